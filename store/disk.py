"""A store's folder: records in segment files, and the index of where each chunk's records are, changed together.

A chunk's records, one for each layer, are in one extent, in the order in which they are read. They are written and
synced before the index names them, and the index forgets them before they are freed: a process killed at any moment
leaves no half-written chunk in the index. The index's lock on writers covers the segments too.
"""

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.index import Changes, Index, Location, is_damage
from ragkv.store.record import ChunkKey
from ragkv.store.segments import FreeSpace, SegmentFiles

INDEX_NAME = "index.db"
_NEARLY_FULL_BYTES = 64 << 20


class Disk:
    """An open folder (`ragkv.store.opening.open_disk`). lock: the descriptor of a shared lock, held until `close`.

    Threads may share it; any number of processes may have the folder open, and write in turn.
    """

    def __init__(self, path: Path, files: SegmentFiles, index: Index, lock: int) -> None:
        self.path, self.files, self.index = path, files, index
        self._lock = lock  # -1: closed
        self._write_lock = threading.Lock()
        self._free: FreeSpace | None = None  # as of `_version` of the index
        self._version = -1

    @property
    def is_open(self) -> bool:
        return self._lock >= 0

    def locate(self, key: ChunkKey) -> Location | None:
        """Return where a chunk's records are, None if it isn't stored or the index can't be read."""
        return self.index.locate(key.prefix())

    @contextmanager
    def writing(self) -> Iterator[tuple[Changes, FreeSpace]]:
        """Be the one writer of all processes. What is taken of the free space stays taken only after a commit."""
        with self._write_lock:
            free, self._free = self._free, None
            with self.index.writing() as changes:
                version = changes.others_version
                if free is None or version != self._version:
                    free = FreeSpace(changes.extents())
                yield changes, free
            self._free, self._version = free, version

    def sweep(self) -> None:
        """Free the extents that the index has given up."""
        if not self.index.num_freed():
            return
        with self.writing() as (changes, free):
            for extent in changes.freed():
                self.files.free(extent)
                free.give(extent)
            changes.forget_freed()

    def errors(self, verb: str) -> AbstractContextManager[None]:
        """Return a context that raises StoreError for what the system and SQLite raise."""
        return store_errors(self.path, verb)

    def close(self) -> None:
        self.files.close()
        self.index.close()
        if self.is_open:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def store_errors(path: Path, verb: str) -> Iterator[None]:
    """Raise StoreError, with the remedy, for what the system and SQLite raise inside."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        free = shutil.disk_usage(path).free if path.exists() else 0
        # A full disk may be an I/O error to SQLite.
        full = free < _NEARLY_FULL_BYTES or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Is it a ragkv store that you may write to?"
        if is_damage(error, path / INDEX_NAME):
            remedy = "Its index is damaged. Stop all that uses it and start again: it is then made anew"
        elif full:
            remedy = "Free some space, or choose another --home"
        raise StoreError(
            f"can't {verb} the KV store {path} ({free >> 20} MiB free on its disk): {error}. {remedy}"
        ) from error
