"""`python -m ragkv.evals.kernels.query_scores`: milliseconds of `query_scores`, and per second bytes of keys."""

from functools import partial

import torch

from ragkv.evals.kernels.timing import DEVICE, DTYPE, HEAD_SIZE, HEADS, KV_HEADS, LENGTHS, kernels, measure
from ragkv.kernels.operands import AttentionSpec

QUESTION = 32  # tokens


def main() -> None:
    for num_tokens in LENGTHS:
        q = torch.randn(QUESTION, HEADS, HEAD_SIZE, device=DEVICE, dtype=DTYPE)
        k = torch.randn(KV_HEADS, num_tokens, HEAD_SIZE, device=DEVICE, dtype=DTYPE)
        k_positions = torch.arange(num_tokens, device=DEVICE)
        given = (q, k_positions[-QUESTION:], k, k_positions, AttentionSpec(HEAD_SIZE**-0.5))
        runs = {each.name: partial(each.query_scores, *given) for each in kernels()}
        case = f"{num_tokens} tokens, {QUESTION} queries"
        measure("query_scores", case, runs, dict.fromkeys(runs, k.nbytes), "GB/s")


if __name__ == "__main__":
    main()
