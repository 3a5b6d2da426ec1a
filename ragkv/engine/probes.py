"""What a pass over a request's stale cache tells about its cached tokens: votes of the question, or deviations."""

import torch

from ragkv.engine.fill import Loaded, rows_in
from ragkv.engine.subset import SubsetForward
from ragkv.kernels.deviation import deviation
from ragkv.kernels.query_scores import query_scores, visibility


class Votes:
    """The attention of some tokens of the pass (the question's), by position `[N]`, summed over heads and `layers`.

    positions: of the pass; voters: which of its rows vote; spread: in `votes`, each layer's attention to a token is
    weighed by its KV's spread there, where the record has one. The pass ends with the last voting layer.
    """

    def __init__(
        self,
        subset: SubsetForward,
        positions: torch.Tensor,
        voters: torch.Tensor,
        layers: range,
        num_tokens: int,
        spread: bool = False,
    ) -> None:
        self._subset, self._positions, self._voters, self._layers = subset, positions, voters, layers
        self._weigh = spread
        self._hidden: dict[int | None, torch.Tensor | None] = {}  # what the voters can't see, by sliding window
        self.attention = torch.zeros(num_tokens)
        self.votes = torch.zeros(num_tokens)

    def see(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, loaded: list[Loaded]) -> bool:
        if layer in self._layers:
            self._vote(layer, q, k, loaded)
        return layer == self._layers.stop - 1

    def _vote(self, layer: int, q: torch.Tensor, k: torch.Tensor, loaded: list[Loaded]) -> None:
        attention = self._subset.layers[layer]
        window = attention.sliding_window
        cached = torch.cat([torch.arange(item.span.start, item.span.end) for item in loaded])
        if window not in self._hidden:
            seen = torch.cat([cached, self._positions])
            hidden = visibility(self._positions[self._voters], seen, window)
            self._hidden[window] = hidden if hidden is None else hidden.to(self._subset.device)
        keys = torch.cat([*(item.keys for item in loaded), k.transpose(0, 1)], dim=1)
        soft_cap = getattr(attention.impl, "logits_soft_cap", None) or 0.0
        scores = query_scores(q[self._voters], keys, self._hidden[window], attention.impl.scale, soft_cap)
        scores = scores[: len(cached)].cpu()
        self.attention[cached] += scores
        self.votes[cached] += scores * _spreads(loaded) if self._weigh else scores


def _spreads(loaded: list[Loaded]) -> torch.Tensor:
    """By token. What was captured only once has the mean spread of the others: of it, nothing is known."""
    known = [item.kv.spread.cpu() for item in loaded if item.kv.spread is not None]
    mean = float(torch.cat(known).mean()) if known else 1.0
    spreads = [
        torch.full((item.span.end - item.span.start,), mean) if item.kv.spread is None else item.kv.spread.cpu()
        for item in loaded
    ]
    return torch.cat(spreads)


class Deviations:
    """How far the V (or K) that the pass computes at `layer` lies from the cached, by position `[N]`; ends the pass."""

    def __init__(self, positions: torch.Tensor, layer: int, num_tokens: int, *, of_keys: bool = False) -> None:
        self._positions, self._layer, self._of_keys = positions, layer, of_keys
        self.deviations = torch.zeros(num_tokens)

    def see(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, loaded: list[Loaded]) -> bool:
        if layer < self._layer:
            return False
        fresh = (k if self._of_keys else v).transpose(0, 1)  # [Hkv, T, D]
        for item in loaded:
            rows = rows_in(self._positions, item.span)
            offsets = (self._positions[rows] - item.span.start).to(fresh.device)
            cached = (item.keys if self._of_keys else item.kv.v)[:, offsets]
            self.deviations[self._positions[rows]] = deviation(fresh[:, rows.to(fresh.device)], cached).cpu()
        return True
