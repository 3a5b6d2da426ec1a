"""The KV store on disk, as requests and the indexer use it: put, find, read, evict and delete chunks' KV.

Each entry is a file (`entries`), and the files tell what is stored; a table beside them knows their uses (`usage`).
`opening` opens and recovers the folder, `memory` keeps what requests use, `admin` counts and verifies. The methods of
`ragkv.store.base.KVStore` are documented there.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import torch

from ragkv.errors import StoreError
from ragkv.store.admin import StoreAdmin
from ragkv.store.base import Whole
from ragkv.store.codecs import CODECS
from ragkv.store.control import StoreControl
from ragkv.store.entries import EntryFile, EntryFolder, entry_bytes
from ragkv.store.eviction import Hint
from ragkv.store.memory import Pool, Staging
from ragkv.store.opening import open_folder, store_errors
from ragkv.store.record import ChunkKey, CorruptRecordError, LayerKV, check, decode, encode, read_header, record_bytes

logger = logging.getLogger(__name__)


class DiskStore:
    """Chunk KV in the folder `path`. codec: how records are written from now on; stored ones may have others.

    disk_bytes: the limit for records; to make room, the entries that `eviction` values least go first. None: no limit.
    memory_bytes: the limit for entries kept in memory, chosen by the same eviction among those that requests use; 0:
    none. pinned: that memory is page-locked, so that a GPU can copy from it directly.

    Any number of processes may have the folder open; a lock excludes writers from each other. Threads may share a
    store. Raises StoreError if the folder holds something else, was made by another version, or can't be written.
    """

    def __init__(
        self,
        path: Path,
        codec: str = "raw",
        *,
        disk_bytes: int | None = None,
        memory_bytes: int = 0,
        eviction: str = "gdsf",
        pinned: bool = False,
    ) -> None:
        self.path, self.codec, self._disk_bytes = path, CODECS[codec], disk_bytes
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="ragkv-read")  # asks the system to; keeps no bytes
        self._has_memory = memory_bytes > 0
        try:
            self._pool = Pool(memory_bytes, eviction, pinned=pinned)
        except (MemoryError, RuntimeError) as error:
            size = f"{memory_bytes / (1 << 30):g} GiB"
            raise StoreError(f"no {size} of memory for KV: {error}. Lower store.memory_gib") from error
        self._staging: list[Staging] = []  # of snapshots that have ended
        self.entries, self._usage, self._lock = open_folder(path, eviction)
        self.admin = StoreAdmin(path, self.entries, self._usage)
        self.control = StoreControl(path, self.entries, self._usage)
        self._last_change = 0  # of the files, when the pool was compared with them
        # Called with the chunks that `delete` is about to delete, for who has copies of them.
        self.before_delete: Callable[[Sequence[str]], None] | None = None
        # Called where chunks are deleted or cleared: deletes what else was computed of their text.
        self.clear_derived: Callable[[], object] = lambda: None

    def put(
        self,
        chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """is_wanted: asked once no other process can delete anything; False stores nothing."""
        chunks = list(chunks)
        lengths = [[record_bytes(kv, self.codec) for kv in layers] for _, layers in chunks]
        self._put(
            ((key, [encode(key.layer(i), kv, self.codec) for i, kv in enumerate(layers)]) for key, layers in chunks),
            list(map(entry_bytes, lengths)),
            is_wanted,
        )

    def put_records(
        self, key: ChunkKey, records: Sequence[bytes | memoryview], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Store one entry whose layers another store has encoded. is_wanted: as of `put`.

        Raises CorruptRecordError, having written nothing, unless every record verifies.
        """
        for i, record in enumerate(records):
            check(key.layer(i), record)
        self._put([(key, records)], [entry_bytes([*map(len, records)])], is_wanted)

    def _put(
        self,
        chunks: Iterable[tuple[ChunkKey, Sequence[bytes | memoryview]]],
        sizes: Sequence[int],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Write files without names, then rows, then give the files their names: so every file has a row.

        What another process deletes in between gets no name.
        """
        files: dict[ChunkKey, Path] = {}
        with self._errors("write to"):
            try:
                with self._usage.writing():
                    if not is_wanted():
                        return
                    self._usage.write_counts()
                    fits = self._make_room(sizes)
                    for (key, records), size_bytes, has_room in zip(chunks, sizes, fits, strict=True):
                        if has_room:
                            files[key] = self.entries.write(key, records)
                        # Without room it is as if it had been stored and evicted: it is precomputed when it is missed.
                        self._usage.put(key, size_bytes, cost=read_header(records[0]).shape[1], stored=has_room)
                with self._usage.writing():
                    self.entries.publish({key: file for key, file in files.items() if self._usage.knows(key)})
            finally:
                for file in files.values():
                    file.unlink(missing_ok=True)

    def _make_room(self, sizes: Sequence[int]) -> list[bool]:
        """Evict others for entries of these sizes. Returns which of them fit then.

        An entry that alone exceeds the limit evicts nothing.
        """
        if self._disk_bytes is None:
            return [True] * len(sizes)
        requested = 0
        for size in sizes:
            requested += size if requested + size <= self._disk_bytes else 0
        room = self._disk_bytes - self._usage.stored_bytes
        if requested > room:
            self.entries.delete(self._usage.evict(requested - room))
            room = self._disk_bytes - self._usage.stored_bytes
        fits = []
        for size in sizes:
            fits.append(size <= room)
            room -= size if fits[-1] else 0
        if not all(fits):
            counts = (fits.count(False), len(fits), self._disk_bytes >> 20)
            logger.warning("%d of %d chunks aren't stored: no room for them can be made in %d MiB", *counts)
        return fits

    def contains(self, key: ChunkKey) -> bool:
        return self.entries.contains(key)

    def remembers(self, key: ChunkKey) -> bool:
        """Return whether the entry is stored, or was until it was evicted; not if it was deleted."""
        with self._errors("read"), self._usage.writing():
            return self._usage.knows(key)

    def in_memory(self, key: ChunkKey) -> bool:
        return key in self._pool

    def in_page_cache(self, key: ChunkKey) -> bool:
        """Return whether the entry can be read without waiting for a disk; also True if it isn't stored."""
        return self.entries.is_cached(key)

    def keys(self, *, evicted: bool = False) -> list[ChunkKey]:
        """Return the keys of all entries; with `evicted` also of evicted ones, whose uses are still remembered."""
        with self._errors("read"):
            return [*self.entries, *(self._usage.evicted() if evicted else ())]

    def chunk_hashes(self, *, evicted: bool = False) -> Iterator[str]:
        """Return the chunks that have entries, each once; with `evicted` also those that had."""
        return iter(dict.fromkeys(key.chunk_hash for key in self.keys(evicted=evicted)))

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        keys = list(keys)
        self._usage.count(keys)
        if self._has_memory:
            self._refresh()
            self._pool.request({key: self._usage.hint_of(key) for key in keys})

    def _refresh(self) -> None:
        """Compare what is in memory with the files, if they have changed."""
        if (last_change := self.entries.last_change) != self._last_change:
            self._pool.refresh(self.entries.version, self._usage.hint_of)
            self._last_change = last_change

    def hold(self, keys: Sequence[ChunkKey], spared: Iterable[ChunkKey] = ()) -> list[ChunkKey]:
        """Read entries into memory, in place of what is worth least there. Returns those that are there then.

        spared: what stays. Counts no use. The others aren't stored, don't verify, or would need room of what is
        pinned, spared or requested.
        """
        self._refresh()
        wanted = {key: self._usage.hint_of(key) for key in (*spared, *keys)}
        with self._pool.requesting(wanted), self.snapshot() as snapshot:
            for key in keys:
                with suppress(CorruptRecordError):  # whoever uses it will say so
                    layer = 0
                    while snapshot.get(key, layer) is not None and self.in_memory(key):
                        layer += 1
        return [key for key in keys if self.in_memory(key)]

    def release(self, keys: Iterable[ChunkKey]) -> int:
        """Give up entries in memory; on disk they stay. Returns the bytes that they took."""
        sizes = self._pool.sizes()
        released = [key for key in keys if key in sizes]
        for key in released:
            self._pool.drop(key)
        return sum(map(sizes.__getitem__, released))

    def held(self) -> dict[ChunkKey, int]:
        """Return the entries in memory, with the bytes that they take."""
        self._refresh()
        return self._pool.sizes()

    def memory_changes(self) -> tuple[list[str], list[str]]:
        return self._pool.take_changes()

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        with self._errors("read"):
            for key in keys:
                if not self.in_memory(key) and not self.in_page_cache(key):
                    self._prefetcher.submit(self.entries.prefetch, key)

    @contextmanager
    def snapshot(self) -> Iterator["DiskSnapshot"]:
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = Staging()
        snapshot = DiskSnapshot(self.entries, self._pool, staging)
        try:
            yield snapshot
        finally:
            snapshot.close()
            staging.shrink()
            self._staging.append(staging)

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None) -> None:
        self.control.hint(chunk_hashes, hint, disk_bytes=None)

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        """Delete every entry of these chunks. Returns how many entries that were.

        When it returns, no file has them; a request that is just reading one reads it to the end. Copies in the memory
        of stores (this one's or another process's) are never returned again, and given up with the next request.
        """
        num_deleted, chunk_hashes = 0, list(chunk_hashes)
        with self._errors("delete from"), self._usage.writing():
            self.clear_derived()
            if self.before_delete is not None:
                self.before_delete(chunk_hashes)
            for chunk_hash in chunk_hashes:
                keys = self.entries.keys_of(chunk_hash)
                self.entries.delete(keys)
                self._usage.forget(bytes.fromhex(chunk_hash))  # an entry's key begins with it
                num_deleted += len(keys)
        return num_deleted

    def delete_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Delete these entries only, as `delete` does."""
        keys = list(keys)
        with self._errors("delete from"), self._usage.writing():
            self.entries.delete(keys)
            for key in keys:
                self._usage.forget(key.prefix())

    def delete_all(self, begin: Callable[[], None]) -> int:
        """Delete every entry, also those that a process is just writing. Returns how many that were.

        begin: called once nobody else can write; what `put` stores after it has asked `is_wanted` comes later.
        """
        with self._errors("delete from"), self._usage.writing():
            begin()
            keys = list(self.entries)
            self.entries.delete(keys)
            self._usage.forget(b"")  # all: what isn't known any more gets no name
        return len(keys)

    def discard(self, key: ChunkKey) -> None:
        self.control.clear([key])

    def close(self) -> None:
        if self._lock >= 0:
            self._usage.flush()
            self._prefetcher.shutdown(cancel_futures=True)
            self._usage.close()
            os.close(self._lock)
            self._lock = -1  # closed

    def _errors(self, verb: str) -> AbstractContextManager[None]:
        return store_errors(self.path, verb)


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

    def whole(self, key: ChunkKey) -> Whole | None:
        with suppress(CorruptRecordError):  # `get` will say so
            file = self._open(key)
            memory = self._pool.whole(key, file.layout) if file else None
            if file and memory is not None:
                return Whole(file.layout, torch.frombuffer(memory, dtype=torch.uint8))
        return None

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
