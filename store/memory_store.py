"""The in-memory twin of the store on disk: the same contract in a dict, for tests and stores that needn't last."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ragkv.store.base import StoreStats, Verification
from ragkv.store.eviction import Hint
from ragkv.store.record import ChunkKey, LayerKV, decode, encode
from ragkv.store.verification import HASH_BYTES, verify_records


class MemoryStore:
    def __init__(self) -> None:
        self._records: dict[bytes, bytes] = {}

    @property
    def admin(self) -> "MemoryStore":
        """Return the store itself, which has no files to look after."""
        return self

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        records = dict(self._records)
        for key, layers in chunks:
            records.update({key.layer(i): encode(key.layer(i), kv) for i, kv in enumerate(layers)})
        self._records = records

    def contains(self, key: ChunkKey) -> bool:
        return key.layer(0) in self._records

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Nothing is evicted."""

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """All of it is in memory."""

    def in_memory(self, key: ChunkKey) -> bool:
        return self.contains(key)

    def memory_changes(self) -> tuple[list[str], list[str]]:
        return [], []

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None) -> None:
        """Nothing is evicted."""

    @contextmanager
    def snapshot(self) -> Iterator["_MemorySnapshot"]:
        yield _MemorySnapshot(self._records)

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        deleted = {bytes.fromhex(chunk_hash) for chunk_hash in chunk_hashes}
        kept = {key: value for key, value in self._records.items() if key[:HASH_BYTES] not in deleted}
        num_deleted = len(self._records) - len(kept)
        self._records = kept
        return num_deleted

    def discard(self, key: ChunkKey) -> None:
        prefix = key.prefix()
        self._records = {k: v for k, v in self._records.items() if not k.startswith(prefix)}

    def chunk_hashes(self) -> Iterator[str]:
        return iter(sorted({key[:HASH_BYTES].hex() for key in self._records}))

    def stats(self) -> StoreStats:
        size_bytes = sum(map(len, self._records.values()))
        return StoreStats(len(list(self.chunk_hashes())), len(self._records), size_bytes, file_bytes=0)

    def verify(self) -> Verification:
        return verify_records(sorted(self._records.items()))

    def close(self) -> None:
        self._records = {}


class _MemorySnapshot:
    """A view of the dict, which writers replace and never change."""

    def __init__(self, records: dict[bytes, bytes]) -> None:
        self._records = records

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        value = self._records.get(key.layer(layer))
        return None if value is None else decode(key.layer(layer), value)

    def deleted(self) -> list[ChunkKey]:
        return []

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        """All of it is in memory."""
