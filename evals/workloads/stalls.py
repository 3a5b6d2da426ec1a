"""`ragkv eval stalls`: how long large requests hold up a server's event loop, and with it all other answers.

A server of its own, over real sockets, whose loop watches itself. A row for each kind of request, one after the other,
beside an answer that is streamed.
"""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import httpx

from ragkv.config import Config
from ragkv.errors import RagKVError
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import TITLES
from ragkv.evals.parameters import Stalls
from ragkv.evals.serving import FINISH_S, Served, index, served, until_ready
from ragkv.evals.watched_loop import PAUSES, longest_pause_ms

_CHAT = "/v1/chat/completions"
_QUESTION = {"role": "user", "content": "How are classes defined?"}
_LONGEST = 1_000_000  # characters of a message that the server takes
_ALONE_S = 3.0  # of the row with no other request
_WARM_UP = 3  # documents that questions find


def run(config: Config, wanted: Stalls, progress: Progress) -> Iterator[Row]:
    """Yield a row for each kind of request."""
    with served(config, "ragkv.evals.watched_loop") as server:
        yield from asyncio.run(_measure(server, wanted, progress))


def requests(size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests of some `size` bytes, by name."""
    manual = "\n\n".join(topics[title] for title in TITLES)
    text = (manual * (size // len(manual) + 1))[:size]
    han = "".join(chr(0x4E00 + i % 5000) for i in range(size // 6))  # 6 bytes each in JSON

    def chat(text: str, number: int) -> dict[str, Any]:
        pieces = [text[i * len(text) // number : (i + 1) * len(text) // number] for i in range(number)]
        said = [{"role": ("user", "assistant")[i % 2], "content": piece} for i, piece in enumerate(pieces)]
        return {"messages": [*said, _QUESTION]}

    def parts(number: int) -> dict[str, Any]:
        said = [{"type": "text", "text": text[: max(1, size // number - 40)]}] * number
        return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "Yes."}, _QUESTION]}

    yield "a short question", {"messages": [_QUESTION]}
    for number in (10, 100, 1000, 9998):
        yield f"{number + 1:,} messages", chat(text, number)
    yield "11 messages in Chinese", chat(han, 10)
    yield "a long question", {"messages": [{"role": "user", "content": text[:_LONGEST]}]}
    for number in (10_000, 100_000):
        yield f"{number:,} parts", parts(number)
    yield "10,000 messages of nobody's", {"messages": [{"role": "nobody", "content": text[: size // 10_000]}] * 10_000}
    yield "an unknown field", {"messages": [_QUESTION], "unknown": [[0] * 10] * (size // 32)}


async def _measure(server: Served, wanted: Stalls, progress: Progress) -> list[Row]:
    async with httpx.AsyncClient(base_url=server.url, timeout=FINISH_S) as client:
        progress.update("the server starts")
        await until_ready(client)
        await index(client, {f"{title}.txt": topics[title][:1500] for title in TITLES[:_WARM_UP]})
        await _sent(client, json.dumps({"messages": [_QUESTION]}).encode())
        rows = [await _row(server, client, "nothing else", None)]
        for name, body in requests(round(wanted.mib * (1 << 20))):
            progress.update(name)
            rows.append(await _row(server, client, name, body))
        return rows


async def _row(server: Served, client: httpx.AsyncClient, name: str, body: dict[str, Any] | None) -> Row:
    content = json.dumps({**(body or {}), "max_tokens": 4}).encode()
    tokens = list[float]()
    beside = asyncio.create_task(_stream(client, tokens))
    while not tokens:
        await asyncio.sleep(0.01)
    begin = time.monotonic()
    status = await (_sent(client, content) if body else asyncio.sleep(_ALONE_S, None))
    end = time.monotonic()
    beside.cancel()
    with suppress(asyncio.CancelledError):
        await beside
    return {
        "request": name,
        "status": status,
        "seconds": round(end - begin, 2),
        "pause_ms": round(longest_pause_ms(server.home / PAUSES, begin, end), 1),
        "gap_ms": round(1000 * longest_gap(tokens, begin, end), 1),
    }


async def _sent(client: httpx.AsyncClient, content: bytes) -> int:
    """Return the status of the answer. Raises RagKVError if the server fails: how fast it does says nothing."""
    answer = await client.post(_CHAT, content=content, headers={"content-type": "application/json"})
    if answer.status_code >= 500:
        raise RagKVError(f"the server answered with status {answer.status_code}: {answer.text}")
    return answer.status_code


async def _stream(client: httpx.AsyncClient, tokens: list[float]) -> None:
    """Ask for answers, one after the other, and note when each token comes; NaN between answers."""
    body = {"messages": [{"role": "user", "content": "Tell me all about classes."}], "stream": True, "max_tokens": 60}
    while True:
        async with client.stream("POST", _CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if '"delta": {"content": ' in line:
                    tokens.append(time.monotonic())
        tokens.append(math.nan)


def longest_gap(tokens: list[float], begin: float, end: float) -> float:
    """Return the longest time between two tokens of one answer that overlaps a time; 0 if there is none."""
    gaps = ((before, after) for before, after in pairwise(tokens) if after > begin and before < end)
    return max((after - before for before, after in gaps), default=0.0)
