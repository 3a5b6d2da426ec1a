"""The KV store on disk, as requests and the indexer use it: put, find, read, evict and delete chunks' KV.

Records are appended to large segment files, an entry's in one extent, and found by an index. `opening` opens and
recovers the folder, `disk` is the folder, `snapshot` reads, `pool` keeps in memory what requests use, `usage` knows
what to evict, and `admin` counts and verifies. The methods of `ragkv.store.base.KVStore` are documented there.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.admin import StoreAdmin
from ragkv.store.codecs import CODECS
from ragkv.store.eviction import Hint
from ragkv.store.index import Location
from ragkv.store.memory import Staging
from ragkv.store.opening import open_disk
from ragkv.store.pool import Pool
from ragkv.store.record import ChunkKey, LayerKV, check, encode, record_bytes, tokens_in
from ragkv.store.segments import Extent, padded
from ragkv.store.snapshot import SegmentSnapshot
from ragkv.store.usage import Usage

logger = logging.getLogger(__name__)


class SegmentStore:
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
        self._codec, self._disk_bytes, self._usage = CODECS[codec], disk_bytes, Usage(eviction)
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="ragkv-read")  # asks the system to; keeps no bytes
        self._has_memory = memory_bytes > 0
        self._pool = _take_pool(memory_bytes, eviction, pinned)
        self._staging: list[Staging] = []  # of snapshots that have ended
        self.disk = open_disk(path, self._usage)
        self.admin = StoreAdmin(self.disk)
        self._pool_version = self.disk.index.others_version()  # -1: the pool has to be compared with the index

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        chunks = list(chunks)
        sizes = [sum(padded(record_bytes(kv, self._codec)) for kv in layers) for _, layers in chunks]
        self._put(
            ((key, [encode(key.layer(i), kv, self._codec) for i, kv in enumerate(layers)]) for key, layers in chunks),
            sizes,
        )

    def put_records(self, key: ChunkKey, records: Sequence[bytes | memoryview]) -> None:
        """Store one entry whose layers another store has encoded, for imports.

        Raises CorruptRecordError, having written nothing, unless every record verifies.
        """
        for i, record in enumerate(records):
            check(key.layer(i), record)
        self._put([(key, records)], [sum(padded(len(record)) for record in records)])

    def _put(self, chunks: Iterable[tuple[ChunkKey, Sequence[bytes | memoryview]]], sizes: Sequence[int]) -> None:
        taken: list[Extent] = []
        with self.disk.errors("write to"):
            fits = self._make_room(sizes)
            with self.disk.writing() as (changes, free):
                self._usage.write_counts(changes)
                try:
                    for (key, records), has_room in zip(chunks, fits, strict=True):
                        size = sum(padded(len(record)) for record in records)
                        if has_room:
                            extent = free.take(size)
                            taken.append(extent)
                            self.disk.files.write(extent, records)
                            lengths = tuple(map(len, records))
                            changes.put(key.prefix(), Location(extent.segment, extent.offset, lengths))
                        # Without room it is as if it had been stored and evicted: it is precomputed when it is missed.
                        self._usage.put(changes, key.prefix(), size, cost=tokens_in(records[0]))
                    self.disk.files.sync(extent.segment for extent in taken)
                except BaseException:
                    for extent in taken:
                        self.disk.files.free(extent)
                    raise
            self.disk.sweep()
        self._pool_version = -1

    def _make_room(self, sizes: Sequence[int]) -> list[bool]:
        """Evict others for entries of these sizes. Returns which of them fit then.

        An entry that alone exceeds the limit evicts nothing.
        """
        if self._disk_bytes is None:
            return [True] * len(sizes)
        requested = 0
        for size in sizes:
            requested += size if requested + size <= self._disk_bytes else 0
        with self.disk.writing() as (changes, free):
            self._usage.write_counts(changes)
            room = self._disk_bytes - free.used_bytes
            for key in self._usage.victims(changes, requested - room) if requested > room else ():
                room += sum(location.extent.length for location in changes.delete(key))
        self.disk.sweep()
        fits = []
        for size in sizes:
            fits.append(size <= room)
            room -= size if fits[-1] else 0
        if not all(fits):
            counts = (fits.count(False), len(fits), self._disk_bytes >> 20)
            logger.warning("%d of %d chunks aren't stored: no room for them can be made in %d MiB", *counts)
        return fits

    def contains(self, key: ChunkKey) -> bool:
        return self.disk.locate(key) is not None

    def in_memory(self, key: ChunkKey) -> bool:
        return key in self._pool

    def in_page_cache(self, key: ChunkKey) -> bool:
        """Return whether the entry can be read without waiting for a disk; also True if it isn't stored."""
        location = self.disk.locate(key)
        return location is None or self.disk.files.is_cached(location.extent)

    def keys(self, *, evicted: bool = False) -> list[ChunkKey]:
        """Return the keys of all entries; with `evicted` also of evicted ones, whose uses are still remembered."""
        with self.disk.errors("read"):
            return [ChunkKey.parse(key) for key in self.disk.index.chunks(evicted=evicted)]

    def chunk_hashes(self, *, evicted: bool = False) -> Iterator[str]:
        """Return the chunks that have entries, each once; with `evicted` also those that had."""
        return iter(dict.fromkeys(key.chunk_hash for key in self.keys(evicted=evicted)))

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        keys = list(keys)
        self._usage.count(key.prefix() for key in keys)
        if self._has_memory:
            self._refresh_pool()
            self._pool.request({key: self.disk.index.hint(key.prefix()) for key in keys})
        if self._usage.is_due():
            self._usage.flush(self.disk.index)

    def _refresh_pool(self) -> None:
        """Drop from memory what was deleted, replaced or evicted."""
        index = self.disk.index
        version = index.others_version()
        if version != self._pool_version:
            self._pool.refresh(self.disk.locate, lambda key: index.hint(key.prefix()))
            self._pool_version = version

    def memory_changes(self) -> tuple[list[str], list[str]]:
        return self._pool.take_changes()

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        with self.disk.errors("read"):
            locations = [self.disk.locate(key) for key in keys if not self.in_memory(key)]
            for location in filter(None, locations):
                extent = location.extent
                if not self.disk.files.is_cached(extent):
                    self._prefetcher.submit(self.disk.files.prefetch, extent.segment, extent.offset, extent.length)

    @contextmanager
    def snapshot(self) -> Iterator[SegmentSnapshot]:
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = Staging()
        try:
            yield SegmentSnapshot(self.disk, self._pool, staging)
        finally:
            staging.shrink()
            self._staging.append(staging)

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None) -> None:
        with self.disk.errors("write to"), self.disk.index.writing() as changes:
            for chunk_hash in chunk_hashes:
                self._usage.hint(changes, bytes.fromhex(chunk_hash), hint)

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        """Delete every entry of these chunks. Returns how many records that were.

        When it returns, the bytes can't be read from the files any more. Copies in the memory of stores (this one's or
        another process's) are never returned again, and given up when they are next asked for.
        """
        # An entry's key begins with its chunk's hash.
        return self._delete(map(bytes.fromhex, chunk_hashes), forget_uses=True)

    def delete_keys(self, keys: Iterable[ChunkKey]) -> int:
        """Delete these entries only, as `delete` does."""
        return self._delete((key.prefix() for key in keys), forget_uses=True)

    def discard(self, key: ChunkKey) -> None:
        self._delete([key.prefix()], forget_uses=False)

    def _delete(self, prefixes: Iterable[bytes], *, forget_uses: bool) -> int:
        num_records = 0
        with self.disk.errors("delete from"):
            with self.disk.writing() as (changes, _):
                for prefix in prefixes:
                    num_records += sum(len(location.lengths) for location in changes.delete(prefix))
                    if forget_uses:
                        self._usage.delete(changes, prefix)
            self.disk.sweep()
        self._pool_version = -1
        return num_records

    def close(self) -> None:
        if self.disk.is_open:
            self._usage.flush(self.disk.index)
        self._prefetcher.shutdown(cancel_futures=True)
        self.disk.close()


def _take_pool(memory_bytes: int, eviction: str, pinned: bool) -> Pool:
    try:
        return Pool(memory_bytes, eviction, pinned=pinned)
    except (MemoryError, RuntimeError) as error:
        raise StoreError(
            f"no {memory_bytes / (1 << 30):g} GiB of memory for KV: {error}. Lower store.memory_gib"
        ) from error
