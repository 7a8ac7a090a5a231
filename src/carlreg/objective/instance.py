"""Instance optimisation: a few more steps on the one pair at hand.

`instance_optimize` is the paper's: training steps on a copy of the network. `optimize_fields` starts from the network's
answer and moves the two displacement fields themselves, with the same loss: many times cheaper, for computers without
a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.fast.precision import Precision, mixed_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import Grid, Interpolation, interpolate, voxel_size
from carlreg.geometry.transforms import DisplacementField, Transform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.objective.losses import Loss, Similarity, as_field, folds, gaussian_blur, lncc, lncc2, registration_loss

logger = logging.getLogger(__name__)

WEIGHT_STEPS, FIELD_STEPS = 50, 20
"""Of instance optimisation, where none are asked for; of the fields, on the finest grid."""
FIELD_WEIGHT = 0.75
"""Of GradICON where fields are optimised."""
LEVELS = 3
"""Grids that fields are optimised on."""
COARSE = 3
"""Steps on each of the coarser ones, to one on the finest."""


@dataclass(frozen=True)
class Optimized:
    """The best pair of transforms seen, and how the loss went."""

    transform: Transform
    """Φ[moving, fixed]."""
    inverse: Transform
    """Φ[fixed, moving], the network's own backward map."""
    losses: list[dict[str, float]]
    """total, similarity and regularity before each step and after the last."""
    best: int
    """Which entry of `losses` belongs to the transforms."""
    stopped: str | None = None
    """Why it ended early, if it did."""


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
    callback: Callable[[int, Loss], None] | None = None,
) -> Optimized:
    """Minimise the GradICON loss of one pair over the weights, with Adam and BatchNorm in evaluation mode.

    `model` itself is not touched. Returns the iterate with the lowest loss, the network's first answer among them.
    `callback(step, loss)` is called `steps` + 1 times. A loss that is not finite ends the run with the best so far.
    `precision` is that of the convolutions: "auto" is bfloat16 on a GPU that has it, float32 elsewhere.

    >>> result = instance_optimize(model, moving, fixed)
    >>> warped = warp(moving, result.transform, like=fixed)
    """
    if steps < 0:
        raise ValueError(f"steps is {steps}; expected 0 or more")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no weights to optimise; expected a network")
    with torch.inference_mode(False), torch.enable_grad():
        moving, fixed = (image.clone() if image.is_inference() else image for image in (moving, fixed))
        tuned = copy.deepcopy(model).eval().requires_grad_(True)
        optimizer = torch.optim.Adam(tuned.parameters(), lr=learning_rate, fused=moving.is_cuda)
        generator = torch.Generator(device=moving.device).manual_seed(seed)
        losses: list[dict[str, float]] = []
        best: tuple[int, Transform, Transform] | None = None
        stopped = None
        for step in range(steps + 1):
            with mixed_precision(moving.device, precision):
                transform, inverse = tuned.both(moving, fixed)
            loss = registration_loss(
                transform,
                inverse,
                moving,
                fixed,
                similarity=similarity,
                weight=weight,
                moving_mask=moving_mask,
                fixed_mask=fixed_mask,
                generator=generator,
            )
            values = loss.floats()
            if not math.isfinite(values["total"]):
                stopped = f"the loss became {values['total']} at step {step}"
                if best is None:
                    raise FloatingPointError(f"{stopped}: the model's own answer for this pair is not finite")
                logger.warning("instance optimisation stopped: %s; keeping the best step before it", stopped)
                break
            losses.append(values)
            if best is None or values["total"] < losses[best[0]]["total"]:
                best = step, transform.detach(), inverse.detach()
            if callback is not None:
                callback(step, loss)
            if step < steps:
                optimizer.zero_grad(set_to_none=True)
                loss.total.backward()
                optimizer.step()
        assert best is not None  # the first iterate either set it or raised
        return Optimized(best[1], best[2], losses, best[0], stopped)


