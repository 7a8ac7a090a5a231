"""The search for an affine or rigid map between two scans that no network knows.

Several starts are refined together by gradient descent on coarse images; the best go on to finer ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import full_precision
from carlreg.geometry.checks import check_finite
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.resizing import resize, resize_mask
from carlreg.geometry.transforms import Affine

LEVELS = ((24, 40, 12), (40, 30, 3), (64, 20, 1))
"""Voxels along the foreground of the fixed image, steps of gradient descent, and how many maps are refined."""
RATE = 0.03
"""Learning rate, as a fraction of half the extent of the foreground."""
WINDOW = 5
"""Voxels a side of the windows of the local correlation."""
FOREGROUND = 0.05
"""Voxels darker than this, on a scale from 0 to 1, are background."""
CONTRAST = 1e-3
"""Windows of the fixed image with this variance count half."""
EPSILON = 1e-5
"""Added to local variances, of intensities from 0 to 1."""
OUTSIDE = 0.25
"""What it costs to map a part of the fixed image outside the moving one: 0 is nothing, 1 as if it were uncorrelated."""
MOST = 192
"""Voxels a side, at most, of the images that are searched."""
MOST_SCALE = 2.0
"""Starts stretch no axis by more than this, relative to the others."""
UNEQUAL = 1.2
"""If the foregrounds differ by this factor along an axis, their ends are aligned as well as their centres."""


@dataclass(frozen=True, eq=False)
class AffineMatch:
    """The best map between two scans."""

    transform: Affine
    """From the fixed image's unit coordinates to the moving one's."""
    start: str
    """What the search that found it started from."""
    similarity: float
    """The mean local correlation of the scans under that map, at most 1; a negative one counts as its square."""


@dataclass(frozen=True, eq=False)
class Scan:
    """An image (1, 1, *shape) with intensities from 0 to 1, the size of its voxels in mm, and where it counts."""

    image: Tensor
    spacing: tuple[float, ...]
    mask: Tensor | None = None

    @property
    def size(self) -> Tensor:
        """Millimetres from the first to the last voxel centre."""
        sides = zip(self.image.shape[2:], self.spacing, strict=True)
        return torch.tensor([max(n - 1, 1) * mm for n, mm in sides], device=self.image.device)

    @property
    def inside(self) -> Tensor:
        """1 where the image counts, 0 elsewhere."""
        return torch.ones_like(self.image) if self.mask is None else (self.mask != 0).to(self.image)

    def shrink(self, voxel: float) -> Scan:
        """On cubic voxels of so many mm, or its own where those are larger."""
        sizes = zip(self.image.shape[2:], self.size.tolist(), strict=True)
        shape = [min(n, max(4, round(mm / voxel) + 1)) for n, mm in sizes]
        spacing = [mm / max(n - 1, 1) for n, mm in zip(shape, self.size.tolist(), strict=True)]
        mask = None if self.mask is None else resize_mask(self.mask, shape)
        return Scan(resize(self.image, shape), tuple(spacing), mask)

    def at_most(self, side: int) -> Scan:
        """With no more voxels a side than this."""
        return self.shrink(float((self.size / (side - 1)).amax())) if max(self.image.shape) > side else self

    def foreground(self) -> tuple[Tensor, Tensor, Tensor]:
        """The corners of the foreground, and its centre of mass, in mm from the first voxel."""
        weight = (self.image * self.inside).clamp(min=0)[0, 0]
        weight = torch.where(weight > FOREGROUND, weight, 0)
        if not bool(weight.any()):
            weight = torch.ones_like(weight)
        points = voxel_points(self.image)[0][weight > 0] * self.size
        mass = weight[weight > 0][:, None]
        return points.amin(0), points.amax(0), (mass * points).sum(0) / mass.sum()


@full_precision
def search_affine(moving: Scan, fixed: Scan, headers: Affine | None = None, *, rigid: bool = False) -> AffineMatch:
    """Find the affine map, or the rigid one, under which two images correlate best, whatever their contrasts. `headers`
    is the map between their unit coordinates that their headers imply; if it has no scale, the others start with its
    rotation. No map is a reflection. Takes seconds on a CPU.

    >>> search_affine(moving, fixed).transform
    """
    dim = fixed.image.dim() - 2
    if dim not in (2, 3) or moving.image.dim() != dim + 2:
        raise InputError(f"the images are {moving.image.dim() - 2}-D and {dim}-D; expected both 2-D or both 3-D")
    check_finite(moving.image, "moving")
    check_finite(fixed.image, "fixed")
    with torch.inference_mode(False), torch.no_grad():
        moving, fixed = moving.at_most(MOST), fixed.at_most(MOST)
        names, maps = zip(*_starts(moving, fixed, headers, rigid), strict=True)
        linear, target = (torch.stack(parts) for parts in zip(*maps, strict=True))
        low, high, _ = fixed.foreground()
        chosen = torch.arange(len(names), device=low.device)
        for side, steps, kept in LEVELS:
            level = Level.of(moving, fixed, low, high, float((high - low).amax()) / side)
            best = level.similarity(linear, target).topk(min(kept, len(linear))).indices
            chosen, linear, target = chosen[best], linear[best], target[best]
            linear, target = level.descend(linear, target, steps, rigid)
        similarity = level.similarity(linear, target)
        first = int(similarity.argmax())
        # From y = A (x − c) + t, in mm, to unit coordinates.
        unit = linear[first] * fixed.size / moving.size[:, None]
        shift = (target[first] - linear[first] @ level.centre) / moving.size
        return AffineMatch(Affine.from_parts(unit[None], shift[None]), names[chosen[first]], float(similarity[first]))


def _starts(
    moving: Scan, fixed: Scan, headers: Affine | None, rigid: bool
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Names of starts; their linear maps, and the points in mm to which they map the centre of the fixed foreground."""
    (low, high, mass), (low_m, high_m, mass_m) = fixed.foreground(), moving.foreground()
    centre, centre_m = (low + high) / 2, (low_m + high_m) / 2
    turn = torch.eye(len(low), device=low.device)
    if headers is not None:
        linear = headers.linear[0].to(low) / fixed.size * moving.size[:, None]
        if _is_rotation(linear):
            turn = linear
        target = linear @ centre + headers.shift[0].to(low) * moving.size
        if bool(((target > low_m) & (target < high_m)).all()) and (_is_rotation(linear) or not rigid):
            yield "headers", (linear, target)
    yield "centres", (turn, centre_m)
    yield "centres of mass", (turn, mass_m + turn @ (centre - mass))
    extent, extent_m = (high - low).clamp(min=1e-6), (high_m - low_m).clamp(min=1e-6)
    for axis, ratio in enumerate((extent_m / extent).tolist()):
        if not 1 / UNEQUAL < ratio < UNEQUAL:
            for sign in (-0.5, 0.5):
                target = centre_m.clone()
                target[axis] += sign * (extent_m - extent)[axis]
                yield "ends", (turn, target)
    if not rigid:
        ratios = extent_m / extent
        whole = ratios.log().mean().exp()
        yield "extents", (turn * whole, centre_m)
        yield "extents of axes", (turn * whole * (ratios / whole).clamp(1 / MOST_SCALE, MOST_SCALE), centre_m)


