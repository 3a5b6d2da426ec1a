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
    [
        *(("musique", 200, 5), ("musique_s", 150, 10), ("musique_short", 200, 10)),
        *(("xquad", 1190, 6), ("xquad_apart", 1190, 6), ("samsum", 818, 10)),
    ],
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
    for name in ("musique", "musique_short", "xquad", "xquad_apart"):
        for example in datasets.load(name, DATA).examples[:50]:
            text = "".join(example.chunks).lower()
            assert any(answer.lower() in text for answer in example.answers)
    assert datasets.load("musique_s", DATA).ceiling == pytest.approx(103 / 150)


@pytest.fixture
def small(tmp_path):
    """One or a few rows of each dataset, in the formats they are published in."""
    for name in ("musique", "xquad", "samsum", "multi_news"):
        (tmp_path / name).mkdir()
    paragraphs = [{"title": f"T{i}", "paragraph_text": f"Text {i}.", "is_supporting": i == 3} for i in range(20)]
    row = {"id": "a", "paragraphs": paragraphs, "question": "Who?", "answer": "Ann", "answer_aliases": ["Anna"]}
    write(tmp_path / "musique" / "musique_200.jsonl", row)
    contexts = [{"title": f"T{i}", "text": "ann was here" if i == 4 else "nobody"} for i in range(10)]
    rows = [{"ctxs": contexts, "question": "Who?", "answers": answers} for answers in (["Ann"], ["Bob"])]
    (tmp_path / "musique" / "musique_s.json").write_text(json.dumps(rows))
    articles = [
        {
            "title": f"A{a}",
            "paragraphs": [
                {
                    "context": f"Context {a}.{p}",
                    "qas": [
                        {"id": f"{a}.{p}", "question": f"Q{a}.{p}?", "answers": [{"text": "x", "answer_start": 0}]}
                    ],
                }
                for p in range(5)
            ],
        }
        for a in range(3)
    ]
    (tmp_path / "xquad" / "xquad.en.json").write_text(json.dumps({"data": articles}))
    dialogues = [{"dialogue": f"A: {i}", "summary": f"S{i}"} for i in range(12)]
    (tmp_path / "samsum" / "samsum_val.json").write_text(json.dumps(dialogues))
    news = {"_id": "n", "context": "Passage 1:\nOne.NEWLINE_CHAR Passage 2:\nTwo.", "answers": "['A summary.']"}
    write(tmp_path / "multi_news" / "multi_news.jsonl", news)
    return tmp_path


def test_published_formats(small):
    (musique,) = datasets.load("musique", small).examples
    assert len(musique.chunks) == 5 and "Text 3." in "".join(musique.chunks)
    assert musique.answers == ["Ann", "Anna"]
    musique_s = datasets.load("musique_s", small)
    assert len(musique_s.examples[0].chunks) == 10 and musique_s.ceiling == 0.5
    xquad = datasets.load("xquad", small).examples
    assert [example.question[:2] for example in xquad[:4]] == ["Q0", "Q1", "Q2", "Q0"]
    for example in xquad:
        article, _, _ = example.id.partition(".")
        assert sum(chunk.startswith(f"Context {article}.") for chunk in example.chunks) == 5
        assert len(example.chunks) == 6
    few_shot = datasets.load("samsum", small)
    samsum = few_shot.examples
    assert all(len(set(e.chunks)) == 10 and e.answers[0] not in "".join(e.chunks).split() for e in samsum)
    shot = f"{few_shot.asking}{samsum[3].question}{few_shot.cue} {samsum[3].answers[0]}\n\n"
    assert any(shot in e.chunks for e in samsum)  # what is asked looks as the examples do
    (news,) = datasets.load("multi_news", small).examples
    assert news.chunks == ["One.\n\n", "Two.\n\n"] and news.answers == ["A summary."]


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
