"""Watches how far answers are from full prefill's: of a share of them the first tokens are computed again, both ways,
while nobody waits. Where the drift is too large the budget rises.

Drift: KL(full ‖ fused) in nats, the mean over the tokens of an answer, and whether full prefill would have chosen the
same ones, as `ragkv eval quality` has them.
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
_RAISE = 2.0  # by how much the budget rises
_MAX_WAITING = 32  # answers: of more, the oldest isn't looked at


@dataclass(frozen=True)
class Sample:
    """An answer to look at: its prompt, how it was fused, and its first tokens."""

    prompt: list[int]
    task: FuseTask
    tokens: list[int]


@dataclass(frozen=True)
class Drift:
    """Of one answer. agreement: the share of its tokens that full prefill would have chosen too."""

    kl: float
    agreement: float
    num_tokens: int


# Log-probabilities `[m, V]` of a sample's tokens: by full prefill, and as it was fused.
Score = Callable[[Sample], Awaitable[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]]


class Canary:
    """Of one engine; lives in its event loop. budget: what it asks for, None as long as the configured one will do.

    on_drift: told of each answer that was looked at.
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
        """Take a share of the samples."""
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
            except Exception as error:  # answers go on without it, whatever it is
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
    """From log-probabilities `[m, V]` of the same tokens."""
    return Drift(float(kl(full, fused).mean()), float((full.argmax(1) == fused.argmax(1)).mean()), len(full))


def kl(full: npt.NDArray[np.float32], fused: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """KL(full ‖ fused) in nats at each position, from log-probabilities `[m, V]`."""
    result: npt.NDArray[np.float32] = (np.exp(full) * (full - fused)).sum(1)
    return result
