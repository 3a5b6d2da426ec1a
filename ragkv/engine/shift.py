"""Moves a loaded chunk's KV by the mean shift of its tokens that a pass computes anew (`ragkv.kernels.shift`)."""

from collections.abc import Sequence

import torch

from ragkv.engine.loader import LoadedSpan
from ragkv.engine.positions import rows_in
from ragkv.engine.task import Span
from ragkv.kernels.kv_fuse import KVShift
from ragkv.kernels.rotation import Rotation
from ragkv.kernels.shift import averaging, mean_shifts, shift_weights


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
