"""One scalar image of a file that holds more: a time point, a channel or the luminance, with finite values."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from carlreg.files.checks import ImageError, Matrix, check_finite, times
from carlreg.files.results import PICTURES

Voxels = npt.NDArray[Any]
CHOICES = ("nan", "frame", "channel", "series", "fixed_series", "moving_series")
"""Options of a registration that say what to take of its files."""
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, by ITU-R BT.601


@dataclass(frozen=True)
class Choice:
    """What to take of an image. Of pictures in colour, that is the luminance, unless a channel is chosen."""

    nan: float | None = None  # replaces values that are not finite
    frame: int | None = None  # a time point of a 4-D image, or a page of a TIFF file
    channel: int | Literal["luminance"] | None = None
    series: str | None = None  # of a DICOM folder: its number, UID, or a part of its description

    @classmethod
    def of(cls, options: Mapping[str, Any], side: str) -> "Choice":
        """The choice for one image of a pair. A frame or channel may be given for each: (fixed, moving)."""
        given = {name: options.get(name) for name in ("nan", "frame", "channel")}
        chosen = {k: v[side == "moving"] if isinstance(v, (list, tuple)) else v for k, v in given.items()}
        numbers = {k: int(v) if isinstance(v, str) and v.isdecimal() else v for k, v in chosen.items()}
        series = options.get(f"{side}_series") or options.get("series")
        return cls(**numbers, series=None if series is None else str(series))

    @classmethod
    def of_pair(cls, options: Mapping[str, Any], side: str, source: Any) -> "Choice":
        """The choice for one image of a pair, whose `source` may be a path. A series that is not that of one image
        alone is chosen in DICOM folders: the other image may be a file."""
        choice = cls.of(options, side)
        is_file = isinstance(source, str | os.PathLike) and Path(source).is_file()
        return replace(choice, series=None) if is_file and not options.get(f"{side}_series") else choice

    def check(self, size: Sequence[int], components: int, name: str) -> None:
        """Refuse an image that is not one scalar 2-D or 3-D image once this is taken of it."""
        if self.has_frames(len(size), name):
            size = self._check_frame(size, name)
        if len(size) not in (2, 3):
            raise ImageError(f"{name} is {len(size)}-D ({times(size)}); expected one 2-D or 3-D image")
        channel, coloured = self.channel, components in (3, 4)
        if components == 1 or (coloured and (channel == "luminance" or (channel is None and is_picture(name)))):
            return
        if not isinstance(channel, int) or not 0 <= channel < components:
            found = f"{name} has {components} components per voxel (colour, vectors or complex numbers)"
            luminance = ", or --channel luminance" if coloured else ""
            raise ImageError(f"{found}; expected one: choose it by --channel N, from 0 to {components - 1}{luminance}")

    def has_frames(self, dim: int, name: str) -> bool:
        """Whether the last axis of an image is time, or the pages of a TIFF file."""
        return dim == 4 or (dim == 3 and self.frame is not None and is_picture(name))

    def _check_frame(self, size: Sequence[int], name: str) -> Sequence[int]:
        *rest, frames = size
        if self.frame is None or not 0 <= self.frame < frames:
            expected = f"expected one image: choose a time point by --frame N, from 0 to {frames - 1}"
            raise ImageError(f"{name} is {len(size)}-D ({times(size)}); {expected}")
        return rest

    def take(self, voxels: Voxels, affine: Matrix, name: str) -> tuple[Voxels, Matrix, Voxels | None]:
        """The chosen voxels and their affine map, of voxels (*shape) or (*shape, components); and all components, if
        the luminance of them was chosen."""
        dim, colours = len(affine) - 1, None
        self.check(voxels.shape[:dim], voxels.shape[dim] if voxels.ndim > dim else 1, name)
        if self.has_frames(dim, name):
            kept = [*range(dim - 1), dim]
            voxels, affine = voxels.take(self.frame or 0, axis=dim - 1), affine[np.ix_(kept, kept)]
        if voxels.ndim == len(affine) and isinstance(self.channel, int):
            voxels = voxels[..., self.channel]
        elif voxels.ndim == len(affine):
            colours, grey = np.ascontiguousarray(voxels), voxels[..., :3] @ np.array(LUMINANCE, np.float32)
            voxels = (np.rint(grey) if voxels.dtype.kind in "iu" else grey).astype(voxels.dtype)
        if self.nan is None:
            check_finite(voxels, name)
        elif voxels.dtype.kind == "f":
            voxels = np.where(np.isfinite(voxels), voxels, voxels.dtype.type(self.nan))
        return np.ascontiguousarray(voxels), affine, colours


def is_picture(name: str) -> bool:
    """Whether a file is a picture by its name."""
    return name.lower().endswith(PICTURES)
