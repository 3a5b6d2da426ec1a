"""How often and when each chunk was used, and so which goes first when the disk's budget is spent.

Rows in the index's file, under its transactions. They outlive the records: a chunk that was evicted and is requested
again comes back with its history.
"""

import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable

from ragkv.store.eviction import POLICIES, Entry, Hint
from ragkv.store.index import Changes, Index

logger = logging.getLogger(__name__)

SESSION_S = 1800.0
_WRITTEN_EVERY_S = 10.0
_CLOCK = "eviction clock"


class Usage:
    """The uses of a store's entries. They are counted here, and written to the index every few seconds and with what
    is written anyway. policy: a name of `ragkv.store.eviction.POLICIES`."""

    def __init__(self, policy: str) -> None:
        self._priority = POLICIES[policy]
        self._counts: Counter[bytes] = Counter()  # not yet in the index
        self._written_at = time.monotonic()

    def count(self, keys: Iterable[bytes]) -> None:
        self._counts.update(keys)

    def is_due(self) -> bool:
        return time.monotonic() - self._written_at > _WRITTEN_EVERY_S

    def flush(self, index: Index) -> None:
        """Write the counts, in a transaction of their own."""
        if self._counts:
            try:
                with index.writing() as changes:
                    self.write_counts(changes)
            except sqlite3.Error as error:  # the disk is full, or another process writes for long
                logger.warning("uses of chunks aren't counted: %s", error)

    def write_counts(self, changes: Changes) -> None:
        counts, self._counts = self._counts, Counter()
        self._written_at = time.monotonic()
        for key, count in counts.items():
            for size_bytes, cost, uses, hint in changes.query(
                "select size, cost, uses, hint from usage where key = ?", key
            ):
                self._write(changes, key, Entry(size_bytes, cost, uses + count), hint)

    def put(self, changes: Changes, key: bytes, size_bytes: int, cost: float) -> None:
        """Count the storing of an entry as a use. cost: of computing it again, in any unit."""
        known = changes.query("select uses, hint from usage where key = ?", key)
        uses, hint = known[0] if known else (0, None)
        self._write(changes, key, Entry(size_bytes, cost, uses + 1), hint)

    def hint(self, changes: Changes, prefix: bytes, hint: Hint | None) -> None:
        """Set the hint of all entries whose keys begin with `prefix`."""
        rows = changes.query("select key, size, cost, uses from usage where key between ? and ?", *_bounds(prefix))
        for key, size_bytes, cost, uses in rows:
            self._write(changes, key, Entry(size_bytes, cost, uses), hint)

    def victims(self, changes: Changes, num_bytes: int) -> list[bytes]:
        """Return the entries to evict for this many bytes, first the one that is worth least; fewer if the rest must
        stay."""
        keys, clock = [], _clock(changes)
        rows = changes.connection.execute(
            "select key, size, priority from usage where exists (select 1 from chunk where chunk.key = usage.key) "
            "and hint is not 'pin' and not (hint is 'session' and used_at > ?) order by priority",
            (time.time() - SESSION_S,),
        )
        for key, size_bytes, priority in rows:
            if num_bytes <= 0:
                break
            num_bytes -= size_bytes
            clock = max(clock, priority)
            keys.append(key)
        rows.close()
        changes.set_meta(_CLOCK, repr(clock))
        return keys

    def delete(self, changes: Changes, prefix: bytes) -> None:
        changes.query("delete from usage where key between ? and ?", *_bounds(prefix))

    def _write(self, changes: Changes, key: bytes, entry: Entry, hint: str | None) -> None:
        entry.stamp = time.time()
        priority = -1.0 if hint == "ephemeral" else self._priority(entry, _clock(changes))
        row = (key, entry.size_bytes, entry.cost, entry.frequency, entry.stamp, priority, hint)
        changes.query("insert or replace into usage values (?, ?, ?, ?, ?, ?, ?)", *row)


def _bounds(prefix: bytes) -> tuple[bytes, bytes]:
    return prefix, prefix + b"\xff" * 64


def _clock(changes: Changes) -> float:
    rows = changes.query("select value from meta where name = ?", _CLOCK)
    try:
        clock = float(rows[0][0]) if rows else 0.0
    except ValueError:
        return 0.0
    return clock if math.isfinite(clock) else 0.0
