"""DRIVE: vessels of the retina, segmented by hand, 20 GIFs of 565 × 584 pixels.

Layout: the GIFs in one folder, 21_manual1.gif to 40_manual1.gif, or DRIVE itself, with the GIFs in
training/1st_manual/. In the order of their names the first 14 are for training, the last 6 for testing.

Vessels are 1, the rest 0. The paper makes pairs by warping these images at random, and pools them by 4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.files.images import Image, PathLike, from_array
from carlreg.geometry.grids import pool

COUNT, TRAIN = 20, 14
LAYOUT = "21_manual1.gif to 40_manual1.gif"


def files(root: PathLike, split: str = "train") -> list[Path]:
    """14 images for training or 6 for testing, in a folder with all 20."""
    inner = Path(root) / "training" / "1st_manual"
    found = sorted((inner if inner.is_dir() else Path(root)).glob("*_manual1.gif"))
    if len(found) != COUNT:
        raise InputError(f"{root} holds {len(found)} images; expected {COUNT}: {LAYOUT}")
    return found[:TRAIN] if split == "train" else found[TRAIN:]


def read_gif(path: PathLike) -> npt.NDArray[np.uint8]:
    """Brightness (height, width), 0 to 255, of a GIF's first image."""
    import PIL.Image

    try:
        with PIL.Image.open(path, formats=("GIF",)) as file:
            return np.asarray(file.convert("L"))
    except (OSError, ValueError, EOFError, PIL.Image.DecompressionBombError) as error:
        raise InputError(f"{path} cannot be read as a GIF ({error}); expected a whole one: copy it again") from error


def read(path: PathLike) -> Image:
    """A segmentation as an image of 0 and 1, x first."""
    return from_array((read_gif(path).T > 127).astype("uint8"), name=str(path))


def preprocess(image: Image) -> Tensor:
    """(1, 1, *shape / 4): averages over 4 × 4 pixels."""
    return pool(pool(torch.from_numpy(image.data.astype("float32"))[None, None]))
