"""Draw one brain, rotated by 45° and registered by several models with optimisation, as in the paper's appendix.

    python experiments/rotation/picture.py carry/turned.npz experiments/rotation/results --method carl-base=carl-base \\
        --method auto=auto --method GradICON=GRADICON.safetensors

The moving brain is rotated in the axial plane about the centre of an empty cube. Each method has a row of axial slices
through the centre: the moving, the fixed and the warped brain, the difference between fixed and warped, and the fixed
image's grid mapped into the moving image. Writes turned-45.png, and picture.json with its numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from angles import PLANES, turn  # type: ignore[import-not-found]
from matplotlib.figure import Figure
from turned import by_model, drawn, image_of  # type: ignore[import-not-found]

from carlreg.files import world_transform
from carlreg.files.images import map_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import DisplacementField, warp
from carlreg.preparation import FOREGROUND

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent.parent / "base"))

from train import Data  # type: ignore[import-not-found]

from experiments.made import commit, machine, png

DEGREES = 45.0
EVERY = 6
"""Voxels between two grid lines."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append", default=[], help="NAME=MODEL; may be repeated")
    parser.add_argument("--no-optimisation", action="store_true")
    arguments = parser.parse_args()
    made = {"commit": commit(), "machine": machine(), "degrees": DEGREES}
    data = Data(arguments.images, 96, torch.device("cpu"))
    (pair,) = drawn(data.pairs("brain", "val"), 1)
    moving, fixed = (data.image(key) for key in pair)
    by = turn(DEGREES, moving.shape[2:], like=moving, plane=PLANES["axial"])
    rotated = warp(moving, by, like=moving, outside="zeros")
    m, f = image_of(rotated), image_of(fixed)
    middle = moving.shape[-1] // 2
    figure = Figure(figsize=(11, 2.3 * len(arguments.method)), layout="constrained")
    plots = figure.subplots(len(arguments.method), 5, squeeze=False)
    rows = {}
    for row, (name, source) in zip(plots, (text.split("=", 1) for text in arguments.method), strict=True):
        transform, rotation = by_model(source, arguments.no_optimisation)[0](m, f)
        warped = world_transform.apply(transform, m, f).data
        index = np.moveaxis(np.indices(f.shape), 0, -1)
        matches = map_points(np.linalg.inv(m.affine), transform(map_points(f.affine, index)))
        # In unit coordinates, to count folds.
        points = torch.from_numpy((matches - index) / (np.array(f.shape) - 1)).movedim(-1, 0)[None].float()
        angle = in_plane(matches[..., middle, :2], f.data[..., middle] > FOREGROUND)
        rows[name] = {
            "folds_percent": folding(DisplacementField(points), fixed),
            "grid_turned_by": angle,
            "look": rotation or None,
        }
        print(name, rows[name], flush=True)
        shown = (m.data, f.data, warped, np.abs(warped - f.data))
        for plot, what, volume in zip(row, ("moving", "fixed", "warped", "difference"), shown, strict=False):
            plot.imshow(volume[..., middle].T, cmap="gray", origin="lower", vmin=0, vmax=0.8)
            plot.set_title(what, fontsize=8)
        row[4].imshow(m.data[..., middle].T, cmap="gray", origin="lower", vmin=0, vmax=1.6)
        for line in (*matches[::EVERY, :, middle, :2], *matches[:, ::EVERY, middle, :2].swapaxes(0, 1)):
            row[4].plot(line[:, 0], line[:, 1], color="tab:orange", linewidth=0.5)
        row[4].set_title("the fixed image's grid", fontsize=8)
        row[4].set(xlim=(-25, 120), ylim=(-25, 120))
        row[0].set_ylabel(name, fontsize=8)
        for plot in row:
            plot.set(xticks=[], yticks=[])
    (arguments.out / "turned-45.png").write_bytes(png(figure, 100))
    report = made | {"pair": list(pair), "optimised": not arguments.no_optimisation, "methods": rows}
    (arguments.out / "picture.json").write_text(json.dumps(report, indent=1) + "\n")


def in_plane(matches: np.ndarray, where: np.ndarray) -> dict[str, float]:
    """The angle by which the map rotates steps of the grid, in degrees: the median and the interquartile range inside
    the brain and around it."""
    steps = np.diff(matches, axis=0)[:, 1:]
    angles = np.degrees(np.arctan2(steps[..., 1], steps[..., 0]))
    inside = where[1:, 1:]
    result: dict[str, float] = {}
    for name, part in (("brain", angles[inside]), ("empty_space", angles[~inside])):
        low, middle, high = np.percentile(part, (25, 50, 75))
        result |= {name: round(float(middle), 1), f"{name}_quartiles_apart": round(float(high - low), 1)}
    return result


if __name__ == "__main__":
    main()
