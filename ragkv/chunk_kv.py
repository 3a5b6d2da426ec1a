"""Names, contexts and places chunks' KV: what lies between chunks as token ids and an engine's tasks.

Every chunk has a record that was precomputed after the anchor; where contexts are averaged, a second one with the mean.
A chunk that stands directly behind the anchor takes the first one, which is exact there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, MeanTask, PrecomputeTask, Span
from ragkv.policies import Policy
from ragkv.prompt import Prompt
from ragkv.retriever.hashing import NEAREST, chunk_hash, mean_hash
from ragkv.store.base import KVStore
from ragkv.store.record import ChunkKey


class ChunkKV:
    """The KV of chunks behind one anchor, made by one model.

    num_contexts: how often each is precomputed, once behind the anchor and else for its average; contexts: what kind of
    contexts that is made in, a name that keeps averages of different kinds apart.
    """

    def __init__(
        self,
        anchor: Sequence[int],
        fingerprint: str,
        heads: tuple[int, int],
        num_contexts: int,
        contexts: str = NEAREST,
    ) -> None:
        self._anchor, self._fingerprint, self._heads = list(anchor), fingerprint, heads
        self.num_contexts = num_contexts
        self.anchor_hash = chunk_hash(anchor)
        self.anchor_span = Span(0, len(anchor), self.anchor_hash, ROOT_HASH)
        self.mean_hash = mean_hash(self.anchor_hash, contexts, num_contexts)

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self._fingerprint, self._heads)

    def span(self, digest: str, num_tokens: int) -> Span:
        """Where a chunk is precomputed: directly behind the anchor."""
        start = len(self._anchor)
        return Span(start, start + num_tokens, digest, self.anchor_hash)

    def averaged(self, span: Span) -> Span:
        """The same chunk's average."""
        return replace(span, anchor_hash=self.mean_hash)

    def task(self, prompt: Prompt, digests: Sequence[str], policy: Policy, store: KVStore) -> FuseTask:
        """Fuse a prompt of these chunks, with their averages where the store has them."""
        spans = [self.anchor_span]
        for digest, (start, end) in zip(digests, prompt.chunk_ranges, strict=True):
            span = Span(start, end, digest, self.anchor_hash)
            first = start == len(self._anchor)
            averaged = self.num_contexts > 1 and not first and store.contains(self.key(self.averaged(span)))
            spans.append(self.averaged(span) if averaged else span)
        return FuseTask(tuple(spans), policy)

    def without_mean(self, task: FuseTask) -> list[str]:
        """The chunks of a task that have no average, though they would be nearer to what prefill computes with one."""
        if self.num_contexts == 1:
            return []
        start = len(self._anchor)
        return [s.chunk_hash for s in task.spans if s.start > start and s.anchor_hash == self.anchor_hash]

    async def precompute_anchor(self, engine: Engine, store: KVStore) -> None:
        if not store.contains(self.key(self.anchor_span)):
            await engine.precompute(self._anchor, PrecomputeTask(self.anchor_span))
        store.hint([self.anchor_hash], "pin")  # every prompt begins with it

    async def precompute(
        self,
        engine: Engine,
        store: KVStore,
        chunks: Mapping[str, Sequence[int]],
        others: Mapping[str, Sequence[Span]],
        done: Callable[[str, int], None] = lambda digest, num_captures: None,
    ) -> int:
        """Make the records that these chunks (token ids by hash) don't have. Returns how many chunks had none.

        others: for each chunk, what its average sees before it, likeliest first: where other chunks are precomputed
        after the anchor. Those that have no KV are passed over. done: told each chunk's hash and the number of contexts
        that it took. Raises StoreError if there is no space.
        """
        missing = {h: t for h, t in chunks.items() if not store.contains(self.key(self.span(h, len(t))))}
        await _all(self._precompute(engine, digest, tokens, done) for digest, tokens in missing.items())
        if self.num_contexts > 1:
            without = {h: t for h, t in chunks.items() if not store.contains(self.key(self.averaged(self.span(h, 0))))}
            there = {h: [o for o in others.get(h, ()) if store.contains(self.key(o))] for h in without}
            await _all(self._average(engine, h, tokens, there[h], done) for h, tokens in without.items())
        return len(missing)

    async def _precompute(
        self, engine: Engine, digest: str, tokens: Sequence[int], done: Callable[[str, int], None]
    ) -> None:
        await engine.precompute([*self._anchor, *tokens], PrecomputeTask(self.span(digest, len(tokens))))
        done(digest, 1)

    async def _average(
        self,
        engine: Engine,
        digest: str,
        tokens: Sequence[int],
        others: Sequence[Span],
        done: Callable[[str, int], None],
    ) -> None:
        """Store the mean over contexts behind each of these chunks."""
        room = engine.max_model_len - len(tokens) - 2
        fitting = [span for span in others if span.end <= room][: self.num_contexts - 1]
        alone = self.span(digest, len(tokens))
        task = MeanTask(self.anchor_span, alone, self.averaged(alone), tuple(fitting))
        await engine.precompute([*self._anchor, *tokens], task)
        done(digest, self.num_contexts - 1)


async def _all(num_contexts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """At once, so that vLLM batches them. Raises the first error alone: one reason stops them all."""
    try:
        async with asyncio.TaskGroup() as group:
            for precompute in num_contexts:
                group.create_task(precompute)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
