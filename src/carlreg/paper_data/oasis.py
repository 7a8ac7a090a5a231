"""Labelled brains of OASIS, from the MICCAI 2012 multi-atlas labelling challenge (MALC), in one of two layouts.

The challenge's own:

    training-images/1000_3.nii.gz   training-labels/1000_3_glm.nii.gz
    testing-images/1003_3.nii.gz    testing-labels/1003_3_glm.nii.gz

or images and labels side by side, with or without folders for the splits:

    train/1000.nii.gz   train/1000_labels.nii.gz
    val/1101.nii.gz     val/1101_labels.nii.gz

The paper does not use this dataset; it stands in for HCP, with the same preprocessing.
"""

from __future__ import annotations

from pathlib import Path

from carlreg.files.images import PathLike
from carlreg.files.tables import Pair, stem
from carlreg.paper_data.dataset import Dataset, Subject, complete, every_pair
from carlreg.paper_data.hcp import preprocess

LABELS = {
    number: f"{side} {name}"
    for name, *numbers in (
        ("accumbens", 23, 30),
        ("amygdala", 31, 32),
        ("caudate", 36, 37),
        ("hippocampus", 47, 48),
        ("pallidum", 55, 56),
        ("putamen", 57, 58),
        ("thalamus", 59, 60),
    )
    for side, number in zip(("right", "left"), numbers, strict=True)
}
"""The subcortical structures among the 138."""
FOLDERS = {"train": "training", "val": "testing", "test": "testing"}
LAYOUT = "NAME.nii.gz with NAME_labels.nii.gz, or training-images/NAME.nii.gz with training-labels/NAME_glm.nii.gz"


def pairs(root: PathLike, split: str = "val") -> list[Pair]:
    """All ordered pairs of different subjects of a split."""
    root = Path(root)
    images, labels, suffix = root / f"{FOLDERS[split]}-images", root / f"{FOLDERS[split]}-labels", "_glm"
    if not images.is_dir():
        images = labels = root / split if (root / split).is_dir() else root
        suffix = "_labels"
    files = [path for path in sorted(images.glob("*.nii.gz")) if not stem(path).endswith("_labels")]
    subjects = [Subject(stem(path), path, labels / f"{stem(path)}{suffix}.nii.gz") for path in files]
    return complete(every_pair(subjects), root, LAYOUT)


DATASET = Dataset(pairs, LABELS, preprocess)
