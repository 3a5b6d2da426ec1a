"""How often and when each entry was used, and so which goes first when the disk's budget is spent.

A table in LMDB (`table`). Every entry file has a row, committed before the file gets its name; rows outlive the files:
an entry that was evicted and is requested again comes back with its history. A wrong table can cost time, but never
makes an answer wrong: the files tell what is stored. So a damaged table is made anew from them (`opening`).
"""

import logging
import struct
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb

from ragkv.store.eviction import HINTS, POLICIES, Entry, Hint
from ragkv.store.record import ChunkKey
from ragkv.store.table import Rows, Table, TableDamageError

logger = logging.getLogger(__name__)

SESSION_S = 1800.0
_WRITTEN_EVERY_S = 10.0
_FORMAT = b"1"
_STORED, _PINNED = b"stored_bytes", b"pinned_bytes"  # totals
_GAUGED = {"disk_bytes": _STORED, "pinned_bytes": _PINNED}
_ROW = struct.Struct("<QdQddBB")  # size, cost, uses, used at, priority, hint, stored
_HINTS = (None, *HINTS)  # by their code in a row
_U64, _F64, _PRIORITY = struct.Struct("<Q"), struct.Struct("<d"), struct.Struct(">Q")


@dataclass(frozen=True)
class Row:
    """What is known of an entry. used_at: in seconds since 1970."""

    size_bytes: int
    cost: float
    uses: int
    used_at: float
    priority: float
    hint: str | None
    stored: bool

    def pack(self) -> bytes:
        numbers = (self.size_bytes, self.cost, self.uses, self.used_at, self.priority)
        return _ROW.pack(*numbers, _HINTS.index(self.hint), self.stored)

    @classmethod
    def parse(cls, value: bytes) -> "Row":
        size_bytes, cost, uses, used_at, priority, hint, stored = _ROW.unpack(value)
        return cls(size_bytes, cost, uses, used_at, priority, _HINTS[hint], bool(stored))

    def place(self, key: bytes) -> bytes:
        """Return the row's key in the order of eviction: by priority as a number that sorts as its bytes do."""
        (bits,) = _PRIORITY.unpack(struct.pack(">d", self.priority))
        return _PRIORITY.pack(bits ^ (0xFFFF_FFFF_FFFF_FFFF if bits >> 63 else 1 << 63)) + key


