"""Plot time against Dice of the default answer and of other programs, as `answer.py` measured them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments.made import png

Points = Mapping[str, tuple[float, float]]
"""Dice and seconds of each program."""


def draw(sets: Mapping[str, Points], path: Path) -> None:
    """One panel for each set of pairs; a program has the same colour in all."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(sets), figsize=(4.2 * len(sets), 3.8), layout="constrained", squeeze=False)
    names = list(dict.fromkeys(name for points in sets.values() for name in points))
    for axis, (title, points) in zip(axes[0], sets.items(), strict=True):
        for number, name in enumerate(names):
            if name in points:
                dice, seconds = points[name]
                marker, size = ("o", 9) if name.startswith("carlreg") else ("s", 7)
                axis.plot(seconds, dice, marker, markersize=size, color=f"C{number}", label=name)
        axis.set(xlabel="seconds", title=title, xlim=(0, 1.15 * max(seconds for _, seconds in points.values())))
        axis.margins(y=0.15)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("Dice")
    found = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend([found[name] for name in names], names, loc="outside lower center", ncols=2, fontsize=8)
    path.write_bytes(png(figure, 90))
    plt.close(figure)
