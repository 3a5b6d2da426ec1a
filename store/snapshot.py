"""What a reader sees of the store on disk: each entry as it was when it was first asked for."""

from contextlib import suppress

from ragkv.store.entries import EntryFile, EntryFolder
from ragkv.store.memory import Staging
from ragkv.store.pool import Pool
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV, decode


class DiskSnapshot:
    """Reads records straight to where they stay: to a slot of the pool if that keeps the entry, else to `staging`,
    which the next layer takes again. They are checked there: what was checked is what is used, whatever becomes of the
    file."""

    def __init__(self, entries: EntryFolder, pool: Pool, staging: Staging) -> None:
        self._entries, self._pool, self._staging = entries, pool, staging
        self._files: dict[ChunkKey, EntryFile | None] = {}
        self._staged_layer = 0

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        file = self._open(key)
        if file is None or layer >= len(file.layout.lengths):
            return None
        kv = self._pool.get(key, file.layout, layer)
        if kv is not None:
            return kv
        slot = self._pool.slot(key, file.layout, layer, in_use=self._files.keys())
        memory = slot if slot is not None else self._stage(layer, file.layout.lengths[layer])
        try:
            file.read_into(layer, memory)
            kv = decode(key.layer(layer), memory)
        except BaseException:
            if slot is not None:
                self._pool.drop(key)
            raise
        if slot is not None:
            self._pool.keep(key, layer, kv)
        return kv

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        with suppress(CorruptRecordError):  # `get` will say so
            file = self._open(key)
            if file is not None and layer < len(file.layout.lengths) and not self._pool.has(key, layer):
                file.prefetch(layer)

    def close(self) -> None:
        for file in filter(None, self._files.values()):
            file.close()

    def _open(self, key: ChunkKey) -> EntryFile | None:
        if key not in self._files:
            self._files[key] = self._entries.open(key)
        return self._files[key]

    def _stage(self, layer: int, num_bytes: int) -> memoryview:
        if layer != self._staged_layer:
            self._staging.reuse()
            self._staged_layer = layer
        return self._staging.take(num_bytes)
