"""Carries what the recomputed tokens of a chunk teach over to the chunk's other tokens."""

import torch

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
    mean = spread[offsets].mean()
    return weight * (spread / mean.clamp(min=1e-6 * float(spread.max()) + 1e-30)).clamp(max=MAX_RATIO)


def shifted(
    k: torch.Tensor,
    v: torch.Tensor,
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor,
    start: int,
    rotation: Rotation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K'(t) = R(t) (R(−t) K(t) + w(t) mean_S [R(−s) (K_new(s) − K(s))]), V'(t) = V(t) + w(t) mean_S [V_new(s) − V(s)].

    k, v: `[Hkv, T, D]`, one layer of a cached chunk, its keys at the positions from `start` on. fresh_k, fresh_v:
    `[Hkv, c, D]`, the same layer of the tokens at `offsets` `[c]` in the chunk, as just computed. weights: `[T]`.
    Returns new tensors; what they hold at `offsets` is of no meaning. Computes in float32.
    """
    mean_v = (fresh_v.float() - v[:, offsets].float()).mean(1, keepdim=True)
    shifted_v = torch.addcmul(v.float(), weights[:, None], mean_v)
    moved_k = fresh_k.float() - k[:, offsets].float()
    shifted_k = k.to(torch.float32, copy=True)
    if rotation is None:
        shifted_k.addcmul_(weights[:, None], moved_k.mean(1, keepdim=True))
    else:
        mean_k = rotation.rotate(moved_k, -(start + offsets)).mean(1, keepdim=True)
        rotation.add_rotated(shifted_k, mean_k, weights, start)
    return shifted_k.to(k.dtype), shifted_v.to(v.dtype)
