"""Carries what the recomputed tokens of a chunk teach over to the chunk's other tokens."""

import torch

from ragkv.kernels.rotation import Rotation

DAMPING = 8  # tokens: a mean over few tokens is noise


def shifted(
    k: torch.Tensor,
    v: torch.Tensor,
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    offsets: torch.Tensor,
    start: int,
    rotation: Rotation | None,
    part: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K'(t) = R(t) (R(−t) K(t) + w mean_S [R(−s) (K_new(s) − K(s))]) and V'(t) = V(t) + w mean_S [V_new(s) − V(s)].

    w = part · c / (c + DAMPING) for the c tokens in S: undamped, the shift hurts where few tokens speak.

    k, v: `[Hkv, T, D]`, one layer of a cached chunk, its keys at the positions from `start` on. fresh_k, fresh_v:
    `[Hkv, c, D]`, the same layer of the tokens at `offsets` `[c]` in the chunk, as just computed. Returns new tensors;
    what they hold at `offsets` is of no meaning. Computes in float32.
    """
    weight = part * len(offsets) / (len(offsets) + DAMPING)
    mean_v = (fresh_v.float() - v[:, offsets].float()).mean(1, keepdim=True)
    moved_k = fresh_k.float() - k[:, offsets].float()
    if rotation is None:
        shift_k = moved_k.mean(1, keepdim=True)
    else:
        mean_k = rotation.rotate(moved_k, -(start + offsets)).mean(1, keepdim=True)
        shift_k = rotation.rotate(mean_k.expand_as(k), start + torch.arange(k.shape[1], device=k.device))
    return (k.float() + weight * shift_k).to(k.dtype), (v.float() + weight * mean_v).to(v.dtype)
