"""Means and tests over pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


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


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
