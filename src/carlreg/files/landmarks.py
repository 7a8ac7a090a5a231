"""Landmark files as world points in LPS millimetres: text (.csv, .tsv, .txt), and 3D Slicer's .fcsv and .mrk.json.

A text file has a row for each point, its cells separated by commas, semicolons, tabs or blanks. A header names the
columns, in any order and among other columns:

| header | meaning |
|---|---|
| `x,y,z` | millimetres, LPS as in ITK and ANTs, or the `space` that the caller names |
| `l,p,s` | millimetres, LPS |
| `r,a,s` | millimetres, RAS as in NIfTI |
| `i,j,k` | indices of the image's voxels, from 0; only where the image is known |

In the plane, the first two are enough. A file without a header has two or three columns, read as x, y and z. Anything
else is refused, never guessed.

A file of corresponding points has both in each row: `fixed_x,fixed_y,fixed_z,moving_x,moving_y,moving_z`, or with any
other header, such as `fixed_r,fixed_a,fixed_s`.
"""

import copy
import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from carlreg.errors import InputError
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, Matrix, PathLike, as_image, map_points
from carlreg.files.tables import read_text

Space = Literal["LPS", "RAS"]
ENDINGS = (".fcsv", ".mrk.json", ".csv", ".tsv", ".txt")
HEADERS = ("xyz", "lps", "ras", "ijk")
EXPECTED = "x,y,z, l,p,s, r,a,s or i,j,k"


class PointsError(InputError):
    """A landmark file that cannot be used."""


@dataclass(frozen=True, eq=False)
class Points:
    """The points of a file, in order, and the rest of it: names, descriptions, display settings."""

    positions: Matrix  # (N, D), world millimetres, LPS
    ending: str  # of the file's name, one of `ENDINGS`
    space: Space  # of the positions in the file
    source: Any  # the file's content: lines of text, or Slicer's JSON
    rows: dict[int, list[str]] = field(default_factory=dict)  # the cells of each line of text that is a point
    columns: tuple[int, ...] = ()  # of the coordinates in these
    separator: str = ","


def read_points(
    path: PathLike,
    *,
    space: Space = "LPS",
    dim: int | None = None,
    image: Image | PathLike | None = None,
    prefix: str = "",
) -> Points:
    """Read a landmark file.

    `space` is that of columns x, y, z; other headers and Slicer's files carry their own. `dim` is the number of
    coordinates that a point must have. `image` is the one whose voxels the indices i, j, k count; a path is only read
    if there are any. In .mrk.json, every control point of every markup counts. In a text file, `prefix` is that of the
    columns, such as `fixed_` for corresponding points.

    >>> read_points("landmarks.fcsv").positions
    """
    name = Path(path)
    ending = next((one for one in ENDINGS if name.name.lower().endswith(one)), None)
    if ending is None:
        raise PointsError(f"{path} has an unknown extension; expected one of {', '.join(ENDINGS)}")
    text = read_text(name, "a landmark file", PointsError)
    points = _read_json(name, text) if ending == ".mrk.json" else _read_rows(name, text, ending, space, image, prefix)
    if len(points.positions) == 0:
        raise PointsError(f"{path} holds no points; expected at least one")
    if not np.isfinite(points.positions).all():
        raise PointsError(f"{path} holds positions that are not finite; expected numbers")
    if dim not in (None, points.positions.shape[1]):
        raise PointsError(f"{path} holds {points.positions.shape[1]}-D points; expected {dim}-D ones, as the image is")
    return points


def read_landmarks(path: PathLike, image: Image) -> Matrix:
    """The landmarks (N, D) of an image, in world millimetres, LPS."""
    return read_points(path, dim=image.dim, image=image).positions


