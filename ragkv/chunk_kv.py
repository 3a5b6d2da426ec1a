"""Names the KV of chunks, has it precomputed, and finds it again: the step from token ids to an engine's tasks.

Every chunk has a record that was precomputed directly after the anchor. Where num_contexts is above 1, it has a second
one: the mean of its KV over several contexts. A prompt's first chunk takes the first record, which is exact there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, MeanTask, PrecomputeTask, Span
from ragkv.policies import Policy
from ragkv.prompt import Prompt
from ragkv.retriever.hashing import NEAREST, mean_hash
from ragkv.retriever.hashing import chunk_hash as hash_of
from ragkv.store.base import KVStore
from ragkv.store.record import ChunkKey


class ChunkKV:
    """The KV of chunks, precomputed after one anchor by one model.

    num_contexts: in how many contexts each chunk is precomputed: after the anchor alone, and after other chunks for its
    mean. contexts: how those other chunks are chosen, a name that keeps means of different kinds apart.
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
        self.anchor_hash = hash_of(anchor)
        self.anchor_span = Span(0, len(anchor), self.anchor_hash, ROOT_HASH)
        self.mean_hash = mean_hash(self.anchor_hash, contexts, num_contexts)

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self._fingerprint, self._heads)

    def span(self, chunk_hash: str, num_tokens: int) -> Span:
        """Return the span in which a chunk is precomputed: directly after the anchor."""
        start = len(self._anchor)
        return Span(start, start + num_tokens, chunk_hash, self.anchor_hash)

    def averaged(self, span: Span) -> Span:
        """Return the same span with the chunk's mean KV."""
        return replace(span, anchor_hash=self.mean_hash)

    def task(self, prompt: Prompt, chunk_hashes: Sequence[str], policy: Policy, store: KVStore) -> FuseTask:
        """Return the task that fuses all chunks of a prompt, with their mean KV where the store has it."""
        spans = [self.anchor_span]
        for chunk_hash, (start, end) in zip(chunk_hashes, prompt.chunk_ranges, strict=True):
            span = Span(start, end, chunk_hash, self.anchor_hash)
            first = start == len(self._anchor)
            averaged = self.num_contexts > 1 and not first and store.contains(self.key(self.averaged(span)))
            spans.append(self.averaged(span) if averaged else span)
        return FuseTask(tuple(spans), policy)

    def without_mean(self, task: FuseTask) -> list[str]:
        """Return the hashes of the chunks of a task that have no mean KV, though it would be nearer to full prefill."""
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
        done: Callable[[str, int], None] = lambda chunk_hash, num_contexts: None,
    ) -> int:
        """Precompute the records that these chunks (hash to token ids) lack. Return how many chunks had none.

        others: for each chunk, the chunks after which its KV is averaged, likeliest first, in the spans in which they
        were precomputed. Those without KV are passed over. done: called with each chunk's hash and the number of
        contexts that were precomputed. Raises StoreError if there is no space.
        """
        missing = {h: t for h, t in chunks.items() if not store.contains(self.key(self.span(h, len(t))))}
        await _run_all(self._precompute(engine, h, tokens, done) for h, tokens in missing.items())
        if self.num_contexts > 1:
            without = {h: t for h, t in chunks.items() if not store.contains(self.key(self.averaged(self.span(h, 0))))}
            stored = {h: [o for o in others.get(h, ()) if store.contains(self.key(o))] for h in without}
            await _run_all(self._precompute_mean(engine, h, tokens, stored[h], done) for h, tokens in without.items())
        return len(missing)

    async def _precompute(
        self, engine: Engine, chunk_hash: str, tokens: Sequence[int], done: Callable[[str, int], None]
    ) -> None:
        await engine.precompute([*self._anchor, *tokens], PrecomputeTask(self.span(chunk_hash, len(tokens))))
        done(chunk_hash, 1)

    async def _precompute_mean(
        self,
        engine: Engine,
        chunk_hash: str,
        tokens: Sequence[int],
        others: Sequence[Span],
        done: Callable[[str, int], None],
    ) -> None:
        room = engine.max_model_len - len(tokens) - 2
        fitting = [span for span in others if span.end <= room][: self.num_contexts - 1]
        alone = self.span(chunk_hash, len(tokens))
        task = MeanTask(self.anchor_span, alone, self.averaged(alone), tuple(fitting))
        await engine.precompute([*self._anchor, *tokens], task)
        done(chunk_hash, self.num_contexts - 1)


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once, so that vLLM batches them. Raises only the first error: one reason stops them all."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
