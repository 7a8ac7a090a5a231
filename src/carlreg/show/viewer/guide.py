"""Corrections by hand: pairs of points that the user clicked, and the registration that they guide."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from carlreg.errors import InputError
from carlreg.files.atomic import write_atomically
from carlreg.files.checksums import sha256
from carlreg.files.results import Report
from carlreg.registration.options import RegisterOptions
from carlreg.show.viewer.jobs import Task, free_path, task_options
from carlreg.show.viewer.scene import Scene

COLUMNS = tuple(f"{side}_{axis}" for side in ("fixed", "moving") for axis in "xyz")
MOST = 1000
"""Pairs of points that are accepted."""
NEEDED = ("fixed", "moving", "fixed_mask", "moving_mask", "initial_transform", "rigid_mask", "moving_rigid_mask")
"""Inputs that change the result, other than the points, of which the page sends the new list; labels and landmarks are
only scored."""
Pairs = Sequence[Sequence[float]]


def read_pairs(value: Any, dim: int) -> Pairs:
    """Check pairs as a page sends them: six numbers each, the fixed and the moving point in LPS mm."""
    good = isinstance(value, list) and 0 < len(value) <= MOST
    if not good or not all(isinstance(row, list) and len(row) == 6 and all(map(_is_position, row)) for row in value):
        raise InputError(f"expected 1 to {MOST} pairs of points, six numbers each, in mm")
    return [[*row[:dim], *row[3 : 3 + dim]] for row in value]


def _is_position(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e6


def save_pairs(pairs: Pairs, path: Path) -> Path:
    """Write pairs as a file for `carl register --guide`."""
    text, dim = io.StringIO(), len(pairs[0]) // 2
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name for name in COLUMNS if name[-1] in "xyz"[:dim]])
    writer.writerows([f"{number:.3f}" for number in row] for row in pairs)
    write_atomically(path, text.getvalue().encode(), overwrite=False)
    return path


def points_path(scene: Scene) -> Path:
    """Where to save points of a scene: beside its folder."""
    return free_path(scene.folder.absolute(), "_points").with_suffix(".csv")


def guided_task(scene: Scene, pairs: Pairs, model: str | None = None) -> Task:
    """The registration of a scene's images once more, guided by pairs, into a new folder beside the old one.

    The files are those that the scene shows, found and checked as it does. `model` is needed if the result was made
    with a model that is not part of the package.
    """
    report = scene.record
    if report is None:
        raise InputError(f"{scene.folder} has no readable report.json; expected one that names the inputs and options")
    for name in NEEDED:
        if (name in ("fixed", "moving") or name in report.inputs) and name not in scene.paths:
            title = name.replace("_", " ")
            raise InputError(f"the {title} of this result was not found or has changed; put it back, or give --trust")
    options, chosen = _options(report), model or _model(report)
    out = free_path(scene.folder.absolute(), "_guided")
    points = save_pairs(pairs, out.with_name(f"{out.name}.csv"))
    inputs = {name: str(path.absolute()) for name, path in scene.paths.items()} | {"guide": str(points)}
    if "moving_seg" not in inputs:
        inputs.pop("fixed_seg", None)
    names = {str(label): name for label, name in report.label_names.items()}
    return Task(inputs, str(out), chosen, options, names)


def _options(report: Report) -> Mapping[str, Any]:
    """The recorded options, changed so that points can guide the optimisation."""
    recorded = {} if report.request is None else report.request.options
    known = {one.name for one in fields(RegisterOptions)} - {"device"}
    options = {name: value for name, value in recorded.items() if name in known}
    if options.get("transform", "deformable") != "deformable":
        raise InputError(f"points guide deformable registrations; this one is {options['transform']}")
    if options.get("optimize") == "weights":
        options["optimize"] = "auto"
    if options.get("io_iterations") == 0:
        options["io_iterations"] = None
    try:
        task_options(options).check_guided()
    except TypeError as error:
        raise InputError(f"report.json has options that cannot be used ({error})") from error
    return options


def _model(report: Report) -> str:
    """The model of a result, if it is part of the package, recognised by its checksum."""
    from carlreg.model.shipped import DEFAULT, WEIGHTS, available

    checksum = report.model.get("sha256")
    if checksum is None and report.model.get("name") == "none":
        return "none"
    rotated = report.request is not None and report.request.options.get("search_rotation")
    for name in available():
        if sha256(WEIGHTS / f"{name}.safetensors") == checksum:
            return "auto" if rotated and name == DEFAULT else name
    raise InputError(
        f"the model {str(report.model.get('name', 'of this result'))!r} is not part of the package; "
        "start carl view with --model FILE"
    )
