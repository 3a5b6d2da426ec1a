"""Profiles: requests are timed once on this machine, for the controller, and the result is kept in the home."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from ragkv.chunk_kv import ChunkKV
from ragkv.controller.cost_model import Load, Profile, Sample
from ragkv.engine.engine import Engine
from ragkv.engine.task import FuseTask, Report
from ragkv.errors import ConfigError
from ragkv.policies import Policy
from ragkv.prompt import Prompt, PromptLayout
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.base import KVStore
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey
from ragkv.workspace import Workspace

QUESTION = "Which statement is used to handle an exception, and what does its else clause do?"
LENGTHS = (192, 512, 1280, 3072)  # of prompts, in tokens
_BUDGETS = (0.05, 0.15)
_ROUNDS = 4
_LONG_S = 40.0  # after that no request is timed again


@dataclass(frozen=True)
class Timed:
    """One timed request: its time to first token, and the worker's report."""

    ttft_ms: float
    report: Report


class Bench:
    """A maker of prompts from English text (the Python manual), in chunks of `chunk_tokens` precomputed by `kv`."""

    def __init__(
        self, engine: Engine, layout: PromptLayout, model: Path, kv: ChunkKV, store: KVStore, chunk_tokens: int
    ) -> None:
        self._engine, self._layout, self._kv, self._store = engine, layout, kv, store
        self._chunk_tokens = chunk_tokens
        self._text = text_tokens(model, engine.max_model_len)
        self._question = layout.question_tokens(QUESTION)
        self.precomputed: set[str] = set()  # hashes
        self.shortest = len(layout.anchor) + len(self._question) + 1

    async def prepare(self, num_tokens: int) -> tuple[Prompt, list[str]]:
        """Cut chunks for a prompt of `num_tokens` and precompute them. Returns the prompt and their hashes.

        In the prompt, the last one that was cut comes first. Raises ConfigError for a length that the model's context
        can't hold.
        """
        room = num_tokens - self.shortest + 1
        if room < 1 or num_tokens >= self._engine.max_model_len:
            raise ConfigError(
                f"{num_tokens} tokens can't be measured: the model's context holds {self._engine.max_model_len}, "
                f"and anchor and question alone take {self.shortest - 1}"
            )
        chunks = [self._text[i : min(i + self._chunk_tokens, room)] for i in range(0, room, self._chunk_tokens)][::-1]
        by_hash = {chunk_hash(chunk): chunk for chunk in chunks}
        spans = {hash: self._kv.span(hash, len(chunk)) for hash, chunk in by_hash.items()}
        self.precomputed |= by_hash.keys()
        contexts = {hash: [[span] for other, span in spans.items() if other != hash] for hash in by_hash}
        await self._kv.precompute_anchor(self._engine, self._store)
        await self._kv.precompute(self._engine, self._store, by_hash, contexts)
        return self._layout.assemble(chunks, self._question), list(map(chunk_hash, chunks))

    async def ask(self, prompt: Prompt, task: FuseTask | None) -> Timed:
        """Time one request, without hits in vLLM's prefix cache. task: None for vLLM's own prefill."""
        begin = time.perf_counter()
        ttft_ms, report = 0.0, Report()
        async for output in self._engine.generate(prompt.token_ids, task, max_tokens=1, salt=uuid.uuid4().hex):
            ttft_ms = ttft_ms or 1e3 * (time.perf_counter() - begin)
            report = output.report or report
        return Timed(ttft_ms, report)


def text_tokens(model: Path, num_tokens: int) -> list[int]:
    """Return English prose that comes with every Python: its manual."""
    text = "\n\n".join(topics[name] for name in sorted(topics))[: 20 * num_tokens + 10_000]
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return tokens


def without(task: FuseTask, missing: Sequence[int]) -> FuseTask:
    """Return the task without these of its spans, so that they are computed, not loaded; index 0 is the anchor."""
    return FuseTask(tuple(span for i, span in enumerate(task.spans) if i not in missing), task.policy)


