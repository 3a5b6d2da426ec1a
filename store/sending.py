"""From the store to the bucket: entries that it lacks, and deletions that it hasn't heard of.

What is to be sent is what is stored and not listed, so that nothing needs a queue on disk. What is to be deleted is
noted in the store's folder (`Deletions`) before it is deleted in the store.
"""

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from ragkv.errors import RemoteError
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import records_in
from ragkv.store.fetching import Unneeded
from ragkv.store.record import ChunkKey, CorruptRecordError
from ragkv.store.remote import Remote
from ragkv.store.remote_state import ALL, Contents, Deletions, Traffic

logger = logging.getLogger(__name__)

_SENDERS, _DELETERS = 4, 4  # entries, chunks at a time


class Sender:
    """What sends entries and deletions. Threads may share it.

    unneeded: which of these chunks no document has: they aren't sent. is_quiet: whether nothing that matters more uses
    the machine. waiting: what stands in the anchor's place in the keys of entries that aren't sent, since another is to
    take their place.
    num_unsent: entries that the bucket lacks, when it was looked at last.
    """

    def __init__(
        self,
        store: DiskStore,
        remote: Remote,
        contents: Contents,
        deletions: Deletions,
        traffic: Traffic,
        unneeded: Unneeded,
        is_quiet: Callable[[], bool],
        waiting: Callable[[], Collection[str]],
    ) -> None:
        self._store, self._remote, self._unneeded, self._is_quiet = store, remote, unneeded, is_quiet
        self._waiting = waiting
        self._contents, self._deletions, self._traffic = contents, deletions, traffic
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._looked_at = -1  # the store's last change when it was compared with the bucket
        self._is_closed = False
        self.num_unsent = 0
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="ragkv-send")
        self._deleters = ThreadPoolExecutor(_DELETERS, thread_name_prefix="ragkv-delete")

    def stop(self) -> None:
        """Have `send` end once what is on its way has arrived."""
        self._is_closed = True

    def close(self) -> None:
        self.stop()
        for pool in (self._senders, self._deleters):
            pool.shutdown(cancel_futures=True)

    def catch_up(self) -> None:
        """Delete and send what is to be, if anything seems to be."""
        if self._deletions:
            self.delete_pending()
        if self.num_unsent or self._contents.is_old or self._store.entries.last_change != self._looked_at:
            self.send()

    def send(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Send the entries that are stored and that the bucket lacks. Returns how many of them are left."""
        with self._sending:
            change = self._store.entries.last_change
            try:
                todo = self._unsent()
            except RemoteError as error:
                logger.warning("nothing is sent: %s", error)
                self.num_unsent = sum(1 for _ in self._store.entries)
                return self.num_unsent
            self.num_unsent, done = len(todo), 0
            progress(done, len(todo))
            while done < len(todo) and not self._is_closed:
                batch = todo[done : done + (_SENDERS if self._is_quiet() else 1)]
                if not all([*self._senders.map(self._send, batch)]):
                    break
                done += len(batch)
                self.num_unsent = len(todo) - done
                progress(done, len(todo))
            self._looked_at = change
            return self.num_unsent

    def _unsent(self) -> list[ChunkKey]:
        self._contents.refresh(self._remote.sizes)
        waiting = self._waiting()
        sendable = (key for key in self._store.entries if key.anchor_hash not in waiting)
        todo = [key for key in sendable if self._contents.size(key) is None]
        unneeded = self._unneeded({key.chunk_hash for key in todo}) if todo else ()
        return [key for key in todo if key.chunk_hash not in unneeded and key.chunk_hash not in self._deletions]

    def _send(self, key: ChunkKey) -> bool:
        """Send one entry, if it is still stored. Returns whether nothing is left to do for it."""
        change = self._deletions.last_change
        file = self._store.entries.read(key)
        if file is None or key.chunk_hash in self._deletions:
            return True
        try:
            records_in(file, key)
            self._remote.put(key, file)
        except CorruptRecordError as error:
            logger.warning("chunk %s isn't sent: %s", key.chunk_hash, error)
            return True
        except RemoteError as error:
            logger.warning("an entry isn't sent: %s", error)
            return False
        self._contents.add(key, len(file))
        with self._lock:
            self._traffic.entries_sent += 1
            self._traffic.bytes_sent += len(file)
        was_cleared = self._deletions.last_change != change and not self._store.contains(key)
        if was_cleared or not self._store.remembers(key):  # or deleted, meanwhile, perhaps before it was in the bucket
            self._deletions.add([key.chunk_hash])
        return True

    def delete_pending(self, only: Collection[str] | None = None) -> set[str]:
        """Delete in the bucket what was deleted in the store. Returns the chunks that an outage has left there.

        only: which chunks; None: all.
        """
        pending = [chunk_hash for chunk_hash in self._deletions.all() if only is None or chunk_hash in only]
        left = {chunk_hash for chunk_hash in self._deleters.map(self._delete, pending) if chunk_hash is not None}
        if len(left) < len(pending):
            self._looked_at = -1  # what was made again meanwhile is to be sent
        return left

    def _delete(self, chunk_hash: str) -> str | None:
        """Delete a chunk's objects, or all. Returns the chunk if they couldn't be reached."""
        token = self._deletions.token(chunk_hash)
        if token is None:  # somebody else has deleted them
            return None
        try:
            if chunk_hash == ALL:
                self._remote.delete_all()
                self._contents.remove_all()
            else:
                self._remote.delete_chunk(chunk_hash)
                self._contents.remove_chunk(chunk_hash)
        except RemoteError as error:
            logger.warning("KV that was deleted here is still there: %s", error)
            return chunk_hash
        self._deletions.done(chunk_hash, token)
        return None
