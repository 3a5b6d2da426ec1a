"""The KV store on disk: chunks' records in segment files, and where they lie in LMDB.

A chunk's records, one for each layer, lie together in one extent, in the order in which they are read. They are written
and synced before the index names them, and the index forgets them before they are freed: a process killed at any moment
leaves nothing half-written behind what the index knows. LMDB's lock on writers covers the segments too.
"""

import errno
import logging
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb

from ragkv.errors import StoreError
from ragkv.store.base import StoreStats, Verification
from ragkv.store.codecs import RAW, Codec
from ragkv.store.rebuild import find_chunks
from ragkv.store.record import FORMAT_VERSION, ChunkKey, CorruptRecordError, LayerKV, decode, encode
from ragkv.store.segments import Extent, FreeSpace, SegmentFiles, padded
from ragkv.store.verification import HASH_BYTES, verify_records

logger = logging.getLogger(__name__)

_FORMAT_KEY, _GENERATION_KEY = b"format", b"generation"
_INDEX_MAP_BYTES = 1 << 36  # address space, not disk
_NEARLY_FULL_BYTES = 64 << 20
_PLACE = struct.Struct("<IQ")  # segment, offset; then each layer's length, uint32
_FREED_KEY, _FREED = struct.Struct(">IQ"), struct.Struct("<Q")  # segment, offset; length


@dataclass(frozen=True)
class _Place:
    """Where a chunk lies: its layers one after the other, each padded. lengths: without padding."""

    segment: int
    offset: int
    lengths: tuple[int, ...]

    @property
    def extent(self) -> Extent:
        return Extent(self.segment, self.offset, sum(map(padded, self.lengths)))

    def layer(self, index: int) -> tuple[int, int, int]:
        """Segment, offset and length."""
        return self.segment, self.offset + sum(map(padded, self.lengths[:index])), self.lengths[index]

    def pack(self) -> bytes:
        return _PLACE.pack(self.segment, self.offset) + struct.pack(f"<{len(self.lengths)}I", *self.lengths)

    @classmethod
    def unpack(cls, value: bytes) -> "_Place":
        segment, offset = _PLACE.unpack_from(value)
        lengths = struct.unpack_from(f"<{(len(value) - _PLACE.size) // 4}I", value, _PLACE.size)
        return cls(segment, offset, lengths)


