"""Where fusion begins to pay, from rows of `ragkv eval swap`, and its picture."""

import json
from pathlib import Path

import pytest

from ragkv.evals.workloads.swap import break_even, draw

ROWS = [
    {
        "tokens": tokens,
        "prefill_ms": prefill,
        "fuse_ms": fuse,
        "predicted_prefill_ms": prefill,
        "predicted_fuse_ms": 1.0,
    }
    for tokens, prefill, fuse in ((100, 10.0, 30.0), (200, 30.0, 30.0), (400, 80.0, 40.0), (800, 200.0, 50.0))
]


def test_the_break_even_lies_where_the_curves_cross():
    assert break_even(ROWS) == 200
    assert break_even([ROWS[0], ROWS[2]]) == pytest.approx(200)
    assert break_even(ROWS[::-1]) == 200
    assert break_even(ROWS[2:]) is None and break_even(ROWS[:1]) is None
    assert break_even(ROWS, "predicted_") is None


def test_measured_rows_are_drawn(tmp_path):
    file = Path(__file__).parents[2] / "evals" / "results" / "swap-2026-11-21-avx512-float32.jsonl"
    arms = {"near": 1.0, "chunk_tokens": 512, "batch": 1}
    rows = [{**arms, **json.loads(line)} for line in file.read_text().splitlines()]
    draw(rows, tmp_path / "new" / "swap.png")
    assert (tmp_path / "new" / "swap.png").read_bytes().startswith(b"\x89PNG")
