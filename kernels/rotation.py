"""Moves keys from the position they were computed at to another, by rotating them further (RoPE is relative)."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """How one layer rotates its keys.

    cos, sin: `[P, R/2]` float32 on the keys' device, the rotation by p positions in row p. Dimensions from R on are not
    rotated. neox: pairs are (i, i + R/2), GPT-NeoX style, and not (2i, 2i + 1), GPT-J style.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    neox: bool

    @classmethod
    def from_table(cls, cos_sin: torch.Tensor, neox: bool) -> "Rotation":
        """From a model's table `[P, R]` of cosines and sines side by side.

        Tables that carry an attention scale (YaRN) have it divided out: a shift must not scale the key again.
        """
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        norm = torch.hypot(cos, sin)
        return cls((cos / norm).contiguous(), (sin / norm).contiguous(), neox)

    def turns(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines `[T, R/2]` that move token t by `shifts[t]` positions, forwards or back."""
        distance = shifts.abs().to(self.cos.device)
        sign = torch.sign(shifts).to(self.sin)
        return self.cos[distance], self.sin[distance] * sign[:, None]

    def rotate(self, k: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate each token of `k` `[..., T, D]` by its turn. Computes in float32; returns k's dtype."""
        cos, sin = turns
        rotated_size = 2 * cos.shape[-1]
        x = k.float()
        out = torch.empty_like(x)
        out[..., rotated_size:] = x[..., rotated_size:]
        if self.neox:
            first, second = slice(0, rotated_size // 2), slice(rotated_size // 2, rotated_size)
        else:
            first, second = slice(0, rotated_size, 2), slice(1, rotated_size, 2)
        a, b = x[..., first], x[..., second]
        torch.mul(a, cos, out=out[..., first]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., second]).addcmul_(a, sin)
        return out.to(k.dtype)
