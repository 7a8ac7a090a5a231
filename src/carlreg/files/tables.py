"""Tables of pairs, and of single images, in CSV files.

A table of pairs has the columns `fixed` and `moving`, and any other of `COLUMNS`. A table of images, for training, has
the column `image`, and optionally `labels`, `modality` and `split`. Cells are separated by commas, semicolons or tabs.
Paths are relative to the table's folder; `transform` and `inverse` may name several files, in ANTs' order, joined by
";".
"""

import csv
import io
import itertools
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from carlreg.errors import InputError
from carlreg.files.images import PathLike

log = logging.getLogger(__name__)

Side = Literal["fixed", "moving"]
SIDES: tuple[Side, Side] = ("fixed", "moving")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Pair:
    """A fixed and a moving image, the files that belong to them, and those of a result. The fields are `COLUMNS`."""

    name: str
    fixed: Path
    moving: Path
    fixed_seg: Path | None = None
    moving_seg: Path | None = None
    fixed_mask: Path | None = None
    moving_mask: Path | None = None
    fixed_landmarks: Path | None = None
    moving_landmarks: Path | None = None
    initial_transform: Path | None = None
    transform: tuple[Path, ...] = ()
    inverse: tuple[Path, ...] = ()
    fixed_modality: str = ""  # for training
    moving_modality: str = ""
    split: str = ""  # one of `SPLITS`, or empty if the table has no such column
    guide: Path | None = None
    rigid_mask: Path | None = None
    moving_rigid_mask: Path | None = None

    def files(self) -> dict[str, Any]:
        """The input files by their column, as `register` takes them."""
        return {name: path for name in FILES if (path := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Scan:
    """One image of a table of images. The fields are `IMAGE_COLUMNS`."""

    image: Path
    labels: Path | None = None
    modality: str = ""
    split: str = ""

    def files(self) -> dict[str, Path | None]:
        return {"image": self.image, "labels": self.labels}


COLUMNS, IMAGE_COLUMNS = (tuple(field.name for field in fields(row)) for row in (Pair, Scan))
RESULTS, MODALITIES = ("transform", "inverse"), ("fixed_modality", "moving_modality")
FILES = tuple(column for column in COLUMNS if column not in ("name", *RESULTS, *MODALITIES, "split"))


@dataclass(frozen=True)
class _Row:
    """A row that is not empty: its table, the number of its line, and its cells by column."""

    table: Path
    line: int
    cells: dict[str, str]

    def error(self, text: str) -> InputError:
        return InputError(f"{self.table}, line {self.line}: {text}")

    def values(self, files: Collection[str], required: Collection[str]) -> dict[str, Any]:
        """The paths in these columns, and the split."""
        cells, split = self.cells, self.cells.get("split", "")
        if empty := [column for column in required if not cells.get(column)]:
            raise self.error(f"{empty[0]} is empty; expected a path in every row")
        if "split" in cells and split not in SPLITS:
            raise self.error(f"split is {split!r}; expected 'train', 'val' or 'test'")
        paths = {column: self.table.parent / cells[column] if cells.get(column) else None for column in files}
        return {**paths, "split": split}

    def scan(self) -> Scan:
        values = self.values(("image", "labels"), required=("image",))
        return Scan(**values, modality=self.cells.get("modality", ""))

    def pair(self) -> Pair:
        """The row as a pair, by default named MOVING_to_FIXED."""
        values = self.values(FILES, required=SIDES) | {name: self.cells.get(name, "") for name in MODALITIES}
        for name in RESULTS:
            parts = map(str.strip, self.cells.get(name, "").split(";"))
            values[name] = tuple(self.table.parent / part for part in parts if part)
        name = self.cells.get("name") or f"{stem(values['moving'])}_to_{stem(values['fixed'])}"
        if name in (".", "..") or "/" in name or "\\" in name:
            raise self.error(f"invalid name {name!r}: it must not contain a path separator")
        return Pair(name, **values)


def read_table(
    path: PathLike, columns: Collection[str] = COLUMNS, *, unique: bool | None = False
) -> Sequence[Pair] | Sequence[Scan]:
    """Read a table of images if it has the column `image` and that is one of `columns`, or else a table of pairs.

    Other columns than `columns` are ignored with a warning. The files are not opened. Pairs of different images must
    have different names; with `unique=True`, all pairs must, and with None, names are not compared. Default names that
    are not different get the names of folders.
    """
    rows = _read_rows(Path(path), columns)
    if "image" in rows[0].cells:
        scans = [row.scan() for row in rows]
        if repeated := _repeated(scan.image for scan in scans):
            raise InputError(f"{path} lists {repeated[0]} twice; expected each image once")
        return scans
    pairs = [row.pair() for row in rows]
    count = Counter(name for name, _, _ in {(pair.name, pair.fixed, pair.moving) for pair in pairs})
    first: dict[str, tuple[int, Pair]] = {}
    for number, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        if count[pair.name] > 1 and not row.cells.get("name"):
            long = (_with_folders(file, Path(path).parent) for file in (pair.moving, pair.fixed))
            pairs[number] = pair = replace(pair, name="_to_".join(long))
        line, other = first.setdefault(pair.name, (row.line, pair))
        same = (pair.fixed, pair.moving) == (other.fixed, other.moving)
        if unique is not None and line != row.line and (unique or not same):
            both = f"lines {line} and {row.line}: both pairs are called {pair.name!r}"
            raise InputError(f"{path}, {both}; expected different names: add a column 'name'")
    return pairs


def read_pairs(path: PathLike, *, unique: bool | None = False) -> list[Pair]:
    """Read a table of pairs; see `read_table`.

    >>> pairs = read_pairs("pairs.csv")
    """
    return [pair for pair in read_table(path, unique=unique) if isinstance(pair, Pair)]


def _read_rows(path: Path, columns: Collection[str]) -> list[_Row]:
    """The rows of a CSV file with some of these columns, at least one; empty lines are skipped."""
    text = read_text(path, "a CSV file")
    separator = max(",;\t", key=text.lstrip().partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        expected = "cells separated by commas, semicolons or tabs, and quotes in pairs"
        raise InputError(f"{path}, line {reader.line_num}, is not valid CSV ({error}); expected {expected}") from error
    if len(lines) < 2:
        raise InputError(f"{path} has no rows; expected a line with the names of the columns, and one for each row")
    (_, names), *rows = lines
    if repeated := _repeated(filter(None, names)):
        raise InputError(f"{path} has the column {repeated[0]!r} twice; expected each column once")
    if not ("image" in columns and "image" in names) and not set(SIDES) <= set(names):
        expected = "'image', or 'fixed' and 'moving'" if "image" in columns else "'fixed' and 'moving'"
        raise InputError(f"{path} has the columns {', '.join(sorted(names))}; expected {expected}")
    if unknown := sorted(set(names) - {"", *columns}):
        log.warning("%s: ignoring unknown columns: %s", path, ", ".join(unknown))
    found = []
    for line, cells in rows:
        if any(cells[len(names) :]):
            expected = "the same number: put paths that contain the separator in quotes"
            raise InputError(f"{path}, line {line}: {len(cells)} cells for {len(names)} columns; expected {expected}")
        filled = itertools.zip_longest(names, cells[: len(names)], fillvalue="")
        found.append(_Row(path, line, {name: cell for name, cell in filled if name in columns}))
    return found


def _repeated(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]


def read_text(path: Path, expected: str, error: type[InputError] = InputError) -> str:
    """The content of a text file; otherwise raise `error`, whose message says what was `expected`."""
    if not path.is_file():
        raise error(f"{path} does not exist or is a folder; expected {expected}: check the path")
    with suppress(UnicodeDecodeError):
        if "\0" not in (text := path.read_text(encoding="utf-8-sig")):
            return text
    raise error(f"{path} is not text; expected {expected} in UTF-8")


def require_files(paths: Iterable[Path | None], source: PathLike) -> None:
    """Refuse a table that names files which do not exist; the message has the first, and how many more."""
    missing = [path for path in dict.fromkeys(paths) if path is not None and not path.exists()]
    if missing:
        more = f", and {len(missing) - 1} more of its files" if len(missing) > 1 else ""
        raise InputError(f"{source} names {missing[0]}, which does not exist{more}: paths are relative to the CSV file")


def stem(path: PathLike) -> str:
    """A file's name without its extension; `.nii.gz` counts as one."""
    name = Path(path).name
    return name[: -len(".nii.gz")] if name.lower().endswith(".nii.gz") else Path(name).stem


def _with_folders(path: Path, root: Path) -> str:
    """The stem, with the folders between `root` and the file in front of it."""
    parents = [part for part in Path(os.path.relpath(path, root)).parent.parts if part != ".."]
    return "-".join([*parents, stem(path)])
