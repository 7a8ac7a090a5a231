"""Dice and landmark errors, before and after."""

from __future__ import annotations

import numpy as np
import torch

from carlreg.files import world_transform
from carlreg.files.images import Image
from carlreg.files.world_transform import ItkTransform, WorldTransform
from carlreg.objective.metrics import dice, mean_score
from carlreg.registration.case import Case


def _score(
    case: Case,
    given: WorldTransform | ItkTransform | None,
    world: WorldTransform,
    metrics: dict[str, float],
) -> dict[str, dict[int, float]]:
    """Dice of each label "before", with the first guess that was given, and "after", where both images have labels;
    means and landmark errors go into the metrics."""
    scores: dict[str, dict[int, float]] = {}
    start = WorldTransform.linear(np.eye(case.fixed.dim + 1)) if given is None else given
    for when, map_ in (("before", start), ("after", world)):
        if case.moving_seg is not None and case.fixed_seg is not None:
            scores[when] = _dice(
                world_transform.apply(map_, case.moving_seg, case.fixed_seg, "nearest"), case.fixed_seg
            )
            metrics[f"dice_{when}"] = mean_score(scores[when])
        if case.landmarks is not None:
            here, there = case.landmarks
            metrics[f"tre_{when}_mm"] = float(np.linalg.norm(map_(here) - there, axis=-1).mean())
    return scores


def _dice(warped: Image, fixed: Image) -> dict[int, float]:
    first, second = (torch.from_numpy(image.data.astype(np.int64))[None, None] for image in (warped, fixed))
    return dice(first, second)
