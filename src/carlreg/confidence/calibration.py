"""From evidence to a probability of failure and an expected error: a readable model, stored beside the weights.

A logistic model and a log-linear one, each on a handful of numbers that grow with the risk, with weights that are not
negative: more of any of them never makes a verdict better. Imports numpy alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.confidence.numbers import LOCAL, NUMBERS, SMOOTH, numbers_of
from carlreg.errors import InputError

Vector = npt.NDArray[np.float64]
SUFFIX = ".confidence.json"
SCHEMA = 1


@dataclass(frozen=True)
class Linear:
    """intercept + Σ weight · (number − centre) / scale."""

    names: tuple[str, ...]
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float

    def __call__(self, numbers: Mapping[str, float]) -> float:
        """NaN if one of the numbers is missing."""
        terms = zip(self.names, self.centre, self.scale, self.weights, strict=True)
        return self.intercept + sum(w * (numbers.get(name, math.nan) - c) / s for name, c, s, w in terms)

    def apply(self, table: Vector) -> Vector:
        """(N, numbers) → (N,)."""
        return self.intercept + ((table - np.array(self.centre)) / np.array(self.scale)) @ np.array(self.weights)


@dataclass(frozen=True)
class Steps:
    """A monotone function given by its values at some points, linear between them and constant beyond."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __call__(self, value: float) -> float:
        return float(np.interp(value, self.x, self.y))


