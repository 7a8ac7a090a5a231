"""Transforms between world spaces, to and from the files of ITK, SimpleITK, ANTs, 3D Slicer and Learn2Reg.

Convention: T maps points of the fixed image's world to points of the moving image's world, in millimetres, LPS. Images
pull, points push: the warped image at a fixed point x is the moving image at T(x); a landmark x of the fixed image lies
at T(x) in the moving image, and landmarks of the moving image need the inverse.

SimpleITK is imported where it is used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.files.checks import distance, times
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.itk import itk_order, simpleitk, vector_image
from carlreg.geometry import jacobian
from carlreg.geometry.grids import Grid, Interpolation, interpolate, sample_with_slopes
from carlreg.geometry.transforms import Transform

Field = npt.NDArray[np.float32]
Box = tuple[slice, ...]
PointMap = Callable[[Matrix], Matrix]
"""World points (..., D) to world points (..., D): a WorldTransform, an ItkTransform, any function."""

SLAB = 2**19
"""Voxels computed at a time, so that large images need little memory beyond their own."""
GPU_SLAB = 2**22
"""The same on a GPU, where few large slabs are faster."""
SMALL = 2**12
"""Grids with fewer voxels are inverted without a coarser one."""
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

    def __repr__(self) -> str:
        with np.printoptions(precision=4, suppress=True):
            matrix = np.array2string(self.affine)
        field = "" if self.is_linear else f" after displacements on {times(self.displacement.shape[:-1])} points"
        return f"{self.dim}-D WorldTransform from fixed to moving points (LPS mm), affine{field}:\n{matrix}"

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
        return map_points(self.affine, points + self._at(self._index(points)).numpy())

    def covers(self, points: Matrix) -> npt.NDArray[np.bool_]:
        """Which world points (..., D) lie inside the displacement's lattice, including its outer half voxel."""
        return np.asarray(self.contains(self._index(points)))

    def _index(self, points: Matrix) -> Tensor:
        return torch.from_numpy(map_points(np.linalg.inv(self.lattice), points))

    def contains(self, index: Tensor) -> Tensor:
        """Which fractional indices (..., D) lie on the lattice of u, including its outer half voxel."""
        return _within(index, self.displacement.shape[:-1])

    def on_voxels(self, grid: Image, box: Box, dtype: torch.dtype) -> Tensor:
        """u at the voxels of a part of a grid, (*sides, D): as they are if the grid is that of u."""
        to_index = np.linalg.inv(self.lattice) @ grid.affine
        if grid.shape == self.displacement.shape[:-1] and np.abs(to_index - np.eye(self.dim + 1)).max() < 1e-7:
            return torch.from_numpy(self.displacement[box]).to(dtype)
        return self._at(_affine_on(to_index, box, dtype=dtype))

    def _at(self, index: Tensor) -> Tensor:
        """u at fractional indices (..., D), in their precision."""
        values = _interpolate(self.displacement, index.reshape(-1, self.dim)).reshape(index.shape)
        return values * self.contains(index)[..., None]

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
    phi: Transform,
    fixed: Image,
    moving: Image,
    affine: Matrix | None = None,
    *,
    grid: Image | None = None,
    device: torch.device | str = "cpu",
) -> WorldTransform:
    """T = U_M ∘ φ ∘ U_F⁻¹ for φ from `fixed`'s to `moving`'s unit coordinates (a batch of one), the images whose unit
    coordinates those are. U takes unit coordinates to the world.

    u lies on the voxels of `grid`, an image in the fixed image's world (`fixed` itself if none is given): the scan as
    it is stored, where `fixed` is the scan as the network saw it. `affine` (D + 1, D + 1) is the part A; see `sample`.
    φ is evaluated on the `device`.

    >>> T = to_world(model(moving_tensor, fixed_tensor), to_closest_ras(fixed), to_closest_ras(moving), grid=fixed)
    """
    grid = grid or fixed
    phi = phi.map_tensors(lambda tensor: tensor.detach().to(device).float())
    to_unit, to_moving = fixed.world_to_unit() @ grid.affine, moving.unit_to_world()
    straight = to_moving @ to_unit - grid.affine  # T(x) − x if φ is the identity
    common = straight @ _centre(grid)

    def shift(box: Box) -> Tensor:
        unit = _affine_on(to_unit, box, device=device)
        moved = phi(unit.reshape(1, -1, grid.dim))
        if len(moved) != 1:
            raise InputError(f"phi holds a batch of {len(moved)} maps; expected one: use phi[0:1]")
        turned = _turned(moved.reshape(unit.shape) - unit, to_moving)
        return (_affine_on(straight, box, common, device=device) + turned).cpu()

    return _decompose(shift, common[:-1], grid, affine)


