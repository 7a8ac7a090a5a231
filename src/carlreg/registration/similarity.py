"""What an optimisation compares, and how: decided from the images, once the network has aligned them roughly.

If the contrasts of two scans agree, it is their local correlation (lncc). If they differ, that would drive them apart,
and its square (lncc2), which does not mind an inverted contrast, is little better: it matches any edge with any other.
So one scan is first recoloured: each of its intensities becomes the mean of the other scan's intensities where the
network's map has put it, as in the correlation ratio (Roche et al., MICCAI 1998), and its result may bend less, since
tissues that look alike in one scan have no edge between them. The better the map, the truer the colours, so they are
taken again from maps that are optimised on coarser grids. Where the scans stay unlike all the same, as CT and MR
do, also where their contrasts seem to agree, their intensities are no guide, and the network's result is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.geometry.grids import interpolate
from carlreg.geometry.transforms import Identity, Transform
from carlreg.objective.losses import gaussian_blur, local_correlation
from carlreg.preparation import FOREGROUND, Prepared, PreparedPair
from carlreg.registration.options import RegisterOptions

WINDOW = 2.0
"""Standard deviation in voxels of the windows in which intensities are compared."""
EPSILON = 1e-5
"""Added to local variances, of intensities from 0 to 1."""
AGREEMENT = 0.7
"""Two images of the same contrast agree at least as much as this,"""
GAINED = 0.03
"""and recolouring one raises their mean local correlation by this at most."""
REGULARITY, STIFFNESS = 3.0, 1.0
"""Weight of the regulariser, and price on the bending of changes, for images of different contrast or preparation, one
stripped and the other not: where two tissues look alike in one of them, only the network knows where they end."""
ALIKE = 0.55
"""The loss of both directions, 2 minus their mean local correlations, that images have to reach."""
BINS = 64
"""Intensities from 0 to 1 that a curve of colours distinguishes."""


Which = Literal["moving", "fixed"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """What an optimisation compares, and how."""

    options: RegisterOptions
    """With a similarity in place of "auto"."""
    pair: PreparedPair
    """Perhaps with one image recoloured."""
    why: str | None = None
    """Why this similarity was chosen, if the user did not choose it."""
    which: Which | None = None
    """The image that was recoloured."""
    stripped: bool = False
    """Whether only one of the scans shows what lies around the anatomy."""

    @property
    def is_uncertain(self) -> bool:
        """Whether intensities are no sure guide, so that the result should stay near the network's."""
        return self.differs or self.stripped

    @property
    def differs(self) -> bool:
        """Whether the contrasts of the scans as they are were found to differ."""
        return self.which is not None or self.options.io_sim == "lncc2"

    @property
    def enough(self) -> float:
        """The loss of similarity that has to be reached for the result to count, if the user did not choose it."""
        return ALIKE if self.why is not None and self.options.io_sim == "lncc" else math.inf

    @property
    def reason(self) -> str | None:
        """What was decided, and why."""
        return self.why if self.which is None else f"{self.why}: the {self.which} image was recoloured"

    def recoloured_at(self, phi: Transform, pair: PreparedPair) -> Comparison:
        """The same, with new colours for an image of the original pair: a better map gives better ones."""
        alike = recoloured(_laid(phi, pair))
        return replace(self, pair=alike.of(pair), which=alike.which)


@torch.no_grad()
def agreement(warped: Tensor, fixed: Tensor, mask: Tensor | None = None) -> float:
    """Mean over root mean square of the local correlations: near 1 if what is brighter in one image is brighter in the
    other everywhere, near −1 if it is darker, about 0 if the contrasts have little in common; NaN without any overlap.
    """
    return _agreement(_correlations(warped, fixed, mask))


def _agreement(correlations: Tensor) -> float:
    return float(correlations.mean() / correlations.square().mean().sqrt().clamp(min=1e-6))


