"""A small decoder with a paged cache, behind the same interface as vLLM's model (`ragkv.engine.forward.Forward`)."""

from types import SimpleNamespace

import torch

from ragkv.kernels.operands import Rotation

NUM_LAYERS, Q_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, VOCABULARY, MAX_TOKENS = 3, 4, 2, 8, 4, 50, 512
_WIDTH = Q_HEADS * HEAD_SIZE


class TinyForward:
    """Embeddings, `NUM_LAYERS` layers of rotary attention, and nothing else; random weights, float32."""

    device, dtype, block_size = torch.device("cpu"), torch.float32, BLOCK_SIZE

    def __init__(self, num_blocks=40):
        generator = torch.Generator().manual_seed(7)

        def weights(*shape):
            return torch.randn(*shape, generator=generator)

        self._embeddings = weights(VOCABULARY, _WIDTH)
        self._to_q = weights(NUM_LAYERS, _WIDTH, _WIDTH) / _WIDTH**0.5
        self._to_kv = weights(NUM_LAYERS, 2, _WIDTH, KV_HEADS * HEAD_SIZE) / _WIDTH**0.5
        self._to_out = weights(NUM_LAYERS, _WIDTH, _WIDTH) / _WIDTH**0.5
        angles = torch.arange(MAX_TOKENS)[:, None] / 100 ** (torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
        self.rotation = Rotation.from_table(torch.cat([angles.cos(), angles.sin()], dim=1), neox=True)
        self.layers = [
            SimpleNamespace(
                num_kv_heads=KV_HEADS,
                head_size=HEAD_SIZE,
                sliding_window=None,
                kv_cache_dtype="auto",
                kv_cache=torch.zeros(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE),
                impl=SimpleNamespace(scale=HEAD_SIZE**-0.5),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.num_computed = []  # tokens, by forward

    def slots(self, positions, block_ids):
        return block_ids[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def write(self, layer, k, v, slots):
        for cache, fresh in zip(self.layers[layer].kv_cache, (k, v), strict=True):
            cache.flatten(0, 1)[slots] = fresh

    def read(self, layer, num_tokens, block_ids):
        """K and V `[num_tokens, Hkv, D]` in these blocks."""
        slots = self.slots(torch.arange(num_tokens), torch.tensor(block_ids))
        return [cache.flatten(0, 1)[slots] for cache in self.layers[layer].kv_cache]

    def run(self, pieces, before_layer=None, attend=None):
        self._forward(pieces, before_layer, attend)

    def logprobs(self, pieces):
        return torch.log_softmax(self._forward(pieces) @ self._embeddings.T, dim=-1)

    def _forward(self, pieces, before_layer=None, attend=None):
        positions = torch.cat([piece.positions for piece in pieces])
        slots = torch.cat([self.slots(piece.positions, piece.block_ids) for piece in pieces])
        self.num_computed.append(len(positions))
        x = self._embeddings[torch.cat([piece.token_ids for piece in pieces])]
        for layer in range(NUM_LAYERS):
            normed = torch.nn.functional.layer_norm(x, (_WIDTH,))
            q = (normed @ self._to_q[layer]).unflatten(1, (Q_HEADS, HEAD_SIZE))
            k, v = ((normed @ weight).unflatten(1, (KV_HEADS, HEAD_SIZE)) for weight in self._to_kv[layer])
            q, k = (self.rotation.rotate(heads.transpose(0, 1), positions).transpose(0, 1) for heads in (q, k))
            if before_layer is not None and before_layer(layer, q, k, v):
                return x
            if attend is None:  # else nobody writes K and V but who gave `attend`, as with vLLM's layers
                self.write(layer, k, v, slots)
            out = attend(layer, q) if attend is not None else self._attend(layer, q, pieces)
            x = x + out.flatten(1) @ self._to_out[layer]
        return x

    def _attend(self, layer, q, pieces):
        outputs, first = [], 0
        for piece in pieces:
            own = q[first : first + len(piece.positions)]
            first += len(own)
            k, v = self.read(layer, int(piece.positions.max()) + 1, piece.block_ids.tolist())
            k, v = (heads.repeat_interleave(Q_HEADS // KV_HEADS, dim=1).transpose(0, 1) for heads in (k, v))
            scores = own.transpose(0, 1) @ k.transpose(1, 2) * HEAD_SIZE**-0.5
            mask = torch.arange(k.shape[1])[None] > piece.positions[:, None]
            outputs.append((scores.masked_fill(mask, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs)
