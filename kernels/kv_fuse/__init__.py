"""`kv_fuse`: chunks' K and V, as they are stored, into a request's paged cache, K moved to its place."""

from dataclasses import dataclass

import torch

from ragkv.kernels.rotation import Rotation


@dataclass(frozen=True)
class Staged:
    """One layer of a chunk on the device, as the store has it.

    k, v: `[Hkv, T, D]`, float32, float16 or bfloat16, or with scales int8 or float8_e4m3fn. k_scale: `[Hkv, 1, D]`,
    v_scale: `[Hkv, T, 1]`, float32: a number is the stored one times its scale. moved: how many positions the keys go
    on from where they were computed. slots: `[T]` int64, each token's place in the paged cache; below 0: not written.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    moved: int = 0
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class KVShift:
    """What recomputed tokens teach about a chunk's others (`ragkv.kernels.shift`): w(t) R(start + t) k is added to
    token t's key, and w(t) v to its value. k, v: `[Hkv, D]` float32; weights: `[T]` float32."""

    k: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    start: int


FIELDS = 11  # of a row of `table`


def table(chunks: list[Staged], shifts: list[KVShift | None] | None) -> list[list[int]]:
    """What a kernel needs to know of each chunk, FIELDS numbers: the addresses of k, v, k_scale, v_scale, slots,
    shifts k, v and weights (0: none), the number of tokens, how far it moves, and where it starts."""
    rows = []
    for i, chunk in enumerate(chunks):
        taught = shifts[i] if shifts else None
        mean_shift = (taught.k, taught.v, taught.weights) if taught else (None, None, None)
        parts = (chunk.k, chunk.v, chunk.k_scale, chunk.v_scale, chunk.slots, *mean_shift)
        assert all(part is None or part.is_contiguous() for part in parts)
        numbers = (chunk.k.shape[1], chunk.moved, taught.start if taught else 0)
        rows.append([*(0 if part is None else part.data_ptr() for part in parts), *numbers])
    return rows


def kv_fuse_reference(
    chunks: list[Staged],
    rotation: Rotation | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    shifts: list[KVShift | None] | None = None,
) -> None:
    """The definition, in float32. key_cache, value_cache: `[blocks, block_size, Hkv, D]`, by any strides; slot s is row
    s % block_size of block s // block_size. Writes in the caches' type."""
    for i, chunk in enumerate(chunks):
        k, v = chunk.k.float(), chunk.v.float()
        if chunk.k_scale is not None and chunk.v_scale is not None:
            k, v = k * chunk.k_scale, v * chunk.v_scale
        if rotation is not None and chunk.moved:
            k = rotation.rotate(k, chunk.moved)
        taught = shifts[i] if shifts else None
        if taught is not None:
            weights = taught.weights[:, None]
            places = torch.arange(taught.start, taught.start + k.shape[1], device=k.device)
            mean = taught.k[:, None].expand(-1, k.shape[1], -1)
            k = k + weights * (mean if rotation is None else rotation.rotate(mean.contiguous(), places))
            v = v + weights * taught.v[:, None]
        written = chunk.slots >= 0
        slots, block_size = chunk.slots[written], key_cache.shape[1]
        key_cache[slots // block_size, slots % block_size] = k[:, written].transpose(0, 1).to(key_cache.dtype)
        value_cache[slots // block_size, slots % block_size] = v[:, written].transpose(0, 1).to(value_cache.dtype)
