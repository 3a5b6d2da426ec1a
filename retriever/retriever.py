"""The search for a question's chunks. Knows nothing about how chunks are prompted, cached or answered from."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError
from ragkv.retriever.catalog import Catalog, Chunk
from ragkv.retriever.index import VectorIndex
from ragkv.retriever.keywords import KeywordIndex

_EARLIER = 0.3  # the weight of a question in the search for the one that follows it: docs/log/2026-11.md
_NUM_EARLIER = 6  # questions, the one asked among them; the next would weigh 0.1%
_NUM_VECTORS = 1024  # questions, which come again with each turn of a conversation
_RRF = 60  # Cormack, Clarke, Büttcher: Reciprocal Rank Fusion outperforms Condorcet, SIGIR 2009

Vector = npt.NDArray[np.float32]
Scores = Callable[[str, Sequence[str]], Vector]  # of how well texts answer a question


@dataclass(frozen=True)
class Hit:
    """A chunk that was found.

    score: its cosine similarity to the question, also where hits are in another order. scope: of its catalogue.
    """

    chunk: Chunk
    score: float
    scope: str = ""


class Retriever:
    """The search of one catalogue as it is now, also after another process has changed it. Usable from many threads.

    embed: makes a question one unit vector, or one of each of its parts: `[n, dim]`. keywords: searched next to the
    vectors; the two rankings are fused. scores: order the hits anew. candidates: how many chunks each search returns
    for these two, if no more are requested.
    """

    def __init__(
        self,
        catalog: Catalog,
        index: VectorIndex,
        embed: Callable[[str], Vector],
        keywords: KeywordIndex | None = None,
        scores: Scores | None = None,
        candidates: int = 50,
    ) -> None:
        self._catalog = catalog
        self._index = index
        self._embed = lru_cache(_NUM_VECTORS)(embed)
        self._keywords = keywords
        self._scores = scores
        self._candidates = candidates

    def search(self, question: str, top_k: int, earlier: Sequence[str] = ()) -> list[Hit]:
        """Return up to `top_k` chunks, best first; a text that several documents share comes once.

        earlier: the conversation's questions before this one, oldest first; the reranker doesn't see them. Raises
        ConfigError if `top_k` is below 1, StoreError if the catalogue fails, ModelError if the reranker gives no
        numbers.
        """
        if top_k < 1:
            raise ConfigError(f"top_k is {top_k}; ask for at least one chunk")
        asked = [(text, _EARLIER**i) for i, text in enumerate([question, *reversed(earlier)][:_NUM_EARLIER])]
        vectors = self._vectors(asked)
        depth = top_k if self._keywords is None and self._scores is None else max(top_k, self._candidates)
        hits = self._distinct(partial(self._by_vectors, vectors), depth)
        if self._keywords is not None:
            hits = _fused([hits, self._with_words(self._keywords, asked, vectors, depth)])[:depth]
        if self._scores is not None and hits:
            best = np.argsort(-self._scores(question, [hit.chunk.text for hit in hits]), kind="stable")
            hits = [hits[i] for i in best]
        return hits[:top_k]

    def _vectors(self, asked: Sequence[tuple[str, float]]) -> Vector:
        """Return a unit vector for each part of the question `[n, dim]`, each with the earlier questions in it."""
        (question, _), *earlier = asked
        before = [weight * self._embed(text).mean(axis=0) for text, weight in earlier]
        mean = sum(before, self._embed(question))
        return np.asarray(mean / np.linalg.norm(mean, axis=1, keepdims=True), np.float32)

    def _by_vectors(self, vectors: Vector, count: int) -> list[tuple[int, float]]:
        """Return `count` chunks by their similarity to whichever vector is nearest."""
        best: dict[int, float] = {}
        for vector in vectors:
            for id, score in self._index.search(vector, count):
                best[id] = max(score, best.get(id, score))
        return sorted(best.items(), key=lambda item: -item[1])[:count]

    def _with_words(
        self, keywords: KeywordIndex, asked: Sequence[tuple[str, float]], vectors: Vector, count: int
    ) -> list[Hit]:
        found = self._distinct(partial(keywords.search, asked), count)
        ids, of_chunks = self._catalog.vectors(hit.chunk.id for hit in found)
        cosines = dict(zip(ids, (of_chunks @ vectors.T).max(axis=1).tolist(), strict=True)) if ids else {}
        return [replace(hit, score=cosines[hit.chunk.id]) for hit in found if hit.chunk.id in cosines]

    def _distinct(self, search: Callable[[int], list[tuple[int, float]]], count: int) -> list[Hit]:
        """Return up to `count` chunks of different texts, from a search that is asked for more until it has them."""
        num_asked = count
        while True:
            scores = dict(search(num_asked))
            hits: dict[str, Hit] = {}
            for chunk in self._catalog.chunks(scores):
                hits.setdefault(chunk.chunk_hash, Hit(chunk, scores[chunk.id], self._catalog.scope))
            if len(hits) >= count or len(scores) < num_asked:
                return list(hits.values())[:count]
            num_asked *= 2  # some were of one text, or deleted since


def _fused(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Merge rankings by reciprocal rank fusion, each text once; of equals the one of the first ranking comes first."""
    sums: defaultdict[str, float] = defaultdict(float)
    hits: dict[str, Hit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            sums[hit.chunk.chunk_hash] += 1 / (_RRF + rank)
            hits.setdefault(hit.chunk.chunk_hash, hit)
    return sorted(hits.values(), key=lambda hit: -sums[hit.chunk.chunk_hash])


def merged(found: Sequence[Sequence[Hit]], top_k: int, *, by_rank: bool) -> list[Hit]:
    """Return the best of several catalogues' hits, best first; a text that several of them have comes once.

    by_rank: rank by the hits' order, which says more than their scores where they were reranked or fused.
    """
    hits: dict[tuple[int, ...], Hit] = {}
    for of_one_rank in zip_longest(*found):
        for hit in filter(None, of_one_rank):
            hits.setdefault(hit.chunk.token_ids, hit)
    best = list(hits.values()) if by_rank else sorted(hits.values(), key=lambda hit: -hit.score)
    return best[:top_k]
