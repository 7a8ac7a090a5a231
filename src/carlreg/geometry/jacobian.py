"""The Jacobian determinant of a map, and the metrics computed from it: folds and SDlogJ."""

from collections.abc import Sequence

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.grids import voxel_size
from carlreg.geometry.transforms import Transform


def determinant(columns: Sequence[Tensor]) -> Tensor:
    """Determinants of D×D matrices given by their D columns, (..., D) each.

    Written out by minors, because library routines are slow for many small matrices.
    """
    return expand(columns[0], minors(columns[1:]))


def minors(columns: Sequence[Tensor]) -> list[Tensor]:
    """The determinants of D − 1 columns, (..., D) each, without each of the D rows."""
    rows = range(len(columns) + 1)
    return [_of_rows(columns, [row for row in rows if row != other]) for other in rows]


def expand(column: Tensor, minors: Sequence[Tensor]) -> Tensor:
    """The determinant of a first column (..., D) and the others, of which the minors are given."""
    total = column[..., 0] * minors[0]
    for row, minor in enumerate(minors[1:], start=1):
        total = torch.addcmul(total, column[..., row], minor, value=(-1) ** row)
    return total


def _of_rows(columns: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """The determinant of columns of which only some rows count, as many as there are columns."""
    if len(columns) < 2:
        return columns[0][..., rows[0]] if columns else torch.ones(())
    first, *others = columns
    total = first[..., rows[0]] * _of_rows(others, rows[1:])
    for number, row in enumerate(rows[1:], start=1):
        rest = _of_rows(others, [*rows[:number], *rows[number + 1 :]])
        total = torch.addcmul(total, first[..., row], rest, value=(-1) ** number)
    return total


def determinant_per_voxel(points: Tensor) -> Tensor:
    """Volume, in any coordinates, of the image of one voxel: (B, *shape, D) → (B, *(shape − 2)).

    `points` are the map's values at an image's voxels; differences are central and leave the outermost voxels out.
    """
    dim = points.dim() - 2
    if min(points.shape[1:-1]) < 3:
        raise InputError(f"the image has sides {tuple(points.shape[1:-1])}; expected at least 3 voxels a side")
    columns = []
    for axis in range(dim):
        ahead, behind = ([slice(None), *[slice(1, -1)] * dim] for _ in range(2))
        ahead[1 + axis], behind[1 + axis] = slice(2, None), slice(None, -2)
        columns.append((points[tuple(ahead)] - points[tuple(behind)]) / 2)
    return determinant(columns)


def jacobian_determinant(transform: Transform, image: Tensor) -> Tensor:
    """det ∇φ at the image's voxels without the outermost ones: (B, *(shape − 2))."""
    return determinant_per_voxel(transform.on_grid_of(image)) / voxel_size(image.shape[2:], image).prod()


def folding(transform: Transform, image: Tensor) -> float:
    """`folds_percent` of a transform at the image's voxels."""
    return folds_percent(jacobian_determinant(transform, image))


def folds_percent(determinants: Tensor) -> float:
    """% |J| < 0: the percentage of voxels at which the map turns space inside out."""
    return 100 * (int((determinants < 0).sum()) / determinants.numel())


def sd_log_jacobian(determinants: Tensor, *, shift: float = 3.0) -> float:
    """SDlogJ, the standard deviation of log(det + shift): 0 for a uniform change of volume. (B, *(shape − 2)) → number.

    As in Learn2Reg's tables, 3 is added so that mild folds do not dominate, the sum is clamped to 1e-9…1e9, and a
    second layer of voxels is left out at the border. Use shift=0 for the plain definition.
    """
    layers = [slice(None), *(slice(1, -1) if n > 2 else slice(None) for n in determinants.shape[1:])]
    inner = determinants.detach()[tuple(layers)]
    return float((inner.double() + shift).clamp(1e-9, 1e9).log().std(correction=0))
