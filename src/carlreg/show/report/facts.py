"""The tables of the report: metrics, images and settings, in words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from carlreg.files.results import Report
from carlreg.registration.result import Registration
from carlreg.show.display import grid_over
from carlreg.show.report.volumes import voxel_points

Row = tuple[str, ...]
METRICS: Mapping[str, Mapping[str, str]] = {
    "folds": {"folds_percent": "{:.4g} % of the fixed image"},
    "SDlogJ": {"sd_log_jacobian": "{:.4g} spread of the volume change"},
    "inverse consistency error": {"inverse_consistency_mm": "{:.4g} mm on average"},
    "error of the written inverse": {
        "inverse_error_mm": "{:.2g} mm on average",
        "inverse_error_max_mm": "{:.3g} mm at most",
    },
    "Dice": {"dice_before": "{:.3f} before", "dice_after": "{:.3f} after"},
    "landmark error": {"tre_before_mm": "{:.2f} mm on average before", "tre_after_mm": "{:.2f} mm after"},
    "guide points": {
        "guide_before_mm": "{:.2f} mm apart on average before",
        "guide_after_mm": "{:.2f} mm after",
        "guide_after_max_mm": "{:.2f} mm at most",
        "guide_before_max_mm": "",
    },
    "changed to keep regions rigid": {"rigid_correction_mm": "{:.2g} mm at most"},
}
"""The metrics of each row, by their names in `report.json`."""
IMAGES = {
    "shape": "voxels",
    "spacing_mm": "spacing, mm",
    "sha256_voxels": "sha256 of the voxels",
    "seen": "seen by the network",
    "given_as": "given as",
}


def metrics(registration: Registration) -> Iterator[Row]:
    """How far points move, and every metric of the registration."""
    points = voxel_points(grid_over(registration.fixed, tuple(min(n, 24) for n in registration.fixed.shape)))
    length = np.linalg.norm(registration.transform(points) - points, axis=-1)
    yield "displacement", f"{length.mean():.1f} mm on average, {length.max():.1f} mm at most"
    values = dict(registration.metrics)
    for title, parts in METRICS.items():
        texts = [text.format(values.pop(name)) for name, text in parts.items() if name in values]
        if any(texts):
            yield title, ", ".join(filter(None, texts))
    for name, value in values.items():
        yield name.replace("_", " "), _text(name, value)


def images(inputs: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """A row for each property of the two images, then one for each further input."""
    pair = {side: inputs[side] for side in ("fixed", "moving") if side in inputs}
    for key in dict.fromkeys(itertools.chain.from_iterable(pair.values())):
        if key == "path":
            yield "file", *(file_name(entry) for entry in pair.values())
        else:
            yield IMAGES.get(key, key), *(_text(key, entry.get(key, "")) for entry in pair.values())
    for key, title in (("seg", "labels"), ("mask", "mask"), ("landmarks", "landmarks")):
        if any(f"{side}_{key}" in inputs for side in pair):
            yield title, *(file_name(inputs.get(f"{side}_{key}", {})) for side in pair)
    if "initial_transform" in inputs:
        yield "initial transform", file_name(inputs["initial_transform"]), ""


def settings(record: Report) -> Iterator[Row]:
    """How the registration was made. How the transforms are stored is decided only when they are."""
    model = dict(record.model)
    licence = model.pop("licence", None)
    because = "" if record.io_sim_reason is None else f": {record.io_sim_reason}"
    memory = {"process": "{:.1f} GiB", "gpu": "{:.1f} GiB on the GPU"}
    rows = {
        "model": _text("", model) or None,
        "licence of the model": licence,
        "found by a search": record.look and _search(record.look),
        "device": record.device,
        "transform": record.transform,
        "fitted to": record.fit_to,
        "optimised": record.io_over if record.io_iterations else None,
        "steps of the optimisation": record.io_iterations,
        "similarity": record.io_sim and f"{record.io_sim}{because}",
        "outcome of the optimisation": record.io_kept,
        "weight of the regulariser": record.regularity,
        "may start from the unregistered images": record.allow_identity,
        "grid of the network": record.grid,
        "grid of the optimisation": record.io_grid,
        "seed": record.seed,
        "seconds": ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in record.seconds.items()) or None,
        "most memory": ", ".join(memory[k].format(v) for k, v in record.peak_memory_gb.items() if k in memory) or None,
        "orientation of the moving scan": record.orientation and _orientation(record.orientation),
    }
    for title, value in rows.items():
        if value is not None:
            yield title, _text("", value)


def _orientation(found: Mapping[str, Any]) -> str:
    doubts = found.get("cannot_tell")
    unclear = f"; whether it is mirrored {' or '.join(doubts)} cannot be told" if doubts else ""
    return f"{found.get('seems')}{', and corrected' if found.get('applied') else ''}{unclear}"


def _search(found: Mapping[str, Any]) -> str:
    if "degrees" not in found:
        return f"an affine map, from {found.get('start')}; likeness {found.get('likeness')}"
    upright = "" if found.get("turned_back") else f", no better than upright ({found.get('likeness_upright')})"
    return f"a rotation by {found['degrees']}°, likeness {found.get('likeness')}{upright}"


def file_name(entry: Mapping[str, Any]) -> str:
    """The name without its folders: reports are passed on, and paths may hold names of people."""
    return re.split(r"[/\\]", str(entry.get("path", "")).rstrip("/\\"))[-1]


def _text(key: str, value: Any) -> str:
    if key.startswith("sha256"):
        return f"{value[:12]}…"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        items = (f"{name.replace('_', ' ')} {_text(name, item)}" for name, item in value.items() if item is not None)
        return ", ".join(items).removeprefix("name ")
    if isinstance(value, (list, tuple)):
        return " × ".join(_text("", item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
