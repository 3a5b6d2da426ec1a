"""`kv_deviation`: how far freshly computed K or V is from the cached; CacheBlend chooses tokens by it."""

import torch


def kv_deviation_reference(fresh: torch.Tensor, cached: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return d(t) = ‖fresh(t) − cached(offsets(t))‖², summed over heads and dimensions; `[T]` float32. The definition,
    computed in float32.

    fresh: `[Hkv, T, D]`; cached: `[Hkv, N, D]`, one layer of a chunk; offsets: `[T]` int64, the fresh tokens' offsets
    in the chunk. CacheBlend (Yao et al., 2024) recomputes the tokens with the largest.
    """
    return (fresh.float() - cached[:, offsets].float()).square().sum((0, 2))
