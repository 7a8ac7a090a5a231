"""Instance optimisation: a few more training steps on the one pair at hand, on a copy of the network."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.losses import Loss, Similarity, registration_loss
from carlreg.precision import Precision, mixed_precision
from carlreg.registration import RegistrationAlgorithm
from carlreg.transforms import Transform

logger = logging.getLogger(__name__)


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
    steps: int = 50,
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
