"""Where the K and V of a request's tokens are while one of its passes is computed, and attention over them by kernels.

On CUDA that is vLLM's own blocks. On CPU a layer is put together in memory of ours, by rows, and then copied into the
blocks, where vLLM keeps K by columns. Kernels read those only where a pass needs KV that it hasn't put together itself.

vLLM's backends take each run of positions for a request of its own, and read the cache anew for each. Our kernel reads
K and V once for a tile of queries, so it attends in their place where queries are scattered over a context.
"""

from typing import TYPE_CHECKING, Protocol

import torch

from ragkv.engine.forward import Attend, Forward
from ragkv.engine.positions import runs_of
from ragkv.kernels.dispatch import Kernels
from ragkv.kernels.operands import AttentionSpec, PagedKV, places

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

_RUN = 8  # tokens: torch is slower than vLLM where runs are longer on average


class Blocks(Protocol):
    """A paged cache of one request at a time. slots: `[N]` int64, of each position."""

    slots: torch.Tensor

    def kv(self, layer: int) -> PagedKV:
        """Return where the layer's K and V are."""

    def put(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v `[T, Hkv, D]` of these positions."""

    def flush(self, layer: int, first: int, end: int) -> None:
        """Copy what was written of positions `[first, end)` into vLLM's blocks, if it isn't there."""


class ContiguousKV:
    """One layer at a time, in a single block, by position."""

    def __init__(self, forward: Forward, slots: torch.Tensor) -> None:
        """slots: `[N]`, the positions' slots in vLLM's blocks."""
        self._forward, self._vllm_slots = forward, slots
        self.slots = torch.arange(len(slots), device=forward.device)
        self._block_table = torch.zeros(1, dtype=torch.int64, device=forward.device)
        self._shape: tuple[int, ...] = ()

    def kv(self, layer: int) -> PagedKV:
        attention = self._forward.layers[layer]
        shape = (attention.num_kv_heads, len(self._vllm_slots), attention.head_size)
        if shape != self._shape:
            both = torch.empty((2, *shape), dtype=self._forward.dtype, device=self._forward.device)
            self._shape, self._k, self._v = shape, *both
        return PagedKV(self._k.transpose(0, 1)[None], self._v.transpose(0, 1)[None], self._block_table)

    def put(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        kv = self.kv(layer)
        kv.k[0, positions], kv.v[0, positions] = k, v

    def flush(self, layer: int, first: int, end: int) -> None:
        if first < end:
            kv = self.kv(layer)
            self._forward.write(layer, kv.k[0, first:end], kv.v[0, first:end], self._vllm_slots[first:end])


class PagedBlocks:
    """vLLM's own blocks. views: of each layer's K and V, `[blocks, block_size, Hkv, D]` (`find_views`)."""

    def __init__(
        self,
        forward: Forward,
        views: list[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        block_ids: torch.Tensor,
    ) -> None:
        self._forward, self._views, self.slots = forward, views, slots
        self._block_table = block_ids.to(forward.device)
        self._put_at = slots[:0], slots[:0]
        self._places = places(self._block_table, forward.block_size, len(slots))

    def kv(self, layer: int) -> PagedKV:
        return PagedKV(*self._views[layer], self._block_table, self._places)

    def put(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if positions is not self._put_at[0]:  # a pass has the same in all layers
            self._put_at = positions, self.slots[positions]
        self._forward.write(layer, k, v, self._put_at[1])

    def flush(self, layer: int, first: int, end: int) -> None:
        """Do nothing: they are vLLM's blocks."""


def find_views(forward: Forward) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return each layer's paged K and V as `[blocks, block_size, Hkv, D]` views; None if a layer has another layout.

    Found by trial: the backend writes a few tokens, and they must be where the view has them. Writes to block 1: call
    it before any request.
    """
    views = []
    slots = forward.block_size + torch.tensor([0, 3], device=forward.device)
    for layer, attention in enumerate(forward.layers):
        shape = (2, 2, attention.num_kv_heads, attention.head_size)  # of K and V: two tokens
        k, v = torch.randn(shape, device=forward.device).to(forward.dtype)
        forward.write(layer, k, v, slots)
        for key_cache, value_cache in _candidates(attention.kv_cache, forward.block_size):
            pairs = ((key_cache, k), (value_cache, v))
            if all(cache.dtype == x.dtype and torch.equal(cache[1, [0, 3]], x) for cache, x in pairs):
                views.append((key_cache, value_cache))
                break
        else:
            return None
    return views


def _candidates(cache: torch.Tensor, block_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the ways to see a backend's tensor as K and V.

    With four dimensions it is `[blocks, Hkv, block_size, 2 D]`. On CUDA each token's K lies before its V there, by any
    strides. On CPU a head has K by columns, then V by rows (with AMX, numbers are in pairs: another layout). Older
    backends have five dimensions: two of something, one of a block's tokens.
    """
    if cache.dim() == 4 and cache.shape[2] == block_size:
        left, right = cache.transpose(1, 2).chunk(2, dim=3)
        if not cache.is_contiguous():
            return [(left, right)]
        k, v = cache.flatten(2).chunk(2, dim=2)
        columns, rows = torch.unflatten(k, 2, (-1, block_size)), torch.unflatten(v, 2, (block_size, -1))
        return [(left, right), (columns.permute(0, 3, 1, 2), rows.transpose(1, 2))]
    if cache.dim() != 5:
        return []
    pairs = [cache.unbind(dim) for dim in (0, 1) if cache.shape[dim] == 2]
    pairs = [(k, v) for k, v in pairs if block_size in k.shape[1:3]]
    return [
        (k, v) if swapped is False else (k.transpose(1, 2), v.transpose(1, 2))
        for k, v in pairs
        for swapped in (False, True)
        if k.shape[2 if swapped else 1] == block_size
    ]


def pays(kernels: Kernels, positions: torch.Tensor) -> bool:
    """Return whether attention at sorted positions `[T]` is faster by these kernels than by vLLM's."""
    return kernels.name != "torch" or len(positions) < _RUN * len(runs_of(positions))


def can_attend(forward: Forward) -> bool:
    """Return whether the kernel computes what the model's layers would."""
    return all(map(_is_plain, forward.layers))


def _is_plain(layer: "Attention") -> bool:
    has_slopes = getattr(layer.impl, "alibi_slopes", None) is not None
    return not has_slopes and layer.kv_cache_dtype == "auto" and getattr(layer, "query_quant", None) is None


def selective(forward: Forward, kernels: Kernels, blocks: Blocks, positions: torch.Tensor) -> Attend:
    """Return the attention of queries at these positions `[T]` over the blocks, for `Forward.run`.

    The blocks must have K and V of all tokens up to the last position.
    """

    def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
        return kernels.selective_attention(q, positions, blocks.kv(layer), attention_spec(forward.layers[layer]))

    return attend


def attention_spec(layer: "Attention") -> AttentionSpec:
    """Read from vLLM how a layer attends."""
    soft_cap = getattr(layer.impl, "logits_soft_cap", None) or 0.0
    return AttentionSpec(layer.impl.scale, layer.sliding_window, soft_cap, getattr(layer.impl, "sinks", None))
