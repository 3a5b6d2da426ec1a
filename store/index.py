"""Where each chunk's records lie, in SQLite: one row for each chunk, and what has been given up and not freed yet.

SQLite and not LMDB: bytes that go bad in it are an error and never a crash (docs/decisions/0010). A row also has a
checksum of its own, so that a wrong place is a chunk that isn't there.
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
_PLACE = struct.Struct("<IQQ")  # segment, offset, serial; then each layer's length, uint32; then a checksum, uint64
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
    """The index holds what nobody wrote. Chunks are found again by their records."""


@dataclass(frozen=True)
class Location:
    """Where a chunk lies: its layers one after the other, each padded. lengths: without padding.

    serial: at random, so that what is put where something lay before is told from it.
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
        """Where in the extent each layer's record begins, and where the last one ends."""
        return (0, *accumulate(map(padded, self.lengths)))

    def layer(self, index: int) -> tuple[int, int, int]:
        """Segment, offset and length."""
        return self.segment, self.offset + self.starts[index], self.lengths[index]

    def pack(self, key: bytes) -> bytes:
        place = _PLACE.pack(self.segment, self.offset, self.serial) + struct.pack(
            f"<{len(self.lengths)}I", *self.lengths
        )
        return place + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + place))

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> "Location | None":
        """None for anything that `pack` didn't make of this key."""
        if not (isinstance(key, bytes) and isinstance(value, bytes)) or len(value) < _PLACE.size + _CHECKSUM.size:
            return None
        place = value[: -_CHECKSUM.size]
        if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + place)) != value[-_CHECKSUM.size :]:
            return None
        lengths = struct.unpack_from(f"<{(len(place) - _PLACE.size) // 4}I", place, _PLACE.size)
        segment, offset, serial = _PLACE.unpack_from(place)
        return cls(segment, offset, lengths, serial)


class Index:
    """The file. Threads may share it. Raises sqlite3.Error for what the system doesn't allow, DamagedIndexError on
    opening a file that isn't whole. version: of the records; an index of other ones is left as it is."""

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
                return  # it may look otherwise: callers refuse it
            _check_schema(changes)
            for key in changes.bad_keys():
                changes.query("delete from chunk where key is ?", key)
            if changes.bad_keys():  # out of order, where a search doesn't find them and may miss others
                raise DamagedIndexError("rows that don't verify can't be removed")
            changes.freed()
        problems = [row[0] for row in self._read("pragma integrity_check")]
        if problems != ["ok"]:
            raise DamagedIndexError("; ".join(map(str, problems[:3])))

    def meta(self, name: str) -> str | None:
        rows = self._read("select value from meta where name = ?", name)
        return str(rows[0][0]) if rows else None

    def place(self, key: bytes) -> Location | None:
        """None also where the index has gone bad: that is a chunk to compute."""
        try:
            rows = self._read("select place from chunk where key = ?", key)
        except sqlite3.Error as error:
            logger.warning("can't look into %s: %s", self._file, error)
            return None
        return Location.unpack(key, rows[0][0]) if rows else None

    def hint(self, key: bytes) -> Hint | None:
        """How a chunk is to be treated (`ragkv.store.usage`). None also where the index has gone bad."""
        try:
            rows = self._read("select hint from usage where key = ?", key)
        except sqlite3.Error:
            return None
        return rows[0][0] if rows and rows[0][0] in HINTS else None

    def others_version(self) -> int:
        """Differs once another process, or another store of this one, has written."""
        with self._write_lock:
            return _data_version(self._writer)

    def chunks(self, *, evicted: bool = False) -> list[bytes]:
        """The keys of all, in order; with `evicted` also of those that were evicted."""
        statement = "select key from chunk" + (" union select key from usage" if evicted else "")
        keys = (key for (key,) in self._read(f"{statement} order by key"))
        return [key for key in keys if isinstance(key, bytes) and len(key) == _KEY_BYTES]

    def counts(self) -> tuple[int, int]:
        """How many contexts are here, and how many had to make room and aren't back."""
        evicted = "select count(*) from usage where key not in (select key from chunk)"
        ((here,),), ((gone,),) = self._read("select count(*) from chunk"), self._read(evicted)
        return here, gone

    def num_freed(self) -> int:
        return int(self._read("select count(*) from freed")[0][0])

    def places(self) -> list[tuple[bytes, Location]]:
        """Of all chunks, by key."""
        return _places(self._read("select key, place from chunk order by key"))

    def size_on_disk(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self._file.parent.glob(f"{self._file.name}*"))

    @contextmanager
    def writing(self) -> Iterator["Changes"]:
        """One transaction, of the one writer among all processes."""
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
        """Differs once another connection has written."""
        return _data_version(self.connection)

    def set_meta(self, name: str, value: str) -> None:
        self.query("insert or replace into meta values (?, ?, ?)", name, value, _meta_checksum(name, value))

    def put(self, key: bytes, place: Location) -> None:
        """Add or replace a chunk."""
        self._give_up(self.query("select key, place from chunk where key = ?", key))
        self.query("insert or replace into chunk values (?, ?)", key, place.pack(key))

    def delete(self, prefix: bytes) -> list[Location]:
        """Forget all chunks whose keys begin so."""
        bounds = (prefix, prefix + b"\xff" * 64)
        rows = self.query("select key, place from chunk where key between ? and ?", *bounds)
        self.query("delete from chunk where key between ? and ?", *bounds)
        return self._give_up(rows)

    def _give_up(self, rows: list[tuple]) -> list[Location]:  # type: ignore[type-arg]
        """Note what is to be freed once the index that doesn't name it any more is on disk."""
        places = _places(rows)
        for key, place in places:
            self.query("insert into freed (key, place) values (?, ?)", key, place.pack(key))
        return [place for _, place in places]

    def places(self) -> list[tuple[bytes, Location]]:
        return _places(self.query("select key, place from chunk order by key"))

    def bad_keys(self) -> list[object]:
        """Of rows that went bad."""
        return [key for key, value in self.query("select key, place from chunk") if not Location.unpack(key, value)]

    def freed(self) -> list[Extent]:
        return [place.extent for _, place in _places(self.query("select key, place from freed"))]

    def forget_freed(self) -> None:
        self.query("delete from freed")

    def extents(self) -> list[Extent]:
        """What holds a record, or did and is still to be freed; sorted."""
        return sorted([*(place.extent for _, place in self.places()), *self.freed()])


