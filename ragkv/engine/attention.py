"""Attention of a pass by ragkv's kernel in place of vLLM's, where queries are scattered over a context.

vLLM's backends take each run of positions for a request of its own, and read the cache anew for it. The kernel reads K
and V once for a tile of queries.
"""

import torch
from vllm.model_executor.layers.attention import Attention

from ragkv.engine.blocks import Blocks
from ragkv.engine.subset import Attend, SubsetForward
from ragkv.kernels.dispatch import Kernels

_RUN = 8  # tokens: torch is slower than vLLM where runs are longer on average


def pays(kernels: Kernels, positions: torch.Tensor) -> bool:
    """Whether sorted positions `[T]` attend faster by these kernels than by vLLM's."""
    num_runs = 1 + int((torch.diff(positions) != 1).sum())
    return kernels.name != "torch" or len(positions) < _RUN * num_runs


def can_attend(subset: SubsetForward) -> bool:
    """Whether the kernel computes what the model's layers would."""
    return all(map(_is_plain, subset.layers))


def _is_plain(layer: Attention) -> bool:
    has_slopes = getattr(layer.impl, "alibi_slopes", None) is not None
    return not has_slopes and layer.kv_cache_dtype == "auto" and getattr(layer, "query_quant", None) is None


def selective(subset: SubsetForward, kernels: Kernels, blocks: Blocks, positions: torch.Tensor) -> Attend:
    """How queries at these positions `[T]` attend, once K and V of all tokens before the last are in the blocks."""

    def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
        attention = subset.layers[layer]
        return kernels.selective_attention(
            q,
            positions,
            *blocks.caches(layer),
            blocks.block_table,
            attention.impl.scale,
            attention.sliding_window,
            soft_cap(attention),
            getattr(attention.impl, "sinks", None),
        )

    return attend


def soft_cap(layer: Attention) -> float:
    return getattr(layer.impl, "logits_soft_cap", None) or 0.0
