"""Exact prefixes in the store: the KV of a request's full blocks, by the names that vLLM gives them.

vLLM hashes each full block together with all that stands before it, and the request's salt. A few blocks make a
segment, which is an entry of the store under the hash of its last block; so the entry's name says what the whole
prompt is up to there, and whoever has the hashes of a prompt finds the longest beginning of it that is stored. The
last segment of a request may be shorter, until a longer request goes on. Nothing is recomputed or rounded.
"""

from collections.abc import Sequence

import xxhash

from ragkv.engine.task import Span
from ragkv.store.entries import EntryFolder
from ragkv.store.record import ChunkKey

EXACT = xxhash.xxh3_128_hexdigest(b"an exact prefix")  # in the anchor's place in a segment's key
MIN_TOKENS = 256  # a shorter prefix is prefilled about as soon
_SEGMENT_TOKENS = 256


class Prefixes:
    """What the scheduler's side knows of stored prefixes: their names, and whether the store has them.

    fingerprint, heads: of the keys (`ChunkKey`). block_size: tokens of vLLM's blocks.
    """

    def __init__(self, entries: EntryFolder, fingerprint: str, heads: tuple[int, int], block_size: int) -> None:
        self._entries, self._fingerprint, self._heads = entries, fingerprint, heads
        self.block_size = block_size
        self._step = max(1, _SEGMENT_TOKENS // block_size)  # blocks of a segment

    def find(self, hashes: Sequence[bytes], num_known: int, num_tokens: int) -> tuple[Span, ...]:
        """Return the segments that have the longest stored prefix, beyond the `num_known` first tokens.

        hashes: of the prompt's full blocks. num_tokens: how many of its tokens may be loaded. Empty if no segment
        ends behind the known tokens, or what is stored is too short.
        """
        end = min(len(hashes), num_tokens // self.block_size)
        found: list[Span] = []
        start = num_known // self.block_size // self._step * self._step
        while start < end:
            lengths = range(min(self._step, end - start), 0, -1)
            segments = (self._segment(hashes, start, start + length) for length in lengths)
            segment = next((each for each in segments if self._entries.contains(self._key(each))), None)
            if segment is None:
                break
            found.append(segment)
            start += self._step
            if segment.end < start * self.block_size:
                break
        is_longer = bool(found) and found[-1].end - num_known >= MIN_TOKENS
        return tuple(found) if is_longer else ()

    def missing(self, hashes: Sequence[bytes], num_blocks: int) -> tuple[Span, ...]:
        """Return the segments of so many first blocks that aren't stored; none of a request that is too short."""
        if num_blocks * self.block_size < MIN_TOKENS:
            return ()
        cuts = range(0, num_blocks, self._step)
        segments = [self._segment(hashes, start, min(start + self._step, num_blocks)) for start in cuts]
        return tuple(each for each in segments if not self._entries.contains(self._key(each)))

    def _segment(self, hashes: Sequence[bytes], start: int, end: int) -> Span:
        return Span(start * self.block_size, end * self.block_size, hashes[end - 1][:16].hex(), EXACT)

    def _key(self, segment: Span) -> ChunkKey:
        return ChunkKey(segment.chunk_hash, EXACT, self._fingerprint, self._heads)
