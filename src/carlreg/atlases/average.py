"""The average of scans: intensities voxel by voxel, shapes by the average of their maps.

Maps T_i take points of the average A to points of the scans, in millimetres. Their mean is M(x) = 1/N Σ T_i(x): what is
at x in A is at M(x) on average. In the mean shape, the average is therefore A ∘ M⁻¹, and its maps are T_i ∘ M⁻¹, whose
mean is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.files import world_transform
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.orientation import to_closest_ras
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.grids import Grid, interpolate
from carlreg.objective.losses import gaussian_blur
from carlreg.preparation import FOREGROUND, looks_like_ct, preprocess

TRIM = 0.25
"""Share of the brightest, and of the darkest, of the values at a voxel that do not count: misplaced structures are
among them. What is left is as sharp as the median, with less noise."""
MARGIN = 0.05
"""The grid of an average is larger than the usual scan by this share, at each end."""
BLUR = 1.0
"""Standard deviation in voxels of the blurred image that sharpening subtracts."""
CHUNK = 2**22


# ---- scans ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A scan to average."""

    name: str
    image: Image
    centre: Matrix
    """The centre of mass of the foreground, in mm."""
    window: tuple[float, float] | None = None
    """The intensities that become 0 and 1; None for CT, which stays in HU."""
    gain: float = 1.0

    def values(self, device: torch.device) -> Tensor:
        """(*shape): intensities that can be compared: of CT in HU, of others with a foreground whose median is 0.5."""
        data = torch.from_numpy(np.ascontiguousarray(self.image.data, np.float32)).to(device)
        if self.window is None:
            return data
        low, high = self.window
        return ((data - low) / (high - low)).clamp(0, 1) * self.gain

    @property
    def lowest(self) -> float:
        return float(self.image.data.min()) if self.window is None else 0.0


def all_ct(images: Sequence[Image]) -> bool:
    """Whether all scans look like CT by their values."""
    return all(looks_like_ct(image.data) for image in images)


def make_subject(name: str, image: Image, ct: bool) -> Subject:
    """Prepare a scan for averaging."""
    tensor, done = preprocess(image, ct=ct)
    scaled = tensor[0, 0]
    inside = scaled > FOREGROUND
    weight = scaled * inside
    index = [float(torch.arange(n, dtype=torch.float64) @ _line(weight, axis)) for axis, n in enumerate(image.shape)]
    centre = map_points(image.affine, index)
    if ct:
        return Subject(name, image, centre)
    return Subject(name, image, centre, (done.low, done.high), 0.5 / float(scaled[inside].median()))


def _line(weight: Tensor, axis: int) -> Tensor:
    """The share of the weight in each plane across an axis."""
    planes = weight.double().movedim(axis, 0).flatten(1).sum(dim=1)
    return planes / planes.sum()


def common_grid(subjects: Sequence[Subject], spacing: float | None = None) -> Image:
    """An empty image for the average: along right, anterior and superior, around the mean of the scans' centres, with
    voxels of the median size of theirs and the median of their extents."""
    dim = subjects[0].image.dim
    sizes, ends = [], []
    for one in subjects:
        upright = to_closest_ras(one.image)
        corners = map_points(upright.unit_to_world(), [[0.0] * dim, [1.0] * dim]) - one.centre
        sizes.append(upright.spacing)
        ends.append(np.sort(corners, axis=0))  # low and high along LPS axes
    low, high = np.median(ends, axis=0)
    voxel = np.median(sizes, axis=0) if spacing is None else np.full(dim, spacing)
    margin = MARGIN * (high - low)
    low, high = low - margin, high + margin
    signs = np.array([-1.0, -1.0, 1.0]) if dim == 3 else np.ones(2)
    shape = tuple(max(4, int(n) + 1) for n in np.ceil((high - low) / voxel))
    affine = np.eye(dim + 1)
    affine[:-1, :-1] = np.diag(signs * voxel)
    middle = (low + high) / 2 + np.mean([one.centre for one in subjects], axis=0)
    affine[:-1, -1] = middle - affine[:-1, :-1] @ ((np.array(shape) - 1) / 2)
    return Image(np.zeros(shape, np.float32), affine, "template")


def centring(subjects: Sequence[Subject]) -> list[WorldTransform]:
    """Maps from the mean of the scans' centres to each of them."""
    mean = np.mean([one.centre for one in subjects], axis=0)
    matrices = []
    for one in subjects:
        matrix = np.eye(len(mean) + 1)
        matrix[:-1, -1] = one.centre - mean
        matrices.append(WorldTransform.linear(matrix))
    return matrices


# ---- maps -----------------------------------------------------------------------------------------------------------


def world_points(grid: Image, device: torch.device) -> Tensor:
    """(*shape, D): the positions of the voxels in mm."""
    return mapped_by(grid.unit_to_world(), Grid.of(grid.shape).points(device=device))


def mapped_by(matrix: npt.NDArray[np.floating[Any]], points: Tensor) -> Tensor:
    """An affine map (D + 1, D + 1) of points (..., D)."""
    linear, shift = (torch.from_numpy(part).to(points) for part in (matrix[:-1, :-1], matrix[:-1, -1]))
    return points @ linear.mT + shift


def mapped(transform: WorldTransform, points: Tensor) -> Tensor:
    """T at world points (*shape, D) on any device; u is continued by its border values."""
    if not transform.is_linear:
        field = torch.from_numpy(np.moveaxis(transform.displacement, -1, 0)).to(points).contiguous()[None]
        spacing = Grid.of(field.shape[2:]).spacing
        to_unit = np.diag([*spacing, 1.0]) @ np.linalg.inv(transform.lattice)
        points = points + interpolate(field, mapped_by(to_unit, points)[None])[0].movedim(0, -1)
    return mapped_by(transform.affine, points)


