import pytest
import torch

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
