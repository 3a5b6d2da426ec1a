"""`ragkv eval cache`: hit rates of eviction policies over traces, next to Belady's optimum. Knows nothing of models.

An access is one chunk (a key, its size and its cost to recompute). A hit saves the cost; a miss pays it and inserts the
chunk. Hit rates are by cost, which is what users wait for.
"""

import heapq
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ragkv.config import Config
from ragkv.errors import ConfigError
from ragkv.evals.experiment import Progress, Row
from ragkv.evals.parameters import Cache
from ragkv.store.eviction import POLICIES, Eviction

BLOCK_TOKENS = 512  # of a hash id in Mooncake's trace
LOG_TOKENS, TOKENS = (5.8, 0.6), (64, 1024)  # of a document's chunk: mean and deviation of the logarithm; least, most
MOVED = 10  # one in so many ranks goes to another document when popularity moves
ANCHOR_TOKENS = 64  # before a document's chunk
OPTIMUM = "belady"
ALL_POLICIES = (*POLICIES, OPTIMUM)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Access:
    """tokens: the size; cost_ms: to recompute."""

    key: int
    tokens: int
    cost_ms: float


def run(config: Config, wanted: Cache, progress: Progress) -> Iterator[Row]:
    """Yield a row for each cache size and policy."""
    return replay(Path(wanted.trace).stem, load(wanted.trace), wanted.shares, ALL_POLICIES)


def mooncake(file: Path) -> list[Access]:
    """Read the blocks of each request of Mooncake's trace, in order.

    A block's cost grows with what precedes it (attention). Raises ConfigError for a file that can't be read.
    """
    return [
        Access(block, BLOCK_TOKENS, _cost_ms(BLOCK_TOKENS, position * BLOCK_TOKENS))
        for blocks in each_line(file, lambda line: list(line["hash_ids"]))
        for position, block in enumerate(blocks)
    ]


def each_line(file: Path, take: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """Return what `take` makes of each request of a trace like Mooncake's.

    Raises ConfigError for a file that can't be read, or lacks what it takes.
    """
    try:
        return [take(json.loads(line)) for line in file.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"can't read the trace {file}: {error!r}") from error


def load(trace: str) -> list[Access]:
    """Return the accesses of `zipf`, or of a file in the format of Mooncake's trace."""
    return zipf_documents() if trace == "zipf" else mooncake(Path(trace))


def zipf_documents(
    num_requests: int = 20_000,
    num_documents: int = 20_000,
    exponent: float = 0.9,
    chunks_per_request: int = 6,
    drift_every: int = 2_000,
    seed: int = 0,
) -> list[Access]:
    """Return requests for chunks of documents whose popularity follows Zipf's law, and moves.

    Every `drift_every` requests, a tenth of the ranks go to other documents. Chunks have 64 to 1,024 tokens and are
    precomputed after a short anchor.
    """
    rng = random.Random(seed)
    least, most = TOKENS
    tokens = [min(most, max(least, round(rng.lognormvariate(*LOG_TOKENS)))) for _ in range(num_documents)]
    weights = [1 / (rank + 1) ** exponent for rank in range(num_documents)]
    cumulative = list(itertools.accumulate(weights))
    documents = list(range(num_documents))
    rng.shuffle(documents)
    accesses = []
    for request in range(num_requests):
        if request and request % drift_every == 0:
            moved = rng.sample(range(num_documents), num_documents // MOVED)
            for rank, document in zip(moved, rng.sample([documents[r] for r in moved], len(moved)), strict=True):
                documents[rank] = document
        for rank in rng.choices(range(num_documents), cum_weights=cumulative, k=chunks_per_request):
            key = documents[rank]
            accesses.append(Access(key, tokens[key], _cost_ms(tokens[key], ANCHOR_TOKENS)))
    return accesses


def replay(name: str, accesses: Sequence[Access], shares: Sequence[float], policies: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each cache size (as a share of all distinct chunks' tokens) and policy."""
    sizes = {access.key: access.tokens for access in accesses}
    for share in shares:
        capacity = round(share * sum(sizes.values()))
        for policy in policies:
            hits, saved = (_belady if policy == OPTIMUM else _hits)(accesses, capacity, policy)
            yield {
                "trace": name,
                "policy": policy,
                "share": share,
                "capacity_tokens": capacity,
                "accesses": len(accesses),
                "hit_rate": round(hits / len(accesses), 4),
                "cost_hit_rate": round(saved / sum(access.cost_ms for access in accesses), 4),
            }


def _hits(accesses: Sequence[Access], capacity: int, policy: str) -> tuple[int, float]:
    eviction, hits, saved = Eviction(policy), 0, 0.0
    for access in accesses:
        if eviction.touch(access.key):
            hits, saved = hits + 1, saved + access.cost_ms
        elif access.tokens <= capacity:
            eviction.add(access.key, access.tokens, access.cost_ms)
            while eviction.size_bytes > capacity:
                eviction.evict()
    return hits, saved


def _belady(accesses: Sequence[Access], capacity: int, _policy: str) -> tuple[int, float]:
    """Evict what is used again last: optimal where all chunks have one size (Belady, 1966), else close to it."""
    next_use = [math.inf] * len(accesses)
    following: dict[int, float] = {}
    for i in range(len(accesses) - 1, -1, -1):
        next_use[i] = following.get(accesses[i].key, math.inf)
        following[accesses[i].key] = i
    held: dict[int, float] = {}
    heap: list[tuple[float, int, int]] = []
    size, hits, saved = 0, 0, 0.0
    for i, access in enumerate(accesses):
        if access.key in held:
            hits, saved = hits + 1, saved + access.cost_ms
        elif access.tokens > capacity:
            continue
        else:
            size += access.tokens
        held[access.key] = next_use[i]
        heapq.heappush(heap, (-next_use[i], access.key, access.tokens))
        while size > capacity:
            at, key, tokens = heapq.heappop(heap)
            if held.get(key) == -at:
                del held[key]
                size -= tokens
    return hits, saved


def _cost_ms(tokens: int, before: int) -> float:
    """Return what it costs to prefill tokens after others: linear layers, and attention to what precedes them (in an
    arbitrary unit: a token's linear layers cost 1, attention as much at 4,096 tokens of context)."""
    return tokens * (1 + (before + tokens / 2) / 4096)
