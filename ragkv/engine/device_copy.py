"""Copies stored KV to the device, on CUDA by a stream of its own, while something else is computed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ragkv.store.record import LayerKV


class DeviceCopy:
    """Asynchronous copies from the store's memory, which the host only waits for in `finish`.

    Copies from memory that isn't pinned are done at once. What was copied is used inside `in_use`, and given up at its
    end: the next copy may take its memory, and waits, on the device, for the kernels launched there. So the copies of
    one layer run during the attention of the one before, and no more than two layers are held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used: torch.cuda.Event | None = None

    def __call__(self, kv: LayerKV) -> LayerKV:
        """Return the same on the device, for kernels of the current stream."""
        if self._stream is None:
            return kv.map(lambda tensor: tensor.to(self._device))
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
