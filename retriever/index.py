"""Search by vectors, in FAISS. A copy of the catalogue's vectors, in memory only, so that deleted ones aren't on disk.

Knows nothing about texts.
"""

import random
import threading
from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from ragkv.errors import StoreError
from ragkv.retriever.catalog import Catalog

BATCH = 4096  # vectors read from the catalogue at a time
_DEPTH = 3  # chunks in a context, at most
_MORE = 4  # asked of the index beyond `count`: some are the chunk itself, or the same text elsewhere


class VectorIndex:
    """Exact search by inner product over a catalogue's vectors as they are now. Usable from many threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.RLock()
        self._index: Any = None  # faiss.IndexIDMap, whose stubs don't know NumPy's arrays
        self._revision = -1

    def __len__(self) -> int:
        """Return the number of chunks that can be found."""
        with self._lock:
            return self._index.ntotal if self._index is not None else 0

    def sync(self) -> bool:
        """Bring the index to exactly the catalogue's chunks. Returns False if nothing had changed: one small query.

        The first call reads all vectors (docs/decisions/0019 has the times). If it fails halfway, the next call
        continues. Raises StoreError if the catalogue fails.
        """
        with self._lock:
            revision = self._catalog.data_version
            if self._revision == revision:
                return False
            present, indexed = self._catalog.chunk_ids(), self._ids()
            if deleted := indexed - present:
                self._index.remove_ids(np.array(list(deleted), np.int64))
            missing = sorted(present - indexed)
            for start in range(0, len(missing), BATCH):
                self._add(*self._catalog.vectors(missing[start : start + BATCH]))
            self._revision = revision
            return True

    def search(self, vector: npt.NDArray[np.float32], top_k: int) -> list[tuple[int, float]]:
        """Return up to `top_k` pairs (chunk id, inner product) for `vector` `[dim]`, best first.

        Raises StoreError if the vector's dimension isn't the index's, or the catalogue fails.
        """
        with self._lock:
            self.sync()
            if not (top_k := min(top_k, len(self))):
                return []
            if vector.shape != (self._index.d,):
                raise StoreError(
                    f"a question of {vector.shape} doesn't fit an index of {self._index.d} dimensions; use the "
                    "embedder that the documents were indexed with"
                )
            scores, ids = self._index.search(np.asarray(vector, np.float32)[None], top_k)
            return list(zip(ids[0].tolist(), scores[0].tolist(), strict=True))

    def _ids(self) -> set[int]:
        return set(faiss.vector_to_array(self._index.id_map).tolist()) if self._index is not None else set()

    def _add(self, ids: list[int], vectors: npt.NDArray[np.float32]) -> None:
        if not ids:
            return
        if not len(self):
            self._index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors.shape[1]))
        self._index.add_with_ids(np.ascontiguousarray(vectors, np.float32), np.array(ids, np.int64))


def nearest(
    which: Sequence[int],
    chunk_hashes: Sequence[str],
    vectors: npt.NDArray[np.float32],
    catalog: Catalog,
    index: VectorIndex,
    count: int,
) -> dict[str, list[str]]:
    """Return, for those of these chunks that `which` counts up, the hashes of the `count` nearest others, best first.

    They are likely to stand next to it in a prompt, and are taken from these chunks and from the index. vectors:
    `[n, dim]`, of these chunks.
    """
    neighbours: dict[str, list[str]] = {}
    for i in which:
        chunk_hash, similarity = chunk_hashes[i], vectors @ vectors[i]  # [n]
        best = np.argsort(-similarity, kind="stable")[: count + _MORE]
        scored = [(float(similarity[j]), chunk_hashes[j]) for j in best]
        hits = index.search(vectors[i], count + _MORE)
        hash_of = {chunk.id: chunk.chunk_hash for chunk in catalog.chunks(id for id, _ in hits)}
        scored += [(score, hash_of[id]) for id, score in hits if id in hash_of]
        ranked = dict.fromkeys(other for _, other in sorted(scored, key=lambda item: -item[0]))
        neighbours[chunk_hash] = [other for other in ranked if other != chunk_hash][:count]
    return neighbours


def contexts_of(chunk_hash: str, near: Sequence[str], pool: Sequence[str]) -> list[list[str]]:
    """Return contexts for a chunk's mean: of three chunks, of two and of one, by turns, each of `near` among others of
    `pool`, all in random order. A context of one chunk is as likely to be one of the others.

    Some chunks, few or many, stand before a chunk in a prompt, and some are about the same as it. A mean over its
    nearest chunks alone takes what they say for granted (docs/decisions/0007). The same arguments give the same
    contexts.
    """
    drawing, contexts = random.Random(chunk_hash), []
    depths = [_DEPTH - i % _DEPTH for i in range(len(near))]
    drawing.shuffle(depths)
    for depth, each in zip(depths, near, strict=True):
        drawn = drawing.sample(pool, min(len(pool), _DEPTH + 1))
        context = [each, *[other for other in drawn if other not in (chunk_hash, each)][: _DEPTH - 1]]
        context = [drawing.choice(context)] if depth == 1 else context[:depth]
        drawing.shuffle(context)
        contexts.append(context)
    return contexts
