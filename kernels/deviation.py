"""How far freshly computed K or V lies from the cached: what CacheBlend chooses tokens by."""

import torch


def deviation(fresh: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """‖fresh − cached‖² for each token, summed over heads and dimensions. `[Hkv, T, D]` each; returns `[T]` float32."""
    return (fresh.float() - cached.float()).square().sum((0, 2))
