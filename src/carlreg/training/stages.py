"""Stages of training, and the schedules of the paper. Importing this module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carlreg.objective.losses import Regularity


@dataclass(frozen=True)
class Stage:
    """A number of training steps with one loss."""

    steps: int
    regularity: Regularity = "gradicon"
    weight: float = 1.5
    """λ, the weight of the regulariser."""
    learning_rate: float = 1e-4
    final_learning_rate: float | None = None
    """Learning rate at the end of a half-cosine decay; by default the rate is constant."""
    warm_up: int = 0
    """Steps over which the learning rate rises from zero: for a fresh optimiser on a trained network."""
    similarity: str = "lncc"
    window: float | None = None
    """Standard deviation of the Gaussian windows of lncc and lncc2, in voxels; by default the paper's 4."""
    label_weight: float = 0.0
    """Weight of the label overlap; labels must then be drawn with the images. The paper trains without labels."""
    refine: bool = False
    """Append a refinement before the first step; its last convolution starts at zero."""
    rotate: bool = False
    """Train through `Augmented`, R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹, with R and Q drawn from SO(D) at each step. The saved model
    is Φ."""
    first_step_alone: bool = False
    """Train only Ξθ, the part before the refinements, and leave the refinements unchanged."""

    passes: int = 1
    """How often the network is applied in a step, each time to the images as aligned so far: TwoStep{Φ, Φ} for 2. The
    saved model is Φ."""
    once_above: int | None = None
    """Images with more voxels than this are passed once."""

    def rate(self, step: int) -> float:
        """The learning rate at a step of this stage."""
        rate = self.learning_rate
        if self.final_learning_rate is not None:
            half_cosine = 0.5 * (1 + math.cos(math.pi * step / max(self.steps, 1)))
            rate = self.final_learning_rate + (rate - self.final_learning_rate) * half_cosine
        return rate * min(1.0, (step + 1) / (self.warm_up + 1))


PAPER = (Stage(1_500, "diffusion"), Stage(50_000), Stage(50_000, refine=True))
"""The paper's schedule, for a network with two refinements."""
PAPER_ROT = (
    Stage(4_500, "diffusion", 10.5, rotate=True, first_step_alone=True),
    Stage(50_000, rotate=True),
    Stage(50_000, rotate=True, refine=True),
)
"""The same for CARL{ROT}. Training Ξθ alone first, and the weight of that stage, are from the authors' code."""
