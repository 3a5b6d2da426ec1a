"""Memory that records are read into: the pool, which keeps what requests use, and staging for what isn't kept.

It is taken whole, in huge pages where the system has them, and reused: taken page by page, it would cost the first
request of a chunk more than all later ones save. An entry in the pool is used only as long as the version that it was
read from is the one that is stored.
"""

import errno
import logging
import mmap
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ragkv.store.entries import Layout, padded
from ragkv.store.eviction import Eviction, Hint
from ragkv.store.record import ChunkKey, LayerKV

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap doesn't name
_BLOCK_BYTES = 8 << 20
_KEPT_BYTES = 64 << 20


def take_memory(num_bytes: int, *, pinned: bool = False) -> memoryview:
    """Allocate memory at once. pinned: a GPU reads it by itself. Raises MemoryError (or torch's RuntimeError) if the
    system hasn't got that much."""
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
        try:
            memory.madvise(advice)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
            logger.debug("memory is taken page by page: %s", error)  # an old system
    return memoryview(memory)


class Staging:
    """Room for records that are used at the same time, such as one layer of a request's chunks. Grows as needed;
    between two requests at most `_KEPT_BYTES` are kept. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: list[memoryview] = []
        self._block = self._used = 0  # the one that is being filled, and how far

    def take(self, num_bytes: int) -> memoryview:
        """Return memory that nobody else gets before `reuse`."""
        while True:
            if self._block == len(self._blocks):
                self._blocks.append(take_memory(max(num_bytes, _BLOCK_BYTES)))
            block, start = self._blocks[self._block], self._used
            if start + num_bytes <= len(block):
                self._used = padded(start + num_bytes)
                return block[start : start + num_bytes]
            self._block, self._used = self._block + 1, 0

    def reuse(self) -> None:
        """Let all that was taken be taken again."""
        self._block = self._used = 0

    def shrink(self) -> None:
        """Let all be taken again, and give back what is more than `_KEPT_BYTES`."""
        self.reuse()
        while sum(map(len, self._blocks)) > _KEPT_BYTES:
            self._blocks.pop()


@dataclass
class _Held:
    """An entry; its records are in the memory from `start` on. layers: those that are read and verify."""

    layout: Layout
    hint: Hint | None
    start: int
    layers: dict[int, LayerKV] = field(default_factory=dict)


class Pool:
    """At most `memory_bytes` of entries, by the policy `eviction` (`ragkv.store.eviction.POLICIES`); 0: none. pinned: a
    GPU reads the memory by itself. Not thread-safe.

    Raises MemoryError if the system hasn't got that much.
    """

    def __init__(self, memory_bytes: int, eviction: str = "gdsf", *, pinned: bool = False) -> None:
        self._arena = take_memory(memory_bytes, pinned=pinned) if memory_bytes else memoryview(b"")
        self._used: list[tuple[int, int]] = []  # sorted ranges of the memory, start and end
        self._eviction = Eviction(eviction)
        self._held: dict[ChunkKey, _Held] = {}
        self._requested: dict[ChunkKey, Hint | None] = {}
        self._entered: set[ChunkKey] = set()  # since `take_changes`
        self._left: set[ChunkKey] = set()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._held

    def request(self, hints: Mapping[ChunkKey, Hint | None]) -> None:
        """Note the entries that a request is going to use: those in memory stay, the others are kept once they are
        read, but for ephemeral ones. Entries that no request uses, such as those read at index time, aren't kept."""
        self._requested = {key: hint for key, hint in hints.items() if hint != "ephemeral"}
        for key, hint in hints.items():
            if self._eviction.touch(key):
                self._held[key].hint = hint

    @contextmanager
    def requesting(self, hints: Mapping[ChunkKey, Hint | None]) -> Iterator[None]:
        """Treat these entries too as requested, without counting a use."""
        requested, self._requested = self._requested, {**self._requested, **hints}
        try:
            yield
        finally:
            self._requested = requested

    def sizes(self) -> dict[ChunkKey, int]:
        """Return the bytes of each entry that is held."""
        return {key: held.layout.size_bytes for key, held in self._held.items()}

    def get(self, key: ChunkKey, layout: Layout, layer: int) -> LayerKV | None:
        held = self._held.get(key)
        if held is not None and held.layout != layout:  # it was replaced
            self.drop(key)
            held = None
        return held.layers.get(layer) if held else None

    def has(self, key: ChunkKey, layer: int) -> bool:
        held = self._held.get(key)
        return held is not None and layer in held.layers

    def whole(self, key: ChunkKey, layout: Layout) -> memoryview | None:
        """Return the memory of an entry of which all records are held, in this layout."""
        held = self._held.get(key)
        if held is None or held.layout != layout or len(held.layers) < len(layout.lengths):
            return None
        return self._arena[held.start : held.start + layout.size_bytes]

    def slot(self, key: ChunkKey, layout: Layout, layer: int, in_use: Set[ChunkKey]) -> memoryview | None:
        """Return the memory to read a record to that `get` didn't return; None unless the entry is requested and room
        can be made without evicting what is `in_use`, requested or pinned. The caller then calls `keep` if the record
        verifies, else `drop`."""
        held = self._held.get(key)
        if held is None and key in self._requested:
            start = self._make_room(layout.size_bytes, in_use)
            if start is not None:
                held = self._held[key] = _Held(layout, self._requested[key], start)
        if held is None or held.layout != layout or layer in held.layers:
            return None
        start = held.start + layout.starts[layer]
        return self._arena[start : start + layout.lengths[layer]]

    def keep(self, key: ChunkKey, layer: int, kv: LayerKV) -> None:
        """Keep the record that was read to the slot and verifies."""
        held = self._held[key]
        if not held.layers:
            self._eviction.add(key, held.layout.size_bytes, cost=kv.k.shape[1])
            self._entered.add(key)
        held.layers[layer] = kv

    def drop(self, key: ChunkKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._eviction.remove(key)
            self._free(held)
            if held.layers:
                self._left.add(key)

    def refresh(self, version: Callable[[ChunkKey], object], hint: Callable[[ChunkKey], Hint | None]) -> None:
        """Drop the entries that aren't stored any more in the version that is held."""
        for key, held in list(self._held.items()):
            if version(key) == held.layout.version:
                held.hint = hint(key)
            else:
                self.drop(key)

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Return the hashes of the chunks that entered memory, and of those that left it, since the last call."""
        entered = sorted(key.chunk_hash for key in self._entered & self._held.keys())
        left = sorted(key.chunk_hash for key in self._left - self._held.keys())
        self._entered, self._left = set(), set()
        return entered, left

    def _make_room(self, length: int, in_use: Set[ChunkKey]) -> int | None:
        """Take so much memory, and return where it begins; None if it can't be had."""
        spared = self._requested.keys() | in_use | {key for key, held in self._held.items() if held.hint == "pin"}
        staying = sum(self._held[key].layout.size_bytes for key in spared if key in self._held)
        if staying + length > len(self._arena):
            return None
        while (start := self._first_gap(length)) is None:
            victim = self._eviction.evict(spared)
            if victim is None:  # what stays leaves no gap that is large enough
                return None
            assert isinstance(victim, ChunkKey)
            self._free(self._held.pop(victim))
            self._left.add(victim)
        insort(self._used, (start, start + length))
        return start

    def _first_gap(self, length: int) -> int | None:
        end = 0
        for start, next_end in self._used:
            if start - end >= length:
                return end
            end = next_end
        return end if end + length <= len(self._arena) else None

    def _free(self, held: _Held) -> None:
        self._used.remove((held.start, held.start + held.layout.size_bytes))
