"""Exact prefixes, the scheduler's side: what of a prompt's beginning is stored, and what of a request is worth storing.

vLLM hashes each full block together with all that stands before it, and the request's salt. A few blocks make a
segment, which is an entry of the store (`ragkv.store.prefixes`) under the hash of its last block; so the entry's name
says what the whole prompt is up to there, and whoever has the hashes of a prompt finds the longest beginning of it that
is stored. The last segment of a request may be shorter, until a longer request goes on, and behind it there may be a
tail: less than a block, where blocks are long. Nothing is recomputed or rounded.
"""

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import xxhash

from ragkv.engine.task import Keep, Span
from ragkv.store.record import ChunkKey

EXACT = xxhash.xxh3_128_hexdigest(b"an exact prefix")  # in the anchor's place in a segment's key
SEGMENT_TOKENS = 256
_MIN_TOKENS = 256  # a shorter prefix is prefilled about as soon,
_MIN_WITH_TAILS = 96  # but not on CPU, where vLLM's blocks are long
_TAIL_TOKENS = 32  # a tail has so many tokens, or two or three times as many with vLLM's blocks of 128 on CPU
_REMEMBERED = 1 << 17
_DOUBTED_AFTER_S = 600.0  # how long it is believed that loading is slower than prefill


class Beginnings:
    """The names of what a request begins with, for every number of tokens at which something stored may end.

    hashes: vLLM's, of full blocks. token_ids: of the request; without them, as for one with images, it has no tails.
    extra_keys: what vLLM hashes with the first block besides its tokens, such as the request's salt. min_tokens: those
    of the shortest prefix that is worth storing; min_loaded: those behind what vLLM has that are worth loading.
    """

    def __init__(
        self,
        hashes: Sequence[bytes],
        token_ids: Sequence[int],
        block_size: int,
        extra_keys: tuple[object, ...] | None = None,
    ) -> None:
        self._hashes, self._token_ids, self.block_size = hashes, token_ids, block_size
        self._extra_keys = extra_keys
        self.has_tails = bool(token_ids) and block_size > _TAIL_TOKENS and block_size % _TAIL_TOKENS == 0
        self._step = _TAIL_TOKENS if self.has_tails else block_size
        self.min_tokens = _MIN_WITH_TAILS if self.has_tails else _MIN_TOKENS
        self.min_loaded = _TAIL_TOKENS if self.has_tails else _MIN_TOKENS

    def full_blocks(self, num_tokens: int) -> int:
        """Return how many blocks are full with so many of the request's first tokens."""
        return min(len(self._hashes), num_tokens // self.block_size)

    def longest(self, num_tokens: int) -> int:
        """Return at how many tokens, at most `num_tokens`, the longest beginning ends that has a name."""
        in_blocks = self.full_blocks(num_tokens) * self.block_size
        if not self.has_tails:
            return in_blocks
        within = min(num_tokens, len(self._token_ids), in_blocks + self.block_size - 1)
        return within // self._step * self._step

    def ends(self, num_tokens: int) -> range:
        """Return at how many tokens each beginning of at most `num_tokens` tokens ends."""
        return range(self._step, self.longest(num_tokens) + 1, self._step)

    def tails(self, start: int, num_tokens: int) -> range:
        """Return where each tail ends that begins at `start` and has room in `num_tokens`, the longest first."""
        if not self.has_tails:
            return range(0)
        last = min(num_tokens, len(self._token_ids), start + self.block_size - 1) // self._step * self._step
        return range(last, start, -self._step)

    def name(self, end: int) -> bytes:
        """Return the name of the first `end` tokens."""
        num_blocks, num_more = divmod(end, self.block_size)
        if num_blocks:
            full = self._hashes[num_blocks - 1]
        else:
            full = hashlib.sha256(b"before the first block\0" + repr(self._extra_keys).encode()).digest()
        if not num_more:
            return full
        tokens = array("q", self._token_ids[end - num_more : end])
        return hashlib.sha256(b"a tail behind a block\0" + full + tokens.tobytes()).digest()


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

    def find(self, beginnings: Beginnings, num_known: int, num_tokens: int) -> tuple[Span, ...]:
        """Return the segments that have the longest stored prefix, beyond the `num_known` first tokens.

        num_tokens: how many of the prompt's tokens may be loaded. Empty if no segment ends behind the known tokens, or
        what is stored is too short.
        """
        end = beginnings.full_blocks(num_tokens)
        found: list[Span] = []
        start = num_known // self.block_size // self._step * self._step
        while start < end:
            lengths = range(min(self._step, end - start), 0, -1)
            ends = [(start + length) * self.block_size for length in lengths]
            segment = self._first_stored(beginnings, start * self.block_size, ends)
            if segment is None:
                break
            found.append(segment)
            start += self._step
            if segment.end < start * self.block_size:
                break
        in_blocks = found[-1].end if found else start * self.block_size
        tail = self._first_stored(beginnings, in_blocks, beginnings.tails(in_blocks, num_tokens))
        found += [] if tail is None else [tail]
        is_longer = bool(found) and found[-1].end - num_known >= beginnings.min_loaded
        return tuple(each for each in found if each.end > num_known) if is_longer else ()

    def missing(self, beginnings: Beginnings, num_tokens: int) -> tuple[Span, ...]:
        """Return the segments of so many first tokens that aren't stored; none of a prefix that is too short.

        Tokens behind the longest beginning that has a name are left out.
        """
        end = beginnings.longest(num_tokens)
        if end < beginnings.min_tokens:
            return ()
        in_blocks = end // self.block_size * self.block_size
        cuts = [*range(0, in_blocks, self._step * self.block_size), in_blocks]
        cuts += [end] if end > in_blocks else []
        segments = [self._segment(beginnings, start, end) for start, end in pairwise(cuts)]
        return tuple(each for each in segments if not self._contains(self.key(each)))

    def _first_stored(self, beginnings: Beginnings, start: int, ends: Iterable[int]) -> Span | None:
        """Return the first stored segment of those that begin at `start`."""
        segments = (self._segment(beginnings, start, end) for end in ends)
        return next((each for each in segments if self._contains(self.key(each))), None)

    def _segment(self, beginnings: Beginnings, start: int, end: int) -> Span:
        return Span(start, end, beginnings.name(end)[:16].hex(), EXACT)

    def key(self, segment: Span) -> ChunkKey:
        return ChunkKey(segment.chunk_hash, EXACT, self._fingerprint, self._heads)


class Reuse:
    """What of a finished request is worth storing, unless the request says so itself: what has come back before.

    Of a request that goes on where another one has ended, as a conversation's next turn does, that is all of it; of
    others what another request had begun with, such as an instruction. The last two million tokens are remembered
    (with blocks of 16).
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # beginnings, and whether a request has ended there

    def worth(self, keep: Keep | None, beginnings: Beginnings, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many of a request's first `num_tokens` tokens are worth storing, and remember it."""
        ends = beginnings.ends(num_tokens)
        names = [beginnings.name(end) for end in ends]
        num_seen, continues = 0, False
        for end, each in zip(ends, names, strict=True):
            if each not in self._seen:
                break
            num_seen = end
            continues |= self._seen[each] and end >= _MIN_TOKENS
        for each in names:
            self._seen[each] = self._seen.pop(each, False)
        if names:
            self._seen[names[-1]] = True
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        match keep:
            case "session":
                return num_tokens
            case "shared":
                return min(num_tokens, num_prompt_tokens)
            case "once":
                return 0
        return num_tokens if continues else num_seen


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
