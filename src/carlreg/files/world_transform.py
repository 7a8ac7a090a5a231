"""Transforms between world spaces, to and from the files of ITK, SimpleITK, ANTs, 3D Slicer and Learn2Reg.

Convention: T maps points of the fixed image's world to points of the moving image's world, in millimetres, LPS. Images
pull, points push: the warped image at a fixed point x is the moving image at T(x); a landmark x of the fixed image lies
at T(x) in the moving image, and landmarks of the moving image need the inverse.

SimpleITK is imported where it is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.files.checks import distance
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.itk import itk_order, simpleitk, vector_image
from carlreg.geometry import jacobian
from carlreg.geometry.grids import Grid, Interpolation, interpolate
from carlreg.geometry.transforms import Transform

Field = npt.NDArray[np.float32]
Box = tuple[slice, ...]
PointMap = Callable[[Matrix], Matrix]
"""World points (..., D) to world points (..., D): a WorldTransform, an ItkTransform, any function."""

SLAB = 2**19
"""Voxels computed at a time, so that large images need little memory beyond their own."""
CHEAP = 10
"""Steps of the plain fixed-point iteration before Newton's method, when a transform is inverted."""
FLATTEST = 0.1
"""The smallest singular value of a fitted affine part: the inverse of a flatter one would inflate displacements."""


class TransformError(InputError):
    """A file that is not a usable transform, or a transform that a file cannot hold."""


@dataclass(frozen=True, eq=False)
class WorldTransform:
    """T(x) = A(x + u(x)), from fixed to moving world points (LPS, mm).

    u is interpolated linearly between the points of its lattice. As in ITK, it is extrapolated by its border values for
    half a voxel and is zero beyond that, where T is A alone.

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
                f"{self.lattice.shape} do not match; expected (D + 1, D + 1), (*shape, D) and (D + 1, D + 1)"
            )

    @classmethod
    def linear(cls, affine: npt.ArrayLike) -> WorldTransform:
        """An affine map alone, from a matrix (D + 1, D + 1)."""
        matrix = np.array(affine, dtype=np.float64)
        dim = len(matrix) - 1
        if matrix.shape not in ((3, 3), (4, 4)) or not np.array_equal(matrix[-1], np.eye(dim + 1)[-1]):
            raise TransformError(
                f"a matrix of shape {matrix.shape} is not an affine map; expected (D + 1, D + 1), last row 0 … 0 1"
            )
        if not np.isfinite(matrix).all() or abs(np.linalg.det(matrix)) < 1e-12:
            raise TransformError("the matrix is singular or not finite; expected an invertible affine map")
        return cls(matrix, np.zeros((*(1,) * dim, dim), np.float32), np.eye(dim + 1))

    @property
    def dim(self) -> int:
        return self.displacement.ndim - 1

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether T is affine: u is zero everywhere."""
        return not self.displacement.any()

    def __call__(self, points: npt.ArrayLike) -> Matrix:
        points = np.asarray(points, dtype=np.float64)
        if points.shape[-1:] != (self.dim,):
            raise TransformError(f"points have shape {points.shape}; expected (..., {self.dim}) for this transform")
        if self.is_linear:
            return map_points(self.affine, points)
        return map_points(self.affine, points + np.where(self.covers(points)[..., None], self.continued(points), 0))

    def covers(self, points: Matrix) -> npt.NDArray[np.bool_]:
        """Which world points (..., D) lie inside the displacement's lattice, including its outer half voxel."""
        index = map_points(np.linalg.inv(self.lattice), points)
        inside = (index >= -0.5) & (index < np.array(self.displacement.shape[:-1]) - 0.5)
        return np.asarray(inside.all(axis=-1))

    def continued(self, points: Matrix) -> Matrix:
        """u at world points (..., D), continued by its border values everywhere."""
        index = torch.from_numpy(map_points(np.linalg.inv(self.lattice), points))
        return np.asarray(_interpolate(self.displacement, index.reshape(-1, self.dim)).numpy().reshape(points.shape))

    def to_sitk(self) -> Any:
        """A SimpleITK AffineTransform, DisplacementFieldTransform, or CompositeTransform of both."""
        sitk = simpleitk()
        affine = sitk.AffineTransform(self.dim)
        affine.SetMatrix(self.affine[:-1, :-1].ravel().tolist())
        affine.SetTranslation(self.affine[:-1, -1].tolist())
        if self.is_linear:
            return affine
        field = sitk.DisplacementFieldTransform(vector_image(self.displacement.astype(np.float64), self.lattice))
        if np.array_equal(self.affine, np.eye(self.dim + 1)):
            return field
        return sitk.CompositeTransform([affine, field])  # the last one acts first


