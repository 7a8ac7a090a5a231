"""Tables of pairs, and of single images, in CSV files.

A table of pairs has the columns `fixed` and `moving`, and any other of `COLUMNS`. A table of images, for training, has
the column `image`, and optionally `labels` and `split`. Cells are separated by commas, semicolons or tabs. Paths are
relative to the table's folder; `transform` and `inverse` may name several files, joined by ";" in ANTs' order.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from carlreg.errors import InputError
from carlreg.files.atomic import write_atomically
from carlreg.files.images import PathLike

log = logging.getLogger(__name__)

Side = Literal["fixed", "moving"]
SIDES: tuple[Side, Side] = ("fixed", "moving")
FILES = (*SIDES, *(f"{side}_{kind}" for kind in ("seg", "mask", "landmarks") for side in SIDES), "initial_transform")
RESULTS = ("transform", "inverse")
COLUMNS = ("name", *FILES, *RESULTS, "split")
IMAGE_COLUMNS = ("image", "labels", "split")
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
    split: str = ""
    """"train", "val" or "test", or empty if the table has no such column."""

    def files(self) -> dict[str, Any]:
        """The input files by their column, as `register` takes them."""
        return {name: path for name in FILES if (path := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Scan:
    """One image of a table of images."""

    image: Path
    labels: Path | None = None
    split: str = ""


@dataclass(frozen=True)
class Table:
    """A CSV file, checked and split into cells; empty rows are left out."""

    path: Path
    columns: frozenset[str]
    rows: tuple[tuple[int, dict[str, str]], ...]
    """The number of each row's line, and its cells by column."""

    def pairs(self, *, unique: bool = False) -> list[Pair]:
        """A pair for each row. Pairs without a name are called MOVING_to_FIXED, with their folders if need be.

        Two pairs of different images must not have the same name; with `unique`, no two pairs may.
        """
        self._require("fixed", "moving")
        pairs = [self._pair(line, cells) for line, cells in self.rows]
        named = [bool(cells.get("name")) for _, cells in self.rows]
        pairs = _with_folders(pairs, named, self.path.parent)
        first: dict[str, tuple[int, Pair]] = {}
        for (line, _), pair in zip(self.rows, pairs, strict=True):
            earlier, other = first.setdefault(pair.name, (line, pair))
            if earlier != line and (unique or (pair.fixed, pair.moving) != (other.fixed, other.moving)):
                raise InputError(
                    f"{self.path}, lines {earlier} and {line}: both pairs are called {pair.name!r}; expected different "
                    "names: add a column 'name'"
                )
        return pairs

    def images(self) -> list[Scan]:
        """An image for each row, each only once."""
        self._require("image")
        scans = [
            Scan(self._path(cells["image"]), self._optional(cells.get("labels")), self._split(line, cells))
            for line, cells in self.rows
        ]
        repeated = [image for image, count in Counter(scan.image for scan in scans).items() if count > 1]
        if repeated:
            raise InputError(f"{self.path} lists {repeated[0]} twice; expected each image once")
        return scans

    def _require(self, *names: str) -> None:
        """Refuse empty cells in these columns."""
        for line, cells in self.rows:
            for name in names:
                if not cells[name]:
                    raise InputError(f"{self.path}, line {line}: {name} is empty; expected a path in every row")

    def _pair(self, line: int, cells: dict[str, str]) -> Pair:
        paths: dict[str, Any] = {name: self._optional(cells.get(name)) for name in FILES}
        for name in RESULTS:
            paths[name] = tuple(self._path(part.strip()) for part in cells.get(name, "").split(";") if part.strip())
        name = cells.get("name") or default_name(paths["fixed"], paths["moving"])
        try:
            check_name(name)
        except InputError as error:
            raise InputError(f"{self.path}, line {line}: {error}") from None
        return Pair(name, **paths, split=self._split(line, cells))

    def _split(self, line: int, cells: dict[str, str]) -> str:
        split = cells.get("split", "")
        if "split" in self.columns and split not in SPLITS:
            raise InputError(f"{self.path}, line {line}: split is {split!r}; expected 'train', 'val' or 'test'")
        return split

    def _path(self, cell: str) -> Path:
        return self.path.parent / cell

    def _optional(self, cell: str | None) -> Path | None:
        return self._path(cell) if cell else None


