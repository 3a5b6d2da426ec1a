"""Looks after a store as a whole and its records as files: for the CLI, the indexer and evaluations. No request waits
for it."""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from ragkv.store.base import StoreStats, Verification
from ragkv.store.disk import Disk
from ragkv.store.index import Location
from ragkv.store.record import ChunkKey, CorruptRecordError, check, codec_name
from ragkv.store.segments import outside
from ragkv.store.verification import verify_records


class StoreAdmin:
    """`SegmentStore.admin`. Raises StoreError for a folder that can't be read."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._files, self._index = disk, disk.files, disk.index

    def stats(self) -> StoreStats:
        with self._disk.errors("read"):
            lengths = [location.lengths for _, location in self._index.locations()]
            return StoreStats(
                len({ChunkKey.parse(key).chunk_hash for key in self._index.chunks()}),
                sum(map(len, lengths)),
                sum(map(sum, lengths)),
                self._index.size_on_disk() + self._files.size_on_disk(),
            )

    def gauges(self) -> dict[str, int]:
        """Return what is counted quickly: entries stored and evicted, bytes of the segments."""
        with self._disk.errors("read"):
            stored, evicted = self._index.counts()
        return {"entries": stored, "evicted_entries": evicted, "disk_bytes": self._files.size_on_disk()}

    def sizes(self) -> dict[ChunkKey, int]:
        """Return what each entry's records take on disk, in bytes."""
        with self._disk.errors("read"):
            return {ChunkKey.parse(key): location.extent.length for key, location in self._index.locations()}

    def codecs(self) -> dict[str, int]:
        """Count the records of each codec, by the first record of each entry; damaged ones are left out."""
        counts: Counter[str] = Counter()
        with self._disk.errors("read"):
            for _, location in self._index.locations():
                with suppress(CorruptRecordError):
                    counts[codec_name(self._files.read(*location.layer(0)) or b"")] += len(location.lengths)
        return dict(counts)

    def verify(self) -> Verification:
        """Read and check every record; also that the segments hold nothing else: what was deleted is away."""
        with self._disk.errors("read"):
            with self._index.writing() as changes:  # nobody writes in the meantime
                locations, known = changes.locations(), changes.extents()
                left = list(outside(self._files.data(), known))
            verification = verify_records(self._read_all(locations))
        overlaps = [f"{b} overlaps {a}" for a, b in pairwise(known) if a.segment == b.segment and b.offset < a.end]
        unknown = [f"{extent} holds what no record is known for" for extent in left]
        return Verification(verification.num_records, [*verification.problems, *overlaps, *unknown])

    def _read_all(self, locations: Sequence[tuple[bytes, Location]]) -> Iterator[tuple[bytes, memoryview]]:
        for prefix, location in locations:
            for i in range(len(location.lengths)):
                yield prefix + struct.pack(">H", i), self._files.read(*location.layer(i)) or memoryview(b"")

    def records(self, key: ChunkKey) -> list[bytes] | None:
        """Return an entry's records as they are in the segment, checked; None if it isn't stored.

        Raises CorruptRecordError for bytes that don't verify.
        """
        location = self._disk.locate(key)
        if location is None:
            return None
        records = [bytes(self._files.read(*location.layer(i)) or b"") for i in range(len(location.lengths))]
        try:
            for i, record in enumerate(records):
                check(key.layer(i), record)
        except CorruptRecordError:
            if self._disk.locate(key) != location:
                return self.records(key)  # deleted or replaced in the meantime
            raise
        return records

    def locate(self, key: ChunkKey, layer: int) -> tuple[Path, int, int]:
        """Return the file, offset and length of a record. Raises KeyError if it isn't stored."""
        location = self._disk.locate(key)
        if location is None:
            raise KeyError(key)
        segment, offset, length = location.layer(layer)
        return self._files.path(segment), offset, length

    def drop_cached(self, keys: Iterable[ChunkKey]) -> None:
        """Drop these entries from the system's page cache: for measuring."""
        for location in filter(None, map(self._disk.locate, keys)):
            self._files.drop_cached(location.extent)
