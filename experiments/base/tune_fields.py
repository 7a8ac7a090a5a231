"""Compare settings of field optimisation on kept-back training subjects: Dice, folds and seconds.

    python experiments/base/tune_fields.py carry/base.npz experiments/base/results/fields.json

A few pairs of each set are optimised as one batch, starting from the model's result. Besides the arguments of
`optimize_fields`, settings may have `side`, the largest side of the images to optimise on (hippocampus crops have about
40 voxels per side, and are resampled to the network's 96). Settings that the output already has are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train import ABDOMEN_FIVE, Data  # type: ignore[import-not-found]

from carlreg.fast.precision import mixed_precision
from carlreg.geometry.grids import Grid, interpolate, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import DisplacementField, warp
from carlreg.model.files import load
from carlreg.model.shipped import pretrained
from carlreg.objective.fields import optimize_fields
from carlreg.objective.metrics import dice, mean_score

SETTINGS: list[dict[str, Any]] = [
    {},
    {"window": 1.5},
    {"window": 3.0},
    {"window": 4.0},
    {"weight": 0.75},
    {"weight": 3.0},
    {"steps": 40},
    {"levels": 4},
    {"side": 48},
    {"smoothing": 1.5},
    {"smoothing": 3.0},
    {"learning_rate": 0.5},
    {"similarity": "mind", "weight": 0.1, "fold_weight": 2.0},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="model file (default: the default model)")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--sets", nargs="+", help="sets to use (default: all)")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of each set")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="a JSON list of keyword arguments")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    arguments = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data(arguments.data, 96, device)
    model = (load(arguments.model) if arguments.model else pretrained()).to(device).eval()
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    report |= {"machine": machine, "torch": torch.__version__, "seed": 0, "pairs": arguments.pairs}
    done = [(row["set"], row["settings"]) for row in report["rows"]]
    sets = {
        name: Batch(data, model, name, random.Random(2).sample(data.pairs(name, "dev"), arguments.pairs))
        for name in arguments.sets or data.sets
    }
    for settings in [{"steps": 0}, *arguments.settings]:
        for name, batch in sets.items():
            if (name, settings) in done or time.monotonic() - start > arguments.seconds:
                continue
            means = batch.score(settings)
            report["rows"].append({"set": name, "settings": settings, "commit": arguments.commit, **means})
            print(json.dumps(report["rows"][-1]), flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


class Batch:
    """Pairs and the network's results for them."""

    def __init__(self, data: Any, model: Any, name: str, pairs: list[tuple[str, str]]) -> None:
        self.data, self.name, self.pairs = data, name, pairs
        self.moving, self.fixed = (torch.cat([data.image(pair[side]) for pair in pairs]) for side in (0, 1))
        displacements = []
        for moving, fixed in zip(self.moving.split(1), self.fixed.split(1), strict=True):
            with torch.no_grad(), mixed_precision(data.device):
                displacements.append([phi.on_grid_of(fixed) - voxel_points(fixed) for phi in model.both(moving, fixed)])
        self.start = [DisplacementField(torch.cat(parts).movedim(-1, 1)) for parts in zip(*displacements, strict=True)]

    def score(self, settings: dict[str, Any]) -> dict[str, float]:
        """Mean scores over the pairs."""
        options = dict(settings)
        side = options.pop("side", 96)
        images = [at_most(image, side) for image in (self.moving, self.fixed)]
        start = time.perf_counter()
        (forward, backward), (moving, fixed) = self.start, images
        phi = optimize_fields(forward, backward, moving, fixed, **options).transform
        if self.moving.is_cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / len(self.pairs)
        rows = []
        for n, pair in enumerate(self.pairs):
            labels = [self.data.images[f"{key}/labels"][None, None].float() for key in pair]
            warped = warp(labels[0], phi[n : n + 1], like=labels[1], mode="nearest")
            rows.append({"dice": mean_score(dice(warped, labels[1])), "folds": folding(phi[n : n + 1], self.fixed)})
            if self.name == "abdomen":
                rows[-1]["dice_five"] = mean_score(dice(warped, labels[1], ABDOMEN_FIVE))
        return {key: round(float(np.mean([row[key] for row in rows])), 4) for key in rows[0]} | {
            "seconds": round(seconds, 2)
        }


def at_most(images: Tensor, side: int) -> Tensor:
    shape = [min(side, n) for n in images.shape[2:]]
    return interpolate(images, Grid.of(shape).points(images.dtype, images.device)[None])


if __name__ == "__main__":
    main()
