"""`kv_fuse`: chunks' K and V, as they are stored, into a request's paged cache, keys rotated to their new positions."""

from dataclasses import dataclass

import torch

from ragkv.kernels.operands import PagedKV, Rotation


@dataclass(frozen=True)
class KVShift:
    """The mean shift of a chunk's recomputed tokens, for its other tokens (`ragkv.engine.shift`).

    w(t) R(start + t) k is added to the key of token t, and w(t) v to its value. k, v: `[Hkv, D]` float32; weights:
    `[T]` float32; start: the position of the chunk's first token.
    """

    k: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    start: int


@dataclass(frozen=True)
class Addend:
    """What is added to the K and V of some of a chunk's tokens, before K is rotated (`ragkv.store.difference`).

    rows: `[T]` int32, which of n rows is a token's; below 0: none. scale: `[2, Hkv, n, 1]` float16, of K, then of V.
    numbers: `[2, Hkv, n, D / 2]`, packed (`unpacked`): what is added is (number - 8) times its scale.
    """

    rows: torch.Tensor
    scale: torch.Tensor
    numbers: torch.Tensor

    def decoded(self) -> torch.Tensor:
        """Return what is added to K and V of the n tokens, `[2, Hkv, n, D]` float32."""
        return unpacked(self.numbers).sub_(8).mul_(self.scale.float())


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit numbers in uint8 `[..., D / 2]`, float32: of dimension i in the lower bits, i + D / 2 in the
    upper."""
    return torch.cat([pairs & 15, pairs >> 4], dim=-1).float()


@dataclass(frozen=True)
class Staged:
    """One layer of a chunk on the device, as the store has it.

    k, v: `[Hkv, T, D]`, perhaps some tokens of a longer chunk, float32, float16 or bfloat16, or with scales int8 or
    float8_e4m3fn, or with scales and lows 4-bit numbers, packed in uint8 `[Hkv, T, D / 2]`. slots: `[T]` int64, each
    token's slot in the paged cache; below 0: not written. moved: by how many positions the keys are rotated further
    than where they were computed. k_scale, k_low `[Hkv, 1, D]`, v_scale, v_low `[Hkv, T, 1]`, float32, of packed
    numbers float16: a number is the stored one times its scale, plus its low. shift: None where no token of the chunk
    was recomputed. addend: None where KV is as it is stored.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    moved: int = 0
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_low: torch.Tensor | None = None
    v_low: torch.Tensor | None = None
    shift: KVShift | None = None
    addend: Addend | None = None

    @property
    def head_size(self) -> int:
        return self.k.shape[2] if self.k_low is None else 2 * self.k.shape[2]

    def decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V `[Hkv, T, D]`, float32, without the addend."""
        k, v = (x.float() if self.k_low is None else unpacked(x) for x in (self.k, self.v))
        if self.k_scale is not None and self.v_scale is not None:
            k, v = k * self.k_scale, v * self.v_scale
        if self.k_low is not None and self.v_low is not None:
            k, v = k + self.k_low, v + self.v_low
        return k, v


FIELDS = 18  # of a row of `table`


def table(chunks: list[Staged]) -> list[list[int]]:
    """Return what a kernel needs to know of each chunk, FIELDS numbers: the addresses of k, v, their scales, their
    lows, of the slots, of the shift's k, v and weights and of the addend's rows, scale and numbers (0: none), the
    number of tokens, how far it moves, where it starts, the addend's number of rows, and how many tokens further in
    memory the next head's k, v, v_scale and v_low begin."""
    rows = []
    for chunk in chunks:
        num_heads, num_tokens, size = chunk.k.shape
        stride = chunk.k.stride(0) // size if num_heads > 1 else num_tokens
        by_head = (chunk.k, chunk.v, chunk.v_scale, chunk.v_low)
        assert all(part is None or _is_by_head(part, stride) for part in by_head)
        shift, addend = chunk.shift, chunk.addend
        moving = (shift.k, shift.v, shift.weights) if shift else (None, None, None)
        added = (addend.rows, addend.scale, addend.numbers) if addend else (None, None, None)
        whole = (chunk.k_scale, chunk.k_low, chunk.slots, *moving, *added)
        assert all(part is None or part.is_contiguous() for part in whole)
        k_scale, k_low, *others = (0 if part is None else part.data_ptr() for part in whole)
        k, v, v_scale, v_low = (0 if part is None else part.data_ptr() for part in by_head)
        numbers = (num_tokens, chunk.moved, shift.start if shift else 0, addend.scale.shape[2] if addend else 0, stride)
        rows.append([k, v, k_scale, v_scale, k_low, v_low, *others, *numbers])
    return rows


def _is_by_head(part: torch.Tensor, stride: int) -> bool:
    """Return whether the tokens of a head are contiguous, and the next head's begin `stride` tokens further."""
    (num_heads, num_tokens, size), strides = part.shape, part.stride()
    by_token = (num_tokens == 1 or strides[1] == size) and (size == 1 or strides[2] == 1)
    return by_token and (num_heads == 1 or strides[0] == stride * size)


def kv_fuse_reference(chunks: list[Staged], rotation: Rotation | None, kv: PagedKV) -> None:
    """Write the chunks' K and V into their slots of the cache, in its type: the definition, computed in float32."""
    for chunk in chunks:
        k, v = chunk.decoded()
        if chunk.addend is not None:
            added, rows = chunk.addend.decoded(), chunk.addend.rows
            k, v = (torch.where(rows[:, None] >= 0, x + y[:, rows], x) for x, y in zip((k, v), added, strict=True))
        if rotation is not None and chunk.moved:
            k = rotation.rotate(k, chunk.moved)
        if chunk.shift is not None:
            weights = chunk.shift.weights[:, None]
            positions = torch.arange(chunk.shift.start, chunk.shift.start + k.shape[1], device=k.device)
            mean = chunk.shift.k[:, None].expand(-1, k.shape[1], -1)
            k = k + weights * (mean if rotation is None else rotation.rotate(mean.contiguous(), positions))
            v = v + weights * chunk.shift.v[:, None]
        written = chunk.slots >= 0
        slots = chunk.slots[written]
        block, row = slots // kv.block_size, slots % kv.block_size
        kv.k[block, row] = k[:, written].transpose(0, 1).to(kv.k.dtype)
        kv.v[block, row] = v[:, written].transpose(0, 1).to(kv.v.dtype)
