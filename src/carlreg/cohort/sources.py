"""The pairs of a cohort: from a table, or from the images of a folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from carlreg.errors import InputError
from carlreg.files.folders import ENDINGS, LABELS, MASKS, Subject, by_stem, list_images, list_subjects
from carlreg.files.tables import Pair, read_pairs, stem


def find_pairs(
    source: Path,
    *,
    fixed: Path | None = None,
    fixed_seg: Path | None = None,
    fixed_mask: Path | None = None,
    all_pairs: bool = False,
    unique: bool | None = None,
) -> list[Pair]:
    """The pairs of a table; of every image of a folder with one `fixed` image; or all ordered pairs of a folder.

    Labels and masks are found by their names: `a_labels.nii.gz` (or `_seg`, `_dseg`) and `a_mask.nii.gz` beside
    `a.nii.gz`. Whether the files exist is not checked. `unique` is that of `files.tables.read_pairs`.

    >>> find_pairs(Path("scans"), fixed=Path("template.nii.gz"))
    """
    if not source.is_dir():
        if fixed is not None or all_pairs:
            option = "all pairs were" if all_pairs else "a fixed image was"
            raise InputError(f"{option} asked for, but {source} is not a folder; expected a folder of images")
        return read_pairs(source, unique=unique)
    if (fixed is None) != all_pairs:
        given = "a fixed image and all pairs were asked for" if all_pairs else f"{source} is a folder"
        raise InputError(f"{given}; expected either --fixed IMAGE, to register every image to it, or --all-pairs")
    subjects = read_folder(source)
    if fixed is None:
        return between(subjects)
    return against(read_fixed(fixed, fixed_seg, fixed_mask), subjects)


def read_folder(folder: Path) -> list[Subject]:
    """The images of a folder in order, each with its labels and its mask."""
    subjects = list_subjects(folder)
    if not subjects:
        raise InputError(f"{folder} holds no image; expected files that end in {', '.join(ENDINGS)}")
    by_stem(list_images(folder))  # refuses files that differ only in their formats
    return subjects


def read_fixed(image: Path, labels: Path | None = None, mask: Path | None = None) -> Subject:
    """The fixed image of a cohort, with the labels and the mask beside it unless they are given."""
    ends = (*(LABELS if labels is None else ()), *(MASKS if mask is None else ()))
    files = list_images(image.parent) if image.parent.is_dir() else []
    found = Subject.beside(image, by_stem(path for path in files if stem(path) in {stem(image) + end for end in ends}))
    return replace(found, labels=labels or found.labels, mask=mask or found.mask)


def against(fixed: Subject, subjects: Iterable[Subject]) -> list[Pair]:
    """A pair of the fixed image with each other image."""
    return [_pair(fixed, one) for one in subjects if one.image.resolve() != fixed.image.resolve()]


def between(subjects: list[Subject]) -> list[Pair]:
    """All ordered pairs of different images."""
    return [_pair(fixed, moving) for fixed in subjects for moving in subjects if fixed is not moving]


def _pair(fixed: Subject, moving: Subject) -> Pair:
    scored = moving.labels is not None  # labels of the fixed image alone have nothing to be compared with
    return Pair(
        f"{moving.name}_to_{fixed.name}",
        fixed.image,
        moving.image,
        fixed_seg=fixed.labels if scored else None,
        moving_seg=moving.labels,
        fixed_mask=fixed.mask,
        moving_mask=moving.mask,
    )
