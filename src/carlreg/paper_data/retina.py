"""DRIVE: vessels of the retina, drawn by hand, 20 GIFs of 565 × 584 pixels.

Layout: the GIFs in one folder, 21_manual1.gif to 40_manual1.gif, or DRIVE itself, where they lie in
training/1st_manual/. In the order of their names the first 14 are for training, the last 6 for testing.

Vessels are 1, the rest 0. The paper makes pairs by warping these images at random and pools them by 4.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from carlreg.files.images import Image, PathLike, from_array
from carlreg.files.tables import Subject, require, stem
from carlreg.geometry.grids import pool
from carlreg.paper_data.gif import read_gif

COUNT, TRAIN = 20, 14
LABELS = {1: "vessels"}
LAYOUT = "21_manual1.gif to 40_manual1.gif"


def check(root: PathLike) -> None:
    """Refuse a folder that does not hold the 20 images."""
    files = _files(Path(root))
    require(files, Path(root), LAYOUT)
    if len(files) != COUNT:
        raise FileNotFoundError(f"{root} holds {len(files)} images; expected {COUNT}: {LAYOUT}")


def subjects(root: PathLike, split: str = "train") -> list[Subject]:
    """14 images for training or 6 for testing."""
    check(root)
    files = _files(Path(root))
    return [Subject(stem(path), path) for path in (files[:TRAIN] if split == "train" else files[TRAIN:])]


def read(path: PathLike) -> Image:
    """A drawing as an image of 0 and 1, x first."""
    return from_array((read_gif(path).T > 127).astype("uint8"), name=str(path))


def preprocess(image: Image) -> Tensor:
    """(1, 1, *shape / 4): averages over 4 × 4 pixels."""
    return pool(pool(torch.from_numpy(image.data.astype("float32"))[None, None]))


def _files(root: Path) -> list[Path]:
    inner = root / "training" / "1st_manual"
    return sorted((inner if inner.is_dir() else root).glob("*_manual1.gif"))
