"""The scores of one method on one pair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from carlreg.errors import InputError, user_message
from carlreg.evaluation.sources import Method, Result, WorldMap
from carlreg.evaluation.statistics import or_none
from carlreg.files import images, world_transform
from carlreg.files.images import Image, Matrix, check_same_grid, map_points
from carlreg.files.tables import SIDES, Pair
from carlreg.files.world_transform import WorldTransform
from carlreg.objective.metrics import dice, hd95, mean_score
from carlreg.paper_data.dataset import PLAIN, Dataset

FIGURES = {
    "dice": "Dice",
    "hd95_mm": "HD95, mm",
    "tre_mm": "TRE, mm",
    "folds_percent": "% |J| < 0",
    "sd_log_jacobian": "SDlogJ",
    "inverse_consistency_mm": "inverse, mm",
    "seconds": "s",
    "peak_gib": "GiB",
}
"""The figures of each pair, with their headings in a table."""


@dataclass
class Scores:
    """The scores of one method on one pair; NaN where there was nothing to measure."""

    method: str
    pair: str
    figures: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, math.nan))
    dice: dict[int, float] = field(default_factory=dict)
    hd95_mm: dict[int, float] = field(default_factory=dict)
    tre_mm: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def noting_failures(self, prefix: str = "") -> Iterator[None]:
        """Record the message of an error that a user can act on, and continue; raise anything else, which is a bug."""
        try:
            yield
        except Exception as error:
            text = user_message(error)
            if text is None:
                raise
            self.failures.append(prefix + text)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {
            "method": self.method,
            "pair": self.pair,
            **{key: or_none(value) for key, value in self.figures.items()},
            "dice_per_label": {str(label): or_none(value) for label, value in self.dice.items()},
            "hd95_mm_per_label": {str(label): or_none(value) for label, value in self.hd95_mm.items()},
            "tre_mm_per_landmark": [or_none(error) for error in self.tre_mm],
            "failures": self.failures,
        }


def score(
    pair: Pair,
    method: Method,
    *,
    name: str = "",
    labels: Sequence[int] | None = None,
    partial: bool = False,
    dataset: Dataset = PLAIN,
) -> Scores:
    """Measure a method on a pair. What cannot be measured is described in `failures`; the other figures are there.

    `labels` are those to score, by default all but 0 that occur. A label that only one of the two maps has is not
    scored, as in Learn2Reg, and is a failure unless `partial`. One that the transform loses has Dice 0 and no HD95.
    `dataset` knows how to read the pair's files.
    """
    scores = Scores(name, pair.name)
    with scores.noting_failures():
        fixed, moving = dataset.read_image(pair.fixed), dataset.read_image(pair.moving)
        if fixed.dim != moving.dim:
            raise InputError(f"the fixed image is {fixed.dim}-D and the moving one {moving.dim}-D; expected the same")
        result = method(pair, fixed, moving)
        dense = result.transform
        if not isinstance(dense, WorldTransform):  # anything but affine maps and one field is sampled
            dense = world_transform.sample(dense, fixed, np.eye(fixed.dim + 1))
        scores.figures |= {"seconds": result.seconds, "peak_gib": result.peak_gib}
        with scores.noting_failures():
            _score_labels(scores, pair, (fixed, moving), dense, labels, partial)
        with scores.noting_failures():
            _score_landmarks(scores, pair, (fixed, moving), result.transform, dataset)
        with scores.noting_failures():
            determinants = world_transform.jacobian_determinant(dense, fixed, mirrored=result.mirrored)
            scores.figures["folds_percent"] = world_transform.folds_percent(determinants)
            scores.figures["sd_log_jacobian"] = world_transform.sd_log_jacobian(determinants)
        with scores.noting_failures("inverse consistency: "):
            scores.figures["inverse_consistency_mm"] = _inverse_consistency(result, fixed, moving)
    return scores


def _score_labels(
    scores: Scores,
    pair: Pair,
    scans: tuple[Image, Image],
    transform: WorldTransform,
    labels: Sequence[int] | None,
    partial: bool,
) -> None:
    files = _both("labels", pair.fixed_seg, pair.moving_seg)
    if files is None:
        return
    maps = dict(zip(SIDES, (images.read_labels(path) for path in files), strict=True))
    for map_, scan in zip(maps.values(), scans, strict=True):
        check_same_grid(map_, scan, "labels")
    present = {side: set(np.unique(map_.data).tolist()) - {0} for side, map_ in maps.items()}
    wanted = sorted(set().union(*present.values())) if labels is None else list(labels)
    missing = {label: [side for side in SIDES if label not in present[side]] for label in wanted}
    if not partial:
        lists = {label: " and the ".join(sides) for label, sides in missing.items() if sides}
        scores.failures += [f"label {label} is missing from the {sides} labels" for label, sides in lists.items()]
    common = [label for label in wanted if not missing[label]]
    moved = world_transform.apply(transform, maps["moving"], maps["fixed"], "nearest")
    warped, target = (torch.from_numpy(map_.data.astype(np.int32))[None, None] for map_ in (moved, maps["fixed"]))
    scores.dice = dice(warped, target, common)
    scores.hd95_mm = {label: hd95(warped, target, label, spacing=maps["fixed"].spacing) for label in common}
    scores.figures |= {"dice": mean_score(scores.dice), "hd95_mm": mean_score(scores.hd95_mm)}


def _score_landmarks(
    scores: Scores, pair: Pair, scans: tuple[Image, Image], transform: WorldMap, dataset: Dataset
) -> None:
    files = _both("landmarks", pair.fixed_landmarks, pair.moving_landmarks)
    if files is None:
        return
    of_fixed, of_moving = (dataset.read_landmarks(file, scan) for file, scan in zip(files, scans, strict=True))
    if len(of_fixed) != len(of_moving):
        counts = f"{len(of_fixed)} fixed and {len(of_moving)} moving landmarks"
        raise InputError(f"there are {counts}; expected the same number, in the same order")
    for side, points, scan in zip(SIDES, (of_fixed, of_moving), scans, strict=True):
        outside = np.flatnonzero(~_inside(points, scan))
        if len(outside):
            position = ", ".join(f"{x:.1f}" for x in points[outside[0]])
            raise InputError(
                f"{len(outside)} {side} landmarks lie outside the image, the first of them (number {outside[0] + 1}) "
                f"at ({position}) mm; expected LPS millimetres"
            )
    errors = np.linalg.norm(transform(of_fixed) - of_moving, axis=-1)
    scores.tre_mm = [float(error) for error in errors]
    scores.figures["tre_mm"] = float(errors.mean())


def _both(what: str, fixed: Path | None, moving: Path | None) -> tuple[Path, Path] | None:
    """The files of both images, or None if there are none."""
    if fixed is None and moving is None:
        return None
    if fixed is None or moving is None:
        side = "fixed" if fixed is None else "moving"
        raise InputError(f"{what} are missing for the {side} image; expected them for both images, or for neither")
    return fixed, moving


def _inside(points: Matrix, image: Image) -> npt.NDArray[np.bool_]:
    """Which points (N, D) lie in a voxel of the image."""
    index = map_points(np.linalg.inv(image.affine), points)
    return np.asarray(((index >= -0.5) & (index <= np.array(image.shape) - 0.5)).all(axis=-1))


def _inverse_consistency(result: Result, fixed: Image, moving: Image) -> float:
    """As the method reports it, or else the mean |S(T(x)) − x| in mm for its inverse S, over a lattice of about 30
    points a side, where T(x) lies in the moving image. NaN without an inverse."""
    if result.inverse is None or not math.isnan(result.inverse_consistency_mm):
        return result.inverse_consistency_mm
    axes = (np.arange(0, n, max(1, n // 30)) for n in fixed.shape)
    index = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, fixed.dim)
    points = map_points(fixed.affine, index)
    moved = result.transform(points)
    inside = _inside(moved, moving)
    if not inside.any():
        return math.nan
    return float(np.linalg.norm(result.inverse(moved[inside]) - points[inside], axis=-1).mean())
