"""`report.html`: one file that shows a registration in any browser, offline.

It holds the volumes themselves, at a display's resolution, and a small script that cuts slices from them.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import carlreg
from carlreg.errors import OVERWRITE, OutputError
from carlreg.files.atomic import PathLike, write_atomically
from carlreg.files.images import Image
from carlreg.files.label_names import Names, guess_names, read_names
from carlreg.registration.result import Registration
from carlreg.show.display import grid_over
from carlreg.show.report.curves import plot_losses
from carlreg.show.report.volumes import is_reduced, label_numbers, page_data, voxel_points

Row = tuple[str, ...]
METRICS = {
    "folds_percent": ("folds", "% of the fixed image"),
    "sd_log_jacobian": ("SDlogJ", "spread of the volume change"),
    "inverse_consistency_mm": ("inverse consistency error", "mm on average"),
    "inverse_error_mm": ("error of the written inverse", "mm on average"),
    "inverse_error_max_mm": ("error of the written inverse", "mm at most"),
    "dice_before": ("Dice before", ""),
    "dice_after": ("Dice after", ""),
    "tre_before_mm": ("landmark error before", "mm on average"),
    "tre_after_mm": ("landmark error after", "mm on average"),
    "guide_before_mm": ("guide points before", "mm apart on average"),
    "guide_after_mm": ("guide points after", "mm apart on average"),
}


@dataclass(frozen=True)
class Structure:
    """A row of the table of labels. `label` is its number, if it is known."""

    name: str
    label: int | None
    before: float
    after: float


def write(
    registration: Registration,
    path: str | os.PathLike[str],
    *,
    spread: Image | None = None,
    dice: Mapping[str, tuple[float, float]] | None = None,
    label_names: PathLike | Names | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the report to a file.

    `spread` is an image in the fixed image's world, in mm, small where the match is certain; by default, that of the
    registration. `dice` is the overlap of each structure before and after, by name; by default, that of the labels.
    `label_names` are their names, by number, or the file or the well-known table that has them.

    >>> write(register(fixed="a.nii.gz", moving="b.nii.gz"), "report.html")
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists already; choose another name, or {OVERWRITE}")
    text = page(registration, spread=spread, dice=dice, label_names=label_names)
    write_atomically(target, text.encode())
    return target


def page(
    registration: Registration,
    *,
    spread: Image | None = None,
    dice: Mapping[str, tuple[float, float]] | None = None,
    label_names: PathLike | Names | None = None,
) -> str:
    """The report as HTML; see `write`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader(__name__, ""), autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    folder = resources.files(__name__)
    settings = dict(registration.settings)
    inputs, confidence = settings.pop("inputs", {}), settings.pop("confidence", None)
    names = _names(registration, label_names)
    data = page_data(registration, registration.spread if spread is None else spread, names)
    structures = list(_overlaps(registration, names) if dice is None else _named(dice, names))
    return environment.get_template("page.html").render(
        title=" on ".join(_file_name(inputs.get(side, {})) or side for side in ("moving", "fixed")),
        style=(folder / "page.css").read_text("utf-8"),
        script=(folder / "page.js").read_text("utf-8"),
        confidence=confidence,
        warnings=registration.warnings,
        metrics=list(_metrics(registration)),
        structures=structures,
        means=[_mean([getattr(one, when) for one in structures]) for when in ("before", "after")],
        plot=plot_losses(registration.losses),
        sides=[side for side in ("fixed", "moving") if side in inputs],
        inputs=list(_inputs(inputs)),
        settings=[(_title(key), _text(key, value)) for key, value in settings.items() if value is not None],
        version=carlreg.__version__,
        reduced=is_reduced(data, registration),
        data=data,
    )


def _names(registration: Registration, given: PathLike | Names | None) -> Names:
    """The names that were given or recorded, or those of FreeSurfer if the labels are its."""
    if given is not None:
        return read_names(given)
    return registration.record.label_names or guess_names(label_numbers(registration))


def _metrics(registration: Registration) -> Iterator[Row]:
    points = voxel_points(grid_over(registration.fixed, tuple(min(n, 24) for n in registration.fixed.shape)))
    length = np.linalg.norm(registration.transform(points) - points, axis=-1)
    yield "displacement", f"{length.mean():.1f} mm on average, {length.max():.1f} mm at most"
    for key, value in registration.metrics.items():
        title, unit = METRICS.get(key, (key.replace("_", " "), ""))
        yield title, f"{_text(key, value)} {unit}".strip()


def _overlaps(registration: Registration, names: Names) -> Iterator[Structure]:
    """Dice of each label before and after, if both images had labels."""
    before, after = (registration.dice.get(when, {}) for when in ("before", "after"))
    for label, score in after.items():
        yield Structure(names.get(label, f"label {label}"), label, before.get(label, math.nan), score)


def _named(dice: Mapping[str, tuple[float, float]], names: Names) -> Iterator[Structure]:
    labels = {name: label for label, name in names.items()}
    for name, scores in dice.items():
        yield Structure(name, labels.get(name), *scores)


def _mean(scores: Sequence[float]) -> float:
    finite = [score for score in scores if math.isfinite(score)]
    return sum(finite) / len(finite) if finite else math.nan


def _inputs(inputs: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """A row for each property of the two images, then one for each further input."""
    pair = {side: inputs[side] for side in ("fixed", "moving") if side in inputs}
    for key in dict.fromkeys(itertools.chain.from_iterable(pair.values())):
        if key == "path":
            yield "file", *(_file_name(entry) for entry in pair.values())
        else:
            yield _title(key), *(_text(key, entry.get(key, "")) for entry in pair.values())
    for key, title in (("seg", "labels"), ("mask", "mask"), ("landmarks", "landmarks")):
        if any(f"{side}_{key}" in inputs for side in pair):
            yield title, *(_file_name(inputs.get(f"{side}_{key}", {})) for side in pair)
    if "initial_transform" in inputs:
        yield "initial transform", _file_name(inputs["initial_transform"]), ""


def _file_name(entry: Mapping[str, Any]) -> str:
    """The name without its folders: reports are passed on, and paths may hold names of people."""
    return re.split(r"[/\\]", str(entry.get("path", "")).rstrip("/\\"))[-1]


def _title(key: str) -> str:
    return key.replace("io_", "optimisation: ").replace("_", " ").replace("memory gb", "memory, GiB")


def _text(key: str, value: Any) -> str:
    if key.startswith("sha256"):
        return f"{value[:12]}…"
    if isinstance(value, Mapping):
        items = (f"{name.replace('_', ' ')} {_text(name, item)}" for name, item in value.items() if item is not None)
        return ", ".join(items).removeprefix("name ")
    if isinstance(value, (list, tuple)):
        return " × ".join(_text("", item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
