"""`ragkv eval load`: questions that arrive at random, next to vLLM alone under the same arrivals.

Two servers on this machine with the same model and settings: ragkv's, and vLLM's own OpenAI server with its prefix
cache, which gets the chunks that ragkv finds as text in the prompt. The one that isn't measured is stopped meanwhile.
Requests are sent and timed by the client of vLLM's own benchmark (`vllm.benchmarks`); TTFT is the time to the first
frame with text.
"""

import asyncio
import itertools
import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import aiohttp
import httpx
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import psutil
from matplotlib.ticker import LogFormatter

from ragkv import models
from ragkv.config import Config
from ragkv.errors import ModelError
from ragkv.evals.arrivals import as_they_come, gaps
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import TITLES
from ragkv.evals.parameters import Load
from ragkv.evals.watched import as_environment, resume, suspend, watched, with_models

SYSTEMS = ("vllm", "ragkv")
_START_S = 600  # what a server may take to begin, and to index
_CHARACTERS, _CHUNK_TOKENS = 2100, 640  # of a document, which is one chunk of about 500 tokens
_STREAM_TOKENS, _ANSWER_TOKENS = 200, 16
_LEAD_S = 10  # the streams decode before the first question comes
_INSTRUCTION = "Answer the question using only the documents below. Be brief.\n\n"
_ASKING = "\n\nAnswer this question in one or two sentences, using only the documents above: "


@dataclass(frozen=True)
class Timed:
    """One request as the client saw it, in seconds. arrivals: when text came, since the client began."""

    ttft: float
    arrivals: list[float]
    prompt_tokens: int
    error: str

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Return when each piece after the first came, and how long after the one before."""
        return [(b, b - a) for a, b in itertools.pairwise(self.arrivals)]


class Server:
    """One of the two, running; stopped (SIGSTOP) except within `awake`."""

    def __init__(self, name: str, url: str, model: str, tree: psutil.Process) -> None:
        self.name, self.url, self._model, self._tree = name, url, model, tree

    @contextmanager
    def awake(self) -> Iterator[None]:
        resume(self._processes())
        try:
            yield
        finally:
            suspend(self._processes())

    def _processes(self) -> list[psutil.Process]:
        return [self._tree, *self._tree.children(recursive=True)]

    async def ready(self) -> None:
        """Wait until it answers. Raises ModelError if it doesn't."""
        path = "/readyz" if self.name == "ragkv" else "/health"
        end = time.monotonic() + _START_S
        async with httpx.AsyncClient(base_url=self.url) as client:
            while time.monotonic() < end and self._tree.is_running():
                with suppress(httpx.TransportError):
                    if (await client.get(path)).status_code == 200:
                        return
                await asyncio.sleep(0.5)
        raise ModelError(f"the server of {self.name} doesn't begin; its log is the last that was printed")

    async def ask(self, session: aiohttp.ClientSession, question: "Question", num_tokens: int) -> Timed:
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_chat_completions

        content = question.text if self.name == "ragkv" else question.prompt
        request = RequestFuncInput(
            prompt="",
            api_url=f"{self.url}/v1/chat/completions",
            prompt_len=0,
            output_len=num_tokens,
            model=self._model,
            chat_messages=[{"role": "user", "content": content}],
            extra_body={"ragkv": {"top_k": question.top_k}} if self.name == "ragkv" else {"temperature": 0},
        )
        found = await async_request_openai_chat_completions(request, session)
        # Both send a first frame without text together with the one that has the first.
        times = list(itertools.accumulate([found.start_time + found.ttft, *found.itl]))[1:]
        if not found.success or not times:
            return Timed(0, [], 0, found.error or "no text")
        return Timed(times[0] - found.start_time, times, found.prompt_len, "")


@dataclass(frozen=True)
class Question:
    """prompt: the question with the chunks that were found for it, for who retrieves nothing."""

    text: str
    prompt: str
    top_k: int


