"""A store with a bucket behind it: entries that it lacks are fetched, those that the bucket lacks are sent, and what is
deleted in the store is deleted in the bucket.

Knows keys and bytes only. What is fetched enters the store by the way of an import: every record is checked before the
entry gets its name. What is to be sent is what is stored and not listed, so that nothing needs a queue on disk; what is
to be deleted in the bucket is noted in the store's folder before it is deleted there.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.errors import RagKVError, RemoteError, StoreError
from ragkv.files import sync_folder
from ragkv.store.admin import Verification
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import records_in
from ragkv.store.record import ChunkKey, CorruptRecordError
from ragkv.store.remote import Remote

logger = logging.getLogger(__name__)

ABSENT, LATE, OUTAGE, DAMAGED = "absent", "late", "outage", "damaged"  # reasons of misses
_FETCHERS, _SENDERS = 8, 4  # entries at a time
_MOST_FETCHED = 512  # that are waited for or on their way; of more, none is asked for
_POLL_S = 1.0  # between looks for what is to be sent or deleted
_RARELY = 20  # times as long as a look takes, at least
_Unneeded = Callable[[Iterable[str]], Collection[str]]
_Progress = Callable[[int, int], None]


@dataclass
class Traffic:
    """What went between the store and its bucket. misses: entries that a request or indexing did without, by reason."""

    entries_read: int = 0
    bytes_read: int = 0
    entries_sent: int = 0
    bytes_sent: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class Deletions:
    """The chunks that are deleted here and not yet in the bucket: an empty file for each, named by its hash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, chunk_hashes: Iterable[str]) -> None:
        for chunk_hash in chunk_hashes:
            (self._folder / chunk_hash).touch()
        sync_folder(self._folder)

    def done(self, chunk_hash: str) -> None:
        (self._folder / chunk_hash).unlink(missing_ok=True)

    def __contains__(self, chunk_hash: str) -> bool:
        return (self._folder / chunk_hash).exists()

    def all(self) -> list[str]:
        return sorted(file.name for file in self._folder.iterdir())


