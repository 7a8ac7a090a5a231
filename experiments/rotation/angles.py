"""Rotated images for the scripts of this folder. Import it first: it puts the retina experiment's modules on the path.

The retinas are those of the Baseline set (experiments/retina/data.py) without the empty rows below them, in the middle
of a square large enough that they stay in view at every angle. Moving images are rotated at full resolution, before
they are averaged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.geometry.fitting import about_centre, random_rotation
from carlreg.geometry.transforms import Affine, warp

sys.path.insert(0, str(Path(__file__).parent.parent / "retina"))

from data import PADDING, POOLING, Pairs, build  # type: ignore[import-not-found]

SIDE = 192
"""Side of the square. A retina is about 135 wide."""
ANGLES = tuple(range(0, 181, 15))
PLANES = {"sagittal": (1, 2), "coronal": (0, 2), "axial": (0, 1)}
"""Array axes (left to right, back to front, bottom to top) that span the plane of the rotation."""
MM = 2.0
"""Voxel size of a brain, as experiments/base/prepare.py packs it."""


def turn(degrees: float, shape: Sequence[int], *, like: Tensor, plane: tuple[int, int] = (0, 1)) -> Affine:
    """The rotation about the centre of an image of this shape, in the plane of two of its axes."""
    linear = torch.eye(len(shape), dtype=torch.float64)
    i, j = plane
    linear[i, i] = linear[j, j] = math.cos(math.radians(degrees))
    linear[j, i] = math.sin(math.radians(degrees))
    linear[i, j] = -linear[j, i]
    return about_centre(linear[None], shape, like=like)


def square(segmentations: Tensor, seed: int, angles: Sequence[float], side: int = SIDE) -> dict[str, Pairs]:
    """Pairs made from binary images (N, 1, height, width), for each angle of rotation of the moving images."""
    upright = build(segmentations, "Baseline", seed)
    fixed = framed(upright.fixed[:, :, : -(PADDING // POOLING)], side)
    whole = framed(torch.cat([segmentations, segmentations.flip(2)]), side, POOLING)
    turns = {f"{angle:g}": turn(angle, whole.shape[2:], like=whole) for angle in angles}
    return {
        angle: Pairs(F.avg_pool2d(warp(whole, by, like=whole, outside="zeros"), POOLING), fixed, upright.retina)
        for angle, by in turns.items()
    }


def framed(images: Tensor, side: int, pooling: int = 1) -> Tensor:
    """Images in the middle of an empty square that has this side after averaging over blocks."""
    padding = []
    for n in reversed(images.shape[2:]):
        before = pooling * ((side - n // pooling) // 2)
        padding += [before, pooling * side - n - before]
    return F.pad(images, padding)


@dataclass(frozen=True)
class Turned:
    """Pairs whose images are each rotated at random when drawn, so that the loss is computed on rotated images."""

    pairs: Pairs
    generator: torch.Generator

    def __len__(self) -> int:
        return len(self.pairs)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        moving, fixed = self.pairs.at(index)
        return self.rotated(moving), self.rotated(fixed)

    def rotated(self, images: Tensor) -> Tensor:
        rotation = random_rotation(images.shape[2:], len(images), like=images, generator=self.generator)
        return warp(images, rotation, like=images)
