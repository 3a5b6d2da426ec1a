"""The KV store on disk: chunks' records in segment files, and where they lie in an index.

A chunk's records, one for each layer, lie together in one extent, in the order in which they are read. They are written
and synced before the index names them, and the index forgets them before they are freed: a process killed at any moment
leaves nothing half-written behind what the index knows. The index's lock on writers covers the segments too.
"""

import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.base import StoreStats, Verification
from ragkv.store.codecs import CODECS
from ragkv.store.eviction import Hint
from ragkv.store.index import FORMAT, Changes, DamagedIndexError, Index, Location, is_damage
from ragkv.store.memory import Staging
from ragkv.store.pool import Pool
from ragkv.store.rebuild import find_chunks
from ragkv.store.record import (
    FORMAT_VERSION,
    ChunkKey,
    CorruptRecordError,
    LayerKV,
    check,
    codec_name,
    encode,
    record_bytes,
    tokens_in,
)
from ragkv.store.segments import Extent, FreeSpace, SegmentFiles, outside, padded
from ragkv.store.snapshot import SegmentSnapshot
from ragkv.store.usage import Usage
from ragkv.store.verification import verify_records

logger = logging.getLogger(__name__)

_INDEX = "index.db"
_NEARLY_FULL_BYTES = 64 << 20
_USES_EVERY_S = 10.0


