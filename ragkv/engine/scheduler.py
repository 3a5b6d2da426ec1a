"""The scheduler's half of the connector: which requests are ours, what the worker is to do for them, and its reports.

Runs in vLLM's scheduler process, which carries `StepWork` to the worker and `StepReports` back in every engine step.
Knows nothing about KV, stores or the model.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from ragkv.engine.finding import Finding
from ragkv.engine.preemption import Hold, Preempted
from ragkv.engine.prefixes import Beginnings, Prefixes, Reuse, WriteBudget
from ragkv.engine.reuse_metrics import counts
from ragkv.engine.task import (
    FuseTask,
    Job,
    Keep,
    MeanTask,
    PrecomputeTask,
    PrefixUse,
    Report,
    Span,
    Task,
    is_trusted,
    prefix_from_params,
    report_to_params,
    task_from_params,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """Segments of a finished request that are to be stored, and the blocks of its tokens. generation: of the store, if
    they may be (`ragkv.engine.task.PrefixUse`)."""

    request_id: str
    spans: tuple[Span, ...]
    block_ids: list[int]
    generation: int
    keep: Keep | None


@dataclass
class StepWork(KVConnectorMetadata):
    """From the scheduler to the worker. num_others: requests of which vLLM computes `num_scheduled` tokens.

    holds: blocks that are to be copied before this step's forward. dropped: requests whose copies aren't needed.
    """

    holds: list[Hold] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    jobs: list[Job] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    num_others: int = 0
    num_scheduled: int = 0


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """From the worker to the scheduler: the reports of the jobs that ended in the step, by request id.

    keeps_prefixes: whether the worker can save blocks and load them. holds: whether it can hold preempted requests' KV.
    num_lost: the prefixes since the last reports that were to be saved, and aren't.
    """

    reports: dict[str, Report]
    keeps_prefixes: bool = False
    holds: bool = False
    num_lost: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReports":
        assert isinstance(other, StepReports)
        keeps_prefixes = self.keeps_prefixes and other.keeps_prefixes
        num_lost = self.num_lost + other.num_lost
        return StepReports({**other.reports, **self.reports}, keeps_prefixes, self.holds and other.holds, num_lost)


@dataclass(frozen=True)
class _Match:
    """What a request is to get once it has blocks: the parts of its job. end: of the tokens that are filled."""

    end: int
    task: Task | None = None
    stored: tuple[Span, ...] = ()
    held: int = 0


@dataclass
class PrefixRules:
    """What the scheduler's side needs to know of exact prefixes. bytes_per_token: of KV."""

    stored: Prefixes
    reuse: Reuse
    budget: WriteBudget
    bytes_per_token: int


