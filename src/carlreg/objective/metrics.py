"""Metrics of a registration: overlap, surface and landmark distances, inverse consistency.

Label maps are (B, 1, *shape) tensors of integers on one grid. Distances are in the unit of `spacing`, the size of a
voxel along each axis: millimetres, or voxels if it is left out. Folds and SDlogJ are in `geometry.jacobian`.

Definitions are those of Learn2Reg's evaluation, except that HD95 counts every surface voxel once, where Learn2Reg
weights pieces of surface by their area.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.checks import check_same_shape
from carlreg.geometry.grids import voxel_points, voxel_size
from carlreg.geometry.transforms import Transform


def dice(first: Tensor, second: Tensor, labels: Sequence[int] | None = None) -> dict[int, float]:
    """2 |A ∩ B| / (|A| + |B|) for each label, by default all labels in either map except 0. NaN if neither map has it.

    >>> scores = dice(warped_labels, fixed_labels)
    """
    check_same_shape(first, second, ("the first label map", "the second"))
    sizes, common = _count(first) + _count(second), _count(first[first == second])
    if labels is None:
        labels = sorted(sizes.keys() - {0})
    return {label: 2 * common[label] / sizes[label] if sizes[label] else math.nan for label in labels}


def _count(labels: Tensor) -> Counter[int]:
    """Number of voxels of each label."""
    values, counts = labels.unique(return_counts=True)
    return Counter(dict(zip((int(value) for value in values), counts.tolist(), strict=True)))


def mean_score(scores: Mapping[int, float]) -> float:
    """Mean of the scores that are not NaN; NaN if there are none."""
    values = [score for score in scores.values() if not math.isnan(score)]
    return sum(values) / len(values) if values else math.nan


def hd95(first: Tensor, second: Tensor, label: int, *, spacing: Sequence[float] | None = None) -> float:
    """95th percentile of the distance between two surfaces, the larger of both directions; NaN if either is empty.

    A surface voxel belongs to the structure and has a neighbour along an axis that does not. Outside the image is
    outside the structure.
    """
    check_same_shape(first, second, ("the first label map", "the second"))
    a, b = (surface(labels == label) for labels in (first, second))
    if not a.any() or not b.any():
        return math.nan
    a, b = _cropped(a, b)
    sides = [1.0] * a.dim() if spacing is None else [float(side) for side in spacing]
    distances = [distance_to(surface, sides)[other].quantile(0.95) for surface, other in ((b, a), (a, b))]
    return float(torch.maximum(*distances))


def mean_surface_distance(
    first: Tensor, second: Tensor, label: int, *, spacing: Sequence[float] | None = None
) -> float:
    """The mean distance of all surface voxels of both structures to the other surface; NaN if either is empty.

    Surfaces are those of `hd95`.
    """
    check_same_shape(first, second, ("the first label map", "the second"))
    a, b = (surface(labels == label) for labels in (first, second))
    if not a.any() or not b.any():
        return math.nan
    a, b = _cropped(a, b)
    sides = [1.0] * a.dim() if spacing is None else [float(side) for side in spacing]
    return float(torch.cat([distance_to(b, sides)[a], distance_to(a, sides)[b]]).mean())


def target_registration_error(
    transform: Transform, fixed_points: Tensor, moving_points: Tensor, *, size: Sequence[float] | None = None
) -> Tensor:
    """Distance of each mapped fixed landmark to its moving landmark, (B, N), from two (B, N, D) in unit coordinates.

    `size` is the moving image's extent in millimetres along each axis, from the first to the last voxel centre.
    """
    check_same_shape(fixed_points, moving_points, ("fixed_points", "moving_points"))
    difference = transform(fixed_points) - moving_points
    if size is not None:
        difference = difference * torch.tensor(list(size)).to(difference)
    return difference.norm(dim=-1)


def inverse_consistency(
    phi_ab: Transform, phi_ba: Transform, image: Tensor, *, spacing: Sequence[float] | None = None
) -> Tensor:
    """|φ_AB(φ_BA(x)) − x| at the voxels of `image`, the one whose points φ_BA takes: (B, *shape)."""
    points = voxel_points(image)
    difference = (phi_ab(phi_ba.on_grid_of(image)) - points) / voxel_size(image.shape[2:], image)
    if spacing is not None:
        difference = difference * torch.tensor(list(spacing)).to(difference)
    return difference.norm(dim=-1)


def _cropped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks without empty margins around both."""
    voxels = (a | b).nonzero()
    box = tuple(slice(int(low), int(high) + 1) for low, high in zip(voxels.amin(0), voxels.amax(0), strict=True))
    return a[box], b[box]


def surface(mask: Tensor) -> Tensor:
    """Voxels of the structure that have a neighbour outside it: (1, 1, *shape) → (*shape)."""
    if mask.shape[0] != 1 or mask.shape[1] != 1:
        raise InputError(f"the label map has shape {tuple(mask.shape)}; expected one item and one channel")
    inside = mask[0, 0]
    dim = inside.dim()
    padded = F.pad(inside, (1, 1) * dim)
    covered = inside.clone()
    for axis, shift in itertools.product(range(dim), (0, 2)):
        window = tuple(slice(shift, shift + n) if a == axis else slice(1, 1 + n) for a, n in enumerate(inside.shape))
        covered &= padded[window]
    return inside & ~covered


def distance_to(mask: Tensor, spacing: Sequence[float]) -> Tensor:
    """Distance of every voxel of (*shape) to the nearest voxel of the mask.

    Computed axis by axis, as a minimum of squared distances over the voxels of a row.
    """
    squared = torch.where(mask, 0.0, math.inf).double()
    for axis, (side, step) in enumerate(zip(mask.shape, spacing, strict=True)):
        index = torch.arange(side, dtype=torch.float64, device=mask.device) * step
        apart = (index[:, None] - index).square()  # (side, side)
        rows = squared.movedim(axis, -1)
        flat = rows.reshape(-1, side)
        blocks = flat.split(max(1, 2**22 // side**2))  # 32 MB at a time
        nearest = torch.cat([(block[:, None, :] + apart).amin(dim=-1) for block in blocks])
        squared = nearest.reshape(rows.shape).movedim(-1, axis)
    return squared.sqrt()
