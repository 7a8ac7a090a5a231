"""What the report draws: volumes, the transform on a lattice and overlays, as JSON values."""

from __future__ import annotations

import base64
import io
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from carlreg import preparation
from carlreg.files import orientation
from carlreg.files.compression import in_threads
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.label_names import Names
from carlreg.geometry import resizing
from carlreg.geometry.grids import Grid, interpolate
from carlreg.registration.result import Registration
from carlreg.show.display import (
    DOUBLINGS,
    GreyScale,
    determinant,
    display_grid,
    foreground_points,
    grey_scale,
    grid_over,
    high_end,
)

Levels = npt.NDArray[np.uint8]
VOXELS, MAP_VOXELS = 128**3, 300_000
"""Largest size of an image and of an overlay. Three images of pure noise take less than 9 MB as text."""
LABELS = 255
"""Largest number of structures; if there are more, the largest ones are shown."""
LATTICE = 700_000
"""Largest number of points at which the page knows the transform; it interpolates between them. Those of a brain take
1.5 MB."""
LEVEL = 6
"""Of compression: the highest one, 9, takes ten times as long to save 2 %."""
STEP, STEPS = 0.04, 8192
"""Positions are rounded to so many mm, or to a 25th of a small voxel; with at most so many steps per unit coordinate,
positions within ±4 images fit into 16 bits."""
VISIBLE = 0.05
"""A smaller error, in mm, is not seen in positions that are shown in tenths of a millimetre."""


def page_data(registration: Registration, spread: Image | None, names: Names) -> dict[str, Any]:
    """Everything that the page's script needs. `names` are those of the labels."""
    pair = registration.fixed, registration.moving
    fixed, moving, warped = (orientation.to_closest_ras(image) for image in (*pair, registration.warped))
    shape, moving_shape = (display_grid(image, VOXELS).shape for image in (fixed, moving))
    fixed_scale, moving_scale = map(grey_scale, pair, preparation.ct_pair(*pair)[0])
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "map": lambda: _lattice(registration, fixed, moving),
        "jacobian": lambda: {**_jacobian(registration, fixed), "doublings": DOUBLINGS},
        "fixed": lambda: _image(fixed, shape, fixed_scale),
        "warped": lambda: _image(warped, shape, moving_scale),
        "moving": lambda: _image(moving, moving_shape, moving_scale),
    }
    if spread is not None:
        parts["certainty"] = lambda: _certainty(spread, fixed)
    if (errors := registration.expected_error) is not None:
        parts["error"] = lambda: _expected_error(errors, fixed, high_end(errors, registration.fixed))
    done = in_threads(lambda part: part(), parts.values())
    data = {"dim": fixed.dim, **dict(zip(parts, done, strict=True))}
    return data | _labels(registration, names, shape, moving_shape[: moving.dim])


def is_reduced(data: dict[str, Any], registration: Registration) -> bool:
    """Whether the page holds fewer voxels than one of the images."""
    pair = (("fixed", registration.fixed), ("moving", registration.moving))
    return any(math.prod(data[side]["shape"]) < math.prod(image.shape) for side, image in pair)


def _image(image: Image, shape: tuple[int, ...], scale: GreyScale) -> dict[str, Any]:
    """The image in grey levels on the display's grid."""
    values = resizing.resize(torch.from_numpy(image.data.astype(np.float32))[None, None], shape)[0, 0].numpy()
    intensities, greys = zip(*scale.knots, strict=True)
    levels = np.interp(values, intensities, greys)
    return {
        **volume(np.rint(levels).astype(np.uint8)),
        "spacing": [*grid_over(image, shape).spacing, *[1.0] * (3 - image.dim)],
        "knots": scale.knots,
        "windows": scale.windows,
        "world": _unit_to_ras(image).tolist(),
    }


def label_maps(registration: Registration) -> dict[str, Image]:
    """The label maps of a registration, by the image that they belong to."""
    maps = {"fixed": registration.fixed_labels, "warped": registration.labels, "moving": registration.moving_labels}
    return {side: labels for side, labels in maps.items() if labels is not None}


