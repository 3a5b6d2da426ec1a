"""Exact prefixes, the scheduler's side: what of a prompt's beginning is stored, and what of a request is worth storing.

vLLM hashes each full block together with all that stands before it, and the request's salt. A few blocks make a
segment, which is an entry of the store (`ragkv.store.prefixes`) under the hash of its last block; so the entry's name
says what the whole prompt is up to there, and whoever has the hashes of a prompt finds the longest beginning of it that
is stored. The last segment of a request may be shorter, until a longer request goes on. Nothing is recomputed or
rounded.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import xxhash

from ragkv.engine.task import Keep, Span
from ragkv.store.record import ChunkKey

EXACT = xxhash.xxh3_128_hexdigest(b"an exact prefix")  # in the anchor's place in a segment's key
MIN_TOKENS = 256  # a shorter prefix is prefilled about as soon
SEGMENT_TOKENS = 256
_REMEMBERED_BLOCKS = 1 << 17
_DOUBTED_AFTER_S = 600.0  # how long it is believed that loading is slower than prefill


class Prefixes:
    """The stored prefixes: their names, whether the store has them, and how long they take to load.

    contains: whether an entry is stored. generation: of the store (`ragkv.store.prefixes.generation`). fingerprint,
    heads: of the keys (`ChunkKey`). block_size: tokens of vLLM's blocks.
    """

    def __init__(
        self,
        contains: Callable[[ChunkKey], bool],
        generation: Callable[[], int],
        fingerprint: str,
        heads: tuple[int, int],
        block_size: int,
    ) -> None:
        self._contains, self._fingerprint, self._heads = contains, fingerprint, heads
        self.generation, self.block_size = generation, block_size
        self._step = max(1, SEGMENT_TOKENS // block_size)  # blocks of a segment
        self._load_ms, self._timed_at = 0.0, 0.0  # of a thousand tokens

    def timed(self, num_tokens: int, load_ms: float) -> None:
        """Note how long a prefix took to load."""
        rate = 1e3 * load_ms / num_tokens
        self._load_ms = rate if not self._load_ms else (self._load_ms + rate) / 2
        self._timed_at = time.monotonic()

    def pays(self, prefill_ms: float | None) -> bool:
        """Return whether to load prefixes where vLLM takes `prefill_ms` for a thousand tokens; None: nobody knows.

        True also if the last time is long ago: the disk may be faster now.
        """
        is_slower = prefill_ms is not None and self._load_ms > prefill_ms
        return not is_slower or time.monotonic() - self._timed_at > _DOUBTED_AFTER_S

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
            segment = next((each for each in segments if self._contains(self.key(each))), None)
            if segment is None:
                break
            found.append(segment)
            start += self._step
            if segment.end < start * self.block_size:
                break
        is_longer = bool(found) and found[-1].end - num_known >= MIN_TOKENS
        return tuple(found) if is_longer else ()

    def missing(self, hashes: Sequence[bytes], num_blocks: int) -> tuple[Span, ...]:
        """Return the segments of so many first blocks that aren't stored; none of a prefix that is too short."""
        if num_blocks * self.block_size < MIN_TOKENS:
            return ()
        cuts = range(0, num_blocks, self._step)
        segments = [self._segment(hashes, start, min(start + self._step, num_blocks)) for start in cuts]
        return tuple(each for each in segments if not self._contains(self.key(each)))

    def _segment(self, hashes: Sequence[bytes], start: int, end: int) -> Span:
        return Span(start * self.block_size, end * self.block_size, hashes[end - 1][:16].hex(), EXACT)

    def key(self, segment: Span) -> ChunkKey:
        return ChunkKey(segment.chunk_hash, EXACT, self._fingerprint, self._heads)


class Reuse:
    """What of a finished request is worth storing, unless the request says so itself: what has come back before.

    Of a request that goes on where another one has ended, as a conversation's next turn does, that is all of it; of
    others the blocks that another request had begun with, such as an instruction. The last two million tokens (with
    blocks of 16) are remembered.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # blocks, and whether a request has ended there

    def worth(self, keep: Keep | None, hashes: Sequence[bytes], num_prompt_tokens: int, num_blocks: int) -> int:
        """Return how many of a request's first `num_blocks` blocks are worth storing, and remember it."""
        hashes = hashes[:num_blocks]
        num_seen, continues = 0, False
        for each in hashes:
            if each not in self._seen:
                break
            num_seen += 1
            continues |= self._seen[each] and num_seen * self._block_size >= MIN_TOKENS
        for each in hashes:
            self._seen[each] = self._seen.pop(each, False)
        if hashes:
            self._seen[hashes[-1]] = True
        while len(self._seen) > _REMEMBERED_BLOCKS:
            self._seen.popitem(last=False)
        match keep:
            case "session":
                return num_blocks
            case "shared":
                return min(num_blocks, num_prompt_tokens // self._block_size)
            case "once":
                return 0
        return num_blocks if continues else num_seen


class WriteBudget:
    """How much may be written, so that a disk isn't worn out: `bytes_per_hour`, and at once what an hour allows."""

    def __init__(self, bytes_per_hour: float) -> None:
        self._rate, self._most = bytes_per_hour / 3600, bytes_per_hour
        self._left, self._at = bytes_per_hour, time.monotonic()

    def take(self, num_bytes: float) -> bool:
        """Return whether so much may be written now. If so, it counts as written."""
        now = time.monotonic()
        self._left = min(self._most, self._left + self._rate * (now - self._at))
        self._at = now
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True
