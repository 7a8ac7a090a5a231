"""Similarity and regularity as functions on tensors, and the paper's training loss.

Similarities compare two images (B, C, *shape) on the same grid; equal images give 0, or the minimum. `mask`
(B, 1, *shape) restricts the average to its nonzero voxels, for each item.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError
from carlreg.geometry.checks import check_image, check_same_shape
from carlreg.geometry.grids import Outside, along_axes, interpolate, voxel_points, voxel_size
from carlreg.geometry.jacobian import jacobian_determinant
from carlreg.geometry.transforms import Composition, DisplacementField, Extrapolation, Transform

Regularity = Literal["gradicon", "diffusion", "nearness"]


class Similarity(Protocol):
    """The signature of a similarity of two images on one grid. Pass your own function wherever a name is accepted."""

    def __call__(self, warped: Tensor, fixed: Tensor, /, *, mask: Tensor | None = None) -> Tensor: ...


# ---- similarity -----------------------------------------------------------------------------------------------------


def lncc(warped: Tensor, fixed: Tensor, *, sigma: float = 4.0, mask: Tensor | None = None) -> Tensor:
    """1 − local normalised cross-correlation, over Gaussian windows of `sigma` voxels. From 0 (equal) to 2."""
    return 1 - _masked_mean(local_correlation(warped, fixed, sigma), mask)


def lncc2(warped: Tensor, fixed: Tensor, *, sigma: float = 4.0, mask: Tensor | None = None) -> Tensor:
    """1 − squared local correlation: invariant to inverted contrast."""
    return 1 - _masked_mean(local_correlation(warped, fixed, sigma) ** 2, mask)


def ssd(warped: Tensor, fixed: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean squared difference."""
    _check_images(warped, fixed)
    return _masked_mean((warped - fixed) ** 2, mask)


def mind(warped: Tensor, fixed: Tensor, *, radius: int = 2, dilation: int = 2, mask: Tensor | None = None) -> Tensor:
    """Mean squared difference of MIND-SSC descriptors (Heinrich et al., MICCAI 2013), for different modalities."""
    _check_images(warped, fixed)
    return _masked_mean((mind_ssc(warped, radius, dilation) - mind_ssc(fixed, radius, dilation)) ** 2, mask)


SIMILARITIES: dict[str, Similarity] = {"lncc": lncc, "lncc2": lncc2, "mind": mind, "ssd": ssd}


def local_correlation(first: Tensor, second: Tensor, sigma: float = 4.0, epsilon: float = 1e-5) -> Tensor:
    """The correlation coefficient within a Gaussian window around each voxel: (B, C, *shape)."""
    _check_images(first, second)
    fused = fast.local_correlation(first, second, functools.partial(gaussian_blur, sigma=sigma), epsilon)
    if fused is not None:
        return fused
    # Subtracting the mean saves digits in E[x²] − E[x]² for images far from zero, such as a CT in HU. Outside an image,
    # windows contain zeros instead of means; `missing` is that fraction of a window, for an exact correction.
    inside = gaussian_blur(torch.ones_like(first[:1, :1]), sigma)
    missing = 1 - inside
    centre1, centre2 = (
        image.detach().flatten(2).mean(dim=2).reshape(*image.shape[:2], *(1,) * (image.dim() - 2))
        for image in (first, second)
    )
    first, second = first - centre1, second - centre2
    moments = torch.cat([first, second, first * first, second * second, first * second], dim=1)
    mean1, mean2, square1, square2, product = gaussian_blur(moments, sigma).chunk(5, dim=1)

    def covariance(product: Tensor, mean1: Tensor, mean2: Tensor, centre1: Tensor, centre2: Tensor) -> Tensor:
        return product - mean1 * mean2 + missing * (centre1 * mean2 + centre2 * mean1 + centre1 * centre2 * inside)

    variance1 = covariance(square1, mean1, mean1, centre1, centre1).clamp(min=0) + epsilon
    variance2 = covariance(square2, mean2, mean2, centre2, centre2).clamp(min=0) + epsilon
    return covariance(product, mean1, mean2, centre1, centre2) / (variance1 * variance2).sqrt()


def gaussian_blur(image: Tensor, sigma: float) -> Tensor:
    """Convolve along each axis with a normalised Gaussian, truncated at 2σ; zeros outside the image."""
    return along_axes(image, _blur_rows, sigma)


