"""What operators do with entries: describe, pin, warm, demote, encode anew and clear them. No request waits for it.

Any number of processes may use the store meanwhile. What is in a worker's memory only its own store knows
(`DiskStore.held`).
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ragkv.errors import ConfigError
from ragkv.store.codecs import CODECS, Codec
from ragkv.store.difference import differences
from ragkv.store.entries import ALIGNMENT, EntryFolder, entry_bytes
from ragkv.store.eviction import Hint
from ragkv.store.opening import store_errors
from ragkv.store.record import (
    ChunkKey,
    CorruptRecordError,
    LayerKV,
    decode,
    encode,
    read_header,
    record_bytes,
)
from ragkv.store.usage import Usage

_GIB = 1 << 30
# recoded; two made one; left as it is because it has the codec, or would not get smaller; changed or gone; damaged
Outcome = Literal["recoded", "joined", "same", "no smaller", "changed", "damaged"]


@dataclass(frozen=True)
class EntryInfo:
    """What the store knows of an entry.

    codec: of its first record, None if that is damaged. is_cached: whether the page cache has all of it. uses: how
    often it was used, its storing among them. used_at: when last, in seconds since 1970.
    """

    key: ChunkKey
    size_bytes: int
    codec: str | None
    is_cached: bool
    uses: int
    used_at: float
    hint: str | None


@dataclass(frozen=True)
class Recoded:
    """What encoding an entry anew came to: its bytes on disk before and after."""

    outcome: Outcome
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True)
class Pair:
    """The keys of a chunk's two entries, after the anchor alone and the mean, and of the one that can hold both."""

    alone: ChunkKey
    mean: ChunkKey
    joined: ChunkKey


