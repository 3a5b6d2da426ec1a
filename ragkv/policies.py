"""Which cached tokens to recompute. Policies are small, pure, and listed by name.

Every policy answers one question: which of the cached tokens that aren't exact already are recomputed. Some look at
what the probe saw (votes, deviations), some only at where the chunks lie. Tokens without cached KV are always computed;
that is not a policy's business. N is the number of cached tokens, S the chosen set.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragkv.errors import ConfigError

DESCRIPTIONS = {
    "none": "recompute nothing: full KV reuse",
    "query": "recompute the tokens that the question attends to most",
    "query-spread": "query, where a token also counts by how much its KV varied between captures",
    "adaptive": "query, with as many tokens as cover most of the question's attention, up to the budget",
    "cacheblend": "recompute the tokens whose V deviates most at the second layer (CacheBlend)",
    "cacheblend-k": "the same by K",
    "cacheblend-gradual": "cacheblend, filtered over three layers",
    "epic": "recompute the first tokens of every chunk after the first (EPIC)",
    "full": "recompute everything: exact, what fusion is measured against",
}
SHIFT = "behind the name of a policy, move what isn't recomputed by what the recomputed tokens of its chunk teach"
FULL = "behind the name of a policy that votes, recompute everything for questions that ask for all of the text"
VOTING = ("query", "query-spread", "adaptive")
DEVIATION = ("cacheblend", "cacheblend-k", "cacheblend-gradual")

COVERED_SHARE = 0.6  # adaptive: the share of the question's attention that S covers
FULL_BELOW = 0.755  # +full: the evenness of the question's attention below which everything is recomputed
MOST_VOTERS = 64  # tokens of the question: of a long one its end says what is asked, the rest is text
LEAST_SHARE = 0.01  # adaptive: S is never less than this share of N
GRADUAL = ((1, 1.5), (2, 1.25), (3, 1.0))  # cacheblend-gradual: at each layer, so many times the budget stay

_TEXT = re.compile(
    r"(?P<name>[a-z-]+?)(\[(?P<low>[\d.]+)-(?P<high>[\d.]+)\])?(?P<shift>\+shift)?"
    r"(?P<full>\+full(\[(?P<below>[\d.]+)\])?)?(:(?P<budget>.+))?"
)


@dataclass(frozen=True)
class Policy:
    """A policy's name and its budget: the share (0 to 1) of the cached tokens to recompute.

    shift: cached tokens that aren't recomputed move by the mean of what their chunk's recomputed tokens moved
    (`ragkv.kernels.shift`). layers: the part of the model's layers whose attention votes, from 0 to 1. full_below:
    everything is recomputed where the evenness of the votes lies below it. `none` and `full` ignore all of these.
    Raises ConfigError for an unknown name or a budget outside 0 to 1.
    """

    name: str
    budget: float = 0.05
    shift: bool = False
    layers: tuple[float, float] = (1 / 3, 2 / 3)
    full_below: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in DESCRIPTIONS:
            raise ConfigError(f"unknown policy {self.name!r}; choose one of {', '.join(DESCRIPTIONS)}")
        if not 0 <= self.budget <= 1:
            raise ConfigError(f"budget {self.budget} is outside 0..1; it is the share of cached tokens to recompute")
        low, high = self.layers
        if not 0 <= low < high <= 1:
            raise ConfigError(f"layers {low:g}-{high:g} are not a part of 0-1")
        if self.shift and not self.chooses_by_budget:
            raise ConfigError(f"+shift means nothing for policy {self.name!r}: it recomputes no part of a chunk")
        if self.full_below and self.name not in VOTING:
            raise ConfigError(
                f"+full means nothing for policy {self.name!r}: it takes no votes; {', '.join(VOTING)} do"
            )
        if not 0 <= self.full_below <= 1:
            raise ConfigError(f"+full[{self.full_below:g}] is outside 0..1; it is the evenness of the votes")

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read `none`, `query:0.15`, `query+shift:0.15`, `query+full`, `query+full[0.7]` (with the evenness below which
        everything is recomputed) or `query[0.5-1]:0.15` (with the layers that vote)."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ConfigError(f"policy {text!r} is not NAME[:BUDGET]; choose one of {', '.join(DESCRIPTIONS)}")
        given = match.groupdict()
        try:
            layers = (float(given["low"]), float(given["high"])) if given["low"] else cls.layers
            below = float(given["below"] or FULL_BELOW) if given["full"] else cls.full_below
            budget = float(given["budget"]) if given["budget"] else cls.budget
        except ValueError:
            raise ConfigError(f"budget {given['budget']!r} in policy {text!r} is not a number") from None
        return cls(given["name"], budget, given["shift"] is not None, layers, below)

    @classmethod
    def of(cls, name: str, budget: float) -> "Policy":
        """From a name as in `parse`, its budget apart."""
        if ":" in name:
            raise ConfigError(f"unknown policy {name!r}: the budget is given apart from the name")
        return cls.parse(f"{name}:{budget}")

    @property
    def chooses_by_budget(self) -> bool:
        return self.name not in ("none", "full")

    @property
    def recomputes_some(self) -> bool:
        """If so, the KV it leaves behind depends on the whole prompt: budget and choice go over all of its chunks."""
        return self.chooses_by_budget and self.budget > 0

    @property
    def asks_the_question(self) -> bool:
        """Whether the question is run over the stale cache first, to vote for tokens."""
        return self.name in VOTING and self.budget > 0

    def pays(self, num_uncached: int, num_tokens: int) -> bool:
        """Whether it computes less than all of `num_tokens`. Those without KV go through both passes where a vote is
        taken: from half of the tokens on, that costs more than one pass over everything."""
        return not self.asks_the_question or 2 * num_uncached < num_tokens

    @property
    def title(self) -> str:
        """The name as in `parse`, without the budget."""
        part = "" if self.layers == Policy.layers else f"[{self.layers[0]:g}-{self.layers[1]:g}]"
        below = "" if self.full_below == FULL_BELOW else f"[{self.full_below:g}]"
        return f"{self.name}{part}{'+shift' * self.shift}{f'+full{below}' if self.full_below else ''}"

    @property
    def label(self) -> str:
        return f"{self.title}:{self.budget:g}" if self.chooses_by_budget else self.name

    def voting_layers(self, num_layers: int) -> range:
        """At least one layer."""
        low, high = (int(part * num_layers + 1e-6) for part in self.layers)
        high = max(1, high)
        return range(min(low, high - 1), high)


def top_voted(votes: torch.Tensor, eligible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`query`: about the `num_tokens` (never more) eligible positions with the most votes, sorted.

    votes, eligible: `[N]`, float and bool. Votes are the attention mass that the question's tokens give each token,
    summed over heads and over the voting layers (`kernels.query_scores`; lower layers vote poorly:
    docs/decisions/0003). Query-guided selection is published as ProphetKV and QCFuse.

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


def num_covering(votes: torch.Tensor, eligible: torch.Tensor, share: float = COVERED_SHARE) -> int:
    """`adaptive`: the size of the smallest set of eligible tokens with `share` of the votes of all eligible tokens."""
    ranked = votes[eligible].sort(descending=True).values.cumsum(0)
    if not len(ranked):
        return 0
    return min(len(ranked), int((ranked < share * ranked[-1]).sum()) + 1)


def evenness(votes: torch.Tensor, eligible: torch.Tensor) -> float:
    """`+full`: the entropy of the votes of the eligible tokens over its largest possible value, from 0 to 1.

    Questions that ask for all of the text (list, count, compare, summarise) give less of their attention to the words
    that a pointed question looks for, and more to the few tokens that always draw it: their votes are less even
    (docs/decisions/0008). 1 where nothing is eligible.
    """
    shares = votes[eligible] / votes[eligible].sum().clamp(min=1e-30)
    if len(shares) < 2:
        return 1.0
    return float(torch.special.entr(shares).sum()) / math.log(len(shares))


def top_deviating(deviations: torch.Tensor, eligible: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """`cacheblend`: the `num_tokens` eligible positions that deviate most, sorted.

    deviations: `[N]`, ‖V_new − V_cached‖² summed over heads and dimensions at the second layer, where V_new comes from
    a first layer that is computed for all tokens (CacheBlend, EuroSys'25, section 4.3, "HKVD tokens"). In the gradual
    variant the same choice is made at three layers, from the tokens that the layer before has left.
    """
    num_tokens = min(num_tokens, int(eligible.sum()))
    return torch.topk(deviations.masked_fill(~eligible, -torch.inf), num_tokens).indices.sort().values


def chunk_heads(chunks: Sequence[tuple[int, int]], num_tokens: int) -> torch.Tensor:
    """`epic`: the first k tokens of each chunk `[start, end)`, k = num_tokens / number of chunks (EPIC, "LegoLink")."""
    if not chunks:
        return torch.zeros(0, dtype=torch.long)
    k, left = divmod(num_tokens, len(chunks))
    heads = [torch.arange(s, min(e, s + k + (i < left))) for i, (s, e) in enumerate(chunks)]
    return torch.cat(heads)
