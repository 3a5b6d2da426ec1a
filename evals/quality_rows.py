"""What `ragkv eval quality` writes, a row for each example and arm: read again, and summed up.

Knows nothing about models.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError
from ragkv.evals import intervals
from ragkv.evals.experiment import Row

_SAME = (
    "dataset",
    "model",
    "dtype",
    "captures",
    "codec",
    "arm",
    "policy",
    "budget",
    "kv",
    "score_name",
    "score_ceiling",
)


def read(file: Path, identity: dict[str, Any]) -> dict[tuple[str, str], Row]:
    """Read what an earlier run wrote, by example and arm, and rid the file of a line that an interruption cut off.

    Raises ConfigError if the run had another `identity` (dataset, model, settings).
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        return rows
    lines = file.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        file.write_text("".join(lines))
    for line in lines:
        row = json.loads(line)
        other = {name: row.get(name) for name in identity if row.get(name) != identity[name]}
        if other:
            raise ConfigError(f"{file} is of another run ({other}, now {identity}); choose another --out")
        rows[row["example"], row["arm"]] = row
    return rows


_QUANTILES = {"kl_p50": 50, "kl_p90": 90, "kl_worst": 100}
_RIGHT = 0.5  # the score of a right answer, at least; `contains` gives 0 or 1
_FURTHER = 1.1  # times the drift of `none`: more is worse than reusing everything


def summary(rows: Sequence[Row], unrepaired: Sequence[Row] = ()) -> Row:
    """Return one arm's means over examples, with 95% bootstrap intervals, and medians of the times.

    Where that says more, they are of differences from full prefill. The tail: quantiles of the KL over examples; the
    share of examples further off than by `unrepaired`, the same examples' rows of policy `none`, by more than a tenth
    (None without those); and of the answers that full prefill gets right the share that stays right. The estimates of
    the drift, where they were asked for.
    """

    def column(name: str) -> npt.NDArray[np.float64]:
        return np.array([row[name] for row in rows], dtype=float)

    def mean(values: npt.NDArray[np.float64]) -> float:
        return round(float(values.mean()), 5)

    def median_of(name: str) -> float | None:
        times = [row[name] for row in rows if row["ttft_ms"]]
        return round(float(np.median(times)), 1) if times else None

    none_kl = {row["example"]: row["kl"] for row in unrepaired}
    further = [row["kl"] > _FURTHER * none_kl[row["example"]] for row in rows if row["example"] in none_kl]
    kept = [row["score"] >= _RIGHT for row in rows if row["score_full"] >= _RIGHT]
    nll, score = column("gold_nll") - column("gold_nll_full"), column("score") - column("score_full")
    return {
        **{name: rows[0][name] for name in _SAME},
        "anchored": rows[0]["kv"] != "alone",
        "examples": len(rows),
        "kl": mean(column("kl")),
        "kl_interval": _interval(column("kl")),
        "agreement": mean(column("agreement")),
        "agreement_interval": _interval(column("agreement")),
        "gold_nll": mean(column("gold_nll")),
        "gold_nll_difference": mean(nll),
        "gold_nll_interval": _interval(nll),
        "score": mean(column("score")),
        "score_full": mean(column("score_full")),
        "score_interval": _interval(score),
        "word_f1": mean(column("word_f1")),
        "word_f1_full": mean(column("word_f1_full")),
        "recomputed_share": mean(column("recomputed_share")),
        "tokens": round(mean(column("tokens"))),
        "ttft_ms": median_of("ttft_ms"),
        "baseline_ttft_ms": median_of("baseline_ttft_ms"),
        **{name: mean(column(name)) if name in rows[0] else None for name in ("kl_greedy", "kl_gold")},
        **{name: round(float(np.percentile(column("kl"), p)), 5) for name, p in _QUANTILES.items()},
        "further_than_none": round(float(np.mean(further)), 4) if further else None,
        "right_full": len(kept),
        "right_kept": round(float(np.mean(kept)), 4) if kept else None,
        **_of_estimates(rows),
    }


def _of_estimates(rows: Sequence[Row]) -> Row:
    """Return the mean of the estimated drifts, and their rank correlation with the true ones (Spearman)."""
    pairs = [(row["drift_estimate"], row["kl_greedy"]) for row in rows if row.get("drift_estimate") is not None]
    if len(pairs) < 2:
        return {"drift_estimate": None, "estimate_rank": None}
    estimates, true = np.array(pairs).T
    ranks = np.array([np.argsort(np.argsort(values)) for values in (estimates, true)])
    return {
        "drift_estimate": round(float(estimates.mean()), 5),
        "estimate_rank": round(float(np.corrcoef(ranks)[0, 1]), 3),
    }


def _interval(values: npt.NDArray[np.float64]) -> list[float]:
    return [round(value, 5) for value in intervals.interval(values)]
