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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.base import StoreStats, Verification
from ragkv.store.codecs import RAW, Codec
from ragkv.store.index import FORMAT, Changes, DamagedIndexError, Index, Place, is_damage
from ragkv.store.rebuild import find_chunks
from ragkv.store.record import FORMAT_VERSION, ChunkKey, CorruptRecordError, LayerKV, decode, encode
from ragkv.store.segments import Extent, FreeSpace, SegmentFiles, padded
from ragkv.store.verification import HASH_BYTES, verify_records

logger = logging.getLogger(__name__)

_INDEX = "index.db"
_NEARLY_FULL_BYTES = 64 << 20


class SegmentStore:
    """Chunk KV in the folder `path`. codec: how records are written; those that are there may have others.

    Any number of processes may have the folder open, and write in turn; threads may share a store. Raises StoreError if
    the folder holds something else, was made by another version, or can't be written.
    """

    def __init__(self, path: Path, codec: Codec = RAW) -> None:
        self.path, self._codec = path, codec
        self._write_lock = threading.Lock()
        self._free: FreeSpace | None = None  # as of `_version` of the index
        self._version = -1
        with self._store_errors("open"):
            path.mkdir(parents=True, exist_ok=True)
            self._refuse_other_contents()
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self._files = SegmentFiles(path / "segments")
            self._index = self._open_index()
            self._check_format()
            self._recover()

    def _refuse_other_contents(self) -> None:
        if (self.path / "data.mdb").exists():
            raise StoreError(
                f"{self.path} holds KV of a release that indexed it with LMDB. Delete the folder, or choose another "
                "--home, and index again"
            )

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
            self.close()
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
                    changes.put(key, Place(segment, offset, lengths))
                if found:
                    logger.warning("found %d chunks again whose index was lost", len(found))
                changes.set_meta(FORMAT, version)
        self._free = None

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        taken: list[Extent] = []
        with self._store_errors("write to"):
            with self._writing() as (changes, free):
                try:
                    for key, layers in chunks:
                        values = [encode(key.layer(i), kv, self._codec) for i, kv in enumerate(layers)]
                        extent = free.take(sum(padded(len(value)) for value in values))
                        taken.append(extent)
                        self._files.write(extent, values)
                        changes.put(key.prefix(), Place(extent.segment, extent.offset, tuple(map(len, values))))
                    self._files.sync(extent.segment for extent in taken)
                except BaseException:
                    for extent in taken:
                        self._files.free(extent)
                    raise
            self._sweep()

    def contains(self, key: ChunkKey) -> bool:
        return self._index.place(key.prefix()) is not None

    @contextmanager
    def snapshot(self) -> Iterator["_SegmentSnapshot"]:
        yield _SegmentSnapshot(self._files, self._index)

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        """Gone for good when it returns: the bytes can't be read from the files any more."""
        with self._store_errors("delete from"):
            with self._writing() as (changes, _):
                places = [place for chunk_hash in chunk_hashes for place in changes.delete(bytes.fromhex(chunk_hash))]
            self._sweep()
        return sum(len(place.lengths) for place in places)

    def locate(self, key: ChunkKey, layer: int) -> tuple[Path, int, int]:
        """The file, offset and length of a record. Raises KeyError where there is none."""
        place = self._index.place(key.prefix())
        if place is None:
            raise KeyError(key)
        segment, offset, length = place.layer(layer)
        return self._files.path(segment), offset, length

    def chunk_hashes(self) -> Iterator[str]:
        with self._store_errors("read"):
            return iter(dict.fromkeys(key[:HASH_BYTES].hex() for key, _ in self._index.places()))

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
                left = list(_outside(self._files.data(), known))
            found = verify_records(self._records(places))
        overlaps = [f"{b} overlaps {a}" for a, b in pairwise(known) if a.segment == b.segment and b.offset < a.end]
        unknown = [f"{extent} holds what no record is known for" for extent in left]
        return Verification(found.num_records, [*found.problems, *overlaps, *unknown])

    def _records(self, places: Sequence[tuple[bytes, Place]]) -> Iterator[tuple[bytes, memoryview]]:
        for prefix, place in places:
            for i in range(len(place.lengths)):
                yield prefix + struct.pack(">H", i), self._files.read(*place.layer(i)) or memoryview(b"")

    def close(self) -> None:
        self._files.close()
        self._index.close()
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
            for extent in list(_outside(self._files.data(), changes.extents())):
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


def _outside(data: Iterable[Extent], known: Iterable[Extent]) -> Iterator[Extent]:
    """The parts of `data` that no extent of `known` covers; both are sorted."""
    rest = iter(known)
    extent = next(rest, None)
    for part in data:
        start = part.offset
        while extent is not None and (extent.segment, extent.offset) < (part.segment, part.end):
            if extent.segment == part.segment and extent.end > start:
                if extent.offset > start:
                    yield Extent(part.segment, start, extent.offset - start)
                start = extent.end
                if start >= part.end:
                    break  # it may cover the next part too
            extent = next(rest, None)
        if start < part.end:
            yield Extent(part.segment, start, part.end - start)


class _SegmentSnapshot:
    def __init__(self, files: SegmentFiles, index: Index) -> None:
        self._files, self._index = files, index
        self._found: dict[ChunkKey, Place | None] = {}

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        place = self._place(key)
        if place is None or layer >= len(place.lengths):
            return None
        try:
            record = self._files.read(*place.layer(layer))
            if record is None:
                raise CorruptRecordError("the file ends before the record")
            return decode(key.layer(layer), record)
        except CorruptRecordError:
            if self._index.place(key.prefix()) != place:
                return None  # deleted or replaced in the meantime
            raise

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        place = self._place(key)
        if place is not None and layer < len(place.lengths):
            self._files.prefetch(*place.layer(layer))

    def _place(self, key: ChunkKey) -> Place | None:
        if key not in self._found:
            self._found[key] = self._index.place(key.prefix())
        return self._found[key]
