"""Runs vLLM's own model over any subset of positions of requests' paged KV.

Knows nothing about chunks, stores or policies. The model runs as it is, so masks, sliding windows, soft caps, quantised
weights and experts are vLLM's business (docs/decisions/0002).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from ragkv.engine.forward import Attend, BeforeLayer, Piece
from ragkv.engine.positions import runs_of


class _ReachedStop(Exception):
    """Ends a forward early, from inside the model."""


class SubsetForward:
    """The model of one worker, as a `Forward`. Not thread-safe: call it between engine steps."""

    def __init__(
        self, model: torch.nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, device: torch.device
    ) -> None:
        self.model, self.vllm_config, self.device = model, vllm_config, device
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size = spec.block_size
        assert isinstance(vllm_config.model_config.dtype, torch.dtype)
        self.dtype: torch.dtype = vllm_config.model_config.dtype
        named = vllm_config.compilation_config.static_forward_context
        self.names = [name for name in kv_cache_config.kv_cache_groups[0].layer_names if name in named]
        self.names.sort(key=list(named).index)
        self.layers: list[Attention] = [named[name] for name in self.names]
        self._builders = []
        for _, group in groupby(sorted(self.names, key=self._backend_name), key=self._backend_name):
            names = list(group)
            layer_spec = spec.kv_cache_specs[names[0]] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            builder = named[names[0]].attn_backend.get_builder_cls()
            self._builders.append((names, builder(layer_spec, names, vllm_config, device)))

    def _backend_name(self, name: str) -> str:
        return str(self.layers[self.names.index(name)].attn_backend.full_cls_name())

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return block_ids[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        attention = self.layers[layer]
        attention.impl.do_kv_cache_update(attention, k, v, attention.kv_cache, slots)  # type: ignore[attr-defined]

    @torch.inference_mode()
    def run(
        self, pieces: Sequence[Piece], before_layer: BeforeLayer | None = None, attend: Attend | None = None
    ) -> None:
        with self._hooked(before_layer, pieces), self._attending(attend), suppress(_ReachedStop):
            self._forward(pieces)

    @torch.inference_mode()
    def logprobs(self, pieces: Sequence[Piece]) -> torch.Tensor:
        logits = self.model.compute_logits(self._forward(pieces))  # type: ignore[operator]
        return torch.log_softmax(logits.float(), dim=-1)

    def _forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        positions = torch.cat([piece.positions for piece in pieces])
        token_ids = torch.cat([piece.token_ids for piece in pieces]).to(self.device)
        offsets = torch.cat([torch.full_like(piece.positions, piece.rope_offset) for piece in pieces])
        slots = self._all_slots(pieces)
        common = self._common_metadata(pieces, positions.to(self.device), slots)
        metadata = {}
        for names, builder in self._builders:
            metadata.update(dict.fromkeys(names, builder.build(0, common)))
        context = set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=len(positions),
            slot_mapping=dict.fromkeys(self.names, slots),
            skip_compiled=True,
        )
        with context:
            hidden: torch.Tensor = self.model(input_ids=token_ids, positions=(positions + offsets).to(self.device))
        return hidden

    def _all_slots(self, pieces: Sequence[Piece]) -> torch.Tensor:
        return torch.cat([self.slots(piece.positions, piece.block_ids) for piece in pieces]).to(self.device)

    def _common_metadata(
        self, pieces: Sequence[Piece], positions: torch.Tensor, slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Describe each contiguous run of positions as a request, so that every token sees exactly those before it."""
        runs = [(start, end, piece.block_ids) for piece in pieces for start, end in runs_of(piece.positions)]
        seq_lens = [end for _, end, _ in runs]
        query_start = torch.tensor([0, *(end - start for start, end, _ in runs)]).cumsum(0).int()
        block_table = torch.nn.utils.rnn.pad_sequence([block_ids for *_, block_ids in runs], batch_first=True)
        return CommonAttentionMetadata(
            query_start_loc=query_start.to(self.device),
            query_start_loc_cpu=query_start,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            num_reqs=len(seq_lens),
            num_actual_tokens=len(positions),
            max_query_len=int(torch.diff(query_start).max()),
            max_seq_len=max(seq_lens),
            block_table_tensor=block_table.int().to(self.device),
            slot_mapping=slots,
            causal=True,
            positions=positions,
        )

    @contextmanager
    def _attending(self, attend: Attend | None) -> Iterator[None]:
        layers = self.layers if attend is not None else []
        for index, layer in enumerate(layers):

            def forward(q: torch.Tensor, *_: object, index: int = index, **__: object) -> torch.Tensor:
                assert attend is not None
                return attend(index, q.view(len(q), -1, self.layers[index].head_size)).flatten(1)

            layer.forward = forward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    @contextmanager
    def _hooked(self, before_layer: BeforeLayer | None, pieces: Sequence[Piece]) -> Iterator[None]:
        last = len(self.layers) - 1
        hooks = []
        for index, layer in enumerate(self.layers):
            if before_layer is None and index != last:
                continue

            def see(module: Attention, args: tuple[torch.Tensor, ...], index: int = index) -> None:
                q, k, v = args[:3]
                q = q.view(len(q), -1, module.head_size)
                k, v = (x.view(len(x), module.num_kv_heads, -1) for x in (k, v))
                if before_layer is not None and before_layer(index, q, k, v):
                    raise _ReachedStop
                if index == last:
                    self.write(last, k, v, self._all_slots(pieces))
                    raise _ReachedStop

            hooks.append(layer.register_forward_pre_hook(see))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
