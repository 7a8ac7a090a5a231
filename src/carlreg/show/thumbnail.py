"""A registration as a small picture: a slice of the fixed and the warped image, as a checkerboard and as a blend."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

from carlreg import preparation
from carlreg.files import orientation
from carlreg.files.images import Image
from carlreg.registration.result import Registration
from carlreg.show.display import GreyScale, grey_scale

SIDE, TILES, GAP = 176, 6, 4
"""Pixels of a panel's side and between panels, and tiles along a side of the checkerboard."""
Levels = npt.NDArray[np.uint8]


def thumbnail(registration: Registration) -> bytes:
    """A JPEG: on the left a checkerboard of fixed and warped image, on the right both in one picture, the fixed one in
    green and the warped one in magenta, so that what agrees is grey. The slice is axial, through the foreground; an R
    marks the patient's right, on the left."""
    from PIL import Image as Picture
    from PIL import ImageDraw

    pair = registration.fixed, registration.moving
    scales = map(grey_scale, pair, preparation.ct_pair(*pair)[0])
    first, second = (orientation.to_closest_ras(image) for image in (registration.fixed, registration.warped))
    at = _slice_through(first)
    fixed, warped = (_panel(image, scale, at) for image, scale in zip((first, second), scales, strict=True))
    rows, columns = np.indices(fixed.shape) * TILES // SIDE
    board = np.where((rows + columns) % 2 == 0, fixed, warped)
    gap = np.zeros((fixed.shape[0], GAP, 3), np.uint8)
    picture = np.concatenate([np.stack([board] * 3, -1), gap, np.stack([warped, fixed, warped], -1)], 1)
    file, sheet = io.BytesIO(), Picture.fromarray(picture)
    if first.dim == 3:
        ImageDraw.Draw(sheet).text((3, SIDE // 2 - 6), "R", fill=(255, 228, 138))
    sheet.save(file, "JPEG", quality=80)
    return file.getvalue()


def _slice_through(image: Image) -> int:
    """The axial slice at the centre of mass of what is brighter than the mean."""
    if image.dim == 2:
        return 0
    bright = (image.data > image.data.mean()).sum((0, 1))
    return round(float(np.average(np.arange(len(bright)), weights=bright))) if bright.any() else len(bright) // 2


def _panel(image: Image, scale: GreyScale, at: int) -> Levels:
    """A slice in grey levels, rows from front to back, columns from right to left, in a square panel."""
    from PIL import Image as Picture

    values = (image.data if image.dim == 2 else image.data[..., at]).astype(np.float32)
    intensities, greys = zip(*scale.knots, strict=True)
    levels = np.rint(np.interp(values, intensities, greys)).astype(np.uint8).T
    levels = levels if image.dim == 2 else levels[::-1, ::-1]  # anterior up, right on the left
    size = [max(n * s, 1e-6) for n, s in zip(levels.shape[::-1], image.spacing, strict=False)]
    width, height = (max(1, round(SIDE * one / max(size))) for one in size)
    picture = Picture.fromarray(np.ascontiguousarray(levels)).resize((width, height), Picture.Resampling.BILINEAR)
    panel = np.zeros((SIDE, SIDE), np.uint8)
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    panel[top : top + height, left : left + width] = np.asarray(picture)
    return panel
