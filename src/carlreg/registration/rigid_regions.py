"""Regions that move but do not bend, made exactly rigid in the final map and blended smoothly into the rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from carlreg.errors import InputError
from carlreg.files import world_transform
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.itk import simpleitk
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.fitting import fit_rigid

LEAST = 4
"""Points that a region needs at least: fewer do not define a rotation."""
REACH = 4.0
"""The blend outside a region is so many times wider than the map moves there, at least."""
NARROWEST = 4.0
"""And at least so many voxels wide."""
ATTEMPTS = 4
"""Blends are widened so many times if the map folds."""
Mask = npt.NDArray[np.bool_]


def make_rigid(
    world: WorldTransform, fixed: Image, fixed_mask: Image | None, moving_mask: Image | None
) -> tuple[WorldTransform, float]:
    """A map that is rigid inside each region, and how far it was from that at most, in mm.

    Each value of a mask other than 0 is a region of its own. A region of the moving image is taken to the fixed one by
    the rigid map itself, so that exactly the points that land in it are mapped rigidly.
    """
    world = _on_grid(world, fixed)
    regions = [*_of_fixed(world, fixed, fixed_mask), *_of_moving(world, fixed, moving_mask)]
    before = world_transform.folds_percent(world_transform.jacobian_determinant(world, fixed))
    widest, changed = 1.0, 0.0
    for _ in range(ATTEMPTS):
        bent, changed = _blended(world, fixed, regions, widest)
        folds = world_transform.folds_percent(world_transform.jacobian_determinant(bent, fixed))
        if folds <= before:
            break
        widest *= 1.5
    return bent, changed


def _on_grid(world: WorldTransform, fixed: Image) -> WorldTransform:
    """The map with its displacements on the voxels of the fixed image."""
    same = world.displacement.shape[:-1] == fixed.shape and np.allclose(world.lattice, fixed.affine, atol=1e-6)
    return world if same else world_transform.sample(world, fixed)


def _of_fixed(world: WorldTransform, fixed: Image, mask: Image | None) -> list[tuple[Mask, Matrix]]:
    if mask is None:
        return []
    regions = [mask.data == value for value in np.unique(mask.data) if value != 0]
    return [(region, _fitted(world, fixed, region, mask.name)) for region in regions]


def _of_moving(world: WorldTransform, fixed: Image, mask: Image | None) -> list[tuple[Mask, Matrix]]:
    if mask is None:
        return []
    pulled = world_transform.apply(world, mask, fixed, "nearest").data
    found = []
    for value in np.unique(mask.data):
        if value != 0:
            matrix = _fitted(world, fixed, pulled == value, f"{mask.name}, region {value}, which")
            exact = world_transform.apply(WorldTransform.linear(matrix), mask, fixed, "nearest").data
            found.append((exact == value, matrix))
    return found


def _fitted(world: WorldTransform, fixed: Image, region: Mask, name: str) -> Matrix:
    """(D + 1, D + 1): the rigid map closest to the dense one in a region of the fixed image."""
    points = map_points(fixed.affine, np.argwhere(region).astype(np.float64))
    if len(points) < LEAST:
        raise InputError(f"{name} covers {len(points)} voxels of the fixed image; expected a larger rigid region")
    here, there = (torch.from_numpy(one)[None] for one in (points, world(points)))
    matrix = np.eye(fixed.dim + 1)
    matrix[:-1] = fit_rigid(here, there).matrix[0].numpy()
    return matrix


def _blended(
    world: WorldTransform, fixed: Image, regions: list[tuple[Mask, Matrix]], widen: float
) -> tuple[WorldTransform, float]:
    """T + Σ w (R − T), where w is 1 in a region, 0 far from it and in all others, and smooth in between."""
    index = np.stack(np.meshgrid(*(np.arange(n) for n in fixed.shape), indexing="ij"), axis=-1)
    points = map_points(fixed.affine, index)
    mapped = map_points(world.affine, points + world.displacement)
    weights, changed = [], 0.0
    for region, matrix in regions:
        apart = np.linalg.norm(map_points(matrix, points[region]) - mapped[region], axis=-1)
        changed = max(changed, float(apart.max()))
        width = widen * max(REACH * float(apart.max()), NARROWEST * max(fixed.spacing))
        beyond = np.maximum(_distance(region, fixed) - max(fixed.spacing), 0)  # rigid for one voxel more
        share = np.clip(1 - beyond / width, 0, 1)
        weights.append(share * share * (3 - 2 * share))
    result = mapped
    for number, (region, matrix) in enumerate(regions):
        weight = weights[number]
        for other in set(range(len(regions))) - {number}:
            weight = np.where(regions[other][0], 0, weight * (1 - weights[other]))
        weight = np.where(region, 1, weight)
        result = result + weight[..., None] * (map_points(matrix, points) - mapped)
    shift = map_points(np.linalg.inv(world.affine), result) - points
    return replace(world, displacement=shift.astype(np.float32)), changed


def _distance(region: Mask, fixed: Image) -> npt.NDArray[np.float64]:
    """Millimetres from each voxel to the region, 0 inside."""
    sitk = simpleitk()
    mask = Image(region.astype(np.uint8), fixed.affine).to_sitk()
    signed = sitk.SignedMaurerDistanceMap(mask, insideIsPositive=False, squaredDistance=False, useImageSpacing=True)
    return np.where(region, 0.0, np.maximum(sitk.GetArrayFromImage(signed).T, 0.0))
