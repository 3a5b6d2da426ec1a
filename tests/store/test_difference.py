"""What a mean's record has of the KV after the anchor alone."""

import pytest
import torch

from ragkv.store.codecs import CODECS
from ragkv.store.difference import differences, num_bytes
from ragkv.store.record import CorruptRecordError, LayerKV, decode, encode, record_bytes

LAYERS, HEADS, TOKENS, SIZE = 3, 2, 40, 16


def kv(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, HEADS, TOKENS, SIZE)
    return list(zip(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), strict=True))


def moved(layers, tokens_of):
    """Return the layers with other numbers for some tokens of each."""
    others = kv(7)
    for (k, v), (other_k, other_v), tokens in zip(layers, others, tokens_of, strict=True):
        k[:, tokens], v[:, tokens] = other_k[:, tokens], other_v[:, tokens]
    return layers


def record(mean, difference, codec="int8"):
    k, v = mean
    return encode(b"key", LayerKV(k, v, 5, torch.rand(TOKENS), difference=difference), CODECS[codec])


def test_the_tokens_that_differ_by_more_than_a_little_are_kept():
    mean = kv(1)
    alone = moved(kv(1), ([3, 4, 5], [], [0, 39]))
    (k, v), (mean_k, mean_v) = alone[1], mean[1]
    k[:, 9], v[:, 9] = 1.05 * mean_k[:, 9], 1.05 * mean_v[:, 9]  # by 0.25% of its energy
    found = differences(alone, mean, 1.0)
    assert found[0].tokens.tolist() == [3, 4, 5] and found[2].tokens.tolist() == [0, 39]
    assert found[1] is None
    found = differences(alone, mean, 2 / (LAYERS * TOKENS))
    assert sum(len(each.tokens) for each in found if each is not None) == 2


@pytest.mark.parametrize("codec", ["int8", "fp8", "raw", "int4"])
def test_a_record_gives_both_kv_back(codec):
    mean = kv(1)
    alone = moved(kv(1), (range(0, TOKENS, 3), [7], range(20)))
    for (k, v), stored, difference in zip(alone, mean, differences(alone, mean, 1.0), strict=True):
        value = record(stored, difference, codec)
        found = decode(b"key", value)
        assert len(value) == record_bytes(LayerKV(*stored, 5, torch.rand(TOKENS), difference=difference), CODECS[codec])
        assert found.v_std is not None and found.v_std.shape == (TOKENS,)
        both = (*found.mean().decoded(), *found.alone().decoded())
        for part, expected in zip(both, (*stored, k, v), strict=True):
            largest = expected.abs().max()
            assert float((part - expected).abs().max()) < 0.2 * largest  # 4 bits of the difference
            assert float((part - expected).norm() / expected.norm()) < (0.15 if codec == "int4" else 0.1)
        assert found.alone().v_std is None and found.mean().difference is None
        for part, whole in zip(found.decoded(torch.tensor([7, 0])), found.alone().decoded(), strict=True):
            assert torch.equal(part, whole[:, [7, 0]])
        for part, whole in zip(found.part(3, 9).decoded(), found.alone().decoded(), strict=True):
            assert torch.equal(part, whole[:, 3:9])


def test_equal_kv_makes_a_difference_of_nothing():
    mean = kv(1)
    for (k, v), difference in zip(mean, differences(kv(1), mean, 1.0), strict=True):
        found_k, found_v = decode(b"key", record((k, v), difference, "raw")).decoded()
        assert torch.equal(found_k, k) and torch.equal(found_v, v)


def test_a_damaged_difference_is_found():
    mean = kv(1)
    (difference, *_) = differences(kv(2), mean, 1.0)
    value = bytearray(record(mean[0], difference))
    value[-1] ^= 1
    with pytest.raises(CorruptRecordError, match="checksum"):
        decode(b"key", value)


def test_it_takes_an_eighth_of_the_bytes_of_two_bfloat16_records_where_all_tokens_differ():
    shape, tokens = (8, 100, 128), 100
    assert num_bytes(shape, tokens) / (4 * 2 * 8 * 100 * 128) == pytest.approx(0.127, abs=0.005)


def test_a_mean_is_moved_to_a_device_with_its_difference():
    mean = kv(1)
    (difference, *_) = differences(kv(2), mean, 1.0)
    found = LayerKV(*mean[0], 0, difference=difference).map(torch.clone)
    assert torch.equal(found.decoded()[0], LayerKV(*mean[0], 0, difference=difference).decoded()[0])
    assert found.size_bytes == LayerKV(*mean[0], 0).size_bytes + sum(part.nbytes for part in difference.parts())
