"""The inputs of a registration, read and checked before a network runs, and the scores of its labels and landmarks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.errors import InputError
from carlreg.files import images, transform_files, world_transform
from carlreg.files.images import Choice, Image, Matrix, as_image, check_same_grid, map_points
from carlreg.files.landmarks import read_correspondences, read_landmarks
from carlreg.files.results import TRANSFORM, ResultFolder
from carlreg.files.world_transform import ItkTransform, PointMap, WorldTransform
from carlreg.model.loaded import LoadedModel
from carlreg.objective.guide import Guide
from carlreg.objective.metrics import dice, mean_score
from carlreg.objective.rigidity import Rigidity
from carlreg.preparation import PreparedPair, mask_voxels, prepare_pair
from carlreg.registration.options import PairInputs, RegisterOptions

DEFAULT = RegisterOptions()
SPACING_RATIO = 100
"""Voxels of two scans whose sizes differ by more than this factor are probably in different units."""


@dataclass(frozen=True, eq=False)
class Case:
    """A pair as the user gave it. `prepare` makes of it what one model on one device takes."""

    fixed: Image
    moving: Image
    fixed_mask: Image | None
    moving_mask: Image | None
    fixed_seg: Image | None
    moving_seg: Image | None
    landmarks: tuple[Matrix, Matrix] | None
    """World points (N, D) of the fixed image, and the corresponding ones of the moving image."""
    initial: WorldTransform | ItkTransform | None
    rigid_masks: tuple[Image | None, Image | None] = (None, None)
    """Regions of the fixed and of the moving image that do not bend, by number."""
    guide: tuple[Matrix, Matrix] | None = None
    """World points (N, D) of the fixed image, and the points of the moving image to which they are pulled."""

    @classmethod
    def read(cls, inputs: PairInputs, options: RegisterOptions = DEFAULT) -> Case:
        given = {"fixed": inputs.fixed, "moving": inputs.moving}
        choices = {side: Choice.of_pair(vars(options), side, source) for side, source in given.items()}
        if options.series is not None and all(choice.series is None for choice in choices.values()):
            files = f"{inputs.fixed} and {inputs.moving}"
            raise InputError(f"a DICOM series was chosen ({options.series}), but {files} are files; expected a folder")
        fixed, moving = (as_image(source, side, choices[side]) for side, source in given.items())
        if fixed.dim != moving.dim:
            raise InputError(f"the fixed image is {fixed.dim}-D and the moving one {moving.dim}-D; expected the same")
        return cls(
            fixed,
            moving,
            _mask(inputs.fixed_mask, fixed, "fixed mask"),
            _mask(inputs.moving_mask, moving, "moving mask"),
            _labels(inputs.fixed_seg, fixed, "fixed labels"),
            _labels(inputs.moving_seg, moving, "moving labels"),
            _landmarks(inputs, fixed, moving),
            _transform(inputs.initial_transform, fixed.dim),
            (
                _rigid(inputs.rigid_mask, fixed, "rigid mask"),
                _rigid(inputs.moving_rigid_mask, moving, "moving rigid mask"),
            ),
            _guide(inputs, fixed, moving),
        )

    def warnings(self) -> list[str]:
        """Warnings about inputs that can be registered but are probably a mistake."""
        found = [
            f"the {name} image looks like a label map: expected a scan; labels are given as {name}_seg"
            for name, image in (("fixed", self.fixed), ("moving", self.moving))
            if images.looks_like_labels(image)
        ]
        if _same(self.fixed, self.moving):
            found.append("the fixed and the moving image are the same")
        elif self.fixed_seg and self.moving_seg and _same(self.fixed_seg, self.moving_seg):
            found.append("the fixed and the moving labels are the same, though the images differ")
        sizes = [float(np.prod(image.spacing)) ** (1 / image.dim) for image in (self.fixed, self.moving)]
        if max(sizes) > SPACING_RATIO * min(sizes):
            found.append(f"voxels are about {sizes[0]:.3g} mm and {sizes[1]:.3g} mm wide: is a header not in mm?")
        for name, at, image in zip(("fixed", "moving"), self.landmarks or (), (self.fixed, self.moving), strict=False):
            if outside := images.count_outside(image, at):
                turned = images.count_outside(image, at * [-1, -1, 1][: image.dim]) < outside
                advice = "are they RAS? Then name the columns r, a, s" if turned else "check that they belong to it"
                text = f"{outside} of {len(at)} landmarks lie outside the {name} image if read as LPS mm; {advice}"
                found.append(text)
        if alone := self.labels(both=False):
            names = ", ".join(map(str, alone[:10])) + (", …" if len(alone) > 10 else "")
            found.append(f"labels that only one of the images has are not scored: {names}")
        return found

    def labels(self, *, both: bool) -> list[int]:
        """The labels that occur in both label maps, which are scored, or in only one of them, which are not."""
        if self.fixed_seg is None or self.moving_seg is None:
            return []
        first, second = (set(np.unique(one.data).tolist()) - {0} for one in (self.fixed_seg, self.moving_seg))
        return sorted(int(label) for label in (first & second if both else first ^ second))

    def prepare(
        self, model: LoadedModel, device: torch.device, *, masks: bool = True, quick: bool = False
    ) -> PreparedPair:
        """Both images as a model takes them, the moving one resampled by the initial transform if there is one; if
        `quick`, never on the model's fine grid."""
        moving, mask = self.moving, self.moving_mask
        if self.initial is not None:
            moving = world_transform.apply(self.initial, moving, self.fixed, outside=float(moving.data.min()))
            if moving.data.min() == moving.data.max():
                raise InputError(
                    "the initial transform maps the fixed image outside the moving one; expected a map from fixed to "
                    "moving world points (LPS, mm): is it the inverse, or in RAS?"
                )
            mask = None if mask is None else world_transform.apply(self.initial, mask, self.fixed, "nearest")
        inside = {"fixed_mask": self.fixed_mask, "moving_mask": mask} if masks else {}
        return prepare_pair(self.fixed, moving, model, device, **inside, aligned=self.initial is not None, quick=quick)

    def rigidity_on(self, pair: PreparedPair) -> Rigidity | None:
        """The regions that do not bend, over the images as they were prepared."""
        fixed, moving = self.rigid_masks
        if fixed is None and moving is None:
            return None
        if moving is not None and self.initial is not None:  # the moving image was resampled by it
            moving = world_transform.apply(self.initial, moving, self.fixed, "nearest")
        here = None if fixed is None else _over(fixed, pair.fixed.image)
        return Rigidity(here, None if moving is None else _over(moving, pair.moving.image))

    def guide_on(self, pair: PreparedPair) -> Guide | None:
        """The guide points in the unit coordinates of the images as they were prepared."""
        if self.guide is None:
            return None
        fixed, moving = self.guide
        if self.initial is not None:  # the moving image was resampled by it
            first = self.initial
            known = first if isinstance(first, WorldTransform) else world_transform.sample(first, self.fixed)
            moving, _ = world_transform.invert_points(known, moving)
        here, there = (
            torch.from_numpy(map_points(one.image.world_to_unit(), at)).float()
            for at, one in zip((fixed, moving), pair, strict=True)
        )
        return Guide(here, there)


