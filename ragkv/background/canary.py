"""The watch over drift: how far fused answers are from those of full prefill.

While the engine is idle, the first tokens of a share of the answers are scored again, both ways. Where the drift is too
large, the budget rises. Drift is the mean of KL(full ‖ fused), in nats, over the tokens of an answer, and the share of
them that full prefill would have chosen too, as in `ragkv eval quality`.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from ragkv.background.idle import Idle, stop
from ragkv.config import CanaryConfig
from ragkv.engine.task import FuseTask
from ragkv.errors import RagKVError

logger = logging.getLogger(__name__)

WINDOW = 20  # answers whose drift decides
_RAISE = 2.0  # the factor by which the budget rises
_MAX_WAITING = 32  # answers: of more, the oldest isn't scored


@dataclass(frozen=True)
class Sample:
    """An answer to score: its prompt, how it was fused, and its first tokens."""

    prompt: list[int]
    task: FuseTask
    tokens: list[int]


@dataclass(frozen=True)
class Drift:
    """The drift of one answer. agreement: the share of its tokens that full prefill would have chosen too."""

    kl: float
    agreement: float
    num_tokens: int


# Log-probabilities `[m, V]` of a sample's tokens: by full prefill, and as it was fused.
Score = Callable[[Sample], Awaitable[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]]


class Canary:
    """The canary of one engine; lives in its event loop.

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
                full, fused = await self._score(sample)
            except Exception as error:  # whatever it is, answering continues
                details = None if isinstance(error, RagKVError) else error
                logger.warning("the drift of an answer isn't known: %s", error, exc_info=details)
                continue
            drift = drift_of(full, fused)
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


def drift_of(full: npt.NDArray[np.float32], fused: npt.NDArray[np.float32]) -> Drift:
    """Return an answer's drift, from log-probabilities `[m, V]` of its tokens."""
    return Drift(float(kl(full, fused).mean()), float((full.argmax(1) == fused.argmax(1)).mean()), len(full))


def kl(full: npt.NDArray[np.float32], fused: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return KL(full ‖ fused) in nats at each position, from log-probabilities `[m, V]`."""
    result: npt.NDArray[np.float32] = (np.exp(full) * (full - fused)).sum(1)
    return result
