"""95% bootstrap intervals of means over examples, by the percentile method; the same for the same values."""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

_NUM_SAMPLES = 2000


def interval(values: npt.ArrayLike) -> tuple[float, float]:
    """Return the interval of the mean: of one value that value, of none not a number."""
    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        only = float(array[0]) if len(array) else float("nan")
        return only, only
    return _bounds((array,), np.mean)


def ratio_interval(values: npt.ArrayLike, others: npt.ArrayLike) -> tuple[float, float]:
    """Return the interval of the ratio of two means over the same examples (paired)."""
    pair = np.asarray(values, dtype=float), np.asarray(others, dtype=float)
    if len(pair[0]) < 2:
        only = float(pair[0][0] / pair[1][0])
        return only, only
    return _bounds(pair, lambda x, y, axis: np.mean(x, axis) / np.mean(y, axis), paired=True)


def _bounds(data: tuple[npt.NDArray[np.float64], ...], statistic: Any, **how: Any) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    found = bootstrap(data, statistic, n_resamples=_NUM_SAMPLES, method="percentile", vectorized=True, rng=rng, **how)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
