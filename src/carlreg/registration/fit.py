"""Rigid and affine transforms: robust least-squares fits to a network's dense result, or to its attention."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import mixed_precision
from carlreg.files.images import map_points
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.fitting import fit_affine, fit_rigid, fit_robustly
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.transforms import Transform
from carlreg.model.algorithms import RegistrationAlgorithm, coordinate_matches
from carlreg.preparation import FOREGROUND, Prepared, PreparedPair
from carlreg.registration.options import TransformKind


def fit_to_dense(forward: Transform, pair: PreparedPair, kind: TransformKind) -> WorldTransform:
    """The rigid or affine map closest to the dense one, at every second voxel of the fixed image."""
    every_second = (slice(None), *[slice(None, None, 2)] * pair.fixed.image.dim)
    points = voxel_points(pair.fixed.tensor.cpu())[every_second].flatten(1, -2)
    return _fit(points, forward(points), _foreground(pair.fixed, points), pair, kind)


def fit_to_attention(network: RegistrationAlgorithm, pair: PreparedPair, kind: TransformKind) -> WorldTransform:
    """The rigid or affine map closest to the matches of coordinate attention, weighted by 1 / variance."""
    with mixed_precision(pair.moving.tensor.device):
        matches = coordinate_matches(network, pair.moving.tensor, pair.fixed.tensor)
    if matches is None:
        raise InputError("this model has no coordinate attention; expected fit_source='network'")
    points, targets, covariance = (t.cpu() for t in (matches.points, matches.targets, matches.covariance))
    to_world = torch.from_numpy(pair.moving.image.unit_to_world()[:-1, :-1])
    variance = torch.einsum("ij,bnjk,ik->bn", to_world, covariance.double(), to_world)
    least = float(np.mean(pair.moving.image.spacing)) ** 2  # no match is more certain than a voxel
    return _fit(points, targets, _foreground(pair.fixed, points) / variance.clamp(min=least), pair, kind)


def _foreground(fixed: Prepared, points: Tensor) -> Tensor:
    """(1, N): 1 at points inside the mask, if there is one, or else in the foreground; 0 elsewhere."""
    source, threshold = (fixed.tensor, FOREGROUND) if fixed.mask is None else (fixed.mask, 0.5)
    inside = (interpolate(source.cpu().float(), points)[:, 0] > threshold).double()
    return inside if bool(inside.any()) else torch.ones_like(inside)


def _fit(points: Tensor, targets: Tensor, weights: Tensor, pair: PreparedPair, kind: TransformKind) -> WorldTransform:
    """Points and targets (1, N, D) in unit coordinates; the fit is in millimetres."""
    here = torch.from_numpy(map_points(pair.fixed.image.unit_to_world(), points.double().numpy()))
    there = torch.from_numpy(map_points(pair.moving.image.unit_to_world(), targets.double().numpy()))
    fitted = fit_robustly(fit_rigid if kind == "rigid" else fit_affine, here, there, weights.double())
    matrix = np.eye(pair.fixed.image.dim + 1)
    matrix[:-1] = fitted.matrix[0].numpy()
    return WorldTransform.linear(matrix)
