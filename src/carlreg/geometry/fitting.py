"""Least-squares fits of rigid and affine maps to matched points, and random rotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from carlreg.fast.precision import full_precision
from carlreg.geometry.transforms import Affine


@full_precision
def fit_affine(points: Tensor, targets: Tensor, weights: Tensor | None = None) -> Affine:
    """The affine map that takes points (B, ..., D) closest to targets, in the (weighted) least-squares sense."""
    batch, dim = max(points.shape[0], targets.shape[0]), points.shape[-1]
    source = points.reshape(points.shape[0], -1, dim).expand(batch, -1, -1)
    target = targets.reshape(targets.shape[0], -1, dim).expand(batch, -1, -1)
    weight = torch.ones_like(source[..., :1]) if weights is None else weights.reshape(batch, -1, 1)
    weight = weight / weight.sum(dim=1, keepdim=True)
    # Centred, the normal equations are as well conditioned as the cloud of points is round.
    source_mean, target_mean = (weight * source).sum(1, keepdim=True), (weight * target).sum(1, keepdim=True)
    centred = weight * (source - source_mean)
    covariance = centred.mT @ (source - source_mean)
    # The pseudo-inverse leaves alone what the points say nothing about, such as an axis of one voxel.
    linear = (torch.linalg.pinv(covariance, hermitian=True) @ centred.mT @ (target - target_mean)).mT
    return Affine.from_parts(linear, (target_mean - source_mean @ linear.mT)[:, 0])


@full_precision
def fit_rigid(points: Tensor, targets: Tensor, weights: Tensor | None = None) -> Affine:
    """The rotation and shift that take points (B, ..., D) closest to targets, in the (weighted) least-squares sense;
    never a reflection. The coordinates must be of a space in which lengths mean something, millimetres say."""
    batch, dim = max(points.shape[0], targets.shape[0]), points.shape[-1]
    source = points.reshape(points.shape[0], -1, dim).expand(batch, -1, -1)
    target = targets.reshape(targets.shape[0], -1, dim).expand(batch, -1, -1)
    weight = torch.ones_like(source[..., :1]) if weights is None else weights.reshape(batch, -1, 1)
    weight = weight / weight.sum(dim=1, keepdim=True)
    source_mean, target_mean = (weight * source).sum(1, keepdim=True), (weight * target).sum(1, keepdim=True)
    left, _, right = torch.linalg.svd((weight * (target - target_mean)).mT @ (source - source_mean))
    keep = torch.ones_like(left[:, 0])
    keep[:, -1] = torch.linalg.det(left @ right).sign()
    linear = left * keep[:, None] @ right
    return Affine.from_parts(linear, (target_mean - source_mean @ linear.mT)[:, 0])


def fit_robustly(
    fit: Callable[[Tensor, Tensor, Tensor], Affine],
    points: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    steps: int = 20,
) -> Affine:
    """`fit_affine` or `fit_rigid` of one pair of point sets (1, N, D), such that wrong matches hardly count.

    Least squares, repeated with each point's weight divided by (1 + (r/s)²)², where r is how far it misses its target
    and s the weighted median of that: Geman and McClure's bounded loss.
    """
    given = torch.ones_like(points[..., 0]) if weights is None else weights
    best = fit(points, targets, given)
    for _ in range(steps):
        missed = (best(points) - targets).norm(dim=-1)
        order = missed.argsort(dim=-1)
        share = given.gather(-1, order).cumsum(dim=-1)
        middle = order.gather(-1, (share < share[..., -1:] / 2).sum(dim=-1, keepdim=True))
        scale = missed.gather(-1, middle).clamp(min=1e-9)
        best = fit(points, targets, given / (1 + (missed / scale) ** 2) ** 2)
    return best


def random_rotation(
    shape: Sequence[int], batch: int, *, like: Tensor, generator: torch.Generator | None = None
) -> Affine:
    """Rotations drawn uniformly from SO(D), about the centre of an image with isotropic voxels and these sides."""
    dim = len(shape)
    gaussian = torch.randn(batch, dim, dim, dtype=torch.float64, generator=generator)
    orthogonal, upper = torch.linalg.qr(gaussian)
    orthogonal = orthogonal * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # makes QR's answer unique: Haar measure
    orthogonal[:, :, 0] *= torch.linalg.det(orthogonal).sign()[:, None]
    return about_centre(orthogonal, shape, like=like)


def about_centre(linear: Tensor, shape: Sequence[int], *, like: Tensor) -> Affine:
    """Linear maps (B, D, D) of voxels, a rotation say, about the centre of an image with these sides, as a map of its
    unit coordinates: conjugated by the box's aspect ratio."""
    size = torch.tensor([max(n - 1, 1) for n in shape], dtype=torch.float64)
    linear = linear.to(torch.float64) * size / size[:, None]
    centre = torch.full((*linear.shape[:2],), 0.5, dtype=torch.float64)
    shift = centre - (linear @ centre[..., None])[..., 0]
    # So few numbers a GPU takes without the host waiting until it is done with what it does.
    return Affine.from_parts(linear, shift).map_tensors(lambda matrix: matrix.to(like, non_blocking=like.is_cuda))
