"""The operators on CPU in C++ (`kernels.cpp`), compiled when ragkv is installed, for several instruction sets.

Where no compiler was there, or for another processor, `find` says so, and torch takes their place.
"""

import ctypes
import functools
import importlib.util
import logging
from pathlib import Path

import torch

from ragkv.kernels.kv_fuse import FIELDS, KVShift, Staged, table
from ragkv.kernels.rotation import Rotation

logger = logging.getLogger(__name__)

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
_CAPABILITY_TO_LIBRARIES = {"AVX512": ["_avx512_bf16", "_avx512"], "AVX2": ["_avx2"]}  # by torch's name; the best first
_SIGNATURES = {  # p: an address, i: int, n: int64, f: float
    "ragkv_selective_attention": "ippppppppppff",
    "ragkv_query_scores": "ippppppff",
    "ragkv_kv_fuse": "iipnppppppp",
}
_CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "n": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def find() -> ctypes.CDLL | None:
    """The library for this processor, None if it wasn't compiled or can't be loaded."""
    names = _CAPABILITY_TO_LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ["_baseline"])
    specs = [
        importlib.util.find_spec(f"{__name__}.{name}")
        for name in names
        if name != "_avx512_bf16" or torch.cpu._is_avx512_bf16_supported()
    ]
    spec = next((spec for spec in specs if spec is not None), None)  # an old compiler knows no bfloat16
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(str(Path(spec.origin)))
    except OSError as error:  # of another machine's libraries, say
        logger.warning("the kernels in C++ can't be loaded: %s", error)
        return None
    for function, letters in _SIGNATURES.items():
        getattr(library, function).argtypes = [_CTYPES[letter] for letter in letters]
    return library


def kv_fuse(
    chunks: list[Staged],
    rotation: Rotation | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    shifts: list[KVShift | None] | None = None,
) -> None:
    """As `kv_fuse_reference`. The chunks have one stored type and are contiguous, and so are a token's numbers."""
    if not chunks:
        return
    assert key_cache.stride(3) == value_cache.stride(3) == 1
    rows = torch.tensor(table(chunks, shifts))
    assert rows.shape[1] == FIELDS
    num_heads, _, head_size = chunks[0].k.shape
    pairs, neox = (rotation.cos.shape[1], rotation.neox) if rotation is not None else (0, True)
    _call(
        "ragkv_kv_fuse",
        _TYPES[chunks[0].k.dtype],
        _TYPES[key_cache.dtype],
        rows.data_ptr(),
        len(rows),
        _address(rotation.cos if rotation is not None else None),
        _address(rotation.sin if rotation is not None else None),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        _numbers(num_heads, head_size, pairs, neox, key_cache.shape[1]),
        _numbers(*key_cache.stride()),
        _numbers(*value_cache.stride()),
    )


def query_scores(
    q: torch.Tensor,
    q_positions: torch.Tensor,
    k: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """As `query_scores_reference`; each thread holds about a MiB of scores, or those of a few rows."""
    num_kv_heads, num_tokens, head_size = k.shape
    q, q_positions, k_positions = q.contiguous(), q_positions.contiguous(), k_positions.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    votes = torch.empty(num_tokens, dtype=torch.float32)
    _call(
        "ragkv_query_scores",
        _TYPES[q.dtype],
        q.data_ptr(),
        k.data_ptr(),
        q_positions.data_ptr(),
        k_positions.data_ptr(),
        votes.data_ptr(),
        _numbers(len(q), q.shape[1], num_kv_heads, head_size, num_tokens, k.stride(0), k.stride(1), window or 0),
        scale,
        soft_cap,
    )
    return votes


def selective_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `selective_attention_reference`, in q's type. A token's numbers lie side by side, or, of keys, a block's
    tokens."""
    assert value_cache.stride(3) == 1 and 1 in (key_cache.stride(3), key_cache.stride(1))
    q, positions, block_table = q.contiguous(), positions.contiguous(), block_table.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty_like(q)
    _call(
        "ragkv_selective_attention",
        _TYPES[q.dtype],
        q.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        positions.data_ptr(),
        block_table.data_ptr(),
        _address(sinks),
        _numbers(*q.shape[:2], key_cache.shape[2], q.shape[2], key_cache.shape[1], window or 0),
        _numbers(*key_cache.stride()),
        _numbers(*value_cache.stride()),
        scale,
        soft_cap,
    )
    return out


def _call(name: str, *arguments: object) -> None:
    library = find()
    assert library is not None
    if getattr(library, name)(*arguments):
        raise TypeError(f"{name} doesn't know the type of these tensors")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _numbers(*numbers: int) -> object:
    return (ctypes.c_int64 * len(numbers))(*numbers)
