"""The images to train on and to validate with, from a CSV file or a folder.

A CSV file has a column `image`, and any two of its images form a pair; or columns `fixed` and `moving`, one pair per
row. Paths are relative to the file. Optional columns are `labels`, or `fixed_seg` and `moving_seg`; `modality`, or
`fixed_modality` and `moving_modality`; `fixed_landmarks` and `moving_landmarks`; and `split`, which is `train`, `val`
or `test`.

A folder contains images, and label maps `NAME_labels.nii.gz` (or `_seg`, `_dseg`) beside `NAME.nii.gz`; or two such
folders `train` and `val`. Masks, `NAME_mask.nii.gz`, are left out.
"""

from __future__ import annotations

import glob
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carlreg.errors import InputError
from carlreg.files import tables
from carlreg.files.atomic import PathLike
from carlreg.files.folders import ENDINGS, LABELS, is_image, list_images, list_subjects
from carlreg.files.tables import IMAGE_COLUMNS, SIDES, SPLITS, read_table, require_files, stem

PAIR_COLUMNS = {"name", "split"} | {f"{side}{end}" for side in SIDES for end in ("", "_seg", "_landmarks", "_modality")}
FRACTION = 0.1
"""Share of the images for validation, by default."""
ENOUGH = 6
"""Number of images below which none is kept for validation, by default."""

log = logging.getLogger(__name__)


class DatasetError(InputError):
    """Images, labels or tables that cannot be used for training."""


@dataclass(frozen=True)
class Case:
    """One image, and optionally a label map on its grid. A label map alone is both."""

    image: Path
    labels: Path | None = None
    modality: str = ""
    """Images of different modality are compared by the labels that they share."""


@dataclass(frozen=True)
class Pair:
    """Two cases by their index, and optionally files with corresponding landmarks."""

    moving: int
    fixed: int
    moving_landmarks: Path | None = None
    fixed_landmarks: Path | None = None


@dataclass(frozen=True)
class Cohort:
    """Cases and the pairs that they form: the listed ones, or any two."""

    cases: tuple[Case, ...]
    pairs: tuple[Pair, ...] | None = None

    def some_pairs(self, most: int) -> list[Pair]:
        """All ordered pairs, or a fixed random choice of at most this many."""
        pairs = self.pairs
        if pairs is None:
            pairs = tuple(Pair(a, b) for a, b in itertools.permutations(range(len(self.cases)), 2))
        return list(pairs) if len(pairs) <= most else random.Random(0).sample(pairs, most)

    def differ(self, first: int, second: int) -> bool:
        """Whether two cases are of different modality."""
        return self.cases[first].modality != self.cases[second].modality

    def part(self, indices: Sequence[int]) -> Cohort:
        """A cohort of some of the pairs and the cases that occur in them or, if any two form a pair, of these cases."""
        if self.pairs is None:
            return Cohort(tuple(self.cases[i] for i in indices))
        pairs = [self.pairs[i] for i in indices]
        used = sorted({number for pair in pairs for number in (pair.moving, pair.fixed)})
        new = {old: number for number, old in enumerate(used)}
        renumbered = (replace(pair, moving=new[pair.moving], fixed=new[pair.fixed]) for pair in pairs)
        return Cohort(tuple(self.cases[i] for i in used), tuple(renumbered))

    def __len__(self) -> int:
        """The number of pairs or, if any two images form one, of images."""
        return len(self.cases if self.pairs is None else self.pairs)

    @property
    def unit(self) -> str:
        return "images" if self.pairs is None else "pairs"


def read(
    source: PathLike, *, val: PathLike | None = None, fraction: float | None = None
) -> tuple[Cohort, Cohort | None]:
    """Read the cases to train on and those to validate with from a CSV file or a folder.

    The latter come from `val`, another CSV file or folder; or from the split; or are a fixed random `fraction` of all:
    by default a tenth, at least two images, and none if there are fewer than six. `fraction=0` means none in any case.

    >>> training, validation = read("scans.csv")
    """
    if fraction is not None and not 0 <= fraction < 1:
        raise DatasetError(f"the validation fraction is {fraction}; expected 0 or more, and less than 1")
    if val is not None and fraction is not None:
        raise DatasetError(f"both {val} and a fraction of {source} were given for validation; expected one of them")
    splits = _read(Path(source))
    if val is not None:
        others = _read(Path(val))
        if "train" in others and "val" not in others:
            raise DatasetError(f"{val} has a split without 'val'; expected images or pairs to validate with")
        training, validation = splits.get("all") or splits.get("train"), others.get("all") or others.get("val")
    elif "all" in splits:
        training, validation = _divide(splits["all"], fraction, source)
    else:
        training, validation = splits.get("train"), splits.get("val") if fraction is None else None
        if fraction:
            raise DatasetError(f"{source} has a split of its own; leave out the fraction, or use 0 for no validation")
        if fraction is None and validation is None:
            raise DatasetError(
                f"{source} has a split without 'val', so the validation set is empty; add some, or use a fraction of 0 "
                "to train without validation"
            )
    if training is None:
        raise DatasetError(f"{source} has a split without 'train'; expected images to train on")
    _check(training, source, "train on")
    if validation is not None:
        _check(validation, source if val is None else val, "validate with")
        both = {case.image.resolve() for case in training.cases} & {case.image.resolve() for case in validation.cases}
        if both:
            log.warning("%d images are used for training and for validation, for example %s", len(both), min(both))
    return training, validation


