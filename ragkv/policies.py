"""Which cached tokens to recompute. Policies are small, pure, and listed by name.

Every policy answers one question: given what the probe saw, which of the cached tokens that aren't exact already are
recomputed. Tokens without cached KV are always computed; that is not a policy's business.
"""

from dataclasses import dataclass

import torch

from ragkv.errors import ConfigError

DESCRIPTIONS = {
    "none": "recompute nothing: full KV reuse",
    "query": "recompute the tokens that the question attends to most",
    "full": "recompute everything: exact, what fusion is measured against",
}


@dataclass(frozen=True)
class Policy:
    """A policy's name and its budget: the share (0 to 1) of the cached tokens to recompute.

    `none` and `full` ignore the budget. Raises ConfigError for an unknown name or a budget outside 0 to 1.
    """

    name: str
    budget: float = 0.05

    def __post_init__(self) -> None:
        if self.name not in DESCRIPTIONS:
            raise ConfigError(f"unknown policy {self.name!r}; choose one of {', '.join(DESCRIPTIONS)}")
        if not 0 <= self.budget <= 1:
            raise ConfigError(f"budget {self.budget} is outside 0..1; it is the share of cached tokens to recompute")

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read `none`, `full`, `query` or `query:0.15`."""
        name, _, budget = text.partition(":")
        try:
            return cls(name, float(budget)) if budget else cls(name)
        except ValueError:
            raise ConfigError(f"budget {budget!r} in policy {text!r} is not a number") from None

    @property
    def probes(self) -> bool:
        """Whether the question is run over the stale cache first, to vote for tokens."""
        return self.name == "query" and self.budget > 0

    @property
    def depends_on_question(self) -> bool:
        """Whether two questions over the same chunks leave different KV behind."""
        return self.probes

    @property
    def label(self) -> str:
        return f"{self.name}:{self.budget:g}" if self.name == "query" else self.name


def top_voted(votes: torch.Tensor, eligible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`query`: about the `num_tokens` (never more) eligible positions with the most votes, sorted.

    votes, eligible: `[N]`, float and bool. Votes are the attention mass that the question's tokens give each token,
    summed over heads and over the layers from L/3 to 2L/3 (lower layers vote poorly: see docs/decisions/0003).
    Query-guided selection is published as ProphetKV and QCFuse.

    One or two tokens between two chosen ones are chosen too, in the place of those with the fewest votes: each run of
    positions reads the whole context once, which costs more than computing two tokens.
    """
    num_tokens = min(num_tokens, int(eligible.sum()))
    ranking = torch.topk(votes.masked_fill(~eligible, -torch.inf), num_tokens).indices
    num_top = num_tokens
    while num_top > 0:
        chosen = _join_runs(ranking[:num_top].sort().values, eligible)
        if len(chosen) <= num_tokens:
            return chosen
        num_top -= max(1, (len(chosen) - num_tokens) // 2)
    return ranking[:0]


def _join_runs(positions: torch.Tensor, eligible: torch.Tensor) -> torch.Tensor:
    """Sorted positions with the eligible ones in gaps of one or two filled in."""
    chosen = torch.zeros_like(eligible)
    chosen[positions] = True
    for gap in (1, 2):
        starts = positions[:-1][torch.diff(positions) == gap + 1]
        for step in range(1, gap + 1):
            chosen[starts + step] = True
    return (chosen & eligible).nonzero().flatten()
