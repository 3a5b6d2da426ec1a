"""Measurement of the operators' kernels. `python -m ragkv.evals.kernels.timing` makes a table of the rows printed."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median

import torch

from ragkv.kernels import native
from ragkv.kernels.dispatch import Kernels, choose

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
DTYPE = torch.bfloat16 if ON_CUDA else torch.float32
HEADS, KV_HEADS, HEAD_SIZE = (32, 8, 128) if ON_CUDA else (9, 3, 64)  # Llama 3 8B's; SmolLM2 135M's
LENGTHS = (8192, 16384, 32768) if ON_CUDA else (4109,)
ROUNDS, WARM_UP = 20, 3
L2_BYTES = 256 << 20  # more than any GPU's


def kernels() -> list[Kernels]:
    """Return what is compared here: Triton's kernels and torch's on CUDA, those in C++ and torch's on a CPU."""
    fast = "triton" if ON_CUDA else "native" if native.find() else None
    return [choose(name, DEVICE) for name in (fast, "torch") if name]


def measure(
    operator: str, case: str, runs: Mapping[str, Callable[[], object]], work: Mapping[str, float], unit: str
) -> None:
    """Print a line of JSON for each of the runs: its median milliseconds, and billions of `work` per second in `unit`.

    The runs take turns, after some rounds to warm up. On CUDA they are timed between two events, with a cold L2 cache.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UP + ROUNDS):
        for name, run in runs.items():
            times[name].append(_milliseconds(run))
    for name in runs:
        ms = median(times[name][WARM_UP:])
        row = {"device": _device(), "operator": operator, "case": case, "by": name}
        print(json.dumps(row | {"ms": round(ms, 4), "rate": round(work[name] / ms / 1e6, 2), "unit": unit}), flush=True)


def _milliseconds(run: Callable[[], object]) -> float:
    if not ON_CUDA:
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    torch.empty(L2_BYTES, dtype=torch.uint8, device=DEVICE).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _device() -> str:
    if ON_CUDA:
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}; no CUDA"


def table(lines: Iterable[str]) -> str:
    """Format rows of JSON as a table with aligned columns."""
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    cells = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (map(str.ljust, row, widths) for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)


if __name__ == "__main__":
    print(table(sys.stdin))
