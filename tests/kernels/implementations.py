"""The operators' implementations, as parameters of tests; those that this machine lacks are skipped.

Where there is no GPU, Triton's run in its interpreter. Triton settles that when it is imported, when a kernel is
defined and when the first one runs: `tests/conftest.py` imports this before anything else brings Triton in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from ragkv.kernels.dispatch import Kernels, KernelsError, choose

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@contextmanager
def interpreter() -> Iterator[None]:
    """Triton's, where there is no GPU; what is started after it doesn't inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu" and find_spec("triton"):
            patch.setenv("TRITON_INTERPRET", "1")
            _repair_dot(patch)
        yield


def _repair_dot(patch) -> None:
    """The interpreter multiplies the bits of bfloat16, not the numbers (Triton 3.9)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    def dot(builder, a, b, *rest):
        a, b = (builder.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return own_dot(builder, a, b, *rest)

    own_dot = InterpreterBuilder.create_dot
    patch.setattr(InterpreterBuilder, "create_dot", dot)


def implementations(operator, *names):
    """A parameter for each of the implementations of that name."""
    return [_parameter(operator, name) for name in names]


def _parameter(operator, name):
    kernels = _KERNELS[name]
    if isinstance(kernels, KernelsError):
        return pytest.param(None, id=name, marks=pytest.mark.skip(str(kernels)))
    return pytest.param(getattr(kernels, operator), id=name)


def _choose(name) -> Kernels | KernelsError:
    try:
        return choose(name, DEVICE)
    except KernelsError as error:
        return error


with interpreter():
    _KERNELS = {name: _choose(name) for name in ("triton", "native", "torch")}
