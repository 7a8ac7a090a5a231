"""Transforms between world spaces, to and from the files of ITK, SimpleITK, ANTs, 3D Slicer and Learn2Reg.

Convention: T maps points of the fixed image's world to points of the moving image's world, in millimetres, LPS. Images
pull, points push: the warped image at a fixed point x is the moving image at T(x); a landmark x of the fixed image lies
at T(x) in the moving image, and landmarks of the moving image need the inverse.

SimpleITK is imported where it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.files.images import (
    Image,
    Matrix,
    _largest_shift,
    _sitk,
    map_points,
)
from carlreg.geometry import jacobian
from carlreg.geometry.grids import Grid, Interpolation, interpolate
from carlreg.geometry.transforms import Transform

Field = npt.NDArray[np.float32]
PointMap = Callable[[Matrix], Matrix]
"""World points (..., D) to world points (..., D): a WorldTransform, an ItkTransform, any function."""

SLAB = 2**20
"""Voxels that are worked on at a time."""
CHEAP = 10
"""Steps of the plain fixed-point iteration before Newton's, when a transform is inverted."""
FLATTEST = 0.1
"""An affine part shrinks no direction by more than this: beyond, its inverse would blow the displacements up."""


class TransformError(ValueError):
    """A file that is not a transform we can use, or a transform that a file cannot hold."""


@dataclass(frozen=True, eq=False)
class WorldTransform:
    """T(x) = A(x + u(x)), from fixed to moving world points (LPS, mm).

    u is interpolated linearly between the points of its lattice. As in ITK it goes on unchanged for half a voxel beyond
    the outermost points and is zero from there on, where T is A alone.

    >>> T = read("transform.h5")
    >>> T(landmarks)  # (..., D) → (..., D)
    """

    affine: Matrix  # (D + 1, D + 1), A
    displacement: Field  # (*shape, D), u in mm, LPS
    lattice: Matrix  # (D + 1, D + 1), from indices of the displacement to world points

    def __post_init__(self) -> None:
        dim = self.displacement.ndim - 1
        square = (dim + 1, dim + 1)
        if self.displacement.shape[-1] != dim or self.affine.shape != square or self.lattice.shape != square:
            raise TransformError(
                f"an affine part of shape {self.affine.shape}, displacements {self.displacement.shape} and a lattice "
                f"{self.lattice.shape} do not fit; expected (D + 1, D + 1), (*shape, D) and (D + 1, D + 1)"
            )

    @classmethod
    def linear(cls, affine: npt.ArrayLike) -> WorldTransform:
        """A alone, from a matrix (D + 1, D + 1): files of it hold an affine map and nothing else."""
        matrix = np.array(affine, dtype=np.float64)
        dim = len(matrix) - 1
        if matrix.shape not in ((3, 3), (4, 4)) or not np.array_equal(matrix[-1], np.eye(dim + 1)[-1]):
            raise TransformError(
                f"a matrix of shape {matrix.shape} is no affine map; expected (D + 1, D + 1), last row zeros and a one"
            )
        if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-12:
            raise TransformError("the matrix is singular or not finite; expected an affine map that has an inverse")
        return cls(matrix, np.zeros((*(1,) * dim, dim), np.float32), np.eye(dim + 1))

    @property
    def dim(self) -> int:
        return self.displacement.ndim - 1

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether there is nothing but A."""
        return not self.displacement.any()

    def __call__(self, points: npt.ArrayLike) -> Matrix:
        points = np.asarray(points, dtype=np.float64)
        if points.shape[-1:] != (self.dim,):
            raise TransformError(f"points have shape {points.shape}; expected (..., {self.dim}) for this transform")
        if self.is_linear:
            return map_points(self.affine, points)
        return map_points(self.affine, points + np.where(self.covers(points)[..., None], self.continued(points), 0))

    def covers(self, points: Matrix) -> npt.NDArray[np.bool_]:
        """Which world points (..., D) lie on the displacement's lattice, its outer half voxel included."""
        index = map_points(invert_matrix(self.lattice), points)
        inside = (index >= -0.5) & (index < np.array(self.displacement.shape[:-1]) - 0.5)
        return np.asarray(inside.all(axis=-1))

    def continued(self, points: Matrix) -> Matrix:
        """u at world points (..., D), continued by its border values for ever."""
        unit = map_points(invert_matrix(self.lattice), points) * Grid.of(self.displacement.shape[:-1]).spacing
        values = interpolate(self._tensor, torch.from_numpy(unit).reshape(1, -1, self.dim))
        return np.asarray(values[0].numpy().T.reshape(points.shape))

    @functools.cached_property
    def _tensor(self) -> Tensor:  # (1, D, *shape)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(self.displacement, -1, 0), dtype=np.float64))[None]

    @functools.cached_property
    def _index_tensor(self) -> Tensor:  # (1, D, *shape), in the lattice's own indices
        turned = self.displacement @ invert_matrix(self.lattice)[:-1, :-1].T.astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(turned, -1, 0)))[None]

    def to_sitk(self) -> Any:
        """A SimpleITK CompositeTransform of the affine and the displacement part, or an AffineTransform alone."""
        sitk = _sitk()
        affine = sitk.AffineTransform(self.dim)
        affine.SetMatrix(self.affine[:-1, :-1].ravel().tolist())
        affine.SetTranslation(self.affine[:-1, -1].tolist())
        if self.is_linear:
            return affine
        field = _vector_image(self.displacement.astype(np.float64), self.lattice)
        # The last one acts first.
        return sitk.CompositeTransform([affine, sitk.DisplacementFieldTransform(field)])


