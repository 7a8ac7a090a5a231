"""Dice of brains while the moving image is shifted, at the network's grid, as in the paper's figure on translation.

    python experiments/moved/grid.py carry/base.npz experiments/moved/results --method carl-base=carl-base \\
        --method gradicon=gradicon.safetensors
    python experiments/moved/grid.py carry/base.npz experiments/moved/results --method ANTs=ants-synquick --pairs 3

`carry/base.npz` is packed by experiments/base/prepare.py. The pairs are all ordered pairs of validation subjects,
scored on 14 subcortical structures. Methods are networks without optimisation, or baselines by their name in `carl
evaluate`.

The moving image is shifted by whole voxels along each axis, by up to half of its 96 voxels. Voxels that enter the image
are 0. Voxels that leave it are lost to the network but not to the score, since labels are not cropped. `visible` is the
share of the moving brain that is still in the image. With `--frame 192`, both images lie in the middle of an empty cube
that no shift leaves. With `--frame 160 --grid 96`, the cube is resampled to the network's grid, so that the brain is
smaller; `--crop` also crops the empty margins, as `carl register` does.

Writes shifts-96.json, shifts-192.json, shifts-160-seen-96.json or shifts-160-cropped-96.json, and a plot of it. Methods
that the file already has are skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.evaluation.baselines import BASELINES
from carlreg.evaluation.sources import Method
from carlreg.fast.precision import mixed_precision
from carlreg.files.atomic import write_atomically
from carlreg.files.images import from_array, map_points
from carlreg.files.tables import Pair
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine, DisplacementField, Identity, Transform, compose, warp
from carlreg.objective.metrics import dice, mean_score
from carlreg.preparation import FOREGROUND, Frame, wide_margins

sys.path.insert(0, str(Path(__file__).parent.parent / "base"))

from train import Data, start_from  # type: ignore[import-not-found]

SHIFTS = (0, 3, 7, 13, 20, 29, 38, 48)
"""In voxels, of 96. Few are multiples of 4, to which coordinate attention is exactly equivariant."""
AXES = ("left to right", "back to front", "bottom to top")
IN_VIEW = 0.999
"""Share of a brain that must be visible for it to count as in view."""
TOGETHER = 8
Algorithm = Callable[[Tensor, Tensor], Transform]
"""Maps a moving and a fixed image to Φ."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append", default=[], help="NAME=MODEL or NAME=BASELINE; may be repeated")
    parser.add_argument("--set", default="brain")
    parser.add_argument("--split", default="val", choices=("dev", "val"))
    parser.add_argument("--pairs", type=int, help="use N pairs, drawn with a fixed seed (default: all)")
    parser.add_argument("--shifts", type=int, nargs="+", default=SHIFTS, help="voxels")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="axes along which to shift")
    parser.add_argument("--frame", type=int, default=96, help="side of the empty cube around both images, in voxels")
    parser.add_argument("--grid", type=int, help="side of the network's grid, in voxels (default: that of the cube)")
    parser.add_argument("--crop", action="store_true", help="crop empty margins, as `carl register` does")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    grid = arguments.grid or arguments.frame
    way = f"-cropped-{grid}" if arguments.crop else f"-seen-{grid}" if grid != arguments.frame else ""
    path = arguments.out / f"shifts-{arguments.frame}{way}.json"
    report: dict[str, Any] = {"methods": {}}
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = dict(text.split("=", 1) for text in arguments.method)
    wanted = {name: model for name, model in wanted.items() if name not in report["methods"]}
    if wanted:
        data = Data(arguments.data, 96, device)
        pairs = data.pairs(arguments.set, arguments.split)
        if arguments.pairs is not None:
            pairs = random.Random(0).sample(pairs, arguments.pairs)
        report |= {"side": arguments.frame, "grid": grid, "set": arguments.set, "split": arguments.split}
    for name, source in wanted.items():
        model = by_program(BASELINES[source]) if source in BASELINES else start_from(Path(source), device).eval()
        still = sweep(model, data, pairs, 0, 0, arguments.frame, grid, arguments.crop)
        rows: list[dict[str, Any]] = [{"axis": axis, "voxels": 0, **still} for axis in arguments.axes]
        for axis in arguments.axes:
            for voxels in (n for n in arguments.shifts if n):
                scores = sweep(model, data, pairs, AXES.index(axis), voxels, arguments.frame, grid, arguments.crop)
                rows.append({"axis": axis, "voxels": voxels, **scores})
                means = {key: round(float(np.mean(rows[-1][key])), 4) for key in ("dice", "visible")}
                print(name, axis, voxels, means, flush=True)
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        names = ["_to_".join(key.split("/")[-1] for key in pair) for pair in pairs]
        report["methods"][name] = {"commit": arguments.commit, "machine": machine, "pairs": names, "rows": rows}
        report["in_view"] = {name: in_view(found["rows"]) for name, found in report["methods"].items()}
        write_atomically(path, (json.dumps(report) + "\n").encode())
    report["in_view"] = {name: in_view(found["rows"]) for name, found in report["methods"].items()}
    write_atomically(path, (json.dumps(report) + "\n").encode())
    draw(report, path.with_suffix(".png"))
    print(json.dumps(report["in_view"], indent=1))


def by_program(method: Method) -> Algorithm:
    """Use a baseline like a network; its images have voxels of 1 mm."""
    pair = Pair("pair", Path("fixed"), Path("moving"))

    def run(moving: Tensor, fixed: Tensor) -> Transform:
        fields = []
        for one, other in zip(moving.cpu().numpy(), fixed.cpu().numpy(), strict=True):
            m, f = (from_array(image[0]) for image in (one, other))
            points = voxel_points(fixed[:1]).cpu().double().numpy()[0]
            matches = method(pair, f, m).transform(map_points(f.unit_to_world(), points))
            fields.append(torch.from_numpy(map_points(m.world_to_unit(), matches) - points).movedim(-1, 0))
        return DisplacementField(torch.stack(fields).to(fixed))

    return run


