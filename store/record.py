"""The KV record: a versioned header, and K and V of one chunk in one layer as the header's codec stores them.

Layout (little-endian): 128-byte header with the record's key, then K and V `[Hkv, T, D]`, head-major
(`ragkv.store.codecs`), then, where the header says so, the v_std `[T]` float32, then the difference of some tokens
(`ragkv.store.difference`). The checksum covers the header and the payload: bytes that are damaged, or filed under
another key, don't verify.
"""

import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

import torch
import xxhash

from ragkv.store import difference
from ragkv.store.codecs import CODE_TO_CODEC, RAW, Codec, restored, to_bytes
from ragkv.store.difference import Difference

FORMAT_VERSION: Final = 5  # of records and of the files that they are in
PREFIX_BYTES: Final = 52  # of a key without the layer

# Records are read in place from read-only memory, which torch can't mark as such. Nothing here writes to a record.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_MAGIC = b"RKV1"
_HEADER = struct.Struct("<4sHBBHHIiII")  # magic, version, codec, dtype, Hkv, D, T, base, flags, n
_KEY_OFFSET = _HEADER.size
_HEADER_SIZE = 128
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = _HEADER_SIZE - _CHECKSUM.size
_HAS_V_STD = 1  # flags
_ALL = slice(None)
_CODE_TO_DTYPE = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
_DTYPE_TO_CODE = {dtype: code for code, dtype in _CODE_TO_DTYPE.items()}


@dataclass(frozen=True)
class ChunkKey:
    """The name of an entry: which chunk, computed after which anchor, by which model.

    chunk_hash, anchor_hash: of token ids (128 bits, hexadecimal); the anchor is what comes before the chunk.
    fingerprint: of the model (128 bits, hexadecimal).
    heads: the range of KV heads in the record, `(first, last + 1)`, so that tensor-parallel ranks read their slice.
    """

    chunk_hash: str
    anchor_hash: str
    fingerprint: str
    heads: tuple[int, int]

    def prefix(self) -> bytes:
        hashes = bytes.fromhex(self.chunk_hash + self.anchor_hash + self.fingerprint)
        return hashes + struct.pack(">HH", *self.heads)

    def layer(self, index: int) -> bytes:
        """Return the key of one layer's record, the chunk first, so that a chunk's keys sort together."""
        return self.prefix() + struct.pack(">H", index)

    @classmethod
    def parse(cls, prefix: bytes) -> "ChunkKey":
        """Return the key that has this prefix."""
        chunk_hash, anchor_hash, fingerprint = (prefix[start : start + 16].hex() for start in (0, 16, 32))
        return cls(chunk_hash, anchor_hash, fingerprint, struct.unpack_from(">HH", prefix, 48))


@dataclass(frozen=True)
class LayerKV:
    """K (after RoPE, for positions from `base_position` on) and V of one chunk in one layer: `[Hkv, T, D]` each.

    v_std: `[T]` float32, the standard deviation of each token's V over the contexts that the mean is of; None for KV
    of a single context. k_scale to v_low: how the numbers of a quantizing codec are to be read, of which `int4` has two
    in a byte (`ragkv.store.codecs.Stored`). difference: of the KV directly after the anchor from this mean. With it,
    `decoded` returns the former; `mean` and `alone` are either of both without the rest.
    """

    k: torch.Tensor
    v: torch.Tensor
    base_position: int
    v_std: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_low: torch.Tensor | None = None
    v_low: torch.Tensor | None = None
    difference: Difference | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return `(Hkv, T, D)`."""
        heads, tokens, size = self.k.shape
        return heads, tokens, size if self.k_low is None else 2 * size

    @property
    def size_bytes(self) -> int:
        """Return the bytes that the tensors take in memory."""
        return sum(part.nbytes for part in self._tensors() if part is not None)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "LayerKV":
        """Return the same with each tensor changed, say moved to a device."""
        parts = (None if part is None else change(part) for part in self._own_tensors())
        k, v, v_std, k_scale, v_scale, k_low, v_low = parts
        assert k is not None and v is not None
        changed = self.difference and Difference(*map(change, self.difference.parts()))
        return LayerKV(k, v, self.base_position, v_std, k_scale, v_scale, k_low, v_low, changed)

    def decoded(self, tokens: torch.Tensor | slice = _ALL) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of these tokens, `[Hkv, c, D]` each: float32 if they have scales or a difference, else as they
        are stored."""
        if self.difference is not None:
            k, v = self.difference.added_to(*self.mean().decoded())
            return k[:, tokens], v[:, tokens]
        k, v = self.k[:, tokens], self.v[:, tokens]
        if self.k_scale is None or self.v_scale is None:
            return k, v
        v_low = None if self.v_low is None else self.v_low[:, tokens]
        return restored(k, self.k_scale, self.k_low), restored(v, self.v_scale[:, tokens], v_low)

    def part(self, start: int, end: int) -> "LayerKV":
        """Return the KV of the tokens `[start, end)`, in the same memory unless there is a difference."""
        if self.difference is not None:
            return LayerKV(*self.decoded(), self.base_position).part(start, end)
        v_std = None if self.v_std is None else self.v_std[start:end]
        k, v = self.k[:, start:end], self.v[:, start:end]
        v_scale, v_low = (None if x is None else x[:, start:end] for x in (self.v_scale, self.v_low))
        base = self.base_position + start
        return replace(self, k=k, v=v, base_position=base, v_std=v_std, v_scale=v_scale, v_low=v_low)

    def mean(self) -> "LayerKV":
        """Return the mean alone."""
        return self if self.difference is None else replace(self, difference=None)

    def alone(self) -> "LayerKV":
        """Return the KV directly after the anchor, of a mean that has the difference."""
        return self if self.v_std is None else replace(self, v_std=None)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        parts = self._own_tensors()
        return (*parts, *self.difference.parts()) if self.difference else parts

    def _own_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return all but those of the difference."""
        return self.k, self.v, self.v_std, self.k_scale, self.v_scale, self.k_low, self.v_low


class CorruptRecordError(Exception):
    """Stored bytes that don't verify. Callers treat the record as a miss; it never reaches a user."""


