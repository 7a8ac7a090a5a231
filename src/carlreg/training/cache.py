"""Images made ready for training, once, and kept on disk: turned to RAS, intensities 0 to 1, on the network's grid.

The name of a file in the cache is a fingerprint of the image's file and of all settings: what was changed is made
anew. Files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg import preparation
from carlreg.errors import InputError
from carlreg.files import images, orientation
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, ImageError
from carlreg.geometry import resizing
from carlreg.model.loaded import CT_RANGE
from carlreg.preparation import FOREGROUND, Frame, common_voxel
from carlreg.training.cohort import Case, PathLike
from carlreg.training.errors import DatasetError

PREPARATION = 2
"""Raised whenever the code below, or that of `preparation`, makes something else of a file."""
LARGEST_SIDE = {2: 256, 3: 96}
"""Of the grid, where none is chosen."""
SURVEYED = 20
"""Images that are looked at to choose a grid."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case on the network's grid. Tensors stay on disk until they are used."""

    image: Tensor  # (1, *grid), uint8: 255 times the intensity
    labels: Tensor | None  # (1, *grid)
    world_to_unit: tuple[tuple[float, ...], ...]
    size: tuple[float, ...]
    """Millimetres from the first to the last voxel centre along each axis."""
    intensities: str
    """What was done to them, in words."""
    digest: str
    """Of the tensors: equal for equal ones."""


def cache_folder() -> Path:
    """Where this platform keeps what can be made again: `~/.cache/carlreg`, or as XDG_CACHE_HOME says."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "carlreg"


def choose_grid(cases: Sequence[Case], sides: Sequence[int] | None = None) -> tuple[int, ...]:
    """The network's grid: the sides given (one is repeated for every axis), or the images' median ones, up to 96
    voxels in 3-D and 256 in 2-D."""
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
    """2 or 3: that of the first image that can be read."""
    return len(next(_shapes(cases)))


def _shapes(cases: Sequence[Case]) -> Iterator[tuple[int, ...]]:
    """Of the images that can be read, turned to RAS. `prepare` tells of the others, all together."""
    problem: ImageError | None = None
    found = False
    for case in cases:
        try:
            shape = orientation.to_closest_ras(images.read(case.image)).shape
        except ImageError as error:
            problem = error
        else:
            found = True
            yield shape
    if problem is not None and not found:
        raise problem


def prepare(
    cases: Sequence[Case],
    grid: Sequence[int],
    folder: PathLike | None = None,
    callback: Callable[[int], None] | None = None,
    *,
    ct_range: tuple[float, float] = CT_RANGE,
    voxel: float | None = None,
) -> list[Prepared]:
    """Make all cases ready, or take them from the cache; `callback` gets the number of those done. `ct_range` is for
    `preprocess`. Images are stretched to the grid, without wide margins that show nothing; or, with `voxel`,
    laid into it with cubic voxels of so many millimetres, around what they show.

    All are looked at before the first unusable one is complained about, so that the message can name the others.
    """
    cache = cache_folder() if folder is None else Path(folder)
    cache.mkdir(parents=True, exist_ok=True)
    prepared, problems = [], []
    for number, case in enumerate(cases, start=1):
        try:
            prepared.append(_from_cache(case, _How(tuple(grid), ct_range, voxel), cache))
        except ImageError as error:
            problems.append((case, error))
        if callback is not None:
            callback(number)
    if problems:
        _, first = problems[0]
        others = ", ".join(str(case.image) for case, _ in problems[1:4])
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise DatasetError(f"{first}" + (f" (nor can these be used: {others}{more})" if others else "")) from first
    return prepared


@dataclass(frozen=True)
class _How:
    """What is made of every image."""

    grid: tuple[int, ...]
    ct_range: tuple[float, float]
    voxel: float | None


def _from_cache(case: Case, how: _How, cache: Path) -> Prepared:
    from safetensors import SafetensorError

    path = cache / f"{fingerprint(case, how)}.safetensors"
    try:
        return _load(path)
    except (FileNotFoundError, SafetensorError, KeyError, ValueError):  # not there yet, or damaged
        pass
    from safetensors.torch import save

    tensors, header = _make(case, how)
    write_atomically(path, save(tensors, header))
    return _load(path)


def fingerprint(case: Case, how: _How) -> str:
    """Changes with the files (place, size, time of change), what is made of them, and the code that does it."""
    files = [file for file in (case.image, case.labels) if file is not None]
    stats = [
        (str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns)
        for file in files
        for part in (sorted(file.iterdir()) if file.is_dir() else [file])  # a DICOM series is a folder
    ]
    settings = [PREPARATION, list(how.grid), how.ct_range, preparation.PERCENTILES, case.labels is not None, how.voxel]
    settings += [FOREGROUND, preparation.FULL, preparation.MARGIN]
    return hashlib.sha256(json.dumps([stats, settings]).encode()).hexdigest()[:32]


def _make(case: Case, how: _How) -> tuple[dict[str, Tensor], dict[str, str]]:
    original = images.read(case.image)
    if original.dim != len(how.grid):
        raise ImageError(
            f"{original.name} is {original.dim}-D but the others are {len(how.grid)}-D; expected one dimension"
        )
    image = orientation.to_closest_ras(original)
    intensities, done = preparation.preprocess(image, ct_range=how.ct_range)
    there = (intensities > FOREGROUND)[0, 0]
    if how.voxel is None:
        sides = preparation.wide_margins(there)
        frame = Frame.cropped(there, how.grid, sides) if any(sides) else None
    else:
        frame = _cubic(image, there, how.voxel, how.grid)
    on_grid = resizing.resize(intensities, how.grid) if frame is None else frame.resample(intensities)
    tensors = {"image": (255 * on_grid[0]).round().clamp(0, 255).byte()}
    if case.labels is not None:
        labels = images.read_labels(case.labels)
        images.check_same_grid(labels, original, "a label map")
        known = _as_tensor(orientation.to_closest_ras(labels))
        tensors["labels"] = (
            resizing.resize_labels(known, how.grid) if frame is None else frame.resample_labels(known)
        )[0]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors.values())).hexdigest()
    if frame is not None:
        image = Image(on_grid[0, 0].numpy(), frame.affine(image), image.name)
    header: dict[str, Any] = {
        "world_to_unit": image.world_to_unit().tolist(),
        "size": [s * (n - 1) for s, n in zip(image.spacing, image.shape, strict=True)],
        "intensities": done.note,
        "digest": digest,
    }
    return tensors, {"prepared": json.dumps(header)}


def _cubic(image: Image, there: Tensor, voxel: float, grid: tuple[int, ...]) -> Frame:
    """Cubic voxels around what an image shows."""
    centre, wide = preparation.foreground_box(there, image.spacing)
    side = min(grid)
    if common_voxel([wide], voxel, side) != voxel:  # `register` would take other voxels
        change = "larger voxels or a larger grid" if wide > side * voxel else "smaller voxels or a smaller grid"
        raise ImageError(
            f"{image.name} shows something {wide:.0f} mm wide, but {side} voxels of {voxel:g} mm are "
            f"{side * voxel:g} mm; expected it to fit, and to fill half of that: take {change}"
        )
    return Frame.cubic(image, grid, centre, voxel)


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
    return Prepared(
        image,
        labels,
        tuple(tuple(row) for row in header["world_to_unit"]),
        tuple(header["size"]),
        header["intensities"],
        header["digest"],
    )


def digest(prepared: Sequence[Prepared]) -> str:
    """Of a whole set of cases in their order."""
    return hashlib.sha256("".join(case.digest for case in prepared).encode()).hexdigest()[:32]
