"""Where each chunk's records lie, in SQLite: one row for each chunk, and what has been given up and not freed yet.

SQLite and not LMDB: bytes that go bad in it are an error and never a crash (docs/decisions/0010). A row also has a
checksum of its own, so that a wrong place is a chunk that isn't there.
"""

import logging
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ragkv.store.segments import Extent, padded

logger = logging.getLogger(__name__)

_SCHEMA = """
create table meta (name text primary key, value text not null) without rowid;
create table chunk (key blob primary key, place blob not null) without rowid;
create table freed (id integer primary key, key blob not null, place blob not null);
create table usage (key blob primary key, size integer, cost real, uses integer, used_at real, priority real, hint text)
  without rowid;
create index usage_priority on usage (priority);
"""
_PLACE = struct.Struct("<IQ")  # segment, offset; then each layer's length, uint32; then a checksum, uint64
_CHECKSUM = struct.Struct("<Q")
_WAIT_S = 60  # for another process that writes


class DamagedIndexError(Exception):
    """The index holds what nobody wrote. Chunks are found again by their records."""


@dataclass(frozen=True)
class Place:
    """Where a chunk lies: its layers one after the other, each padded. lengths: without padding."""

    segment: int
    offset: int
    lengths: tuple[int, ...]

    @property
    def extent(self) -> Extent:
        return Extent(self.segment, self.offset, sum(map(padded, self.lengths)))

    def layer(self, index: int) -> tuple[int, int, int]:
        """Segment, offset and length."""
        return self.segment, self.offset + sum(map(padded, self.lengths[:index])), self.lengths[index]

    def pack(self, key: bytes) -> bytes:
        place = _PLACE.pack(self.segment, self.offset) + struct.pack(f"<{len(self.lengths)}I", *self.lengths)
        return place + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + place))

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> "Place | None":
        """None for anything that `pack` didn't make of this key."""
        if not (isinstance(key, bytes) and isinstance(value, bytes)) or len(value) < _PLACE.size + _CHECKSUM.size:
            return None
        place = value[: -_CHECKSUM.size]
        if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(key + place)) != value[-_CHECKSUM.size :]:
            return None
        lengths = struct.unpack_from(f"<{(len(place) - _PLACE.size) // 4}I", place, _PLACE.size)
        segment, offset = _PLACE.unpack_from(place)
        return cls(segment, offset, lengths)


class Index:
    """The file. Threads may share it. Raises sqlite3.Error for what the system doesn't allow, DamagedIndexError on
    opening a file that isn't whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        try:
            self._reader, self._writer = self._connect(), self._connect()
            self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise _damage(error) or error from error
        except BaseException:
            self.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._file, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
        self._connections.append(connection)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        connection.execute("pragma cell_size_check = on")
        return connection

    def _prepare(self) -> None:
        with self.writing() as changes:
            if not changes.query("select 1 from sqlite_master limit 1"):
                for statement in _SCHEMA.split(";"):
                    changes.query(statement)
            bad = [key for key, value in changes.query("select key, place from chunk") if not Place.unpack(key, value)]
            for key in bad:
                changes.query("delete from chunk where key is ?", key)
            changes.freed()
            changes.query("select key, size, cost, uses, used_at, priority, hint from usage limit 1")
        problems = [row[0] for row in self._read("pragma quick_check")]
        if problems != ["ok"]:
            raise DamagedIndexError("; ".join(map(str, problems[:3])))

    def meta(self, name: str) -> str | None:
        rows = self._read("select value from meta where name = ?", name)
        return str(rows[0][0]) if rows else None

    def place(self, key: bytes) -> Place | None:
        """None also where the index has gone bad: that is a chunk to compute."""
        try:
            rows = self._read("select place from chunk where key = ?", key)
        except sqlite3.Error as error:
            logger.warning("can't look into %s: %s", self._file, error)
            return None
        return Place.unpack(key, rows[0][0]) if rows else None

    def chunks(self, *, evicted: bool = False) -> list[bytes]:
        """The keys of all, in order; with `evicted` also of those that were evicted."""
        statement = "select key from chunk" + (" union select key from usage" if evicted else "")
        return [key for (key,) in self._read(f"{statement} order by key")]

    def num_freed(self) -> int:
        return int(self._read("select count(*) from freed")[0][0])

    def places(self) -> list[tuple[bytes, Place]]:
        """Of all chunks, by key."""
        return _places(self._read("select key, place from chunk order by key"))

    def size_on_disk(self) -> int:
        return sum(file.stat().st_blocks * 512 for file in self._file.parent.glob(f"{self._file.name}*"))

    @contextmanager
    def writing(self) -> Iterator["Changes"]:
        """One transaction, of the one writer among all processes."""
        with self._write_lock:
            self._writer.execute("begin immediate")
            try:
                yield Changes(self._writer)
                self._writer.execute("commit")
            except BaseException:
                self._writer.execute("rollback")
                raise

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _read(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._read_lock:
            return self._reader.execute(statement, values).fetchall()


class Changes:
    """A write transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with closing(self.connection.execute(statement, values)) as cursor:
            return cursor.fetchall()

    @property
    def others_version(self) -> int:
        """Differs once another connection has written."""
        return int(self.query("pragma data_version")[0][0])

    def set_meta(self, name: str, value: str) -> None:
        self.query("insert or replace into meta values (?, ?)", name, value)

    def put(self, key: bytes, place: Place) -> None:
        """Add or replace a chunk."""
        self._give_up(self.query("select key, place from chunk where key = ?", key))
        self.query("insert or replace into chunk values (?, ?)", key, place.pack(key))

    def delete(self, prefix: bytes) -> list[Place]:
        """Forget all chunks whose keys begin so."""
        bounds = (prefix, prefix + b"\xff" * 64)
        rows = self.query("select key, place from chunk where key between ? and ?", *bounds)
        self.query("delete from chunk where key between ? and ?", *bounds)
        return self._give_up(rows)

    def _give_up(self, rows: list[tuple]) -> list[Place]:  # type: ignore[type-arg]
        """Note what is to be freed once the index that doesn't name it any more is on disk."""
        places = _places(rows)
        for key, place in places:
            self.query("insert into freed (key, place) values (?, ?)", key, place.pack(key))
        return [place for _, place in places]

    def places(self) -> list[tuple[bytes, Place]]:
        return _places(self.query("select key, place from chunk order by key"))

    def freed(self) -> list[Extent]:
        return [place.extent for _, place in _places(self.query("select key, place from freed"))]

    def forget_freed(self) -> None:
        self.query("delete from freed")

    def extents(self) -> list[Extent]:
        """What holds a record, or did and is still to be freed; sorted."""
        return sorted([*(place.extent for _, place in self.places()), *self.freed()])


def _places(rows: list[tuple]) -> list[tuple[bytes, Place]]:  # type: ignore[type-arg]
    """Without rows that went bad."""
    found = ((key, Place.unpack(key, value)) for key, value in rows)
    return [(key, place) for key, place in found if place is not None]


def _damage(error: sqlite3.Error) -> DamagedIndexError | None:
    """None if it is something else that keeps the file from being used."""
    is_operational = isinstance(error, sqlite3.OperationalError)
    return None if is_operational and not str(error).startswith("no such") else DamagedIndexError(str(error))
