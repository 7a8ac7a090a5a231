"""Dice while the moving image is shifted or rotated, as in the paper's figure on HCP.

    python experiments/moved/run.py ../shared/data/brain/val experiments/moved --pairs 8
    python experiments/moved/run.py DATA OUT --method carl=carl-base --method gradicon=gradicon.safetensors
    python experiments/moved/run.py DATA OUT --method ants=ants-synquick --pairs 3 --margin 48 --angles

The moving image and its labels are shifted by millimetres along the first axis, or rotated by degrees about their
centre in the plane of the first two axes, inside their own box; what enters the box is 0. `--margin` first pads both
images by this many millimetres on every side, so that they stay in view; wide margins are cropped before a network
runs, see docs/conventions.md. Networks run without instance optimisation. Baselines such as `ants-synquick` have the
names of `carl evaluate`. Data are NAME.nii.gz with NAME_labels.nii.gz. Writes moved.json and moved.png. `grid.py` does
the same for many pairs, at the network's grid.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.evaluation.api import Evaluation, evaluate
from carlreg.evaluation.baselines import BASELINES
from carlreg.evaluation.sources import by_model
from carlreg.files import world_transform
from carlreg.files.images import Image, Matrix, map_points, read, read_labels, write
from carlreg.files.tables import Pair
from carlreg.paper_data import oasis

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine


def moved(image: Image, shift: float, angle: float, labels: bool) -> Image:
    middle = map_points(image.affine, (np.array(image.shape) - 1) / 2)
    rotation = np.eye(3)
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    rotation[:2, :2] = [[cosine, -sine], [sine, cosine]]

    def back(points: Matrix) -> Matrix:
        return (points - middle - [shift, 0, 0]) @ rotation + middle

    return world_transform.apply(back, image, image, "nearest" if labels else "linear")


def padded(image: Image, margin: float) -> Image:
    """Pad with zeros by this many millimetres on every side."""
    voxels = [round(margin / size) for size in image.spacing]
    affine = image.affine.copy()
    affine[:-1, -1] = map_points(image.affine, -np.array(voxels, dtype=float))
    return Image(np.pad(image.data, [(n, n) for n in voxels]), affine)


def with_moved(pair: Pair, folder: Path, shift: float, angle: float, margin: float) -> Pair:
    files: dict[str, Path] = {}
    for side in ("fixed", "moving"):
        for kind in ("", "_seg"):
            path = getattr(pair, side + kind)
            image = padded(read_labels(path) if kind else read(path), margin)
            if side == "moving":
                image = moved(image, shift, angle, bool(kind))
            files[side + kind] = folder / f"{pair.name}_{side}{kind}.nii.gz"
            write(image, files[side + kind], overwrite=True)
    return dataclasses.replace(pair, **files)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append", help="NAME=MODEL or NAME=BASELINE; may be repeated")
    parser.add_argument("--margin", type=float, default=0, help="padding around both images, mm")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--shifts", type=float, nargs="*", default=[0, 3, 7, 13, 20, 29], help="mm")
    parser.add_argument("--angles", type=float, nargs="*", default=[15, 30, 45, 90, 180], help="degrees")
    parser.add_argument("--labels", default=",".join(str(label) for label in oasis.LABELS))
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    named = dict(text.split("=", 1) for text in arguments.method or ["carl-base=carl-base"])
    methods = {
        name: BASELINES.get(model) or by_model(model, io_iterations=0, device=arguments.device)
        for name, model in named.items()
    }
    labels = [int(word) for word in arguments.labels.split(",")]
    pairs = oasis.pairs(arguments.data)[: arguments.pairs]
    rows: list[dict[str, Any]] = []
    for shift, angle in [*((shift, 0.0) for shift in arguments.shifts), *((0.0, angle) for angle in arguments.angles)]:
        with tempfile.TemporaryDirectory() as folder:
            moved_pairs = [with_moved(pair, Path(folder), shift, angle, arguments.margin) for pair in pairs]
            evaluation: Evaluation = evaluate(moved_pairs, methods, labels=labels, partial=True)
        failures = [text for scores in evaluation.scores for text in scores.failures]
        dice = {method: evaluation.means(method)["dice"] for method in evaluation.methods}
        rows.append({"shift_mm": shift, "angle_degrees": angle, "dice": dice, "failures": failures})
        print(json.dumps(rows[-1]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {
        "commit": commit(),
        "machine": machine(),
        "margin_mm": arguments.margin,
        "pairs": [pair.name for pair in pairs],
        "rows": rows,
    }
    (arguments.out / "moved.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(rows, list(methods), arguments.out / "moved.png")


def draw(rows: list[dict[str, Any]], methods: list[str], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, key, other in zip(
        figure.subplots(1, 2, sharey=True), ("shift_mm", "angle_degrees"), ("angle_degrees", "shift_mm"), strict=True
    ):
        shown = sorted((row for row in rows if row[other] == 0), key=lambda row: row[key])
        for method in methods:
            axes.plot([row[key] for row in shown], [row["dice"][method] for row in shown], "o-", label=method)
        axes.set(xlabel=key.replace("_", ", "), ylabel="Dice", ylim=(0, 1))
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
