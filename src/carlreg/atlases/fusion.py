"""Label fusion: one label map from those of several atlases, warped onto a scan.

Each atlas votes for its label at every voxel of the scan. The votes are weighted by one of three methods:

- "majority": all atlases count the same;
- "local": by the local correlation of the warped atlas with the scan, raised to a power;
- "joint": Wang et al. (PAMI 2013). The weights minimise the expected error of the vote, w = M⁻¹1 / (1ᵀM⁻¹1), where
  M_ij estimates from the intensities of a patch how often the atlases i and j are wrong together. Atlases that make the
  same mistakes share a vote: two copies of one atlas count as one.

Only voxels at which the atlases disagree are computed. All of it is torch alone, on any device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.atlases.options import Fusion
from carlreg.errors import InputError
from carlreg.geometry.grids import along_axes
from carlreg.objective.losses import local_correlation

FLAT = 1e-4
"""Patches with a variance below this, of intensities from 0 to 1, are mostly noise."""
CHUNK = {"cpu": 2**22, "cuda": 2**27}
"""Numbers in the largest tensor, by kind of device."""


@dataclass(frozen=True)
class FusionSettings:
    """Settings of the fusion, chosen on training subjects that were kept back."""

    sigma: float = 1.0
    """Standard deviation in voxels of the windows of the local correlation."""
    power: float = 2.0
    """The local correlation is raised to this power; a negative one counts as 0."""
    patch: int = 2
    """Voxels from the centre of a patch to its sides."""
    search: int = 1
    """An atlas votes from the best matching patch within so many voxels: registrations are not perfect."""
    alpha: float = 0.3
    """Added to the diagonal of M, so that equal atlases have equal weights."""
    beta: float = 2.0
    """Common differences of intensity are raised to this power to become common errors of labels."""


DEFAULT = FusionSettings()


@dataclass(frozen=True, eq=False)
class Fused:
    """The result of a fusion. The probability of a label is its share of the votes; negative votes count as none."""

    labels: Tensor
    """(*shape): the label with most votes; the lowest one if several have as many."""
    entropy: Tensor
    """(*shape), in bits: 0 where all atlases agree, 1 where two labels have half of the votes each."""
    values: Tensor
    """(L,): all labels that any atlas has, in order."""
    active: Tensor
    """(*shape): where the atlases disagree."""
    shares: Tensor
    """(L, N): the probabilities there, in half precision."""

    def probability(self, label: int) -> Tensor:
        """(*shape), float32: the share of the votes for a label."""
        every = (self.labels == label).float()
        every[self.active] = self.shares[int((self.values == label).nonzero())].to(every)
        return every


@torch.no_grad()
def fuse(
    scan: Tensor, images: Tensor, labels: Tensor, method: Fusion = "joint", settings: FusionSettings = DEFAULT
) -> Fused:
    """Fuse the labels (M, *shape) of atlases whose images (M, *shape) are warped onto a scan (*shape), of one scale of
    intensities, about 0 to 1.

    >>> fuse(scan, images, labels).labels
    """
    if method not in get_args(Fusion):
        raise InputError(f"unknown fusion {method!r}; expected one of {', '.join(get_args(Fusion))}")
    if images.shape != labels.shape or images.shape[1:] != scan.shape or len(labels) == 0:
        shapes = f"{tuple(scan.shape)}, {tuple(images.shape)} and {tuple(labels.shape)}"
        raise InputError(f"scan, images and labels have shapes {shapes}; expected (*shape), and twice (M, *shape)")
    if labels.is_floating_point():
        raise InputError(f"labels have the type {labels.dtype}; expected integers")
    values, active = labels.unique(), (labels != labels[:1]).any(dim=0)
    points = active.nonzero()
    result, entropy = labels[0].clone(), torch.zeros_like(scan, dtype=torch.float32)
    shares = torch.empty(len(values), len(points), dtype=torch.float16, device=labels.device)
    start = 0
    for chosen, weights, voters in _voters(scan, images, labels, points, method, settings):
        votes = vote(voters, weights, values)
        total = votes.sum(dim=0).clamp(min=1e-12)
        votes = votes / total
        index = tuple(chosen.unbind(-1))
        result[index] = values[votes.argmax(dim=0)]
        entropy[index] = -torch.special.xlogy(votes, votes).sum(dim=0).float() / math.log(2)
        shares[:, start : start + len(chosen)] = votes.half()
        start += len(chosen)
    return Fused(result, entropy.clamp(min=0), values, active, shares)


def vote(labels: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """The sum of the weights (M, N) for each of the sorted `values`, by labels (M, N): (L, N), none below 0."""
    votes = weights.new_zeros(len(values), labels.shape[1])
    votes.scatter_add_(0, torch.searchsorted(values, labels.contiguous()), weights)
    return votes.clamp(min=0)


Voters = Iterator[tuple[Tensor, Tensor, Tensor]]
"""Voxels (N, D), and the weights and labels of the atlases at each of them, (M, N)."""


def _voters(
    scan: Tensor, images: Tensor, labels: Tensor, points: Tensor, method: Fusion, settings: FusionSettings
) -> Voters:
    if len(points) == 0:
        return
    if method == "joint":
        yield from _joint_voters(scan, images, labels, points, settings)
        return
    if method == "local":
        every = torch.stack([_local_weight(scan, image, settings) for image in images])
    for chosen in points.split(_count(scan, 2 * len(labels))):
        index = (slice(None), *chosen.unbind(-1))
        voters = labels[index]
        yield chosen, every[index] if method == "local" else torch.ones_like(voters, dtype=torch.float32), voters


def _local_weight(scan: Tensor, image: Tensor, settings: FusionSettings) -> Tensor:
    correlation = local_correlation(image[None, None].float(), scan[None, None].float(), settings.sigma)[0, 0]
    return correlation.clamp(min=1e-3) ** settings.power  # no atlas counts nothing: somebody has to vote


def _count(scan: Tensor, numbers: int) -> int:
    """Voxels at a time, for so many numbers each."""
    return max(256, CHUNK["cuda" if scan.is_cuda else "cpu"] // max(numbers, 1))


# ---- joint label fusion ---------------------------------------------------------------------------------------------


def _joint_voters(scan: Tensor, images: Tensor, labels: Tensor, points: Tensor, settings: FusionSettings) -> Voters:
    """Everything in the box around the voxels, with a margin for patches and search."""
    reach = settings.patch + settings.search
    low, high = points.amin(dim=0), points.amax(dim=0) + 1
    shape = tuple((high - low + 2 * reach).tolist())
    scan, images, labels = (_box(part, low, high, reach) for part in (scan, images, labels))
    shifts = torch.tensor(_offsets(scan.dim(), settings.search), device=scan.device)
    flat_shifts, inside = _flat(shifts, shape), _flat(points - low + reach, shape)
    best = _best_shifts(scan, images, flat_shifts, inside, settings) if settings.search else None
    around = _flat(torch.tensor(_offsets(scan.dim(), settings.patch), device=scan.device), shape)
    flat_scan, flat_images, flat_labels = scan.flatten().float(), images.flatten(1), labels.flatten(1)
    step = _count(scan, len(images) * len(around))
    for chosen, at, part in zip(points.split(step), inside.split(step), range(0, len(points), step), strict=True):
        centre = at.expand(len(images), -1)
        if best is not None:
            centre = centre + flat_shifts[best[:, part : part + step].long()]
        mine = normalised(flat_scan[at[:, None] + around])  # (N, P)
        patches = [flat_images[i][centre[i][:, None] + around].float() for i in range(len(images))]
        errors = torch.stack([(normalised(patch) - mine).abs() for patch in patches], dim=1)  # (N, M, P)
        weights = joint_weights(errors, settings.alpha, settings.beta)
        yield chosen, weights.mT, flat_labels.gather(1, centre)


def normalised(patches: Tensor) -> Tensor:
    """Patches (..., P) with mean 0 and variance 1, less where they are flat: contrast must not count."""
    centred = patches - patches.mean(dim=-1, keepdim=True)
    return centred * (centred.square().mean(dim=-1, keepdim=True) + FLAT).rsqrt()


def joint_weights(errors: Tensor, alpha: float, beta: float) -> Tensor:
    """w = (M + αI)⁻¹1 / (1ᵀ(M + αI)⁻¹1), (N, M), where M_ij is the mean over a patch of |e_i| |e_j|, to the power β;
    `errors` (N, M, P) are the absolute differences of intensity."""
    common = (errors @ errors.mT / errors.shape[-1]) ** beta
    common = common + alpha * torch.eye(errors.shape[1]).to(errors)
    weights = torch.linalg.solve(common, torch.ones_like(common[..., 0]))
    return weights / weights.sum(dim=-1, keepdim=True)


def _best_shifts(scan: Tensor, images: Tensor, shifts: Tensor, inside: Tensor, settings: FusionSettings) -> Tensor:
    """(M, N): which shift of each atlas gives the patch that correlates best with that of the scan."""
    mean, scale = _moments(scan.float(), settings.patch)
    best = torch.empty(len(images), len(inside), dtype=torch.int16, device=scan.device)
    for number, image in enumerate(images):
        image = image.float()
        other_mean, other_scale = (part.flatten() for part in _moments(image, settings.patch))
        highest = torch.full((len(inside),), -torch.inf, device=scan.device)
        flat = image.flatten()
        for k, shift in enumerate(shifts.tolist()):
            product = _box_mean(scan * flat.roll(-shift).reshape(scan.shape), settings.patch).flatten()[inside]
            there = inside + shift
            covariance = product - mean.flatten()[inside] * other_mean[there]
            correlation = covariance * scale.flatten()[inside] * other_scale[there]
            better = correlation > highest
            highest = torch.where(better, correlation, highest)
            best[number] = torch.where(better, torch.full_like(best[number], k), best[number])
    return best


def _moments(image: Tensor, radius: int) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of the patch around each voxel."""
    mean = _box_mean(image, radius)
    variance = (_box_mean(image * image, radius) - mean * mean).clamp(min=0)
    return mean, (variance + FLAT).rsqrt()