async def run(config: Config, load: Load, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each measurement as soon as it is known. Raises ModelError if a server doesn't begin."""
    async with _servers(config, progress) as servers:
        questions = _Questions(servers["ragkv"], load)
        progress.update("asking one after the other")
        rates = {}
        for name, server in servers.items():
            batch = [await questions.next() for _ in range(4)]
            with server.awake():
                alone = await _one_by_one(server, batch)
            yield {"part": "alone", "system": name, **_row(alone[1:])}
            rates[name] = 1 / float(np.mean([timed.ttft for timed in alone[1:]]))
        for name, server in servers.items() if load.streams else ():
            progress.update(f"{name}: {load.questions} questions during {load.streams} streams")
            batch = [await questions.next() for _ in range(load.questions)]
            streams = [await questions.next(1) for _ in range(200)]
            pauses = gaps(load.questions, 0.5 * rates["vllm"], load.seed)
            with server.awake():
                asked, decoded = await _during_streams(server, batch, pauses, streams, load.streams)
            yield {"part": "streams", "system": name, "rate": 0.5 * rates["vllm"], **_row(asked, decoded)}
        for share in load.shares:
            for name, server in servers.items():
                rate = share * rates[name]
                progress.update(f"{name}: {load.questions} questions, {60 * rate:.1f} a minute")
                batch = [await questions.next() for _ in range(load.questions)]
                with server.awake():
                    begin = time.perf_counter()
                    asked = await _as_they_come(server, batch, gaps(load.questions, rate, load.seed))
                    seconds = time.perf_counter() - begin
                answered = sum(not timed.error for timed in asked) / seconds
                yield {"part": "rate", "system": name, "rate": rate, "answered_per_s": answered, **_row(asked)}


class _Questions:
    """New questions without end, on two subjects each, so that each finds other chunks in another order."""

    def __init__(self, server: Server, load: Load) -> None:
        pairs = list(itertools.permutations(TITLES, 2))
        random.Random(load.seed).shuffle(pairs)
        self._pairs, self._server, self._top_k = iter(pairs), server, load.top_k

    async def next(self, top_k: int | None = None) -> Question:
        first, second = next(self._pairs)
        text = f"What does the manual say about {first.lower()} and about {second.lower()}?"
        top_k = top_k or self._top_k
        with self._server.awake():
            async with httpx.AsyncClient(base_url=self._server.url, timeout=60) as client:
                sources = (await client.post("/v1/search", json={"query": text, "top_k": top_k})).json()["sources"]
        chunks = "\n\n".join(source["text"] for source in sources)
        return Question(text, f"{_INSTRUCTION}{chunks}{_ASKING}{text}", top_k)


async def _one_by_one(server: Server, questions: Sequence[Question]) -> list[Timed]:
    async with _session() as session:
        return [await server.ask(session, question, _ANSWER_TOKENS) for question in questions]


async def _as_they_come(server: Server, questions: Sequence[Question], pauses: Sequence[float]) -> list[Timed]:
    async with _session() as session:
        return await as_they_come(lambda question: server.ask(session, question, _ANSWER_TOKENS), questions, pauses)


async def _during_streams(
    server: Server,
    questions: Sequence[Question],
    pauses: Sequence[float],
    streams: Sequence[Question],
    num_streams: int,
) -> tuple[list[Timed], list[float]]:
    """Return the questions as they were answered, and the seconds between tokens of the streams.

    Counted are those from the first question's arrival to the last one's first token.
    """
    left, decoded = iter(streams), list[Timed]()
    async with _session() as session:

        async def decode() -> None:
            while (stream := next(left, None)) is not None:
                decoded.append(await server.ask(session, stream, _STREAM_TOKENS))

        decoding = [asyncio.create_task(decode()) for _ in range(num_streams)]
        await asyncio.sleep(_LEAD_S)
        begin = time.perf_counter()
        asked = await _as_they_come(server, questions, pauses)
        end = time.perf_counter()
        left = iter(())
        await asyncio.gather(*decoding)
    if failed := [timed.error for timed in decoded if timed.error]:
        raise ModelError(f"{len(failed)} streams of {server.name} failed: {failed[0]}")
    return asked, [gap for timed in decoded for at, gap in timed.gaps if begin <= at <= end]


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600), connector=aiohttp.TCPConnector(limit=0))


def _row(asked: Sequence[Timed], gaps: Sequence[float] = ()) -> Row:
    times = [1e3 * timed.ttft for timed in asked if not timed.error]
    row: Row = {"questions": len(asked), "failed": len(asked) - len(times)}
    if times:
        row["prompt_tokens"] = round(float(np.mean([timed.prompt_tokens for timed in asked if not timed.error])))
        row |= {f"ttft_p{q}_ms": round(float(np.percentile(times, q)), 1) for q in (50, 90)}
    if gaps:
        row["tokens"] = len(gaps)
        row |= {f"itl_p{q}_ms": round(1e3 * float(np.percentile(gaps, q)), 1) for q in (50, 90, 99, 100)}
    return row


