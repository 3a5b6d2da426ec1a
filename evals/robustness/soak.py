"""`ragkv eval soak`: a server of its own under mixed traffic, for as long as wanted.

Clients ask, leave in the middle of an answer, upload, replace and delete documents, and send junk, over real sockets.
Nothing may fail or be lost, memory, descriptors and threads may not grow, and answers from stored KV must be full
prefill's where the two are the same: for one chunk directly after the anchor, in float32, stored as it is (`raw`).
Memory is judged in runs of five minutes and more: vLLM's caches are filled before those, which takes minutes by itself.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import httpx
import psutil

from ragkv.config import Config
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import TITLES, excerpt
from ragkv.evals.parameters import Soak
from ragkv.evals.serving import FINISH_S, served, until_ready
from ragkv.evals.watched import resources

_TITLES = TITLES[:24]
_EVERY_S = 2.0  # between looks at the processes
_HEALTH_TIMEOUT_S = 10.0  # for /healthz, always
_MORE_HANDLES = 64  # connections and threads of pools come and go
_MORE_MEMORY = 0.05  # of what it was when warm
_LONG_S = 300.0  # a run of at least so long is warmed, and its memory judged
_NUM_SIZES = 256  # vLLM on CPU keeps a compiled product for each batch size, of the last 256 (docs/log/2026-11.md)
_STEPS = {"compare": 0.3, "ask": 0.3, "leave": 0.15, "upload": 0.15, "delete": 0.05, "junk": 0.05}


@dataclass
class Soaked:
    """What was done and what became of it. Samples: seconds since the start, bytes, descriptors and threads."""

    steps: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    texts: dict[str, str | None] = field(default_factory=dict)  # what a document must be, None: deleted


def run(config: Config, wanted: Soak, progress: Progress) -> Iterator[Row]:
    """Yield one row."""
    seen = Soaked()
    with served(config, RAGKV_SERVER__LOG="json", RAGKV_STORE__CODEC="raw") as server:
        traffic = _Traffic(server.url, seen, progress)
        try:
            asyncio.run(traffic.flow(psutil.Process(server.process.pid), wanted.seconds, wanted.clients, wanted.seed))
        except (httpx.HTTPError, TimeoutError) as error:
            seen.problems.append(f"{type(error).__name__}: {error}; the server ended with {server.process.poll()}")
        seen.problems += _logged(server.log)
    yield _row(seen, is_long=wanted.seconds >= _LONG_S)


class _Traffic:
    def __init__(self, url: str, seen: Soaked, progress: Progress) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None))
        self._seen, self._progress, self._begin = seen, progress, time.monotonic()

    async def flow(self, tree: psutil.Process, seconds: float, num_clients: int, seed: int) -> None:
        async with self._client:
            await until_ready(self._client)
            for title in _TITLES[:4]:
                await self._upload(title, random.Random(seed))
            await self._all_indexed()
            if seconds >= _LONG_S:
                await self._warm(random.Random(seed))
            self._begin = time.monotonic()
            watcher = asyncio.create_task(self._watch(tree))
            async with asyncio.TaskGroup() as group:
                for i in range(num_clients):
                    group.create_task(self._behave(random.Random(seed + i), _TITLES[i::num_clients], seconds))
            await self._all_indexed()
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            for title, text in self._seen.texts.items():
                await self._check(title, text)

    async def _warm(self, rng: random.Random) -> None:
        """Fill what vLLM caches by batch size, so that what grows afterwards is a fault."""
        words = " ".join(topics[title] for title in _TITLES).split()
        for size in rng.sample(range(1, _NUM_SIZES + 1), _NUM_SIZES):
            question = " ".join(rng.choices(words, k=size))
            await self._ask({"question": question, "policy": "full", "top_k": 1, "max_tokens": 1})

    async def _watch(self, tree: psutil.Process) -> None:
        """Look at the processes, and whether the server says that it is alive."""
        while True:
            size, handles = resources(tree)
            if size:
                self._seen.samples.append((time.monotonic() - self._begin, size, handles))
            try:
                await self._client.get("/healthz", timeout=_HEALTH_TIMEOUT_S)
            except httpx.HTTPError as error:
                self._seen.problems.append(
                    f"/healthz didn't answer within {_HEALTH_TIMEOUT_S:g} s: {type(error).__name__}"
                )
            await asyncio.sleep(_EVERY_S)

    async def _behave(self, rng: random.Random, own: list[str], seconds: float) -> None:
        """One client, with documents that no other changes."""
        while time.monotonic() - self._begin < seconds:
            (step,) = rng.choices(list(_STEPS), list(_STEPS.values()))
            try:
                await self._step(step, rng, own)
            except httpx.HTTPError as error:
                self._seen.problems.append(f"{step}: {type(error).__name__} {error}")
            self._seen.steps[step] += 1
            steps, problems = sum(self._seen.steps.values()), len(self._seen.problems)
            self._progress.update(f"{steps} steps, {time.monotonic() - self._begin:.0f} s, {problems} problems")

    async def _step(self, step: str, rng: random.Random, own: list[str]) -> None:
        question = f"What does the manual say about {rng.choice(_TITLES).lower()}?"
        match step:
            case "compare":
                await self._compare(question)
            case "ask":
                await self._ask({"question": question, "max_tokens": 12})
            case "leave":
                await self._leave({"question": question, "max_tokens": 100, "stream": True})
            case "upload":
                await self._upload(rng.choice(own), rng)
            case "delete":
                await self._delete(rng.choice(own))
            case "junk":
                await self._junk(rng)

    @asynccontextmanager
    async def _sent(self, what: str, method: str, path: str, expected: int, **fields: Any) -> AsyncIterator[Any]:
        """Send a request; give its response if that is as expected, else note why not and give None."""
        async with self._client.stream(method, path, **fields) as response:
            if response.status_code == 429:
                self._seen.refused += 1
                await asyncio.sleep(min(5.0, float(response.headers["retry-after"])))
            elif response.status_code != expected:
                text = (await response.aread()).decode(errors="replace")
                self._seen.problems.append(f"{what}: {response.status_code} {text[:200]}")
            yield response if response.status_code == expected else None

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any] | None:
        async with self._sent(body["question"], "POST", "/v1/answer", 200, json=body) as response:
            return None if response is None else json.loads(await response.aread())

    async def _leave(self, body: dict[str, Any]) -> None:
        async with self._sent(body["question"], "POST", "/v1/answer", 200, json=body) as response:
            if response is not None:
                async for line in response.aiter_lines():
                    if line == "event: delta":
                        return

    async def _compare(self, question: str) -> None:
        body = {"question": question, "top_k": 1, "max_tokens": 12, "fresh": True}
        fused, full = [await self._ask({**body, "policy": policy}) for policy in ("none", "full")]
        if fused and full and fused["sources"] == full["sources"]:  # else a document came or went in between
            self._seen.compared += 1
            if fused["answer"] != full["answer"]:
                self._seen.problems.append(f"{question}: {fused['answer']!r} and not {full['answer']!r}")

    async def _upload(self, title: str, rng: random.Random) -> None:
        content = f"{title} {excerpt(title, rng).strip()}"
        files = {"files": (f"{title}.txt", content.encode())}
        async with self._sent(f"upload of {title}", "POST", "/v1/documents", 202, files=files) as response:
            if response is not None:
                self._seen.texts[title] = content

    async def _delete(self, title: str) -> None:
        expected = 200 if self._seen.texts.get(title) else 404
        async with self._sent(f"delete {title}", "DELETE", f"/v1/documents/{title}.txt", expected) as response:
            if response is not None:
                self._seen.texts[title] = None
        async with self._sent(f"{title} is present still", "GET", f"/v1/documents/{title}.txt", 404):
            pass

    async def _junk(self, rng: random.Random) -> None:
        content = rng.randbytes(rng.choice([0, 10, 100_000]))
        files = {"files": (f"junk{rng.choice(['.pdf', '.txt', '.jsonl', '.html'])}", b"\0" + content)}
        async with self._sent("junk", "POST", "/v1/documents", 422, files=files):
            pass

    async def _all_indexed(self) -> None:
        end = time.monotonic() + FINISH_S
        while time.monotonic() < end:
            jobs = (await self._client.get("/v1/jobs")).json()["jobs"]
            if failed := [job for job in jobs if job["status"] == "failed"]:
                self._seen.problems.append(f"not indexed: {failed[0]}")
                return
            if all(job["status"] == "done" for job in jobs):
                return
            await asyncio.sleep(0.5)
        self._seen.problems.append(f"not all is indexed {FINISH_S} s after the last request")

    async def _check(self, title: str, text: str | None) -> None:
        path = f"/v1/documents/{title}.txt"
        if text is None:
            async with self._sent(f"{title} is present still", "GET", path, 404):
                return
        async with self._sent(f"{title} is missing", "GET", path, 200) as response:
            if response is not None:
                chunks = json.loads(await response.aread())["chunks"]
                if "".join("".join(chunk["text"] for chunk in chunks).split()) != "".join(text.split()):
                    self._seen.problems.append(f"{title} has another text than was last uploaded")


def _logged(file: Path) -> list[str]:
    """Return what the server logged as errors. vLLM's processes write lines of their own there."""
    problems = []
    for line in file.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"levelname": "ERROR"' in line:
            entry = json.loads(line)
            problems.append(f"logged: {entry['message']}")
    return problems


