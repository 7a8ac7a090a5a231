"""Checks of images and their headers: what can be refused before memory is taken for voxels."""

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.errors import InputError

Matrix = npt.NDArray[np.float64]
MOST_VOXELS = 4e9


class ImageError(InputError):
    """A file or an array that is not a usable image. One line: which, what was found, what to do."""


def check_size(size: Iterable[int], name: str, bytes_per_voxel: int = 4) -> None:
    """Refuse images without voxels and those that cannot fit into memory, even as float32."""
    size = tuple(size)
    if min(size) < 1:
        raise ImageError(f"{name} declares {times(size)} voxels; expected at least one along every axis")
    count, width = math.prod(size), max(bytes_per_voxel, 4)
    try:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # not on every platform
        memory = math.inf
    most = min(MOST_VOXELS, memory / width)
    if count > most:
        found = f"{times(size)} voxels, {width * count / 1e9:.3g} GB with {width} bytes each"
        expected = f"at most {most:.2g} voxels in this memory: check the header, or resample it"
        raise ImageError(f"{name} declares {found}; expected {expected}")


def check_spacing(spacing: Sequence[float], name: str) -> None:
    """Refuse spacings that are not positive numbers."""
    if not all(math.isfinite(s) and s > 0 for s in spacing):
        numbers = " × ".join(f"{s:g}" for s in spacing)
        raise ImageError(f"{name} declares a spacing of {numbers} mm; expected positive numbers: correct its header")


def check_geometry(affine: Matrix, name: str) -> None:
    """Refuse positions that are not finite and axes that lie in a plane."""
    if not np.isfinite(affine).all():
        raise ImageError(f"{name} has a direction or origin that is not finite; expected numbers: correct its header")
    lengths = np.linalg.norm(affine[:-1, :-1], axis=0)
    check_spacing(lengths.tolist(), name)
    if abs(np.linalg.det(affine[:-1, :-1] / lengths)) < 1e-3:
        raise ImageError(f"{name} has a singular direction matrix; expected axes in different directions: correct it")


def check_finite(data: npt.NDArray[Any], name: str) -> None:
    """Refuse NaN and infinity."""
    if bad := data.size - int(np.isfinite(data).sum()):
        raise ImageError(
            f"{name} has {bad} NaN or infinite voxels out of {data.size}; expected none: replace them by --nan 0"
        )


def distance(first: Matrix, second: Matrix, shape: Sequence[int]) -> float:
    """The largest distance, in millimetres, between where two affine maps (D + 1, D + 1) put an image's voxels."""
    corners = np.array([[*corner, 1] for corner in itertools.product(*((0, n - 1) for n in shape))])
    return float(np.linalg.norm((corners @ (first - second).T)[:, :-1], axis=-1).max())


def times(size: Iterable[int]) -> str:
    """Sides as text: 7 × 9 × 5."""
    return " × ".join(str(n) for n in size)
