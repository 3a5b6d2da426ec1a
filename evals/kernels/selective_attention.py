"""`python -m ragkv.evals.kernels.selective_attention`: arithmetic per second of scattered queries, next to dense causal
attention over the same context (torch's: flash attention on CUDA). Only necessary work is counted: 4·Hq·D for each
token that a query sees."""

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragkv.evals.kernels.timing import DEVICE, DTYPE, HEAD_SIZE, HEADS, KV_HEADS, LENGTHS, kernels, measure
from ragkv.kernels.operands import AttentionSpec, PagedKV

BLOCK_SIZE = 16


def main() -> None:
    for num_tokens in LENGTHS:
        shapes = [(1, heads, num_tokens, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        dense = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for shape in shapes]
        for num_queries in (256, 1024):
            _bench(num_tokens, num_queries, dense)


def _bench(num_tokens: int, num_queries: int, dense: list[torch.Tensor]) -> None:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    k, v = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device=DEVICE, dtype=DTYPE)
    block_table = torch.randperm(num_blocks, device=DEVICE)
    positions = torch.randperm(num_tokens, device=DEVICE)[:num_queries].sort().values
    q = torch.randn(num_queries, HEADS, HEAD_SIZE, device=DEVICE, dtype=DTYPE)
    given = (q, positions, PagedKV(k, v, block_table), AttentionSpec(HEAD_SIZE**-0.5))
    runs = {each.name: partial(each.selective_attention, *given) for each in kernels()}
    each_seen = 4 * HEADS * HEAD_SIZE
    work = dict.fromkeys(runs, each_seen * float((positions + 1).sum()))
    runs["dense"] = partial(_dense, *dense)
    work["dense"] = each_seen * num_tokens * (num_tokens + 1) / 2
    measure("selective_attention", f"{num_tokens} tokens, {num_queries} queries", runs, work, "GFLOP/s")


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


if __name__ == "__main__":
    main()
