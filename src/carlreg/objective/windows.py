"""Images in blocks, and their local correlation: what the optimisation of fields computes on every voxel."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError
from carlreg.geometry.grids import interpolate, multiply_axes, sample_with_slopes
from carlreg.geometry.resizing import averaging, resize, resize_mask

BLOCK = 16
"""Voxels a side of the blocks that are sampled together."""
FLAT = 1e-7
"""Windows with a variance below this are constant."""
EPSILON = 1e-6
"""Added to local variances, of intensities from 0 to 1."""
CONTRAST = 1e-4
"""Windows of the target with this variance count half: less contrast is mostly noise."""
THICK = 1.5
"""Voxels longer than so many of the finest axis are not joined along their axis."""
ROUND = 0.5
"""Standard deviation, in voxels of a coarse field, of the Gaussian that smooths it on a finer grid."""
LEAST_SIDE = 8
"""No grid is made coarser than this."""


@dataclass(frozen=True, eq=False)
class Picture:
    """An image (B, C, *shape), its mask, and the size of its voxels in mm. It is divided into blocks; those at the end
    may reach beyond it, where its border is continued."""

    image: Tensor
    mask: Tensor | None
    spacing: tuple[float, ...]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.image.shape[2:])

    @functools.cached_property
    def size(self) -> tuple[float, ...]:
        """The extent in mm, from the first to the last voxel centre; one voxel for an axis of one."""
        return tuple(mm * max(n - 1, 1) for mm, n in zip(self.spacing, self.shape, strict=True))

    @functools.cached_property
    def stride(self) -> tuple[int, ...]:
        """The field has every second voxel, but every one across thick slices."""
        thick = THICK * min(self.spacing)
        return tuple(1 if mm > thick or n < BLOCK else 2 for n, mm in zip(self.shape, self.spacing, strict=True))

    @functools.cached_property
    def block(self) -> tuple[int, ...]:
        return tuple(BLOCK if k == 2 else min(n, BLOCK // 2) for n, k in zip(self.shape, self.stride, strict=True))

    @functools.cached_property
    def blocks(self) -> tuple[int, ...]:
        return tuple(-(-n // q) for n, q in zip(self.shape, self.block, strict=True))

    @functools.cached_property
    def control(self) -> tuple[int, ...]:
        """The shape of the field."""
        sides = zip(self.blocks, self.block, self.stride, strict=True)
        return tuple(count * size // k + k - 1 for count, size, k in sides)

    @functools.cached_property
    def steps(self) -> tuple[float, ...]:
        """The size of the field's voxels in unit coordinates."""
        return tuple(k / max(n - 1, 1) for k, n in zip(self.stride, self.shape, strict=True))

    @functools.cached_property
    def grid(self) -> Tensor:
        """Unit coordinates of the field's voxels, (1, D, *control)."""
        sides = zip(self.control, self.steps, strict=True)
        axes = [(torch.arange(n, dtype=torch.float64) * step).to(self.image) for n, step in sides]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"))[None]

    @functools.cached_property
    def finer(self) -> list[Tensor]:
        """Matrices that interpolate the field at the voxels of the image."""
        sides = zip(self.control, self.shape, self.stride, strict=True)
        return [averaging(c, torch.arange(n, dtype=torch.float64) / k, 1.0).to(self.image) for c, n, k in sides]

    def resampled(self, field: Tensor, other: Picture) -> Tensor:
        """A field of this image, interpolated at the voxels of another one's field. If those are smaller, it is also
        smoothed: creases between the cells of a coarse grid would be folds on a fine one."""
        matrices = []
        for n, own, step, count in zip(self.control, self.steps, other.steps, other.control, strict=True):
            index = (torch.arange(count, dtype=torch.float64) * step / own).clamp(0, n - 1)
            matrix = averaging(n, index, max(step / own, 1.0)).double()
            smooth = gaussian(count, ROUND * math.sqrt(max((own / step) ** 2 - 1, 0)), matrix)
            matrices.append((matrix if smooth is None else matrix @ smooth / smooth.sum(0)).to(field))
        return multiply_axes(field, matrices)

    def warp(self, source: Tensor, positions: Tensor) -> Tensor:
        """An image at points (B, D, *control), interpolated at the voxels of this one."""
        return interpolate(source, multiply_axes(positions, self.finer).movedim(1, -1))

    def shrink(self, voxel: float) -> Picture:
        """On a grid of voxels no smaller than this."""
        sizes = zip(self.shape, self.size, strict=True)
        shape = tuple(min(n, max(LEAST_SIDE, round(mm / voxel) + 1)) for n, mm in sizes)
        spacing = tuple(mm / max(n - 1, 1) for mm, n in zip(self.size, shape, strict=True))
        mask = None if self.mask is None else resize_mask(self.mask, shape)
        return Picture(resize(self.image, shape), mask, spacing)