def _blur_rows(rows: Tensor, sigma: float) -> Tensor:
    radius = int(2 * sigma)
    offset = torch.arange(-radius, radius + 1, dtype=rows.dtype, device=rows.device)
    taps = torch.exp(-0.5 * (offset / sigma) ** 2)
    return F.conv1d(rows.movedim(1, 0), (taps / taps.sum())[None, None], padding=radius).movedim(0, 1)


def mind_ssc(image: Tensor, radius: int = 2, dilation: int = 2) -> Tensor:
    """Self-similarities between each voxel's neighbours, exp(−patch distance / local variance).

    Neighbours at right angles are compared: 12 channels in 3-D, 4 in 2-D, for each channel of the image.
    """
    check_image(image)
    dim = image.dim() - 2
    if dim == 1:
        raise InputError("mind compares neighbours at right angles; a 1-D image has none: use lncc, lncc2 or ssd")
    batch, channels, *shape = image.shape
    padded = _pad_border(image.reshape(batch * channels, 1, *shape), dilation)

    def neighbour(axis: int, sign: int) -> Tensor:
        start = [dilation * (1 + sign * (axis == a)) for a in range(dim)]
        window = (slice(None), slice(None), *(slice(s, s + n) for s, n in zip(start, shape, strict=True)))
        return padded[window]

    neighbours = {(axis, sign): neighbour(axis, sign) for axis in range(dim) for sign in (-1, 1)}
    pairs = [(a, b) for a, b in itertools.combinations(neighbours, 2) if a[0] != b[0]]
    distance = torch.cat([(neighbours[a] - neighbours[b]) ** 2 for a, b in pairs], dim=1)
    average = (F.avg_pool2d, F.avg_pool3d)[dim - 2]
    distance = average(_pad_border(distance, radius), 2 * radius + 1, stride=1)
    distance = distance - distance.amin(dim=1, keepdim=True)
    variance = distance.mean(dim=1, keepdim=True)
    # Clamped to within a factor of 1000 of the image's average, for flat regions and for outliers.
    average_variance = variance.detach().reshape(batch, -1).mean(dim=1).repeat_interleave(channels)
    average_variance = average_variance.reshape(-1, *(1,) * (dim + 1)).clamp(min=torch.finfo(image.dtype).eps)
    variance = torch.maximum(torch.minimum(variance, 1000 * average_variance), 0.001 * average_variance)
    return torch.exp(-distance / variance).reshape(batch, -1, *shape)


def _pad_border(image: Tensor, voxels: int) -> Tensor:
    return F.pad(image, (voxels, voxels) * (image.dim() - 2), mode="replicate")


def _masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    if mask.shape[0] not in (1, values.shape[0]) or mask.shape[1] != 1 or mask.shape[2:] != values.shape[2:]:
        raise InputError(
            f"mask has shape {tuple(mask.shape)} for images of shape {tuple(values.shape)}; "
            f"expected {(values.shape[0], 1, *values.shape[2:])}"
        )
    inside = (mask != 0).expand_as(values)
    count = inside.flatten(1).sum(dim=1)
    if not bool((count > 0).all()):
        raise InputError("mask is empty for at least one item of the batch; expected at least one nonzero voxel")
    return (values.where(inside, 0).flatten(1).sum(dim=1) / count).mean()


def _check_images(first: Tensor, second: Tensor) -> None:
    check_image(first, "first image")
    check_image(second, "second image")
    check_same_shape(first, second, ("first image", "second image"))


# ---- regularity -----------------------------------------------------------------------------------------------------


def diffusion(displacement: Tensor) -> Tensor:
    """‖∇φ − I‖² of a dense displacement (B, D, *shape) in unit coordinates, by differences of one voxel.

    Summed over directions, averaged over components and voxels: the squared Frobenius norm divided by D. The paper's λ
    is for this normalisation.
    """
    _check_displacement(displacement)
    total = displacement.new_zeros(())
    for axis in range(2, displacement.dim()):
        side = displacement.shape[axis]
        if side > 1:
            total = total + ((side - 1) * displacement.diff(dim=axis)).square().mean()
    return total


def nearness(displacement: Tensor) -> Tensor:
    """|φ(x) − x|² of a dense displacement (B, D, *shape) in unit coordinates, averaged over the voxels.

    If a network maps all points to one, ∇φ is constant and `diffusion` has no gradient except at the image's border.
    This has one everywhere.
    """
    _check_displacement(displacement)
    return displacement.square().sum(dim=1).mean()


