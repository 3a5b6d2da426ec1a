"""Every implementation of `kv_fuse` against the definition."""

from dataclasses import replace

import pytest
import torch
from implementations import DEVICE, TOLERANCE, implementations
from rope_reference import table

from ragkv.kernels.kv_fuse import Addend, KVShift, Staged, kv_fuse_reference
from ragkv.kernels.operands import PagedKV, Rotation

BLOCK_SIZE = 16
ROTATIONS = [(64, 64, True), (64, 32, False), (80, 32, True), (96, 96, False), (128, 128, True), (256, 64, False)]
_BY_TOKEN = ("k", "v", "v_scale", "v_low")
LAYOUTS = ("NHD", "NHD by block", "HND", "one block")

every_implementation = pytest.mark.parametrize("kv_fuse", implementations("kv_fuse", "triton", "native"))


def paged(layout, num_blocks, num_heads, head_size, dtype):
    """A NaN-filled cache, its blocks in order."""
    return PagedKV(*caches(layout, num_blocks, num_heads, head_size, dtype), torch.arange(num_blocks, device=DEVICE))


def caches(layout, num_blocks, num_heads, head_size, dtype):
    """K and V, NaN-filled, as `[blocks, block_size, Hkv, D]`, in the layouts of vLLM's backends and, as one
    block, in a chunk's own."""
    match layout:
        case "NHD":
            return filled(2, num_blocks, BLOCK_SIZE, num_heads, head_size, dtype=dtype).unbind(0)
        case "NHD by block":
            return filled(num_blocks, 2, BLOCK_SIZE, num_heads, head_size, dtype=dtype).unbind(1)
        case "HND":
            return filled(2, num_blocks, num_heads, BLOCK_SIZE, head_size, dtype=dtype).transpose(2, 3).unbind(0)
        case "one block":
            both = filled(2, num_heads, num_blocks * BLOCK_SIZE, head_size, dtype=dtype)
            return both.transpose(1, 2)[:, None].unbind(0)
        case "K by columns":
            k, v = filled(2, num_blocks, num_heads, BLOCK_SIZE * head_size, dtype=dtype).unbind(0)
            columns, rows = k.unflatten(2, (head_size, BLOCK_SIZE)), v.unflatten(2, (BLOCK_SIZE, head_size))
            return columns.permute(0, 3, 1, 2), rows.transpose(1, 2)


