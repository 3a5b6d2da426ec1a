"""Builds the store keys and the engine's tasks for chunks' KV, and precomputes what is missing.

Every chunk is precomputed directly after the anchor, and, where `num_contexts` is above 1, after other chunks too: its
mean KV over `num_contexts` - 1 computations. The chunk that comes first in a prompt uses the former, which is right
there, all others the latter. Either has an entry of its own, or, where they are stored in fewer bits than the model
computes with, one entry holds the mean and the former's difference from it (`ragkv.store.difference`). Changing a hash
or a key here orphans every stored entry.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ragkv.engine.engine import Engine
from ragkv.engine.task import ROOT_HASH, FuseTask, MeanTask, PrecomputeTask, Span
from ragkv.policies import Policy
from ragkv.prompt import Prompt
from ragkv.retriever.hashing import CONTEXTS, mean_hash
from ragkv.retriever.hashing import chunk_hash as hash_of
from ragkv.retriever.tokens import FoundChunk
from ragkv.store.base import KVStore
from ragkv.store.record import ChunkKey


class Stored(Protocol):
    """Whatever says which entries are stored."""

    def contains(self, key: ChunkKey) -> bool: ...


class ChunkKV:
    """The KV of chunks, precomputed after one anchor by one model.

    heads: the range of KV heads in an entry. num_contexts: how often each chunk is precomputed: once after the anchor
    alone, otherwise after another chunk, for its mean. contexts: the name of the rule by which those other chunks are
    chosen; part of the mean's key. joins: whether one entry holds both.
    """

    def __init__(
        self,
        anchor: Sequence[int],
        fingerprint: str,
        heads: tuple[int, int],
        num_contexts: int,
        contexts: str = CONTEXTS,
        *,
        joins: bool = False,
    ) -> None:
        self._anchor, self._fingerprint, self._heads = list(anchor), fingerprint, heads
        self.num_contexts = num_contexts
        self.anchor_hash = hash_of(anchor)
        self.anchor_span = Span(0, len(anchor), self.anchor_hash, ROOT_HASH)
        self.mean_hash = mean_hash(self.anchor_hash, contexts, num_contexts, joins=joins)
        self._joined = self.mean_hash if joins and num_contexts > 1 else ""

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self._fingerprint, self._heads)

    def span(self, chunk_hash: str, num_tokens: int) -> Span:
        """Return the span in which a chunk is precomputed: directly after the anchor."""
        start = len(self._anchor)
        return Span(start, start + num_tokens, chunk_hash, self.anchor_hash, self._joined)

    def keys(self, chunk_hash: str) -> list[ChunkKey]:
        """Return the keys of the entries that a chunk ends with: after the anchor alone, then the mean, if it has one;
        the mean only, if that holds both."""
        alone = self.span(chunk_hash, 0)
        spans = [self.averaged(alone)] if self._joined else [alone, self.averaged(alone)][: self.num_contexts]
        return list(map(self.key, spans))

    def best_key(self, span: Span) -> ChunkKey:
        """Return the key of the entry that a prompt is best served with there, stored or not: the mean, if the chunk
        has one and isn't the first."""
        if span.end <= len(self._anchor):
            return self.key(span)
        first, *_, last = 2 * self.keys(span.chunk_hash)
        return first if span.start <= len(self._anchor) else last

    def averaged(self, span: Span) -> Span:
        """Return the same span with the chunk's mean KV, which the store keeps as if it came after another anchor."""
        return replace(span, anchor_hash=self.mean_hash, mean_hash="")

    def stored_key(self, span: Span, store: Stored) -> ChunkKey | None:
        """Return the key of the entry that has the KV of a span, its own or its mean's; None if it isn't stored."""
        keys = [self.key(span), *([self.key(self.averaged(span))] if span.mean_hash else [])]
        return next(filter(store.contains, keys), None)

    def is_stored(self, span: Span, store: Stored) -> bool:
        """Return whether the store has the KV of a span, in an entry of its own or in its mean's."""
        return self.stored_key(span, store) is not None

    def task(self, prompt: Prompt, chunk_hashes: Sequence[str], policy: Policy, store: KVStore) -> FuseTask:
        """Return the task that fuses all chunks of a prompt, with their mean KV where the store has it."""
        spans = [self.anchor_span]
        for chunk_hash, (start, end) in zip(chunk_hashes, prompt.chunk_ranges, strict=True):
            span = Span(start, end, chunk_hash, self.anchor_hash, self._joined)
            first = start == len(self._anchor)
            averaged = self.num_contexts > 1 and not first and store.contains(self.key(self.averaged(span)))
            spans.append(self.averaged(span) if averaged else span)
        return FuseTask(tuple(spans), policy)

    def found(self, token_ids: Sequence[int], chunks: Sequence[FoundChunk]) -> list[Span]:
        """Return the spans of chunks that were found in a prompt, in order of position.

        They have their mean KV, if they have any (`behind` is for the first). If the prompt begins with the anchor,
        that is the first span.
        """
        anchor = len(self._anchor) if list(token_ids[: len(self._anchor)]) == self._anchor else 0
        spans = [self.anchor_span] if anchor else []
        for chunk in chunks:
            if chunk.start < anchor:
                continue
            num_tokens = 0 if chunk.is_whole else chunk.num_tokens
            span = Span(
                chunk.start, chunk.end, chunk.chunk_hash, self.anchor_hash, self._joined, chunk.offset, num_tokens
            )
            spans.append(span if self.num_contexts == 1 else self.averaged(span))
        return spans

    def behind(self, span: Span, token_ids: Sequence[int]) -> Span:
        """Return the same span with the KV that its chunk has directly behind a prompt's first tokens `[n]`.

        They may be the anchor's or any others.
        """
        beginning = hash_of(token_ids)
        joined = self._joined if beginning == self.anchor_hash else ""
        return replace(span, anchor_hash=beginning, mean_hash=joined)

    def over_other_kv(self, task: FuseTask) -> FuseTask | None:
        """Return the task with the KV after the anchor alone of the chunks that it takes the mean of; None if it takes
        no mean."""
        others = tuple(
            replace(s, anchor_hash=self.anchor_hash, mean_hash=self._joined) if s.anchor_hash == self.mean_hash else s
            for s in task.spans
        )
        return replace(task, spans=others) if others != task.spans else None

    def without_mean(self, task: FuseTask) -> list[str]:
        """Return the hashes of the chunks of a task that have no mean KV, although a mean would be more accurate."""
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
        contexts: Mapping[str, Sequence[Sequence[Span]]],
        done: Callable[[str, int], None] = lambda chunk_hash, num_contexts: None,
    ) -> int:
        """Precompute the entries that these chunks (hash to token ids) lack: `precompute_alone`, then their means."""
        num_missing = await self.precompute_alone(engine, store, chunks, done)
        if self.num_contexts > 1:
            await self.precompute_means(engine, store, chunks, contexts, done)
        return num_missing

    async def precompute_alone(
        self,
        engine: Engine,
        store: KVStore,
        chunks: Mapping[str, Sequence[int]],
        done: Callable[[str, int], None] = lambda chunk_hash, num_contexts: None,
    ) -> int:
        """Precompute those of these chunks (hash to token ids) that aren't stored. Returns how many.

        done: called with a chunk's hash and the number of contexts (one) for each entry. Raises StoreError if there is
        no space.
        """

        async def run(chunk_hash: str, tokens: Sequence[int]) -> None:
            await engine.precompute([*self._anchor, *tokens], PrecomputeTask(self.span(chunk_hash, len(tokens))))
            done(chunk_hash, 1)

        missing = {h: t for h, t in chunks.items() if not self.is_stored(self.span(h, len(t)), store)}
        await _run_all(run(h, t) for h, t in missing.items())
        return len(missing)

    async def precompute_means(
        self,
        engine: Engine,
        store: KVStore,
        chunks: Mapping[str, Sequence[int]],
        contexts: Mapping[str, Sequence[Sequence[Span]]],
        done: Callable[[str, int], None] = lambda chunk_hash, num_contexts: None,
    ) -> None:
        """Precompute the means that these chunks (hash to token ids) lack.

        contexts: for each chunk, what stands before it: other chunks, one behind another, in the spans in which they
        were precomputed; those without KV or without room are left out. done, errors: as of `precompute_alone`.
        """

        async def run(task: MeanTask, tokens: Sequence[int]) -> None:
            await engine.precompute([*self._anchor, *tokens], task)
            done(task.span.chunk_hash, self.num_contexts - 1)

        means = []
        for chunk_hash, tokens in chunks.items():
            alone = self.span(chunk_hash, len(tokens))
            if not store.contains(self.key(self.averaged(alone))):
                stored = [
                    [span for span in context if self.is_stored(span, store)]
                    for context in contexts.get(chunk_hash, ())
                ]
                means.append((self.mean_task(alone, stored, engine.max_model_len), tokens))
        await _run_all(run(task, tokens) for task, tokens in means)

    def mean_task(self, alone: Span, contexts: Sequence[Sequence[Span]], max_model_len: int) -> MeanTask:
        """Return the task that averages a chunk over contexts whose KV is stored. max_model_len: of the engine."""
        room = max_model_len - (alone.end - alone.start) - 2  # tokens at the end that vLLM itself computes
        placed = dict.fromkeys(self._placed(context, room) for context in contexts)
        usable = [context for context in placed if context][: self.num_contexts - 1]
        return MeanTask(self.anchor_span, alone, self.averaged(alone), tuple(usable))

    def _placed(self, context: Sequence[Span], room: int) -> tuple[Span, ...]:
        """Return the spans one behind another after the anchor, those that end within `room`."""
        placed, end = [], self.anchor_span.end
        for span in context:
            if end + span.end - span.start <= room:
                placed.append(replace(span, start=end, end=end + span.end - span.start))
                end = placed[-1].end
        return tuple(placed)


async def _run_all(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them at once, so that vLLM batches them. Raises only the first error: usually all have the same reason."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
