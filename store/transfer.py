"""Chunks' KV as one file, to carry it from one store into another. Written and read from start to end, chunk by chunk.

The file is blocks of ALIGNMENT bytes: a head with the format of the records, then the chunks, then an end. A chunk is a
title block (key, number of records, their size) and its records as they lie in a segment, each padded. Head, titles and
end have checksums of their own: a reader always knows how much to read, and after damage the next title is found.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import xxhash

from ragkv.errors import StoreError
from ragkv.store.record import FORMAT_VERSION, ChunkKey, CorruptRecordError, identify
from ragkv.store.segment_store import SegmentStore
from ragkv.store.segments import ALIGNMENT, padded
from ragkv.store.verification import HASH_BYTES

_HEAD = struct.Struct("<8sI")  # magic, format of the records
_TITLE = struct.Struct("<8s52sHQ")  # magic, key without the layer, number of records, their size with padding
_HEAD_MAGIC, _TITLE_MAGIC, _END_MAGIC = b"ragkvkv1", b"ragkvchk", b"ragkvend"
_CHECKSUM = struct.Struct("<Q")


@dataclass
class Transfer:
    """What an export or an import did: chunk hashes, bytes on disk, and a line for each damaged chunk.

    kept: chunks that the store had already. fingerprints: of the models whose KV was imported.
    """

    chunks: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)
    fingerprints: set[str] = field(default_factory=set)
    size_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, key: ChunkKey, size_bytes: int) -> None:
        self.chunks.add(key.chunk_hash)
        self.fingerprints.add(key.fingerprint)
        self.size_bytes += size_bytes


def export_chunks(store: SegmentStore, file: BinaryIO, progress: Callable[[int], None] = lambda size: None) -> Transfer:
    """Write all chunks that verify. progress: called with the bytes of each chunk."""
    done = Transfer()
    file.write(_block(_HEAD.pack(_HEAD_MAGIC, FORMAT_VERSION)))
    for key, size in store.admin.sizes().items():
        progress(size)
        try:
            records = store.admin.records(key)
        except CorruptRecordError as error:
            done.problems.append(f"chunk {key.chunk_hash}: {error}")
            continue
        if records is None:
            continue  # deleted in the meantime
        size_bytes = sum(padded(len(record)) for record in records)
        file.write(_block(_TITLE.pack(_TITLE_MAGIC, key.prefix(), len(records), size_bytes)))
        for record in records:
            file.write(record.ljust(padded(len(record)), b"\0"))
        done.add(key, size_bytes)
    file.write(_block(_END_MAGIC))
    return done


def check_head(file: BinaryIO, name: str) -> None:
    """Read the head. Raises StoreError, which calls the file `name`, unless it is an export that can be imported."""
    block = file.read(ALIGNMENT)
    if not _is_whole(block) or not block.startswith(_HEAD_MAGIC):
        raise StoreError(f"{name} is not an export of a KV store; make one with `ragkv store export FILE`")
    _, version = _HEAD.unpack_from(block)
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{name} holds KV records of format {version}; this release reads format {FORMAT_VERSION}. Import it with "
            "the release that wrote it, or index the documents again"
        )


def import_chunks(file: BinaryIO, store: SegmentStore, progress: Callable[[int], None] = lambda size: None) -> Transfer:
    """Store the chunks that the store doesn't have, each in a transaction of its own and if all its records verify.

    The file's head has been read. progress: called with the bytes of each chunk. Raises StoreError without space.
    """
    done = Transfer()
    for chunk in _chunks(file):
        if isinstance(chunk, str):
            done.problems.append(chunk)
            continue
        key, num_records, data = chunk
        progress(ALIGNMENT + len(data))
        if store.contains(key):
            done.kept.add(key.chunk_hash)
            continue
        try:
            store.put_records(key, list(_split(data, num_records)))
        except CorruptRecordError as error:
            done.problems.append(f"chunk {key.chunk_hash}: {error}")
            continue
        if store.contains(key):
            done.add(key, len(data))
        else:
            done.problems.append(f"chunk {key.chunk_hash}: the store's budget has no room for it")
    return done


def _chunks(file: BinaryIO) -> Iterator[tuple[ChunkKey, int, memoryview] | str]:
    """Yield the key, number of records and their bytes, unchecked; or a line about what can't be read."""
    missing: dict[str, None] = {}  # hashes in the blocks since the last title, in order
    num_blocks = 0
    while block := file.read(ALIGNMENT):
        if not (_is_whole(block) and block.startswith((_TITLE_MAGIC, _END_MAGIC))):
            num_blocks += 1
            with suppress(CorruptRecordError):
                missing[identify(block)[0][:HASH_BYTES].hex()] = None
            continue
        yield from _loss(missing, num_blocks)
        missing, num_blocks = {}, 0
        if block.startswith(_END_MAGIC):
            return
        _, key, num_records, size_bytes = _TITLE.unpack_from(block)
        yield ChunkKey.parse(key), num_records, memoryview(file.read(size_bytes))
    yield from _loss(missing, num_blocks)
    yield "the file is cut off: chunks that followed are missing; export it again"


def _loss(missing: dict[str, None], num_blocks: int) -> Iterator[str]:
    if num_blocks and not missing:
        yield f"{num_blocks * ALIGNMENT} bytes that belong to no chunk"
    for chunk_hash in missing:
        yield f"chunk {chunk_hash}: its title is damaged"


def _split(data: memoryview, num_records: int) -> Iterator[memoryview]:
    start = 0
    for _ in range(num_records):
        _, length = identify(data[start:])
        yield data[start : start + length]
        start += padded(length)


def _block(content: bytes) -> bytes:
    content = content.ljust(ALIGNMENT - _CHECKSUM.size, b"\0")
    return content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content))


def _is_whole(block: bytes) -> bool:
    content, checksum = block[: -_CHECKSUM.size], block[-_CHECKSUM.size :]
    return len(block) == ALIGNMENT and _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content)) == checksum
