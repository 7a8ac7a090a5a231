"""The figure of `carl evaluate`: Dice per structure, as in the paper's appendix."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carlreg.evaluation.api import Evaluation


def box_plot(evaluation: Evaluation) -> bytes:
    """Dice per structure, a box for each method, as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    labels, count = evaluation.labels, len(evaluation.methods)
    width = 2 + 0.35 * len(labels) * (count + 0.5)
    figure = Figure(figsize=(min(max(width, 7), 14), 4), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(evaluation.methods):
        boxes = axes.boxplot(
            [evaluation.dice_of(method, label) for label in labels],
            positions=[group * (count + 1) + number for group in range(len(labels))],
            widths=0.8,
            patch_artist=True,
            medianprops={"color": "black"},
            flierprops={"markersize": 3},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(f"C{number}")
        axes.plot([], [], "s", color=f"C{number}", label=method)
    centres = [group * (count + 1) + (count - 1) / 2 for group in range(len(labels))]
    axes.set_xticks(centres, [evaluation.label_name(label) for label in labels], rotation=45, ha="right")
    axes.set(ylabel="Dice", ylim=(0, 1))
    figure.legend(loc="outside upper center", ncols=3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
