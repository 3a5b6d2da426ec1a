"""How often and when each entry was used, and so which goes first when the disk's budget is spent.

A table in SQLite. Every entry file has a row, committed before the file gets its name; rows outlive the files: an entry
that was evicted and is requested again comes back with its history. A wrong table can cost time, but never makes an
answer wrong: the files tell what is stored. So a damaged table is made anew from them (`ragkv.store.opening`).
"""

import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from ragkv.files import Database
from ragkv.store.eviction import HINTS, POLICIES, Entry, Hint
from ragkv.store.record import PREFIX_BYTES, ChunkKey

logger = logging.getLogger(__name__)

SESSION_S = 1800.0
_WRITTEN_EVERY_S = 10.0
_SCHEMA = (
    "create table clock (value real not null) strict",
    "create table usage (key blob primary key, size integer not null, cost real not null, uses integer not null, "
    "used_at real not null, priority real not null, hint text, stored integer not null) strict, without rowid",
    "create index usage_priority on usage (priority)",
)


class Usage:
    """The table of a store; threads and processes may share it. policy: a name of `ragkv.store.eviction.POLICIES`.

    Uses are counted in memory, and written every few seconds and with what is written anyway. Raises sqlite3.Error for
    what the system doesn't allow, and for a damaged table (`is_damage`).
    """

    def __init__(self, file: Path, policy: str) -> None:
        self._priority = POLICIES[policy]
        self._counts: Counter[bytes] = Counter()  # not yet in the table
        self._written_at = time.monotonic()
        self._reader, self._writer = Database(file), Database(file)  # two, so that no reading waits for a writer
        self.writing = self._writer.writing  # of entry files too
        try:
            for database in (self._reader, self._writer):
                database.make_durable()
                database.run("pragma cell_size_check = on")
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Make the tables, or check that they are as they were made."""
        with self.writing():
            if not self._writer.run("select 1 from sqlite_master limit 1"):
                for statement in _SCHEMA:
                    self._writer.run(statement)
        schema = self._reader.run("select lower(sql) from sqlite_master where sql is not null order by rowid")
        problems = [row[0] for row in self._reader.run("pragma integrity_check")]
        if schema != [(statement,) for statement in _SCHEMA] or problems != ["ok"]:
            raise sqlite3.DatabaseError(f"its tables are not those that were made; {problems[:3]}")

    # Inside `writing` only

    def put(self, key: ChunkKey, size_bytes: int, cost: float, *, stored: bool) -> None:
        """Count the storing of an entry as a use. cost: of computing it again, in any unit; stored: False if there was
        no room for it."""
        known = self._known(key.prefix())
        uses, hint = known[0][3:5] if known else (0, None)
        self._write(key.prefix(), Entry(size_bytes, cost, uses + 1), hint, stored)

    def hint(self, chunk_hash: str, hint: Hint | None) -> None:
        """Set the hint of all entries of a chunk."""
        for key, size_bytes, cost, uses, _, stored in self._known(bytes.fromhex(chunk_hash)):
            self._write(key, Entry(size_bytes, cost, uses), hint, stored)

    def evict(self, num_bytes: int) -> list[ChunkKey]:
        """Choose entries that free this many bytes, those that are worth least, and count them as evicted; fewer if
        the rest must stay."""
        evicted, clock = [], self._clock()
        statement = (
            "select key, size, priority from usage where stored and hint is not 'pin' "
            "and not (hint is 'session' and used_at > ?) order by priority"
        )
        with closing(self._writer.connection.execute(statement, (time.time() - SESSION_S,))) as rows:
            for key, size_bytes, priority in rows:
                if num_bytes <= 0:
                    break
                num_bytes -= size_bytes
                clock = max(clock, priority)
                evicted.append(key)
        self._writer.run("delete from clock")
        self._writer.run("insert into clock values (?)", clock)
        keys = [ChunkKey.parse(key) for key in evicted]
        for key in keys:
            self.lose(key)
        return keys

    def lose(self, key: ChunkKey) -> None:
        """Count an entry as evicted, whose uses are remembered."""
        self._writer.run("update usage set stored = 0 where key = ?", key.prefix())

    def forget(self, prefix: bytes) -> None:
        """Forget all entries whose keys begin with `prefix`."""
        self._writer.run("delete from usage where key between ? and ?", *_bounds(prefix))

    def knows(self, key: ChunkKey) -> bool:
        return bool(self._known(key.prefix()))

    def write_counts(self) -> None:
        counts, self._counts = self._counts, Counter()
        self._written_at = time.monotonic()
        for key, count in counts.items():
            for _, size_bytes, cost, uses, hint, stored in self._known(key):
                self._write(key, Entry(size_bytes, cost, uses + count), hint, stored)

    @property
    def stored_bytes(self) -> int:
        return int(self._writer.run("select coalesce(sum(size), 0) from usage where stored")[0][0])

    # Outside `writing`; `count` and `flush` may wait for another writer

    @property
    def is_empty(self) -> bool:
        return not self._reader.run("select 1 from usage limit 1")

    def count(self, keys: Iterable[ChunkKey]) -> None:
        """Count a use of each of these entries."""
        self._counts.update(key.prefix() for key in keys)
        if time.monotonic() - self._written_at > _WRITTEN_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write the counts, in a transaction of their own."""
        if self._counts:
            try:
                with self.writing():
                    self.write_counts()
            except sqlite3.Error as error:  # the disk is full, or another process writes for long
                logger.warning("uses of chunks aren't counted: %s", error)

    def hint_of(self, key: ChunkKey) -> Hint | None:
        """Return how an entry is to be treated. None also if the table is damaged."""
        try:
            rows = self._reader.run("select hint from usage where key = ?", key.prefix())
        except sqlite3.Error:
            return None
        return rows[0][0] if rows and rows[0][0] in HINTS else None

    def evicted(self) -> list[ChunkKey]:
        """Return the keys of entries that were evicted, or had no room, and aren't stored again."""
        rows = self._reader.run("select key from usage where not stored order by key")
        return [ChunkKey.parse(key) for (key,) in rows if len(key) == PREFIX_BYTES]

    def gauges(self) -> dict[str, int]:
        """Count entries stored and evicted, and the bytes of the stored ones."""
        statement = "select coalesce(sum(stored), 0), count(*), coalesce(sum(size * stored), 0) from usage"
        stored, known, size_bytes = self._reader.run(statement)[0]
        return {"entries": stored, "evicted_entries": known - stored, "disk_bytes": size_bytes}

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _known(self, prefix: bytes) -> list[Any]:
        statement = "select key, size, cost, uses, hint, stored from usage where key between ? and ?"
        return self._writer.run(statement, *_bounds(prefix))

    def _write(self, key: bytes, entry: Entry, hint: str | None, stored: bool) -> None:
        entry.stamp = time.time()
        priority = -1.0 if hint == "ephemeral" else self._priority(entry, self._clock())
        row = (key, entry.size_bytes, entry.cost, entry.frequency, entry.stamp, priority, hint, stored)
        self._writer.run("insert or replace into usage values (?, ?, ?, ?, ?, ?, ?, ?)", *row)

    def _clock(self) -> float:
        return float(self._writer.run("select coalesce(max(value), 0) from clock")[0][0])


def _bounds(prefix: bytes) -> tuple[bytes, bytes]:
    return prefix, prefix + b"\xff" * PREFIX_BYTES


def is_damage(error: Exception, file: Path) -> bool:
    """Return whether the error says that the table holds what nobody wrote, and not that the system doesn't let it be
    used."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.Error)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # Python's own errors have none
    if code == sqlite3.SQLITE_READONLY:  # a damaged header may say so too
        return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF == sqlite3.SQLITE_ERROR  # the latter of a bad schema
