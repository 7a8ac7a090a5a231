"""Score a network on an anatomy it was not trained on: Dice on the validation pairs at the network's grid.

    python experiments/base/unseen.py carry/base.npz experiments/base/results/unseen.json --model MODEL --set abdomen

Compares aligning the images' boxes, the closed-form affine fit to the matches of the network's coordinate attention,
the network, and the network with its fields optimised.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from train import ABDOMEN_FIVE, Data  # type: ignore[import-not-found]

from carlreg.fast.precision import mixed_precision
from carlreg.geometry.fitting import fit_affine, fit_robustly
from carlreg.geometry.grids import interpolate
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Affine, Identity, Transform, warp
from carlreg.model.algorithms import RegistrationAlgorithm, coordinate_matches
from carlreg.model.files import load
from carlreg.objective.fields import optimize_fields
from carlreg.objective.metrics import dice, mean_score
from carlreg.preparation import FOREGROUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--set", default="abdomen")
    parser.add_argument("--pairs", type=int, help="use only the first N pairs, to try the script")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data(arguments.data, 96, device)
    model = load(arguments.model, device=device).eval()
    rows = []
    for moving, fixed in data.pairs(arguments.set, "val")[: arguments.pairs]:
        m, f = data.image(moving), data.image(fixed)
        with torch.no_grad(), mixed_precision(device):
            forward, backward = model.both(m, f)
        transforms: dict[str, Transform] = {
            "boxes": Identity(),
            "affine": affine(model, m, f),
            "network": forward,
            "optimised": optimize_fields(forward, backward, m, f).transform,
        }
        labels = [data.images[f"{key}/labels"][None, None].float() for key in (moving, fixed)]
        row: dict[str, Any] = {"moving": moving, "fixed": fixed}
        for how, phi in transforms.items():
            with torch.no_grad():
                warped = warp(labels[0], phi, like=labels[1], mode="nearest")
                row[how] = {"dice": mean_score(dice(warped, labels[1])), "folds": folding(phi, f)}
                if arguments.set == "abdomen":
                    row[how]["dice_five"] = mean_score(dice(warped, labels[1], ABDOMEN_FIVE))
        rows.append(row)
        print(json.dumps(row), flush=True)
    means = {how: {key: float(np.mean([row[how][key] for row in rows])) for key in rows[0][how]} for how in transforms}
    report = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "set": arguments.set,
        "means": means,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(means, indent=1))


def affine(model: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Affine:
    """The fit of `carl register --transform affine --fit-source attention`, but in unit coordinates."""
    with mixed_precision(moving.device):
        matches = coordinate_matches(model, moving, fixed)
    if matches is None:
        raise SystemExit("the first step of this model is not coordinate attention")
    variance = torch.einsum("bnii->bn", matches.covariance).clamp(min=1 / 96**2)
    inside = (interpolate(fixed, matches.points)[:, 0] > FOREGROUND).float()
    fitted = fit_robustly(fit_affine, matches.points.double(), matches.targets.double(), (inside / variance).double())
    return fitted.to(moving)


if __name__ == "__main__":
    main()