def _box_mean(image: Tensor, radius: int) -> Tensor:
    """Means of (*shape) over boxes, which end at the border."""
    return along_axes(image[None, None], _box_rows, float(radius))[0, 0]


def _box_rows(rows: Tensor, radius: float) -> Tensor:
    side = 2 * int(radius) + 1
    return F.avg_pool1d(rows, side, stride=1, padding=side // 2, count_include_pad=False)


def _offsets(dim: int, radius: int) -> Sequence[Sequence[int]]:
    """All offsets within a cube, the nearest first, so that a tie is decided in favour of it."""
    cube = itertools.product(range(-radius, radius + 1), repeat=dim)
    return sorted(cube, key=lambda offset: (sum(n * n for n in offset), offset))


def _flat(index: Tensor, shape: Sequence[int]) -> Tensor:
    """Indices (N, D), or offsets, as indices of a flat array of this shape."""
    flat = torch.zeros_like(index[:, 0])
    for axis, side in enumerate(shape):
        flat = flat * side + index[:, axis]
    return flat


def _box(values: Tensor, low: Tensor, high: Tensor, margin: int) -> Tensor:
    """The last axes from `low` to `high` and a margin; beyond the image, its border is continued."""
    dim = len(low)
    for axis, (first, last) in enumerate(zip(low.tolist(), high.tolist(), strict=True), start=values.dim() - dim):
        index = torch.arange(first - margin, last + margin, device=values.device).clamp(0, values.shape[axis] - 1)
        values = values.index_select(axis, index)
    return values
