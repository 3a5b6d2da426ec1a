"""What a chunk's KV directly after the anchor differs by from its mean KV, for the tokens where it differs most.

It takes the place of a second record: a chunk that comes first in a prompt needs the KV after the anchor alone, and
its mean in that place costs two to three times the drift (docs/decisions/0027). The KV of some tokens, more of them in
the first layers, hardly depends on what stands before, and of the rest 4 bits are enough.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ragkv.store.packing import pack, unpack

FLOOR = 0.005  # of the energy of K and V: what differs by less is left out
_LARGEST, _ZERO = 7, 8  # numbers are -7 to 7, and stored 8 more than they are

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """What is added to K and V of `n` tokens in one layer: numbers times their token's scale.

    tokens: `[n]` int32, sorted. scale: `[2, Hkv, n, 1]` float16, of K, then of V. numbers: `[2, Hkv, n, D / 2]` uint8,
    packed (`ragkv.store.packing`), each 8 more than it is.
    """

    tokens: torch.Tensor
    scale: torch.Tensor
    numbers: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order in which a record has them."""
        return self.tokens, self.scale, self.numbers

    def rows(self, num_tokens: int) -> torch.Tensor:
        """Return which of the n is each of the chunk's tokens, `[T]` int32; -1: none."""
        rows = torch.full((num_tokens,), -1, dtype=torch.int32, device=self.tokens.device)
        rows[self.tokens] = torch.arange(len(self.tokens), dtype=torch.int32, device=self.tokens.device)
        return rows

    def added_to(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Return K and V `[Hkv, T, D]` with the difference, float32."""
        k_change, v_change = unpack(self.numbers).sub_(_ZERO).mul_(self.scale.float())
        return k.float().index_add(1, self.tokens, k_change), v.float().index_add(1, self.tokens, v_change)


def num_bytes(shape: tuple[int, int, int], num_tokens: int) -> int:
    """Return the bytes of a difference for so many tokens. shape: of K and V, `[Hkv, T, D]`."""
    heads, _, size = shape
    return num_tokens * (4 + 2 * heads * (2 + size // 2))


def split(payload: memoryview, shape: tuple[int, int, int], num_tokens: int) -> Difference:
    """Return what `Difference.parts` became as bytes, one behind another; shares their memory."""
    heads, _, size = shape
    parts, start = [], 0
    shapes = ((num_tokens,), (2, heads, num_tokens, 1), (2, heads, num_tokens, size // 2))
    for part_shape, dtype in zip(shapes, (torch.int32, torch.float16, torch.uint8), strict=True):
        count = math.prod(part_shape)
        parts.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=start).view(part_shape))
        start += parts[-1].nbytes
    return Difference(*parts)


def differences(alone: Iterable[KV], mean: Iterable[KV], share: float) -> list[Difference | None]:
    """Return each layer's difference of `alone` from `mean`, layers of K and V `[Hkv, T, D]` at the same positions.

    Kept are the tokens that differ by more than FLOOR: the energy of the difference over that of a layer's tokens, of
    which K's is counted from the mean of all, and the mean of both ratios. share: of all layers' tokens at most so many
    are kept, those that differ most. None where no token of a layer is kept.
    """
    changes, ratios = [], []
    for (k, v), (mean_k, mean_v) in zip(alone, mean, strict=True):
        k, v = k.float(), v.float()
        change = torch.stack([k - mean_k, v - mean_v])
        varying = torch.stack([k - k.mean(1, keepdim=True), v])
        changes.append(change)
        ratios.append((_energy(change) / _energy(varying).mean(1, keepdim=True).clamp(min=1e-30)).mean(0))
    ratio = torch.stack(ratios)
    kept = torch.zeros_like(ratio, dtype=torch.bool)
    kept.view(-1)[ratio.flatten().topk(round(share * ratio.numel())).indices] = True
    rows = kept & (ratio > FLOOR)
    return [
        _quantised(change, row.nonzero().flatten()) if bool(row.any()) else None
        for change, row in zip(changes, rows, strict=True)
    ]


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Return each token's sum of squares in K and in V, `[2, T]`."""
    return x.square().sum((1, 3))


def _quantised(change: torch.Tensor, tokens: torch.Tensor) -> Difference:
    x = change[:, :, tokens]
    limits = torch.finfo(torch.float16)
    scale = (x.abs().amax(3, keepdim=True) / _LARGEST).clamp(min=limits.tiny, max=limits.max).half()
    numbers = (x / scale.float()).round().clamp(-_LARGEST, _LARGEST) + _ZERO
    return Difference(tokens.int(), scale, pack(numbers))
