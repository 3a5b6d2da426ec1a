"""KV shift: moves a loaded chunk's KV by the mean change of those of its tokens that a pass computes anew.

`ragkv.kernels.kv_fuse` applies it.
"""

from collections.abc import Sequence

import torch

from ragkv.engine.loader import LoadedSpan
from ragkv.engine.positions import rows_in
from ragkv.engine.task import Span
from ragkv.kernels.kv_fuse import KVShift
from ragkv.kernels.operands import Rotation

DAMPING = 8  # tokens: a mean over few tokens is noise
MAX_RATIO = 2.0  # no token is shifted more than so many times as far as the recomputed ones


class MeanShift:
    """The shifts of one pass's spans, layer by layer. positions: `[T]`, of the pass's tokens."""

    def __init__(self, positions: torch.Tensor, device: torch.device) -> None:
        self._positions, self._device = positions, device
        self._on_device = positions.to(device)
        self._span_to_rows: dict[Span, tuple[torch.Tensor, torch.Tensor]] = {}
        self._averaging: torch.Tensor | None = None  # the same in all layers

    def shifts(
        self, loaded: Sequence[LoadedSpan], k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> list[KVShift | None]:
        """Return each span's shift, None where no token of it is in the pass. k, v: `[T, Hkv, D]`, as just computed."""
        with_rows = [(item, *self._rows(item.span)) for item in loaded]
        shifted = [(item, rows, offsets) for item, rows, offsets in with_rows if len(rows)]
        if not shifted:
            return [None] * len(loaded)
        rows = torch.cat([rows for _, rows, _ in shifted])
        fresh_k, fresh_v = k[rows].transpose(0, 1).float(), v[rows].transpose(0, 1)
        cached = [item.kv.decoded(offsets) for item, _, offsets in shifted]
        cached_k, cached_v = (torch.cat(parts, dim=1) for parts in zip(*cached, strict=True))
        if rotation is not None:
            fresh_k = rotation.rotate(fresh_k, -self._on_device[rows])
            positions = torch.cat([item.kv.base_position + offsets for item, _, offsets in shifted])
            cached_k = rotation.rotate(cached_k.float(), -positions)
        if self._averaging is None:
            self._averaging = averaging([len(rows) for _, rows, _ in shifted]).to(self._device)
        means = iter(mean_shifts(fresh_k, fresh_v, cached_k, cached_v, self._averaging))
        return [_weighted(item, offsets, *next(means)) if len(rows) else None for item, rows, offsets in with_rows]

    def _rows(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the pass's tokens lie in the span, and their offsets in it."""
        if span not in self._span_to_rows:
            inside = rows_in(self._positions, span)
            offsets = self._positions[inside] - span.start
            self._span_to_rows[span] = inside.to(self._device), offsets.to(self._device)
        return self._span_to_rows[span]


def _weighted(item: LoadedSpan, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> KVShift:
    span = item.span
    return KVShift(k, v, shift_weights(item.kv.v_std, offsets, span.end - span.start), span.start)


def shift_weights(v_std: torch.Tensor | None, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return w(t) = c / (c + DAMPING) · min(MAX_RATIO, v_std(t) / mean_S v_std), `[T]` float32 on offsets' device.

    v_std: `[T]`, the standard deviation of each token's V over contexts, None where it isn't known: then the last
    factor is 1. offsets: `[c]`, of the recomputed tokens S in the chunk. Policies choose tokens that vary much; without
    the last factor the others would be shifted as far as those.
    """
    weight = len(offsets) / (len(offsets) + DAMPING)
    if v_std is None:
        return torch.full((num_tokens,), weight, device=offsets.device)
    v_std = v_std.to(offsets.device)
    mean = torch.maximum(v_std[offsets].mean(), 1e-6 * v_std.max() + 1e-30)
    return weight * (v_std / mean).clamp(max=MAX_RATIO)


def averaging(counts: Sequence[int]) -> torch.Tensor:
    """Return the matrix `[chunks, c]` that takes the mean over each chunk's tokens; counts: how many, at least one."""
    of_token = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    matrix = (of_token == torch.arange(len(counts))[:, None]).float()
    return matrix / matrix.sum(1, keepdim=True)


def mean_shifts(
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    cached_k: torch.Tensor,
    cached_v: torch.Tensor,
    averaging: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each chunk's k = mean_S [R(−s) K_new(s) − R(−s') K(s)] and v = mean_S [V_new(s) − V(s)] over its
    recomputed tokens S, `[Hkv, D]` float32; s is a token's position in the prompt, s' where it was precomputed.

    Then K'(t) = K(t) + w(t) R(t) k and V'(t) = V(t) + w(t) v for the chunk's other tokens t. Arguments: `[Hkv, c, D]`,
    the recomputed tokens of all chunks, concatenated, as just computed and as cached, keys rotated back to position 0.
    averaging: `[chunks, c]` (`averaging`).
    """
    means = [averaging @ (fresh.float() - cached) for fresh, cached in ((fresh_k, cached_k), (fresh_v, cached_v))]
    k, v = (mean.transpose(0, 1).contiguous() for mean in means)  # [chunks, Hkv, D]
    return list(zip(k, v, strict=True))
