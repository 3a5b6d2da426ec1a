"""From the bucket to the store: entries that are asked for and not stored, many at once, checked before they enter."""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from ragkv.errors import RemoteError, StoreError
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import records_in
from ragkv.store.record import ChunkKey, CorruptRecordError
from ragkv.store.remote import Remote
from ragkv.store.remote_state import Contents, Deletions, Traffic

logger = logging.getLogger(__name__)

MISSES = ABSENT, LATE, OUTAGE, DAMAGED = "absent", "late", "outage", "damaged"  # their reasons
Unneeded = Callable[[Iterable[str]], Collection[str]]
_FETCHERS = 8  # entries at a time
_MOST = 512  # that are on their way; of more, none is asked for
_MEAN_OF = 16  # entries, by whose size that of others is guessed


class Fetcher:
    """What brings entries. unneeded: which of these chunks no document has any more. Threads may share it."""

    def __init__(
        self,
        store: DiskStore,
        remote: Remote,
        contents: Contents,
        deletions: Deletions,
        traffic: Traffic,
        unneeded: Unneeded,
    ) -> None:
        self._store, self._remote, self._unneeded = store, remote, unneeded
        self._contents, self._deletions, self._traffic = contents, deletions, traffic
        self._lock = threading.Lock()
        self._coming: dict[ChunkKey, Future[bool]] = {}
        self._mean_bytes = 0.0
        self._is_closed = self._was_in_vain = False
        self._pool = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="ragkv-fetch")

    async def fetch(
        self,
        keys: Iterable[ChunkKey],
        longest_s: float | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> int:
        """Bring those of these entries that aren't stored and that the bucket has. Returns how many have come.

        longest_s: how long to wait for them. Those that aren't expected by then, or that the bucket didn't have when it
        was listed, aren't begun: they would take processor time from a request that can't wait for them (`begin`).
        None: until all have come, or failed. is_wanted: as of `DiskStore.put`, of those that aren't on their way yet.
        """
        missing = [key for key in dict.fromkeys(keys) if self._is_missing(key)]
        if self._remote.breaker.rests:
            self._miss(OUTAGE, len(missing))
            return 0
        if longest_s is not None:  # what another machine has sent since is for the next request
            missing = [key for key in missing if self._contents.may_have(key)]
        awaited = missing if longest_s is None else missing[: self.num_in_time(missing, longest_s)]
        coming = [future for key in awaited if (future := self._begin(key, is_wanted)) is not None]
        if coming:
            await asyncio.wait(map(asyncio.wrap_future, coming), timeout=longest_s)
        done = [future for future in coming if future.done()]
        if len(done) < len(coming):
            self._was_in_vain = True
        self._miss(LATE, len(missing) - len(done))
        return sum(not future.cancelled() and future.result() for future in done)

    def begin(self, keys: Iterable[ChunkKey], is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Begin to bring those of these entries that aren't stored, for requests that come later."""
        if not self._remote.breaker.rests:
            for key in filter(self._is_missing, dict.fromkeys(keys)):
                self._begin(key, is_wanted)

    def num_in_time(self, keys: Sequence[ChunkKey], longest_s: float) -> int:
        """Return how many of these entries, the first ones, can be expected so soon, behind all that is on its way.

        None of them, if one was waited for in vain and nothing has come or failed since.
        """
        if self._was_in_vain:
            return 0
        with self._lock:
            num_bytes = sum(self._expected_bytes(key) for key in self._coming if key not in keys)
        for count, key in enumerate(keys):
            num_bytes += self._expected_bytes(key)
            if self._remote.link.expected_s(num_bytes) > longest_s:
                return count
        return len(keys)

    def close(self) -> None:
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    def _is_missing(self, key: ChunkKey) -> bool:
        return not self._store.contains(key) and key.chunk_hash not in self._deletions

    def _expected_bytes(self, key: ChunkKey) -> float:
        return self._contents.size(key) or self._mean_bytes

    def _begin(self, key: ChunkKey, is_wanted: Callable[[], bool]) -> "Future[bool] | None":
        with self._lock:
            if key not in self._coming:
                if self._is_closed or len(self._coming) >= _MOST:
                    return None
                self._coming[key] = self._pool.submit(self._fetch, key, is_wanted)
            return self._coming[key]

    def _fetch(self, key: ChunkKey, is_wanted: Callable[[], bool]) -> bool:
        """Bring one entry. Returns whether it is stored."""
        try:
            change = self._deletions.last_change
            file = self._remote.get(key)
            if file is None:
                self._miss(ABSENT)
                self._contents.remove(key)  # so that it is sent once it is made again
                return False
            self._store.put_records(key, records_in(file, key), is_wanted)
            if self._was_cleared(key, change):
                self._store.control.clear([key])
                self._miss(ABSENT)
                return False
            self._contents.add(key, len(file))
            self._count(len(file))
            if self._unneeded([key.chunk_hash]):  # its document was deleted meanwhile
                self._store.delete([key.chunk_hash])
            return self._store.contains(key)
        except CorruptRecordError as error:
            self._miss(DAMAGED)
            logger.warning("the entry of chunk %s in %s is deleted: %s", key.chunk_hash, self._remote.url, error)
            self._contents.remove(key)  # so that it is sent again once it is made again
            with suppress(RemoteError):
                self._remote.delete_key(key)
        except RemoteError:
            self._miss(OUTAGE)
        except StoreError as error:
            self._miss(OUTAGE)
            logger.warning("chunk %s isn't kept: %s", key.chunk_hash, error)
        finally:
            with self._lock:
                self._coming.pop(key, None)
                self._was_in_vain = False
        return False

    def _was_cleared(self, key: ChunkKey, change: int) -> bool:
        """Return whether an entry was cleared, by any process, since the deletions' last change was this one."""
        if key.chunk_hash in self._deletions:
            return True
        return self._deletions.last_change != change and not self._remote.has(key)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._traffic.entries_read += 1
            self._traffic.bytes_read += num_bytes
            self._mean_bytes += (num_bytes - self._mean_bytes) / min(self._traffic.entries_read, _MEAN_OF)

    def _miss(self, reason: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._traffic.misses[reason] += count
