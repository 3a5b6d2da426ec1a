"""Which chunks are likely to be next to a chunk in a prompt: those with the most similar vectors."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ragkv.retriever.catalog import Catalog
from ragkv.retriever.index import VectorIndex

_MORE = 4  # asked of the index beyond `count`: some are the chunk itself, or the same text elsewhere


def nearest(
    chunk_hashes: Sequence[str], vectors: npt.NDArray[np.float32], catalog: Catalog, index: VectorIndex, count: int
) -> dict[str, list[str]]:
    """Return, for each of these chunks, the hashes of the `count` nearest others, best first.

    vectors: `[n, dim]`, of these chunks. The others are taken from these chunks and from the index.
    """
    similarity = vectors @ vectors.T  # [n, n]
    neighbours: dict[str, list[str]] = {}
    for i, chunk_hash in enumerate(chunk_hashes):
        best = np.argsort(-similarity[i])[: count + _MORE]
        scored = [(float(similarity[i, j]), chunk_hashes[j]) for j in best]
        hits = index.search(vectors[i], count + _MORE)
        hash_of = {chunk.id: chunk.chunk_hash for chunk in catalog.chunks(id for id, _ in hits)}
        scored += [(score, hash_of[id]) for id, score in hits if id in hash_of]
        ranked = dict.fromkeys(other for _, other in sorted(scored, key=lambda item: -item[0]))
        neighbours[chunk_hash] = [other for other in ranked if other != chunk_hash][:count]
    return neighbours
