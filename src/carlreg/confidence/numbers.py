"""The numbers that calibration sees: evidence without a unit, each growing with the risk. Imports numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

LEAST = 1e-3
"""Distances below this fraction of the foreground's extent count as this."""

SMOOTH = {"smooth_": 0.03, "wide_": 0.08}
"""What precedes the name of local evidence that is averaged over Gaussian windows, and their deviation as a fraction of
the longest side."""
SHARES = {"dissimilarity": "similarity", "no_excess": "excess", "mismatch": "likeness"}
"""Local numbers that are 1 minus a share, and where that share is found. All others are distances."""
LOCAL = (
    "network_disagreement",
    "disagreement",
    "turn",
    "shift",
    "scatter",
    "opinion",
    "spread",
    "attention",
    "moved",
    "deformation",
    "stretch",
    "residual",
    "flatness",
    "drift",
    "feature_drift",
    *SHARES,
)
"""Names of local evidence."""


def split_name(name: str) -> tuple[float, str]:
    """The windows that local evidence is averaged over, 0 for none, and its plain name."""
    for prefix, window in SMOOTH.items():
        if name.startswith(prefix):
            return window, name.removeprefix(prefix)
    return 0.0, name


Values = Mapping[str, float]


def _relative(name: str) -> Callable[[Values], float]:
    """The logarithm of a distance as a fraction of the extent."""

    def number(evidence: Values) -> float:
        value, extent = evidence.get(name, math.nan), evidence.get("extent_mm", math.nan)
        return math.log(max(value / extent, LEAST)) if extent > 0 and not math.isnan(value) else math.nan

    return number


def _moved(evidence: Values) -> float:
    """Only of what was optimised."""
    return _relative("moved_mm")(evidence) if "gain" in evidence else math.nan


def _missing(name: str) -> Callable[[Values], float]:
    """1 minus a share."""
    return lambda evidence: 1 - evidence.get(name, math.nan)


def _percent(name: str) -> Callable[[Values], float]:
    return lambda evidence: math.log1p(max(evidence.get(name, math.nan), 0)) if name in evidence else math.nan


def _logarithm(name: str) -> Callable[[Values], float]:
    return lambda evidence: math.log(max(evidence[name], 1e-3)) if name in evidence else math.nan


def _plain(name: str) -> Callable[[Values], float]:
    return lambda evidence: evidence.get(name, math.nan)


NUMBERS: dict[str, Callable[[Values], float]] = {
    "disagreement": _relative("disagreement_mm"),
    "network_disagreement": _relative("network_disagreement_mm"),
    "turn": _relative("turn_mm"),
    "turn_95": _relative("turn_95_mm"),
    "shift": _relative("shift_mm"),
    "shift_95": _relative("shift_95_mm"),
    "spread": _relative("spread_mm"),
    "moved": _moved,
    "entropy": _plain("entropy"),
    "dissimilarity": _missing("similarity"),
    "no_excess": _missing("similarity_excess"),
    "contrast": _missing("agreement"),
    "uncovered": _missing("covered"),
    "no_overlap": _missing("overlap"),
    "folds": _percent("coarse_folds_percent"),
    "extreme": _percent("extreme_percent"),
    "volume": _logarithm("volume"),
    "gain": _plain("gain"),
    "residual": _relative("residual_mm"),
    "deformation": _relative("deformation_mm"),
    "attention": _relative("attention_mm"),
    "surprise": _plain("surprise"),
    "misorientation": _plain("misorientation"),
    "scatter": _relative("scatter_mm"),
    "opinion": _relative("opinion_mm"),
    "network_dissimilarity": _missing("network_similarity"),
    "no_gain": _missing("similarity_gain"),
    "no_information": _missing("information_excess"),
    "drift": _relative("drift_mm"),
    "strain": _plain("strain"),
    "mismatch": _missing("feature_excess"),
    "feature_drift": _relative("feature_drift_mm"),
    "novelty": _logarithm("novelty"),
    "kinship": _logarithm("kinship"),
}
"""By name; NaN where the evidence is missing."""


def numbers_of(evidence: Values) -> dict[str, float]:
    return {name: number(evidence) for name, number in NUMBERS.items()}
