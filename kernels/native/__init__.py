"""The operators on CPU in C++ (`kernels.cpp`), compiled when ragkv is installed, for several instruction sets.

Where there was no compiler, or for another processor, `find` returns None, and torch takes their place.
"""

import ctypes
import functools
import importlib.util
import logging
from pathlib import Path

import torch

from ragkv.kernels.kv_fuse import FIELDS, Staged, table
from ragkv.kernels.operands import AttentionSpec, PagedKV, Rotation

logger = logging.getLogger(__name__)

_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.uint8: 5,  # two 4-bit numbers
}
# By torch's name of what the processor can; the best first.
_CAPABILITY_TO_LIBRARIES = {"AVX512": ["_amx", "_avx512_bf16", "_avx512"], "AVX2": ["_avx2"]}
_SIGNATURES = {  # p: an address, i: int, n: int64, f: float
    "ragkv_selective_attention": "ippppppppppff",
    "ragkv_query_scores": "ippppppff",
    "ragkv_kv_fuse": "iipnppppppp",
}
_CTYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "n": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def find() -> ctypes.CDLL | None:
    """Load the library for this processor; None if it wasn't compiled or can't be loaded."""
    is_usable = {"_amx": torch.cpu._is_amx_tile_supported(), "_avx512_bf16": torch.cpu._is_avx512_bf16_supported()}
    names = _CAPABILITY_TO_LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ["_baseline"])
    specs = [importlib.util.find_spec(f"{__name__}.{name}") for name in names if is_usable.get(name, True)]
    spec = next((spec for spec in specs if spec is not None), None)  # an old compiler knows no AMX or bfloat16
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


def kv_fuse(chunks: list[Staged], rotation: Rotation | None, kv: PagedKV) -> None:
    """Compute `kv_fuse_reference`. The chunks have one stored type; a head's tokens are contiguous, and so are the D
    numbers of a token in the cache."""
    if not chunks:
        return
    assert kv.k.stride(3) == kv.v.stride(3) == 1
    rows = torch.tensor(table(chunks))
    assert rows.shape[1] == FIELDS
    num_heads, head_size = len(chunks[0].k), chunks[0].head_size
    cos, sin, neox = (rotation.cos, rotation.sin, rotation.neox) if rotation is not None else (None, None, True)
    shape = (num_heads, head_size, 0 if cos is None else cos.shape[1], neox, kv.block_size)
    types = (chunks[0].k.dtype, kv.k.dtype)
    _call("ragkv_kv_fuse", *types, rows, len(rows), cos, sin, kv.k, kv.v, shape, kv.k.stride(), kv.v.stride())


def query_scores(
    q: torch.Tensor, q_positions: torch.Tensor, k: torch.Tensor, k_positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Compute `query_scores_reference`; each thread holds the scores of 8 to 32 rows."""
    num_kv_heads, num_tokens, head_size = k.shape
    q, q_positions, k_positions = q.contiguous(), q_positions.contiguous(), k_positions.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    votes = torch.empty(num_tokens, dtype=torch.float32)
    shape = (*q.shape[:2], num_kv_heads, head_size, num_tokens, *k.stride()[:2], spec.sliding_window or 0)
    _call("ragkv_query_scores", q.dtype, q, k, q_positions, k_positions, votes, shape, spec.scale, spec.soft_cap)
    return votes


def selective_attention(q: torch.Tensor, positions: torch.Tensor, kv: PagedKV, spec: AttentionSpec) -> torch.Tensor:
    """Compute `selective_attention_reference`, in q's type. The D numbers of a token in the cache are contiguous; of K
    instead those of a block's tokens may be."""
    assert kv.v.stride(3) == 1 and 1 in (kv.k.stride(3), kv.k.stride(1))
    q, positions, block_table = q.contiguous(), positions.contiguous(), kv.block_table.contiguous()
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    out = torch.empty_like(q)
    _call(
        "ragkv_selective_attention",
        q.dtype,
        *(q, kv.k, kv.v, out, positions, block_table, sinks),
        (*q.shape[:2], kv.k.shape[2], q.shape[2], kv.block_size, spec.sliding_window or 0),
        kv.k.stride(),
        kv.v.stride(),
        spec.scale,
        spec.soft_cap,
    )
    return out


def _call(name: str, *arguments: torch.dtype | torch.Tensor | tuple[int, ...] | float | None) -> None:
    library = find()
    assert library is not None
    if getattr(library, name)(*map(_to_c, arguments)):
        raise TypeError(f"{name} doesn't know the type of these tensors")


def _to_c(argument: torch.dtype | torch.Tensor | tuple[int, ...] | float | None) -> object:
    match argument:
        case torch.dtype():
            return _TYPES[argument]
        case torch.Tensor():
            return argument.data_ptr()
        case tuple():
            return (ctypes.c_int64 * len(argument))(*argument)
    return argument
