"""How images are displayed: grids of a screen's resolution, grey levels and windows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from carlreg import preparation
from carlreg.files import world_transform
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.world_transform import PointMap
from carlreg.geometry.grids import Grid, interpolate

DOUBLINGS = 2.0
"""Volume changes beyond 2^±2 are displayed alike."""
SAMPLES = 200_000
"""So many voxels are looked at to know the foreground."""


@dataclass(frozen=True)
class GreyScale:
    """How the intensities of an image are displayed."""

    knots: tuple[tuple[float, int], ...]  # intensities and their levels, 0 to 255, linear in between
    windows: dict[str, tuple[float, float]]  # by name, the usual one first


CT = GreyScale(
    ((-1024.0, 0), (-200.0, 48), (300.0, 208), (1600.0, 255)),  # most levels are for soft tissue
    {"soft tissue": (-160.0, 240.0), "lung": (-1000.0, 200.0), "bone": (-450.0, 1050.0)},
)


def grey_scale(image: Image, ct: bool | None = None) -> GreyScale:
    """Choose a scale by the image's range, or that of CT; its values show whether it is CT unless `ct` does."""
    _, done = preparation.preprocess(image, ct=ct)
    if done.kind == "CT":
        return CT
    bright = done.low + 0.6 * (done.high - done.low)
    return GreyScale(((done.low, 0), (done.high, 255)), {"all": (done.low, done.high), "bright": (done.low, bright)})


def foreground_points(image: Image) -> Matrix:
    """World points (N, D) within random voxels of the foreground, always the same ones."""
    inside, random = preparation.foreground(image).ravel(), np.random.default_rng(0)
    voxels = random.integers(0, inside.size, SAMPLES)
    if inside[voxels].any():
        voxels = voxels[inside[voxels]]
    index = np.stack(np.unravel_index(voxels, image.shape), axis=-1)
    within = index + random.uniform(-0.5, 0.5, index.shape)
    return map_points(image.affine, np.clip(within, 0, np.array(image.shape) - 1))


def high_end(errors: Image, fixed: Image) -> float:
    """Where the colours of a map of expected errors end: its 99th percentile over the foreground of the fixed image,
    rounded up to two digits. Beyond the anatomy the map grows without meaning anything."""
    unit = torch.from_numpy(map_points(errors.world_to_unit(), foreground_points(fixed)))[None]
    values = interpolate(torch.from_numpy(errors.data.astype(np.float64))[None, None], unit)
    most = max(float(np.percentile(values.numpy(), 99)), 1e-3)
    digit = math.floor(math.log10(most)) - 1
    return round(math.ceil(round(most / 10.0**digit, 6)) * 10.0**digit, max(-digit, 0))


def display_grid(image: Image, voxels: int) -> Image:
    """An empty image over the same box, with at most `voxels` nearly cubic voxels, no finer than the finest axis."""
    extent = [max(s * (n - 1), 1e-6) for s, n in zip(image.spacing, image.shape, strict=True)]
    step = max(min(image.spacing), (math.prod(extent) / voxels) ** (1 / image.dim))
    while math.prod(shape := tuple(max(2, math.floor(e / step) + 1) for e in extent)) > voxels:
        step *= 1.01
    return grid_over(image, shape)


def grid_over(image: Image, shape: tuple[int, ...]) -> Image:
    """An empty image of this shape whose corners are those of `image`."""
    affine = image.unit_to_world() @ np.diag([*Grid.of(shape).spacing, 1.0])
    return Image(np.zeros(shape, np.uint8), affine)


def determinant(transform: PointMap, fixed: Image, voxels: int, *, mirrored: bool) -> Image:
    """det ∇T over the fixed image, at a display's resolution."""
    return world_transform.jacobian_determinant(transform, display_grid(fixed, voxels), mirrored=mirrored)
