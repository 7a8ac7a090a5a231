"""Removal of folds: the smallest changes to a map that make its Jacobian determinants positive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.geometry.grids import multiply_axes
from carlreg.geometry.jacobian import determinant, expand, minors

LEAST, AIM = 0.01, 0.05
"""Where a determinant is below the first, it is raised to the second."""
MANY = 0.1
"""With a larger share of folded voxels, there is nothing worth preserving."""
ROUNDS, SWEEPS, PLAIN = 40, 10, 3
"""Rounds, sweeps in each, and how many rounds come before one begins to smooth."""


@torch.no_grad()
def unfold(displacement: Tensor, steps: Sequence[float], size: Sequence[float]) -> Tensor:
    """The displacements (D, *shape) of a map, changed as little as possible so that no voxel is folded.

    `steps` are the distances between the points that are displaced. `size` is the scale of each coordinate: lengths of
    changes are measured after multiplication with it. A voxel is folded if one of the 2^D determinants of differences
    to its neighbours, one along each axis, is below 0.01. To first order, the smallest change of these D + 1 points
    that corrects one determinant has a closed form; points that belong to several take the mean of the changes. A
    fold that is several voxels wide can get stuck that way, so from the fourth round on its surroundings are also
    smoothed a little. Unlike smoothing alone, this leaves the map around folds nearly as it was.

    If more than a tenth of the voxels are folded, or an axis has a single voxel, nothing is changed; folds that
    resist are left.
    """
    shape = displacement.shape[1:]
    if min(shape) < 2:
        return displacement
    axes = [torch.arange(n, device=displacement.device) * step for n, step in zip(shape, steps, strict=True)]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).to(displacement)
    for number in range(ROUNDS):
        folded = smallest_determinant((grid + displacement)[None], steps)[0] < LEAST
        if not bool(folded.any()) or float(folded.float().mean()) > MANY:
            break
        if number >= PLAIN:
            displacement = _smooth(displacement, folded)
        corners, signs = _corners(folded.nonzero(), shape)
        moves = displacement.flatten(1).mT.clone(memory_format=torch.contiguous_format)
        for _ in range(SWEEPS):
            if not _sweep(moves, corners, signs, steps, size):
                break
        displacement = moves.mT.reshape(grid.shape)
    return displacement


def smallest_determinant(positions: Tensor, steps: Sequence[float]) -> Tensor:
    """The smallest determinant at each voxel, by differences to either neighbour along each axis: (B, D, *shape) →
    (B, *shape)."""
    slopes = []
    for axis, step in enumerate(steps, start=2):
        slope = positions.diff(dim=axis) / step
        if slope.shape[axis] == 0:
            return torch.ones_like(positions[:, 0])
        ends = slope.narrow(axis, 0, 1), slope.narrow(axis, slope.shape[axis] - 1, 1)
        behind, ahead = torch.cat([ends[0], slope], dim=axis), torch.cat([slope, ends[1]], dim=axis)
        slopes.append((behind.movedim(1, -1), ahead.movedim(1, -1)))
    smallest = torch.full_like(positions[:, 0], torch.inf)
    firsts, *others = slopes
    for columns in itertools.product(*others):
        shared = minors(columns)
        for first in firsts:
            smallest = torch.minimum(smallest, expand(first, shared))
    return smallest


def _corners(voxels: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The 2^D corners of voxels (N, D) of a grid: each voxel with one neighbour along every axis, at the border with
    the only one. Indices in the flattened grid of the voxel and of its neighbours, (1 + D, 2^D N), and the directions
    of the neighbours, ±1, (D, 2^D N)."""
    choices = torch.tensor(list(itertools.product((-1, 1), repeat=len(shape))), device=voxels.device)[:, None]
    there, last = voxels + choices, torch.tensor(shape, device=voxels.device) - 1  # (2^D, N, D)
    signs = torch.where((there < 0) | (there > last), -choices, choices).flatten(0, 1).mT
    strides = torch.tensor([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], device=voxels.device)
    here = (voxels * strides).sum(1).repeat(len(choices))
    return torch.cat([here[None], here + signs * strides[:, None]]), signs


def _sweep(moves: Tensor, corners: Tensor, signs: Tensor, steps: Sequence[float], size: Sequence[float]) -> bool:
    """Change displacements (voxels, D) to raise each determinant that is too small; whether one of them was a fold."""
    unit, scale = (torch.tensor(part).to(moves) for part in (steps, size))
    factors = (signs / unit[:, None])[..., None]  # (D, 2^D N, 1)
    columns = torch.eye(len(unit)).to(moves)[:, None] + factors * (moves[corners[1:]] - moves[corners[0]])
    found = determinant(list(columns))
    (low,) = torch.nonzero(found < AIM, as_tuple=True)
    slopes = factors[:, low] * cofactors(columns[:, low])
    slopes = torch.cat([-slopes.sum(0, keepdim=True), slopes]) / scale  # by the voxel and by its neighbours
    length = slopes.square().sum((0, 2)).clamp(min=1e-12)
    changes = ((AIM - found[low]) / length)[:, None] * slopes / scale
    places, index = corners[:, low].unique(return_inverse=True)
    total = moves.new_zeros(len(places), moves.shape[1] + 1)  # the last column counts what is demanded of a place
    _add_at(total, index.flatten(), F.pad(changes.flatten(0, 1), (0, 1), value=1.0))
    moves[places] += total[:, :-1] / total[:, -1:]
    return bool(found.min() < LEAST)


def cofactors(columns: Tensor) -> Tensor:
    """The derivatives of determinants by their columns: (D, N, D) → (D, N, D)."""
    units = torch.eye(len(columns)).to(columns)
    rows = []
    for replaced in range(len(columns)):
        others = [unit.expand_as(columns[0]) for unit in units]
        rows.append([determinant([*columns[:replaced], one, *columns[replaced + 1 :]]) for one in others])
    return torch.stack([torch.stack(row, dim=-1) for row in rows])


def _add_at(total: Tensor, index: Tensor, values: Tensor) -> None:
    """Add rows, in the same order every time: on each device, only one of these two functions does."""
    if total.is_cuda:
        total.index_put_((index,), values, accumulate=True)
    else:
        total.index_add_(0, index, values)


def _smooth(displacement: Tensor, folded: Tensor) -> Tensor:
    """Displacements averaged with their neighbours around folds, in Gaussian windows of one voxel."""
    index = torch.arange(max(folded.shape)).to(displacement)
    apart = index[:, None] - index
    taps = torch.exp(-0.5 * apart.square()) * (apart.abs() <= 3)
    windows = [taps[:n, :n] for n in folded.shape]
    every = torch.cat([displacement, torch.stack([folded, torch.ones_like(folded)]).to(displacement)])
    blurred = multiply_axes(every[None], windows)[0]
    mean, near = blurred[:-2] / blurred[-1], blurred[-2] / blurred[-1].amax()
    return torch.lerp(displacement, mean, near)
