"""Chunks for tests of the store."""

import time

import pytest
import torch

from ragkv.store.record import ChunkKey, LayerKV

NUM_LAYERS = 3


def make_key(chunk=1, anchor=2, fingerprint=3, heads=(0, 2)):
    return ChunkKey(*(f"{value:032x}" for value in (chunk, anchor, fingerprint)), heads=heads)


def make_layers(seed=0, num_tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_tokens, 8)
    return [
        LayerKV(
            torch.randn(shape, generator=generator).to(dtype),
            torch.randn(shape, generator=generator).to(dtype),
            base_position=7,
        )
        for _ in range(NUM_LAYERS)
    ]


def drop_cached(store, keys):
    """Have the system forget these chunks, or skip the test where it can't."""
    for _ in range(100):  # what is being written just now can't be dropped
        store.admin.drop_cached(keys)
        if not any(map(store.in_page_cache, keys)):
            return
        time.sleep(0.02)
    pytest.skip("this file system keeps its files in memory")
