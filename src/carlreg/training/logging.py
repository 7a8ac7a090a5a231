"""Logs of a run: TensorBoard's scalars and pictures, and a plot of the curves at the end."""

from __future__ import annotations

import importlib.util
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from carlreg.errors import DependencyError
from carlreg.files.atomic import write_atomically
from carlreg.geometry.transforms import Transform, warp
from carlreg.training.checkpoint import CURVES, LOG
from carlreg.training.loop import Progress
from carlreg.training.validation import Score, is_higher_better

LINES = 12
"""Approximate number of grid lines across a picture of a deformation."""


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def wants_board(tensorboard: bool | None) -> bool:
    """Whether to log to TensorBoard: as requested, by default if it is installed."""
    if tensorboard and not is_installed("tensorboard"):
        raise DependencyError("TensorBoard is not installed: pip install tensorboard, or use --no-tensorboard")
    return is_installed("tensorboard") if tensorboard is None else tensorboard


class Board:
    """TensorBoard's files in a folder. Entries of a killed run after the step `start` are hidden."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder), purge_step=start + 1)

    def progress(self, progress: Progress, step: int) -> None:
        for name, value in {**progress.losses, "folds, %": progress.folds, "skipped": progress.skipped}.items():
            self._write("add_scalar", f"training/{name}", value, step)

    def validation(self, score: Score, image: Tensor, step: int) -> None:
        self._write("add_scalar", f"validation/{score.measure}", score.value, step)
        self._write("add_scalar", "validation/folds, %", score.folds, step)
        self._write("add_image", "validation/moving, warped, fixed, grid", image, step)
        self._write("flush")

    def close(self) -> None:
        self._write("close")

    def _write(self, method: str, *values: Any) -> None:
        """A full disk is reported with the next checkpoint; pictures are no reason to stop."""
        with suppress(OSError):
            getattr(self.writer, method)(*values)


@torch.no_grad()
def picture(moving: Tensor, fixed: Tensor, phi: Transform) -> Tensor:
    """Moving, warped and fixed images and the deformed grid side by side, in the central slice: (1, H, W) from 0 to 1.

    The grid, lines one voxel wide in the plane of the moving image's first two axes, is warped like the image. 3-D
    images (1, 1, *shape) are cut at right angles to their last axis.
    """
    lines = torch.zeros_like(moving[:1, :1])
    for axis in (2, 3):
        lines.movedim(axis, 0)[:: max(4, moving.shape[axis] // LINES)] = 1
    parts = [moving, warp(moving, phi, like=fixed), fixed, warp(lines, phi, like=fixed, outside="zeros")]
    slices = [part[0, 0].float().cpu().clamp(0, 1) for part in parts]
    if slices[0].dim() == 3:  # in RAS: right to the right, anterior up
        slices = [part[..., part.shape[-1] // 2].flip(1) for part in slices]
    return torch.cat([part.mT for part in slices], dim=1)[None]


def plot_curves(folder: Path, measure: str | None) -> None:
    """Plot the parts of the loss, folds and validation of `log.jsonl` over all stages. Needs matplotlib, or does
    nothing."""
    if not is_installed("matplotlib") or not (folder / LOG).exists():
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    lengths = {entry["stage"]: entry["step"] for entry in entries}  # the last step of each stage
    starts = {stage: sum(n for s, n in lengths.items() if s < stage) for stage in lengths}
    curves = _curves(entries, measure)
    figure = Figure(figsize=(7, 2.2 * len(curves)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        axis.plot([starts[e["stage"]] + e["step"] for e, _ in curve], [value for _, value in curve], linewidth=1)
        axis.set_ylabel(name, fontsize=8)
        for start in list(starts.values())[1:]:
            axis.axvline(start, color="grey", linewidth=0.5)
    axes[-1].set_xlabel("step")
    content = io.BytesIO()
    canvas.print_png(content)
    write_atomically(folder / CURVES, content.getvalue())


def _curves(entries: list[dict[str, Any]], measure: str | None) -> dict[str, list[tuple[dict[str, Any], float]]]:
    """Log entries with their values, by the name of the curve; curves without values are left out."""
    steps = [entry for entry in entries if "losses" in entry]
    sign = 1 if measure is None or is_higher_better(measure) else -1
    curves = {
        "similarity loss, both ways": [(e, e["losses"]["similarity"]) for e in steps],
        "regularity, before its weight": [(e, e["losses"]["regularity"]) for e in steps],
        "label loss, both ways": [(e, e["losses"]["label_loss"]) for e in steps if "label_loss" in e["losses"]],
        "folds, %": [(e, e["folds"]) for e in steps],
        f"validation: {measure}": [(e, sign * e["validation"]) for e in entries if "validation" in e],
    }
    return {name: curve for name, curve in curves.items() if curve}
