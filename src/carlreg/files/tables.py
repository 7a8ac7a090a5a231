"""A pair to register or to judge, and lists of them in CSV files.

Columns: `fixed`, `moving`, and as wanted `fixed_seg`, `moving_seg`, `fixed_mask`, `moving_mask`, `fixed_landmarks`,
`moving_landmarks`; `transform` and `inverse`, the files of a result, several of them joined by ";" in ANTs' order; and
`name`. Paths are relative to the CSV's folder.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.files.images import Image, Matrix, PathLike, map_points, read
from carlreg.files.landmarks import read_points

SIDES = ("fixed", "moving")
FILES = ("fixed", "moving", *(f"{side}_{what}" for what in ("seg", "mask", "landmarks") for side in SIDES))
RESULTS = ("transform", "inverse")


def read_landmarks(path: Path, image: Image) -> Matrix:
    """Landmarks (N, D) in world millimetres, LPS, from 3D Slicer's .fcsv or .mrk.json, or from a text file with a row
    for each, split by commas or blanks.

    A header may name the columns: `x, y, z` for LPS millimetres (the default), `r, a, s` for RAS millimetres, `i, j, k`
    for indices of the image's voxels, from 0. Other columns are left out.
    """
    if path.name.lower().endswith((".fcsv", ".mrk.json")):
        return read_points(path).positions
    names = "xyz"[: image.dim]
    rows: list[list[float]] = []
    columns = list(range(image.dim))
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        words = [word for word in re.split(r"[,;\s]+", line.strip()) if word]
        if not words or line.startswith("#"):
            continue
        header = [word.strip('"').lower() for word in words]
        kind = next((kind for kind in ("xyz", "ras", "ijk") if set(kind[: image.dim]) <= set(header)), None)
        if not rows and kind is not None:
            names, columns = kind[: image.dim], [header.index(letter) for letter in kind[: image.dim]]
            continue
        try:
            rows.append([float(words[column]) for column in columns])
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}, line {number}, is {line!r}; expected {image.dim} numbers") from error
    points = np.array(rows, dtype=np.float64).reshape(-1, image.dim)
    if not len(points):
        raise ValueError(f"{path} holds no landmarks; expected a row of {image.dim} numbers for each")
    if names.startswith("r"):
        return points * np.array([-1.0, -1.0, 1.0])[: image.dim]
    return map_points(image.index_to_world(), points) if names.startswith("i") else points


@dataclass(frozen=True)
class Pair:
    """A fixed and a moving image, what is known about them, and a result's files, where there is one."""

    name: str
    fixed: Path | None
    moving: Path | None
    fixed_seg: Path | None = None
    moving_seg: Path | None = None
    fixed_mask: Path | None = None
    moving_mask: Path | None = None
    fixed_landmarks: Path | None = None
    moving_landmarks: Path | None = None
    transform: tuple[Path, ...] = ()
    inverse: tuple[Path, ...] = ()
    read_image: Callable[[Path], Image] = read
    read_points: Callable[[Path, Image], Matrix] = read_landmarks

    def image(self, side: str) -> Image:
        """The "fixed" or the "moving" image."""
        path: Path | None = getattr(self, side)
        if path is None:
            raise ValueError(f"no {side} image is given; expected its path in the column {side!r}")
        return self.read_image(path)


@dataclass(frozen=True)
class Subject:
    """One image of a dataset, and what belongs to it."""

    name: str
    image: Path
    labels: Path | None = None
    mask: Path | None = None


def pair_of(fixed: Subject, moving: Subject) -> Pair:
    """Two subjects as a pair, MOVING_to_FIXED."""
    name = f"{moving.name}_to_{fixed.name}"
    return Pair(name, fixed.image, moving.image, fixed.labels, moving.labels, fixed.mask, moving.mask)


def every_pair(subjects: Sequence[Subject]) -> list[Pair]:
    """All ordered pairs of different subjects."""
    return [pair_of(fixed, moving) for fixed in subjects for moving in subjects if fixed != moving]


def require(files: Sequence[Path], root: Path, layout: str) -> None:
    """Refuse a folder that lacks some of these files, saying which and what it should look like."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder; expected {layout}")
    missing = [path for path in files if not path.is_file()]
    if missing or not files:
        first = f"lacks {missing[0].relative_to(root)}" if missing else "holds nothing of it"
        others = f" and {len(missing) - 1} more of {len(files)} files" if len(missing) > 1 else ""
        raise FileNotFoundError(f"{root} {first}{others}; expected {layout}")


def read_pairs(path: PathLike) -> list[Pair]:
    """The rows of a CSV file as pairs. Whether their files are sound is found out when they are used.

    >>> pairs = read_pairs("pairs.csv")
    """
    path = Path(path)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        header = [name.strip() for name in reader.fieldnames or []]
        known = ("name", *FILES, *RESULTS)
        unknown = sorted(set(header) - set(known))
        missing = [name for name in SIDES if name not in header]
        if unknown or missing:
            what = f"has the columns {', '.join(unknown)}" if unknown else f"has no column {missing[0]!r}"
            raise ValueError(f"{path} {what}; expected fixed, moving, and of {', '.join(known)} what there is")
        reader.fieldnames = header
        rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
    if not rows:
        raise ValueError(f"{path} lists no pairs; expected a row for each")

    def located(text: str) -> tuple[Path, ...]:
        return tuple(path.parent / part.strip() for part in text.split(";") if part.strip())

    pairs = []
    for row in rows:
        files: dict[str, Any] = {name: next(iter(located(row.get(name, ""))), None) for name in FILES}
        files |= {name: located(row.get(name, "")) for name in RESULTS}
        pairs.append(Pair(row.get("name") or name_of(files["fixed"], files["moving"]), **files))
    return _told_apart(pairs, path.parent)


def write_pairs(pairs: list[Pair], path: PathLike) -> None:
    """Write pairs as a CSV file, with absolute paths."""
    path = Path(path)
    columns = [one.name for one in fields(Pair) if one.name == "name" or one.name in (*FILES, *RESULTS)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for pair in pairs:
            writer.writerow([_as_text(getattr(pair, column)) for column in columns])


def stem(path: PathLike) -> str:
    """A file's name without its extensions: `.nii.gz` counts as one."""
    name = Path(path).name
    return name[: -len(".nii.gz")] if name.lower().endswith(".nii.gz") else Path(name).stem


def name_of(fixed: PathLike | None, moving: PathLike | None) -> str:
    """What a pair is called if it has no name of its own, as `carl register` calls its folder: MOVING_to_FIXED."""
    return "_to_".join("?" if path is None else stem(path) for path in (moving, fixed))


def _told_apart(pairs: list[Pair], folder: Path) -> list[Pair]:
    """Where two pairs of different files have one name, as fixed.nii.gz of many folders do, folders join the name."""
    count = Counter(pair.name for pair in {(p.fixed, p.moving): p for p in pairs}.values())

    def longer(path: Path | None) -> str:
        if path is None:
            return "?"
        parents = [part for part in Path(os.path.relpath(path, folder)).parent.parts if part != ".."]
        return "-".join([*parents, stem(path)])

    return [
        replace(pair, name=f"{longer(pair.moving)}_to_{longer(pair.fixed)}") if count[pair.name] > 1 else pair
        for pair in pairs
    ]


def _as_text(value: str | Path | tuple[Path, ...] | None) -> str:
    if isinstance(value, tuple):
        return ";".join(str(path.resolve()) for path in value)
    return str(value.resolve()) if isinstance(value, Path) else value or ""
