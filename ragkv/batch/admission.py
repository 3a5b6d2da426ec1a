"""How many requests of a batch are in the engine at a time. Knows nothing about models or engines."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from ragkv.batch.sharing import Item

_QUEUED = 1 / 4  # of the memory: so much more than fits is in the engine
_REMEMBERED = 64  # answers, of which the longest says how much memory the next one may need


class Request(Protocol):
    """What is admitted. is_exact: whether its parts are blocks that requests share while they run."""

    @property
    def item(self) -> Item: ...

    @property
    def is_exact(self) -> bool: ...


@dataclass
class Admission:
    """Which requests are in the engine: as many as its memory for KV will probably hold, so that few are preempted.

    A quarter more than fits is there too. It waits in vLLM's queue, so that when several requests end in one step,
    the next one begins with as many.

    capacity: of that memory, in tokens. Blocks that running requests share count once. An answer counts with
    half of its limit, or once so many are known, with half of the longest of the last ones: running answers are at
    different points of theirs, and what vLLM preempts at times, because they aren't, comes back with its KV.
    """

    capacity: int
    _num_tokens: int = 0
    _shared: Counter[object] = field(default_factory=Counter)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def fits(self, work: Request) -> bool:
        """Return whether there is memory for this request as well."""
        parts = work.item.parts if work.is_exact else ()
        new = sum(size for name, size in parts if not self._shared[name])
        return self._num_tokens + new + self._own(work) <= self.capacity

    @property
    def is_full(self) -> bool:
        """Whether as many were counted in as fit, and as are to wait in vLLM's queue."""
        return self._num_tokens > (1 + _QUEUED) * self.capacity

    def _own(self, work: Request) -> int:
        """Return how many tokens the request shares with nobody."""
        item, shared = work.item, sum(size for _, size in work.item.parts) if work.is_exact else 0
        is_known = len(self._lengths) == _REMEMBERED
        longest = min(item.max_tokens, max(self._lengths)) if is_known else item.max_tokens
        return item.num_tokens - shared + (longest + 1) // 2

    def start(self, work: Request) -> int:
        """Count the request in. Returns what `end` is to be told."""
        own = self._own(work)
        self._num_tokens += own
        for name, size in work.item.parts if work.is_exact else ():
            self._num_tokens += 0 if self._shared[name] else size
            self._shared[name] += 1
        return own

    def end(self, work: Request, own: int, num_generated: int | None) -> None:
        """Count the request out. num_generated: the length of its answer, None if it has none."""
        self._num_tokens -= own
        for name, size in work.item.parts if work.is_exact else ():
            self._shared[name] -= 1
            if not self._shared[name]:
                self._num_tokens -= size
                del self._shared[name]
        if num_generated is not None:
            self._lengths.append(num_generated)
