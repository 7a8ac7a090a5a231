"""A look at two scans: whether, and how, they are turned against each other.

Many rotations are tried on coarse images, the best of them refined, and judged on finer ones. No network takes part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg._checks import check_pair
from carlreg.grids import interpolate, voxel_points
from carlreg.images import resize
from carlreg.losses import lncc
from carlreg.transforms import Affine

TRIED = {2: 72, 3: 1500}
"""Rotations, by dimension: in 3-D every rotation is within about 15° of one of them."""
COARSE, MIDDLE, FINE = 24, 32, 48
"""Voxels along the longest side: on which rotations are tried, refined, and judged."""
KEPT = 12
"""Rotations that are refined, besides none."""
STEPS = 40


@dataclass(frozen=True, eq=False)
class Look:
    """The rigid map between two images with the same cubic voxels, at a glance."""

    transform: Affine
    """From the fixed image's unit coordinates to the moving one's."""
    degrees: float
    """By how much it turns."""
    likeness: float
    """Of the images by that map: their local correlation, at most 1."""
    upright: float
    """The same without any turn, the images' centres of mass laid onto one another."""


@torch.no_grad()
def look(moving: Tensor, fixed: Tensor) -> Look:
    """The rigid map by which two images, (1, C, *shape), are most alike, whatever the angle. Voxels must be cubes, of
    the same size in both; what is not background should be in view. Takes seconds on a CPU.

    >>> seen = look(moving, fixed)
    >>> seen.degrees
    """
    check_pair(moving, fixed)
    dim = fixed.dim() - 2
    if dim not in TRIED or len(fixed) != 1:
        raise ValueError(f"the images have shape {tuple(fixed.shape)}; expected one 2-D or 3-D image each")
    # Coordinates are voxels of the full grid, from its middle.
    rotations = torch.cat([torch.eye(dim)[None], many_rotations(TRIED[dim], dim)]).to(fixed)
    pair = _Pair.of(moving, fixed, COARSE)
    best = pair.correlation(rotations, pair.offsets(rotations)).topk(min(KEPT, len(rotations))).indices
    rotations = torch.cat([rotations[:1], rotations[best]])
    offsets = pair.offsets(rotations)
    fine = _Pair.of(moving, fixed, FINE)
    upright = fine.likeness(rotations[:1], offsets[:1])
    rotations, offsets = _refine(_Pair.of(moving, fixed, MIDDLE), rotations, offsets)
    alike = fine.likeness(rotations, offsets)
    first = int(alike.argmax())
    return Look(
        _as_affine(rotations[first], offsets[first], moving, fixed),
        math.degrees(float(_angle(rotations[first]))),
        float(alike[first]),
        float(upright),
    )


def many_rotations(count: int, dim: int) -> Tensor:
    """(count, dim, dim): rotations spread evenly; in 3-D by super-Fibonacci spirals (Alexa, CVPR 2022)."""
    n = torch.arange(count, dtype=torch.float64) + 0.5
    if dim == 2:
        angle = 2 * math.pi * n / count
        return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).reshape(-1, 2, 2)
    share = n / count
    around, other = (2 * math.pi * n / ratio for ratio in (math.sqrt(2), 1.533751168755204288118041))
    inner, outer = share.sqrt(), (1 - share).sqrt()
    x, y, z, w = inner * around.sin(), inner * around.cos(), outer * other.sin(), outer * other.cos()
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