def _same(first: Image, second: Image) -> bool:
    return np.array_equal(first.affine, second.affine) and np.array_equal(first.data, second.data)


def _mask(source: Any, image: Image, name: str) -> Image | None:
    if source is None:
        return None
    mask = images.placed_like(as_image(source, name), image)
    mask_voxels(mask, image)
    return mask


def _over(mask: Image, grid: Image) -> torch.Tensor:
    """(1, 1, *shape): 1 inside a mask, on the voxels of another grid of the same world."""
    resampled = world_transform.apply(lambda points: points, mask, grid, "nearest")
    return torch.from_numpy((resampled.data != 0).astype(np.float32))[None, None]


def _rigid(source: Any, image: Image, name: str) -> Image | None:
    """A map of regions. It must not be empty."""
    regions = _labels(source, image, name)
    if regions is not None and not regions.data.any():
        raise InputError(f"{regions.name} is empty; expected a rigid region, with voxels other than 0")
    return regions


def _labels(source: Any, image: Image, name: str) -> Image | None:
    """A label map. Like a mask, it must lie on the grid of its image: anything else is likely another scan's."""
    if source is None:
        return None
    labels = images.placed_like(images.as_labels(as_image(source, name)), image)
    check_same_grid(labels, image, "a label map")
    return labels