def _is_rotation(linear: Tensor) -> bool:
    square = linear @ linear.mT
    return bool(torch.linalg.det(linear) > 0) and torch.allclose(square, torch.eye(len(linear)).to(linear), atol=1e-3)


@dataclass(frozen=True, eq=False)
class Level:
    """Two images at one resolution, and maps x ↦ A (x − centre) + target between them, in mm."""

    source: Tensor  # (1, 2, *shape): the moving image, and where it counts
    size: Tensor  # of the moving image, in mm
    target: Tensor  # (1, 1, *shape): the foreground of the fixed image
    inside: Tensor  # where that counts
    points: Tensor  # (*shape, D): its voxels in mm from the centre
    centre: Tensor
    radius: Tensor  # half the largest extent

    @classmethod
    def of(cls, moving: Scan, fixed: Scan, low: Tensor, high: Tensor, voxel: float) -> Level:
        small, other = fixed.shrink(voxel), moving.shrink(voxel)
        sizes = zip(low.tolist(), high.tolist(), small.spacing, small.image.shape[2:], strict=True)
        around = tuple(slice(max(0, int(a / mm) - 2), min(n, int(b / mm) + 4)) for a, b, mm, n in sizes)
        centre, crop = (low + high) / 2, (slice(None), slice(None), *around)
        return cls(
            torch.cat([other.image, other.inside], dim=1),
            other.size,
            small.image[crop],
            small.inside[crop],
            (voxel_points(small.image)[0] * small.size - centre)[around],
            centre,
            (high - low).amax() / 2,
        )

    def similarity(self, linear: Tensor, target: Tensor) -> Tensor:
        """(B,): the mean local correlation under each map; a negative one counts as its square."""
        dim, count = len(self.centre), len(linear)
        mapped = torch.einsum("bij,...j->b...i", linear, self.points) + target.reshape(count, *[1] * dim, dim)
        warped = interpolate(self.source.expand(count, *self.source.shape[1:]), mapped / self.size, outside="zeros")
        a, b = warped[:, :1], self.target
        weight = warped[:, 1:].detach() * self.inside
        moments = torch.cat([weight, weight * a, weight * b, weight * a * a, weight * b * b, weight * a * b], dim=1)
        n, a, b, aa, bb, ab = self._windows(moments).unbind(1)
        n = n.clamp(min=1e-3)
        a, b = a / n, b / n
        aa, bb, ab = aa / n - a * a, bb / n - b * b, ab / n - a * b
        correlation = ab / ((aa.clamp(min=0) + EPSILON) * (bb.clamp(min=0) + EPSILON)).sqrt()
        value = torch.maximum(correlation, correlation.square())
        here, whole = (n * self.contrast).detach(), self.contrast.sum()
        counted = here.flatten(1).sum(1) ** (1 - OUTSIDE) * whole**OUTSIDE
        return (here * value).flatten(1).sum(1) / counted.clamp(min=1e-6)

    @functools.cached_property
    def contrast(self) -> Tensor:
        """(1, *windows): how much each window counts if it lies inside the moving image."""
        moments = torch.cat([self.inside, self.inside * self.target, self.inside * self.target**2], dim=1)
        n, b, bb = self._windows(moments).unbind(1)
        variance = (bb - b * b / n.clamp(min=1e-3)).clamp(min=0)
        return variance / (variance + CONTRAST)

    def _windows(self, values: Tensor) -> Tensor:
        """Means in windows around every second voxel."""
        pool = F.avg_pool2d if values.dim() == 4 else F.avg_pool3d
        for axis, n in enumerate(values.shape[2:]):
            width, stride = [1] * (values.dim() - 2), [1] * (values.dim() - 2)
            width[axis], stride[axis] = min(WINDOW, n), 2
            values = pool(values, width, stride)
        return values

    def descend(self, linear: Tensor, target: Tensor, steps: int, rigid: bool) -> tuple[Tensor, Tensor]:
        """Each map after gradient ascent of the similarity: A exp(K), so that its determinant keeps its sign."""
        dim = len(self.centre)
        change = linear.new_zeros(len(linear), dim, dim + 1, requires_grad=True)
        optimizer = torch.optim.Adam([change], lr=RATE)
        best, highest = (linear, target), linear.new_full((len(linear),), -math.inf)

        def maps() -> tuple[Tensor, Tensor]:
            inner = change[..., :dim]
            inner = inner - inner.mT if rigid else inner
            return linear @ torch.linalg.matrix_exp(inner), target + self.radius * change[..., dim]

        for step in range(steps + 1):
            with torch.enable_grad():
                now = maps()
                similarity = self.similarity(*now)
                (gradient,) = torch.autograd.grad(similarity.sum(), change)
            better = similarity.detach() > highest
            highest = torch.where(better, similarity.detach(), highest)
            best = (
                torch.where(better[:, None, None], now[0].detach(), best[0]),
                torch.where(better[:, None], now[1].detach(), best[1]),
            )
            change.grad = -gradient
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / (steps + 1))
            optimizer.step()
        return best
