"""A memory or a disk of a simulated engine, from which the product's own eviction takes what is worth least."""

from collections import Counter
from collections.abc import Collection, Hashable

from ragkv.store.eviction import Eviction


class Tier:
    """Entries of at most `num_bytes` (None: no limit), of which the product's eviction chooses those that go.

    remembers: uses of evicted entries count when they come back, as `ragkv.store.usage` has it for the disk; in memory
    (`ragkv.store.memory`) they don't. has_all: every entry is stored, whether it was put or not.
    """

    def __init__(self, num_bytes: int | None, eviction: str, *, remembers: bool = False, has_all: bool = False) -> None:
        self._num_bytes, self._eviction = num_bytes, Eviction(eviction)
        self._sizes: dict[Hashable, int] = {}
        self._uses: Counter[Hashable] | None = Counter() if remembers and num_bytes is not None else None
        self._has_all = has_all
        self.size_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return self._has_all or key in self._sizes

    def touch(self, key: Hashable) -> None:
        """Count a use of an entry that is stored, or is remembered."""
        if self._uses is not None and key in self._uses:
            self._uses[key] += 1
        self._eviction.touch(key)

    def put(self, key: Hashable, size_bytes: int, cost: float, spared: Collection[Hashable] = ()) -> list[Hashable]:
        """Store an entry, if it is missing and room can be made without the spared ones. Returns those that went."""
        if key in self:
            return []
        uses = 1
        if self._uses is not None:
            self._uses[key] = uses = self._uses[key] + 1
        evicted: list[Hashable] = []
        if self._num_bytes is not None:
            if sum(self._sizes.get(each, 0) for each in spared) + size_bytes > self._num_bytes:
                return []
            while self.size_bytes + size_bytes > self._num_bytes:
                evicted.append(self._eviction.evict(spared))
                self.size_bytes -= self._sizes.pop(evicted[-1])
            self._eviction.add(key, size_bytes, cost)
            for _ in range(uses - 1):
                self._eviction.touch(key)
        self._sizes[key] = size_bytes
        self.size_bytes += size_bytes
        return evicted

    def remove(self, key: Hashable) -> None:
        self._eviction.remove(key)
        self.size_bytes -= self._sizes.pop(key, 0)
