"""`ragkv eval all` with a real engine: rows of an experiment become a page."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_small_samples_of_a_real_engine_become_a_page(home, tmp_path):
    command = [sys.executable, "-m", "ragkv", "eval", "all", "--quick", "--only", "ttft,timeline"]
    environment = {**os.environ, "RAGKV_HOME": str(home), "RAGKV_MODEL__DTYPE": "float32"}
    done = subprocess.run(
        [*command, "--data", str(tmp_path), "--out", str(tmp_path / "all")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "all" / "benchmarks.md").read_text()
    assert "Time to first token by policy and length" in page and "guided:0.05" in page
    rows = [json.loads(line) for line in (tmp_path / "all" / "ttft.jsonl").read_text().splitlines()]
    assert {row["policy"] for row in rows} == {"guided", "none"}
    timeline = [json.loads(line) for line in (tmp_path / "all" / "timeline.jsonl").read_text().splitlines()]
    assert [row["kv"] for row in timeline] == ["memory", "disk"] and all(row["mib"] > 1 for row in timeline)
    assert (tmp_path / "all" / "timeline.png").read_bytes().startswith(b"\x89PNG")
