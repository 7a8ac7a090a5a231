"""Which similarity to optimise: decided from the images, once the network has aligned them roughly.

Squared local correlation (lncc2) does not mind inverted contrast. On scans of the same contrast it is as good as local
correlation (lncc), or nearly so; on others it is far better. So it is taken unless the contrasts clearly agree. Where
they differ, the images are a weaker guide, and the map is kept more regular.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from carlreg.geometry.grids import interpolate
from carlreg.geometry.transforms import Identity, Transform
from carlreg.objective.losses import gaussian_blur, local_correlation
from carlreg.preparation import FOREGROUND, PreparedPair
from carlreg.registration.options import RegisterOptions

WINDOW = 2.0
"""Standard deviation in voxels of the windows in which intensities are compared."""
AGREEMENT = 0.7
"""From this agreement on, two images have the same contrast."""
REGULARITY = 3.0
"""Default weight of the regulariser for images of different contrast."""


@torch.no_grad()
def agreement(warped: Tensor, fixed: Tensor) -> float:
    """Mean over root mean square of the local correlations: near 1 if what is brighter in one image is brighter in the
    other everywhere, near −1 if it is darker, about 0 if the contrasts have little in common; NaN without any overlap.

    Only windows inside both bodies count, since a body differs from the background in every contrast.
    """
    inside = gaussian_blur(((warped > FOREGROUND) & (fixed > FOREGROUND)).to(fixed), WINDOW) > 0.95
    correlation = local_correlation(warped, fixed, WINDOW)[inside]
    return float(correlation.mean() / correlation.square().mean().sqrt().clamp(min=1e-6))


@torch.no_grad()
def mismatch(
    moving: Tensor, fixed: Tensor, phi: Transform, *, squared: bool = False, mask: Tensor | None = None
) -> tuple[float, float]:
    """How badly two images match before and after the map Φ, where they do not match before: from 0 to 2. A mask of the
    fixed image restricts the places.

    One minus the local correlation, or its square where contrasts differ, is averaged with itself before the map, at
    most 1, as the weight. A body that holds still around a beating heart does not count, though it fills most of the
    image. Nor does a wrong map gain from such a choice of places: what it moves together is uncorrelated, and 1 is the
    most that a place can count.
    """
    warped = (interpolate(moving, one.on_grid_of(fixed)) for one in (Identity(), phi))
    before, after = (local_correlation(image, fixed, WINDOW) for image in warped)
    before, after = (1 - (one.square() if squared else one) for one in (before, after))
    weight = before.clamp(0, 1) * (fixed > FOREGROUND if mask is None else mask)
    total = weight.sum().clamp(min=1e-6)
    return float((weight * before).sum() / total), float((weight * after).sum() / total)


def with_similarity(options: RegisterOptions, phi: Transform, pair: PreparedPair) -> tuple[RegisterOptions, str | None]:
    """The options with a similarity in place of "auto", chosen by the map Φ[moving, fixed], and the reason."""
    if options.io_sim != "auto":
        return options, None
    fixed = pair.fixed.tensor
    found = agreement(interpolate(pair.moving.tensor, phi.on_grid_of(fixed)), fixed)
    if found >= AGREEMENT:
        return replace(options, io_sim="lncc"), f"the contrasts agree (agreement {found:.2f}, limit {AGREEMENT})"
    weight = REGULARITY if options.regularity is None else options.regularity
    reason = f"the contrasts differ (agreement {found:.2f}, limit {AGREEMENT})"
    reason = "the images hardly overlap" if math.isnan(found) else reason
    return replace(options, io_sim="lncc2", regularity=weight), reason
