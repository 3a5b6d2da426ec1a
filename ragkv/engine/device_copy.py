"""Brings stored KV to the device, on CUDA by a stream of its own, beside what is being computed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ragkv.store.record import LayerKV


class Upload:
    """Copies from the store's memory; the host waits for none of them before `finish`, but for those from memory that
    isn't pinned, which are done at once.

    What was brought is used, and given up, `within` a use. What is brought next may lie in its memory, and so waits, on
    the device, until it was used: the copies of one layer run beside the attention of the one before, and no more than
    two layers are held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used: torch.cuda.Event | None = None

    def __call__(self, kv: LayerKV) -> LayerKV:
        """The same on the device, for kernels of the current stream."""
        if self._stream is None:
            return kv.map(lambda tensor: tensor.to(self._device))
        if self._used is not None:
            self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            found = kv.map(lambda tensor: tensor.to(self._device, non_blocking=True))
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return found

    @contextmanager
    def within(self) -> Iterator[None]:
        """The kernels that use what is brought are launched in here."""
        try:
            yield
        finally:
            if self._stream is not None:
                self._used = torch.cuda.current_stream(self._device).record_event()

    def finish(self) -> None:
        """Wait until the store's memory isn't read any more: then it may become another record's."""
        if self._stream is not None:
            self._stream.synchronize()
