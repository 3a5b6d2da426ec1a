"""A store with a bucket behind it: entries that it lacks are fetched, those that the bucket lacks are sent, and what is
deleted in the store is deleted in the bucket.

Knows keys and bytes only. The parts are `remote` (the bucket), `fetching`, `sending` and `remote_state`.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ragkv.errors import RagKVError, RemoteError, StoreError
from ragkv.store.admin import Verification
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import records_in
from ragkv.store.fetching import Fetcher, Unneeded
from ragkv.store.record import ChunkKey, CorruptRecordError
from ragkv.store.remote import Remote
from ragkv.store.remote_state import Contents, Deletions, Traffic
from ragkv.store.sending import Sender

logger = logging.getLogger(__name__)

MARKER = Path("remote", "url")  # in the store's folder: where its bucket is
_DELETIONS = Path("remote", "deletions")
_POLL_S, _LONGEST_POLL_S = 1.0, 60.0  # between looks for what is to be sent or deleted
_RARELY = 20  # times as long as a look computes, at least


@dataclass(frozen=True)
class RemoteStatus:
    """A bucket as it is now. problem: why it doesn't answer, None if it does. pending_deletions: chunks that were
    deleted here, and that it still has."""

    url: str
    problem: str | None
    pending_deletions: int


class RemoteTier:
    """The bucket behind a store. Arguments as of `Fetcher` and `Sender`.

    From now on what is deleted in the store is noted, and deleted in the bucket by `delete_pending`. Threads may share
    it.
    """

    def __init__(
        self,
        store: DiskStore,
        remote: Remote,
        unneeded: Unneeded = lambda hashes: (),
        is_quiet: Callable[[], bool] = lambda: True,
        waiting: Callable[[], Collection[str]] = lambda: (),
    ) -> None:
        self.remote, self.traffic, self._store = remote, Traffic(), store
        self._contents, self._deletions = Contents(), Deletions(store.path / _DELETIONS)
        known = (self._contents, self._deletions, self.traffic, unneeded)
        self._fetcher, self._sender = Fetcher(store, remote, *known), Sender(store, remote, *known, is_quiet, waiting)
        self.fetch, self.send = self._fetcher.fetch, self._sender.send
        self.delete_pending = self._sender.delete_pending
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        store.before_delete = self.note_deletions

    def start(self) -> None:
        """Send and delete from now on, in a thread."""
        self._thread = threading.Thread(target=self._run, name="ragkv-remote", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, once what is on its way has arrived. The store stays open."""
        self._closed.set()
        self._sender.stop()
        if self._thread is not None:
            self._thread.join()
        self._fetcher.close()
        self._sender.close()
        self.remote.close()
        self._store.before_delete = None

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._closed.wait(pause_s):
            spent_s = time.thread_time()  # of the processor; waiting costs nobody anything
            try:
                if not self.remote.breaker.rests:
                    self._sender.catch_up()
            except RagKVError as error:
                logger.warning("%s is left as it is for now: %s", self.remote.url, error)
            except Exception:
                logger.exception("%s is left as it is for now", self.remote.url)
            pause_s = min(_LONGEST_POLL_S, max(_POLL_S, _RARELY * (time.thread_time() - spent_s)))

    @property
    def num_unsent(self) -> int:
        """The entries that the bucket lacks, when it was looked at last."""
        return self._sender.num_unsent

    @property
    def num_pending_deletions(self) -> int:
        return len(self._deletions)

    def status(self) -> RemoteStatus:
        """Return where the bucket is, whether it answers now, and what it hasn't heard of."""
        problem = None
        try:
            self.remote.check()
        except RemoteError as error:
            problem = str(error)
        return RemoteStatus(self.remote.url, problem, self.num_pending_deletions)

    def note_deletions(self, chunk_hashes: Iterable[str]) -> None:
        """Have all that is of these chunks deleted in the bucket, by the next `delete_pending` of any process; until
        then nothing of it is fetched or sent."""
        self._deletions.add(chunk_hashes)

    def keys_of(self, chunk_hashes: Collection[str]) -> list[ChunkKey]:
        """List the objects of these chunks. Raises RemoteError for an outage."""
        return [key for key, _ in self.remote.sizes() if key.chunk_hash in chunk_hashes]

    def delete_keys(self, keys: Iterable[ChunkKey]) -> None:
        """Delete these objects in the bucket only. Raises RemoteError for an outage."""
        for key in keys:
            self.remote.delete_key(key)
            self._contents.remove(key)

    def verify(self, chunk_hashes: Collection[str]) -> Verification:
        """Read and check the objects of these chunks. Raises RemoteError for an outage."""
        num_records, problems = 0, []
        for key in self.keys_of(chunk_hashes):
            try:
                if (file := self.remote.get(key)) is not None:
                    num_records += len(records_in(file, key))
            except CorruptRecordError as error:
                problems.append(f"chunk {key.chunk_hash} in {self.remote.url}: {error}")
        for chunk_hash in self._deletions.all():
            problems.append(f"chunk {chunk_hash} is deleted, and may still be in {self.remote.url}")
        return Verification(num_records, problems)


class Place(Protocol):
    """The settings that say where a store's bucket is (`ragkv.config.StoreConfig`)."""

    @property
    def remote(self) -> str | None: ...

    @property
    def remote_timeout_s(self) -> float: ...


def open_tier(
    store: DiskStore,
    place: Place,
    unneeded: Unneeded = lambda hashes: (),
    is_quiet: Callable[[], bool] = lambda: True,
    waiting: Callable[[], Collection[str]] = lambda: (),
) -> RemoteTier | None:
    """Return the tier behind a store; None if it has none. Raises StoreError if the store has another than that.

    The store's folder remembers the URL: what is deleted by a command that doesn't know it would stay in the bucket.
    """
    url, marker = place.remote, store.path / MARKER
    known = marker.read_text().strip() if marker.exists() else None
    if known is not None and known != url:
        raise StoreError(
            f"the KV in {store.path} is also in {known}, and store.remote is {url or 'not set'}: what is deleted here "
            f"would stay there. Set store.remote = {known!r} (RAGKV_STORE__REMOTE), or delete {marker} if that place "
            "is of no concern any more"
        )
    if url is None:
        return None
    tier = RemoteTier(store, Remote(url, place.remote_timeout_s), unneeded, is_quiet, waiting)
    if known is None:
        marker.write_text(f"{url}\n")
    return tier
