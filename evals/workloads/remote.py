"""`ragkv eval remote`: two homes that share a bucket, and what a question costs while it is slow, silent or gone.

The first home indexes; the second one, which has no KV, takes all of it from the bucket and answers. Then, in each
state of the bucket, the second home's KV is taken from its disk before each question, and the time to the first token
is set beside that of vLLM's own prefill of the same question, asked right before or after it. A real S3 server
(moto's) on this machine stands behind a proxy that slows it down or takes it away; both share its cores with vLLM.
"""

import asyncio
import random
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

from ragkv.answer import Answer, AnswerOptions, Conversation, Delta
from ragkv.background import IDLE_S
from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals import bucket as s3
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.manual import CHARACTERS, TITLES
from ragkv.evals.parameters import Remote
from ragkv.evals.watched import with_models
from ragkv.pipeline import Pipeline
from ragkv.policies import Policy

_SLOW, _FAST = 20 << 20, 400 << 20  # bytes a second
_CHANGES_S = 0.3  # between the rates of a bucket that changes
_TIMEOUT_S = 10.0  # of a request to the bucket
_RECOVERY_S, _ARRIVAL_S = 90.0, 20.0
_QUIET_S = 0.6 * IDLE_S  # before idle time, in which missing KV is restored and a question waits for that step's end
_TOKENS, _OTHER_TOKENS = 16, 200  # of an answer, and of one to the other client
_Work = Coroutine[Any, Any, None]


@dataclass(frozen=True)
class _Asked:
    """An answer, and the seconds until its first token."""

    text: str
    ttft_s: float
    num_tokens: int
    reused: int


