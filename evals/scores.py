"""Scores of an answer against the gold ones, each between 0 and 1."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

_ROUGE = RougeScorer(["rougeL"])


def contains(answer: str, golds: Sequence[str]) -> float:
    """Return whether a gold answer is in the answer, both normalised as SQuAD does."""
    text = f" {_normalise(answer)} "
    return float(any(f" {_normalise(gold)} " in text for gold in golds if _normalise(gold)))


def word_f1(answer: str, golds: Sequence[str]) -> float:
    """Return SQuAD's F1 over words, the best over the gold answers."""
    return max(_f1(_normalise(answer).split(), _normalise(gold).split()) for gold in golds)


def token_f1(answer: str, golds: Sequence[str], encode: Callable[[str], list[int]]) -> float:
    """Return CacheBlend's F1 over the tokenizer's tokens of the answer's first line."""
    tokens = encode(_normalise(first_line(answer)))
    return max(_f1(tokens, encode(_normalise(gold))) for gold in golds)


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """Return the F1 of the longest common subsequence of words (Lin, 2004), the best over the gold answers.

    Words are of Latin letters without accents and of digits, unstemmed, as the published scores count them.
    """
    return max(float(_ROUGE.score(gold, answer)["rougeL"].fmeasure) for gold in golds)


def first_line(answer: str) -> str:
    """Return what CacheBlend scores of an answer."""
    return answer.lstrip("\n").split("\n")[0]


def _normalise(text: str) -> str:
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(found: Sequence[object], gold: Sequence[object]) -> float:
    common = sum((Counter(found) & Counter(gold)).values())
    if not common:
        return float(not found and not gold)
    precision, recall = common / len(found), common / len(gold)
    return 2 * precision * recall / (precision + recall)
