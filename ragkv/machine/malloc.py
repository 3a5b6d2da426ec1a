"""What the C library keeps of memory that was freed."""

import ctypes
import logging

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # glibc's malloc.h
_LARGE, _NUM_ARENAS = 128 << 10, 2  # bytes, glibc's first threshold; heaps that all threads share

logger = logging.getLogger(__name__)


def return_large_blocks() -> None:
    """From now on large blocks go back to the system as soon as they are freed, and threads share their heaps.

    glibc raises what it calls large, up to 32 MiB, with each block that is freed, and has heaps for every thread; a
    server of many threads and tensors of all sizes grows for as long as it fragments them (mallopt(3)). Where the C
    library is another one nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        logger.debug("the C library has no mallopt")
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def return_free_pages() -> None:
    """Give the system what is free between blocks that are in use (malloc_trim(3)): 20 ms in a process of 4 GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
