"""Regions that move but do not bend: a term of the optimisation of fields that keeps their maps rigid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.geometry.grids import interpolate
from carlreg.objective.windows import Picture

WEIGHT = 5.0
"""Default weight, for each voxel of a region, of the squared deviation from a rotation."""


@dataclass(frozen=True, eq=False)
class Rigidity:
    """Where the maps are to be rigid: masks (1, 1, *shape) over the unit cubes of the fixed and the moving image, not
    zero inside, of which one may be missing."""

    fixed: Tensor | None
    moving: Tensor | None
    weight: float = WEIGHT

    def between(self, fixed: Picture, moving: Picture) -> tuple[Stiffness | None, Stiffness | None]:
        """The price of bending for the map of the fixed image's field, and for that of the moving image's."""
        masks = (self.fixed, fixed, moving), (self.moving, moving, fixed)
        first, second = (None if mask is None else Stiffness.of(mask, own, to, self.weight) for mask, own, to in masks)
        return first, second


@dataclass(frozen=True, eq=False)
class Stiffness:
    """The mean of ‖∇φᵀ∇φ − 1‖² over a field, counted inside a region only: 0 if the map is rigid there."""

    inside: Tensor  # (*cells): 1 where all differences are taken inside the region
    steps: tuple[float, ...]  # the size of the field's voxels in mm
    size: Tensor  # of the other image in mm, (1, D, 1, …)
    weight: float

    @classmethod
    def of(cls, mask: Tensor, own: Picture, other: Picture, weight: float) -> Stiffness:
        grid = own.grid
        region = (interpolate((mask != 0).to(grid), grid.movedim(1, -1)) > 0.5).to(grid)[0, 0]
        inside = region
        for axis, n in enumerate(region.shape):
            inside = torch.minimum(inside.narrow(axis, 0, n - 1), inside.narrow(axis, 1, n - 1)) if n > 1 else inside
        steps = tuple(step * mm for step, mm in zip(own.steps, own.size, strict=True))
        size = torch.tensor(other.size, dtype=torch.float64).to(grid).reshape(1, -1, *(1,) * len(steps))
        return cls(inside, steps, size, weight)

    def __call__(self, positions: Tensor) -> Tensor:
        """For a map (B, D, *control) in unit coordinates."""
        places, dim = positions * self.size, len(self.steps)
        if min(places.shape[2:]) < 2:
            return places.new_zeros(())
        columns = []
        for axis, mm in enumerate(self.steps, start=2):
            change = places.diff(dim=axis) / mm
            for other in range(2, dim + 2):
                change = change if other == axis else change.narrow(other, 0, places.shape[other] - 1)
            columns.append(change)
        bent = torch.zeros_like(columns[0][:, 0])
        for a in range(dim):
            for b in range(a, dim):
                product = (columns[a] * columns[b]).sum(dim=1) - (1.0 if a == b else 0.0)
                bent = bent + (1.0 if a == b else 2.0) * product.square()
        return self.weight * (bent * self.inside).flatten(1).sum(dim=1).mean() / positions[0, 0].numel()
