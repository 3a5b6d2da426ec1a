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
from ragkv.store.remote_state import ALL, LISTED_FOR_S, Contents, Deletions, Traffic
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
    """The bucket behind a store. Arguments as of `Fetcher`, `Sender` and `Contents`.

    From now on what is deleted in the store is noted, and deleted in the bucket by `delete_pending`. Threads may share
    it.

    derived: the tier of what else was computed of the chunks' text (`DiskStore.clear_derived`), None if there is none.
    All that its bucket has is deleted where chunks are; it is started, and closed with its store, with this one.
    """

    def __init__(
        self,
        store: DiskStore,
        remote: Remote,
        unneeded: Unneeded = lambda hashes: (),
        is_quiet: Callable[[], bool] = lambda: True,
        waiting: Callable[[], Collection[str]] = lambda: (),
        listed_for_s: float = LISTED_FOR_S,
    ) -> None:
        self.remote, self.traffic, self.store = remote, Traffic(), store
        self.derived: RemoteTier | None = None
        self._contents, self._deletions = Contents(listed_for_s), Deletions(store.path / _DELETIONS)
        known = (self._contents, self._deletions, self.traffic, unneeded)
        self._fetcher, self._sender = Fetcher(store, remote, *known), Sender(store, remote, *known, is_quiet, waiting)
        self.fetch, self.begin, self.send = self._fetcher.fetch, self._fetcher.begin, self._sender.send
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        store.before_delete = self.note_deletions

    def start(self) -> None:
        """Send and delete from now on, in a thread."""
        self._thread = threading.Thread(target=self._run, name="ragkv-remote", daemon=True)
        self._thread.start()
        if self.derived is not None:
            self.derived.start()

    def close(self) -> None:
        """Stop, once what is on its way has arrived. The store stays open."""
        self._closed.set()
        self._sender.stop()
        if self._thread is not None:
            self._thread.join()
        self._fetcher.close()
        self._sender.close()
        self.remote.close()
        self.store.before_delete = None
        if self.derived is not None:
            self.derived.close()
            self.derived.store.close()

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
        """The chunks that the bucket hasn't heard of; all that is derived is one more."""
        return len(self._deletions) + (self.derived.num_pending_deletions if self.derived is not None else 0)

    def expect(self, key: ChunkKey) -> None:
        """Take the bucket to have an entry, of which another machine says so."""
        if not self.is_listed(key):
            self._contents.add(key, 0)

    def is_listed(self, key: ChunkKey) -> bool:
        """Return whether the bucket has an entry, as far as is known without asking it."""
        return self._contents.size(key) is not None

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
        chunk_hashes = list(chunk_hashes)
        self._deletions.add(chunk_hashes)
        if chunk_hashes and self.derived is not None:
            self.derived.note_deletions([ALL])

    def delete_pending(self, only: Collection[str] | None = None) -> set[str]:
        """Delete in the bucket what was deleted in the store. Returns the chunks that an outage has left there, and
        `ALL` if it has left what was derived.

        only: which chunks; None: all.
        """
        left = self._sender.delete_pending(only)
        return left if self.derived is None else left | self.derived.delete_pending()

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
        if self.derived is not None and self.derived.num_pending_deletions:
            problems.append(f"exact prefixes are deleted, and may still be in {self.derived.remote.url}")
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
