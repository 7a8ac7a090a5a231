"""A demo without downloads: two synthetic patients whose true correspondence is known.

Their fields of view differ by a third of the image. A second pair has the moving image shifted, which should shift the
result and change nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from carlreg.errors import OVERWRITE, ExistsError, InputError
from carlreg.files import images, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.results import PAGE
from carlreg.files.world_transform import PointMap
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.loaded import load_model
from carlreg.objective.metrics import dice, mean_score
from carlreg.registration.api import register_pair
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.result import Registration
from carlreg.show.report import page
from carlreg.synthesis import LABELS, correspondence, patient

WIDTH = 384.0
"""The field of view from side to side, in mm."""
SHIFT = (24.0, -42.0, 0.0)
"""Shift of the second pair's moving patient in mm, small enough that nothing leaves the field of view."""
MIDDLE = 33.0
"""Canonical height of the centre of the common field of view: liver, kidneys, spleen, stomach."""
CASES = {
    "pair": ("two patients, fields of view a third apart", (0.0, 0.0, 0.0)),
    "shifted": ("the same, the moving image shifted", SHIFT),
}
"""Folder, description and shift of each pair."""
SUMMARY = "demo.json"


@dataclass(frozen=True, eq=False)
class SyntheticPair:
    """Two images with label maps, and the true map from fixed to moving world points."""

    fixed: Image
    fixed_labels: Image
    moving: Image
    moving_labels: Image
    truth: PointMap

    def save(self, folder: Path, *, overwrite: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("fixed", "moving", "fixed_labels", "moving_labels"):
            images.write(getattr(self, name), folder / f"{name}.nii.gz", overwrite=overwrite)

    def with_labels(self, result: Registration) -> Registration:
        """A result of this pair with the labels and their names, to be shown."""
        warped = world_transform.apply(result.transform, self.moving_labels, self.fixed, "nearest")
        record = replace(result.record, label_names={label: name for name, label in LABELS.items()})
        return replace(
            result, record=record, labels=warped, fixed_labels=self.fixed_labels, moving_labels=self.moving_labels
        )

    def in_view(self, points: Matrix) -> npt.NDArray[np.bool_]:
        """Whether the moving image shows the true counterparts of fixed world points (..., D)."""
        index = map_points(np.linalg.inv(self.moving.affine), self.truth(points))
        return np.asarray(((index >= 0) & (index <= np.array(self.moving.shape) - 1)).all(axis=-1))

    def landmarks(self, count: int = 10_000) -> Matrix:
        """World points (n, D) in structures of the fixed image that the moving one shows, too; always the same."""
        inside = np.argwhere(self.fixed_labels.data > 0)
        chosen = np.random.default_rng(0).choice(len(inside), min(count, len(inside)), replace=False)
        points = map_points(self.fixed.affine, inside[chosen])
        return points[self.in_view(points)]

    @functools.cached_property
    def common(self) -> npt.NDArray[np.bool_]:
        """The voxels of the fixed image that the moving one shows, too, to within a voxel."""
        step = 4  # the true map is smooth and slow to evaluate
        shape = [n // step + 2 for n in self.fixed.shape]
        coarse = Image(np.zeros(shape, np.uint8), self.fixed.affine @ np.diag([step, step, step, 1]))
        true = world_transform.sample(self.truth, coarse, np.eye(4))
        whole = Image(np.ones(self.moving.shape, np.uint8), self.moving.affine)
        return world_transform.apply(true, whole, self.fixed, "nearest").data > 0

    def score(self, transform: PointMap) -> dict[str, Any]:
        """Dice of each structure and distance from the truth in mm, inside the common field of view."""
        here = self.fixed_labels.data * self.common
        there = world_transform.apply(transform, self.moving_labels, self.fixed, "nearest").data * self.common
        named = {name: label for name, label in LABELS.items() if (here == label).any()}
        first, second = (torch.from_numpy(labels)[None, None] for labels in (there, here))
        scores = dice(first, second, list(named.values()))
        points = self.landmarks()
        error = np.linalg.norm(transform(points) - self.truth(points), axis=-1)
        summary = {"mean": error.mean(), "median": np.median(error), "95%": np.quantile(error, 0.95)}
        return {
            "dice": round(mean_score(scores), 4),
            "error_mm": {name: round(float(value), 2) for name, value in summary.items()},
            "dice_of": {name: round(scores[label], 4) for name, label in named.items()},
            "common_percent": round(100 * float(self.common.mean()), 1),
        }


def make_pair(seed: int = 0, size: int = 128, *, shift: tuple[float, float, float] = (0, 0, 0)) -> SyntheticPair:
    """Two patients in images of size × size × ¾ size voxels with equal headers, the moving one a third higher up and
    shifted by `shift` mm."""
    if size < 16:
        raise InputError(f"size is {size}; expected at least 16 voxels")
    shape, spacing = (size, size, 3 * size // 4), WIDTH / size
    third = shape[2] * spacing / 3
    fixed = patient(2 * seed).moved((0, 0, third / 2 - MIDDLE))
    moving = patient(2 * seed + 1).moved((shift[0], shift[1], shift[2] - third / 2 - MIDDLE))
    made = {}
    for number, (name, who) in enumerate((("fixed", fixed), ("moving", moving))):
        scan = who.scan(shape, spacing, seed=2 * seed + number)
        made[name] = Image(scan.data, scan.affine, name)
        made[f"{name}_labels"] = Image(scan.labels, scan.affine, f"{name} labels")
    return SyntheticPair(**made, truth=correspondence(fixed, moving))


def run(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    size: int = 128,
    quick: bool = False,
    device: str = "cpu",
    model: str | os.PathLike[str] | RegistrationAlgorithm = "default",
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Register both pairs, write images, results and `demo.json` into the folder, and return the content of the latter.

    `quick` skips the optimisation.

    >>> report = run("carl-demo", quick=True)
    """
    folder = Path(out)
    taken = [name for name in (SUMMARY, *CASES) if (folder / name).exists()]
    if taken and not overwrite:
        raise ExistsError(f"{folder} already holds {taken[0]}; choose another folder, or {OVERWRITE}")
    started = time.perf_counter()
    report: dict[str, Any] = {"seed": seed, "size": size, "quick": quick, "shift_mm": list(SHIFT)}
    options = RegisterOptions(io_iterations=0 if quick else None, optimize="fields", device=device, seed=seed)
    loaded = replace(load_model(model, device), climbs=False)  # both pairs are to be registered in the same way
    pairs, results = {}, {}
    for name, (description, shift) in CASES.items():
        say(f"{description}: drawing")
        pair = pairs[name] = make_pair(seed, size, shift=shift)
        say(f"{description}: registering")
        inputs = PairInputs(fixed=pair.fixed, moving=pair.moving)
        result = results[name] = register_pair(inputs, loaded, options, full_precision=False)
        report[name] = {
            "before": pair.score(lambda points: points),
            "after": pair.score(result.transform),
            "metrics": result.metrics,
            "warnings": list(result.warnings),
        }
    report["answer_moved_mm"] = _moved_along(pairs, results)
    report["model"], report["device"] = results["pair"].record.model, results["pair"].record.device
    for name in CASES:  # only now, so that a failure leaves nothing behind
        pairs[name].save(folder / name, overwrite=overwrite)
        before, after = (report[name][when]["dice_of"] for when in ("before", "after"))
        overlap = {organ: (before[organ], after[organ]) for organ in after}
        result = pairs[name].with_labels(results[name])
        result.save(folder / name, overwrite=overwrite, extra={PAGE: page(result, dice=overlap)})
    report["seconds"] = round(time.perf_counter() - started, 1)
    write_atomically(folder / SUMMARY, (json.dumps(report, indent=2) + "\n").encode())
    return report


def _moved_along(pairs: dict[str, SyntheticPair], results: dict[str, Registration]) -> dict[str, Any]:
    """How far the result moved with the moving image, over the organs in the common field of view."""
    points = pairs["pair"].landmarks()
    points = points[pairs["shifted"].in_view(points)]
    moved = results["shifted"].transform(points) - results["pair"].transform(points)
    off = np.linalg.norm(moved - np.array(SHIFT), axis=-1)
    return {
        "shift": [round(float(v), 2) for v in moved.mean(axis=0)],
        "off_mean": round(float(off.mean()), 2),
        "off_median": round(float(np.median(off)), 2),
    }
