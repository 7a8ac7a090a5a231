"""What only one of two scans shows: the skull and the scalp around a brain, where the other scan was stripped of them.

The network finds the brain in the head. But an optimisation matches whatever both scans show, and would pull the skull
onto the edge of the stripped brain. So it is shown both scans without what surrounds the anatomy of the smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from carlreg.geometry.grids import interpolate, multiply_axes
from carlreg.geometry.resizing import averaging
from carlreg.geometry.transforms import Transform
from carlreg.objective.losses import gaussian_blur
from carlreg.preparation import FOREGROUND, Frame, Prepared, PreparedPair

RIM = 2.0
"""Standard deviation of a Gaussian that ends after 4 voxels of the network's grid: so far reaches what lies around."""
FILLED = 0.75
"""A scan was stripped if the other one shows something in at least this share of what lies around its anatomy."""


@torch.no_grad()
def without_surroundings(pair: PreparedPair, phi: Transform, psi: Transform) -> tuple[PreparedPair, str | None]:
    """The pair without what only one scan shows all around the other's anatomy, and a note if there is such a thing.

    Φ[moving, fixed] and Ψ[fixed, moving] have aligned the scans roughly. If the user gave masks, nothing is left out.
    """
    fixed, moving = pair
    if fixed.mask is not None or moving.mask is not None:
        return pair, None
    if surrounded(fixed.tensor, moving.tensor, phi) >= FILLED:
        return replace(pair, moving=_inside(moving, fixed, psi)), _note("moving", "fixed")
    if surrounded(moving.tensor, fixed.tensor, psi) >= FILLED:
        return replace(pair, fixed=_inside(fixed, moving, phi)), _note("fixed", "moving")
    return pair, None


def _note(larger: str, smaller: str) -> str:
    return f"what the {larger} image shows around the anatomy of the {smaller} one was left out"


@torch.no_grad()
def surrounded(image: Tensor, other: Tensor, phi: Transform) -> float:
    """The share of the voxels around the anatomy of an image at which the other one, warped by a map from this image's
    points to its own, shows something; 0 if the anatomy reaches the border of the image nearly everywhere."""
    inside = anatomy(image)
    around = (gaussian_blur(inside.to(image), RIM) > 0) & ~inside
    if around.sum() < 0.05 * inside.sum():
        return 0.0
    warped = interpolate(other, phi.on_grid_of(image), outside="zeros")
    return float((warped[around] > FOREGROUND).float().mean())


def anatomy(image: Tensor) -> Tensor:
    """Where there is foreground, or foreground on both sides along every axis: ventricles are dark, but inside."""
    bright = image > FOREGROUND
    between = torch.ones_like(bright)
    for axis in range(2, image.dim()):
        before, after = (_seen(one, axis) for one in (bright, bright.flip(axis)))
        between &= before & after.flip(axis)
    return bright | between


def _seen(bright: Tensor, axis: int) -> Tensor:
    """Whether there has been foreground before, along an axis."""
    return bright.to(torch.uint8).cummax(axis).values.bool()


def _inside(larger: Prepared, smaller: Prepared, phi: Transform) -> Prepared:
    """The larger scan, black beyond the anatomy of the smaller one, to which `phi` maps its points."""
    share = interpolate(anatomy(smaller.tensor).to(larger.tensor), phi.on_grid_of(larger.tensor), outside="zeros")
    source = larger.source
    if source is not None:
        scan, mask, frame = source
        fine = multiply_axes(share.to(scan), list(_to_scan(frame.on(share.shape[2:]), scan)))
        source = scan * (fine > 0.5), mask, frame
    return replace(larger, tensor=larger.tensor * (share > 0.5), source=source)


def _to_scan(frame: Frame, scan: Tensor) -> Iterator[Tensor]:
    """For each axis, the matrix that interpolates values on the voxels of a frame at those of its scan."""
    for side, new, middle, gap in zip(scan.shape[2:], frame.shape, frame.centre, frame.step, strict=True):
        index = (torch.arange(side, dtype=torch.float64) - middle) / gap + (new - 1) / 2
        yield averaging(new, index.clamp(0, new - 1), 1.0).to(scan)