@dataclass(frozen=True, eq=False)
class ItkTransform:
    """Any other SimpleITK transform, for example a B-spline, as a map of world points."""

    transform: Any  # SimpleITK.Transform

    @property
    def dim(self) -> int:
        return int(self.transform.GetDimension())

    def __call__(self, points: npt.ArrayLike) -> Matrix:
        points = np.asarray(points, dtype=np.float64)
        if points.size == 0:
            return points.copy()
        # SimpleITK maps one point at a time, but all points of a lattice at once. The lattice is a line of N points
        # whose displacements lead to ours; both are then mapped by one composite.
        flat = points.reshape(-1, *(1,) * (self.dim - 1), self.dim)
        line = np.zeros_like(flat)
        line[..., 0] = np.arange(len(flat)).reshape(flat.shape[:-1])
        sitk = simpleitk()
        to_points = sitk.DisplacementFieldTransform(vector_image(flat - line, np.eye(self.dim + 1)))
        both = sitk.CompositeTransform([self.transform, to_points])  # the last one acts first
        shift = sitk.TransformToDisplacementField(both, sitk.sitkVectorFloat64, flat.shape[:-1])
        return np.asarray((itk_order(sitk.GetArrayViewFromImage(shift)) + line).reshape(points.shape))

    def to_sitk(self) -> Any:
        return self.transform


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
            raise InputError(f"phi holds a batch of {len(moved)} maps; expected one: use phi[0:1]")
        return map_points(unit_to_world, moved.numpy().reshape(points.shape))

    return sample(world, grid or fixed, affine)


def sample(function: PointMap, grid: Image, affine: Matrix | None = None) -> WorldTransform:
    """A map of world points as a WorldTransform, its displacements on the voxels of `grid`.

    A is the least-squares fit to the map on the grid unless it is given, so that it is a registration by itself. If the
    fit is nearly flat, A is the mean shift.
    """
    centre = map_points(grid.affine, (np.array(grid.shape) - 1) / 2)[None]
    common = function(centre) - centre  # apart, since float32 would round distant origins
    shift = _empty_field(grid)
    for box, points in slabs(grid):
        shift[box] = function(points) - points - common
    matrix = _fit(grid, shift, common) if affine is None else np.array(affine, dtype=np.float64)
    inverse = np.linalg.inv(matrix)
    for box, points in slabs(grid):
        shift[box] = map_points(inverse, points + common + shift[box]) - points
    return WorldTransform(matrix, shift, grid.index_to_world())


def compose(outer: PointMap, inner: PointMap, grid: Image) -> WorldTransform:
    """x ↦ outer(inner(x)): exact if either is affine, otherwise sampled on the voxels of `grid`."""
    return compose_exactly(outer, inner) or sample(lambda points: outer(inner(points)), grid)


def compose_exactly(outer: PointMap, inner: PointMap) -> WorldTransform | None:
    """x ↦ outer(inner(x)) if either is affine and both are WorldTransforms, otherwise None."""
    if not isinstance(outer, WorldTransform) or not isinstance(inner, WorldTransform):
        return None
    affine = outer.affine @ inner.affine
    if outer.is_linear:
        return WorldTransform(affine, inner.displacement, inner.lattice)
    if not inner.is_linear:
        return None
    if np.array_equal(inner.affine, np.eye(inner.dim + 1)):
        return outer
    # A(Bx + u(Bx)) = AB(x + B⁻¹u(Bx))
    undo = np.asarray(np.linalg.inv(inner.affine), np.float64)
    return WorldTransform(affine, (outer.displacement @ undo[:-1, :-1].T).astype(np.float32), undo @ outer.lattice)


def slabs(grid: Image) -> Iterator[tuple[Box, Matrix]]:
    """The image's voxels, `SLAB` at a time: the slices of a slab, and its world positions (..., D)."""
    for box in _slab_boxes(grid):
        yield box, _voxel_positions(grid, box)


