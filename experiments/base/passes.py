"""Dice on `dev` of a model applied several times, and averaged over copies of the pair, at the network's grids.

    python experiments/base/passes.py carry/*.npz --out passes.json --passes 3 --commit HASH

A second pass registers the images as the first one aligned them: TwoStep{Φ, Φ}. *Mirrored* is the mean of the results
for the pair and for its mirror image, *shifted* that for the pair and for the pair with an empty margin of two voxels,
half of the stride of coordinate attention. `--grids` replaces grids of `universal.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from universal import GRIDS, Mixture, start_from, write  # type: ignore[import-not-found]

from carlreg import DisplacementField, RegistrationAlgorithm
from carlreg.geometry.grids import voxel_points, voxel_size
from carlreg.geometry.transforms import Transform
from carlreg.model.algorithms import TwoStep

sys.path.append(str(Path(__file__).parents[2]))
from experiments.made import machine

MARGIN = 2


class Averaged(RegistrationAlgorithm):
    """The mean of the results for a pair and for copies of it: mirrored along the first axis, with an empty margin, or
    both."""

    def __init__(self, phi: RegistrationAlgorithm, mirrored: bool, shifted: bool) -> None:
        super().__init__()
        self.phi, self.mirrored, self.shifted = phi, mirrored, shifted

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        if moving.shape != fixed.shape:
            raise ValueError(f"expected images on one grid, got {tuple(moving.shape)} and {tuple(fixed.shape)}")
        found = [
            self._voxels(moving, fixed, mirror, margin)
            for mirror in (False, True)[: 1 + self.mirrored]
            for margin in (0, MARGIN)[: 1 + self.shifted]
        ]
        mean = torch.stack(found).mean(0) * voxel_size(moving.shape[2:], moving)
        return DisplacementField(mean.movedim(-1, 1))

    def _voxels(self, moving: Tensor, fixed: Tensor, mirror: bool, margin: int) -> Tensor:
        """Displacement in voxels (B, *shape, D), found on altered images and brought back to the original ones."""
        images = [F.pad(image, (margin,) * 6) for image in (moving, fixed)]
        if mirror:
            images = [image.flip(2) for image in images]
        phi = self.phi.transform(*images)
        moved = (phi.on_grid_of(images[1]) - voxel_points(images[1])) / voxel_size(images[0].shape[2:], moving)
        inside = (slice(None), *(slice(margin, margin + side) for side in fixed.shape[2:]))
        if mirror:
            moved = moved.flip(1) * moved.new_tensor([-1.0, 1.0, 1.0])
        return moved[inside]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("carl-base"))
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--average", action="store_true", help="also average over copies of the pair")
    parser.add_argument("--grids", type=json.loads, default={}, help="grids that replace those of `universal.py`")
    parser.add_argument("--kinds", nargs="+", help="kinds of pairs (default: all)")
    parser.add_argument("--split", choices=("dev", "val"), default="dev")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    GRIDS.update({name: tuple(shape) for name, shape in arguments.grids.items()})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Mixture(arguments.packs, device, {"thin": 0.2, "fine": 0.25})
    once = start_from(arguments.model, device)
    report = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else machine(),
        "model": arguments.model.name,
        "split": arguments.split,
    }
    ways = {"": once}
    if arguments.average:
        ways |= {", mirrored": Averaged(once, True, False).eval(), ", shifted": Averaged(once, False, True).eval()}
        ways |= {", mirrored and shifted": Averaged(once, True, True).eval()}
    rows: dict[str, dict[str, float]] = {}
    for name, first in ways.items():
        model = first
        for number in range(1, arguments.passes + 1):
            for kind, pairs in data.scored_pairs(arguments.split).items():
                if arguments.kinds and kind not in arguments.kinds:
                    continue
                scores = [data.score(model, kind, *pair, n % 10) for n, pair in enumerate(pairs)]
                mean = {key: float(np.mean([row[key] for row in scores])) for key in scores[0]}
                rows[f"{kind}, {number}{name}"] = mean
                print(f"{kind}, {number}{name}: {mean['dice']:.4f}", flush=True)
            model = TwoStep(model, first).eval()
    write({**report, "grids": {name: list(shape) for name, shape in GRIDS.items()}, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
