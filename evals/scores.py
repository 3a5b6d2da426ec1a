"""Scores of an answer against the gold ones, each between 0 and 1, and what an interval of their mean is."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt


def contains(answer: str, golds: Sequence[str]) -> float:
    """Whether a gold answer is in the answer, both normalised as SQuAD does."""
    text = f" {_normalise(answer)} "
    return float(any(f" {_normalise(gold)} " in text for gold in golds if _normalise(gold)))


def word_f1(answer: str, golds: Sequence[str]) -> float:
    """SQuAD's F1 over words, the best over the gold answers."""
    return max(_f1(_normalise(answer).split(), _normalise(gold).split()) for gold in golds)


def token_f1(answer: str, golds: Sequence[str], encode: Callable[[str], list[int]]) -> float:
    """CacheBlend's: F1 over the tokenizer's tokens of the answer's first line."""
    tokens = encode(_normalise(first_line(answer)))
    return max(_f1(tokens, encode(_normalise(gold))) for gold in golds)


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004), the best over the gold answers."""
    return max(_rouge_l(_words(answer), _words(gold)) for gold in golds)


def first_line(answer: str) -> str:
    """What CacheBlend scores of an answer."""
    return answer.lstrip("\n").split("\n")[0]


def interval(values: npt.ArrayLike, num_samples: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the mean."""
    array = np.asarray(values, dtype=float)
    if not len(array):
        return float("nan"), float("nan")
    means = array[_resampled(len(array), num_samples)].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def ratio_interval(values: npt.ArrayLike, others: npt.ArrayLike, num_samples: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the ratio of two means over the same examples (paired)."""
    rows = _resampled(len(np.asarray(values)), num_samples)
    ratios = np.asarray(values, dtype=float)[rows].mean(1) / np.asarray(others, dtype=float)[rows].mean(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def _resampled(size: int, num_samples: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, size, (num_samples, size))


def _normalise(text: str) -> str:
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _f1(found: Sequence[object], gold: Sequence[object]) -> float:
    common = sum((Counter(found) & Counter(gold)).values())
    if not common:
        return float(not found and not gold)
    precision, recall = common / len(found), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _rouge_l(found: Sequence[str], gold: Sequence[str]) -> float:
    lengths = [0] * (len(gold) + 1)  # of the longest common subsequence with each prefix of gold
    for word in found:
        diagonal = 0
        for j, other in enumerate(gold):
            diagonal, lengths[j + 1] = (
                lengths[j + 1],
                diagonal + 1 if word == other else max(lengths[j + 1], lengths[j]),
            )
    common = lengths[-1]
    if not common:
        return float(not found and not gold)
    precision, recall = common / len(found), common / len(gold)
    return 2 * precision * recall / (precision + recall)