def _slab_boxes(grid: Image, count: int = SLAB) -> Iterator[Box]:
    """Slabs across the last axis, which is the slowest in ITK's files, or across the longest if those are too large."""
    rows = grid.data.size // np.array(grid.shape)  # voxels in a slab of one row, for each axis
    axis = grid.dim - 1 if rows[-1] <= count else int(rows.argmin())
    step = max(1, count // int(rows[axis]))
    box = [slice(0, n) for n in grid.shape]
    for start in range(0, grid.shape[axis], step):
        box[axis] = slice(start, min(start + step, grid.shape[axis]))
        yield tuple(box)


def _voxel_positions(grid: Image, box: Box) -> Matrix:
    index = np.meshgrid(*(np.arange(rows.start, rows.stop) for rows in box), indexing="ij")
    return map_points(grid.affine, np.stack(index, axis=-1))


def _empty_field(grid: Image) -> Field:
    """Room for displacements (*shape, D), in memory as ITK's files have them, so that writing needs no copy."""
    return itk_order(np.empty((*grid.shape[::-1], grid.dim), np.float32))


def _interpolate(values: npt.NDArray[Any], index: Tensor) -> Tensor:
    """(*shape, C) at fractional indices (N, D), linearly, continued by the border: (N, C) in the precision of `index`.

    Values of another type are converted only in the box around the indices. If it is much larger than their number,
    they are split along its longest side.
    """
    kind = np.dtype(np.float64 if index.dtype == torch.float64 else np.float32)
    if len(index) == 0:
        return index.new_empty(0, values.shape[-1])
    if values.dtype == kind:
        unit = index * torch.tensor(Grid.of(values.shape[:-1]).spacing, dtype=index.dtype)
        return interpolate(torch.from_numpy(np.moveaxis(values, -1, 0))[None], unit[None])[0].mT
    lowest, highest = index.aminmax(dim=0)
    if not bool(torch.isfinite(highest - lowest).all()):
        return _interpolate(values, index.nan_to_num(0, 1e30, -1e30))
    last = np.array(values.shape[:-1]) - 1
    low, high = (np.clip(edge.numpy(), 0, last).astype(int) for edge in (lowest.floor(), highest.ceil()))
    size = high - low + 1
    if math.prod(size.tolist()) > max(2**20, 8 * len(index)):
        order = index[:, int(size.argmax())].argsort()
        result = index.new_empty(len(index), values.shape[-1])
        for part in order.tensor_split(2):
            result[part] = _interpolate(values, index[part])
        return result
    box = values[tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))]
    return _interpolate(box.astype(kind), index - torch.from_numpy(low))


