"""What to give up when a tier is full. Pure bookkeeping: knows keys, sizes and costs, and no KV.

Each policy is a priority; the entry with the lowest is evicted first. `clock` is the priority of what was evicted last:
added to a new priority, it lets what was popular once age.
"""

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Literal

from ragkv.errors import ConfigError


@dataclass
class Entry:
    """What is known of an entry. cost: of computing it again; frequency: number of uses; stamp: of the last use, of any
    clock that grows."""

    size_bytes: int
    cost: float
    frequency: int = 1
    priority: float = 0.0
    stamp: float = 0.0


POLICIES: dict[str, Callable[[Entry, float], float]] = {
    "gdsf": lambda entry, clock: clock + entry.frequency * entry.cost / max(1, entry.size_bytes),
    "lru": lambda entry, clock: entry.stamp,
    "lfu": lambda entry, clock: float(entry.frequency),
    "lfuda": lambda entry, clock: clock + entry.frequency,
}
Hint = Literal["pin", "session", "ephemeral"]
HINTS: dict[str, str] = {
    "pin": "never evicted",
    "session": "not evicted within half an hour of its last use",
    "ephemeral": "the first to be evicted",
}


def parse_hint(text: str | None) -> Hint | None:
    """Return the text as a hint. Raises ConfigError for an unknown one."""
    if text is not None and text not in HINTS:
        raise ConfigError(f"unknown hint {text!r}; choose one of {', '.join(HINTS)}")
    return text  # type: ignore[return-value]


class Eviction:
    """The entries of one tier in the order in which they would go. Keys are what callers make of them.

    Not thread-safe. Raises ConfigError for an unknown name.
    """

    def __init__(self, name: str = "gdsf") -> None:
        if name not in POLICIES:
            raise ConfigError(f"unknown eviction policy {name!r}; choose one of {', '.join(POLICIES)}")
        self._priority = POLICIES[name]
        self._entries: dict[Hashable, Entry] = {}
        self._heap: list[tuple[float, float, Hashable]] = []
        self._stamps = itertools.count(1)
        self._clock = 0.0
        self.size_bytes = 0

    def add(self, key: Hashable, size_bytes: int, cost: float) -> None:
        """Add or replace an entry, as used just now."""
        self.remove(key)
        self._entries[key] = entry = Entry(size_bytes, cost)
        self.size_bytes += size_bytes
        self._push(key, entry)

    def touch(self, key: Hashable) -> bool:
        """Count a use; return False if there is no such entry."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.frequency += 1
        self._push(key, entry)
        return True

    def remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.size_bytes

    def evict(self, spared: Collection[Hashable] = ()) -> Hashable | None:
        """Remove and return the entry with the lowest priority that isn't spared; None if there is none."""
        passed = []
        evicted: Hashable | None = None
        while self._heap and evicted is None:
            priority, stamp, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.stamp != stamp:
                continue
            if key in spared:
                passed.append((priority, stamp, key))
                continue
            self._clock = max(self._clock, priority)
            self.remove(key)
            evicted = key
        for item in passed:
            heapq.heappush(self._heap, item)
        return evicted

    def _push(self, key: Hashable, entry: Entry) -> None:
        entry.stamp = next(self._stamps)
        entry.priority = self._priority(entry, self._clock)
        heapq.heappush(self._heap, (entry.priority, entry.stamp, key))
        if len(self._heap) > 4 * len(self._entries) + 64:  # most of it is outdated: earlier priorities of entries
            self._heap = [(e.priority, e.stamp, k) for k, e in self._entries.items()]
            heapq.heapify(self._heap)
