"""The name of a chunk's content, the same in every layer. Knows nothing about where chunks come from."""

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

CONTEXTS: Final = "behind one to three, near and at random"  # what an index averages over (`index.contexts_of`)


def chunk_hash(token_ids: Sequence[int], scope: str = "") -> str:
    """Return the hex BLAKE2b-128 of the token ids as little-endian int32, keyed by `scope`.

    scope: whose text it is, at most 64 bytes. The same text has another hash in another scope, so that nothing that is
    stored under the hash is shared, or can be found by guessing.
    """
    data = np.asarray(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(data, digest_size=16, key=scope.encode()).hexdigest()


def mean_hash(anchor_hash: str, contexts: str, num_contexts: int, *, joins: bool = False) -> str:
    """Return what takes the anchor's place in the key of a chunk's KV that is averaged over contexts.

    joins: whether the entry also has the difference of the KV after the anchor alone.
    """
    rule = f"{anchor_hash} {contexts} {num_contexts}" + " with the difference" * joins
    return xxhash.xxh3_128_hexdigest(rule.encode())
