"""Measure how coordinate attention follows a shifted brain, and the empty space around it.

    python experiments/moved/attention.py carry/base.npz experiments/moved/results

The first pair of validation brains lies in the middle of an empty cube. When the moving image is shifted, the matches
of carl-base's first step, before any refinement, should change by that shift. The script measures this for voxels of
the fixed brain and for empty voxels. Writes attention.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from carlreg.files.atomic import write_atomically
from carlreg.geometry.grids import interpolate
from carlreg.geometry.transforms import Affine, warp
from carlreg.model.algorithms import coordinate_matches
from carlreg.model.shipped import pretrained

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent.parent / "base"))

from train import Data  # type: ignore[import-not-found]

from experiments.made import commit, machine
from experiments.moved.grid import framed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--frame", type=int, default=160, help="side of the empty cube in voxels")
    parser.add_argument("--shifts", type=int, nargs="+", default=[20, 32], help="voxels, from left to right")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, model = Data(arguments.data, 96, device), pretrained().to(device).eval()
    made_by = commit()  # before anything is written
    pair = data.pairs("brain", "val")[0]
    moving, fixed = (framed([data.image(key)], arguments.frame) for key in pair)
    voxels, before, rows = arguments.frame - 1, torch.empty(0), []
    for shift in (0, *arguments.shifts):
        by = torch.tensor([[-shift / voxels, 0, 0]])
        shifted = warp(moving, Affine.from_parts(torch.eye(3)[None], by).to(moving), like=moving, outside="zeros")
        matches = coordinate_matches(model, shifted, fixed)
        assert matches is not None
        targets = voxels * matches.targets[0].cpu()
        if not shift:
            before = targets
            continue
        change = targets - before
        brain = (interpolate(fixed, matches.points)[0, 0] > 0.1).cpu()
        missed = (change - torch.tensor([shift, 0, 0])).norm(dim=-1)
        row: dict[str, Any] = {
            "shift_voxels": shift,
            "brain_missed_by_voxels": {"median": float(missed[brain].median()), "largest": float(missed[brain].max())},
            "empty_space_followed_by_voxels": float(change[~brain, 0].mean()),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        device_name = torch.cuda.get_device_name() if device.type == "cuda" else machine()
        report = {"commit": made_by, "machine": device_name, "pair": pair, "frame": arguments.frame, "rows": rows}
        write_atomically(arguments.out / "attention.json", (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