def label_numbers(registration: Registration) -> list[int]:
    """All labels but the background, those with the most voxels first."""
    counts: Counter[int] = Counter()
    for labels in label_maps(registration).values():
        counts.update(dict(zip(*(part.tolist() for part in np.unique(labels.data, return_counts=True)), strict=True)))
    return [int(label) for label, _ in counts.most_common() if label != 0]


def _labels(
    registration: Registration, names: Names, fixed: tuple[int, ...], moving: tuple[int, ...]
) -> dict[str, Any]:
    """Each label map as places in the list of labels, 0 for the background, on its image's grid."""
    numbers = sorted(label_numbers(registration)[:LABELS])
    if not numbers:
        return {}
    data: dict[str, Any] = {"labels": [{"number": n, "name": names.get(n, f"label {n}")} for n in numbers]}
    for side, labels in label_maps(registration).items():
        grid = orientation.to_closest_ras(labels)
        shape = moving if side == "moving" else fixed
        nearest = np.ix_(
            *(np.rint(np.linspace(0, n - 1, m)).astype(int) for n, m in zip(grid.shape, shape, strict=True))
        )
        values = grid.data[nearest]
        place = np.searchsorted(numbers, values).clip(max=len(numbers) - 1)
        known = np.asarray(numbers)[place] == values
        data[f"{side}_labels"] = volume(np.where(known, place + 1, 0).astype(np.uint8))
    return data


def _lattice(registration: Registration, fixed: Image, moving: Image) -> dict[str, Any]:
    """The transform as unit coordinates of the moving image, and by how many mm the page is off.

    The three components (3, z, y, x) are 16-bit multiples of 1 / `units`. They vary smoothly, so what is packed are
    their differences along x, y and z: first all lower bytes, then all upper ones.
    """
    grid = grid_over(fixed, lattice_shape(fixed))
    unit = map_points(moving.world_to_unit(), registration.transform(voxel_points(grid)))
    extent = [mm * (n - 1) for mm, n in zip(moving.spacing, moving.shape, strict=True)]
    units = np.clip(np.array(extent) / min(STEP, min(moving.spacing) / 25), 1, STEPS)
    steps = np.clip(np.rint(unit * units), -32768, 32767)
    off = _lattice_error(registration, steps / units, fixed, moving)
    sides = _three(grid.shape)
    whole = np.zeros((*sides, 3), np.int64)
    whole[..., : fixed.dim] = steps.reshape(*sides, fixed.dim)
    for axis in range(3):
        whole = np.diff(whole, axis=axis, prepend=0)
    parts = (
        whole.transpose(3, 2, 1, 0).astype("<i2").reshape(-1, 1).view(np.uint8)
    )  # modulo 2¹⁶; lower byte, upper byte
    values = base64.b64encode(zlib.compress(parts.T.tobytes(), LEVEL)).decode()
    return {"shape": sides, "units": [*units.tolist(), *[1] * (3 - fixed.dim)], "off": off, "values": values}


def lattice_shape(fixed: Image) -> tuple[int, ...]:
    """The fixed image's voxels, or as many points as there may be, about equally far apart."""
    step = min(fixed.spacing)
    while (
        math.prod(shape := tuple(_points(n, mm, step) for n, mm in zip(fixed.shape, fixed.spacing, strict=True)))
        > LATTICE
    ):
        step *= 1.01
    return shape


def _points(n: int, mm: float, step: float) -> int:
    return min(n, max(2, round(mm * (n - 1) / step) + 1))


def _lattice_error(registration: Registration, lattice: Matrix, fixed: Image, moving: Image) -> float:
    """By how many mm the interpolated lattice is off at 99 % of the foreground, rounded up to tenths; 0 if that is not
    visible."""
    points = foreground_points(fixed)
    unit = torch.from_numpy(map_points(fixed.world_to_unit(), points))[None]
    values = torch.from_numpy(np.moveaxis(lattice, -1, 0).copy())[None]
    found = map_points(moving.unit_to_world(), interpolate(values, unit)[0].T.numpy())
    off = float(np.percentile(np.linalg.norm(found - registration.transform(points), axis=-1), 99))
    return 0.0 if off < VISIBLE else math.ceil(10 * off) / 10


