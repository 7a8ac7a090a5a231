"""A cache of prepared images: in the axis order closest to RAS, with intensities from 0 to 1, on the network's grid.

A cached file is named by a fingerprint of the image's file and of all settings, so that nothing outdated is ever read.
Cached files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg import preparation
from carlreg.errors import InputError
from carlreg.files import images, orientation
from carlreg.files.atomic import PathLike, write_atomically
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, ImageError
from carlreg.geometry import resizing
from carlreg.model.loaded import CT_RANGE
from carlreg.preparation import FOREGROUND, Frame, common_voxel
from carlreg.training.cohort import Case, Cohort, DatasetError

PREPARATION = 2
"""Version of the cached data: to be raised if this module, or `preparation`, computes something else."""
LARGEST_SIDE = {2: 256, 3: 96}
"""Largest side of a grid that is chosen from the images, by dimension."""
SURVEYED = 20
"""Number of images that are inspected to choose a grid."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case on the network's grid. Its tensors are mapped from disk."""

    image: Tensor  # (1, *grid), uint8: 255 times the intensity
    labels: Tensor | None  # (1, *grid)
    world_to_unit: Sequence[Sequence[float]]
    size: Sequence[float]
    """Millimetres from the first to the last voxel centre along each axis."""
    intensities: str
    """How intensities were scaled, in words."""
    digest: str
    """Checksum of the tensors."""


