"""Optimisation of the two displacement fields of one pair, on the images' own voxels.

Everything is measured in millimetres, so that ten slices of 10 mm are not treated like voxels of 1 mm. Three things
keep the finest grid affordable without a GPU. Fields have half as many voxels a side as the images, and are
interpolated. Local correlation is computed in windows around every second voxel. And only the images are sampled at
every voxel: GradICON and folds are measured on the grid of the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError, NotFiniteError
from carlreg.fast import exact
from carlreg.fast.precision import full_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import interpolate, multiply_axes, sample_at, sample_at_backward
from carlreg.geometry.jacobian import determinant
from carlreg.geometry.resizing import averaging, resize, resize_labels
from carlreg.geometry.transforms import DisplacementField, Transform
from carlreg.objective.losses import Loss, Similarity, extrapolation, find_similarity

logger = logging.getLogger(__name__)

FIELD_STEPS = 20
"""Default steps on the finest grid."""
FIELD_WEIGHT = 0.75
"""Default weight of GradICON when fields are optimised."""
LEVELS = 4
"""Grids on which fields are optimised."""
COARSE = 3
"""Steps on each coarser grid for one on the finest."""
LEAST_SIDE = 8
"""No grid is made coarser than this."""
THICK = 1.5
"""Voxels longer than so many of the finest axis are not joined along their axis."""
SAME = 1e-3
"""Images that differ by no more than this fraction of their intensity range match perfectly."""
BLOCK = 16
"""Voxels a side of the blocks that are sampled together."""
CHUNK = 32
"""Blocks at a time on a CPU."""
FLAT = 1e-7
"""Windows with a variance below this are constant."""
SLOW = 0.02
"""Fields change more slowly where the gradient of the loss by a voxel, times the number of voxels, is below this."""
GAIN = 0.02
"""A start stays as it is if the loss does not fall by this fraction."""
EPSILON = 1e-6
"""Added to local variances, of intensities from 0 to 1."""
CONTRAST = 1e-4
"""Windows of the target with this variance count half: less contrast is mostly noise."""
REPAIRS, LEAST_VOLUME = 20, 0.01
"""Where a voxel keeps less than this fraction of its volume, the result is smoothed, at most so many times."""
MARGIN = 0.1
"""Determinants below this count as folds in the loss."""

Callback = Callable[[int, Loss], None]


@dataclass(frozen=True)
class Optimized:
    """The best pair of transforms, and the course of the loss."""

    transform: Transform
    """Φ[moving, fixed]."""
    inverse: Transform
    """Φ[fixed, moving], the network's own backward map."""
    losses: list[dict[str, float]]
    """total, similarity and regularity before each step and after the last."""
    best: int
    """Which entry of `losses` belongs to the transforms."""
    stopped: str | None = None
    """Why the optimisation ended early, if it did."""


def steps_in_all(steps: int, levels: int = LEVELS) -> int:
    """The number of steps of `optimize_fields` over all levels."""
    return steps * (1 + COARSE * (levels - 1))


