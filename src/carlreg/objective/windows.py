"""Images in blocks, and their local correlation: what the optimisation of fields computes on every voxel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError
from carlreg.geometry.grids import interpolate, multiply_axes, sample_at, sample_at_backward
from carlreg.geometry.resizing import averaging, resize, resize_labels

BLOCK = 16
"""Voxels a side of the blocks that are sampled together."""
CHUNK = 32
"""Blocks at a time on a CPU."""
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
        mask = None if self.mask is None else resize_labels((self.mask != 0).to(self.image), shape)
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

    Only blocks of the target with windows that are not constant are sampled: elsewhere the correlation is 0.
    """

    def __init__(self, source: Tensor, target: Picture, sigma: float, squared: bool) -> None:
        self.source, self.target, self.squared = source, target, squared
        padding = [b * q - n for b, q, n in zip(target.blocks, target.block, target.shape, strict=True)]
        ends = [pad for n in reversed(padding) for pad in (0, n)]
        image = F.pad(target.image, ends, mode="replicate")
        self.pooled = [b * q // k for b, q, k in zip(target.blocks, target.block, target.stride, strict=True)]
        # A pair of voxels has a spread of its own, half a voxel, to which the Gaussian is added.
        sides = list(zip(self.pooled, target.stride, target.spacing, strict=True))
        widths = [math.sqrt(max(sigma**2 - (k > 1) * mm**2 / 4, 0)) / (k * mm) for _, k, mm in sides]
        self.blur = [gaussian(n, width, image) for (n, _, _), width in zip(sides, widths, strict=True)]
        ones = image.new_ones(1, 1, *self.pooled)
        self.share = 1 / multiply_axes(ones * math.prod(target.stride), self.blur)
        moments = _pooled(torch.cat([image, image * image], dim=1), target.stride)
        self.mean, square = (multiply_axes(moments, self.blur) * self.share).chunk(2, dim=1)
        variance = (square - self.mean**2).clamp(min=0)
        self.scale = (variance + EPSILON).rsqrt()
        mask = torch.ones_like(target.image[:, :1]) if target.mask is None else (target.mask != 0).to(image)
        inside = (_pooled(F.pad(mask, ends), target.stride) > 0).to(image)
        if not bool(inside.any()):
            raise InputError("mask is empty for at least one item of the batch; expected at least one nonzero voxel")
        inside = inside / inside.sum() / image.shape[1]
        self.weights = torch.where(variance > FLAT, inside * variance / (variance + CONTRAST), 0.0)
        seen = multiply_axes((self.weights.amax(dim=1, keepdim=True) > 0).to(image), self.blur) > 0
        self.active = _split(seen, target.blocks).flatten(1).any(dim=1).nonzero()[:, 0]
        self.index = torch.stack(torch.unravel_index(self.active, target.blocks))
        self.images = _split(image, target.blocks)[self.active]
        if self.fused:
            self.padded = image.contiguous()
            self.seen = image.new_zeros(math.prod(target.blocks), dtype=torch.uint8).index_fill_(0, self.active, 1)

    def tensors(self) -> list[Tensor]:
        """What `gradient` reads of the images themselves; all else depends on shapes and settings."""
        blocks = [self.padded, self.seen] if self.fused else [self.images, self.active, self.index]
        return [self.source, self.mean, self.scale, self.weights, *blocks]

    def chunks(self) -> list[slice]:
        """Blocks to work on at a time: on a CPU as many as its caches hold."""
        count = len(self.active) if self.source.is_cuda else CHUNK
        return [slice(at, at + count) for at in range(0, len(self.active), count)]

    def __call__(self, positions: Tensor) -> Tensor:
        if not len(self.active):
            return positions.sum() * 0
        correlation = self.correlation(positions)
        return ((1 - (correlation**2 if self.squared else correlation)) * self.weights).sum()

    def correlation(self, positions: Tensor) -> Tensor:
        moments = _Moments.apply((2 * positions - 1).flip(1), self)  # type: ignore[no-untyped-call]
        mean, square, product = (multiply_axes(moments, self.blur) * self.share).chunk(3, dim=1)
        variance = (square - mean**2).clamp(min=0) + EPSILON
        return (product - mean * self.mean) * self.scale * variance.rsqrt()

    @functools.cached_property
    def fused(self) -> bool:
        """Whether `gradient` runs in kernels of its own: for one channel in 3-D, on a GPU."""
        return self.source.shape[1] == 1 and self.source.dim() == 5 and fast.descends_on(self.source)

    def gradient(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient by the positions."""
        if not self.fused or not len(self.active):
            with torch.enable_grad():
                leaf = positions.detach().requires_grad_()
                loss = self(leaf)
                return loss.detach(), torch.autograd.grad(loss, leaf)[0]
        from carlreg.fast.kernels import descent

        stride, block = self.target.stride, self.target.block
        at = positions.contiguous()
        moments = multiply_axes(descent.moments(self.source, self.padded, at, self.seen, stride, block), self.blur)
        parts = self.share, self.mean, self.scale, self.weights
        loss, by_moments = descent.correlate(moments, *parts, EPSILON, self.squared)
        by_moments = multiply_axes(by_moments, self.blur)  # symmetric
        return loss, descent.moments_backward(self.source, self.padded, at, self.seen, stride, block, by_moments)

    def shows(self, positions: Tensor) -> bool:
        """Whether there is anything to correlate."""
        return len(self.active) > 0 and bool((self.correlation(positions) * (self.weights > 0)).abs().amax() >= 0.01)

    def refine(self, positions: Tensor, chunk: slice) -> Tensor:
        """The positions (1, D, *control) of the voxels of some blocks: (K, D, *block)."""
        view = positions[0]
        for axis, (q, k) in enumerate(zip(self.target.block, self.target.stride, strict=True), start=1):
            view = view.unfold(axis, q // k + k - 1, q // k)  # (D, *blocks, *sides)
        index = (slice(None), *self.index[:, chunk])
        fine = view[index].transpose(0, 1)
        for axis, k in enumerate(self.target.stride, start=2):
            if k == 2:
                fine = _double(fine, axis)
        return fine

    def refine_backward(self, gradients: Tensor) -> Tensor:
        """The adjoint of `refine`, of all active blocks (K, D, *sides) whose voxels were joined by `_halve`."""
        blocks, dim = self.target.blocks, len(self.target.blocks)
        every = gradients.new_zeros(math.prod(blocks), *gradients.shape[1:]).index_copy_(0, self.active, gradients)
        every = every.reshape(*blocks, *gradients.shape[1:]).movedim(dim, 0)  # (D, *blocks, *sides)
        for axis, k in enumerate(self.target.stride, start=1):
            every = _overlap(every.movedim(dim + 1, axis + 1), axis, k)
        return every[None]


def _overlap(values: Tensor, axis: int, stride: int) -> Tensor:
    """Join the blocks of an axis, (…, blocks, side, …); with a stride of 2 the last voxel of each is the first of the
    next."""
    if stride == 1:
        return values.flatten(axis, axis + 1)
    main, last = values.narrow(axis + 1, 0, values.shape[axis + 1] - 1), values.select(axis + 1, -1)
    count, side = main.shape[axis : axis + 2]
    out = values.new_empty(*values.shape[:axis], count * side + 1, *values.shape[axis + 2 :])
    out.narrow(axis, 0, count * side).copy_(main.flatten(axis, axis + 1))
    out.select(axis, count * side).zero_()
    _every(out, axis, side, side).add_(last)
    return out


class _Moments(torch.autograd.Function):
    """a, a², a·b of a warped image and the target, pooled: (1, 3 C, *pooled)."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, windows: Windows) -> Tensor:
        warped, moments = [], []
        for chunk in windows.chunks():
            a, b = sample_at(windows.source, windows.refine(positions, chunk)), windows.images[chunk]
            warped.append(a)
            moments.append(_pooled(torch.cat([a, a * a, a * b], dim=1), windows.target.stride))
        ctx.save_for_backward(positions, *warped)
        ctx.windows = windows
        blocks = windows.target.blocks
        part = torch.cat(moments)
        every = part.new_zeros(math.prod(blocks), *part.shape[1:]).index_copy_(0, windows.active, part)
        return _join(every, blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions, *warped), windows = ctx.saved_tensors, ctx.windows
        by_moments = _split(gradients[0], windows.target.blocks)[windows.active]
        parts = []
        for chunk, a in zip(windows.chunks(), warped, strict=True):
            by = _spread(by_moments[chunk], windows.target.stride)
            by_mean, by_square, by_product = by.chunk(3, dim=1)
            by_a = by_mean.addcmul(a, by_square, value=2).addcmul_(windows.images[chunk], by_product)
            by_points = sample_at_backward(by_a, windows.source, windows.refine(positions, chunk))
            for axis in reversed(range(2, by_points.dim())):
                if windows.target.stride[axis - 2] == 2:
                    by_points = _halve(by_points, axis)
            parts.append(by_points)
        return windows.refine_backward(torch.cat(parts)), None


def _every(values: Tensor, axis: int, first: int, step: int) -> Tensor:
    """Every `step`-th voxel along an axis, as a view."""
    index = (*(slice(None),) * axis, slice(first, None, step))
    return values[index]


def _double(values: Tensor, axis: int) -> Tensor:
    """n + 1 voxels of a field to 2 n by linear interpolation."""
    side = values.shape[axis] - 1
    here, ahead = values.narrow(axis, 0, side), values.narrow(axis, 1, side)
    out = values.new_empty(*values.shape[:axis], 2 * side, *values.shape[axis + 1 :])
    _every(out, axis, 0, 2).copy_(here)
    torch.lerp(here, ahead, 0.5, out=_every(out, axis, 1, 2))
    return out


def _halve(values: Tensor, axis: int) -> Tensor:
    """The adjoint of `_double`."""
    even, odd = _every(values, axis, 0, 2), _every(values, axis, 1, 2) * 0.5
    side = even.shape[axis]
    out = values.new_empty(*values.shape[:axis], side + 1, *values.shape[axis + 1 :])
    torch.add(even, odd, out=out.narrow(axis, 0, side))
    out.select(axis, side).zero_()
    out.narrow(axis, 1, side).add_(odd)
    return out


def _pooled(values: Tensor, stride: Sequence[int]) -> Tensor:
    """Sums of pairs of voxels along the axes with a 2."""
    for axis, k in enumerate(stride, start=2):
        if k == 2:
            values = _every(values, axis, 0, 2) + _every(values, axis, 1, 2)
    return values


def _spread(values: Tensor, stride: Sequence[int]) -> Tensor:
    """The adjoint of `_pooled`."""
    for axis, k in enumerate(stride, start=2):
        if k == 2:
            values = values.repeat_interleave(2, dim=axis)
    return values


def _split(values: Tensor, blocks: Sequence[int]) -> Tensor:
    """(1, C, *shape) → (blocks, C, *block)."""
    dim = len(blocks)
    shape = [part for b, n in zip(blocks, values.shape[2:], strict=True) for part in (b, n // b)]
    parts = values.reshape(values.shape[1], *shape).permute(*range(1, 2 * dim, 2), 0, *range(2, 2 * dim + 1, 2))
    return parts.flatten(0, dim - 1)


def _join(values: Tensor, blocks: Sequence[int]) -> Tensor:
    """The inverse of `_split`."""
    dim = len(blocks)
    parts = values.reshape(*blocks, *values.shape[1:])
    order = [dim, *(part for axis in range(dim) for part in (axis, dim + 1 + axis))]
    sides = [b * n for b, n in zip(blocks, values.shape[2:], strict=True)]
    return parts.permute(*order).reshape(1, values.shape[1], *sides)
