"""What is known of a bucket without asking it: its entries, what it is still to delete, and what went to and fro."""

import fcntl
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.files import sync_folder
from ragkv.store.record import ChunkKey

LISTED_FOR_S = 3600.0  # other machines send and delete too
ALL = "all"  # in the place of a chunk's hash among deletions


@dataclass
class Traffic:
    """What went between a store and its bucket. misses: entries that a request or indexing did without, by reason."""

    entries_read: int = 0
    bytes_read: int = 0
    entries_sent: int = 0
    bytes_sent: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class Deletions:
    """The chunks that are deleted, or cleared, here and not yet in the bucket: a file for each, named by it.

    `ALL` is one that means every chunk. A file holds a token that is new whenever the chunk is noted, so that what is
    noted again while it is being deleted stays noted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock_file = folder, folder.with_name(f"{folder.name}.lock")
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock_file.open("wb") as lock:  # of this call: it excludes other threads too
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def add(self, chunk_hashes: Iterable[str]) -> None:
        with self._locked():
            for chunk_hash in chunk_hashes:
                (self._folder / chunk_hash).write_text(uuid.uuid4().hex)
        sync_folder(self._folder)

    def token(self, chunk_hash: str) -> str | None:
        """Return what `done` wants to know, None if the chunk isn't noted."""
        file = self._folder / chunk_hash
        with self._locked():
            return file.read_text() if file.exists() else None

    def done(self, chunk_hash: str, token: str) -> None:
        """Forget a chunk that was deleted since `token` was read, unless it was noted again meanwhile."""
        file = self._folder / chunk_hash
        with self._locked():
            if file.exists() and file.read_text() == token:
                file.unlink()

    def __contains__(self, chunk_hash: str) -> bool:
        return (self._folder / chunk_hash).exists() or (self._folder / ALL).exists()

    @property
    def last_change(self) -> int:
        """Return a number that differs once a deletion was noted or done, by any process."""
        return self._folder.stat().st_mtime_ns

    def all(self) -> list[str]:
        return sorted(file.name for file in self._folder.iterdir())

    def __len__(self) -> int:
        return len(self.all())


class Contents:
    """The entries of a bucket and their sizes, as listed, and as changed from here since. Threads may share it.

    listed_for_s: how long a list is believed.
    """

    def __init__(self, listed_for_s: float = LISTED_FOR_S) -> None:
        self._listed_for_s = listed_for_s
        self._lock = threading.Lock()
        self._sizes: dict[str, dict[ChunkKey, int]] = {}  # by chunk
        self._listed_at: float | None = None

    @property
    def is_old(self) -> bool:
        """Whether it is to be listed anew."""
        return self._listed_at is None or time.monotonic() > self._listed_at + self._listed_for_s

    def refresh(self, listed: Callable[[], Iterable[tuple[ChunkKey, int]]]) -> None:
        """List the bucket anew, if that was long ago. listed: returns keys and sizes; what it raises is passed on."""
        if not self.is_old:
            return
        sizes: dict[str, dict[ChunkKey, int]] = {}
        for key, size in listed():
            sizes.setdefault(key.chunk_hash, {})[key] = size
        with self._lock:
            self._sizes, self._listed_at = sizes, time.monotonic()

    def size(self, key: ChunkKey) -> int | None:
        """Return an entry's bytes, None if it isn't known to be there."""
        with self._lock:
            return self._sizes.get(key.chunk_hash, {}).get(key)

    def may_have(self, key: ChunkKey) -> bool:
        """Return whether the bucket may have an entry: it has, or wasn't listed."""
        return self._listed_at is None or self.size(key) is not None

    def add(self, key: ChunkKey, size: int) -> None:
        with self._lock:
            self._sizes.setdefault(key.chunk_hash, {})[key] = size

    def remove(self, key: ChunkKey) -> None:
        with self._lock:
            self._sizes.get(key.chunk_hash, {}).pop(key, None)

    def remove_chunk(self, chunk_hash: str) -> None:
        with self._lock:
            self._sizes.pop(chunk_hash, None)

    def remove_all(self) -> None:
        with self._lock:
            self._sizes = {}