def optimize_fields(
    transform: Transform,
    inverse: Transform,
    moving: Tensor,
    fixed: Tensor,
    *,
    steps: int = FIELD_STEPS,
    levels: int = LEVELS,
    learning_rate: float = 1.0,
    smoothing: float = 2.0,
    similarity: str | Similarity = "lncc",
    window: float = 2.0,
    weight: float = FIELD_WEIGHT,
    fold_weight: float = 5.0,
    moving_mask: Tensor | None = None,
    fixed_mask: Tensor | None = None,
    moving_spacing: Sequence[float] | None = None,
    fixed_spacing: Sequence[float] | None = None,
    seed: int = 0,
    callback: Callback | None = None,
) -> Optimized:
    """Minimise the GradICON loss of one pair over its two displacement fields, from a network's result.

    Spacings are the sizes of the images' voxels in mm, 1 by default. The finest of them is the unit of `window`, the
    standard deviation of the Gaussian windows of "lncc" and "lncc2", of `smoothing`, that of the Gaussian by which
    changes of the fields are smoothed, and of `learning_rate`, by which Adam changes them in a step. A field can fold
    more easily than a network's output, so `fold_weight` times a penalty is added. `weight` is that of GradICON.

    There are `steps` on the finest of the `levels`, the images' own grid, preceded by three times as many on each of
    the coarser ones, where they cost little. Their unit doubles with each level; only axes with smaller voxels than
    that are made coarser.

    Returns the best iterate on the finest grid; `losses` are those of that grid. If the loss does not fall by 2 %,
    or if the images already match perfectly or cannot be compared, the given transforms are returned.
    `callback(step, loss)` is called at every step of every level.

    >>> result = optimize_fields(*model.both(moving, fixed), moving, fixed)
    """
    if steps < 0 or levels < 1:
        raise InputError(f"steps is {steps} and levels {levels}; expected 0 or more, and 1 or more")
    check_pair(moving, fixed)
    check_finite(moving, "moving")
    check_finite(fixed, "fixed")
    ones = (1.0,) * (fixed.dim() - 2)
    f = _Picture(fixed.detach().clone(), fixed_mask, tuple(fixed_spacing or ones))
    m = _Picture(moving.detach().clone(), moving_mask, tuple(moving_spacing or ones))
    settings = _Settings(similarity, window, weight, fold_weight, learning_rate, smoothing, seed)
    with torch.inference_mode(False), torch.no_grad():
        finest = _Level(f, m, max(min(f.spacing), min(m.spacing)), settings)
        given = transform.detach(), inverse.detach()
        start = fields = finest.displacements(given)
        if not all(bool(torch.isfinite(field).all()) for field in start):
            raise NotFiniteError("the transform that the optimisation starts from is not finite")
        if (reason := finest.meaningless(start)) is not None or finest.matches(start):
            return Optimized(*given, [] if reason else [finest.loss(start).floats()], 0, reason)
        done = 0
        for level in reversed(range(1, levels)):
            coarse = finest.shrink(2**level)
            begin = [own.sampled(field, other) for field, own, other in zip(fields, (f, m), coarse.both, strict=True)]
            found, losses, _ = coarse.descend(begin, COARSE * steps, done, callback)
            moves = (new - old for new, old in zip(found, begin, strict=True))
            parts = zip(fields, moves, coarse.both, (f, m), strict=True)
            fields = [field + other.sampled(move, own) for field, move, other, own in parts]
            done += COARSE * steps
        least = (1 - GAIN) * float(finest.loss(start).total)
        if done and not float(finest.loss(fields).total) < least:
            fields = start
        found, losses, best = finest.descend(fields, steps, done, callback)
        bad = next((step for step, loss in enumerate(losses) if not math.isfinite(loss["total"])), None)
        stopped = None if bad is None else f"the loss became {losses[bad]['total']} at step {done + bad}"
        if stopped is not None:
            logger.warning("instance optimisation stopped: %s; keeping the best step before it", stopped)
        if not losses[best]["total"] < least:
            return Optimized(*given, losses[:bad], 0, stopped)
        phi, psi = (
            DisplacementField(one.sampled(side.unfolded(field), one, control=False), extrapolation(old))
            for field, one, side, old in zip(found, (f, m), finest.sides, given, strict=True)
        )
        return Optimized(phi, psi, losses[:bad], best, stopped)


@dataclass(frozen=True)
class _Settings:
    similarity: str | Similarity
    window: float
    weight: float
    fold_weight: float
    learning_rate: float
    smoothing: float
    seed: int


