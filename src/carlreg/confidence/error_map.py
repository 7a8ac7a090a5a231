"""The map of expected errors: local evidence, scaled to the expected error of the whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from carlreg.confidence.calibration import Calibration
from carlreg.confidence.evidence import foreground
from carlreg.confidence.gather import Gathered
from carlreg.confidence.numbers import LEAST, SMOOTH
from carlreg.files.images import Image
from carlreg.geometry.grids import Grid
from carlreg.geometry.resizing import resize
from carlreg.objective.losses import gaussian_blur
from carlreg.preparation import Prepared

WINDOW = 0.03
"""The deviation of windows over which smooth evidence is averaged, as a fraction of the longest side."""
LARGEST = 20.0
"""No point is expected to be off by more than this many times the mean."""


def smooth(values: Tensor) -> Tensor:
    """A map (*shape) averaged over Gaussian windows, since errors vary smoothly."""
    sigma = WINDOW * max(values.shape)
    one = torch.ones_like(values, dtype=torch.float32)
    blurred, inside = (gaussian_blur(each[None, None], sigma)[0, 0] for each in (values.float(), one))
    return blurred / inside


def error_map(
    gathered: Gathered, calibration: Calibration | None, expected_mm: float | None, fixed: Prepared
) -> Image | None:
    """The expected error in mm at the voxels that the network sees of the fixed image; None without a calibration of
    local evidence. Its mean over the foreground is the expected error of the registration.

    Evidence that was not computed is left out, as if it were the same everywhere.
    """
    model = None if calibration is None else calibration.local
    if model is None or expected_mm is None or not gathered.local:
        return None
    shape = tuple(gathered.local["disagreement"].shape)
    logarithm = torch.zeros(shape, device=fixed.tensor.device)
    for name, scale, weight in zip(model.names, model.scale, model.weights, strict=True):
        plain = name.removeprefix(SMOOTH)
        source = gathered.local.get("similarity" if plain == "dissimilarity" else plain)
        if source is None or not weight:
            continue
        source = smooth(source) if name.startswith(SMOOTH) else source
        values = resize(source[None, None].float(), shape)[0, 0]
        if plain == "dissimilarity":
            values = 1 - values
        else:
            values = (values / gathered.evidence.extent_mm).clamp(min=LEAST).log()
        logarithm += weight * values / scale
    inside = foreground(resize(fixed.tensor, shape))
    error = (logarithm - logarithm[inside].mean()).exp()
    error = (error / error[inside].mean()).clamp(max=LARGEST) * expected_mm
    to_world = fixed.image.unit_to_world() @ np.diag([*Grid.of(shape).spacing, 1.0])
    return Image(error.cpu().numpy().astype(np.float32), to_world, "expected error, mm")
