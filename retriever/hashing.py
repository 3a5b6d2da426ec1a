"""The name of a chunk's content, the same in every layer. Knows nothing about where chunks come from."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

NEAREST: Final = "nearest"  # the contexts that an index averages over: each chunk's nearest neighbours


def chunk_hash(token_ids: Sequence[int]) -> str:
    """Return the hex XXH3-128 of the token ids as little-endian int32.

    Fast, not cryptographic: somebody who chooses both texts can make two of them collide.
    """
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<i4").tobytes())


def average_hash(anchor_hash: str, contexts: str, num_captures: int) -> str:
    """What stands for the anchor in the key of a chunk's averaged KV."""
    return xxhash.xxh3_128_hexdigest(f"{anchor_hash} {contexts} {num_captures}".encode())
