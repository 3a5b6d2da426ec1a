"""Puts stored KV into a request's blocks, inside the forward passes over other tokens of the request.

A layer's KV is read, checked and fused (`ragkv.kernels.kv_fuse`) just before that layer attends, and dropped after it:
no more than one layer is held. Knows nothing about policies.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ragkv.engine.attention import can_attend, selective
from ragkv.engine.blocks import Blocks, ContiguousKV, PagedBlocks, find_views
from ragkv.engine.device_copy import Upload
from ragkv.engine.subset import Piece, SubsetForward
from ragkv.engine.task import Job, Report, Span
from ragkv.errors import StoreError
from ragkv.kernels.dispatch import Kernels
from ragkv.kernels.kv_fuse import KVShift, Staged
from ragkv.kernels.rotation import Rotation
from ragkv.kernels.shift import averaging, learn, shift_weights
from ragkv.store.base import KVStore, Snapshot
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV

logger = logging.getLogger(__name__)

_NOT_WRITTEN = -1  # a slot
_UNKNOWN = (1 << 31) - 1  # a position behind every query


class BadSpanError(Exception):
    """A span whose KV turned out to be missing or damaged after the load had begun. is_corrupt: it is there, and of no
    use to anybody."""

    def __init__(self, span: Span, reason: str, *, is_corrupt: bool = False) -> None:
        super().__init__(f"chunk {span.chunk_hash}: {reason}")
        self.span, self.is_corrupt = span, is_corrupt


@dataclass(frozen=True)
class LoadedSpan:
    """One layer of a span as it is stored, on the device, for as long as that layer is being computed."""

    span: Span
    kv: LayerKV

    @property
    def moved(self) -> int:
        """How many positions its keys have to go on."""
        return self.span.start - self.kv.base_position


@dataclass(frozen=True)
class LayerView:
    """A layer, before it attends. q, k, v: `[T, H, D]` of the tokens in the pass. key_positions: `[N]`, of the keys;
    behind every query where there is none."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    loaded: list[LoadedSpan]
    blocks: Blocks
    key_positions: torch.Tensor

    @property
    def keys(self) -> torch.Tensor:
        """`[Hkv, N, D]` of all tokens, in the pass or cached."""
        return self.blocks.keys(self.layer)


See = Callable[[LayerView], bool | None]  # True ends the pass


