"""Numerical inverse of a transform."""

from __future__ import annotations

import torch
from torch import Tensor

from carlreg.geometry.fitting import fit_affine
from carlreg.geometry.grids import voxel_points, voxel_size
from carlreg.geometry.transforms import Affine, DisplacementField, Transform


def invert(transform: Transform, *, like: Tensor, steps: int = 100, tolerance: float = 1e-4) -> DisplacementField:
    """The inverse of a transform on the voxels of `like`, the image whose points `transform` returns.

    Solves transform(x) = y for every voxel y by x ← x − A⁻¹(transform(x) − y), where A is the transform's best affine
    approximation, so that large rotations and shifts cost nothing. If a step does not reduce the residual, it is undone
    and halved. Stops after `steps`, or when every residual is below `tolerance` voxels.
    """
    with torch.no_grad():
        target = voxel_points(like)
        affine = fit_affine(target, transform(target))
        undo = Affine.from_parts(torch.linalg.pinv(affine.linear), torch.zeros_like(affine.shift))
        size = voxel_size(like.shape[2:], like)
        best = undo(target - affine.shift.reshape(len(affine.shift), *(1,) * (target.dim() - 2), -1))
        residual = transform(best) - target
        error = (residual / size).norm(dim=-1, keepdim=True)
        step = torch.ones_like(error)
        for _ in range(steps):
            if error.max() < tolerance:
                break
            trial = best - step * undo(residual)
            trial_residual = transform(trial) - target
            trial_error = (trial_residual / size).norm(dim=-1, keepdim=True)
            better = trial_error < error
            best = torch.where(better, trial, best)
            residual = torch.where(better, trial_residual, residual)
            error = torch.where(better, trial_error, error)
            step = torch.where(better, (1.5 * step).clamp(max=1), step / 2)
        return DisplacementField((best - target).movedim(-1, 1))
