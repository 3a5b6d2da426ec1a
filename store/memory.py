"""Memory that records are read into: taken whole, in huge pages where the system has them, and reused.

Taken page by page, it would cost the first request of a chunk more than all later ones save.
"""

import errno
import logging
import mmap

import torch

from ragkv.store.entries import padded

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap doesn't name
_BLOCK_BYTES = 8 << 20
_KEPT_BYTES = 64 << 20


def take_memory(num_bytes: int, *, pinned: bool = False) -> memoryview:
    """Allocate memory at once. pinned: a GPU reads it by itself. Raises MemoryError (or torch's RuntimeError) if the
    system hasn't got that much."""
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
        try:
            memory.madvise(advice)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
            logger.debug("memory is taken page by page: %s", error)  # an old system
    return memoryview(memory)


class Staging:
    """Room for records that are used at the same time, such as one layer of a request's chunks. Grows as needed;
    between two requests at most `_KEPT_BYTES` are kept. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[memoryview] = []
        self._block = self._used = 0  # the one that is being filled, and how far

    def take(self, num_bytes: int) -> memoryview:
        """Return memory that nobody else gets before `reuse`."""
        while True:
            if self._block == len(self._blocks):
                self._blocks.append(take_memory(max(num_bytes, _BLOCK_BYTES)))
            block, start = self._blocks[self._block], self._used
            if start + num_bytes <= len(block):
                self._used = padded(start + num_bytes)
                return block[start : start + num_bytes]
            self._block, self._used = self._block + 1, 0

    def reuse(self) -> None:
        """Let all that was taken be taken again."""
        self._block = self._used = 0

    def shrink(self) -> None:
        """Let all be taken again, and give back what is more than `_KEPT_BYTES`."""
        self.reuse()
        while sum(map(len, self._blocks)) > _KEPT_BYTES:
            self._blocks.pop()
