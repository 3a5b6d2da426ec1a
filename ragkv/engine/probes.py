"""Observers of a pass over a request's stale cache: they collect the question's votes, or deviations of K or V."""

import torch

from ragkv.engine.blocks import attention_spec
from ragkv.engine.filler import LayerView
from ragkv.engine.loader import KVLoader, LoadedSpan
from ragkv.engine.positions import rows_in


class Votes:
    """The attention of some tokens of the pass (the question's) to each position, summed over heads and `layers`.

    positions: of the pass; voters: which of its rows vote; weigh_by_std: each layer's attention to a token is weighted
    by the token's `v_std` there, where the record has one. The pass ends with the last voting layer.
    """

    def __init__(
        self,
        loader: KVLoader,
        positions: torch.Tensor,
        voters: torch.Tensor,
        layers: range,
        num_tokens: int,
        weigh_by_std: bool = False,
    ) -> None:
        self._loader, self._layers, self._weigh = loader, layers, weigh_by_std
        device = loader.forward.device
        self._voters, self._positions = voters.to(device), positions[voters].to(device)
        self._attention = torch.zeros(num_tokens, device=device)
        self._votes = torch.zeros(num_tokens, device=device)
        self._cached = torch.zeros(num_tokens, dtype=torch.bool)
        self._rows: torch.Tensor | None = None  # the positions of the loaded tokens

    def observe(self, view: LayerView) -> bool:
        if view.layer in self._layers:
            self._vote(view)
        return view.layer == self._layers.stop - 1

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention and votes, `[N]` each, on the host; 0 for what isn't cached."""
        attention, votes = self._attention.cpu(), self._votes.cpu()
        return attention * self._cached, votes * self._cached

    def _vote(self, view: LayerView) -> None:
        spec = attention_spec(self._loader.forward.layers[view.layer])
        q = view.q[self._voters]
        scores = self._loader.kernels.query_scores(q, self._positions, view.keys, view.key_positions, spec)
        self._attention += scores
        if not view.loaded:
            return
        if self._rows is None:  # the same in all layers
            rows = torch.cat([torch.arange(item.span.start, item.span.end) for item in view.loaded])
            self._cached[rows] = True
            self._rows = rows.to(scores.device)
        votes = scores[self._rows]
        self._votes.index_add_(0, self._rows, votes * _v_std(view.loaded) if self._weigh else votes)


def _v_std(loaded: list[LoadedSpan]) -> torch.Tensor:
    """Return the `v_std` of all spans' tokens.

    What was precomputed in one context has none, and gets the mean of the others'.
    """
    known = [item.kv.v_std for item in loaded if item.kv.v_std is not None]
    mean = (torch.cat(known).mean() if known else torch.ones(())).to(loaded[0].kv.k.device)
    return torch.cat([mean.expand(item.kv.shape[1]) if item.kv.v_std is None else item.kv.v_std for item in loaded])


class Deviations:
    """How far the V (or K) that the pass computes at `layer` is from the cached, by position `[N]`; ends the pass."""

    def __init__(
        self, loader: KVLoader, positions: torch.Tensor, layer: int, num_tokens: int, *, of_keys: bool = False
    ) -> None:
        self._loader, self._positions, self._layer, self._of_keys = loader, positions, layer, of_keys
        self.deviations = torch.zeros(num_tokens)

    def observe(self, view: LayerView) -> bool:
        if view.layer < self._layer:
            return False
        for item in view.loaded:
            rows = rows_in(self._positions, item.span)
            self.deviations[self._positions[rows]] = self._of_span(view, item, rows).cpu()
        return True

    def _of_span(self, view: LayerView, item: LoadedSpan, rows: torch.Tensor) -> torch.Tensor:
        k, cached = item.kv.decoded()
        rotation = self._loader.rotations[view.layer]
        if self._of_keys:
            cached = k if rotation is None else rotation.rotate(k, item.distance)
        device = self._loader.forward.device
        fresh = (view.k if self._of_keys else view.v)[rows.to(device)].transpose(0, 1)  # [Hkv, T, D]
        offsets = (self._positions[rows] - item.span.start).to(device)
        return self._loader.kernels.kv_deviation(fresh, cached, offsets)