def read_correspondences(path: PathLike, fixed: Image, moving: Image) -> tuple[Matrix, Matrix]:
    """Points (N, D) of the fixed image, and those of the moving image that they correspond to, in LPS, from a text file
    that has both in each row."""
    if not Path(path).name.lower().endswith(ENDINGS[-3:]):
        expected = "one with the columns fixed_x, fixed_y, fixed_z, moving_x, moving_y, moving_z, or a file for each"
        raise PointsError(f"{path} is not a text file of corresponding points (.csv, .tsv, .txt); expected {expected}")
    here, there = (
        read_points(path, dim=image.dim, image=image, prefix=prefix).positions
        for prefix, image in (("fixed_", fixed), ("moving_", moving))
    )
    return here, there


def write_points(
    points: Points,
    positions: Matrix,
    path: PathLike,
    *,
    overwrite: bool = False,
    column: tuple[str, Sequence[float]] | None = None,
) -> None:
    """Write the file that `points` came from with other positions (N, D), LPS. It appears whole or not at all.

    `column` is the name of a further column of a text file, and its N numbers.
    """
    if not Path(path).name.lower().endswith(points.ending):
        raise PointsError(f"{path} should end in {points.ending}, like the file that the points came from")
    if positions.shape != points.positions.shape:
        raise PointsError(f"{positions.shape} points cannot replace {points.positions.shape}; expected the same number")
    placed = positions * _sign(points.space, positions.shape[1])
    text = _json_text(points, placed) if points.ending == ".mrk.json" else _rows_text(points, placed, column)
    write_atomically(path, text.encode(), overwrite=overwrite)


def _sign(space: str, dim: int) -> Matrix:
    return np.array([-1.0, -1.0, 1.0][:dim]) if space == "RAS" else np.ones(dim)


def _read_rows(path: Path, text: str, ending: str, space: Space, image: Image | PathLike | None, prefix: str) -> Points:
    lines = text.splitlines()
    filled = {number: line for number, line in enumerate(lines) if not line.startswith("#") and line.strip(" \t,;")}
    first = next(iter(filled.values()), "")
    separator = max(",;\t", key=first.count) if re.search("[,;\t]", first) else " "
    rows = {number: _cells(path, line, separator) for number, line in filled.items()}
    if ending == ".fcsv":
        axes, (space, columns) = "", _fcsv_settings(path, lines)
    else:
        axes, columns = _text_columns(path, next(iter(rows.values()), []), prefix)
        space = "RAS" if axes == "ras" else "LPS" if axes == "lps" else space
    if axes:
        del rows[min(rows)]
    dim, positions = len(columns), []
    for number, cells in rows.items():
        try:
            if not axes and ending != ".fcsv" and any(cells[dim:]):
                raise ValueError
            positions.append([float(cells[column]) for column in columns])
        except (ValueError, IndexError):
            text = f"{path}, line {number + 1}: {lines[number]!r} is not a point; expected {dim} numbers"
            raise PointsError(text) from None
    found = np.array(positions, dtype=np.float64).reshape(-1, dim)
    if axes == "ijk" and image is None:
        raise PointsError(f"{path} holds voxel indices i,j,k; expected millimetres: x,y,z, l,p,s or r,a,s")
    if axes == "ijk" and (grid := as_image(image, "image")).dim == dim:
        found = map_points(grid.index_to_world(), found)
    return Points(found * _sign(space, dim), ending, space, lines, rows, columns, separator)


def _cells(path: Path, line: str, separator: str) -> list[str]:
    if separator == " ":
        return line.split()
    try:
        return next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise PointsError(f"{path}: {line[:80]!r} is not valid CSV ({error}); expected quotes in pairs") from error


def _text_columns(path: Path, first: list[str], prefix: str) -> tuple[str, tuple[int, ...]]:
    """The header's axes, one of `HEADERS`, or "" if the first row is a point; and the columns of the coordinates."""
    names = [cell.strip().lower() for cell in first]
    if prefix:
        names = [name.removeprefix(prefix) if name.startswith(prefix) else "" for name in names]
    named = [axes for axes in HEADERS if set(axes[:2]) <= set(names)]
    if len(named) == 1:
        return named[0], tuple(names.index(axis) for axis in named[0] if axis in names)
    if prefix and len(named) != 1:
        expected = ", ".join(f"{prefix}{axis}" for axis in "xyz")
        raise PointsError(
            f"{path} has the columns {', '.join(first)}; expected also {expected}, or r, a, s, or i, j, k"
        )
    if named or (names and not any(re.match(r"[-+.]?\d", name) for name in names)):
        raise PointsError(f"{path} has the columns {', '.join(first)}; expected one set of {EXPECTED}")
    width = len([name for name in names if name])
    if width > 3:
        raise PointsError(f"{path} has {width} columns without a header; expected a first line that names {EXPECTED}")
    return "", tuple(range(max(width, 2)))


