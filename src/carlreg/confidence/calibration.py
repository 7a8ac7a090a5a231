"""From evidence to a probability of failure and an expected error: a readable model, stored beside the weights.

A logistic model and a log-linear one, each on a handful of numbers that grow with the risk, with weights that are not
negative: more of any of them never makes a verdict better. Imports numpy alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.confidence.numbers import LOCAL, NUMBERS, numbers_of, split_name
from carlreg.errors import InputError

Vector = npt.NDArray[np.float64]
SUFFIX = ".confidence.json"
SCHEMA = 1
BEYOND = "beyond_"
"""What precedes the name of a number that is compared with the usual one for two kinds of scans."""


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
class Typical:
    """What is usual for registrations of intact pairs of each two kinds of scans: brains and hearts differ."""

    medians: Mapping[str, Mapping[str, float]]
    """Medians of some numbers for the kinds of the fixed and of the moving scan, by `pair_name`."""
    deviation: Mapping[str, float]
    """Standard deviations of these numbers from the medians."""

    def beyond(self, numbers: Mapping[str, float], fixed: str, moving: str) -> dict[str, float]:
        """By how much numbers exceed what is usual: ln(1 + deviations), 0 if they do not. Kinds that were never seen
        together are held to the stricter of their own standards."""
        own = [pair_name(fixed, moving)] if pair_name(fixed, moving) in self.medians else None
        names = own or [name for kind in (fixed, moving) if (name := pair_name(kind, kind)) in self.medians]
        known = [self.medians[name] for name in names] or list(self.medians.values())
        found = {}
        for name, deviation in self.deviation.items():
            excess = (numbers.get(name, math.nan) - min(one[name] for one in known)) / deviation
            found[BEYOND + name] = math.nan if math.isnan(excess) else math.log1p(max(excess, 0.0))
        return found


def pair_name(fixed: str, moving: str) -> str:
    return f"{fixed}, {moving}"


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
    typical: Typical | None = None
    """What is usual for each two of these kinds."""
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
            "typical": None if self.typical is None else _rounded(vars(self.typical)),
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
            typical=_typical(values["typical"]) if values.get("typical") else None,
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
    for name in values["names"]:
        _check(split_name(name)[1] if local else name.removeprefix(BEYOND), LOCAL if local else NUMBERS)
    return Linear(**_tuples(values))


def _typical(values: Mapping[str, Any]) -> Typical:
    deviation = {name: float(value) for name, value in dict(values["deviation"]).items()}
    medians = {
        pair: {name: float(dict(one)[name]) for name in deviation} for pair, one in dict(values["medians"]).items()
    }
    for name, value in deviation.items():
        _check(name, NUMBERS)
        if not value > 0:
            raise ValueError(f"the deviation of {name} is {value}, not positive")
    if not medians:
        raise ValueError("typical has no medians")
    return Typical(medians, deviation)


def _check(name: str, known: Container[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown number {name!r}")


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- fitting --------------------------------------------------------------------------------------------------------


def fit_logistic(
    table: Vector, failed: Vector, names: Sequence[str], *, ridge: float = 0.02, share: float | None = None
) -> Linear:
    """Log odds of failure on numbers (N, D) that grow with the risk, by Newton's method. Both classes have the same
    weight in the fit; the odds are those of a sample with this share of failures, that of the rows by default."""
    centre, scale = table.mean(0), np.maximum(table.std(0), 1e-6)
    x = np.column_stack([(table - centre) / scale, np.ones(len(table))])
    sign = np.where(failed > 0, 1.0, -1.0)
    weight = np.where(failed > 0, 0.5 / max(failed.sum(), 1), 0.5 / max((1 - failed).sum(), 1))
    pull = np.array([ridge] * table.shape[1] + [1e-9])

    def loss(values: Vector) -> float:
        return float(weight @ np.logaddexp(0, -sign * (x @ values)) + pull @ values**2 / 2)

    now = np.zeros(x.shape[1])
    for _ in range(100):
        wrong = 1 / (1 + np.exp(np.clip(sign * (x @ now), -50, 50)))
        curvature = x.T @ ((weight * np.maximum(wrong * (1 - wrong), 1e-6))[:, None] * x) + np.diag(pull)
        slope = pull * now - x.T @ (sign * weight * wrong)
        step = non_negative(curvature, curvature @ now - slope, free=1, start=now) - now
        while loss(now + step) > loss(now) + 1e-12 and np.abs(step).max() > 1e-7:
            step = step / 2
        now = now + step
        if np.abs(step).max() < 1e-6:
            break
    failures = failed.mean() if share is None else share
    prior = math.log(max(failures, 1e-6) / max(1 - failures, 1e-6))
    return Linear(tuple(names), tuple(centre), tuple(scale), tuple(now[:-1]), float(now[-1]) + prior)


def fit_log_linear(table: Vector, target: Vector, names: Sequence[str], *, ridge: float = 0.02) -> Linear:
    """Least squares on numbers (N, D), with weights that are not negative."""
    centre, scale = table.mean(0), np.maximum(table.std(0), 1e-6)
    x = (table - centre) / scale
    gram, towards = x.T @ x / len(x) + ridge * np.eye(x.shape[1]), x.T @ (target - target.mean()) / len(x)
    weights = non_negative(gram, towards)
    return Linear(tuple(names), tuple(centre), tuple(scale), tuple(weights), float(target.mean()))


def non_negative(gram: Vector, towards: Vector, *, free: int = 0, start: Vector | None = None) -> Vector:
    """The minimum of w·G w / 2 − t·w over weights that are not negative but for the last, free ones, one weight at a
    time."""
    weights = np.zeros(len(towards)) if start is None else start.copy()
    for _ in range(1000):
        before = weights.copy()
        for index in range(len(weights)):
            best = weights[index] + (towards[index] - gram[index] @ weights) / gram[index, index]
            weights[index] = best if index >= len(weights) - free else max(best, 0)
        if np.abs(weights - before).max(initial=0) < 1e-8:
            break
    return weights


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
