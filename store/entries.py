"""Entries as files: one for each, written whole before it gets its name, and gone once it is unlinked.

An entry file is a head (magic, format, key, length of each layer's record, a checksum), then the records, head and
records at multiples of ALIGNMENT. Its name is its key's, in one of 256 subfolders; it doesn't change once it has its
name. What a reader has opened it can read to the end, whatever becomes of the name.
"""

import os
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import xxhash

from ragkv.files import sync_folder
from ragkv.store.page_cache import cached_bytes
from ragkv.store.record import FORMAT_VERSION, PREFIX_BYTES, ChunkKey, CorruptRecordError, check

ALIGNMENT = 4096
_MAGIC = b"RKVE"
_HEAD = struct.Struct(f"<4sH{PREFIX_BYTES}sH")  # magic, format, key, number of layers; then each length, uint32
_CHECKSUM = struct.Struct("<Q")
_SUFFIX = ".kv"
_BLOCK_BYTES = 1 << 20  # read at a time
_NEW, _UNFINISHED_S = "new", 60  # the subfolder of files that aren't finished; the time that a live writer may take


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def entry_bytes(lengths: Sequence[int]) -> int:
    """Return what an entry with records of these lengths takes on disk."""
    return padded(head_bytes(len(lengths))) + sum(map(padded, lengths))


def head_bytes(num_layers: int) -> int:
    return _HEAD.size + 4 * num_layers + _CHECKSUM.size


def make_head(key: ChunkKey, lengths: Sequence[int]) -> bytes:
    """Return the head of an entry whose records have these lengths."""
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, key.prefix(), len(lengths)) + struct.pack(f"<{len(lengths)}I", *lengths)
    return head + _checksum(head)


def read_head(head: bytes, key: ChunkKey) -> tuple[int, ...]:
    """Return the lengths in a head; more bytes may follow it. Raises CorruptRecordError unless it is the key's."""
    magic, version, prefix, num_layers = _HEAD.unpack_from(head.ljust(_HEAD.size, b"\0"))
    if (magic, version, prefix) != (_MAGIC, FORMAT_VERSION, key.prefix()):
        raise CorruptRecordError("its head is not that of this entry")
    head = head[: head_bytes(num_layers)]
    if _checksum(head[: -_CHECKSUM.size]) != head[-_CHECKSUM.size :]:
        raise CorruptRecordError("its head is damaged")
    return struct.unpack_from(f"<{num_layers}I", head, _HEAD.size)


