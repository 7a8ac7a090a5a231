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
SLIDES, LIKELY = 3, 0.05
"""By how many coarse voxels windows are slid along each axis to look for other matches, at most, and by how much
squared correlations differ if one match is e times as likely as the other."""
FEATURE_SLIDES = 2
"""The same for features, on the grid of attention."""
LEVELS = 32
"""Levels of intensity whose mutual information is measured."""


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
    coarse_folds_percent: float = math.nan
    """Folds on the coarse grid of the evidence; those on the scan's voxels are among the metrics."""
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
    scatter_mm: float = math.nan
    """How far the network's answers to shifted and turned copies are from one another, median."""
    opinion_mm: float = math.nan
    """How far the result is from the mean of these answers, median."""
    network_similarity: float = math.nan
    """Similarity of the network's result, before any optimisation."""
    similarity_gain: float = math.nan
    """How much more similar the images are than before the registration, as a fraction of what could be."""
    information_excess: float = math.nan
    """How much more the intensities tell of one another than in wrong alignments, as a fraction of what could be."""
    drift_mm: float = math.nan
    """How far from their places windows may match as well, median."""
    strain: float = math.nan
    """By which factor the affine map closest to the result stretches or shrinks some direction, as a logarithm."""
    feature_excess: float = math.nan
    """How much more alike features are at the result than in wrong alignments, as a fraction of what could be."""
    feature_drift_mm: float = math.nan
    """How far from the result features may match as well, median."""
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
def followed(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, probe: Affine) -> Tensor:
    """W(Φ[M ∘ W, F](x)), (1, *shape, D): the answer to an image moved by a known map W, with W undone."""
    seen = interpolate(moving, probe.on_grid_of(moving), outside="zeros")
    return probe(network(seen, fixed).on_grid_of(fixed).float())


def certificate(
    network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, phi: Transform, probe: Affine, size: Sequence[float]
) -> Tensor:
    """|W(Φ[M ∘ W, F](x)) − Φ[M, F](x)| in mm: how far the answer φ = Φ[M, F] is from following a known map W of its own
    input. An equivariant algorithm that is right gives 0."""
    return distance(followed(network, moving, fixed, probe) - phi.on_grid_of(fixed).float(), size)


