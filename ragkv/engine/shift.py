"""KV shift: moves a loaded chunk's KV by the mean change of those of its tokens that a pass computes anew.

`ragkv.kernels.kv_fuse` applies it.
"""

from collections.abc import Sequence

import torch

from ragkv.engine.loader import KVLoader, LoadedSpan
from ragkv.engine.positions import rows_in
from ragkv.engine.task import Span
from ragkv.kernels.kv_fuse import KVShift
from ragkv.kernels.operands import PagedKV, Rotation
from ragkv.store.record import LayerKV

DAMPING = 8  # tokens: a mean over few tokens is noise
MAX_RATIO = 2.0  # no token is shifted more than so many times as far as the recomputed ones


class MeanShift:
    """The shifts of one pass's spans, layer by layer. positions: `[T]`, of the pass's tokens."""

    def __init__(self, loader: KVLoader, positions: torch.Tensor) -> None:
        self._loader, self._positions, self._device = loader, positions, loader.forward.device
        self._span_to_offsets: dict[Span, torch.Tensor] = {}  # of the tokens in the pass, in the span
        self._recomputed: dict[tuple[Span, ...], Recomputed] = {}  # the same in most layers

    def shifts(
        self, loaded: Sequence[LoadedSpan], k: torch.Tensor, v: torch.Tensor, rotation: Rotation | None
    ) -> list[KVShift | None]:
        """Return each span's shift, None where no token of it is in the pass. k, v: `[T, Hkv, D]`, as just computed."""
        shifted = [item for item in loaded if len(self._offsets(item.span))]
        if not shifted:
            return [None] * len(loaded)
        spans = tuple(item.span for item in shifted)
        if (tokens := self._recomputed.get(spans)) is None:
            tokens = self._recomputed[spans] = self._find(spans)
        means = mean_shifts(self._changes(shifted, tokens, k, v, rotation), tokens.averaging)
        weights = shift_weights(torch.cat([_v_std(item.kv) for item in shifted]), tokens)
        found = {
            item.span: KVShift(*mean, weight, item.span.start)
            for item, mean, weight in zip(shifted, means, torch.split(weights, tokens.lengths), strict=True)
        }
        return [found.get(item.span) for item in loaded]

    def _changes(
        self,
        chunks: Sequence[LoadedSpan],
        tokens: "Recomputed",
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Return how far K and V of the computed tokens are from the stored, keys rotated back to position 0,
        `[2, Hkv, c, D]` float32. The stored are written behind each other by the kernel that fuses."""
        heads, _, size = chunks[0].kv.shape
        changes = torch.empty((2, heads, len(tokens.rows), size), device=self._device)
        in_order = PagedKV(changes[0].transpose(0, 1)[None], changes[1].transpose(0, 1)[None], tokens.rows[:0])
        staged = [item.staged(slots, item.distance) for item, slots in zip(chunks, tokens.slots, strict=True)]
        self._loader.write(staged, rotation, in_order)
        for fresh, change in zip((k, v), changes, strict=True):
            torch.sub(fresh[tokens.rows].transpose(0, 1), change, out=change)
        if rotation is not None:
            changes[0] = rotation.turn(changes[0], *tokens.angles_back(rotation))
        return changes

    def _offsets(self, span: Span) -> torch.Tensor:
        if span not in self._span_to_offsets:
            self._span_to_offsets[span] = self._positions[rows_in(self._positions, span)] - span.start
        return self._span_to_offsets[span]

    def _find(self, spans: Sequence[Span]) -> "Recomputed":
        rows = torch.cat([rows_in(self._positions, span) for span in spans])
        lengths, offsets = [span.end - span.start for span in spans], list(map(self._offsets, spans))
        return Recomputed(lengths, offsets, self._device, rows, self._positions[rows])


class Recomputed:
    """The tokens of some chunks that a pass computes: `c` of the `n` that the chunks have.

    lengths: how many tokens each chunk has. offsets: of each chunk's computed tokens, in it, at least one. rows: `[c]`,
    in the pass. positions: `[c]`, in the prompt. slots: of each chunk's tokens `[T]`, their numbers among the `c`,
    -1 of those that aren't computed.
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
        ends = counts.cumsum(0).tolist()
        self.slots = [
            torch.full((length,), -1).index_copy_(0, each, torch.arange(end - len(each), end)).to(device)
            for length, each, end in zip(lengths, offsets, ends, strict=True)
        ]
        self.averaging = averaging(counts.tolist()).to(device)
        self.places, self.chunk_of, self.certainty = (
            x.to(device) for x in (places, chunks, counts / (counts + DAMPING))
        )
        self.rows = places if rows is None else rows.to(device)
        self._back = None if positions is None else -positions.to(device)
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layers share their rotations

    def angles_back(self, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the angles by which keys of the computed tokens are rotated back to position 0."""
        assert self._back is not None
        if id(rotation) not in self._angles:
            self._angles[id(rotation)] = rotation.angles(self._back)
        return self._angles[id(rotation)]


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


def mean_shifts(changes: torch.Tensor, averaging: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each chunk's k = mean_S R(−s) [K_new(s) − K(s)] and v = mean_S [V_new(s) − V(s)] over its recomputed
    tokens S, `[Hkv, D]` float32; s is a token's position in the prompt, to which its stored key is rotated.

    Then K'(t) = K(t) + w(t) R(t) k and V'(t) = V(t) + w(t) v for the chunk's other tokens t. changes: `[2, Hkv, c, D]`
    float32, what the means are taken of, of K and V of the recomputed tokens of all chunks, concatenated. averaging:
    `[chunks, c]` (`averaging`).
    """
    means = (averaging @ changes).permute(2, 0, 1, 3).contiguous()  # [chunks, 2, Hkv, D]
    return [(k, v) for k, v in means]
