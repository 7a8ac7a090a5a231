"""The verdict: good, doubtful, failed or unknown, with reasons that a user can act on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from carlreg.confidence.calibration import SUFFIX, Calibration, read_calibration
from carlreg.confidence.evidence import Evidence, mahalanobis
from carlreg.confidence.gather import Gathered
from carlreg.confidence.numbers import numbers_of
from carlreg.errors import InputError
from carlreg.files.results import Confidence, Verdict
from carlreg.model.loaded import NONE, LoadedModel
from carlreg.model.shipped import WEIGHTS

MOST_REASONS = 3


@dataclass(frozen=True)
class Circumstances:
    """What of a registration decides whether its evidence can be judged, and how reasons are worded."""

    model_name: str
    transform: str = "deformable"
    dim: int = 3
    io_sim: str | None = None


def find_calibration(model: LoadedModel) -> tuple[Calibration | None, str]:
    """The calibration of a model, or None and the reason why there is none."""
    name = NONE if model.searches_affine else str(model.provenance.get("name"))
    source = WEIGHTS / f"{NONE}.safetensors" if model.searches_affine else model.source
    path = None if source is None else source.with_name(source.stem + SUFFIX)
    if path is None or not path.is_file():
        return None, f"no calibration was made for the model {name}"
    try:
        calibration = read_calibration(path)
    except InputError as error:
        return None, str(error)
    if calibration.model != (NONE if model.searches_affine else model.provenance.get("sha256")):
        return None, f"the calibration was made for another version of {name}"
    return calibration, ""


def judge(gathered: Gathered, calibration: Calibration | None, about: Circumstances, why: str = "") -> Confidence:
    """A verdict on a registration; unknown, with the reason, where nothing was calibrated."""
    evidence = gathered.evidence
    if calibration is not None:
        evidence = with_features(evidence, gathered.features, calibration)
    unknown = Confidence(verdict="unknown", evidence=evidence.to_json())
    if about.dim == 1:
        return replace(unknown, reasons=("images with one axis cannot be judged",))
    if about.transform != "deformable":
        reason = f"only deformable transforms can be judged, and this one is {about.transform}"
        return replace(unknown, reasons=(reason,))
    if calibration is None:
        return replace(unknown, reasons=(why,))
    if about.dim != 3 and calibration.model == NONE:
        return replace(unknown, reasons=("without a network, only volumes can be judged",))
    numbers = numbers_of(evidence.to_json()) | beyond_usual(evidence, gathered.features, calibration)
    probability = calibration.probability(numbers)
    if math.isnan(probability):
        return replace(unknown, reasons=("too little evidence could be computed",))
    error = calibration.expected_error(numbers, evidence.extent_mm)
    verdict: Verdict = (
        "good" if probability < calibration.good else "failed" if probability > calibration.failed else "doubtful"
    )
    found = reasons(evidence, calibration.unusual(numbers), about) if verdict != "good" else []
    if verdict != "good" and not found:
        found = ["no single number is unusual, but together they are"]
    return Confidence(
        verdict=verdict,
        expected_error_mm=error if math.isfinite(error) else None,
        failure_probability=probability,
        reasons=tuple(found),
        evidence=evidence.to_json(),
    )


def with_features(evidence: Evidence, features: tuple[Tensor, Tensor] | None, calibration: Calibration) -> Evidence:
    """Add the distances of the pooled features from those of training, and from one another."""
    if features is None or not (apart := distances(features, calibration)):
        return evidence
    novelty = max(min(one.values()) for one in apart)
    deviation = torch.tensor(list(calibration.deviation), dtype=torch.float64)
    fixed, moving = (one.double().cpu() for one in features)
    return replace(evidence, novelty=novelty, kinship=mahalanobis(fixed, moving, deviation))


def beyond_usual(
    evidence: Evidence, features: tuple[Tensor, Tensor] | None, calibration: Calibration
) -> dict[str, float]:
    """Numbers compared with what is usual for the two kinds of scans that the features resemble most."""
    if features is None or calibration.typical is None or not (apart := distances(features, calibration)):
        return {}
    fixed, moving = (min(one, key=one.__getitem__) for one in apart)
    return calibration.typical.beyond(numbers_of(evidence.to_json()), fixed, moving)


def distances(features: tuple[Tensor, Tensor], calibration: Calibration) -> list[dict[str, float]]:
    """How far the pooled features of each scan are from those of each kind; empty if they cannot be compared."""
    if not calibration.kinds or len(calibration.deviation) != len(features[0]):
        return []
    deviation = torch.tensor(list(calibration.deviation), dtype=torch.float64)
    means = {kind: torch.tensor(list(mean), dtype=torch.float64) for kind, mean in calibration.kinds.items()}
    return [
        {kind: mahalanobis(one.double().cpu(), mean, deviation) for kind, mean in means.items()} for one in features
    ]


def reasons(evidence: Evidence, unusual: Mapping[str, float], about: Circumstances) -> list[str]:
    """The most unusual evidence, in words."""
    order = sorted(unusual, key=lambda name: -unusual[name])
    return list(dict.fromkeys(text for name in order if (text := _word(name, evidence, about))))[:MOST_REASONS]


def _word(name: str, evidence: Evidence, about: Circumstances) -> str:
    apart = [mm for mm in (evidence.disagreement_mm, evidence.network_disagreement_mm) if not math.isnan(mm)]
    values = vars(evidence) | {
        "model": about.model_name,
        "apart_mm": max(apart, default=math.nan),
        "uncovered_percent": 100 * (1 - evidence.covered),
        "overlap_percent": 100 * evidence.overlap,
        "gain_percent": 100 * evidence.gain,
        "factor": math.exp(evidence.strain),
        "advice": ": use --io-sim mind, or leave it at auto" if about.io_sim in ("lncc", "ssd") else "",
    }
    return WORDS.get(name, "").format(**values)


_DIRECTIONS = "the two directions disagree by {apart_mm:.1f} mm"
_TURN = "the answer changes by {turn_mm:.1f} mm if the moving image is turned slightly"
_SHIFT = "the answer changes by {shift_mm:.1f} mm if the moving image is shifted slightly"
_ATTENTION = "attention is spread over {spread_mm:.0f} mm: the network found no clear matches"
_ALIKE = "the registered images are hardly more similar than in wrong alignments"
_VOLUME = "volumes change by more than a factor of 4 in {extreme_percent:.1f} % of the image"
WORDS = {
    "disagreement": _DIRECTIONS,
    "network_disagreement": _DIRECTIONS,
    "turn": _TURN,
    "turn_95": _TURN,
    "shift": _SHIFT,
    "shift_95": _SHIFT,
    "spread": _ATTENTION,
    "entropy": _ATTENTION,
    "dissimilarity": _ALIKE,
    "no_excess": _ALIKE,
    "contrast": "the two contrasts differ{advice}",
    "uncovered": "no common anatomy in {uncovered_percent:.0f} % of the fixed image",
    "no_overlap": "the outlines of the two scans overlap by {overlap_percent:.0f} % only",
    "folds": _VOLUME,
    "extreme": _VOLUME,
    "volume": _VOLUME,
    "gain": "the optimisation removed {gain_percent:.0f} % of the loss: the network was far off",
    "moved": "the optimisation moved the network's answer by {moved_mm:.1f} mm",
    "residual": "structures still seem to be {residual_mm:.1f} mm apart",
    "attention": "the result is {attention_mm:.1f} mm from where the network's attention points",
    "surprise": "the network's attention points elsewhere",
    "scatter": "the network's answers differ by {scatter_mm:.1f} mm if the moving image is shifted or turned slightly",
    "opinion": "the result is {opinion_mm:.1f} mm from what the network answers on average",
    "network_dissimilarity": "the network's own result does not make the images similar",
    "no_gain": "the registered images are hardly more similar than before",
    "no_information": _ALIKE,
    "drift": "structures match as well {drift_mm:.1f} mm away",
    "strain": "a direction is stretched or shrunk by a factor of {factor:.1f}",
    "mismatch": "the network sees different anatomy at corresponding places",
    "feature_drift": "the network sees as good a match {feature_drift_mm:.1f} mm away",
    "misorientation": "the scans are more alike if one is mirrored or turned: check the headers",
    "novelty": "outside what {model} was trained on",
    "kinship": "the two scans seem to show different anatomy, or very different contrasts",
}
"""What each number means to a user."""
