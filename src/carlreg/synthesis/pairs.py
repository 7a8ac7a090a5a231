"""Random anatomy for training: pairs of images of the same solids, deformed, placed and coloured differently."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.grids import Grid, interpolate
from carlreg.geometry.transforms import Affine
from carlreg.synthesis.waves import Waves

REGIONS, BALLS = 6, 10
TUBES = (5, 9)
"""Cells of the random functions that define each kind of tube: with fewer cells, tubes are larger and further apart."""
THICKNESS = 0.11
MARGIN = 0.25
"""Extent of the regions beyond the unit cube, on every side."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Images from 0 to 1 and their label maps, each (B, 1, *shape)."""

    moving: Tensor
    fixed: Tensor
    moving_labels: Tensor  # int64
    fixed_labels: Tensor


def random_anatomy(
    shape: Sequence[int],
    batch: int = 1,
    *,
    generator: torch.Generator,
    slope: float = 0.6,
    affine: float = 0.1,
    shift: float = 0.15,
    same_contrast: float = 0.8,
    body: tuple[float, float] = (0.4, 0.9),
) -> Pairs:
    """Pairs of images of random solids, on the generator's device and determined by its seed.

    Both images of a pair show one random anatomy: regions, balls and tubes in a body whose half axes are drawn from the
    range `body`, so that it fits into the image or extends beyond it. Each image is deformed by waves of this `slope`,
    rotated and scaled by about `affine`, shifted by up to `shift` of the image, coloured (with the same colours in a
    fraction `same_contrast` of the pairs), blurred anisotropically, shaded, and given noise.

    >>> pairs = random_anatomy((96, 96, 96), batch=4, generator=torch.Generator("cuda").manual_seed(0))
    """
    dim = len(shape)
    if dim not in (2, 3) or min(shape) < 8:
        raise InputError(f"shape is {tuple(shape)}; expected 2 or 3 sides of at least 8 voxels")
    if batch < 1:
        raise InputError(f"batch is {batch}; expected 1 or more")
    draw = _Draw(batch, dim, generator)
    anatomy = _Anatomy.random(draw, body)
    count = 1 + REGIONS + BALLS + len(TUBES)
    colours = draw.uniform(count)
    others = torch.where(draw.uniform(1) < same_contrast, colours, draw.uniform(count))
    moving, moving_labels = _image(anatomy, tuple(shape), colours, draw, slope, affine, shift)
    fixed, fixed_labels = _image(anatomy, tuple(shape), others, draw, slope, affine, shift)
    return Pairs(moving, fixed, moving_labels, fixed_labels)


@dataclass(frozen=True, eq=False)
class _Draw:
    """Random numbers for each item of a batch."""

    batch: int
    dim: int
    generator: torch.Generator

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        numbers = torch.rand(self.batch, *shape, generator=self.generator, device=self.generator.device)
        return low + (high - low) * numbers

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, generator=self.generator, device=self.generator.device)

    def smooth(self, channels: int, cells: int) -> Tensor:
        """Smooth random functions with `cells` cells along each axis, to be interpolated: (B, channels, *lattice)."""
        lattice = self.normal(channels, *[cells] * self.dim)
        for axis in range(2, lattice.dim()):  # more points than cells, so that smoothing leaves no creases
            lattice = lattice.repeat_interleave(3, dim=axis)
        return blurred(lattice, 1.0)