def _fcsv_settings(path: Path, lines: list[str]) -> tuple[Space, tuple[int, ...]]:
    """The space and the columns of the coordinates, from an .fcsv file's comments `# name = value`."""
    comments = [line.lstrip("# ").partition("=") for line in lines if line.startswith("#")]
    settings = {key.strip(): value.strip() for key, _, value in comments}
    system = settings.get("CoordinateSystem")
    known: dict[str | None, Space] = {"0": "RAS", "RAS": "RAS", "1": "LPS", "LPS": "LPS"}
    if system not in known:
        what = "names no CoordinateSystem" if system is None else f"is in the coordinate system {system!r}"
        raise PointsError(f"{path} {what}; expected LPS or RAS, as 3D Slicer writes it")
    names = [name.strip() for name in settings.get("columns", "id,x,y,z").split(",")]
    if not set("xyz") <= set(names):
        raise PointsError(f"{path} has the columns {', '.join(names)}; expected x, y and z, as 3D Slicer writes them")
    return known[system], tuple(names.index(axis) for axis in "xyz")


def _rows_text(points: Points, positions: Matrix, column: tuple[str, Sequence[float]] | None = None) -> str:
    out = io.StringIO()
    header, more = min(points.rows, default=0) - 1, iter(() if column is None else column[1])
    writer = csv.writer(out, delimiter=points.separator, lineterminator="\n")
    left = iter(positions)
    for number, line in enumerate(points.source):
        if number not in points.rows:  # a header, a comment or an empty line
            named = column is not None and number == header and line.strip() and not line.lstrip().startswith("#")
            out.write(f"{line}{points.separator}{column[0]}\n" if column is not None and named else f"{line}\n")
            continue
        cells = list(points.rows[number])
        for cell, value in zip(points.columns, next(left), strict=True):
            cells[cell] = f"{value:.6f}"
        writer.writerow(cells if column is None else [*cells, f"{next(more):.2f}"])
    return out.getvalue()


def _read_json(path: Path, text: str) -> Points:
    try:
        content = json.loads(text)
        spaces = {markup["coordinateSystem"] for markup in content["markups"]}
        positions = [point["position"] for markup in content["markups"] for point in markup["controlPoints"]]
        if not all(len(p) == 3 and all(isinstance(c, (int, float)) and math.isfinite(c) for c in p) for p in positions):
            raise PointsError(f"{path} has control points without a position; expected three numbers each")
    except (json.JSONDecodeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PointsError(f"{path} is not a markups file of 3D Slicer ({error}); expected one that it wrote") from error
    if len(spaces) > 1 or not spaces <= {"LPS", "RAS"}:
        raise PointsError(f"{path} is in the coordinate systems {sorted(map(str, spaces))}; expected LPS or RAS")
    space: Space = "RAS" if spaces == {"RAS"} else "LPS"
    return Points(np.array(positions, dtype=np.float64).reshape(-1, 3) * _sign(space, 3), ".mrk.json", space, content)


def _json_text(points: Points, positions: Matrix) -> str:
    left = iter(positions.tolist())
    try:
        content = copy.deepcopy(points.source)
        for markup in content["markups"]:
            for point in markup["controlPoints"]:
                point["position"] = next(left)
        return json.dumps(content, indent=2) + "\n"
    except RecursionError as error:
        raise PointsError("the markups file is nested too deeply; expected one as 3D Slicer writes it") from error
