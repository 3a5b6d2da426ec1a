"""What the connector's two sides send each other in every engine step. vLLM carries it between its processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ragkv.engine.task import Job, Report


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
