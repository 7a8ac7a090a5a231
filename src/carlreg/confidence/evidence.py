"""Evidence about a registration that needs no labels: small functions, each of one number or one map.

Images are (1, 1, *shape) with intensities from 0 to 1, φ = Φ[moving, fixed] maps unit points of the fixed image to the
moving one and ψ = Φ[fixed, moving] back. Sizes are millimetres from the first to the last voxel centre. Maps are
(*shape) on the voxels of the fixed image, and averages are taken over its foreground.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.explain import Inside
from carlreg.fast.precision import full_precision
from carlreg.geometry.fitting import fit_affine
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.jacobian import jacobian_determinant
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine, Transform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.objective.losses import gaussian_blur, local_correlation
from carlreg.preparation import FOREGROUND

DEGREES = 8.0
"""By how much the moving image is turned for the certificate."""
SHIFT = 0.05
"""By which fraction of its sides the moving image is shifted for the certificate, to the nearest odd voxel: networks
that pool follow shifts by four voxels whatever they see."""
COARSE, WINDOW = 48, 2.0
"""Voxels a side, at most, of the grid on which similarity is measured, and the deviation of its windows in voxels."""
CONTRAST = 1e-3
"""Windows of the fixed image with this variance count half."""
INNER = 0.98
"""Windows of which this share is foreground lie inside."""
WRONG = 0.12
"""By which fraction of the sides the warped image is shifted to make deliberately wrong alignments."""
EXTREME = 4.0
"""Where volumes change by more than this factor, they change extremely."""
NOISE = 0.02
"""Differences of intensity below this show nothing."""
SAMPLES = 256
"""How many points the entropy of attention is averaged over."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Numbers about one registration; NaN for those that were not computed."""

    extent_mm: float = math.nan
    """The cube root of the volume of the fixed image's foreground: the scale of everything in mm."""
    disagreement_mm: float = math.nan
    """Mean disagreement of the two directions of the result."""
    network_disagreement_mm: float = math.nan
    """The same of the network's result, whose directions no optimisation has reconciled."""
    shift_mm: float = math.nan
    """Certificate: how far the answer is from following a shift of the moving image, median."""
    shift_95_mm: float = math.nan
    turn_mm: float = math.nan
    """Certificate: how far the answer is from following a small turn of the moving image, median."""
    turn_95_mm: float = math.nan
    spread_mm: float = math.nan
    """Mean spread of attention: the root mean square distance from its centre."""
    entropy: float = math.nan
    """Mean entropy of attention, as a fraction of that of even attention to everything."""
    similarity: float = math.nan
    """Mean squared local correlation after the registration, from 0 to 1."""
    similarity_excess: float = math.nan
    """How much more similar the images are than in deliberately wrong alignments, as a fraction of what could be."""
    agreement: float = math.nan
    """Mean over root mean square of the local correlations: near 1 where the contrasts are alike."""
    covered: float = math.nan
    """The share of the fixed image's foreground on which the warped image has foreground, too."""
    overlap: float = math.nan
    """Dice overlap of the two foregrounds."""
    folds_percent: float = math.nan
    extreme_percent: float = math.nan
    """The percentage of the foreground that changes its volume by more than `EXTREME`."""
    volume: float = math.nan
    """Standard deviation of the logarithm of the change of volume."""
    gain: float = math.nan
    """Which fraction of the loss the optimisation removed."""
    moved_mm: float = math.nan
    """How far the optimisation moved the network's answer, on average."""
    residual_mm: float = math.nan
    """How far structures seem to be apart after the registration, by what is left of their contrast, median."""
    deformation_mm: float = math.nan
    """How far the result is from an affine map, on average."""
    attention_mm: float = math.nan
    """How far the result is from the centre of each point's attention, median."""
    surprise: float = math.nan
    """How little attention there is at the result: minus its mean logarithm, as a fraction of that of even attention to
    everything."""
    misorientation: float = math.nan
    """By how much a reflection or quarter turns of the moving scan make coarse images more similar than their headers
    do; 0 if nothing does."""
    novelty: float = math.nan
    """How far the features of the less usual image are from those of training, in standard deviations."""
    kinship: float = math.nan
    """How far the features of the two images are from one another, in standard deviations."""

    def to_json(self) -> dict[str, float]:
        """The numbers that were computed."""
        return {name: value for name, value in asdict(self).items() if math.isfinite(value)}

    @classmethod
    def from_json(cls, values: dict[str, float]) -> Evidence:
        known = {one.name for one in fields(cls)}
        return cls(**{name: float(value) for name, value in values.items() if name in known and value is not None})


