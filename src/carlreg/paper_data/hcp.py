"""Human Connectome Project: T1-weighted brains, with manual labels of subcortical structures for some subjects.

Layout:

    HCP_1200/100307/T1w/T1w_acpc_dc_restore_brain.nii.gz
    manual_subcortical_segmentations_BWH/100307/100307_*_novdc-label.nii.gz

The first is the project's own. The labels are the dataset that goes with Rushmore et al. (2022), 28 structures. The
paper evaluates as ConstrICON did: 100 pairs of labelled subjects, drawn with the seed 1. Images are stretched to
130 × 155 × 130 and scaled so that the maximum is 0.9.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from carlreg.files.images import Image, PathLike
from carlreg.files.orientation import to_closest_ras
from carlreg.files.tables import Pair, Subject, pair_of, require
from carlreg.geometry.resizing import resize

GRID = (130, 155, 130)
LABELS: dict[int, str] = {}
"""All that occur; the label maps hold their own numbers, 1 to 28."""
COUNT, SEED = 100, 1
LAYOUT = (
    "HCP_1200/SUBJECT/T1w/T1w_acpc_dc_restore_brain.nii.gz and "
    "manual_subcortical_segmentations_BWH/SUBJECT/SUBJECT_*_novdc-label.nii.gz"
)


def check(root: PathLike) -> None:
    """Refuse a folder with fewer than two labelled subjects, or with labels whose image is missing."""
    found = subjects(root, "test")
    if len(found) < 2:
        raise FileNotFoundError(f"{root} holds {len(found)} labelled subject; expected two or more: {LAYOUT}")


def subjects(root: PathLike, split: str = "test") -> list[Subject]:
    """Labelled subjects for "test"; for "train" all the others."""
    root = Path(root)
    labelled = {
        path.parent.name: path
        for path in sorted(root.glob("manual_subcortical_segmentations_BWH/*/*_*_novdc-label.nii.gz"))
    }
    if split == "train":
        images = sorted(root.glob("HCP_1200/*/T1w/T1w_acpc_dc_restore_brain.nii.gz"))
        found = [Subject(path.parts[-3], path) for path in images if path.parts[-3] not in labelled]
    else:
        found = [Subject(name, _image(root, name), labels) for name, labels in sorted(labelled.items())]
    require([one.image for one in found], root, LAYOUT)
    return found


def pairs(root: PathLike, split: str = "test") -> list[Pair]:
    """100 different pairs of different labelled subjects, or as many as there are, drawn with the paper's seed."""
    check(root)
    found = subjects(root, split)
    rng, chosen = random.Random(SEED), dict[str, Pair]()
    while len(chosen) < min(COUNT, len(found) * (len(found) - 1)):
        moving, fixed = rng.choice(found), rng.choice(found)
        if moving != fixed:
            pair = pair_of(fixed, moving)
            chosen[pair.name] = pair
    return list(chosen.values())


def preprocess(image: Image) -> Tensor:
    """(1, 1, 130, 155, 130): stretched, its maximum scaled to 0.9."""
    data = torch.from_numpy(to_closest_ras(image).data.astype("float32"))[None, None]
    return resize(data, GRID) * (0.9 / data.max())


def _image(root: Path, name: str) -> Path:
    return root / "HCP_1200" / name / "T1w" / "T1w_acpc_dc_restore_brain.nii.gz"
