"""Plot the Dice on val against minutes of training, for CARL and GradICON of the same size, data and loss.

    python experiments/base/curve.py OUT.png

Scores are those of the runs' files; minutes are those of the ledger, which counts all calls of a run.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import png

RESULTS = Path(__file__).with_name("results")
RUNS = {
    "CARL": {"scores-1.json": 3.1, "scores-3.json": 14.5, "scores-4.json": 7.6, "scores.json": 7.8},
    "GradICON": {"scores-grad-1.json": 9.1, "scores-grad-2.json": 12.8, "scores-grad.json": 11.1},
}
"""The score file of each run, from scratch to the last, and its minutes on a GPU."""
KINDS = {
    "brain, 14 structures": ("brain", "dice"),
    "abdomen CT, 13 organs": ("abdomen", "dice"),
    "hippocampus": ("hippocampus", "dice"),
}


def draw(path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(KINDS), figsize=(9, 2.8), layout="constrained")
    for axis, (title, (kind, key)) in zip(axes, KINDS.items(), strict=True):
        for name, runs in RUNS.items():
            scores = [json.loads((RESULTS / file).read_text(encoding="utf-8"))["val"]["network"] for file in runs]
            axis.plot([*accumulate(runs.values())], [score[kind][key] for score in scores], marker="o", label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GPU minutes")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("Dice")
    axes[0].legend()
    path.write_bytes(png(figure, 110))
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