@dataclass(frozen=True, eq=False)
class _Picture:
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

    def units(self, axis: int, *, control: bool = True) -> Tensor:
        """Unit coordinates of the field's voxels, or of the image's, along an axis."""
        n = self.control[axis] if control else self.shape[axis]
        step = self.stride[axis] if control else 1
        return torch.arange(n, dtype=torch.float64) * step / max(self.shape[axis] - 1, 1)

    def sampled(self, field: Tensor, other: _Picture, *, control: bool = True) -> Tensor:
        """A field of this image, interpolated at the voxels of another one's field, or of that image itself."""
        matrices = []
        for axis, n in enumerate(self.control):
            index = other.units(axis, control=control) * max(self.shape[axis] - 1, 1) / self.stride[axis]
            apart = float(index[1] - index[0]) if len(index) > 1 else 1.0
            matrices.append(averaging(n, index.clamp(0, n - 1), max(apart, 1.0)).to(field))
        return multiply_axes(field, matrices)

    def shrink(self, voxel: float) -> _Picture:
        """On a grid of voxels no smaller than this."""
        sizes = zip(self.shape, self.size, strict=True)
        shape = tuple(min(n, max(LEAST_SIDE, round(mm / voxel) + 1)) for n, mm in sizes)
        spacing = tuple(mm / max(n - 1, 1) for mm, n in zip(self.size, shape, strict=True))
        mask = None if self.mask is None else resize_labels((self.mask != 0).to(self.image), shape)
        return _Picture(resize(self.image, shape), mask, spacing)