@dataclass(frozen=True)
class Calibration:
    """What evidence is worth, for the results of one model."""

    model: str
    """Checksum of the model file, or "none" for registration without a network."""
    failure: tuple[Linear, ...]
    """Log odds of failure, the model of most evidence first; the first whose evidence is complete counts."""
    error: tuple[tuple[Linear, Steps], ...]
    """Logarithm of the error as a fraction of the foreground's extent, and its correction."""
    good: float
    """A probability of failure below this is good."""
    failed: float
    """A probability of failure above this is failed."""
    usual: Mapping[str, float] = field(default_factory=dict)
    """The 95th percentile of each number among registrations that did not fail."""
    median: Mapping[str, float] = field(default_factory=dict)
    """The median of each number among them."""
    local: Linear | None = None
    """Logarithm of the error at a point, as a fraction of the extent."""
    kinds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Mean pooled features of each kind of scan in training."""
    deviation: Sequence[float] = ()
    """Standard deviation of the features within a kind."""
    made: Mapping[str, Any] = field(default_factory=dict)
    """How, when and from how many rows it was fitted."""

    def probability(self, numbers: Mapping[str, float]) -> float:
        """The probability of failure; NaN without the evidence for it."""
        odds = next((value for model in self.failure if math.isfinite(value := model(numbers))), math.nan)
        return 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0))) if math.isfinite(odds) else math.nan

    def expected_error(self, numbers: Mapping[str, float], extent_mm: float) -> float:
        """The expected error in mm; NaN without the evidence for it."""
        for model, steps in self.error:
            if math.isfinite(value := model(numbers)):
                return math.exp(steps(value)) * extent_mm
        return math.nan

    def unusual(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """By how much each number exceeds what is usual, in steps from the median to the 95th percentile."""
        found = {}
        for name, limit in self.usual.items():
            excess = (numbers.get(name, math.nan) - limit) / max(limit - self.median.get(name, limit), 1e-3)
            if excess > 0:
                found[name] = excess
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "good": self.good,
            "failed": self.failed,
            "failure": [_rounded(vars(one)) for one in self.failure],
            "error": [{"linear": _rounded(vars(one)), "steps": _rounded(vars(steps))} for one, steps in self.error],
            "local": None if self.local is None else _rounded(vars(self.local)),
            "usual": _rounded(self.usual),
            "median": _rounded(self.median),
            "kinds": _rounded(self.kinds),
            "deviation": _rounded(self.deviation),
            "made": dict(self.made),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        return cls(
            model=str(values["model"]),
            failure=tuple(_linear(one) for one in values["failure"]),
            error=tuple((_linear(one["linear"]), Steps(**_tuples(one["steps"]))) for one in values["error"]),
            good=float(values["good"]),
            failed=float(values["failed"]),
            usual=dict(values["usual"]),
            median=dict(values["median"]),
            local=_linear(values["local"], local=True) if values.get("local") else None,
            kinds=dict(values["kinds"]),
            deviation=list(values["deviation"]),
            made=dict(values.get("made", {})),
        )


def read_calibration(path: Path) -> Calibration:
    try:
        return Calibration.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a calibration ({error}); expected what experiments/confidence writes"
        ) from error


def _linear(values: Mapping[str, Any], *, local: bool = False) -> Linear:
    known = {*LOCAL, *(SMOOTH + name for name in LOCAL)} if local else NUMBERS.keys()
    if unknown := [name for name in values["names"] if name not in known]:
        raise ValueError(f"unknown number {unknown[0]!r}")
    return Linear(**_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- fitting --------------------------------------------------------------------------------------------------------


def fit_logistic(table: Vector, failed: Vector, names: Sequence[str], *, ridge: float = 0.02) -> Linear:
    """Log odds of failure on numbers (N, D) that grow with the risk. Both classes have the same weight."""
    centre, scale = table.mean(0), np.maximum(table.std(0), 1e-6)
    x = (table - centre) / scale
    sign = np.where(failed > 0, 1.0, -1.0)
    share = np.where(failed > 0, 0.5 / max(failed.sum(), 1), 0.5 / max((1 - failed).sum(), 1))

    def gradient(weights: Vector, intercept: float) -> tuple[Vector, float]:
        pull = -sign * share / (1 + np.exp(np.clip(sign * (x @ weights + intercept), -50, 50)))
        return x.T @ pull + ridge * weights, float(pull.sum())

    weights, intercept = _descend(gradient, x)
    # Odds in the sample, instead of odds of classes with the same weight.
    prior = math.log(max(failed.sum(), 1) / max((1 - failed).sum(), 1))
    return Linear(tuple(names), tuple(centre), tuple(scale), tuple(weights), intercept + prior)


def fit_log_linear(table: Vector, target: Vector, names: Sequence[str], *, ridge: float = 0.02) -> Linear:
    """Least squares on numbers (N, D), with weights that are not negative."""
    centre, scale = table.mean(0), np.maximum(table.std(0), 1e-6)
    x = (table - centre) / scale

    def gradient(weights: Vector, intercept: float) -> tuple[Vector, float]:
        missed = (x @ weights + intercept - target) / len(target)
        return x.T @ missed + ridge * weights, float(missed.sum())

    weights, intercept = _descend(gradient, x)
    return Linear(tuple(names), tuple(centre), tuple(scale), tuple(weights), intercept)


def _descend(
    gradient: Callable[[Vector, float], tuple[Vector, float]], x: Vector, steps: int = 20000
) -> tuple[Vector, float]:
    """Projected gradient descent: the weights stay at 0 or above."""
    rate = 1.0 / (1.0 + float(np.linalg.norm(x.T @ x / len(x), 2)))
    weights, intercept = np.zeros(x.shape[1]), 0.0
    for _ in range(steps):
        by_weights, by_intercept = gradient(weights, intercept)
        moved = np.maximum(weights - rate * by_weights, 0)
        change = float(np.abs(moved - weights).max(initial=0)) + abs(rate * by_intercept)
        weights, intercept = moved, intercept - rate * by_intercept
        if change < 1e-7:
            break
    return weights, intercept


def fit_isotonic(predicted: Vector, target: Vector, *, least: int = 20) -> Steps:
    """The monotone function of the prediction closest to the target, by pooling neighbours that violate the order, in
    blocks of at least so many."""
    order = np.argsort(predicted, kind="stable")
    blocks: list[list[float]] = []  # sum of predictions, sum of targets, count
    for x, y in zip(predicted[order], target[order], strict=True):
        blocks.append([float(x), float(y), 1.0])
        while len(blocks) > 1 and (
            blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2] or blocks[-2][2] < min(least, len(order))
        ):
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    if len(blocks) > 1 and blocks[-1][2] < least:
        last = blocks.pop()
        blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
    return Steps(tuple(x / n for x, _, n in blocks), tuple(y / n for _, y, n in blocks))


def auroc(score: Vector, failed: Vector) -> float:
    """The probability that a failure has a higher score than a success; ties count half."""
    values, inverse = np.unique(score, return_inverse=True)
    bad = np.bincount(inverse, failed, len(values))
    well = np.bincount(inverse, 1 - failed, len(values))
    below = np.concatenate([[0.0], np.cumsum(well)[:-1]])
    pairs = failed.sum() * (1 - failed).sum()
    return float((bad * (below + well / 2)).sum() / pairs) if pairs else math.nan


__all__ = ["NUMBERS", "Calibration", "Linear", "Steps", "auroc", "numbers_of", "read_calibration"]
