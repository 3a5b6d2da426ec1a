"""Where each entry's records are, in SQLite: a row for each entry, and the extents given up and not freed yet.

SQLite and not LMDB: bytes that go bad in it are an error and never a crash (docs/decisions/0010). A row also has a
checksum of its own, so that a wrong location is an entry that isn't stored.
"""

import logging
import os
import random
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import xxhash

from ragkv.files import USE_WAL, when_free
from ragkv.store.eviction import HINTS, Hint
from ragkv.store.record import KEY_BYTES
from ragkv.store.segments import Extent, padded

logger = logging.getLogger(__name__)

_SCHEMA = (
    "create table chunk (key blob primary key, place blob not null) without rowid",
    "create table freed (id integer primary key, key blob not null, place blob not null)",
    "create table meta (name text primary key, value text not null, checksum blob not null) without rowid",
    "create table usage (key blob primary key, size integer, cost real, uses integer, used_at real, priority real, "
    "hint text) without rowid",
    "create index usage_priority on usage (priority)",
)
FORMAT = "format"  # in `meta`
_LOCATION = struct.Struct("<IQQ")  # segment, offset, serial; then each layer's length, uint32; then a checksum, uint64
_CHECKSUM = struct.Struct("<Q")
_KEY_BYTES = KEY_BYTES - 2  # without the layer
_WAIT_S = 60  # for another process that writes
_NOT_DAMAGE = {  # what keeps a file that is whole from being used
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}


class DamagedIndexError(Exception):
    """The index holds what nobody wrote. Entries are found again by their records."""


@dataclass(frozen=True)
class Location:
    """Where an entry's records are: its layers one after the other, each padded. lengths: in bytes, without padding.

    serial: random, so that an entry differs from an earlier one in the same extent.
    """

    segment: int
    offset: int
    lengths: tuple[int, ...]
    serial: int = field(default_factory=lambda: random.getrandbits(64))

    @property
    def extent(self) -> Extent:
        return Extent(self.segment, self.offset, self.starts[-1])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return where in the extent each layer's record begins, and where the last one ends."""
        return (0, *accumulate(map(padded, self.lengths)))

    def layer(self, index: int) -> tuple[int, int, int]:
        """Return a record's segment, offset and length."""
        return self.segment, self.offset + self.starts[index], self.lengths[index]

    def pack(self, key: bytes) -> bytes:
        """Return the bytes of the index's row for the entry `key`."""
        lengths = struct.pack(f"<{len(self.lengths)}I", *self.lengths)
        packed = _LOCATION.pack(self.segment, self.offset, self.serial) + lengths
        return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + packed))

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> "Location | None":
        """Return the location that `pack` made these bytes of, None for any other bytes."""
        if not (isinstance(key, bytes) and isinstance(value, bytes)) or len(value) < _LOCATION.size + _CHECKSUM.size:
            return None
        packed = value[: -_CHECKSUM.size]
        if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + packed)) != value[-_CHECKSUM.size :]:
            return None
        lengths = struct.unpack_from(f"<{(len(packed) - _LOCATION.size) // 4}I", packed, _LOCATION.size)
        segment, offset, serial = _LOCATION.unpack_from(packed)
        return cls(segment, offset, lengths, serial)


