"""The worker's three queues of jobs, one for each kind of work, and how each advances by a slice of an engine step.

A slice takes about as many tokens as the step budget allows, so that the requests that vLLM decodes meanwhile don't
wait long. A queue never raises: what goes wrong becomes the outcome of the jobs concerned.
"""

from collections import deque
from collections.abc import Generator
from typing import Protocol

from ragkv.engine.fusion import Fusion, StepBudget
from ragkv.engine.precompute import Average, Precompute
from ragkv.engine.task import Job, MeanTask, Report, ScoreTask, TokenReport

Outcome = tuple[Job, Report | Exception]  # a job that has ended, and its report or why it failed


class Queue(Protocol):
    """Jobs of one kind, oldest first."""

    def __len__(self) -> int: ...

    def add(self, job: Job) -> None: ...

    def advance(self, budget: StepBudget) -> list[Outcome]:
        """Do one slice of work. Returns the jobs that ended with it."""

    def drop(self, request_ids: set[str]) -> list[Job]:
        """Remove aborted requests' jobs. Returns those that were there."""


class FusionQueue:
    """Fusions and scorings, one at a time: each is a generator that yields where an engine step is to end."""

    def __init__(self, fusion: Fusion, budget: StepBudget) -> None:
        self._fusion, self._budget = fusion, budget
        self._jobs: deque[tuple[Job, Generator[None, None, Report]]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        if self._jobs:  # it has to wait, so its KV can be read ahead
            self._fusion.prefetch(job)
        run = self._fusion.score if isinstance(job.task, ScoreTask) else self._fusion.fuse
        self._jobs.append((job, run(job, self._budget)))

    def advance(self, budget: StepBudget) -> list[Outcome]:
        job, slices = self._jobs[0]
        try:
            next(slices)
        except StopIteration as stop:
            outcome: Report | Exception = stop.value
        except Exception as error:  # any fault of ours: vLLM prefills the request itself, and the report says why
            outcome = error
        else:
            return []
        self._jobs.popleft()
        return [(job, outcome)]

    def drop(self, request_ids: set[str]) -> list[Job]:
        dropped = [job for job, _ in self._jobs if job.request_id in request_ids]
        self._jobs = deque(item for item in self._jobs if item[0].request_id not in request_ids)
        return dropped


class PrecomputeQueue:
    """Chunks to precompute after their anchor: as many in one forward as fit into a batch of vLLM's."""

    def __init__(self, precompute: Precompute, max_batch_tokens: int) -> None:
        self._precompute, self._max_batch_tokens = precompute, max_batch_tokens
        self._jobs: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def advance(self, budget: StepBudget) -> list[Outcome]:
        jobs = [self._jobs.popleft()]
        num_tokens = len(jobs[0].token_ids)
        while self._jobs and num_tokens + len(self._jobs[0].token_ids) <= self._max_batch_tokens:
            jobs.append(self._jobs.popleft())
            num_tokens += len(jobs[-1].token_ids)
        try:
            self._precompute.precompute(jobs)
        except Exception as error:
            return [(job, error) for job in jobs]
        return [(job, _computed(len(job.token_ids))) for job in jobs]

    def drop(self, request_ids: set[str]) -> list[Job]:
        dropped = [job for job in self._jobs if job.request_id in request_ids]
        self._jobs = deque(job for job in self._jobs if job.request_id not in request_ids)
        return dropped


class MeanQueue:
    """Chunks whose KV is averaged over contexts. Each slice computes the next context of the first few of them."""

    def __init__(self, precompute: Precompute) -> None:
        self._precompute = precompute
        self._averages: deque[Average] = deque()

    def __len__(self) -> int:
        return len(self._averages)

    def add(self, job: Job) -> None:
        assert isinstance(job.task, MeanTask)
        self._averages.append(self._precompute.begin(job, job.task))

    def advance(self, budget: StepBudget) -> list[Outcome]:
        batch: list[Average] = []  # at least one, and as many as fit into the slice
        num_tokens = 0
        for average in self._averages:
            num_tokens += average.num_tokens
            if batch and num_tokens > budget.slice_tokens:
                break
            batch.append(average)
        outcomes: list[Outcome]
        try:
            ended = self._precompute.average(batch)
            outcomes = [(average.job, _computed(average.num_computed)) for average in ended]
        except Exception as error:
            ended = batch
            outcomes = [(average.job, error) for average in batch]
        self._averages = deque(average for average in self._averages if average not in ended)
        return outcomes

    def drop(self, request_ids: set[str]) -> list[Job]:
        dropped = [average.job for average in self._averages if average.job.request_id in request_ids]
        self._averages = deque(item for item in self._averages if item.job.request_id not in request_ids)
        return dropped


def _computed(num_tokens: int) -> Report:
    return Report(tokens=TokenReport(recomputed=num_tokens))