@dataclass(frozen=True, eq=False)
class ItkTransform:
    """Any other SimpleITK transform, a B-spline say, on world points. `sample` makes a WorldTransform of it."""

    transform: Any  # SimpleITK.Transform

    @property
    def dim(self) -> int:
        return int(self.transform.GetDimension())

    def __call__(self, points: npt.ArrayLike) -> Matrix:
        points = np.asarray(points, dtype=np.float64)
        moved = [self.transform.TransformPoint(point) for point in points.reshape(-1, points.shape[-1]).tolist()]
        return np.array(moved).reshape(points.shape)

    def to_sitk(self) -> Any:
        return self.transform


def invert_matrix(matrix: Matrix) -> Matrix:
    return np.asarray(np.linalg.inv(matrix), dtype=np.float64)


# ---- from networks and functions ------------------------------------------------------------------------------------


def to_world(
    phi: Transform, fixed: Image, moving: Image, affine: Matrix | None = None, *, grid: Image | None = None
) -> WorldTransform:
    """T = U_M ∘ φ ∘ U_F⁻¹ for φ from `fixed`'s to `moving`'s unit coordinates (a batch of one), the images whose unit
    coordinates those are. U takes unit coordinates to the world.

    u lies on the voxels of `grid`, an image in the fixed image's world (`fixed` itself if none is given): the scan as
    it is stored, where `fixed` is the scan as the network saw it. `affine` (D + 1, D + 1) is the part A; see `sample`.

    >>> T = to_world(model(moving_tensor, fixed_tensor), to_closest_ras(fixed), to_closest_ras(moving), grid=fixed)
    """
    precise = phi.map_tensors(lambda tensor: tensor.detach().cpu().double())
    world_to_unit, unit_to_world = fixed.world_to_unit(), moving.unit_to_world()

    def world(points: Matrix) -> Matrix:
        unit = torch.from_numpy(map_points(world_to_unit, points)).reshape(1, -1, fixed.dim)
        moved = precise(unit)
        if len(moved) != 1:
            raise ValueError(f"phi holds a batch of {len(moved)} maps; expected one: use phi[0:1]")
        return map_points(unit_to_world, moved.numpy().reshape(points.shape))

    return sample(world, grid or fixed, affine)


def sample(function: PointMap, grid: Image, affine: Matrix | None = None) -> WorldTransform:
    """A map of world points as a WorldTransform, its displacements on the voxels of `grid`.

    A is the least-squares fit to the map on the grid unless it is given, so that it is a registration of its own. Where
    that fit is nearly flat, A is the mean shift alone.
    """
    centre = map_points(grid.affine, (np.array(grid.shape) - 1) / 2)[None]
    common = function(centre) - centre  # apart, since float32 would round distant origins
    shift = np.empty((*grid.shape, grid.dim), np.float32)
    for rows, points in _slabs(grid):
        shift[rows] = function(points) - points - common
    matrix = _fit(grid, shift, common) if affine is None else np.array(affine, dtype=np.float64)
    inverse = invert_matrix(matrix)
    for rows, points in _slabs(grid):
        shift[rows] = map_points(inverse, points + common + shift[rows]) - points
    return WorldTransform(matrix, shift, grid.index_to_world())


