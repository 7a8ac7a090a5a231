"""Slices of a registration side by side: before, after, and a checkerboard, for notebooks and pages."""

from __future__ import annotations

import base64
import html as escaping
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from carlreg import preparation
from carlreg.errors import DependencyError
from carlreg.files import world_transform
from carlreg.files.images import Image
from carlreg.files.orientation import to_closest_ras
from carlreg.files.world_transform import PointMap

if TYPE_CHECKING:
    from carlreg.registration.result import Registration

TITLES = ("fixed", "moving, before", "moving, after", "fixed and after")
PLANES = ("sagittal", "coronal", "axial")
LEFT = ("A", "R", "R")
"""What lies on the left of a picture of each of `PLANES`: the patient's front or right."""
SQUARES = 8
"""Squares of a checkerboard along the longer side of a slice."""
HEIGHT = 240
"""Pixels of the longer side of a slice in a notebook."""
Picture = npt.NDArray[np.uint8]


def slices(result: Registration, axis: int | None = None) -> list[Picture]:
    """A slice through the middle of the fixed image's foreground, across an axis that runs closest to right, anterior
    or superior, by default the last: the four of `TITLES`, (rows, columns) of grey levels, the first row on top."""
    fixed = to_closest_ras(result.fixed)
    axis = 2 if axis is None else axis
    ct, _ = preparation.ct_pair(result.fixed, result.moving)
    data, scaling = preparation.preprocess(fixed, ct=ct[0])
    centre, _ = preparation.foreground_box(data[0, 0] > preparation.FOREGROUND, fixed.spacing)
    grid = fixed if fixed.dim == 2 else _slice(fixed, axis, round(centre[axis]))
    _, other = preparation.preprocess(result.moving, ct=ct[1])
    looks = [(fixed, scaling), (result.moving, other)]
    maps: list[tuple[PointMap, int]] = [(_same, 0), (_same, 1), (result.transform, 1)]
    levels = [_levels(world_transform.apply(phi, looks[n][0], grid), looks[n][1], axis, fixed.dim) for phi, n in maps]
    return [*levels, _checkerboard(levels[0], levels[2])]


def _same(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return points


def _slice(image: Image, axis: int, index: int) -> Image:
    """The grid of one slice, as a volume of one voxel along that axis."""
    affine, shape = image.affine.copy(), list(image.shape)
    affine[:-1, -1] += index * affine[:-1, axis]
    shape[axis] = 1
    return Image(np.zeros(shape, np.uint8), affine)


def _levels(image: Image, scaling: preparation.Preprocessing, axis: int, dim: int) -> Picture:
    """Grey levels of a slice on square pixels, as in the report: anterior or superior on top, right or anterior on the
    left."""
    from PIL import Image as Pillow

    low, high = (-160.0, 240.0) if scaling.kind == "CT" else (scaling.low, scaling.high)
    scaled = np.clip((image.data.astype(np.float64) - low) / (high - low), 0, 1)
    grey = np.rint(255 * scaled).astype(np.uint8)
    spacing = list(image.spacing)
    if dim == 3:
        grey = np.moveaxis(grey, axis, 0)[0]
        del spacing[axis]
        grey = grey.T[::-1, ::-1]  # the second axis upwards, the first to the left
    else:
        grey = grey.T
    step = min(image.spacing)
    size = [max(1, round(n * mm / step)) for n, mm in zip(grey.shape[::-1], spacing, strict=True)]
    return np.asarray(
        Pillow.fromarray(np.ascontiguousarray(grey)).resize((size[0], size[1]), Pillow.Resampling.BILINEAR)
    )


def _checkerboard(first: Picture, second: Picture) -> Picture:
    side = max(1, -(-max(first.shape) // SQUARES))
    rows, columns = (np.arange(n) // side for n in first.shape)
    return np.where((rows[:, None] + columns) % 2 == 0, first, second)


def row(pictures: list[Picture], height: int = HEIGHT, gap: int = 6) -> Picture:
    """Pictures of one shape side by side, their longer side scaled to `height` pixels, white between them."""
    from PIL import Image as Pillow

    tall, wide = pictures[0].shape
    scale = height / max(tall, wide)
    size = max(1, round(wide * scale)), max(1, round(tall * scale))
    white = np.full((size[1], gap), 255, np.uint8)
    parts: list[Picture] = []
    for one in pictures:
        scaled = np.asarray(Pillow.fromarray(one).resize(size, Pillow.Resampling.BILINEAR))
        parts += [*([white] if parts else []), scaled]
    return np.concatenate(parts, axis=1)


def html(result: Registration) -> str:
    """A picture and the numbers of a registration, as a piece of a page that needs nothing else."""
    from PIL import Image as Pillow

    picture, buffer = row(slices(result)), io.BytesIO()
    Pillow.fromarray(picture).save(buffer, "PNG", optimize=True)
    source = base64.b64encode(buffer.getvalue()).decode()
    sides = "; axial, the patient's right on the left" if result.fixed.dim == 3 else ""
    lines = "<br>".join(escaping.escape(line) for line in result.lines())
    return (
        f'<div><img alt="{", ".join(TITLES)}" src="data:image/png;base64,{source}" style="max-width:100%">'
        f"<p>{', '.join(TITLES)}{sides}</p><p>{lines}</p>{''.join(_rows(result))}</div>"
    )


def _rows(result: Registration) -> Iterator[str]:
    yield "<table>"
    for name, value in result.metrics.items():
        yield f"<tr><th>{escaping.escape(name)}</th><td>{value:.4g}</td></tr>"
    yield "</table>"
    for warning in result.warnings:
        yield f"<p>⚠ {escaping.escape(warning)}</p>"


def plot(result: Registration) -> Any:
    """A Matplotlib figure: a row for each plane, a column for each of `TITLES`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError("plots need Matplotlib: pip install matplotlib") from error
    axes = [2, 1, 0] if result.fixed.dim == 3 else [2]
    figure = Figure(figsize=(12, 3.2 * len(axes)), layout="constrained")
    grid = figure.subplots(len(axes), len(TITLES), squeeze=False)
    for places, axis in zip(grid, axes, strict=True):
        for place, title, picture in zip(places, TITLES, slices(result, axis), strict=True):
            place.imshow(picture, cmap="gray", vmin=0, vmax=255)
            place.set_axis_off()
            if result.fixed.dim == 3:
                middle = (picture.shape[0] - 1) / 2
                place.text(0, middle, LEFT[axis], color="yellow", va="center")
            place.set_title(title if result.fixed.dim == 2 else f"{title}, {PLANES[axis]}", fontsize=9)
    figure.suptitle(result.lines()[2], fontsize=10)
    return figure
