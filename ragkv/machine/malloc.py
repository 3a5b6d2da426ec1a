"""Settings of the C library's allocator, so that freed memory goes back to the system."""

import ctypes
import logging

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc's malloc.h
_LARGE, _NUM_ARENAS = 128 << 10, 2  # bytes, glibc's first threshold; heaps that all threads share

logger = logging.getLogger(__name__)


def return_large_blocks() -> None:
    """Have large blocks returned to the system as soon as they are freed, and threads share their heaps.

    By default glibc raises the size that it calls large, up to 32 MiB, with each block that is freed, and gives every
    thread heaps of its own: a server with many threads and tensors of all sizes fragments them and grows (mallopt(3)).
    Does nothing if the C library isn't glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        logger.debug("the C library has no mallopt")
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def return_free_pages() -> None:
    """Return free pages between used blocks to the system (malloc_trim(3)); takes 20 ms in a process of 4 GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
