"""Dice of a few retina pairs against the angle of the moving image, without and with instance optimisation.

    python experiments/rotation/sweep.py carry/retina.npz OUT --method rot=OUT/rot-Baseline-0.safetensors \\
        --method CARL=OUT/CARL-Baseline-0.safetensors --method displacement=OUT/displacement-Baseline-0.safetensors

Models are those of train.py, or any model for 2-D images with one channel. Writes sweep.json after every angle,
skipping those it already has, and sweep.npz, one pair at `--shown` degrees, for plot.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from angles import ANGLES, SIDE, square  # type: ignore[import-not-found]
from data import load  # type: ignore[import-not-found]
from look import picture  # type: ignore[import-not-found]
from train import DATA_SEEDS, vessel_dice  # type: ignore[import-not-found]

from carlreg.fast.precision import mixed_precision
from carlreg.files.atomic import write_atomically
from carlreg.model.files import load as load_model
from carlreg.objective.instance import instance_optimize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append", required=True, help="NAME=MODEL; may be repeated")
    parser.add_argument("--angles", nargs="+", type=float, default=ANGLES, help="degrees")
    parser.add_argument("--pairs", type=int, default=2, help="test pairs, of different retinas")
    parser.add_argument("--optimize", type=int, default=50, help="steps of instance optimisation")
    parser.add_argument("--shown", type=float, default=135.0, help="angle of the pair in the picture, degrees")
    parser.add_argument("--side", type=int, default=SIDE, help="side of the square")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, test = load(arguments.data, device)
    test = test[: arguments.pairs]  # a retina's first warp is one pair
    tests = square(test, DATA_SEEDS["test"], arguments.angles, arguments.side)
    shown = square(test[:1], DATA_SEEDS["test"], [arguments.shown], arguments.side)[f"{arguments.shown:g}"]
    models = {name: load_model(path, device=device) for name, path in (text.split("=", 1) for text in arguments.method)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "sweep.json"
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "commit": arguments.commit,
        "pairs": arguments.pairs,
        "steps": arguments.optimize,
        "network": {},
        "optimised": {},
    }
    if path.exists():
        result = json.loads(path.read_text())
    arrays: dict[str, Any] = {}
    for name, model in models.items():
        arrays |= {f"{name}/{key}": value for key, value in picture(model, shown, 0).items()}
        alone, optimised = (result[how].setdefault(name, {}) for how in ("network", "optimised"))
        for angle, pairs in tests.items():
            if angle in optimised:
                continue
            first = torch.arange(0, arguments.pairs * 20, 20, device=device)
            scores: tuple[list[float], list[float]] = ([], [])
            for moving, fixed in (pairs.at(index) for index in first.split(1)):
                with torch.no_grad(), mixed_precision(device):
                    phi = model(moving, fixed)
                scores[0].extend(vessel_dice(moving, fixed, phi))
                phi = instance_optimize(model, moving, fixed, steps=arguments.optimize).transform
                scores[1].extend(vessel_dice(moving, fixed, phi))
            alone[angle], optimised[angle] = scores
            write_atomically(path, (json.dumps(result) + "\n").encode())
            print(f"{name}, {angle}°: {scores[0]} alone, {scores[1]} optimised", flush=True)
    np.savez_compressed(arguments.out / "sweep.npz", **arrays)


if __name__ == "__main__":
    main()