def _correlations(warped: Tensor, fixed: Tensor, mask: Tensor | None) -> Tensor:
    """Only those in windows inside both bodies, since a body differs from the background in every contrast. Windows end
    where the images and the mask do: across few slices, none would be complete."""
    bodies = (warped > FOREGROUND) & (fixed > FOREGROUND)
    parts = [torch.ones_like(fixed), bodies.to(fixed), warped, fixed, warped**2, fixed**2, warped * fixed]
    counted = torch.cat(parts, dim=1) if mask is None else torch.cat(parts, dim=1) * mask
    whole, filled, *moments = gaussian_blur(counted, WINDOW).split(1, dim=1)
    inside = (filled > 0.95 * whole) if mask is None else (filled > 0.95 * whole) & (mask > 0)
    a, b, aa, bb, ab = (one[inside] / whole[inside] for one in moments)
    variances = ((aa - a * a).clamp(min=0) + EPSILON) * ((bb - b * b).clamp(min=0) + EPSILON)
    return (ab - a * b) / variances.sqrt()


@torch.no_grad()
def mismatch(
    moving: Tensor,
    fixed: Tensor,
    phi: Transform,
    *,
    squared: bool = False,
    fixed_mask: Tensor | None = None,
    moving_mask: Tensor | None = None,
) -> tuple[float, float]:
    """How badly two images match before and after the map Φ, where they do not match before: from 0 to 2. Masks
    restrict the places, that of the moving image to those which it covers before or after: what a map moves out of it
    counts.

    One minus the local correlation, or its square where contrasts differ, is averaged with itself before the map, at
    most 1, as the weight. A body that holds still around a beating heart does not count, though it fills most of the
    image. Nor does a wrong map gain from such a choice of places: what it moves together is uncorrelated, and 1 is the
    most that a place can count.
    """
    points = [one.on_grid_of(fixed) for one in (Identity(), phi)]
    before, after = (local_correlation(interpolate(moving, at), fixed, WINDOW) for at in points)
    before, after = (1 - (one.square() if squared else one) for one in (before, after))
    weight = before.clamp(0, 1) * (fixed > FOREGROUND if fixed_mask is None else fixed_mask)
    if moving_mask is not None:
        weight = weight * torch.maximum(*(_covers(moving_mask, at) for at in points))
    total = weight.sum().clamp(min=1e-6)
    return float((weight * before).sum() / total), float((weight * after).sum() / total)


@torch.no_grad()
def compare(options: RegisterOptions, phi: Transform, pair: PreparedPair, *, stripped: bool = False) -> Comparison:
    """How to compare two images that the map Φ[moving, fixed] has aligned roughly, where what lies around the anatomy
    may have been `stripped` from one. Only fields are optimised on recoloured images: to optimise its weights, the
    network has to see the images as they are."""
    cautious = replace(options, regularity=REGULARITY if options.regularity is None else options.regularity)
    options = cautious if stripped else options
    if options.io_sim != "auto":
        return Comparison(options, pair, stripped=stripped)
    laid = _laid(phi, pair)
    alike = recoloured(laid)
    differ, why = _differ(pair, laid, alike)
    if not differ:
        return Comparison(replace(options, io_sim="lncc"), pair, why, stripped=stripped)
    if options.optimize == "weights" or alike.which is None:
        return Comparison(replace(cautious, io_sim="lncc2"), pair, why, stripped=stripped)
    return Comparison(replace(cautious, io_sim="lncc"), alike.of(pair), why, alike.which, stripped)


class Laid(NamedTuple):
    """The moving image where a map has put it, the fixed one, and where the masks of both count, if there are any."""

    warped: Tensor
    fixed: Tensor
    mask: Tensor | None = None


def _laid(phi: Transform, pair: PreparedPair) -> Laid:
    fixed, moving = pair
    points = phi.on_grid_of(fixed.tensor)
    mask = None if fixed.mask is None else (fixed.mask > 0).to(fixed.tensor)
    if moving.mask is not None:
        covered = _covers(moving.mask, points)
        mask = covered if mask is None else mask * covered
    return Laid(interpolate(moving.tensor, points), fixed.tensor, mask)


def _covers(mask: Tensor, points: Tensor) -> Tensor:
    """1 at the points that a mask covers, 0 elsewhere."""
    return (interpolate((mask > 0).to(points), points, outside="zeros") >= 0.5).to(points)


