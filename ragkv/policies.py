"""Which cached tokens a request recomputes. Policies are small data; the choices are pure functions of tensors.

A policy chooses among the cached tokens whose KV isn't exact already. Some policies look at what the probe pass
measured (votes, deviations), some only at where the chunks are. Tokens without cached KV are always computed, whatever
the policy. N is the number of cached tokens, S the chosen set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from ragkv.errors import ConfigError


class Selection(StrEnum):
    """How a policy chooses the tokens that it recomputes."""

    NONE = "none"
    QUERY = "query"
    CACHEBLEND = "cacheblend"
    CACHEBLEND_K = "cacheblend-k"
    CACHEBLEND_GRADUAL = "cacheblend-gradual"
    EPIC = "epic"
    FULL = "full"


GUIDED, STD, SHIFT = "guided", "-std", "+shift"  # a name, and two suffixes of a selection's name
DESCRIPTIONS = {
    "guided": f"query{STD}{SHIFT}, the default",
    "none": "recompute nothing: full KV reuse",
    "query": "recompute the tokens that the question attends to most",
    "query-std": "query, where a token also counts by how much its KV varied over the contexts it was precomputed in",
    "cacheblend": "recompute the tokens whose V deviates most at the second layer (CacheBlend)",
    "cacheblend-k": "cacheblend, by the deviation of K",
    "cacheblend-gradual": "cacheblend, filtered over three layers",
    "epic": "recompute the first tokens of every chunk after the first (EPIC)",
    "full": "recompute everything: exact, the reference that fusion is compared with",
}
SHIFT_DESCRIPTION = "after a policy's name: shift the other tokens by the mean shift of their chunk's recomputed ones"
MAX_VOTERS = 64  # tokens of the question: the end of a long one says what is asked, the rest is text
GRADUAL = ((1, 1.5), (2, 1.25), (3, 1.0))  # cacheblend-gradual: (layer, multiple of the budget that stays)


@dataclass(frozen=True)
class Policy:
    """A way to select the tokens that are recomputed, its budget, and what is done with the others.

    budget: the share (0 to 1) of the cached tokens to recompute; `none` and `full` ignore it. weigh_by_std: votes are
    weighted by the standard deviation of each token's KV over contexts. shift: cached tokens that aren't recomputed
    are shifted by the mean shift of their chunk's recomputed tokens (`ragkv.engine.shift`). Raises ConfigError for a
    budget outside 0 to 1 and for a combination that makes no sense.
    """

    selection: Selection
    budget: float = 0.05
    weigh_by_std: bool = False
    shift: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            raise ConfigError(f"budget {self.budget} is outside 0..1; it is the share of cached tokens to recompute")
        if self.weigh_by_std and self.selection != Selection.QUERY:
            raise ConfigError(f"{STD} has no effect on policy {self.selection!s}, which takes no votes")
        if self.shift and not self.selects_by_budget:
            raise ConfigError(
                f"{SHIFT} has no effect on policy {self.selection!s}, which recomputes no part of a chunk"
            )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a policy as people write it: `none`, `guided`, `query:0.15`, `query+shift:0.15`."""
        name, has_budget, budget = text.partition(":")
        whole = f"{Selection.QUERY}{STD}{SHIFT}" if name == GUIDED else name
        unshifted = whole.removesuffix(SHIFT)
        selection = unshifted.removesuffix(STD)
        if selection not in set(Selection):
            raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(DESCRIPTIONS)}")
        try:
            share = float(budget) if has_budget else cls.budget
        except ValueError:
            raise ConfigError(f"budget {budget!r} in policy {text!r} is not a number") from None
        return cls(Selection(selection), share, unshifted.endswith(STD), whole.endswith(SHIFT))

    @classmethod
    def of(cls, name: str, budget: float) -> "Policy":
        """Read a policy's name, as `parse` does; its budget is given separately."""
        if ":" in name:
            raise ConfigError(f"unknown policy {name!r}: the budget is given separately")
        return replace(cls.parse(name), budget=budget)

    @property
    def name(self) -> str:
        """The name as `parse` reads it, without the budget."""
        if self.weigh_by_std and self.shift:
            return GUIDED
        return f"{self.selection}{STD * self.weigh_by_std}{SHIFT * self.shift}"

    @property
    def label(self) -> str:
        """The policy as `parse` reads it."""
        return f"{self.name}:{self.budget:g}" if self.selects_by_budget else self.name

    def is_like(self, other: "Policy") -> bool:
        """Return whether both policies are the same but for the budget."""
        return replace(self, budget=other.budget) == other

    @property
    def is_full(self) -> bool:
        return self.selection == Selection.FULL

    @property
    def selects_by_budget(self) -> bool:
        return self.selection not in (Selection.NONE, Selection.FULL)

    @property
    def recomputes_some(self) -> bool:
        """Whether some cached tokens are recomputed, so that the resulting KV depends on the whole prompt."""
        return self.selects_by_budget and self.budget > 0

    @property
    def uses_votes(self) -> bool:
        """Whether the question is run over the stale cache first, to vote for tokens."""
        return self.selection == Selection.QUERY and self.budget > 0

    def pays(self, num_uncached: int, num_tokens: int) -> bool:
        """Return whether the policy computes less than all of `num_tokens`.

        Tokens without KV go through both passes where a vote is taken: from half of the tokens on, that costs more than
        one pass over everything.
        """
        return not self.uses_votes or 2 * num_uncached < num_tokens


