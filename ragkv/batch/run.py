"""A batch: reads all requests, orders them, keeps as many in the engine as its memory holds, and writes the answers."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from ragkv.batch.admission import Admission
from ragkv.batch.requests import BatchRequest
from ragkv.batch.results import Results
from ragkv.batch.sharing import in_order, shared_tokens
from ragkv.batch.work import Outcome, Preparation, Work
from ragkv.errors import EngineStoppedError, RagKVError
from ragkv.pipeline import Pipeline
from ragkv.server.wire import STATUSES, error_of

_MOST_AT_ONCE = 256
_TRIES = 3  # of a request whose engine ended; it has been started again then


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

    The engine has a few requests more than fit: they wait in vLLM's queue, and begin in the very step in which memory
    becomes free. Raises EngineStoppedError for a request during which the engine ended again and again. Closing the
    generator aborts what runs.
    """
    waiting, running = deque(works), dict[asyncio.Task[Outcome], tuple[Work, int]]()
    tries: Counter[str] = Counter()
    try:
        while waiting or running:
            while waiting and len(running) < _MOST_AT_ONCE and not admission.is_full:
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
