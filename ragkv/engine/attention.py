"""Attention of a pass by ragkv's kernel in place of vLLM's, where queries are scattered over a context.

vLLM's backends take each run of positions for a request of its own, and read the cache anew for each. The kernel reads
K and V once for a tile of queries.
"""

from typing import TYPE_CHECKING

import torch

from ragkv.engine.blocks import Blocks
from ragkv.engine.forward import Attend, Forward
from ragkv.kernels.dispatch import Kernels
from ragkv.kernels.operands import AttentionSpec

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

_RUN = 8  # tokens: torch is slower than vLLM where runs are longer on average


def pays(kernels: Kernels, positions: torch.Tensor) -> bool:
    """Return whether attention at sorted positions `[T]` is faster by these kernels than by vLLM's."""
    num_runs = 1 + int((torch.diff(positions) != 1).sum())
    return kernels.name != "torch" or len(positions) < _RUN * num_runs


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