async def profile_machine(workspace: Workspace, policy: Policy, report: Callable[[str], None]) -> Profile | None:
    """Measure how long requests of this policy take; None for a model that isn't fused, or a policy without reuse.

    Deletes the chunks that it precomputes for this. Raises StoreError if there is no space for them.
    """
    engine = await workspace.start(report)
    if not workspace.fuses or policy.is_full:
        return None
    report("measuring this machine, once")
    kv = ChunkKV(workspace.layout.anchor, workspace.owner.fingerprint, engine.kv_heads, num_contexts=1)
    chunk_tokens = workspace.config.index.chunk_tokens
    bench = Bench(engine, workspace.layout, workspace.folder, kv, workspace.store, chunk_tokens)
    try:
        return await measure(bench, kv, policy, workspace.store, engine.max_model_len)
    finally:
        if unused := workspace.main.catalog.unreferenced(bench.precomputed):
            workspace.store.delete(unused)


async def measure(
    bench: Bench,
    kv: ChunkKV,
    policy: Policy,
    store: DiskStore,
    max_model_len: int,
    statistic: Callable[[Sequence[float]], float] = min,
) -> Profile | None:
    """Time a minute of requests and fit a profile; None if the model's context is too short for a fused prompt.

    Requests are timed in rounds over all lengths, and the best time of each counts: whatever else the machine does
    makes requests slower for seconds at a time, and must not make one length look slower than another. statistic: in
    its place, of the times of a request, but for the first where there are more.
    """
    prefill: list[_Request] = []
    fused: list[_Request] = []
    keys: list[ChunkKey] = []
    for length in [n for n in LENGTHS if bench.shortest < n < max_model_len]:
        prompt, chunk_hashes = await bench.prepare(length)
        keys = [kv.key(kv.span(hash, 0)) for hash in chunk_hashes]
        prefill.append(_Request(prompt, None))
        for budget in _BUDGETS if policy.selects_by_budget else _BUDGETS[:1]:
            whole = kv.task(prompt, chunk_hashes, replace(policy, budget=budget), store)
            fused.append(_Request(prompt, whole))
            if budget == _BUDGETS[0] and (num_missing := len(chunk_hashes) // 3):
                fused.append(_Request(prompt, without(whole, range(1, 1 + num_missing))))
    requests = sorted(prefill + fused, key=lambda request: len(request.prompt.token_ids))
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        for request in requests:
            if not request.timed or time.perf_counter() - begin + 1e-3 * request.timed[-1].ttft_ms < _LONG_S:
                request.timed.append(await bench.ask(request.prompt, request.task))
    samples = [request.sample(statistic) for request in fused if request.is_as_asked]
    if not samples:
        return None
    return Profile.fit(policy, [request.sample(statistic) for request in prefill], samples, _cold_ms(store, keys))


@dataclass
class _Request:
    prompt: Prompt
    task: FuseTask | None
    timed: list[Timed] = field(default_factory=list)

    @property
    def is_as_asked(self) -> bool:
        return self.task is not None and self.timed[-1].report.policy == self.task.policy

    def sample(self, statistic: Callable[[Sequence[float]], float]) -> Sample:
        num_tokens, times = len(self.prompt.token_ids), [timed.ttft_ms for timed in self.timed]
        load = Load(num_tokens) if self.task is None else load_of(num_tokens, self.task)
        return Sample(load, statistic(times[1:] or times))


def load_of(num_tokens: int, task: FuseTask) -> Load:
    loaded = sum(span.end - span.start for span in task.spans)
    chosen = int(task.policy.budget * loaded) if task.policy.selects_by_budget else 0
    return Load(num_tokens, loaded, 0, chosen, num_tokens - loaded)


def _cold_ms(store: DiskStore, keys: Sequence[ChunkKey]) -> float:
    """Measure how many milliseconds longer a thousand tokens take to read from disk than from the page cache."""
    tokens, times = 0, []
    for is_cold in (True, False):
        if is_cold:
            store.admin.drop_cached(keys)
        begin, layer, tokens = time.perf_counter(), 0, 0
        with store.snapshot() as snapshot:
            while True:  # as a request reads: layer by layer, the next one announced
                for key in keys:
                    snapshot.prefetch(key, layer + 1)
                hits = [kv for kv in (snapshot.get(key, layer) for key in keys) if kv is not None]
                if not hits:
                    break
                tokens, layer = sum(kv.v.shape[1] for kv in hits), layer + 1
        times.append(1e3 * (time.perf_counter() - begin))
    return max(0.0, times[0] - times[1]) / max(tokens, 1) * 1e3