def foreground(image: Tensor, mask: Tensor | None = None) -> Tensor:
    """(*shape): the foreground of an image, inside its mask if there is one; everything if that is empty."""
    inside = image[0, 0] > FOREGROUND
    inside = inside if mask is None else inside & (mask[0, 0] > 0)
    return inside if bool(inside.any()) else torch.ones_like(inside)


def extent(inside: Tensor, size: Sequence[float]) -> float:
    """The D-th root of the volume of a foreground (*shape) in an image of this size, in mm."""
    return float(inside.float().mean() * math.prod(max(side, 1e-6) for side in size)) ** (1 / len(size))


@full_precision
def disagreement(phi: Transform, psi: Transform, fixed: Tensor, size: Sequence[float]) -> Tensor:
    """|ψ(φ(x)) − x| in mm. Zero if each direction is the other's inverse, which nothing but the truth requires."""
    return distance(psi(phi.on_grid_of(fixed)) - voxel_points(fixed), size)


def difference(phi: Transform, other: Transform, fixed: Tensor, size: Sequence[float]) -> Tensor:
    """|φ(x) − φ′(x)| in mm of the moving image, whose size is given."""
    return distance(phi.on_grid_of(fixed) - other.on_grid_of(fixed), size)


def shift_probe(moving: Tensor, sign: int = 1) -> Affine:
    """A shift of an image by an odd number of whole voxels along each axis, in alternating directions."""
    steps = [(2 * math.floor(SHIFT * n / 2) + 1) / max(n - 1, 1) for n in moving.shape[2:]]
    shift = [sign * (-1) ** axis * step for axis, step in enumerate(steps)]
    return Affine.translation(torch.tensor([shift], dtype=moving.dtype, device=moving.device))


def turn_probe(moving: Tensor, size: Sequence[float], signs: Sequence[int] = (1, 1, 1)) -> Affine:
    """A turn of an image about its centre by `DEGREES`, in 3-D around an oblique axis with these signs."""
    dim = moving.dim() - 2
    if dim not in (2, 3):
        raise InputError(f"a {dim}-D image cannot be turned; expected a 2-D or a 3-D image")
    skew = torch.zeros(dim, dim, dtype=torch.float64)
    planes = [(i, j) for i in range(dim) for j in range(i)]
    for (i, j), sign in zip(planes, signs, strict=False):
        angle = sign * math.radians(DEGREES) / math.sqrt(len(planes))
        skew[i, j], skew[j, i] = angle, -angle
    scale = torch.tensor([max(side, 1e-6) for side in size], dtype=torch.float64)
    linear = torch.linalg.matrix_exp(skew) * scale / scale[:, None]
    centre = torch.full((dim,), 0.5, dtype=torch.float64)
    return Affine.from_parts(linear[None], (centre - linear @ centre)[None]).to(moving)


@torch.no_grad()
def certificate(
    network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, phi: Transform, probe: Affine, size: Sequence[float]
) -> Tensor:
    """|W(Φ[M ∘ W, F](x)) − Φ[M, F](x)| in mm: how far the answer φ = Φ[M, F] is from following a known map W of its own
    input. An equivariant algorithm that is right gives 0."""
    seen = interpolate(moving, probe.on_grid_of(moving), outside="zeros")
    answer = network(seen, fixed)
    return distance(probe(answer.on_grid_of(fixed).float()) - phi.on_grid_of(fixed).float(), size)


def distance(vectors: Tensor, size: Sequence[float]) -> Tensor:
    """(1, *shape, D) in unit coordinates → (*shape) in mm."""
    return (vectors.float() * torch.tensor(list(size), device=vectors.device).float()).norm(dim=-1)[0]


@dataclass(frozen=True, eq=False)
class Similarity:
    """Two images compared in windows, on a coarse grid."""

    squared: Tensor  # (*coarse shape): squared local correlation, as a map
    mean: float
    excess: float
    """By how much it exceeds that of wrong alignments, as a fraction of what could be."""
    agreement: float


