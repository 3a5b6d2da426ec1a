"""KV shift: applies the mean change of a chunk's recomputed tokens to the chunk's other tokens (`kernels/kv_fuse`)."""

from collections.abc import Sequence

import torch

DAMPING = 8  # tokens: a mean over few tokens is noise
MAX_RATIO = 2.0  # no token is shifted more than so many times as far as the recomputed ones


def shift_weights(v_std: torch.Tensor | None, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return w(t) = c / (c + DAMPING) · min(MAX_RATIO, v_std(t) / mean_S v_std), `[T]` float32 on offsets' device.

    v_std: `[T]`, the standard deviation of each token's V over contexts, None where it isn't known: then the last
    factor is 1. offsets: `[c]`, of the recomputed tokens S in the chunk. Policies choose tokens that vary much; without
    the last factor the others would be shifted as far as those.
    """
    weight = len(offsets) / (len(offsets) + DAMPING)
    if v_std is None:
        return torch.full((num_tokens,), weight, device=offsets.device)
    v_std = v_std.to(offsets.device)
    mean = torch.maximum(v_std[offsets].mean(), 1e-6 * v_std.max() + 1e-30)
    return weight * (v_std / mean).clamp(max=MAX_RATIO)


def averaging(counts: Sequence[int]) -> torch.Tensor:
    """Return the matrix `[chunks, c]` that takes the mean over each chunk's tokens; counts: how many, at least one."""
    of_token = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    matrix = (of_token == torch.arange(len(counts))[:, None]).float()
    return matrix / matrix.sum(1, keepdim=True)


def mean_shifts(
    fresh_k: torch.Tensor,
    fresh_v: torch.Tensor,
    cached_k: torch.Tensor,
    cached_v: torch.Tensor,
    averaging: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each chunk's k = mean_S [R(−s) K_new(s) − R(−s') K(s)] and v = mean_S [V_new(s) − V(s)] over its
    recomputed tokens S, `[Hkv, D]` float32; s is a token's position in the prompt, s' where it was precomputed.

    Then K'(t) = K(t) + w(t) R(t) k and V'(t) = V(t) + w(t) v for the chunk's other tokens t. Arguments: `[Hkv, c, D]`,
    the recomputed tokens of all chunks, concatenated, as just computed and as cached, keys rotated back to position 0.
    averaging: `[chunks, c]` (`averaging`).
    """
    means = [averaging @ (fresh.float() - cached) for fresh, cached in ((fresh_k, cached_k), (fresh_v, cached_v))]
    k, v = (mean.transpose(0, 1).contiguous() for mean in means)  # [chunks, Hkv, D]
    return list(zip(k, v, strict=True))
