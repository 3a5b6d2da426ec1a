"""`selective_attention` in one launch."""

import torch
import triton
import triton.language as tl

from ragkv.kernels.operands import AttentionSpec, PagedKV
from ragkv.kernels.query_scores.triton_kernel import masked_scores, tiles


def selective_attention(q: torch.Tensor, positions: torch.Tensor, kv: PagedKV, spec: AttentionSpec) -> torch.Tensor:
    """Compute `selective_attention_reference`, in q's type. Doesn't wait for the device."""
    num_queries, num_heads, head_size = q.shape
    num_kv_heads = kv.k.shape[2]
    group = num_heads // num_kv_heads
    q, positions, block_table = q.contiguous(), positions.contiguous(), kv.block_table.contiguous()
    out = torch.empty_like(q)
    sizes = tiles(head_size, q.dtype)
    sizes["BLOCK_M"] = max(sizes["BLOCK_M"], triton.next_power_of_2(group))
    _selective_attention[(triton.cdiv(num_queries, sizes["BLOCK_M"] // group), num_kv_heads)](
        q,
        positions,
        kv.k,
        kv.v,
        block_table,
        None if spec.sinks is None else spec.sinks.contiguous(),
        out,
        num_queries,
        kv.block_size,
        spec.scale,
        spec.soft_cap,
        *kv.k.stride(),
        *kv.v.stride(),
        GROUP=group,
        HEAD_SIZE=head_size,
        WINDOW=spec.sliding_window or 0,
        CAPPED=bool(spec.soft_cap),
        **sizes,
    )
    return out


@triton.jit(do_not_specialize=["num_queries", "block_size"])
def _selective_attention(
    q,
    positions,
    key_cache,
    value_cache,
    block_table,
    sinks,
    out,
    num_queries,
    block_size,
    scale,
    soft_cap,
    key_block,
    key_row,
    key_head,
    key_number,
    value_block,
    value_row,
    value_head,
    value_number,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute a tile of queries for all heads of one KV head, in (query, member of the group) rows: K and V are read
    once for all of them."""
    per_tile: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # the longest first
    row = tl.arange(0, BLOCK_M)
    query, head = tile * per_tile + row // GROUP, kv_head * GROUP + row % GROUP
    valid = (row < per_tile * GROUP) & (query < num_queries)
    d = tl.arange(0, BLOCK_D)
    at = (query * (tl.num_programs(1) * GROUP) + head)[:, None] * HEAD_SIZE + d[None, :]
    inside = valid[:, None] & (d < HEAD_SIZE)[None, :]
    x = tl.load(q + at, mask=inside, other=0.0)
    position = tl.load(positions + query, mask=valid, other=-1).to(tl.int32)
    end, first = tl.max(position, 0) + 1, 0
    if WINDOW:
        first = tl.maximum(tl.load(positions + tile * per_tile).to(tl.int32) - WINDOW + 1, 0)

    if sinks is None:
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    else:
        top = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for begin in range(first, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        block = tl.load(block_table + n // block_size, mask=n < end, other=0)
        line = n % block_size
        filled = (n < end)[:, None] & (d < HEAD_SIZE)[None, :]
        keys = (block * key_block + line.to(tl.int64) * key_row + kv_head * key_head)[:, None]
        k = tl.load(key_cache + keys + (d * key_number)[None, :], mask=filled, other=0.0)
        scores = masked_scores(x, position, k, n, scale, soft_cap, WINDOW, CAPPED)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        faded = tl.exp(top - new_top)
        total = total * faded + tl.sum(weights, 1)
        values = (block * value_block + line.to(tl.int64) * value_row + kv_head * value_head)[:, None]
        v = tl.load(value_cache + values + (d * value_number)[None, :], mask=filled, other=0.0)
        sums = sums * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        top = new_top
    result = sums / tl.where(valid, total, 1.0)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
