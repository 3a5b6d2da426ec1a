"""Search by tokens: which chunks stand in a prompt, and where. A copy of some of the catalogue's, in memory only.

Of each chunk windows near either end are hashed, two neighbours there, so that one of them begins at an even position
wherever the chunk stands in a prompt. A prompt's windows at even positions are looked up among them. What is found is
compared with the chunk token by token, in the catalogue, before it counts.
"""

import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

WINDOW = 16  # tokens, a power of two
SEAM = 4  # tokens at either end of a chunk that may be others in a prompt, where the text around it merges with them
BATCH = 4096  # chunks read from the catalogue at a time
_BASE = 0x9E3779B97F4A7C15  # of the polynomial, odd
_MIX = 0xD6E8FEB86659FD93
_ONE, _SIX_BITS = np.uint64(1), np.uint64(63)
_STRIDE = 2  # a prompt's windows begin so far from each other
_WINDOWS_A_WORD = 2  # of 64 bits in the filter, which says at once that most of a prompt's windows aren't there
_MOST_ALIKE = 16  # chunks that are looked at for one window
_MOST_COMPARED, _FEW_COMPARED = 8, 1 << 16  # tokens compared for each of the prompt's, at most, and for a short prompt
# Windows that came last are sorted by themselves at each change, as long as they are no more than this share of all.
_RECENT, _RECENT_AFTER_SYNC = 1 / 8, 1 / 64

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]


class ChunkTokens(Protocol):
    """Whatever has chunks' tokens, such as a catalogue. A chunk's id is never given to another chunk, and grows."""

    @property
    def data_version(self) -> int: ...

    def ids_after(self, id: int) -> list[int]:
        """Return the ids above `id`, sorted."""

    def tokens(self, ids: Iterable[int]) -> dict[int, tuple[str, Tokens]]:
        """Return hash and token ids `[T]`, by id, of those of these chunks that aren't deleted."""


@dataclass(frozen=True)
class FoundChunk:
    """Prompt tokens `[start, end)` that are the tokens `[offset, offset + end - start)` of a chunk of `num_tokens`."""

    start: int
    end: int
    chunk_hash: str
    offset: int
    num_tokens: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.start == self.num_tokens


class TokenIndex:
    """Finds a catalogue's chunks, as they are now, in the tokens of prompts. Usable from many threads."""

    def __init__(self, chunks: ChunkTokens) -> None:
        self._chunks = chunks
        self._lock = threading.Lock()
        self._revision, self._last_id = -1, 0
        self._windows, self._recent = _Windows(), _Windows()

    def sync(self) -> bool:
        """Add the chunks that are new in the catalogue. Returns False if nothing had changed: one small query.

        Deleted ones needn't be removed: whatever is found is compared with the catalogue. If it fails halfway, the next
        call continues. Raises StoreError if the catalogue fails.
        """
        with self._lock:
            revision = self._chunks.data_version
            if self._revision == revision:
                return False
            new = self._chunks.ids_after(self._last_id)
            for start in range(0, len(new), BATCH):
                ids = new[start : start + BATCH]
                self._add({id: tokens for id, (_, tokens) in self._chunks.tokens(ids).items()})
                self._last_id = ids[-1]
            self._settle(_RECENT_AFTER_SYNC)
            self._revision = revision
            return True

    def _add(self, tokens: dict[int, Tokens]) -> None:
        self._recent = self._recent.with_more(tokens)
        self._settle(_RECENT)

    def _settle(self, most: float) -> None:
        if len(self._recent) > most * len(self._windows):
            self._windows, self._recent = self._windows.merged(self._recent), _Windows()

    def search(self, token_ids: Sequence[int]) -> list[FoundChunk]:
        """Return which chunks stand in the prompt `[n]`, in order of position; none overlap.

        Each is the longest run of a chunk's tokens around one of its windows. Of those that overlap the longest counts,
        others with what it leaves of them, down to a window's length.
        """
        self.sync()
        prompt = as_tokens(token_ids)
        if len(prompt) < WINDOW:
            return []
        hashes = window_hashes(prompt, _STRIDE)
        hits = [hit for windows in (self._windows, self._recent) for hit in windows.find(hashes)]
        return apart(self._compared(prompt, hits)) if hits else []

    def _compared(self, prompt: Tokens, hits: list[tuple[int, int, int]]) -> list[FoundChunk]:
        """Return the runs of tokens that are a chunk's.

        hits: a position in the prompt, a chunk's id, and the offset in it of the window that is the same there.
        """
        chunks, found = self._chunks.tokens({id for _, id, _ in hits}), []
        left = max(_FEW_COMPARED, _MOST_COMPARED * len(prompt))
        reached: dict[tuple[int, int], int] = {}  # by chunk and where its first token would be: up to where it is known
        for at, id, offset in sorted(hits):
            if id not in chunks or left <= 0 or at < reached.get((id, at - offset), 0):
                continue
            chunk_hash, tokens = chunks[id]
            first = at - offset
            start, end = max(first, 0), min(first + len(tokens), len(prompt))
            left -= end - start
            differing = np.flatnonzero(prompt[start:end] != tokens[start - first : end - first]) + start
            i = int(np.searchsorted(differing, at))
            run = (int(differing[i - 1]) + 1 if i else start, int(differing[i]) if i < len(differing) else end)
            reached[id, first] = run[1]
            if run[0] <= at and at + WINDOW <= run[1]:
                found.append(FoundChunk(*run, chunk_hash, run[0] - first, len(tokens)))
        return found


