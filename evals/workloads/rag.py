"""`ragkv eval rag`: questions about retrieved documents that arrive at random, next to vLLM and LMCache.

How often a document is asked for follows Zipf's law; a question gets several of them in an order of its own, and no two
questions are the same. All engines get the same prompts, one engine after the other, at moments that differ by the rate
alone. vLLM comes twice, with its prefix cache and without it.
"""

import itertools
import random
import uuid
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import Tokenizer

from ragkv.config import Config
from ragkv.controller.cost_model import Profile
from ragkv.controller.profile import measure
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask
from ragkv.errors import ConfigError
from ragkv.evals import datasets
from ragkv.evals.arrivals import as_they_come, gaps
from ragkv.evals.beside_vllm import RAGKV, VLLM, Arms, Timed, ask, folder, in_turn, memory_for, parts, peers, start
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Rag
from ragkv.evals.rig import Rig, rig
from ragkv.evals.simulation import System, expected
from ragkv.evals.workloads.simulate import of_tasks
from ragkv.policies import Policy
from ragkv.retriever.hashing import chunk_hash

_NUM_CONTEXTS = 2
_HUNDRED = 100
_PART, _BETWEEN = 10, 2  # of a run that is simulated: questions that arrive at random, and then alone
_IDLE_S = 1000.0  # since the question before, as far as the simulation knows: nothing is in work any more


@dataclass(frozen=True)
class _Question:
    token_ids: list[int]
    task: FuseTask


async def run(config: Config, wanted: Rag, progress: Progress) -> AsyncIterator[Row]:
    """Yield a row for each engine asked one question after the other, for each rate of arrivals, and for each hundred
    of a long run of ragkv's. Raises ConfigError if the data has too few documents."""
    async with AsyncExitStack() as stack:
        temporary = Path(stack.enter_context(folder()))
        others = await stack.enter_async_context(peers(temporary, uncached=True, lmcache=wanted.lmcache))
        options, memory = config.store.worker_options(), memory_for(config, wanted.kv_tokens)
        found = await stack.enter_async_context(rig(config, _NUM_CONTEXTS, options, **memory))
        questions = _Questions(config, wanted, found)
        await questions.precompute(progress)
        engines = {RAGKV: found.engine}
        alone: Arms = {VLLM: {}, **others}
        for name, more in alone.items():
            progress.update(f"starting {name}")
            engines[name] = await start(config, temporary, wanted.kv_tokens, alone=True, **more)
            stack.push_async_callback(engines[name].close)
        asked = {name: _Asked(engine, name, wanted) for name, engine in engines.items()}
        rates = {}
        async for row in _one_by_one(asked, questions, wanted, progress):
            rates[row["system"]] = 1e3 / row["latency_ms"]
            yield row
        for i, share in enumerate(wanted.shares):
            batch = questions.some(wanted.questions)
            for name in in_turn(engines, i):
                rate = share * rates[name]
                progress.update(f"{name}: {wanted.questions} questions, {60 * rate:.1f} a minute")
                pauses = gaps(len(batch), rate, wanted.seed)
                yield {"part": "rate", "system": name, "rate": rate, **_row(await asked[name].arriving(batch, pauses))}
        ours, run = asked[RAGKV], _LongRun()
        for i in range(0, wanted.long, _HUNDRED):
            progress.update("a long run", i, wanted.long)
            rate, batch = wanted.shares[0] * rates[RAGKV], questions.some(min(_HUNDRED, wanted.long - i))
            await run.go_on(ours, batch, gaps(len(batch), rate, wanted.seed), questions if wanted.simulated else None)
            yield {"part": "long", "system": RAGKV, "from": i, "rate": rate, **_row(run.answers[i:])}
        if wanted.simulated and run.answers:
            progress.update("measuring this machine for the simulation")
            stored = questions.stored()
            yield {"part": "simulated", "system": RAGKV, **await _simulated(config, found, ours, run, stored)}


@dataclass
class _Asked:
    """An engine, and all questions that it has had, each with the seconds before it."""

    engine: Engine
    name: str
    wanted: Rag
    earlier: list[tuple[_Question, float]] = field(default_factory=list)

    async def alone(self, question: _Question) -> Timed:
        self.earlier.append((question, _IDLE_S))
        return await self._ask(question)

    async def arriving(self, questions: Sequence[_Question], pauses: Sequence[float]) -> list[Timed]:
        """Ask each of these after its pause, and wait for all."""
        self.earlier += zip(questions, [_IDLE_S, *pauses[1:]], strict=True)
        return await as_they_come(self._ask, questions, pauses)

    async def _ask(self, question: _Question) -> Timed:
        if self.name == RAGKV:
            salt = uuid.uuid4().hex
            return await ask(self.engine, question.token_ids, self.wanted.tokens, "once", salt, question.task)
        return await ask(self.engine, question.token_ids, self.wanted.tokens)


