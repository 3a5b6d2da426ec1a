"""The vLLM connector: passes vLLM's calls on to the scheduler's side and to the worker's.

vLLM loads it by `kv_connector_module_path`; one instance is in the scheduler, one in each worker. The scheduler is told
that a prompt's KV is external and loaded asynchronously; the worker produces it, a slice in every engine step, and
other requests decode in between.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ragkv.engine.exact import ExactKV
from ragkv.engine.finding import Finding
from ragkv.engine.held import HeldKV
from ragkv.engine.loader import KVLoader
from ragkv.engine.preemption import Preempted
from ragkv.engine.prefixes import Prefixes, Reuse, WriteBudget
from ragkv.engine.scheduler import PrefixRules, SchedulerSide, StepReports, StepWork
from ragkv.engine.subset import SubsetForward
from ragkv.engine.trial import UnsupportedModelError, check_layout, find_rotations
from ragkv.engine.worker import WorkerSide
from ragkv.kernels.dispatch import choose
from ragkv.machine import keep_free_pages
from ragkv.store.disk_store import DiskStore
from ragkv.store.entries import EntryFolder
from ragkv.store.prefixes import generation, open_prefixes
from ragkv.store.record import FORMAT_VERSION, ChunkKey

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_GRACE_S = 30.0


class RagKVConnector(KVConnectorBase_V1):
    """What vLLM calls. Only the side of its own process does anything."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._extra = self._options()
        self._scheduler = SchedulerSide()
        self.worker: WorkerSide | None = None  # once `attach` has been called
        self.store: DiskStore | None = None  # the worker's
        if role == KVConnectorRole.SCHEDULER:
            prefixes, preempted, key = self._prefix_rules(), self._preempted(), self._extra.get("key", "")
            self._scheduler = SchedulerSide(prefixes, preempted, self._finding(), key)
            _end_with_parent()

    def _options(self) -> dict[str, Any]:
        """Return what the connector works with: the store, the model's fingerprint and so on."""
        return dict(self._kv_transfer_config.kv_connector_extra_config)

    def _finding(self) -> Finding | None:
        """Return who finds chunks in the prompts of requests without a task; None: nobody."""
        return None

    def attach(self, model: Any, device: Any) -> str | None:
        """Give the worker's side its model. Returns why its KV can't be fused, None if it can."""
        extra = self._extra
        try:
            check_layout(self._vllm_config, self._kv_cache_config)
            subset = SubsetForward(model, self._vllm_config, self._kv_cache_config, device)
            rotations = find_rotations(subset)
            kernels = choose(extra["kernels"], subset.device)
        except UnsupportedModelError as error:
            return str(error)
        pinned = subset.device.type == "cuda"
        self.store = store = DiskStore(Path(extra["store"]), **extra["store_options"], pinned=pinned)
        max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        loader = partial(KVLoader, subset, rotations, fingerprint=extra["fingerprint"], kernels=kernels)
        exact, limit = None, _prefix_bytes(extra)
        if limit and (prefixes := open_prefixes(Path(extra["prefixes"]["folder"]), limit)) is not None:
            exact = ExactKV(loader(store=prefixes), prefixes, limit)
        held = HeldKV(subset, self._kv_cache_config.num_blocks) if _held_bytes(extra) else None
        self.worker = WorkerSide(loader(store=store), max_tokens, exact, held)
        if subset.device.type == "cpu":
            keep_free_pages()
        return None

    def _prefix_rules(self) -> PrefixRules | None:
        """Return the rules for exact prefixes; None if they aren't wanted, and for models whose blocks aren't all alike
        or belong to several workers."""
        group, extra = self._only_group(), self._extra
        if not _prefix_bytes(extra) or group is None:
            return None
        folder, spec = Path(extra["prefixes"]["folder"]), group.kv_cache_spec
        try:
            entries = EntryFolder(folder / f"v{FORMAT_VERSION}")
        except OSError as error:
            logger.warning("prefixes aren't kept: %s", error)
            return None
        stored = Prefixes(
            entries.contains,
            partial(generation, folder),
            extra["fingerprint"],
            self._heads(),
            spec.block_size,
        )
        bytes_per_token = spec.page_size_bytes * len(group.layer_names) // spec.block_size
        budget = WriteBudget(extra["prefixes"]["bytes_per_hour"])
        return PrefixRules(stored, Reuse(), budget, bytes_per_token)

    def _preempted(self) -> Preempted | None:
        """Return who follows preempted requests; None if they are to be computed anew, or their blocks aren't alike."""
        group, limit = self._only_group(), _held_bytes(self._extra)
        if not limit or group is None:
            return None
        spec = group.kv_cache_spec
        block_bytes = spec.page_size_bytes * len(group.layer_names)
        way, key = self._extra["preemption"]["way"], self._extra.get("key", "")
        return Preempted(way, limit, spec.block_size, block_bytes, key)

    def _heads(self) -> tuple[int, int]:
        """Return the range of KV heads in a stored entry."""
        return 0, self._vllm_config.model_config.get_num_kv_heads(self._vllm_config.parallel_config)

    def _only_group(self) -> "KVCacheGroupSpec | None":
        """Return vLLM's one kind of blocks; None if there are several, or they belong to several workers."""
        groups = self._kv_cache_config.kv_cache_groups
        return groups[0] if len(groups) == 1 and self._vllm_config.parallel_config.world_size == 1 else None

    # Scheduler

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduler.start(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepWork:
        self._scheduler.follow(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        return self._scheduler.take_work(len(scheduled), sum(scheduled.values()))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StepReports):
            self._scheduler.keep(meta)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.save(request, block_ids), self._scheduler.finish(request.request_id)

    # Worker

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepWork)
        if self.worker is not None:
            self.worker.hold(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        if self.worker is not None:
            self.worker.step(work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.take_finished() if self.worker else (None, None)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_bad_blocks() if self.worker else set()

    def build_connector_worker_meta(self) -> StepReports | None:
        return self.worker.take_reports() if self.worker else None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def shutdown(self) -> None:
        if self.worker:
            self.worker.close()


class WorkerExtension:
    """What vLLM mixes into its worker (`worker_extension_cls`), to reach the model, which the connector can't."""

    def ragkv_attach(self) -> str | None:
        """Give the connector the loaded model. Returns why its KV can't be fused, None if it can."""
        runner = self.model_runner  # type: ignore[attr-defined]
        return connector().attach(runner.get_model(), runner.device)

    # For operators, by the names of entries (`ChunkKey.prefix`, hexadecimal), which vLLM carries between processes

    def ragkv_held(self) -> list[tuple[str, int]]:
        """Return the entries in memory, with the bytes that they take; none if the model isn't fused."""
        store = connector().store
        return [(key.prefix().hex(), size) for key, size in store.held().items()] if store else []

    def ragkv_hold(self, names: list[str], spared: list[str]) -> None:
        """Read entries into memory, but not in the place of those that are spared."""
        if store := connector().store:
            store.hold(_keys(names), _keys(spared))

    def ragkv_release(self, names: list[str]) -> int:
        """Give up entries in memory. Returns the bytes that they took."""
        store = connector().store
        return store.release(_keys(names)) if store else 0


def _prefix_bytes(extra: dict[str, Any]) -> int:
    """Return how much of the disk exact prefixes may take, 0 if none are wanted."""
    return int(extra.get("prefixes", {}).get("disk_bytes", 0))


def _held_bytes(extra: dict[str, Any]) -> int:
    """Return how much memory preempted requests' KV may take, 0 if none is held."""
    return int(extra.get("preemption", {}).get("held_bytes", 0))


def connector() -> RagKVConnector:
    """Return the connector of this process, a worker's."""
    found = get_kv_transfer_group()
    assert isinstance(found, RagKVConnector)
    return found


def _keys(names: list[str]) -> list[ChunkKey]:
    return [ChunkKey.parse(bytes.fromhex(name)) for name in names]


def _end_with_parent() -> None:
    """End this process, which `multiprocessing` started, and what it started itself, once its parent has ended.

    Nobody can reach it any more then, and it would keep its memory.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_for, args=(parent,), daemon=True, name="ragkv-parent").start()


def _wait_for(parent: BaseProcess) -> None:
    parent.join()
    logger.warning("process %s, which started this engine, has ended; so it ends too", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's own way, which takes its workers along
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