def _differ(pair: PreparedPair, laid: Laid, alike: Recoloured) -> tuple[bool, str]:
    """Whether the contrasts of two images differ, and why."""
    if pair.fixed.is_ct != pair.moving.is_ct:
        return True, "one scan is a CT, the other is not"
    if pair.fixed.is_ct:
        return False, "both scans are CTs"
    correlations = _correlations(*laid)
    found = _agreement(correlations)
    gained = float(_correlations(alike.warped, alike.fixed, laid.mask).mean() - correlations.mean())
    if found >= AGREEMENT and not gained > GAINED:
        return False, f"the contrasts agree (agreement {found:.2f}, limit {AGREEMENT})"
    unmoved = agreement(*_laid(Identity(), pair))
    if unmoved >= AGREEMENT and not found >= unmoved:  # whatever the map has done
        return False, f"the contrasts agree (agreement {unmoved:.2f} before the network, limit {AGREEMENT})"
    if math.isnan(found):
        return True, "the images hardly overlap"
    if found < AGREEMENT:
        return True, f"the contrasts differ (agreement {found:.2f}, limit {AGREEMENT})"
    return True, f"the contrasts differ (recolouring raises their correlation by {gained:.2f}, limit {GAINED})"


class Recoloured(NamedTuple):
    """Two images on the network's grid, of which one has taken the colours of the other."""

    warped: Tensor
    """The moving image where a map has put it, in its new colours if it is the one."""
    fixed: Tensor
    which: Which | None = None
    """None without any overlap."""
    curve: Tensor | None = None
    """The new colours."""

    def of(self, pair: PreparedPair) -> PreparedPair:
        """The pair in these colours, on the scans' own voxels, too."""
        if self.curve is None:
            return pair
        if self.which == "moving":
            return replace(pair, moving=_with_colours(pair.moving, self.curve))
        return replace(pair, fixed=_with_colours(pair.fixed, self.curve))


def recoloured(laid: Laid) -> Recoloured:
    """The images with that one recoloured whose intensities tell more about the other's, where they overlap."""
    warped, fixed, _ = laid
    counts = _joint_histogram(*laid)
    if not counts.any():
        return Recoloured(warped, fixed)
    (of_moving, explained), (of_fixed, less) = _curve(counts), _curve(counts.T)
    if explained >= less:
        return Recoloured(_coloured(warped, of_moving), fixed, "moving", of_moving)
    return Recoloured(warped, _coloured(fixed, of_fixed), "fixed", of_fixed)


Array = npt.NDArray[np.float64]


def _joint_histogram(warped: Tensor, fixed: Tensor, mask: Tensor | None) -> Array:
    """How often each intensity of the warped image (rows) lies on each of the fixed one (columns), in both bodies."""
    inside = (warped > FOREGROUND) & (fixed > FOREGROUND)
    inside = inside if mask is None else inside & (mask > 0)
    rows, columns = ((image[inside].clamp(0, 1) * (BINS - 1)).round().long() for image in (warped, fixed))
    both = (BINS * rows + columns).cpu().numpy()
    return np.bincount(both, minlength=BINS**2).reshape(BINS, BINS).astype(np.float64)


def _curve(counts: Array) -> tuple[Tensor, float]:
    """The mean intensity of the columns for each row, and the part of their variance that it explains. Black stays
    black."""
    levels = np.linspace(0, 1, BINS)
    near = counts
    for _ in range(3):  # neighbouring rows share their counts
        padded = np.pad(near, ((1, 1), (0, 0)), mode="edge")
        near = 0.25 * padded[:-2] + 0.5 * padded[1:-1] + 0.25 * padded[2:]
    known = near.sum(axis=1) > 1
    means = np.interp(levels, levels[known], near[known] @ levels / near[known].sum(axis=1)) if known.any() else levels
    total = max(float(counts.sum()), 1.0)
    centre = float((counts @ levels).sum()) / total
    spread = float((counts * (levels - centre) ** 2).sum())
    rest = float((counts * (levels - means[:, None]) ** 2).sum())
    curve = means * np.clip(levels / FOREGROUND, 0, 1)
    return torch.from_numpy(curve).float(), 1 - rest / max(spread, 1e-9)


def _with_colours(image: Prepared, curve: Tensor) -> Prepared:
    source = image.source
    source = None if source is None else (_coloured(source[0], curve), *source[1:])
    return replace(image, tensor=_coloured(image.tensor, curve), source=source)


def _coloured(values: Tensor, curve: Tensor) -> Tensor:
    """The curve at each intensity, by linear interpolation."""
    curve, place = curve.to(values), values.clamp(0, 1) * (BINS - 1)
    low = place.floor().clamp(max=BINS - 2)
    index = low.long()
    return torch.lerp(curve[index], curve[index + 1], place - low)