class _Windows:
    """Hashed windows, sorted by hash, with the chunk that each is of; before them a Bloom filter. Never changed."""

    def __init__(
        self,
        hashes: Hashes | None = None,
        ids: npt.NDArray[np.int64] | None = None,
        offsets: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """hashes, ids, offsets: `[m]`, in any order."""
        hashes = np.empty(0, np.uint64) if hashes is None else hashes
        order = np.argsort(hashes, kind="stable")
        self._hashes: Hashes = hashes[order]
        self._ids = np.empty(0, np.int64) if ids is None else ids[order]
        self._offsets = np.empty(0, np.int32) if offsets is None else offsets[order]
        bits = max(10, (len(hashes) // _WINDOWS_A_WORD).bit_length())
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.uint64)
        np.bitwise_or.at(self._filter, hashes >> self._shift, _bits(hashes))

    def __len__(self) -> int:
        return len(self._hashes)

    def with_more(self, tokens: dict[int, Tokens]) -> "_Windows":
        """Return these and the windows of more chunks, by id."""
        cut = [
            (id, offset, each[offset : offset + WINDOW])
            for id, each in tokens.items()
            for offset in _offsets(len(each))
        ]
        if not cut:
            return self
        windows = np.stack([window for *_, window in cut])  # [m, WINDOW]
        hashes = window_hashes(windows)[:, 0]
        ids, offsets = np.array([id for id, *_ in cut]), np.array([offset for _, offset, _ in cut], np.int32)
        return self.merged(_Windows(hashes, ids, offsets))

    def merged(self, other: "_Windows") -> "_Windows":
        return _Windows(
            np.concatenate([self._hashes, other._hashes]),
            np.concatenate([self._ids, other._ids]),
            np.concatenate([self._offsets, other._offsets]),
        )

    def find(self, hashes: Hashes) -> list[tuple[int, int, int]]:
        """Return (position, chunk's id, offset in the chunk) of each of a prompt's windows that is here.

        hashes: of the windows at every `_STRIDE`-th position.
        """
        if not len(self):
            return []
        words = self._filter.take((hashes >> self._shift).view(np.int64))
        some = words & (_ONE << (hashes & _SIX_BITS)) != 0  # a tenth of them, of which the other bits tell more
        at = np.flatnonzero(some)
        bits = _bits(hashes[at])
        at = at[(words[at] & bits) == bits]
        first = np.searchsorted(self._hashes, hashes[at])
        is_here = self._hashes.take(first, mode="clip") == hashes[at]
        at, first = at[is_here], first[is_here]
        last = np.minimum(np.searchsorted(self._hashes, hashes[at], side="right"), first + _MOST_ALIKE)
        return [
            (_STRIDE * int(position), int(self._ids[row]), int(self._offsets[row]))
            for position, begin, end in zip(at, first, last, strict=True)
            for row in range(begin, end)
        ]


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Return token ids `[n]`, sooner than NumPy itself makes an array of a list."""
    return np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), np.int32)


def window_hashes(tokens: Tokens, stride: int = 1) -> Hashes:
    """Return the hashes of windows of `[..., n]` tokens, at every `stride`-th position, 1 or 2: of a polynomial modulo
    2^64. `[..., (n - WINDOW) // stride + 1]`."""
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    hashes = hashes[..., :-1:stride] * np.uint64(_BASE) + hashes[..., 1::stride]  # of two tokens
    base, width = _BASE * _BASE % (1 << 64), 2
    while width < WINDOW:
        step = width // stride
        hashes = hashes[..., :-step] * np.uint64(base) + hashes[..., step:]
        base, width = base * base % (1 << 64), 2 * width
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_MIX)
    return hashes


def _bits(hashes: Hashes) -> Hashes:
    """Return which bits of a word of the filter each hash sets: up to three, by its lowest bits."""
    bits = np.zeros_like(hashes)
    for shift in (0, 6, 12):
        bits |= _ONE << ((hashes >> np.uint64(shift)) & _SIX_BITS)
    return bits


def _offsets(num_tokens: int) -> list[int]:
    """Return where in a chunk its windows begin: `_STRIDE` in a row near either end, or in the middle."""
    last = num_tokens - WINDOW
    if last < 0:
        return []
    near = [SEAM, last - SEAM] if last >= 2 * SEAM else [last // 2]
    return sorted({offset for first in near for offset in range(first, min(first + _STRIDE, last + 1))})


def apart(found: list[FoundChunk]) -> list[FoundChunk]:
    """Return the longest of what was found, and of the others what doesn't overlap with them, in order of position.

    Of those that are equally long the one counts that is nearest its chunk's beginning.
    """
    taken: list[FoundChunk] = []
    for chunk in sorted(
        set(found), key=lambda chunk: (chunk.start - chunk.end, chunk.offset, chunk.start, chunk.chunk_hash)
    ):
        start, end = chunk.start, chunk.end
        for other in taken:
            if start < other.end and other.start < end:
                if other.start - start >= end - other.end:
                    end = other.start
                else:
                    start = other.end
        if end - start >= WINDOW:
            cut = FoundChunk(start, end, chunk.chunk_hash, chunk.offset + start - chunk.start, chunk.num_tokens)
            taken.append(cut)
    return sorted(taken, key=lambda chunk: chunk.start)
