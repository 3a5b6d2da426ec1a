"""The rows of `ragkv eval pressure`, and their picture."""

import asyncio

import pytest

from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals import tables
from ragkv.evals.experiment import Progress
from ragkv.evals.parameters import Pressure
from ragkv.evals.parsing import ways
from ragkv.evals.workloads import pressure


def course(seconds, answers, preemptions=2):
    return pressure._Course([0.0, seconds], [0.1, 0.9], [0, preemptions], [0, 4], answers, 7)


@pytest.fixture
def measured(monkeypatch):
    """Every third answer of `load` differs, and it takes half the time."""
    asked = []

    async def measure(config, model, way, blocks, prompts, wanted):
        asked.append((way, len(prompts[0]), *blocks))
        return course(1.0 if way == "load" else 2.0, [(i, 0 if i % 3 or way != "load" else 9) for i in range(4)])

    monkeypatch.setattr(pressure, "_measure", measure)
    monkeypatch.setattr(pressure, "text_tokens", lambda _, num: list(range(num)))
    monkeypatch.setattr(pressure.models, "resolve", lambda *_: None)
    return asked


def rows_of(wanted):
    async def collect():
        return [row async for row in pressure.run(Config(), wanted, Progress())]

    return asyncio.run(collect())


def test_each_way_is_measured_next_to_vllm(measured, tmp_path, capsys):
    rows = rows_of(Pressure(4, (300, 600), 200, (0.5, 1.0), (128, 32), ("recompute", "load"), repeats=2))
    blocks = [(300, 7, 128), (300, 15, 128), (600, 12, 128), (600, 25, 128)]
    blocks += [(300, 31, 32), (300, 62, 32), (600, 50, 32), (600, 100, 32)]
    ways = ["vLLM", "recompute", "load", "load", "recompute", "vLLM"]
    assert measured == [(way, *cell) for cell in blocks for way in ways]
    load = rows[2]
    assert (load["tokens_per_s"], load["preemptions"], load["resumed_tokens"], load["kv_use"]) == (8.0, 2, 7, 0.5)
    assert [row["answers_that_differ"] for row in rows[:3]] == [0, 0, 4]
    pressure.draw(rows, tmp_path / "new" / "pressure.png")
    assert (tmp_path / "new" / "pressure.png").read_bytes().startswith(b"\x89PNG")
    tables.pressure(rows)
    assert "2.00" in capsys.readouterr().out


def test_a_memory_for_none_is_an_error(measured):
    with pytest.raises(ConfigError, match="isn't enough"):
        rows_of(Pressure(4, (300,), 200, (0.2,)))


def test_ways_are_checked():
    assert ways("load, auto") == ("load", "auto")
    with pytest.raises(ValueError, match="slow"):
        ways("load,slow")