async def run(config: Config, wanted: Remote, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row of what the second home answers, then one for each state. Raises ConfigError without an S3 server."""
    if not s3.is_installed():
        raise ConfigError("there is no S3 server on this machine: pip install 'moto[server]'")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-eval-")))
        bucket = stack.enter_context(s3.new_bucket(stack.enter_context(s3.s3_server())))
        (folder / "documents").mkdir()
        for title in TITLES[: wanted.documents]:
            (folder / "documents" / f"{title}.txt").write_text(f"{title}\n\n{topics[title][:CHARACTERS]}")
        questions = [f"What does the manual say about {title.lower()}?" for title in TITLES[: wanted.questions]]
        async with _home(config, folder / "first", bucket.url) as first:
            progress.update("the first home indexes")
            await first.ingest([folder / "documents"])
            trial = _Trial(first, wanted, bucket.proxy, progress)
            files = _files(first)
            expected = [await trial.ask(question) for question in questions]
        async with _home(config, folder / "second", bucket.url) as second:
            progress.update("the second home takes the KV from the bucket")
            begin = time.monotonic()
            report = await second.ingest([folder / "documents"])
            ingest_s = time.monotonic() - begin
            await second.profile(progress.note)
            trial = _Trial(second, wanted, bucket.proxy, progress)
            found = [await trial.ask(question) for question in questions]
            yield {
                "state": "second home",
                "entries": len(files),
                "entries_fetched": report.entries_fetched,
                "chunks_prefilled": report.chunks_prefilled,
                "equal_files": sum(_files(second).get(key) == data for key, data in files.items()),
                "questions": len(questions),
                "equal_answers": sum(a.text == b.text for a, b in zip(expected, found, strict=True)),
                "ingest_s": round(ingest_s, 1),
            }
            for state in wanted.states:
                yield await trial.in_state(state, questions, found)


@asynccontextmanager
async def _beside(work: _Work | None) -> AsyncIterator[None]:
    """Have something done meanwhile."""
    task = None if work is None else asyncio.create_task(work)
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def _home(config: Config, home: Path, url: str) -> AsyncIterator[Pipeline]:
    store = config.store.model_copy(update={"remote": url, "remote_timeout_s": _TIMEOUT_S, "memory_gib": 0.0})
    own = config.model_copy(update={"home": with_models(home, config.home), "store": store})
    pipeline = await Pipeline.open(own)
    try:
        yield pipeline
    finally:
        await pipeline.close()


def _files(pipeline: Pipeline) -> dict[object, bytes | None]:
    entries = pipeline.workspace.store.entries
    return {key: entries.read(key) for key in entries}


class _Trial:
    """A home whose questions are timed."""

    def __init__(self, pipeline: Pipeline, wanted: Remote, proxy: s3.Proxy, progress: Progress) -> None:
        self._pipeline, self._wanted, self._proxy, self._progress = pipeline, wanted, proxy, progress
        answer = pipeline.config.answer
        policy = Policy.of(answer.policy, answer.budget)
        self._options = AnswerOptions(policy, wanted.top_k, _TOKENS, fresh=True)

    async def ask(self, question: str) -> _Asked:
        begin, ttft_s = time.monotonic(), 0.0
        async for event in self._pipeline.answer(question, self._options):
            if isinstance(event, Delta) and not ttft_s:
                ttft_s = time.monotonic() - begin
        assert isinstance(event, Answer)
        return _Asked(event.text, ttft_s, event.usage.prompt_tokens, event.usage.reused_tokens)

    async def ask_vllm(self, question: str, max_tokens: int = _TOKENS) -> _Asked:
        """Have vLLM prefill a question's prompt itself; finding its chunks is in the time."""
        begin, ttft_s, text = time.monotonic(), 0.0, ""
        engine = await self._pipeline.workspace.start()
        asked = (Conversation(question), self._options, engine.max_model_len)
        _, fitted = await asyncio.to_thread(self._pipeline.retrieve, *asked)
        token_ids, salt = fitted.prompt.token_ids, uuid.uuid4().hex
        async for output in engine.generate(token_ids, None, max_tokens=max_tokens, salt=salt):
            ttft_s = ttft_s or time.monotonic() - begin
            text += output.text
        return _Asked(text, ttft_s, len(token_ids), 0)

    async def in_state(self, state: str, questions: list[str], whole: list[_Asked]) -> Row:
        """Return the row of one state. whole: the answers over all stored KV, in the order of the questions."""
        tier = self._pipeline.workspace.tier
        assert tier is not None
        misses = tier.traffic.misses.copy()
        ratios, in_time, differing = list[float](), 0, 0
        async with _beside(self._set(state)), _beside(self._other() if self._wanted.busy else None):
            for i, (question, stored) in enumerate(zip(questions, whole, strict=True)):
                self._progress.update(f"{state}: questions", i, len(questions))
                if state != "disk":
                    self._lose()
                full = None if i % 2 else await self.ask_vllm(question)
                found = await self.ask(question)
                await self._arrived()  # what comes after the first token would slow vLLM down
                full = full or await self.ask_vllm(question)
                ratios.append(found.ttft_s / full.ttft_s)
                in_time += found.reused == stored.reused
                if found.reused in (0, stored.reused):
                    differing += found.text != (stored if found.reused else full).text
        recovered_s = await self._recovered(questions[0], whole[0])
        return {
            "state": state,
            "busy": self._wanted.busy,
            "questions": len(questions),
            "median": round(median(ratios), 3),
            "largest": round(max(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "in_time": in_time,
            "differing": differing,
            "misses": dict(tier.traffic.misses - misses),
            "recovered_s": recovered_s,
            "prompt_tokens": [asked.num_tokens for asked in whole],
        }

    def _set(self, state: str) -> _Work | None:
        """Bring the bucket into a state. Returns what has to go on meanwhile."""
        self._proxy.set(state if state in ("closed", "silent") else "open", _SLOW if state == "slow" else None)
        if state != "changing":
            return None

        async def change() -> None:
            rng = random.Random(0)
            while True:
                self._proxy.set(bytes_per_s=rng.choice((_SLOW, _FAST)))
                await asyncio.sleep(_CHANGES_S)

        return change()

    async def _other(self) -> None:
        """Be another client, which asks without a pause and without stored KV."""
        for title in cycle(TITLES):
            await self.ask_vllm(f"Tell all that there is about {title.lower()}.", _OTHER_TOKENS)

    def _lose(self) -> None:
        """Take all chunks' KV from the disk, as eviction does; the anchor's is never evicted."""
        workspace = self._pipeline.workspace
        for key in list(workspace.store.entries):
            if key.chunk_hash != workspace.anchor_hash:
                workspace.store.discard(key)

    async def _arrived(self) -> None:
        """Wait until nothing comes from the bucket any more, so that the next question doesn't find it by chance."""
        tier = self._pipeline.workspace.tier
        assert tier is not None
        end, since, before = time.monotonic() + _ARRIVAL_S, time.monotonic(), -1
        while time.monotonic() < min(end, since + _QUIET_S):
            if (now := self._proxy.num_bytes) != before:
                before, since = now, time.monotonic()
            await asyncio.sleep(0.05)

    async def _recovered(self, question: str, stored: _Asked) -> float | None:
        """Open the bucket. Returns the seconds until a question has all its KV from it again, None if it doesn't."""
        self._proxy.set()
        begin = time.monotonic()
        await self._arrived()
        self._lose()
        while time.monotonic() - begin < _RECOVERY_S:
            if (await self.ask(question)).reused == stored.reused:
                return round(time.monotonic() - begin, 1)
            await asyncio.sleep(0.2)
        return None
