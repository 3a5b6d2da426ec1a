"""The worker's half of the connector: a slice of fusion or precomputing in every engine step.

Runs in vLLM's worker process, between the forwards of other requests. A fault of ours never fails a request: its blocks
are reported as bad, and vLLM prefills it.
"""

import logging
import time
from typing import TYPE_CHECKING

from ragkv.engine.fusion import Fusion, StepBudget
from ragkv.engine.loader import KVLoader
from ragkv.engine.precompute import Precompute
from ragkv.engine.queues import FusionQueue, MeanQueue, PrecomputeQueue, Queue
from ragkv.engine.task import Job, MeanTask, PrecomputeTask, Report, Task
from ragkv.errors import RagKVError
from ragkv.machine.malloc import return_free_pages

if TYPE_CHECKING:
    from ragkv.engine.steps import StepWork

logger = logging.getLogger(__name__)

_MIN_SLICE, _MAX_SLICE = 64, 512  # tokens, while other requests are computed
_TIDY_INTERVAL_S = 30.0


def slice_tokens(max_batch_tokens: int, num_others: int, num_scheduled: int) -> int:
    """Return how many tokens of a fusion to compute in a step in which vLLM computes `num_scheduled` tokens of others.

    Each of the `num_others` requests waits for the slice, so the more they are, the smaller it is: together they wait
    about as long as one stream does for a whole batch of vLLM's. The load pass isn't sliced, but has its own step.
    """
    if not num_others:
        return max_batch_tokens
    return min(_MAX_SLICE, max(_MIN_SLICE, (max_batch_tokens - num_scheduled) // (1 + num_others)))


class WorkerSide:
    """The jobs of a worker, and what became of those that have ended since vLLM last asked."""

    def __init__(self, loader: KVLoader, max_batch_tokens: int) -> None:
        self.loader = loader
        self._max_batch_tokens = max_batch_tokens
        self._budget = StepBudget(max_batch_tokens)
        precompute = Precompute(loader)
        self._fusions = FusionQueue(Fusion(loader), self._budget)
        self._precomputes = PrecomputeQueue(precompute, max_batch_tokens)
        self._means = MeanQueue(precompute)
        self._finished: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._reports: dict[str, Report] = {}
        self._tidied_at = time.monotonic()

    def step(self, work: "StepWork") -> None:
        """Take the step's new jobs, drop aborted ones, and do one slice of the most urgent work: fusions first."""
        self._budget.slice_tokens = slice_tokens(self._max_batch_tokens, work.num_others, work.num_scheduled)
        self._budget.alone = not work.num_others
        queues: tuple[Queue, ...] = (self._fusions, self._precomputes, self._means)
        for job in work.jobs:
            self._queue_for(job.task).add(job)
        if work.aborted:
            self._finished.update(job.request_id for queue in queues for job in queue.drop(work.aborted))
        busy = next((queue for queue in queues if len(queue)), None)
        if busy is None:
            self._tidy()
            return
        for job, outcome in busy.advance(self._budget):
            self._end(job, outcome)

    def _queue_for(self, task: Task) -> Queue:
        match task:
            case PrecomputeTask():
                return self._precomputes
            case MeanTask():
                return self._means
            case _:
                return self._fusions

    def _end(self, job: Job, outcome: Report | Exception) -> None:
        if isinstance(outcome, Exception):
            logger.error("request %s is prefilled by vLLM instead", job.request_id, exc_info=outcome)
            first_block = job.num_prefix // self.loader.forward.block_size
            self._bad_blocks.update(job.block_ids[first_block:])
            problem = str(outcome) if isinstance(outcome, RagKVError) else f"{type(outcome).__name__}: {outcome}"
            outcome = Report(problem=problem, failed=True)
        self._finished.add(job.request_id)
        self._reports[job.request_id] = outcome

    def _tidy(self) -> None:
        """Give memory back: what vLLM compiles for batch sizes is allocated between tensors, and fragments the heap."""
        if self.loader.forward.device.type == "cpu" and time.monotonic() - self._tidied_at > _TIDY_INTERVAL_S:
            return_free_pages()
            self._tidied_at = time.monotonic()

    def take_finished(self) -> set[str] | None:
        """Return the requests that have ended since the last call, None if there are none."""
        finished, self._finished = self._finished, set()
        return finished or None

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks of failed jobs since the last call: vLLM computes them anew."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> dict[str, Report]:
        """Return the reports since the last call, by request id."""
        reports, self._reports = self._reports, {}
        return reports
