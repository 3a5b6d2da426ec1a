"""Tile sizes of Triton's matrix products."""

import torch


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