class SegmentStore:
    """Chunk KV in the folder `path`. codec: how records are written; those that are there may have others.

    A process may open a folder once; any number of processes may have it open. Raises StoreError if the folder holds
    something else, was made by another version, or can't be written.
    """

    def __init__(self, path: Path, codec: Codec = RAW) -> None:
        self.path, self._codec = path, codec
        self._write_lock = threading.Lock()
        self._free: FreeSpace | None = None  # as of `_generation`
        self._generation = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._env = _open_index(path)
            self._places = self._env.open_db(b"places")
            self._freed = self._env.open_db(b"freed")  # what the index has forgotten and the files haven't
            self._meta = self._env.open_db(b"meta")
            self._files = SegmentFiles(path / "segments")
            self._check_format()
            self._recover()
        except (lmdb.Error, OSError) as error:
            raise self._storage_error("open", error) from error

    def _check_format(self) -> None:
        expected = str(FORMAT_VERSION).encode()
        with self._env.begin(db=self._meta) as txn:
            found = txn.get(_FORMAT_KEY)
        if found is None:
            self._begin_index(expected)
        elif found != expected:
            self._env.close()
            raise StoreError(
                f"{self.path} holds KV records of format {found.decode(errors='replace')}; this release reads format "
                f"{FORMAT_VERSION}. Use the release that wrote it, another --home, or delete the folder and index again"
            )

    def _begin_index(self, version: bytes) -> None:
        """Of a new store, or of one whose index is lost: then chunks are found again by their records. All of it in one
        transaction, so that an index with a format is whole, and what it doesn't name may be freed."""
        with self._writing() as (txn, _):
            if txn.get(_FORMAT_KEY, db=self._meta) is None:  # no other process was faster
                for key, segment, offset, lengths in find_chunks(self._files):
                    txn.put(key, _Place(segment, offset, lengths).pack())
                if num_found := txn.stat(self._places)["entries"]:
                    logger.warning("found %d chunks again whose index was lost", num_found)
                txn.put(_FORMAT_KEY, version, db=self._meta)
        self._free = None

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        taken: list[Extent] = []
        try:
            with self._writing() as (txn, free):
                try:
                    for key, layers in chunks:
                        values = [encode(key.layer(i), kv, self._codec) for i, kv in enumerate(layers)]
                        extent = free.take(sum(padded(len(value)) for value in values))
                        taken.append(extent)
                        self._files.write(extent, values)
                        self._give_up(txn, txn.get(key.prefix()))
                        txn.put(key.prefix(), _Place(extent.segment, extent.offset, tuple(map(len, values))).pack())
                    self._files.sync(extent.segment for extent in taken)
                except BaseException:
                    for extent in taken:
                        self._files.free(extent)
                    raise
            self._sweep()
        except (lmdb.Error, OSError) as error:
            raise self._storage_error("write to", error) from error

    def contains(self, key: ChunkKey) -> bool:
        with self._env.begin(db=self._places) as txn:
            return txn.get(key.prefix()) is not None

    @contextmanager
    def snapshot(self) -> Iterator["_SegmentSnapshot"]:
        with self._env.begin(db=self._places) as txn:
            yield _SegmentSnapshot(txn, self._files, self._env, self._places)

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        """Gone for good when it returns: the bytes can't be read from the files any more."""
        num_deleted = 0
        try:
            with self._writing() as (txn, _), txn.cursor() as cursor:
                for prefix in map(bytes.fromhex, chunk_hashes):
                    while cursor.set_range(prefix) and cursor.key().startswith(prefix):
                        num_deleted += len(_Place.unpack(cursor.value()).lengths)
                        self._give_up(txn, cursor.value())
                        cursor.delete()
            self._sweep()
        except (lmdb.Error, OSError) as error:
            raise self._storage_error("delete from", error) from error
        return num_deleted

    def locate(self, key: ChunkKey, layer: int) -> tuple[Path, int, int]:
        """The file, offset and length of a record. Raises KeyError where there is none."""
        with self._env.begin(db=self._places) as txn:
            value = txn.get(key.prefix())
        if value is None:
            raise KeyError(key)
        segment, offset, length = _Place.unpack(value).layer(layer)
        return self._files.path(segment), offset, length

    def chunk_hashes(self) -> Iterator[str]:
        last = b""
        with self._env.begin(db=self._places) as txn, txn.cursor() as cursor:
            for key in cursor.iternext(values=False):
                if key[:HASH_BYTES] != last:
                    last = key[:HASH_BYTES]
                    yield last.hex()

    def stats(self) -> StoreStats:
        with self._env.begin(db=self._places) as txn, txn.cursor() as cursor:
            lengths = [_Place.unpack(value).lengths for value in cursor.iternext(keys=False)]
        index_bytes = sum(file.stat().st_blocks * 512 for file in self.path.glob("*.mdb"))
        return StoreStats(
            len(list(self.chunk_hashes())),
            sum(map(len, lengths)),
            sum(map(sum, lengths)),
            index_bytes + self._files.size_on_disk(),
        )

    def verify(self) -> Verification:
        """Also that nothing but records is in the files: what was deleted is gone."""
        with self._env.begin(db=self._places, write=True) as txn:  # nobody writes in the meantime
            places = [(bytes(key), _Place.unpack(value)) for key, value in txn.cursor()]
            known = self._known(txn)
            left = list(_outside(self._files.data(), known))
        found = verify_records(self._records(places))
        overlaps = [f"{b} overlaps {a}" for a, b in pairwise(known) if a.segment == b.segment and b.offset < a.end]
        unknown = [f"{extent} holds what no record is known for" for extent in left]
        return Verification(found.num_records, [*found.problems, *overlaps, *unknown])

    def _known(self, txn: "lmdb.Transaction[bytes]") -> list[Extent]:
        """What holds a record, or did and is still to be freed; sorted."""
        freed = [Extent(*_FREED_KEY.unpack(k), *_FREED.unpack(v)) for k, v in txn.cursor(db=self._freed)]
        return sorted([*(_Place.unpack(value).extent for _, value in txn.cursor(db=self._places)), *freed])

    def _records(self, places: Sequence[tuple[bytes, _Place]]) -> Iterator[tuple[bytes, memoryview]]:
        for prefix, place in places:
            for i in range(len(place.lengths)):
                yield prefix + struct.pack(">H", i), self._files.read(*place.layer(i)) or memoryview(b"")

    def close(self) -> None:
        self._files.close()
        self._env.close()

    @contextmanager
    def _writing(self) -> Iterator[tuple["lmdb.Transaction[bytes]", FreeSpace]]:
        """The one writer of all processes. What it takes of the free space is taken if the transaction is committed."""
        with self._write_lock:
            free, self._free = self._free, None
            with self._env.begin(db=self._places, write=True) as txn:
                generation = int(txn.get(_GENERATION_KEY, b"0", db=self._meta))
                if free is None or generation != self._generation:
                    free = FreeSpace(self._known(txn))
                txn.put(_GENERATION_KEY, str(generation + 1).encode(), db=self._meta)
                yield txn, free
            self._free, self._generation = free, generation + 1

    def _give_up(self, txn: "lmdb.Transaction[bytes]", place: bytes | None) -> None:
        """Note what is to be freed once the index that doesn't name it any more is on disk."""
        if place is not None:
            extent = _Place.unpack(place).extent
            txn.put(_FREED_KEY.pack(extent.segment, extent.offset), _FREED.pack(extent.length), db=self._freed)

    def _sweep(self) -> None:
        """Free what was given up."""
        with self._env.begin(db=self._freed) as txn:
            if not txn.stat(self._freed)["entries"]:
                return
        with self._writing() as (txn, free):
            for key, value in list(txn.cursor(db=self._freed)):
                extent = Extent(*_FREED_KEY.unpack(key), *_FREED.unpack(value))
                self._files.free(extent)
                free.give(extent)
                txn.delete(key, db=self._freed)

    def _recover(self) -> None:
        """Free what a process that was killed has left: given up and not freed, or written and not named."""
        self._sweep()
        with self._env.begin(db=self._places, write=True) as txn:  # nobody writes in the meantime
            for extent in list(_outside(self._files.data(), self._known(txn))):
                self._files.free(extent)

    def _storage_error(self, verb: str, error: Exception) -> StoreError:
        free = shutil.disk_usage(self.path).free if self.path.exists() else 0
        # A full disk is EIO to LMDB.
        full = isinstance(error, lmdb.MapFullError) or free < _NEARLY_FULL_BYTES
        full = full or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space, or choose another --home" if full else "Is it a ragkv store that you may write to?"
        return StoreError(
            f"can't {verb} the KV store {self.path} ({free >> 20} MiB free on its disk): {error}. {remedy}"
        )


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


