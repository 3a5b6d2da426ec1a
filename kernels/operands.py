"""The two descriptions that the operators share: a layer's paged KV, and how the layer attends to it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagedKV:
    """One layer's paged KV cache and one request's way through it.

    k, v: `[blocks, block_size, Hkv, D]` by any strides, which is what vLLM's backends have (FlashAttention, FlashInfer,
    Triton; NHD and HND). Slot s is row s % block_size of block s // block_size. block_table: `[N / block_size]` int64:
    the token at position n is in row n % block_size of block block_table[n // block_size].
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    def keys(self, num_tokens: int) -> torch.Tensor:
        """Return K of the first tokens in order, `[Hkv, num_tokens, D]`; a view where one block has them all."""
        return self._in_order(self.k, num_tokens)

    def values(self, num_tokens: int) -> torch.Tensor:
        """Return V of the first tokens in order, `[Hkv, num_tokens, D]`; a view where one block has them all."""
        return self._in_order(self.v, num_tokens)

    def _in_order(self, cache: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if num_tokens <= self.block_size:
            return cache[int(self.block_table[0]), :num_tokens].transpose(0, 1)
        positions = torch.arange(num_tokens, device=cache.device)
        return cache[self.block_table[positions // self.block_size], positions % self.block_size].transpose(0, 1)


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
