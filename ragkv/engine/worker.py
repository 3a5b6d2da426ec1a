"""The worker's half of the connector: a slice of fusion or precomputing in every engine step.

Runs in vLLM's worker process, between the forwards of other requests. A fault of ours never fails a request: its blocks
are reported as bad, and vLLM prefills it.
"""

import logging
import time
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ragkv.engine.exact import ExactKV
from ragkv.engine.fusion import Fusion, StepBudget
from ragkv.engine.held import HeldKV
from ragkv.engine.loader import KVLoader
from ragkv.engine.precompute import Average, Precompute
from ragkv.engine.scheduler import StepReports
from ragkv.engine.task import Job, MeanTask, PrecomputeTask, Report, ScoreTask, TokenReport
from ragkv.errors import RagKVError, StoreError
from ragkv.machine import return_free_pages

if TYPE_CHECKING:
    from ragkv.engine.scheduler import StepWork

logger = logging.getLogger(__name__)

_MIN_SLICE, _MAX_SLICE = 64, 512  # tokens, while other requests are computed
_LOADS_S = 0.02  # of a step: so long the requests in it wait for loads of others' exact KV
_TIDY_INTERVAL_S = 600.0  # what is given back is soon wanted again, and then costs time
_T = TypeVar("_T")


def slice_tokens(max_batch_tokens: int, num_others: int, num_scheduled: int) -> int:
    """Return how many tokens of a fusion to compute in a step in which vLLM computes `num_scheduled` tokens of others.

    Each of the `num_others` requests waits for the slice, so the more they are, the smaller it is: together they wait
    about as long as one stream does for a whole batch of vLLM's. A fusion's probe isn't sliced.
    """
    if not num_others:
        return max_batch_tokens
    return min(_MAX_SLICE, max(_MIN_SLICE, (max_batch_tokens - num_scheduled) // (1 + num_others)))


class WorkerSide:
    """The jobs of a worker, and what became of those that have ended since vLLM last asked.

    Jobs of each kind wait in the order in which they came. In an engine step one kind advances by about as many tokens
    as the step's budget allows, so that the requests that vLLM decodes meanwhile don't wait long. Exact KV is loaded
    for as many requests as a step has time for, so that vLLM computes the rest of their prompts together.
    """

    def __init__(
        self, loader: KVLoader, max_batch_tokens: int, exact: ExactKV | None = None, held: HeldKV | None = None
    ) -> None:
        """exact: what stores and loads exact prefixes, None for neither. held: what holds preempted requests' KV, None
        for nothing."""
        self.loader = loader
        self._max_batch_tokens = max_batch_tokens
        self._budget = StepBudget(max_batch_tokens)
        self._fusion, self._precompute, self._exact = Fusion(loader), Precompute(loader), exact
        self._saves: dict[str, Generator[None, None, None]] = {}
        self._saved: set[str] = set()
        self._keeps_prefixes = exact is not None and exact.can_save
        self._held = held if held is not None and held.can_hold else None
        self._has_told = not self._keeps_prefixes and self._held is None  # what it can do
        self._fusions: dict[str, tuple[Job, Generator[None, None, Report]]] = {}  # each yields where a step is to end
        self._precomputes: dict[str, Job] = {}
        self._means: dict[str, Average] = {}
        self._finished: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._reports: dict[str, Report] = {}
        self._num_lost = 0  # as last told
        self._tidied_at = time.monotonic()

    def hold(self, work: "StepWork") -> None:
        """Copy the blocks of requests that were preempted. Called before anything else of a step."""
        if self._held is not None:
            for request_id in work.dropped:
                self._held.drop(request_id)
            for hold in work.holds:
                self._held.hold(hold)

    def step(self, work: "StepWork") -> None:
        """Take the step's new jobs, drop aborted ones, and do one slice of the most urgent work: fusions first."""
        self._budget.slice_tokens = slice_tokens(self._max_batch_tokens, work.num_others, work.num_scheduled)
        self._budget.alone = not work.num_others
        self._save(work)
        for job in work.jobs:
            self._add(job)
        kinds: tuple[dict[str, Any], ...] = (self._fusions, self._precomputes, self._means)
        for waiting in kinds:
            for request_id in work.aborted & waiting.keys():
                del waiting[request_id]
                self._finished.add(request_id)
        if self._fusions:
            self._advance_fusions()
        elif not self._precomputes and not self._means:
            self._tidy()
        else:
            advance = self._advance_precomputes if self._precomputes else self._advance_means
            advance()

    def _add(self, job: Job) -> None:
        match job.task:
            case PrecomputeTask():
                self._precomputes[job.request_id] = job
            case MeanTask():
                self._means[job.request_id] = Average(self.loader, job)
            case _:
                if self._fusions and job.task is not None:  # it has to wait, so its KV can be read ahead
                    self._fusion.prefetch(job)
                self._fusions[job.request_id] = job, self._run(job)

    def _run(self, job: Job) -> Generator[None, None, Report]:
        """Load the job's exact prefix, if one is stored, then do its task. Of a preempted request load what is held."""
        if job.held and self._held is not None:
            return (yield from self._held.load(job, self._budget))
        num_loaded, prefix_ms = 0, None
        if job.stored and self._exact is not None:
            prefix_ms = yield from self._exact.load(job, self._budget)
            if prefix_ms is None and job.task is None:
                raise StoreError("a stored prefix couldn't be read")
            if prefix_ms is not None:
                num_loaded = job.stored[-1].end - job.num_prefix
                job = replace(job, num_prefix=job.stored[-1].end)
        report = Report(tokens=TokenReport(prefix=job.num_prefix))
        if job.task is not None:
            run = self._fusion.score if isinstance(job.task, ScoreTask) else self._fusion.fuse
            report = yield from run(job, self._budget)
        if prefix_ms is not None:
            report.tokens.prefix -= num_loaded
            report.tokens.exact = num_loaded
            report.stages.prefix_ms = prefix_ms
        return report

    def _save(self, work: "StepWork") -> None:
        """Copy a segment of each request whose blocks are to be stored; all if nobody waits."""
        for save in work.saves:
            assert self._exact is not None  # or the scheduler's side wouldn't ask
            self._saves[save.request_id] = self._exact.save(save)
        for request_id, copying in list(self._saves.items()):
            try:
                for _ in copying:
                    if not self._budget.alone:
                        break
                else:
                    self._end_save(request_id)
            except Exception:  # any fault of ours costs the prefix
                logger.exception("the prefix of request %s isn't kept", request_id)
                assert self._exact is not None
                self._exact.lose()
                self._end_save(request_id)

    def _end_save(self, request_id: str) -> None:
        del self._saves[request_id]
        self._saved.add(request_id)

    def _advance_fusions(self) -> None:
        """Go on with the oldest fusion or scoring, or with the oldest loads of exact KV while the step has time."""
        until = time.perf_counter() + _LOADS_S
        self._advance_oldest()
        while self._is_load_next and time.perf_counter() < until:
            self._advance_oldest()

    @property
    def _is_load_next(self) -> bool:
        job, _ = next(iter(self._fusions.values()), (None, None))
        return job is not None and job.task is None

    def _advance_oldest(self) -> None:
        job, slices = next(iter(self._fusions.values()))
        try:
            next(slices)
            return
        except StopIteration as stop:
            outcome: Report | Exception = stop.value
        except Exception as error:  # any fault of ours: vLLM prefills the request itself, and the report says why
            outcome = error
        del self._fusions[job.request_id]
        self._end(job, outcome)

    def _advance_precomputes(self) -> None:
        """Precompute chunks after their anchor: as many in one forward as fit into a batch of vLLM's."""
        jobs = _fitting(((job, len(job.token_ids)) for job in self._precomputes.values()), self._budget.slice_tokens)
        problem = None
        try:
            self._precompute.precompute(jobs)
        except Exception as error:
            problem = error
        for job in jobs:
            del self._precomputes[job.request_id]
            self._end(job, problem or _computed(len(job.token_ids)))

    def _advance_means(self) -> None:
        """Compute the next context of the first few chunks whose KV is averaged over contexts."""
        batch = _fitting(((each, each.num_tokens) for each in self._means.values()), self._budget.slice_tokens)
        ended, problem = batch, None
        try:
            ended = self._precompute.average(batch)
        except Exception as error:
            problem = error
        for average in ended:
            del self._means[average.job.request_id]
            self._end(average.job, problem or _computed(average.num_computed))

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

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks were copied, and those whose job has ended, since the last call; None for
        none."""
        saved, finished, self._saved, self._finished = self._saved, self._finished, set(), set()
        return saved or None, finished or None

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks of failed jobs since the last call: vLLM computes them anew."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> StepReports | None:
        """Return the reports since the last call, by request id; None if there is nothing to tell."""
        reports, self._reports = self._reports, {}
        num_lost = self._exact.num_lost if self._exact is not None else 0
        newly_lost, self._num_lost = num_lost - self._num_lost, num_lost
        if self._has_told and not reports and not newly_lost:
            return None
        self._has_told = True
        return StepReports(reports, self._keeps_prefixes, self._held is not None, newly_lost)

    def close(self) -> None:
        if self._exact is not None:
            self._exact.close()
        self.loader.store.close()


def _fitting(sized: Iterable[tuple[_T, int]], limit: int) -> list[_T]:
    """Return the first items whose sizes add up to at most `limit`, but at least one item."""
    fitting: list[_T] = []
    for item, size in sized:
        limit -= size
        if fitting and limit < 0:
            break
        fitting.append(item)
    return fitting


def _computed(num_tokens: int) -> Report:
    return Report(tokens=TokenReport(recomputed=num_tokens))
