"""What others build on: the options of `ragkv eval ttft` and `ragkv eval quality`, and the keys of their rows."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import typer

from ragkv import cli
from ragkv.config import Config
from ragkv.controller.profile import Timed
from ragkv.engine.task import Report, TokenReport
from ragkv.evals import quality_rows
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import Ttft
from ragkv.evals.workloads import ttft
from ragkv.policies import Policy

SETTINGS = [
    ("--home", None),
    ("--model", None),
    ("--embedder", None),
    ("--dtype", None),
    ("--config", None),
    ("--verbose", False),
]
OPTIONS = {
    "ttft": [
        ("--tokens", "1024,2048,4096,7168"),
        ("--policies", "full,query:0.15,query:0.05,none"),
        ("--repeats", 5),
        ("--cold", False),
        ("--random-weights", False),
        ("--json", False),
        *SETTINGS,
    ],
    "quality": [
        ("--dataset", "required"),
        ("--data", None),
        ("--examples", 50),
        ("--policies", "none,guided:0.05,cacheblend:0.15@alone"),
        ("--captures", 4),
        ("--codec", None),
        ("--ttft-examples", 10),
        ("--out", None),
        ("--estimate", False),
        ("--beginning", None),
        ("--json", False),
        *[option for option in SETTINGS if option[0] != "--embedder"],
    ],
}


def command(*names):
    found = typer.main.get_command(cli.app)
    for name in names:
        found = found.get_command(None, name)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_options_keep_their_names_defaults_and_order(name):
    found = [
        (",".join(option.opts + option.secondary_opts), "required" if option.required else option.default)
        for option in command("eval", name).params
    ]
    assert found == OPTIONS[name]


class FakeBench:
    """Times nothing: what is asked takes 10 ms."""

    async def prepare(self, num_tokens):
        return SimpleNamespace(token_ids=list(range(num_tokens))), ["a chunk's hash"]

    async def ask(self, prompt, task):
        return Timed(10.0, Report(tokens=TokenReport(reused=90, recomputed=9)))


def test_rows_of_ttft_keep_their_keys(monkeypatch):
    @asynccontextmanager
    async def rig(*_, **__):
        kv = SimpleNamespace(task=lambda _prompt, _hashes, policy, _store: SimpleNamespace(policy=policy))
        yield SimpleNamespace(bench=lambda _: FakeBench(), kv=kv, store=None)

    monkeypatch.setattr(ttft, "rig", rig)
    (row,) = asyncio.run(measured(ttft.run(Config(), Ttft((100,), (Policy.parse("query:0.05"),), 1), Progress())))
    assert list(row) == [
        *("tokens", "policy", "budget", "ttft_ms", "baseline_ttft_ms", "speedup", "reused_tokens", "recomputed_tokens"),
        *("load_ms", "probe_ms", "recompute_ms", "cold", "repeats", "model", "random_weights", "dtype"),
    ]
    assert (row["tokens"], row["policy"], row["budget"], row["ttft_ms"]) == (100, "query", 0.05, 10.0)
    assert (row["reused_tokens"], row["recomputed_tokens"]) == (90, 10)  # and the last token, which vLLM computes


async def measured(rows):
    return [row async for row in rows]


def test_rows_of_quality_keep_their_keys():
    measured = ("kl", "agreement", "gold_nll", "gold_nll_full", "score", "score_full", "word_f1", "word_f1_full")
    identity = ("dataset", "model", "dtype", "captures", "codec", "arm", "policy", "budget", "kv", "score_name")
    numbers = dict.fromkeys((*measured, "recomputed_share", "tokens", "ttft_ms", "baseline_ttft_ms"), 1.0)
    row = quality_rows.summary([{"example": "1", **dict.fromkeys((*identity, "score_ceiling"), "same"), **numbers}] * 2)
    assert list(row) == [
        *(*identity, "score_ceiling", "anchored", "examples", "kl", "kl_interval", "agreement", "agreement_interval"),
        *("gold_nll", "gold_nll_difference", "gold_nll_interval", "score", "score_full", "score_interval"),
        *("word_f1", "word_f1_full", "recomputed_share", "tokens", "ttft_ms", "baseline_ttft_ms"),
        *("kl_greedy", "kl_gold", "kl_p50", "kl_p90", "kl_worst", "further_than_none", "right_full", "right_kept"),
        *("drift_estimate", "estimate_rank"),
    ]
