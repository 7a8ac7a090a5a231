"""Resampling of images and label maps to another grid over the same unit cube."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import full_precision
from carlreg.geometry.grids import multiply_axes


@full_precision
def resize(data: Tensor, shape: Sequence[int]) -> Tensor:
    """Resample linearly to another shape: (B, C, *sides) → (B, C, *shape). First and last voxel centres stay the same.

    Where it shrinks by a factor s, values are first averaged over √(s² − 1) voxels: together with the width of a voxel
    itself, 1, this is the spread of a voxel of width s. The window narrows towards the border, to stay centred.
    """
    for axis, (old, new) in enumerate(zip(data.shape[2:], _new_sides(data, shape), strict=True), start=2):
        if old != new:
            matrix = averaging(old, _positions(old, new), (old - 1) / (new - 1)).to(data)
            data = (data.movedim(axis, -1) @ matrix).movedim(-1, axis)
    return data.contiguous()


def resize_labels(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Resample to another shape by nearest neighbour: (B, C, *sides) → (B, C, *shape), any dtype."""
    for axis, (old, new) in enumerate(zip(labels.shape[2:], _new_sides(labels, shape), strict=True), start=2):
        nearest = (_positions(old, new) + 0.5).floor().long()
        labels = labels.index_select(axis, nearest.to(labels.device))
    return labels


def resize_mask(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """Resample a mask to another shape: (B, C, *sides) → (B, C, *shape), 1 inside and 0 outside. No nonzero voxel is
    lost where it shrinks, however thin the mask is."""
    sides = zip(mask.shape[2:], _new_sides(mask, shape), strict=True)
    return cover(mask, [(_positions(old, new), (old - 1) / max(new - 1, 1)) for old, new in sides])


@full_precision
def cover(mask: Tensor, axes: Sequence[tuple[Tensor, float]]) -> Tensor:
    """1 where a new voxel holds any nonzero one of a mask (B, C, *sides), or is held by it if it is smaller. Along each
    axis, the centres of new voxels are given as fractional indices of the old ones, and how many of those they lie
    apart."""
    inside, held = (mask != 0).float(), []
    for old, (centre, step) in zip(mask.shape[2:], axes, strict=True):
        apart = (centre - torch.arange(old, dtype=torch.float64)[:, None]).abs()
        nearest = F.one_hot(apart.argmin(1), len(centre)) if step > 1 else F.one_hot(apart.argmin(0), old).mT
        held.append((nearest * (apart <= max(step, 1) / 2 + 1e-6)).to(inside))
    return (multiply_axes(inside, held) > 0).to(inside)


def _new_sides(data: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    sides, shape = tuple(data.shape[2:]), tuple(shape)
    if len(shape) != len(sides):
        raise InputError(f"shape is {shape} but the image has {len(sides)} spatial axes {sides}")
    if any(new < 2 and new != old for old, new in zip(sides, shape, strict=True)):
        raise InputError(f"shape is {shape}; expected sides of at least 2, whose ends are 0 and 1")
    return shape


def _positions(old: int, new: int) -> Tensor:
    """Fractional indices of the new axis's voxels along the old one."""
    return torch.arange(new, dtype=torch.float64) * (old - 1) / max(new - 1, 1)


def averaging(old: int, centre: Tensor, step: float) -> Tensor:
    """(old, new): weights of the old voxels in new ones that lie `step` apart, centred at these fractional indices."""
    width = torch.full_like(centre, math.sqrt(max(step**2 - 1, 0)))
    width = torch.minimum(width, 2 * torch.minimum(centre, old - 1 - centre)).clamp(min=0)
    samples = 2 * math.ceil(step) if step > 1 else 1
    offsets = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples - 0.5
    position = centre[:, None] + width[:, None] * offsets  # (new, samples)
    matrix = torch.zeros(old, len(centre), dtype=torch.float64)
    for index in (position.floor(), position.floor() + 1):  # the voxels beside each sample; others are out of reach
        weight = (1 - (position - index).abs()) * ((index >= 0) & (index < old))
        matrix.scatter_add_(0, index.clamp(0, old - 1).long().T, weight.T)
    return matrix / samples
