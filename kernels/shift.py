"""Carries what the recomputed tokens of a chunk teach over to the chunk's other tokens."""

import torch

from ragkv.kernels.kv_fuse import Learned
from ragkv.kernels.rotation import Rotation

DAMPING = 8  # tokens: a mean over few tokens is noise
MAX_RATIO = 2.0  # no token moves more than so many times as far as the recomputed ones did


def shift_weights(spread: torch.Tensor | None, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """w(t) = c / (c + DAMPING) · min(MAX_RATIO, spread(t) / mean_S spread), `[T]` float32 on offsets' device.

    spread: `[T]`, how much each token's KV varies with its context, None where that isn't known: then the last factor
    is 1. offsets: `[c]`, the recomputed tokens S in the chunk. Policies choose tokens that vary much; without the last
    factor the others would move as far as those.
    """
    weight = len(offsets) / (len(offsets) + DAMPING)
    if spread is None:
        return torch.full((num_tokens,), weight, device=offsets.device)
    spread = spread.to(offsets.device)
    mean = torch.maximum(spread[offsets].mean(), 1e-6 * spread.max() + 1e-30)
    return weight * (spread / mean).clamp(max=MAX_RATIO)


def learn(
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    cached_k: torch.Tensor,
    cached_v: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    start: int,
    rotation: Rotation | None,
) -> Learned:
    """k = mean_S [R(−s) K_new(s) − R(−s') K(s)], v = mean_S [V_new(s) − V(s)] over the recomputed tokens S of a chunk;
    then K'(t) = K(t) + w(t) R(t) k and V'(t) = V(t) + w(t) v for its tokens t (`ragkv.kernels.kv_fuse`).

    fresh_k: `[Hkv, c, D]`, as just computed, rotated back to position 0; cached_k: as it was stored, for `positions`
    `[c]`; fresh_v, cached_v: `[Hkv, c, D]`. weights: `[T]`, of all tokens of the chunk, which begins at `start`.
    Computes in float32.
    """
    cached_k = cached_k.float()
    if rotation is not None:
        cached_k = rotation.rotate(cached_k, -positions)
    mean_k, mean_v = ((fresh.float() - cached).mean(1) for fresh, cached in ((fresh_k, cached_k), (fresh_v, cached_v)))
    return Learned(mean_k, mean_v, weights, start)
