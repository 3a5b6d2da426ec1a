"""The vLLM connector: tells the scheduler that a prompt's KV is external, and lets the worker produce it.

Loaded by vLLM with `kv_connector_module_path`; one instance lives in the scheduler, one in each worker. Loads are
asynchronous: the worker does one slice of work in every engine step, and other requests decode in between.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from ragkv.engine.fusion import Fusion, StepBudget
from ragkv.engine.loader import Source
from ragkv.engine.orphans import end_with_parent
from ragkv.engine.precompute import Average, Precompute
from ragkv.engine.subset import SubsetForward
from ragkv.engine.task import (
    PARAMS_KEY,
    FuseTask,
    Job,
    MeanTask,
    PrecomputeTask,
    Report,
    ScoreTask,
    task_from_params,
)
from ragkv.engine.trial import UnsupportedModelError, check_layout, find_rotations
from ragkv.errors import RagKVError
from ragkv.kernels.dispatch import choose
from ragkv.machine.malloc import return_free_pages
from ragkv.store.segment_store import SegmentStore

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LEAST_SLICE, _MOST_SLICE = 64, 512  # tokens, while others are computed
_TIDY_EVERY_S = 30.0


def slice_tokens(max_batch_tokens: int, num_others: int, num_scheduled: int) -> int:
    """How many tokens of a fusion are computed in a step, beside `num_scheduled` tokens of `num_others` requests.

    Each of them waits for the slice, so the more they are, the smaller it is: together they wait about as long as one
    stream does for a whole batch of vLLM's. The load pass isn't sliced, but has a step of its own.
    """
    if not num_others:
        return max_batch_tokens
    return min(_MOST_SLICE, max(_LEAST_SLICE, (max_batch_tokens - num_scheduled) // (1 + num_others)))


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler to worker, each engine step. num_others: requests of which vLLM computes `num_scheduled` tokens."""

    jobs: list[Job] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    num_others: int = 0
    num_scheduled: int = 0


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Worker to scheduler: the reports of jobs that ended in this step, by request id."""

    reports: dict[str, Report]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReports":
        assert isinstance(other, StepReports)
        return StepReports({**other.reports, **self.reports})


class RagKVConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler = _SchedulerSide()
        self._worker: _WorkerSide | None = None  # once `attach` has been called
        if role == KVConnectorRole.SCHEDULER:
            end_with_parent()

    def attach(self, model: Any, device: Any) -> str | None:
        """Give the worker's side its model. Returns why the model can't be fused, None if it can."""
        extra = self._kv_transfer_config.kv_connector_extra_config
        try:
            check_layout(self._vllm_config, self._kv_cache_config)
            subset = SubsetForward(model, self._vllm_config, self._kv_cache_config, device)
            rotations = find_rotations(subset)
            kernels = choose(extra["kernels"], subset.device)
        except UnsupportedModelError as error:
            return str(error)
        pinned = subset.device.type == "cuda"
        store = SegmentStore(Path(extra["store"]), **extra["store_options"], pinned=pinned)
        max_tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        self._worker = _WorkerSide(Source(subset, rotations, store, extra["fingerprint"], kernels), max_tokens)
        return None

    # Scheduler

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if num_external_tokens:
            self._scheduler.start(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepWork:
        scheduled = scheduler_output.num_scheduled_tokens
        return self._scheduler.take_work(len(scheduled), sum(scheduled.values()))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, StepReports):
            self._scheduler.keep(meta.reports)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish(request.request_id)

    # Worker

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        if self._worker is not None:
            self._worker.step(work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_finished() if self._worker else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> StepReports | None:
        reports = self._worker.take_reports() if self._worker else None
        return StepReports(reports) if reports else None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def shutdown(self) -> None:
        if self._worker:
            self._worker.source.store.close()


class _SchedulerSide:
    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self.reports: dict[str, Report] = {}

    def match(self, request: "Request", num_computed: int) -> tuple[int, bool]:
        """All of the prompt but its last token is ours, if vLLM's prefix cache doesn't cover what we could add."""
        task = task_from_params(request.kv_transfer_params)
        report = self.reports.get(request.request_id)
        if task is None or (report is not None and report.failed):
            return 0, False
        num_tokens = request.num_prompt_tokens - 1
        useful = num_tokens
        if isinstance(task, FuseTask) and not task.policy.is_full:
            useful = task.spans[-1].end if task.spans else 0
        return (num_tokens - num_computed, True) if num_computed < useful else (0, False)

    def start(self, request: "Request", block_ids: list[int], num_external: int) -> None:
        task = task_from_params(request.kv_transfer_params)
        assert task is not None
        token_ids = list(request.prompt_token_ids or [])[:-1]
        job = Job(request.request_id, task, token_ids, block_ids, num_prefix=len(token_ids) - num_external)
        self._jobs[request.request_id] = job
        self._running.add(request.request_id)

    def take_work(self, num_others: int, num_scheduled: int) -> StepWork:
        work = StepWork(list(self._jobs.values()), self._aborted, num_others, num_scheduled)
        self._jobs, self._aborted = {}, set()
        return work

    def keep(self, reports: dict[str, Report]) -> None:
        """Keep the reports of requests that are still there; one may have been aborted in the meantime."""
        self.reports.update({id: report for id, report in reports.items() if id in self._running})

    def finish(self, request_id: str) -> dict[str, Any] | None:
        if request_id in self._running and request_id not in self.reports:
            self._aborted.add(request_id)
        self._running.discard(request_id)
        report = self.reports.pop(request_id, None)
        return {PARAMS_KEY: dataclasses.asdict(report)} if report else None


class _WorkerSide:
    """The queue of jobs and the one in progress. Does one slice of work in every engine step, oldest job first."""

    def __init__(self, source: Source, max_batch_tokens: int) -> None:
        self.source = source
        self._fusion, self._precompute = Fusion(source), Precompute(source)
        self._max_batch_tokens = max_batch_tokens
        self._budget = StepBudget(max_batch_tokens)
        self._captures: deque[Job] = deque()
        self._averages: deque[Average] = deque()
        self._sliced: deque[tuple[Job, Generator[None, None, Report]]] = deque()
        self._finished: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._reports: dict[str, Report] = {}
        self._tidied_at = time.monotonic()

    def step(self, work: StepWork) -> None:
        self._budget.slice_tokens = slice_tokens(self._max_batch_tokens, work.num_others, work.num_scheduled)
        self._budget.alone = not work.num_others
        for job in work.jobs:
            match job.task:
                case PrecomputeTask():
                    self._captures.append(job)
                case MeanTask():
                    self._averages.append(self._precompute.begin(job, job.task))
                case _:
                    if self._sliced:
                        self._fusion.prepare(job)
                    self._sliced.append((job, self._slices(job)))
        if work.aborted:
            self._drop(work.aborted)
        if self._sliced:
            self._run_slice()
        elif self._captures:
            self._precompute_batch()
        elif self._averages:
            self._average_batch()
        elif self.source.subset.device.type == "cpu" and time.monotonic() - self._tidied_at > _TIDY_EVERY_S:
            return_free_pages()  # what vLLM compiles for batch sizes lies between tensors, and fragments the heap
            self._tidied_at = time.monotonic()

    def _slices(self, job: Job) -> Generator[None, None, Report]:
        run = self._fusion.score if isinstance(job.task, ScoreTask) else self._fusion.fuse
        return run(job, self._budget)

    def _run_slice(self) -> None:
        job, slices = self._sliced[0]
        try:
            next(slices)
        except StopIteration as stop:
            self._sliced.popleft()
            self._finish(job, stop.value)
        except Exception as error:  # any fault of ours: vLLM prefills the request itself, and the report says why
            self._sliced.popleft()
            self._fail(job, error)

    def _precompute_batch(self) -> None:
        jobs = [self._captures.popleft()]
        num_tokens = len(jobs[0].token_ids)
        while self._captures and num_tokens + len(self._captures[0].token_ids) <= self._max_batch_tokens:
            jobs.append(self._captures.popleft())
            num_tokens += len(jobs[-1].token_ids)
        try:
            self._precompute.precompute(jobs)
        except Exception as error:
            for job in jobs:
                self._fail(job, error)
            return
        for job in jobs:
            self._finish(job, Report(policy="precompute", recomputed_tokens=len(job.token_ids)))

    def _average_batch(self) -> None:
        """One more precompute of the first chunks in the queue: of as many as fit in a slice, at least of one."""
        batch: list[Average] = []
        num_tokens = 0
        for average in self._averages:
            num_tokens += average.num_tokens
            if batch and num_tokens > self._budget.slice_tokens:
                break
            batch.append(average)
        try:
            ended = self._precompute.average(batch)
        except Exception as error:
            ended = batch
            for average in batch:
                self._fail(average.job, error)
        else:
            for average in ended:
                self._finish(average.job, Report(policy="average", recomputed_tokens=average.num_computed))
        self._averages = deque(average for average in self._averages if average not in ended)

    def _finish(self, job: Job, report: Report) -> None:
        self._finished.add(job.request_id)
        self._reports[job.request_id] = report

    def _fail(self, job: Job, error: Exception) -> None:
        logger.error("request %s is prefilled by vLLM instead", job.request_id, exc_info=error)
        first_block = job.num_prefix // self.source.subset.block_size
        self._bad_blocks.update(job.block_ids[first_block:])
        problem = str(error) if isinstance(error, RagKVError) else f"{type(error).__name__}: {error}"
        self._finish(job, Report(problem=problem, failed=True))

    def _drop(self, aborted: set[str]) -> None:
        dropped = [job for job, _ in self._sliced if job.request_id in aborted]
        dropped += [job for job in self._captures if job.request_id in aborted]
        dropped += [average.job for average in self._averages if average.job.request_id in aborted]
        self._sliced = deque(item for item in self._sliced if item[0].request_id not in aborted)
        self._captures = deque(job for job in self._captures if job.request_id not in aborted)
        self._averages = deque(item for item in self._averages if item.job.request_id not in aborted)
        self._finished.update(job.request_id for job in dropped)

    def take_finished(self) -> set[str] | None:
        finished, self._finished = self._finished, set()
        return finished or None

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> dict[str, Report]:
        reports, self._reports = self._reports, {}
        return reports


class WorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`): what the connector can't reach by itself."""

    def ragkv_attach(self) -> str | None:
        """Introduce the loaded model to the connector. Returns why it can't be fused, None if it can."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, RagKVConnector)
        runner = self.model_runner  # type: ignore[attr-defined]
        return connector.attach(runner.get_model(), runner.device)
