"""The quality target: an answer whose estimated drift is above it is begun again, with more tokens recomputed.

The estimate needs no full prefill. The store has two kinds of KV of a chunk (`ragkv.chunk_kv`), both approximate: its
mean over contexts, which answers use, and its KV after the anchor alone. The first tokens are scored once more over
the latter. Where the two disagree, at least one of them is wrong.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ragkv.policies import FULL, Policy

if TYPE_CHECKING:
    from ragkv.generation import Generation

NUM_TOKENS = 16  # of the answer; fewer say nothing about the drift of all of it (docs/decisions/0021)
NUM_LOGPROBS = 20  # the likeliest tokens of each step whose probabilities vLLM reports
_RAISE, _MOST = 3.0, 0.4  # of the budget; above the latter nothing is gained over computing everything

Estimate = Callable[[], Awaitable[float | None]]


def raised(policy: Policy) -> Policy:
    """Return the policy with three times the budget: `full`, where that would be more than 0.4 of the tokens."""
    if not policy.selects_by_budget or policy.budget * _RAISE > _MOST:
        return FULL
    return replace(policy, budget=policy.budget * _RAISE)


async def begun_within(
    generation: "Generation", texts: AsyncGenerator[str, None], estimate: Estimate, max_drift: float
) -> AsyncGenerator[str, None]:
    """Yield a generation's texts, those of its first tokens only once its drift has been estimated.

    Yields none if that is above `max_drift`. vLLM goes on decoding meanwhile. An estimate that can't be had (None)
    holds nothing back.
    """

    async def is_within() -> bool:
        generation.drift_estimate = await estimate()
        generation.released()
        return generation.drift_estimate is None or generation.drift_estimate <= max_drift

    held: list[str] = []
    is_held = True
    async with aclosing(texts):
        async for text in texts:
            held.append(text)
            if is_held and len(generation.tokens) < NUM_TOKENS:
                continue
            if is_held and not await is_within():
                return
            is_held = False
            yield "".join(held)
            held.clear()
    if is_held and await is_within() and held:
        yield "".join(held)


def disagreement(steps: Sequence[Mapping[int, float]], other: npt.NDArray[np.float32]) -> float:
    """Return the mean of KL(answer ‖ other) over an answer's tokens, in nats.

    steps: for each token the log-probabilities of the likeliest tokens, as the answer had them; all the rest counts as
    one, so the result is a lower bound. other: `[m, V]`, the same tokens' log-probabilities over the other KV.
    """
    total = 0.0
    for step, row in zip(steps, other, strict=True):
        p, q = np.exp(list(step.values())), np.exp(row[list(step)].astype(float))
        pairs = [*zip(p.tolist(), q.tolist(), strict=True), (1 - float(p.sum()), 1 - float(q.sum()))]
        total += sum(a * math.log(a / max(b, 1e-12)) for a, b in pairs if a > 0)
    return max(0.0, total / max(1, len(steps)))
