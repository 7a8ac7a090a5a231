"""COPDGene: CT of the chest at full inhalation and exhalation, with lung masks.

Layout, with or without a folder for each subject:

    13216S/13216S_INSP_STD_USD_COPD.nii.gz        13216S/13216S_INSP_STD_USD_COPD_label.nii.gz
    13216S/13216S_EXP_STD_USD_COPD.nii.gz         13216S/13216S_EXP_STD_USD_COPD_label.nii.gz

or the same as .nrrd. The paper trains on 999 pairs. Hounsfield units are clamped to −1000…0 and scaled to 0…1, voxels
outside the lungs are set to 0, and images are stretched to 175³. Training permutes and flips the axes of both images of
a pair alike, and adds affine noise of 0.05 to each.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.files.images import Image, PathLike, check_same_grid
from carlreg.files.orientation import to_closest_ras
from carlreg.files.tables import Pair, stem
from carlreg.geometry.resizing import resize
from carlreg.paper_data.dataset import Dataset, Subject, complete, pair_of

GRID = (175, 175, 175)
LAYOUT = "SUBJECT_INSP_*.nii.gz, SUBJECT_EXP_*.nii.gz and for each SUBJECT_*_label.nii.gz, or .nrrd"


def pairs(root: PathLike, split: str = "train") -> list[Pair]:
    """Inhalation as the moving, exhalation as the fixed image, each with its lung mask."""
    root = Path(root)
    moving = [path for ending in (".nii.gz", ".nrrd") for path in sorted(root.rglob(f"*_INSP_*{ending}"))]
    scans = [(path.with_name(path.name.replace("_INSP_", "_EXP_")), path) for path in moving]
    found = [pair_of(*map(_subject, pair)) for pair in scans if not stem(pair[1]).endswith("_label")]
    return complete(found, root, LAYOUT)


def preprocess(image: Image, mask: Image | None = None) -> tuple[Tensor, str]:
    """(1, 1, 175, 175, 175): lungs from 0 to 1, the rest 0."""
    if mask is None:
        raise InputError(f"{image.name} has no lung mask; expected one beside it: networks see only the lungs")
    check_same_grid(mask, image, "a lung mask")
    scan, lungs = to_closest_ras(image), to_closest_ras(mask)
    data = torch.from_numpy(scan.data.astype("float32").clip(-1000, 0) / 1000 + 1)
    masked = (data * torch.from_numpy(lungs.data != 0))[None, None]
    return resize(masked, GRID), "-1000…0 HU scaled to 0…1, 0 outside the lungs"


def _subject(scan: Path) -> Subject:
    mask = scan.with_name(scan.name.replace(stem(scan), f"{stem(scan)}_label"))
    return Subject(stem(scan), scan, mask=mask)


DATASET = Dataset(pairs, {}, preprocess)