def read_table(path: PathLike, columns: Collection[str] = COLUMNS) -> Table:
    """Read a CSV file. Columns other than `columns` are ignored with a warning."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist or is a folder; expected a CSV file: check the path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text; expected a CSV file in UTF-8") from error
    if "\0" in text:
        raise InputError(f"{path} is not text; expected a CSV file in UTF-8")
    header, rows = _split_cells(path, text)
    repeated = [name for name, count in Counter(header).items() if name and count > 1]
    if repeated:
        raise InputError(f"{path} has the column {repeated[0]!r} twice; expected each column once")
    if not rows:
        raise InputError(f"{path} has no rows; expected a line with the names of the columns, and one for each row")
    for line, cells in rows:
        if any(cells[len(header) :]):
            raise InputError(
                f"{path}, line {line}: {len(cells)} cells for {len(header)} columns; expected as many: put paths that "
                "contain the separator in quotes"
            )
    if not ("image" in columns and "image" in header) and not {"fixed", "moving"} <= set(header):
        expected = "'image', or 'fixed' and 'moving'" if "image" in columns else "'fixed' and 'moving'"
        raise InputError(f"{path} has the columns {', '.join(sorted(header))}; expected {expected}")
    unknown = sorted(set(header) - {"", *columns})
    if unknown:
        log.warning("%s: ignoring unknown columns: %s", path, ", ".join(unknown))
    used = [(number, name) for number, name in enumerate(header) if name in columns]
    found = (
        (line, {name: cells[number] if number < len(cells) else "" for number, name in used}) for line, cells in rows
    )
    return Table(path, frozenset(header) - {""}, tuple(found))


def _split_cells(path: Path, text: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The cells of the header, and those of each row that is not empty with the number of its line."""
    separator = max(",;\t", key=text.lstrip().partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise InputError(
            f"{path}, line {reader.line_num}, is not valid CSV ({error}); expected cells separated by commas, "
            "semicolons or tabs, and quotes in pairs"
        ) from error
    return (rows[0][1], rows[1:]) if rows else ([], [])


def read_pairs(path: PathLike, *, unique: bool = False) -> list[Pair]:
    """Read a table of pairs; see `Table.pairs`. Its files are not opened.

    >>> pairs = read_pairs("pairs.csv")
    """
    return read_table(path).pairs(unique=unique)


def write_pairs(pairs: Iterable[Pair], path: PathLike) -> None:
    """Write pairs as a CSV file, with absolute paths."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    pairs = list(pairs)
    columns = [name for name in COLUMNS if name != "split" or any(pair.split for pair in pairs)]
    writer.writerow(columns)
    writer.writerows([_as_text(getattr(pair, column)) for column in columns] for pair in pairs)
    write_atomically(path, text.getvalue().encode())


def require_files(paths: Iterable[Path | None], source: PathLike) -> None:
    """Refuse a table that names files which do not exist; the message has the first, and how many more."""
    missing = [path for path in dict.fromkeys(paths) if path is not None and not path.exists()]
    if missing:
        more = f", and {len(missing) - 1} more of its files" if len(missing) > 1 else ""
        raise InputError(f"{source} names {missing[0]}, which does not exist{more}: paths are relative to the CSV file")


def check_name(name: str) -> None:
    """Refuse a name that cannot be the name of a pair's folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name:
        raise InputError(f"invalid name {name!r}: it must not contain a path separator")


def stem(path: PathLike) -> str:
    """A file's name without its extension; `.nii.gz` counts as one."""
    name = Path(path).name
    return name[: -len(".nii.gz")] if name.lower().endswith(".nii.gz") else Path(name).stem


def default_name(fixed: PathLike, moving: PathLike) -> str:
    """The name of a pair that has none of its own: MOVING_to_FIXED."""
    return f"{stem(moving)}_to_{stem(fixed)}"


def _with_folders(pairs: list[Pair], named: list[bool], folder: Path) -> list[Pair]:
    """Add the folders to default names that pairs of different images share, as `s1/t1.nii.gz`, `s2/t1.nii.gz` do."""
    count = Counter(name for name, _, _ in {(pair.name, pair.fixed, pair.moving) for pair in pairs})

    def long_stem(path: Path) -> str:
        parents = [part for part in Path(os.path.relpath(path, folder)).parent.parts if part != ".."]
        return "-".join([*parents, stem(path)])

    return [
        replace(pair, name=f"{long_stem(pair.moving)}_to_{long_stem(pair.fixed)}")
        if count[pair.name] > 1 and not has_name
        else pair
        for pair, has_name in zip(pairs, named, strict=True)
    ]


def _as_text(value: str | Path | tuple[Path, ...] | None) -> str:
    if isinstance(value, tuple):
        return ";".join(str(path.resolve()) for path in value)
    return str(value.resolve()) if isinstance(value, Path) else value or ""