def records_in(file: bytes, key: ChunkKey) -> list[memoryview]:
    """Return the records in the bytes of an entry file. Raises CorruptRecordError unless all of them are the key's."""
    lengths = read_head(file, key)
    starts = accumulate(map(padded, lengths), initial=padded(head_bytes(len(lengths))))
    records = [memoryview(file)[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    for i, record in enumerate(records):
        check(key.layer(i), record)
    return records


@dataclass(frozen=True)
class Layout:
    """Where an entry's records are in its file, and which version of the entry it is.

    lengths: of each layer's record, in bytes. version: differs for each file that ever had the entry's name.
    """

    lengths: tuple[int, ...]
    version: tuple[int, int]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return where each record begins, counted from the first, and where the last one ends, with padding."""
        return (0, *accumulate(map(padded, self.lengths)))

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all records, with padding."""
        return self.starts[-1]


class EntryFile:
    """An open entry."""

    def __init__(self, descriptor: int, key: ChunkKey) -> None:
        """Read the head. Owns the descriptor, and closes it where the head doesn't verify: CorruptRecordError."""
        self._descriptor = descriptor
        try:
            status = os.fstat(descriptor)
            head = b""
            with suppress(OSError):  # of a disk that can't read it
                head = os.pread(descriptor, ALIGNMENT, 0)
            lengths = read_head(head, key)
            self._first = padded(head_bytes(len(lengths)))
            self.layout = Layout(lengths, (status.st_ino, status.st_ctime_ns))
        except BaseException:
            os.close(descriptor)
            raise

    def offset(self, layer: int) -> int:
        """Return where a layer's record begins in the file."""
        return self._first + self.layout.starts[layer]

    def read(self, layer: int) -> memoryview:
        """Return a layer's record. Raises CorruptRecordError as `read_into` does."""
        memory = memoryview(bytearray(self.layout.lengths[layer]))
        self.read_into(layer, memory)
        return memory

    def read_begin(self, num_bytes: int) -> bytes:
        """Return the first bytes of the first record; fewer where the file is cut off or can't be read."""
        with suppress(OSError):
            return os.pread(self._descriptor, num_bytes, self.offset(0))
        return b""

    def read_into(self, layer: int, memory: memoryview) -> None:
        """Fill `memory` with a layer's record. Raises CorruptRecordError where the file is cut off or can't be read.

        Copied and not mapped: what is copied can be cut off or damaged in the file and stays what it is, and a page
        that can't be read is an error here and no signal that kills the process.
        """
        done, begin = 0, self.offset(layer)
        with suppress(OSError):  # of the disk
            while done < len(memory) and (num_read := os.preadv(self._descriptor, [memory[done:]], begin + done)):
                done += num_read
        if done < len(memory):
            raise CorruptRecordError("the file ends before the record, or can't be read")

    def prefetch(self, layer: int) -> None:
        """Have the system start to read a layer into its page cache."""
        os.posix_fadvise(self._descriptor, self.offset(layer), self.layout.lengths[layer], os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._descriptor)


class EntryFolder:
    """The entry files of a store. Any number of processes may read them; writers hold `Usage.writing`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / _NEW).mkdir(parents=True, exist_ok=True)

    def path(self, key: ChunkKey) -> Path:
        name = key.prefix().hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"

    def contains(self, key: ChunkKey) -> bool:
        return self.path(key).exists()

    def open(self, key: ChunkKey) -> EntryFile | None:
        """Open an entry, None if it isn't stored. Raises CorruptRecordError if its head isn't whole."""
        descriptor = self._open(key)
        return None if descriptor is None else EntryFile(descriptor, key)

    def first_bytes(self, key: ChunkKey, num_bytes: int) -> bytes | None:
        """Return the beginning of an entry's first record, without what follows being read ahead; errors as `open`."""
        if (descriptor := self._open(key)) is None:
            return None
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        with closing(EntryFile(descriptor, key)) as file:
            return file.read_begin(num_bytes)

    def read(self, key: ChunkKey) -> bytes | None:
        """Return an entry's file as it is, unchecked, None if it isn't stored."""
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def is_cached(self, key: ChunkKey) -> bool:
        """Return whether all of an entry is in the page cache; doesn't wait for the disk.

        True also where it isn't stored, or the system can't tell.
        """
        if (descriptor := self._open(key)) is None:
            return True
        try:
            num_bytes = cached_bytes(descriptor)
            return num_bytes is None or num_bytes >= os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def prefetch(self, key: ChunkKey) -> None:
        """Have the system start to read an entry, if it is stored, into its page cache."""
        self._advise(key, os.POSIX_FADV_WILLNEED)

    def read_through(self, key: ChunkKey) -> None:
        """Bring an entry, if it is stored, into the page cache before returning."""
        if (descriptor := self._open(key)) is not None:
            block = bytearray(_BLOCK_BYTES)
            with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - which closes it
                while file.readinto(block):
                    pass

    def drop_cached(self, key: ChunkKey) -> None:
        """Drop an entry from the page cache, so that the next read is from the disk."""
        self._advise(key, os.POSIX_FADV_DONTNEED)

    def _advise(self, key: ChunkKey, advice: int) -> None:
        if (descriptor := self._open(key)) is not None:
            with open(descriptor, "rb") as file:  # noqa: PTH123 - which closes it
                os.posix_fadvise(file.fileno(), 0, 0, advice)

    def _open(self, key: ChunkKey) -> int | None:
        try:
            return os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

    def version(self, key: ChunkKey) -> tuple[int, int] | None:
        """Return the version of the entry that is stored now (`Layout.version`), None if none is."""
        try:
            status = self.path(key).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_ctime_ns

    def size(self, key: ChunkKey) -> int:
        """Return the bytes of an entry's file, 0 if it isn't stored."""
        with suppress(FileNotFoundError):
            return self.path(key).stat().st_size
        return 0

    @property
    def last_change(self) -> int:
        """Return a number that differs once an entry has been replaced or deleted, by any process."""
        return self._folder.stat().st_mtime_ns

    def __iter__(self) -> Iterator[ChunkKey]:
        """Yield the keys of all entries, in order."""
        for subfolder in sorted(self._subfolders()):
            yield from sorted(_keys_in(subfolder), key=ChunkKey.prefix)

    def keys_of(self, chunk_hash: str) -> list[ChunkKey]:
        """Return the keys of the entries of one chunk."""
        return [key for key in _keys_in(self._folder / chunk_hash[:2]) if key.chunk_hash == chunk_hash]

    def keys_by_chunk(self, chunk_hashes: Iterable[str]) -> dict[str, list[ChunkKey]]:
        """Return the keys of the entries of each of these chunks. Lists each subfolder once."""
        found: dict[str, list[ChunkKey]] = {chunk_hash: [] for chunk_hash in chunk_hashes}
        for name in {chunk_hash[:2] for chunk_hash in found}:
            for key in _keys_in(self._folder / name):
                if key.chunk_hash in found:
                    found[key.chunk_hash].append(key)
        return found

    def try_writing(self) -> None:
        """Write a page as an entry is written, sync it and remove it. Raises OSError where that fails."""
        file = self._folder / _NEW / f"try.{secrets.token_hex(4)}"
        try:
            with file.open("wb") as written:
                written.write(bytes(ALIGNMENT))
                written.flush()
                os.fsync(written.fileno())
        finally:
            file.unlink(missing_ok=True)

    def strangers(self) -> list[Path]:
        """Return files that are no entry, also those that a process began over a minute ago and hasn't finished."""
        old = time.time() - _UNFINISHED_S
        unfinished = [file for file in (self._folder / _NEW).iterdir() if file.stat().st_mtime < old]
        named = (file for folder in self._subfolders() for file in folder.iterdir())
        return unfinished + [file for file in named if _key_of(file.name) is None]

    def remove_unfinished(self) -> None:
        """Remove files that killed processes left unfinished. No other process may have the store open."""
        for file in (self._folder / _NEW).iterdir():
            file.unlink()

    def write(self, key: ChunkKey, records: Sequence[bytes | memoryview]) -> Path:
        """Write an entry and sync it. Returns its file, which `publish` gives its name, or the caller removes."""
        file = self._folder / _NEW / f"{self.path(key).name}.{secrets.token_hex(4)}"
        parts = (make_head(key, [*map(len, records)]), *records)
        offsets = [0, *accumulate(padded(len(part)) for part in parts)]
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, offsets[-1])
            for part, offset in zip(parts, offsets, strict=False):
                _write_all(descriptor, part, offset)
            os.fdatasync(descriptor)
        except BaseException:
            file.unlink()
            raise
        finally:
            os.close(descriptor)
        return file

    def publish(self, files: Mapping[ChunkKey, Path]) -> None:
        """Give written files their names, in place of what had them. They are on disk when it returns."""
        for key, file in files.items():
            path = self.path(key)
            path.parent.mkdir(exist_ok=True)
            file.replace(path)
        self._sync({self.path(key).parent for key in files})

    def delete(self, keys: Iterable[ChunkKey]) -> None:
        """Unlink entries, stored or not. Whoever has them open may read them to the end."""
        changed = set()
        for key in keys:
            with suppress(FileNotFoundError):
                self.path(key).unlink()
                changed.add(self.path(key).parent)
        if changed:
            self._sync(changed)

    def size_on_disk(self) -> int:
        return sum(file.stat().st_blocks * 512 for folder in self._subfolders() for file in folder.iterdir())

    def _sync(self, subfolders: Iterable[Path]) -> None:
        for subfolder in subfolders:
            sync_folder(subfolder)
        self.mark_changed()
        sync_folder(self._folder)

    def mark_changed(self) -> None:
        """Give `last_change` another value."""
        os.utime(self._folder)

    def _subfolders(self) -> list[Path]:
        return [path for path in self._folder.iterdir() if path.name != _NEW]


def _keys_in(subfolder: Path) -> list[ChunkKey]:
    try:
        return [key for file in subfolder.iterdir() if (key := _key_of(file.name)) is not None]
    except FileNotFoundError:
        return []


def _key_of(name: str) -> ChunkKey | None:
    try:
        prefix = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return ChunkKey.parse(prefix) if name.endswith(_SUFFIX) and len(prefix) == PREFIX_BYTES else None


def _checksum(head: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    done, rest = 0, memoryview(data)
    while done < len(data):
        done += os.pwrite(descriptor, rest[done:], offset + done)
