"""A registration to look at, with nothing to download: two synthetic patients whose true correspondence is known.

Their fields of view differ by a third of the image, so that a third of each shows what the other does not. The
pair is registered again with one image shifted, which should shift the result and change nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from carlreg.errors import ExistsError, InputError
from carlreg.files import images, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.results import PAGE
from carlreg.files.world_transform import PointMap, WorldTransform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.objective.metrics import dice, mean_score
from carlreg.registration.api import register
from carlreg.registration.result import Registration
from carlreg.show.report import page
from carlreg.synthesis import LABELS, correspondence, patient

WIDTH = 384.0
"""Millimetres that an image shows from side to side."""
SHIFT = (24.0, -42.0, 0.0)
"""By how many millimetres the second pair's moving image is shifted inside its frame, so that nothing leaves it."""
MIDDLE = 33.0
"""Canonical height of the middle of what both images show: liver, kidneys, spleen, stomach."""
CASES = {
    "pair": ("two patients, fields of view a third apart", (0.0, 0.0, 0.0)),
    "shifted": ("the same, the moving image shifted", SHIFT),
}
"""Folder of each pair, what it is, and how far the moving image is shifted."""
SUMMARY = "demo.json"


@dataclass(frozen=True, eq=False)
class Pair:
    """Two images with label maps, and the true map from world points of the fixed one to those of the moving one."""

    fixed: Image
    fixed_labels: Image
    moving: Image
    moving_labels: Image
    truth: PointMap

    def save(self, folder: Path, *, overwrite: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("fixed", "moving", "fixed_labels", "moving_labels"):
            images.write(getattr(self, name), folder / f"{name}.nii.gz", overwrite=overwrite)

    def shown(self, points: Matrix) -> npt.NDArray[np.bool_]:
        """Which world points (..., D) of the fixed image have their true counterpart inside the moving image."""
        index = map_points(np.linalg.inv(self.moving.affine), self.truth(points))
        return np.asarray(((index >= 0) & (index <= np.array(self.moving.shape) - 1)).all(axis=-1))

    def landmarks(self, count: int = 10_000) -> Matrix:
        """World points (n, D) in structures of the fixed image that the moving one shows too, the same every time."""
        inside = np.argwhere(self.fixed_labels.data > 0)
        chosen = np.random.default_rng(0).choice(len(inside), min(count, len(inside)), replace=False)
        points = map_points(self.fixed.affine, inside[chosen])
        return points[self.shown(points)]

    @functools.cached_property
    def common(self) -> npt.NDArray[np.bool_]:
        """Which voxels of the fixed image the moving one shows too, accurate to a voxel at the edges."""
        step = 4  # the truth is smooth and costs time
        axes = [np.arange(0, n + step, step) for n in self.fixed.shape]
        points = map_points(self.fixed.affine, np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1))
        true = WorldTransform(
            np.eye(4), (self.truth(points) - points).astype(np.float32), self.fixed.affine @ np.diag([step] * 3 + [1])
        )
        whole = Image(np.ones(self.moving.shape, np.uint8), self.moving.affine)
        return world_transform.apply(true, whole, self.fixed, "nearest").data > 0

    def score(self, transform: PointMap) -> dict[str, Any]:
        """Dice of each structure and distance from the truth in mm, where the moving image shows what the fixed does.

        Points beyond the moving image's edge have no counterpart to be found.
        """
        here = self.fixed_labels.data * self.common
        there = world_transform.apply(transform, self.moving_labels, self.fixed, "nearest").data * self.common
        named = {name: label for name, label in LABELS.items() if (here == label).any()}
        first, second = (torch.from_numpy(labels)[None, None] for labels in (there, here))
        scores = dice(first, second, list(named.values()))
        points = self.landmarks()
        error = np.linalg.norm(transform(points) - self.truth(points), axis=-1)
        return {
            "dice": round(mean_score(scores), 4),
            "error_mm": {
                "mean": round(float(error.mean()), 2),
                "median": round(float(np.median(error)), 2),
                "95%": round(float(np.quantile(error, 0.95)), 2),
            },
            "dice_of": {name: round(scores[label], 4) for name, label in named.items()},
            "common_percent": round(100 * float(self.common.mean()), 1),
        }


