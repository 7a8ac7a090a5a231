"""Small scans with labels for tests of templates and atlases: ellipsoids with a texture that moves along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from conftest import SMALL

from carlreg import gradicon, save
from carlreg.files import images
from carlreg.files.images import Image

AFFINE = np.diag([-1.0, -1.0, 1.5, 1.0])


def ellipsoid(radii: Sequence[float], centre: Sequence[float] = (0, 0, 0), side: int = 20) -> tuple[Image, Image]:
    """A scan and its labels: 1 outside, 2 inside."""
    grid = np.stack(np.meshgrid(*[np.arange(side) - (side - 1) / 2] * 3, indexing="ij"), axis=-1)
    place = (grid - np.array(centre)) / np.array(radii)
    radius = np.linalg.norm(place, axis=-1)
    texture = 0.7 + 0.3 * np.sin(7 * place[..., 0]) * np.sin(6 * place[..., 1]) * np.cos(5 * place[..., 2])
    data = np.clip(4 * (1 - radius), 0, 1) * texture
    labels = (radius < 0.9).astype(np.uint8) + (radius < 0.5)
    return Image((1000 * data).astype(np.int16), AFFINE), Image(labels, AFFINE)


def write_model(path: Path) -> None:
    """A model that does nothing."""
    torch.manual_seed(0)
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": "16 16 16"})


def write_scans(folder: Path, radii: Sequence[Sequence[float]]) -> None:
    folder.mkdir(parents=True)
    for number, one in enumerate(radii):
        scan, labels = ellipsoid(one)
        images.write(scan, folder / f"s{number}.nii.gz")
        images.write(labels, folder / f"s{number}_labels.nii.gz")
