"""`kv_fuse` in one launch for all chunks of a request."""

import torch
import triton
import triton.language as tl

from ragkv.kernels.kv_fuse import FIELDS, Staged, table
from ragkv.kernels.operands import PagedKV, Rotation

_NUMBERS = 2048  # of a program: some tokens of one head, in few enough registers


def kv_fuse(chunks: list[Staged], rotation: Rotation | None, kv: PagedKV) -> None:
    """Compute `kv_fuse_reference`. The chunks have one stored type; a head's tokens are contiguous. Keeps nothing of
    them: their memory may be reused once the stream has passed this."""
    if not any(chunk.k.shape[1] for chunk in chunks):
        return
    device = kv.k.device
    num_heads, head_size = len(chunks[0].k), chunks[0].head_size
    block_d = triton.next_power_of_2(head_size)
    block_t = max(1, _NUMBERS // block_d)
    rows = table(chunks)
    numbers = torch.tensor([number for row in rows for number in row], pin_memory=device.type == "cuda")
    num_tiles = triton.cdiv(max(chunk.k.shape[1] for chunk in chunks), block_t)
    _kv_fuse[(num_tiles, num_heads, len(chunks))](
        numbers.to(device, non_blocking=True),
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        kv.k,
        kv.v,
        kv.block_size,
        *kv.k.stride(),
        *kv.v.stride(),
        HEAD_SIZE=head_size,
        PAIRS=0 if rotation is None else rotation.cos.shape[-1],
        NEOX=rotation is None or rotation.neox,
        STORED=_TYPES[chunks[0].k.dtype],
        SCALED=chunks[0].k_scale is not None,
        FP8=chunks[0].k.dtype == torch.float8_e4m3fn,
        PACKED=chunks[0].k_low is not None,
        ALIGN=16 if all(row[0] % 16 == row[1] % 16 == 0 for row in rows) else 1,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        FIELDS=FIELDS,
    )


_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.int8,  # converted by its bits
    torch.uint8: tl.uint8,  # two 4-bit numbers
}


@triton.jit
def _number(x, FP8: tl.constexpr):
    """Decode numbers to float32. e4m3's bits, seven places up, are those of a float16 of 2^-8 times its value."""
    if FP8:
        bits = x.to(tl.int16)
        half = ((bits << 7) & 0x3F80) | (bits & -0x8000)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return x.to(tl.float32)


@triton.jit
def _partners(d, PAIRS: tl.constexpr, NEOX: tl.constexpr):
    """Return each dimension's partner in the rotation, its pair, the partner's sign, and whether it is rotated."""
    if NEOX:
        partner = tl.where(d < PAIRS, d + PAIRS, tl.where(d < 2 * PAIRS, d - PAIRS, d))
        pair = tl.where(d < PAIRS, d, d - PAIRS)
        sign = tl.where(d < PAIRS, -1.0, 1.0)
    else:
        partner = tl.where(d < 2 * PAIRS, d ^ 1, d)
        pair = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    turned = d < 2 * PAIRS
    return partner, tl.where(turned, pair, 0), sign, turned


@triton.jit
def _unpacked(pairs, row, d, mask, HEAD_SIZE: tl.constexpr):
    """Return the 4-bit numbers of these rows and dimensions, 0 to 15, two of which are a byte of pairs."""
    half: tl.constexpr = HEAD_SIZE // 2
    upper = d >= half
    at = row[:, None] * half + tl.where(upper, d - half, d)[None, :]
    return (tl.load(pairs + at, mask=mask, other=0).to(tl.int32) >> tl.where(upper, 4, 0)[None, :]) & 15


@triton.jit
def _added(row, part, head, t, d, valid, HEAD_SIZE: tl.constexpr):
    """Return what is added to K (part 0) or V (1) of these tokens and dimensions, 0 for tokens without a row."""
    rows = tl.load(tl.load(row + 10).to(tl.pointer_type(tl.int32)) + t, mask=valid, other=-1)
    at = (part * tl.num_programs(1) + head) * tl.load(row + 16) + rows
    scale = tl.load(tl.load(row + 11).to(tl.pointer_type(tl.float16)) + at, mask=rows >= 0, other=0.0).to(tl.float32)
    has = (rows >= 0)[:, None] & (d < HEAD_SIZE)[None, :]
    numbers = _unpacked(tl.load(row + 12).to(tl.pointer_type(tl.uint8)), at, d, has, HEAD_SIZE)
    return (numbers - 8).to(tl.float32) * scale[:, None]


