import math

import numpy as np
import pytest

from ragkv.evals import scores


@pytest.mark.parametrize(
    "answer, golds, found, f1",
    [
        ("It is the Exeter College.", ["Exeter College"], 1.0, 2 / 3),
        ("Paris", ["Rome", "paris!"], 1.0, 1.0),
        ("category", ["cat"], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("a cat and a dog", ["dog cat"], 0.0, 0.8),
    ],
)
def test_answers_as_squad_scores_them(answer, golds, found, f1):
    assert scores.contains(answer, golds) == found
    assert scores.word_f1(answer, golds) == pytest.approx(f1)


@pytest.mark.parametrize(
    "answer, gold, expected",
    [
        ("the cat sat", "the cat sat", 1.0),
        ("sat cat the", "the cat sat", 1 / 3),
        ("police killed the gunman", "police kill the gunman", 0.75),  # Lin (2004), the example of section 3.1
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("dog", "cat", 0.0),
    ],
)
def test_rouge_l(answer, gold, expected):
    assert scores.rouge_l(answer, [gold]) == pytest.approx(expected)


def test_the_first_line_is_the_first_with_text():
    assert scores.first_line("\n\n Ann came. \n\nDialogue:") == " Ann came. "
    assert scores.first_line("") == ""


def test_cacheblends_f1_looks_at_the_first_line_only():
    encode = lambda text: [ord(char) for char in text]  # noqa: E731
    assert scores.token_f1("\n\nabc\nxyz", ["abc"], encode) == 1.0
    assert scores.token_f1("xyz\nabc", ["abc"], encode) == 0.0


def test_intervals_hold_the_mean_and_narrow_with_more_examples():
    values = np.random.default_rng(1).normal(5, 1, 400)
    low, high = scores.interval(values)
    few_low, few_high = scores.interval(values[:25])
    assert low < values.mean() < high
    assert 0.1 < high - low < 0.3 < few_high - few_low
    assert all(map(math.isnan, scores.interval([])))


def test_a_paired_ratio_is_certain_where_examples_agree():
    others = np.random.default_rng(1).uniform(1, 100, 50)
    assert scores.ratio_interval(0.3 * others, others) == pytest.approx((0.3, 0.3))
    low, high = scores.ratio_interval(np.random.default_rng(2).uniform(1, 100, 50), others)
    assert low < 1 < high