@dataclass
class _LongRun:
    """Questions that arrive at random. alone: others, asked one after the other between parts of the run, while nothing
    else is in work; both in the order in which they were asked, `is_alone` says which is which."""

    answers: list[Timed] = field(default_factory=list)
    alone: list[Timed] = field(default_factory=list)
    is_alone: list[bool] = field(default_factory=list)

    async def go_on(
        self, ours: _Asked, batch: Sequence[_Question], pauses: Sequence[float], others: "_Questions | None"
    ) -> None:
        """Ask a batch. others: where the questions between its parts are from; None: there are none, nor parts."""
        for part in parts(len(batch), _PART if others is not None else len(batch)):
            self.answers += await ours.arriving(batch[part.start : part.stop], pauses[part.start : part.stop])
            self.is_alone += [False] * len(part)
            for question in others.some(_BETWEEN) if others is not None else ():
                self.alone.append(await ours.alone(question))
                self.is_alone.append(True)


async def _one_by_one(
    asked: dict[str, _Asked], questions: "_Questions", wanted: Rag, progress: Progress
) -> AsyncIterator[Row]:
    answers: dict[str, list[Timed]] = {name: [] for name in asked}
    for i, question in enumerate(questions.some(wanted.questions + 1)):
        progress.update("one after the other", i, wanted.questions)
        for name in in_turn(asked, i):
            answers[name].append(await asked[name].alone(question))
    for name, timed in answers.items():  # the first forward of such a length is slow in itself
        yield {"part": "alone", "system": name, **_row(timed[1:])}


async def _simulated(config: Config, found: Rig, ours: _Asked, run: _LongRun, stored: "_Stored") -> Row:
    """Return what the simulation expects of a run, beside what it was. stored: before this measures.

    KV that was computed just now is in the page cache, which the simulation doesn't have: a read costs nothing. A
    machine that others share may be half as fast again a minute later, so the profile, which is measured after the run,
    is scaled to what questions took that were asked alone during it.
    """
    policy, wanted = Policy.of(config.answer.policy, config.answer.budget), ours.wanted
    bench = found.bench(wanted.chunk_tokens)
    measured = await measure(bench, found.kv, policy, found.store, found.engine.max_model_len, median)
    if measured is None:
        raise ConfigError(f"there is nothing to simulate for the policy {policy.label}: it reuses nothing")
    requests = of_tasks(
        ((len(question.token_ids), question.task) for question, _ in ours.earlier),
        (pause for _, pause in ours.earlier),
        wanted.tokens,
    )
    system = System(
        num_engines=1,
        profile=replace(measured, cold_ms=0.0),
        policy=policy,
        kv_bytes=stored.kv_bytes,
        kv_tokens=wanted.kv_tokens,
        memory_bytes=round(config.store.memory_gib * (1 << 30)) - stored.anchor_bytes,
        token_s=float(np.median([gap for each in run.answers for gap in each.gaps_s])),
        eviction=config.store.eviction,
        is_indexed=True,
        sizes=stored.sizes,
    )
    first = len(requests) - len(run.is_alone)
    alone, others = ([first + i for i, each in enumerate(run.is_alone) if each == kind] for kind in (True, False))
    alone_ms = 1e3 * float(np.mean([each.ttft_s for each in run.alone]))
    scale = alone_ms / expected(requests, system, alone).ttft_mean_ms
    simulated = expected(requests, replace(system, profile=_scaled(system.profile, scale)), others)
    num_chunks, ttfts = sum(each.chunks for each in run.answers), [each.ttft_s for each in run.answers]
    return {
        "questions": len(run.answers),
        "kv_bytes": stored.kv_bytes,
        "memory_share": round(sum(each.in_memory for each in run.answers) / max(1, num_chunks), 4),
        "expected_memory_share": round(simulated.memory_share, 4),
        "ttft_mean_ms": round(1e3 * float(np.mean(ttfts)), 1),
        "expected_ttft_mean_ms": round(simulated.ttft_mean_ms, 1),
        "ttft_p90_ms": round(1e3 * float(np.percentile(ttfts, 90)), 1),
        "expected_ttft_p90_ms": round(simulated.ttft_p90_ms, 1),
        "alone_ms": round(alone_ms, 1),
        "scale": round(scale, 3),
        "profile": measured.as_dict(),
    }


