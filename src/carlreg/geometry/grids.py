"""Unit coordinates, interpolation and pooling. Nothing else calls grid_sample or flips the order of axes.

Convention: points are (B, ..., D) in array-axis order, in unit coordinates, where 0 and 1 are the first and last voxel
centres of the image that the points belong to. (On an axis of one voxel, the unit is one voxel.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError
from carlreg.fast.precision import full_precision

Interpolation = Literal["linear", "nearest"]
Outside = Literal["border", "zeros"]


@dataclass(frozen=True)
class Grid:
    """A regular lattice of points: index i along axis d lies at origin[d] + i · spacing[d], in unit coordinates.

    >>> Grid.of((3,)).points().ravel()
    tensor([0.0000, 0.5000, 1.0000])
    """

    shape: tuple[int, ...]
    origin: tuple[float, ...]
    spacing: tuple[float, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Grid:
        """The voxel centres of an image with this spatial shape."""
        return cls(tuple(shape), (0.0,) * len(shape), tuple(1 / max(n - 1, 1) for n in shape))

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def pad(self, voxels: int) -> Grid:
        """The lattice extended by a number of voxels on every side, below 0 and above 1."""
        return Grid(
            tuple(n + 2 * voxels for n in self.shape),
            tuple(o - voxels * s for o, s in zip(self.origin, self.spacing, strict=True)),
            self.spacing,
        )

    def at(self, index: Tensor) -> Tensor:
        """Unit coordinates of (fractional) indices (..., D)."""
        spacing, origin = (constant(values, index.dtype, index.device) for values in (self.spacing, self.origin))
        return index * spacing + origin

    def points(self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """All points, (*shape, D)."""
        # In float64 and rounded once, so that 1 is exactly 1.
        axes = [
            (o + s * torch.arange(n, dtype=torch.float64, device=device)).to(dtype)
            for n, o, s in zip(self.shape, self.origin, self.spacing, strict=True)
        ]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def voxel_points(image: Tensor) -> Tensor:
    """Unit coordinates of an image's own voxels: (B, C, *shape) → (1, *shape, D)."""
    return Grid.of(image.shape[2:]).points(coordinate_type(image), image.device)[None]


def voxel_size(shape: Sequence[int], like: Tensor) -> Tensor:
    """Sides of one voxel in unit coordinates: (D,)."""
    return constant(Grid.of(shape).spacing, coordinate_type(like), like.device)


def coordinate_type(image: Tensor) -> torch.dtype:
    """The dtype of an image's coordinates: its own, but at least float32."""
    return torch.promote_types(image.dtype, torch.float32) if image.is_floating_point() else torch.float32


def interpolate(
    image: Tensor, points: Tensor, *, mode: Interpolation = "linear", outside: Outside = "border"
) -> Tensor:
    """Sample image (B, C, *shape) at points (B, ..., D) in unit coordinates: (B, C, ...).

    A batch of one is repeated to fit the other. `outside` continues the image by its border or by zeros.
    """
    dim, batch = image.dim() - 2, max(image.shape[0], points.shape[0])
    check_points(points, dim, len(image), "image")
    if mode not in ("linear", "nearest"):
        raise InputError(f"unknown mode {mode!r}; expected 'linear' or 'nearest'")
    if outside not in ("border", "zeros"):
        raise InputError(f"unknown outside {outside!r}; expected 'border' or 'zeros'")
    if not image.is_floating_point() and mode == "linear":
        raise TypeError(f"the image has dtype {image.dtype}; expected floating point, or mode='nearest' for labels")
    if mode == "linear" and outside == "border" and (sampled := fast.sample(image, points)) is not None:
        return sampled
    leading, dtype = points.shape[1:-1], image.dtype
    image = image.to(coordinate_type(image))
    image = image.expand(batch, *image.shape[1:])
    points = points.reshape(len(points), -1, dim).expand(batch, -1, dim).to(image.dtype)
    # On a GPU, the gradients of grid_sample are not deterministic.
    deterministic = image.is_cuda and torch.are_deterministic_algorithms_enabled()
    method = _sample_by_index if deterministic else _grid_sample
    return method(image, points, mode, outside).reshape(batch, image.shape[1], *leading).to(dtype)


def check_points(points: Tensor, dim: int, batch: int, what: str) -> None:
    """Require points (B, ..., D) for an image or a transform of this dimension and batch size."""
    if points.shape[-1] != dim:
        raise InputError(f"points have {points.shape[-1]} coordinates but the {what} has {dim} spatial axes")
    if points.dim() < 2 or (len(points) != batch and 1 not in (len(points), batch)):
        found = f"points have shape {tuple(points.shape)} but the {what} has batch size {batch}"
        raise InputError(f"{found}; expected ({batch}, ..., {dim}): add the batch axis with points[None]")


