"""Evaluation data as examples: chunks, a question, the answers. Knows nothing about models or KV.

The named datasets are read from a folder that holds them as published; `--dataset` also takes a JSONL file, or the id
of a Hugging Face dataset with JSONL files, whose lines have `question`, `answers` and `chunks`.
"""

import ast
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

_SEED = 20240521
_NUM_SHORT = 10  # passages


@dataclass(frozen=True)
class Example:
    """chunks: texts in the order of the prompt. answers: any of them is right; the first is the gold answer."""

    id: str
    chunks: list[str]
    question: str
    answers: list[str]


@dataclass(frozen=True)
class Dataset:
    """Examples, how the model is asked, and how its answers are scored.

    instruction precedes the chunks, asking between them and the question; None is what the product uses. cue:
    what the answer follows in a plain text that the model continues; None is a chat, if the model has a template.
    score: "contains", "token-f1", "rouge-l" or "rouge-l-line" (`ragkv.evals.scores`). ceiling: the best score that can
    be had, if not 1.
    """

    name: str
    examples: list[Example]
    score: str
    max_tokens: int
    instruction: str | None = None
    asking: str | None = None
    cue: str | None = None
    ceiling: float = 1.0


def load(name: str, data: Path | None) -> Dataset:
    """Load a dataset by name, file or Hugging Face id. Raises ConfigError for one that isn't there or can't be read."""
    if name in _READERS:
        if data is None:
            raise ConfigError(f"--data is missing: the folder that holds {name}")
        try:
            return _READERS[name](data)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"can't read {name} from {data}: {error}") from error
    if name.endswith(".jsonl"):
        return _own(name, [Path(name)])
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _own(name, _download(name))
    raise ConfigError(f"unknown dataset {name!r}; choose {', '.join(_READERS)}, a .jsonl file or a Hugging Face id")


def _musique(data: Path) -> Dataset:
    """20 paragraphs in 5 chunks of about 500 tokens, so that what a question needs is spread over chunks."""
    examples = []
    for row in _lines(data / "musique" / "musique_200.jsonl"):
        paragraphs = [f"{p['title']}\n{p['paragraph_text']}\n\n" for p in row["paragraphs"]]
        _shuffle(paragraphs, row["id"])
        chunks = ["".join(paragraphs[i : i + 4]) for i in range(0, len(paragraphs), 4)]
        examples.append(Example(row["id"], chunks, row["question"], [row["answer"], *row["answer_aliases"]]))
    return Dataset("musique", examples, "contains", 32)


def _musique_short(data: Path) -> Dataset:
    """Ten paragraphs, each a chunk as short as search results are: all that a question needs, and others."""
    examples = []
    for row in _lines(data / "musique" / "musique_200.jsonl"):
        paragraphs = sorted(row["paragraphs"], key=lambda p: not p["is_supporting"])[:_NUM_SHORT]
        chunks = [f"{p['title']}\n{p['paragraph_text']}\n\n" for p in paragraphs]
        _shuffle(chunks, row["id"])
        examples.append(Example(row["id"], chunks, row["question"], [row["answer"], *row["answer_aliases"]]))
    return Dataset("musique_short", examples, "contains", 32)


def _musique_s(data: Path) -> Dataset:
    """CacheBlend's own set and protocol: its prompt's wording, F1 over the tokenizer's tokens of the first line."""
    rows = json.loads((data / "musique" / "musique_s.json").read_text())
    examples = []
    for i, row in enumerate(rows):
        chunks = [f"{c['title']}\n\n{c['text']}\n\n" for c in row["ctxs"]]
        _shuffle(chunks, str(i))
        examples.append(Example(str(i), chunks, row["question"], row["answers"]))
    found = sum(any(a.lower() in "".join(e.chunks).lower() for a in e.answers) for e in examples)
    return Dataset(
        "musique_s",
        examples,
        "token-f1",
        32,
        "You will be asked a question after reading several passages. Please directly answer the question based on "
        "the given passages. Do NOT repeat the question. The answer should be within 5 words.",
        "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should "
        "be within 5 words.\nQuestion: ",
        ceiling=found / len(examples),
    )


def _xquad(data: Path) -> Dataset:
    """The five paragraphs of an article and one of the next article; questions go round the articles."""
    return _xquad_with("xquad", data, lambda own, _, others, turn: [*own, others[0][turn % 5]])


