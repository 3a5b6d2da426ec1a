"""`ragkv eval retrieval`: how many of the passages that answer a question are found, by vectors and by words.

The product's own retriever over the passages of a published data set, each one chunk. No vLLM, and no generator.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragkv import models
from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals import intervals
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Retrieval
from ragkv.retriever.catalog import Catalog
from ragkv.retriever.chunking import ChunkText
from ragkv.retriever.encoders import Embedder, Reranker
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.keywords import KeywordIndex
from ragkv.retriever.retriever import Retriever, Scores

MODES = ("vector", "hybrid")
Recalls = npt.NDArray[np.float64]  # [tasks, depths]


@dataclass(frozen=True)
class Task:
    """The questions of a conversation, the one asked last, and the passages that answer it."""

    questions: tuple[str, ...]
    relevant: frozenset[str]


@dataclass(frozen=True)
class Collection:
    passages: list[str]
    tasks: list[Task]


def run(config: Config, wanted: Retrieval, progress: Progress) -> Iterator[Row]:
    """Yield the rows of `compare`, with the models by which they came about."""
    collection = load(wanted.dataset, wanted.data)
    name = config.retrieval.reranker
    scores = None if name is None else Reranker(models.resolve(name, config.home)).scores
    embedder = Embedder(models.resolve(config.index.embedder, config.home))
    used = {"embedder": Path(config.index.embedder).name, "reranker": name and Path(name).name}
    candidates = config.retrieval.candidates
    for row in compare(wanted.dataset, collection, embedder, scores, wanted.depths, candidates, progress):
        yield {**row, **used}


def load(name: str, data: Path) -> Collection:
    """Read mtrag, or xquad in a language: xquad (English), xquad.de, … Raises ConfigError for what isn't there."""
    language = re.fullmatch(r"xquad(?:\.([a-z]{2}))?", name)
    if name != "mtrag" and not language:
        raise ConfigError(f"unknown dataset {name!r}; choose mtrag, xquad, or xquad in another language as xquad.de")
    try:
        if language:
            return _xquad(data / "xquad" / f"xquad.{language[1] or 'en'}.json")
        return _mtrag(data / "mtrag" / "reference_subset_with_human_evaluations.json")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"can't read {name} from {data}: {error}") from error


def compare(
    name: str,
    collection: Collection,
    embedder: Embedder,
    scores: Scores | None,
    depths: Sequence[int],
    candidates: int,
    progress: Progress,
) -> Iterator[Row]:
    """Yield a row for each way to search, part of the tasks (all, first questions, later ones) and depth.

    A way is a mode, without a reranker and with it. recall: the mean share of a task's passages among the first `depth`
    chunks; difference: from the first way's, with a 95% interval, paired by task.
    """
    ways = [(mode, scorer) for scorer in dict.fromkeys((None, scores)) for mode in MODES]
    recalls: list[Recalls] = []
    with tempfile.TemporaryDirectory() as folder, Catalog(Path(folder) / "catalog.sqlite") as catalog:
        chunks = [ChunkText(text, tuple(text.encode())) for text in collection.passages]  # bytes name them as well
        catalog.put_document(name, name, "", chunks, embedder.embed(collection.passages))
        index, embed = VectorIndex(catalog), cache(embedder.embed_question)
        for i, (mode, scorer) in enumerate(ways):
            keywords = KeywordIndex(catalog) if mode == "hybrid" else None
            retriever = Retriever(catalog, index, embed, keywords, scorer, candidates)
            rows = []
            for j, task in enumerate(collection.tasks, 1):
                rows.append(_recalls(retriever, task, depths))
                progress.update(name, i * len(collection.tasks) + j, len(ways) * len(collection.tasks))
            recalls.append(np.array(rows))
    later = np.array([len(task.questions) > 1 for task in collection.tasks])
    for turns, part in (("all", np.ones_like(later)), ("first", ~later), ("later", later)):
        if not part.any() or (turns != "all" and part.all()):
            continue
        for (mode, scorer), found in zip(ways, recalls, strict=True):
            for k, depth in enumerate(depths):
                difference = found[part, k] - recalls[0][part, k]
                yield {
                    "dataset": name,
                    "passages": len(collection.passages),
                    "mode": mode,
                    "reranked": scorer is not None,
                    "turns": turns,
                    "tasks": int(part.sum()),
                    "depth": depth,
                    "recall": round(float(found[part, k].mean()), 4),
                    "difference": round(float(difference.mean()), 4),
                    "difference_interval": [round(bound, 4) for bound in intervals.interval(difference)],
                }


def _recalls(retriever: Retriever, task: Task, depths: Sequence[int]) -> list[float]:
    *earlier, question = task.questions
    found = [hit.chunk.text for hit in retriever.search(question, max(depths), earlier)]
    return [len(task.relevant & set(found[:depth])) / len(task.relevant) for depth in depths]


def _mtrag(file: Path) -> Collection:
    """Read the tasks that have reference passages, over all tasks' passages."""
    content = json.loads(file.read_text())
    texts = {document["document_id"]: document["text"] for document in content["documents"]}
    tasks = [
        Task(
            tuple(message["text"] for message in task["input"] if message["speaker"] == "user"),
            frozenset(texts[context["document_id"]] for context in task["contexts"]),
        )
        for task in content["tasks"]
        if task["contexts"]
    ]
    return Collection(list(dict.fromkeys(texts.values())), tasks)


def _xquad(file: Path) -> Collection:
    """Read each question with its paragraph, among those of all articles."""
    paragraphs = [p for article in json.loads(file.read_text())["data"] for p in article["paragraphs"]]
    tasks = [Task((qa["question"],), frozenset([p["context"]])) for p in paragraphs for qa in p["qas"]]
    return Collection(list(dict.fromkeys(p["context"] for p in paragraphs)), tasks)
