import json
import zlib

import numpy as np
import pytest

from ragkv.errors import ConfigError
from ragkv.evals import tables
from ragkv.evals.experiment import Progress
from ragkv.evals.workloads.retrieval import Collection, Task, compare, load


class FirstWord:
    """Only the first word of a text has a say."""

    def embed(self, texts):
        vectors = [np.random.default_rng(zlib.crc32(text.split()[0].encode())).standard_normal(8) for text in texts]
        vectors = np.array(vectors, np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed_question(self, question):
        return self.embed([question])


class Longest:
    def scores(self, question, texts):
        return np.array([len(text) for text in texts], np.float32)


PASSAGES = ["fox red", "dog brown", "cat black and white", "bird yellow"]


class Steps(Progress):
    def __init__(self, steps):
        self._steps = steps

    def update(self, what, done=None, total=None):
        self._steps.append((done, total))


def rows(tasks, depths=(1, 2), reranker=None, steps=None):
    progress = Steps([] if steps is None else steps)
    scores = reranker and reranker.scores
    return list(compare("test", Collection(PASSAGES, tasks), FirstWord(), scores, depths, 50, progress))


def recalls(found, **wanted):
    return [row["recall"] for row in found if all(row[name] == value for name, value in wanted.items())]


def test_recall_by_way_part_and_depth():
    tasks = [
        Task(("fox ?",), frozenset(["fox red"])),
        Task(("dog red",), frozenset(["dog brown", "fox red"])),  # the second by its words only
        Task(("gnu red", "cat ?"), frozenset(["cat black and white"])),
    ]
    steps = []
    found = rows(tasks, steps=steps)
    assert steps == [(i, 6) for i in range(1, 7)]
    assert recalls(found, mode="vector", turns="all", depth=1) == [round((1 + 0.5 + 1) / 3, 4)]
    assert recalls(found, mode="vector", turns="later") == [1, 1]
    assert recalls(found, mode="hybrid", turns="first", depth=2) == [1]
    (all_at_2,) = [row for row in found if (row["mode"], row["turns"], row["depth"]) == ("hybrid", "all", 2)]
    (vector_at_2,) = recalls(found, mode="vector", turns="all", depth=2)
    assert all_at_2["difference"] == pytest.approx(all_at_2["recall"] - vector_at_2, abs=2e-4)
    low, high = all_at_2["difference_interval"]
    assert low <= all_at_2["difference"] <= high
    assert [row["tasks"] for row in found] == [3] * 4 + [2] * 4 + [1] * 4


def test_reranked_ways_follow_and_single_questions_are_one_part():
    tasks = [Task(("fox ?",), frozenset(["cat black and white"]))]
    found = rows(tasks, depths=(1,), reranker=Longest())
    ways = [(row["mode"], row["reranked"], row["recall"]) for row in found]
    assert ways == [("vector", False, 0), ("hybrid", False, 0), ("vector", True, 1), ("hybrid", True, 1)]
    assert {row["turns"] for row in found} == {"all"}


def test_published_formats(tmp_path):
    for name in ("mtrag", "xquad"):
        (tmp_path / name).mkdir()
    says = [("user", "Who?"), ("agent", "Ann."), ("user", "When?")]
    task = {"input": [{"speaker": speaker, "text": text} for speaker, text in says], "contexts": [{"document_id": "b"}]}
    documents = [{"document_id": id, "text": text} for id, text in (("a", "A"), ("b", "B"), ("c", "B"))]
    content = {"documents": documents, "tasks": [task, {**task, "contexts": []}]}
    (tmp_path / "mtrag" / "reference_subset_with_human_evaluations.json").write_text(json.dumps(content))
    assert load("mtrag", tmp_path) == Collection(["A", "B"], [Task(("Who?", "When?"), frozenset(["B"]))])
    paragraphs = [{"context": "P", "qas": [{"question": "Q?"}, {"question": "R?"}]}, {"context": "S", "qas": []}]
    (tmp_path / "xquad" / "xquad.de.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    tasks = [Task((question,), frozenset(["P"])) for question in ("Q?", "R?")]
    assert load("xquad.de", tmp_path) == Collection(["P", "S"], tasks)
    with pytest.raises(ConfigError, match=r"can't read xquad from .*xquad\.en\.json"):
        load("xquad", tmp_path)
    with pytest.raises(ConfigError, match="unknown dataset 'squad'; choose mtrag"):
        load("squad", tmp_path)


def test_the_table_names_every_way(capsys):
    tasks = [Task(("fox ?",), frozenset(["fox red"])), Task(("gnu red", "cat ?"), frozenset(["cat black and white"]))]
    tables.retrieval(rows(tasks, reranker=Longest()))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["all,", "2", "vector"],
        ["all,", "2", "hybrid"],
        ["all,", "2", "vector,"],
        ["all,", "2", "hybrid,"],
    ]
    assert lines[1].split()[3:] == ["1.000", "+0.000", "+0.000", "to", "+0.000"] * 2
    assert len(lines) == 1 + 3 * 4