@torch.no_grad()
def sweep(
    model: Algorithm,
    data: Any,
    pairs: list[tuple[str, str]],
    axis: int,
    voxels: int,
    frame: int,
    grid: int | None = None,
    crop: bool = False,
) -> dict[str, list[float]]:
    """Dice of each pair with the moving image shifted along one axis, and the share of the brain that is visible."""
    by = torch.zeros(1, 3)
    by[0, axis] = -voxels / (frame - 1)
    shift = Affine.from_parts(torch.eye(3)[None], by).to(torch.empty(0, device=data.device))
    scores: dict[str, list[float]] = {"dice": [], "visible": []}
    together = max(1, round(TOGETHER * (data.side / frame) ** 3))
    for first in range(0, len(pairs), together):
        some = pairs[first : first + together]
        moving, fixed = (framed([data.image(pair[side]) for pair in some], frame) for side in (0, 1))
        shifted = warp(moving, shift, like=moving, outside="zeros")
        sides = cut_sides(shifted, fixed) if crop else None
        (m, of_m, _), (f, _, to_f) = (at_grid(image, grid or frame, sides) for image in (shifted, fixed))
        with mixed_precision(data.device):
            phi = compose(of_m, model(m, f), to_f)
        labels = [
            framed([data.images[f"{pair[side]}/labels"][None, None].float() for pair in some], frame) for side in (0, 1)
        ]
        warped = warp(labels[0], compose(shift, phi), like=labels[1], mode="nearest")
        scores["dice"] += [mean_score(dice(warped[n : n + 1], labels[1][n : n + 1])) for n in range(len(some))]
        visible, whole = ((image > 0.02).sum((1, 2, 3, 4)) for image in (shifted, moving))
        scores["visible"] += (visible / whole).tolist()
    return scores


def cut_sides(moving: Tensor, fixed: Tensor) -> list[list[bool]]:
    """The axes along which `carl register` would crop each pair of images (B, 1, n, n, n) to the foreground."""
    each = [[wide_margins(one[0] > FOREGROUND) for one in batch] for batch in (moving, fixed)]
    return [[a or b for a, b in zip(*pair, strict=True)] for pair in zip(*each, strict=True)]


def at_grid(cube: Tensor, side: int, cut: list[list[bool]] | None) -> tuple[Tensor, Transform, Transform]:
    """Images (B, 1, n, n, n) resampled to the network's grid, the map from its unit box to theirs, and its inverse."""
    if cut is None:
        return resize(cube, (side,) * 3), Identity(), Identity()
    frames = [Frame.cropped(one[0] > FOREGROUND, (side,) * 3, sides) for one, sides in zip(cube, cut, strict=True)]
    images = torch.cat([frame.resample(one[None]) for frame, one in zip(frames, cube, strict=True)])
    middle, step = (torch.tensor([getattr(frame, name) for frame in frames]).to(cube) for name in ("centre", "step"))
    scale = step * (side - 1) / (cube.shape[-1] - 1)
    corner = middle / (cube.shape[-1] - 1) - scale / 2
    to_cube = Affine.from_parts(torch.diag_embed(scale), corner)
    return images, to_cube, Affine.from_parts(torch.diag_embed(1 / scale), -corner / scale)


def framed(images: list[Tensor], side: int) -> Tensor:
    """Images as one batch, in the middle of an empty cube."""
    batch = torch.cat(images)
    before = (side - batch.shape[-1]) // 2
    return F.pad(batch, 3 * (before, side - batch.shape[-1] - before))


def in_view(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Change of Dice under shifts that keep the brain in view: the mean and mean absolute change over pairs and shifts,
    and the lowest change."""
    still = {row["axis"]: np.array(row["dice"]) for row in rows if row["voxels"] == 0}
    changes = []
    for row in rows:
        whole = np.array(row["visible"]) >= IN_VIEW
        if row["voxels"] and whole.any():
            changes.append((np.array(row["dice"]) - still[row["axis"]])[whole])
    if not changes:
        return {"cases": 0}
    every = np.concatenate(changes)
    return {
        "cases": len(every),
        "at_rest": float(np.mean(next(iter(still.values())))),
        "mean_change": float(every.mean()),
        "mean_absolute_change": float(np.abs(every).mean()),
        "lowest": float(every.min()),
    }


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    plots = figure.subplots(1, 3, sharey=True)
    for axes, axis in zip(plots, AXES, strict=True):
        for number, (name, found) in enumerate(report["methods"].items()):
            rows = sorted((row for row in found["rows"] if row["axis"] == axis), key=lambda row: row["voxels"])
            shifts = [row["voxels"] for row in rows]
            label = f"{name}, {len(found['pairs'])} pairs"
            axes.plot(shifts, [np.mean(row["dice"]) for row in rows], "o-", color=f"C{number}", label=label)
        rows = next(iter(report["methods"].values()))["rows"]
        rows = sorted((row for row in rows if row["axis"] == axis), key=lambda row: row["voxels"])
        visible = [np.mean(row["visible"]) for row in rows]
        axes.plot([row["voxels"] for row in rows], visible, ":", color="0.6", label="share of the brain in view")
        axes.set(title=axis, xlabel="shift of the moving image, voxels", ylim=(0, 1.02))
    plots[0].set_ylabel("Dice, mean over the pairs")
    plots[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
