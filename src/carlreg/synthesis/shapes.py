"""Solids defined by signed distances, and a canvas that paints them with soft edges.

Points are (3, ...) here, in millimetres: arithmetic on separate coordinates is faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.geometry.grids import interpolate

Distance = Callable[[Tensor], Tensor]
"""From points (3, ...) to signed distances in mm, (...): negative inside, accurate near the surface."""
Material = float | Callable[[Tensor, Tensor], Tensor]
"""Hounsfield units: a number, or a function of points (3, ...) and their distances (...)."""
Vector = tuple[float, ...]
BLOCK = 8
LATTICE = 64
REACH = 8.0
"""Margin around a solid's box in which it may still affect voxels, in mm."""


@dataclass(frozen=True)
class Shape:
    """A solid and its bounding box."""

    distance: Distance
    low: Vector = (-math.inf, -math.inf, -math.inf)
    high: Vector = (math.inf, math.inf, math.inf)

    def __call__(self, points: Tensor) -> Tensor:
        return self.distance(points)

    def grown(self, by: float) -> Shape:
        """The same with its surface moved outwards, in mm."""
        low, high = tuple(v - by for v in self.low), tuple(v + by for v in self.high)
        return Shape(lambda p: self.distance(p) - by, low, high)

    def rough(self, noise: Distance, height: float) -> Shape:
        """The same with an uneven surface of this height."""
        return Shape(lambda p: self.distance(p) - height * noise(p), self.low, self.high)

    def within(self, *others: Distance, blend: float = 0.0) -> Shape:
        """The intersection with the others, with edges rounded over `blend` mm."""
        return Shape(lambda p: largest([self.distance(p), *(o(p) for o in others)], blend), self.low, self.high)

    def without(self, *others: Distance, blend: float = 0.0) -> Shape:
        """The difference from the others, with edges rounded over `blend` mm."""
        return Shape(lambda p: largest([self.distance(p), *(-o(p) for o in others)], blend), self.low, self.high)


def union(*shapes: Shape, blend: float = 0.0) -> Shape:
    """The union of solids, with notches filled over `blend` mm."""
    low = tuple(map(min, zip(*(s.low for s in shapes), strict=True)))
    high = tuple(map(max, zip(*(s.high for s in shapes), strict=True)))
    return Shape(lambda p: -largest([-s.distance(p) for s in shapes], blend), low, high)


def ellipsoid(centre: Vector, radii: Vector, *, power: float = 2.0, turn: float = 0.0, tilt: float = 0.0) -> Shape:
    """An ellipsoid with these half axes, turned about z and tilted about y in degrees; a higher power is more boxy."""
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    ct, st = math.cos(math.radians(tilt)), math.sin(math.radians(tilt))

    def distance(points: Tensor) -> Tensor:
        x, y, z = (points[axis] - centre[axis] for axis in range(3))
        x, z = ct * x - st * z, st * x + ct * z
        x, y = cos * x + sin * y, cos * y - sin * x
        return section([x, y, z], list(radii), power)

    reach = max(radii) if turn or tilt else 0.0
    low, high = (tuple(c + sign * max(r, reach) for c, r in zip(centre, radii, strict=True)) for sign in (-1.0, 1.0))
    return Shape(distance, low, high)


def section(coordinates: Sequence[Tensor], radii: Sequence[float | Tensor], power: float = 2.0) -> Tensor:
    """First-order distance to Σ |x_i / r_i|^p = 1: (‖x‖ − 1) / |∇‖x‖|."""
    ratios = [(x / r).abs() for x, r in zip(coordinates, radii, strict=True)]
    powers = ratios if power == 2 else [q ** (power - 1) for q in ratios]
    total, slope = torch.full_like(ratios[0], 1e-9), torch.zeros_like(ratios[0])
    for q, t, r in zip(ratios, powers, radii, strict=True):
        total += q * t
        slope += (t / r).square()
    size = total.sqrt() if power == 2 else total ** (1 / power)
    return (size - 1) * total / (size * slope.sqrt())


