"""Measure the equivariance and attention masks of the trained retina networks, and draw pairs.

    python experiments/retina/look.py carry/retina.npz MODELS experiments/retina/results

MODELS is a folder with the models of train.py for CARL and the displacement network, trained on Baseline with seed 0.
Writes look.json and, for the pictures of plot.py, look.npz (not committed).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import Pairs, build, load  # type: ignore[import-not-found]
from torch import Tensor
from train import DATA_SEEDS  # type: ignore[import-not-found]

from carlreg.explain import Inside
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.transforms import warp
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import load as load_model

SHIFTS = (0, 1, 2, 3, 4, 6, 8, 12, 13, 16, 20, 24, 28, 32, 37, 40, 44, 48)
"""In pixels of the averaged images. A retina spans about 130 pixels, with 50 empty rows below it."""
COARSE = 4
"""Pixels of the averaged images per voxel of Ξθ."""


def shifted(images: Tensor, rows: int) -> Tensor:
    """Shift images down, with zeros above: I ∘ U for U(x) = x − rows."""
    return torch.nn.functional.pad(images, (0, 0, rows, -rows))


@torch.no_grad()
def equivariance(model: RegistrationAlgorithm, pairs: Pairs) -> dict[str, list[float]]:
    """Mean error in pixels over the vessels, for shifts U of the fixed image alone, Φ[M, F∘U] − Φ[M, F]∘U, and of
    both, Φ[M∘U, F∘U] − U⁻¹∘Φ[M, F]∘U."""
    moving, fixed = pairs.at(torch.arange(0, len(pairs), 20))  # one pair of each retina
    height, width = fixed.shape[2:]
    size = torch.tensor([height - 1, width - 1], device=fixed.device)
    still = model(moving, fixed)
    result: dict[str, list[float]] = {"[W, U]": [], "[U, U]": []}
    for rows in SHIFTS:
        up = torch.tensor([rows / (height - 1), 0.0], device=fixed.device)
        where = shifted(fixed, rows)[:, 0] > 0.2
        expected = still(voxel_points(fixed) - up)  # Φ[M, F] ∘ U
        alone = model(moving, shifted(fixed, rows)).on_grid_of(fixed)
        both = model(shifted(moving, rows), shifted(fixed, rows)).on_grid_of(fixed)
        for name, error in (("[W, U]", alone - expected), ("[U, U]", both - up - expected)):
            result[name].append(float(((error * size).norm(dim=-1))[where].mean()))
        print(rows, {name: round(values[-1], 3) for name, values in result.items()}, flush=True)
    return result


def masks(model: RegistrationAlgorithm, pairs: Pairs, count: int = 6) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention of random vessel voxels of one pair, and the spread of every vessel voxel's attention."""
    moving, fixed = pairs.at(torch.tensor([45]))
    inside = Inside.of(model, moving, fixed)
    vessels = (inside.fixed[0, 0] > 0.1).nonzero()
    chosen = vessels[torch.randperm(len(vessels), generator=torch.Generator().manual_seed(0))[:count]]
    _, covariance = inside.moments()  # unit coordinates of the pooled moving image
    size = torch.tensor([n - 1 for n in inside.moving.shape[2:]], device=moving.device)
    variance = (covariance.diagonal(dim1=-2, dim2=-1) * size**2).sum(dim=-1)  # in voxels of Ξθ
    spread = COARSE * variance.clamp(min=0).sqrt()[tuple(vessels.T)]
    share = inside.masks(chosen.tolist()).flatten(1).sort(dim=1, descending=True).values
    figures = {
        "spread_pixels_median": float(spread.median()),
        "spread_pixels_quartiles": [float(spread.quantile(q)) for q in (0.25, 0.75)],
        "share_of_the_nine_strongest_voxels": [float(s) for s in share[:, :9].sum(dim=1)],
    }
    arrays = {
        "masks": inside.masks(chosen.tolist()).float().cpu().numpy(),
        "voxels": chosen.cpu().numpy(),
        "moving": inside.moving[0, 0].cpu().numpy(),
        "fixed": inside.fixed[0, 0].cpu().numpy(),
    }
    return figures, arrays


@torch.no_grad()
def picture(model: RegistrationAlgorithm, pairs: Pairs, number: int = 45) -> dict[str, Any]:
    moving, fixed = pairs.at(torch.tensor([number]))
    phi = model(moving, fixed)
    return {
        "moving": moving[0, 0].cpu().numpy(),
        "fixed": fixed[0, 0].cpu().numpy(),
        "warped": warp(moving, phi, like=fixed)[0, 0].cpu().numpy(),
        "points": phi.on_grid_of(fixed)[0].cpu().numpy(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--parts", nargs="+", default=["equivariance", "masks", "pictures"])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, test = load(arguments.data, device)
    baseline, scaled = (build(test, variant, DATA_SEEDS["test"]) for variant in ("Baseline", "Scale Shift"))

    def model(name: str) -> RegistrationAlgorithm:
        return load_model(arguments.models / f"{name}.safetensors", device=device).eval()

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "look.json"
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    arrays: dict[str, Any] = {}
    if "equivariance" in arguments.parts:
        result["equivariance"] = {
            "shifts_pixels": SHIFTS,
            "CARL": equivariance(model("CARL-Baseline-0"), baseline),
            "displacement": equivariance(model("displacement-Baseline-0"), baseline),
        }
    if "masks" in arguments.parts:
        result["masks"] = {}
        for name in ("CARL-Baseline-0", "CARL-Baseline-0-diffusion"):
            result["masks"][name], found = masks(model(name), baseline)
            arrays |= {f"{name}/{key}": value for key, value in found.items()}
    if "pictures" in arguments.parts:
        for name, pairs in (("Baseline", baseline), ("Scale Shift", scaled)):
            arrays |= {f"{name}/{key}": value for key, value in picture(model("CARL-Baseline-0"), pairs).items()}
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    result["made"] = {**result.get("made", {}), **{part: [arguments.commit, kind] for part in arguments.parts}}
    path.write_text(json.dumps(result) + "\n")
    if arrays:
        np.savez_compressed(arguments.out / "look.npz", **arrays)


if __name__ == "__main__":
    main()