def _check_displacement(displacement: Tensor) -> None:
    if displacement.dim() < 3 or displacement.shape[1] != displacement.dim() - 2:
        raise InputError(f"displacement has shape {tuple(displacement.shape)}; expected (B, D, *shape)")


def folds(displacement: Tensor, *, margin: float = 0.1) -> Tensor:
    """Mean of relu(margin − det ∇φ) over the inner voxels of a dense displacement (B, D, *shape) in unit coordinates.

    A differentiable counterpart of `jacobian.folding`: 0 where every determinant is above the small positive margin.
    """
    if min(displacement.shape[2:]) < 3:
        return displacement.new_zeros(())  # central differences need three voxels
    return F.relu(margin - jacobian_determinant(DisplacementField(displacement), displacement)).mean()


def gradicon(
    phi_ab: Callable[[Tensor], Tensor], phi_ba: Callable[[Tensor], Tensor], points: Tensor, *, delta: float = 1e-3
) -> Tensor:
    """‖∇(φ_AB ∘ φ_BA) − I‖² at the points (B, ..., D), by differences of `delta`, normalised like `diffusion`."""
    return _squared_gradient(phi_ab, phi_ba, points, points.new_full((points.shape[-1],), delta))


def _squared_gradient(
    phi_ab: Callable[[Tensor], Tensor], phi_ba: Callable[[Tensor], Tensor], points: Tensor, steps: Tensor
) -> Tensor:
    """‖∇(φ_AB ∘ φ_BA) − I‖² / D from the points (B, ..., D) and their neighbours at these steps along each axis."""

    def error(x: Tensor) -> Tensor:
        return phi_ab(phi_ba(x)) - x

    here = error(points)
    total = points.new_zeros(())
    for axis, direction in enumerate(torch.diag(steps)):
        total = total + ((error(points + direction) - here) / steps[axis]).square().mean()
    return total


