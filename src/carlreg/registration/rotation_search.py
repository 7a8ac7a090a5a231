"""The search for a rotation between two images.

Many rotations are tried on coarse images; the best are refined, and compared on finer ones. No network is involved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import full_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine
from carlreg.objective.losses import lncc

TRIED = {2: 72, 3: 1500}
"""Number of rotations tried, by dimension: in 3-D every rotation is within 20° of one of them."""
COARSE, MIDDLE, FINE = 24, 32, 48
"""Voxels along the longest side of the images on which rotations are tried, refined, and compared."""
KEPT, STEPS = 12, 40
"""Number of rotations that are refined, besides the identity, and steps of gradient descent for each."""
RATES = 0.04, 0.3
"""Learning rates: radians, and voxels of the middle grid."""
WINDOW = 3.0
"""Standard deviation of the windows of the local correlation, in voxels of the fine grid."""
LEAST_DEGREES, LEAST_GAIN = 20.0, 0.02
"""The smallest rotation worth undoing, and the smallest gain in correlation that makes it credible."""


@dataclass(frozen=True, eq=False)
class RigidMatch:
    """The best rigid map between two images with the same cubic voxels."""

    transform: Affine
    """From the fixed image's unit coordinates to the moving one's."""
    degrees: float
    """The angle of its rotation."""
    correlation: float
    """Local correlation of the images under that map, at most 1."""
    upright_correlation: float
    """The same for the best map whose rotation is smaller than `LEAST_DEGREES`."""

    @property
    def is_rotated(self) -> bool:
        """Whether the rotation is worth undoing: large enough, and clearly better than a small one."""
        return self.degrees >= LEAST_DEGREES and self.correlation > max(self.upright_correlation, 0.0) + LEAST_GAIN


@full_precision
def search_rotation(moving: Tensor, fixed: Tensor) -> RigidMatch:
    """Find the rigid map, of any angle, under which two images (1, C, *shape) correlate best. Voxels must be cubes of
    the same size in both images; the foreground should be in view. Takes seconds on a CPU.

    >>> match = search_rotation(moving, fixed)
    >>> match.degrees
    """
    check_pair(moving, fixed)
    check_finite(moving, "moving")
    check_finite(fixed, "fixed")
    dim = fixed.dim() - 2
    if dim not in TRIED or len(fixed) != 1:
        raise InputError(f"the images have shape {tuple(fixed.shape)}; expected one 2-D or 3-D image each")
    with torch.inference_mode(False), torch.no_grad():
        moving, fixed = _from_0_to_1(moving.clone()), _from_0_to_1(fixed.clone())
        rotations = torch.cat([torch.eye(dim)[None], many_rotations(TRIED[dim], dim).float()]).to(fixed.device)
        coarse, middle, fine = (_Pair.of(moving, fixed, side) for side in (COARSE, MIDDLE, FINE))
        best = coarse.correlation(rotations, coarse.offsets(rotations)).topk(KEPT).indices
        rotations = torch.cat([rotations[:1], rotations[best]])
        offsets = coarse.offsets(rotations)
        unrefined = fine.local_correlation(rotations[:1], offsets[:1])
        rotations, offsets = _refined(middle, rotations, offsets)
        correlation, degrees = fine.local_correlation(rotations, offsets), torch.rad2deg(_angle(rotations))
        best_index = int(correlation.argmax())
        upright = torch.cat([unrefined, correlation[degrees < LEAST_DEGREES]]).amax()
        transform = _as_affine(rotations[best_index], offsets[best_index], moving, fixed)
        return RigidMatch(transform, float(degrees[best_index]), float(correlation[best_index]), float(upright))


def many_rotations(count: int, dim: int) -> Tensor:
    """(count, dim, dim): evenly spread rotations; in 3-D by super-Fibonacci spirals (Alexa, CVPR 2022)."""
    n = torch.arange(count, dtype=torch.float64) + 0.5
    if dim == 2:
        angle = 2 * math.pi * n / count
        return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).reshape(-1, 2, 2)
    share = n / count
    around, other = (2 * math.pi * n / ratio for ratio in (math.sqrt(2), 1.533751168755204288118041))
    inner, outer = share.sqrt(), (1 - share).sqrt()
    x, y, z, w = inner * around.sin(), inner * around.cos(), outer * other.sin(), outer * other.cos()
    zero = torch.zeros_like(n)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).reshape(-1, 3, 3)  # v ↦ (x, y, z) × v
    return torch.eye(3, dtype=n.dtype) + 2 * w[:, None, None] * cross + 2 * cross @ cross


@dataclass(frozen=True, eq=False)
class _Pair:
    """Two images at one resolution, and maps x ↦ R x + t between them. Points are in voxels of the full grid, relative
    to the centre of each image."""

    moving: Tensor
    fixed: Tensor
    sides: tuple[Tensor, Tensor]
    """Extents of the moving and of the fixed image, in voxels of the full grid."""

    @classmethod
    def of(cls, moving: Tensor, fixed: Tensor, side: int) -> _Pair:
        longest = max(*moving.shape[2:], *fixed.shape[2:])
        small = [_shrunk(image, side / longest) for image in (moving, fixed)]
        return cls(small[0], small[1], (_ends(moving), _ends(fixed)))

    def offsets(self, rotations: Tensor) -> Tensor:
        """Translations that make each rotation map the fixed image's centre of mass to the moving one's."""
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
        mapped = torch.einsum("bij,...j->b...i", rotations, points) + offsets.reshape(shape)
        moving = self.moving.expand(len(rotations), *self.moving.shape[1:])
        return interpolate(moving, mapped / self.sides[0] + 0.5, outside="zeros")

    def correlation(self, rotations: Tensor, offsets: Tensor, together: int = 100) -> Tensor:
        """(B,): the correlation of all intensities under each map, computed for `together` maps at a time."""
        parts = zip(rotations.split(together), offsets.split(together), strict=True)
        fixed = _centred(self.fixed)
        return torch.cat([F.cosine_similarity(_centred(self.warped(*part)), fixed) for part in parts])

    def local_correlation(self, rotations: Tensor, offsets: Tensor) -> Tensor:
        """(B,): the mean correlation in windows, to which the inside of a head matters as much as its outline."""
        warped = self.warped(rotations, offsets)
        return torch.stack([1 - lncc(one[None], self.fixed, sigma=WINDOW) for one in warped])


def _refined(pair: _Pair, rotations: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Each map after gradient ascent of the correlation."""
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
    """(B, dim (dim − 1) / 2) angles in the planes of two axes → (B, dim, dim)."""
    i, j = torch.triu_indices(dim, dim, 1, device=vector.device)
    item = torch.arange(len(vector), device=vector.device)[:, None]
    skew = vector.new_zeros(len(vector), dim, dim).index_put((item, i, j), vector)
    return torch.linalg.matrix_exp(skew - skew.mT)


