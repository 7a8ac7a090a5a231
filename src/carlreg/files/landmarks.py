"""Landmark files: CSV, and 3D Slicer's .fcsv and .mrk.json, as world points in LPS millimetres.

A file keeps everything that is not a position (names, descriptions, display settings) when its points are replaced.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from carlreg.files.atomic import write_atomically
from carlreg.files.images import Matrix, PathLike

Space = Literal["LPS", "RAS"]
ENDINGS = (".csv", ".fcsv", ".mrk.json")


class PointsError(ValueError):
    """A file that does not hold points we can use. One line: which, what was found, what was expected."""


@dataclass(frozen=True, eq=False)
class Points:
    """Points of a file, in order."""

    positions: Matrix  # (N, D), world millimetres, LPS
    ending: str  # of the format, one of `ENDINGS`
    space: Space  # in which the file has them
    source: Any  # the file's content: rows of text, or Slicer's JSON
    columns: tuple[int, ...] = ()  # of the coordinates, where there are rows

    def replaced(self, positions: Matrix) -> bytes:
        """The file's content with other positions (N, D), LPS."""
        if positions.shape != self.positions.shape:
            raise PointsError(f"{positions.shape} points cannot replace {self.positions.shape}; expected as many")
        signed = positions * _sign(self.space, positions.shape[1])
        return (_json_bytes if self.ending == ".mrk.json" else _row_bytes)(self, signed)


def read_points(path: PathLike, *, space: Space = "LPS") -> Points:
    """Read a landmark file. `space` is that of a CSV, which does not say; Slicer's files do.

    A CSV has a column each for x, y and, in 3-D, z, found by the names in its first line; without such names the first
    three columns count (two, if there are but two). In .mrk.json, every control point of every markup counts.

    >>> read_points("landmarks.fcsv").positions
    """
    name = Path(path)
    ending = next((one for one in ENDINGS if name.name.lower().endswith(one)), None)
    if ending is None:
        raise PointsError(f"{path} has an unknown extension; expected one of {', '.join(ENDINGS)}")
    if not name.is_file():
        raise PointsError(f"{path} does not exist or is a folder; expected a file of points: check the path")
    try:
        text = name.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PointsError(f"{path} is not text; expected a file of points") from error
    found = _read_json(name, text) if ending == ".mrk.json" else _read_rows(name, text, ending, space)
    if len(found.positions) == 0:
        raise PointsError(f"{path} holds no points; expected at least one")
    if not np.isfinite(found.positions).all():
        raise PointsError(f"{path} holds positions that are not finite; expected numbers")
    return found


def write_points(points: Points, positions: Matrix, path: PathLike, *, overwrite: bool = False) -> None:
    """Write the file that `points` came from with other positions (N, D), LPS. It appears whole or not at all."""
    name = Path(path)
    if not name.name.lower().endswith(points.ending):
        raise PointsError(f"{path} should end in {points.ending}, as the file that the points came from")
    if name.exists() and not overwrite:
        raise PointsError(f"{path} exists already; expected a new name: choose another, or allow overwriting")
    write_atomically(name, points.replaced(positions))


def _sign(space: str, dim: int) -> Matrix:
    return np.array([-1.0, -1.0, 1.0][:dim]) if space == "RAS" else np.ones(dim)


# ---- CSV and .fcsv --------------------------------------------------------------------------------------------------


def _read_rows(path: Path, text: str, ending: str, space: Space) -> Points:
    lines = text.splitlines()
    if ending == ".fcsv":
        space = _fcsv_space(path, lines)
    rows = [[line] if line.startswith("#") or not line.strip() else next(csv.reader([line])) for line in lines]
    names = _column_names(rows, ending)
    columns = tuple(names.index(axis) for axis in ("x", "y", "z") if axis in names)
    first = next((row for row in rows if _is_data(row)), [])
    if not columns:
        columns = tuple(range(3 if len(first) >= 3 else 2))
    positions = []
    for number, row in enumerate(rows, start=1):
        if not _is_data(row) or _is_header(row):
            continue
        try:
            positions.append([float(row[column]) for column in columns])
        except (ValueError, IndexError) as error:
            raise PointsError(f"{path}, line {number}: {','.join(row)!r} is no point; expected x,y,z in mm") from error
    dim = len(columns)
    return Points(np.array(positions).reshape(-1, dim) * _sign(space, dim), ending, space, rows, columns)


def _fcsv_space(path: Path, lines: list[str]) -> Space:
    for line in lines:
        key, _, value = line.lstrip("# ").partition("=")
        if line.startswith("#") and key.strip() == "CoordinateSystem":
            known: dict[str, Space] = {"0": "RAS", "RAS": "RAS", "1": "LPS", "LPS": "LPS"}
            if value.strip() not in known:
                raise PointsError(f"{path} is in the coordinate system {value.strip()!r}; expected RAS or LPS")
            return known[value.strip()]
    raise PointsError(f"{path} does not say its CoordinateSystem; expected a file as 3D Slicer writes it")


def _column_names(rows: list[list[str]], ending: str) -> list[str]:
    if ending == ".fcsv":
        for row in rows:
            key, _, value = row[0].lstrip("# ").partition("=") if row else ("", "", "")
            if key.strip() == "columns":
                return [name.strip() for name in value.split(",")]
        return ["id", "x", "y", "z"]
    first = next((row for row in rows if _is_data(row)), [])
    return [name.strip().lower() for name in first] if _is_header(first) else []


def _is_data(row: list[str]) -> bool:
    return bool(row) and not row[0].startswith("#") and any(cell.strip() for cell in row)


def _is_header(row: list[str]) -> bool:
    return {"x", "y"} <= {cell.strip().lower() for cell in row}


def _row_bytes(points: Points, positions: Matrix) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    left = iter(positions)
    for row in points.source:
        if not _is_data(row):
            out.write("".join(row) + "\n")
        elif _is_header(row):
            writer.writerow(row)
        else:
            new = list(row)
            for column, value in zip(points.columns, next(left), strict=True):
                new[column] = f"{value:.6f}"
            writer.writerow(new)
    return out.getvalue().encode()


# ---- .mrk.json ------------------------------------------------------------------------------------------------------


def _read_json(path: Path, text: str) -> Points:
    try:
        content = json.loads(text)
        spaces = {markup["coordinateSystem"] for markup in content["markups"]}
        positions = [point["position"] for markup in content["markups"] for point in markup["controlPoints"]]
        if not all(len(p) == 3 and all(isinstance(c, (int, float)) and math.isfinite(c) for c in p) for p in positions):
            raise PointsError(f"{path} has control points without a position; expected three numbers each")
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise PointsError(
            f"{path} is no markups file of 3D Slicer ({error}); expected one as Slicer writes it"
        ) from error
    if len(spaces) > 1 or not spaces <= {"LPS", "RAS"}:
        raise PointsError(f"{path} is in the coordinate systems {sorted(map(str, spaces))}; expected LPS or RAS")
    space: Space = "RAS" if spaces == {"RAS"} else "LPS"
    return Points(np.array(positions, dtype=np.float64).reshape(-1, 3) * _sign(space, 3), ".mrk.json", space, content)


def _json_bytes(points: Points, positions: Matrix) -> bytes:
    content = json.loads(json.dumps(points.source))  # a copy
    left = iter(positions.tolist())
    for markup in content["markups"]:
        for point in markup["controlPoints"]:
            point["position"] = next(left)
    return (json.dumps(content, indent=2) + os.linesep).encode()
