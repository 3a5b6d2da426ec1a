"""Codecs between K and V of a chunk in one layer and bytes. Pure functions of tensors.

All but `raw` scale K by channel, over a chunk's tokens, and V by token, over a head's channels: outliers of K lie in
few channels, those of V in none (KIVI, ICML'24). With `int8` and `fp8` a stored number is x / scale, the scale the
largest |x| of its group over the largest number of the type. With `int4` it is (x - low) / scale, 0 to 15, from the
smallest x of its group to the largest.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from ragkv.store.packing import pack, unpack

_K_GROUP, _V_GROUP = 1, 2  # the dimension of `[Hkv, T, D]` that shares a scale
_STEPS: Final = 15  # from the smallest number of 4 bits to the largest


@dataclass(frozen=True)
class Codec:
    """code: its number in a record's header. stored: the type that K and V are stored in, None: as they are; uint8: two
    numbers a byte. of_others: what stores KV that is no mean, None: the same. A mean is made of such KV, and so is the
    prompt's start: an error there is in all that comes of it. share: of a mean's tokens, counted in each layer, how
    many get a difference at most (`ragkv.store.difference`)."""

    name: str
    code: int
    stored: torch.dtype | None = None
    of_others: "Codec | None" = None
    share: float = 1.0

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """Encode k, v `[Hkv, T, D]`. The scales, then the lows, come first: of K `[Hkv, 1, D]`, of V `[Hkv, T, 1]`."""
        if self.stored is None:
            return to_bytes(k) + to_bytes(v)
        quantise = _in_steps if self.stored == torch.uint8 else self._quantise
        (*of_k, k_stored), (*of_v, v_stored) = quantise(k, _K_GROUP), quantise(v, _V_GROUP)
        grids = [each for pair in zip(of_k, of_v, strict=True) for each in pair]
        return b"".join(map(to_bytes, (*grids, k_stored, v_stored)))

    def split(self, payload: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> "Stored":
        """Return the parts of what `encode` made, sharing its memory. dtype: of K and V before they were encoded."""
        parts, start = [], 0
        for part_shape, part_dtype in self._parts(shape, dtype):
            count = math.prod(part_shape)
            parts.append(torch.frombuffer(payload, dtype=part_dtype, count=count, offset=start).view(part_shape))
            start += parts[-1].nbytes
        *grids, k, v = parts
        return Stored(k, v, *grids)

    def num_bytes(self, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        return sum(math.prod(part_shape) * each.itemsize for part_shape, each in self._parts(shape, dtype))

    def of(self, *, is_mean: bool) -> "Codec":
        """Return the codec that stores KV of this kind where this one is chosen."""
        return self if is_mean or self.of_others is None else self.of_others

    def _parts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> list[tuple[tuple[int, int, int], torch.dtype]]:
        """Return shape and type of each part of what `encode` makes."""
        heads, tokens, size = shape
        by_channel, by_token = (heads, 1, size), (heads, tokens, 1)
        if self.stored is None:
            return [(shape, dtype)] * 2
        if self.stored == torch.uint8:
            half = torch.float16
            return [(by_channel, half), (by_token, half)] * 2 + [((heads, tokens, size // 2), self.stored)] * 2
        return [(by_channel, torch.float32), (by_token, torch.float32), *[(shape, self.stored)] * 2]

    def _quantise(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.stored is not None
        x = x.float()
        whole = not self.stored.is_floating_point
        largest = 127.0 if whole else torch.finfo(self.stored).max
        scale = (x.abs().amax(dim, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = x / scale
        return scale, (scaled.round() if whole else scaled).clamp(-largest, largest).to(self.stored)


def _in_steps(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scale, low and packed numbers: x is low + scale times its number."""
    x, limits = x.float(), torch.finfo(torch.float16)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    low = low.clamp(limits.min, limits.max).half()
    scale = ((high - low.float()) / _STEPS).clamp(limits.tiny, limits.max).half()
    return scale, low, pack(((x - low.float()) / scale.float()).round().clamp(0, _STEPS))


@dataclass(frozen=True)
class Stored:
    """K and V as they are stored, `[Hkv, T, D]`, or packed `[Hkv, T, D / 2]` uint8.

    With scales (K's `[Hkv, 1, D]`, V's `[Hkv, T, 1]`) a number is the stored one times its scale, plus the low, which
    packed ones have. float32, of packed ones float16.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_low: torch.Tensor | None = None
    v_low: torch.Tensor | None = None


def restored(stored: torch.Tensor, scale: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """Return what was stored, `[Hkv, T, D]` float32."""
    return times(stored, scale) if low is None else unpack(stored).mul_(scale.float()).add_(low.float())


def times(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply in float32. torch converts e4m3 number by number; as half-precision numbers, which have the same bits
    seven higher, and an exponent bias that is 8 more, it takes a quarter of the time."""
    if stored.dtype != torch.float8_e4m3fn:
        return stored * scale
    half = stored.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~0x4000).view(torch.float16)
    return half.float().mul_(scale * 2.0**8)


RAW = Codec("raw", 0)
INT8 = Codec("int8", 1, torch.int8)
FP8 = Codec("fp8", 2, torch.float8_e4m3fn)
INT4 = Codec("int4", 3, torch.uint8, of_others=INT8, share=0.06)
CODECS = {codec.name: codec for codec in (RAW, INT8, FP8, INT4)}
CODE_TO_CODEC = {codec.code: codec for codec in CODECS.values()}


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
