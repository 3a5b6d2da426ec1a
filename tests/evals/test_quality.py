"""`ragkv eval quality` continues where it stopped. What it measures needs a model: tests/engine."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals import quality_rows
from ragkv.evals.arms import Arm
from ragkv.evals.datasets import Dataset, Example
from ragkv.evals.experiment import Progress
from ragkv.evals.workloads import quality
from ragkv.evals.workloads.quality_bench import Settings

DATASET = Dataset("own", [Example(str(i), [f"chunk {i}"], "who?", ["Ann"]) for i in range(4)], "contains", 8)
MEASURED = ("kl", "agreement", "gold_nll", "gold_nll_full", "score", "score_full", "word_f1", "word_f1_full")


class FakeBench:
    """Notes what it is asked; the drift of the example with the id 3 is 3."""

    def __init__(self):
        self.dataset, self.evaluated, self.coming = DATASET, [], []

    async def prepare(self, arms, vectors):
        pass

    def chunk_hashes(self, example):
        return {example.id}

    async def evaluate(self, example, arms, *, timed):
        self.evaluated.append((example.id, [arm.label for arm in arms], timed))
        numbers = dict.fromkeys((*MEASURED, "recomputed_share", "tokens", "baseline_ttft_ms"), 0.5)
        numbers |= {"kl": float(example.id), "budget": 0.0, "ttft_ms": 7.0 if timed else None}
        return [{"example": example.id, "arm": a.label, "policy": a.policy.name, "kv": a.kv, **numbers} for a in arms]

    def forget(self, coming):
        self.coming.append(coming)


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    def evaluate(*labels, examples=3):
        bench = FakeBench()

        @asynccontextmanager
        async def running(*_):
            yield bench

        monkeypatch.setattr(quality, "running", running)
        arms, settings = [Arm.parse(label) for label in labels], Settings(examples=examples, ttft_examples=1)
        return asyncio.run(
            quality.evaluate(Config(), DATASET, arms, settings, tmp_path / "new" / "rows.jsonl", Progress())
        ), bench

    return evaluate


def test_rows_sum_up_the_examples(evaluate, tmp_path):
    (first, second), bench = evaluate("none", "query:0.05@anchor")
    assert (first["arm"], second["arm"], first["examples"]) == ("none@mixed", "query:0.05@anchor", 3)
    assert (first["kl"], first["captures"], first["ttft_ms"]) == (1.0, 4, 7.0)
    assert [timed for _, _, timed in bench.evaluated] == [True, False, False]
    assert bench.coming == [[{"1"}, {"2"}], [{"2"}], []]


def test_estimates_are_ranked_beside_the_true_drift():
    def ranked(estimates, true):
        rows = [{"drift_estimate": e, "kl_greedy": t} for e, t in zip(estimates, true, strict=True)]
        return quality_rows._of_estimates(rows)

    assert ranked([0.1, 0.2, 0.6], [1.0, 5.0, 7.0]) == {"drift_estimate": 0.3, "estimate_rank": 1.0}
    assert ranked([0.3, 0.2, 0.1], [1.0, 5.0, 7.0])["estimate_rank"] == -1.0
    assert ranked([0.3, None], [1.0, 5.0]) == {"drift_estimate": None, "estimate_rank": None}


def test_the_tail_is_told_apart_from_the_mean():
    def rows(kl, score):
        zeros = dict.fromkeys((*MEASURED, "recomputed_share", "tokens"), 0.0)
        same = dict.fromkeys((*quality_rows._SAME, "ttft_ms", "baseline_ttft_ms"))
        scored = zip(kl, score, (1.0, 1.0, 0.0, 1.0), strict=True)
        return [
            {**same, **zeros, "example": i, "kl": k, "kl_gold": 2 * k, "kl_greedy": 0.0, "score": s, "score_full": full}
            for i, (k, s, full) in enumerate(scored)
        ]

    none, arm = rows([1.0, 1.0, 1.0, 1.0], [1.0] * 4), rows([0.0, 1.05, 1.2, 3.0], [1.0, 0.0, 0.0, 1.0])
    row = quality_rows.summary(arm, none)
    assert (row["kl_p50"], row["kl_worst"]) == (1.125, 3.0) and 1.2 < row["kl_p90"] < 3.0
    assert (row["kl_greedy"], row["kl_gold"]) == (0.0, 2 * row["kl"])
    assert row["further_than_none"] == 0.5  # those at 1.2 and 3.0; a twentieth more is no difference
    assert (row["right_full"], row["right_kept"]) == (3, round(2 / 3, 4))
    assert quality_rows.summary(arm)["further_than_none"] is None


def test_only_what_is_missing_is_evaluated(evaluate, tmp_path):
    evaluate("none", examples=2)
    (none, query), bench = evaluate("none", "query:0.05")
    both = ["none@mixed", "query:0.05@mixed"]
    assert [labels for _, labels, _ in bench.evaluated] == [both[1:], both[1:], both]
    assert none["kl"] == query["kl"] == 1.0
    assert len((tmp_path / "new" / "rows.jsonl").read_text().splitlines()) == 6
    assert evaluate(*both)[1].evaluated == []


def test_rows_of_another_run_are_refused(evaluate, tmp_path):
    evaluate("none")
    file = tmp_path / "new" / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({**json.loads(line), "dtype": "float8"}) + "\n" for line in file.read_text().splitlines())
    )
    with pytest.raises(ConfigError, match=r"another run \({'dtype': 'float8'}.*; choose another --out"):
        evaluate("none")


def test_an_arm_may_encode_mixed_kv_anew(evaluate):
    arm = Arm.parse("guided:0.05@mixed/int8")
    assert (arm.policy.label, arm.kv, arm.codec, arm.label) == (
        "guided:0.05",
        "mixed",
        "int8",
        "guided:0.05@mixed/int8",
    )
    for text in ("none@mixed/zip", "none@alone/int8", "none@mixed/raw"):
        with pytest.raises(ConfigError, match=r"only mixed is encoded anew, in int8, fp8, int4"):
            Arm.parse(text)
    with pytest.raises(ConfigError, match=r"KV in int8 can't be encoded anew: give --codec raw"):
        evaluate("none", "none@mixed/int4")
