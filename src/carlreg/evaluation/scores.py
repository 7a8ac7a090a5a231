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
from torch import Tensor

from carlreg.errors import InputError, user_message
from carlreg.evaluation.sources import Method, Result, WorldMap
from carlreg.evaluation.statistics import or_none
from carlreg.files import images, world_transform
from carlreg.files.images import Image, Matrix, check_same_grid, map_points
from carlreg.files.tables import Pair
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
            "dice_per_label": {str(label): or_none(score) for label, score in self.dice.items()},
            "hd95_mm_per_label": {str(label): or_none(score) for label, score in self.hd95_mm.items()},
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
        dense = _dense(result.transform, fixed)
        scores.figures |= {"seconds": result.seconds, "peak_gib": result.peak_gib}
        with scores.noting_failures():
            _score_labels(scores, pair, fixed, moving, dense, labels, partial)
        with scores.noting_failures():
            _score_landmarks(scores, pair, fixed, moving, result.transform, dataset)
        with scores.noting_failures():
            _score_determinants(scores, dense, fixed)
        with scores.noting_failures("inverse consistency: "):
            scores.figures["inverse_consistency_mm"] = _inverse_consistency(result, fixed, moving)
    return scores


def _score_labels(
    scores: Scores,
    pair: Pair,
    fixed: Image,
    moving: Image,
    transform: WorldTransform,
    labels: Sequence[int] | None,
    partial: bool,
) -> None:
    files = _both("labels", pair.fixed_seg, pair.moving_seg)
    if files is None:
        return
    fixed_map, moving_map = (images.read_labels(path) for path in files)
    check_same_grid(fixed_map, fixed, "labels")
    check_same_grid(moving_map, moving, "labels")
    present = {"fixed": _labels_in(fixed_map), "moving": _labels_in(moving_map)}
    wanted = sorted(present["fixed"] | present["moving"]) if labels is None else list(labels)
    for label in wanted:
        missing = [side for side in present if label not in present[side]]
        if missing and not partial:
            scores.failures.append(f"label {label} is missing from the {' and the '.join(missing)} labels")
    common = [label for label in wanted if label in present["fixed"] and label in present["moving"]]
    warped = _label_tensor(world_transform.apply(transform, moving_map, fixed_map, "nearest"))
    target = _label_tensor(fixed_map)
    scores.dice = dice(warped, target, common)
    scores.hd95_mm = {label: hd95(warped, target, label, spacing=fixed_map.spacing) for label in common}
    scores.figures |= {"dice": mean_score(scores.dice), "hd95_mm": mean_score(scores.hd95_mm)}


def _score_landmarks(
    scores: Scores, pair: Pair, fixed: Image, moving: Image, transform: WorldMap, dataset: Dataset
) -> None:
    files = _both("landmarks", pair.fixed_landmarks, pair.moving_landmarks)
    if files is None:
        return
    of_fixed, of_moving = dataset.read_landmarks(files[0], fixed), dataset.read_landmarks(files[1], moving)
    if len(of_fixed) != len(of_moving):
        counts = f"{len(of_fixed)} fixed and {len(of_moving)} moving landmarks"
        raise InputError(f"there are {counts}; expected the same number, in the same order")
    _check_inside("fixed", of_fixed, fixed)
    _check_inside("moving", of_moving, moving)
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


def _check_inside(side: str, points: Matrix, image: Image) -> None:
    outside = ~_inside(points, image)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise InputError(
            f"{int(outside.sum())} {side} landmarks lie outside the image, the first of them (number {first + 1}) at "
            f"({', '.join(f'{x:.1f}' for x in points[first])}) mm; expected LPS millimetres"
        )


def _inside(points: Matrix, image: Image) -> npt.NDArray[np.bool_]:
    """Which points (N, D) lie in a voxel of the image."""
    index = map_points(np.linalg.inv(image.affine), points)
    return np.asarray(((index >= -0.5) & (index <= np.array(image.shape) - 0.5)).all(axis=-1))


def _score_determinants(scores: Scores, transform: WorldTransform, fixed: Image) -> None:
    determinants = world_transform.jacobian_determinant(transform, fixed)
    scores.figures["folds_percent"] = world_transform.folds_percent(determinants)
    scores.figures["sd_log_jacobian"] = world_transform.sd_log_jacobian(determinants)


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


def _dense(transform: WorldMap, fixed: Image) -> WorldTransform:
    """Anything but affine maps and one field is sampled on the fixed grid."""
    if isinstance(transform, WorldTransform):
        return transform
    return world_transform.sample(transform, fixed, np.eye(fixed.dim + 1))


def _labels_in(labels: Image) -> set[int]:
    return set(np.unique(labels.data).tolist()) - {0}


def _label_tensor(labels: Image) -> Tensor:
    return torch.from_numpy(labels.data.astype(np.int32))[None, None]
