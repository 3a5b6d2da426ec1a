import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from implementations import DEVICE, implementations
from rope_reference import rope, table

from ragkv.engine.loader import KVLoader, LoadedSpan
from ragkv.engine.shift import DAMPING, MeanShift, Recomputed, averaging, mean_shifts, shift_weights
from ragkv.engine.task import Span
from ragkv.kernels.kv_fuse import KVShift, Staged, kv_fuse_reference
from ragkv.kernels.operands import PagedKV, Rotation
from ragkv.store.codecs import FP8, INT4, INT8, RAW
from ragkv.store.record import ChunkKey, LayerKV, decode, encode

START, SIZE = 37, 64


def shifted(k, v, fresh_k, fresh_v, offsets, weights, start, rotation):
    """As the engine does it: keys rotated back, their mean shift fused. k, fresh_k: at their positions."""

    def back(keys):
        return keys.float() if rotation is None else rotation.rotate(keys.float(), -(start + offsets))

    changes = torch.stack([back(fresh_k) - back(k[:, offsets]), fresh_v.float() - v[:, offsets].float()])
    ((mean_k, mean_v),) = mean_shifts(changes, averaging([len(offsets)]))
    mean_shift = KVShift(mean_k, mean_v, weights, start)
    caches = [torch.full((1, k.shape[1], *k.shape[::2]), torch.nan, dtype=k.dtype) for _ in range(2)]
    kv = PagedKV(*caches, torch.zeros(1, dtype=torch.int64))
    kv_fuse_reference([Staged(k, v, torch.arange(k.shape[1]), shift=mean_shift)], rotation, kv)
    return kv.in_order(kv.k, k.shape[1]), kv.in_order(kv.v, k.shape[1])


def test_each_chunk_shifts_by_its_own_tokens():
    fresh, cached = torch.randn(2, 2, 9, SIZE)
    changes = torch.stack([fresh - cached, cached - fresh])
    for (k, v), part in zip(mean_shifts(changes, averaging([2, 1, 6])), ((0, 2), (2, 3), (3, 9)), strict=True):
        expected = (fresh - cached)[:, slice(*part)].mean(1)
        torch.testing.assert_close(k, expected)
        torch.testing.assert_close(v, -expected)


def definition(k, v, fresh_k, fresh_v, offsets, weights, rotated, neox):
    """Token by token, in float64: unrotate, take the mean of the differences, rotate to each position."""
    positions, weights = START + torch.arange(k.shape[1]), weights.double()[:, None]
    differences = rope(fresh_k - k[:, offsets], -positions[offsets], rotated, neox)
    mean = differences.mean(1, keepdim=True)
    moved = torch.cat([rope(mean, position[None], rotated, neox) for position in positions], 1)
    return k + weights * moved, v + weights * (fresh_v - v[:, offsets]).double().mean(1, keepdim=True)


