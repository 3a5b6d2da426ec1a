"""K and V of a request where kernels find them: in memory of ours, or in a backend's own blocks."""

from types import SimpleNamespace

import pytest
import torch

from ragkv.engine.blocks import ContiguousKV, PagedBlocks, find_views

BLOCK_SIZE, NUM_BLOCKS, HEADS, SIZE = 8, 5, 3, 4
LAYOUTS = {
    "K and V, NHD": ((2, NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE), lambda x: x.unbind(0)),
    "blocks, NHD": ((NUM_BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE), lambda x: x.unbind(1)),
    "K and V, HND": (
        (2, NUM_BLOCKS, HEADS, BLOCK_SIZE, SIZE),
        lambda x: (x[0].transpose(1, 2), x[1].transpose(1, 2)),
    ),
    "blocks, HND": (
        (NUM_BLOCKS, 2, HEADS, BLOCK_SIZE, SIZE),
        lambda x: (x[:, 0].transpose(1, 2), x[:, 1].transpose(1, 2)),
    ),
    "CUDA: K before V, HND": (
        (NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE),
        lambda x: x.transpose(1, 2).split(SIZE, dim=3),
    ),
    "CUDA: K before V, NHD": (
        (NUM_BLOCKS, BLOCK_SIZE, HEADS, 2 * SIZE),
        lambda x: x.transpose(1, 2).split(SIZE, dim=3),
        lambda x: x.transpose(1, 2),
    ),
    "CPU: K by columns": (
        (NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE),
        lambda x: (
            x.view(NUM_BLOCKS, HEADS, 2, SIZE, BLOCK_SIZE)[:, :, 0].permute(0, 3, 1, 2),
            x.view(NUM_BLOCKS, HEADS, 2, BLOCK_SIZE, SIZE)[:, :, 1].transpose(1, 2),
        ),
    ),
}


class Backend:
    """A subset forward whose one layer is written in a given layout; view: as what the layer shows its memory."""

    def __init__(self, shape, split, view=lambda x: x):
        cache = view(torch.zeros(shape))
        self.layers = [SimpleNamespace(num_kv_heads=HEADS, head_size=SIZE, kv_cache=cache)]
        self.block_size, self.dtype, self.device = BLOCK_SIZE, torch.float32, torch.device("cpu")
        self._caches = split(cache)

    def write(self, layer, k, v, slots):
        for cache, x in zip(self._caches, (k, v), strict=True):
            places = slots // BLOCK_SIZE, slots % BLOCK_SIZE
            cache[places] = x.reshape(cache[places].shape)

    def read(self, slots):
        return [cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] for cache in self._caches]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backend_s_layout_is_found_by_what_it_writes(layout):
    backend = Backend(*LAYOUTS[layout])
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:11]
    blocks = PagedBlocks(backend, find_views(backend), slots, torch.arange(NUM_BLOCKS))
    kv = blocks.kv(0)
    assert kv.k.shape == kv.v.shape == (NUM_BLOCKS, BLOCK_SIZE, HEADS, SIZE)
    k, v = torch.randn(2, 11, HEADS, SIZE)
    blocks.put(0, torch.arange(11), k, v)
    for found, cache, expected in zip(backend.read(slots), (kv.k, kv.v), (k, v), strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE], expected)


def test_keys_of_a_request_come_in_order_from_the_backend_s_blocks():
    backend = Backend(*LAYOUTS["K and V, NHD"])
    block_ids = torch.tensor([4, 1])
    positions = torch.arange(13)
    slots = block_ids[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    blocks = PagedBlocks(backend, find_views(backend), slots, block_ids)
    k, v = torch.randn(2, 13, HEADS, SIZE)
    blocks.put(0, positions, k, v)
    assert torch.equal(blocks.kv(0).in_order(blocks.kv(0).k, len(k)), k.transpose(0, 1))


def test_another_layout_is_left_alone():
    def columns(x):
        return [half.view(NUM_BLOCKS, HEADS, SIZE, BLOCK_SIZE).permute(0, 3, 1, 2) for half in x]

    def pairs(x):  # of a head's numbers, two of a token side by side, as AMX has them
        k, v = (half.view(NUM_BLOCKS, HEADS, SIZE // 2, BLOCK_SIZE, 2) for half in x.chunk(2, dim=2))
        return [half.permute(0, 3, 1, 2, 4) for half in (k, v)]

    assert find_views(Backend((2, NUM_BLOCKS, HEADS, SIZE * BLOCK_SIZE), columns)) is None
    assert find_views(Backend((NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * SIZE), pairs)) is None


def test_what_lies_in_order_reaches_the_backend_when_it_is_flushed():
    backend = Backend(*LAYOUTS["blocks, HND"])
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:20]
    blocks = ContiguousKV(backend, slots)
    k, v = torch.randn(2, 20, HEADS, SIZE)
    blocks.put(0, torch.arange(20), k, v)
    assert torch.equal(blocks.kv(0).in_order(blocks.kv(0).k, len(k)), k.transpose(0, 1))
    assert not any(x.any() for x in backend.read(slots))
    blocks.flush(0, 3, 9)
    for found, expected in zip(backend.read(slots), (k, v), strict=True):
        assert torch.equal(found[3:9], expected[3:9])
        assert not found[:3].any() and not found[9:].any()
