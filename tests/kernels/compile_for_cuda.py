"""Compiles Triton's kernels for a GPU that needn't be there; `test_compilation.py` runs this in a process of its own.

Prints a line of JSON for each: its name, and how many bytes of shared memory it takes.
"""

import json
import sys
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ragkv.kernels.kv_deviation.triton_kernel import kv_deviation
from ragkv.kernels.kv_fuse import Addend, KVShift, Staged
from ragkv.kernels.kv_fuse.triton_kernel import kv_fuse
from ragkv.kernels.operands import AttentionSpec, PagedKV, Rotation
from ragkv.kernels.query_scores.triton_kernel import query_scores
from ragkv.kernels.selective_attention.triton_kernel import selective_attention

TOKENS, HEADS, KV_HEADS = 40, 8, 2


class Absent:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(kernel, grid):
    def launch(*arguments, **options):
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        print(json.dumps({"kernel": kernel.fn.__name__, "shared": compiled.metadata.shared}))

    return launch


def compile_all(head_size, dtype, stored, **options):
    q, fresh = (torch.zeros(*shape, head_size, dtype=dtype) for shape in ((5, HEADS), (KV_HEADS, 5)))
    k, positions = torch.zeros(KV_HEADS, TOKENS, head_size).to(stored), torch.arange(5)
    scales = (torch.ones(KV_HEADS, 1, head_size), torch.ones(KV_HEADS, TOKENS, 1)) if stored.itemsize == 1 else ()
    cache, angles = torch.zeros(3, 16, KV_HEADS, head_size, dtype=dtype), torch.zeros(TOKENS, head_size // 2)
    kv, spec = PagedKV(cache, cache, torch.arange(3)), AttentionSpec(0.1, **options)
    mean = torch.zeros(KV_HEADS, head_size)
    shift = KVShift(mean, mean, torch.ones(TOKENS), 0)
    k_scale, v_scale = scales or (None, None)
    pairs = torch.zeros(2, KV_HEADS, 1, head_size // 2, dtype=torch.uint8)
    addend = Addend(torch.zeros(TOKENS, dtype=torch.int32), torch.zeros(2, KV_HEADS, 1, 1).half(), pairs)
    chunk = Staged(k, k, torch.arange(TOKENS), 3, k_scale, v_scale, shift=shift, addend=addend)
    kv_fuse([chunk], Rotation(angles, angles, neox=bool(scales)), kv)
    pairs = torch.zeros(KV_HEADS, TOKENS, head_size // 2, dtype=torch.uint8)
    by_channel, by_token = torch.ones(KV_HEADS, 1, head_size).half(), torch.ones(KV_HEADS, TOKENS, 1).half()
    packed = replace(chunk, k=pairs, v=pairs, k_scale=by_channel, v_scale=by_token, k_low=by_channel, v_low=by_token)
    kv_fuse([packed], Rotation(angles, angles, neox=not scales), kv)
    kv_deviation(fresh, k.to(dtype), positions)
    query_scores(q, positions, k.to(dtype), torch.arange(TOKENS), spec)
    sinks = torch.zeros(HEADS) if options else None
    selective_attention(q, positions, kv, replace(spec, sinks=sinks))


driver.set_active(Absent())
JITFunction.__getitem__ = compile_only
compile_all(128, torch.bfloat16, torch.float8_e4m3fn, sliding_window=30, soft_cap=3.0)
compile_all(256, torch.float32, torch.float32)