class SegmentStore:
    """Chunk KV in the folder `path`. codec: how records are written; those that are there may have others.

    disk_bytes: what the records may take; for a chunk that needs room those go that `eviction` values least. None: no
    limit. memory_bytes: what is kept in memory of the chunks that requests use (`ragkv.store.pool`), by the same
    eviction; 0: nothing. pinned: that memory is read by a GPU.

    Any number of processes may have the folder open, and write in turn; threads may share a store. Raises StoreError if
    the folder holds something else, was made by another version, or can't be written.
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
        self.path, self._codec, self._disk_bytes, self._usage = path, CODECS[codec], disk_bytes, Usage(eviction)
        self._uses: Counter[bytes] = Counter()  # not yet in the index
        self._uses_written_at = time.monotonic()
        self._write_lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ragkv-read")  # has the system read, and holds no bytes
        self._free: FreeSpace | None = None  # as of `_version` of the index
        self._version = -1
        self._pool = self._take_memory(memory_bytes, eviction, pinned) if memory_bytes else None
        self._staging: list[Staging] = []  # of snapshots that have ended
        with self._store_errors("open"):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(
                    self._lock, fcntl.LOCK_SH
                )  # every user shares it, one that mends is alone: not `filelock`'s
                self._files = SegmentFiles(path / "segments")
                self._index = self._open_index()
                self._check_format()
                self._recover()
            except BaseException:
                self._unlock()
                raise
        self._pool_version = self._index.others_version()  # -1: to be looked through

    def _take_memory(self, memory_bytes: int, eviction: str, pinned: bool) -> Pool:
        try:
            return Pool(memory_bytes, eviction, pinned=pinned)
        except (MemoryError, RuntimeError) as error:
            raise StoreError(
                f"no {memory_bytes / (1 << 30):g} GiB of memory for KV: {error}. Lower store.memory_gib"
            ) from error

    def _open_index(self) -> Index:
        """One that is damaged is put aside, and then a new one is made from what the segments hold."""
        file = self.path / _INDEX
        try:
            return Index(file, str(FORMAT_VERSION))
        except DamagedIndexError as error:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{file} is damaged ({error}), and another process uses it. Stop that process and start again: a "
                    "new index is then made from the records"
                ) from error
            logger.warning("%s is damaged (%s); made anew from the records", file, error)
            for part in self.path.glob(f"{file.name}*"):
                part.unlink()
            index = Index(file, str(FORMAT_VERSION))
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return index

    def _check_format(self) -> None:
        expected = str(FORMAT_VERSION)
        found = self._index.meta(FORMAT)
        if found is None:
            self._begin_index(expected)
        elif found != expected:
            self._index.close()
            raise StoreError(
                f"{self.path} holds KV records of format {found}; this release reads format "
                f"{FORMAT_VERSION}. Use the release that wrote it, another --home, or delete the folder and index again"
            )

    def _begin_index(self, version: str) -> None:
        """Of a new store, or of one whose index is lost: then chunks are found again by their records. All of it in one
        transaction, so that an index with a format is whole, and what it doesn't name may be freed."""
        with self._writing() as (changes, _):
            if not changes.query("select 1 from meta where name = ?", FORMAT):  # no other process was faster
                found = list(find_chunks(self._files))
                for key, segment, offset, lengths in found:
                    changes.put(key, place := Location(segment, offset, lengths))
                    first = self._files.read(*place.layer(0)) or b""
                    self._usage.put(changes, key, place.extent.length, cost=tokens_in(first))
                if found:
                    logger.warning("found %d chunks again whose index was lost", len(found))
                changes.set_meta(FORMAT, version)
        self._free = None

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        chunks = list(chunks)
        sizes = [sum(padded(record_bytes(kv, self._codec)) for kv in layers) for _, layers in chunks]
        self._put(
            ((key, [encode(key.layer(i), kv, self._codec) for i, kv in enumerate(layers)]) for key, layers in chunks),
            sizes,
        )

    def put_records(self, key: ChunkKey, records: Sequence[bytes | memoryview]) -> None:
        """As `put`, for one chunk whose layers another store has encoded. Raises CorruptRecordError, having written
        nothing, unless every record verifies."""
        for i, record in enumerate(records):
            check(key.layer(i), record)
        self._put([(key, records)], [sum(padded(len(record)) for record in records)])

    def _put(self, chunks: Iterable[tuple[ChunkKey, Sequence[bytes | memoryview]]], sizes: Sequence[int]) -> None:
        taken: list[Extent] = []
        with self._store_errors("write to"):
            stored = self._make_room(sizes)
            with self._writing() as (changes, free):
                self._write_uses(changes)
                try:
                    for (key, values), has_room in zip(chunks, stored, strict=True):
                        if not has_room:  # as if it had been stored and evicted: it comes back when it is asked for
                            size = sum(padded(len(value)) for value in values)
                            self._usage.put(changes, key.prefix(), size, cost=tokens_in(values[0]))
                            continue
                        extent = free.take(sum(padded(len(value)) for value in values))
                        taken.append(extent)
                        self._files.write(extent, values)
                        changes.put(key.prefix(), Location(extent.segment, extent.offset, tuple(map(len, values))))
                        self._usage.put(changes, key.prefix(), extent.length, cost=tokens_in(values[0]))
                    self._files.sync(extent.segment for extent in taken)
                except BaseException:
                    for extent in taken:
                        self._files.free(extent)
                    raise
            self._sweep()
        self._pool_version = -1

    def _make_room(self, sizes: Sequence[int]) -> list[bool]:
        """Evict others for chunks of these sizes. Which of them are to be stored: as many as there is room for then."""
        if self._disk_bytes is None:
            return [True] * len(sizes)
        wanted = 0
        for size in sizes:
            wanted += size if wanted + size <= self._disk_bytes else 0
        with self._writing() as (changes, free):
            self._write_uses(changes)
            room = self._disk_bytes - free.used_bytes
            for key in self._usage.victims(changes, wanted - room) if wanted > room else ():
                room += sum(place.extent.length for place in changes.delete(key))
        self._sweep()
        stored = []
        for size in sizes:
            stored.append(size <= room)
            room -= size if stored[-1] else 0
        if not all(stored):
            counts = (stored.count(False), len(stored), self._disk_bytes >> 20)
            logger.warning("%d of %d chunks aren't stored: no room for them can be made in %d MiB", *counts)
        return stored

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Written to the index every few seconds, and with what is written anyway."""
        keys = list(keys)
        self._uses.update(key.prefix() for key in keys)
        if self._pool is not None:
            self._refresh(self._pool)
            self._pool.want({key: self._index.hint(key.prefix()) for key in keys})
        if time.monotonic() - self._uses_written_at > _USES_EVERY_S:
            self._flush_uses()

    def _refresh(self, pool: Pool) -> None:
        """Drop from memory what was deleted, replaced or evicted."""
        try:
            version = self._index.others_version()
        except sqlite3.Error as error:
            logger.warning("can't look into the index: %s", error)
            version = -1
        if version != self._pool_version:
            pool.refresh(lambda key: self._index.place(key.prefix()), lambda key: self._index.hint(key.prefix()))
            self._pool_version = version

    def _flush_uses(self) -> None:
        if self._uses:
            try:
                with self._index.writing() as changes:
                    self._write_uses(changes)
            except sqlite3.Error as error:  # the disk is full, or another process writes for long
                logger.warning("uses of chunks aren't counted: %s", error)

    def _write_uses(self, changes: Changes) -> None:
        uses, self._uses = self._uses, Counter()
        self._uses_written_at = time.monotonic()
        self._usage.touch(changes, uses)

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        with self._store_errors("read"):
            places = [self._index.place(key.prefix()) for key in keys if not self.in_memory(key)]
            for place in filter(None, places):
                extent = place.extent
                if not self._files.is_cached(extent):
                    self._reader.submit(self._files.prefetch, extent.segment, extent.offset, extent.length)

    def in_memory(self, key: ChunkKey) -> bool:
        return self._pool is not None and key in self._pool

    def memory_changes(self) -> tuple[list[str], list[str]]:
        return self._pool.take_changes() if self._pool is not None else ([], [])

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None) -> None:
        """How these chunks' records are to be treated when room is needed (`ragkv.store.eviction.HINTS`)."""
        with self._store_errors("write to"), self._index.writing() as changes:
            for chunk_hash in chunk_hashes:
                self._usage.hint(changes, bytes.fromhex(chunk_hash), hint)

    def contains(self, key: ChunkKey) -> bool:
        return self._index.place(key.prefix()) is not None

    @contextmanager
    def snapshot(self) -> Iterator["SegmentSnapshot"]:
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = Staging()
        try:
            yield SegmentSnapshot(self._files, self._index, self._pool, staging)
        finally:
            staging.shrink()
            self._staging.append(staging)

    def records(self, key: ChunkKey) -> list[bytes] | None:
        """A chunk's records as they lie in the segment, checked. None where there are none.

        Raises CorruptRecordError for bytes that don't verify.
        """
        place = self._index.place(key.prefix())
        if place is None:
            return None
        records = [bytes(self._files.read(*place.layer(i)) or b"") for i in range(len(place.lengths))]
        try:
            for i, record in enumerate(records):
                check(key.layer(i), record)
        except CorruptRecordError:
            if self._index.place(key.prefix()) != place:
                return self.records(key)  # deleted or replaced in the meantime
            raise
        return records

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        """Gone for good when it returns: the bytes can't be read from the files any more."""
        return self._delete(map(bytes.fromhex, chunk_hashes))

    def delete_keys(self, keys: Iterable[ChunkKey]) -> int:
        """As `delete`, only of these models and anchors."""
        return self._delete(key.prefix() for key in keys)

    def _delete(self, prefixes: Iterable[bytes]) -> int:
        with self._store_errors("delete from"):
            with self._writing() as (changes, _):
                places = []
                for prefix in prefixes:
                    places += changes.delete(prefix)
                    self._usage.delete(changes, prefix)
            self._sweep()
        self._pool_version = -1
        return sum(len(place.lengths) for place in places)

    def discard(self, key: ChunkKey) -> None:
        """Forget one precompute of a chunk whose bytes went bad. Its uses still count."""
        with self._store_errors("delete from"):
            with self._writing() as (changes, _):
                changes.delete(key.prefix())
            self._sweep()
        self._pool_version = -1

    def in_page_cache(self, key: ChunkKey) -> bool:
        """Whether the chunk can be read without waiting for a disk."""
        place = self._index.place(key.prefix())
        return place is None or self._files.is_cached(place.extent)

    def drop_cached(self, keys: Iterable[ChunkKey]) -> None:
        """Have the system forget its copies in memory: for measuring."""
        for place in filter(None, (self._index.place(key.prefix()) for key in keys)):
            self._files.drop_cached(place.extent)

    def locate(self, key: ChunkKey, layer: int) -> tuple[Path, int, int]:
        """The file, offset and length of a record. Raises KeyError where there is none."""
        place = self._index.place(key.prefix())
        if place is None:
            raise KeyError(key)
        segment, offset, length = place.layer(layer)
        return self._files.path(segment), offset, length

    def chunk_hashes(self, *, evicted: bool = False) -> Iterator[str]:
        """The chunks that have records, each once; with `evicted` also those that had to make room."""
        return iter(dict.fromkeys(key.chunk_hash for key in self.keys(evicted=evicted)))

    def keys(self, *, evicted: bool = False) -> list[ChunkKey]:
        """Of all contexts; with `evicted` also of those that had to make room."""
        with self._store_errors("read"):
            return [ChunkKey.parse(key) for key in self._index.chunks(evicted=evicted)]

    def sizes(self) -> dict[ChunkKey, int]:
        """What each chunk's records take on disk, in bytes."""
        with self._store_errors("read"):
            return {ChunkKey.parse(key): place.extent.length for key, place in self._index.places()}

    def codecs(self) -> dict[str, int]:
        """How many records each codec has, by the first record of each chunk; damaged ones are left out."""
        counts: Counter[str] = Counter()
        with self._store_errors("read"):
            for _, place in self._index.places():
                with suppress(CorruptRecordError):
                    counts[codec_name(self._files.read(*place.layer(0)) or b"")] += len(place.lengths)
        return dict(counts)

    def gauges(self) -> dict[str, int]:
        """What is quickly counted: contexts here and evicted, bytes of the files."""
        with self._store_errors("read"):
            here, evicted = self._index.counts()
        return {"entries": here, "evicted_entries": evicted, "disk_bytes": self._files.size_on_disk()}

    def stats(self) -> StoreStats:
        with self._store_errors("read"):
            lengths = [place.lengths for _, place in self._index.places()]
            return StoreStats(
                len(list(self.chunk_hashes())),
                sum(map(len, lengths)),
                sum(map(sum, lengths)),
                self._index.size_on_disk() + self._files.size_on_disk(),
            )

    def verify(self) -> Verification:
        """Also that nothing but records is in the files: what was deleted is gone."""
        with self._store_errors("read"):
            with self._index.writing() as changes:  # nobody writes in the meantime
                places, known = changes.places(), changes.extents()
                left = list(outside(self._files.data(), known))
            found = verify_records(self._records(places))
        overlaps = [f"{b} overlaps {a}" for a, b in pairwise(known) if a.segment == b.segment and b.offset < a.end]
        unknown = [f"{extent} holds what no record is known for" for extent in left]
        return Verification(found.num_records, [*found.problems, *overlaps, *unknown])

    def _records(self, places: Sequence[tuple[bytes, Location]]) -> Iterator[tuple[bytes, memoryview]]:
        for prefix, place in places:
            for i in range(len(place.lengths)):
                yield prefix + struct.pack(">H", i), self._files.read(*place.layer(i)) or memoryview(b"")

    def close(self) -> None:
        if self._lock >= 0:
            self._flush_uses()
        self._reader.shutdown(cancel_futures=True)
        self._files.close()
        self._index.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _writing(self) -> Iterator[tuple[Changes, FreeSpace]]:
        """The one writer of all processes. What it takes of the free space is taken if the transaction is committed."""
        with self._write_lock:
            free, self._free = self._free, None
            with self._index.writing() as changes:
                version = changes.others_version
                if free is None or version != self._version:
                    free = FreeSpace(changes.extents())
                yield changes, free
            self._free, self._version = free, version

    def _sweep(self) -> None:
        """Free what was given up."""
        if not self._index.num_freed():
            return
        with self._writing() as (changes, free):
            for extent in changes.freed():
                self._files.free(extent)
                free.give(extent)
            changes.forget_freed()

    def _recover(self) -> None:
        """Free what a process that was killed has left: given up and not freed, or written and not named."""
        self._sweep()
        with self._index.writing() as changes:  # nobody writes in the meantime
            for extent in list(outside(self._files.data(), changes.extents())):
                self._files.free(extent)

    @contextmanager
    def _store_errors(self, verb: str) -> Iterator[None]:
        """Translates what the system and SQLite raise."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            free = shutil.disk_usage(self.path).free if self.path.exists() else 0
            # A full disk may be an I/O error to SQLite.
            full = free < _NEARLY_FULL_BYTES or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            remedy = "Is it a ragkv store that you may write to?"
            if is_damage(error, self.path / _INDEX):
                remedy = "Its index is damaged. Stop all that uses it and start again: it is then made anew"
            elif full:
                remedy = "Free some space, or choose another --home"
            raise StoreError(
                f"can't {verb} the KV store {self.path} ({free >> 20} MiB free on its disk): {error}. {remedy}"
            ) from error
