"""Reads chunks' stored KV, one layer of a chunk at a time, copies it to the device and fuses it into blocks.

On CUDA the copies have a stream of their own, so that something else is computed meanwhile.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ragkv.engine.blocks import Blocks, ContiguousKV, PagedBlocks, can_attend, find_views
from ragkv.engine.device_copy import DeviceCopy
from ragkv.engine.forward import Forward
from ragkv.engine.task import Job, Span
from ragkv.errors import StoreError
from ragkv.kernels.dispatch import Kernels
from ragkv.kernels.kv_fuse import Addend, KVShift, Staged
from ragkv.kernels.operands import PagedKV, Rotation
from ragkv.store.base import KVStore, Snapshot
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV

logger = logging.getLogger(__name__)


class BadSpanError(Exception):
    """A span whose KV turned out to be missing or damaged after the load had begun.

    corrupt: the key of its record, if that is in the store, and of no use to anybody.
    """

    def __init__(self, span: Span, reason: str, corrupt: ChunkKey | None = None) -> None:
        super().__init__(f"chunk {span.chunk_hash}: {reason}")
        self.span, self.corrupt = span, corrupt


@dataclass(frozen=True)
class LoadedSpan:
    """One layer of a span as it is stored, on the device, for as long as that layer is being computed."""

    span: Span
    kv: LayerKV

    @property
    def distance(self) -> int:
        """By how many positions its keys have to be rotated."""
        return self.span.start - self.kv.base_position

    def staged(self, slots: torch.Tensor, moved: int = 0, shift: KVShift | None = None) -> Staged:
        """Return it as `kv_fuse` takes it. slots: of its tokens `[T]`."""
        kv, addend = self.kv, None
        if (change := kv.difference) is not None:
            addend = Addend(change.rows(len(slots)), change.scale, change.numbers)
        return Staged(kv.k, kv.v, slots, moved, kv.k_scale, kv.v_scale, kv.k_low, kv.v_low, shift, addend)


class KVLoader:
    """A worker's way from the store to the blocks: store, copies to the device, rotations, kernels.

    rotations: one for each layer (`find_rotations`), None where keys don't depend on the position.
    """

    def __init__(
        self,
        forward: Forward,
        rotations: Sequence[Rotation | None],
        store: KVStore,
        fingerprint: str,
        kernels: Kernels,
    ) -> None:
        self.forward, self.rotations, self.store, self.kernels = forward, rotations, store, kernels
        self.device_copy = DeviceCopy(forward.device)
        self._fingerprint = fingerprint
        self._views = find_views(forward)
        self.can_attend = can_attend(forward)

    def key(self, span: Span) -> ChunkKey:
        """Return the key of the span's own entry."""
        return self._keys(span)[0]

    def find(self, span: Span) -> ChunkKey:
        """Return the key of the entry that has the span's KV: its own, or its mean's. If there is none, its own."""
        own, *means = self._keys(span)
        return next((key for key in means if not self.store.contains(own) and self.store.contains(key)), own)

    def has(self, span: Span) -> bool:
        return self.store.contains(self.find(span))

    def _keys(self, span: Span) -> list[ChunkKey]:
        heads = (0, self.forward.layers[0].num_kv_heads)
        anchors = [span.anchor_hash, span.mean_hash] if span.mean_hash else [span.anchor_hash]
        return [ChunkKey(span.chunk_hash, anchor, self._fingerprint, heads) for anchor in anchors]

    def blocks(self, job: Job) -> tuple[Blocks, PagedBlocks | None]:
        """Return where a pass over the job puts its KV together, and vLLM's own blocks if kernels can read those."""
        block_ids = torch.tensor(job.block_ids)
        slots = self.forward.slots(torch.arange(len(job.token_ids)), block_ids).to(self.forward.device)
        paged = PagedBlocks(self.forward, self._views, slots, block_ids) if self._views is not None else None
        if paged is not None and self.forward.device.type != "cpu":
            return paged, paged
        return ContiguousKV(self.forward, slots), paged

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Give a snapshot of the store. At its end the device has all that was read."""
        with self.store.snapshot() as snapshot:
            try:
                yield snapshot
            finally:
                self.device_copy.finish()

    def read(self, snapshot: Snapshot, layer: int, span: Span) -> LoadedSpan:
        """Read one layer of a span; what it returns is valid inside `device_copy.in_use()`.

        Raises BadSpanError unless it is in the store, verifies and fits.
        """
        own, *means = self._keys(span)
        kv = self._get(snapshot, layer, span, own)
        if kv is not None:
            return self._loaded(span, own, kv.mean())
        for key in means:
            kv = self._get(snapshot, layer, span, key)
            if kv is not None:
                return self._loaded(span, key, kv.alone())
        raise BadSpanError(span, f"layer {layer} is missing")

    def _loaded(self, span: Span, key: ChunkKey, kv: LayerKV) -> LoadedSpan:
        copied = self.device_copy(key, kv)
        if span.num_tokens:
            copied = copied.part(span.offset, span.offset + span.end - span.start)
        return LoadedSpan(span, copied)

    def stage(self, snapshot: Snapshot, spans: Iterable[Span]) -> None:
        """Start to copy to the device what the store has in memory of these spans. `device_copy.release` ends it."""
        if self.forward.device.type == "cpu":
            return
        keys = [key for span in spans for key in self._keys(span)]
        self.device_copy.stage({key: snapshot.whole(key) for key in keys})

    def prefetch(self, snapshot: Snapshot, layer: int, span: Span) -> None:
        """Start to read one layer of a span from disk."""
        keys = self._keys(span)
        if not any(map(self.device_copy.is_staged, keys)):
            for key in keys:
                snapshot.prefetch(key, layer)

    def _get(self, snapshot: Snapshot, layer: int, span: Span, key: ChunkKey) -> LayerKV | None:
        try:
            kv = snapshot.get(key, layer)
        except CorruptRecordError as error:
            raise BadSpanError(span, f"layer {layer}: {error}", key) from error
        if kv is None:
            return None
        attention = self.forward.layers[layer]
        num_tokens = span.num_tokens or span.end - span.start
        expected = (attention.num_kv_heads, num_tokens, attention.head_size)
        if kv.shape != expected:
            reason = f"layer {layer} has shape {kv.shape}, expected {expected}"
            raise BadSpanError(span, reason, key)
        return kv

    def fuse(
        self,
        layer: int,
        loaded: Sequence[LoadedSpan],
        blocks: Blocks,
        slots: torch.Tensor,
        shifts: Sequence[KVShift | None] | None = None,
    ) -> None:
        """Write one layer of loaded spans into the blocks by the kernel, keys rotated to their new positions.

        slots: `[N]`, of every position; negative ones aren't written. shifts: for each span, how far to move its KV.
        """
        chunks = [
            item.staged(slots[item.span.start : item.span.end], item.distance, shift)
            for item, shift in zip(loaded, shifts or [None] * len(loaded), strict=True)
        ]
        self.write(chunks, self.rotations[layer], blocks.kv(layer))

    def write(self, chunks: Sequence[Staged], rotation: Rotation | None, kv: PagedKV) -> None:
        """Write chunks by the kernel, once for each stored type: means may have a codec of their own."""
        for dtype in {chunk.k.dtype for chunk in chunks}:
            self.kernels.kv_fuse([chunk for chunk in chunks if chunk.k.dtype == dtype], rotation, kv)

    def discard_if_corrupt(self, error: BadSpanError) -> None:
        """Delete a damaged record, so that nobody reads it again and it is precomputed anew."""
        if error.corrupt is not None:
            try:
                self.store.discard(error.corrupt)
            except StoreError as problem:
                logger.warning("bad KV stays in the store: %s", problem)
