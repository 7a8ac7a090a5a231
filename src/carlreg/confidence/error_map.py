"""The map of expected errors: local evidence, scaled to the expected error of the whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from carlreg.confidence.calibration import Calibration
from carlreg.confidence.evidence import foreground
from carlreg.confidence.gather import Gathered
from carlreg.confidence.numbers import LEAST, SHARES, split_name
from carlreg.files.images import Image
from carlreg.geometry.grids import Grid
from carlreg.geometry.resizing import resize
from carlreg.objective.losses import gaussian_blur
from carlreg.preparation import Prepared

LARGEST = 20.0
"""No point is expected to be off by more than this many times the mean."""


def smooth(maps: Tensor, window: float) -> Tensor:
    """Maps (N, *shape) averaged over Gaussian windows whose deviation is this fraction of their longest side, since
    errors vary smoothly."""
    sigma = max(window * max(maps.shape[1:]), 0.5)
    inside = gaussian_blur(torch.ones_like(maps[:1, None], dtype=torch.float32), sigma)
    return (gaussian_blur(maps[:, None].float(), sigma) / inside)[:, 0]


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
        window, plain = split_name(name)
        source = gathered.local.get(SHARES.get(plain, plain))
        if source is None or not weight:
            continue
        source = smooth(source[None], window)[0] if window else source
        values = resize(source[None, None].float(), shape)[0, 0]
        values = 1 - values if plain in SHARES else (values / gathered.evidence.extent_mm).clamp(min=LEAST).log()
        logarithm += weight * values / scale
    inside = foreground(resize(fixed.tensor, shape))
    error = (logarithm - logarithm[inside].mean()).exp()
    error = (error / error[inside].mean()).clamp(max=LARGEST) * expected_mm
    to_world = fixed.image.unit_to_world() @ np.diag([*Grid.of(shape).spacing, 1.0])
    return Image(error.cpu().numpy().astype(np.float32), to_world, "expected error, mm")
