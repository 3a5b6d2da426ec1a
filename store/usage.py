"""How often and when each chunk was used, and so which goes first when the disk's budget is spent.

Rows in the index's file, under its transactions. They outlive the records: a chunk that was evicted and is wanted
again comes back with its history.
"""

import math
import time
from collections.abc import Mapping

from ragkv.store.eviction import POLICIES, Entry, Hint
from ragkv.store.index import Changes

SESSION_S = 1800.0
_CLOCK = "eviction clock"


class Usage:
    """policy: a name of `ragkv.store.eviction.POLICIES`."""

    def __init__(self, policy: str) -> None:
        self._priority = POLICIES[policy]

    def put(self, changes: Changes, key: bytes, size_bytes: int, cost: float) -> None:
        """A chunk was stored: that counts as a use. cost: of making it again, in any unit."""
        known = changes.query("select uses, hint from usage where key = ?", key)
        uses, hint = known[0] if known else (0, None)
        self._write(changes, key, Entry(size_bytes, cost, uses + 1), hint)

    def touch(self, changes: Changes, counts: Mapping[bytes, int]) -> None:
        for key, count in counts.items():
            for size_bytes, cost, uses, hint in changes.query(
                "select size, cost, uses, hint from usage where key = ?", key
            ):
                self._write(changes, key, Entry(size_bytes, cost, uses + count), hint)

    def hint(self, changes: Changes, prefix: bytes, hint: Hint | None) -> None:
        """Of all chunks whose keys begin so."""
        rows = changes.query("select key, size, cost, uses from usage where key between ? and ?", *_bounds(prefix))
        for key, size_bytes, cost, uses in rows:
            self._write(changes, key, Entry(size_bytes, cost, uses), hint)

    def victims(self, changes: Changes, num_bytes: int) -> list[bytes]:
        """The chunks to evict for this many bytes, first the one that is worth least; fewer if the rest must stay."""
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
