"""Files that are written whole or not at all, and what SQLite doesn't wait for by itself."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

USE_WAL = "PRAGMA journal_mode = WAL"
_PAUSE_S = 0.01


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` once it is written and on disk; after an error `path` is what it was.

    It is written as `<path>.tmp`, by one writer at a time: where several may come, the caller holds a lock.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write a folder's entries to disk; without it a file's new name may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def when_free(action: Callable[[], object], wait_s: float) -> None:
    """Call `action`, again and again while another connection is in the way.

    Raises sqlite3.Error: any other at once, and that of a connection in the way after `wait_s`.

    For `USE_WAL`: while another connection does the same to a new file, SQLite refuses at once, whatever the timeout.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # Python's own errors have none
            if code & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= end:
                raise
        time.sleep(_PAUSE_S)