def similarity(warped: Tensor, fixed: Tensor, inside: Tensor | None = None) -> Similarity:
    """Compare a warped image with the fixed one, and with itself in deliberately wrong alignments: shifted both ways
    along each axis, and mirrored. Squared local correlation does not mind inverted contrast. Only windows inside the
    foreground count, since outlines resemble one another in any pair."""
    shape = [min(n, COARSE) for n in fixed.shape[2:]]
    counted = foreground(fixed) if inside is None else inside
    mask = resize(counted[None, None].to(fixed), shape)
    warped, fixed = resize(warped, shape), resize(fixed, shape)
    mean, square = (gaussian_blur(image, WINDOW) for image in (fixed, fixed * fixed))
    variance = (square - mean * mean).clamp(min=0)
    full = gaussian_blur(mask, WINDOW) / gaussian_blur(torch.ones_like(mask), WINDOW)
    inner = (full > INNER).to(mask)
    weight = (inner if bool(inner.any()) else mask) * variance / (variance + CONTRAST)
    total = weight.sum().clamp(min=1e-6)

    def average(values: Tensor) -> float:
        return float((weight * values).sum() / total)

    signed = local_correlation(warped, fixed, WINDOW)
    squared = signed.square()
    right = average(squared)
    wrong = [average(local_correlation(other, fixed, WINDOW).square()) for other in wrong_alignments(warped)]
    usual = sum(wrong) / len(wrong)
    root = math.sqrt(max(right, 1e-6))
    return Similarity(squared[0, 0], right, (right - usual) / max(1 - usual, 1e-6), average(signed) / root)


def wrong_alignments(image: Tensor) -> Iterator[Tensor]:
    """An image shifted both ways along each axis, around the border, and mirrored along each."""
    for axis, side in enumerate(image.shape[2:], start=2):
        step = max(1, round(WRONG * side))
        yield image.roll(step, axis)
        yield image.roll(-step, axis)
        yield image.flip(axis)


def residual(warped: Tensor, fixed: Tensor, size: Sequence[float]) -> Tensor:
    """How far structures seem to be apart, in mm: the contrast in a window of the fixed image that the warped one does
    not explain, whatever its own contrast, over the mean gradient there. Large where the image is flat, too."""
    correlation = local_correlation(warped, fixed, WINDOW)
    inside = gaussian_blur(torch.ones_like(fixed), WINDOW)
    mean, square, slope = (gaussian_blur(x, WINDOW) / inside for x in (fixed, fixed**2, _slope(fixed, size).square()))
    unexplained = (square - mean * mean).clamp(min=0) * (1 - correlation.square()).clamp(min=0) + NOISE**2
    return (unexplained / slope.clamp(min=1e-8)).sqrt()[0, 0].clamp(max=max(size))


def flatness(fixed: Tensor, size: Sequence[float]) -> Tensor:
    """Within how many mm the fixed image changes by more than noise: small at edges and in texture."""
    slope = gaussian_blur(_slope(fixed, size).square(), WINDOW) / gaussian_blur(torch.ones_like(fixed), WINDOW)
    return (NOISE / slope.sqrt().clamp(min=1e-8))[0, 0].clamp(max=max(size))


def _slope(image: Tensor, size: Sequence[float]) -> Tensor:
    """The length of an image's gradient, per mm."""
    slopes = [
        torch.gradient(image, spacing=max(side, 1e-6) / (image.shape[axis] - 1), dim=axis)[0].square()
        for axis, side in enumerate(size, start=2)
        if image.shape[axis] > 1
    ]
    return torch.stack(slopes).sum(0).sqrt()