def _landmarks(inputs: PairInputs, fixed: Image, moving: Image) -> tuple[Matrix, Matrix] | None:
    if inputs.fixed_landmarks is None:
        return None
    return _corresponding((inputs.fixed_landmarks, inputs.moving_landmarks), (fixed, moving), "landmarks")


def _guide(inputs: PairInputs, fixed: Image, moving: Image) -> tuple[Matrix, Matrix] | None:
    """Guide points, from a file with both or from one for each image. They must lie inside their images."""
    if not inputs.is_guided:
        return None
    if isinstance(inputs.guide, (str, os.PathLike)):
        points = read_correspondences(inputs.guide, fixed, moving)
    else:
        given = (inputs.guide_fixed, inputs.guide_moving) if inputs.guide is None else inputs.guide
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(f"guide is a {type(given).__name__}; expected a path, or (points of fixed, of moving)")
        points = _corresponding(given, (fixed, moving), "guide points")
    for name, at, image in zip(("fixed", "moving"), points, (fixed, moving), strict=True):
        if outside := images.count_outside(image, at):
            columns = f"{name}_r, {name}_a, {name}_s" if inputs.guide is not None else "r, a, s"
            reason = f"expected millimetres in LPS: name the columns {columns} if they are in RAS"
            raise InputError(f"{outside} of {len(at)} guide points lie outside the {name} image; {reason}")
    return points


def _corresponding(sources: Sequence[Any], both: Sequence[Image], what: str) -> tuple[Matrix, Matrix]:
    """Points of the fixed and of the moving image, from files or arrays (N, D)."""
    here, there = (
        read_landmarks(source, image) if isinstance(source, (str, os.PathLike)) else np.asarray(source, np.float64)
        for source, image in zip(sources, both, strict=True)
    )
    dim = both[0].dim
    if here.shape != there.shape or here.ndim != 2 or here.shape[1] != dim:
        raise InputError(f"the {what} have shapes {here.shape} and {there.shape}; expected the same, (N, {dim})")
    return here, there


def _transform(source: Any, dim: int) -> WorldTransform | ItkTransform | None:
    if isinstance(source, (str, os.PathLike)):
        folder = ResultFolder(Path(source))
        source = transform_files.read(folder[TRANSFORM] if folder.holds_registration() else source)
    elif isinstance(source, (np.ndarray, list, tuple)):
        source = WorldTransform.linear(source)
    elif not isinstance(source, WorldTransform | ItkTransform | None):
        given = f"initial_transform is a {type(source).__name__}"
        raise TypeError(f"{given}; expected a path, a transform of carlreg.files.world_transform, or a matrix")
    if source is not None and source.dim != dim:
        raise InputError(f"the initial transform is {source.dim}-D but the images are {dim}-D; expected the same")
    return source


def score(case: Case, before: PointMap, after: PointMap) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Mean Dice and landmark error of both maps, as metrics, and the Dice of each label."""
    metrics: dict[str, float] = {}
    overlaps: dict[str, dict[int, float]] = {}
    for when, transform in (("before", before), ("after", after)):
        if case.moving_seg is not None and case.fixed_seg is not None:
            warped = world_transform.apply(transform, case.moving_seg, case.fixed, "nearest")
            overlaps[when] = dice(_tensor(warped), _tensor(case.fixed_seg), case.labels(both=True))
            metrics[f"dice_{when}"] = mean_score(overlaps[when])
        if case.landmarks is not None:
            fixed, moving = case.landmarks
            metrics[f"tre_{when}_mm"] = float(np.linalg.norm(transform(fixed) - moving, axis=-1).mean())
        if case.guide is not None:
            missed = np.linalg.norm(transform(case.guide[0]) - case.guide[1], axis=-1)
            metrics[f"guide_{when}_mm"], metrics[f"guide_{when}_max_mm"] = float(missed.mean()), float(missed.max())
    return metrics, overlaps


def _tensor(labels: Image) -> torch.Tensor:
    return torch.from_numpy(labels.data.astype(np.int64))[None, None]