def tube(*path: tuple[float, float, float, float]) -> Shape:
    """A tube along a path of nodes (x, y, z, radius), round at its ends."""
    nodes = torch.tensor(path)

    def distance(points: Tensor) -> Tensor:
        nearest = torch.full_like(points[0], math.inf)
        for start, end in zip(nodes[:-1].tolist(), nodes[1:].tolist(), strict=True):
            along = [e - s for s, e in zip(start[:3], end[:3], strict=True)]
            offset = [points[axis] - start[axis] for axis in range(3)]
            scale = 1 / sum(a * a for a in along)
            t = torch.zeros_like(points[0])
            for o, a in zip(offset, along, strict=True):
                t.add_(o, alpha=a * scale)
            t.clamp_(0, 1)
            away = torch.zeros_like(t)
            for o, a in zip(offset, along, strict=True):
                away += (o - t * a).square_()
            nearest = torch.minimum(nearest, away.sqrt_() - (start[3] + (end[3] - start[3]) * t))
        return nearest

    low, high = (nodes[:, :3] - nodes[:, 3:]).amin(0), (nodes[:, :3] + nodes[:, 3:]).amax(0)
    return Shape(distance, tuple(low.tolist()), tuple(high.tolist()))


def largest(values: Sequence[Tensor], blend: float = 0.0) -> Tensor:
    """The maximum, which is the distance to an intersection, with edges rounded over `blend` mm."""
    result, *others = values
    for value in others:
        rounding = (blend - (result - value).abs()).clamp(min=0).square() / (4 * blend) if blend else 0.0
        result = torch.maximum(result, value) + rounding
    return result


@dataclass(frozen=True)
class Noise:
    """A smooth random function of space with mean 0 and variance about 1, determined by its seed."""

    scale: float
    """Approximate distance between a maximum and the next minimum, in mm."""
    seed: int

    def __call__(self, points: Tensor) -> Tensor:
        position = (points.movedim(0, -1) / (self.scale * LATTICE / 4)).remainder(1.0)
        return interpolate(_lattice(self.seed), position[None])[0, 0]


@functools.lru_cache(maxsize=16)
def _lattice(seed: int) -> Tensor:
    lattice = torch.randn(1, 1, *[LATTICE] * 3, generator=torch.Generator().manual_seed(seed))
    for axis in (2, 3, 4) * 3:  # smooth, and periodic because the lattice repeats
        lattice = lattice + 0.5 * (lattice.roll(1, axis) + lattice.roll(-1, axis))
    lattice = lattice / lattice.std()
    for axis in (2, 3, 4):
        lattice = torch.cat([lattice, lattice.narrow(axis, 0, 1)], dim=axis)
    return lattice


class Canvas:
    """Values and labels at points (3, *shape), sides multiples of 8; each solid is painted over those before it.

    Points are stored in blocks of neighbours, so that a solid is evaluated only in blocks near it.
    """

    def __init__(self, points: Tensor, softness: float, background: float) -> None:
        """`softness`: width in mm over which edges are averaged, usually that of a voxel."""
        self.softness, self._shape = softness, points.shape[1:]
        self._grids = [n // BLOCK for n in self._shape]
        dim = len(self._grids)
        split = points.reshape(3, *(side for n in self._grids for side in (n, BLOCK)))
        order = (0, *range(1, 2 * dim, 2), *range(2, 2 * dim + 1, 2))
        self._points = split.permute(order).reshape(3, -1, BLOCK**dim).contiguous()
        self._low, self._high = self._points.amin(-1), self._points.amax(-1)  # (3, blocks)
        self._values = torch.full(self._points.shape[1:], background)
        self._labels = torch.zeros(self._points.shape[1:], dtype=torch.uint8)

    def paint(self, shape: Shape, material: Material, label: int = 0) -> None:
        """Paint a solid; voxels that it fills by half or more get its label."""
        low, high = (torch.tensor(box)[:, None] for box in (shape.low, shape.high))
        near = ((self._high >= low - REACH) & (self._low <= high + REACH)).all(dim=0).nonzero()[:, 0]
        points = self._points[:, near]
        distance = shape.distance(points)
        touched = (distance < self.softness / 2).any(dim=-1)
        near, points, distance = near[touched], points[:, touched], distance[touched]
        cover = self.inside(distance)
        values = material if isinstance(material, (int, float)) else material(points, distance)
        old = self._values[near]
        self._values[near] = old + cover * (values - old)
        self._labels[near] = torch.where(cover >= 0.5, label, self._labels[near]).to(torch.uint8)

    def inside(self, distance: Tensor) -> Tensor:
        """The fraction of a voxel inside, 0 to 1, from the distance of its centre."""
        return (0.5 - distance / self.softness).clamp(0, 1)

    def values(self) -> Tensor:
        """(*shape)."""
        return self._joined(self._values)

    def labels(self) -> Tensor:
        """(*shape), uint8."""
        return self._joined(self._labels)

    def _joined(self, blocks: Tensor) -> Tensor:
        dim = len(self._grids)
        split = blocks.reshape(*self._grids, *[BLOCK] * dim)
        return split.permute(*(axis for d in range(dim) for axis in (d, dim + d))).reshape(self._shape)