@dataclass(frozen=True, eq=False)
class _Anatomy:
    """Random solids. Higher labels cover lower ones; 0 is the air around the body."""

    coarse: Tensor  # (B, REGIONS, *lattice)
    fine: Tensor
    wobble: Tensor  # (B, 1, *lattice)
    centres: Tensor  # (B, BALLS + 1, D): the last is the body
    radii: Tensor
    tubes: tuple[Tensor, ...]  # (B, D − 1, *lattice) each; their common zeros form a curve

    @classmethod
    def random(cls, draw: _Draw, body: tuple[float, float]) -> _Anatomy:
        dim = draw.dim
        centres = [draw.uniform(BALLS, dim, low=0.1, high=0.9), draw.uniform(1, dim, low=0.45, high=0.55)]
        radii = [draw.uniform(BALLS, dim, low=0.05, high=0.2), draw.uniform(1, dim, low=body[0], high=body[1])]
        return cls(
            coarse=draw.smooth(REGIONS, 5),
            fine=draw.smooth(REGIONS, 11),
            wobble=draw.smooth(1, 7),
            centres=torch.cat(centres, dim=1),
            radii=torch.cat(radii, dim=1),
            tubes=tuple(draw.smooth(dim - 1, cells) for cells in TUBES),
        )

    def labels(self, points: Tensor) -> Tensor:
        """Labels at points (B, ..., D) of the anatomy's unit cube and beyond: (B, ...)."""
        at = (points + MARGIN) / (1 + 2 * MARGIN)
        labels = 1 + (interpolate(self.coarse, at) + 0.35 * interpolate(self.fine, at)).argmax(dim=1)
        reach = 1 + 0.12 * interpolate(self.wobble, at)[:, 0]
        for number in range(BALLS):
            labels = torch.where(self._ball(number, points) < reach, 1 + REGIONS + number, labels)
        for number, lattice in enumerate(self.tubes):
            away = _length(interpolate(lattice, at).movedim(1, -1))
            labels = torch.where(away < THICKNESS, 1 + REGIONS + BALLS + number, labels)
        return torch.where(self._ball(BALLS, points) < reach, labels, 0)

    def _ball(self, number: int, points: Tensor) -> Tensor:
        shape = (len(points), *[1] * (points.dim() - 2), -1)
        return _length((points - self.centres[:, number].reshape(shape)) / self.radii[:, number].reshape(shape))


def _image(
    anatomy: _Anatomy, shape: tuple[int, ...], colours: Tensor, draw: _Draw, slope: float, affine: float, shift: float
) -> tuple[Tensor, Tensor]:
    """One image of the anatomy, (B, 1, *shape), and its labels."""
    batch, dim = draw.batch, draw.dim
    grid = Grid.of(shape).points(device=draw.generator.device)[None]
    waves = Waves.random(batch, dim, wavelength=(0.35, 1.4), slope=slope, generator=draw.generator)
    turn = draw.normal(dim, dim)
    linear = torch.matrix_exp(affine * (0.7 * (turn - turn.mT) + torch.diag_embed(draw.normal(dim))))
    centre = torch.full((batch, dim, 1), 0.5, device=linear.device)
    offset = (centre - linear @ centre)[..., 0] + draw.uniform(dim, low=-shift, high=shift)
    labels = anatomy.labels(waves(Affine.from_parts(linear, offset)(grid)))[:, None]

    def amount(most: float) -> Tensor:
        return draw.uniform(*[1] * (dim + 1), high=most)

    dark = draw.uniform(1) < 0.85  # in most images air is black, as in CT and MRI
    colours = torch.cat([torch.where(dark, 0.0, colours[:, :1]), colours[:, 1:]], dim=1)
    image = colours.gather(1, labels.flatten(1)).reshape(labels.shape)
    image = blurred(image, torch.exp(draw.uniform(dim, low=math.log(0.4), high=math.log(1.6))))  # uneven resolution
    image = image * (1 + amount(0.06) * interpolate(draw.smooth(1, max(4, max(shape) // 5)), grid))
    image = image * torch.exp(amount(0.35) * interpolate(draw.smooth(1, 3), grid))  # a coil's bias field
    image = image + amount(0.05) * draw.normal(1, *shape)
    low, high = (part.reshape(batch, *[1] * (dim + 1)) for part in image.flatten(1).aminmax(dim=1))
    image = ((image - low) / (high - low).clamp(min=1e-6)).clamp(0, 1)
    return image ** torch.exp(amount(0.6) - 0.3), labels


def _length(vectors: Tensor) -> Tensor:
    return vectors.square().sum(dim=-1).sqrt()


def blurred(image: Tensor, width: float | Tensor) -> Tensor:
    """Gaussian blur with a standard deviation in voxels: a number, or (B, D)."""
    batch, dim = len(image), image.dim() - 2
    widths = torch.as_tensor(width, device=image.device).expand(batch, dim)
    for axis in range(dim):
        index = torch.arange(image.shape[axis + 2], device=image.device)
        gap = (index[:, None] - index).square() / (2 * widths[:, axis, None, None].square())
        matrix = torch.softmax(-gap, dim=-1)  # (B, n, n), rows that add up to 1
        rows = image.movedim(axis + 2, -1)
        moved = rows.reshape(batch, -1, rows.shape[-1]) @ matrix.mT
        image = moved.reshape(rows.shape).movedim(-1, axis + 2)
    return image.contiguous()