# ---- one level ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Level:
    """Two images, and the descent of the fields between them: of the map on the fixed image, whose values are points of
    the moving image, and of its inverse. Fields are displacements (B, D, *control) in unit coordinates."""

    fixed: _Picture
    moving: _Picture
    voxel: float
    """The unit of the settings, in mm."""
    settings: _Settings

    def shrink(self, factor: int) -> _Level:
        voxel = factor * self.voxel
        return dataclasses.replace(self, fixed=self.fixed.shrink(voxel), moving=self.moving.shrink(voxel), voxel=voxel)

    @functools.cached_property
    def sides(self) -> tuple[_Side, _Side]:
        """Of the map on the fixed image, and of its inverse."""
        return _Side(self.moving, self.fixed, self), _Side(self.fixed, self.moving, self)

    @property
    def both(self) -> tuple[_Picture, _Picture]:
        return self.fixed, self.moving

    def displacements(self, maps: Sequence[Transform]) -> list[Tensor]:
        """The displacements of both maps."""
        fields = []
        for phi, side in zip(maps, self.sides, strict=True):
            field = phi(side.grid.movedim(1, -1)).movedim(-1, 1) - side.grid
            fields.append(field.expand(len(side.target.image), *field.shape[1:]).clone())
        return fields

    def matches(self, fields: Sequence[Tensor]) -> bool:
        """Whether each image, warped, is the other at every voxel, so that a lower loss would mean nothing."""
        for field, side in zip(fields, self.sides, strict=True):
            other = side.target.image
            apart = (side.warp(side.grid + field) - other).abs().amax()
            if bool(apart > SAME * (other.amax() - other.amin())):
                return False
        return True

    def meaningless(self, fields: Sequence[Tensor]) -> str | None:
        """Why the similarity of the images cannot be computed, if it cannot."""
        for field, side in zip(fields, self.sides, strict=True):
            for measure, at in zip(side.measures, (side.grid + field).split(1), strict=True):
                if isinstance(measure, _Windows) and not measure.shows(at):
                    return "where the images overlap, at least one of them is constant"
                if not bool(torch.isfinite(measure(at))):
                    return "the similarity of the images is not a finite number"
        return None

    def loss(self, fields: Sequence[Tensor]) -> Loss:
        positions = [side.grid + field for field, side in zip(fields, self.sides, strict=True)]
        similar = sum(side.similarity(at) for at, side in zip(positions, self.sides, strict=True))
        regular, folded = self._regularity(positions, self.first_phase)
        return Loss(self._total(similar, regular, folded), similar, regular)  # type: ignore[arg-type]

    @functools.cached_property
    def ends(self) -> Tensor:
        """Unit coordinates of the last voxels of the fixed image's field."""
        last = [float(self.fixed.units(axis)[-1]) or 1.0 for axis in range(len(self.fixed.shape))]
        return across(last, self.fixed.image)

    @functools.cached_property
    def first_phase(self) -> Tensor:
        return torch.tensor(self.settings.seed % 2, device=self.fixed.image.device)

    def _total(self, similar: Any, regular: Tensor, folded: Tensor) -> Tensor:
        return similar + self.settings.weight * regular + self.settings.fold_weight * folded

    def _regularity(self, positions: Sequence[Tensor], phase: Tensor) -> tuple[Tensor, Tensor]:
        """GradICON on every second voxel of the moving image's field, from the first or the second one, and folds."""
        (forward, backward), side = positions, self.sides[1]
        grid, steps = side.grid.expand_as(backward), []
        for axis, n in enumerate(backward.shape[2:]):
            stride = 2 if n >= 2 * LEAST_SIDE else 1
            at = stride * torch.arange(n // stride, device=grid.device) + (phase if stride == 2 else 0)
            backward, grid = backward.index_select(axis + 2, at), grid.index_select(axis + 2, at)
            steps.append(stride * self.moving.stride[axis] * self.moving.spacing[axis])
        inner = (backward / self.ends).clamp(0, 1)
        field = forward - self.sides[0].grid
        sampled = exact.sample(field, inner) if field.is_cuda else interpolate(field, inner.movedim(1, -1))
        error = (backward + sampled - grid) * self.sides[0].size
        regular = sum(
            (error.diff(dim=axis + 2) / mm).square().mean()
            for axis, mm in enumerate(steps)
            if error.shape[axis + 2] > 1
        )
        return regular, _folds(forward, self.fixed) + _folds(positions[1], self.moving)  # type: ignore[return-value]

    def _gradients(self, positions: Sequence[Tensor], phase: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(total, similarity, regularity), and the gradients of the total by the positions."""
        with torch.enable_grad():
            leaves = [at.detach().requires_grad_() for at in positions]
            similar = torch.zeros_like(leaves[0][0, 0].sum()).detach()
            gradients = []
            for at, side in zip(leaves, self.sides, strict=True):
                part = side.similarity(at)  # one image at a time, for half the memory
                gradients.append(torch.autograd.grad(part, at)[0])
                similar = similar + part.detach()
            regular, folded = self._regularity(leaves, phase)
            rest = self._total(0, regular, folded)
            more = torch.autograd.grad(rest, leaves)
        parts = torch.stack([similar + rest.detach(), similar, regular.detach()])
        return parts, [a + b for a, b in zip(gradients, more, strict=True)]

    @full_precision
    def descend(
        self, start: Sequence[Tensor], steps: int, first: int, callback: Callback | None
    ) -> tuple[list[Tensor], list[dict[str, float]], int]:
        """Take steps, numbered from `first`: the fields with the lowest loss, all losses, and which was the lowest."""
        rate = self.settings.learning_rate
        changes, mean, square = ([torch.zeros_like(field) for field in start] for _ in range(3))
        best = [field.clone() for field in start]
        lowest = start[0].new_full((), math.inf)
        history = start[0].new_full((steps + 1, 3), math.nan)
        count = torch.zeros(1, dtype=torch.long, device=history.device)

        def step() -> None:
            fields = [f + side.moves(c) for f, c, side in zip(start, changes, self.sides, strict=True)]
            positions = [side.grid + field for field, side in zip(fields, self.sides, strict=True)]
            parts, gradients = self._gradients(positions, (count[0] + self.settings.seed) % 2)
            history.index_copy_(0, count, parts[None])
            better = parts[0] < lowest
            lowest.copy_(torch.where(better, parts[0], lowest))
            count.add_(1)
            for n, side in enumerate(self.sides):
                best[n].copy_(torch.where(better, fields[n], best[n]))
                gradient = side.moves_backward(gradients[n])
                mean[n].lerp_(gradient, 0.1)
                square[n].lerp_(gradient.square(), 0.001)
                speed = (square[n] / (1 - 0.999**count)).sqrt_().add_(SLOW)
                changes[n].sub_(mean[n] / speed * (rate / (1 - 0.9**count)))

        def after(number: int) -> None:
            if callback is not None:
                callback(first + number, Loss(*history[number]))

        if history.is_cuda and self._captured():
            exact.repeat(step, steps + 1, after)
        else:
            for number in range(steps + 1):
                step()
                after(number)
        names = ("total", "similarity", "regularity")
        losses = [dict(zip(names, row, strict=True)) for row in history.tolist()]
        totals = [row["total"] if math.isfinite(row["total"]) else math.inf for row in losses]
        return best, losses, totals.index(min(totals))

    def _captured(self) -> bool:
        """Whether nothing in a step waits for the GPU: other similarities with masks do, and users' functions may."""
        name, masks = self.settings.similarity, (self.fixed.mask, self.moving.mask)
        return name in ("lncc", "lncc2") or (isinstance(name, str) and masks == (None, None))


def _folds(positions: Tensor, picture: _Picture) -> Tensor:
    """Mean of relu(margin − det ∇φ), by differences of one voxel of the field."""
    shape, dim = positions.shape[2:], positions.dim() - 2
    steps = [k / max(n - 1, 1) for k, n in zip(picture.stride, picture.shape, strict=True)]
    if min(shape) < 2:
        return positions.new_zeros(())
    columns = []
    for axis, step in enumerate(steps, start=2):
        change = positions.diff(dim=axis) / step
        for other in range(2, dim + 2):
            change = change if other == axis else change.narrow(other, 0, shape[other - 2] - 1)
        columns.append(change.movedim(1, -1))
    return F.relu(MARGIN - determinant(columns)).mean()


class _Side:
    """One direction of a level: the field on the grid of `target`, whose values are points of `source`."""

    def __init__(self, source: _Picture, target: _Picture, level: _Level) -> None:
        settings, like = level.settings, target.image
        self.source, self.target = source, target
        axes = [target.units(axis) for axis in range(len(target.shape))]
        self.grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))[None].to(like)
        sigma = settings.smoothing * level.voxel
        sides = zip(target.control, target.spacing, target.stride, strict=True)
        self.blur = [_gaussian(n, sigma / (mm * k), like) for n, mm, k in sides]
        self.size = across(source.size, like)
        self.unit = level.voxel / self.size
        name, width = settings.similarity, settings.window * level.voxel
        self.measures: list[Callable[[Tensor], Tensor]] = []
        for item in range(len(like)):
            one = slice(item, item + 1)
            mask = None if target.mask is None else target.mask[one if len(target.mask) > 1 else slice(None)]
            image, picture = source.image[one], _Picture(like[one], mask, target.spacing)
            if name in ("lncc", "lncc2"):
                self.measures.append(_Windows(image, picture, width, name == "lncc2"))
            else:
                measure = functools.partial(find_similarity(name), mask=mask)
                self.measures.append(_Dense(image, picture, measure))

    def warp(self, positions: Tensor) -> Tensor:
        """The source on the target's voxels."""
        parts = zip(self.source.image.split(1), positions.split(1), strict=True)
        return torch.cat([_warp(image, at, self.target) for image, at in parts])

    def similarity(self, positions: Tensor) -> Tensor:
        parts = zip(self.measures, positions.split(1), strict=True)
        return torch.stack([measure(at) for measure, at in parts]).mean()

    def moves(self, change: Tensor) -> Tensor:
        """Changes in units of the level, smoothed, in unit coordinates."""
        return multiply_axes(change, self.blur) * self.unit

    def moves_backward(self, gradient: Tensor) -> Tensor:
        """The gradient by the changes, per voxel, so that it does not depend on the number of voxels."""
        return multiply_axes(gradient * (self.unit * gradient[0, 0].numel()), self.blur)  # symmetric

    def unfolded(self, field: Tensor) -> Tensor:
        """The field, smoothed around folds until there are none: a few voxels in a thousand at most."""
        steps = [k / max(n - 1, 1) for k, n in zip(self.target.stride, self.target.shape, strict=True)]
        for number in range(REPAIRS):
            bad = _smallest_determinant(self.grid + field, steps) < LEAST_VOLUME
            if not bool(bad.any()):
                break
            near = [_gaussian(n, 1.0 + number // 4, field) for n in field.shape[2:]]
            share = (10 * multiply_axes(bad.to(field), near)).clamp(max=1)
            inside = multiply_axes(torch.ones_like(field[:1, :1]), near)
            field = torch.lerp(field, multiply_axes(field, near) / inside, share)
        return field


def _smallest_determinant(positions: Tensor, steps: Sequence[float]) -> Tensor:
    """The smallest determinant at each voxel, by differences to either neighbour along each axis: (B, 1, *shape)."""
    slopes = []
    for axis, step in enumerate(steps, start=2):
        slope = positions.diff(dim=axis) / step
        if slope.shape[axis] == 0:
            return torch.ones_like(positions[:, :1])
        ends = slope.narrow(axis, 0, 1), slope.narrow(axis, slope.shape[axis] - 1, 1)
        behind, ahead = torch.cat([ends[0], slope], dim=axis), torch.cat([slope, ends[1]], dim=axis)
        slopes.append((behind.movedim(1, -1), ahead.movedim(1, -1)))
    smallest = torch.full_like(positions[:, 0], math.inf)
    for columns in itertools.product(*slopes):
        smallest = torch.minimum(smallest, determinant(columns))
    return smallest[:, None]


def across(values: Sequence[float], like: Tensor) -> Tensor:
    """One value for each coordinate, (1, D, 1, …)."""
    return torch.tensor(values, dtype=like.dtype).to(like.device).reshape(1, -1, *(1,) * len(values))


def _warp(image: Tensor, positions: Tensor, target: _Picture) -> Tensor:
    points = target.sampled(positions, target, control=False)
    return interpolate(image, points.movedim(1, -1))


@dataclass(frozen=True, eq=False)
class _Dense:
    """Any similarity of two images."""

    source: Tensor
    target: _Picture
    measure: Similarity

    def __call__(self, positions: Tensor) -> Tensor:
        return self.measure(_warp(self.source, positions, self.target), self.target.image)


def _gaussian(side: int, sigma: float, like: Tensor) -> Tensor | None:
    """(side, side): a Gaussian of `sigma` voxels, truncated at 3σ, with zeros outside. None if it is very narrow."""
    if sigma < 0.25 or side == 1:
        return None
    offset = torch.arange(-side, side + 1, dtype=torch.float64)
    taps = torch.exp(-0.5 * (offset / sigma) ** 2) * (offset.abs() <= max(3 * sigma, 1))
    index = torch.arange(side)
    return (taps / taps.sum())[index[:, None] - index + side].to(like)


# ---- local correlation ----------------------------------------------------------------------------------------------


class _Windows:
    """Local correlation of two images (1, C, *shape), in Gaussian windows of `sigma` mm around every second voxel.

    Only blocks of the target with windows that are not constant are sampled: elsewhere the correlation is 0.
    """

    def __init__(self, source: Tensor, target: _Picture, sigma: float, squared: bool) -> None:
        self.source, self.target, self.squared = source, target, squared
        padding = [b * q - n for b, q, n in zip(target.blocks, target.block, target.shape, strict=True)]
        ends = [pad for n in reversed(padding) for pad in (0, n)]
        image = F.pad(target.image, ends, mode="replicate")
        self.pooled = [b * q // k for b, q, k in zip(target.blocks, target.block, target.stride, strict=True)]
        # A pair of voxels has a spread of its own, half a voxel, to which the Gaussian is added.
        sides = list(zip(self.pooled, target.stride, target.spacing, strict=True))
        widths = [math.sqrt(max(sigma**2 - (k > 1) * mm**2 / 4, 0)) / (k * mm) for _, k, mm in sides]
        self.blur = [_gaussian(n, width, image) for (n, _, _), width in zip(sides, widths, strict=True)]
        ones = image.new_ones(1, 1, *self.pooled)
        self.share = 1 / multiply_axes(ones * math.prod(target.stride), self.blur)
        moments = _pooled(torch.cat([image, image * image], dim=1), target.stride)
        self.mean, square = (multiply_axes(moments, self.blur) * self.share).chunk(2, dim=1)
        variance = (square - self.mean**2).clamp(min=0)
        self.scale = (variance + EPSILON).rsqrt()
        inside = ones if target.mask is None else F.pad((target.mask != 0).to(image), ends)
        inside = ones if target.mask is None else (_pooled(inside, target.stride) > 0).to(image)
        for axis, (n, k) in enumerate(zip(target.shape, target.stride, strict=True), start=2):
            inside = inside * (torch.arange(inside.shape[axis], device=image.device) < n / k).reshape(
                -1, *(1,) * (inside.dim() - 1 - axis)
            )
        if not bool(inside.any()):
            raise InputError("mask is empty for at least one item of the batch; expected at least one nonzero voxel")
        inside = inside / inside.sum() / image.shape[1]
        self.weights = torch.where(variance > FLAT, inside * variance / (variance + CONTRAST), 0.0)
        seen = multiply_axes((self.weights.amax(dim=1, keepdim=True) > 0).to(image), self.blur) > 0
        self.active = _split(seen, target.blocks).flatten(1).any(dim=1).nonzero()[:, 0]
        self.index = torch.stack(torch.unravel_index(self.active, target.blocks))
        self.images = _split(image, target.blocks)[self.active]

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
        target = self.target
        every = gradients.new_zeros(math.prod(target.blocks), *gradients.shape[1:])
        every.index_copy_(0, self.active, gradients)
        every = every.reshape(*target.blocks, *gradients.shape[1:])
        dim = len(target.blocks)
        every = every.movedim(dim, 0)  # (D, *blocks, *sides)
        for axis in range(1, dim + 1):  # merge the blocks along each axis: (D, …, blocks, …, side, …)
            every = _overlap(every, axis, dim + axis - (axis - 1), target.stride[axis - 1])
        return every[None]


def _overlap(values: Tensor, axis: int, side_axis: int, stride: int) -> Tensor:
    """Join the blocks of an axis; with a stride of 2 the last voxel of each is the first of the next."""
    values = values.movedim(side_axis, axis + 1)  # (…, blocks, side, …)
    if stride == 1:
        return values.flatten(axis, axis + 1)
    main, last = values.narrow(axis + 1, 0, values.shape[axis + 1] - 1), values.select(axis + 1, -1)
    count, side = main.shape[axis : axis + 2]
    out = values.new_zeros(*values.shape[:axis], count * side + 1, *values.shape[axis + 2 :])
    out.narrow(axis, 0, count * side).copy_(main.flatten(axis, axis + 1))
    _every(out, axis, side, side).add_(last)
    return out


class _Moments(torch.autograd.Function):
    """a, a², a·b of a warped image and the target, pooled: (1, 3 C, *pooled)."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, windows: _Windows) -> Tensor:
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
            by = _spread(by_moments[chunk], windows.target.stride, a.shape[2:])
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
    out = values.new_zeros(*values.shape[:axis], side + 1, *values.shape[axis + 1 :])
    torch.add(even, odd, out=out.narrow(axis, 0, side))
    out.narrow(axis, 1, side).add_(odd)
    return out


def _pooled(values: Tensor, stride: Sequence[int]) -> Tensor:
    """Sums of pairs of voxels along the axes with a 2."""
    for axis, k in enumerate(stride, start=2):
        if k == 2:
            values = _every(values, axis, 0, 2) + _every(values, axis, 1, 2)
    return values


def _spread(values: Tensor, stride: Sequence[int], shape: Sequence[int]) -> Tensor:
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
