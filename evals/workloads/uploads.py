"""`ragkv eval uploads`: while a large file is indexed, how long a small upload takes, and how a stream's tokens come.

A server of its own, over real sockets. One row; times are in seconds or, where the name says so, milliseconds.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import httpx
import numpy as np

from ragkv.config import Config
from ragkv.errors import RagKVError
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import TITLES
from ragkv.evals.parameters import Uploads
from ragkv.evals.serving import FINISH_S, START_S, served

_WARM_UP = 3  # documents that questions find
_SMALL = 1500  # characters of a small upload: one chunk


def run(config: Config, wanted: Uploads, progress: Progress) -> Iterator[Row]:
    """Yield one row."""
    with served(config) as server:
        row = asyncio.run(_measure(server.url, wanted, progress))
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(FINISH_S)
        yield {**row, "stop_s": round(time.monotonic() - begin, 1)}


async def _measure(url: str, wanted: Uploads, progress: Progress) -> Row:
    async with httpx.AsyncClient(base_url=url, timeout=FINISH_S) as client:
        progress.update("the server starts")
        await _until(lambda: _ready(client), START_S)
        alone = [await _upload(client, f"{title}.txt", topics[title][:_SMALL]) for title in TITLES[:_WARM_UP]]
        await _gaps_ms(client, wanted.tokens, 1)
        before_ms = await _gaps_ms(client, wanted.tokens, wanted.answers)
        progress.update("a large file is uploaded")
        manual = "\n\n".join(topics[title] for title in TITLES)
        size = round(wanted.mib * (1 << 20))
        begin = time.monotonic()
        large = await _post(client, "large.txt", (manual * (size // len(manual) + 1))[:size])
        accepted_s = time.monotonic() - begin
        await _until(lambda: _has_begun(client, large), FINISH_S)
        small = []
        for i in range(wanted.uploads):
            progress.update("small files are uploaded", i, wanted.uploads)
            small.append(await _upload(client, f"small{i}.txt", topics[TITLES[10 + i]][:_SMALL]))
        progress.update("answers are streamed")
        during_ms, beside = await asyncio.gather(
            _gaps_ms(client, wanted.tokens, wanted.answers), _upload(client, "beside.txt", topics[TITLES[30]][:_SMALL])
        )
        job = (await client.get(large)).json()
        if job["status"] != "running":
            raise RagKVError(f"the large file was {job['status']} before all was measured; give more --mib")
        return {
            "mib": wanted.mib,
            "accepted_s": round(accepted_s, 1),
            "alone_s": [round(each, 1) for each in alone],
            "small_s": [round(each, 1) for each in small],
            "beside_answers_s": round(beside, 1),
            "gap_p50_ms": [round(float(np.percentile(each, 50)), 1) for each in (before_ms, during_ms)],
            "gap_p99_ms": [round(float(np.percentile(each, 99)), 1) for each in (before_ms, during_ms)],
            "p99_ratio": round(float(np.percentile(during_ms, 99) / np.percentile(before_ms, 99)), 2),
            "num_gaps": len(during_ms),
            "large_done": job["done"],
            "large_total": job["total"],
        }


async def _until(condition: Any, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {timeout_s} s")
        await asyncio.sleep(0.1)


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def _has_begun(client: httpx.AsyncClient, job: str) -> bool:
    found = (await client.get(job)).json()
    return bool(found["status"] == "done" or (found["status"] == "running" and found["done"] > 0))


async def _is_done(client: httpx.AsyncClient, job: str) -> bool:
    return str((await client.get(job)).json()["status"]) == "done"


async def _post(client: httpx.AsyncClient, name: str, text: str) -> str:
    """Upload a document; return its job's address."""
    response = await client.post("/v1/documents", files={"files": (name, text.encode())})
    response.raise_for_status()
    return response.headers["location"]


async def _upload(client: httpx.AsyncClient, name: str, text: str) -> float:
    """Return the seconds from the upload until it is indexed."""
    begin = time.monotonic()
    job = await _post(client, name, text)
    await _until(lambda: _is_done(client, job), FINISH_S)
    return time.monotonic() - begin


async def _gaps_ms(client: httpx.AsyncClient, num_tokens: int, num_answers: int) -> list[float]:
    """Return the times between the pieces of some answers, one answer after another."""
    gaps: list[float] = []
    for i in range(num_answers):
        question = f"List everything that the manual says about {TITLES[i % _WARM_UP].lower()} ({i})."
        body = {"question": question, "max_tokens": num_tokens, "stream": True, "top_k": 3}
        last = None
        async with client.stream("POST", "/v1/answer", json=body) as response:
            async for line in response.aiter_lines():
                if line == "event: delta":
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(1000 * (now - last))
                    last = now
    return gaps
