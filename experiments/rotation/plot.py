"""Plot Dice against the angle of the moving image, and grids of one rotated pair, from the files of the other scripts:
runs.json, sweep.json and sweep.npz of the retinas; turned-NAME.json of the brains; log-encoder.jsonl of encoder.py, and
log-encoder-2.jsonl of a second run.

python experiments/rotation/plot.py experiments/rotation/results
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import angles  # type: ignore[import-not-found] # noqa: F401
import matplotlib.pyplot as plt
import numpy as np
from plot import draw_grid, mean  # type: ignore[import-not-found]

LOOKS = {
    "rot": ("CARL{ROT}", "tab:red"),
    "outside": ("CARL{ROT}, augmented outside the loss", "tab:purple"),
    "CARL": ("CARL", "#d99a00"),
    "displacement": ("displacement", "tab:blue"),
}

CHANGED, BACK = 3500, 2600
"""Steps of encoder.py, see `encoder_errors`."""
COLOURS = ("k", "tab:red", "#d99a00", "tab:blue", "tab:pink", "tab:green")


def line(axis: Any, scores: dict[str, list[float]], **look: Any) -> None:
    """Plot the mean Dice at each angle."""
    points = sorted((float(angle), mean(dice)) for angle, dice in scores.items())
    axis.plot([angle for angle, _ in points], [dice for _, dice in points], **look)


def curves(folder: Path) -> None:
    """Left: every run over all test pairs. Right: the few pairs that were also optimised."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    runs = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    for run in runs["runs"]:
        label, colour = LOOKS[run["network"]]
        line(left, run["dice"], color=colour, label=label)
    line(left, runs["unregistered"], color="0.5", linestyle=":", label="unregistered")
    left.set(title="networks alone, all test pairs", ylabel="Dice of vessels", ylim=(0, 1))
    path = folder / "sweep.json"
    if path.exists():
        sweep = json.loads(path.read_text(encoding="utf-8"))
        for how, style in (("network", ":"), ("optimised", "-")):
            for network, scores in sweep[how].items():
                label, colour = LOOKS.get(network, (network, "k"))
                line(right, scores, color=colour, linestyle=style, label=f"{label}, {how}")
        right.set(title=f"{sweep['pairs']} pairs; dotted: alone, solid: {sweep['steps']} steps optimised")
    for axis in (left, right):
        axis.set(xlabel="rotation of the moving image, degrees", xticks=range(0, 181, 30))
    named = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    left.legend(named.values(), named.keys(), fontsize=8)
    figure.savefig(folder / "angles.png", dpi=110)


def encoder_errors(folder: Path) -> None:
    """Plot the median matching error on kept-back brains during training of the encoder. In the run behind carl-rot,
    determinants were computed from the output from step `CHANGED` on, where the step counter was reset to `BACK`."""
    entries, again = (entries_of(folder / name) for name in ("log-encoder.jsonl", "log-encoder-2.jsonl"))
    back = [n for n, (one, other) in enumerate(itertools.pairwise(entries), 1) if other["step"] < one["step"]]
    first = [entry for entry in entries[: back[0]] if entry["step"] <= CHANGED] if back else []
    last = entries[back[0] :] if back else entries
    figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
    looks = [(first, 0, "before the last block", "0.5")]
    looks += [(last, CHANGED - BACK if back else 0, "of the output, later" if back else "of the output", "tab:red")]
    looks += [(again, 0, "of the output, from the start", "tab:blue")]
    for part, later, label, colour in (look for look in looks if look[0]):
        points = [(entry["step"] + later, entry["dev_median"]) for entry in part if "dev_median" in entry]
        axis.plot([n for n, _ in points], [mm for _, mm in points], color=colour, marker="o", markersize=3, label=label)
    axis.set(xlabel="steps", ylabel="median distance, mm", ylim=(0, None))
    axis.legend(fontsize=8, title="determinants", title_fontsize=8)
    figure.savefig(folder / "encoder.png", dpi=110)


def entries_of(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; none if there is no such file."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def registrations(paths: list[Path], folder: Path) -> None:
    """A panel for every plane, a colour for every method; dotted without optimisation. At 0° all planes are the
    same."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained", sharey=True)
    names = sorted({path.stem.removeprefix("turned-").removesuffix("-optimised") for path in paths})
    colours = dict(zip(names, itertools.cycle(COLOURS)))
    for path in paths:
        report, name = json.loads(path.read_text(encoding="utf-8")), path.stem.removeprefix("turned-")
        rows, alone = report["rows"], not report.get("optimised", True)
        look = {"color": colours[name.removesuffix("-optimised")], "linestyle": ":" if alone else "-"}
        label = f"{name}, alone" if alone else name.replace("-optimised", ", optimised")
        for axis, plane in zip(panels, ("sagittal", "coronal", "axial"), strict=True):
            scores = {str(row["degrees"]): row["dice"] for row in rows if row["plane"] == plane or not row["degrees"]}
            if len(scores) > 1:
                line(axis, scores, marker="o", markersize=3, label=label, **look)
            axis.set(title=plane, xlabel="degrees", xticks=range(0, 181, 30), ylim=(0, 1))
    panels[0].set_ylabel("Dice, subcortical")
    panels[-1].legend(fontsize=7)
    figure.savefig(folder / "turned.png", dpi=110)


def grids(folder: Path) -> None:
    """One pair registered by each network; the grid in empty space shows whether it rotates as a whole."""
    with np.load(folder / "sweep.npz") as arrays:
        networks = list(dict.fromkeys(key.split("/")[0] for key in arrays.files))
        figure, axes = plt.subplots(
            len(networks), 4, figsize=(9, 2.4 * len(networks)), layout="constrained", squeeze=False
        )
        for network, row in zip(networks, axes, strict=True):
            for axis, what in zip(row, ("moving", "warped", "points", "fixed"), strict=True):
                if what == "points":
                    points = arrays[f"{network}/points"]
                    draw_grid(axis, points)
                    middle, half = np.array(points.shape[:2]) / 2, max(points.shape[:2])  # corners lie outside
                    axis.set(xlim=(middle[1] - 0.8 * half, middle[1] + 0.8 * half))
                    axis.set(ylim=(middle[0] + 0.8 * half, middle[0] - 0.8 * half))
                else:
                    axis.imshow(arrays[f"{network}/{what}"], cmap="gray")
                axis.set(xticks=[], yticks=[])
                axis.set_title("grid" if what == "points" else what, fontsize=8)
            row[0].set_ylabel(LOOKS.get(network, (network, ""))[0], fontsize=7)
        figure.savefig(folder / "grids.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if (folder / "runs.json").exists():
        curves(folder)
    if (folder / "log-encoder.jsonl").exists():
        encoder_errors(folder)
    if paths := sorted(folder.glob("turned-*.json")):
        registrations(paths, folder)
    if (folder / "sweep.npz").exists():
        grids(folder)


if __name__ == "__main__":
    main()
