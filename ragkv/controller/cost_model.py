"""The controller: predicts how long each way of answering a request takes, and plans the quickest.

The times come from a profile of the machine and model (`ragkv.controller.profile`). Chunks that are quicker to compute
than to load are computed, and a prompt that vLLM prefills faster than it can be fused is left to vLLM. CacheBlend's
controller sets the budget, to recompute as much as loading hides; here the budget stays what quality asks for.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ragkv.policies import Policy

WAIT_SHARE = 0.05  # of the time of full prefill, in which KV may come from a bucket
GIVEN_SHARE = 0.5  # the same, of KV that another machine has made for this very request
_DOUBT = 1.05  # predictions err by a few percent, and being slower than vLLM is worse than missing a small gain


@dataclass(frozen=True)
class Load:
    """Counts of a request's tokens.

    prompt: all of them. loaded: those with stored KV. cold: loaded ones that are read from disk, not from memory.
    chosen: loaded ones that are recomputed. uncached: those without KV, the question included.
    """

    prompt: int
    loaded: int = 0
    cold: int = 0
    chosen: int = 0
    uncached: int = 0

    @property
    def features(self) -> list[float]:
        """The terms that the time of a fused request is linear in."""
        k = 1e-3
        n = self.prompt * k
        return [1.0, self.loaded * k, self.chosen * k, self.uncached * k, self.chosen * k * n, self.uncached * k * n]


@dataclass(frozen=True)
class Sample:
    """One request, timed."""

    load: Load
    ttft_ms: float


@dataclass(frozen=True)
class Profile:
    """Coefficients that predict a request's time to first token, in milliseconds.

    policy: the one whose requests were timed; the profile holds for any budget of it. prefill: coefficients of 1, n and
    n², where n is the prompt's length in thousands of tokens. fused: coefficients of `Load.features`. cold_ms: how much
    longer a thousand tokens take that are read from disk.
    """

    policy: Policy
    prefill: tuple[float, ...]
    fused: tuple[float, ...]
    cold_ms: float

    @classmethod
    def fit(cls, policy: Policy, prefill: Sequence[Sample], fused: Sequence[Sample], cold_ms: float) -> "Profile":
        """Fit the coefficients by least squares of the relative error; none of them is negative."""
        polynomial = [[1.0, s.load.prompt * 1e-3, (s.load.prompt * 1e-3) ** 2] for s in prefill]
        return cls(
            policy,
            _fit(polynomial, [s.ttft_ms for s in prefill]),
            _fit([s.load.features for s in fused], [s.ttft_ms for s in fused]),
            cold_ms,
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Profile":
        """Read what `as_dict` wrote. Raises KeyError, TypeError or ConfigError for anything else."""
        policy = Policy.parse(str(fields["policy"]))
        return cls(policy, tuple(fields["prefill"]), tuple(fields["fused"]), fields["cold_ms"])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "policy": self.policy.label}

    def prefill_ms(self, num_tokens: int) -> float:
        n = num_tokens * 1e-3
        return float(np.dot(self.prefill, [1.0, n, n * n]))

    def fused_ms(self, load: Load) -> float:
        return float(np.dot(self.fused, load.features)) + self.cold_ms * load.cold * 1e-3


@dataclass(frozen=True)
class Chunk:
    """A span of the prompt that could be loaded. is_cold: its KV is on disk and not in memory."""

    num_tokens: int
    is_cold: bool = False


@dataclass(frozen=True)
class Plan:
    """The way that a request is answered.

    way: "fuse" all chunks; "fuse warm" ones and compute the cold; or leave all to vLLM's "prefill". chunks: indices of
    those that are loaded. predicted_ms: time to first token; prefill_ms: the same by vLLM's prefill.
    """

    way: Literal["fuse", "fuse warm", "prefill"]
    chunks: tuple[int, ...]
    predicted_ms: float
    prefill_ms: float


def plan(profile: Profile, num_tokens: int, chunks: Sequence[Chunk], policy: Policy) -> Plan:
    """Return the quickest way to answer a prompt of `num_tokens` with these chunks; vLLM's where it is close."""
    prefill_ms = profile.prefill_ms(num_tokens)
    ways: list[Plan] = []
    every, warm = tuple(range(len(chunks))), tuple(i for i, chunk in enumerate(chunks) if not chunk.is_cold)
    for way, which in (("fuse", every), ("fuse warm", warm)):
        loaded = sum(chunks[i].num_tokens for i in which)
        cold = sum(chunks[i].num_tokens for i in which if chunks[i].is_cold)
        load = Load(num_tokens, loaded, cold, int(policy.budget * loaded), num_tokens - loaded)
        if loaded and policy.pays(load.uncached, num_tokens):
            ways.append(Plan(way, which, profile.fused_ms(load), prefill_ms))  # type: ignore[arg-type]
    ways.append(Plan("prefill", (), prefill_ms, prefill_ms))
    return min(ways, key=lambda plan: plan.predicted_ms * (1 if plan.way == "prefill" else _DOUBT))


def saves(profile: Profile, load: Load, num_before: int) -> bool:
    """Return whether a request is answered sooner by fusing than by vLLM's prefill, which has to be clearly slower.

    num_before: tokens before the first chunk, which vLLM has or both ways compute, so that they count for neither.
    """
    prefill_ms = profile.prefill_ms(load.prompt) - profile.prefill_ms(num_before) + profile.prefill_ms(0)
    return profile.fused_ms(load) * _DOUBT < prefill_ms


def longest_wait_s(profile: Profile | None, num_tokens: int, num_missing: int, share: float = WAIT_SHARE) -> float:
    """Return how long a prompt of `num_tokens`, so many of which have no KV here, may wait for KV from a bucket.

    With a slow one it may wait in vain, so that it is a part, by default a small one, of what the prompt takes without;
    less where little is to be gained. 0 where nobody knows what prefill takes.
    """
    if profile is None:
        return 0.0
    return 1e-3 * profile.prefill_ms(num_tokens) * min(share, num_missing / num_tokens)


def _fit(features: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, ...]:
    from scipy.optimize import nnls

    target = np.array(times)
    coefficients, _ = nnls(np.array(features) / target[:, None], np.ones(len(target)))
    return tuple(float(c) for c in coefficients)
