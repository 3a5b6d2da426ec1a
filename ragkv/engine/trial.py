"""Finds out by trial, without per-model code, whether a model's KV can be fused and how its keys rotate."""

import functools
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, UniformTypeKVCacheSpecs

from ragkv.engine.forward import Piece
from ragkv.engine.subset import SubsetForward
from ragkv.kernels.operands import Rotation

_NUM_TEST_TOKENS = 16
_DTYPE_TO_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.05, torch.bfloat16: 0.1}  # a wrong rotation is off by ~1


class UnsupportedModelError(Exception):
    """The model, or how vLLM runs it, can't be fused; the message says why. Its requests get a full prefill."""


def check_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedModelError unless every layer caches the K and V of every token, in one group of blocks."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise UnsupportedModelError("tensor, pipeline and context parallelism aren't supported yet")
    if vllm_config.model_config.uses_mrope:
        raise UnsupportedModelError("multimodal rotary positions (M-RoPE) aren't supported yet")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedModelError(f"its layers keep {len(groups)} different kinds of KV cache")
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    other = [type(s).__name__ for s in specs if type(s) is not FullAttentionSpec]
    if other:
        raise UnsupportedModelError(f"vLLM keeps only part of its KV ({other[0]}), as with layers that all slide")
    context = vllm_config.compilation_config.static_forward_context
    for name in groups[0].layer_names:
        layer = context.get(name)
        if not isinstance(layer, Attention) or layer.attn_type != AttentionType.DECODER:
            raise UnsupportedModelError(f"layer {name} isn't plain decoder attention")
        if layer.kv_sharing_target_layer_name is not None:
            raise UnsupportedModelError(f"layer {name} shares the KV of another layer")
        if not hasattr(layer.impl, "do_kv_cache_update"):
            raise UnsupportedModelError(f"attention backend {layer.attn_backend.get_name()} can't be written to")


@torch.inference_mode()
def find_rotations(subset: SubsetForward) -> list[Rotation | None]:
    """Return each layer's rotation of keys by position, None where they don't depend on it.

    Found by trial: the same tokens are run at two positions, and the model's own rotary table must turn the keys of one
    run into those of the other, in every layer. So absolute positions, tables that change with the length, or a table
    that is not the one in use, are noticed. Writes to block 1 of the paged cache: call it before any request.
    Raises UnsupportedModelError.
    """
    limit = min(subset.vllm_config.model_config.max_model_len, 4096)
    shift = limit // 2 + 3
    at_start, shifted = _keys(subset, 0), _keys(subset, shift)
    tolerance = _DTYPE_TO_TOLERANCE[at_start[0].dtype]
    rotations: list[Rotation | None] = []
    for name, before, after in zip(subset.names, at_start, shifted, strict=True):
        for candidate in (None, *_tables_near(subset.model, name)):
            moved = before if candidate is None else candidate.rotate(before, shift)
            if torch.dist(moved.float(), after.float()) < tolerance * after.float().norm():
                rotations.append(candidate)
                break
        else:
            raise UnsupportedModelError(f"the keys of layer {name} don't follow its rotary table when tokens move")
    return rotations


def _keys(subset: SubsetForward, rope_offset: int) -> list[torch.Tensor]:
    """Return every layer's keys `[Hkv, T, D]` of some tokens that start at position `rope_offset`."""
    positions = torch.arange(_NUM_TEST_TOKENS)
    vocabulary = subset.vllm_config.model_config.get_vocab_size()
    token_ids = (positions * 7919 + 11) % vocabulary
    keys: list[torch.Tensor] = []
    piece = Piece(token_ids, positions, torch.tensor([1, 2, 3, 4]), rope_offset)
    subset.run([piece], lambda _layer, _q, k, _v: keys.append(k.transpose(0, 1).clone()))
    return keys


def _tables_near(model: torch.nn.Module, layer_name: str) -> list[Rotation]:
    """Return the rotary tables of the modules around a layer, nearest first."""
    modules = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if hasattr(m, "cos_sin_cache")]
    modules.sort(key=lambda item: -_common_length(item[0], layer_name))
    return [_table(module) for module in dict.fromkeys(module for _, module in modules)]


@functools.cache  # layers share rotary modules
def _table(module: Any) -> Rotation:
    """Return a module's table, recomputed in float32 where the model rounds its own."""
    cache = module.cos_sin_cache
    if cache.dtype != torch.float32 and hasattr(module, "_compute_cos_sin_cache"):
        exact = module._compute_cos_sin_cache().to(cache.device)
        cache = exact if exact.shape == cache.shape else cache
    return Rotation.from_table(cache, getattr(module, "is_neox_style", True))


def _common_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a.split("."), b.split("."), strict=False)) if x != y), 0)
