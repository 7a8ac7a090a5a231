"""Instance optimisation: a few more steps on one pair.

`instance_optimize` is the paper's: training steps on a copy of the network. `optimize_fields` starts from the network's
result and optimises the two displacement fields themselves, with the same loss: many times cheaper, for computers
without a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from carlreg.errors import InputError, NotFiniteError
from carlreg.fast.precision import Precision, mixed_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import Grid, Interpolation, interpolate, voxel_size
from carlreg.geometry.transforms import DisplacementField, Transform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.objective.losses import Loss, Similarity, as_field, folds, gaussian_blur, lncc, lncc2, registration_loss

logger = logging.getLogger(__name__)

WEIGHT_STEPS, FIELD_STEPS = 50, 20
"""Default steps over the weights, and over the fields on the finest grid."""
FIELD_WEIGHT = 0.75
"""Default weight of GradICON when fields are optimised."""
LEVELS = 3
"""Grids on which fields are optimised."""
COARSE = 3
"""Steps on each coarser grid for one on the finest."""
SAME = 1e-3
"""Images that differ by no more than this fraction of their intensity range match perfectly."""

Callback = Callable[[int, Loss], None]
Iterate = tuple[Transform, Transform, Loss]
"""Φ[moving, fixed], Φ[fixed, moving] and their loss."""


@dataclass(frozen=True, eq=False)
class Objective:
    """What is minimised for one pair: similarity both ways, inside the masks, plus `weight` times GradICON."""

    similarity: str | Similarity = "lncc"
    weight: float = 1.5
    moving_mask: Tensor | None = None
    fixed_mask: Tensor | None = None

    def __call__(
        self, transform: Transform, inverse: Transform, moving: Tensor, fixed: Tensor, generator: torch.Generator
    ) -> Loss:
        return registration_loss(transform, inverse, moving, fixed, generator=generator, **vars(self))


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


def instance_optimize(
    model: RegistrationAlgorithm,
    moving: Tensor,
    fixed: Tensor,
    *,
    steps: int = WEIGHT_STEPS,
    learning_rate: float = 2e-5,
    similarity: str | Similarity = "lncc",
    weight: float = 1.5,
    moving_mask: Tensor | None = None,
    fixed_mask: Tensor | None = None,
    seed: int = 0,
    precision: Precision = "auto",
    callback: Callback | None = None,
) -> Optimized:
    """Minimise the GradICON loss of one pair over the weights, with Adam and BatchNorm in evaluation mode.

    `model` itself is not changed. Returns the iterate with the lowest loss, which may be the network's own result.
    `callback(step, loss)` is called `steps` + 1 times. A loss that is not finite ends the run with the best iterate so
    far. `precision` is that of the convolutions: "auto" is bfloat16 on a GPU that supports it, float32 elsewhere.

    >>> result = instance_optimize(model, moving, fixed)
    >>> warped = warp(moving, result.transform, like=fixed)
    """
    if steps < 0:
        raise InputError(f"steps is {steps}; expected 0 or more")
    if next(model.parameters(), None) is None:
        raise InputError(f"{type(model).__name__} has no weights to optimise; expected a network")
    objective = Objective(similarity, weight, moving_mask, fixed_mask)
    with torch.inference_mode(False), torch.enable_grad():
        moving, fixed = (image.clone() if image.is_inference() else image for image in (moving, fixed))
        tuned = copy.deepcopy(model).eval().requires_grad_(True)
        optimizer = torch.optim.Adam(tuned.parameters(), lr=learning_rate, fused=moving.is_cuda)
        generator = torch.Generator(device=moving.device).manual_seed(seed)

        def iterate() -> Iterate:
            with mixed_precision(moving.device, precision):
                transform, inverse = tuned.both(moving, fixed)
            return transform, inverse, objective(transform, inverse, moving, fixed, generator)

        return _descend(iterate, optimizer, steps, callback)


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
    window: float = 1.5,
    weight: float = FIELD_WEIGHT,
    fold_weight: float = 20.0,
    moving_mask: Tensor | None = None,
    fixed_mask: Tensor | None = None,
    seed: int = 0,
    callback: Callback | None = None,
) -> Optimized:
    """Minimise the GradICON loss of one pair over its two displacement fields, from a network's result.

    A field can fold more easily than a network's output, so `fold_weight` times `folds` is added. A field can also
    follow finer detail: "lncc" and "lncc2" correlate over Gaussian windows with a standard deviation of `window`
    voxels, 4 in training. `weight` is that of GradICON.

    There are `steps` on the finest of the `levels`, the images' own grid, preceded by three times as many on each of
    the coarser ones, with half as many voxels a side, a quarter, and so on, where they cost little. Updates are
    smoothed by a Gaussian of `smoothing` voxels, and Adam changes the fields by about `learning_rate` voxels a step.

    Returns the best iterate on the finest grid; `losses` are those of that grid. What the coarser grids gained is
    dropped if the start has the lower loss there, and images that already match perfectly stay as they are.
    `callback(step, loss)` is called at every step of every level.

    >>> result = optimize_fields(*model.both(moving, fixed), moving, fixed)
    """
    if steps < 0 or levels < 1:
        raise InputError(f"steps is {steps} and levels {levels}; expected 0 or more, and 1 or more")
    check_pair(moving, fixed)
    check_finite(moving, "moving")
    check_finite(fixed, "fixed")
    if similarity in ("lncc", "lncc2"):
        similarity = functools.partial(lncc if similarity == "lncc" else lncc2, sigma=window)
    objective = Objective(similarity, weight, moving_mask, fixed_mask)
    with torch.inference_mode(False), torch.enable_grad():
        moving, fixed = (image.clone() if image.is_inference() else image for image in (moving, fixed))
        if match_perfectly(transform, inverse, moving, fixed):
            steps, levels = 0, 1
        pair = ((transform, fixed), (inverse, moving))
        given = [as_field(phi.detach().on_grid_of(image), phi, image) for phi, image in pair]
        start = fields = [phi.displacement.expand(len(fixed), *phi.displacement.shape[1:]).clone() for phi in given]
        generator = torch.Generator(device=moving.device).manual_seed(seed)
        finest = _Level(moving, fixed, objective, fold_weight, given, learning_rate, smoothing, generator, callback)
        done = 0
        for level in reversed(range(1, levels)):
            coarse = finest.shrink(2**level)
            found = coarse.descend(fields, COARSE * steps, done)
            fields = coarse.add_moves(fields, found)
            done += len(found.losses) - 1
        if done and finest.total(start) <= finest.total(fields):
            fields = start
        return finest.descend(fields, steps, done)


def match_perfectly(transform: Transform, inverse: Transform, moving: Tensor, fixed: Tensor) -> bool:
    """Whether each image, warped, is the other at every voxel, so that a lower loss would mean nothing."""

    def same(image: Tensor, phi: Transform, other: Tensor) -> bool:
        difference = (interpolate(image, phi.on_grid_of(other)) - other).abs().amax()
        return bool(difference <= SAME * (other.amax() - other.amin()))

    return same(moving, transform, fixed) and same(fixed, inverse, moving)


def _descend(
    iterate: Callable[[], Iterate],
    optimizer: torch.optim.Optimizer,
    steps: int,
    callback: Callback | None,
    first: int = 0,
) -> Optimized:
    """Take `steps` of the optimizer, numbered from `first`, on the loss of `iterate`, and keep the best iterate."""
    losses: list[dict[str, float]] = []
    best: tuple[int, Transform, Transform] | None = None
    stopped = None
    for step in range(steps + 1):
        transform, inverse, loss = iterate()
        values = loss.floats()
        if not math.isfinite(values["total"]):
            stopped = f"the loss became {values['total']} at step {first + step}"
            if best is None:
                raise NotFiniteError(f"{stopped}: the transform that the optimisation starts from is not finite")
            logger.warning("instance optimisation stopped: %s; keeping the best step before it", stopped)
            break
        losses.append(values)
        if best is None or values["total"] < losses[best[0]]["total"]:
            best = step, transform.detach(), inverse.detach()
        if callback is not None:
            callback(first + step, loss)
        if step < steps:
            optimizer.zero_grad(set_to_none=True)
            loss.total.backward()
            optimizer.step()
    assert best is not None  # the first iterate either set it or raised
    return Optimized(best[1], best[2], losses, best[0], stopped)


@dataclass(frozen=True, eq=False)
class _Level:
    """Two images on one grid, and the descent of the fields between them: of the map on the grid of the fixed image,
    and of the inverse on that of the moving image."""

    moving: Tensor
    fixed: Tensor
    objective: Objective
    fold_weight: float
    like: Sequence[DisplacementField]
    """Fields that are extrapolated in the same way."""
    learning_rate: float
    smoothing: float
    generator: torch.Generator
    callback: Callback | None

    def shrink(self, factor: int) -> _Level:
        """The same on grids with `factor` times fewer voxels a side."""
        moving, fixed = (_shrink(image, factor) for image in (self.moving, self.fixed))
        masks = (self.objective.moving_mask, moving), (self.objective.fixed_mask, fixed)
        small = [
            None if mask is None else _resample((mask != 0).to(image), image.shape[2:], "nearest")
            for mask, image in masks
        ]
        objective = dataclasses.replace(self.objective, moving_mask=small[0], fixed_mask=small[1])
        return dataclasses.replace(self, moving=moving, fixed=fixed, objective=objective)

    def loss(self, fields: Sequence[Tensor], generator: torch.Generator) -> Iterate:
        phi, back = (DisplacementField(f, like.extrapolate) for f, like in zip(fields, self.like, strict=True))
        loss = self.objective(phi, back, self.moving, self.fixed, generator)
        if self.fold_weight:
            folded = folds(fields[0]) + folds(fields[1])
            loss = dataclasses.replace(loss, total=loss.total + self.fold_weight * folded)
        return phi, back, loss

    @torch.no_grad()
    def total(self, fields: Sequence[Tensor]) -> float:
        """The loss, with the same random numbers every time."""
        return float(self.loss(fields, torch.Generator(self.fixed.device).manual_seed(0))[2].total)

    def descend(self, fields: Sequence[Tensor], steps: int, first: int) -> Optimized:
        start = self._resampled(fields)
        changes = [torch.zeros_like(field, requires_grad=True) for field in start]

        def iterate() -> Iterate:
            smooth = (_voxel(change) * gaussian_blur(change, self.smoothing) for change in changes)
            return self.loss([field + move for field, move in zip(start, smooth, strict=True)], self.generator)

        optimizer = torch.optim.Adam(changes, lr=self.learning_rate)
        return _descend(iterate, optimizer, steps, self.callback, first)

    def add_moves(self, fields: Sequence[Tensor], found: Optimized) -> list[Tensor]:
        """Fields on their own grid, changed by what the descent changed on this one."""
        after = (cast(DisplacementField, phi).displacement for phi in (found.transform, found.inverse))
        moves = (new - old for new, old in zip(after, self._resampled(fields), strict=True))
        return [field + _resample(move, field.shape[2:]) for field, move in zip(fields, moves, strict=True)]

    def _resampled(self, fields: Sequence[Tensor]) -> list[Tensor]:
        return [
            _resample(field, image.shape[2:]) for field, image in zip(fields, (self.fixed, self.moving), strict=True)
        ]


def _shrink(image: Tensor, factor: int) -> Tensor:
    """The image on a grid over the same unit cube with `factor` times fewer voxels a side, but no fewer than 8."""
    shape = [min(n, max(n // factor, 8)) for n in image.shape[2:]]
    return image if factor == 1 else _resample(gaussian_blur(image, factor / 2), shape)


def _resample(image: Tensor, shape: Sequence[int], mode: Interpolation = "linear") -> Tensor:
    if tuple(image.shape[2:]) == tuple(shape):
        return image
    return interpolate(image, Grid.of(shape).points(image.dtype, image.device)[None], mode=mode)


def _voxel(field: Tensor) -> Tensor:
    """One voxel of the field's grid in unit coordinates, (1, D, 1, …)."""
    return voxel_size(field.shape[2:], field).reshape(1, -1, *(1,) * (field.dim() - 2))
