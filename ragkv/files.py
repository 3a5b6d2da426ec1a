"""Files that are written whole or not at all, and files of SQLite."""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_WAIT_S, _PAUSE_S = 60, 0.01  # for another process that writes


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


class Database:
    """A connection to a file of SQLite, or with `:memory:` to none, which threads may share. Opening it makes the file
    if there is none.

    Raises nothing but sqlite3.Error, also if another process writes for longer than a minute.
    """

    def __init__(self, file: Path | str) -> None:
        self._lock = threading.RLock()
        self.connection = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)

    def make_durable(self) -> None:
        """Let what is committed survive kill -9 and loss of power, and others read while somebody writes (WAL)."""
        end = time.monotonic() + _WAIT_S
        while True:
            try:
                self.run("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                # While another connection does the same to a new file, SQLite refuses at once, whatever the timeout.
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # Python's own errors have none
                if code & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= end:
                    raise
            time.sleep(_PAUSE_S)
        self.run("PRAGMA synchronous = FULL")

    def run(self, statement: str, *values: object) -> list[Any]:
        """Return the rows that a statement yields."""
        try:
            with self._lock, closing(self.connection.execute(statement, values)) as cursor:
                return cursor.fetchall()
        except UnicodeDecodeError as error:  # from Python, of a message of SQLite's that quotes what went bad
            raise sqlite3.DatabaseError(f"it holds text that went bad: {error}") from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer of all processes; commit at the end what was changed inside, or nothing after an error."""
        with self._lock:
            self.run("BEGIN IMMEDIATE")
            try:
                yield
                self.run("COMMIT")
            except BaseException:
                if self.connection.in_transaction:  # SQLite ends one itself after some errors
                    self.run("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            self.connection.close()
