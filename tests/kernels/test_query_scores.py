"""`query_scores`: the definition row by row in float64, every implementation against the definition."""

from dataclasses import replace

import pytest
import torch
from implementations import DEVICE, implementations

from ragkv.kernels.operands import AttentionSpec
from ragkv.kernels.query_scores import query_scores_reference

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # sums of many rows
OPTIONS = [{}, {"sliding_window": 40}, {"soft_cap": 5.0}, {"sliding_window": 25, "soft_cap": 2.0}]

both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # whose products are taken differently
every_implementation = pytest.mark.parametrize("scores", implementations("query_scores", "triton", "native", "torch"))


def case(num_tokens, num_queries, num_heads, num_kv_heads, head_size, dtype=torch.float32):
    """A question after tokens in any order, its own among them."""
    generator = torch.Generator().manual_seed(1)
    k = torch.randn(num_kv_heads, num_tokens, head_size, generator=generator)
    q = torch.randn(num_queries, num_heads, head_size, generator=generator)
    k_positions = torch.randperm(num_tokens, generator=generator)
    q_positions = torch.arange(num_tokens - num_queries, num_tokens)
    return (
        q.to(DEVICE, dtype),
        q_positions.to(DEVICE),
        k.to(DEVICE, dtype),
        k_positions.to(DEVICE),
        AttentionSpec(head_size**-0.5),
    )


def check(scores, case, **options):
    *operands, spec = case
    case = (*operands, replace(spec, **options))
    found = scores(*case)
    assert found.dtype == torch.float32
    tolerance = TOLERANCE[case[0].dtype]
    torch.testing.assert_close(found, query_scores_reference(*case), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(float(found.sum()), float(case[0][..., 0].numel()), atol=0, rtol=tolerance)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 1), (9, 3), (2, 2)])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_definition(num_heads, num_kv_heads, options):
    """One query and one head at a time, in float64."""
    q, q_positions, k, k_positions, spec = case(107, 9, num_heads, num_kv_heads, 64)
    votes = torch.zeros(107, dtype=torch.float64, device=DEVICE)
    window, soft_cap = options.get("sliding_window"), options.get("soft_cap")
    for i, at in enumerate(q_positions):
        for head in range(num_heads):
            scores = k[head * num_kv_heads // num_heads].double() @ q[i, head].double() * spec.scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            visible = k_positions <= at
            if window is not None:
                visible &= k_positions > at - window
            votes += torch.softmax(scores.masked_fill(~visible, -torch.inf), 0)
    found = query_scores_reference(q, q_positions, k, k_positions, replace(spec, **options))
    torch.testing.assert_close(found.double(), votes, atol=1e-5, rtol=1e-5)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens, num_queries", [(1, 1), (63, 63), (500, 20)])
def test_types_and_lengths(scores, num_tokens, num_queries, dtype):
    check(scores, case(num_tokens, num_queries, 6, 2, 64, dtype))


@every_implementation
@both_types
def test_a_long_context(scores, dtype):
    check(scores, case(4109, 12, 3, 1, 64, dtype))


@every_implementation
@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (9, 3), (8, 1), (71, 1)])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@both_types
def test_heads(scores, num_heads, num_kv_heads, head_size, dtype):
    check(scores, case(150, 5, num_heads, num_kv_heads, head_size, dtype))


@every_implementation
@pytest.mark.parametrize("options", OPTIONS)
@both_types
def test_windows_and_soft_caps(scores, options, dtype):
    check(scores, case(200, 30, 6, 2, 64, dtype), **options)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_other_strides(scores, dtype):
    """Heads after tokens, between other numbers; NaN there isn't read."""
    q, q_positions, k, *rest = case(70, 9, 6, 2, 64, dtype)
    within = torch.full((72, 3, 64), torch.nan, dtype=dtype, device=DEVICE)
    within[1:-1, :2] = k.transpose(0, 1)
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    check(scores, (q, q_positions, within[1:-1, :2].transpose(0, 1), *rest))


@every_implementation
def test_keys_larger_than_32_bits_can_count(scores):
    """Two heads between which there are 2^31 numbers, in memory that is never touched."""
    q, q_positions, k, *rest = case(20, 3, 4, 2, 64, torch.float16)
    memory = torch.empty((1 << 31) + 4096, dtype=torch.float16, device=DEVICE)
    apart = memory.as_strided(k.shape, (1 << 31, 64, 1)).copy_(k)
    check(scores, (q, q_positions, apart, *rest))


@every_implementation
@both_types
def test_keys_that_nobody_has_written_are_not_seen(scores, dtype):
    """Their positions are after every query's, their numbers may be anything."""
    q, q_positions, k, k_positions, spec = case(200, 12, 6, 2, 64, dtype)
    unknown = k_positions < 40
    k[:, unknown] = torch.nan
    found = scores(q, q_positions, k, k_positions.masked_fill(unknown, (1 << 31) - 1), spec)
    expected = torch.zeros_like(found)
    known = ~unknown
    expected[known] = query_scores_reference(q, q_positions, k[:, known], k_positions[known], spec)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
