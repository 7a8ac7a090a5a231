"""The Jacobian determinant of a map, and what is measured with it: folds and SDlogJ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from carlreg.geometry.grids import voxel_size
from carlreg.geometry.transforms import Transform


def determinant_per_voxel(points: Tensor) -> Tensor:
    """By how much a map enlarges the cell of a voxel: its values (B, *shape, D) at the voxels of an image, in any
    coordinates, give the determinants of its central differences over one voxel, (B, *(shape − 2))."""
    dim = points.dim() - 2
    if min(points.shape[1:-1]) < 3:
        raise ValueError(f"the image has sides {tuple(points.shape[1:-1])}; expected at least 3 voxels a side")
    columns = []
    for axis in range(dim):
        ahead, behind = ([slice(None), *[slice(1, -1)] * dim] for _ in range(2))
        ahead[1 + axis], behind[1 + axis] = slice(2, None), slice(None, -2)
        columns.append((points[tuple(ahead)] - points[tuple(behind)]) / 2)
    return determinant(columns)


def determinant(columns: Sequence[Tensor]) -> Tensor:
    """Of matrices whose D columns are given one by one, (..., D) each. Written out: torch.linalg.det of small matrices
    is slow."""
    dim = len(columns)
    total = torch.zeros_like(columns[0][..., 0])
    for order in itertools.permutations(range(dim)):
        sign = (-1) ** sum(order[i] > order[j] for i in range(dim) for j in range(i + 1, dim))
        total = total + sign * math.prod(columns[i][..., order[i]] for i in range(dim))
    return total


def jacobian_determinant(transform: Transform, image: Tensor) -> Tensor:
    """det ∇φ at the image's voxels, by central differences, without the outermost ones: (B, *(shape − 2))."""
    return determinant_per_voxel(transform.on_grid_of(image)) / voxel_size(image.shape[2:], image).prod()


def folding(transform: Transform, image: Tensor) -> float:
    """% |J| < 0: the share of voxels at which the map turns space inside out, in per cent."""
    return 100 * float((jacobian_determinant(transform, image) < 0).double().mean())


def sd_log_jacobian(transform: Transform, image: Tensor) -> float:
    """Standard deviation of log det ∇φ, see `spread_of_log`: 0 where volume changes evenly."""
    return spread_of_log(jacobian_determinant(transform, image))


def spread_of_log(determinants: Tensor, *, shift: float = 3.0) -> float:
    """Standard deviation of log(det + shift), the sum held within 1e-9…1e9: for determinants (B, *(shape − 2)).

    SDlogJ in Learn2Reg's tables is this: 3 is added, so that mild folds do not rule the figure, and a second layer of
    voxels at the border is left out. The plain one has shift 0.
    """
    layers = [slice(None), *(slice(1, -1) if n > 2 else slice(None) for n in determinants.shape[1:])]
    inner = determinants[tuple(layers)]
    return float((inner.double() + shift).clamp(1e-9, 1e9).log().std(correction=0))