def filled(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def rotation(rotated, neox):
    rotation = Rotation.from_table(table(2048, rotated), neox)
    return Rotation(rotation.cos.to(DEVICE), rotation.sin.to(DEVICE), neox)


def staged(generator, slots, num_heads, head_size, stored, moved):
    shape = (num_heads, len(slots), head_size)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    scales = ()
    if stored == torch.uint8:
        grids = [(num_heads, 1, head_size), (num_heads, len(slots), 1)] * 2
        scales = (torch.randn(*each, generator=generator).half().to(DEVICE) for each in grids)
        k, v = (torch.randint(256, (*shape[:2], head_size // 2), generator=generator) for _ in range(2))
    if stored in (torch.int8, torch.float8_e4m3fn):
        largest = 127 if stored == torch.int8 else 448
        k, v = (largest * x.tanh() for x in (k, v))
        scales = (torch.rand(num_heads, *each, generator=generator) for each in ((1, head_size), (len(slots), 1)))
        scales = (scale.to(DEVICE) / largest for scale in scales)
    return Staged(k.to(stored).to(DEVICE), v.to(stored).to(DEVICE), slots.to(DEVICE), moved, *scales)


def request(lengths, num_heads, head_size, stored):
    """Chunks in slots at random, some tokens of which aren't to be written; and how many blocks they take."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = sum(lengths) // BLOCK_SIZE + 3
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[: sum(lengths)]
    slots[torch.rand(len(slots), generator=generator) < 0.1] = -1
    moves = [700, -37, 0]
    parts = enumerate(slots.split(lengths))
    return [staged(generator, part, num_heads, head_size, stored, moves[i % 3]) for i, part in parts], num_blocks


def shifted(chunks):
    """Every chunk but the second with a mean shift."""
    generator, found, start = torch.Generator().manual_seed(1), [], 0
    for chunk in chunks:
        num_heads, num_tokens, head_size = *chunk.k.shape[:2], chunk.head_size
        k, v = (torch.randn(num_heads, head_size, generator=generator).to(DEVICE) for _ in range(2))
        weights = torch.rand(num_tokens, generator=generator).to(DEVICE)
        found.append(chunk if len(found) == 1 else replace(chunk, shift=KVShift(k, v, weights, start)))
        start += num_tokens
    return found


def with_addends(chunks):
    """The first chunk with an addend to every other token, the others with one to their last."""
    generator, found = torch.Generator().manual_seed(2), []
    for i, chunk in enumerate(chunks):
        num_heads, num_tokens, head_size = *chunk.k.shape[:2], chunk.head_size
        tokens = torch.arange(num_tokens)[::2] if i == 0 else torch.tensor([num_tokens - 1])
        rows = torch.full((num_tokens,), -1, dtype=torch.int32).index_copy(0, tokens, torch.arange(len(tokens)).int())
        scale = torch.rand(2, num_heads, len(tokens), 1, generator=generator).half()
        numbers = torch.randint(256, (2, num_heads, len(tokens), head_size // 2), generator=generator)
        addend = Addend(rows.to(DEVICE), scale.to(DEVICE), numbers.to(torch.uint8).to(DEVICE))
        found.append(replace(chunk, addend=addend))
    return found


def check(kv_fuse, chunks, turning, layout, num_blocks, dtype):
    num_heads, head_size = len(chunks[0].k), chunks[0].head_size
    found, expected = (paged(layout, num_blocks, num_heads, head_size, dtype) for _ in range(2))
    kv_fuse(chunks, turning, found)
    kv_fuse_reference(chunks, turning, expected)
    for one, other in ((found.k, expected.k), (found.v, expected.v)):
        assert torch.equal(one.isnan(), other.isnan())  # all that is to be is written, and nothing else
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@every_implementation
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("stored", ["raw", torch.int8, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_types_and_layouts(kv_fuse, dtype, stored, layout):
    chunks, num_blocks = request([33, 1], 2, 64, dtype if stored == "raw" else stored)
    check(kv_fuse, chunks, rotation(64, True), layout, num_blocks, dtype)


@pytest.mark.parametrize("kv_fuse", implementations("kv_fuse", "triton"))
def test_keys_by_columns(kv_fuse):
    """As vLLM has them on CPU."""
    chunks, num_blocks = request([33, 1], 2, 64, torch.float32)
    check(kv_fuse, shifted(chunks), rotation(64, True), "K by columns", num_blocks, torch.float32)


@every_implementation
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cache_of_another_type_than_stored(kv_fuse, stored):
    chunks, num_blocks = request([20], 2, 64, stored)
    check(kv_fuse, chunks, rotation(64, True), "NHD", num_blocks, torch.float16)


@every_implementation
@pytest.mark.parametrize("num_heads", [1, 3, 8])
@pytest.mark.parametrize("head_size, rotated, neox", ROTATIONS)
def test_heads_and_rotations(kv_fuse, num_heads, head_size, rotated, neox):
    chunks, num_blocks = request([2, 6], num_heads, head_size, torch.float32)
    check(kv_fuse, shifted(chunks), rotation(rotated, neox), "NHD", num_blocks, torch.float32)


@every_implementation
@pytest.mark.parametrize(
    "lengths, stored", [([1], torch.float32), ([500], torch.int8), ([63, 33, 1], torch.float32), ([40], torch.uint8)]
)
@pytest.mark.parametrize("neox", [True, False, None])
def test_mean_shifts_of_recomputed_tokens(kv_fuse, lengths, neox, stored):
    chunks, num_blocks = request(lengths, 2, 64, stored)
    turning = None if neox is None else rotation(64, neox)
    check(kv_fuse, shifted(chunks), turning, "NHD", num_blocks, torch.float32)


@every_implementation
@pytest.mark.parametrize(
    "lengths, stored",
    [([1], torch.float32), ([70, 7], torch.int8), ([33], torch.float8_e4m3fn), ([33, 1], torch.uint8)],
)
@pytest.mark.parametrize("head_size, rotated, neox", [(80, 32, True), (128, 128, False)])
def test_what_some_tokens_are_added(kv_fuse, lengths, stored, head_size, rotated, neox):
    chunks, num_blocks = request(lengths, 3, head_size, stored)
    for each in (with_addends(chunks), shifted(with_addends(chunks)), [*with_addends(chunks)[:1], *chunks[1:]]):
        check(kv_fuse, each, rotation(rotated, neox), "NHD", num_blocks, torch.float32)


@every_implementation
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_some_tokens_of_a_longer_chunk(kv_fuse, stored, num_heads):
    chunks, num_blocks = request([33, 20], num_heads, 64, stored)

    def tokens(each):
        cut = {name: None if x is None else x[:, 3:18] for name in _BY_TOKEN for x in [getattr(each, name)]}
        return replace(each, slots=each.slots[3:18], **cut)

    check(kv_fuse, shifted(map(tokens, chunks)), rotation(64, True), "NHD", num_blocks, torch.float32)


@every_implementation
def test_packed_numbers_by_hand(kv_fuse):
    """Scale and low of K by channel, of V by token."""
    k, v = (
        torch.tensor([pairs], dtype=torch.uint8, device=DEVICE)
        for pairs in ([[1 | 15 << 4, 2], [3, 0]], [[0, 7], [8 << 4, 5]])
    )
    grids = ([[1, 2, 0.5, 1]], [[1], [2]], [[0, -1, 10, 0.25]], [[0], [-3]])
    grids = (torch.tensor([each], dtype=torch.float16, device=DEVICE) for each in grids)
    found = paged("NHD", 1, 1, 4, torch.float32)
    kv_fuse([Staged(k, v, torch.arange(2, device=DEVICE), 0, *grids)], None, found)
    assert found.k[0, :2, 0].tolist() == [[1, 3, 17.5, 0.25], [3, -1, 10, 0.25]]
    assert found.v[0, :2, 0].tolist() == [[0, 7, 0, 0], [-3, 7, 13, -3]]


@every_implementation
def test_what_is_added_by_hand(kv_fuse):
    zero = torch.zeros(1, 2, 4, device=DEVICE)
    numbers = torch.tensor([[[[8 + 1 | 15 << 4, 8 | 0 << 4]]], [[[1, 8]]]], dtype=torch.uint8, device=DEVICE)
    scale = torch.tensor([[[[2.0]]], [[[0.5]]]], dtype=torch.float16, device=DEVICE)
    rows = torch.tensor([-1, 0], dtype=torch.int32, device=DEVICE)
    found = paged("NHD", 1, 1, 4, torch.float32)
    kv_fuse([Staged(zero, zero, torch.arange(2, device=DEVICE), addend=Addend(rows, scale, numbers))], None, found)
    assert found.k[0, :2, 0].tolist() == [[0, 0, 0, 0], [2, 0, 14, -16]]
    assert found.v[0, :2, 0].tolist() == [[0, 0, 0, 0], [-3.5, 0, -4, -4]]


@every_implementation
def test_tensors_that_do_not_begin_at_a_multiple_of_16_bytes(kv_fuse):
    slots = torch.arange(7, 12, device=DEVICE)
    k, v = torch.randn(2, 2 * 5 * 64 + 2, device=DEVICE)
    chunk = Staged(k[1:-1].view(2, 5, 64), v[2:].view(2, 5, 64), slots, 300)
    check(kv_fuse, [chunk], rotation(64, True), "NHD", 2, torch.float32)


@every_implementation
def test_every_code_of_e4m3_is_exact(kv_fuse):
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[[0x7F, 0xFF]] = 0  # NaN
    stored = codes.view(torch.float8_e4m3fn).view(1, 4, 64)
    ones = (torch.ones(1, *shape, device=DEVICE) for shape in ((1, 64), (4, 1)))
    found = paged("NHD", 1, 1, 64, torch.float32)
    kv_fuse([Staged(stored, stored.flip(1), torch.arange(4, device=DEVICE), 0, *ones)], None, found)
    assert torch.equal(found.k[0, :4, 0], stored[0].float())
    assert torch.equal(found.v[0, :4, 0], stored.flip(1)[0].float())


@every_implementation
def test_caches_larger_than_32_bits_can_count(kv_fuse):
    """Two blocks of a cache between which there are 2^31 numbers, in memory that is never touched."""
    memory = torch.empty((1 << 31) + 8192, dtype=torch.float16, device=DEVICE)
    kv = PagedKV(
        *(memory.as_strided((2, BLOCK_SIZE, 2, 64), (1 << 31, 128, 64, 1), begin) for begin in (0, 4096)),
        torch.arange(2),
    )
    slots = torch.tensor([3, 2 * BLOCK_SIZE - 1])
    chunk = staged(torch.Generator().manual_seed(0), slots, 2, 64, torch.float16, 9)
    kv_fuse([chunk], None, kv)
    for cache, x in ((kv.k, chunk.k), (kv.v, chunk.v)):
        assert torch.equal(cache[0, 3], x[:, 0])
        assert torch.equal(cache[-1, -1], x[:, 1])


@every_implementation
def test_nothing_to_write(kv_fuse):
    found = paged("NHD", 1, 2, 64, torch.float32)
    nothing = Staged(torch.empty(2, 0, 64), torch.empty(2, 0, 64), torch.empty(0, dtype=torch.int64))
    kv_fuse([], None, found)
    kv_fuse([nothing], None, found)
    assert found.k.isnan().all() and found.v.isnan().all()
