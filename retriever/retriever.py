"""A question to its chunks. Knows nothing about how chunks are prompted, cached or answered from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError
from ragkv.retriever.catalog import Catalog, Chunk
from ragkv.retriever.index import VectorIndex

_EARLIER = 0.3  # the weight of a question's vector in the search for the one that follows it: docs/log.md, 2026-11-22
_NUM_EARLIER = 6  # questions, the one asked among them; the next would weigh 0.1%
_NUM_VECTORS = 1024  # questions that are asked again as a conversation goes on


class QuestionEmbedder(Protocol):
    """What the retriever needs of an embedder."""

    def embed_question(self, question: str) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True)
class Hit:
    """A chunk that was found, and its cosine similarity to the question. scope: of the catalogue that has it."""

    chunk: Chunk
    score: float
    scope: str = ""


class Retriever:
    """Searches the catalogue as it is now, also after another process has changed it. Usable from many threads."""

    def __init__(self, catalog: Catalog, index: VectorIndex, embedder: QuestionEmbedder) -> None:
        self._catalog = catalog
        self._index = index
        self._vector = lru_cache(_NUM_VECTORS)(embedder.embed_question)

    def search(self, question: str, top_k: int, earlier: Sequence[str] = ()) -> list[Hit]:
        """Return up to `top_k` chunks, best first; a text that several documents share comes once.

        earlier: the questions that were asked before in the same conversation, oldest first.

        Brings the index up to date first. Raises ConfigError if `top_k` is below 1, StoreError if the catalogue fails.
        """
        if top_k < 1:
            raise ConfigError(f"top_k is {top_k}; ask for at least one chunk")
        vector = self._vector(question)
        if earlier:
            recent = [question, *reversed(earlier)]
            mean = np.sum([_EARLIER**i * self._vector(text) for i, text in enumerate(recent[:_NUM_EARLIER])], axis=0)
            vector = mean / np.linalg.norm(mean)
        num_asked = top_k
        while True:
            self._index.sync(self._catalog)
            found = self._index.search(vector, num_asked)
            hits = self._hits(found)
            if len(hits) >= top_k or len(found) < num_asked:
                return hits[:top_k]
            num_asked *= 2  # some were of one text, or deleted since

    def _hits(self, found: Sequence[tuple[int, float]]) -> list[Hit]:
        scores = dict(found)
        hits: dict[str, Hit] = {}
        for chunk in self._catalog.chunks(list(scores)):
            hits.setdefault(chunk.chunk_hash, Hit(chunk, scores[chunk.id], self._catalog.scope))
        return list(hits.values())


def merged(found: Sequence[Sequence[Hit]], top_k: int) -> list[Hit]:
    """The best of several catalogues' hits, best first; a text that several of them have comes once, from the first."""
    hits: dict[tuple[int, ...], Hit] = {}
    for hit in (hit for each in found for hit in each):
        hits.setdefault(hit.chunk.token_ids, hit)
    return sorted(hits.values(), key=lambda hit: -hit.score)[:top_k]
