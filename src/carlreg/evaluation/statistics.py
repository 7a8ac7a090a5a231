"""Means and tests over pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Comparison:
    """One method minus another, in one figure, on the pairs that both have."""

    first: str
    second: str
    figure: str
    pairs: int
    mean_difference: float
    interval: tuple[float, float]
    """95 % confidence interval, by bootstrap over pairs."""
    p: float
    """p-value of a two-sided sign-flip permutation test of the differences."""
    won: int
    """The number of pairs on which the first method is better."""


def compare(first: str, second: str, figure: str, differences: Iterable[float]) -> Comparison | None:
    """Compare two methods by their differences on common pairs; None if there are none. NaN is left out."""
    finite = np.array([value for value in differences if math.isfinite(value)])
    if not len(finite):
        return None
    means = np.random.default_rng(0).choice(finite, (10_000, len(finite))).mean(axis=1)
    low, high = (float(x) for x in np.percentile(means, [2.5, 97.5]))
    won = int((finite > 0 if figure == "dice" else finite < 0).sum())
    mean_difference, p = float(finite.mean()), sign_flip_test(finite)
    return Comparison(first, second, figure, len(finite), mean_difference, (low, high), p, won)


def sign_flip_test(differences: np.ndarray[Any, Any]) -> float:
    """Two-sided p that the mean is 0: how often random signs give one as far off. Exact for up to 13 differences."""
    count = len(differences)
    if count <= 13:
        signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (20_000, count))
        signs[0] = 1
    means = np.abs((signs * differences).mean(axis=1))
    return float((means >= abs(differences.mean()) - 1e-12).mean())


def mean(values: Iterable[float]) -> float:
    """The mean of the values that are not NaN."""
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


def or_none(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return None if math.isnan(value) else value
