import json
import os
from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv.evals import datasets

DATA = Path(os.environ.get("EVALUATION_DATA", "no/such/folder"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="EVALUATION_DATA doesn't name the folder of the datasets")


@needs_data
@pytest.mark.parametrize(
    "name, num_examples, num_chunks",
    [("musique", 200, 4), ("musique_s", 150, 10), ("xquad", 1190, 6), ("samsum", 818, 10)],
)
def test_named_datasets_are_whole_and_the_same_every_time(name, num_examples, num_chunks):
    found = datasets.load(name, DATA)
    assert found == datasets.load(name, DATA)
    assert len(found.examples) == num_examples
    assert len({example.id for example in found.examples}) == num_examples
    assert {len(example.chunks) for example in found.examples} == {num_chunks}
    assert all(example.answers[0].strip() and example.question.strip() for example in found.examples)


@needs_data
def test_multi_news_is_cut_into_its_articles():
    found = datasets.load("multi_news", DATA)
    assert len(found.examples) == 200
    assert all(example.chunks and "Passage 1:" not in example.chunks[0] for example in found.examples)
    assert all(len(example.answers[0]) > 100 for example in found.examples)


@needs_data
def test_the_gold_answer_is_there_to_be_found():
    for name in ("musique", "xquad"):
        for example in datasets.load(name, DATA).examples[:50]:
            text = "".join(example.chunks).lower()
            assert any(answer.lower() in text for answer in example.answers)
    assert datasets.load("musique_s", DATA).ceiling == pytest.approx(103 / 150)


def write(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_file_of_ones_own(tmp_path):
    row = {"question": "Who?", "answers": ["Ann"], "chunks": ["Ann did it.\n", "Bob didn't.\n"]}
    found = datasets.load(write(tmp_path / "own.jsonl", row, row), None)
    assert [example.id for example in found.examples] == ["own.jsonl-0", "own.jsonl-1"]
    assert found.examples[0].chunks == row["chunks"]


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"question": "Who?", "answers": ["Ann"]}, "chunks"),
        ({"question": "Who?", "answers": [], "chunks": ["x"]}, "not empty"),
        ({"question": "Who?", "answers": ["Ann"], "chunks": "x"}, "must be lists"),
        (["no object"], "question, answers and chunks"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, problem):
    with pytest.raises(ConfigError, match=problem):
        datasets.load(write(tmp_path / "own.jsonl", row), None)


@pytest.mark.parametrize(
    "name, problem", [("nonsense", "choose musique"), ("gone.jsonl", "gone.jsonl"), ("musique", "--data")]
)
def test_what_is_not_there_is_named(name, problem):
    with pytest.raises(ConfigError, match=problem):
        datasets.load(name, None)
    with pytest.raises(ConfigError, match="can't read musique"):
        datasets.load("musique", Path("/nowhere"))
