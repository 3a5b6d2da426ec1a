"""The seam between fusion and storage: what requests and precomputing ask of a KV store.

An entry is one chunk's KV after one anchor, all layers of it; `ChunkKey` names it.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from ragkv.store.codecs import Codec
from ragkv.store.eviction import Hint
from ragkv.store.record import ChunkKey, LayerKV


@dataclass(frozen=True)
class Whole:
    """An entry in memory: its bytes `[n]` uint8, of which what `Snapshot.get` returns are views.

    version: another one after the entry was replaced.
    """

    version: object
    memory: torch.Tensor


class Snapshot(Protocol):
    """A view of the store in which an entry stays what it was when it was first asked for, whatever becomes of it."""

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        """Return one layer of an entry, None if it isn't stored.

        The tensors share the store's memory: they are read-only, and valid until another layer is asked for or the
        snapshot ends. Raises CorruptRecordError for bytes that don't verify.
        """
        ...

    def whole(self, key: ChunkKey) -> Whole | None:
        """Return the memory of an entry of which all layers are in this process's memory and verify, else None."""
        ...

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        """Start to bring one layer of an entry into the page cache, if it is stored. Returns at once."""
        ...


class KVStore(Protocol):
    """One record for each chunk and layer. All layers of an entry are put, and deleted, together or not at all.

    codec: how entries are written from now on.
    """

    codec: Codec

    def put(self, chunks: Iterable[tuple[ChunkKey, Sequence[LayerKV]]]) -> None:
        """Store or replace entries: all are durable when the call returns. Of a process that is killed, some may be.

        Raises StoreError, having stored nothing, if there is no space.
        """
        ...

    def contains(self, key: ChunkKey) -> bool:
        """Return whether the entry is stored, without reading it."""
        ...

    def in_memory(self, key: ChunkKey) -> bool:
        """Return whether the entry is in this process's memory, ready to use."""
        ...

    def memory_changes(self) -> tuple[list[str], list[str]]:
        """Return the hashes of the chunks that entered memory, and of those that left it, since the last call."""
        ...

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Count a use of each of these entries, stored or not: the most used are kept longest, and only used ones are
        kept in memory."""
        ...

    def prefetch(self, keys: Iterable[ChunkKey]) -> None:
        """Start to bring those of these entries that are on disk only into the page cache. Returns at once."""
        ...

    def snapshot(self) -> AbstractContextManager[Snapshot]: ...

    def hint(self, chunk_hashes: Iterable[str], hint: Hint | None) -> None:
        """Set how these chunks' entries are treated when room is needed (`ragkv.store.eviction.HINTS`), whatever the
        budget."""
        ...

    def delete_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Delete these entries, stored or not, and forget their uses."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """Delete an entry whose bytes are damaged. Its uses still count."""
        ...

    def close(self) -> None: ...
