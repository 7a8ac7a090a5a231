"""COPDGene: CT of the chest at full inhalation and exhalation, with lung masks.

Layout, with or without a folder for each subject:

    13216S/13216S_INSP_STD_USD_COPD.nii.gz        13216S/13216S_INSP_STD_USD_COPD_label.nii.gz
    13216S/13216S_EXP_STD_USD_COPD.nii.gz         13216S/13216S_EXP_STD_USD_COPD_label.nii.gz

or the same as .nrrd. The paper trains on 999 pairs. Hounsfield units are clamped to −1000…0 and scaled to 0…1, voxels
outside the lungs are set to 0, and images are stretched to 175³. Training permutes and flips the axes of both images of
a pair alike, and adds affine noise of 0.05 to each.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.files.images import Image, PathLike, check_same_grid
from carlreg.files.orientation import to_closest_ras
from carlreg.files.tables import Pair, stem
from carlreg.geometry.resizing import resize
from carlreg.paper_data.dataset import Dataset, Subject, pair_of, require

GRID = (175, 175, 175)
LABELS: dict[int, str] = {}
ENDINGS = (".nii.gz", ".nrrd")
LAYOUT = "SUBJECT_INSP_*.nii.gz, SUBJECT_EXP_*.nii.gz and for each SUBJECT_*_label.nii.gz, or .nrrd"


def check(root: PathLike) -> None:
    """Refuse a folder without scans, an inhalation without its exhalation, and a scan without a mask."""
    pairs(root)


def subjects(root: PathLike, split: str = "train") -> list[Subject]:
    """Each scan with its lung mask."""
    scans = [
        path
        for ending in ENDINGS
        for path in sorted(Path(root).rglob(f"*_INSP_*{ending}")) + sorted(Path(root).rglob(f"*_EXP_*{ending}"))
        if not stem(path).endswith("_label")
    ]
    return [Subject(stem(path), path, mask=_mask(path)) for path in scans]


def pairs(root: PathLike, split: str = "train") -> list[Pair]:
    """Inhalation as the moving, exhalation as the fixed image."""
    scans = {one.image: one for one in subjects(root, split)}
    found: list[Pair] = []
    for path, moving in scans.items():
        if "_INSP_" in path.name:
            partner = path.with_name(path.name.replace("_INSP_", "_EXP_"))
            fixed = scans.get(partner, Subject(stem(partner), partner, mask=_mask(partner)))
            found.append(pair_of(fixed, moving))
    files = [path for pair in found for path in (pair.fixed, pair.moving, pair.fixed_mask, pair.moving_mask) if path]
    require(files, Path(root), LAYOUT)
    return found


def preprocess(image: Image, mask: Image | None = None) -> tuple[Tensor, str]:
    """(1, 1, 175, 175, 175): lungs from 0 to 1, the rest 0."""
    if mask is None:
        raise InputError(f"{image.name} has no lung mask; expected one beside it: networks see only the lungs")
    check_same_grid(mask, image, "a lung mask")
    scan, lungs = to_closest_ras(image), to_closest_ras(mask)
    data = torch.from_numpy(scan.data.astype("float32").clip(-1000, 0) / 1000 + 1)
    masked = (data * torch.from_numpy(lungs.data != 0))[None, None]
    return resize(masked, GRID), "-1000…0 HU scaled to 0…1, 0 outside the lungs"


def _mask(scan: Path) -> Path:
    return scan.with_name(re.sub(r"(\.nii\.gz|\.nrrd)$", r"_label\1", scan.name))


DATASET = Dataset(pairs, LABELS, preprocess)
