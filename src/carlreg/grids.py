"""Unit-cube coordinates, interpolation and pooling: the only grid_sample and the only axis flip.

Convention: points are (B, ..., D) in array-axis order, in unit coordinates, where 0 and 1 are the first and last
voxel centres of the image that the points belong to. (On an axis of one voxel the unit is one voxel.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

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
        """The voxel centres of an image with these spatial sides."""
        return cls(tuple(shape), (0.0,) * len(shape), tuple(1 / max(n - 1, 1) for n in shape))

    def pad(self, voxels: int) -> Grid:
        """The same lattice continued by so many voxels on every side: below 0 and above 1."""
        return Grid(
            tuple(n + 2 * voxels for n in self.shape),
            tuple(o - voxels * s for o, s in zip(self.origin, self.spacing, strict=True)),
            self.spacing,
        )

    def at(self, index: Tensor) -> Tensor:
        """Unit coordinates of (fractional) indices (..., D)."""
        return index * torch.tensor(self.spacing).to(index) + torch.tensor(self.origin).to(index)

    def points(self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """All points, (*shape, D)."""
        # Built in float64 and rounded once, so that 1 comes out as exactly 1.
        axes = [
            (o + s * torch.arange(n, dtype=torch.float64, device=device)).to(dtype)
            for n, o, s in zip(self.shape, self.origin, self.spacing, strict=True)
        ]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def voxel_points(image: Tensor) -> Tensor:
    """Unit coordinates of an image's own voxels: (B, C, *shape) → (1, *shape, D)."""
    return Grid.of(image.shape[2:]).points(image.dtype, image.device)[None]


def voxel_size(shape: Sequence[int], like: Tensor) -> Tensor:
    """The side of one voxel in unit coordinates, one value per axis: (D,)."""
    return torch.tensor(Grid.of(shape).spacing, dtype=like.dtype, device=like.device)


def interpolate(
    image: Tensor, points: Tensor, *, mode: Interpolation = "linear", outside: Outside = "border"
) -> Tensor:
    """The image's values at points of its unit cube.

    image (B, C, *shape) and points (B, ..., D) give (B, C, ...); a batch of one is repeated to fit the other.
    `outside` continues the image by its border or by zeros.
    """
    dim = image.dim() - 2
    if points.shape[-1] != dim:
        raise ValueError(f"points have {points.shape[-1]} coordinates but the image has {dim} spatial axes")
    batch = max(image.shape[0], points.shape[0])
    if {image.shape[0], points.shape[0]} - {1, batch}:
        raise ValueError(f"points have batch size {points.shape[0]} but the image has {image.shape[0]}")
    if mode not in ("linear", "nearest"):
        raise ValueError(f"unknown mode {mode!r}; expected 'linear' or 'nearest'")
    if outside not in ("border", "zeros"):
        raise ValueError(f"unknown outside {outside!r}; expected 'border' or 'zeros'")
    leading = points.shape[1:-1]
    # grid_sample takes 2-D and 3-D, coordinates in [-1, 1], last array axis first.
    sample = (2 * points - 1).flip(-1).expand(batch, *leading, dim)
    image = image.expand(batch, *image.shape[1:])
    if dim == 1:
        image, sample = image[..., None], F.pad(sample, (1, 0))
    spatial = image.dim() - 2
    sample = sample.reshape(batch, *(1,) * (spatial - 1), -1, spatial)
    values = F.grid_sample(
        image,
        sample.to(image.dtype),
        mode="bilinear" if mode == "linear" else "nearest",
        padding_mode=outside,
        align_corners=True,
    )
    return values.reshape(batch, image.shape[1], *leading)


def pool(image: Tensor) -> Tensor:
    """Average over blocks of two voxels per axis; an odd last voxel is kept as it is (ceil mode)."""
    dim = image.dim() - 2
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dim - 1]
    return average(image, tuple(min(n, 2) for n in image.shape[2:]), ceil_mode=True)


def pooled_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The sides that `pool` gives."""
    return tuple((n + 1) // 2 for n in shape)


def fine_to_coarse(shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Scale and shift, (D,) in float64, from an image's unit coordinates to those of its pooled image.

    Coarse voxel j averages fine voxels 2j and 2j + 1, so it lies at fine index 2j + ½, not at the same place of
    the unit cube. Pooling as if it did stretches every translation and breaks equivariance.
    """
    pooled = torch.tensor([n > 1 for n in shape])
    fine = torch.tensor([max(n - 1, 1) for n in shape], dtype=torch.float64)
    coarse = torch.tensor([max(n - 1, 1) for n in pooled_shape(shape)], dtype=torch.float64)
    return (fine / (2 * coarse)).where(pooled, 1), (-1 / (4 * coarse)).where(pooled, 0)
