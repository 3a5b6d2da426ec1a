"""What a chunk's KV directly after the anchor differs by from its mean KV, for the tokens where it differs most.

It takes the place of a second record: a chunk that comes first in a prompt needs the KV after the anchor alone, and
its mean in that place costs two to three times the drift (docs/decisions/0027). The KV of some tokens, more of them in
the first layers, hardly depends on what stands before, and of the rest 4 bits are enough.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ragkv.kernels.kv_fuse import Addend

FLOOR = 0.02  # of the energy of K and V: what differs by less is left out
_LARGEST = 7  # of a 4-bit number, which are -7 to 7

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """What is added to K and V of `n` tokens in one layer: numbers times their token's scale.

    tokens: `[n]` int32, sorted. scale: `[2, Hkv, n, 1]` float16, of K, then of V. numbers: `[2, Hkv, n, D / 2]` uint8,
    two numbers each, dimension i in the lower bits and dimension i + D / 2 in the upper, each 8 more than it is.
    """

    tokens: torch.Tensor
    scale: torch.Tensor
    numbers: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order in which a record has them."""
        return self.tokens, self.scale, self.numbers

    def addend(self, num_tokens: int) -> Addend:
        """Return it as the kernels want it. num_tokens: of the chunk."""
        rows = torch.full((num_tokens,), -1, dtype=torch.int32, device=self.tokens.device)
        rows[self.tokens] = torch.arange(len(self.tokens), dtype=torch.int32, device=self.tokens.device)
        return Addend(rows, self.scale, self.numbers)

    def added_to(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Return K and V `[Hkv, T, D]` with the difference, float32."""
        k_change, v_change = self.addend(k.shape[1]).unpacked()
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


def differences(alone: Iterable[KV], mean: Iterable[KV]) -> list[Difference | None]:
    """Return each layer's difference of `alone` from `mean`, layers of K and V `[Hkv, T, D]` at the same positions.

    Kept are the tokens that differ by more than FLOOR: the energy of the difference over that of a layer's tokens, of
    which K's is counted from the mean of all, and the mean of both ratios. None where no token of a layer is kept.
    """
    found: list[Difference | None] = []
    for (k, v), (mean_k, mean_v) in zip(alone, mean, strict=True):
        k, v = k.float(), v.float()
        change = torch.stack([k - mean_k, v - mean_v])
        varying = torch.stack([k - k.mean(1, keepdim=True), v])
        ratio = _energy(change) / _energy(varying).mean(1, keepdim=True).clamp(min=1e-30)
        tokens = (ratio.mean(0) > FLOOR).nonzero().flatten()
        found.append(_quantised(change, tokens) if len(tokens) else None)
    return found


def _energy(x: torch.Tensor) -> torch.Tensor:
    """Return each token's sum of squares in K and in V, `[2, T]`."""
    return x.square().sum((1, 3))


def _quantised(change: torch.Tensor, tokens: torch.Tensor) -> Difference:
    x = change[:, :, tokens]
    limits = torch.finfo(torch.float16)
    scale = (x.abs().amax(3, keepdim=True) / _LARGEST).clamp(min=limits.tiny, max=limits.max).half()
    low, high = ((x / scale.float()).round().clamp(-_LARGEST, _LARGEST) + 8).to(torch.uint8).chunk(2, dim=3)
    return Difference(tokens.int(), scale, low | high << 4)