def compose(outer: PointMap, inner: PointMap, grid: Image) -> WorldTransform:
    """x ↦ outer(inner(x)): exact where either is affine, otherwise sampled on the voxels of `grid`."""
    if isinstance(outer, WorldTransform) and isinstance(inner, WorldTransform):
        if outer.is_linear:
            return WorldTransform(outer.affine @ inner.affine, inner.displacement, inner.lattice)
        if inner.is_linear:
            return _after_affine(outer, inner.affine)
    return sample(lambda points: outer(inner(points)), grid)


def _slabs(grid: Image) -> Iterator[tuple[slice, Matrix]]:
    """The world positions (n, ..., D) of the image's voxels, some rows of the first axis at a time."""
    for rows in _row_slices(grid):
        yield rows, _voxel_positions(grid, rows)


def _row_slices(grid: Image) -> Iterator[slice]:
    step = max(1, SLAB * grid.shape[0] // grid.data.size)
    for start in range(0, grid.shape[0], step):
        yield slice(start, min(start + step, grid.shape[0]))


def _voxel_positions(grid: Image, rows: slice) -> Matrix:
    """World positions (n, ..., D) of the voxels in some rows of the first axis."""
    index = np.meshgrid(np.arange(rows.start, rows.stop), *(np.arange(n) for n in grid.shape[1:]), indexing="ij")
    return map_points(grid.affine, np.stack(index, axis=-1))


def _fit(grid: Image, shift: Field, common: Matrix) -> Matrix:
    """The affine map x + B(x − c) + b closest to x + shift(x) + common on the grid."""
    dim = grid.dim
    centre = map_points(grid.affine, (np.array(grid.shape) - 1) / 2)
    left, right = np.zeros((dim + 1, dim + 1)), np.zeros((dim + 1, dim))
    for rows, points in _slabs(grid):
        flat = np.concatenate([points - centre, np.ones_like(points[..., :1])], axis=-1).reshape(-1, dim + 1)
        left += flat.T @ flat
        right += flat.T @ shift[rows].reshape(-1, dim)
    # Of the shift, not of the map: along an axis of one voxel the smallest solution leaves everything in place.
    solution = np.linalg.lstsq(left, right, rcond=1e-12)[0]
    linear = solution[:-1].T
    if np.linalg.norm(np.eye(dim) + linear, -2) < FLATTEST:  # the smallest singular value
        linear = np.zeros((dim, dim))
    matrix = np.eye(dim + 1)
    matrix[:-1, :-1] += linear
    matrix[:-1, -1] = solution[-1] + common[0] - linear @ centre
    return matrix


# ---- use ------------------------------------------------------------------------------------------------------------


def invert(
    transform: WorldTransform, grid: Image, *, steps: int = 100, tolerance: float = 1e-3
) -> tuple[WorldTransform, Field]:
    """T⁻¹, its displacements on the voxels of `grid`, an image in the moving image's world; and |T(T⁻¹(y)) − y| in mm
    at each of those voxels y.

    Where T⁻¹(y) lies beyond the lattice of u, there is no displacement to undo: T⁻¹ undoes u's border values, so that
    it stays smooth, and the residual is NaN. Each point stops at `tolerance` mm or after `steps`; where T folds there
    may be no solution, and the residual says so.

    >>> inverse, residual = invert(T, moving)
    >>> np.nanmax(residual)
    """
    undo = invert_matrix(transform.affine)
    shift, residual = np.empty((*grid.shape, grid.dim), np.float32), np.empty(grid.shape, np.float32)
    for rows, points in _slabs(grid):
        # A(x + u(x)) = y is x + u(x) = A⁻¹ y.
        solution = _solve(transform, map_points(undo, points).reshape(-1, grid.dim), steps, tolerance)
        solution = solution.reshape(points.shape)
        shift[rows] = map_points(transform.affine, solution) - points
        missed = np.linalg.norm(transform(solution) - points, axis=-1)
        residual[rows] = np.where(transform.covers(solution), missed, np.nan)
    return WorldTransform(undo, shift, grid.index_to_world()), residual


def invert_points(transform: WorldTransform, points: npt.ArrayLike) -> tuple[Matrix, Matrix]:
    """T⁻¹ at some world points (N, D) of the moving image, and how far T misses each of them from there, in mm: NaN
    where T⁻¹ lies beyond the lattice of u."""
    target = np.asarray(points, dtype=np.float64)
    if transform.is_linear:
        return map_points(invert_matrix(transform.affine), target), np.zeros(len(target))
    found = _solve(transform, map_points(invert_matrix(transform.affine), target), steps=100, tolerance=1e-4)
    missed = np.linalg.norm(transform(found) - target, axis=-1)
    return found, np.where(transform.covers(found), missed, np.nan)


def jacobian_determinant(transform: PointMap, grid: Image) -> Image:
    """det ∇T at the voxels of `grid`, an image in the fixed image's world, as a float32 image: above 1 where the moving
    image has more volume, below 0 where T folds. Central differences over one voxel, one-sided at the border.

    >>> folds_percent(jacobian_determinant(T, fixed))
    """
    if min(grid.shape) < 2:
        raise TransformError(f"{grid.name} has {grid.shape} voxels; expected at least 2 along every axis")
    world_to_index, result = invert_matrix(grid.affine), np.empty(grid.shape, np.float32)
    for rows in _row_slices(grid):
        around = slice(max(rows.start - 1, 0), min(rows.stop + 1, grid.shape[0]))
        moved = map_points(world_to_index, transform(_voxel_positions(grid, around)))
        # A step beyond the border, continued straight, makes the central difference there a one-sided one.
        ends = [(int(around.start == rows.start), int(around.stop == rows.stop)), *[(1, 1)] * (grid.dim - 1), (0, 0)]
        padded = np.pad(moved, ends, mode="reflect", reflect_type="odd")
        result[rows] = jacobian.determinant_per_voxel(torch.from_numpy(padded)[None])[0].numpy()
    return Image(result, grid.index_to_world(), "jacobian")


def folds_percent(determinants: Image) -> float:
    """% |J| < 0 without the outermost voxels, the one definition for `carl register`, `carl jacobian` and `carl
    evaluate`; `determinants` is the result of `jacobian_determinant`."""
    return jacobian.folds_percent(_without_border(determinants))


def sd_log_jacobian(determinants: Image) -> float:
    """SDlogJ as in Learn2Reg's tables, see `carlreg.geometry.jacobian.sd_log_jacobian`."""
    return jacobian.sd_log_jacobian(_without_border(determinants))


def _without_border(image: Image) -> Tensor:
    inner = image.data[tuple(slice(1, -1) if n > 2 else slice(None) for n in image.shape)]
    return torch.from_numpy(np.ascontiguousarray(inner))[None]


def _solve(transform: WorldTransform, target: Matrix, steps: int, tolerance: float) -> Matrix:
    """x with x + u(x) = target, (N, D). Most points need a few cheap steps x ← target − u(x); where u is steep,
    Newton's method takes over. In the lattice's indices and float32, whose rounding is far below a useful tolerance."""
    to_world = torch.from_numpy(transform.lattice[:-1, :-1].T).float()
    unit = torch.tensor(Grid.of(transform.displacement.shape[:-1]).spacing)
    goal = torch.from_numpy(map_points(invert_matrix(transform.lattice), target)).float()
    field, dim = transform._index_tensor, transform.dim

    def missed(points: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of x + u(x) − target, and its length in mm."""
        left = points + interpolate(field, (points * unit)[None])[0].mT - of
        return left, (left @ to_world).norm(dim=-1)

    best, active = goal.clone(), torch.arange(len(goal))
    here, end = goal, goal
    residual, error = missed(here, end)
    step = torch.ones(len(goal))
    for number in range(CHEAP + steps):
        trial = here - residual
        if number >= CHEAP:
            nudge = 1e-2 * torch.eye(dim)
            slopes = [(missed(here + nudge[axis], end)[0] - residual) / 1e-2 for axis in range(dim)]
            slope = torch.stack(slopes, dim=-1)
            slope[torch.linalg.det(slope).abs() < 1e-2] = torch.eye(dim)
            trial = here - step[:, None] * torch.linalg.solve(slope, residual[..., None])[..., 0]
        left, length = missed(trial, end)
        better = length < error
        here = torch.where(better[:, None], trial, here)
        residual, error = torch.where(better[:, None], left, residual), torch.where(better, length, error)
        best[active] = here
        if number >= CHEAP:
            step = torch.where(better, (2 * step).clamp(max=1), step / 2)
        (going,) = torch.nonzero((error > tolerance) & (step > 1e-3), as_tuple=True)
        if len(going) == 0:
            break
        if len(going) < 0.9 * len(active):  # the others are done: go on with these alone
            active, here, end, residual = active[going], here[going], end[going], residual[going]
            error, step = error[going], step[going]
    return map_points(transform.lattice, best.double().numpy())


def apply(
    transform: PointMap,
    image: Image,
    like: Image,
    interpolation: Interpolation = "linear",
    outside: float | None = None,
) -> Image:
    """The moving image on the voxels of `like`, an image in the fixed image's world: image ∘ T, in its own type.

    Integers are rounded to the nearest. Voxels whose T(x) lies more than half a voxel beyond the outermost voxel
    centres become `outside`: without it 0, or the image's lowest value if that is negative, which is air in a CT.
    Use "nearest" for labels.

    >>> warped = apply(T, moving, like=fixed)
    """
    if interpolation not in ("linear", "nearest"):
        raise ValueError(f"unknown interpolation {interpolation!r}; expected 'linear' or 'nearest'")
    result = np.empty(like.shape, image.data.dtype)
    whole = result.dtype.kind in "iu"
    if outside is None:
        outside = min(0, image.data.min().item())
    if whole and not (np.iinfo(result.dtype).min <= outside <= np.iinfo(result.dtype).max and outside % 1 == 0):
        raise ValueError(f"outside is {outside}, which {image.name}'s type {result.dtype} cannot hold")
    world_to_index, sides = invert_matrix(image.affine), np.array(image.shape)
    tensor = torch.from_numpy(image.data.astype(np.float64))[None, None] if interpolation == "linear" else None
    for rows, points in _slabs(like):
        index = map_points(world_to_index, transform(points))
        inside = ((index >= -0.5) & (index < sides - 0.5)).all(axis=-1)
        if tensor is None:
            nearest = np.clip(np.floor(index + 0.5), 0, sides - 1).astype(np.intp)
            values = image.data[tuple(np.moveaxis(nearest, -1, 0))]
        else:
            unit = torch.from_numpy(index * Grid.of(image.shape).spacing).reshape(1, -1, image.dim)
            values = interpolate(tensor, unit).numpy().reshape(inside.shape)
            values = np.rint(values) if whole else values
        result[rows] = values
        result[rows][~inside] = outside
    return Image(result, like.index_to_world(), image.name)


def learn2reg(transform: PointMap, fixed: Image, moving: Image) -> Field:
    """The displacement (*shape, D) in voxels, as Learn2Reg's evaluation wants it in `disp_0001_0002.nii.gz`: the moving
    array is sampled at index + displacement, for every index of the fixed one. Both images must have the same grid.
    """
    if fixed.shape != moving.shape or _largest_shift(moving.affine, fixed) > 0.01 * min(fixed.spacing):
        raise TransformError(
            f"{fixed.name} and {moving.name} have different grids ({fixed.shape}, {moving.shape}, or other headers); "
            "expected one grid, where a displacement in voxels has a meaning: resample one to the other's"
        )
    field = np.empty((*fixed.shape, fixed.dim), np.float32)
    undo = invert_matrix(moving.affine)[:-1, :-1]
    for rows, points in _slabs(fixed):
        field[rows] = (transform(points) - points) @ undo.T
    return field


def _vector_image(vectors: npt.NDArray[Any], lattice: Matrix) -> Any:
    image = _sitk().GetImageFromArray(np.ascontiguousarray(_itk_order(vectors)), isVector=True)
    spacing = np.linalg.norm(lattice[:-1, :-1], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lattice[:-1, :-1] / spacing).ravel().tolist())
    image.SetOrigin(lattice[:-1, -1].tolist())
    return image


def _itk_order(vectors: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(x, y, z, D) to (z, y, x, D) and back: ITK's arrays have the last axis first."""
    dim = vectors.ndim - 1
    return vectors.transpose(*reversed(range(dim)), dim)


def _after_affine(outer: WorldTransform, before: Matrix) -> WorldTransform:
    """x ↦ T(Bx), exactly: A(Bx + u(Bx)) = AB(x + B⁻¹u(Bx))."""
    if outer.is_linear or np.array_equal(before, np.eye(outer.dim + 1)):
        return WorldTransform(outer.affine @ before, outer.displacement, outer.lattice)
    undo = invert_matrix(before)
    turned = np.ascontiguousarray(outer.displacement @ undo[:-1, :-1].T, np.float32)
    return WorldTransform(outer.affine @ before, turned, undo @ outer.lattice)
