"""The traffic of `ragkv eval soak` and what it notices, against a scripted pipeline behind the real server."""

import asyncio
from dataclasses import replace

import psutil
import pytest
from server_harness import ANSWER, SCRIPT, ParagraphIndexer, ScriptedPipeline, running

from ragkv.config import MAIN
from ragkv.errors import StoreError
from ragkv.evals.experiment import Progress
from ragkv.evals.robustness import soak
from ragkv.evals.robustness.soak import Soaked


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(soak, "_EVERY_S", 0.05)
    monkeypatch.setattr(soak, "_NUM_SIZES", 4)
    monkeypatch.setattr(soak, "_LONG_S", 4.0)


def flow(pipeline, tmp_path, seconds=2.0):
    with running({MAIN: pipeline}, tmp_path) as client:
        seen = Soaked()
        traffic = soak._Traffic(str(client.base_url), seen, Progress())
        asyncio.run(traffic.flow(psutil.Process(), seconds, 4, seed=1))
    return seen


def test_a_server_without_faults_has_none(tmp_path):
    seen = flow(ScriptedPipeline(tmp_path), tmp_path, seconds=4)
    assert seen.problems == []
    assert seen.steps.keys() == soak._STEPS.keys() and seen.compared > 3 and len(seen.samples) > 10
    assert len([text for text in seen.texts.values() if text]) > 4
    row = soak._row(seen, is_long=True)
    assert row["problems"] == [] and row["steps"]["ask"] == seen.steps["ask"]


class Forgetful(ParagraphIndexer):
    """Says that a document is deleted, and keeps it."""

    async def delete(self, ids):
        return replace(await super().delete([]), documents=list(ids))


class Fickle(ScriptedPipeline):
    """Answers `full` otherwise than `none`."""

    async def answer(self, question, options):
        async for event in super().answer(question, options):
            yield replace(event, text=options.policy.name) if event is ANSWER else event


def test_what_is_not_gone_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "_STEPS", {"delete": 1.0})
    pipeline = ScriptedPipeline(tmp_path)
    pipeline.indexer = Forgetful(pipeline.catalog)
    assert "is present still: 200" in " ".join(flow(pipeline, tmp_path, seconds=2).problems)


def test_answers_that_differ_are_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "_STEPS", {"compare": 1.0})
    seen = flow(Fickle(tmp_path), tmp_path, seconds=0.3)
    assert seen.compared > 0 and "'none' and not 'full'" in seen.problems[0]


@pytest.mark.parametrize("failure", [StoreError("no space"), RuntimeError("a bug")])
def test_an_answer_that_fails_is_a_problem(tmp_path, monkeypatch, failure):
    monkeypatch.setattr(soak, "_STEPS", {"ask": 1.0})
    pipeline = ScriptedPipeline(tmp_path)
    pipeline.play([*SCRIPT[:2], failure])
    problems = flow(pipeline, tmp_path, seconds=0.5).problems
    assert problems and all(": 500 " in each for each in problems)


def row_of(samples, *, is_long=True):
    return soak._row(Soaked(samples=samples), is_long=is_long)


def test_what_grows_is_a_problem():
    gib = 1 << 30
    flat = [(i, gib + i, 100 + i % 5) for i in range(100)]
    assert row_of(flat)["problems"] == []
    memory = [(i, gib + i * gib // 900, 100) for i in range(100)]
    assert "of memory at the end where" in row_of(memory)["problems"][0]
    assert row_of(memory, is_long=False)["problems"] == []
    handles = [(i, gib, 100 + 3 * i) for i in range(100)]
    assert "descriptors and threads at the end" in row_of(handles)["problems"][0]
    assert "memory_mib" not in row_of(flat[:3])


def test_errors_in_the_log_are_problems(tmp_path):
    log = tmp_path / "log"
    log.write_text('Loading\n{"levelname": "INFO", "message": "fine"}\n{"levelname": "ERROR", "message": "a bug"}\n')
    assert soak._logged(log) == ["logged: a bug"]