def sample(function: PointMap, grid: Image, affine: Matrix | None = None) -> WorldTransform:
    """A map of world points as a WorldTransform, its displacements on the voxels of `grid`.

    A is the least-squares fit to the map on the grid unless it is given, so that it is a registration by itself. If the
    fit is nearly flat, A is the mean shift.
    """
    centre = (grid.affine @ _centre(grid))[:-1]
    common = function(centre[None])[0] - centre
    return _decompose(lambda box: _mapped(function, grid, box, None, common), common, grid, affine)


def _decompose(shift: Callable[[Box], Tensor], common: Matrix, grid: Image, affine: Matrix | None) -> WorldTransform:
    """A and u of T(x) = x + shift(x) + common, where `common` is kept apart since float32 would round it."""
    field = itk_order(np.empty((*grid.shape[::-1], grid.dim), np.float32))  # as ITK's files have it: no copy to write
    values = torch.from_numpy(field)
    for box in _slabs(grid):
        values[box] = shift(box)
    matrix = _fit(grid, values, common) if affine is None else np.array(affine, dtype=np.float64)
    undo = np.linalg.inv(matrix)
    rest = undo @ grid.affine - grid.affine
    rest[:-1, -1] += undo[:-1, :-1] @ common
    for box in _slabs(grid):  # A⁻¹(x + shift(x) + common) − x
        values[box] = _affine_on(rest, box) + _turned(values[box], undo)
    return WorldTransform(matrix, field, grid.index_to_world())


def _fit(grid: Image, shift: Tensor, common: Matrix) -> Matrix:
    """The affine map x + B(x − c) + b closest to x + shift(x) + common on the grid. Along an axis of one voxel, B is 0.

    On a grid the axes are independent: each slope is a sum over the means of the planes across its axis.
    """
    dim, slopes = grid.dim, []
    for axis, side in enumerate(grid.shape):
        planes = shift.movedim(axis, 0).flatten(1, -2).mean(dim=1, dtype=torch.float64).numpy()
        index = np.arange(side) - (side - 1) / 2
        slopes.append(index @ planes / max(index @ index, 1e-12))
    linear = np.transpose(slopes) @ np.linalg.inv(grid.affine[:-1, :-1])
    if np.linalg.norm(np.eye(dim) + linear, -2) < FLATTEST:  # the smallest singular value
        linear = np.zeros((dim, dim))
    matrix = np.eye(dim + 1)
    matrix[:-1, :-1] += linear
    matrix[:-1, -1] = planes.mean(axis=0) + common - linear @ (grid.affine @ _centre(grid))[:-1]
    return matrix


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


# ---- on the voxels of an image --------------------------------------------------------------------------------------
# Sums of small numbers: a part that is affine in the index, computed in float64 and added along each axis, and the
# displacements. So float32 is enough however far from the origin the image lies.


