"""A slower disk than there is: reads of chunk KV from a store in vLLM's worker take as long as at a given bandwidth."""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ragkv.engine.connector import WorkerExtension
from ragkv.store.base import Snapshot
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import ChunkKey, LayerKV


class SlowDiskWorker(WorkerExtension):
    """vLLM's worker whose store reads at `read_mib_s` of vLLM's `additional_config`. It has a process of its own."""

    def ragkv_attach(self) -> str | None:
        mib_s = self.vllm_config.additional_config["read_mib_s"]  # type: ignore[attr-defined]
        DiskStore.snapshot = slowed(DiskStore.snapshot, mib_s)  # type: ignore[assignment, method-assign]
        return super().ragkv_attach()


def slowed(
    open_snapshot: Callable[[DiskStore], AbstractContextManager[Snapshot]], mib_s: float
) -> Callable[[DiskStore], AbstractContextManager["SlowSnapshot"]]:
    """Return `DiskStore.snapshot` with reads at `mib_s` MiB/s, of a store without memory of its own."""

    @contextmanager
    def snapshot(store: DiskStore) -> Iterator[SlowSnapshot]:
        with open_snapshot(store) as inner:
            yield SlowSnapshot(inner, store, Throttle(mib_s))

    return snapshot


class SlowSnapshot:
    """A snapshot whose records arrive no earlier than from a disk of the throttle's bandwidth."""

    def __init__(self, snapshot: Snapshot, store: DiskStore, throttle: "Throttle") -> None:
        self._snapshot, self._store, self._throttle = snapshot, store, throttle

    def get(self, key: ChunkKey, layer: int) -> LayerKV | None:
        kv = self._snapshot.get(key, layer)
        if kv is not None:
            self._throttle.wait((key, layer), self._num_bytes(key, layer))
        return kv

    def prefetch(self, key: ChunkKey, layer: int) -> None:
        self._snapshot.prefetch(key, layer)
        if num_bytes := self._num_bytes(key, layer):
            self._throttle.ask((key, layer), num_bytes)

    def _num_bytes(self, key: ChunkKey, layer: int) -> int:
        try:
            return self._store.admin.locate(key, layer)[2]
        except (KeyError, IndexError):
            return 0


class Throttle:
    """Reads what it is asked for one after the other, at `mib_s` MiB/s, while its caller does other things."""

    def __init__(self, mib_s: float) -> None:
        self._bytes_s = mib_s * (1 << 20)
        self._free_at = 0.0
        self._ready_at: dict[Hashable, float] = {}

    def ask(self, what: Hashable, num_bytes: int) -> None:
        """Begin to read it once all that was asked for before is read; returns at once."""
        if what not in self._ready_at:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_s
            self._ready_at[what] = self._free_at

    def wait(self, what: Hashable, num_bytes: int) -> None:
        """Return when it is read."""
        self.ask(what, num_bytes)
        time.sleep(max(0.0, self._ready_at.pop(what) - time.monotonic()))
