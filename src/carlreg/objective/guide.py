"""Corresponding points that guide the optimisation of fields: a soft term, which pulls each point to its partner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast import exact
from carlreg.objective.windows import Picture

WEIGHT = 1000.0
"""Default weight: how many voxels of the field a point counts as, for each voxel that it is away from its partner."""
NEAR = 0.5
"""Within this distance, in voxels, the pull grows in proportion to the distance; beyond it, it is constant."""


@dataclass(frozen=True, eq=False)
class Guide:
    """Points of the fixed image and the points of the moving image that they correspond to, (N, D) each, in the unit
    coordinates of their images."""

    fixed: Tensor
    moving: Tensor
    weight: float = WEIGHT

    def __post_init__(self) -> None:
        if self.fixed.dim() != 2 or self.fixed.shape != self.moving.shape or not len(self.fixed):
            shapes = f"{tuple(self.fixed.shape)} and {tuple(self.moving.shape)}"
            raise InputError(f"the guide's points have shapes {shapes}; expected the same, (N, D), with N above 0")

    def between(self, fixed: Picture, moving: Picture) -> tuple[Pull, Pull]:
        """The pull on the map of the fixed image's field, and on that of the moving image's, at one resolution.

        Distances are in voxels, so that coarse grids, whose fields move far around a point, are pulled no more than
        fine ones.
        """
        here, there, voxel = self.fixed, self.moving, max(min(fixed.spacing), min(moving.spacing))
        return (
            Pull.of(fixed, here, there, [mm / voxel for mm in moving.size], self.weight),
            Pull.of(moving, there, here, [mm / voxel for mm in fixed.size], self.weight),
        )


@dataclass(frozen=True, eq=False)
class Pull:
    """How far a map takes points from their partners. Everything lies on the device of the field."""

    points: Tensor  # (1, D, N), unit coordinates
    partners: Tensor  # (1, D, N), unit coordinates of the other image
    grid: Tensor  # of the field, (1, D, *control)
    ends: Tensor  # unit coordinates of the last voxels of the field
    size: Tensor  # of the other image, in voxels of the level
    weight: float

    @classmethod
    def of(cls, picture: Picture, points: Tensor, partners: Tensor, size: Sequence[float], weight: float) -> Pull:
        grid = picture.grid
        ends = [max(n - 1, 1) * step for n, step in zip(picture.control, picture.steps, strict=True)]
        first, second, last, extent = (
            torch.as_tensor(one, dtype=torch.float64).to(grid).reshape(-1, len(size)).mT[None]
            for one in (points.cpu(), partners.cpu(), ends, size)
        )
        return cls(first, second, grid, last, extent, weight)

    def __call__(self, positions: Tensor) -> Tensor:
        """The sum of the distances for a map (B, D, *control), times the weight, over the number of voxels: so it adds
        to a similarity that is a mean over these."""
        inside = (self.points / self.ends).expand(len(positions), -1, -1)
        moved = self.points + exact.sample(positions - self.grid, inside)
        missed = (moved - self.partners) * self.size / NEAR
        far = (missed.square().sum(dim=1) + 1).sqrt() - 1
        return self.weight * NEAR * far.sum(dim=1).mean() / positions[0, 0].numel()