def _slabs(grid: Image, count: int = SLAB) -> Iterator[Box]:
    """Slabs across the last axis, which is the slowest in ITK's files, or across the longest if those are too large."""
    rows = grid.data.size // np.array(grid.shape)  # voxels in a slab of one row, for each axis
    axis = grid.dim - 1 if rows[-1] <= count else int(rows.argmin())
    step = max(1, count // int(rows[axis]))
    box = [slice(0, n) for n in grid.shape]
    for start in range(0, grid.shape[axis], step):
        box[axis] = slice(start, min(start + step, grid.shape[axis]))
        yield tuple(box)


def _centre(grid: Image) -> Matrix:
    """The index in the middle of an image, and a one: (D + 1,)."""
    return np.array([*((n - 1) / 2 for n in grid.shape), 1.0])


def _affine_on(
    matrix: Matrix,
    box: Box,
    minus: Matrix | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """matrix · index − minus, at the indices of a box: (*sides, D)."""
    dim = len(box)
    total = torch.from_numpy(matrix[:-1, -1] - (0 if minus is None else minus[:-1])).to(device, dtype)
    for axis, rows in enumerate(box):
        line = torch.from_numpy(np.arange(rows.start, rows.stop)[:, None] * matrix[:-1, axis]).to(device, dtype)
        total = total + line.reshape([-1 if a == axis else 1 for a in range(dim)] + [dim])
    return total


def _turned(vectors: Tensor, matrix: npt.NDArray[np.floating[Any]]) -> Tensor:
    """The linear part of a matrix (D + 1, D + 1), applied to vectors (..., D)."""
    return vectors @ torch.from_numpy(matrix[:-1, :-1].T).to(vectors)


def _mapped(
    transform: PointMap,
    grid: Image,
    box: Box,
    left: npt.NDArray[np.floating[Any]] | None = None,
    minus: Matrix | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`left` ∘ T at voxels of a grid, (*sides of the box, D); without `left`, T(x) − x − `minus`."""
    if not isinstance(transform, WorldTransform):
        index = np.meshgrid(*(np.arange(rows.start, rows.stop) for rows in box), indexing="ij")
        points = map_points(grid.affine, np.stack(index, axis=-1))
        moved = transform(points)
        values = map_points(left, moved) if left is not None else moved - points - (0 if minus is None else minus)
        return torch.from_numpy(values).to(dtype)
    matrix = transform.affine if left is None else left @ transform.affine
    whole = matrix @ grid.affine - (grid.affine if left is None else 0)
    offset = None if minus is None else np.array([*minus, 0.0])
    straight = _affine_on(whole, box, offset, dtype)
    return straight if transform.is_linear else straight + _turned(transform.on_voxels(grid, box, dtype), matrix)


def displacements(transform: PointMap, grid: Image) -> Iterator[tuple[Box, Field]]:
    """T(x) − x at the voxels of an image, slab by slab: the box of the slab, and (*sides, D) in mm."""
    for box in _slabs(grid):
        yield box, _mapped(transform, grid, box).numpy()


# ---- use ------------------------------------------------------------------------------------------------------------


def invert(
    transform: WorldTransform,
    grid: Image,
    *,
    steps: int = 100,
    tolerance: float = 1e-3,
    device: torch.device | str = "cpu",
) -> tuple[WorldTransform, Field]:
    """T⁻¹, its displacements on the voxels of `grid`, an image in the moving image's world; and |T(T⁻¹(y)) − y| in mm
    at each of those voxels y.

    Beyond the lattice of u, T⁻¹ undoes u's border values, so that it stays smooth, and the residual is NaN. Each point
    stops at `tolerance` mm or after `steps`. Where T folds there may be no solution; the residual is then large. The
    equations are solved on the `device`.

    >>> inverse, residual = invert(T, moving)
    >>> np.nanmax(residual)
    """
    undo = np.asarray(np.linalg.inv(transform.affine), np.float64)
    to_index, to_moving = np.linalg.inv(transform.lattice) @ undo @ grid.affine, transform.affine @ transform.lattice
    shift, residual = itk_order(np.empty((*grid.shape[::-1], grid.dim), np.float32)), np.empty(grid.shape, np.float32)
    equation = _Equation.of(transform).to(device)
    coarse = _solve_coarsely(equation, to_index, grid.shape, steps, tolerance)
    for box in _slabs(grid, GPU_SLAB if equation.displacement.is_cuda else SLAB):
        # A(x + u(x)) = y is x + u(x) = A⁻¹ y, in indices of u's lattice
        goal = _affine_on(to_index, box, device=equation.displacement.device)
        start = goal if coarse is None else goal + _doubled(coarse, box)
        solution, left = equation.solve_on(goal, start, steps, tolerance)
        missed = torch.where(transform.contains(solution), _turned(left, to_moving).norm(dim=-1), torch.nan)
        shift[box], residual[box] = _turned(solution - goal, to_moving).numpy(force=True), missed.numpy(force=True)
    return WorldTransform(undo, shift, grid.index_to_world()), residual


def _solve_coarsely(
    equation: _Equation, to_index: Matrix, shape: Sequence[int], steps: int, tolerance: float
) -> Tensor | None:
    """x − goal at every second voxel of a grid, (*sides, D), where the solution is sought from a still coarser one;
    None if the grid is small. It is a good start for all voxels, of which there are eight times as many in 3-D."""
    if math.prod(shape) < SMALL or min(shape) < 4:
        return None
    sides = tuple((n - 1) // 2 + 2 for n in shape)  # one beyond the end
    doubled = to_index @ np.diag([*(2.0,) * len(sides), 1.0])
    coarser = _solve_coarsely(equation, doubled, sides, steps, tolerance)
    box = tuple(slice(0, n) for n in sides)
    goal = _affine_on(doubled, box, device=equation.displacement.device)
    start = goal if coarser is None else goal + _doubled(coarser, box)
    return equation.solve_on(goal, start, steps, tolerance)[0] - goal


def _doubled(values: Tensor, box: Box) -> Tensor:
    """Vectors at every second voxel, (*sides, D), interpolated linearly at the voxels of a box."""
    for axis, rows in enumerate(box):
        first, last = rows.start // 2, (rows.stop - 1) // 2 + 2
        part = values.narrow(axis, first, last - first)
        here, ahead = part.narrow(axis, 0, last - first - 1), part.narrow(axis, 1, last - first - 1)
        both = torch.stack([here, (here + ahead) / 2], dim=axis + 1).flatten(axis, axis + 1)
        values = both.narrow(axis, rows.start - 2 * first, rows.stop - rows.start)
    return values


def invert_points(transform: WorldTransform, points: npt.ArrayLike) -> tuple[Matrix, Matrix]:
    """x = T⁻¹(y) at world points y (N, D) of the moving image, and |T(x) − y| in mm: NaN where x lies beyond the
    lattice of u."""
    target = np.asarray(points, dtype=np.float64)
    undone = map_points(np.linalg.inv(transform.affine), target)
    if transform.is_linear:
        return undone, np.zeros(len(target))
    goal = transform._index(undone).float()
    found, _ = _Equation.of(transform).solve_on(goal, goal, steps=100, tolerance=1e-4)
    solution = map_points(transform.lattice, found.double().numpy())
    missed = np.linalg.norm(transform(solution) - target, axis=-1)
    return solution, np.where(transform.contains(found).numpy(), missed, np.nan)


def jacobian_determinant(transform: PointMap, grid: Image, *, mirrored: bool = False) -> Image:
    """det ∇T at the voxels of `grid`, an image in the fixed image's world, as a float32 image: above 1 where the moving
    image has more volume, below 0 where T folds. Central differences over one voxel, one-sided at the border. Where a
    scan was `mirrored` on purpose, because of its header, they are negated: a fold is what was not.

    >>> folds_percent(jacobian_determinant(T, fixed))
    """
    if min(grid.shape) < 2:
        raise TransformError(f"{grid.name} has {grid.shape} voxels; expected at least 2 along every axis")
    to_index, result = np.linalg.inv(grid.affine), np.empty(grid.shape, np.float32)
    for box in _slabs(grid, 2 * SLAB):  # neighbouring slabs overlap by two rows
        around = tuple(slice(max(b.start - 1, 0), min(b.stop + 1, n)) for b, n in zip(box, grid.shape, strict=True))
        moved = _mapped(transform, grid, around, to_index)
        for axis, (a, b) in enumerate(zip(around, box, strict=True)):
            # One more voxel at the border, continued straight, makes the central difference there a one-sided one.
            first, last = moved.narrow(axis, 0, 2), moved.narrow(axis, -2, 2)
            before = [2 * first.narrow(axis, 0, 1) - first.narrow(axis, 1, 1)] * (a.start == b.start)
            after = [2 * last.narrow(axis, 1, 1) - last.narrow(axis, 0, 1)] * (a.stop == b.stop)
            moved = torch.cat([*before, moved, *after], dim=axis)
        result[box] = jacobian.determinant_per_voxel(moved[None])[0].numpy()
    return Image(-result if mirrored else result, grid.index_to_world(), "jacobian")


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


@dataclass(frozen=True, eq=False)
class _Equation:
    """x + u(x) = goal, in indices of u's lattice and float32, whose rounding is far below a useful tolerance."""

    displacement: Tensor  # (1, D, *shape), in indices
    to_mm: list[list[float]]
    """(D, D), an upper triangle: it makes vectors as long as the lattice does."""

    @classmethod
    def of(cls, transform: WorldTransform) -> _Equation:
        axes = transform.lattice[:-1, :-1]
        field = torch.from_numpy(np.moveaxis(transform.displacement, -1, 0)).float()
        turned = torch.tensordot(torch.from_numpy(np.linalg.inv(axes)).float(), field, dims=1)
        return cls(turned[None].contiguous(), np.linalg.qr(axes)[1].tolist())

    def to(self, device: torch.device | str) -> _Equation:
        return replace(self, displacement=self.displacement.to(device))

    def missed(self, points: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """At points (D, N): x + u(x) − goal, its length in mm, (N,), and its derivatives by x, (D, D, N)."""
        last = points.new_tensor([max(n - 1, 1) for n in self.displacement.shape[2:]])[:, None]
        shift, slopes = sample_with_slopes(self.displacement, points / last)
        left, slopes = shift.add_(points).sub_(goal), slopes.div_(last[..., None])
        slopes.diagonal().add_(1)
        lengths = [sum(part * factor for part, factor in zip(left, row, strict=True) if factor) for row in self.to_mm]
        return left, sum(one.square() for one in lengths).sqrt(), slopes

    def solve_on(self, goal: Tensor, start: Tensor, steps: int, tolerance: float) -> tuple[Tensor, Tensor]:
        """`solve` at points (..., D) on its device."""
        ends, here = (points.reshape(-1, points.shape[-1]).mT.contiguous() for points in (goal, start))
        found, left = (values.mT.reshape(goal.shape) for values in self.solve(ends, here, steps, tolerance))
        return found, left

    def solve(self, goal: Tensor, start: Tensor, steps: int, tolerance: float) -> tuple[Tensor, Tensor]:
        """x, (D, N), and x + u(x) − goal, by Newton's method; a step that does not help is halved."""
        here, step = start, goal.new_ones(goal.shape[1])
        active = torch.arange(goal.shape[1], device=goal.device)
        residual, error, slopes = self.missed(here, goal)
        best, rest = here.clone(), residual.clone()
        for _ in range(steps):
            (going,) = torch.nonzero((error > tolerance) & (step > 1e-3), as_tuple=True)
            if len(going) < 0.9 * len(active):  # the others are done: go on with these alone
                best[:, active], rest[:, active] = here, residual
                active, here, goal, residual, error, slopes, step = (
                    part.index_select(-1, going) for part in (active, here, goal, residual, error, slopes, step)
                )
            if len(going) == 0:
                break
            trial = here - step * _quotient(slopes, residual)
            left, length, steeper = self.missed(trial, goal)
            better = length < error
            here, residual = torch.where(better, trial, here), torch.where(better, left, residual)
            error, slopes = torch.where(better, length, error), torch.where(better, steeper, slopes)
            step = torch.where(better, (2 * step).clamp(max=1), step / 2)
        best[:, active], rest[:, active] = here, residual
        return best, rest


def _quotient(columns: Tensor, vectors: Tensor) -> Tensor:
    """Solve linear equations by Cramer's rule: D columns of D numbers each, (D, D, N), and (D, N) → (D, N). Where the
    matrix is nearly singular, it counts as the identity."""
    whole = [column.movedim(0, -1) for column in columns]
    divisor = jacobian.determinant(whole)
    parts = []
    for axis in range(len(whole)):
        parts.append(jacobian.determinant([*whole[:axis], vectors.movedim(0, -1), *whole[axis + 1 :]]))
    return torch.where(divisor.abs() < 1e-2, vectors, torch.stack(parts) / divisor)


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
    to_index, sides = np.linalg.inv(image.affine), np.array(image.shape)
    more_digits = result.dtype.itemsize > 2 and result.dtype != np.float32
    dtype = torch.float64 if more_digits else torch.float32
    for box in _slabs(like):
        index = _mapped(transform, like, box, to_index, dtype=dtype)
        inside = _within(index, image.shape).numpy()
        if interpolation == "nearest":
            nearest = np.clip(np.floor(index.numpy() + 0.5), 0, sides - 1).astype(np.intp)
            values = parts[tuple(np.moveaxis(nearest, -1, 0))]
        else:
            values = _interpolate(parts, index.reshape(-1, image.dim)).numpy().reshape(*inside.shape, -1)
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
    field = itk_order(np.empty((*fixed.shape[::-1], fixed.dim), np.float32))
    for box, shift in displacements(transform, fixed):
        field[box] = shift @ np.linalg.inv(moving.affine)[:-1, :-1].T
    return field


def _within(index: Tensor, shape: Sequence[int]) -> Tensor:
    """Which fractional indices (..., D) lie on an image of this shape, including its outer half voxel."""
    return ((index >= -0.5) & (index < index.new_tensor(shape) - 0.5)).all(dim=-1)


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
