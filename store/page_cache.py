"""What the system's page cache has of a file. To ask doesn't read: a read that mustn't wait (`RWF_NOWAIT`) would bring
what it asks for, so that a file that is asked about often enough would seem to be there."""

import ctypes
import mmap
import os
from contextlib import closing

_mincore = getattr(ctypes.CDLL(None), "mincore", None)


def cached_bytes(descriptor: int) -> int | None:
    """Return how many bytes of an open file are in the page cache, in whole pages; None if the system can't tell.

    The file is mapped for it, and never touched: one that is cut off meanwhile does no harm.
    """
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    if _mincore is None:
        return None
    try:  # private and writable, which is what ctypes takes an address of; nothing is written
        mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError:
        return None
    with closing(mapped):
        pages = bytearray(-(-size // mmap.PAGESIZE))
        first, vector = ctypes.c_char.from_buffer(mapped), (ctypes.c_char * len(pages)).from_buffer(pages)
        failed = _mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector)
        del first, vector  # or neither could be closed
    return None if failed else mmap.PAGESIZE * (len(pages) - pages.count(0))