def _angle(rotations: Tensor) -> Tensor:
    """The angle of each rotation: its trace is 1 + 2 cos α in 3-D, 2 cos α in 2-D."""
    trace = rotations.diagonal(dim1=-2, dim2=-1).sum(-1)
    return ((trace - rotations.shape[-1] + 2) / 2).clamp(-1, 1).acos()


def _centred(images: Tensor) -> Tensor:
    """(B, C, *shape) → (B, C · voxels) with mean 0."""
    return images.flatten(1) - images.flatten(1).mean(1, keepdim=True)


def _from_0_to_1(image: Tensor) -> Tensor:
    """Scale to 0…1, so that the background has no mass."""
    image = image.detach().float() - image.float().amin()
    return image / image.amax().clamp(min=1e-9)


def _shrunk(image: Tensor, factor: float) -> Tensor:
    """The image on a coarser grid over the same unit cube."""
    shape = [min(n, max(4, round(n * factor))) for n in image.shape[2:]]
    return resize(image, shape) if factor < 1 else image


def _ends(image: Tensor) -> Tensor:
    """The distance from the first to the last voxel along each axis; 1 if there is only one."""
    return torch.tensor([float(max(n - 1, 1)) for n in image.shape[2:]], device=image.device)


def _as_affine(rotation: Tensor, offset: Tensor, moving: Tensor, fixed: Tensor) -> Affine:
    """x ↦ R x + t, in voxels from the centres, as a map of unit coordinates."""
    linear = rotation * _ends(fixed) / _ends(moving)[:, None]
    half = torch.full_like(offset, 0.5)
    return Affine.from_parts(linear[None], (half + offset / _ends(moving) - linear @ half)[None])
