"""`report.html`: one file that shows a registration, offline, in any browser.

It holds the volumes themselves, at no more than a display's resolution, and a small program that cuts slices from
them; nothing is fetched from anywhere.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import carlreg
from carlreg import preparation
from carlreg.files import orientation
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, Matrix, map_points
from carlreg.files.world_transform import PointMap
from carlreg.geometry import resizing
from carlreg.geometry.grids import Grid, interpolate
from carlreg.registration.result import Registration
from carlreg.show.report.encode import array_text, volume_uri

VOXELS = 1_100_000
"""Of each volume in the page at most: three of them, as text, take less than 5 MB even if they are pure noise."""
MAP_VOXELS = 300_000
LATTICE = 56
"""Points along each side, at most, at which the page knows the transform; between them it interpolates."""
UNITS = 8192
"""Steps per unit coordinate in which it does: ±4 images fit into 16 bits."""
DOUBLINGS = 2.0
"""Volume changes beyond 2^±2 look alike."""
CT_KNOTS = ((-1024.0, 0), (-200.0, 48), (300.0, 208), (1600.0, 255))
"""Grey levels for Hounsfield units: most of them where soft tissue is."""
CT_WINDOWS = {"soft tissue": (-160.0, 240.0), "lung": (-1000.0, 200.0), "bone": (-450.0, 1050.0)}


def write(
    registration: Registration,
    path: str | os.PathLike[str],
    *,
    spread: Image | None = None,
    dice: Mapping[str, tuple[float, float]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the report as one HTML file.

    `spread` is an image in the fixed image's world, in mm, smaller where the match is surer; without it, that of the
    registration, if it has one. `dice` gives the overlap of
    each structure before and after, by name; without it, labels go by their numbers.

    >>> write(register(fixed="a.nii.gz", moving="b.nii.gz"), "report.html")
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already; choose another name, or overwrite=True")
    write_atomically(target, page(registration, spread=spread, dice=dice).encode())
    return target


def page(
    registration: Registration,
    *,
    spread: Image | None = None,
    dice: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """The report's HTML."""
    part = resources.files(__package__)
    style, program, frame = ((part / f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html"))
    inputs = registration.settings.get("inputs", {})
    title = " on ".join(_name(inputs.get(side, {}), side) for side in ("moving", "fixed"))
    # "<" must not occur in the data, or a name could end the script.
    data = json.dumps(
        _data(registration, registration.spread if spread is None else spread), separators=(",", ":")
    ).replace("<", "\\u003c")
    filled = {
        "title": html.escape(title),
        "style": style,
        "warnings": _warnings(registration.warnings),
        "figures": _table(_figures(registration), ("", "")),
        "dice": _dice(_overlaps(registration) if dice is None else dice),
        "losses": _curves(registration.losses),
        "inputs": _inputs(inputs),
        "settings": _table(_settings(registration.settings), ("", "")),
        "version": html.escape(carlreg.__version__),
        "data": data,
        "program": program,
    }
    # Split once, so that nothing inside a value can be taken for a place to fill.
    pieces = frame.split("{{")
    return pieces[0] + "".join(filled[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:]))


def _overlaps(registration: Registration) -> dict[str, tuple[float, float]]:
    """Dice of each label before and after, where both images had labels."""
    before, after = (registration.dice.get(when, {}) for when in ("before", "after"))
    return {f"label {label}": (before.get(label, math.nan), score) for label, score in after.items()}


# ---- what the page draws --------------------------------------------------------------------------------------------


def _data(registration: Registration, spread: Image | None) -> dict[str, Any]:
    fixed, moving, warped = (
        orientation.to_closest_ras(image) for image in (registration.fixed, registration.moving, registration.warped)
    )
    shape, world_to_unit = display_shape(fixed, VOXELS), moving.world_to_unit()
    points = _points(fixed, tuple(min(n, LATTICE) for n in shape))
    lattice = map_points(world_to_unit, registration.transform(points))
    steps = np.clip(np.rint(lattice * UNITS), -32768, 32767).astype(np.int16)
    data: dict[str, Any] = {
        "planes": _planes(fixed.dim),
        "fixed": _picture(fixed, shape, registration.fixed),
        "warped": _picture(warped, shape, registration.moving),
        "moving": _picture(moving, display_shape(moving, VOXELS), registration.moving),
        "map": {"shape": _three(points.shape[:-1]), "units": UNITS, "values": array_text(_fortran(steps))},
        "jacobian": {**_jacobian(registration.transform, fixed), "doublings": DOUBLINGS},
    }
    if spread is not None:
        data["certainty"] = _certainty(spread, fixed)
    return data


def display_shape(image: Image, most: int) -> tuple[int, ...]:
    """Sides of a grid over the image with voxels as nearly cubes as can be, no finer than its finest axis."""
    extent = [max(s * (n - 1), 1e-6) for s, n in zip(image.spacing, image.shape, strict=True)]
    step = max(min(image.spacing), (math.prod(extent) / most) ** (1 / image.dim))
    while math.prod(shape := tuple(max(2, math.floor(e / step) + 1) for e in extent)) > most:
        step *= 1.01
    return shape


def _points(image: Image, shape: Sequence[int]) -> Matrix:
    """World points (*shape, D) of a grid over the image."""
    return map_points(image.unit_to_world(), Grid.of(shape).points(torch.float64).numpy())


def _picture(image: Image, shape: tuple[int, ...], source: Image) -> dict[str, Any]:
    """The image at the display's grid, in grey levels, and how to read them. `source` decides on modality and range."""
    _, done = preparation.preprocess(source)
    values = resizing.resize(torch.from_numpy(image.data.astype(np.float32))[None, None], shape)[0, 0].numpy()
    if done.kind == "CT":
        knots: Sequence[tuple[float, float]] = CT_KNOTS
        windows: dict[str, tuple[float, float]] = CT_WINDOWS
    else:
        knots = ((done.low, 0), (done.high, 255))
        windows = {"all": (done.low, done.high), "bright": (done.low, done.low + 0.6 * (done.high - done.low))}
    levels = np.interp(values, [value for value, _ in knots], [level for _, level in knots])
    volume = np.rint(levels).astype(np.uint8).reshape(_three(shape))
    extent = [s * (n - 1) for s, n in zip(image.spacing, image.shape, strict=True)]
    spacing = [e / max(n - 1, 1) for e, n in zip(extent, shape, strict=True)]
    return {
        **volume_uri(volume),
        "spacing": [*spacing, *[1.0] * (3 - image.dim)],
        "knots": knots,
        "windows": windows,
        "world": _unit_to_ras(image).tolist(),
    }


def _jacobian(transform: PointMap, fixed: Image) -> dict[str, Any]:
    """det ∇T as levels: 0 where space is turned inside out, 1 to 255 for 2^−2 to 2^2 times the volume."""
    shape = display_shape(fixed, MAP_VOXELS)
    points = _points(fixed, shape)
    moved = transform(points)
    columns, straight = ([np.gradient(field, axis=axis) for axis in range(fixed.dim)] for field in (moved, points))
    determinant = np.linalg.det(np.stack(columns, -1)) / np.linalg.det(np.stack(straight, -1))
    doublings = np.log2(np.clip(determinant, 1e-6, None)) / DOUBLINGS
    levels = np.where(determinant <= 0, 0, np.clip(np.rint(128 + 127 * doublings), 1, 255)).astype(np.uint8)
    return volume_uri(levels.reshape(_three(shape)))


def _certainty(spread: Image, fixed: Image) -> dict[str, Any]:
    """From the widest spread to the narrowest, in mm."""
    shape = display_shape(fixed, MAP_VOXELS)
    index = map_points(np.linalg.inv(spread.affine), _points(fixed, shape))
    unit = torch.from_numpy(index * Grid.of(spread.shape).spacing)[None]
    values = interpolate(torch.from_numpy(spread.data.astype(np.float64))[None, None], unit)[0, 0].numpy()
    narrow, wide = float(values.min()), float(values.max())
    levels = np.rint(255 * (wide - values) / max(wide - narrow, 1e-12)).astype(np.uint8)
    return {**volume_uri(levels.reshape(_three(shape))), "low": wide, "high": narrow}


def _planes(dim: int) -> list[dict[str, Any]]:
    """For each plane: array axis to the right, downwards and through it, which run backwards, and names of its edges.

    Array axes run to the right, to the front and to the head. Radiological: the patient's right is on the left.
    """
    if dim == 2:
        return [{"name": "image", "axes": [0, 1, 2], "flip": [False, False], "edges": ["", "", "", ""]}]
    return [
        {"name": "axial", "axes": [0, 1, 2], "flip": [True, True], "edges": ["R", "L", "A", "P"]},
        {"name": "coronal", "axes": [0, 2, 1], "flip": [True, True], "edges": ["R", "L", "S", "I"]},
        {"name": "sagittal", "axes": [1, 2, 0], "flip": [True, True], "edges": ["A", "P", "S", "I"]},
    ]


def _unit_to_ras(image: Image) -> Matrix:
    """(3, 4): unit coordinates to world millimetres as most viewers show them, RAS."""
    matrix = np.zeros((3, 4))
    dim = image.dim
    signs = np.array([-1.0, -1.0, 1.0])[:dim] if dim == 3 else np.ones(dim)
    unit = image.unit_to_world()
    matrix[:dim, :dim], matrix[:dim, 3] = signs[:, None] * unit[:-1, :-1], signs * unit[:-1, -1]
    return matrix


def _three(shape: Iterable[int]) -> list[int]:
    sides = list(shape)
    return [*sides, *[1] * (3 - len(sides))]


def _fortran(vectors: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """(*shape, D) as (components, z, y, x): each component apart, x fastest; a third one for pictures."""
    dim = vectors.shape[-1]
    whole = np.zeros((*_three(vectors.shape[:-1]), 3), np.int16)
    whole[..., :dim] = vectors.reshape(*_three(vectors.shape[:-1]), dim)
    return whole.transpose(3, 2, 1, 0)


# ---- what the page says ---------------------------------------------------------------------------------------------


def _name(described: Mapping[str, Any], otherwise: str = "") -> str:
    """The last part of a path: where files lie is nobody else's business, and reports are passed on."""
    return re.split(r"[/\\]", str(described.get("path", "")).rstrip("/\\"))[-1] or otherwise


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figures(registration: Registration) -> list[tuple[str, str]]:
    known = {
        "folds_percent": ("folded", "% of the fixed image"),
        "inverse_consistency_mm": ("disagreement of the two directions", "mm on average"),
        "inverse_error_mm": ("error of the written inverse", "mm on average"),
        "inverse_error_max_mm": ("the same, at most", "mm"),
        "dice_before": ("overlap before (Dice)", ""),
        "dice_after": ("overlap after", ""),
        "tre_before_mm": ("landmarks apart, before", "mm on average"),
        "tre_after_mm": ("landmarks apart, after", "mm on average"),
    }
    rows = []
    for key, value in registration.metrics.items():
        words, unit = known.get(key, (key.replace("_", " "), ""))
        rows.append((words, f"{_number(value)} {unit}".strip()))
    grid = Grid.of([min(n, 24) for n in registration.fixed.shape]).points(torch.float64).numpy()
    points = map_points(registration.fixed.unit_to_world(), grid)
    length = np.linalg.norm(registration.transform(points) - points, axis=-1)
    rows.insert(0, ("movement", f"{length.mean():.1f} mm on average, {length.max():.1f} mm at most"))
    return rows


def _settings(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in settings.items():
        words = key.replace("io_", "optimisation: ").replace("_", " ").replace("memory gb", "memory, GiB")
        if isinstance(value, Mapping):
            text = ", ".join(
                f"{name.replace('_', ' ')} {_cell(name, inner)}" for name, inner in value.items() if inner is not None
            )
            value = text.removeprefix("name ")
        if key != "inputs" and value is not None:
            rows.append((words, _cell(key, value)))
    return rows


def _inputs(inputs: Mapping[str, Mapping[str, Any]]) -> str:
    """The two images beside each other, then the names of what else was given."""
    pair = {side: inputs[side] for side in ("fixed", "moving") if side in inputs}
    keys = dict.fromkeys(itertools.chain.from_iterable(pair.values()))
    rows = [
        ("file", *(_name(described) for described in pair.values()))
        if key == "path"
        else (key.replace("_", " "), *(_cell(key, described.get(key, "")) for described in pair.values()))
        for key in keys
    ]
    others = [
        (words, *(_name(inputs.get(f"{side}_{key}", {})) for side in pair))
        for key, words in (("seg", "labels"), ("mask", "mask"), ("landmarks", "landmarks"))
        if any(f"{side}_{key}" in inputs for side in pair)
    ]
    first = [("first guess", _name(inputs["initial_transform"]), "")] if "initial_transform" in inputs else []
    return _table([*rows, *others, *first], ("", *pair))


def _cell(key: str, value: Any) -> str:
    if key.startswith("sha256"):
        return f"{value[:12]}…"
    return " × ".join(map(_number, value)) if isinstance(value, (list, tuple)) else _number(value)


def _dice(dice: Mapping[str, tuple[float, float]]) -> str:
    if not dice:
        return ""
    rows = [(name, f"{before:.3f}", f"{after:.3f}") for name, (before, after) in dice.items()]
    means = [float(np.nanmean([pair[i] for pair in dice.values()])) for i in (0, 1)]
    rows.append(("mean", f"{means[0]:.3f}", f"{means[1]:.3f}"))
    return "<section><h2>Overlap (Dice)</h2>" + _table(rows, ("structure", "before", "after")) + "</section>"


def _table(rows: Iterable[Sequence[str]], head: Sequence[str]) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        first, *others = (html.escape(cell) for cell in cells)
        return f"<tr><th>{first}</th>" + "".join(f"<{kind}>{cell}</{kind}>" for cell in others) + "</tr>"

    top = f"<thead>{line(head, 'th')}</thead>" if any(head) else ""
    return f"<div class=wide><table>{top}<tbody>{''.join(line(row, 'td') for row in rows)}</tbody></table></div>"


def _warnings(warnings: Sequence[str]) -> str:
    return "".join(f'<p class="warning" role="alert">{html.escape(text)}</p>' for text in warnings)


def _curves(losses: Sequence[Mapping[str, float]]) -> str:
    """Each part of the loss against the step, as a drawing."""
    if len(losses) < 2:
        return ""
    width, height, left, bottom = 640, 220, 56, 28
    names = [name for name in losses[0] if all(math.isfinite(step.get(name, math.nan)) for step in losses)]
    values = [step[name] for step in losses for name in names]
    low, high = min([*values, 0.0]), max(values)
    span = (high - low) or 1.0

    def place(step: float, value: float) -> str:
        x = left + (width - left - 8) * step / (len(losses) - 1)
        return f"{x:.1f},{8 + (height - bottom - 8) * (1 - (value - low) / span):.1f}"

    lines = [
        f'<polyline class="curve c{i % 4}" points="{" ".join(place(k, s[name]) for k, s in enumerate(losses))}"/>'
        for i, name in enumerate(names)
    ]
    marks = []
    for value in (low, low + span / 2, high):
        y = place(0, value).split(",")[1]
        marks.append(f"<line class=rule x1={left} x2={width - 8} y1={y} y2={y} />")
        marks.append(f"<text x={left - 6} y={y} text-anchor=end dominant-baseline=middle>{value:.3g}</text>")
    for step, anchor in ((0, "middle"), (len(losses) - 1, "end")):
        x = place(step, low).split(",")[0]
        marks.append(f"<text x={x} y={height - 8} text-anchor={anchor}>{step + 1}</text>")
    key = "".join(f'<span class="key c{i % 4}">{html.escape(name)}</span>' for i, name in enumerate(names))
    return (
        "<section><h2>Optimisation</h2>"
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss at each step">{"".join(marks + lines)}</svg>'
        f"<p>{key} at each of {len(losses)} steps</p></section>"
    )
