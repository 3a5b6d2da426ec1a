"""What the operators share: a layer's paged KV, how the layer attends to it, and how its keys rotate by position."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedKV:
    """One layer's paged KV cache and one request's way through it.

    k, v: `[blocks, block_size, Hkv, D]` by any strides, which is what vLLM's backends have (FlashAttention, FlashInfer,
    Triton; NHD and HND). Slot s is row s % block_size of block s // block_size. block_table: `[N / block_size]` int64:
    the token at position n is in row n % block_size of block block_table[n // block_size]. places: `[N]` each, the
    blocks and rows of all positions, where somebody has computed them already.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    def in_order(self, cache: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return the first tokens of `k` or `v` in order, `[Hkv, num_tokens, D]`; a view where one block has them."""
        if num_tokens <= self.block_size:
            return cache[int(self.block_table[0]), :num_tokens].transpose(0, 1)
        blocks, rows = self.places or places(self.block_table, self.block_size, num_tokens)
        return cache[blocks[:num_tokens], rows[:num_tokens]].transpose(0, 1)


def places(block_table: torch.Tensor, block_size: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block and the row of each of the first positions, `[num_tokens]` int64 each."""
    positions = torch.arange(num_tokens, device=block_table.device)
    return block_table[positions // block_size], positions % block_size


@dataclass(frozen=True)
class AttentionSpec:
    """How one layer attends: causally by position, with scores q·k · scale.

    sliding_window: a query at position p sees only positions above p − sliding_window. soft_cap: scores become
    c · tanh(score / c); 0: they stay. sinks: `[Hq]`, for each head one more score under the softmax, without a value.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    def hidden(self, q_positions: torch.Tensor, k_positions: torch.Tensor) -> torch.Tensor:
        """Return which tokens each query doesn't see, `[Q, N]` bool."""
        hidden = k_positions > q_positions[:, None]
        if self.sliding_window is not None:
            hidden |= k_positions <= q_positions[:, None] - self.sliding_window
        return hidden

    def cap_(self, scores: torch.Tensor) -> torch.Tensor:
        """Cap float32 scores in place and return them."""
        return scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap) if self.soft_cap else scores


@dataclass(frozen=True)
class Rotation:
    """One layer's rotary position embedding (Su et al., 2021). It is relative, so keys can be moved to other positions.

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
        return self.turn(k, *self.angles(shift))

    def angles(self, shift: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of these shifts, for `turn`: `[R/2]` each, or `[T, R/2]`."""
        if isinstance(shift, int):
            return self.cos[abs(shift)], self.sin[abs(shift)] * (1 if shift >= 0 else -1)
        return self.cos[shift.abs()], self.sin[shift.abs()] * shift.sign()[:, None]

    def turn(self, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate as `rotate` does, by these angles."""
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
