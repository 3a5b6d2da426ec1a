"""KV in memory, ready to use: read and checked once for all requests of a worker.

What lies here is used only as long as the index still names the place on disk that it was read from. Its memory is
taken whole at the start, as vLLM does.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from ragkv.store.eviction import Eviction, Hint
from ragkv.store.index import Location
from ragkv.store.memory import take_memory
from ragkv.store.record import ChunkKey, LayerKV
from ragkv.store.segments import Extent, FreeSpace

_ARENA = 0  # the only segment


@dataclass
class _Held:
    """A chunk: its records lie in `extent` as they do on disk. layers: those that are read and whole."""

    place: Location
    hint: Hint | None
    extent: Extent
    layers: dict[int, LayerKV] = field(default_factory=dict)


class Pool:
    """At most `memory_bytes` of chunks, by the policy `eviction` (`ragkv.store.eviction.POLICIES`). pinned: in memory
    that a GPU reads by itself. Not thread-safe.

    Raises MemoryError if the system hasn't got that much.
    """

    def __init__(self, memory_bytes: int, eviction: str = "gdsf", *, pinned: bool = False) -> None:
        self._arena = take_memory(memory_bytes, pinned=pinned)
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
        but for ephemeral ones. What isn't wanted by a request, such as contexts at index time, is only read here."""
        self._wanted = {key: hint for key, hint in hints.items() if hint != "ephemeral"}
        for key, hint in hints.items():
            if self._eviction.touch(key):
                self._held[key].hint = hint

    def get(self, key: ChunkKey, place: Location, layer: int) -> LayerKV | None:
        held = self._held.get(key)
        if held is not None and held.place != place:  # it was replaced
            self.drop(key)
            held = None
        kv = held.layers.get(layer) if held else None
        self.num_hits += kv is not None
        self.num_misses += kv is None
        return kv

    def has(self, key: ChunkKey, layer: int) -> bool:
        held = self._held.get(key)
        return held is not None and layer in held.layers

    def slot(self, key: ChunkKey, place: Location, layer: int, in_use: Set[ChunkKey]) -> memoryview | None:
        """Where to read a record to that `get` hasn't got, if the chunk is wanted and room can be made without giving
        up what is `in_use`, wanted or pinned. Then `keep` it if it is whole, or else `drop` the chunk."""
        held = self._held.get(key)
        if held is None and key in self._wanted:
            held = self._enter(key, place, in_use)
        if held is None or held.place != place or layer in held.layers:
            return None
        start = held.extent.offset + place.starts[layer]
        return self._arena[start : start + place.lengths[layer]]

    def keep(self, key: ChunkKey, layer: int, kv: LayerKV) -> None:
        """What lies in the slot, checked."""
        held = self._held[key]
        if not held.layers:
            self._eviction.add(key, held.extent.length, cost=kv.k.shape[1])
            self._entered.add(key)
        held.layers[layer] = kv

    def drop(self, key: ChunkKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._eviction.remove(key)
            self._free.give(held.extent)
            if held.layers:
                self._left.add(key)

    def refresh(self, place: Callable[[ChunkKey], Location | None], hint: Callable[[ChunkKey], Hint | None]) -> None:
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

    def _enter(self, key: ChunkKey, place: Location, in_use: Set[ChunkKey]) -> _Held | None:
        extent = self._make_room(place.extent.length, in_use)
        if extent is None:
            return None
        held = self._held[key] = _Held(place, self._wanted[key], extent)
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