def gradicon_on_grid(
    phi_ab: Callable[[Tensor], Tensor],
    phi_ba: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    stride: int = 2,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`gradicon` at every `stride`-th voxel of the image's grid, which is shifted by up to `stride` voxels at random,
    with differences of one voxel."""
    dim = image.dim() - 2
    size = voxel_size(image.shape[2:], image)
    every = (slice(None), *(slice(None, None, stride) for _ in range(dim)))
    shift = stride * torch.rand(dim, generator=generator, dtype=image.dtype, device=_device(generator, image))
    points = voxel_points(image)[every] + size * (shift.to(image.device) - 0.5)
    return _squared_gradient(phi_ab, phi_ba, points, size)


def jittered_points(image: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """The image's voxels with Gaussian noise of one voxel added to each: (B, *shape, D)."""
    points = voxel_points(image).expand(image.shape[0], *(-1,) * (image.dim() - 1))
    noise = torch.randn(points.shape, dtype=image.dtype, device=_device(generator, image), generator=generator)
    return points + voxel_size(image.shape[2:], image) * noise.to(image.device)


def _device(generator: torch.Generator | None, image: Tensor) -> torch.device:
    return image.device if generator is None else generator.device


# ---- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A training loss and its parts."""

    total: Tensor
    similarity: Tensor
    """Sum of both directions."""
    regularity: Tensor
    """Not weighted."""
    label_loss: Tensor | None = None
    """1 − Dice, sum of both directions, so from 0 to 2; not weighted. None without labels."""

    def floats(self) -> dict[str, float]:
        parts = {name: getattr(self, name) for name in ("total", "similarity", "regularity", "label_loss")}
        return {name: float(part.detach()) for name, part in parts.items() if part is not None}


def registration_loss(
    phi_ab: Transform,
    phi_ba: Transform,
    moving: Tensor,
    fixed: Tensor,
    *,
    similarity: str | Similarity = "lncc",
    regularity: Regularity = "gradicon",
    weight: float = 1.5,
    moving_mask: Tensor | None = None,
    fixed_mask: Tensor | None = None,
    outside: Outside = "border",
    exact: bool = False,
    generator: torch.Generator | None = None,
    labels: tuple[Tensor, Tensor] | None = None,
    label_weight: float = 1.0,
) -> Loss:
    """sim(M ∘ φ_AB, F) + sim(F ∘ φ_BA, M) + λ · regularity, Eq. (gradicon_loss).

    φ_AB = Φ[M, F] and φ_BA = Φ[F, M], as `both` returns them. "gradicon" penalises ∇(φ_AB ∘ φ_BA) − I over the moving
    image; "diffusion" penalises ∇φ_AB − I, for the first steps of training; "nearness", which is not in the paper,
    penalises both displacements themselves. Both maps are evaluated once, at the voxels, and GradICON interpolates them
    from there (`gradicon_on_grid`). `exact` evaluates them again, at each voxel jittered by one voxel's noise and at D
    neighbours of it, as the authors do; this is an order of magnitude slower.

    `labels` are maps of K structures in the moving and the fixed image, (B, K, *shape) each, from 0 to 1. With them,
    `label_loss` in both directions is added, times `label_weight`; the paper has no such term.
    """
    measure = find_similarity(similarity)
    ab, ba = phi_ab.on_grid_of(fixed), phi_ba.on_grid_of(moving)
    similar = measure(interpolate(moving, ab, outside=outside), fixed, mask=fixed_mask) + measure(
        interpolate(fixed, ba, outside=outside), moving, mask=moving_mask
    )
    dense_ab, dense_ba = as_field(ab, phi_ab, fixed), as_field(ba, phi_ba, moving)
    if regularity == "diffusion":
        regular = diffusion(dense_ab.displacement)
    elif regularity == "nearness":
        regular = (nearness(dense_ab.displacement) + nearness(dense_ba.displacement)) / 2
    elif regularity != "gradicon":
        raise InputError(f"unknown regularity {regularity!r}; expected 'gradicon', 'diffusion' or 'nearness'")
    elif exact:
        regular = gradicon(phi_ab, phi_ba, jittered_points(moving, generator=generator))
    else:
        regular = gradicon_on_grid(dense_ab, dense_ba, moving, generator=generator)
    total = similar + weight * regular
    if labels is None:
        return Loss(total, similar, regular)
    of_moving, of_fixed = labels
    apart = label_loss(of_moving, of_fixed, ab) + label_loss(of_fixed, of_moving, ba)
    return Loss(total + label_weight * apart, similar, regular, apart)


def label_loss(moving: Tensor, fixed: Tensor, points: Tensor) -> Tensor:
    """1 − Dice of structures M ∘ φ and F, (B, K, *shape) from 0 to 1, with φ at the voxels of F, (B, *shape, D).

    For each pair the mean over the structures that both images show, 0 if there are none; then the mean over pairs.
    More than half a voxel outside of the moving image there are no structures.
    """
    axes = tuple(range(2, moving.dim()))
    half = voxel_size(moving.shape[2:], points) / 2
    inside = ((points >= -half) & (points <= 1 + half)).all(dim=-1)
    warped = interpolate(moving, points) * inside[:, None]
    common, sizes = (warped * fixed).sum(axes), warped.sum(axes) + fixed.sum(axes)
    shown = (moving.amax(axes) > 0) & (fixed.amax(axes) > 0)
    apart = 1 - 2 * common / sizes.clamp(min=1e-3)
    return ((apart * shown).sum(1) / shown.sum(1).clamp(min=1)).mean()


def as_field(points: Tensor, transform: Transform, image: Tensor) -> DisplacementField:
    """One field for a transform with these values at the image's voxels, (B, *shape, D)."""
    return DisplacementField((points - voxel_points(image)).movedim(-1, 1), extrapolation(transform))


def extrapolation(transform: Transform) -> Extrapolation:
    """How the parts of a transform extrapolate; "mirror" stands for linear parts."""
    parts = transform.transforms if isinstance(transform, Composition) else (transform,)
    clamped = any(isinstance(part, DisplacementField) and part.extrapolate == "clamp" for part in parts)
    return "clamp" if clamped else "mirror"


def find_similarity(similarity: str | Similarity, window: float | None = None) -> Similarity:
    """The similarity of that name; a function is returned as it is. lncc and lncc2 can have another `window`, the
    standard deviation of their Gaussian in voxels."""
    if window is not None and similarity not in ("lncc", "lncc2"):
        raise InputError(f"a window of {window:g} voxels was given for {similarity}; only lncc and lncc2 have windows")
    if not isinstance(similarity, str):
        return similarity
    if similarity not in SIMILARITIES:
        raise InputError(f"unknown similarity {similarity!r}; expected one of {sorted(SIMILARITIES)} or a function")
    if window is None:
        return SIMILARITIES[similarity]
    return functools.partial(lncc if similarity == "lncc" else lncc2, sigma=window)