def encode(key: bytes, kv: LayerKV, codec: Codec = RAW) -> bytes:
    """Serialise one layer of a chunk under its key. K and V are as a model computes them, not quantized."""
    codec = codec.of(is_mean=kv.v_std is not None)
    num_kv_heads, num_tokens, head_size = kv.k.shape
    dtype = _DTYPE_TO_CODE[kv.k.dtype]
    flags = 0 if kv.v_std is None else _HAS_V_STD
    num_differing = len(kv.difference.tokens) if kv.difference else 0
    shape = (num_kv_heads, head_size, num_tokens)
    fields = (_MAGIC, FORMAT_VERSION, codec.code, dtype, *shape, kv.base_position, flags, num_differing)
    header = (_HEADER.pack(*fields) + key).ljust(_CHECKSUM_OFFSET, b"\0")
    payload = codec.encode(kv.k, kv.v) + (b"" if kv.v_std is None else to_bytes(kv.v_std.float()))
    payload += b"".join(map(to_bytes, kv.difference.parts())) if kv.difference else b""
    return header + _CHECKSUM.pack(_checksum(header, payload)) + payload


def decode(key: bytes, value: bytes | memoryview) -> LayerKV:
    """Read a record without copying: its tensors share `value`'s memory, and are read-only.

    Raises CorruptRecordError, naming what is wrong, for anything that `encode` wouldn't have written under this key.
    """
    head, payload = check(key, value)
    stored = head.codec.split(payload[: head.size_bytes], head.shape, head.dtype)
    v_std, rest = None, payload[head.size_bytes :]
    if head.has_v_std:
        v_std, rest = torch.frombuffer(rest, dtype=torch.float32, count=head.shape[1]), rest[head.v_std_bytes :]
    differing = difference.split(rest, head.shape, head.num_differing) if head.num_differing else None
    grids = (stored.k_scale, stored.v_scale, stored.k_low, stored.v_low)
    return LayerKV(stored.k, stored.v, head.base_position, v_std, *grids, differing)


def check(key: bytes, value: bytes | memoryview) -> tuple["Header", memoryview]:
    """Return a record's header and payload. Raises CorruptRecordError unless `encode` wrote it under this key."""
    view = memoryview(value)
    head = read_header(view)
    if view[_KEY_OFFSET : _KEY_OFFSET + len(key)] != key:
        raise CorruptRecordError("the record of another key")
    header, payload = view[:_CHECKSUM_OFFSET], view[_HEADER_SIZE:]
    (expected,) = _CHECKSUM.unpack_from(view, _CHECKSUM_OFFSET)
    if len(view) != head.length:
        raise CorruptRecordError(f"{len(view)} bytes where the header says {head.length}")
    if _checksum(header, payload) != expected:
        raise CorruptRecordError("checksum mismatch")
    return head, payload


def record_bytes(kv: LayerKV, codec: Codec = RAW) -> int:
    """Return the length of the record that `encode` makes."""
    is_mean, num_differing = kv.v_std is not None, len(kv.difference.tokens) if kv.difference else 0
    return Header(codec.of(is_mean=is_mean), kv.k.dtype, kv.shape, 0, is_mean, num_differing).length


@dataclass(frozen=True)
class Header:
    """What a record says of itself. shape: of K and V, `[Hkv, T, D]`. num_differing: tokens with a difference."""

    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, int, int]
    base_position: int
    has_v_std: bool
    num_differing: int

    @cached_property
    def size_bytes(self) -> int:
        """Return the bytes of K and V."""
        return self.codec.num_bytes(self.shape, self.dtype)

    @property
    def v_std_bytes(self) -> int:
        return 4 * self.shape[1] if self.has_v_std else 0

    @cached_property
    def length(self) -> int:
        """Return the bytes of the whole record."""
        differing_bytes = difference.num_bytes(self.shape, self.num_differing)
        return _HEADER_SIZE + self.size_bytes + self.v_std_bytes + differing_bytes


def read_header(value: bytes | memoryview) -> Header:
    """Read the header of the record that begins here. Raises CorruptRecordError if none does."""
    if len(value) < _HEADER_SIZE:
        raise CorruptRecordError(f"{len(value)} bytes are too few for a header")
    return _parse_fields(bytes(value[: _HEADER.size]))


@lru_cache(64)  # most records of a store begin alike
def _parse_fields(fields: bytes) -> Header:
    magic, version, code, dtype_code, num_kv_heads, head_size, num_tokens, base, flags, differing = _HEADER.unpack(
        fields
    )
    if magic != _MAGIC:
        raise CorruptRecordError("not a KV record")
    codec = CODE_TO_CODEC.get(code)
    if version != FORMAT_VERSION or codec is None or dtype_code not in _CODE_TO_DTYPE:
        raise CorruptRecordError(f"version {version}, codec {code}, dtype {dtype_code} are unknown to this release")
    shape = (num_kv_heads, num_tokens, head_size)
    return Header(codec, _CODE_TO_DTYPE[dtype_code], shape, base, bool(flags & _HAS_V_STD), differing)


def _checksum(header: bytes | memoryview, payload: bytes | memoryview) -> int:
    checksum = xxhash.xxh3_64(header)
    checksum.update(payload)
    return checksum.intdigest()
