"""Dice and landmark errors, before and after the registration."""

from __future__ import annotations

import numpy as np
import torch

from carlreg.files import world_transform
from carlreg.files.images import Image
from carlreg.files.world_transform import PointMap
from carlreg.objective.metrics import dice, mean_score
from carlreg.registration.case import Case


def score(case: Case, before: PointMap, after: PointMap) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Mean Dice and landmark error of both maps, as metrics, and the Dice of each label."""
    metrics: dict[str, float] = {}
    overlaps: dict[str, dict[int, float]] = {}
    for when, transform in (("before", before), ("after", after)):
        if case.moving_seg is not None and case.fixed_seg is not None:
            warped = world_transform.apply(transform, case.moving_seg, case.fixed, "nearest")
            overlaps[when] = dice(_tensor(warped), _tensor(case.fixed_seg))
            metrics[f"dice_{when}"] = mean_score(overlaps[when])
        if case.landmarks is not None:
            fixed, moving = case.landmarks
            metrics[f"tre_{when}_mm"] = float(np.linalg.norm(transform(fixed) - moving, axis=-1).mean())
    return metrics, overlaps


def _tensor(labels: Image) -> torch.Tensor:
    return torch.from_numpy(labels.data.astype(np.int64))[None, None]
