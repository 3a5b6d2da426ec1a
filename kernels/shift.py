"""Carries what the recomputed tokens of a chunk teach over to the chunk's other tokens."""

from collections.abc import Sequence

import torch

DAMPING = 8  # tokens: a mean over few tokens is noise
MAX_RATIO = 2.0  # no token moves more than so many times as far as the recomputed ones did


def shift_weights(v_std: torch.Tensor | None, offsets: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """w(t) = c / (c + DAMPING) · min(MAX_RATIO, v_std(t) / mean_S v_std), `[T]` float32 on offsets' device.

    v_std: `[T]`, how much each token's KV varies with its context, None where that isn't known: then the last factor
    is 1. offsets: `[c]`, the recomputed tokens S in the chunk. Policies choose tokens that vary much; without the last
    factor the others would move as far as those.
    """
    weight = len(offsets) / (len(offsets) + DAMPING)
    if v_std is None:
        return torch.full((num_tokens,), weight, device=offsets.device)
    v_std = v_std.to(offsets.device)
    mean = torch.maximum(v_std[offsets].mean(), 1e-6 * v_std.max() + 1e-30)
    return weight * (v_std / mean).clamp(max=MAX_RATIO)


def averaging(counts: Sequence[int]) -> torch.Tensor:
    """The matrix `[chunks, c]` that takes the mean of each chunk's tokens, `counts` of them, at least one."""
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
    """For each chunk, k = mean_S [R(−s) K_new(s) − R(−s') K(s)] and v = mean_S [V_new(s) − V(s)] over its recomputed
    tokens S; then K'(t) = K(t) + w(t) R(t) k and V'(t) = V(t) + w(t) v for its other tokens t (`kernels/kv_fuse`).

    All `[Hkv, c, D]`, the recomputed tokens of all chunks one after the other: as just computed, and as cached; keys
    rotated back to position 0. averaging: `[chunks, c]` (`averaging`). Returns `[Hkv, D]` float32 twice for each chunk.
    """
    means = [averaging @ (fresh.float() - cached) for fresh, cached in ((fresh_k, cached_k), (fresh_v, cached_v))]
    k, v = (mean.transpose(0, 1).contiguous() for mean in means)  # [chunks, Hkv, D]
    return list(zip(k, v, strict=True))