FULL = Policy(Selection.FULL)


def voting_layers(num_layers: int) -> range:
    """Return the layers whose attention votes: all but the lowest third, at least one (docs/decisions/0003)."""
    return range(min(int(num_layers / 3 + 1e-6), num_layers - 1), num_layers)


def top_voted(votes: torch.Tensor, eligible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Choose about `num_tokens` (never more) of the eligible positions, those with the most votes; sorted (`query`).

    votes, eligible: `[N]`, float and bool. Votes are the attention mass that the question's tokens give each token,
    summed over heads and over the voting layers (`kernels.query_scores`; lower layers vote poorly:
    docs/decisions/0003). Query-guided selection is published as ProphetKV and QCFuse.

    One or two tokens between two chosen ones are chosen too, instead of those with the fewest votes: each run of
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
    """Return sorted positions with the eligible ones in gaps of one or two filled in."""
    chosen = torch.zeros_like(eligible)
    chosen[positions] = True
    for gap in (1, 2):
        starts = positions[:-1][torch.diff(positions) == gap + 1]
        for step in range(1, gap + 1):
            chosen[starts + step] = True
    return (chosen & eligible).nonzero().flatten()


def evenness(votes: torch.Tensor, eligible: torch.Tensor) -> float:
    """Return the entropy of the eligible tokens' votes over its largest possible value, from 0 to 1.

    Questions that ask for all of the text (list, count, compare, summarise) give less of their attention to the words
    that a pointed question looks for, and more to the few tokens that always draw it: their votes are less even
    (docs/decisions/0008). 1 where nothing is eligible.
    """
    shares = votes[eligible] / votes[eligible].sum().clamp(min=1e-30)
    if len(shares) < 2:
        return 1.0
    return float(torch.special.entr(shares).sum()) / math.log(len(shares))


def top_deviating(deviations: torch.Tensor, eligible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Choose the `num_tokens` eligible positions that deviate most; sorted (`cacheblend`).

    deviations: `[N]`, ‖V_new − V_cached‖² summed over heads and dimensions at the second layer, where V_new comes from
    a first layer that is computed for all tokens (CacheBlend, EuroSys'25, section 4.3, "HKVD tokens"). In the gradual
    variant the same choice is made at three layers, from the tokens that the layer before has left.
    """
    num_tokens = min(num_tokens, int(eligible.sum()))
    return torch.topk(deviations.masked_fill(~eligible, -torch.inf), num_tokens).indices.sort().values


def chunk_heads(chunks: Sequence[tuple[int, int]], num_tokens: int) -> torch.Tensor:
    """Choose the first k tokens of each chunk `[start, end)`, k = num_tokens / number of chunks (EPIC, "LegoLink")."""
    k, left = divmod(num_tokens, max(1, len(chunks)))
    heads = [torch.arange(s, min(e, s + k + (i < left))) for i, (s, e) in enumerate(chunks)]
    return torch.cat([torch.arange(0), *heads])
