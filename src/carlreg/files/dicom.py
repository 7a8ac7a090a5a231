"""DICOM as clinics have it: several series in a folder, and slices of a tilted gantry."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.files.checks import ImageError, Matrix

LISTED, LOOKED_AT, WALKED = 3, 3, 1000
"""How many folders are named, how many files of each are looked at, and how many folders are searched, where a folder
has no series itself."""
UNEVEN = 0.1
"""Slices further than this from even steps, as a fraction of a step, are missing or repeated."""


@dataclass(frozen=True)
class Series:
    """A series of a folder, as its first file describes it."""

    uid: str
    number: str
    description: str
    modality: str
    files: int

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> "Series":
        return cls(**{name: header[name] for name in ("uid", "number", "description", "modality", "files")})

    def __str__(self) -> str:
        about = [f"'{self.description}'"] if self.description else []
        count = f"{self.files} file{'s' if self.files > 1 else ''}"
        return " ".join([self.number or self.uid, *about, f"({', '.join(filter(None, (self.modality, count)))})"])

    def matches(self, wanted: str) -> bool:
        """By its number, its UID, or a part of its description."""
        return wanted in (self.number, self.uid) or wanted.lower() in self.description.lower()


def choose(series: Sequence[Series], wanted: str | None, folder: str) -> Series:
    """The only series, or the wanted one; otherwise an error that lists them all."""
    if wanted is None and len(series) == 1:
        return series[0]
    exact = [one for one in series if wanted in (one.number, one.uid)]
    found = exact or [one for one in series if wanted is not None and one.matches(wanted)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(str, sorted(series, key=_order)))
    what = f"{folder} holds {len(series)} DICOM series: {listed}"
    if wanted is None:
        example = sorted(series, key=_order)[0]
        raise ImageError(f"{what}; expected one: choose it by --series {example.number or example.uid}")
    problem = f"{len(found)} of them match" if found else "none matches"
    raise ImageError(f"{what}; {problem} {wanted!r}: choose one by its number, its UID or a part of its description")


def where_else(folder: Path) -> str:
    """What to give instead of a folder without DICOM files: the folders below it that have them, as exports to a disc
    do, if there are any."""
    found: list[str] = []
    for number, (place, folders, files) in enumerate(os.walk(folder)):
        folders.sort()
        if number and any(_is_dicom(Path(place, name)) for name in sorted(files)[:LOOKED_AT]):
            found.append(str(Path(place)))
        if len(found) > LISTED or number >= WALKED:
            break
    if not found:
        return "expected one, or a file: check the path"
    listed = ", ".join(found[:LISTED]) + " and others" * (len(found) > LISTED)
    return f"expected the folder of one: {listed} below it {'has' if len(found) == 1 else 'have'} files"


def _is_dicom(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(128)
            return file.read(4) == b"DICM"
    except OSError:
        return False


def _order(series: Series) -> tuple[int, str]:
    return int(series.number) if series.number.isdecimal() else 0, series.uid


def straighten(
    voxels: npt.NDArray[Any], affine: Matrix, positions: npt.ArrayLike
) -> tuple[npt.NDArray[Any], Matrix, float] | None:
    """Voxels (x, y, z) of a tilted gantry, whose slices are shifted in their plane, on axes at right angles.

    `positions` (z, 3) are those of the first voxels of the slices. Returns the voxels, resampled linearly within each
    slice on a grid that holds them all, its affine map, and the tilt in degrees; or None if the slices are not evenly
    spaced.
    """
    places = np.asarray(positions, dtype=np.float64)
    step = (places[-1] - places[0]) / max(len(places) - 1, 1)
    even = places[0] + np.arange(len(places))[:, None] * step
    if np.linalg.norm(places - even, axis=1).max() > UNEVEN * np.linalg.norm(step):
        return None
    spacing = np.linalg.norm(affine[:3, :2], axis=0)
    across = affine[:3, :2] / spacing
    normal = np.cross(across[:, 0], across[:, 1])
    normal *= np.sign(normal @ step)
    tilt = math.degrees(math.acos(min(1.0, float(normal @ step / np.linalg.norm(step)))))
    result, straight = voxels, np.eye(4)
    straight[:3, :2], straight[:3, 2], straight[:3, 3] = affine[:3, :2], normal * (normal @ step), places[0]
    for axis in range(2):
        shift = float(across[:, axis] @ step / spacing[axis])  # voxels from slice to slice
        result, first = _sheared(result, axis, shift)
        straight[:3, 3] += first * affine[:3, axis]
    return result, straight, tilt


def _sheared(voxels: npt.NDArray[Any], axis: int, shift: float) -> tuple[npt.NDArray[Any], int]:
    """Slice k moved by k · shift voxels along an axis, and the index of the new first voxel in the old ones."""
    far = shift * (voxels.shape[2] - 1)
    first, last = math.floor(min(0.0, far)), math.ceil(max(0.0, far))
    side = voxels.shape[axis]
    moved = np.moveaxis(voxels, axis, 0).astype(np.float64)
    result = np.full((side + last - first, *moved.shape[1:]), voxels.min(), dtype=np.float64)
    for k in range(voxels.shape[2]):
        source = np.arange(len(result)) + first - k * shift
        inside = (source >= -1e-6) & (source <= side - 1 + 1e-6)
        low = np.clip(np.floor(source[inside] + 1e-6), 0, max(side - 2, 0)).astype(int)
        share = np.clip(source[inside] - low, 0, 1)[:, None]
        result[inside, :, k] = moved[low, :, k] * (1 - share) + moved[np.minimum(low + 1, side - 1), :, k] * share
    if voxels.dtype.kind in "iu":
        result = np.rint(result)
    return np.ascontiguousarray(np.moveaxis(result, 0, axis).astype(voxels.dtype)), first
