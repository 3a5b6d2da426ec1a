"""Which chunks are likely to stand beside a chunk in a prompt: those with the most similar vectors."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ragkv.retriever.catalog import Catalog
from ragkv.retriever.index import VectorIndex

_MORE = 4  # asked of the index beyond what is wanted: some are the chunk itself, or the same text elsewhere


def nearest(
    digests: Sequence[str], vectors: npt.NDArray[np.float32], catalog: Catalog, index: VectorIndex, count: int
) -> dict[str, list[str]]:
    """For each of these chunks, the hashes of the `count` nearest others, best first.

    vectors: `[n, dim]`, as embedded. The others are these chunks themselves and what the index holds.
    """
    among = vectors @ vectors.T
    found: dict[str, list[str]] = {}
    for i, digest in enumerate(digests):
        best = np.argsort(-among[i])[: count + _MORE]
        scored = [(float(among[i, j]), digests[j]) for j in best]
        hits = index.search(vectors[i], count + _MORE) if len(index) else []
        ids = {chunk.id: chunk.chunk_hash for chunk in catalog.chunks(id for id, _ in hits)}
        scored += [(score, ids[id]) for id, score in hits if id in ids]
        ranked = dict.fromkeys(other for _, other in sorted(scored, key=lambda item: -item[0]))
        found[digest] = [other for other in ranked if other != digest][:count]
    return found
