"""Least-squares fits of rigid and affine maps to matched points, random rotations, and the inverse of any map."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from carlreg.fast.precision import full_precision
from carlreg.geometry.grids import voxel_points, voxel_size
from carlreg.geometry.transforms import Affine, DisplacementField, Transform


@full_precision
def fit_affine(points: Tensor, targets: Tensor, weights: Tensor | None = None) -> Affine:
    """The affine map that takes points (B, ..., D) closest to targets, by (weighted) least squares."""
    weight, source, source_mean, target, target_mean = _centred(points, targets, weights)
    weighted = weight * source
    # The pseudo-inverse leaves directions alone that the points do not span, such as an axis of one voxel.
    linear = (torch.linalg.pinv(weighted.mT @ source, hermitian=True) @ weighted.mT @ target).mT
    return Affine.from_parts(linear, (target_mean - source_mean @ linear.mT)[:, 0])


@full_precision
def fit_rigid(points: Tensor, targets: Tensor, weights: Tensor | None = None) -> Affine:
    """The rotation and shift that take points (B, ..., D) closest to targets, by (weighted) least squares; never a
    reflection. Coordinates must be isotropic, for example millimetres."""
    weight, source, source_mean, target, target_mean = _centred(points, targets, weights)
    left, _, right = torch.linalg.svd((weight * target).mT @ source)
    signs = torch.ones_like(left[:, 0])
    signs[:, -1] = torch.linalg.det(left @ right).sign()
    linear = left * signs[:, None] @ right
    return Affine.from_parts(linear, (target_mean - source_mean @ linear.mT)[:, 0])


def _centred(points: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
    """Weights (B, N, 1) that add up to 1, and points and targets (B, N, D) minus their means, each with its mean."""
    batch, dim = max(points.shape[0], targets.shape[0]), points.shape[-1]
    source, target = (p.reshape(p.shape[0], -1, dim).expand(batch, -1, -1) for p in (points, targets))
    weight = torch.ones_like(source[..., :1]) if weights is None else weights.reshape(batch, -1, 1)
    weight = weight / weight.sum(dim=1, keepdim=True)
    source_mean, target_mean = ((weight * p).sum(1, keepdim=True) for p in (source, target))
    return weight, source - source_mean, source_mean, target - target_mean, target_mean


Fit = Callable[[Tensor, Tensor, Tensor], Affine]


def fit_robustly(fit: Fit, points: Tensor, targets: Tensor, weights: Tensor | None = None, steps: int = 20) -> Affine:
    """`fit_affine` or `fit_rigid` of two point sets (1, N, D), robust to wrong matches.

    Iteratively reweighted least squares: each weight is divided by (1 + (r/s)²)², where r is the point's residual and s
    the weighted median of all residuals. This is the bounded loss of Geman and McClure.
    """
    weights = torch.ones_like(points[..., 0]) if weights is None else weights
    best = fit(points, targets, weights)
    for _ in range(steps):
        residual = (best(points) - targets).norm(dim=-1)
        order = residual.argsort(dim=-1)
        share = weights.gather(-1, order).cumsum(dim=-1)
        middle = order.gather(-1, (share < share[..., -1:] / 2).sum(dim=-1, keepdim=True))
        scale = residual.gather(-1, middle).clamp(min=1e-9)
        best = fit(points, targets, weights / (1 + (residual / scale) ** 2) ** 2)
    return best


def random_rotation(
    shape: Sequence[int], batch: int, *, like: Tensor, generator: torch.Generator | None = None
) -> Affine:
    """Rotations drawn uniformly from SO(D), about the centre of an image with isotropic voxels and this shape."""
    dim = len(shape)
    gaussian = torch.randn(batch, dim, dim, dtype=torch.float64, generator=generator)
    orthogonal, upper = torch.linalg.qr(gaussian)
    orthogonal = orthogonal * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # makes QR unique: Haar measure
    orthogonal[:, :, 0] *= torch.linalg.det(orthogonal).sign()[:, None]
    return about_centre(orthogonal, shape, like=like)


def about_centre(linear: Tensor, shape: Sequence[int], *, like: Tensor) -> Affine:
    """Linear maps (B, D, D) of voxels, such as rotations, about the centre of an image of this shape, as affine maps of
    its unit coordinates."""
    size = torch.tensor([max(n - 1, 1) for n in shape], dtype=torch.float64)
    linear = linear.to(torch.float64) * size / size[:, None]  # conjugated by the aspect ratio
    centre = torch.full((*linear.shape[:2],), 0.5, dtype=torch.float64)
    shift = centre - (linear @ centre[..., None])[..., 0]
    # A copy this small can be asynchronous: no need to synchronise with the device.
    return Affine.from_parts(linear, shift).map_tensors(lambda matrix: matrix.to(like, non_blocking=like.is_cuda))


@torch.no_grad()
def invert(transform: Transform, *, like: Tensor, steps: int = 100, tolerance: float = 1e-4) -> DisplacementField:
    """The inverse of a transform on the voxels of `like`, the image whose points `transform` returns.

    Solves transform(x) = y for every voxel y by x ← x − A⁻¹(transform(x) − y), where A is the transform's best affine
    approximation, so that large rotations and shifts cost nothing. If a step does not reduce the residual, it is undone
    and halved. Stops after `steps`, or when every residual is below `tolerance` voxels.
    """
    target, size = voxel_points(like), voxel_size(like.shape[2:], like)
    affine = fit_affine(target, transform(target))
    undo = Affine.from_parts(torch.linalg.pinv(affine.linear), torch.zeros_like(affine.shift))

    def missed(points: Tensor) -> tuple[Tensor, Tensor]:
        residual = transform(points) - target
        return residual, (residual / size).norm(dim=-1, keepdim=True)

    best = undo(target - affine.shift.reshape(len(affine.shift), *(1,) * (target.dim() - 2), -1))
    residual, error = missed(best)
    step = torch.ones_like(error)
    for _ in range(steps):
        if error.max() < tolerance:
            break
        trial = best - step * undo(residual)
        trial_residual, trial_error = missed(trial)
        better = trial_error < error
        best = torch.where(better, trial, best)
        residual = torch.where(better, trial_residual, residual)
        error = torch.where(better, trial_error, error)
        step = torch.where(better, (1.5 * step).clamp(max=1), step / 2)
    return DisplacementField((best - target).movedim(-1, 1))