def _check(cohort: Cohort, source: PathLike, purpose: str) -> None:
    if cohort.pairs is None and len(cohort.cases) < 2:
        count = f"only one image ({cohort.cases[0].image})" if cohort.cases else "no image"
        raise DatasetError(f"{source} has {count} to {purpose}; expected at least two, to form a pair")


def _divide(cohort: Cohort, fraction: float | None, source: PathLike) -> tuple[Cohort, Cohort | None]:
    least = 2 if cohort.pairs is None else 1
    count = round((FRACTION if fraction is None else fraction) * len(cohort))
    if fraction is None:
        count = max(least, count) if len(cohort) >= ENOUGH else 0
        if not count and len(cohort) >= least:
            log.warning("%s has only %d %s: none is kept for validation", source, len(cohort), cohort.unit)
    if not count and not fraction:
        return cohort, None
    if count < least or len(cohort) - count < least:
        raise DatasetError(
            f"a fraction of {fraction} of the {len(cohort)} {cohort.unit} of {source} leaves {count} for validation "
            f"and {len(cohort) - count} for training; expected at least {least} of each"
        )
    chosen = set(random.Random(0).sample(range(len(cohort)), count))
    return cohort.part([i for i in range(len(cohort)) if i not in chosen]), cohort.part(sorted(chosen))


def _read(source: Path) -> dict[str, Cohort]:
    """A cohort for each split, or one for "all" if there is no split."""
    if (source / "train").is_dir():
        return {name: _images_of(source / name) for name in SPLITS if (source / name).is_dir()}
    if source.is_dir():
        return {"all": _images_of(source)}
    if not source.exists():
        raise DatasetError(f"{source} does not exist; expected a CSV file or a folder of images")
    rows = read_table(source, {*IMAGE_COLUMNS, *PAIR_COLUMNS})
    require_files((file for row in rows for file in row.files().values()), source)
    splits = dict.fromkeys(row.split for row in rows)
    return {split or "all": _cohort([row for row in rows if row.split == split], source) for split in splits}


def _images_of(folder: Path) -> Cohort:
    subjects = list_subjects(folder)
    names = {subject.name for subject in subjects}
    for path in list_images(folder):
        end = next((end for end in LABELS if stem(path).endswith(end)), None)
        if end is not None and (name := stem(path).removesuffix(end)) not in names:
            raise DatasetError(f"{path} has no image {name} beside it; check the names")
    if not subjects:
        raise DatasetError(f"{folder} holds no image; expected files that end in {', '.join(ENDINGS)}, or a CSV file")
    return Cohort(tuple(Case(subject.image, subject.labels) for subject in subjects))


def read_label_maps(source: str) -> tuple[Case, ...]:
    """The label maps of a folder (those called `NAME_labels`, `NAME_seg` or `NAME_dseg`, or all files if there are
    none), or of a pattern.

    >>> maps = read_label_maps("maps/*_labels.nii.gz")
    """
    folder = Path(source)
    paths = sorted(folder.iterdir() if folder.is_dir() else map(Path, glob.glob(source, recursive=True)))
    paths = [path for path in paths if is_image(path)]
    named = [path for path in paths if stem(path).endswith(LABELS)]
    found = named if folder.is_dir() and named else paths
    if len(found) < 2:
        count = f"only one label map ({found[0]})" if found else "no label map"
        raise DatasetError(f"{source} has {count}; expected a folder or a quoted pattern with at least two, as a pair")
    return tuple(Case(path, path) for path in found)


def _cohort(rows: Sequence[tables.Scan | tables.Pair], path: Path) -> Cohort:
    numbers: dict[Case, int] = {}
    pairs = []
    for row in rows:
        if isinstance(row, tables.Scan):
            numbers[Case(row.image, row.labels, row.modality)] = len(numbers)
            continue
        moving = Case(row.moving, row.moving_seg, row.moving_modality)
        fixed = Case(row.fixed, row.fixed_seg, row.fixed_modality)
        if (row.moving_landmarks is None) != (row.fixed_landmarks is None):
            raise InputError(
                f"{path} has landmarks for one image only of the pair {fixed.image}, {moving.image}; "
                "expected them for both"
            )
        first, second = (numbers.setdefault(case, len(numbers)) for case in (moving, fixed))
        pairs.append(Pair(first, second, row.moving_landmarks, row.fixed_landmarks))
    return Cohort(tuple(numbers), tuple(pairs) or None)
