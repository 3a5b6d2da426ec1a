"""The choice of kernels that compute the operators, made once for a worker."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragkv.kernels import native
from ragkv.kernels.kv_deviation import kv_deviation_reference
from ragkv.kernels.kv_fuse import Staged, kv_fuse_reference
from ragkv.kernels.operands import AttentionSpec, PagedKV, Rotation
from ragkv.kernels.query_scores import query_scores
from ragkv.kernels.selective_attention import selective_attention

CHOICES = ("auto", "triton", "native", "torch")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operator, with the arguments of its reference (`ragkv.kernels.kv_fuse` and so on)."""

    name: str
    kv_fuse: Callable[[list[Staged], Rotation | None, PagedKV], None]
    kv_deviation: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    query_scores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]
    selective_attention: Callable[[torch.Tensor, torch.Tensor, PagedKV, AttentionSpec], torch.Tensor]


class KernelsError(Exception):
    """The chosen kernels can't run here; the message says why, and what to do."""


def choose(name: str, device: torch.device) -> Kernels:
    """Return the kernels of that name: `triton` on CUDA (or, to try it, in Triton's interpreter), `native` (C++) on
    CPU, `torch` anywhere; `auto`: the first of these that can run, without the interpreter. Raises KernelsError if they
    can't run here."""
    if name not in CHOICES:
        raise KernelsError(f"kernels are {', '.join(CHOICES)}, not {name!r}")
    problems = {"triton": _no_triton(device), "native": _no_native(device), "torch": None}
    if name == "auto":
        name = next(each for each in problems if not problems[each] and (each != "triton" or device.type == "cuda"))
        if name == "torch":
            why = "; ".join(f"{kind}: {problem}" for kind, problem in problems.items() if problem)
            logger.warning("fusion is several times slower than it could be, without kernels of ragkv's own (%s)", why)
    if problems[name]:
        raise KernelsError(f"no {name} kernels: {problems[name]}; choose auto, or torch")
    logger.info("kernels: %s on %s", name, device)
    if name == "triton":
        return _triton()
    if name == "native":
        return Kernels(name, native.kv_fuse, kv_deviation_reference, native.query_scores, native.selective_attention)
    return Kernels(name, kv_fuse_reference, kv_deviation_reference, query_scores, selective_attention)


def _no_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton isn't installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton doesn't compile for {device.type}"
    return None


def _no_native(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"they are for CPUs, not for {device.type}"
    if native.find() is None:
        return "none were compiled for this processor when ragkv was installed (it needs a compiler: `g++ --version`)"
    return None


def _triton() -> Kernels:
    from ragkv.kernels.kv_deviation.triton_kernel import kv_deviation
    from ragkv.kernels.kv_fuse.triton_kernel import kv_fuse
    from ragkv.kernels.query_scores.triton_kernel import query_scores
    from ragkv.kernels.selective_attention.triton_kernel import selective_attention

    return Kernels("triton", kv_fuse, kv_deviation, query_scores, selective_attention)
