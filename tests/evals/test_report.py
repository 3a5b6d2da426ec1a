import gzip
import json
import random

import pytest

from ragkv.errors import ConfigError
from ragkv.evals import report


def row(arm, example, **fields):
    label, _, kv = arm.partition("@")
    policy, _, budget = label.partition(":")
    rng = random.Random(f"{arm}{example}")
    return {
        "dataset": "musique",
        "model": "small",
        "dtype": "float32",
        "captures": 4,
        "codec": "raw",
        "score_name": "contains",
        "score_ceiling": 1.0,
        "example": example,
        "arm": arm,
        "policy": policy,
        "budget": float(budget or 0),
        "kv": kv,
        "kl": rng.random() / (1 + 10 * float(budget or 0)),
        "agreement": 0.9,
        "gold_nll": 2.0,
        "gold_nll_full": 1.5,
        "score": 0.25,
        "score_full": 0.5,
        "word_f1": 0.1,
        "word_f1_full": 0.1,
        "tokens": 2000,
        "ttft_ms": None,
        "baseline_ttft_ms": 4000.0,
        "recomputed_share": 0.05,
        **fields,
    }


@pytest.fixture
def results(tmp_path):
    arms = ["none@near", "query:0.02@near", "query:0.05@near", "cacheblend:0.15@alone"]
    rows = [row(arm, f"e{i}") for i in range(20) for arm in arms]
    rows[1] |= {
        "ttft_ms": 500.0,
        "pieces": ["<anchor>", "one", " two\n", " three", " asked"],
        "chunk_ranges": [[1, 3], [3, 4]],
        "recomputed_runs": [[2, 3]],
    }
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"cut off')
    return file


def test_the_page_shows_numbers_pictures_and_a_prompt(results, tmp_path):
    page = report.write([results], tmp_path / "out", "cacheblend:0.15@alone")
    text = page.read_text()
    for picture in ("rows-drift.png", "rows-score.png"):
        assert picture in text
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")
    assert "<td>query:0.05@near</td><td>20</td>" in text
    assert "1.00 [1.00, 1.00]" in text  # CacheBlend against itself
    assert "&lt;anchor&gt;<br>▸ one<b class=recomputed> two↵ </b><br>▸  three<b class=asked> asked</b>" in text


def test_without_times_there_is_no_picture_of_them(results, tmp_path):
    results.write_text("\n".join(line for line in results.read_text().splitlines() if '"ttft_ms": null' in line))
    text = report.write([results], tmp_path / "out", "cacheblend:0.15@alone").read_text()
    assert "rows-drift.png" in text and "rows-score.png" not in text


@pytest.mark.parametrize("content", ["", "not json}\n", '{"a": 1}\n'])
def test_other_files_are_named(tmp_path, content):
    file = tmp_path / "other.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"other\.jsonl holds no results"):
        report.write([file], tmp_path / "out", "x")


def test_files_of_one_dataset_keep_their_pictures(results, tmp_path):
    other = tmp_path / "budgets.jsonl"
    other.write_text(results.read_text())
    page = report.write([results, other], tmp_path / "out", "cacheblend:0.15@alone")
    for picture in ("rows-drift.png", "budgets-drift.png"):
        assert picture in page.read_text()
        assert (page.parent / picture).exists()


def test_two_files_of_one_name_are_refused(results, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / results.name
    other.write_text(results.read_text())
    with pytest.raises(ConfigError, match=r"two files are called rows\.jsonl"):
        report.write([results, other], tmp_path / "out", "x")


def test_compressed_rows_are_read_and_other_bytes_are_named_without_being_shown(results, tmp_path):
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(results.read_bytes()))
    assert report.write([packed], tmp_path / "out", "cacheblend:0.15@alone").exists()
    packed.with_suffix("").write_bytes(packed.read_bytes())
    with pytest.raises(ConfigError, match=r"packed\.jsonl holds no results of `ragkv eval quality`: \w+$"):
        report.write([packed.with_suffix("")], tmp_path / "out", "x")