class SchedulerSide:
    """Our requests in work.

    Each is matched, started once it has blocks, sent to the worker with the next step, reported on, and finished. It
    may be aborted at any of these. prefixes: None stores and loads none. preempted: None leaves requests that vLLM
    preempts to vLLM, which computes them anew. finding: which requests are fused although they have no task of ours,
    None: none. key: the engine's; a task without it isn't done, empty: no task is.
    """

    def __init__(
        self,
        prefixes: PrefixRules | None = None,
        preempted: Preempted | None = None,
        finding: Finding | None = None,
        key: str = "",
    ) -> None:
        self._prefixes, self._preempted, self._finding, self._key = prefixes, preempted, finding, key
        self._worker_keeps = False  # until it says so
        self._generations: dict[str, int] = {}  # as requests have arrived
        self._matched: dict[str, _Match] = {}
        self._saves: list[Save] = []
        self._holds: list[Hold] = []
        self._dropped: set[str] = set()
        self._jobs: dict[str, Job] = {}
        self._running: dict[str, Job] = {}  # in the worker
        self._resumed: dict[str, int] = {}  # tokens that were loaded again
        self._num_lost = 0  # prefixes that nobody was told of
        self._aborted: set[str] = set()
        self.reports: dict[str, Report] = {}
        self._totals: Counter[str] = Counter()  # of all reports since somebody took them

    def arrive(self, request: "Request") -> None:
        """Look at a request before vLLM looks for its blocks in the prefix cache."""
        if self._finding is not None and not is_trusted(request.kv_transfer_params, self._key):
            self._totals["failed_requests"] += not self._finding.note(request)

    def match(self, request: "Request", num_computed: int) -> tuple[int, bool]:
        """Return how many tokens after the `num_computed` are loaded, and that loading is asynchronous.

        That is all of the prompt but its last token, or its stored prefix if there is nothing else for us to do, or
        none if vLLM's prefix cache covers what we could add. Of a request that comes back after it was preempted it is
        all that the worker holds, of the answer too.
        """
        if self._preempted is not None:
            self._preempted.note(request)
            held = self._preempted.held(request.request_id)
            if held > num_computed:
                self._matched[request.request_id] = _Match(held, held=held)
                return held - num_computed, True
        task = self._task(request)
        report = self.reports.get(request.request_id)
        if report is not None and report.failed:
            return 0, False
        stored, useful = self._find_stored(request, task, num_computed), 0
        num_tokens = end = request.num_prompt_tokens - 1
        if isinstance(task, FuseTask) and not task.policy.is_full:
            useful = task.spans[-1].end if task.spans else 0
        elif task is not None:
            useful = num_tokens
        if stored and stored[-1].end >= useful:
            task, end = None, stored[-1].end  # vLLM computes the rest
        elif num_computed >= useful:
            return 0, False
        self._matched[request.request_id] = _Match(end, task, stored)
        return end - num_computed, True

    def _task(self, request: "Request") -> Task | None:
        task = task_from_params(request.kv_transfer_params, self._key)
        return self._finding.task(request.request_id) if task is None and self._finding is not None else task

    def _prefix_use(self, request: "Request") -> PrefixUse:
        return prefix_from_params(request.kv_transfer_params, self._key)

    def _beginnings(self, request: "Request", block_size: int) -> Beginnings:
        """Return the names of a request's beginnings, without tails if it has more than its tokens, such as images, or
        a tail's name might not say that there is fused KV in it."""
        is_fused = self._finding is not None and self._finding.task(request.request_id) is not None
        has_tails = not request.mm_features and request.prompt_embeds is None and not is_fused
        extra_keys, _ = generate_block_hash_extra_keys(request, 0, 1, 0) if has_tails else (None, 0)
        return Beginnings(request.block_hashes, request.all_token_ids if has_tails else (), block_size, extra_keys)

    def _find_stored(self, request: "Request", task: Task | None, num_computed: int) -> tuple[Span, ...]:
        if self._prefixes is None or not self._worker_keeps or not isinstance(task, FuseTask | None):
            return ()
        if request.skip_reading_prefix_cache:  # it wants the log-probabilities of its prompt, say
            return ()
        stored, use = self._prefixes.stored, self._prefix_use(request)
        try:
            self._generations.setdefault(request.request_id, stored.generation())
            if not stored.pays(use.prefill_ms):
                return ()
            return stored.find(self._beginnings(request, stored.block_size), num_computed, request.num_tokens - 1)
        except OSError as error:
            logger.warning("stored prefixes can't be looked up: %s", error)
            self._generations.pop(request.request_id, None)
            return ()

    def start(self, request: "Request", block_ids: list[int], num_external: int) -> None:
        """Make the request's job, now that vLLM has given it blocks."""
        found = self._matched.pop(request.request_id)
        token_ids = list(request.prompt_token_ids or [])[:-1]
        num_prefix = found.end - num_external
        job = Job(request.request_id, found.task, token_ids, block_ids, num_prefix, found.stored, found.held)
        self._jobs[request.request_id] = self._running[request.request_id] = job

    def follow(self, output: "SchedulerOutput") -> None:
        """Note what vLLM's next step does, and whom it has preempted."""
        if self._preempted is not None:
            self._holds, self._dropped = self._preempted.step(output)

    def take_work(self, num_others: int, num_scheduled: int) -> StepWork:
        """Return what the worker is to do from this step on."""
        jobs, kept = list(self._jobs.values()), (self._holds, self._dropped)
        work = StepWork(*kept, jobs, self._saves, self._aborted, num_others, num_scheduled)
        self._holds, self._dropped, self._jobs, self._saves, self._aborted = [], set(), {}, [], set()
        return work

    def keep(self, step: StepReports) -> None:
        """Keep the reports of requests that haven't been aborted in the meantime."""
        self._worker_keeps |= step.keeps_prefixes
        self._num_lost += step.num_lost
        if self._preempted is not None:
            self._preempted.worker_holds |= step.holds
        for id, report in step.reports.items():
            if self._prefixes is not None and report.stages.prefix_ms:
                self._prefixes.stored.timed(report.tokens.exact, report.stages.prefix_ms)
            job = self._running.pop(id, None)
            if job is None:  # it was aborted in the meantime
                continue
            if job.held and self._preempted is not None:
                self._preempted.came_back(id, report.tokens.exact, report.stages.load_ms)
            if job.held and not report.failed:  # what was reported of its prompt before stays true
                self._resumed[id] = self._resumed.get(id, 0) + report.tokens.exact
            else:
                self.reports[id] = report
                if not isinstance(job.task, PrecomputeTask | MeanTask):  # those are our own
                    self._totals += counts(report)

    def take_totals(self) -> Counter[str]:
        """Return what requests have reused since the last call, as `ragkv.engine.reuse_metrics` counts it."""
        totals, self._totals = self._totals, Counter()
        return totals

    def save(self, request: "Request", block_ids: list[int]) -> bool:
        """Have a finished request's blocks stored, as far as that pays. Returns whether vLLM is to keep them meanwhile.

        Those of a request of which vLLM holds nothing exactly, such as a precomputation, aren't; nor those of one that
        was aborted before its KV was loaded: its blocks are empty, and vLLM frees them when the worker drops its job.
        """
        generation = self._generations.pop(request.request_id, None)
        if self._prefixes is None or generation is None or request.request_id in self._running:
            return False
        use, stored = self._prefix_use(request), self._prefixes.stored
        num_computed = min(request.num_computed_tokens, request.num_tokens - 1, len(block_ids) * stored.block_size)
        beginnings = self._beginnings(request, stored.block_size)
        num_tokens = self._prefixes.reuse.worth(use.keep, beginnings, request.num_prompt_tokens, num_computed)
        try:
            spans = stored.missing(beginnings, num_tokens)
            if not use.is_given:
                spans = tuple(takewhile(self._may_write, spans))
        except OSError as error:
            logger.warning("the prefix of request %s isn't kept: %s", request.request_id, error)
            self._num_lost += 1
            return False
        if spans:
            since = generation if use.generation is None else use.generation
            self._saves.append(Save(request.request_id, spans, block_ids, since, use.keep))
        return bool(spans)

    def _may_write(self, span: Span) -> bool:
        assert self._prefixes is not None
        return self._prefixes.budget.take((span.end - span.start) * self._prefixes.bytes_per_token)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Forget the request. Returns its report as plain data, None if it has none.

        The first request that ends says how many prefixes were lost since the last one did.
        """
        self._matched.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            self._aborted.add(request_id)
        if self._preempted is not None:
            self._preempted.forget(request_id)
        if self._finding is not None:
            self._finding.forget(request_id)
        num_lost, self._num_lost = self._num_lost, 0
        return report_to_params(self.reports.pop(request_id, None), self._resumed.pop(request_id, 0), num_lost)
