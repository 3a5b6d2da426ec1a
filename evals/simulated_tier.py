"""A memory or a disk of a simulated engine, from which the product's own eviction takes what is worth least."""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Hashable

from ragkv.store.eviction import Eviction


class Tier:
    """Entries of at most `num_bytes` (None: no limit), of which the product's eviction chooses those that go.

    remembers: uses of evicted entries count when they come back, as `ragkv.store.usage` has it for the disk; in memory
    (`ragkv.store.memory`) they don't. has_all: every entry is stored, whether it was put or not. has_gaps: each entry
    takes one piece, as in memory, so that entries of unlike sizes leave gaps that are of no use.
    """

    def __init__(
        self,
        num_bytes: int | None,
        eviction: str,
        *,
        remembers: bool = False,
        has_all: bool = False,
        has_gaps: bool = False,
    ) -> None:
        self._num_bytes, self._eviction = num_bytes, Eviction(eviction)
        self._pieces = _Pieces(num_bytes) if has_gaps and num_bytes is not None else None
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
            while not self._fits(key, size_bytes, self._num_bytes):
                victim = self._eviction.evict(spared)
                if victim is None:  # what stays leaves no gap that is large enough
                    return evicted
                evicted.append(victim)
                self._free(victim)
            self._eviction.add(key, size_bytes, cost)
            for _ in range(uses - 1):
                self._eviction.touch(key)
        self._sizes[key] = size_bytes
        self.size_bytes += size_bytes
        return evicted

    def remove(self, key: Hashable) -> None:
        self._eviction.remove(key)
        self._free(key)

    def _fits(self, key: Hashable, size_bytes: int, num_bytes: int) -> bool:
        """Return whether an entry fits as it is; with gaps it has its piece then."""
        if self._pieces is None:
            return self.size_bytes + size_bytes <= num_bytes
        return self._pieces.take(key, size_bytes)

    def _free(self, key: Hashable) -> None:
        self.size_bytes -= self._sizes.pop(key, 0)
        if self._pieces is not None:
            self._pieces.free(key)


class _Pieces:
    """Where entries lie in a memory: each in the first gap that is long enough, as in `ragkv.store.memory`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._used: list[tuple[int, int]] = []  # start and end of each piece, sorted
        self._of: dict[Hashable, tuple[int, int]] = {}

    def take(self, key: Hashable, size_bytes: int) -> bool:
        start = 0
        for begin, end in self._used:
            if begin - start >= size_bytes:
                break
            start = end
        if start + size_bytes > self._num_bytes:
            return False
        self._of[key] = (start, start + size_bytes)
        insort(self._used, self._of[key])
        return True

    def free(self, key: Hashable) -> None:
        if (piece := self._of.pop(key, None)) is not None:
            self._used.remove(piece)
