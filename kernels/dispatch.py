"""Which kernels compute the operators: decided here, once for a worker."""

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ragkv.kernels import native
from ragkv.kernels.kv_deviation import kv_deviation_reference
from ragkv.kernels.kv_fuse import kv_fuse_reference
from ragkv.kernels.query_scores import query_scores
from ragkv.kernels.selective_attention import selective_attention

CHOICES = ("auto", "triton", "native", "torch")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """The operators, each with its reference's arguments (`ragkv.kernels.kv_fuse` and so on)."""

    name: str
    kv_fuse: Callable[..., None]
    kv_deviation: Callable[..., torch.Tensor]
    query_scores: Callable[..., torch.Tensor]
    selective_attention: Callable[..., torch.Tensor]


class KernelsError(Exception):
    """The kernels that were asked for can't run here; the message says why, and what to do."""


def choose(wish: str, device: torch.device) -> Kernels:
    """`triton` on CUDA (or, to try it, in Triton's interpreter), `native` (C++) on CPU, `torch` anywhere; `auto` takes
    the first of these that there is, and no interpreter. Raises KernelsError if the wish can't be met."""
    if wish not in CHOICES:
        raise KernelsError(f"kernels are {', '.join(CHOICES)}, not {wish!r}")
    problems = {"triton": _no_triton(device), "native": _no_native(device), "torch": None}
    there = [name for name in problems if problems[name] is None]
    if wish == "auto":
        wish = next(name for name in there if name != "triton" or device.type == "cuda")
    problem = problems[wish]
    if problem is not None:
        raise KernelsError(f"no {wish} kernels: {problem}; choose auto, or torch")
    logger.info("kernels: %s on %s", wish, device)
    return _KERNELS[wish]()


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
        return "there are none for this processor from when ragkv was installed (it needs a compiler: `g++ --version`)"
    return None


def _triton() -> Kernels:
    from ragkv.kernels.kv_deviation import triton_kernel as of_deviation
    from ragkv.kernels.kv_fuse import triton_kernel as of_fuse
    from ragkv.kernels.query_scores import triton_kernel as of_scores
    from ragkv.kernels.selective_attention import triton_kernel as of_attention

    return Kernels(
        "triton",
        of_fuse.kv_fuse,
        of_deviation.kv_deviation,
        of_scores.query_scores,
        of_attention.selective_attention,
    )


def _native() -> Kernels:
    return Kernels("native", native.kv_fuse, kv_deviation_reference, native.query_scores, native.selective_attention)


def _torch() -> Kernels:
    return Kernels("torch", kv_fuse_reference, kv_deviation_reference, query_scores, selective_attention)


_KERNELS = {"triton": _triton, "native": _native, "torch": _torch}