def _row(seen: Soaked, *, is_long: bool) -> Row:
    """Return the row, with what grew: the last fifth of the time against the second. In a long run alone it says how
    much memory is allowed, and more is a problem."""
    row: Row = {"steps": dict(sorted(seen.steps.items())), "refused": seen.refused}
    row |= {"compared": seen.compared}
    if len(seen.samples) >= 5:
        fifth = len(seen.samples) // 5
        warm, end = seen.samples[fifth : 2 * fifth], seen.samples[-fifth:]
        sizes, handles = ([median(sample[i] for sample in part) for part in (warm, end)] for i in (1, 2))
        allowed = round((1 + _MORE_MEMORY) * sizes[0]) >> 20 if is_long else None
        if allowed is not None and round(sizes[1]) >> 20 > allowed:
            seen.problems.append(f"{round(sizes[1]) >> 20} MiB of memory at the end where {allowed} were allowed")
        if handles[1] > handles[0] + _MORE_HANDLES:
            seen.problems.append(f"{handles[1]:.0f} descriptors and threads at the end, {handles[0]:.0f} when warm")
        row |= {
            "seconds": round(seen.samples[-1][0], 1),
            "memory_mib": {"warm": round(sizes[0]) >> 20, "end": round(sizes[1]) >> 20, "allowed": allowed},
            "memory_mib_by_fifth": [
                round(median(size for _, size, _ in seen.samples[i * fifth : (i + 1) * fifth])) >> 20 for i in range(5)
            ],
            "handles": {"warm": handles[0], "end": handles[1]},
        }
    return {**row, "problems": seen.problems}
