"""`python -m ragkv.evals.kernels.kv_fuse`: bytes per second of `kv_fuse`, next to a copy of as many."""

from collections.abc import Callable
from functools import partial

import torch

from ragkv.evals.kernels.timing import DEVICE, DTYPE, HEAD_SIZE, KV_HEADS, LENGTHS, kernels, measure
from ragkv.kernels.kv_fuse import Staged
from ragkv.kernels.operands import PagedKV, Rotation

BLOCK_SIZE, CHUNK = 16, 512  # tokens


def main() -> None:
    for num_tokens in LENGTHS:
        for stored in (DTYPE, torch.int8, torch.float8_e4m3fn, torch.uint8):
            _bench(num_tokens, stored)


def _bench(num_tokens: int, stored: torch.dtype) -> None:
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = (2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    angles = torch.rand(1000, HEAD_SIZE // 2, device=DEVICE)
    rotation = Rotation(angles.cos(), angles.sin(), neox=True)
    first = BLOCK_SIZE * torch.randperm(num_blocks, device=DEVICE)
    k, v = torch.empty(shape, device=DEVICE, dtype=DTYPE)
    kv = PagedKV(k, v, first // BLOCK_SIZE)
    slots = (first[:, None] + torch.arange(BLOCK_SIZE, device=DEVICE)).flatten()[:num_tokens]
    chunks = [_chunk(slots[begin : begin + CHUNK], stored) for begin in range(0, num_tokens, CHUNK)]
    runs: dict[str, Callable[[], object]] = {
        each.name: partial(each.kv_fuse, chunks, rotation, kv) for each in kernels()
    }
    stored_bytes = 0.5 if stored == torch.uint8 else stored.itemsize  # of a number; two are packed in a byte
    num_bytes = round(2 * KV_HEADS * num_tokens * HEAD_SIZE * (stored_bytes + DTYPE.itemsize))
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    runs["copy"] = lambda: target.copy_(source)
    name = str(stored).removeprefix("torch.")
    measure("kv_fuse", f"{num_tokens} tokens, {name}", runs, dict.fromkeys(runs, num_bytes), "GB/s")


def _chunk(slots: torch.Tensor, stored: torch.dtype) -> Staged:
    shape = (KV_HEADS, len(slots), HEAD_SIZE)
    k, v = (torch.randn(shape, device=DEVICE).to(stored) for _ in range(2))
    if stored == DTYPE:
        return Staged(k, v, slots, 700)
    by_channel, by_token = (torch.rand(KV_HEADS, *each, device=DEVICE) for each in ((1, HEAD_SIZE), (len(slots), 1)))
    if stored != torch.uint8:
        return Staged(k, v, slots, 700, by_channel, by_token)
    pairs, grids = k[:, :, : HEAD_SIZE // 2].contiguous(), (by_channel.half(), by_token.half())
    return Staged(pairs, pairs, slots, 700, *grids, *grids)


if __name__ == "__main__":
    main()
