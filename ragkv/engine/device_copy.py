"""Copies of the store's KV on the device: of whole entries ahead of their use, or of one layer when it is asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ragkv.store.base import Whole
from ragkv.store.record import ChunkKey, LayerKV

PARTS = 8
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
        self._staged: dict[ChunkKey, StagedEntry] = {}
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
        parts = CopiedParts(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if self._used is not None:
                self._stream.wait_event(self._used)
            added = []
            for key, whole in new.items():
                room -= len(whole.memory)
                if room >= 0:
                    self._staged[key] = staged = StagedEntry(whole, self._device, parts)
                    added.append((whole.memory, staged))
            for part in range(PARTS if added else 0):
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


class CopiedParts:
    """The events at which the parts of some staged entries are on the device, and how many the stream has waited
    for."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._num_waited = stream, 0
        self.copied: list[torch.cuda.Event] = []

    def wait_for(self, part: int) -> None:
        if part >= self._num_waited:
            self._stream.wait_event(self.copied[part])
            self._num_waited = part + 1


class StagedEntry:
    """A whole entry on the device, or on its way there."""

    def __init__(self, whole: Whole, device: torch.device, parts: CopiedParts) -> None:
        self.version, self.size_bytes, self._parts = whole.version, len(whole.memory), parts
        self._memory = whole.memory.data_ptr()
        self._block = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def copy(self, memory: torch.Tensor, part: int) -> None:
        """Start to copy one of `PARTS` parts of the entry's memory."""
        first, end = (i * self.size_bytes // PARTS for i in (part, part + 1))
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
        self._parts.wait_for(min(PARTS - 1, end * PARTS // self.size_bytes))
        return on_device
