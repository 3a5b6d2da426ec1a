"""The scheduler's half of the connector: which requests are ours, what the worker is to do for them, and its reports.

Runs in vLLM's scheduler process, which carries `StepWork` to the worker and `StepReports` back in every engine step.
Knows nothing about KV, stores or the model.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ragkv.engine.task import FuseTask, Job, Report, report_to_params, task_from_params

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class StepWork(KVConnectorMetadata):
    """From the scheduler to the worker. num_others: requests of which vLLM computes `num_scheduled` tokens."""

    jobs: list[Job] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    num_others: int = 0
    num_scheduled: int = 0


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """From the worker to the scheduler: the reports of the jobs that ended in the step, by request id."""

    reports: dict[str, Report]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReports":
        assert isinstance(other, StepReports)
        return StepReports({**other.reports, **self.reports})


class SchedulerSide:
    """Our requests in work.

    Each is matched, started once it has blocks, sent to the worker with the next step, reported on, and finished. It
    may be aborted at any of these.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self.reports: dict[str, Report] = {}

    def match(self, request: "Request", num_computed: int) -> tuple[int, bool]:
        """Return how many tokens after the `num_computed` are loaded, and that loading is asynchronous.

        That is all of the prompt but its last token, or none if vLLM's prefix cache covers what we could add.
        """
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
        """Make the request's job, now that vLLM has given it blocks."""
        task = task_from_params(request.kv_transfer_params)
        assert task is not None
        token_ids = list(request.prompt_token_ids or [])[:-1]
        job = Job(request.request_id, task, token_ids, block_ids, num_prefix=len(token_ids) - num_external)
        self._jobs[request.request_id] = job
        self._running.add(request.request_id)

    def take_work(self, num_others: int, num_scheduled: int) -> StepWork:
        """Return what the worker is to do from this step on."""
        work = StepWork(list(self._jobs.values()), self._aborted, num_others, num_scheduled)
        self._jobs, self._aborted = {}, set()
        return work

    def keep(self, reports: dict[str, Report]) -> None:
        """Keep the reports of requests that haven't been aborted in the meantime."""
        self.reports.update({id: report for id, report in reports.items() if id in self._running})

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Forget the request. Returns its report as plain data, None if it has none."""
        if request_id in self._running and request_id not in self.reports:
            self._aborted.add(request_id)
        self._running.discard(request_id)
        report = self.reports.pop(request_id, None)
        return report_to_params(report) if report else None
