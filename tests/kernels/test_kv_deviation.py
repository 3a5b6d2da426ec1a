"""`kv_deviation`: the definition token by token in float64, Triton's against the definition."""

import pytest
import torch
from implementations import DEVICE, implementations

from ragkv.kernels.kv_deviation import kv_deviation_reference

every_implementation = pytest.mark.parametrize("deviation", implementations("kv_deviation", "triton"))


def case(num_tokens, num_cached, num_heads=3, head_size=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    fresh, cached = (torch.randn(num_heads, n, head_size, generator=generator) for n in (num_tokens, num_cached))
    offsets = torch.randint(num_cached, (num_tokens,), generator=generator)
    return fresh.to(DEVICE, dtype), cached.to(DEVICE, dtype), offsets.to(DEVICE)


def check(deviation, fresh, cached, offsets):
    found = deviation(fresh, cached, offsets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, kv_deviation_reference(fresh, cached, offsets), atol=0, rtol=1e-5)


def test_the_definition():
    fresh, cached, offsets = case(63, 90)
    expected = [(fresh[:, t].double() - cached[:, at].double()).norm() ** 2 for t, at in enumerate(offsets)]
    found = kv_deviation_reference(fresh, cached, offsets)
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=0, rtol=1e-5)


@every_implementation
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 500])
def test_types_and_lengths(deviation, num_tokens, dtype):
    check(deviation, *case(num_tokens, 510, dtype=dtype))


@every_implementation
@pytest.mark.parametrize("num_heads", [1, 8])
@pytest.mark.parametrize("head_size", [80, 96, 128, 256])
def test_heads(deviation, num_heads, head_size):
    check(deviation, *case(21, 30, num_heads, head_size))


@every_implementation
def test_other_strides_and_two_types(deviation):
    """Heads after tokens; NaN where no offset points isn't read."""
    fresh, cached, offsets = case(30, 50)
    untouched = torch.ones(50, dtype=torch.bool, device=DEVICE).index_fill(0, offsets, False)
    cached[:, untouched] = torch.nan
    fresh, cached = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (fresh, cached.half()))
    check(deviation, fresh, cached, offsets)


@every_implementation
def test_tokens_further_apart_than_32_bits_can_count(deviation):
    fresh, cached, offsets = case(3, 2, 2, 64, torch.float16)
    memory = torch.empty((1 << 31) + 128, dtype=torch.float16, device=DEVICE)
    check(deviation, fresh, memory.as_strided(cached.shape, (64, 1 << 31, 1)).copy_(cached), offsets)
