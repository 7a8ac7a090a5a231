"""The scans to average, and the labelled scans to segment with: found, read and checked before anything runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from carlreg.errors import CarlError, InputError
from carlreg.files.atomic import PathLike
from carlreg.files.folders import LABELS, list_subjects
from carlreg.files.images import Image, as_image, as_labels, check_same_grid, placed_like
from carlreg.files.tables import IMAGE_COLUMNS, Scan, read_table, stem
from carlreg.preparation import preprocess

Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Atlas:
    """A scan and its labels, on one grid."""

    name: str
    image: Image
    labels: Image
    path: Path | None = None
    """The file of the image, if it is one."""
    labels_path: Path | None = None


def read_each(
    sources: Sequence[tuple[str, Item]],
    read: Callable[[str, Item], Any],
    *,
    what: str,
    least: int,
    skip_bad: bool,
    skipped: Callable[[str], None],
) -> list[Any]:
    """Read all sources; raise one error that lists everything that is wrong, or skip those and report each.

    Names must be different, and no path separators; there must be at least so many good ones.
    """
    count, good, problems = Counter(name for name, _ in sources), [], []
    for name, source in sources:
        try:
            if not name or name in (".", "..") or "/" in name or "\\" in name:
                raise InputError(f"invalid name {name!r}: it must not contain a path separator")
            if count[name] > 1:
                raise InputError(f"{source}: {count[name]} {what} are called {name!r}; expected different names")
            good.append(read(name, source))
        except (CarlError, OSError) as error:
            problems.append(str(error))
    if problems and not skip_bad:
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(dict.fromkeys(problems), 1))
        raise InputError(f"{len(problems)} of {len(sources)} {what} cannot be used: {listed}. Allow skipping bad ones")
    for text in dict.fromkeys(problems):
        skipped(text)
    if len(good) < least:
        raise InputError(f"{len(good)} usable {what} of {len(sources)}; expected at least {least}")
    return good


# ---- scans ----------------------------------------------------------------------------------------------------------


def list_scans(sources: Iterable[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and sources of scans: paths, folders, or anything that `register` accepts. A folder stands for its images,
    without label maps and masks."""
    if isinstance(sources, Mapping):
        return list(sources.items())
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    found: list[tuple[str, Any]] = []
    for number, source in enumerate(sources, 1):
        if not isinstance(source, (str, os.PathLike)):
            found.append((f"scan-{number}", source))
        elif Path(source).is_dir() and (subjects := list_subjects(Path(source))):
            found += [(subject.name, subject.image) for subject in subjects]
        else:  # a file, or a folder without images, such as of DICOM
            found.append((stem(source), Path(source)))
    return found


def read_scan(name: str, source: Any) -> tuple[str, Image]:
    """A scan that can be registered."""
    image = as_image(source, name)
    preprocess(image)  # refuses constant and tiny images
    return name, image


# ---- atlases --------------------------------------------------------------------------------------------------------


def list_atlases(source: PathLike) -> list[tuple[str, tuple[Path, Path | None]]]:
    """Names, images and label maps of a folder with NAME.nii.gz and NAME_labels.nii.gz (or _seg, _dseg), or of a CSV
    file with the columns `image` and `labels`."""
    path = Path(source)
    if path.is_dir():
        subjects = list_subjects(path)
        if not subjects:
            raise InputError(f"{path} has no images; expected NAME.nii.gz with NAME_labels.nii.gz")
        return [(subject.name, (subject.image, subject.labels)) for subject in subjects]
    if path.suffix.lower() not in (".csv", ".tsv", ".txt"):
        raise InputError(f"{path} does not exist, or is not a folder, a CSV file or a .carlatlas file; check the path")
    rows = [row for row in read_table(path, IMAGE_COLUMNS) if isinstance(row, Scan)]
    if not rows:
        raise InputError(f"{path} lists pairs; expected the columns 'image' and 'labels'")
    return [(stem(row.image), (row.image, row.labels)) for row in rows]


def read_atlas(name: str, source: tuple[Any, Any]) -> Atlas:
    """A scan and its labels, checked."""
    image, labels = source
    if labels is None:
        raise InputError(f"{image} has no labels; expected a label map {name}{LABELS[0]}.nii.gz beside it")
    _, scan = read_scan(name, image)
    mapped = placed_like(as_labels(as_image(labels, f"labels of {name}")), scan)
    check_same_grid(mapped, scan, "a label map")
    if not mapped.data.any():
        raise InputError(f"{mapped.name} is empty; expected labels other than 0")
    if mapped.data.min() < 0:
        raise InputError(f"{mapped.name} has negative labels; expected 0 or more")
    paths = (Path(one) if isinstance(one, (str, os.PathLike)) else None for one in source)
    return Atlas(name, scan, mapped, *paths)
