"""`ragkv eval all` with real engines: a case of one engine, and one of ragkv's and vLLM's side by side."""

import json
import os
import subprocess
import sys
from pydoc_data.topics import topics

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of datasets, with passages of the Python manual in MuSiQue's place."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "musique").mkdir()
    text = "\n\n".join(topics[name] for name in sorted(topics))
    texts = [text[i * 2000 :][:2000] for i in range(40)]
    rows = [
        {
            "id": f"q{i}",
            "question": f"What is said in passage {i}?",
            "answer": "much",
            "answer_aliases": [],
            "paragraphs": [{"title": f"{i}.{j}", "paragraph_text": text} for j, text in enumerate(texts[i * 4 :][:4])],
        }
        for i in range(10)
    ]
    (folder / "musique" / "musique_200.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_small_samples_of_real_engines_become_a_page(home, data, tmp_path):
    command = [sys.executable, "-m", "ragkv", "eval", "all", "--quick", "--only", "ttft,rag"]
    environment = {**os.environ, "RAGKV_HOME": str(home), "RAGKV_MODEL__DTYPE": "float32"}
    done = subprocess.run(
        [*command, "--data", str(data), "--out", str(tmp_path / "all")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "all" / "benchmarks.md").read_text()
    assert "Time to first token by policy and length" in page and "guided:0.05" in page
    assert "vLLM, no prefix cache" in page and "Without LMCache: LMCache isn't installed" in page
    rows = [json.loads(line) for line in (tmp_path / "all" / "rag.jsonl").read_text().splitlines()]
    alone = {row["system"]: row for row in rows if row["part"] == "alone"}
    assert alone["vLLM, no prefix cache"]["reused_share"] == 0
    assert alone["ragkv"]["reused_share"] > 0.8 > alone["vLLM"]["reused_share"]
    (long,) = (row for row in rows if row["part"] == "long")
    assert long["questions"] == 4 and long["reused_share"] > 0.8