def _open_index(path: Path) -> lmdb.Environment:
    """An index that can't be opened is put aside, if there are segments to find its contents in."""

    def opened() -> lmdb.Environment:
        return lmdb.open(str(path), map_size=_INDEX_MAP_BYTES, max_dbs=3, max_readers=512)

    try:
        return opened()
    except lmdb.Error as error:
        if not any((path / "segments").glob("*.seg")):
            raise
        logger.warning("%s is damaged: %s", path / "data.mdb", error)
        (path / "data.mdb").rename(path / "data.mdb.damaged")
        return opened()


class _SegmentSnapshot:
    def __init__(self, txn: "lmdb.Transaction[bytes]", files: SegmentFiles, env: lmdb.Environment, places: Any) -> None:
        self._txn, self._files, self._env, self._places = txn, files, env, places
        self._found: dict[ChunkKey, _Place | None] = {}

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
            with self._env.begin(db=self._places) as now:
                if now.get(key.prefix()) != place.pack():
                    return None  # deleted or replaced in the meantime
            raise

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        place = self._place(key)
        if place is not None and layer < len(place.lengths):
            self._files.prefetch(*place.layer(layer))

    def _place(self, key: ChunkKey) -> _Place | None:
        if key not in self._found:
            value = self._txn.get(key.prefix())
            self._found[key] = None if value is None else _Place.unpack(value)
        return self._found[key]