def _fit(grid: Image, shift: Field, common: Matrix) -> Matrix:
    """The affine map x + B(x − c) + b closest to x + shift(x) + common on the grid."""
    dim = grid.dim
    centre = map_points(grid.affine, (np.array(grid.shape) - 1) / 2)
    left, right = np.zeros((dim + 1, dim + 1)), np.zeros((dim + 1, dim))
    for box, points in slabs(grid):
        flat = np.concatenate([points - centre, np.ones_like(points[..., :1])], axis=-1).reshape(-1, dim + 1)
        left += flat.T @ flat
        right += flat.T @ shift[box].reshape(-1, dim)
    # The shift is fitted, not the map: along an axis of one voxel the smallest solution leaves everything in place.
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

    Beyond the lattice of u, T⁻¹ undoes u's border values, so that it stays smooth, and the residual is NaN. Each point
    stops at `tolerance` mm or after `steps`. Where T folds there may be no solution; the residual is then large.

    >>> inverse, residual = invert(T, moving)
    >>> np.nanmax(residual)
    """
    undo = np.asarray(np.linalg.inv(transform.affine), np.float64)
    shift, residual = _empty_field(grid), np.empty(grid.shape[::-1], np.float32).T
    for box, points in slabs(grid):
        # A(x + u(x)) = y is x + u(x) = A⁻¹ y.
        solution = _solve(transform, map_points(undo, points).reshape(-1, grid.dim), steps, tolerance)
        solution = solution.reshape(points.shape)
        shift[box] = map_points(transform.affine, solution) - points
        missed = np.linalg.norm(transform(solution) - points, axis=-1)
        residual[box] = np.where(transform.covers(solution), missed, np.nan)
    return WorldTransform(undo, shift, grid.index_to_world()), residual


def invert_points(transform: WorldTransform, points: npt.ArrayLike) -> tuple[Matrix, Matrix]:
    """x = T⁻¹(y) at world points y (N, D) of the moving image, and |T(x) − y| in mm: NaN where x lies beyond the
    lattice of u."""
    target = np.asarray(points, dtype=np.float64)
    if transform.is_linear:
        return map_points(np.linalg.inv(transform.affine), target), np.zeros(len(target))
    solution = _solve(transform, map_points(np.linalg.inv(transform.affine), target), steps=100, tolerance=1e-4)
    missed = np.linalg.norm(transform(solution) - target, axis=-1)
    return solution, np.where(transform.covers(solution), missed, np.nan)


def jacobian_determinant(transform: PointMap, grid: Image) -> Image:
    """det ∇T at the voxels of `grid`, an image in the fixed image's world, as a float32 image: above 1 where the moving
    image has more volume, below 0 where T folds. Central differences over one voxel, one-sided at the border.

    >>> folds_percent(jacobian_determinant(T, fixed))
    """
    if min(grid.shape) < 2:
        raise TransformError(f"{grid.name} has {grid.shape} voxels; expected at least 2 along every axis")
    world_to_index, result = np.linalg.inv(grid.affine), np.empty(grid.shape, np.float32)
    for box in _slab_boxes(grid, 2 * SLAB):  # neighbouring slabs overlap by two rows
        around = tuple(slice(max(b.start - 1, 0), min(b.stop + 1, n)) for b, n in zip(box, grid.shape, strict=True))
        moved = map_points(world_to_index, transform(_voxel_positions(grid, around)))
        # One more voxel at the border, continued straight, makes the central difference there a one-sided one.
        missing = [(int(a.start == b.start), int(a.stop == b.stop)) for a, b in zip(around, box, strict=True)]
        padded = np.pad(moved, [*missing, (0, 0)], mode="reflect", reflect_type="odd")
        result[box] = jacobian.determinant_per_voxel(torch.from_numpy(padded)[None])[0].numpy()
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
    return torch.from_numpy(inner)[None]


def _solve(transform: WorldTransform, target: Matrix, steps: int, tolerance: float) -> Matrix:
    """x with x + u(x) = target, (N, D). Most points need a few cheap steps x ← target − u(x); where u is steep,
    Newton's method takes over. In the lattice's indices and float32, whose rounding is far below a useful tolerance."""
    to_index = np.linalg.inv(transform.lattice)
    turn_to_world, turn_to_index = (torch.from_numpy(m[:-1, :-1].T).float() for m in (transform.lattice, to_index))
    goal, dim = torch.from_numpy(map_points(to_index, target)).float(), transform.dim

    def missed(points: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """x + u(x) − target, and its length in mm."""
        left = points + _interpolate(transform.displacement, points) @ turn_to_index - goal
        return left, (left @ turn_to_world).norm(dim=-1)

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
    centres become `outside`: by default 0, or the image's lowest value if that is negative, as in CT, where it is air.
    Use "nearest" for labels. Colours are warped alike.

    >>> warped = apply(T, moving, like=fixed)
    """
    if interpolation not in ("linear", "nearest"):
        raise InputError(f"unknown interpolation {interpolation!r}; expected 'linear' or 'nearest'")
    parts = image.data[..., None]
    if image.colours is not None:
        parts = np.concatenate([parts, image.colours], axis=-1)
    result = np.empty((*like.shape, parts.shape[-1]), parts.dtype)
    whole = result.dtype.kind in "iu"
    if outside is None:
        outside = min(0, image.data.min().item())
    if whole and not (np.iinfo(result.dtype).min <= outside <= np.iinfo(result.dtype).max and outside % 1 == 0):
        raise InputError(f"outside is {outside}, which {image.name}'s type {result.dtype} cannot hold")
    world_to_index, sides = np.linalg.inv(image.affine), np.array(image.shape)
    for box, points in slabs(like):
        index = map_points(world_to_index, transform(points))
        inside = ((index >= -0.5) & (index < sides - 0.5)).all(axis=-1)
        if interpolation == "nearest":
            nearest = np.clip(np.floor(index + 0.5), 0, sides - 1).astype(np.intp)
            values = parts[tuple(np.moveaxis(nearest, -1, 0))]
        else:
            flat = torch.from_numpy(index).reshape(-1, image.dim)
            values = _interpolate(parts, flat).numpy().reshape(*inside.shape, -1)
            values = np.rint(values) if whole else values
        result[box] = values
        result[box][~inside] = outside
    colours = None if image.colours is None else result[..., 1:]
    return Image(np.ascontiguousarray(result[..., 0]), like.index_to_world(), image.name, colours)


def learn2reg(transform: PointMap, fixed: Image, moving: Image) -> Field:
    """The displacement (*shape, D) in voxels that Learn2Reg's evaluation reads from `disp_0001_0002.nii.gz`: the moving
    array is sampled at index + displacement, for every index of the fixed one. Both images must have the same grid.
    """
    if fixed.shape != moving.shape or distance(moving.affine, fixed.affine, fixed.shape) > 0.01 * min(fixed.spacing):
        raise TransformError(
            f"{fixed.name} and {moving.name} have different grids ({fixed.shape}, {moving.shape}, or other headers); "
            "expected one grid, where a displacement in voxels has a meaning: resample one to the other's"
        )
    field = _empty_field(fixed)
    undo = np.linalg.inv(moving.affine)[:-1, :-1]
    for box, points in slabs(fixed):
        field[box] = (transform(points) - points) @ undo.T
    return field
