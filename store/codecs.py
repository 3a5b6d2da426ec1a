"""Codecs between K and V of a chunk in one layer and bytes. Pure functions of tensors.

`int8` and `fp8` scale K by channel, over a chunk's tokens, and V by token, over a head's channels: outliers of K lie in
few channels, those of V in none (KIVI, ICML'24). A stored number is x / scale, the scale the largest |x| of its group
over the largest number of the type.
"""

from dataclasses import dataclass

import torch

_K_GROUP, _V_GROUP = 1, 2  # the dimension of `[Hkv, T, D]` that shares a scale


@dataclass(frozen=True)
class Codec:
    """code: its number in a record's header. stored: the type that K and V are stored in, None: as they are."""

    name: str
    code: int
    stored: torch.dtype | None = None

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> bytes:
        """Encode k, v `[Hkv, T, D]`. The scales come first: K's `[Hkv, 1, D]`, V's `[Hkv, T, 1]`, float32."""
        if self.stored is None:
            return to_bytes(k) + to_bytes(v)
        (k_scale, k_stored), (v_scale, v_stored) = self._quantise(k, _K_GROUP), self._quantise(v, _V_GROUP)
        return b"".join(map(to_bytes, (k_scale, v_scale, k_stored, v_stored)))

    def split(self, payload: memoryview, shape: tuple[int, int, int], dtype: torch.dtype) -> "Stored":
        """Return the parts of what `encode` made, sharing its memory. dtype: of K and V before they were encoded."""
        heads, tokens, size = shape
        scales, start = [], 0
        for scale_shape in ((heads, 1, size), (heads, tokens, 1)) if self.stored is not None else ():
            count = scale_shape[0] * scale_shape[1] * scale_shape[2]
            part = torch.frombuffer(payload, dtype=torch.float32, count=count, offset=start)
            scales.append(part.view(scale_shape))
            start += part.nbytes
        numbers = torch.frombuffer(payload, dtype=self.stored or dtype, offset=start)
        k, v = numbers.view(2, *shape).unbind()
        return Stored(k, v, *scales)

    def num_bytes(self, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
        heads, tokens, size = shape
        if self.stored is None:
            return 2 * heads * tokens * size * dtype.itemsize
        return 2 * heads * tokens * size * self.stored.itemsize + 4 * heads * (size + tokens)

    def _quantise(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.stored is not None
        x = x.float()
        whole = not self.stored.is_floating_point
        largest = 127.0 if whole else torch.finfo(self.stored).max
        scale = (x.abs().amax(dim, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
        scaled = x / scale
        return scale, (scaled.round() if whole else scaled).clamp(-largest, largest).to(self.stored)


@dataclass(frozen=True)
class Stored:
    """K and V `[Hkv, T, D]` as they are stored; with scales (K's `[Hkv, 1, D]`, V's `[Hkv, T, 1]`, float32) a number is
    the stored one times its scale."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


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
CODECS = {codec.name: codec for codec in (RAW, INT8, FP8)}
CODE_TO_CODEC = {codec.code: codec for codec in CODECS.values()}


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