class Source:
    """Where a worker's chunk KV comes from, and how it is moved. rotations: one for each layer (`find_rotations`)."""

    def __init__(
        self,
        subset: SubsetForward,
        rotations: Sequence[Rotation | None],
        store: KVStore,
        fingerprint: str,
        kernels: Kernels,
    ) -> None:
        self.subset, self.rotations, self.store, self.kernels = subset, rotations, store, kernels
        self.upload = Upload(subset.device)
        self._fingerprint = fingerprint
        self._views = find_views(subset)
        self.can_attend = can_attend(subset)

    def key(self, span: Span) -> ChunkKey:
        return ChunkKey(span.chunk_hash, span.anchor_hash, self._fingerprint, (0, self.subset.layers[0].num_kv_heads))

    def blocks(self, job: Job) -> tuple[Blocks, PagedBlocks | None]:
        """Where a pass over the job puts its KV together, and vLLM's own blocks if kernels can read those."""
        block_ids = torch.tensor(job.block_ids)
        slots = self.subset.slots(torch.arange(len(job.token_ids)), block_ids).to(self.subset.device)
        in_place = PagedBlocks(self.subset, self._views, slots, block_ids) if self._views is not None else None
        if in_place is not None and self.subset.device.type != "cpu":
            return in_place, in_place
        return ContiguousKV(self.subset, slots), in_place

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Of the store. At its end the device has all that was read."""
        with self.store.snapshot() as snapshot:
            try:
                yield snapshot
            finally:
                self.upload.finish()

    def read(self, snapshot: Snapshot, layer: int, span: Span) -> LoadedSpan:
        """One layer of a span, to be used `within` a use of `upload`.

        Raises BadSpanError unless it is there, verifies and fits.
        """
        try:
            kv = snapshot.get(self.key(span), layer)
        except CorruptRecordError as error:
            raise BadSpanError(span, f"layer {layer}: {error}", is_corrupt=True) from error
        if kv is None:
            raise BadSpanError(span, f"layer {layer} is missing")
        attention = self.subset.layers[layer]
        expected = (attention.num_kv_heads, span.end - span.start, attention.head_size)
        if tuple(kv.k.shape) != expected:
            reason = f"layer {layer} has shape {tuple(kv.k.shape)}, expected {expected}"
            raise BadSpanError(span, reason, is_corrupt=True)
        return LoadedSpan(span, self.upload(kv))

    def discard_if_corrupt(self, error: BadSpanError) -> None:
        """So that nobody reads it again, and it is precomputed anew."""
        if error.is_corrupt:
            try:
                self.store.discard(self.key(error.span))
            except StoreError as problem:
                logger.warning("bad KV stays in the store: %s", problem)

    def check_still_there(self, snapshot: Snapshot, spans: Iterable[Span]) -> None:
        """Raise BadSpanError if one of these spans was deleted or replaced since it was first read."""
        lost = set(snapshot.lost())
        for span in spans if lost else ():
            if self.key(span) in lost:
                raise BadSpanError(span, "was deleted while it was read")


class BlockFiller:
    """The blocks of one request being filled. is_apart: a layer is put together elsewhere than in vLLM's blocks."""

    def __init__(self, source: Source, job: Job, report: Report) -> None:
        self._source, self._subset, self._job, self._report = source, source.subset, job, report
        self.blocks, self.in_place = source.blocks(job)
        self.is_apart = self.blocks is not self.in_place
        self._slots = self.blocks.slots.clone()
        if not self.is_apart:  # what vLLM's prefix cache has must not be written
            self._slots[: job.num_prefix] = _NOT_WRITTEN

    def run(
        self,
        positions: torch.Tensor,
        spans_at: Callable[[int], Sequence[Span]],
        see: See | None = None,
        *,
        shift: bool = False,
        stage: Literal["probe_ms", "recompute_ms"] = "recompute_ms",
        over: Blocks | None = None,
        flush: bool = True,
    ) -> None:
        """Compute `positions`, loading `spans_at(layer)` just before each layer attends.

        shift: what the tokens computed here teach about a loaded span is carried over to the span's other tokens.
        over: where they attend by `selective_attention`: in `blocks`, if the spans and `positions` are all tokens up to
        the last, or in `in_place`. flush: False leaves nothing in vLLM's blocks, if `blocks` are elsewhere. Time goes
        to the report's `stage`, apart from the load's. Raises BadSpanError, with some layers written.
        """
        begin, loaded_before = time.perf_counter(), self._report.load_ms
        blocks, device = self.blocks, self._subset.device
        on_device = positions.to(device)
        slots = self._slots.index_fill(0, on_device, _NOT_WRITTEN)  # these are computed here
        mean_shift = _MeanShift(positions, device) if shift else None
        end = max([int(positions[-1]) + 1 if len(positions) else 0, *(span.end for span in spans_at(0))])
        key_positions = self._key_positions(positions, spans_at(0)) if see else on_device
        with self._source.snapshot() as snapshot:

            def before_layer(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool | None:
                with self._source.upload.within():
                    return put_together(layer, q, k, v)

            def put_together(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool | None:
                if layer + 1 < len(self._subset.layers):  # is read while this one is computed
                    for span in spans_at(layer + 1):
                        snapshot.prefetch(self._source.key(span), layer + 1)
                load_begin = time.perf_counter()
                spans = spans_at(layer)
                loaded = [self._source.read(snapshot, layer, span) for span in spans]
                shifts = mean_shift.learn(loaded, k, v, self._source.rotations[layer]) if mean_shift else None
                self._fuse(layer, loaded, slots, shifts)
                if len(positions) and (see or over is blocks):
                    blocks.put(layer, on_device, k, v)
                if flush and over is blocks:
                    blocks.flush(layer, self._job.num_prefix, end)
                elif flush:
                    for span in spans:
                        blocks.flush(layer, max(span.start, self._job.num_prefix), span.end)
                if over is not None and over is not blocks:
                    over.put(layer, on_device, k, v)
                load_end = time.perf_counter()
                self._report.load_ms += 1e3 * (load_end - load_begin)
                if self._report.trace is not None:
                    self._report.trace.append((stage, layer, load_begin, load_end))
                return see(LayerView(layer, q, k, v, loaded, blocks, key_positions)) if see else None

            if len(positions):
                attend = selective(self._subset, self._source.kernels, over, on_device) if over is not None else None
                self._subset.run([piece(self._job, positions)], before_layer, attend)
            else:  # everything is cached: there is nothing to run, only to write
                nothing = torch.empty(0, device=device)
                for layer in range(len(self._subset.layers)):
                    before_layer(layer, nothing, nothing, nothing)
            self._source.check_still_there(snapshot, spans_at(len(self._subset.layers) - 1))
        elapsed_ms = 1e3 * (time.perf_counter() - begin) - (self._report.load_ms - loaded_before)
        setattr(self._report, stage, getattr(self._report, stage) + elapsed_ms)

    def is_passing(self, over: Blocks | None) -> bool:
        """Whether what a pass over these puts together is gone at its end, unless it is flushed."""
        return self.is_apart and over is self.blocks

    def load(self, snapshot: Snapshot, layer: int, span: Span) -> None:
        """Write one layer of a span into the blocks."""
        with self._source.upload.within():
            self._fuse(layer, [self._source.read(snapshot, layer, span)], self._slots)
        self.blocks.flush(layer, span.start, span.end)

    def _fuse(
        self, layer: int, loaded: list[LoadedSpan], slots: torch.Tensor, shifts: list[KVShift | None] | None = None
    ) -> None:
        staged = []
        for item in loaded:
            kv, own = item.kv, slots[item.span.start : item.span.end]
            staged.append(Staged(kv.k, kv.v, own, item.moved, kv.k_scale, kv.v_scale))
        rotation, caches = self._source.rotations[layer], self.blocks.caches(layer)
        for dtype in {chunk.k.dtype for chunk in staged}:  # more than one only where the codec was changed
            which = [i for i, chunk in enumerate(staged) if chunk.k.dtype == dtype]
            teaching = [shifts[i] for i in which] if shifts else None
            self._source.kernels.kv_fuse([staged[i] for i in which], rotation, *caches, teaching)

    def _key_positions(self, positions: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        found = torch.arange(len(self._job.token_ids))
        found[~covered(len(found), positions, spans)] = _UNKNOWN
        return found.to(self._subset.device)


class _MeanShift:
    """What the tokens of a pass teach about the spans that they lie in."""

    def __init__(self, positions: torch.Tensor, device: torch.device) -> None:
        self._positions, self._device = positions, device
        self._on_device = positions.to(device)
        self._span_to_rows: dict[Span, tuple[torch.Tensor, torch.Tensor]] = {}
        self._averaging: torch.Tensor | None = None  # the same in all layers

    def learn(
        self, loaded: Sequence[LoadedSpan], k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> list[KVShift | None]:
        """For each span, None if none of its tokens is in the pass. k, v: `[T, Hkv, D]`."""
        found = [(item, *self._rows(item.span)) for item in loaded]
        concerned = [(item, rows, offsets) for item, rows, offsets in found if len(rows)]
        if not concerned:
            return [None] * len(loaded)
        rows = torch.cat([rows for _, rows, _ in concerned])
        fresh_k, fresh_v = k[rows].transpose(0, 1).float(), v[rows].transpose(0, 1)
        cached = [item.kv.decoded(offsets) for item, _, offsets in concerned]
        cached_k, cached_v = (torch.cat(parts, dim=1) for parts in zip(*cached, strict=True))
        if rotation is not None:
            fresh_k = rotation.rotate(fresh_k, -self._on_device[rows])
            positions = torch.cat([item.kv.base_position + offsets for item, _, offsets in concerned])
            cached_k = rotation.rotate(cached_k.float(), -positions)
        if self._averaging is None:
            self._averaging = averaging([len(rows) for _, rows, _ in concerned]).to(self._device)
        means = iter(learn(fresh_k, fresh_v, cached_k, cached_v, self._averaging))
        return [self._of(item, offsets, *next(means)) if len(rows) else None for item, rows, offsets in found]

    def _of(self, item: LoadedSpan, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> KVShift:
        span = item.span
        return KVShift(k, v, shift_weights(item.kv.v_std, offsets, span.end - span.start), span.start)

    def _rows(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the pass's tokens lie in the span, and their offsets in it."""
        if span not in self._span_to_rows:
            inside = rows_in(self._positions, span)
            offsets = self._positions[inside] - span.start
            self._span_to_rows[span] = inside.to(self._device), offsets.to(self._device)
        return self._span_to_rows[span]


def rows_in(positions: torch.Tensor, span: Span) -> torch.Tensor:
    """Which of these positions `[T]` lie in the span."""
    return ((positions >= span.start) & (positions < span.end)).nonzero().flatten()


def covered(num_tokens: int, positions: torch.Tensor, spans: Iterable[Span]) -> torch.Tensor:
    """Which of the tokens lie in a span or are among the positions: `[N]` bool."""
    known = torch.zeros(num_tokens, dtype=torch.bool)
    known[positions] = True
    for span in spans:
        known[span.start : span.end] = True
    return known


def piece(job: Job, positions: torch.Tensor) -> Piece:
    return Piece(torch.tensor(job.token_ids)[positions], positions, torch.tensor(job.block_ids))
