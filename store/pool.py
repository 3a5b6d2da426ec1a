"""KV in memory, ready to use: read, checked and decoded once for all requests of a worker.

What lies here is used only as long as the index still names the place on disk that it was read from. Its memory is
taken whole at the start, as vLLM does, in huge pages where the system has them: taking it page by page would cost the
first request of a chunk more than all later ones save.
"""

import errno
import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch

from ragkv.store.eviction import Eviction, Hint
from ragkv.store.index import Place
from ragkv.store.record import ChunkKey, LayerKV
from ragkv.store.segments import Extent, FreeSpace, padded

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap doesn't name
_ARENA = 0  # the only segment


@dataclass
class _Held:
    """A chunk: its layers lie in `extent`, each in a slot as long in proportion as its record."""

    place: Place
    hint: Hint | None
    extent: Extent
    slots: list[tuple[int, int]]  # offset, length
    layers: dict[int, LayerKV] = field(default_factory=dict)


class Pool:
    """At most `memory_bytes` of chunks, by the policy `eviction` (`ragkv.store.eviction.POLICIES`). pinned: in memory
    that a GPU reads by itself. Not thread-safe.

    Raises MemoryError if the system hasn't got that much.
    """

    def __init__(self, memory_bytes: int, eviction: str = "gdsf", *, pinned: bool = False) -> None:
        self._arena = _pinned(memory_bytes) if pinned else _huge(memory_bytes)
        self._free = FreeSpace((), segment_bytes=memory_bytes)
        self._eviction = Eviction(eviction)
        self._held: dict[ChunkKey, _Held] = {}
        self._wanted: dict[ChunkKey, Hint | None] = {}
        self._entered: set[ChunkKey] = set()  # since `take_changes`
        self._left: set[ChunkKey] = set()
        self.num_hits = self.num_misses = 0  # records

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(list(self._held))

    @property
    def size_bytes(self) -> int:
        """Of what is taken by chunks."""
        return self._eviction.size_bytes

    def want(self, hints: Mapping[ChunkKey, Hint | None]) -> None:
        """A request is going to use these chunks: those that are here stay, the others are kept once they are read,
        but for ephemeral ones. What isn't wanted by a request, such as captures at index time, is only read here."""
        self._wanted = {key: hint for key, hint in hints.items() if hint != "ephemeral"}
        for key, hint in hints.items():
            if self._eviction.use(key):
                self._held[key].hint = hint

    def get(self, key: ChunkKey, place: Place, layer: int) -> LayerKV | None:
        held = self._held.get(key)
        if held is not None and held.place != place:  # it was replaced
            self.drop(key)
            held = None
        kv = held.layers.get(layer) if held else None
        self.num_hits += kv is not None
        self.num_misses += kv is None
        return kv

    def put(self, key: ChunkKey, place: Place, layer: int, kv: LayerKV, in_use: Set[ChunkKey]) -> None:
        """Keep a copy of a layer that was read, if the chunk is wanted and room can be made without giving up what is
        `in_use`, wanted or pinned."""
        held = self._held.get(key)
        if held is None:
            held = self._enter(key, place, layer, kv, in_use) if key in self._wanted else None
        if held is not None and layer not in held.layers:
            self._copy(held, layer, kv)

    def drop(self, key: ChunkKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._eviction.remove(key)
            self._free.give(held.extent)
            self._left.add(key)

    def refresh(self, place: Callable[[ChunkKey], Place | None], hint: Callable[[ChunkKey], Hint | None]) -> None:
        """Drop what isn't in the index any more. To be called when others have written there."""
        for key, held in list(self._held.items()):
            if place(key) == held.place:
                held.hint = hint(key)
            else:
                self.drop(key)

    def take_changes(self) -> tuple[list[str], list[str]]:
        """The hashes of the chunks that have come here, and of those that have gone, since this was last asked."""
        entered = sorted(key.chunk_hash for key in self._entered & self._held.keys())
        left = sorted(key.chunk_hash for key in self._left - self._held.keys())
        self._entered, self._left = set(), set()
        return entered, left

    def _enter(self, key: ChunkKey, place: Place, layer: int, kv: LayerKV, in_use: Set[ChunkKey]) -> _Held | None:
        ratio = kv.size_bytes / place.lengths[layer]
        lengths = [padded(int(ratio * length)) for length in place.lengths]
        extent = self._make_room(sum(lengths), in_use)
        if extent is None:
            return None
        offsets = [extent.offset + sum(lengths[:i]) for i in range(len(lengths))]
        held = self._held[key] = _Held(place, self._wanted[key], extent, list(zip(offsets, lengths, strict=True)))
        self._eviction.add(key, extent.length, cost=kv.k.shape[1])
        self._entered.add(key)
        return held

    def _make_room(self, length: int, in_use: Set[ChunkKey]) -> Extent | None:
        spared = self._wanted.keys() | in_use | {key for key, held in self._held.items() if held.hint == "pin"}
        staying = sum(self._held[key].extent.length for key in spared if key in self._held)
        if staying + length > len(self._arena):
            return None
        while (extent := self._free.take_in(_ARENA, length)) is None:
            victim = self._eviction.evict(spared)
            if victim is None:  # what stays lies in the way
                return None
            assert isinstance(victim, ChunkKey)
            self._free.give(self._held.pop(victim).extent)
            self._left.add(victim)
        return extent

    def _copy(self, held: _Held, layer: int, kv: LayerKV) -> None:
        start, length = held.slots[layer]
        if kv.size_bytes > length:
            return

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal start
            end = start + tensor.nbytes
            copy = self._arena[start:end].view(tensor.dtype).view(tensor.shape)
            start = end
            return copy.copy_(tensor)

        held.layers[layer] = kv.map(copied)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _huge(num_bytes: int) -> torch.Tensor:
    try:
        arena = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
        try:
            arena.madvise(advice)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise MemoryError(f"{num_bytes} bytes of memory can't be had: {error}") from error
            logger.debug("memory is taken page by page: %s", error)  # an old system
    return torch.frombuffer(arena, dtype=torch.uint8)
