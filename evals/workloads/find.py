"""`ragkv eval find`: how long it takes to find chunks in a prompt's tokens, by the number of chunks. Knows no model."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median

import numpy as np

from ragkv.config import Config
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Find
from ragkv.retriever.tokens import TokenIndex, Tokens

_VOCABULARY = 50_000
_ODD = np.uint64(0x9E3779B97F4A7C15)


class DrawnChunks:
    """So many chunks of random tokens, which their ids decide, so that nothing has to hold them."""

    data_version = 1

    def __init__(self, num_chunks: int, chunk_tokens: int) -> None:
        self._num_chunks, self._places = num_chunks, np.arange(chunk_tokens, dtype=np.uint64)

    def ids_after(self, id: int) -> list[int]:
        return list(range(id + 1, self._num_chunks + 1))

    def tokens(self, ids: Iterable[int]) -> dict[int, tuple[str, Tokens]]:
        return {id: (f"{id:032x}", self._drawn(id)) for id in ids}

    def _drawn(self, id: int) -> Tokens:
        mixed = (np.uint64(id << 20) + self._places) * _ODD
        mixed ^= mixed >> np.uint64(29)
        return (mixed * _ODD >> np.uint64(40)).astype(np.int32) % _VOCABULARY


def run(config: Config, wanted: Find, progress: Progress) -> Iterator[Row]:
    """Yield a row for each number of chunks and length of a prompt: without any chunk, and of nothing but chunks."""
    drawing = np.random.default_rng(0)
    for num_chunks in wanted.chunks:
        progress.update(f"hashing {num_chunks:,} chunks")
        chunks = DrawnChunks(num_chunks, wanted.chunk_tokens)
        index, begin = TokenIndex(chunks), time.perf_counter()
        index.sync()
        built_s = time.perf_counter() - begin
        for num_tokens in wanted.tokens:
            without = drawing.integers(0, _VOCABULARY, num_tokens).tolist()
            ids = drawing.integers(1, num_chunks + 1, -(-num_tokens // wanted.chunk_tokens)).tolist()
            of_chunks = [token for id in ids for token in chunks.tokens([id])[id][1].tolist()][:num_tokens]
            found = index.search(of_chunks)
            yield {
                "chunks": num_chunks,
                "tokens": num_tokens,
                "built_s": round(built_s, 2),
                "without_ms": round(_median_ms(partial(index.search, without), wanted.repeats), 3),
                "of_chunks_ms": round(_median_ms(partial(index.search, of_chunks), wanted.repeats), 3),
                "found": len(found),
                "found_tokens": sum(each.end - each.start for each in found),
            }


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times)
