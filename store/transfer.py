"""Chunks' KV as one file, to carry it from one store into another: a tar archive, written and read from start to end.

Its members are one whose name tells the format, then the entries (head and records, `ragkv.store.entries`), named by
their keys, at last a list of all names. Head and records have checksums of their own; what the list names and the
archive lacks was lost on the way.
"""

import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import BinaryIO

from ragkv.errors import StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import entry_bytes, head_bytes, make_head, read_head
from ragkv.store.record import FORMAT_VERSION, PREFIX_BYTES, ChunkKey, CorruptRecordError

_FORMAT = "ragkv-kv-format-"  # the first member; then the version
_LIST = "entries"  # the last member


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


def export_chunks(store: DiskStore, file: BinaryIO, progress: Callable[[int], None] = lambda size: None) -> Transfer:
    """Write all chunks that verify. progress: called with the bytes of each chunk."""
    done, names = Transfer(), []
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        _add(archive, f"{_FORMAT}{FORMAT_VERSION}", b"")
        for key, size_bytes in store.admin.sizes().items():
            progress(size_bytes)
            try:
                records = store.admin.records(key)
            except CorruptRecordError as error:
                done.problems.append(f"chunk {key.chunk_hash}: {error}")
                continue
            if records is None:
                continue  # deleted in the meantime
            names.append(f"{key.chunk_hash}/{key.prefix().hex().removeprefix(key.chunk_hash)}")
            _add(archive, names[-1], b"".join((make_head(key, [*map(len, records)]), *records)))
            done.add(key, size_bytes)
        _add(archive, _LIST, "\n".join(names).encode())
    return done


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def open_export(file: BinaryIO, name: str) -> tarfile.TarFile:
    """Open an archive, for `import_chunks`. Raises StoreError, which calls the file `name`, if it can't be imported."""
    try:
        archive = tarfile.open(fileobj=file, mode="r|", ignore_zeros=True)  # noqa: SIM115
        first = archive.next()
    except (tarfile.TarError, EOFError):
        first = None
    if first is None or not first.name.startswith(_FORMAT):
        raise StoreError(f"{name} is not an export of a KV store; make one with `ragkv store export FILE`")
    version = first.name.removeprefix(_FORMAT)
    if version != str(FORMAT_VERSION):
        raise StoreError(
            f"{name} holds KV records of format {version}; this release reads format {FORMAT_VERSION}. Export it with "
            "the release that reads it here, or index the documents again"
        )
    return archive


def import_chunks(
    archive: tarfile.TarFile, store: DiskStore, progress: Callable[[int], None] = lambda size: None
) -> Transfer:
    """Put the chunks of an export that the store doesn't have. progress: called with the bytes of each chunk."""
    done = Transfer()
    for item in _entries(archive):
        if isinstance(item, str):
            done.problems.append(item)
            continue
        key, data = item
        progress(len(data))
        if store.contains(key):
            done.kept.add(key.chunk_hash)
            continue
        try:
            lengths = read_head(data, key)
            bounds = pairwise(accumulate(lengths, initial=head_bytes(len(lengths))))
            store.put_records(key, [data[start:end] for start, end in bounds])
        except CorruptRecordError as error:
            done.problems.append(f"chunk {key.chunk_hash}: {error}")
            continue
        if store.contains(key):
            done.add(key, entry_bytes(lengths))
        else:
            done.problems.append(f"chunk {key.chunk_hash}: the store's budget has no room for it")
    return done


def _entries(archive: tarfile.TarFile) -> Iterator[tuple[ChunkKey, bytes] | str]:
    """Yield the key of each entry and its bytes, unchecked; or a line about what can't be read."""
    seen: set[str] = set()
    try:
        for member in archive:
            content = archive.extractfile(member)
            data = content.read() if content else b""
            if member.name == _LIST:
                for name in [name for name in data.decode(errors="replace").split("\n") if name and name not in seen]:
                    yield f"chunk {name[:32]}: its title is damaged"
                return
            with suppress(ValueError):  # of another name
                prefix = bytes.fromhex(member.name.replace("/", ""))
                if len(prefix) == PREFIX_BYTES:
                    seen.add(member.name)
                    yield ChunkKey.parse(prefix), data
    except (tarfile.TarError, EOFError):  # it ends within a member
        pass
    yield "the file is cut off: chunks that followed are missing; export it again"
