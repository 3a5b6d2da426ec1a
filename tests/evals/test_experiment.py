# ruff: noqa: RUF009 - `option` returns a dataclass field
"""From an experiment's declaration to its command: options are parsed, rows printed, drawn and judged."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from ragkv.evals import cli, registry
from ragkv.evals.experiment import Experiment, option
from ragkv.evals.parsing import numbers, whole_numbers


@dataclass(frozen=True)
class Squares:
    """Square numbers."""

    numbers: tuple[int, ...] = option("What to square.", "1,2", parse=whole_numbers)
    limit: int = option("The largest square that is allowed.", 10, least=1)
    codec: str | None = option("Stands in the configuration.", None, setting="store.codec")
    out: Path | None = option("A picture.", None)


def run(config, wanted, progress):
    progress.update("squaring")
    for number in wanted.numbers:
        yield {"square": number**2, "ok": number**2 <= wanted.limit, "codec": config.store.codec}


async def run_async(config, wanted, progress):
    for row in run(config, wanted, progress):
        yield row


def draw(rows, out):
    out.write_text(f"{len(rows)} rows")


@pytest.fixture(params=[run, run_async])
def invoke(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "squares", SimpleNamespace(run=request.param, draw=draw))
    squares = Experiment(
        *("squares", Squares, "squares", lambda rows: print("table of", len(rows)), ("home",)),
        draws=True,
        fails=lambda row: not row["ok"],
    )
    app = typer.Typer()
    app.command()(cli.command_of(squares))
    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


def test_rows_are_a_table_or_json(invoke):
    assert invoke().stdout == "table of 2\n"
    done = invoke("--numbers", "3", "--codec", "int8", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"square": 9, "ok": True, "codec": "int8"})


def test_a_row_that_fails_ends_with_1(invoke):
    assert invoke("--numbers", "4").exit_code == 1
    assert invoke("--numbers", "4", "--limit", "16").exit_code == 0


def test_a_picture_is_drawn_where_it_is_wanted(invoke, tmp_path):
    invoke("--out", tmp_path / "picture")
    assert (tmp_path / "picture").read_text() == "2 rows"


@pytest.mark.parametrize("arguments", [("--numbers", "1,x"), ("--limit", 0), ("--embedder", "x")])
def test_what_cannot_be_parsed_is_a_usage_error(invoke, arguments):
    assert invoke(*arguments).exit_code == 2


def test_lists():
    assert whole_numbers("1, 20") == (1, 20) and numbers("0,0.5") == (0, 0.5)
    for text in ("", "0", "1,-2", "1.5"):
        with pytest.raises(ValueError, match="is not a list of positive numbers"):
            whole_numbers(text)


@pytest.mark.parametrize("experiment", registry.EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_every_experiment_has_its_module(experiment):
    from importlib import import_module

    module = import_module(experiment.module)
    assert callable(module.run) and (callable(getattr(module, "draw", None)) or not experiment.draws)
