"""The seam between fusion and storage: what every KV store can do."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from ragkv.store.eviction import Hint
from ragkv.store.record import ChunkKey, LayerKV


@dataclass(frozen=True)
class StoreStats:
    """What a store holds. `size_bytes` is the sum of the records; `file_bytes` what they take on disk (0 in memory)."""

    num_chunks: int
    num_records: int
    size_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Verification:
    """What `verify` found: `problems` has one line for each bad chunk, with its hash."""

    num_records: int
    problems: list[str] = field(default_factory=list)


class Snapshot(Protocol):
    """A view of the store in which each chunk stays what it was when it was first asked for, or is gone once it is
    deleted or replaced."""

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        """One layer of a chunk, or None where there is none.

        The tensors share the store's memory: they are to be read only, and until another layer is asked for or the
        snapshot ends; then others may lie there. Raises CorruptRecordError for bytes that don't verify.
        """
        ...

    def lost(self) -> list[ChunkKey]:
        """Of the chunks asked for, those that were deleted or replaced since. Their layers may be of several contexts,
        and what was made of them is not to be used: that counts only if this doesn't name them afterwards."""
        ...

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        """Start to bring one layer of a chunk nearer, if it is there; returns at once."""
        ...


class KVStore(Protocol):
    """One record for each chunk and layer. All layers of a chunk are put, and deleted, together or not at all."""

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        """Store chunks in one transaction: all are durable when the call returns, or none. Replaces what was there.

        Raises StoreError, having written nothing, where there is no space.
        """
        ...

    def contains(self, key: ChunkKey) -> bool:
        """Whether the chunk's records are there, without reading their payload."""
        ...

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Count a use of each of these chunks, whether it is there or not: what is used often is kept longest, and only
        what is used is kept in memory."""
        ...

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """Start to read those of these chunks that lie on a slow disk, for who asks for them soon; returns at once."""
        ...

    def in_memory(self, key: ChunkKey) -> bool:
        """Whether the chunk lies in this process's memory, ready to use."""
        ...

    def memory_changes(self) -> tuple[list[str], list[str]]:
        """The hashes of the chunks that have come into memory, and of those that have gone, since this was last
        asked."""
        ...

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None) -> None:
        """How these chunks' records are to be treated when room is needed."""
        ...

    def snapshot(self) -> AbstractContextManager[Snapshot]: ...

    def delete(self, chunk_hashes: Iterable[str]) -> int:
        """Remove every record of these chunks, whatever the model and anchor. Returns how many records went."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """Remove one precompute of a chunk."""
        ...

    def chunk_hashes(self) -> Iterator[str]:
        """The chunks that have records, each once."""
        ...

    def stats(self) -> StoreStats: ...

    def verify(self) -> Verification:
        """Read every record and check it, and that every chunk has all its layers."""
        ...

    def close(self) -> None: ...