@dataclass(frozen=True, eq=False)
class _Pair:
    """Two images at some resolution, and maps x ↦ R x + t between them. Points are in voxels of the full grid, counted
    from the middle of each image."""

    moving: Tensor
    fixed: Tensor
    sides: tuple[Tensor, Tensor]
    """Voxels of the full grids from end to end, of the moving and of the fixed image."""

    @classmethod
    def of(cls, moving: Tensor, fixed: Tensor, side: int) -> _Pair:
        longest = max(*moving.shape[2:], *fixed.shape[2:])
        small = [_shrunk(image, side / longest) for image in (moving, fixed)]
        full = [torch.tensor([n - 1.0 for n in image.shape[2:]]).to(fixed) for image in (moving, fixed)]
        return cls(small[0], small[1], (full[0], full[1]))

    def offsets(self, rotations: Tensor) -> Tensor:
        """Shifts by which each rotation takes the fixed image's centre of mass to the moving one's."""
        centres = []
        for image, side in zip((self.moving, self.fixed), self.sides, strict=True):
            points = (voxel_points(image)[0] - 0.5) * side
            mass = image.mean(dim=1)[0][..., None]
            centres.append((mass * points).flatten(0, -2).sum(0) / mass.sum().clamp(min=1e-9))
        return centres[0] - rotations @ centres[1]

    def warped(self, rotations: Tensor, offsets: Tensor) -> Tensor:
        """(B, C, *fixed shape): the moving image through each map; 0 outside of it."""
        points = (voxel_points(self.fixed)[0] - 0.5) * self.sides[1]
        shape = (len(rotations), *[1] * self.moving[0, 0].dim(), points.shape[-1])
        found = torch.einsum("bij,...j->b...i", rotations, points) + offsets.reshape(shape)
        moving = self.moving.expand(len(rotations), *self.moving.shape[1:])
        return interpolate(moving, found / self.sides[0] + 0.5, outside="zeros")

    def correlation(self, rotations: Tensor, offsets: Tensor) -> Tensor:
        """(B,): of all intensities."""
        parts = []
        for some, shifts in zip(rotations.split(100), offsets.split(100), strict=True):
            warped = self.warped(some, shifts).flatten(1)
            fixed = self.fixed.flatten(1)
            parts.append(F.cosine_similarity(warped - warped.mean(1, True), fixed - fixed.mean(1, True)))
        return torch.cat(parts)

    def likeness(self, rotations: Tensor, offsets: Tensor) -> Tensor:
        """(B,): of intensities in windows, which tells the inside of a head from its outline."""
        warped = self.warped(rotations, offsets)
        return torch.stack([1 - lncc(one[None], self.fixed, sigma=3.0) for one in warped])


def _refine(pair: _Pair, rotations: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Each map, turned and shifted so that intensities correlate best near it."""
    dim = rotations.shape[-1]
    count = dim * (dim - 1) // 2
    turns = torch.zeros(len(rotations), count).to(rotations).requires_grad_()
    shifts = torch.zeros_like(offsets).requires_grad_()
    voxel = float(pair.sides[1].max()) / max(pair.fixed.shape[2:])
    optimizer = torch.optim.Adam([{"params": turns, "lr": 0.04}, {"params": shifts, "lr": 0.3 * voxel}])
    with torch.enable_grad():
        for _ in range(STEPS):
            optimizer.zero_grad()
            turned = rotations @ _rotation(turns, dim)
            (-pair.correlation(turned, offsets + shifts).sum()).backward()
            optimizer.step()
    return (rotations @ _rotation(turns, dim)).detach(), (offsets + shifts).detach()


def _rotation(vector: Tensor, dim: int) -> Tensor:
    """(B, dim, dim) of (B, dim (dim − 1) / 2) angles in the planes of two axes."""
    upper = torch.triu_indices(dim, dim, 1)
    skew = vector.new_zeros(len(vector), dim, dim).index_put(
        (torch.arange(len(vector))[:, None], upper[0], upper[1]), vector
    )
    return torch.linalg.matrix_exp(skew - skew.mT)


def _angle(rotations: Tensor) -> Tensor:
    """Of each rotation: its trace is 1 + 2 cos α in space, 2 cos α in the plane."""
    trace = rotations.diagonal(dim1=-2, dim2=-1).sum(-1)
    return ((trace - rotations.shape[-1] + 2) / 2).clamp(-1, 1).acos()


def _shrunk(image: Tensor, factor: float) -> Tensor:
    """On a coarser grid over the same unit cube."""
    return resize(image, [max(4, round(n * factor)) for n in image.shape[2:]]) if factor < 1 else image


def _as_affine(rotation: Tensor, offset: Tensor, moving: Tensor, fixed: Tensor) -> Affine:
    """x ↦ R x + t of voxels from the middles, in unit coordinates."""
    from_side, to_side = (torch.tensor([n - 1.0 for n in image.shape[2:]]).to(rotation) for image in (fixed, moving))
    linear = rotation * from_side / to_side[:, None]
    half = torch.full_like(offset, 0.5)
    return Affine.from_parts(linear[None], (half + offset / to_side - linear @ half)[None])
