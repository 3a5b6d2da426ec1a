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
from ragkv.store.codecs import restored
from ragkv.store.record import LayerKV

DAMPING = 8  # tokens: a mean over few tokens is noise
MAX_RATIO = 2.0  # no token is shifted more than so many times as far as the recomputed ones


class MeanShift:
    """The shifts of one pass's spans, layer by layer. positions: `[T]`, of the pass's tokens."""

    def __init__(self, positions: torch.Tensor, device: torch.device) -> None:
        self._positions, self._device = positions, device
        self._span_to_offsets: dict[Span, torch.Tensor] = {}  # of the tokens in the pass, in the span
        self._recomputed: dict[tuple[tuple[Span, int], ...], Recomputed] = {}  # the same in most layers

    def shifts(
        self, loaded: Sequence[LoadedSpan], k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> list[KVShift | None]:
        """Return each span's shift, None where no token of it is in the pass. k, v: `[T, Hkv, D]`, as just computed."""
        shifted = [item for item in loaded if len(self._offsets(item.span))]
        if not shifted:
            return [None] * len(loaded)
        which = tuple((item.span, item.kv.base_position) for item in shifted)
        if (tokens := self._recomputed.get(which)) is None:
            tokens = self._recomputed[which] = self._find(which)
        fresh_k, fresh_v = (x[tokens.rows].transpose(0, 1) for x in (k, v))
        cached_k, cached_v = tokens.cached([item.kv for item in shifted])
        if rotation is not None:
            fresh_k, cached_k = tokens.turned_back(fresh_k, cached_k, rotation)
        means = mean_shifts(fresh_k, fresh_v, cached_k, cached_v, tokens.averaging)
        weights = shift_weights(torch.cat([_v_std(item.kv) for item in shifted]), tokens)
        found = {
            item.span: KVShift(*mean, weight, item.span.start)
            for item, mean, weight in zip(shifted, means, torch.split(weights, tokens.lengths), strict=True)
        }
        return [found.get(item.span) for item in loaded]

    def _offsets(self, span: Span) -> torch.Tensor:
        if span not in self._span_to_offsets:
            self._span_to_offsets[span] = self._positions[rows_in(self._positions, span)] - span.start
        return self._span_to_offsets[span]

    def _find(self, which: Sequence[tuple[Span, int]]) -> "Recomputed":
        spans = [span for span, _ in which]
        rows = torch.cat([rows_in(self._positions, span) for span in spans])
        then = torch.cat([base + self._offsets(span) for span, base in which])
        lengths, offsets = [span.end - span.start for span in spans], list(map(self._offsets, spans))
        return Recomputed(lengths, offsets, self._device, rows, torch.cat([self._positions[rows], then]))


class Recomputed:
    """The tokens of some chunks that a pass computes: `c` of the `n` that the chunks have.

    lengths: how many tokens each chunk has. offsets: of each chunk's computed tokens, in it, at least one. rows: `[c]`,
    where they are in the pass. positions: `[2 c]`, of all computed tokens in the prompt, then of all where they were
    precomputed.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        offsets: Sequence[torch.Tensor],
        device: torch.device,
        rows: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        self.lengths = list(lengths)
        counts = torch.tensor([len(each) for each in offsets])
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        places = torch.cat([start + each for start, each in zip(starts, offsets, strict=True)])
        chunks = torch.arange(len(lengths)).repeat_interleave(torch.tensor(self.lengths))
        self._offsets = [each.to(device) for each in offsets]
        self.averaging = averaging(counts.tolist()).to(device)
        self.places, self.chunk_of, self.certainty = (
            x.to(device) for x in (places, chunks, counts / (counts + DAMPING))
        )
        self._chunk_of_place = self.chunk_of[self.places]
        self.rows = places if rows is None else rows.to(device)
        self._back = None if positions is None else -positions.to(device)
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layers share their rotations

    def cached(self, chunks: Sequence[LayerKV]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the computed tokens as they are stored, `[Hkv, c, D]` each."""
        if self.places.device.type == "cuda" and _are_alike(
            chunks
        ):  # copies it all sooner than it launches more kernels
            return self.cached_at_once(chunks)
        each = [kv.decoded(offsets) for kv, offsets in zip(chunks, self._offsets, strict=True)]
        k, v = (torch.cat(parts, dim=1) for parts in zip(*each, strict=True))
        return k, v

    def cached_at_once(self, chunks: Sequence[LayerKV]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same, of chunks that are alike, in a number of operations that doesn't grow with the chunks'."""
        k = torch.cat([kv.k for kv in chunks], dim=1)[:, self.places]
        v = torch.cat([kv.v for kv in chunks], dim=1)[:, self.places]
        k_scales = [kv.k_scale for kv in chunks if kv.k_scale is not None]
        v_scales = [kv.v_scale for kv in chunks if kv.v_scale is not None]
        if not k_scales:
            return k, v
        k_scale = torch.cat(k_scales, dim=1)[:, self._chunk_of_place]
        return restored(k, k_scale, None), restored(v, torch.cat(v_scales, dim=1)[:, self.places], None)

    def turned_back(
        self, fresh: torch.Tensor, cached: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys `[Hkv, c, D]`, as computed and as stored, rotated back to position 0, in float32."""
        assert self._back is not None
        if id(rotation) not in self._angles:
            self._angles[id(rotation)] = rotation.angles(self._back)
        both = torch.cat([fresh.float(), cached.float()], dim=1)
        first, second = rotation.turn(both, *self._angles[id(rotation)]).chunk(2, dim=1)
        return first, second


def _are_alike(chunks: Sequence[LayerKV]) -> bool:
    """Return whether all have the same codec, one of those of which torch can take rows, and no difference."""
    dtypes = {kv.k.dtype for kv in chunks}
    plain = all(kv.k_low is None and kv.difference is None for kv in chunks)
    return plain and len(dtypes) == 1 and torch.float8_e4m3fn not in dtypes


def _v_std(kv: LayerKV) -> torch.Tensor:
    """Return `v_std`, or the same for all tokens where it isn't known."""
    return torch.ones(kv.shape[1], device=kv.k.device) if kv.v_std is None else kv.v_std


def shift_weights(v_std: torch.Tensor, tokens: Recomputed) -> torch.Tensor:
    """Return w(t) = c / (c + DAMPING) · min(MAX_RATIO, v_std(t) / mean_S v_std) of all the chunks' tokens, `[n]`.

    v_std: `[n]`, the standard deviation of each token's V over contexts, where it isn't known 1. c is how many tokens
    are in S, the computed ones of token t's chunk. Policies choose tokens that vary much; without the last factor the
    others would be shifted as far as those.
    """
    means = (tokens.averaging @ v_std[tokens.places]).clamp(min=1e-30)  # nothing is divided by 0
    return tokens.certainty[tokens.chunk_of] * (v_std / means[tokens.chunk_of]).clamp(max=MAX_RATIO)


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
    changes = torch.cat([fresh_k.float() - cached_k, fresh_v.float() - cached_v])  # [2 Hkv, c, D]
    means = (averaging @ changes).transpose(0, 1).contiguous()  # [chunks, 2 Hkv, D]
    k, v = means.chunk(2, dim=1)
    return list(zip(k, v, strict=True))
