"""4-bit numbers, two a byte: dimension i in the lower bits, i + D / 2 in the upper."""

import torch


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of 0 to 15, `[..., D]`, as uint8 `[..., D / 2]`."""
    low, high = numbers.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def unpack(pairs: torch.Tensor) -> torch.Tensor:
    """Return what was packed, float32."""
    return torch.cat([pairs & 15, pairs >> 4], dim=-1).float()
