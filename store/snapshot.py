"""What a reader sees of the store on disk: each chunk as it was when it was first asked for.

A record is read straight to where it stays: into the pool if that keeps the chunk, else into memory that the next layer
takes again. There it is checked: what was checked is what is used, whatever becomes of the file.
"""

from ragkv.store.index import Index, Location
from ragkv.store.memory import Staging
from ragkv.store.pool import Pool
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV, decode
from ragkv.store.segments import SegmentFiles


class SegmentSnapshot:
    def __init__(self, files: SegmentFiles, index: Index, pool: Pool | None, staging: Staging) -> None:
        self._files, self._index, self._pool, self._staging = files, index, pool, staging
        self._found: dict[ChunkKey, Location | None] = {}
        self._staged_layer = 0

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        place = self._place(key)
        if place is None or layer >= len(place.lengths):
            return None
        kv = self._pool.get(key, place, layer) if self._pool is not None else None
        if kv is not None:
            return kv
        try:
            return self._read(key, place, layer)
        except CorruptRecordError:
            if self._index.place(key.prefix()) != place:
                return None  # deleted or replaced in the meantime
            raise

    def _read(self, key: ChunkKey, place: Location, layer: int) -> LayerKV:
        slot = self._pool.slot(key, place, layer, in_use=self._found.keys()) if self._pool is not None else None
        if slot is None or self._pool is None:
            return self._read_into(self._stage(place, layer), key, place, layer)
        try:
            kv = self._read_into(slot, key, place, layer)
        except BaseException:
            self._pool.drop(key)
            raise
        self._pool.keep(key, layer, kv)
        return kv

    def _read_into(self, memory: memoryview, key: ChunkKey, place: Location, layer: int) -> LayerKV:
        if not self._files.read_into(place.segment, place.offset + place.starts[layer], memory):
            raise CorruptRecordError("the file ends before the record, or can't be read")
        return decode(key.layer(layer), memory)

    def _stage(self, place: Location, layer: int) -> memoryview:
        if layer != self._staged_layer:
            self._staging.reuse()
            self._staged_layer = layer
        return self._staging.take(place.lengths[layer])

    def lost(self) -> list[ChunkKey]:
        return [key for key, place in self._found.items() if place and self._index.place(key.prefix()) != place]

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        place = self._place(key)
        if place is None or layer >= len(place.lengths) or (self._pool is not None and self._pool.has(key, layer)):
            return
        self._files.prefetch(*place.layer(layer))

    def _place(self, key: ChunkKey) -> Location | None:
        try:
            return self._found[key]
        except KeyError:
            place = self._found[key] = self._index.place(key.prefix())
            return place
