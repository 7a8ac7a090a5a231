"""The scores of one transform on one pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.evaluation.sources import BAD_INPUT, Method, WorldMap, _times
from carlreg.evaluation.statistics import _number
from carlreg.files import images, world_transform
from carlreg.files.images import Image, map_points
from carlreg.files.itk import itk_order, simpleitk
from carlreg.files.tables import Pair
from carlreg.files.world_transform import PointMap, WorldTransform
from carlreg.objective.metrics import dice, hd95, mean_score

# ---- one pair -------------------------------------------------------------------------------------------------------

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
"""What is measured of each pair, and its heading in a table."""


@dataclass
class Scores:
    """What was measured of one pair and one method; NaN where there was nothing to measure."""

    method: str
    pair: str
    figures: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, math.nan))
    dice: dict[int, float] = field(default_factory=dict)
    hd95_mm: dict[int, float] = field(default_factory=dict)
    tre_mm: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        return {
            "method": self.method,
            "pair": self.pair,
            **{key: _number(value) for key, value in self.figures.items()},
            "dice_per_label": {str(label): _number(score) for label, score in self.dice.items()},
            "hd95_mm_per_label": {str(label): _number(score) for label, score in self.hd95_mm.items()},
            "tre_mm_per_landmark": [_number(error) for error in self.tre_mm],
            "failures": self.failures,
        }


def score(
    pair: Pair, method: Method, *, name: str = "", labels: Sequence[int] | None = None, partial: bool = False
) -> Scores:
    """Measure a method on a pair. What cannot be measured is named in `failures`; the rest is there.

    `labels` are those to score, by default all but 0 that occur. A label that only one of the two maps has is not
    scored, as in Learn2Reg, and is a failure unless `partial`. One that the transform loses has Dice 0 and no HD95.
    """
    scores = Scores(name, pair.name)

    def attempt(measure: Callable[[], None]) -> bool:
        try:
            measure()
        except BAD_INPUT as error:
            scores.failures.append(" ".join(str(error).split()))
            return False
        return True

    found: dict[str, Any] = {}

    def load() -> None:
        found["fixed"], found["moving"] = pair.image("fixed"), pair.image("moving")
        if found["fixed"].dim != found["moving"].dim:
            raise ValueError(f"the fixed image is {found['fixed'].dim}-D, the moving one is not; expected the same")
        result = method(pair, found["fixed"], found["moving"])
        found["result"], found["dense"] = result, _dense(result.transform, found["fixed"])
        scores.figures.update(
            seconds=result.seconds,
            peak_gib=result.peak_gib,
            inverse_consistency_mm=result.inverse_consistency_mm,
        )

    if not attempt(load):
        return scores
    fixed, moving, result = found["fixed"], found["moving"], found["result"]
    attempt(lambda: _score_labels(scores, pair, fixed, moving, found["dense"], labels, partial))
    attempt(lambda: _score_landmarks(scores, pair, fixed, moving, result.transform))
    attempt(lambda: _score_determinants(scores, found["dense"], fixed))
    if result.inverse is not None and math.isnan(result.inverse_consistency_mm):
        error = _inconsistency(result.transform, result.inverse, fixed, moving)
        scores.figures["inverse_consistency_mm"] = error
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
    given = {"fixed": pair.fixed_seg, "moving": pair.moving_seg}
    if all(path is None for path in given.values()):
        return
    for side, path in given.items():
        if path is None:
            raise ValueError(f"there are labels on one side only, not for the {side} image; expected {side}_seg")
    assert pair.fixed_seg is not None
    assert pair.moving_seg is not None
    maps = {"fixed": images.read_labels(pair.fixed_seg), "moving": images.read_labels(pair.moving_seg)}
    for side, image in (("fixed", fixed), ("moving", moving)):
        if maps[side].shape != image.shape:
            raise ValueError(
                f"{maps[side].name} has {_times(maps[side].shape)} voxels; expected {_times(image.shape)}, as the "
                f"{side} image has"
            )
    present = {side: set(np.unique(map_.data).tolist()) - {0} for side, map_ in maps.items()}
    wanted = sorted(present["fixed"] | present["moving"]) if labels is None else list(labels)
    for label in wanted:
        missing = [side for side in maps if label not in present[side]]
        if missing and not partial:
            scores.failures.append(f"label {label} is missing from the {' and the '.join(missing)} labels")
    common = [int(label) for label in wanted if label in present["fixed"] and label in present["moving"]]
    warped = world_transform.apply(transform, maps["moving"], maps["fixed"], "nearest")
    first, second = _label_tensor(warped), _label_tensor(maps["fixed"])
    scores.dice = dice(first, second, common)
    scores.hd95_mm = {label: hd95(first, second, label, spacing=maps["fixed"].spacing) for label in common}
    scores.figures.update(dice=mean_score(scores.dice), hd95_mm=mean_score(scores.hd95_mm))


def _score_landmarks(scores: Scores, pair: Pair, fixed: Image, moving: Image, transform: WorldMap) -> None:
    given = {"fixed": pair.fixed_landmarks, "moving": pair.moving_landmarks}
    if all(path is None for path in given.values()):
        return
    points = {}
    for (side, path), image in zip(given.items(), (fixed, moving), strict=True):
        if path is None:
            raise ValueError(f"there are landmarks on one side only, not for the {side} image")
        points[side] = pair.read_points(path, image)
    if len(points["fixed"]) != len(points["moving"]):
        counts = f"{len(points['fixed'])} fixed and {len(points['moving'])} moving landmarks"
        raise ValueError(f"there are {counts}; expected as many, in the same order")
    for side, image in (("fixed", fixed), ("moving", moving)):
        index = map_points(np.linalg.inv(image.affine), points[side])
        outside = ((index < -0.5) | (index > np.array(image.shape) - 0.5)).any(axis=-1)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            raise ValueError(
                f"{int(outside.sum())} {side} landmarks lie outside of the image, the first, number {first + 1}, at "
                f"({', '.join(f'{x:.1f}' for x in points[side][first])}) mm; expected LPS millimetres"
            )
    errors = np.linalg.norm(transform(points["fixed"]) - points["moving"], axis=-1)
    scores.tre_mm = [float(error) for error in errors]
    scores.figures["tre_mm"] = float(errors.mean())


def _score_determinants(scores: Scores, transform: WorldTransform, fixed: Image) -> None:
    determinants = world_transform.jacobian_determinant(transform, fixed)
    scores.figures["folds_percent"] = world_transform.folds_percent(determinants)
    scores.figures["sd_log_jacobian"] = world_transform.sd_log_jacobian(determinants)


def _inconsistency(transform: PointMap, inverse: PointMap, fixed: Image, moving: Image) -> float:
    """Mean |S(T(x)) − x| in mm over a lattice of about 30 points a side, where T(x) lies in the moving image."""
    steps = [max(1, n // 30) for n in fixed.shape]
    index = np.meshgrid(*(np.arange(0, n, s) for n, s in zip(fixed.shape, steps, strict=True)), indexing="ij")
    points = map_points(fixed.affine, np.stack(index, axis=-1).reshape(-1, fixed.dim))
    moved = transform(points)
    there = map_points(np.linalg.inv(moving.affine), moved)
    inside = ((there >= -0.5) & (there < np.array(moving.shape) - 0.5)).all(axis=-1)
    if not inside.any():
        return math.nan
    return float(np.linalg.norm(inverse(moved[inside]) - points[inside], axis=-1).mean())


def _dense(transform: WorldMap, fixed: Image) -> WorldTransform:
    """Anything but affine maps and one field is evaluated by SimpleITK on the fixed grid, which is quick."""
    if isinstance(transform, WorldTransform):
        return transform
    sitk, like = simpleitk(), fixed.to_sitk()
    field = sitk.TransformToDisplacementField(
        transform.transform,
        sitk.sitkVectorFloat64,
        like.GetSize(),
        like.GetOrigin(),
        like.GetSpacing(),
        like.GetDirection(),
    )
    vectors = itk_order(sitk.GetArrayFromImage(field)).astype(np.float32)
    return WorldTransform(np.eye(fixed.dim + 1), np.ascontiguousarray(vectors), fixed.index_to_world())


def _label_tensor(labels: Image) -> Tensor:
    return torch.from_numpy(labels.data.astype(np.int32))[None, None]