@asynccontextmanager
async def _servers(config: Config, progress: Progress) -> AsyncIterator[dict[str, Server]]:
    """Start both; give them warm and stopped, ragkv's with its documents."""
    folder = models.resolve(config.model.name, config.home)
    with tempfile.TemporaryDirectory(prefix="ragkv-load-") as name, ExitStack() as stack:
        home = with_models(Path(name), config.home)
        ports = _free_ports(2)
        own = [sys.executable, "-m", "ragkv", "serve", "--port", str(ports[1])]
        alone = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        alone += ["--served-model-name", config.model.name, "--port", str(ports[0]), "--host", "127.0.0.1"]
        alone += ["--dtype", config.model.dtype, "--enable-prefix-caching"]
        alone += [] if config.model.compile else ["--enforce-eager"]
        alone += ["--gpu-memory-utilization", str(config.model.gpu_memory_utilization)]
        if config.model.max_model_len is not None:
            alone += ["--max-model-len", str(config.model.max_model_len)]
        same = {
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(config.model.kv_cache_gib))),
            # By itself vLLM keeps a core free for its scheduler where it has no connector: half of a machine with two.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "100000",  # a step may be stopped meanwhile
            "VLLM_LOGGING_LEVEL": "ERROR",
            **({} if config.model.compile else {"TORCH_COMPILE_DISABLE": "1"}),
        }
        environment = {**same, **os.environ, **as_environment(config, home)}
        environment |= {"RAGKV_ANSWER__FREQUENCY_PENALTY": "0"}  # as vLLM's server samples
        environment |= {"RAGKV_INDEX__NUM_CONTEXTS": "1", "RAGKV_INDEX__CHUNK_TOKENS": str(_CHUNK_TOKENS)}
        servers = {}
        for kind, command, port in zip(SYSTEMS, (alone, own), ports, strict=True):
            progress.update(f"starting {kind}")
            log = stack.enter_context((home / f"{kind}.log").open("wb"))
            process = stack.enter_context(watched(command, environment, log))
            server = Server(kind, f"http://127.0.0.1:{port}", config.model.name, psutil.Process(process.pid))
            with server.awake():
                try:
                    await server.ready()
                except ModelError:
                    progress.update((home / f"{kind}.log").read_text(errors="replace")[-2000:])
                    raise
                if kind == "ragkv":
                    await _index(server, progress)
            servers[kind] = server
        yield servers


async def _index(server: Server, progress: Progress) -> None:
    files = [("files", (f"{title}.txt", f"{title}\n{topics[title][:_CHARACTERS]}".encode())) for title in TITLES]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        job = (await client.post("/v1/documents", files=files)).headers["location"]
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            found = (await client.get(job)).json()
            if found["status"] == "done":
                return
            progress.update(f"indexing: {found.get('done')} of {found.get('total')}")
            await asyncio.sleep(1)
    raise ModelError(f"the documents aren't indexed after {_START_S} s: {json.dumps(found)}")


def _free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [each.getsockname()[1] for each in sockets]


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw TTFT by rate of arrival, and the time between tokens of the streams."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colors = dict(zip(SYSTEMS, ("tab:red", "tab:blue"), strict=True))
    for name, color in colors.items():
        points = sorted((r for r in rows if (r["part"], r["system"]) == ("rate", name)), key=lambda r: r["rate"])
        rates = [60 * row["rate"] for row in points]
        for q, label, line in ((90, "90%", "o-"), (50, "median", "o--")):
            seconds = [row[f"ttft_p{q}_ms"] / 1e3 for row in points]
            left.plot(rates, seconds, line, color=color, alpha=0.5 + (q == 90) / 2, label=f"{name}, {label}")
    left.set(xlabel="questions per minute", ylabel="time to first token, s", xscale="log", yscale="log")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(4, 1)))
    left.legend(fontsize=8)
    names = [f"itl_p{q}_ms" for q in (50, 90, 99, 100)]
    for i, (name, color) in enumerate(colors.items()):
        for row in rows:
            if (row["part"], row["system"]) == ("streams", name):
                positions = np.arange(len(names)) + 0.4 * i
                right.bar(positions, [row[key] for key in names], width=0.38, color=color, label=name)
    right.set_xticks(np.arange(len(names)) + 0.2, ["50%", "90%", "99%", "longest"])
    right.set(yscale="log", ylabel="between two tokens of a stream, ms")
    right.yaxis.set_major_formatter("{x:g}")
    right.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