def cache_folder() -> Path:
    """The platform's folder for cached files: on Linux `~/.cache/carlreg`, or in XDG_CACHE_HOME."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "carlreg"


def choose_grid(cases: Sequence[Case], sides: Sequence[int] | None = None) -> tuple[int, ...]:
    """The network's grid: the given sides (a single one is used for every axis), or the median of the images' sides, up
    to 96 voxels in 3-D and 256 in 2-D."""
    if sides is not None and min(sides) < preparation.LEAST_SIDE:
        raise InputError(f"the grid is {tuple(sides)}; expected sides of at least {preparation.LEAST_SIDE}")
    if sides is None:
        shapes = list(_shapes(cases[:: max(1, len(cases) // SURVEYED)]))
        dim = len(shapes[0])
        same = [shape for shape in shapes if len(shape) == dim]
        return tuple(min(median_low(axis), LARGEST_SIDE[dim]) for axis in zip(*same, strict=True))
    dim = dimension(cases)
    if len(sides) not in (1, dim):
        raise InputError(
            f"the grid has {len(sides)} sides but {cases[0].image} is {dim}-D; expected {dim} sides, or one"
        )
    return tuple(sides) * dim if len(sides) == 1 else tuple(sides)


def dimension(cases: Sequence[Case]) -> int:
    """The dimension of the first readable image, 2 or 3."""
    return len(next(_shapes(cases)))


def _shapes(cases: Sequence[Case]) -> Iterator[tuple[int, ...]]:
    """Shapes of the readable images in the axis order closest to RAS. `prepare` reports the others, all together."""
    problems: list[ImageError] = []
    for case in cases:
        try:
            yield orientation.to_closest_ras(images.read(case.image)).shape
        except ImageError as error:
            problems.append(error)
    if len(problems) == len(cases):
        raise problems[0]


def prepare(
    cases: Sequence[Case],
    grid: Sequence[int],
    folder: PathLike | None = None,
    callback: Callable[[int], None] = lambda done: None,
    *,
    ct_range: tuple[float, float] = CT_RANGE,
    voxel: float | None = None,
) -> list[Prepared]:
    """Prepare all cases, or read them from the cache; `callback` gets the number of finished ones.

    Images are stretched to the grid without wide empty margins or, with `voxel`, resampled to cubic voxels of this many
    millimetres, centred on the foreground. `ct_range` is for `preprocess`. All unusable images are reported in one
    error.
    """
    cache = cache_folder() if folder is None else Path(folder)
    cache.mkdir(parents=True, exist_ok=True)
    prepared, problems = [], []
    for number, case in enumerate(cases, start=1):
        try:
            prepared.append(_from_cache(case, _Recipe(tuple(grid), ct_range, voxel), cache))
        except ImageError as error:
            problems.append((str(case.image), error))
        callback(number)
    if problems:
        (_, first), *others = problems
        also = f" (also unusable: {', '.join(path for path, _ in others[:3])}" if others else ""
        more = f", and {len(others) - 3} more" if len(others) > 3 else ""
        raise DatasetError(f"{first}{also}{more}{')' if others else ''}") from first
    return prepared


@dataclass(frozen=True)
class _Recipe:
    """How every image is prepared."""

    grid: tuple[int, ...]
    ct_range: tuple[float, float]
    voxel: float | None


def _from_cache(case: Case, recipe: _Recipe, cache: Path) -> Prepared:
    from safetensors import SafetensorError
    from safetensors.torch import save

    path = cache / f"{fingerprint(case, recipe)}.safetensors"
    try:
        return _load(path)
    except (FileNotFoundError, SafetensorError, KeyError, ValueError, TypeError):  # not cached yet, or damaged
        write_atomically(path, save(*_make(case, recipe)))
        return _load(path)


def fingerprint(case: Case, recipe: _Recipe) -> str:
    """A name that changes with the files (path, size, time of change), the recipe, and the version of the code."""
    files = [file for file in (case.image, case.labels) if file is not None]
    stats = [
        (str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns)
        for file in files
        for part in (sorted(file.iterdir()) if file.is_dir() else [file])  # a DICOM series is a folder
    ]
    settings = [PREPARATION, list(recipe.grid), recipe.ct_range, preparation.PERCENTILES, case.labels is not None]
    settings += [recipe.voxel, FOREGROUND, preparation.FULL, preparation.MARGIN]
    return hashlib.sha256(json.dumps([stats, settings]).encode()).hexdigest()[:32]


def _make(case: Case, recipe: _Recipe) -> tuple[dict[str, Tensor], dict[str, str]]:
    original = images.read(case.image)
    grid = recipe.grid
    if original.dim != len(grid):
        raise ImageError(
            f"{original.name} is {original.dim}-D but the others are {len(grid)}-D; expected one dimension"
        )
    image = orientation.to_closest_ras(original)
    if case.image == case.labels:  # a label map alone: its foreground in place of an image
        image = replace(image, data=(_as_tensor(images.as_labels(image))[0, 0] != 0).byte().numpy())
    intensities, done = preparation.preprocess(image, ct_range=recipe.ct_range)
    frame = _frame(image, (intensities > FOREGROUND)[0, 0], recipe)
    on_grid = resizing.resize(intensities, grid) if frame is None else frame.resample(intensities)
    tensors = {"image": (255 * on_grid[0]).round().clamp(0, 255).byte()}
    if case.labels is not None:
        labels = images.read_labels(case.labels)
        images.check_same_grid(labels, original, "a label map")
        map_ = _as_tensor(orientation.to_closest_ras(labels))
        tensors["labels"] = (resizing.resize_labels(map_, grid) if frame is None else frame.resample_labels(map_))[0]
    if frame is not None:
        image = Image(on_grid[0, 0].numpy(), frame.affine(image), image.name)
    header: dict[str, Any] = {
        "world_to_unit": image.world_to_unit().tolist(),
        "size": [s * (n - 1) for s, n in zip(image.spacing, image.shape, strict=True)],
        "intensities": done.note,
        "digest": hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest(),
    }
    return tensors, {"prepared": json.dumps(header)}


def _frame(image: Image, foreground: Tensor, recipe: _Recipe) -> Frame | None:
    """The part of an image that is resampled to the grid; None for the whole image."""
    if recipe.voxel is None:
        axes = preparation.wide_margins(foreground)
        return Frame.cropped(foreground, recipe.grid, axes) if any(axes) else None
    centre, width = preparation.foreground_box(foreground, image.spacing)
    voxel, side = recipe.voxel, min(recipe.grid)
    if common_voxel([width], voxel, side) != voxel:  # `register` would use other voxels
        change = "larger voxels or a larger grid" if width > side * voxel else "smaller voxels or a smaller grid"
        raise ImageError(
            f"the foreground of {image.name} is {width:.0f} mm wide, but {side} voxels of {voxel:g} mm are "
            f"{side * voxel:g} mm; expected it to fit, and to fill half of that: use {change}"
        )
    return Frame.cubic(image, recipe.grid, centre, voxel)


def _as_tensor(labels: Image) -> Tensor:
    data = np.ascontiguousarray(labels.data)
    if not data.any():
        raise ImageError(f"{labels.name} is empty: every voxel is 0; expected a label map")
    kind = np.uint8 if data.min() >= 0 and data.max() < 256 else np.int32
    return torch.from_numpy(data.astype(kind))[None, None]


def _load(path: Path) -> Prepared:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["prepared"])
        image = file.get_tensor("image")
        labels = file.get_tensor("labels") if "labels" in file.keys() else None  # noqa: SIM118
    return Prepared(image, labels, **header)


def digest(prepared: Sequence[Prepared], cohort: Cohort | None = None) -> str:
    """A checksum of cases and, of a cohort of them, of their modalities, its pairs and their landmarks."""
    content: list[Any] = [[case.digest for case in prepared]]
    if cohort is not None:
        landmarks = [(pair.moving_landmarks, pair.fixed_landmarks) for pair in cohort.pairs or ()]
        content += [
            [case.modality for case in cohort.cases],
            cohort.pairs and [(pair.moving, pair.fixed) for pair in cohort.pairs],
            [[path and sha256(path) for path in both] for both in landmarks],
        ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
