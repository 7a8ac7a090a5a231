"""What the paper's datasets have in common: subjects, pairs of them, and the preparation of their images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.files import images, landmarks
from carlreg.files.images import Image, Matrix, PathLike
from carlreg.files.orientation import to_closest_ras
from carlreg.files.tables import Pair, read_pairs
from carlreg.geometry.resizing import resize


@dataclass(frozen=True)
class Dataset:
    """Pairs to evaluate on, how their files are read, and what a network trained as in the paper sees of them."""

    pairs: Callable[[PathLike], list[Pair]]
    labels: Mapping[int, str]
    """The labels to score and their names; all that occur if empty."""
    prepare: Callable[[Image, Image | None], tuple[Tensor, str]] | None = None
    """As `LoadedModel.prepare`: an image and its mask to the network's input, and a note."""
    read_image: Callable[[Path], Image] = images.read
    read_landmarks: Callable[[Path, Image], Matrix] = landmarks.read_landmarks


PLAIN = Dataset(read_pairs, {})
"""A table of pairs: common files, prepared as each model wants them."""


@dataclass(frozen=True)
class Subject:
    """An image of a dataset, and what belongs to it."""

    name: str
    image: Path
    labels: Path | None = None
    mask: Path | None = None


def pair_of(fixed: Subject, moving: Subject) -> Pair:
    """Two subjects as a pair, MOVING_to_FIXED."""
    name = f"{moving.name}_to_{fixed.name}"
    return Pair(name, fixed.image, moving.image, fixed.labels, moving.labels, fixed.mask, moving.mask)


def every_pair(subjects: Sequence[Subject]) -> list[Pair]:
    """All ordered pairs of different subjects."""
    return [pair_of(fixed, moving) for fixed in subjects for moving in subjects if fixed != moving]


def complete(pairs: Sequence[Pair], root: Path, layout: str) -> list[Pair]:
    """The pairs, in a folder that has all their files; the error names the first missing one and the layout."""
    files = sorted({path for pair in pairs for path in pair.files().values()})
    missing = [path for path in files if not path.is_file()]
    if files and not missing:
        return list(pairs)
    problem = f"lacks {missing[0].relative_to(root)}" if missing else "holds no pair of images"
    if len(missing) > 1:
        problem += f" and {len(missing) - 1} more of {len(files)} files"
    raise InputError(f"{root} {problem if root.is_dir() else 'is not a folder'}; expected {layout}")


def stretch(image: Image, grid: Sequence[int], *, maximum: float) -> tuple[Tensor, str]:
    """(1, 1, *grid): the whole image in the axis order closest to RAS, scaled so that its maximum is `maximum`."""
    data = torch.from_numpy(to_closest_ras(image).data.astype(np.float32))[None, None]
    top = float(data.max())
    if not 0 < top < np.inf:
        raise InputError(f"{image.name} has the maximum {top:g}; expected a finite number above 0 to divide by")
    return resize(data, grid) * (maximum / top), f"{top:g}, the maximum, scaled to {maximum:g}"
