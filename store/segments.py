"""Extents of bytes in a few large files. Knows nothing of KV, nor of what an extent holds: that is in an index.

A freed extent becomes a hole: its blocks go back to the file system, and what was there can't be read again.
"""

import ctypes
import errno
import os
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ALIGNMENT = 4096  # of extents and records: holes are made of whole blocks
SEGMENT_BYTES = 1 << 30  # a larger extent has a file of its own
_PUNCH_HOLE_KEEP_SIZE = 0x03
_libc = ctypes.CDLL(None, use_errno=True)


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, order=True)
class Extent:
    """Bytes `[offset, offset + length)` of a segment, both multiples of ALIGNMENT."""

    segment: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class FreeSpace:
    """The gaps between the extents in use. Pure bookkeeping. Segments are numbered from 0."""

    def __init__(self, used: Iterable[Extent], segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._segments: dict[int, list[tuple[int, int]]] = {}  # to sorted used ranges (offset, end)
        for extent in sorted(used):
            self._segments.setdefault(extent.segment, []).append((extent.offset, extent.end))

    @property
    def used_bytes(self) -> int:
        return sum(end - start for used in self._segments.values() for start, end in used)

    def take(self, length: int) -> Extent:
        """Take the first gap that is large enough, or the end of a segment with room, or a new segment."""
        segment = 0
        while (extent := self.take_in(segment, length)) is None:
            segment += 1
        return extent

    def take_in(self, segment: int, length: int) -> Extent | None:
        """Take a gap as `take` does, in this segment only; None if it has none."""
        offset = self._first_gap(segment, length)
        if offset is None:
            return None
        insort(self._segments.setdefault(segment, []), (offset, offset + length))
        return Extent(segment, offset, length)

    def give(self, extent: Extent) -> None:
        self._segments[extent.segment].remove((extent.offset, extent.end))

    def _first_gap(self, segment: int, length: int) -> int | None:
        end = 0
        used = self._segments.get(segment)
        if not used:
            return 0
        for start, stop in used:
            if start - end >= length:
                return end
            end = stop
        return end if end + length <= self._segment_bytes else None


def outside(data: Iterable[Extent], known: Iterable[Extent]) -> Iterator[Extent]:
    """Yield the parts of `data` that no extent of `known` covers; both are sorted."""
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


class SegmentFiles:
    """The segments' files in a folder. Raises OSError as the system does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._descriptors: dict[int, int] = {}

    def write(self, extent: Extent, buffers: Sequence[bytes | memoryview]) -> None:
        """Write buffers one after the other, each at a multiple of ALIGNMENT. Not durable before `sync`."""
        descriptor = self._open(extent.segment)
        os.posix_fallocate(descriptor, extent.offset, extent.length)
        offset = extent.offset
        for buffer in buffers:
            _write_all(descriptor, buffer, offset)
            offset += padded(len(buffer))

    def sync(self, segments: Iterable[int]) -> None:
        for segment in set(segments):
            os.fdatasync(self._open(segment))

    def read(self, segment: int, offset: int, length: int) -> memoryview | None:
        """Return a copy of these bytes; None where `read_into` returns False."""
        with suppress(FileNotFoundError):
            if offset + length <= os.fstat(self._open(segment, create=False)).st_size:  # or there may be no such memory
                memory = memoryview(bytearray(length))
                return memory if self.read_into(segment, offset, memory) else None
        return None

    def read_into(self, segment: int, offset: int, memory: memoryview) -> bool:
        """Fill `memory` with the bytes from `offset` on. Returns False if the file is missing or too short, or the disk
        can't read it; part of the memory may be filled then.

        Copied and not mapped: what is copied can be cut off, freed or damaged in the file and stays what it is, and
        a page that can't be read is an error here and no signal that kills the process.
        """
        done = 0
        try:
            descriptor = self._open(segment, create=False)
            while done < len(memory):
                num_read = os.preadv(descriptor, [memory[done:]], offset + done)
                if not num_read:
                    return False
                done += num_read
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO):
                raise
            return False
        return True

    def prefetch(self, segment: int, offset: int, length: int) -> None:
        """Have the system start to read these bytes into its page cache."""
        with suppress(FileNotFoundError):
            os.posix_fadvise(self._open(segment, create=False), offset, length, os.POSIX_FADV_WILLNEED)

    def drop_cached(self, extent: Extent) -> None:
        """Drop the extent from the page cache, so that the next read is from the disk."""
        os.posix_fadvise(self._open(extent.segment), extent.offset, extent.length, os.POSIX_FADV_DONTNEED)

    def is_cached(self, extent: Extent) -> bool:
        """Return whether the extent seems to be in the page cache: by a page at its start, middle and end."""
        try:
            descriptor = self._open(extent.segment, create=False)
            for offset in {extent.offset, extent.offset + extent.length // 2, extent.end - ALIGNMENT}:
                os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # missing, or a file system that can't tell
            return True
        return True

    def free(self, extent: Extent) -> None:
        """Make a hole of the extent; its bytes can't be read any more once the call returns."""
        descriptor = self._open(extent.segment)
        offset, length = ctypes.c_int64(extent.offset), ctypes.c_int64(extent.length)
        if _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, length):
            if ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self.path(extent.segment)))
            for start in range(extent.offset, extent.end, 1 << 20):
                _write_all(descriptor, bytes(min(1 << 20, extent.end - start)), start)
        os.fdatasync(descriptor)

    def data(self) -> Iterator[Extent]:
        """Yield what is not a hole, over all segments: whole blocks."""
        for segment in self.segments():
            descriptor = self._open(segment)
            end = 0
            while True:
                try:
                    start = os.lseek(descriptor, end, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                        break
                    raise
                end = os.lseek(descriptor, start, os.SEEK_HOLE)
                yield Extent(segment, start, padded(end - start))

    def segments(self) -> list[int]:
        return sorted(int(file.stem) for file in self.folder.glob("*.seg"))

    def size_on_disk(self) -> int:
        return sum(self.path(segment).stat().st_blocks * 512 for segment in self.segments())

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _open(self, segment: int, *, create: bool = True) -> int:
        if segment not in self._descriptors:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            self._descriptors[segment] = os.open(self.path(segment), flags, 0o600)
        return self._descriptors[segment]

    def path(self, segment: int) -> Path:
        return self.folder / f"{segment:06}.seg"


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    done, rest = 0, memoryview(data)
    while done < len(data):
        done += os.pwrite(descriptor, rest[done:], offset + done)