def _jacobian(registration: Registration, fixed: Image) -> dict[str, Any]:
    """det ∇T as levels: 0 where the transform folds, 1 to 255 for 2^−2 to 2^2 times the volume."""
    values = determinant(registration.transform, fixed, MAP_VOXELS, mirrored=registration.record.is_mirrored).data
    doublings = np.log2(np.clip(values, 1e-6, None)) / DOUBLINGS
    return volume(np.where(values <= 0, 0, np.clip(np.rint(128 + 127 * doublings), 1, 255)).astype(np.uint8))


def _certainty(spread: Image, fixed: Image) -> dict[str, Any]:
    """The spread of the attention as levels, from the widest to the narrowest."""
    values = _on_display(spread, fixed)
    narrow, wide = float(values.min()), float(values.max())
    levels = np.rint(255 * (wide - values) / max(wide - narrow, 1e-12)).astype(np.uint8)
    return {**volume(levels), "low": wide, "high": narrow}


def _expected_error(errors: Image, fixed: Image, most: float) -> dict[str, Any]:
    """The expected error as levels, from 0 to `most`."""
    values = _on_display(errors, fixed)
    levels = np.rint(255 * np.clip(values / most, 0, 1)).astype(np.uint8)
    return {**volume(levels), "low": 0.0, "high": most}


def _on_display(values: Image, fixed: Image) -> Matrix:
    """A map over the fixed image at the voxels of an overlay."""
    points = voxel_points(display_grid(fixed, MAP_VOXELS))
    unit = torch.from_numpy(map_points(values.world_to_unit(), points))[None]
    return interpolate(torch.from_numpy(values.data.astype(np.float64))[None, None], unit)[0, 0].numpy()


def voxel_points(grid: Image) -> Matrix:
    """World points (*shape, D) of the voxels of a grid."""
    return map_points(grid.unit_to_world(), Grid.of(grid.shape).points(torch.float64).numpy())


def _unit_to_ras(image: Image) -> Matrix:
    """(3, 4): unit coordinates to world millimetres, RAS."""
    matrix, dim, unit = np.zeros((3, 4)), image.dim, image.unit_to_world()
    signs = np.array([-1.0, -1.0, 1.0]) if dim == 3 else np.ones(dim)
    matrix[:dim, :dim], matrix[:dim, 3] = signs[:, None] * unit[:-1, :-1], signs * unit[:-1, -1]
    return matrix


def _three(shape: Sequence[int]) -> list[int]:
    return [*shape, *[1] * (3 - len(shape))]


def volume(levels: Levels) -> dict[str, Any]:
    """A volume of 8-bit levels as a PNG of its slices, in a data URI."""
    from PIL import Image as Picture

    levels = levels.reshape(_three(levels.shape))
    picture, columns = mosaic(levels)
    file = io.BytesIO()
    Picture.fromarray(picture).save(file, "PNG")
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"shape": list(levels.shape), "columns": columns, "png": uri}


def mosaic(levels: Levels) -> tuple[Levels, int]:
    """Arrange the slices (nx, ny, nz) of a volume in rows of tiles; return the picture and the tiles per row.

    Pixel (i, j) of tile k, counted row by row, is voxel (i, j, k): i to the right, j down.
    """
    nx, ny, nz = levels.shape
    columns = max(1, math.ceil(math.sqrt(nz * ny / nx)))
    rows = math.ceil(nz / columns)
    tiles = np.zeros((rows * columns, ny, nx), np.uint8)
    tiles[:nz] = levels.transpose(2, 1, 0)
    return tiles.reshape(rows, columns, ny, nx).swapaxes(1, 2).reshape(rows * ny, columns * nx), columns
