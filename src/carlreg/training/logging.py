"""What one sees of a run: TensorBoard's scalars and pictures, and a plot of the curves at the end."""

from __future__ import annotations

import importlib.util
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carlreg.files.atomic import write_atomically
from carlreg.geometry.transforms import Transform, warp
from carlreg.training.loop import Progress

LINES = 12
"""Across a picture of a deformation, about."""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class Board:
    """TensorBoard's files in a folder. `start` is the step at which a run goes on: what was written of later ones is
    hidden."""

    def __init__(self, folder: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install tensorboard, or --no-tensorboard") from error
        self.writer: Any = SummaryWriter(str(folder), purge_step=start + 1)

    def progress(self, progress: Progress, step: int) -> None:
        for name, value in {**progress.losses, "folds, %": progress.folds, "skipped": progress.skipped}.items():
            self._write("add_scalar", f"training/{name}", value, step)

    def validation(self, measure: str, value: float, folds: float, step: int) -> None:
        self._write("add_scalar", f"validation/{measure}", value, step)
        self._write("add_scalar", "validation/folds, %", folds, step)

    def picture(self, image: Tensor, step: int) -> None:
        self._write("add_image", "validation/moving, warped, fixed, grid", image, step)
        self._write("flush")

    def close(self) -> None:
        self._write("close")

    def _write(self, method: str, *values: Any) -> None:
        """A disk that is full is told of when a checkpoint is written: pictures are no reason to stop."""
        with suppress(OSError):
            getattr(self.writer, method)(*values)


@torch.no_grad()
def picture(moving: Tensor, fixed: Tensor, phi: Transform) -> Tensor:
    """Moving, warped, fixed and the deformation's grid side by side, through the middle: (1, H, W) from 0 to 1.

    The grid is a lattice of the moving image's coordinates seen through φ, as the warped image is. Images
    (1, 1, *shape) of 3-D are cut at right angles to their last axis.
    """
    parts = [moving, warp(moving, phi, like=fixed), fixed, warp(_lattice(moving), phi, like=fixed, outside="zeros")]
    slices = [part[0, 0].float().cpu().clamp(0, 1) for part in parts]
    if slices[0].dim() == 3:  # in RAS: right to the right, anterior up
        slices = [part[..., part.shape[-1] // 2].flip(1) for part in slices]
    return torch.cat([part.mT for part in slices], dim=1)[None]


def _lattice(image: Tensor) -> Tensor:
    """1 on lines a voxel wide, 0 between them: a grid in the plane of the first two axes."""
    lines = torch.zeros_like(image[:1, :1])
    for axis in (2, 3):
        lines.movedim(axis, 0)[:: max(4, image.shape[axis] // LINES)] = 1
    return lines


def plot_curves(folder: Path, measure: str | None) -> Path | None:
    """`curves.png` from `log.jsonl`: loss parts, folds and validation over all stages; none without matplotlib."""
    if not is_installed("matplotlib"):
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    lengths: dict[int, int] = {}
    for entry in entries:
        lengths[entry["stage"]] = max(lengths.get(entry["stage"], 0), entry["step"])
    starts = {stage: sum(n for s, n in lengths.items() if s < stage) for stage in lengths}
    steps = [e for e in entries if "losses" in e]
    scores = [e for e in entries if "validation" in e]
    curves = {
        "similarity loss, both ways": [(e, e["losses"]["similarity"]) for e in steps],
        "regularity, before its weight": [(e, e["losses"]["regularity"]) for e in steps],
        "label loss, both ways": [(e, e["losses"]["label_loss"]) for e in steps if "label_loss" in e["losses"]],
        "folds, %": [(e, e["folds"]) for e in steps],
        f"validation: {measure}": [(e, e["validation"]) for e in scores],
    }
    shown = {name: curve for name, curve in curves.items() if curve}
    figure = Figure(figsize=(7, 2.2 * len(shown)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, curve) in zip(axes, shown.items(), strict=True):
        axis.plot([starts[e["stage"]] + e["step"] for e, _ in curve], [value for _, value in curve], linewidth=1)
        axis.set_ylabel(name, fontsize=8)
        for start in list(starts.values())[1:]:
            axis.axvline(start, color="grey", linewidth=0.5)
    axes[-1].set_xlabel("step")
    content = io.BytesIO()
    canvas.print_png(content)
    path = folder / "curves.png"
    write_atomically(path, content.getvalue())
    return path
