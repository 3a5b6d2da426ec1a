"""Counts tokens for a splitter, which asks for many beginnings of one text to find the longest that fits."""

from bisect import bisect_right
from collections.abc import Sequence

from tokenizers import Tokenizer

_LEAST_PIECE = 1 << 7  # characters that are tokenised at a time; as a rule as many as `capacity` has tokens
_NEAR = 16  # tokens by which the ends of two texts may differ that begin alike
_BACK, _ALIKE = 32, 8  # tokens that are tokenised anew where a text goes on; of these, those that must be as before


class TokenCount:
    """Returns the number of a text's tokens where it is near `capacity`, else one that is as far from it.

    What a text has in common with the beginning of the last one isn't tokenised again, nor what follows after there
    are enough: else each chunk of a text would be tokenised some ten times, and a text of quotes that are nested all
    of it at each of them.
    """

    def __init__(self, tokenizer: Tokenizer, capacity: int) -> None:
        self._tokenizer, self._capacity = tokenizer, capacity
        self._piece = max(capacity, _LEAST_PIECE)
        self._text = ""
        self._ends: list[int] = []  # of its tokens, in characters

    def __call__(self, text: str) -> int:
        if not (text.startswith(self._text) or self._text.startswith(text)):
            self._text, self._ends = "", []
        while len(self._text) < len(text) and len(self._ends) <= self._capacity + _NEAR:
            anew = len(self._text) - (self._ends[-_BACK] if len(self._ends) > _BACK else 0)
            longer = text[: len(self._text) + max(self._piece, anew)]
            self._ends = self._ends_of(longer, self._ends)
            self._text = longer
        if len(self._text) <= len(text):
            return len(self._ends)
        known = self._ends[: bisect_right(self._ends, len(text))]
        is_near = abs(len(known) - self._capacity) <= _NEAR
        return len(self._ends_of(text, known)) if is_near else len(known)

    def _ends_of(self, text: str, known: Sequence[int]) -> list[int]:
        """Tokenise a text. known: where the tokens end of another that begins alike."""
        if len(known) > _BACK:
            start = known[-_BACK]
            ends = [start + end for end in self._encoded(text[start:])]
            middle = known[-_BACK // 2]
            a, b = bisect_right(known, middle), bisect_right(ends, middle)
            if ends[b - _ALIKE : b] == known[a - _ALIKE : a]:
                return [*known[:a], *ends[b:]]
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        # As a batch, which lets other threads run meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return [end for _, end in encoded.offsets]