@triton.jit
def _decoded(
    row,
    part: tl.constexpr,
    head,
    t,
    d,
    valid,
    written,
    HEAD_SIZE: tl.constexpr,
    STORED: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Return K (part 0) or V (1) of these tokens and dimensions, with the addend."""
    numbers = tl.multiple_of(tl.load(row + part).to(tl.pointer_type(STORED)), ALIGN)
    at = head * tl.load(row + 17) + t  # in memory, of all heads' tokens
    if PACKED:
        x = _unpacked(numbers, at, d, written, HEAD_SIZE).to(tl.float32)
    else:
        x = _number(tl.load(numbers + at[:, None] * HEAD_SIZE + d[None, :], mask=written, other=0), FP8)
    if SCALED:
        scales = tl.load(row + 2 + part).to(tl.pointer_type(tl.float16 if PACKED else tl.float32))
        if part == 0:
            group, has = (head * HEAD_SIZE + d)[None, :], (d < HEAD_SIZE)[None, :]
        else:
            group, has = at[:, None], valid[:, None]
        x = x * tl.load(scales + group, mask=has, other=0.0).to(tl.float32)
        if PACKED:
            lows = tl.load(row + 4 + part).to(tl.pointer_type(tl.float16))
            x += tl.load(lows + group, mask=has, other=0.0).to(tl.float32)
    if tl.load(row + 10) != 0:
        x += _added(row, part, head, t, d, valid, HEAD_SIZE)
    return x


@triton.jit(do_not_specialize=["block_size"])
def _kv_fuse(
    rows,
    cos,
    sin,
    key_cache,
    value_cache,
    block_size,
    key_block,
    key_row,
    key_head,
    key_number,
    value_block,
    value_row,
    value_head,
    value_number,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    NEOX: tl.constexpr,
    STORED: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
    PACKED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Write some tokens of one head of one chunk; of a short chunk, some programs have none."""
    first, head = tl.program_id(0) * BLOCK_T, tl.program_id(1).to(tl.int64)
    row = rows + tl.program_id(2) * FIELDS
    num_tokens, moved, start = tl.load(row + 13), tl.load(row + 14), tl.load(row + 15)
    if first >= num_tokens:
        return
    t = first + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    valid, within = t < num_tokens, d < HEAD_SIZE
    slots = tl.load(tl.load(row + 6).to(tl.pointer_type(tl.int64)) + t, mask=valid, other=-1)
    written = (slots >= 0)[:, None] & within[None, :]

    partner, pair, sign, turned = _partners(d, PAIRS, NEOX)
    k = _decoded(row, 0, head, t, d, valid, written, HEAD_SIZE, STORED, SCALED, FP8, PACKED, ALIGN)
    if PAIRS:
        other = _decoded(row, 0, head, t, partner, valid, written, HEAD_SIZE, STORED, SCALED, FP8, PACKED, ALIGN)
        distance = tl.abs(moved)
        c = tl.load(cos + distance * PAIRS + pair, mask=turned, other=1.0)
        s = tl.load(sin + distance * PAIRS + pair, mask=turned, other=0.0) * tl.where(moved < 0, -1.0, 1.0)
        k = k * c[None, :] + other * (sign * s)[None, :]
    v = _decoded(row, 1, head, t, d, valid, written, HEAD_SIZE, STORED, SCALED, FP8, PACKED, ALIGN)

    if tl.load(row + 9) != 0:
        weights = tl.load(tl.load(row + 9).to(tl.pointer_type(tl.float32)) + t, mask=valid, other=0.0)[:, None]
        shift_k = tl.load(row + 7).to(tl.pointer_type(tl.float32)) + head * HEAD_SIZE
        term = tl.load(shift_k + d, mask=within, other=0.0)[None, :]
        if PAIRS:
            across = sign * tl.load(shift_k + partner, mask=within, other=0.0)
            angles = (start + t)[:, None] * PAIRS + pair[None, :]
            turning = valid[:, None] & turned[None, :]
            term = term * tl.load(cos + angles, mask=turning, other=1.0)
            term += across[None, :] * tl.load(sin + angles, mask=turning, other=0.0)
        k += weights * term
        shift_v = tl.load(row + 8).to(tl.pointer_type(tl.float32)) + head * HEAD_SIZE
        v += weights * tl.load(shift_v + d, mask=within, other=0.0)[None, :]

    block, line = slots // block_size, slots % block_size
    to = (block * key_block + line * key_row + head * key_head)[:, None] + (d * key_number)[None, :]
    tl.store(key_cache + to, k.to(key_cache.dtype.element_ty), mask=written)
    to = (block * value_block + line * value_row + head * value_head)[:, None] + (d * value_number)[None, :]
    tl.store(value_cache + to, v.to(value_cache.dtype.element_ty), mask=written)
