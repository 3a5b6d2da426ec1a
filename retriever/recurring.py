"""Passages that recur: which parts of a prompt earlier prompts have had too, after other tokens. In memory only.

Some windows of every prompt are remembered, chosen by what they contain, so that the same are chosen wherever a
passage stands. Where one comes back, the prompts are compared token by token to either side: what they share there is
the passage, from where their contexts end to where they begin again. What stands at the beginning of both isn't one:
it has no other context, and vLLM's prefix cache has it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from ragkv.retriever.tokens import WINDOW, Hashes, Tokens, as_tokens, window_hashes

_REMEMBERED = 1 << 20  # tokens of prompts
_ONE_IN = np.uint64(8)  # windows is remembered
_SALT = np.uint64(0x9E3779B97F4A7C15)  # cuts where other windows than those remembered are the least


class Recurring:
    """The prompts of those who may share passages: of one `cache_salt`. Not for several threads at once.

    min_tokens, max_tokens: of a passage; of longer ones the parts count, cut where their tokens say so.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min, self._max = max(min_tokens, 2 * WINDOW), max_tokens
        self._prompts: OrderedDict[int, Tokens] = OrderedDict()  # by number
        self._windows: dict[int, tuple[int, int]] = {}  # by hash: the last prompt that had it, and where
        self._number, self._num_tokens = 0, 0

    def add(self, token_ids: Sequence[int], known: Sequence[tuple[int, int]] = ()) -> list[list[int]]:
        """Remember a prompt `[n]`. Returns its passages that an earlier prompt had in another context, in order.

        known: sorted ranges of its tokens that needn't be found.
        """
        prompt = as_tokens(token_ids)
        if len(prompt) < self._min:
            return []
        hashes = window_hashes(prompt)
        chosen = np.flatnonzero(hashes % _ONE_IN == 0)
        runs = self._shared(prompt, chosen.tolist(), hashes[chosen].tolist())
        passages = [part for run in runs for gap in _gaps(run, known) for part in self._parts(hashes, *gap)]
        self._remember(prompt, chosen.tolist(), hashes[chosen].tolist())
        return [prompt[start:end].tolist() for start, end in passages]

    def _shared(self, prompt: Tokens, chosen: list[int], hashes: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranges that another prompt has, after and before other tokens; none overlap."""
        done = 0
        for at, hash in zip(chosen, hashes, strict=True):
            if at < done or hash not in self._windows:
                continue
            number, there = self._windows[hash]
            start, end = _common(prompt, at, self._prompts[number], there)
            if end - start < WINDOW:  # another text of the same hash
                continue
            is_beginning = start == 0 and there == at
            if not is_beginning and end - max(start, done) >= self._min:
                yield max(start, done), end
            done = max(done, end)

    def _parts(self, hashes: Hashes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut a range into parts of `max_tokens` at most, each where the least window is, of those that could be."""
        while end - start > self._max:
            first = start + max(self._min, self._max // 2)
            last = min(start + self._max, end - self._min)
            cut = first + int(np.argmin(hashes[first:last] * _SALT)) if first < last else start + self._max
            yield start, cut
            start = cut
        if end - start >= self._min:
            yield start, end

    def _remember(self, prompt: Tokens, chosen: list[int], hashes: list[int]) -> None:
        self._number += 1
        self._prompts[self._number] = prompt
        self._num_tokens += len(prompt)
        self._windows.update((hash, (self._number, at)) for at, hash in zip(chosen, hashes, strict=True))
        while self._num_tokens > _REMEMBERED:
            number, oldest = self._prompts.popitem(last=False)
            self._num_tokens -= len(oldest)
            for hash in window_hashes(oldest).tolist():
                if hash in self._windows and self._windows[hash][0] == number:
                    del self._windows[hash]


def _common(a: Tokens, at: int, b: Tokens, there: int) -> tuple[int, int]:
    """Return the range of `a` around the position `at` that is the same in `b` around `there`."""
    back, ahead = min(at, there), min(len(a) - at, len(b) - there)
    before = np.flatnonzero(a[at - back : at] != b[there - back : there])
    after = np.flatnonzero(a[at : at + ahead] != b[there : there + ahead])
    start = at - back + int(before[-1]) + 1 if len(before) else at - back
    return start, at + (int(after[0]) if len(after) else ahead)


def _gaps(run: tuple[int, int], known: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what of a range isn't known."""
    start, end = run
    for known_start, known_end in known:
        if known_end > start and known_start < end:
            if known_start > start:
                yield start, known_start
            start = max(start, known_end)
    if start < end:
        yield start, end
