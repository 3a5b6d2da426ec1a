"""Where K and V of a request's tokens lie while one of its passes is computed, for kernels that know tensors only.

On CUDA that is vLLM's own blocks. On CPU a layer is put together in memory of ours, by rows, and then copied into the
blocks: vLLM keeps K there by columns. Kernels read it there where there is more than one pass has put together.
"""

from typing import Protocol

import torch

from ragkv.engine.subset import SubsetForward
from ragkv.kernels.selective_attention import ordered


class Blocks(Protocol):
    """A paged cache of one request at a time. block_table: `[blocks]`; slots: `[N]`, of each position; int64 both."""

    block_table: torch.Tensor
    slots: torch.Tensor

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[blocks, block_size, Hkv, D]`, by any strides."""
        ...

    def keys(self, layer: int) -> torch.Tensor:
        """K of all positions, `[Hkv, N, D]`; of those that nobody has written, anything."""
        ...

    def put(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v `[T, Hkv, D]` of these positions."""
        ...

    def flush(self, layer: int, first: int, end: int) -> None:
        """See that vLLM has what was written of these positions."""
        ...


class ContiguousKV:
    """One layer after the other, in one block, by position."""

    def __init__(self, subset: SubsetForward, slots: torch.Tensor) -> None:
        """slots: `[N]`, the positions' places in vLLM's blocks."""
        self._subset, self._to = subset, slots
        self.slots = torch.arange(len(slots), device=subset.device)
        self.block_table = torch.zeros(1, dtype=torch.int64, device=subset.device)
        self._shape: tuple[int, ...] = ()

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self._subset.layers[layer]
        shape = (attention.num_kv_heads, len(self._to), attention.head_size)
        if shape != self._shape:
            both = torch.empty((2, *shape), dtype=self._subset.dtype, device=self._subset.device)
            self._shape, self._k, self._v = shape, *both
        return self._k.transpose(0, 1)[None], self._v.transpose(0, 1)[None]

    def keys(self, layer: int) -> torch.Tensor:
        return self.caches(layer)[0][0].transpose(0, 1)

    def put(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for cache, fresh in zip(self.caches(layer), (k, v), strict=True):
            cache[0, positions] = fresh

    def flush(self, layer: int, first: int, end: int) -> None:
        if first < end:
            k, v = (cache[0, first:end] for cache in self.caches(layer))
            self._subset.write(layer, k, v, self._to[first:end])


class PagedBlocks:
    """vLLM's own blocks. views: of each layer's K and V, `[blocks, block_size, Hkv, D]` (`find_views`)."""

    def __init__(
        self,
        subset: SubsetForward,
        views: list[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        block_ids: torch.Tensor,
    ) -> None:
        self._subset, self._views, self.slots = subset, views, slots
        self.block_table = block_ids.to(subset.device)

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._views[layer]

    def keys(self, layer: int) -> torch.Tensor:
        return ordered(self._views[layer][0], self.block_table, 0, len(self.slots))

    def put(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._subset.write(layer, k, v, self.slots[positions])

    def flush(self, layer: int, first: int, end: int) -> None:
        """They are there."""


def find_views(subset: SubsetForward) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Each layer's paged K and V as `[blocks, block_size, Hkv, D]`, by strides; None if a layer has another layout.

    Found by trial: the backend writes a few tokens, and they must be where the view has them. Writes to block 1: call
    it before any request.
    """
    views = []
    slots = subset.block_size + torch.tensor([0, 3], device=subset.device)
    for layer, attention in enumerate(subset.layers):
        shape = (2, 2, attention.num_kv_heads, attention.head_size)  # of K and V: two tokens
        k, v = torch.randn(shape, device=subset.device).to(subset.dtype)
        subset.write(layer, k, v, slots)
        for key_cache, value_cache in _candidates(attention.kv_cache, subset.block_size):
            found = ((key_cache, k), (value_cache, v))
            if all(cache.dtype == x.dtype and torch.equal(cache[1, [0, 3]], x) for cache, x in found):
                views.append((key_cache, value_cache))
                break
        else:
            return None
    return views


def _candidates(cache: torch.Tensor, block_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A backend's tensor as K and V. On CPU `[blocks, Hkv, block_size, 2 D]`: of each head K by columns, then V by rows
    (but with AMX, where numbers lie in pairs). Else five dimensions: two of something, one of a block's tokens."""
    if cache.dim() == 4 and cache.shape[2] == block_size:
        k, v = cache.flatten(2).chunk(2, dim=2)
        columns, rows = torch.unflatten(k, 2, (-1, block_size)), torch.unflatten(v, 2, (block_size, -1))
        return [(columns.permute(0, 3, 1, 2), rows.transpose(1, 2))]
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