def mean_map(transforms: Sequence[WorldTransform], grid: Image, device: torch.device) -> WorldTransform:
    """M(x) = 1/N Σ T_i(x), on the voxels of the grid."""
    points = world_points(grid, device)
    shift = torch.zeros_like(points)
    for one in transforms:
        shift += (mapped(one, points) - points) / len(transforms)
    return WorldTransform(np.eye(grid.dim + 1), shift.cpu().numpy(), grid.index_to_world())


# ---- the average ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Average:
    """Scans in the mean of their shapes."""

    image: Image
    """Their mean."""
    transforms: tuple[WorldTransform, ...]
    """From its points to those of each scan."""
    moved_mm: float
    """RMS length, in the foreground, of the mean displacement of the maps that were given."""
    residual_mm: float
    """The same of the maps in the mean shape: how far this shape is from the mean."""
    spread: float
    """Mean over the foreground of the standard deviation of the scans' intensities, relative to the mean intensity."""


@torch.no_grad()
def average(
    subjects: Sequence[Subject], transforms: Sequence[WorldTransform], grid: Image, device: torch.device
) -> Average:
    """Average scans in the mean of the shapes that maps from a grid to each of them imply."""
    mean = mean_map(transforms, grid, device)
    back = mean if mean.is_linear else world_transform.invert(mean, grid)[0]
    points = world_points(grid, device)
    start = mapped(back, points)
    stack, centred, total = [], [], torch.zeros_like(points)
    for subject, transform in zip(subjects, transforms, strict=True):
        there = mapped(transform, start)  # T_i ∘ M⁻¹
        total += (there - points) / len(subjects)
        stack.append(sampled(subject, there))
        shift = mapped_by(np.linalg.inv(transform.affine), there) - points
        centred.append(WorldTransform(transform.affine, shift.cpu().numpy(), grid.index_to_world()))
    values, spread = trimmed_mean(torch.stack(stack), empty=min(one.lowest for one in subjects))
    image = Image(values.cpu().numpy(), grid.index_to_world(), "template")
    inside = foreground(image).to(device)
    before = torch.from_numpy(mean.displacement).to(points)
    moved, residual = (float(shift[inside].square().sum(dim=-1).mean().sqrt()) for shift in (before, total))
    relative = float(spread[inside].mean() / (values - values.min())[inside].mean().clamp(min=1e-6))
    return Average(image, tuple(centred), moved, residual, relative)


def sampled(subject: Subject, points: Tensor) -> Tensor:
    """The intensities of a scan at world points (*shape, D), in half precision; NaN beyond it."""
    image = subject.image
    unit = mapped_by(image.world_to_unit(), points)
    values = interpolate(subject.values(points.device)[None, None], unit[None])[0, 0]
    half = torch.tensor([0.5 * s for s in Grid.of(image.shape).spacing]).to(unit)
    inside = ((unit >= -half) & (unit <= 1 + half)).all(dim=-1)
    return torch.where(inside, values, torch.nan).half()


def trimmed_mean(stack: Tensor, empty: float) -> tuple[Tensor, Tensor]:
    """Mean of (N, *shape) without the `TRIM` lowest and highest of the values at each voxel, and the standard deviation
    of all of them. NaN does not count; voxels without any value are `empty`."""
    flat = stack.flatten(1)
    mean, spread = (torch.empty(flat.shape[1], device=stack.device) for _ in range(2))
    rank = torch.arange(len(flat), device=stack.device)[:, None]
    for start in range(0, flat.shape[1], max(1, CHUNK // len(flat))):
        part = flat[:, start : start + max(1, CHUNK // len(flat))].float()
        counts = (~part.isnan()).sum(dim=0)
        values = part.nan_to_num(torch.inf).sort(dim=0).values
        cut = (TRIM * counts).floor()
        kept = (rank >= cut) & (rank < counts - cut)
        trimmed = torch.where(kept, values, 0.0).sum(dim=0) / kept.sum(dim=0)
        here = slice(start, start + part.shape[1])
        mean[here] = torch.where(counts > 0, trimmed, empty)
        every = torch.where(rank < counts, values, 0.0)
        centre = every.sum(dim=0) / counts.clamp(min=1)
        square = torch.where(rank < counts, (values - centre) ** 2, 0.0).sum(dim=0)
        spread[here] = (square / counts.clamp(min=1)).sqrt()
    return mean.reshape(stack.shape[1:]), spread.reshape(stack.shape[1:])


def foreground(image: Image) -> Tensor:
    """(*shape): the head or body, as for registration."""
    return preprocess(image)[0][0, 0] > FOREGROUND


def sharpen(image: Image, amount: float) -> Image:
    """I + amount · (I − blurred I), within the range of the image."""
    if amount == 0:
        return image
    values = torch.from_numpy(image.data)[None, None]
    inside = gaussian_blur(torch.ones_like(values), BLUR)
    sharp = values + amount * (values - gaussian_blur(values, BLUR) / inside)
    return Image(sharp[0, 0].clamp(float(values.min()), float(values.max())).numpy(), image.affine, image.name)


def sharpness(image: Image) -> float:
    """Mean gradient magnitude in the foreground, per mm, by central differences, of intensities that are scaled so that
    the 5th and the 95th percentile of the foreground become 0 and 1."""
    inside = foreground(image).numpy()
    low, high = np.percentile(image.data[inside], (5, 95))
    gradients = np.gradient(image.data.astype(np.float32) / max(high - low, 1e-12), *image.spacing)
    return float(np.sqrt(sum(g * g for g in gradients))[inside].mean())
