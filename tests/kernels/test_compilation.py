"""Triton's compiler refuses what its interpreter runs: the kernels are compiled too, for GPUs that needn't be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = ["_kv_fuse", "_kv_fuse", "_kv_deviation", "_log_sums", "_votes", "_selective_attention"]
SHARED_MEMORY = 99 * 1024  # bytes: the least of any GPU since Ampere


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit(capability, tmp_path):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_for_cuda.py")
    done = subprocess.run(
        [sys.executable, script, str(capability)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["kernel"] for row in rows] == 2 * KERNELS
    assert all(row["shared"] <= SHARED_MEMORY for row in rows), rows
