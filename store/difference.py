"""What a chunk's KV directly after the anchor differs by from its mean KV, for the tokens where it differs most.

It takes the place of a second record: a chunk that comes first in a prompt needs the KV after the anchor alone, and
its mean in that place costs two to three times the drift (docs/decisions/0027). Half of the tokens' KV, counted in each
layer, hardly depends on what stands before, and of the rest 4 bits are enough.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

SHARE = 0.45  # of the tokens, counted in each layer
_LARGEST = 7  # of a 4-bit number, which are -7 to 7
_TINY = torch.finfo(torch.float16).tiny

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """What is added to K and V of `n` tokens in one layer: numbers times their token's scale.

    tokens: `[n]` int32, sorted. k, v: `[Hkv, n, D / 2]` uint8, two numbers each, dimension i below dimension i + D / 2,
    each 8 more than it is. k_scale, v_scale: `[Hkv, n, 1]` float16.
    """

    tokens: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the order in which a record has them."""
        return self.tokens, self.k_scale, self.v_scale, self.k, self.v

    def added_to(self, k: torch.Tensor, v: torch.Tensor) -> KV:
        """Return K and V `[Hkv, T, D]` with the difference, float32."""
        k_change, v_change = _unpacked(self.k, self.k_scale), _unpacked(self.v, self.v_scale)
        return k.float().index_add(1, self.tokens, k_change), v.float().index_add(1, self.tokens, v_change)


def num_bytes(shape: tuple[int, int, int], num_tokens: int) -> int:
    """Return the bytes of a difference for so many tokens. shape: of K and V, `[Hkv, T, D]`."""
    heads, _, size = shape
    return num_tokens * (4 + 2 * heads * (2 + size // 2))


def split(payload: memoryview, shape: tuple[int, int, int], num_tokens: int) -> Difference:
    """Return what `Difference.parts` became as bytes, one behind another; shares their memory."""
    heads, _, size = shape
    parts, start = [], 0
    scales, numbers = (heads, num_tokens, 1), (heads, num_tokens, size // 2)
    types = (torch.int32, torch.float16, torch.float16, torch.uint8, torch.uint8)
    for part_shape, dtype in zip(((num_tokens,), scales, scales, numbers, numbers), types, strict=True):
        count = int(torch.Size(part_shape).numel())
        parts.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=start).view(part_shape))
        start += parts[-1].nbytes
    return Difference(*parts)


def differences(alone: Iterable[KV], mean: Iterable[KV], share: float = SHARE) -> list[Difference | None]:
    """Return each layer's difference of `alone` from `mean`, layers of K and V `[Hkv, T, D]` at the same positions.

    Of all layers' tokens the `share` is kept that differs most, measured by how much K, and V, vary among the layer's
    tokens. None where no token of a layer is kept.
    """
    changes = [
        (k.float() - mean_k.float(), v.float() - mean_v.float(), k.float(), v.float())
        for (k, v), (mean_k, mean_v) in zip(alone, mean, strict=True)
    ]
    weights = torch.stack(
        [
            _relative(k_change, k - k.mean(1, keepdim=True)) + _relative(v_change, v)
            for k_change, v_change, k, v in changes
        ]
    )
    num_kept = round(share * weights.numel())
    kept = torch.zeros(weights.numel(), dtype=torch.bool)
    kept[weights.flatten().topk(num_kept).indices] = True
    return [
        _packed(row.nonzero().flatten(), k_change, v_change) if bool(row.any()) else None
        for row, (k_change, v_change, _, _) in zip(kept.view(weights.shape), changes, strict=True)
    ]


def _relative(change: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return each token's squared change over the mean square of a token of x, `[T]`."""
    return change.square().sum((0, 2)) / x.square().sum((0, 2)).mean().clamp(min=1e-30)


def _packed(tokens: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Difference:
    (k_scale, k), (v_scale, v) = (_quantised(x[:, tokens]) for x in (k, v))
    return Difference(tokens.int(), k_scale, v_scale, k, v)


def _quantised(x: torch.Tensor) -> KV:
    scale = (x.abs().amax(2, keepdim=True) / _LARGEST).clamp(min=_TINY, max=torch.finfo(torch.float16).max).half()
    low, high = ((x / scale.float()).round().clamp(-_LARGEST, _LARGEST) + 8).to(torch.uint8).chunk(2, dim=2)
    return scale, low | high << 4


def _unpacked(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (torch.cat([numbers & 15, numbers >> 4], dim=2).float() - 8) * scale.float()
