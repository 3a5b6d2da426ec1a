"""`kv_deviation` in one launch, cached tokens read in place."""

import torch
import triton
import triton.language as tl

_BLOCK_T = 4  # tokens of a program: a few hundred are compared, and they should occupy all of a GPU


def kv_deviation(fresh: torch.Tensor, cached: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute `kv_deviation_reference`."""
    fresh, cached = (x if x.stride(2) == 1 else x.contiguous() for x in (fresh, cached))
    num_heads, num_tokens, head_size = fresh.shape
    deviations = torch.empty(num_tokens, dtype=torch.float32, device=fresh.device)
    if num_tokens:
        _kv_deviation[(triton.cdiv(num_tokens, _BLOCK_T),)](
            fresh,
            cached,
            offsets.contiguous(),
            deviations,
            num_tokens,
            num_heads,
            *fresh.stride()[:2],
            *cached.stride()[:2],
            HEAD_SIZE=head_size,
            BLOCK_T=_BLOCK_T,
            BLOCK_D=triton.next_power_of_2(head_size),
        )
    return deviations


@triton.jit(do_not_specialize=["num_tokens", "num_heads"])
def _kv_deviation(
    fresh,
    cached,
    offsets,
    deviations,
    num_tokens,
    num_heads,
    fresh_head,
    fresh_token,
    cached_head,
    cached_token,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    valid = t < num_tokens
    inside = valid[:, None] & (d < HEAD_SIZE)[None, :]
    offset = tl.load(offsets + t, mask=valid, other=0)
    new = fresh + (t.to(tl.int64) * fresh_token)[:, None] + d[None, :]
    old = cached + (offset * cached_token)[:, None] + d[None, :]
    total = tl.zeros([BLOCK_T], tl.float32)
    for _ in range(num_heads):
        x = tl.load(new, mask=inside, other=0.0).to(tl.float32)
        x -= tl.load(old, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1)
        new += fresh_head
        old += cached_head
    tl.store(deviations + t, total, mask=valid)
