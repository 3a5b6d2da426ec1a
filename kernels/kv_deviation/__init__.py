"""`kv_deviation`: how far freshly computed K or V lies from the cached; what CacheBlend chooses tokens by."""

import torch


def kv_deviation_reference(fresh: torch.Tensor, cached: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """d(t) = ‖fresh(t) − cached(offsets(t))‖², summed over heads and dimensions: the definition, in float32.

    fresh: `[Hkv, T, D]`; cached: `[Hkv, N, D]`, one layer of a chunk; offsets: `[T]` int64, which of the chunk's tokens
    the fresh ones are. Returns `[T]` float32.
    """
    return (fresh.float() - cached[:, offsets].float()).square().sum((0, 2))
