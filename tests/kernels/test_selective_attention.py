"""`selective_attention`: the definition against torch's causal attention, every implementation against it."""

from dataclasses import dataclass, replace

import pytest
import torch
from implementations import DEVICE, TOLERANCE, implementations

from ragkv.kernels.operands import AttentionSpec, PagedKV
from ragkv.kernels.selective_attention import selective_attention_reference

BLOCK_SIZE = 16

both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # whose products are taken differently
every_implementation = pytest.mark.parametrize(
    "attention", implementations("selective_attention", "triton", "native", "torch")
)


@dataclass(frozen=True)
class Case:
    """q: `[Q, Hq, D]`; positions: `[Q]`; k, v: `[Hkv, N, D]`."""

    q: torch.Tensor
    positions: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def expected(self, **options):
        """By the definition, K and V as one block."""
        one_block = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        kv = PagedKV(*(x.transpose(0, 1)[None] for x in (self.k, self.v)), one_block)
        return selective_attention_reference(self.q, self.positions, kv, self.spec(**options))

    def spec(self, **options):
        return AttentionSpec(self.q.shape[-1] ** -0.5, **options)

    def paged(self, layout="NHD", window=None):
        """K and V in blocks at random, NaN wherever no query looks."""
        num_kv_heads, num_tokens, head_size = self.k.shape
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        table = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(1))[:num_blocks].to(DEVICE)
        shape = (2, num_blocks + 2, BLOCK_SIZE, num_kv_heads, head_size)
        if layout == "HND":
            caches = torch.empty(*shape[:2], *shape[3:1:-1], head_size, dtype=self.k.dtype, device=DEVICE).transpose(
                2, 3
            )
        elif layout == "K by columns":
            both = torch.empty(num_blocks + 2, num_kv_heads, 2, shape[2] * head_size, dtype=self.k.dtype, device=DEVICE)
            columns, rows = both.unbind(2)
            caches = [
                columns.unflatten(2, (head_size, BLOCK_SIZE)).permute(0, 3, 1, 2),
                rows.unflatten(2, (BLOCK_SIZE, head_size)).transpose(1, 2),
            ]
        else:
            caches = torch.empty(shape, dtype=self.k.dtype, device=DEVICE)
        for cache in caches:
            cache.fill_(torch.nan)
        first = 0 if window is None else max(0, int(self.positions[0]) - window + 1)
        places = torch.arange(first, int(self.positions[-1]) + 1, device=DEVICE)
        for cache, x in zip(caches, (self.k, self.v), strict=True):
            cache[table[places // BLOCK_SIZE], places % BLOCK_SIZE] = x[:, places].transpose(0, 1)
        return PagedKV(*caches, table)


def case(num_tokens, num_queries, num_heads, num_kv_heads, head_size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    positions = torch.randperm(num_tokens, generator=generator)[:num_queries].sort().values
    q = torch.randn(num_queries, num_heads, head_size, generator=generator)
    k, v = (torch.randn(num_kv_heads, num_tokens, head_size, generator=generator) for _ in range(2))
    return Case(q.to(DEVICE, dtype), positions.to(DEVICE), k.to(DEVICE, dtype), v.to(DEVICE, dtype))


def check(attention, case, layout="NHD", **options):
    found = attention(case.q, case.positions, case.paged(layout, options.get("sliding_window")), case.spec(**options))
    assert found.dtype == case.q.dtype
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), case.expected(**options), atol=tolerance, rtol=tolerance)


def test_the_definition_is_causal_attention():
    every = case(70, 70, 6, 2, 64)
    plain = torch.nn.functional.scaled_dot_product_attention(
        every.q.transpose(0, 1), every.k.repeat_interleave(3, 0), every.v.repeat_interleave(3, 0), is_causal=True
    )
    torch.testing.assert_close(every.expected(), plain.transpose(0, 1))


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens, num_queries", [(1, 1), (63, 63), (500, 50)])
def test_types_and_lengths(attention, num_tokens, num_queries, dtype):
    check(attention, case(num_tokens, num_queries, 6, 2, 64, dtype))


@every_implementation
@both_types
def test_a_long_context(attention, dtype):
    check(attention, case(4109, 20, 3, 1, 64, dtype))


@every_implementation
@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (9, 3), (8, 2), (8, 1)])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@both_types
def test_heads(attention, num_heads, num_kv_heads, head_size, dtype):
    check(attention, case(90, 25, num_heads, num_kv_heads, head_size, dtype))


@every_implementation
def test_more_heads_than_rows_of_a_tile(attention):
    check(attention, case(40, 3, 71, 1, 64))


@every_implementation
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 1}, {"sliding_window": 40}, {"soft_cap": 2.0}, {"sliding_window": 90, "soft_cap": 5.0}],
)
@both_types
def test_windows_and_soft_caps(attention, options, dtype):
    scattered = case(200, 60, 6, 2, 64, dtype)
    late = scattered.positions >= 100  # the first tokens are in no window
    check(attention, replace(scattered, q=scattered.q[late], positions=scattered.positions[late]), **options)


@every_implementation
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40, "soft_cap": 5.0}])
@both_types
def test_sinks(attention, options, dtype):
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0, 0.5, 9.0], device=DEVICE)
    check(attention, case(150, 50, 6, 2, 64, dtype), sinks=sinks, **options)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 50}])
@pytest.mark.parametrize("head_size", [64, 80])
def test_keys_by_columns(attention, dtype, options, head_size):
    """As vLLM has them on CPU."""
    some = case(300, 60, 6, 2, head_size, dtype)
    late = some.positions >= 100
    some = replace(some, q=some.q[late], positions=some.positions[late])
    check(attention, some, layout="K by columns", **options)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_other_strides(attention, dtype):
    """Heads before tokens, in q and in the caches."""
    contiguous = case(100, 30, 6, 2, 64, dtype)
    q = contiguous.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not q.is_contiguous()
    check(attention, replace(contiguous, q=q), layout="HND")


@every_implementation
def test_caches_larger_than_32_bits_can_count(attention):
    """Two blocks between which there are 2^31 numbers, in memory that is never touched."""
    some = case(2 * BLOCK_SIZE, 9, 2, 2, 64, torch.float16)
    memory = torch.empty((1 << 31) + 8192, dtype=torch.float16, device=DEVICE)
    caches = [memory.as_strided((2, BLOCK_SIZE, 2, 64), (1 << 31, 128, 64, 1), begin) for begin in (0, 4096)]
    for cache, x in zip(caches, (some.k, some.v), strict=True):
        cache.copy_(x.view(2, 2, BLOCK_SIZE, 64).permute(1, 2, 0, 3))
    found = attention(some.q, some.positions, PagedKV(*caches, torch.tensor([0, 1], device=DEVICE)), some.spec())
    torch.testing.assert_close(found.float(), some.expected(), atol=4e-3, rtol=4e-3)


@every_implementation
def test_later_tokens_are_not_seen(attention):
    some = case(200, 20, 4, 2, 64)
    before = attention(some.q, some.positions, some.paged(), some.spec())
    some.k[:, int(some.positions[7]) + 1 :] = 100.0
    after = attention(some.q, some.positions, some.paged(), some.spec())
    assert torch.equal(before[:8], after[:8])
    assert not torch.equal(before[8:], after[8:])
