"""Search by words, with BM25. A copy of the catalogue's texts, in memory only, so that deleted text isn't kept on disk.

Knows nothing about vectors.
"""

import logging
import sys
import threading
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import regex

from ragkv.retriever.catalog import Catalog

BATCH = 4096  # texts read from the catalogue at a time

# Scripts that put no blanks between words: their runs become pairs of characters, as in Lucene's CJK analyser.
_UNSPACED = r"\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(r"\w+")  # with the marks that many scripts write vowels by, which `re` leaves out
_RUN = regex.compile(rf"(?V1)(?P<unspaced>[\w&&[{_UNSPACED}]]+)|[\w--[{_UNSPACED}]]+")


def words(text: str) -> list[str]:
    """Return the text's words in any language, folded so that case, width and composed accents don't matter."""
    found: list[str] = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if word.isascii():  # six times as fast as looking for runs in all of them
            found.append(word)
            continue
        for run in _RUN.finditer(word):
            is_long = run["unspaced"] and len(run[0]) > 2
            found += [a + b for a, b in pairwise(run[0])] if is_long else [run[0]]
    return found


@dataclass(frozen=True)
class _Built:
    """BM25 (Lucene's variant, k1 = 1.5, b = 0.75) over the chunks `ids`, in this order."""

    ids: list[int]
    scores: Any  # bm25s.BM25


class KeywordIndex:
    """BM25 over a catalogue's chunks as they are now. Usable from many threads.

    After a change of the catalogue, `sync` splits new texts into words and makes the scores of all chunks anew: bm25s
    can't add to them (docs/decisions/0014 has the times).
    """

    def __init__(self, catalog: Catalog) -> None:
        import bm25s  # takes a second: only whoever searches by words waits for it, and not with the first question

        logging.getLogger(bm25s.__name__).setLevel(logging.WARNING)  # it turns its own debugging on
        self._catalog = catalog
        self._syncing = threading.Lock()
        self._revision = -1
        self._words: dict[int, list[str]] = {}  # by chunk id; equal words are one object
        self._built: _Built | None = None  # replaced as a whole, so that searches need no lock

    def __len__(self) -> int:
        """Return the number of chunks that can be found: those that have words."""
        built = self._built
        return len(built.ids) if built else 0

    def sync(self) -> bool:
        """Bring the index to exactly the catalogue's chunks. Returns False if nothing had changed: one small query.

        While another thread does so, it returns False at once, so that searches use the index as it was; only for the
        first one it waits. If it fails halfway, the next call continues. Raises StoreError if the catalogue fails.
        """
        if not self._syncing.acquire(blocking=self._built is None):
            return False
        try:
            revision = self._catalog.data_version
            if self._revision == revision:
                return False
            present = self._catalog.chunk_ids()
            for deleted in self._words.keys() - present:
                del self._words[deleted]
            missing = sorted(present - self._words.keys())
            for start in range(0, len(missing), BATCH):
                texts = self._catalog.texts(missing[start : start + BATCH])
                self._words |= {id: [sys.intern(word) for word in words(text)] for id, text in texts.items()}
            self._built = _build(self._words)
            self._revision = revision
            return True
        finally:
            self._syncing.release()

    def search(self, questions: Sequence[tuple[str, float]], top_k: int) -> list[tuple[int, float]]:
        """Return up to `top_k` pairs (chunk id, score), best first, of the chunks that share a word with a question.

        questions: with weights; a chunk's score is the weighted sum of its BM25 scores. Raises StoreError if the
        catalogue fails.
        """
        self.sync()
        built = self._built
        if built is None or not built.ids:
            return []
        total = np.zeros(len(built.ids), np.float32)
        for question, weight in questions:
            known = built.scores.get_tokens_ids(list(dict.fromkeys(words(question))))
            if known:
                total += weight * built.scores.get_scores_from_ids(known)
        best = np.argsort(-total, kind="stable")[:top_k]
        return [(built.ids[i], float(total[i])) for i in best if total[i] > 0]


def _build(words_of: dict[int, list[str]]) -> _Built:
    import bm25s

    having = {id: words_of[id] for id in sorted(words_of) if words_of[id]}
    scores = bm25s.BM25()
    if having:  # bm25s can't take the mean length of nothing
        scores.index(list(having.values()), create_empty_token=False, show_progress=False)
    return _Built(list(having), scores)