def gaussian(side: int, sigma: float, like: Tensor) -> Tensor | None:
    """(side, side): a Gaussian of `sigma` voxels, truncated at 3σ, with zeros outside. None if it is very narrow."""
    return None if sigma < 0.25 or side == 1 else _gaussian(side, sigma, like.dtype, like.device)


@functools.lru_cache(256)  # pairs of a list have them in common, and a copy to a GPU waits for it
def _gaussian(side: int, sigma: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        offset = torch.arange(-side, side + 1, dtype=torch.float64)
        taps = torch.exp(-0.5 * (offset / sigma) ** 2) * (offset.abs() <= max(3 * sigma, 1))
        index = torch.arange(side)
        return (taps / taps.sum())[index[:, None] - index + side].to(device, dtype)


class Windows:
    """Local correlation of two images (1, C, *shape), in Gaussian windows of `sigma` mm around every second voxel.

    Windows are sums over cells of 2 × 2 × 2 voxels, of which all are sampled, or every second one, as on a
    `chessboard`. Only cells near windows that are not constant are sampled: elsewhere the correlation is 0.
    """

    def __init__(
        self, source: Tensor, target: Picture, sigma: float, squared: bool, *, chessboard: bool = False
    ) -> None:
        self.source, self.target, self.squared = source.contiguous(), target, squared
        padding = [b * q - n for b, q, n in zip(target.blocks, target.block, target.shape, strict=True)]
        ends = [pad for n in reversed(padding) for pad in (0, n)]
        image = F.pad(target.image, ends, mode="replicate")
        self.pooled = [b * q // k for b, q, k in zip(target.blocks, target.block, target.stride, strict=True)]
        # A pair of voxels has a spread of its own, half a voxel, to which the Gaussian is added.
        sides = list(zip(self.pooled, target.stride, target.spacing, strict=True))
        widths = [math.sqrt(max(sigma**2 - (k > 1) * mm**2 / 4, 0)) / (k * mm) for _, k, mm in sides]
        self.blur = [gaussian(n, width, image) for (n, _, _), width in zip(sides, widths, strict=True)]
        self.chessboard = chessboard
        every = itertools.product(*(range(k) for k in target.stride))
        self.offsets = [one for one in every if not chessboard or sum(one) % 2 == 0]
        sampled = [_of_cells(image, target.stride, offset) for offset in self.offsets]
        self.share = 1 / multiply_axes(torch.full_like(sampled[0][:, :1], len(sampled)), self.blur)
        moments = torch.cat([sum(sampled), sum(one * one for one in sampled)], dim=1)  # type: ignore[list-item]
        self.mean, square = (multiply_axes(moments, self.blur) * self.share).chunk(2, dim=1)
        variance = (square - self.mean**2).clamp(min=0)
        self.scale = (variance + EPSILON).rsqrt()
        mask = torch.ones_like(target.image[:, :1]) if target.mask is None else (target.mask != 0).to(image)
        inside = _any_of_cells(F.pad(mask, ends), target.stride)
        if not bool(inside.any()):
            raise InputError("mask is empty for at least one item of the batch; expected at least one nonzero voxel")
        inside = inside / inside.sum() / image.shape[1]
        self.weights = torch.where(variance > FLAT, inside * variance / (variance + CONTRAST), 0.0)
        seen = multiply_axes((self.weights.amax(dim=1, keepdim=True) > 0).to(image), self.blur) > 0
        self.empty = not bool(seen.any())
        if self.fused:
            active = _split(seen, target.blocks).flatten(1).any(dim=1).nonzero()[:, 0]
            self.padded = image.contiguous()
            self.seen = image.new_zeros(math.prod(target.blocks), dtype=torch.uint8).index_fill_(0, active, 1)
        else:
            at = seen[0, 0].nonzero(as_tuple=True)  # torch.unravel_index would import sympy, for seconds
            self.cells = _raveled(at, self.pooled)
            self.indices = [_raveled(at, _inside(target.control, offset)) for offset in self.offsets]
            self.values = torch.stack([one[0].flatten(1).index_select(1, self.cells) for one in sampled], dim=1)

    def tensors(self) -> list[Tensor]:
        """What `gradient` reads of the images themselves; all else depends on shapes and settings."""
        parts = [self.padded, self.seen] if self.fused else [self.cells, *self.indices, self.values]
        return [self.source, self.mean, self.scale, self.weights, *parts]

    def __call__(self, positions: Tensor) -> Tensor:
        return ((1 - self._kept(self.correlation(positions))) * self.weights).sum()

    def _kept(self, correlation: Tensor) -> Tensor:
        return correlation**2 if self.squared else correlation

    @functools.cached_property
    def fused(self) -> bool:
        """Whether `gradient` runs in kernels of its own: for one channel in 3-D, on a GPU."""
        return self.source.shape[1] == 1 and self.source.dim() == 5 and fast.descends_on(self.source)

    def correlation(self, positions: Tensor) -> Tensor:
        """(1, C, *pooled): local correlation, where it counts."""
        if self.empty:
            return torch.zeros_like(self.mean)
        if self.fused:
            return self._correlate(self._fused_moments(positions.contiguous()))[0]
        return self._correlate(self._moments(self._warp(positions)[0]))[0]

    def gradient(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient by the positions."""
        if self.empty:
            return positions.new_zeros(()), torch.zeros_like(positions)
        if self.fused:
            return self._fused_gradient(positions.contiguous())
        warped, slopes = self._warp(positions)
        correlation, mean, factor, slope = self._correlate(self._moments(warped))
        loss = ((1 - self._kept(correlation)) * self.weights).sum()
        by = -self.weights * self.share * (2 * correlation if self.squared else 1)  # by the correlation of each window
        by_mean, by_square = by * (mean * slope - self.mean * factor), -0.5 * by * slope
        by_moments = multiply_axes(torch.cat([by_mean, by_square, by * factor], dim=1), self.blur)  # symmetric
        by_mean, by_square, by_product = by_moments[0].flatten(1).index_select(1, self.cells)[:, None].chunk(3)
        by_warped = torch.addcmul(by_mean, warped, by_square, value=2).addcmul_(self.values, by_product)
        return loss, self._warp_backward((slopes * by_warped).sum(1))

    def _fused_moments(self, positions: Tensor) -> Tensor:
        from carlreg.fast.kernels import descent

        parts = self.source, self.padded, positions, self.seen, self.target.stride, self.target.block
        return multiply_axes(descent.moments(*parts, self.chessboard), self.blur)

    def _fused_gradient(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        from carlreg.fast.kernels import descent

        target = self.share, self.mean, self.scale, self.weights
        loss, by_moments = descent.correlate(self._fused_moments(positions), *target, EPSILON, self.squared)
        by_moments = multiply_axes(by_moments, self.blur)  # symmetric
        parts = self.source, self.padded, positions, self.seen, self.target.stride, self.target.block
        return loss, descent.moments_backward(*parts, self.chessboard, by_moments)

    def _correlate(self, moments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From blurred moments: the correlation of each window, the mean of the warped image, and the derivatives of
        the correlation by the product of both images and, times −2, by the square of the warped one."""
        mean, square, product = (moments * self.share).chunk(3, dim=1)
        spread = square - mean**2
        variance = spread.clamp(min=0) + EPSILON
        factor = self.scale * variance.rsqrt()
        correlation = (product - mean * self.mean) * factor
        return correlation, mean, factor, torch.where(spread >= 0, correlation / variance, 0.0)

    def _moments(self, warped: Tensor) -> Tensor:
        """a, a², a·b of a warped image (C, voxels of a cell, cells) and the target, in windows: (1, 3 C, *pooled)."""
        sums = torch.cat([warped.sum(1), warped.square().sum(1), (warped * self.values).sum(1)])
        every = sums.new_zeros(len(sums), math.prod(self.pooled)).index_copy_(1, self.cells, sums)
        return multiply_axes(every.reshape(1, -1, *self.pooled), self.blur)

    def shows(self, positions: Tensor) -> bool:
        """Whether there is anything to correlate."""
        return bool((self.correlation(positions) * (self.weights > 0)).abs().amax() >= 0.01)

    def _warp(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The source at positions (1, D, *control), where it is sampled, (C, voxels of a cell, cells), and its
        derivatives by the positions of these voxels, (D, C, voxels of a cell, cells)."""
        points = (_centres(positions[0], offset).flatten(1) for offset in self.offsets)
        picked = [one.index_select(1, cells) for one, cells in zip(points, self.indices, strict=True)]
        values, slopes = sample_with_slopes(self.source, torch.cat(picked, dim=1))
        shape = self.values.shape[1:]
        return values.unflatten(-1, shape), slopes.unflatten(-1, shape)

    def _warp_backward(self, by_points: Tensor) -> Tensor:
        """The gradient by the positions (1, D, *control), from that by the voxels', (D, voxels of a cell, cells)."""
        dim, control = len(by_points), self.target.control
        total = by_points.new_zeros(dim, *control)
        for number, (offset, cells) in enumerate(zip(self.offsets, self.indices, strict=True)):
            shape = _inside(control, offset)
            part = by_points.new_zeros(dim, math.prod(shape)).index_copy_(1, cells, by_points[:, number])
            _add_centres_backward(total, part.reshape(dim, *shape), offset)
        return total[None]


def _inside(control: Sequence[int], offset: Sequence[int]) -> list[int]:
    """How many points lie between those of a field, along axes with an offset of 1."""
    return [n - between for n, between in zip(control, offset, strict=True)]


def _raveled(index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Indices along each axis as indices of the flattened grid."""
    flat = torch.zeros_like(index[0])
    for at, side in zip(index, shape, strict=True):
        flat = flat * side + at
    return flat


def _every(values: Tensor, axis: int, first: int, step: int) -> Tensor:
    """Every `step`-th voxel along an axis, as a view."""
    index = (*(slice(None),) * axis, slice(first, None, step))
    return values[index]


def _of_cells(values: Tensor, stride: Sequence[int], offset: Sequence[int]) -> Tensor:
    """One voxel of each cell, as a view."""
    for axis, (k, first) in enumerate(zip(stride, offset, strict=True), start=2):
        values = _every(values, axis, first, k)
    return values


def _any_of_cells(values: Tensor, stride: Sequence[int]) -> Tensor:
    """The largest value of each cell."""
    for axis, k in enumerate(stride, start=2):
        if k == 2:
            values = values.unflatten(axis, (-1, 2)).amax(axis + 1)
    return values


def _centres(values: Tensor, offset: Sequence[int]) -> Tensor:
    """Means of neighbours along axes with an offset of 1, where voxels lie between those of the field."""
    for axis, between in enumerate(offset, start=1):
        if between:
            side = values.shape[axis] - 1
            values = values.narrow(axis, 0, side) + values.narrow(axis, 1, side)
    return values * 0.5 ** sum(offset) if any(offset) else values


def _add_centres_backward(total: Tensor, values: Tensor, offset: Sequence[int]) -> None:
    """Add the adjoint of `_centres`."""
    values = values.mul_(0.5 ** sum(offset))
    for axes in itertools.product(*(range(between + 1) for between in offset)):
        part = total
        for axis, (first, side) in enumerate(zip(axes, values.shape[1:], strict=True), start=1):
            part = part.narrow(axis, first, side)
        part.add_(values)


def _split(values: Tensor, blocks: Sequence[int]) -> Tensor:
    """(1, C, *shape) → (blocks, C, *block)."""
    dim = len(blocks)
    shape = [part for b, n in zip(blocks, values.shape[2:], strict=True) for part in (b, n // b)]
    parts = values.reshape(values.shape[1], *shape).permute(*range(1, 2 * dim, 2), 0, *range(2, 2 * dim + 1, 2))
    return parts.flatten(0, dim - 1)
