"""A look at two scans: whether, and how, they are turned against each other.

Many rotations are tried on coarse images, the best of them refined, and judged on finer ones. No network takes part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.fast.precision import full_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine
from carlreg.objective.losses import lncc

TRIED = {2: 72, 3: 1500}
"""Rotations, by dimension: in space every rotation is within 20° of one of them."""
COARSE, MIDDLE, FINE = 24, 32, 48
"""Voxels along the longest side: on which rotations are tried, refined, and judged."""
KEPT, STEPS = 12, 40
"""Rotations that are refined, besides none, and steps of gradient descent for that."""
RATES = 0.04, 0.3
"""Of a step: radians, and voxels of the middle grid."""
WINDOW = 3.0
"""Of the local correlation by which they are judged, in voxels of the fine grid."""
TURNED, CLEARLY = 20.0, 0.02
"""Degrees by which images are turned at least, and by how much more alike they must be that way."""


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
    """The same by the best map found that turns by less than `TURNED`."""

    @property
    def turned(self) -> bool:
        """Far enough to be worth turning back, and clearly more alike that way."""
        return self.degrees >= TURNED and self.likeness > max(self.upright, 0.0) + CLEARLY


@full_precision
def look(moving: Tensor, fixed: Tensor) -> Look:
    """The rigid map by which two images, (1, C, *shape), are most alike, whatever the angle. Voxels must be cubes, of
    the same size in both; what is not background should be in view. Takes seconds on a CPU.

    >>> seen = look(moving, fixed)
    >>> seen.degrees
    """
    check_pair(moving, fixed)
    check_finite(moving, "moving")
    check_finite(fixed, "fixed")
    dim = fixed.dim() - 2
    if dim not in TRIED or len(fixed) != 1:
        raise ValueError(f"the images have shape {tuple(fixed.shape)}; expected one 2-D or 3-D image each")
    with torch.inference_mode(False), torch.no_grad():
        moving, fixed = _from_0_to_1(moving.clone()), _from_0_to_1(fixed.clone())
        rotations = torch.cat([torch.eye(dim)[None], many_rotations(TRIED[dim], dim).float()]).to(fixed.device)
        coarse, middle, fine = (_Pair.of(moving, fixed, side) for side in (COARSE, MIDDLE, FINE))
        best = coarse.correlation(rotations, coarse.offsets(rotations)).topk(KEPT).indices
        rotations = torch.cat([rotations[:1], rotations[best]])
        offsets = coarse.offsets(rotations)
        as_it_is = fine.likeness(rotations[:1], offsets[:1])
        rotations, offsets = _refined(middle, rotations, offsets)
        alike, degrees = fine.likeness(rotations, offsets), torch.rad2deg(_angle(rotations))
        first = int(alike.argmax())
        upright = torch.cat([as_it_is, alike[degrees < TURNED]]).amax()
        transform = _as_affine(rotations[first], offsets[first], moving, fixed)
        return Look(transform, float(degrees[first]), float(alike[first]), float(upright))


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
        return cls(small[0], small[1], (_ends(moving), _ends(fixed)))

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

    def correlation(self, rotations: Tensor, offsets: Tensor, together: int = 100) -> Tensor:
        """(B,): of all intensities, so many maps at a time."""
        parts = []
        fixed = self.fixed.flatten(1)
        for some, shifts in zip(rotations.split(together), offsets.split(together), strict=True):
            warped = self.warped(some, shifts).flatten(1)
            parts.append(F.cosine_similarity(warped - warped.mean(1, True), fixed - fixed.mean(1, True)))
        return torch.cat(parts)

    def likeness(self, rotations: Tensor, offsets: Tensor) -> Tensor:
        """(B,): of intensities in windows, which tells the inside of a head from its outline."""
        warped = self.warped(rotations, offsets)
        return torch.stack([1 - lncc(one[None], self.fixed, sigma=WINDOW) for one in warped])


def _refined(pair: _Pair, rotations: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Each map, turned and shifted so that intensities correlate best near it."""
    dim = rotations.shape[-1]
    turns = rotations.new_zeros(len(rotations), dim * (dim - 1) // 2, requires_grad=True)
    shifts = torch.zeros_like(offsets, requires_grad=True)
    voxel = float((pair.sides[1] / _ends(pair.fixed)).max())
    optimizer = torch.optim.Adam([{"params": turns, "lr": RATES[0]}, {"params": shifts, "lr": RATES[1] * voxel}])
    with torch.enable_grad():
        for _ in range(STEPS):
            optimizer.zero_grad()
            turned = rotations @ _rotation(turns, dim)
            (-pair.correlation(turned, offsets + shifts).sum()).backward()
            optimizer.step()
    return rotations @ _rotation(turns, dim), offsets + shifts


def _rotation(vector: Tensor, dim: int) -> Tensor:
    """(B, dim, dim) of (B, dim (dim − 1) / 2) angles in the planes of two axes."""
    i, j = torch.triu_indices(dim, dim, 1, device=vector.device)
    item = torch.arange(len(vector), device=vector.device)[:, None]
    skew = vector.new_zeros(len(vector), dim, dim).index_put((item, i, j), vector)
    return torch.linalg.matrix_exp(skew - skew.mT)


def _angle(rotations: Tensor) -> Tensor:
    """Of each rotation: its trace is 1 + 2 cos α in space, 2 cos α in the plane."""
    trace = rotations.diagonal(dim1=-2, dim2=-1).sum(-1)
    return ((trace - rotations.shape[-1] + 2) / 2).clamp(-1, 1).acos()


def _from_0_to_1(image: Tensor) -> Tensor:
    """The darkest is background, and weighs nothing."""
    image = image.detach().float() - image.float().amin()
    return image / image.amax().clamp(min=1e-9)


def _shrunk(image: Tensor, factor: float) -> Tensor:
    """On a coarser grid over the same unit cube."""
    shape = [min(n, max(4, round(n * factor))) for n in image.shape[2:]]
    return resize(image, shape) if factor < 1 else image


def _ends(image: Tensor) -> Tensor:
    """How many voxels the last one is from the first, along each axis; 1 where there is only one."""
    return torch.tensor([float(max(n - 1, 1)) for n in image.shape[2:]], device=image.device)


def _as_affine(rotation: Tensor, offset: Tensor, moving: Tensor, fixed: Tensor) -> Affine:
    """x ↦ R x + t of voxels from the middles, in unit coordinates."""
    linear = rotation * _ends(fixed) / _ends(moving)[:, None]
    half = torch.full_like(offset, 0.5)
    return Affine.from_parts(linear[None], (half + offset / _ends(moving) - linear @ half)[None])