class StoreControl:
    """`DiskStore.control`. Raises StoreError for a folder that can't be read or written."""

    def __init__(self, path: Path, entries: EntryFolder, usage: Usage) -> None:
        self._path, self._entries, self._usage = path, entries, usage

    def keys_of(self, chunk_hashes: Iterable[str]) -> list[ChunkKey]:
        """Return the keys of all entries of these chunks, the most used first."""
        with self._errors("read"):
            by_chunk = self._entries.keys_by_chunk(chunk_hashes)
            uses = {key: row.uses for key, row in self._usage.rows_of(by_chunk).items()}
            keys = [key for each in by_chunk.values() for key in each]
            return sorted(keys, key=lambda key: uses.get(key, 0), reverse=True)

    def describe(self, chunk_hashes: Collection[str]) -> dict[str, list[EntryInfo]]:
        """Return what is known of the entries of each of these chunks."""
        with self._errors("read"):
            rows = self._usage.rows_of(chunk_hashes)
            described: dict[str, list[EntryInfo]] = {}
            for chunk_hash, keys in self._entries.keys_by_chunk(chunk_hashes).items():
                described[chunk_hash] = []
                for key in keys:
                    row, is_cached = rows.get(key), self._entries.is_cached(key)
                    uses, used_at, hint = (row.uses, row.used_at, row.hint) if row else (0, 0.0, None)
                    codec, size_bytes = self._codec(key), self._entries.size(key)
                    described[chunk_hash].append(EntryInfo(key, size_bytes, codec, is_cached, uses, used_at, hint))
            return described

    def _codec(self, key: ChunkKey) -> str | None:
        with suppress(CorruptRecordError):
            if (begin := self._entries.first_bytes(key, ALIGNMENT)) is not None:
                return read_header(begin).codec.name
        return None

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None, disk_bytes: int | None) -> int:
        """Set the hint of all entries of these chunks. Returns the bytes of all that is pinned then.

        disk_bytes: the store's budget; None: pins aren't limited. Raises ConfigError, having changed nothing, if it
        can't hold all that would be pinned.
        """
        chunk_hashes = set(chunk_hashes)
        with self._errors("write to"), self._usage.writing():
            if hint == "pin" and disk_bytes is not None:
                self._check_pins(chunk_hashes, disk_bytes)
            for chunk_hash in chunk_hashes:
                self._usage.hint(chunk_hash, hint)
            pinned = self._usage.pinned_bytes()
        self._entries.mark_changed()  # for what is in memory, of other processes too
        return pinned

    def _check_pins(self, chunk_hashes: Collection[str], disk_bytes: int) -> None:
        before, pinned = self._usage.pinned_bytes(), self._usage.pinned_bytes(and_those_of=chunk_hashes)
        if pinned > disk_bytes and pinned > before:
            raise ConfigError(
                f"{_gib(pinned)} would be pinned with these ({_gib(before)} are already), and store.disk_gib is "
                f"{_gib(disk_bytes)}; pin fewer, unpin others, or raise store.disk_gib. Nothing was pinned"
            )

    def unpin(self, chunk_hashes: Collection[str]) -> int:
        """Let those of these chunks that are pinned be evicted again. Returns the bytes of all that is pinned then."""
        with self._errors("write to"), self._usage.writing():
            for chunk_hash in {
                k.chunk_hash for k, row in self._usage.rows_of(chunk_hashes).items() if row.hint == "pin"
            }:
                self._usage.hint(chunk_hash, None)
            pinned = self._usage.pinned_bytes()
        self._entries.mark_changed()
        return pinned

    def hints(self, chunk_hashes: Iterable[str]) -> dict[str, str | None]:
        """Return the hint of each of these chunks that has, or had, entries."""
        with self._errors("read"):
            return {key.chunk_hash: row.hint for key, row in self._usage.rows_of(chunk_hashes).items()}

    def warm(self, key: ChunkKey) -> int:
        """Bring an entry into the page cache. Returns its bytes, 0 if it isn't stored."""
        with self._errors("read"):
            self._entries.read_through(key)
            return self._entries.size(key)

    def is_cached(self, key: ChunkKey) -> bool:
        """Return whether an entry is stored and all of it in the page cache."""
        return self._entries.contains(key) and self._entries.is_cached(key)

    def demote(self, keys: Iterable[ChunkKey]) -> int:
        """Drop entries from the page cache. Returns the bytes of those that were there and are no more."""
        dropped = 0
        with self._errors("read"):
            for key in keys:
                was_cached = self.is_cached(key)
                self._entries.drop_cached(key)
                dropped += self._entries.size(key) if was_cached and not self._entries.is_cached(key) else 0
        return dropped

    def recode(self, key: ChunkKey, codec: Codec) -> Recoded:
        """Encode an entry anew and replace it, whole or not at all. Its uses and its hint stay.

        An entry that wouldn't get smaller stays as it is: what its codec left out doesn't come back.
        """
        with self._errors("write to"):
            version, size = self._entries.version(key), self._entries.size(key)
            try:
                layers = self._decoded(key, codec)
            except CorruptRecordError:
                return Recoded("damaged", size, size)
            if layers == "same":
                self._correct_size(key)
            if not isinstance(layers, list):
                return Recoded(layers, size, size)
            records = [encode(key.layer(i), kv, codec) for i, kv in enumerate(layers)]
            return self._replace(key, records, version, size)

    def _decoded(self, key: ChunkKey, codec: Codec) -> list[LayerKV] | Outcome:
        """Return an entry's layers as they were before they were encoded, or why it is to stay."""
        records = self._records(key)
        if records is None:
            return "changed"
        headers = list(map(read_header, records))
        if all(header.codec == codec.of(is_mean=header.has_v_std) for header in headers):
            return "same"
        layers = []
        for i, (record, header) in enumerate(zip(records, headers, strict=True)):
            kv = decode(key.layer(i), record)
            k, v = (part.to(header.dtype) for part in kv.mean().decoded())
            layers.append(LayerKV(k, v, kv.base_position, kv.v_std, difference=kv.difference))
        return layers if sum(record_bytes(kv, codec) for kv in layers) < sum(map(len, records)) else "no smaller"

    def join(self, pair: Pair, codec: Codec) -> Recoded:
        """Put one entry in the place of two: the mean, with the difference of the KV after the anchor alone.

        As of what is put, the row is committed before the file has its name: killed in between, both entries are there.
        """
        keys = (pair.alone, pair.mean)
        with self._errors("write to"):
            versions, size = list(map(self._entries.version, keys)), sum(map(self._entries.size, keys))
            try:
                alone, mean = (self._layers(key) for key in keys)
            except CorruptRecordError:
                return Recoded("damaged", size, size)
            if not (alone and mean):
                return Recoded("changed", size, size)
            changes = differences(
                [(kv.k, kv.v) for kv in alone], [(kv.k.float(), kv.v.float()) for kv in mean], codec.share
            )
            layers = [replace(kv, difference=change) for kv, change in zip(mean, changes, strict=True)]
            records = [encode(pair.joined.layer(i), kv, codec) for i, kv in enumerate(layers)]
            file, size_after = self._entries.write(pair.joined, records), entry_bytes([*map(len, records)])
            try:
                with self._usage.writing():
                    self._usage.copy(pair.mean, pair.joined, size_after)
                with self._usage.writing():
                    if list(map(self._entries.version, keys)) != versions:
                        self._usage.lose(pair.joined)
                        return Recoded("changed", size, size)
                    self._entries.publish({pair.joined: file})
                    self._entries.delete(keys)
                    for key in keys:
                        self._usage.forget(key.prefix())
            finally:
                file.unlink(missing_ok=True)
        return Recoded("joined", size, size_after)

    def _layers(self, key: ChunkKey) -> list[LayerKV]:
        """Return an entry's layers as they were before they were encoded; none if it isn't stored."""
        layers = []
        for i, record in enumerate(self._records(key) or ()):
            kv, dtype = decode(key.layer(i), record), read_header(record).dtype
            k, v = (part.to(dtype) for part in kv.decoded())
            layers.append(LayerKV(k, v, kv.base_position, kv.v_std))
        return layers

    def _records(self, key: ChunkKey) -> list[memoryview] | None:
        if (file := self._entries.open(key)) is None:
            return None
        with closing(file):
            return [file.read(i) for i in range(len(file.layout.lengths))]

    def _replace(self, key: ChunkKey, records: Sequence[bytes], version: tuple[int, int] | None, size: int) -> Recoded:
        """Write a file without a name, and give it the entry's, with its row; unless the entry was changed meanwhile.

        Of a process that is killed in between the row may have the larger size: the next `recode` corrects it.
        """
        file, size_after = self._entries.write(key, records), entry_bytes([*map(len, records)])
        try:
            with self._usage.writing():
                if self._entries.version(key) != version:  # deleted, say: then it stays away
                    return Recoded("changed", size, size)
                self._usage.resize(key, size_after)
                self._entries.publish({key: file})
        finally:
            file.unlink(missing_ok=True)
        return Recoded("recoded", size, size_after)

    def _correct_size(self, key: ChunkKey) -> None:
        """Have the row of an entry say what its file takes."""
        row = self._usage.rows_of([key.chunk_hash]).get(key)
        if row is not None and row.size_bytes != self._entries.size(key):
            with self._usage.writing():
                if size := self._entries.size(key):
                    self._usage.resize(key, size)

    def clear(self, keys: Iterable[ChunkKey]) -> int:
        """Delete entries, whose uses and hints are remembered. Returns the bytes that they took on disk."""
        keys = list(keys)
        with self._errors("delete from"), self._usage.writing():
            size_bytes = sum(map(self._entries.size, keys))
            self._entries.delete(keys)
            for key in keys:
                self._usage.lose(key)
        return size_bytes

    def try_reading(self) -> None:
        """Raise StoreError unless the folder, an entry of it and the table can be read."""
        with self._errors("read"):
            self._usage.gauges()
            if (key := next(iter(self._entries), None)) is not None:
                self._codec(key)

    def try_writing(self) -> None:
        """Raise StoreError unless an entry could be written now. Waits for other writers."""
        with self._errors("write to"):
            with self._usage.writing():
                pass
            self._entries.try_writing()

    def _errors(self, verb: str) -> AbstractContextManager[None]:
        return store_errors(self._path, verb)


def codec_named(name: str) -> Codec:
    """Return the codec to encode stored KV with. Raises ConfigError for one that is unknown or leaves nothing out."""
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}")
    if CODECS[name].stored is None:
        raise ConfigError(
            f"nothing can be encoded as {name!r} again: what a smaller codec left out doesn't come back. Set "
            f"store.codec = {name!r}, and `ragkv store clear` the documents: their KV is then made anew"
        )
    return CODECS[name]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
