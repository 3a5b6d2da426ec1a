"""A batch: reads all requests, orders them, keeps as many in the engine as its memory holds, and writes the answers."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.batch.requests import BatchRequest
from ragkv.batch.results import Results
from ragkv.batch.sharing import in_order, shared_tokens
from ragkv.batch.work import Outcome, Preparation, Work
from ragkv.errors import EngineStoppedError, RagKVError
from ragkv.pipeline import Pipeline
from ragkv.server.wire import STATUSES, error_of

_MOST_AT_ONCE = 256
_TRIES = 3  # of a request whose engine ended; it has been started again then
_REMEMBERED = 64  # answers, of which the longest says how much memory the next one may need


@dataclass
class Summary:
    """What became of a batch. earlier: requests that the file had already been answered. Tokens are of this run.

    num_shared: of the prompts for the model itself, the tokens that needn't be computed twice. seconds: without
    preparation.
    """

    earlier: int = 0
    answered: int = 0
    failed: int = 0
    num_prompt: int = 0
    num_shared: int = 0
    num_reused: int = 0
    num_generated: int = 0
    seconds: float = 0.0


@dataclass
class Admission:
    """Which requests are in the engine: as many as its memory for KV will probably hold, so that few are preempted.

    capacity: of that memory, in tokens. Blocks that running requests share count once. An answer counts with its limit,
    or once so many are known, with the longest of the last ones.
    """

    capacity: int
    _num_tokens: int = 0
    _shared: Counter[object] = field(default_factory=Counter)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def fits(self, work: Work) -> bool:
        """Return whether there is memory for this request as well."""
        parts = work.item.parts if work.is_exact else ()
        new = sum(size for name, size in parts if not self._shared[name])
        return self._num_tokens + new + self._own(work) <= self.capacity

    def _own(self, work: Work) -> int:
        """Return how many tokens the request shares with nobody."""
        item, shared = work.item, sum(size for _, size in work.item.parts) if work.is_exact else 0
        is_known = len(self._lengths) == _REMEMBERED
        return item.num_tokens - shared + min(item.max_tokens, max(self._lengths) if is_known else item.max_tokens)

    def start(self, work: Work) -> int:
        """Count the request in. Returns what `end` is to be told."""
        own = self._own(work)
        self._num_tokens += own
        for name, size in work.item.parts if work.is_exact else ():
            self._num_tokens += 0 if self._shared[name] else size
            self._shared[name] += 1
        return own

    def end(self, work: Work, own: int, num_generated: int | None) -> None:
        """Count the request out. num_generated: the length of its answer, None if it has none."""
        self._num_tokens -= own
        for name, size in work.item.parts if work.is_exact else ():
            self._shared[name] -= 1
            if not self._shared[name]:
                self._num_tokens -= size
                del self._shared[name]
        if num_generated is not None:
            self._lengths.append(num_generated)


async def run(
    pipeline: Pipeline,
    requests: Sequence[BatchRequest],
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Answer all requests that `out` has no answers to yet, and append these to it as they come.

    progress: called with how many requests of how many are answered. A request that can't be answered has the error in
    its answer's place. Raises EngineStoppedError if vLLM ends again and again, StoreError if `out` can't be written:
    what it has stays, and the next run goes on.
    """
    with Results(out) as results:
        left = [request for request in requests if request.custom_id not in results.done]
        summary = Summary(earlier=len(requests) - len(left))
        if not left:
            return summary
        engine = await pipeline.start()
        works, problems = await asyncio.to_thread(Preparation(pipeline, engine).prepare, left)
        for custom_id, problem in problems.items():
            _fail(custom_id, problem, results, summary)
        works = [works[number] for number in in_order([work.item for work in works])]
        summary.num_shared = shared_tokens([work.item for work in works if work.is_exact])
        begin = time.perf_counter()
        try:
            async with aclosing(answered(works, Admission(engine.kv_tokens))) as answers:
                async for work, outcome in answers:
                    if isinstance(outcome, Outcome):
                        _keep(work.custom_id, outcome, results, summary)
                    else:
                        _fail(work.custom_id, outcome, results, summary)
                    progress(len(results.done), len(requests))
        finally:
            summary.seconds = time.perf_counter() - begin
    return summary


async def answered(
    works: Sequence[Work], admission: Admission
) -> AsyncGenerator[tuple[Work, Outcome | RagKVError], None]:
    """Answer requests, begun in this order; yield each with its answer, or why it has none, as they come.

    Raises EngineStoppedError for a request during which the engine ended again and again. Closing the generator aborts
    what runs.
    """
    waiting, running = deque(works), dict[asyncio.Task[Outcome], tuple[Work, int]]()
    tries: Counter[str] = Counter()
    try:
        while waiting or running:
            while waiting and len(running) < _MOST_AT_ONCE and (not running or admission.fits(waiting[0])):
                work = waiting.popleft()
                running[asyncio.ensure_future(work.run())] = work, admission.start(work)
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                work, own = running.pop(task)
                error = task.exception()
                admission.end(work, own, None if error else task.result().num_generated)
                if isinstance(error, EngineStoppedError) and tries[work.custom_id] < _TRIES:
                    tries[work.custom_id] += 1
                    waiting.appendleft(work)
                elif error is None:
                    yield work, task.result()
                elif isinstance(error, RagKVError) and not isinstance(error, EngineStoppedError):
                    yield work, error
                else:
                    raise error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _keep(custom_id: str, outcome: Outcome, results: Results, summary: Summary) -> None:
    results.add(custom_id, 200, outcome.body)
    summary.answered += 1
    summary.num_prompt += outcome.num_prompt
    summary.num_reused += outcome.num_reused
    summary.num_generated += outcome.num_generated


def _fail(custom_id: str, error: RagKVError, results: Results, summary: Summary) -> None:
    status = STATUSES.get(type(error), 500)
    results.add(custom_id, status, error_of(error))
    summary.failed += 1