def steps_in_all(steps: int, levels: int = LEVELS) -> int:
    """Of `optimize_fields`, over all levels."""
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
    callback: Callable[[int, Loss], None] | None = None,
) -> Optimized:
    """Minimise the GradICON loss of one pair over its two displacement fields, from a network's answer.

    A field is free to fold where a network is not, so what folds is penalised on top, `fold_weight` times `folds`. And
    it can follow finer detail than a network: "lncc" and "lncc2" correlate over Gaussian windows with a standard
    deviation of `window` voxels, 4 in training. `weight` is that of GradICON.
    There are `steps` on the finest of the `levels`, the images' own grid, and first three times as many on each of the
    coarser ones, with half as many voxels a side, a quarter, and so on, where they cost little. Changes of the fields
    are smoothed by a Gaussian of `smoothing` voxels, and Adam moves them by about `learning_rate` voxels a step.
    Returns the best iterate on the finest grid; `losses` are of that grid.
    `callback(step, loss)` sees every step of every level.

    >>> result = optimize_fields(*model.both(moving, fixed), moving, fixed)
    """
    if steps < 0 or levels < 1:
        raise ValueError(f"steps is {steps} and levels {levels}; expected 0 or more, and 1 or more")
    check_pair(moving, fixed)
    check_finite(moving, "moving")
    check_finite(fixed, "fixed")
    with torch.inference_mode(False), torch.enable_grad():
        moving, fixed = (image.clone() if image.is_inference() else image for image in (moving, fixed))
        generator = torch.Generator(device=moving.device).manual_seed(seed)
        if similarity in ("lncc", "lncc2"):
            similarity = functools.partial(lncc if similarity == "lncc" else lncc2, sigma=window)
        given = [
            as_field(t.detach().on_grid_of(image), t, image) for t, image in ((transform, fixed), (inverse, moving))
        ]
        fields = [
            field.displacement.expand(len(image), *field.displacement.shape[1:]).clone()
            for field, image in zip(given, (fixed, moving), strict=True)
        ]
        losses: list[dict[str, float]] = []
        best: tuple[int, DisplacementField, DisplacementField] | None = None
        done, stopped = 0, None
        for level in reversed(range(levels)):
            images = [_shrink(image, 2**level) for image in (moving, fixed)]
            masks = [
                None if mask is None else _resample((mask != 0).to(image.dtype), image.shape[2:], "nearest")
                for mask, image in zip((moving_mask, fixed_mask), images, strict=True)
            ]
            start = [_resample(field, image.shape[2:]) for field, image in zip(fields, images[::-1], strict=True)]
            changes = [torch.zeros_like(field, requires_grad=True) for field in start]
            optimizer = torch.optim.Adam(changes, lr=learning_rate)
            losses, best = [], None
            last = done + (COARSE * steps if level else steps)
            while True:
                current = [
                    field + _voxel(field) * gaussian_blur(change, smoothing)
                    for field, change in zip(start, changes, strict=True)
                ]
                phi, back = (DisplacementField(f, like.extrapolate) for f, like in zip(current, given, strict=True))
                loss = registration_loss(
                    phi,
                    back,
                    *images,
                    similarity=similarity,
                    weight=weight,
                    moving_mask=masks[0],
                    fixed_mask=masks[1],
                    generator=generator,
                )
                if fold_weight:
                    folded = folds(current[0]) + folds(current[1])
                    loss = dataclasses.replace(loss, total=loss.total + fold_weight * folded)
                values = loss.floats()
                if not math.isfinite(values["total"]):
                    stopped = f"the loss became {values['total']} at step {done}"
                    if best is None:
                        raise FloatingPointError(f"{stopped}: the answer given for this pair is not finite")
                    logger.warning("optimisation of the fields stopped: %s; keeping the best step before it", stopped)
                    break
                losses.append(values)
                if best is None or values["total"] < losses[best[0]]["total"]:
                    best = len(losses) - 1, phi.detach(), back.detach()
                if callback is not None:
                    callback(done, loss)
                if done == last:
                    break
                optimizer.zero_grad(set_to_none=True)
                loss.total.backward()
                optimizer.step()
                done += 1
            assert best is not None  # the first iterate either set it or raised
            moves = [field.displacement - before for field, before in zip(best[1:], start, strict=True)]
            fields = [field + _resample(move, field.shape[2:]) for field, move in zip(fields, moves, strict=True)]
        assert best is not None
        return Optimized(best[1], best[2], losses, best[0], stopped)


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
