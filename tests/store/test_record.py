import pytest
import torch

from ragkv.store.codecs import CODECS
from ragkv.store.record import CorruptRecordError, LayerKV, decode, encode

KV = LayerKV(torch.randn(2, 3, 4), torch.randn(2, 3, 4), base_position=11)
KEY = b"some key"


def test_every_flipped_bit_is_found():
    value = encode(KEY, KV)
    for position in range(len(value)):
        damaged = bytearray(value)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptRecordError):
            decode(KEY, bytes(damaged))


@pytest.mark.parametrize("size", [0, 10, 63, 64, 100, -1])
def test_a_truncated_record_is_found(size):
    with pytest.raises(CorruptRecordError):
        decode(KEY, encode(KEY, KV)[:size])


def test_a_record_under_another_key_is_found():
    with pytest.raises(CorruptRecordError, match="another key"):
        decode(b"other key", encode(KEY, KV))


def test_non_contiguous_tensors_are_stored_in_order():
    k = torch.arange(24.0).view(3, 2, 4).transpose(0, 1)
    found = decode(KEY, encode(KEY, LayerKV(k, k, 0)))
    assert torch.equal(found.k, k)


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8", "int4"])
def test_a_part_has_the_kv_of_its_tokens(codec):
    kv = LayerKV(torch.randn(2, 30, 8), torch.randn(2, 30, 8), base_position=11, v_std=torch.rand(30))
    stored = decode(KEY, encode(KEY, kv, CODECS[codec]))
    part = stored.part(5, 21)
    assert part.shape == (2, 16, 8) and part.base_position == 16
    assert torch.equal(part.v_std, kv.v_std[5:21])
    for mine, whole in zip(part.decoded(), stored.decoded(), strict=True):
        assert torch.equal(mine, whole[:, 5:21])
    assert part.k.untyped_storage().data_ptr() == stored.k.untyped_storage().data_ptr()  # not copied
