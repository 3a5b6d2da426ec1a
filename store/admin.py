"""Looks after a store as a whole and its entries as files: for the CLI, the indexer and evaluations. No request waits
for it."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.files import atomic_write
from ragkv.store.entries import EntryFile, EntryFolder
from ragkv.store.opening import USAGE_NAME, store_errors
from ragkv.store.record import ChunkKey, CorruptRecordError, check, decode, read_header
from ragkv.store.usage import Usage

_VERIFIED_NAME = "verified.json"


@dataclass(frozen=True)
class StoreStats:
    """What a store holds. `size_bytes` is the sum of the records; `file_bytes` what they take on disk (0 in memory)."""

    num_chunks: int
    num_records: int
    size_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Verification:
    """The result of `verify`: `problems` has one line for each damaged entry, with its chunk hash."""

    num_records: int
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LastVerification:
    """When the store was verified last, in seconds since 1970, and what it came to."""

    at: float
    num_records: int
    num_problems: int


class StoreAdmin:
    """`DiskStore.admin`. Raises StoreError for a folder that can't be read."""

    def __init__(self, path: Path, entries: EntryFolder, usage: Usage) -> None:
        self._path, self._entries, self._usage = path, entries, usage

    def stats(self) -> StoreStats:
        with self._errors():
            lengths = {key: file.layout.lengths for key, file in self._files()}
            table_bytes = sum(file.stat().st_blocks * 512 for file in self._path.glob(f"{USAGE_NAME}*"))
            return StoreStats(
                len({key.chunk_hash for key in lengths}),
                sum(map(len, lengths.values())),
                sum(map(sum, lengths.values())),
                table_bytes + self._entries.size_on_disk(),
            )

    def gauges(self) -> dict[str, int]:
        """Return what is counted quickly: entries stored and evicted, bytes of the stored and of the pinned ones."""
        with self._errors():
            return self._usage.gauges()

    def sizes(self, keys: Iterable[ChunkKey] | None = None) -> dict[ChunkKey, int]:
        """Return what each of these entries, or of all, takes on disk, in bytes; 0 if it isn't stored."""
        with self._errors():
            return {key: self._entries.size(key) for key in (self._entries if keys is None else keys)}

    def codecs(self) -> dict[str, int]:
        """Count the records of each codec, by the first record of each entry; damaged ones are left out."""
        counts: Counter[str] = Counter()
        with self._errors():
            for _, file in self._files():
                with suppress(CorruptRecordError):
                    counts[read_header(file.read(0)).codec.name] += len(file.layout.lengths)
        return dict(counts)

    def verify(self) -> Verification:
        """Read and check every record; also that the folder holds nothing else: what was deleted is away.

        An entry whose last layers are missing is noticed if another entry of the same model has more.
        """
        num_records, problems = 0, []
        model_to_entries: dict[tuple[str, tuple[int, int]], list[tuple[ChunkKey, int]]] = {}
        with self._errors():
            with self._usage.writing():  # nobody writes in the meantime
                problems += [f"{file} is no entry" for file in self._entries.strangers()]
            for key in self._entries:
                try:
                    file = self._entries.open(key)
                except CorruptRecordError as error:
                    problems.append(f"chunk {key.chunk_hash}: {error}")
                    continue
                if file is None:  # deleted in the meantime
                    continue
                with closing(file):
                    problems += _problems(key, file)
                    num_layers = len(file.layout.lengths)
                num_records += num_layers
                model_to_entries.setdefault((key.fingerprint, key.heads), []).append((key, num_layers))
        for entries in model_to_entries.values():
            most = max(count for _, count in entries)
            problems += [f"chunk {key.chunk_hash}: {count} of {most} layers" for key, count in entries if count < most]
        with self._errors(), atomic_write(self._path / _VERIFIED_NAME) as written:
            written.write(json.dumps([time.time(), num_records, len(problems)]).encode())
        return Verification(num_records, problems)

    def last_verification(self) -> LastVerification | None:
        """Return when the store was verified last, None if it never was, or nobody knows any more."""
        try:
            return LastVerification(*json.loads((self._path / _VERIFIED_NAME).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def records(self, key: ChunkKey) -> list[memoryview] | None:
        """Return an entry's records as they are in the file, checked; None if it isn't stored.

        Raises CorruptRecordError for bytes that don't verify.
        """
        file = self._entries.open(key)
        if file is None:
            return None
        with closing(file):
            records = list(map(file.read, range(len(file.layout.lengths))))
        for i, record in enumerate(records):
            check(key.layer(i), record)
        return records

    def locate(self, key: ChunkKey, layer: int) -> tuple[Path, int, int]:
        """Return the file, offset and length of a record. Raises KeyError if it isn't stored."""
        file = self._entries.open(key)
        if file is None:
            raise KeyError(key)
        with closing(file):
            return self._entries.path(key), file.offset(layer), file.layout.lengths[layer]

    def drop_cached(self, keys: Iterable[ChunkKey]) -> None:
        """Drop these entries from the system's page cache: for measuring."""
        for key in keys:
            self._entries.drop_cached(key)

    def _files(self) -> Iterator[tuple[ChunkKey, EntryFile]]:
        """Yield all entries whose heads are whole, open until the next one is asked for."""
        for key in self._entries:
            with suppress(CorruptRecordError):
                if (file := self._entries.open(key)) is not None:
                    with closing(file):
                        yield key, file

    def _errors(self) -> AbstractContextManager[None]:
        return store_errors(self._path, "read")


def _problems(key: ChunkKey, file: EntryFile) -> Iterator[str]:
    """Yield a line for each record that doesn't verify, and one if the layers don't fit together."""
    shapes = set()
    for layer in range(len(file.layout.lengths)):
        try:
            kv = decode(key.layer(layer), file.read(layer))
            shapes.add((kv.shape, kv.k.dtype, kv.base_position))
        except CorruptRecordError as error:
            yield f"chunk {key.chunk_hash} layer {layer}: {error}"
    if len(shapes) > 1:
        yield f"chunk {key.chunk_hash}: layers differ in shape: {sorted(map(str, shapes))}"