def opinions(answers: Sequence[Tensor], result: Tensor, size: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Root mean square distance of several answers (1, *shape, D) from their mean, and the distance of a result from
    that mean, in mm."""
    every = torch.stack(list(answers)).float()
    mean = every.mean(0)
    scatter = torch.stack([distance(one - mean, size).square() for one in every]).mean(0).sqrt()
    return scatter, distance(result - mean, size)


def distance(vectors: Tensor, size: Sequence[float]) -> Tensor:
    """(1, *shape, D) in unit coordinates → (*shape) in mm."""
    return (vectors.float() * torch.tensor(list(size), device=vectors.device).float()).norm(dim=-1)[0]


@dataclass(frozen=True, eq=False)
class Similarity:
    """Two images compared in windows, on a coarse grid."""

    squared: Tensor  # (*coarse shape): squared local correlation, as a map
    beyond: Tensor  # by how much that exceeds the mean of wrong alignments
    mean: float
    excess: float
    """By how much it exceeds that of wrong alignments, as a fraction of what could be."""
    agreement: float


class Windows:
    """Windows of the fixed image on a coarse grid, which other images are compared with. Only those inside the
    foreground count, since outlines resemble one another in any pair, and those with contrast count most."""

    def __init__(self, fixed: Tensor, inside: Tensor | None = None) -> None:
        self.shape = [min(n, COARSE) for n in fixed.shape[2:]]
        counted = foreground(fixed) if inside is None else inside
        self.mask = resize(counted[None, None].to(fixed), self.shape)
        self.fixed = fixed = resize(fixed, self.shape)
        mean, square = (gaussian_blur(image, WINDOW) for image in (fixed, fixed * fixed))
        variance = (square - mean * mean).clamp(min=0)
        full = gaussian_blur(self.mask, WINDOW) / gaussian_blur(torch.ones_like(self.mask), WINDOW)
        inner = (full > INNER).to(self.mask)
        self.weight = (inner if bool(inner.any()) else self.mask) * variance / (variance + CONTRAST)

    def average(self, values: Tensor) -> float:
        return float((self.weight * values).sum() / self.weight.sum().clamp(min=1e-6))

    def median(self, values: Tensor) -> float:
        """The median of a map (*coarse shape), by weight."""
        order = values.flatten().argsort()
        below = self.weight.flatten()[order].cumsum(0)
        return float(values.flatten()[order][min(int((below < below[-1] / 2).sum()), len(order) - 1)])

    def similarity(self, warped: Tensor) -> Similarity:
        """Compare a warped image with the fixed one, and with itself in deliberately wrong alignments: shifted both
        ways along each axis, and mirrored. Squared local correlation does not mind inverted contrast."""
        warped = resize(warped, self.shape)
        signed = local_correlation(warped, self.fixed, WINDOW)
        squared = signed.square()
        others = [local_correlation(other, self.fixed, WINDOW).square() for other in wrong_alignments(warped)]
        wrong = torch.stack(others).mean(0)
        right, usual = self.average(squared), self.average(wrong)
        excess, root = (right - usual) / max(1 - usual, 1e-6), math.sqrt(max(right, 1e-6))
        return Similarity(squared[0, 0], (squared - wrong)[0, 0], right, excess, self.average(signed) / root)

    def alike(self, warped: Tensor) -> float:
        """The mean squared local correlation alone."""
        return self.average(local_correlation(resize(warped, self.shape), self.fixed, WINDOW).square())

    def information(self, warped: Tensor) -> float:
        """How much more the intensities of a warped image tell of the fixed one's than in wrong alignments, as a
        fraction of what could be: whatever their contrasts are."""
        warped, counted = resize(warped, self.shape), self.mask > 0.5
        right = mutual_information(warped, self.fixed, counted)
        wrong = [mutual_information(other, self.fixed, counted) for other in wrong_alignments(warped)]
        usual, most = sum(wrong) / len(wrong), mutual_information(self.fixed, self.fixed, counted)
        return (right - usual) / max(most - usual, 1e-6)

    def drift(self, warped: Tensor, size: Sequence[float]) -> Tensor:
        """(*coarse shape): how far from its place each window may match, in mm: the root mean square of shifts along
        each axis, the more likely the better they match. Large where an image is flat, or matches elsewhere."""
        warped = resize(warped, self.shape)
        square = torch.zeros_like(self.fixed)
        for axis, side in enumerate(size, start=2):
            voxels = self.fixed.shape[axis]
            steps = _slides(SLIDES, voxels)
            matches = [local_correlation(warped.roll(n, axis), self.fixed, WINDOW).square() for n in steps]
            square += _mean_square(torch.stack(matches) / LIKELY, steps) * (side / max(voxels - 1, 1)) ** 2
        return square.sqrt()[0, 0]


def _slides(most: int, voxels: int) -> list[int]:
    reach = min(most, (voxels - 1) // 2)
    return list(range(-reach, reach + 1))


def _mean_square(odds: Tensor, steps: Sequence[int]) -> Tensor:
    """The mean of the squares of steps with these logarithms (steps, ...) of their odds."""
    squares = torch.tensor([float(n * n) for n in steps], device=odds.device)
    return torch.einsum("s,s...->...", squares, odds.float().softmax(0))


def mutual_information(first: Tensor, second: Tensor, counted: Tensor) -> float:
    """Of the intensities of two images from 0 to 1 at the places that count, in nats."""
    levels = [(image[counted] * LEVELS).long().clamp(0, LEVELS - 1) for image in (first, second)]
    joint = torch.bincount(levels[0] * LEVELS + levels[1], minlength=LEVELS**2).reshape(LEVELS, LEVELS).double()
    joint = joint / joint.sum().clamp(min=1)
    apart = joint.sum(0) * joint.sum(1)[:, None]
    seen = joint > 0
    return float((joint[seen] * (joint[seen] / apart[seen]).log()).sum())


def similarity(warped: Tensor, fixed: Tensor, inside: Tensor | None = None) -> Similarity:
    """Compare a warped image with the fixed one in windows."""
    return Windows(fixed, inside).similarity(warped)


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
) -> tuple[Tensor, Tensor, float]:
    """How far a map is from the affine map closest to it over a foreground, in mm of the moving image; how much it
    stretches relative to that map, in mm for each mm; and by which factor that map stretches or shrinks the direction
    that it changes most, as a logarithm."""
    points, mapped = voxel_points(fixed).float(), phi.on_grid_of(fixed).float()
    affine = fit_affine(points[:, inside], mapped[:, inside])
    here, there = (torch.tensor([max(mm, 1e-6) for mm in sides]).to(mapped) for sides in (size, moving_size))
    apart = ((mapped - affine(points)) * there)[0]
    slopes = [
        torch.gradient(apart, spacing=max(side, 1e-6) / (voxels - 1), dim=axis)[0].square().sum(-1)
        for axis, (side, voxels) in enumerate(zip(size, inside.shape, strict=True))
        if voxels > 1
    ]
    factors = torch.linalg.svdvals((affine.linear[0] * there[:, None] / here).cpu())
    strain = float(factors.clamp(1e-3, 1e3).log().abs().max())
    return apart.norm(dim=-1), torch.stack(slopes).sum(0).sqrt(), strain


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


@torch.no_grad()
def feature_match(
    inside: Inside, counted: Tensor, phi: Transform, size: Sequence[float]
) -> tuple[Tensor, Tensor, float]:
    """(*pooled shape): the cosine of the features of both images at the result φ; how far from it they may match in
    mm, as attention weighs places along each axis; and by how much the cosine exceeds that of wrong alignments over a
    foreground, as a fraction of what could be. `size` is the moving image's."""
    shape = inside.fixed_features.shape[1:-1]
    indices = torch.stack(torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij"), dim=-1)[None]
    points = _through(inside.fixed_to_unit, indices.float().to(inside.fixed_features.device))
    there = _through(np.linalg.inv(inside.moving_to_unit), phi(points))
    last = (torch.tensor(inside.keys.shape, device=there.device) - 1).clamp(min=1)
    queries, keys = inside.fixed_features.float().movedim(-1, 1), inside.moving_features.float().movedim(-1, 1)

    def matched(offset: Tensor) -> Tensor:
        return interpolate(keys, (there + offset) / last)

    square = torch.zeros(shape, device=there.device)
    for axis, side in enumerate(size):
        steps = _slides(FEATURE_SLIDES, shape[axis])
        unit = torch.eye(len(size), device=there.device)[axis]
        odds = torch.stack([(queries * matched(n * unit)).sum(1)[0] for n in steps])
        square += _mean_square(odds, steps) * (side * float(inside.moving_to_unit[axis, axis])) ** 2
    here = matched(torch.zeros(len(size), device=there.device))
    cosine = torch.nn.functional.cosine_similarity(here, queries, dim=1)
    wrong = [torch.nn.functional.cosine_similarity(other, queries, dim=1) for other in wrong_alignments(here)]
    right, usual = (float(one[0][counted].mean()) for one in (cosine, torch.stack(wrong).mean(0)))
    return cosine[0], square.sqrt(), (right - usual) / max(1 - usual, 1e-6)


def _through(matrix: npt.NDArray[Any], points: Tensor) -> Tensor:
    homogeneous = torch.from_numpy(matrix).to(points)
    return points @ homogeneous[:-1, :-1].mT + homogeneous[:-1, -1]


def pooled_features(features: Tensor, counted: Tensor) -> Tensor:
    """(C,): features (1, *shape, C) averaged over a foreground (*shape)."""
    return features[0][counted].float().mean(0)


def mahalanobis(features: Tensor, mean: Tensor, deviation: Tensor) -> float:
    """Root mean square of (f − μ) / σ: 1 on average for features like those that μ and σ were taken from."""
    return float(((features - mean) / deviation).square().mean().sqrt())