@pytest.mark.parametrize("num_tokens, offsets", [(1, [0]), (63, [5, 6, 60]), (500, list(range(0, 500, 7)))])
@pytest.mark.parametrize("rotated, neox", [(64, True), (64, False), (32, True)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_equals_the_definition(num_tokens, offsets, rotated, neox, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, num_tokens, SIZE, generator=generator).to(dtype) for _ in range(2))
    offsets = torch.tensor(offsets)
    fresh_k, fresh_v = (torch.randn(2, len(offsets), SIZE, generator=generator).to(dtype) for _ in range(2))
    rotation = Rotation.from_table(table(4096, rotated), neox)
    weights = torch.rand(num_tokens, generator=generator)
    found_k, found_v = shifted(k, v, fresh_k, fresh_v, offsets, weights, START, rotation)
    expected_k, expected_v = definition(k, v, fresh_k, fresh_v, offsets, weights, rotated, neox)
    assert found_k.dtype == found_v.dtype == dtype
    torch.testing.assert_close(found_k.double(), expected_k.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found_v.double(), expected_v.double(), atol=tolerance, rtol=tolerance)


def test_a_shift_common_to_all_tokens_is_found_again_but_for_the_damping():
    """Where every token's KV moved by the same amount, the recomputed ones tell by how much."""
    k, v = torch.randn(2, 90, SIZE), torch.randn(2, 90, SIZE)
    rotation = Rotation.from_table(table(256, SIZE), True)
    true_k, true_v = k + rotation.rotate(torch.ones_like(k), START + torch.arange(90)), v + 1
    offsets = torch.arange(0, 90, 2)
    weights = shift_weights(torch.ones(90), Recomputed([90], [offsets], torch.device("cpu")))
    found_k, found_v = shifted(k, v, true_k[:, offsets], true_v[:, offsets], offsets, weights, START, rotation)
    left = DAMPING / (len(offsets) + DAMPING)
    torch.testing.assert_close((true_k - found_k).norm(), left * (true_k - k).norm(), rtol=1e-4, atol=0)
    torch.testing.assert_close(true_v - found_v, torch.full_like(v, left), rtol=1e-4, atol=1e-5)


def test_keys_without_positions_move_like_values():
    k, fresh = torch.randn(1, 9, SIZE), torch.randn(1, 2, SIZE)
    found_k, found_v = shifted(k, k, fresh, fresh, torch.tensor([1, 7]), torch.ones(9), START, None)
    assert torch.equal(found_k, found_v)


def weights(v_std, *offsets):
    """Of chunks of four tokens."""
    tokens = Recomputed([4] * len(offsets), list(map(torch.tensor, offsets)), torch.device("cpu"))
    return shift_weights(torch.tensor(v_std), tokens).tolist()


def test_weights_follow_v_std_and_are_bounded():
    part = 1 / (1 + DAMPING)
    assert weights([1.0] * 4, [1]) == pytest.approx([part] * 4)
    assert weights([0.0, 1.0, 2.0, 100.0], [1]) == pytest.approx([0, part, 2 * part, 2 * part])


def test_weights_are_each_chunk_s_own():
    first, second = [0.0, 1.0, 2.0, 100.0], [3.0, 5.0, 4.0, 0.0]
    assert weights(first + second, [1], [0, 1]) == pytest.approx(weights(first, [1]) + weights(second, [0, 1]))
    part = 2 / (2 + DAMPING)
    assert weights(second, [0, 1]) == pytest.approx([0.75 * part, 1.25 * part, part, 0])


def test_weights_are_numbers_even_where_nothing_varied():
    for v_std in ([0.0] * 4, [0.0, 1.0, 0.0, 0.0]):
        assert all(map(math.isfinite, weights(v_std, [0])))


@pytest.mark.parametrize("kv_fuse", [kv_fuse_reference, *implementations("kv_fuse", "triton", "native")])
@pytest.mark.parametrize("codecs", [[RAW] * 3, [INT8] * 3, [INT4] * 3, [FP8, RAW, INT8]])
def test_changes_are_from_what_the_chunks_decode_to(codecs, kv_fuse):
    chunks, offsets, start = [], [[1, 4], [0], [2, 3, 8]], 0
    for codec, num_tokens in zip(codecs, (5, 3, 9), strict=True):
        key = ChunkKey("a" * 32, "b" * 32, "c" * 32, (0, 2)).layer(0)
        kv = LayerKV(*torch.randn(2, 2, num_tokens, SIZE), 30, torch.rand(num_tokens))
        span = Span(start, start + num_tokens, "d" * 32, "b" * 32)
        chunks.append(LoadedSpan(span, decode(key, encode(key, kv, codec))))
        start += num_tokens
    positions = torch.cat([item.span.start + torch.tensor(own) for item, own in zip(chunks, offsets, strict=True)])
    tokens = Recomputed([5, 3, 9], list(map(torch.tensor, offsets)), DEVICE, positions, positions)
    write = partial(KVLoader.write, SimpleNamespace(kernels=SimpleNamespace(kv_fuse=kv_fuse)))
    loader = SimpleNamespace(forward=SimpleNamespace(device=DEVICE), write=write)
    chunks = [LoadedSpan(item.span, item.kv.map(lambda x: x.to(DEVICE))) for item in chunks]
    k, v = torch.randn(2, start, 2, SIZE, device=DEVICE)
    rotation = Rotation.from_table(table(SIZE, 64).to(DEVICE), neox=True)
    found = MeanShift(loader, torch.arange(start))._changes(chunks, tokens, k, v, rotation)
    each = [item.kv.decoded(torch.tensor(own, device=DEVICE)) for item, own in zip(chunks, offsets, strict=True)]
    cached_k, cached_v = (torch.cat(parts, dim=1).float() for parts in zip(*each, strict=True))
    then = torch.cat([30 + torch.tensor(own) for own in offsets]).to(DEVICE)
    positions = positions.to(DEVICE)
    expected = rotation.rotate(k[positions].transpose(0, 1), -positions) - rotation.rotate(cached_k, -then)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], v[positions].transpose(0, 1) - cached_v)
