"""The paper's instance optimisation: a few more training steps on one pair, with a copy of the network."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.errors import InputError, NotFiniteError
from carlreg.fast.precision import Precision, mixed_precision
from carlreg.geometry.grids import interpolate
from carlreg.geometry.transforms import Transform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.objective.fields import SAME, Callback, Optimized
from carlreg.objective.losses import Loss, Similarity, registration_loss

logger = logging.getLogger(__name__)

WEIGHT_STEPS = 50
"""Default steps over the weights."""

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
) -> Optimized:
    """Take `steps` of the optimizer on the loss of `iterate`, and keep the best iterate."""
    losses: list[dict[str, float]] = []
    best: tuple[int, Transform, Transform] | None = None
    stopped = None
    for step in range(steps + 1):
        transform, inverse, loss = iterate()
        values = loss.floats()
        if not math.isfinite(values["total"]):
            stopped = f"the loss became {values['total']} at step {step}"
            if best is None:
                raise NotFiniteError(f"{stopped}: the transform that the optimisation starts from is not finite")
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
