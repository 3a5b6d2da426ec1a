"""The watcher of `ragkv eval churn` sees what goes wrong. The work itself needs a model: tests/engine."""

import json
import random
import sys
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch

from ragkv.config import Config
from ragkv.evals.experiment import Progress
from ragkv.evals.robustness import churn
from ragkv.evals.robustness.churn import Seen
from ragkv.home import Home
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.hashing import chunk_hash
from ragkv.store.record import ChunkKey, LayerKV

CHUNK = ChunkText("text", (1, 2, 3))
HASH = chunk_hash(CHUNK.token_ids)


@pytest.fixture
def home(tmp_path):
    """One document with its KV."""
    home = Home(tmp_path)
    with home.open_catalog() as catalog, closing(home.open_store()) as store:
        document = str((tmp_path / "documents" / "a.txt").resolve())
        catalog.put_document(document, "a", "digest", [CHUNK], np.ones((1, 4), np.float32))
        store.put(
            [(ChunkKey(HASH, "0" * 32, "1" * 32, (0, 1)), [LayerKV(torch.ones(1, 3, 4), torch.ones(1, 3, 4), 0)])]
        )
    return home


def left_behind(home, **indexed):
    seen = Seen(indexed={f"{name}.txt": is_there for name, is_there in indexed.items()})
    return churn._left_behind(Config(home=home.path), home.path, seen)


def test_a_home_that_holds_what_was_told_has_no_problem(home):
    assert left_behind(home, a=True, b=False) == []


def test_what_is_lost_or_left_is_named(home):
    assert left_behind(home, a=False, b=True) == ["a.txt is present still", "b.txt is missing"]
    with closing(home.open_store()) as store:
        store.delete([HASH])
    assert left_behind(home, a=True) == ["a.txt lacks the KV of 1 chunks"]


def test_what_was_at_work_may_be_either(home):
    seen = Seen(indexed={"a.txt": False}, at_work="a.txt")
    assert churn._left_behind(Config(home=home.path), home.path, seen) == []


def test_answers_that_differ_are_problems():
    seen = Seen()
    seen.note({"event": "compared", "question": "Q", "fused": "one", "full": "one"})
    seen.note({"event": "compared", "question": "Q", "fused": "one", "full": "two"})
    assert seen.compared == 2 and seen.problems == ["Q: 'one' and not 'two'"]


PROCESS = churn.watched
EVENTS = [{"event": "begin", "document": "a.txt"}, {"event": "indexed", "document": "a.txt"}, {"event": "ready"}]
ENDLESS = "import json, sys, time\nfor line in json.loads(sys.argv[1]): print(json.dumps(line), flush=True)\n{end}"


def play(monkeypatch, tmp_path, end, seconds):
    """A round of a process that tells EVENTS."""

    @contextmanager
    def process(command, environment):
        assert environment["RAGKV_HOME"] == str(tmp_path) and "RAGKV_INDEX__NUM_CONTEXTS" in environment
        with PROCESS([sys.executable, "-c", ENDLESS.format(end=end), json.dumps(EVENTS)], environment) as started:
            yield started

    monkeypatch.setattr(churn, "watched", process)
    monkeypatch.setattr(churn, "_LATEST_KILL_S", 0.2)
    monkeypatch.setattr(churn, "_EVERY_S", 0.05)
    seen = Seen()
    churn._round(tmp_path, Config(home=tmp_path), seconds, random.Random(0), seen, Progress())
    return seen


def test_a_round_is_watched_and_killed(monkeypatch, tmp_path):
    seen = play(monkeypatch, tmp_path, "time.sleep(60)", None)
    assert seen.kills == 1 and seen.indexed == {"a.txt": True} and seen.at_work is None
    assert seen.start_bytes > 0 and seen.problems == []


def test_a_process_that_fails_is_a_problem(monkeypatch, tmp_path):
    assert "ended with 3" in play(monkeypatch, tmp_path, "sys.exit(3)", 5.0).problems[0]
    assert play(monkeypatch, tmp_path, "time.sleep(0.3)", 5.0).problems == []
