"""What a user gives: images, masks, labels, landmarks, transforms and models, from files or from memory.

All of it is read and checked before any network runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from carlreg import preparation
from carlreg.errors import InputError
from carlreg.files import images, transform_files, world_transform
from carlreg.files.images import Image, Matrix, as_image
from carlreg.files.landmarks import read_landmarks
from carlreg.files.world_transform import ItkTransform, WorldTransform
from carlreg.model.loaded import LoadedModel
from carlreg.preparation import Prepared, PreparedPair, prepare_pair
from carlreg.registration.options import PairInputs


@dataclass(frozen=True, eq=False)
class Case:
    """A pair with all that came with it."""

    fixed: Image
    moving: Image
    f: Prepared
    m: Prepared
    """The moving image as the network sees it: through the first guess, if there is one."""
    fixed_mask: Image | None
    moving_mask: Image | None
    fixed_seg: Image | None
    moving_seg: Image | None
    landmarks: tuple[Matrix, Matrix] | None
    initial: WorldTransform | ItkTransform | None

    def through(self, initial: WorldTransform, model: LoadedModel, place: torch.device) -> Case:
        """The same pair with another first guess."""
        case = replace(self, initial=initial)
        f, m = case.prepared_for(model, place)
        return replace(case, f=f, m=m)

    def prepared_for(self, model: LoadedModel, place: torch.device, *, masks: bool = True) -> PreparedPair:
        """The fixed and the moving image as a model sees them, the latter through the first guess if there is one."""
        seen, mask = _pulled(self.fixed, self.moving, self.moving_mask, self.initial)
        inside = {"fixed_mask": self.fixed_mask, "moving_mask": mask} if masks else {}
        return prepare_pair(self.fixed, seen, model, place, **inside, aligned=self.initial is not None)


def read_case(inputs: PairInputs, model: LoadedModel, place: torch.device) -> Case:
    def image(name: str, what: str) -> Image | None:
        return None if (source := getattr(inputs, name)) is None else as_image(source, what)

    fixed, moving = as_image(inputs.fixed, "fixed"), as_image(inputs.moving, "moving")
    if fixed.dim != moving.dim:
        raise ValueError(f"the fixed image is {fixed.dim}-D and the moving one {moving.dim}-D; expected the same")
    fixed_mask, moving_mask = (image(f"{side}_mask", f"{side} mask") for side in ("fixed", "moving"))
    segs = {side: image(f"{side}_seg", f"{side} labels") for side in ("fixed", "moving")}
    labels = {side: None if seg is None else images.as_labels(seg) for side, seg in segs.items()}
    for side, seg in labels.items():
        if seg is not None and seg.dim != fixed.dim:
            raise ValueError(f"the {side} labels are {seg.dim}-D but the images {fixed.dim}-D; expected the same")
    landmarks = _landmarks((inputs.fixed_landmarks, inputs.moving_landmarks), fixed, moving)
    guess = inputs.initial_transform
    initial = None if guess is None else _as_transform(guess, fixed.dim)
    seen, seen_mask = _pulled(fixed, moving, moving_mask, initial)
    inside = {"fixed_mask": fixed_mask, "moving_mask": seen_mask}
    f, m = prepare_pair(fixed, seen, model, place, **inside, aligned=initial is not None)
    return Case(fixed, moving, f, m, fixed_mask, moving_mask, labels["fixed"], labels["moving"], landmarks, initial)


def _pulled(
    fixed: Image,
    moving: Image,
    mask: Image | None,
    initial: WorldTransform | ItkTransform | None,
) -> tuple[Image, Image | None]:
    """The moving image and its mask, seen through the first guess on the fixed image's grid."""
    if mask is not None:
        preparation.mask_voxels(mask, moving)
    if initial is None:
        return moving, mask
    seen = world_transform.apply(initial, moving, fixed, outside=float(moving.data.min()))
    if seen.data.min() == seen.data.max():
        raise ValueError(
            "through the initial transform nothing of the moving image is seen from the fixed one; expected a map from "
            "fixed to moving world points (LPS, mm): is it the inverse, or in RAS?"
        )
    return seen, None if mask is None else world_transform.apply(initial, mask, fixed, "nearest")


def _landmarks(sources: tuple[Any, Any], fixed: Image, moving: Image) -> tuple[Matrix, Matrix] | None:
    """World points (N, D) of both images, the n-th of one lying where the n-th of the other does."""
    if sources[0] is None:
        return None
    both = tuple(
        read_landmarks(source, image) if isinstance(source, (str, os.PathLike)) else np.asarray(source, np.float64)
        for source, image in zip(sources, (fixed, moving), strict=True)
    )
    shapes = [points.shape for points in both]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != fixed.dim:
        raise InputError(f"the landmarks have shapes {shapes[0]} and {shapes[1]}; expected the same, (N, {fixed.dim})")
    return both[0], both[1]


def _as_transform(source: Any, dim: int) -> WorldTransform | ItkTransform:
    if isinstance(source, (str, os.PathLike)):
        found = transform_files.read(source)
    elif isinstance(source, (WorldTransform, ItkTransform)):
        found = source
    elif isinstance(source, (np.ndarray, list, tuple)):
        found = WorldTransform.linear(source)
    else:
        raise TypeError(
            f"initial_transform is a {type(source).__name__}; expected a path, a transform of carlreg.itk or a matrix"
        )
    if found.dim != dim:
        raise ValueError(f"the initial transform is {found.dim}-D but the images are {dim}-D; expected the same")
    return found