class Usage:
    """The table of a store; threads and processes may share it. policy: a name of `ragkv.store.eviction.POLICIES`.

    Uses are counted in memory, and written every few seconds and with what is written anyway. is_alone: no other store
    has the folder open. Raises lmdb.Error for what the system doesn't allow, and TableDamageError or lmdb.Error for a
    damaged table (`ragkv.store.table.is_damage`).
    """

    def __init__(self, file: Path, policy: str, *, is_alone: bool) -> None:
        self._priority = POLICIES[policy]
        self._counts: Counter[bytes] = Counter()  # not yet in the table
        self._written_at = time.monotonic()
        self._parts: dict[str, Rows] = {}  # of the transaction that `writing` is
        # rows: by entry; order: of the stored ones, those to be evicted first first; totals: of all rows.
        self._table = Table(file, ("rows", "order", "totals"), is_alone=is_alone)
        try:
            with self.writing():
                if self._totals.get(b"format") is None and not len(self._rows):
                    self._totals.put(b"format", _FORMAT)
                if self._totals.get(b"format") != _FORMAT:
                    raise TableDamageError("it isn't a table of uses")
                if self._totals.get(_PINNED) is None:  # a table of before
                    pinned = (row.size_bytes for _, row in _all(self._rows) if row.hint == "pin")
                    self._totals.put(_PINNED, _U64.pack(sum(pinned)))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer of all processes, of entry files too; commit at the end, or change nothing after an
        error."""
        with self._table.writing() as parts:
            self._parts = parts
            try:
                yield
            finally:
                self._parts = {}

    # Inside `writing` only

    def put(self, key: ChunkKey, size_bytes: int, cost: float, *, stored: bool) -> None:
        """Count the storing of an entry as a use. cost: of computing it again, in any unit; stored: False if there was
        no room for it."""
        known = self._row(key.prefix())
        uses, hint = (known.uses, known.hint) if known else (0, self._hint_of_chunk(key))
        self._use(key.prefix(), Entry(size_bytes, cost, uses + 1), hint, stored=stored)

    def hint(self, chunk_hash: str, hint: Hint | None) -> None:
        """Set the hint of all entries of a chunk. That is no use of them, but a session begins now."""
        for key, row in list(_all(self._rows, bytes.fromhex(chunk_hash))):
            if hint == "session" or "ephemeral" in (hint, row.hint):  # which changes its place in the order
                stamp = time.time() if hint == "session" else row.used_at
                self._use(key, Entry(row.size_bytes, row.cost, row.uses, stamp=stamp), hint, stored=row.stored)
            else:
                self._set(key, row, replace(row, hint=hint))

    def resize(self, key: ChunkKey, size_bytes: int) -> None:
        """Note that an entry takes another size on disk. That is no use of it."""
        if row := self._row(key.prefix()):
            self._set(key.prefix(), row, replace(row, size_bytes=size_bytes))

    def copy(self, key: ChunkKey, to: ChunkKey, size_bytes: int) -> None:
        """Note what is known of an entry for another one, of this size, that is to take its place."""
        if row := self._row(key.prefix()):
            self._set(to.prefix(), self._row(to.prefix()), replace(row, size_bytes=size_bytes, stored=True))

    def pinned_bytes(self, and_those_of: Iterable[str] = ()) -> int:
        """Return the bytes of pinned entries, if those of these chunks were pinned too. Evicted ones count: they come
        back."""
        rows = (row for each in set(and_those_of) for _, row in _all(self._rows, bytes.fromhex(each)))
        return _total(self._totals, _PINNED) + sum(row.size_bytes for row in rows if row.hint != "pin")

    def evict(self, num_bytes: int) -> list[ChunkKey]:
        """Choose entries that free this many bytes, those that are worth least, and count them as evicted; fewer if
        the rest must stay."""
        evicted, clock, session = [], self._clock, time.time() - SESSION_S
        for place, _ in self._order.items():
            if num_bytes <= 0:
                break
            key = place[_PRIORITY.size :]
            row = self._row(key)
            if row is None:
                raise TableDamageError("its order of eviction names an entry that it doesn't know")
            if row.hint == "pin" or (row.hint == "session" and row.used_at > session):
                continue
            num_bytes -= row.size_bytes
            clock = max(clock, row.priority)
            evicted.append(ChunkKey.parse(key))
        self._totals.put(b"clock", _F64.pack(clock))
        for each in evicted:
            self.lose(each)
        return evicted

    def lose(self, key: ChunkKey) -> None:
        """Count an entry as evicted, whose uses are remembered."""
        if row := self._row(key.prefix()):
            self._set(key.prefix(), row, replace(row, stored=False))

    def forget(self, prefix: bytes) -> None:
        """Forget all entries whose keys begin with `prefix`."""
        for key, row in list(_all(self._rows, prefix)):
            self._set(key, row, None)

    def knows(self, key: ChunkKey) -> bool:
        return self._row(key.prefix()) is not None

    def write_counts(self) -> None:
        counts, self._counts = self._counts, Counter()
        self._written_at = time.monotonic()
        for key, count in counts.items():
            if row := self._row(key):
                self._use(key, Entry(row.size_bytes, row.cost, row.uses + count), row.hint, stored=row.stored)

    @property
    def stored_bytes(self) -> int:
        return _total(self._totals, _STORED)

    # Outside `writing`; `count` and `flush` may wait for another writer

    @property
    def is_empty(self) -> bool:
        with self._table.reading() as parts:
            return not len(parts["rows"])

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
            except (TableDamageError, lmdb.Error) as error:  # the disk is full, say
                logger.warning("uses of chunks aren't counted: %s", error)

    def hint_of(self, key: ChunkKey) -> Hint | None:
        """Return how an entry is to be treated. None also if the table is damaged."""
        try:
            with self._table.reading() as parts:
                value = parts["rows"].get(key.prefix())
        except (TableDamageError, lmdb.Error):
            return None
        return None if value is None else Row.parse(value).hint  # type: ignore[return-value]

    def rows_of(self, chunk_hashes: Iterable[str]) -> dict[ChunkKey, Row]:
        """Return what is known of these chunks' entries, evicted ones too; uses of the last seconds are missing."""
        with self._table.reading() as parts:
            each = (_all(parts["rows"], bytes.fromhex(chunk_hash)) for chunk_hash in chunk_hashes)
            return {ChunkKey.parse(key): row for rows in each for key, row in rows}

    def evicted(self) -> list[ChunkKey]:
        """Return the keys of entries that were evicted, or had no room, and aren't stored again."""
        with self._table.reading() as parts:
            return [ChunkKey.parse(key) for key, row in _all(parts["rows"]) if not row.stored]

    def gauges(self) -> dict[str, int]:
        """Count entries stored and evicted, and the bytes of the stored and of the pinned ones."""
        with self._table.reading() as parts:
            stored, known = len(parts["order"]), len(parts["rows"])
            sizes = {name: _total(parts["totals"], key) for name, key in _GAUGED.items()}
        return {"entries": stored, "evicted_entries": known - stored, **sizes}

    def close(self) -> None:
        self._table.close()

    @property
    def _rows(self) -> Rows:
        return self._parts["rows"]

    @property
    def _order(self) -> Rows:
        return self._parts["order"]

    @property
    def _totals(self) -> Rows:
        return self._parts["totals"]

    @property
    def _clock(self) -> float:
        value = self._totals.get(b"clock")
        return 0.0 if value is None else float(_F64.unpack(value)[0])

    def _row(self, key: bytes) -> Row | None:
        value = self._rows.get(key)
        return None if value is None else Row.parse(value)

    def _hint_of_chunk(self, key: ChunkKey) -> str | None:
        """Return the hint of a chunk's other entries: a mean may come long after the chunk was pinned."""
        _, row = next(_all(self._rows, bytes.fromhex(key.chunk_hash)), (b"", None))
        return row.hint if row else None

    def _use(self, key: bytes, entry: Entry, hint: str | None, *, stored: bool) -> None:
        entry.stamp = entry.stamp or time.time()
        priority = -1.0 if hint == "ephemeral" else self._priority(entry, self._clock)
        row = Row(entry.size_bytes, entry.cost, entry.frequency, entry.stamp, priority, hint, stored)
        self._set(key, self._row(key), row)

    def _set(self, key: bytes, old: Row | None, new: Row | None) -> None:
        """Put a row in the place of another, None for none, and bring order and totals up to date."""
        changes = {_STORED: 0, _PINNED: 0}
        for row, sign in ((old, -1), (new, 1)):
            if row is not None:
                changes[_STORED] += sign * row.size_bytes * row.stored
                changes[_PINNED] += sign * row.size_bytes * (row.hint == "pin")
        if old and old.stored:
            self._order.delete(old.place(key))
        if new and new.stored:
            self._order.put(new.place(key), b"")
        if new:
            self._rows.put(key, new.pack())
        else:
            self._rows.delete(key)
        for total, change in changes.items():
            if change:
                self._totals.put(total, _U64.pack(max(0, _total(self._totals, total) + change)))


def _all(rows: Rows, prefix: bytes = b"") -> Iterator[tuple[bytes, Row]]:
    return ((key, Row.parse(value)) for key, value in rows.items(prefix))


def _total(totals: Rows, key: bytes) -> int:
    value = totals.get(key)
    return 0 if value is None else int(_U64.unpack(value)[0])