def _xquad_apart(data: Path) -> Dataset:
    """The paragraph that a question is about, and one of each of the next five articles."""
    return _xquad_with("xquad_apart", data, lambda _, asked, others, turn: [asked, *(o[turn % 5] for o in others)])


_Paragraphs = list[dict[str, Any]]


def _xquad_with(
    name: str, data: Path, choose: Callable[[_Paragraphs, dict[str, Any], list[_Paragraphs], int], _Paragraphs]
) -> Dataset:
    """choose: given an article's paragraphs, the one asked about, the next five articles' and the turn, those shown."""
    articles = [a["paragraphs"] for a in json.loads((data / "xquad" / "xquad.en.json").read_text())["data"]]
    examples = []
    questions = [[(p, qa) for p in paragraphs for qa in p["qas"]] for paragraphs in articles]
    for i, article_questions in enumerate(questions):
        _shuffle(article_questions, str(i))
    for turn in range(max(map(len, questions))):
        for i, paragraphs in enumerate(articles):
            if turn >= len(questions[i]):
                continue
            asked, qa = questions[i][turn]
            others = [articles[(i + step) % len(articles)] for step in range(1, 6)]
            chunks = [f"{p['context']}\n\n" for p in choose(paragraphs, asked, others, turn)]
            _shuffle(chunks, qa["id"])
            examples.append(Example(qa["id"], chunks, qa["question"], [a["text"] for a in qa["answers"]]))
    return Dataset(name, examples, "contains", 32)


def _samsum(data: Path) -> Dataset:
    """Few-shot: ten dialogues with their summaries are the chunks, as in CacheBlend's paper, and its protocol: its
    wording, a text to continue instead of a chat, Rouge-L of the first line."""
    rows = json.loads((data / "samsum" / "samsum_val.json").read_text())
    examples = []
    for i, row in enumerate(rows):
        shots = random.Random(f"{_SEED}-{i}").sample([other for other in rows if other is not row], 10)
        chunks = [f"Dialogue:\n{shot['dialogue']}\nSummary: {shot['summary']}\n\n" for shot in shots]
        examples.append(Example(str(i), chunks, row["dialogue"], [row["summary"]]))
    instruction = "Summarize the dialogue into a few short sentences. The following are some examples."
    return Dataset("samsum", examples, "rouge-l-line", 64, instruction, "Dialogue:\n", "\nSummary:")


def _multi_news(data: Path) -> Dataset:
    """Articles about one event, to be summarised."""
    examples = []
    for row in _lines(data / "multi_news" / "multi_news.jsonl"):
        text = row["context"].replace("NEWLINE_CHAR", "\n")
        chunks = [part.strip() + "\n\n" for part in re.split(r"Passage \d+:\n", text) if part.strip()]
        answers = row["answers"] if isinstance(row["answers"], list) else ast.literal_eval(row["answers"])
        examples.append(Example(row["_id"], chunks, "Summary:", answers))
    instruction = "You are given several news articles about one event. Summarize them."
    return Dataset("multi_news", examples, "rouge-l", 64, instruction, "Write a short summary of all the news above.\n")


def _own(name: str, files: Sequence[Path]) -> Dataset:
    examples = []
    for file in files:
        try:
            for i, row in enumerate(_lines(file)):
                fields = (row["chunks"], row["question"], row["answers"])
                if not isinstance(fields[0], list) or not isinstance(fields[2], list) or not fields[2]:
                    raise ConfigError(f"{file}, line {i + 1}: chunks and answers must be lists, answers not empty")
                examples.append(Example(f"{file.name}-{i}", *fields))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"can't read {file}: {error!r}; a line needs question, answers and chunks") from error
    if not examples:
        raise ConfigError(f"{name} has no examples")
    return Dataset(name, examples, "contains", 32)


def _download(name: str) -> list[Path]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns="*.jsonl"))
    except Exception as error:  # whatever the network and the hub make of it
        raise ConfigError(f"can't download the dataset {name}: {error}") from error
    files = sorted(folder.rglob("*.jsonl"))
    if not files:
        raise ConfigError(f"the dataset {name} has no .jsonl files")
    return files


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open() as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _shuffle(items: list[Any], key: str) -> None:
    random.Random(f"{_SEED}-{key}").shuffle(items)


_READERS: dict[str, Callable[[Path], Dataset]] = {
    "musique": _musique,
    "musique_s": _musique_s,
    "musique_short": _musique_short,
    "xquad": _xquad,
    "xquad_apart": _xquad_apart,
    "samsum": _samsum,
    "multi_news": _multi_news,
}