def _grid_sample(image: Tensor, points: Tensor, mode: Interpolation, outside: Outside) -> Tensor:
    """(B, C, *shape) at points (B, N, D) → (B, C, N)."""
    # PyTorch's function takes 2-D and 3-D images, and coordinates in [-1, 1] with the last array axis first.
    sample = (2 * points - 1).flip(-1)
    if image.dim() == 3:
        image, sample = image[..., None], F.pad(sample, (1, 0))
    spatial, count, threads = image.dim() - 2, sample.shape[1], torch.get_num_threads()
    # On a CPU it is parallel over the batch only, so the points of a single item are split into a batch.
    gradient = torch.is_grad_enabled() and (image.requires_grad or points.requires_grad)
    split = spatial == 3 and not image.is_cuda and not gradient and len(image) == 1 and count > 2**14 and threads > 1
    if split:
        sample = F.pad(sample, (0, 0, 0, -count % threads)).reshape(threads, -1, spatial)
        image = image.expand(threads, *image.shape[1:])
    values = F.grid_sample(
        image,
        sample.reshape(len(sample), *(1,) * (spatial - 1), -1, spatial),
        mode="bilinear" if mode == "linear" else "nearest",
        padding_mode=outside,
        align_corners=True,
    ).flatten(2)
    return values.movedim(0, 1).flatten(1)[None, :, :count] if split else values


def _sample_by_index(image: Tensor, points: Tensor, mode: Interpolation, outside: Outside) -> Tensor:
    """The same as a sum over the corners of each point's cell, in a fixed order."""
    shape = image.shape[2:]
    size = constant(tuple(shape), torch.long, image.device)
    position = points * (size - 1).clamp(min=1)
    if outside == "border":
        position = position.clamp(torch.zeros_like(size), size - 1)
    low = position.round() if mode == "nearest" else position.floor()
    if mode == "linear" and outside == "border":  # the last voxel belongs to the cell before it, for its slope
        low = torch.minimum(low, (size - 2).clamp(min=0))
    fraction = position - low
    low = low.long()
    batch = torch.arange(len(image), device=image.device)[:, None]
    values = image.movedim(1, -1)
    total = torch.zeros_like(points[..., :1]) * values.new_zeros(image.shape[1])
    for corner in itertools.product((0, 1), repeat=len(shape)) if mode == "linear" else [(0,) * len(shape)]:
        offset = constant(corner, torch.long, image.device)
        index = low + offset
        weight = torch.where(offset == 1, fraction, 1 - fraction).prod(dim=-1, keepdim=True) if mode == "linear" else 1
        inside = ((index >= 0) & (index < size)).all(dim=-1, keepdim=True)
        at = (batch, *index.clamp(torch.zeros_like(size), size - 1).unbind(-1))
        total = total + values[at] * weight * inside
    return total.movedim(-1, 1)


CHUNK = 2**16
"""Points that `sample_with_slopes` takes at a time on a CPU, for its caches."""