def deformation(
    phi: Transform, fixed: Tensor, inside: Tensor, size: Sequence[float], moving_size: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """How far a map is from the affine map closest to it over a foreground, in mm of the moving image; and how much it
    stretches relative to that map, in mm for each mm."""
    points, mapped = voxel_points(fixed).float(), phi.on_grid_of(fixed).float()
    affine = fit_affine(points[:, inside], mapped[:, inside])
    apart = ((mapped - affine(points)) * torch.tensor(list(moving_size), device=mapped.device).float())[0]
    slopes = [
        torch.gradient(apart, spacing=max(side, 1e-6) / (voxels - 1), dim=axis)[0].square().sum(-1)
        for axis, (side, voxels) in enumerate(zip(size, inside.shape, strict=True))
        if voxels > 1
    ]
    return apart.norm(dim=-1), torch.stack(slopes).sum(0).sqrt()


def overlap(warped: Tensor, inside: Tensor) -> tuple[float, float]:
    """The share of a foreground (*shape) that is covered by that of the warped image, and their Dice overlap."""
    other = warped[0, 0] > FOREGROUND
    common = int((other & inside).sum())
    return common / max(int(inside.sum()), 1), 2 * common / max(int(inside.sum()) + int(other.sum()), 1)


def volume_change(phi: Transform, fixed: Tensor, inside: Tensor, scale: float = 1.0) -> tuple[float, float, float]:
    """Percentages of the foreground that fold, and that change volume extremely; the deviation of the logarithm of the
    change. `scale` turns the determinant of unit coordinates into one of millimetres."""
    inner = inside[tuple(slice(1, -1) for _ in inside.shape)]
    determinants = jacobian_determinant(phi, fixed)[0]
    values = determinants[inner] if bool(inner.any()) else determinants.flatten()
    values = values * scale
    logarithm = values.clamp(1e-3, 1e3).log()
    extreme = (logarithm.abs() > math.log(EXTREME)).float().mean()
    return 100 * float((values < 0).float().mean()), 100 * float(extreme), float(logarithm.std(correction=0))


def optimisation_gain(losses: Sequence[dict[str, float]]) -> float:
    """Which fraction of the first loss was removed; NaN without an optimisation."""
    totals = [loss["total"] for loss in losses if math.isfinite(loss.get("total", math.nan))]
    return (totals[0] - min(totals)) / max(abs(totals[0]), 1e-6) if len(totals) > 1 else math.nan


def attention_spread(covariance: Tensor, size: Sequence[float]) -> Tensor:
    """(*pooled shape): the spread of every fixed voxel's attention in mm, for a moving image of this size, which the
    network's poolings leave nearly as it is."""
    scale = torch.tensor(list(size), dtype=covariance.dtype, device=covariance.device)
    return (covariance.diagonal(dim1=-2, dim2=-1) * scale.square()).sum(-1).clamp(min=0).sqrt().float()


@torch.no_grad()
def attention_entropy(inside: Inside, counted: Tensor, phi: Transform) -> tuple[float, float]:
    """Mean entropy of the attention of some voxels of a foreground (*pooled shape), and the mean of minus its logarithm
    at the result φ, both as fractions of the highest entropy."""
    chosen = counted.nonzero()
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:SAMPLES].to(chosen.device)
    voxels = chosen[order]
    queries = inside.fixed_features[0][tuple(voxels.T)].float()
    keys = inside.moving_features[0].flatten(0, -2).float()
    logits = queries @ keys.mT
    total = logits.logsumexp(dim=-1)
    attention = logits - total[:, None]
    # Where the result is on the padded grid of the keys.
    there = _through(np.linalg.inv(inside.moving_to_unit), phi(_through(inside.fixed_to_unit, voxels[None].float())))
    sides = torch.tensor(inside.keys.shape, device=there.device)
    matched = interpolate(inside.moving_features.float().movedim(-1, 1), there / (sides - 1).clamp(min=1))[0].mT
    entropy, surprise = -(attention.exp() * attention).sum(-1), total - (queries * matched).sum(-1)
    return float(entropy.mean()) / math.log(len(keys)), float(surprise.mean()) / math.log(len(keys))


def _through(matrix: npt.NDArray[Any], points: Tensor) -> Tensor:
    homogeneous = torch.from_numpy(matrix).to(points)
    return points @ homogeneous[:-1, :-1].mT + homogeneous[:-1, -1]


def pooled_features(features: Tensor, counted: Tensor) -> Tensor:
    """(C,): features (1, *shape, C) averaged over a foreground (*shape)."""
    return features[0][counted].float().mean(0)


def mahalanobis(features: Tensor, mean: Tensor, deviation: Tensor) -> float:
    """Root mean square of (f − μ) / σ: 1 on average for features like those that μ and σ were taken from."""
    return float(((features - mean) / deviation).square().mean().sqrt())
