"""Human Connectome Project: T1-weighted brains, with manual labels of subcortical structures for some subjects.

Layout:

    HCP_1200/100307/T1w/T1w_acpc_dc_restore_brain.nii.gz
    manual_subcortical_segmentations_BWH/100307/100307_*_novdc-label.nii.gz

The images are the project's own; the labels, 28 structures, were published with Rushmore et al. (2022). The paper
evaluates as ConstrICON did: 100 pairs of labelled subjects, drawn with the seed 1. Images are stretched to
130 × 155 × 130 and scaled so that the maximum is 0.9.
"""

from __future__ import annotations

import random
from pathlib import Path

from torch import Tensor

from carlreg.errors import InputError
from carlreg.files.images import Image, PathLike
from carlreg.files.tables import Pair
from carlreg.paper_data.dataset import Dataset, Subject, pair_of, require, stretch

GRID = (130, 155, 130)
LABELS: dict[int, str] = {}
"""Empty: all labels that occur, 1 to 28, are scored by their numbers."""
COUNT, SEED = 100, 1
LAYOUT = (
    "HCP_1200/SUBJECT/T1w/T1w_acpc_dc_restore_brain.nii.gz and "
    "manual_subcortical_segmentations_BWH/SUBJECT/SUBJECT_*_novdc-label.nii.gz"
)


def check(root: PathLike) -> None:
    """Refuse a folder with fewer than two labelled subjects, or with labels whose image is missing."""
    count = len(subjects(root, "test"))
    if count < 2:
        raise InputError(f"{root} holds {count} labelled subject; expected two or more: {LAYOUT}")


def subjects(root: PathLike, split: str = "test") -> list[Subject]:
    """The labelled subjects for "test", all others for "train"."""
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
    """100 different pairs of labelled subjects, or all if there are fewer, drawn with the paper's seed."""
    check(root)
    candidates = subjects(root, split)
    rng, chosen = random.Random(SEED), dict[str, Pair]()
    while len(chosen) < min(COUNT, len(candidates) * (len(candidates) - 1)):
        moving, fixed = rng.choice(candidates), rng.choice(candidates)
        if moving != fixed:
            pair = pair_of(fixed, moving)
            chosen[pair.name] = pair
    return list(chosen.values())


def preprocess(image: Image, mask: Image | None = None) -> tuple[Tensor, str]:
    """(1, 1, 130, 155, 130): stretched, its maximum scaled to 0.9. A mask has no effect."""
    return stretch(image, GRID, maximum=0.9)


def _image(root: Path, name: str) -> Path:
    return root / "HCP_1200" / name / "T1w" / "T1w_acpc_dc_restore_brain.nii.gz"


DATASET = Dataset(pairs, LABELS, preprocess)
