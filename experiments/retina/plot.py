"""Draw the figures of the retina experiment and print its table, from runs.json, look.json and look.npz.

python experiments/retina/plot.py experiments/retina/results
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

NETWORKS = ("displacement", "Ξ", "CARL")
COLUMNS = (
    ("Baseline", "Baseline"),
    ("Shift", "Shift"),
    ("Baseline", "Shift"),
    ("Scale Shift", "Scale Shift"),
    ("Baseline", "Scale Shift"),
)
"""Training and test set of each column, as in the paper's figure."""
COLOURS = {"displacement": "tab:blue", "Ξ": "tab:green", "CARL": "#d99a00"}
FAILED = 0.5
"""A run has failed if its mean Dice on its own test set is below this."""


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def scores(result: dict[str, Any], network: str, trained: str, tested: str) -> list[float]:
    """Mean test Dice of every run."""
    chosen = [run for run in result["runs"] if run["network"] == network and run["trained on"] == trained]
    return [mean(run["dice"][tested]) for run in sorted(chosen, key=lambda run: run["seed"])]


def table(result: dict[str, Any]) -> str:
    head = ["trained on → tested on", "unregistered", *NETWORKS]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for trained, tested in COLUMNS:
        cells = [f"{trained} → {tested}", f"{mean(result['unregistered'][tested]):.3f}"]
        for network in NETWORKS:
            runs = scores(result, network, trained, tested)
            cells.append(f"{mean(runs):.3f} ({', '.join(f'{score:.3f}' for score in runs)})" if runs else "not run yet")
        lines.append("| " + " | ".join(cells) + " |")
    failed = [score for score in scores(result, "CARL", "Shift", "Shift") if score < FAILED]
    lines += ["", f"CARL on Shift: {len(failed)} of {len(scores(result, 'CARL', 'Shift', 'Shift'))} runs failed."]
    return "\n".join(lines) + "\n"


def violins(result: dict[str, Any], folder: Path) -> None:
    """The paper's rightmost panel: every test pair of every run, and each run's mean."""
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for n, (trained, tested) in enumerate(COLUMNS):
        for m, network in enumerate(NETWORKS):
            runs = [r for r in result["runs"] if r["network"] == network and r["trained on"] == trained]
            if not runs:
                continue
            position = n + (m - 1) * 0.28
            parts = axis.violinplot([score for r in runs for score in r["dice"][tested]], [position], widths=0.26)
            for body in parts["bodies"]:
                body.set_facecolor(COLOURS[network])
            for line in ("cbars", "cmins", "cmaxes"):
                parts[line].set(color=COLOURS[network], linewidth=0.6)
            means = [mean(r["dice"][tested]) for r in runs]
            axis.plot([position] * len(means), means, "k.", markersize=4)
        level = statistics.fmean(result["unregistered"][tested])
        axis.plot([n - 0.45, n + 0.45], [level, level], ":", color="0.5")
    axis.set_xticks(range(len(COLUMNS)), [f"{trained} →\n{tested}" for trained, tested in COLUMNS])
    axis.set(ylabel="Dice of vessels", ylim=(0, 1), title="Test pairs of all runs; dots: the mean of each run")
    handles = [plt.Line2D([], [], color=COLOURS[network], linewidth=6, label=network) for network in NETWORKS]
    axis.legend(handles=[*handles, plt.Line2D([], [], color="0.5", linestyle=":", label="unregistered")], ncols=4)
    figure.savefig(folder / "dice.png", dpi=110)


def equivariance(look: dict[str, Any], folder: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    errors = look["equivariance"]
    for network in ("CARL", "displacement"):
        for kind, style in (("[W, U]", "-"), ("[U, U]", "--")):
            label = f"{network}, {kind}"
            axis.plot(
                errors["shifts_pixels"], errors[network][kind], style, marker=".", c=COLOURS[network], label=label
            )
    axis.set(xlabel="shift, pixels", ylabel="error over the vessels, pixels")
    axis.set_yscale("symlog", linthresh=1)
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(folder / "equivariance.png", dpi=110)


def attention(arrays: Any, folder: Path) -> None:
    figure, axes = plt.subplots(2, 7, figsize=(13, 5), layout="constrained")
    rows = (("CARL-Baseline-0-diffusion", "after diffusion"), ("CARL-Baseline-0", "trained"))
    for row, (name, title) in zip(axes, rows, strict=True):
        voxels, masks = arrays[f"{name}/voxels"], arrays[f"{name}/masks"]
        row[0].imshow(arrays[f"{name}/fixed"], cmap="gray")
        for n, (i, j) in enumerate(voxels):
            row[0].text(j, i, str(n + 1), color="orange", fontsize=8, ha="center", va="center")
        row[0].set_title(f"{title}: fixed", fontsize=9)
        padding = (masks.shape[1] - arrays[f"{name}/moving"].shape[0]) // 2
        background = np.pad(arrays[f"{name}/moving"], padding)
        for n, mask in enumerate(masks):
            row[n + 1].imshow(background, cmap="gray", vmax=1.5 * background.max())
            row[n + 1].imshow(mask, cmap="inferno", alpha=np.clip(mask / mask.max() * 3, 0, 1))
            row[n + 1].set_title(f"{n + 1}: largest weight {mask.max():.3f}", fontsize=9)
        for axis in row:
            axis.axis("off")
    figure.savefig(folder / "attention.png", dpi=100)


def pictures(arrays: Any, folder: Path) -> None:
    figure, axes = plt.subplots(1, 8, figsize=(15, 3), layout="constrained")
    for n, name in enumerate(("Baseline", "Scale Shift")):
        panels = [arrays[f"{name}/{key}"] for key in ("moving", "warped")]
        for axis, image, title in zip(axes[4 * n :], panels, ("moving", "warped"), strict=False):
            axis.imshow(image, cmap="gray")
            axis.set_title(f"{name}: {title}", fontsize=9)
        draw_grid(axes[4 * n + 2], arrays[f"{name}/points"])
        axes[4 * n + 2].set_title("grid", fontsize=9)
        axes[4 * n + 3].imshow(arrays[f"{name}/fixed"], cmap="gray")
        axes[4 * n + 3].set_title("fixed", fontsize=9)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.savefig(folder / "pairs.png", dpi=100)


def draw_grid(axis: Any, points: Any, every: int = 6) -> None:
    """Draw the images of rows and columns of voxels under a map, points (height, width, 2)."""
    height, width = points.shape[:2]
    x, y = points[..., 1] * (width - 1), points[..., 0] * (height - 1)
    for i in range(0, height, every):
        axis.plot(x[i], y[i], color="k", linewidth=0.4)
    for j in range(0, width, every):
        axis.plot(x[:, j], y[:, j], color="k", linewidth=0.4)
    axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    result = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    (folder / "table.md").write_text(table(result), encoding="utf-8")
    print(table(result))
    violins(result, folder)
    if (folder / "look.json").exists():
        look = json.loads((folder / "look.json").read_text(encoding="utf-8"))
        equivariance(look, folder)
    if (folder / "look.npz").exists():
        with np.load(folder / "look.npz") as arrays:
            attention(arrays, folder)
            pictures(arrays, folder)


if __name__ == "__main__":
    main()
