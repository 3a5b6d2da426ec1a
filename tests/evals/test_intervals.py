import math
import warnings

import numpy as np
import pytest

from ragkv.evals.intervals import interval, ratio_interval


def test_intervals_hold_the_mean_and_narrow_with_more_examples():
    values = np.random.default_rng(1).normal(5, 1, 400)
    low, high = interval(values)
    few_low, few_high = interval(values[:25])
    assert low < values.mean() < high
    assert 0.1 < high - low < 0.3 < few_high - few_low
    assert all(map(math.isnan, interval([])))


def test_a_paired_ratio_is_certain_where_examples_agree():
    others = np.random.default_rng(1).uniform(1, 100, 50)
    assert ratio_interval(0.3 * others, others) == pytest.approx((0.3, 0.3))
    low, high = ratio_interval(np.random.default_rng(2).uniform(1, 100, 50), others)
    assert low < 1 < high


@pytest.mark.parametrize("values", [[0.25], [0.25] * 7, [0.0, 0.0]])
def test_values_that_are_all_equal_are_certain(values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert interval(values) == (values[0], values[0])
        assert ratio_interval([1.0] * len(values), [4.0] * len(values)) == (0.25, 0.25)


def test_intervals_are_those_of_published_rows():
    """Of the percentiles of 2,000 means over examples drawn by numpy's generator of seed 0."""
    values = np.random.default_rng(3).exponential(1, 60)
    rows = np.random.default_rng(0).integers(0, 60, (2000, 60))
    assert interval(values) == pytest.approx(np.quantile(values[rows].mean(1), (0.025, 0.975)))