def sample_with_slopes(image: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """`interpolate` an image (1, C, *shape) at points (D, N) in unit coordinates: values (C, N), and their derivatives
    by the points, (D, C, N). On a CPU, it is several times as fast as PyTorch's sampling and its gradient."""
    dim, count, channels = *points.shape, image[0].flatten(1)
    values, slopes = points.new_empty(len(channels), count), points.new_empty(dim, len(channels), count)
    size = max(count, 1) if image.is_cuda else CHUNK
    for start in range(0, count, size):
        part = slice(start, start + size)
        first, fractions, factors, steps = _cells(points[:, part], image.shape[2:])
        offsets = [sum(corner) for corner in itertools.product(*((0, step) for step in steps))]
        for number, channel in enumerate(channels):
            lines = [channel.index_select(0, first + offset) for offset in offsets]
            found: list[list[Tensor]] = []
            for fraction in reversed(fractions):
                lines, changes = _between(lines, fraction)
                found = [_between(one, fraction)[0] for one in found] + [changes]
            values[number, part] = lines[0]
            for axis, (slope,) in enumerate(reversed(found)):
                torch.mul(slope, factors[axis], out=slopes[axis, number, part])
    return values, slopes


def _between(lines: list[Tensor], fraction: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Values between each two of a list, and the differences of the two."""
    changes = [high - low for low, high in zip(lines[::2], lines[1::2], strict=True)]
    return [torch.addcmul(low, change, fraction) for low, change in zip(lines[::2], changes, strict=True)], changes


def _cells(points: Tensor, shape: Sequence[int]) -> tuple[Tensor, list[Tensor], list[Tensor], list[int]]:
    """The cells in which points lie: the first corner of each in the flattened image, how far the point is from it
    along each axis, voxels for one unit (0 beyond the border), and how far apart corners are in the flattened image."""
    first, fractions, factors = torch.zeros_like(points[0], dtype=torch.long), [], []
    for point, side in zip(points, shape, strict=True):
        index = point * max(side - 1, 1)
        low = index.floor().clamp_(0, max(side - 2, 0)).nan_to_num_(0)
        fractions.append((index - low).clamp_(0, 1))
        factors.append(((index > 0) & (index < side - 1)).to(points.dtype).mul_(side - 1))
        first = first.mul_(side).add_(low.long())
    steps = [math.prod(shape[axis + 1 :]) if side > 1 else 0 for axis, side in enumerate(shape)]
    return first, fractions, factors, steps


@full_precision
def multiply_axes(values: Tensor, matrices: Sequence[Tensor | None]) -> Tensor:
    """Multiply (B, C, *n) by a matrix (n, m) along each axis: (B, C, *m). None leaves an axis as it is."""
    for axis, matrix in enumerate(matrices, start=2):
        if matrix is None:
            continue
        if axis == values.dim() - 1:
            values = values @ matrix
        else:
            flat = values.reshape(math.prod(values.shape[:axis]), values.shape[axis], -1)
            shape = (*values.shape[:axis], matrix.shape[1], *values.shape[axis + 1 :])
            values = (matrix.mT @ flat).reshape(shape)
    return values


@full_precision
def along_axes(image: Tensor, operation: Callable[..., Tensor], *arguments: float) -> Tensor:
    """Apply a linear operation on rows, (1, N, n) → (1, N, m), along each spatial axis of (B, C, *shape).

    It is applied to the identity once, and the image is multiplied by that matrix: one path for every dimension and
    memory format, and faster than PyTorch's kernels. The image's precision is kept, also under autocast. The operation
    must be a module-level function, because its matrices are cached.
    """
    dim = image.dim() - 2
    channels_last = image.shape[1] > 1 and image.stride(1) == 1
    values = image.movedim(1, -1) if channels_last else image
    for axis in range(1, dim + 1) if channels_last else range(2, dim + 2):
        side = values.shape[axis]
        matrix = _matrix(operation, arguments, side, image.dtype, image.device)  # (n, m)
        if axis == values.dim() - 1:
            values = values @ matrix
        else:
            flat = values.reshape(math.prod(values.shape[:axis]), side, -1)
            shape = (*values.shape[:axis], matrix.shape[1], *values.shape[axis + 1 :])
            values = (matrix.mT @ flat).reshape(shape)
    return values.movedim(-1, 1) if channels_last else values


@functools.cache  # never evicted: captured CUDA graphs read them
def _matrix(
    operation: Callable[..., Tensor], arguments: tuple[float, ...], side: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        precise = torch.float32 if device.type == "mps" else torch.float64
        return operation(torch.eye(side, dtype=precise, device=device)[None], *arguments)[0].to(dtype)


@functools.cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small constant tensor, cached because each copy to a GPU costs time. Do not change it in place."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.tensor(values, dtype=dtype, device=device)


def pool(image: Tensor) -> Tensor:
    """Average blocks of two voxels per axis; an odd last voxel is kept as it is (ceil mode)."""
    return along_axes(image, _pool_rows)


def _pool_rows(rows: Tensor) -> Tensor:
    return F.avg_pool1d(rows, min(rows.shape[-1], 2), ceil_mode=True)


def enlarge(image: Tensor) -> Tensor:
    """Double the voxels per axis by linear interpolation; the border continues the image."""
    return along_axes(image, _enlarge_rows)


def _enlarge_rows(rows: Tensor) -> Tensor:
    return F.interpolate(rows, scale_factor=2, mode="linear")


def pooled_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a pooled image."""
    return tuple((n + 1) // 2 for n in shape)


def fine_to_coarse(shape: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Scale and shift per axis that map an image's unit coordinates to those of its pooled image.

    Coarse voxel j averages fine voxels 2j and 2j + 1, so it lies at fine index 2j + ½ and has another unit coordinate
    in either image. Ignoring this stretches every translation and breaks equivariance.
    """
    coarse = [max(n - 1, 1) for n in pooled_shape(shape)]
    scale = tuple((n - 1) / (2 * m) if n > 1 else 1.0 for n, m in zip(shape, coarse, strict=True))
    shift = tuple(-1 / (4 * m) if n > 1 else 0.0 for n, m in zip(shape, coarse, strict=True))
    return scale, shift
