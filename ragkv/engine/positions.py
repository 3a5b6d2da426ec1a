"""Pure functions of token positions: which lie in a span, which are known, which runs they form."""

from collections.abc import Iterable, Sequence

import torch

from ragkv.engine.task import ROOT_HASH, Span
from ragkv.retriever.hashing import chunk_hash


def rows_in(positions: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the rows of `positions` `[T]` that lie in the span."""
    return ((positions >= span.start) & (positions < span.end)).nonzero().flatten()


def covered(num_tokens: int, positions: torch.Tensor, spans: Iterable[Span]) -> torch.Tensor:
    """Return which of the first `num_tokens` positions lie in a span or are among `positions`: `[N]` bool."""
    known = torch.zeros(num_tokens, dtype=torch.bool)
    known[positions] = True
    for span in spans:
        known[span.start : span.end] = True
    return known


def runs_of(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Return sorted positions as contiguous runs `(start, end)`."""
    starts = positions[torch.diff(positions, prepend=positions[:1] - 2) != 1]
    ends = positions[torch.diff(positions, append=positions[-1:] + 2) != 1] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def end_of_slice(selected: torch.Tensor, end: int, spans: Sequence[Span]) -> int:
    """Return the first index from `end` on that doesn't cut the selected positions of a span in two."""
    for span in spans:
        inside = rows_in(selected, span)
        if len(inside) and int(inside[0]) < end <= int(inside[-1]):
            return int(inside[-1]) + 1
    return end


def exact_until(spans: Sequence[Span], token_ids: Sequence[int]) -> int:
    """Return the position up to which the spans' KV, and what is computed before them, is what prefill computes.

    That is so where a span follows what it was precomputed after: the anchor does, and a chunk directly after it, or
    one directly after the prompt's own beginning. token_ids: of the prompt.
    """
    end, before = 0, ROOT_HASH
    if spans and spans[0].start:
        end = spans[0].start - spans[0].offset
        before = chunk_hash(token_ids[:end])
    for span in spans[:2]:
        if span.start != end or span.anchor_hash != before:
            break
        end, before = span.end, span.chunk_hash
    return end
