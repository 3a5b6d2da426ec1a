"""What a pass over a request's stale cache tells about its cached tokens: votes of the question, or deviations."""

import torch

from ragkv.engine.attention import soft_cap
from ragkv.engine.loader import LayerView, LoadedSpan, Source, rows_in


class Votes:
    """The attention of some tokens of the pass (the question's), by position, summed over heads and `layers`.

    positions: of the pass; voters: which of its rows vote; v_std: in the votes, each layer's attention to a token is
    weighed by its KV's v_std there, where the record has one. The pass ends with the last voting layer.
    """

    def __init__(
        self,
        source: Source,
        positions: torch.Tensor,
        voters: torch.Tensor,
        layers: range,
        num_tokens: int,
        v_std: bool = False,
    ) -> None:
        self._source, self._layers, self._weigh = source, layers, v_std
        device = source.subset.device
        self._voters, self._positions = voters.to(device), positions[voters].to(device)
        self._attention = torch.zeros(num_tokens, device=device)
        self._votes = torch.zeros(num_tokens, device=device)
        self._cached = torch.zeros(num_tokens, dtype=torch.bool)

    def see(self, seen: LayerView) -> bool:
        if seen.layer in self._layers:
            self._vote(seen)
        return seen.layer == self._layers.stop - 1

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and votes, `[N]` each, on the host; 0 for what isn't cached."""
        attention, votes = self._attention.cpu(), self._votes.cpu()
        return attention * self._cached, votes * self._cached

    def _vote(self, seen: LayerView) -> None:
        attention = self._source.subset.layers[seen.layer]
        scores = self._source.kernels.query_scores(
            seen.q[self._voters],
            self._positions,
            seen.keys,
            seen.key_positions,
            attention.impl.scale,
            attention.sliding_window,
            soft_cap(attention),
        )
        self._attention += scores
        for item, weight in zip(seen.loaded, _v_stds(seen.loaded), strict=True):
            part = slice(item.span.start, item.span.end)
            self._votes[part] += scores[part] * weight if self._weigh else scores[part]
            self._cached[part] = True


def _v_stds(loaded: list[LoadedSpan]) -> list[torch.Tensor]:
    """Of each token, `[T]` or a number for all. What was precomputed only once has the mean v_std of the others: of it,
    nothing is known."""
    known = [item.kv.v_std for item in loaded if item.kv.v_std is not None]
    mean = torch.cat(known).mean() if known else torch.ones(())
    return [mean.to(item.kv.k.device) if item.kv.v_std is None else item.kv.v_std for item in loaded]


class Deviations:
    """How far the V (or K) that the pass computes at `layer` lies from the cached, by position `[N]`; ends the pass."""

    def __init__(
        self, source: Source, positions: torch.Tensor, layer: int, num_tokens: int, *, of_keys: bool = False
    ) -> None:
        self._source, self._positions, self._layer, self._of_keys = source, positions, layer, of_keys
        self.deviations = torch.zeros(num_tokens)

    def see(self, seen: LayerView) -> bool:
        if seen.layer < self._layer:
            return False
        for item in seen.loaded:
            rows = rows_in(self._positions, item.span)
            self.deviations[self._positions[rows]] = self._of_span(seen, item, rows).cpu()
        return True

    def _of_span(self, seen: LayerView, item: LoadedSpan, rows: torch.Tensor) -> torch.Tensor:
        k, cached = item.kv.decoded()
        rotation = self._source.rotations[seen.layer]
        if self._of_keys:
            cached = k if rotation is None else rotation.rotate(k, item.moved)
        device = self._source.subset.device
        fresh = (seen.k if self._of_keys else seen.v)[rows.to(device)].transpose(0, 1)  # [Hkv, T, D]
        offsets = (self._positions[rows] - item.span.start).to(device)
        return self._source.kernels.kv_deviation(fresh, cached, offsets)
