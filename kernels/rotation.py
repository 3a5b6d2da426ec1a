"""Rotation of keys from the positions at which they were computed to others: RoPE (Su et al., 2021) is relative."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """One layer's rotary position embedding.

    cos, sin: `[P, R/2]` float32 on the keys' device, the rotation by p positions in row p. Dimensions from R on are not
    rotated. neox: pairs are (i, i + R/2), GPT-NeoX style, and not (2i, 2i + 1), GPT-J style.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    neox: bool

    @classmethod
    def from_table(cls, cos_sin: torch.Tensor, neox: bool) -> "Rotation":
        """Make it from a model's table `[P, R]`, cosines first, then sines.

        Tables that carry an attention scale (YaRN) have it divided out: a rotation must not scale the key again.
        """
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        norm = torch.hypot(cos, sin)
        return cls((cos / norm).contiguous(), (sin / norm).contiguous(), neox)

    def rotate(self, k: torch.Tensor, shift: int | torch.Tensor) -> torch.Tensor:
        """Rotate `k` `[..., T, D]` by `shift` positions, forwards or back: one number, or one for each token `[T]`.

        Computes in float32; returns k's dtype.
        """
        if isinstance(shift, int):
            cos, sin = self.cos[abs(shift)], self.sin[abs(shift)] * (1 if shift >= 0 else -1)
        else:
            cos, sin = self.cos[shift.abs()], self.sin[shift.abs()] * shift.sign()[:, None]
        first, second, rest = self._parts()
        a, b = k[..., first].float(), k[..., second].float()
        out = torch.empty_like(k, memory_format=torch.contiguous_format)
        out[..., first] = (a * cos).addcmul_(b, sin, value=-1)
        out[..., second] = (b * cos).addcmul_(a, sin)
        out[..., rest] = k[..., rest]
        return out

    def _parts(self) -> tuple[slice, slice, slice]:
        """Return the dimensions of the pairs' first and second numbers, and those that aren't rotated."""
        size = 2 * self.cos.shape[-1]
        if self.neox:
            return slice(0, size // 2), slice(size // 2, size), slice(size, None)
        return slice(0, size, 2), slice(1, size, 2), slice(size, None)
