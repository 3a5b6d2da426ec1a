"""What a reader sees of the store on disk: each chunk as it was when it was first asked for."""

from ragkv.store.disk import Disk
from ragkv.store.index import Location
from ragkv.store.memory import Staging
from ragkv.store.pool import Pool
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV, decode


class SegmentSnapshot:
    """Reads records straight to where they stay: to a slot of the pool if that keeps the chunk, else to `staging`,
    which the next layer takes again. They are checked there: what was checked is what is used, whatever becomes of the
    file."""

    def __init__(self, disk: Disk, pool: Pool, staging: Staging) -> None:
        self._disk, self._pool, self._staging = disk, pool, staging
        self._locations: dict[ChunkKey, Location | None] = {}
        self._staged_layer = 0

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        location = self._locate(key)
        if location is None or layer >= len(location.lengths):
            return None
        kv = self._pool.get(key, location, layer)
        if kv is not None:
            return kv
        slot = self._pool.slot(key, location, layer, in_use=self._locations.keys())
        memory = slot if slot is not None else self._stage(layer, location.lengths[layer])
        try:
            kv = self._read(key, location, layer, memory)
        except BaseException as error:
            if slot is not None:
                self._pool.drop(key)
            if isinstance(error, CorruptRecordError) and self._disk.locate(key) != location:
                return None  # deleted or replaced in the meantime
            raise
        if slot is not None:
            self._pool.keep(key, layer, kv)
        return kv

    def deleted(self) -> list[ChunkKey]:
        return [key for key, location in self._locations.items() if location and self._disk.locate(key) != location]

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        location = self._locate(key)
        if location is not None and layer < len(location.lengths) and not self._pool.has(key, layer):
            self._disk.files.prefetch(*location.layer(layer))

    def _locate(self, key: ChunkKey) -> Location | None:
        if key not in self._locations:
            self._locations[key] = self._disk.locate(key)
        return self._locations[key]

    def _stage(self, layer: int, num_bytes: int) -> memoryview:
        if layer != self._staged_layer:
            self._staging.reuse()
            self._staged_layer = layer
        return self._staging.take(num_bytes)

    def _read(self, key: ChunkKey, location: Location, layer: int, memory: memoryview) -> LayerKV:
        segment, offset, _ = location.layer(layer)
        if not self._disk.files.read_into(segment, offset, memory):
            raise CorruptRecordError("the file ends before the record, or can't be read")
        return decode(key.layer(layer), memory)
