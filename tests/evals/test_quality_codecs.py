"""KV that `ragkv eval quality` encodes anew: as the index would keep it in that codec, and only for as long."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from ragkv.chunk_kv import ChunkKV
from ragkv.evals.workloads.quality_codecs import encoded
from ragkv.store.disk_store import DiskStore
from ragkv.store.record import LayerKV

HEADS, SIZE, NUM_LAYERS, NUM_TOKENS = 2, 32, 3, 40
ANCHOR = [1, 2, 3]
TWO = ChunkKV(ANCHOR, "0" * 32, (0, HEADS), 4, "mixed")
ONE = ChunkKV(ANCHOR, "0" * 32, (0, HEADS), 4, "int8", joins=True)
SPANS = [TWO.span(name * 32, NUM_TOKENS) for name in "ab"]


def random_layers(num_tokens, v_std=None):
    return [LayerKV(*torch.randn(2, HEADS, num_tokens, SIZE), len(ANCHOR), v_std) for _ in range(NUM_LAYERS)]


def moved(layers):
    """The same but for two tokens: what int4 keeps the difference of."""
    change = torch.zeros(1, NUM_TOKENS, 1)
    change[:, :: NUM_TOKENS // 2] = 3.0
    return [replace(kv, k=kv.k + change, v=kv.v - change, v_std=None) for kv in layers]


def read(store, key):
    with store.snapshot() as snapshot:
        return [kv.map(torch.clone) for layer in range(NUM_LAYERS) if (kv := snapshot.get(key, layer)) is not None]


@pytest.mark.parametrize("codec, error", [("int8", 0.03), ("int4", 0.3)])
def test_chunks_are_in_the_codec_inside_and_as_they_were_outside(tmp_path, codec, error):
    with closing(DiskStore(tmp_path)) as store:
        means = [random_layers(NUM_TOKENS, torch.rand(NUM_TOKENS)) for _ in SPANS]
        store.put([(TWO.key(TWO.anchor_span), random_layers(len(ANCHOR)))])
        for span, layers in zip(SPANS, means, strict=True):
            store.put([(TWO.key(span), moved(layers)), (TWO.key(TWO.averaged(span)), layers)])
        keys = store.keys()
        before = {key: read(store, key) for key in keys}

        async def inside():
            async with encoded(store, TWO, ONE, SPANS, codec):
                assert read(store, TWO.key(TWO.anchor_span))[0].k.dtype == torch.int8
                for span, layers in zip(SPANS, means, strict=True):
                    assert not store.contains(TWO.key(span))
                    assert ONE.is_stored(ONE.span(span.chunk_hash, NUM_TOKENS), store)
                    found = read(store, ONE.key(ONE.averaged(span)))
                    for kv, mean, alone in zip(found, layers, moved(layers), strict=True):
                        for part, expected in ((kv.mean(), mean), (kv.alone(), alone)):
                            for x, y in zip(part.decoded(), (expected.k, expected.v), strict=True):
                                assert (x - y).norm() < error * y.norm()

        asyncio.run(inside())
        assert sorted(map(str, store.keys())) == sorted(map(str, keys))
        for key, layers in before.items():
            for kv, expected in zip(read(store, key), layers, strict=True):
                assert torch.equal(kv.k, expected.k) and torch.equal(kv.v, expected.v)
