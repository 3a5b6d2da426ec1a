"""A file of LMDB that is checked before its bytes are trusted. Knows nothing of what its rows mean.

LMDB maps its file and follows the page numbers in it, without checksums: a file that went bad can end the process. So
the file is verified before it is opened, unless it is the very one that was verified last; before each transaction its
length is compared with what it should have; and each row has a checksum of its own. What these don't see is in
docs/decisions/0024.
"""

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import xxhash
from lmdb import verify

_MAP_BYTES = 16 << 30  # of addresses, not of memory or disk
_MAX_READERS = 1024
_CHECKSUM = struct.Struct("<Q")
_META_PAGES = 2
# What LMDB says where the system, and not the file, is at fault.
_OF_THE_SYSTEM = (lmdb.DiskError, lmdb.LockError, lmdb.MapFullError, lmdb.MemoryError, lmdb.ReadersFullError)


class TableDamageError(Exception):
    """The file, or a row of it, holds what nobody wrote."""


class _Environment:
    """The file as this process has it open; LMDB allows it once only. users: how many tables share it."""

    def __init__(self, file: Path, names: tuple[str, ...]) -> None:
        self.users = 0
        self.lock = threading.RLock()  # LMDB's own lock of the writers would block a thread that has it already
        self.lmdb = lmdb.open(
            str(file), subdir=False, map_size=_MAP_BYTES, max_dbs=len(names), max_readers=_MAX_READERS, mode=0o600
        )
        try:
            self.descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self.page_bytes = self.lmdb.stat()["psize"]
            self.lmdb.reader_check()  # those of killed processes keep old pages from being used again
            self.check_length()
            self.parts = {name: self.lmdb.open_db(name.encode()) for name in names}
        except BaseException:
            self.lmdb.close()
            raise

    def check_length(self) -> None:
        """Raise TableDamageError for a file that was cut off: reading behind its end would kill the process."""
        size = os.fstat(self.descriptor).st_size
        if size < _META_PAGES * self.page_bytes or size < (self.lmdb.info()["last_pgno"] + 1) * self.page_bytes:
            raise TableDamageError(f"it is cut off at {size} bytes")

    def close(self) -> None:
        self.lmdb.close()
        os.close(self.descriptor)


_opened: dict[str, _Environment] = {}
_opening = threading.Lock()


class Rows:
    """The named part of a table inside one transaction. Keys and values are bytes."""

    def __init__(self, transaction: lmdb.Transaction, part: Any) -> None:
        self._transaction, self._part = transaction, part

    def get(self, key: bytes) -> bytes | None:
        """Return a row's value, None if there is none. Raises TableDamageError if it isn't what was put."""
        value = self._transaction.get(key, db=self._part)
        return None if value is None else _checked(key, bytes(value))

    def put(self, key: bytes, value: bytes) -> None:
        self._transaction.put(key, value + _checksum(key, value), db=self._part)

    def delete(self, key: bytes) -> None:
        self._transaction.delete(key, db=self._part)

    def items(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose keys begin so, in the order of their keys. Nothing may be written meanwhile."""
        with self._transaction.cursor(db=self._part) as cursor:
            if cursor.set_range(prefix):
                for row in cursor:
                    key, value = map(bytes, row)
                    if not key.startswith(prefix):
                        return
                    yield key, _checked(key, value)

    def __len__(self) -> int:
        return int(self._transaction.stat(db=self._part)["entries"])


class Table:
    """The rows of a file, in named parts. Threads and processes may share the file, and threads a table.

    Opening it makes the file if there is none. is_alone: nobody else has the file open, or opens it meanwhile; then it
    is verified first. Raises TableDamageError or lmdb.Error for a file that can't be used; see `is_damage`.
    """

    def __init__(self, file: Path, parts: tuple[str, ...], *, is_alone: bool) -> None:
        self._file = file
        unverified = is_alone and file.exists() and (digest := _digest(file)) != _seal(file)
        if unverified:
            _verify(file)
        if is_alone:
            lock_file(file).unlink(missing_ok=True)  # it holds nothing yet, and may be damaged as well
        with _opening:
            name = os.path.realpath(file)
            self._environment = _opened.get(name) or _Environment(file, parts)
            _opened[name] = self._environment
            self._environment.users += 1
        try:
            if unverified:
                self._check_rows()
                _seal_file(file).write_bytes(digest)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[dict[str, Rows]]:
        """Yield the parts by name, as they are now, whatever is written meanwhile."""
        with self._transaction(write=False) as parts:
            yield parts

    @contextmanager
    def writing(self) -> Iterator[dict[str, Rows]]:
        """Be the one writer of all processes; commit at the end what was changed inside, or nothing after an error."""
        with self._environment.lock, self._transaction(write=True) as parts:
            yield parts

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[dict[str, Rows]]:
        environment = self._environment
        environment.check_length()
        with environment.lmdb.begin(write=write) as transaction:
            yield {name: Rows(transaction, part) for name, part in environment.parts.items()}

    def _check_rows(self) -> None:
        with self.reading() as parts:
            for rows in parts.values():
                for _ in rows.items():
                    pass

    def close(self) -> None:
        with _opening:
            self._environment.users -= 1
            if not self._environment.users:
                del _opened[os.path.realpath(self._file)]
                self._environment.close()


def lock_file(file: Path) -> Path:
    """Return where LMDB keeps who reads and writes."""
    return file.with_name(f"{file.name}-lock")


def remove(file: Path) -> None:
    """Remove a table. Nobody may have it open."""
    for part in (file, lock_file(file), _seal_file(file)):
        part.unlink(missing_ok=True)


def is_damage(error: Exception) -> bool:
    """Return whether the error says that the file holds what nobody wrote, and not that the system doesn't let it be
    used."""
    return isinstance(error, (TableDamageError, lmdb.Error)) and not isinstance(error, _OF_THE_SYSTEM)


def _seal_file(file: Path) -> Path:
    return file.with_name(f"{file.name}-seal")


def _seal(file: Path) -> bytes:
    """Return the digest of the file as it was when it was verified last."""
    try:
        return _seal_file(file).read_bytes()
    except FileNotFoundError:
        return b""


def _digest(file: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _verify(file: Path) -> None:
    """Raise TableDamageError unless LMDB can follow every page of the file."""
    try:
        problems: list[str] = verify.verify(str(file), subdir=False)  # type: ignore[no-untyped-call]
    except verify.VerifyError as error:
        problems = [str(error)]
    if problems:
        raise TableDamageError(f"{len(problems)} problems, the first: {problems[0]}")


def _checksum(key: bytes, value: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + value))


def _checked(key: bytes, value: bytes) -> bytes:
    """Return what was put under the key, without its checksum."""
    value, checksum = value[: -_CHECKSUM.size], value[-_CHECKSUM.size :]
    if _checksum(key, value) != checksum:
        raise TableDamageError(f"the row {key[:16].hex()} doesn't verify")
    return value
