"""`ragkv eval all`: cases run as they are declared, once, and the page tells what came of each."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ragkv.errors import ConfigError
from ragkv.evals import cli, everything, lmcache
from ragkv.evals.cases import CASES
from ragkv.evals.registry import EXPERIMENTS


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["all", *map(str, arguments)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("is_quick", [False, True])
def test_each_case_has_the_options_of_its_experiment(case, is_quick, tmp_path):
    if is_quick and case.quick is None:
        return
    arguments, _ = everything._arguments(case, tmp_path, tmp_path, is_quick=is_quick)
    if case.experiment == "profile":
        assert arguments == ["profile"]
        return
    command = get_command(cli.app).get_command(None, case.experiment)
    values = command.make_context(case.experiment, arguments[2:]).params  # raises for what is unknown or too little
    (experiment,) = (found for found in EXPERIMENTS if found.name == case.experiment)
    for parameter in fields(experiment.parameters):
        cli._parsed(parameter, values[parameter.name])  # raises for what can't be read
    assert ("{" in " ".join(arguments)) is False


def test_every_experiment_has_a_case():
    assert {case.experiment for case in CASES} >= {found.name for found in EXPERIMENTS}


def test_results_are_kept_and_shown(tmp_path, monkeypatch):
    out = tmp_path / "all"
    done = invoke("--data", tmp_path, "--out", out, "--quick", "--only", "cache, store")
    assert done.exit_code == 0, done.output
    assert Path(done.stdout.strip().splitlines()[-1]) == out / "benchmarks.md"
    page = (out / "benchmarks.md").read_text()
    for text in (
        "ragkv eval cache --trace zipf --shares 0.05,0.25 --json",
        "gdsf",
        "belady",
        "vllm",
        "The store on this",
    ):
        assert text.removesuffix(" --json") in page
    rows = [json.loads(line) for line in (out / "cache.jsonl").read_text().splitlines()]
    assert {row["policy"] for row in rows} >= {"gdsf", "lru", "belady"}
    monkeypatch.setattr(everything.subprocess, "Popen", None)  # nothing runs again
    again = invoke("--data", tmp_path, "--out", out, "--quick", "--only", "store,cache")
    assert again.exit_code == 0, again.output
    assert "cache is there already" in again.stderr and (out / "benchmarks.md").read_text() == page


def test_a_case_that_fails_says_why_and_runs_again(tmp_path):
    out = tmp_path / "all"
    for _ in range(2):
        done = invoke("--data", tmp_path / "none", "--out", out, "--quick", "--only", "retrieval")
        assert done.exit_code == 1 and "retrieval ended with status" in done.stderr
        assert "1 of 1: ragkv eval retrieval" in done.stderr
    page = (out / "benchmarks.md").read_text()
    assert "ended with status" in page and "can't read xquad from" in page


def test_names_that_no_case_has(tmp_path):
    assert "there is no case 'nothing'" in str(invoke("--data", tmp_path, "--only", "nothing").exception)
    with pytest.raises(ConfigError, match="by --quick; choose from cache"):
        everything.chosen(["load"], is_quick=True)


def test_a_peer_that_is_missing_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(lmcache.importlib.util, "find_spec", lambda name: None)
    case = next(case for case in CASES if case.name == "chat")
    arguments, note = everything._arguments(case, tmp_path, tmp_path, is_quick=False)
    assert "--lmcache" not in arguments and "LMCache isn't installed" in note
    monkeypatch.setattr(lmcache.importlib.util, "find_spec", lambda name: name)
    arguments, note = everything._arguments(case, tmp_path, tmp_path, is_quick=False)
    assert arguments[-1] == "--lmcache" and not note
    case = next(case for case in CASES if case.name == "rag")
    arguments, note = everything._arguments(case, tmp_path, tmp_path, is_quick=True)
    assert "--lmcache" not in arguments and not note


def test_a_command_of_ragkvs_own_runs_in_a_new_home_with_the_same_models(tmp_path, monkeypatch):
    seen = []

    class Process:
        def __init__(self, command, env, **streams):
            home = Path(env["RAGKV_HOME"])
            seen.append((command[3], home, (home / "models" / "a model").read_text()))

        def wait(self):
            return 0

    (tmp_path / "home" / "models").mkdir(parents=True)
    (tmp_path / "home" / "models" / "a model").write_text("weights")
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(everything.subprocess, "Popen", Process)
    done = invoke("--data", tmp_path, "--out", tmp_path / "all", "--only", "profile,cache")
    assert done.exit_code == 0, done.output
    (cache, home, _), (profile, new, weights) = seen
    assert (cache, home) == ("eval", tmp_path / "home")
    assert (profile, weights) == ("profile", "weights") and new != home and not new.exists()