def _scaled(profile: Profile, factor: float) -> Profile:
    """Return the profile of a machine on which prompts take so many times as long."""
    prefill, fused = (tuple(factor * c for c in each) for each in (profile.prefill, profile.fused))
    return replace(profile, prefill=prefill, fused=fused, cold_ms=factor * profile.cold_ms)


@dataclass(frozen=True)
class _Stored:
    """What the store has. sizes: of the documents' entries, in bytes, by chunk and by what they were computed behind.
    kv_bytes: of a token of theirs. anchor_bytes: of all other entries."""

    sizes: dict[Hashable, int]
    kv_bytes: int
    anchor_bytes: int


class _Questions:
    """New questions without end."""

    def __init__(self, config: Config, wanted: Rag, found: Rig) -> None:
        self._found, self._rng = found, random.Random(wanted.seed)
        self._policy, self._top_k = Policy.of(config.answer.policy, config.answer.budget), wanted.top_k
        tokenizer = Tokenizer.from_file(str(found.model / "tokenizer.json"))
        data = datasets.load("musique", wanted.data)
        texts = dict.fromkeys(chunk for example in data.examples for chunk in example.chunks)
        cut = (tokenizer.encode(text, add_special_tokens=False).ids[: wanted.chunk_tokens] for text in texts)
        chunks = itertools.islice((ids for ids in cut if len(ids) == wanted.chunk_tokens), wanted.documents)
        self._chunks: dict[str, list[int]] = {chunk_hash(ids): ids for ids in chunks}
        if len(self._chunks) < wanted.documents:
            raise ConfigError(
                f"MuSiQue has {len(self._chunks)} passages of {wanted.chunk_tokens} tokens, not {wanted.documents}: "
                "lower --documents or --chunk-tokens"
            )
        self._hashes = list(self._chunks)
        self._weights = [1 / (rank + 1) ** wanted.exponent for rank in range(len(self._hashes))]
        self._asked = itertools.cycle([example.question for example in data.examples])
        self._numbers = itertools.count(1)

    async def precompute(self, progress: Progress) -> None:
        """Compute the KV of all documents, each after two others."""
        progress.update("precomputing the documents")
        kv, hashes = self._found.kv, self._hashes
        spans = [kv.span(hash, len(tokens)) for hash, tokens in self._chunks.items()]
        contexts = {hash: [[spans[i - 1]], [spans[i - 2]]] for i, hash in enumerate(hashes)}
        await kv.precompute_anchor(self._found.engine, self._found.store)
        await kv.precompute(self._found.engine, self._found.store, self._chunks, contexts)

    def stored(self) -> _Stored:
        """Return what the store has now."""
        entries = self._found.store.entries
        sizes = {(key.chunk_hash, key.anchor_hash): entries.size(key) for key in entries}
        ours: dict[Hashable, int] = {key: size for key, size in sizes.items() if key[0] in self._chunks}
        num_bytes = sum(ours.values())
        kv_bytes = round(num_bytes / sum(map(len, self._chunks.values())))
        return _Stored(ours, kv_bytes, sum(sizes.values()) - num_bytes)

    def some(self, number: int) -> list[_Question]:
        return [self._new() for _ in range(number)]

    def _new(self) -> _Question:
        names: list[str] = []
        while len(names) < self._top_k:
            (name,) = self._rng.choices(self._hashes, self._weights)
            names += [name] if name not in names else []
        layout, kv = self._found.layout, self._found.kv
        question = layout.question_tokens(f"{next(self._asked)} (question {next(self._numbers)})")
        prompt = layout.assemble([self._chunks[name] for name in names], question)
        return _Question(prompt.token_ids, kv.task(prompt, names, self._policy, self._found.store))


def _row(asked: Sequence[Timed]) -> Row:
    """Return what a client would see. latency_ms: of a whole answer; normalised_ms: of it, for each token."""
    ttfts = [1e3 * each.ttft_s for each in asked]
    between = [1e3 * gap for each in asked for gap in each.gaps_s]
    num_tokens = sum(each.num_tokens for each in asked)
    return {
        "questions": len(asked),
        "prompt_tokens": round(num_tokens / len(asked)),
        **{f"ttft_p{q}_ms": round(float(np.percentile(ttfts, q)), 1) for q in (50, 90, 99)},
        **{f"itl_p{q}_ms": round(float(np.percentile(between, q)), 1) for q in (50, 99)},
        "latency_ms": round(float(np.mean([1e3 * each.total_s for each in asked])), 1),
        "normalised_ms": round(float(np.mean([1e3 * each.total_s / len(each.token_ids) for each in asked])), 1),
        "reused_share": round(sum(each.prefix + each.stored + each.fused for each in asked) / num_tokens, 4),
    }
