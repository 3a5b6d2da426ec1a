"""What a reader sees of the store on disk: each chunk as it was when it was first asked for."""

import time

from ragkv.store.index import Index, Place
from ragkv.store.pool import Pool
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV, decode
from ragkv.store.segments import SegmentFiles


class SegmentSnapshot:
    def __init__(self, files: SegmentFiles, index: Index, pool: Pool | None, read_mib_s: float | None) -> None:
        self._files, self._index, self._pool, self._read_mib_s = files, index, pool, read_mib_s
        self._found: dict[ChunkKey, Place | None] = {}

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        place = self._place(key)
        if place is None or layer >= len(place.lengths):
            return None
        kv = self._pool.get(key, place, layer) if self._pool is not None else None
        if kv is None:
            kv = self._read(key, place, layer)
            if kv is not None and self._pool is not None:
                self._pool.put(key, place, layer, kv, in_use=self._found.keys())
        return kv

    def _read(self, key: ChunkKey, place: Place, layer: int) -> LayerKV | None:
        try:
            record = self._files.read(*place.layer(layer))
            if record is None:
                raise CorruptRecordError("the file ends before the record")
            if self._read_mib_s is not None:
                time.sleep(len(record) / (self._read_mib_s * (1 << 20)))
            return decode(key.layer(layer), record)
        except CorruptRecordError:
            if self._index.place(key.prefix()) != place:
                return None  # deleted or replaced in the meantime
            raise

    def lost(self) -> list[ChunkKey]:
        return [key for key, place in self._found.items() if place and self._index.place(key.prefix()) != place]

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        place = self._place(key)
        if self._pool is not None and key in self._pool:
            return
        if place is not None and layer < len(place.lengths):
            self._files.prefetch(*place.layer(layer))

    def _place(self, key: ChunkKey) -> Place | None:
        if key not in self._found:
            self._found[key] = self._index.place(key.prefix())
        return self._found[key]