class Index:
    """The index's file; threads may share it. version: of the records; an index of other records is left as it is.

    Raises sqlite3.Error for what the system doesn't allow, DamagedIndexError on opening a file that isn't whole.
    """

    def __init__(self, file: Path, version: str) -> None:
        self._file, self._version = file, version
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        try:
            self._reader, self._writer = self._connect(), self._connect()
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            if is_damage(error, file):
                raise DamagedIndexError(str(error)) from error
            raise
        except BaseException:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._file, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        self._connections.append(connection)
        when_free(lambda: _query(connection, USE_WAL), _WAIT_S)
        for pragma in ("synchronous = full", "cell_size_check = on"):
            _query(connection, f"pragma {pragma}")
        return connection

    def _prepare(self) -> None:
        with self.writing() as changes:
            if not changes.query("select 1 from sqlite_master limit 1"):
                for statement in _SCHEMA:
                    changes.query(statement)
            if _checked_meta(changes).get(FORMAT, self._version) != self._version:
                return  # its tables may be others: callers refuse it
            _check_schema(changes)
            for key in changes.bad_keys():
                changes.query("delete from chunk where key is ?", key)
            if changes.bad_keys():  # out of order: a search doesn't find them and may miss others
                raise DamagedIndexError("rows that don't verify can't be removed")
            changes.freed()
        problems = [row[0] for row in self._read("pragma integrity_check")]
        if problems != ["ok"]:
            raise DamagedIndexError("; ".join(map(str, problems[:3])))

    def meta(self, name: str) -> str | None:
        rows = self._read("select value from meta where name = ?", name)
        return str(rows[0][0]) if rows else None

    def locate(self, key: bytes) -> Location | None:
        """Return where an entry is. None also if the index is damaged: then the chunk is computed."""
        try:
            rows = self._read("select place from chunk where key = ?", key)
        except sqlite3.Error as error:
            logger.warning("can't look into %s: %s", self._file, error)
            return None
        return Location.unpack(key, rows[0][0]) if rows else None

    def hint(self, key: bytes) -> Hint | None:
        """Return how an entry is to be treated (`ragkv.store.usage`). None also if the index is damaged."""
        try:
            rows = self._read("select hint from usage where key = ?", key)
        except sqlite3.Error:
            return None
        return rows[0][0] if rows and rows[0][0] in HINTS else None

    def others_version(self) -> int:
        """Return a number that differs once another process, or another store of this one, has written; -1 if the index
        can't be read."""
        try:
            with self._write_lock:
                return _data_version(self._writer)
        except sqlite3.Error as error:
            logger.warning("can't look into the index: %s", error)
            return -1

    def chunks(self, *, evicted: bool = False) -> list[bytes]:
        """Return the keys of all entries, in order; with `evicted` also of evicted ones."""
        statement = "select key from chunk" + (" union select key from usage" if evicted else "")
        keys = (key for (key,) in self._read(f"{statement} order by key"))
        return [key for key in keys if isinstance(key, bytes) and len(key) == _KEY_BYTES]

    def counts(self) -> tuple[int, int]:
        """Count the entries that are stored, and those that were evicted and aren't stored again."""
        statement = "select count(*) from usage where key not in (select key from chunk)"
        ((stored,),), ((evicted,),) = self._read("select count(*) from chunk"), self._read(statement)
        return stored, evicted

    def num_freed(self) -> int:
        return int(self._read("select count(*) from freed")[0][0])

    def locations(self) -> list[tuple[bytes, Location]]:
        """Return the keys and locations of all entries, by key."""
        return _unpack_rows(self._read("select key, place from chunk order by key"))

    def size_on_disk(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self._file.parent.glob(f"{self._file.name}*"))

    @contextmanager
    def writing(self) -> Iterator["Changes"]:
        """Begin a transaction as the one writer of all processes; commit it at the end."""
        with self._write_lock:
            _query(self._writer, "begin immediate")
            try:
                yield Changes(self._writer)
                _query(self._writer, "commit")
            except BaseException:
                if self._writer.in_transaction:  # SQLite ends one itself after some errors
                    _query(self._writer, "rollback")
                raise

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _read(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._read_lock:
            return _query(self._reader, statement, *values)


class Changes:
    """A write transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        return _query(self.connection, statement, *values)

    @property
    def others_version(self) -> int:
        """Return a number that differs once another connection has written."""
        return _data_version(self.connection)

    def set_meta(self, name: str, value: str) -> None:
        self.query("insert or replace into meta values (?, ?, ?)", name, value, _meta_checksum(name, value))

    def put(self, key: bytes, location: Location) -> None:
        """Add or replace an entry."""
        self._give_up(self.query("select key, place from chunk where key = ?", key))
        self.query("insert or replace into chunk values (?, ?)", key, location.pack(key))

    def delete(self, prefix: bytes) -> list[Location]:
        """Delete all entries whose keys begin with `prefix`; return where they were."""
        bounds = (prefix, prefix + b"\xff" * 64)
        rows = self.query("select key, place from chunk where key between ? and ?", *bounds)
        self.query("delete from chunk where key between ? and ?", *bounds)
        return self._give_up(rows)

    def _give_up(self, rows: list[tuple]) -> list[Location]:  # type: ignore[type-arg]
        """Note what is to be freed once the index that doesn't name it any more is on disk."""
        locations = _unpack_rows(rows)
        for key, location in locations:
            self.query("insert into freed (key, place) values (?, ?)", key, location.pack(key))
        return [location for _, location in locations]

    def locations(self) -> list[tuple[bytes, Location]]:
        return _unpack_rows(self.query("select key, place from chunk order by key"))

    def bad_keys(self) -> list[object]:
        """Return the keys of damaged rows."""
        return [key for key, value in self.query("select key, place from chunk") if not Location.unpack(key, value)]

    def freed(self) -> list[Extent]:
        return [location.extent for _, location in _unpack_rows(self.query("select key, place from freed"))]

    def forget_freed(self) -> None:
        self.query("delete from freed")

    def extents(self) -> list[Extent]:
        """Return the extents that hold records, or did and are still to be freed, sorted."""
        return sorted([*(location.extent for _, location in self.locations()), *self.freed()])


def _data_version(connection: sqlite3.Connection) -> int:
    return int(_query(connection, "pragma data_version")[0][0])


def _unpack_rows(rows: list[tuple]) -> list[tuple[bytes, Location]]:  # type: ignore[type-arg]
    """Leaves damaged rows out."""
    unpacked = ((key, Location.unpack(key, value)) for key, value in rows)
    return [(key, location) for key, location in unpacked if location is not None]


def _query(connection: sqlite3.Connection, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
    """Raises nothing but sqlite3.Error."""
    try:
        with closing(connection.execute(statement, values)) as cursor:
            return cursor.fetchall()
    except UnicodeDecodeError as error:  # from Python, of a message of SQLite's that quotes what went bad
        raise sqlite3.DatabaseError(f"the index holds text that went bad: {error}") from error


def _check_schema(changes: Changes) -> None:
    """Raise DamagedIndexError if the tables aren't as they were made: SQLite accepts whatever it can read."""
    schema = changes.query("select lower(sql) from sqlite_master where sql is not null order by name")
    if schema != [(statement,) for statement in _SCHEMA]:
        raise DamagedIndexError("its tables are not those of an index")


def _checked_meta(changes: Changes) -> dict[str, str]:
    """Raise DamagedIndexError if `meta` isn't what was set."""
    rows = changes.query("select name, value, checksum from meta")
    if any(checksum != _meta_checksum(name, value) for name, value, checksum in rows):
        raise DamagedIndexError("what it says of itself doesn't verify")
    return {name: value for name, value, _ in rows}


def _meta_checksum(name: object, value: object) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(repr((name, value)).encode()))


def is_damage(error: Exception, file: Path) -> bool:
    """Return whether the error says that the index holds what nobody wrote, and not that the system doesn't let it be
    used."""
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return True
    if code == sqlite3.SQLITE_READONLY:  # a damaged header may say so too
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return code & 0xFF not in _NOT_DAMAGE
