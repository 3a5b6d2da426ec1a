"""`python -m ragkv.evals.kernels.kv_deviation`: milliseconds of `kv_deviation`, and bytes per second, where every
token of a layer was computed anew."""

from functools import partial

import torch

from ragkv.evals.kernels.timing import DEVICE, DTYPE, HEAD_SIZE, KV_HEADS, LENGTHS, kernels, measure


def main() -> None:
    for num_tokens in LENGTHS:
        fresh, cached = torch.randn(2, KV_HEADS, num_tokens, HEAD_SIZE, device=DEVICE, dtype=DTYPE)
        offsets = torch.arange(num_tokens, device=DEVICE)
        different = {each.kv_deviation: each.name for each in kernels()}  # C++ uses torch's
        runs = {name: partial(run, fresh, cached, offsets) for run, name in different.items()}
        measure("kv_deviation", f"{num_tokens} tokens", runs, dict.fromkeys(runs, 2 * fresh.nbytes), "GB/s")


if __name__ == "__main__":
    main()