def make_pair(seed: int = 0, size: int = 128, *, shift: tuple[float, float, float] = (0, 0, 0)) -> Pair:
    """Two patients in frames of size × size × ¾ size voxels, of which the moving one is a third higher up.

    Both frames are centred at the world origin, so the headers give no hint. `shift` moves the moving patient
    inside their frame, in mm.
    """
    if size < 16:
        raise InputError(f"size is {size}; expected a width of at least 16 voxels")
    shape, spacing = (size, size, 3 * size // 4), WIDTH / size
    third = shape[2] * spacing / 3
    fixed = patient(2 * seed).moved((0, 0, third / 2 - MIDDLE))
    moving = patient(2 * seed + 1).moved((shift[0], shift[1], shift[2] - third / 2 - MIDDLE))
    images_of: list[tuple[Image, Image]] = []
    for number, (name, who) in enumerate((("fixed", fixed), ("moving", moving))):
        scan = who.scan(shape, spacing, seed=2 * seed + number)
        images_of.append((Image(scan.data, scan.affine, name), Image(scan.labels, scan.affine, f"{name} labels")))
    return Pair(*images_of[0], *images_of[1], correspondence(fixed, moving))


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
    """Register both pairs, write images, results and `demo.json` into the folder, and return the figures.

    `quick` leaves the optimisation of the fields out.

    >>> figures = run("carl-demo", quick=True)
    """
    folder = Path(out)
    taken = [path for path in (folder / SUMMARY, *(folder / name for name in CASES)) if path.exists()]
    if taken and not overwrite:
        raise ExistsError(f"{folder} already holds {taken[0].name}; choose another folder, or allow overwriting")
    started = time.perf_counter()
    report: dict[str, Any] = {"seed": seed, "size": size, "quick": quick, "shift_mm": list(SHIFT)}
    pairs: dict[str, Pair] = {}
    answers: dict[str, Registration] = {}
    for name, (words, shift) in CASES.items():
        say(f"{words}: drawing")
        pair = make_pair(seed, size, shift=shift)
        say(f"{words}: registering")
        answer = register(
            fixed=pair.fixed,
            moving=pair.moving,
            model=model,
            io_iterations=0 if quick else None,
            over="fields",
            device=device,
            seed=seed,
        )
        report[name] = {
            "before": pair.score(lambda points: points),
            "after": pair.score(answer.transform),
            "metrics": answer.metrics,
            "warnings": list(answer.warnings),
        }
        pairs[name], answers[name] = pair, answer
    report["answer_moved_mm"] = _moved_along(pairs, answers)
    report["model"], report["device"] = answers["pair"].record.model, answers["pair"].record.device
    for name in CASES:  # only now: a failure leaves nothing behind
        pairs[name].save(folder / name, overwrite=overwrite)
        before, after = (report[name][when]["dice_of"] for when in ("before", "after"))
        overlap = {organ: (before[organ], after[organ]) for organ in after}
        extra = {PAGE: page(answers[name], dice=overlap)}
        answers[name].save(folder / name, overwrite=overwrite, extra=extra)
    report["seconds"] = round(time.perf_counter() - started, 1)
    write_atomically(folder / SUMMARY, (json.dumps(report, indent=2) + "\n").encode())
    return report


def _moved_along(pairs: dict[str, Pair], answers: dict[str, Registration]) -> dict[str, Any]:
    """How far the result moved with the moving image, averaged over organs that both images show."""
    points = pairs["pair"].landmarks()
    points = points[pairs["shifted"].shown(points)]
    moved = answers["shifted"].transform(points) - answers["pair"].transform(points)
    off = np.linalg.norm(moved - np.array(SHIFT), axis=-1)
    return {
        "shift": [round(float(v), 2) for v in moved.mean(axis=0)],
        "off_mean": round(float(off.mean()), 2),
        "off_median": round(float(np.median(off)), 2),
    }
