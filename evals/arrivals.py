"""Requests that arrive at random, and the rate that a server sustains."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ragkv.evals.experiment import Row

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


def gaps(number: int, rate: float, seed: int) -> list[float]:
    """Return the seconds between arrivals of a Poisson process: of the same seed the same, stretched by the rate."""
    rng = random.Random(seed + 1)
    return [rng.expovariate(1.0) / rate for _ in range(number)]


async def as_they_come(
    ask: Callable[[_Request], Awaitable[_Answer]], requests: Sequence[_Request], pauses: Sequence[float]
) -> list[_Answer]:
    """Send each request after its pause, whether those before it are answered or not. Returns the answers in order."""
    asked: list[asyncio.Future[_Answer]] = []
    for request, pause in zip(requests, pauses, strict=True):
        await asyncio.sleep(pause)
        asked.append(asyncio.ensure_future(ask(request)))
    return await asyncio.gather(*asked)


def sustained(rows: Sequence[Row], system: str, ttft_p90_ms: float) -> float | None:
    """Return the highest rate, in requests per second, at which nine in ten have their first token within the time:
    interpolated between two that were measured. None if none is that quick, or if all are."""
    points = sorted((r["rate"], r["ttft_p90_ms"]) for r in rows if (r["part"], r["system"]) == ("rate", system))
    for (rate, ms), (more, more_ms) in itertools.pairwise(points):
        if ms <= ttft_p90_ms < more_ms:
            return float(rate + (more - rate) * (ttft_p90_ms - ms) / (more_ms - ms))
    return None


def rates_at_equal_p90(rows: Sequence[Row]) -> list[tuple[Row, float, bool]]:
    """Return each row of a rate of vLLM's with ragkv's highest rate at which nine in ten have their first token as
    soon, and whether that is a lower bound: ragkv is as quick at all rates that were tried."""
    found = []
    for row in rows:
        if (row["part"], row["system"]) != ("rate", "vLLM"):
            continue
        rate = sustained(rows, "ragkv", row["ttft_p90_ms"])
        tried = [r for r in rows if (r["part"], r["system"]) == ("rate", "ragkv")]
        quick = [r["rate"] for r in tried if r["ttft_p90_ms"] <= row["ttft_p90_ms"]]
        if rate is not None or quick:
            found.append((row, rate if rate is not None else max(quick), rate is None))
    return found
