"""Work that is done while no request is being answered: restoring missing KV, and the watch over drift.

Drift is how far a fused answer is from that of full prefill: the mean of KL(full ‖ fused), in nats, over its tokens,
and the share of them that full prefill would have chosen too, as in `ragkv eval quality`.
"""

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ragkv.config import CanaryConfig
from ragkv.engine.task import FuseTask
from ragkv.errors import RagKVError

logger = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_S = 0.5  # since the last answer
SOON_S = 1.0  # for which what is small waits for an idle moment
RESTORE_EVENTS = ("restored_chunks", "failed_restores")  # names of what is counted
PAUSE_S = 60.0  # after a failure to restore: the disk may be full
WINDOW = 20  # answers whose drift decides
_RAISE = 2.0  # the factor by which the budget rises
_MAX_WAITING = 32  # answers: of more, the oldest isn't scored


class AnswerBegunError(Exception):
    """Work that can wait was broken off, because a request came."""


class Idle:
    """A count of the requests that one engine is answering; lives in its event loop. Times are `time.monotonic`'s.

    patience_s: how long work that can wait does so while requests come without a pause.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._num_answering, self._quiet_since = 0, 0.0
        self._begun = asyncio.Event()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request: the engine isn't idle within this context."""
        self._num_answering += 1
        self._begun.set()
        try:
            yield
        finally:
            self._num_answering -= 1
            self._quiet_since = time.monotonic()
            if not self._num_answering:
                self._begun.clear()

    async def wait(self, until: float = math.inf) -> bool:
        """Wait until no request has been answered for `IDLE_S`, and return True; or False at the time `until`."""
        while (left := IDLE_S if self._num_answering else self._quiet_since + IDLE_S - time.monotonic()) > 0:
            if until <= time.monotonic():
                return False
            await asyncio.sleep(min(left, until - time.monotonic()))
        return True

    @property
    def is_quiet(self) -> bool:
        return not self._num_answering

    async def unless_answering(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work. If a request comes meanwhile, cancel it and raise AnswerBegunError."""
        task, begun = asyncio.create_task(work), asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise AnswerBegunError
        finally:
            await stop(begun)
            await stop(task)


class Turns:
    """The turns of what indexes, in one event loop: one at a time, in the order in which they were asked for.

    lock: held during a turn; also by whoever deletes KV that no catalogue mentions.
    """

    def __init__(self, idle: Idle) -> None:
        self._idle, self.lock = idle, asyncio.Lock()

    @asynccontextmanager
    async def next(self, until: float) -> AsyncIterator[bool]:
        """Take the next turn, once no request is being answered, or at the time `until`. Gives whether it is quiet."""
        while True:
            is_quiet = await self._idle.wait(until)
            async with self.lock:
                if self._idle.is_quiet or not is_quiet:
                    yield is_quiet
                    return


async def stop(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task, if there is one, and wait until it has ended."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class KVRestorer:
    """The chunks of one pipeline whose KV is missing, to be precomputed again; lives in its event loop.

    precompute: makes the KV of one chunk, by hash, and returns whether it did.
    """

    def __init__(self, precompute: Callable[[str], Coroutine[Any, Any, bool]], idle: Idle) -> None:
        self._precompute, self._idle = precompute, idle
        self._missing: dict[str, None] = {}
        self._paused_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self.num_restored = self.num_failed = 0

    def add(self, chunk_hashes: Iterable[str]) -> None:
        if time.monotonic() < self._paused_until:
            return
        self._missing.update(dict.fromkeys(chunk_hashes))
        if self._missing and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        waits_until = time.monotonic() + self._idle.patience_s
        while self._missing:
            is_quiet = await self._idle.wait(waits_until)
            chunk_hash = next(iter(self._missing))
            try:
                work = self._precompute(chunk_hash)
                self.num_restored += await (self._idle.unless_answering(work) if is_quiet else work)
                del self._missing[chunk_hash]
                waits_until = time.monotonic() + self._idle.patience_s
            except AnswerBegunError:
                continue
            except Exception as error:  # whatever it is, answering continues
                details = None if isinstance(error, RagKVError) else error
                logger.warning("missing KV isn't precomputed again for %d s: %s", PAUSE_S, error, exc_info=details)
                self.num_failed += 1
                self._missing.clear()
                self._paused_until = time.monotonic() + PAUSE_S

    async def close(self) -> None:
        await stop(self._task)


@dataclass(frozen=True)
class Sample:
    """An answer to score: its prompt, how it was fused, and its first tokens."""

    prompt: list[int]
    task: FuseTask
    tokens: list[int]


@dataclass(frozen=True)
class Drift:
    """The drift of one answer. agreement: the share of its tokens that full prefill would have chosen too.

    estimate: what `ragkv.quality_target` takes the drift for, None where its chunks have no other KV.
    """

    kl: float
    agreement: float
    num_tokens: int
    estimate: float | None = None


LogProbs = npt.NDArray[np.float32]
# Log-probabilities `[m, V]` of a sample's tokens: by full prefill, as it was fused, and from the chunks' other KV.
Score = Callable[[Sample], Awaitable[tuple[LogProbs, LogProbs, LogProbs | None]]]


class Canary:
    """The watch over one engine's drift: while it is idle, the first tokens of a share of the answers are scored again,
    both ways, and where the drift is too large, the budget rises. Lives in its event loop.

    budget: the one that drift calls for, None as long as the configured one will do. on_drift: called for each answer
    that was scored.
    """

    def __init__(self, config: CanaryConfig, budget: float, idle: Idle, score: Score) -> None:
        self._config, self._configured, self._idle, self._score = config, budget, idle, score
        self._waiting: deque[Sample] = deque(maxlen=_MAX_WAITING)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._random = random.Random()
        self._task: asyncio.Task[None] | None = None
        self.budget: float | None = None
        self.on_drift: Callable[[Drift], None] = lambda drift: None

    def offer(self, sample: Sample) -> None:
        """Take this sample for scoring, or leave it: `canary.share` of all are taken."""
        if sample.tokens and self._random.random() < self._config.share:
            self._waiting.append(sample)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        await stop(self._task)

    async def _run(self) -> None:
        while self._waiting:
            await self._idle.wait()
            sample = self._waiting.popleft()
            try:
                full, fused, other = await self._score(sample)
            except Exception as error:  # whatever it is, answering continues
                details = None if isinstance(error, RagKVError) else error
                logger.warning("the drift of an answer isn't known: %s", error, exc_info=details)
                continue
            drift = drift_of(full, fused, other)
            self.on_drift(drift)
            if sample.task.policy.budget == (self.budget or self._configured):
                self._consider(drift)

    def _consider(self, drift: Drift) -> None:
        self._recent.append(drift.kl)
        now, most = self.budget or self._configured, self._config.max_budget
        if len(self._recent) == WINDOW and fmean(self._recent) > self._config.max_kl and now < most:
            self.budget = min(_RAISE * now, most)
            logger.warning(
                "the last %d answers that were compared with full prefill drifted by %.3f nats, more than %g "
                "(canary.max_kl): from now on %g of the cached tokens are recomputed instead of %g",
                *(WINDOW, fmean(self._recent), self._config.max_kl, self.budget, now),
            )
            self._recent.clear()


def drift_of(full: LogProbs, fused: LogProbs, other: LogProbs | None = None) -> Drift:
    """Return an answer's drift, from log-probabilities `[m, V]` of its tokens."""
    agreement = float((full.argmax(1) == fused.argmax(1)).mean())
    estimate = None if other is None else float(kl(fused, other).mean())
    return Drift(float(kl(full, fused).mean()), agreement, len(full), estimate)


def kl(full: LogProbs, fused: LogProbs) -> npt.NDArray[np.float32]:
    """Return KL(full ‖ fused) in nats at each position, from log-probabilities `[m, V]`."""
    result: npt.NDArray[np.float32] = (np.exp(full) * (full - fused)).sum(1)
    return result
