import pytest
import torch

from ragkv.store import codecs
from ragkv.store.codecs import CODECS, FP8, INT4, INT8, RAW
from ragkv.store.difference import differences
from ragkv.store.packing import pack, unpack
from ragkv.store.record import CorruptRecordError, LayerKV, decode, encode, read_header, record_bytes

QUANTISED = [INT8, FP8, INT4]


def make_kv(shape=(3, 50, 16), dtype=torch.float32, seed=0):
    """K with outliers in a channel, V with outliers in a token."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    k[:, :, 3] *= 40
    v[:, 7] *= 40
    return k.to(dtype), v.to(dtype)


def reference(codec, x, dim):
    """One number at a time: to the nearest that the type has."""
    if codec is INT4:
        return _nearest_of_16(x.float(), dim)
    largest = {INT8: 127.0, FP8: 448.0}[codec]
    scale = x.float().abs().amax(dim, keepdim=True) / largest
    numbers = torch.arange(-127, 128).float() if codec is INT8 else _fp8_numbers()
    scaled = (x.float() / scale).flatten()
    nearest = numbers[(scaled[:, None] - numbers).abs().argmin(1)]
    return nearest.view(x.shape) * scale


def _nearest_of_16(x, dim):
    """At equal distances, from the group's smallest number to its largest."""
    groups = x.movedim(dim, -1)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    numbers = low[..., None] + (high - low)[..., None] * torch.arange(16) / 15
    nearest = (groups[..., None] - numbers).abs().argmin(-1, keepdim=True)
    return numbers.expand(*groups.shape, 16).gather(-1, nearest)[..., 0].movedim(-1, dim)


def _fp8_numbers():
    """e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    positive = [m / 8 * 2**-6 for m in range(8)]
    positive += [(1 + m / 8) * 2 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor([-x for x in positive] + positive)


def stored(codec, k, v):
    return decode(b"key", encode(b"key", LayerKV(k, v, 0, torch.ones(k.shape[1])), codec)).decoded()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 50, 16), (1, 1, 2), (2, 3, 6)])
def test_size_shape_and_type_are_kept(codec, dtype, shape):
    k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    assert len(codec.encode(k, v)) == codec.num_bytes(shape, dtype)
    for found, given in zip(stored(codec, k, v), (k, v), strict=True):
        assert found.shape == given.shape and found.dtype == (dtype if codec is RAW else torch.float32)
        if codec is RAW:
            assert torch.equal(found, given)


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
def test_every_number_is_the_nearest_that_the_type_has(codec):
    k, v = make_kv()
    found_k, found_v = stored(codec, k, v)
    for found, given, dim in ((found_k, k, 1), (found_v, v, 2)):
        expected = reference(codec, given, dim)
        step = given.abs().amax(dim, keepdim=True) / 100
        rounding = 0.1 if codec is INT4 else 1e-5  # of its scales, which are float16
        assert ((found - expected).abs() <= rounding * step).float().mean() > 0.99  # but for ties
        torch.testing.assert_close(found, given, atol=float(step.max()) * (8 if codec is INT4 else 4), rtol=0.07)


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
def test_outliers_cost_only_their_own_channel_or_token(codec):
    k, v = make_kv()
    found_k, found_v = stored(codec, k, v)
    at_most = {INT8: 0.02, FP8: 0.15, INT4: 0.25}[codec]
    others = [i for i in range(16) if i != 3]
    assert (found_k - k)[:, :, others].abs().max() < at_most
    tokens = [i for i in range(50) if i != 7]
    assert (found_v - v)[:, tokens].abs().max() < at_most


@pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
def test_zeros_stay_zeros(codec):
    zeros = torch.zeros(2, 4, 8)
    for found in stored(codec, zeros, zeros):
        assert torch.equal(found, zeros)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("v_std", [None, torch.arange(50.0)], ids=["single", "average"])
def test_a_record_says_its_codec(codec, v_std):
    k, v = make_kv(dtype=torch.bfloat16)
    value = encode(b"key", LayerKV(k, v, 5, v_std), codec)
    found = decode(b"key", value)
    used = INT8 if codec is INT4 and v_std is None else codec
    assert read_header(value).codec is used
    assert len(value) == record_bytes(LayerKV(k, v, 5, v_std), codec)
    expected = used.split(memoryview(used.encode(k, v)), k.shape, k.dtype)
    assert found.shape == k.shape
    assert torch.equal(found.k, expected.k) and torch.equal(found.v, expected.v)
    tokens = torch.tensor([4, 0, 4])
    for some, all_of_them in zip(found.decoded(tokens), found.decoded(), strict=True):
        assert torch.equal(some, all_of_them[:, tokens])
    assert found.base_position == 5
    assert found.v_std is None if v_std is None else torch.equal(found.v_std, v_std)
    for position in range(0, len(value), 97):
        damaged = bytearray(value)
        damaged[position] ^= 16
        with pytest.raises(CorruptRecordError):
            decode(b"key", bytes(damaged))


def test_every_e4m3_number_is_read_as_torch_reads_it():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.float().isnan()].view(1, -1, 1)
    for scale in (1.0, 0.37, 1e-30):
        scales = torch.full((1, numbers.shape[1], 1), scale)
        assert torch.equal(codecs.times(numbers, scales), numbers.float() * scales)


def test_4_bits_pack_in_order():
    numbers = torch.arange(16).view(2, 8)
    packed = pack(numbers)
    assert packed.tolist() == [[0x40, 0x51, 0x62, 0x73], [0xC8, 0xD9, 0xEA, 0xFB]]
    assert torch.equal(unpack(packed), numbers.float())


@pytest.mark.parametrize("offset", [0.0, 3.0, -200.0])
def test_4_bits_reach_from_the_smallest_number_to_the_largest(offset):
    """Where numbers lie far from 0, as K's do in some channels of some models, no step is lost on what is between."""
    k, v = (offset + torch.randn(2, 60, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for found, given, dim in zip(stored(INT4, k, v), (k, v), (1, 2), strict=True):
        steps = (given.amax(dim, keepdim=True) - given.amin(dim, keepdim=True)) / 15
        assert ((found - given).abs() <= 0.5 * steps + abs(offset) / 1000 + 0.01).all()


def test_4_bits_of_numbers_that_are_all_the_same_or_too_large():
    same, large = torch.full((1, 4, 8), 2.5), torch.tensor([[[-3e38, 0.0, 1.0, 3e38]]])
    for found in stored(INT4, same, same):
        assert torch.equal(found, same)
    for found in stored(INT4, large, large):
        assert found.isfinite().all()


def test_bytes_beside_two_raw_entries_in_bfloat16():
    """Where all tokens differ."""
    shape = (8, 120, 64)
    mean, alone = (list(torch.randn(4, 2, *shape, generator=torch.Generator().manual_seed(i))) for i in range(2))
    for codec, at_most in ((INT8, 0.41), (INT4, 0.15)):
        entry = [
            LayerKV(k.bfloat16(), v.bfloat16(), 0, torch.ones(120), difference=each)
            for (k, v), each in zip(mean, differences(alone, mean, codec.share), strict=True)
        ]
        num_bytes = sum(record_bytes(kv, codec) for kv in entry)
        assert 0.95 * at_most < num_bytes / (len(entry) * 8 * 8 * 120 * 64) <= at_most
