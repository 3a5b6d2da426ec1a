"""`query_scores` in two passes over the keys, neither of which holds `[Q, N]` scores."""

import torch
import triton
import triton.language as tl

from ragkv.kernels.operands import AttentionSpec

_SPLIT = 512  # tokens of a program of the first pass: enough programs for a GPU where rows are few


def query_scores(
    q: torch.Tensor, q_positions: torch.Tensor, k: torch.Tensor, k_positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Compute `query_scores_reference`; holds `[Hkv, N]` float32 and 1/512 of what the scores would take."""
    num_kv_heads, num_tokens, head_size = k.shape
    q, q_positions, k_positions = q.contiguous(), q_positions.contiguous(), k_positions.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    num_rows = len(q) * q.shape[1] // num_kv_heads
    splits = triton.cdiv(num_tokens, _SPLIT)
    operands = (q, q_positions, k, k_positions)
    sizes = (num_rows, num_tokens, spec.scale, spec.soft_cap, k.stride(0), k.stride(1))
    options = {
        "GROUP": q.shape[1] // num_kv_heads,
        "HEAD_SIZE": head_size,
        "WINDOW": spec.sliding_window or 0,
        "CAPPED": bool(spec.soft_cap),
        **tiles(head_size, q.dtype),
    }
    parts = torch.empty(splits, num_kv_heads, num_rows, dtype=torch.float32, device=k.device)
    _log_sums[(splits, triton.cdiv(num_rows, options["BLOCK_M"]), num_kv_heads)](
        *operands, parts, *sizes, SPLIT=_SPLIT, **options
    )
    votes = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=k.device)
    _votes[(triton.cdiv(num_tokens, options["BLOCK_N"]), num_kv_heads)](
        *operands, parts, votes, splits, *sizes, **options
    )
    return votes.sum(0)


def tiles(head_size: int, dtype: torch.dtype) -> dict[str, int]:
    """Return rows BLOCK_M, tokens BLOCK_N and dimensions BLOCK_D, powers of 2 for Triton, and launch options: within
    99 KB of shared memory, which every GPU since Ampere has, the next keys' copies in flight."""
    block_d = max(16, 1 << (head_size - 1).bit_length())
    wide = dtype.itemsize > 2
    return {
        "BLOCK_M": 32 if wide else 64,
        "BLOCK_N": max(16, min(64, 16384 // (block_d * dtype.itemsize))),
        "BLOCK_D": block_d,
        "num_warps": 4 if block_d <= 128 else 8,
        "num_stages": 1 if wide else 2,
    }


@triton.jit
def _rows(
    q, q_positions, row, num_rows, head, num_heads, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load the queries `[BLOCK_M, BLOCK_D]` of rows (query, member of the group) of a KV head, and their positions."""
    valid = row < num_rows
    query = row // GROUP
    d = tl.arange(0, BLOCK_D)
    at = (query.to(tl.int64) * num_heads * GROUP + head * GROUP + row % GROUP) * HEAD_SIZE
    x = tl.load(q + at[:, None] + d[None, :], mask=valid[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    return x, tl.load(q_positions + query, mask=valid, other=-1).to(tl.int32)


@triton.jit
def _keys(k, k_positions, n, num_tokens, head, k_head, k_token, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the keys `[BLOCK_N, BLOCK_D]` of tokens n of a KV head, and their positions."""
    valid = n < num_tokens
    d = tl.arange(0, BLOCK_D)
    at = head * k_head + n.to(tl.int64) * k_token
    x = tl.load(k + at[:, None] + d[None, :], mask=valid[:, None] & (d < HEAD_SIZE)[None, :], other=0.0)
    return x, tl.load(k_positions + n, mask=valid, other=0x7FFFFFFF).to(tl.int32)


@triton.jit
def masked_scores(x, position, keys, k_position, scale, soft_cap, WINDOW: tl.constexpr, CAPPED: tl.constexpr):
    """Return the scores `[BLOCK_M, BLOCK_N]`, minus infinity where a row doesn't see the token."""
    scores = tl.dot(x, tl.trans(keys), input_precision="tf32x3") * scale
    if CAPPED:
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)  # tanh
    seen = k_position[None, :] <= position[:, None]
    if WINDOW:
        seen &= k_position[None, :] > position[:, None] - WINDOW
    return tl.where(seen, scores, float("-inf"))


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _log_sums(
    q,
    q_positions,
    k,
    k_positions,
    parts,
    num_rows,
    num_tokens,
    scale,
    soft_cap,
    k_head,
    k_token,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write to parts `[splits, Hkv, rows]` log Σ_n exp(score) over the tokens of a split."""
    split, head, num_heads = tl.program_id(0), tl.program_id(2).to(tl.int64), tl.num_programs(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    x, position = _rows(q, q_positions, row, num_rows, head, num_heads, GROUP, HEAD_SIZE, BLOCK_D)
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, num_tokens), BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        keys, k_position = _keys(k, k_positions, n, num_tokens, head, k_head, k_token, HEAD_SIZE, BLOCK_D)
        scores = masked_scores(x, position, keys, k_position, scale, soft_cap, WINDOW, CAPPED)
        new_top = tl.maximum(top, tl.max(scores, 1))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(scores - new_top[:, None]), 1)
        top = new_top
    to = parts + (split.to(tl.int64) * num_heads + head) * num_rows + row
    tl.store(to, top + tl.log(tl.maximum(total, 1e-30)), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_splits", "num_rows", "num_tokens"])
def _votes(
    q,
    q_positions,
    k,
    k_positions,
    parts,
    votes,
    num_splits,
    num_rows,
    num_tokens,
    scale,
    soft_cap,
    k_head,
    k_token,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write to votes `[Hkv, N]` Σ_rows exp(score − log_sum) of a tile of tokens, kept while all rows pass. A row's
    log_sum is over all of its parts."""
    head, num_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    keys, k_position = _keys(k, k_positions, n, num_tokens, head, k_head, k_token, HEAD_SIZE, BLOCK_D)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, num_rows, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        x, position = _rows(q, q_positions, row, num_rows, head, num_heads, GROUP, HEAD_SIZE, BLOCK_D)
        scores = masked_scores(x, position, keys, k_position, scale, soft_cap, WINDOW, CAPPED)
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        of_row = tl.zeros([BLOCK_M], tl.float32)
        for split in range(0, num_splits):
            part = tl.load(parts + (split * num_heads + head) * num_rows + row, mask=row < num_rows, other=0.0)
            new_top = tl.maximum(top, part)
            of_row = of_row * tl.exp(top - new_top) + tl.exp(part - new_top)
            top = new_top
        log_sum = top + tl.log(of_row)
        total += tl.sum(tl.exp(scores - log_sum[:, None]), 0)
    tl.store(votes + head * num_tokens + n, total, mask=n < num_tokens)
