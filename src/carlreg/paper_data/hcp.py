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

from carlreg.files.images import Image, PathLike
from carlreg.files.tables import Pair
from carlreg.paper_data.dataset import Dataset, Subject, complete, pair_of, stretch

GRID = (130, 155, 130)
COUNT, SEED = 100, 1
IMAGE, SEGMENTATIONS = "T1w/T1w_acpc_dc_restore_brain.nii.gz", "manual_subcortical_segmentations_BWH"
LAYOUT = f"HCP_1200/SUBJECT/{IMAGE} and {SEGMENTATIONS}/SUBJECT/SUBJECT_*_novdc-label.nii.gz"


def pairs(root: PathLike, split: str = "test") -> list[Pair]:
    """100 different pairs of labelled subjects or, for "train", of all others; all pairs if there are fewer."""
    root = Path(root)
    labels = {path.parent.name: path for path in sorted(root.glob(f"{SEGMENTATIONS}/*/*_*_novdc-label.nii.gz"))}
    names = sorted(labels)
    if split == "train":
        names = sorted({path.parts[-3] for path in root.glob(f"HCP_1200/*/{IMAGE}")} - labels.keys())
    subjects = [Subject(name, root / "HCP_1200" / name / IMAGE, labels.get(name)) for name in names]
    rng, chosen = random.Random(SEED), dict[str, Pair]()
    while len(chosen) < min(COUNT, len(subjects) * (len(subjects) - 1)):
        moving, fixed = rng.choice(subjects), rng.choice(subjects)
        if moving != fixed:
            pair = pair_of(fixed, moving)
            chosen[pair.name] = pair
    return complete(list(chosen.values()), root, LAYOUT)


def preprocess(image: Image, mask: Image | None = None) -> tuple[Tensor, str]:
    """(1, 1, 130, 155, 130): stretched, its maximum scaled to 0.9. A mask has no effect."""
    return stretch(image, GRID, maximum=0.9)


DATASET = Dataset(pairs, {}, preprocess)  # all labels that occur, 1 to 28, are scored by their numbers
