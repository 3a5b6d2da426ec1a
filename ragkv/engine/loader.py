"""Reads chunks' stored KV, one layer of a chunk at a time, copies it to the device and fuses it into blocks.

On CUDA the copies have a stream of their own, so that something else is computed meanwhile.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ragkv.engine.blocks import Blocks, ContiguousKV, PagedBlocks, can_attend, find_views
from ragkv.engine.forward import Forward
from ragkv.engine.task import Job, Span
from ragkv.errors import StoreError
from ragkv.kernels.dispatch import Kernels
from ragkv.kernels.kv_fuse import Addend, KVShift, Staged
from ragkv.kernels.operands import Rotation
from ragkv.store.base import KVStore, Snapshot, Whole
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


_PARTS = 8
_STAGED_BYTES = 4 << 30


class DeviceCopy:
    """Asynchronous copies from the store's memory, which the host only waits for in `finish`.

    On CUDA, entries that are in that memory as a whole can be copied ahead of their use (`stage`), all their first
    parts before their second ones: the first layers are used while the rest is on its way. They are held until
    `release`, up to `_STAGED_BYTES` or half of what the device has free.

    Else a layer is copied when it is asked for, at once from memory that isn't pinned. It is used inside `in_use`, and
    given up at its end: the next copy may take its memory, and waits, on the device, for the kernels launched there. So
    the copies of one layer run during the attention of the one before, and no more than two layers are held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used: torch.cuda.Event | None = None
        self._staged: dict[ChunkKey, _Staged] = {}
        self._room = min(_STAGED_BYTES, torch.cuda.mem_get_info(device)[0] // 2) if self._stream is not None else 0

    def stage(self, entries: Mapping[ChunkKey, Whole | None]) -> None:
        """Start to copy these entries, as far as they are in memory and there is room for them."""
        if self._stream is None:
            return
        new: dict[ChunkKey, Whole] = {}
        for key, whole in entries.items():
            if key in self._staged and (whole is None or self._staged[key].version != whole.version):
                del self._staged[key]
            if whole is not None and key not in self._staged:
                new[key] = whole
        room = self._room - sum(staged.size_bytes for staged in self._staged.values())
        parts = _Parts(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if self._used is not None:
                self._stream.wait_event(self._used)
            added = []
            for key, whole in new.items():
                room -= len(whole.memory)
                if room >= 0:
                    self._staged[key] = staged = _Staged(whole, self._device, parts)
                    added.append((whole.memory, staged))
            for part in range(_PARTS if added else 0):
                for memory, staged in added:
                    staged.copy(memory, part)
                parts.copied.append(self._stream.record_event())

    def is_staged(self, key: ChunkKey) -> bool:
        return key in self._staged

    def release(self) -> None:
        """Give up what was staged."""
        if self._staged:
            self._used = torch.cuda.current_stream(self._device).record_event()
            self._staged.clear()

    def __call__(self, key: ChunkKey, kv: LayerKV) -> LayerKV:
        """Return the same layer of this entry on the device, for kernels of the current stream."""
        if self._stream is None:
            return kv.map(lambda tensor: tensor.to(self._device))
        if (staged := self._staged.get(key)) is not None and staged.has(kv):
            return staged.layer(kv)
        if self._used is not None:
            self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            copied = kv.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return copied

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Launch inside this the kernels that use what was copied."""
        try:
            yield
        finally:
            if self._stream is not None:
                self._used = torch.cuda.current_stream(self._device).record_event()

    def finish(self) -> None:
        """Wait until the store's memory isn't read any more, so that it can be given to another record."""
        if self._stream is not None:
            self._stream.synchronize()


class _Parts:
    """The events at which the parts of some staged entries are on the device, and how many the stream has waited
    for."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._num_waited = stream, 0
        self.copied: list[torch.cuda.Event] = []

    def wait_for(self, part: int) -> None:
        if part >= self._num_waited:
            self._stream.wait_event(self.copied[part])
            self._num_waited = part + 1


class _Staged:
    """A whole entry on the device, or on its way there."""

    def __init__(self, whole: Whole, device: torch.device, parts: _Parts) -> None:
        self.version, self.size_bytes, self._parts = whole.version, len(whole.memory), parts
        self._memory = whole.memory.data_ptr()
        self._block = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def copy(self, memory: torch.Tensor, part: int) -> None:
        """Start to copy one of `_PARTS` parts of the entry's memory."""
        first, end = (i * self.size_bytes // _PARTS for i in (part, part + 1))
        self._block[first:end].copy_(memory[first:end], non_blocking=True)

    def has(self, kv: LayerKV) -> bool:
        """Return whether a layer is a view of the memory that was copied."""
        return 0 <= kv.k.data_ptr() - self._memory < self.size_bytes

    def layer(self, kv: LayerKV) -> LayerKV:
        """Return the same views of the copy."""
        end = 0

        def view(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal end
            start = tensor.data_ptr() - self._memory
            end = max(end, start + tensor.nbytes)
            if (typed := self._typed.get(tensor.dtype)) is None:
                typed = self._typed[tensor.dtype] = self._block.view(tensor.dtype)
            return typed.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize)

        on_device = kv.map(view)
        self._parts.wait_for(min(_PARTS - 1, end * _PARTS // self.size_bytes))
        return on_device


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
            return LoadedSpan(span, self.device_copy(own, kv.mean()))
        for key in means:
            kv = self._get(snapshot, layer, span, key)
            if kv is not None:
                return LoadedSpan(span, self.device_copy(key, kv.alone()))
        raise BadSpanError(span, f"layer {layer} is missing")

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
        expected = (attention.num_kv_heads, span.end - span.start, attention.head_size)
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
        staged = []
        for item, shift in zip(loaded, shifts or [None] * len(loaded), strict=True):
            kv, own = item.kv, slots[item.span.start : item.span.end]
            addend = None
            if (change := kv.difference) is not None:
                addend = Addend(change.rows(len(own)), change.scale, change.numbers)
            grids = (kv.k_scale, kv.v_scale, kv.k_low, kv.v_low)
            staged.append(Staged(kv.k, kv.v, own, item.distance, *grids, shift, addend))
        rotation, paged = self.rotations[layer], blocks.kv(layer)
        for dtype in {chunk.k.dtype for chunk in staged}:  # more than one where means have a codec of their own
            self.kernels.kv_fuse([chunk for chunk in staged if chunk.k.dtype == dtype], rotation, paged)

    def discard_if_corrupt(self, error: BadSpanError) -> None:
        """Delete a damaged record, so that nobody reads it again and it is precomputed anew."""
        if error.corrupt is not None:
            try:
                self.store.discard(error.corrupt)
            except StoreError as problem:
                logger.warning("bad KV stays in the store: %s", problem)