class RemoteTier:
    """The bucket behind a store.

    unneeded: returns which of these chunks no document has: they aren't sent, and not kept when they come too late.
    is_quiet: whether nothing that matters more uses the machine.

    From now on what is deleted in the store is noted, and deleted in the bucket by `delete_pending`. Threads may share
    it.
    """

    def __init__(
        self,
        store: DiskStore,
        remote: Remote,
        unneeded: _Unneeded = lambda hashes: (),
        is_quiet: Callable[[], bool] = lambda: True,
    ) -> None:
        self.remote, self.traffic = remote, Traffic()
        self._store, self._unneeded, self._is_quiet = store, unneeded, is_quiet
        self._deletions = Deletions(store.path / "remote" / "deletions")
        store.before_delete = self._deletions.add
        self._lock, self._working = threading.Lock(), threading.Lock()
        self._fetching: dict[ChunkKey, Future[bool]] = {}
        self._known: dict[ChunkKey, int] | None = None  # what the bucket has, with sizes; None until it is listed
        self._mean_bytes = 0.0
        self._looked_at = -1  # the store's last change when it was compared with the bucket
        self.num_unsent = 0
        self._closed = threading.Event()
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="ragkv-fetch")
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="ragkv-send")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Send and delete from now on, in a thread."""
        self._thread = threading.Thread(target=self._run, name="ragkv-remote", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for pool in (self._fetchers, self._senders):
            pool.shutdown(cancel_futures=True)
        self.remote.close()
        self._store.before_delete = None

    # ---- fetch ----

    async def fetch(self, keys: Iterable[ChunkKey], longest_s: float | None = None) -> int:
        """Bring those of these entries that aren't stored and that the bucket has. Returns how many are stored then.

        longest_s: how long to wait for them, which is not at all for those that aren't expected by then. They are
        stored nevertheless when they come. None: until all have come, or failed.
        """
        missing = [key for key in dict.fromkeys(keys) if self._is_missing(key)]
        if self.remote.breaker.rests:
            self.traffic.misses[OUTAGE] += len(missing)
            return 0
        awaited = len(missing) if longest_s is None else self._num_in_time(missing, longest_s)
        coming = {key: self._begin(key) for key in missing}
        waits = [asyncio.wrap_future(future) for key in missing[:awaited] if (future := coming[key]) is not None]
        if waits:
            await asyncio.wait(waits, timeout=longest_s)
        if late := sum(future is None or not future.done() for future in coming.values()):
            self.traffic.misses[LATE] += late
        return sum(future is not None and future.done() and future.result() for future in coming.values())

    def _is_missing(self, key: ChunkKey) -> bool:
        return not self._store.contains(key) and key.chunk_hash not in self._deletions

    def _num_in_time(self, keys: Sequence[ChunkKey], longest_s: float) -> int:
        """Return how many of these entries, the first ones, can be expected so soon, behind all that is on its way."""
        with self._lock:
            num_bytes = sum(self._expected_bytes(key) for key in self._fetching)
        for count, key in enumerate(keys):
            num_bytes += self._expected_bytes(key)
            if self.remote.link.expected_s(num_bytes) > longest_s:
                return count
        return len(keys)

    def _expected_bytes(self, key: ChunkKey) -> float:
        return (self._known or {}).get(key, self._mean_bytes)

    def _begin(self, key: ChunkKey) -> "Future[bool] | None":
        with self._lock:
            if key not in self._fetching:
                if self._closed.is_set() or len(self._fetching) >= _MOST_FETCHED:
                    return None
                self._fetching[key] = self._fetchers.submit(self._fetch, key)
            return self._fetching[key]

    def _fetch(self, key: ChunkKey) -> bool:
        """Bring one entry. Returns whether it is stored."""
        miss: str | None = None
        try:
            file = self.remote.get(key)
            if file is None:
                miss = ABSENT
            else:
                self._store.put_records(key, records_in(file, key))
                self._count_read(len(file))
                self._note(key, len(file))
                if self._unneeded([key.chunk_hash]):  # its document was deleted meanwhile
                    self._store.delete([key.chunk_hash])
        except RemoteError as error:
            miss = OUTAGE
            logger.debug("%s", error)
        except CorruptRecordError as error:
            miss = DAMAGED
            logger.warning("the entry of chunk %s in %s is deleted: %s", key.chunk_hash, self.remote.url, error)
            self._forget(key)
        except StoreError as error:
            miss = OUTAGE
            logger.warning("chunk %s isn't kept: %s", key.chunk_hash, error)
        finally:
            with self._lock:
                self._fetching.pop(key, None)
                if miss is not None:
                    self.traffic.misses[miss] += 1
        return miss is None and self._store.contains(key)

    def _count_read(self, num_bytes: int) -> None:
        with self._lock:
            self.traffic.entries_read += 1
            self.traffic.bytes_read += num_bytes
            self._mean_bytes += (num_bytes - self._mean_bytes) / min(self.traffic.entries_read, 16)

    def _note(self, key: ChunkKey, size: int | None) -> None:
        """Note what the bucket has under a key; None: nothing."""
        with self._lock:
            if self._known is not None:
                if size is None:
                    self._known.pop(key, None)
                else:
                    self._known[key] = size

    def _forget(self, key: ChunkKey) -> None:
        """Delete an object that is worth nothing to anybody; the entry is sent again once it is made again."""
        self._note(key, None)
        with suppress(RemoteError):
            self.remote.delete_key(key)

    # ---- send ----

    def send(self, progress: _Progress = lambda done, total: None) -> int:
        """Send the entries that are stored and that the bucket lacks. Returns how many of them are left."""
        with self._working:
            change = self._store.entries.last_change
            try:
                todo = self._unsent()
            except RemoteError as error:
                logger.warning("nothing is sent: %s", error)
                self.num_unsent = len([*self._store.entries])
                return self.num_unsent
            self.num_unsent = len(todo)
            done = 0
            progress(0, len(todo))
            while done < len(todo) and not self._closed.is_set():
                batch = todo[done : done + (_SENDERS if self._is_quiet() else 1)]
                if not all([*self._senders.map(self._send, batch)]):
                    break
                done += len(batch)
                self.num_unsent = len(todo) - done
                progress(done, len(todo))
            self._looked_at = change
            return self.num_unsent

    def _unsent(self) -> list[ChunkKey]:
        if (known := self._known) is None:
            known = dict(self.remote.sizes())
            with self._lock:
                self._known = known
        todo = [key for key in self._store.entries if key not in known]
        unneeded = self._unneeded({key.chunk_hash for key in todo}) if todo else ()
        return [key for key in todo if key.chunk_hash not in unneeded and key.chunk_hash not in self._deletions]

    def _send(self, key: ChunkKey) -> bool:
        """Send one entry, if it is still stored. Returns whether nothing is left to do for it."""
        file = self._store.entries.read(key)
        if file is None or key.chunk_hash in self._deletions:
            return True
        try:
            records_in(file, key)
            self.remote.put(key, file)
        except CorruptRecordError as error:
            logger.warning("chunk %s isn't sent: %s", key.chunk_hash, error)
            return True
        except RemoteError as error:
            logger.warning("an entry isn't sent: %s", error)
            return False
        self._note(key, len(file))
        with self._lock:
            self.traffic.entries_sent += 1
            self.traffic.bytes_sent += len(file)
        if not self._store.remembers(key):  # it was deleted meanwhile, perhaps before it was in the bucket
            self._deletions.add([key.chunk_hash])
        return True

    # ---- delete ----

    def delete_pending(self) -> int:
        """Delete in the bucket what was deleted in the store. Returns how many chunks an outage has left there."""
        pending = self._deletions.all()
        num_done = sum(self._senders.map(self._delete, pending))
        if num_done:
            self._looked_at = -1  # what was made again meanwhile is to be sent
        return len(pending) - num_done

    def _delete(self, chunk_hash: str) -> bool:
        try:
            self.remote.delete_chunk(chunk_hash)
        except RemoteError as error:
            logger.warning("KV that was deleted here is still there: %s", error)
            return False
        with self._lock:
            if self._known is not None:
                self._known = {key: size for key, size in self._known.items() if key.chunk_hash != chunk_hash}
        self._deletions.done(chunk_hash)
        return True

    @property
    def num_pending_deletions(self) -> int:
        return len(self._deletions.all())

    # ---- both, in the background ----

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._closed.wait(pause_s):
            begun_at = time.monotonic()
            try:
                if not self.remote.breaker.rests:
                    self._catch_up()
            except RagKVError as error:
                logger.warning("%s is left as it is for now: %s", self.remote.url, error)
            except Exception:
                logger.exception("%s is left as it is for now", self.remote.url)
            pause_s = max(_POLL_S, _RARELY * (time.monotonic() - begun_at))
            pause_s = min(pause_s, 60.0)

    def _catch_up(self) -> None:
        if self.num_pending_deletions:
            self.delete_pending()
        if self.num_unsent or self._store.entries.last_change != self._looked_at:
            self.send()

    # ---- look after ----

    def verify(self, chunk_hashes: Collection[str]) -> Verification:
        """Read and check the objects of these chunks."""
        num_records, problems = 0, []
        for key in [key for key, _ in self.remote.sizes() if key.chunk_hash in chunk_hashes]:
            try:
                if (file := self.remote.get(key)) is not None:
                    num_records += len(records_in(file, key))
            except CorruptRecordError as error:
                problems.append(f"chunk {key.chunk_hash} in {self.remote.url}: {error}")
        pending = [
            f"chunk {chunk_hash} is deleted, and may still be in {self.remote.url}"
            for chunk_hash in self._deletions.all()
        ]
        return Verification(num_records, problems + pending)


def open_tier(
    store: DiskStore,
    url: str | None,
    timeout_s: float,
    unneeded: _Unneeded = lambda hashes: (),
    is_quiet: Callable[[], bool] = lambda: True,
) -> RemoteTier | None:
    """Return the tier behind a store; None if it has none. Raises StoreError if the store has another than `url`.

    The store's folder remembers the URL: what is deleted by a command that doesn't know it would stay in the bucket.
    """
    marker = store.path / "remote" / "url"
    known = marker.read_text().strip() if marker.exists() else None
    if known is not None and known != url:
        raise StoreError(
            f"the KV in {store.path} is also in {known}, and store.remote is {url or 'not set'}: what is deleted here "
            f"would stay there. Set store.remote = {known!r} (RAGKV_STORE__REMOTE), or delete {marker} if that place "
            "is of no concern any more"
        )
    if url is None:
        return None
    tier = RemoteTier(store, Remote(url, timeout_s), unneeded, is_quiet)
    if known is None:
        marker.write_text(f"{url}\n")
    return tier