def _data_version(connection: sqlite3.Connection) -> int:
    return int(_query(connection, "pragma data_version")[0][0])


def _places(rows: list[tuple]) -> list[tuple[bytes, Location]]:  # type: ignore[type-arg]
    """Without rows that went bad."""
    found = ((key, Location.unpack(key, value)) for key, value in rows)
    return [(key, place) for key, place in found if place is not None]


def _query(connection: sqlite3.Connection, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
    """Raises nothing but sqlite3.Error."""
    try:
        with closing(connection.execute(statement, values)) as cursor:
            return cursor.fetchall()
    except UnicodeDecodeError as error:  # from Python, of a message of SQLite's that quotes what went bad
        raise sqlite3.DatabaseError(f"the index holds text that went bad: {error}") from error


def _check_schema(changes: Changes) -> None:
    """Raises DamagedIndexError if the tables aren't as they were made: SQLite takes whatever it can read."""
    schema = changes.query("select lower(sql) from sqlite_master where sql is not null order by name")
    if schema != [(statement,) for statement in _SCHEMA]:
        raise DamagedIndexError("its tables are not those of an index")


def _checked_meta(changes: Changes) -> dict[str, str]:
    """Raises DamagedIndexError if that isn't what was set."""
    rows = changes.query("select name, value, checksum from meta")
    if any(checksum != _meta_checksum(name, value) for name, value, checksum in rows):
        raise DamagedIndexError("what it says of itself doesn't verify")
    return {name: value for name, value, _ in rows}


def _meta_checksum(name: object, value: object) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(repr((name, value)).encode()))


def is_damage(error: Exception, file: Path) -> bool:
    """Whether it says that the index holds what nobody wrote, and not that the system doesn't let it be used."""
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return True
    if code == sqlite3.SQLITE_READONLY:  # a damaged header may say so too
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return code & 0xFF not in _NOT_DAMAGE
