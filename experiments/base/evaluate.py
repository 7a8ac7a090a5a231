"""Score a model on a CPU, with the network alone and with optimisation of the fields, at the network's grid.

    python experiments/base/evaluate.py carry/base.npz experiments/base/results/cpu.json --pairs 4

Pairs are drawn from the validation pairs with a fixed seed. Each row has both directions' time and peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train import ABDOMEN_FIVE, Data  # type: ignore[import-not-found]

from carlreg.metrics import dice, folding, inverse_consistency, mean_score
from carlreg.models import pretrained
from carlreg.optimize import optimize_fields
from carlreg.transforms import Identity, Transform, warp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=4, help="of each set")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    data, model = Data(arguments.data, 96, torch.device("cpu")), pretrained()
    report: dict[str, Any] = {
        "commit": commit,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads",
        "seed": 2,
        "sets": {},
    }
    for name in data.sets:
        pairs = random.Random(2).sample(data.pairs(name, "val"), arguments.pairs)
        rows: dict[str, list[dict[str, float]]] = {"before": [], "network": [], "fields": []}
        for moving_key, fixed_key in pairs:
            moving, fixed = data.image(moving_key), data.image(fixed_key)
            start = time.perf_counter()
            with torch.no_grad():
                phi, inverse = model.both(moving, fixed)
                phi.on_grid_of(fixed)
            network_seconds = time.perf_counter() - start
            start = time.perf_counter()
            best = optimize_fields(phi, inverse, moving, fixed)
            fields_seconds = time.perf_counter() - start
            answers: dict[str, tuple[Transform, Transform, float]] = {
                "before": (Identity(), Identity(), 0.0),
                "network": (phi, inverse, network_seconds),
                "fields": (best.transform, best.inverse, network_seconds + fields_seconds),
            }
            labels = [data.images[f"{key}/labels"][None, None].float() for key in (moving_key, fixed_key)]
            for kind, (forward, backward, seconds) in answers.items():
                warped = warp(labels[0], forward, like=labels[1], mode="nearest")
                row = {
                    "dice": mean_score(dice(warped, labels[1])),
                    "folds_percent": folding(forward, fixed),
                    "inverse_consistency_voxels": float(inverse_consistency(forward, backward, moving).mean()),
                    "seconds": seconds,
                }
                if name == "abdomen":
                    row["dice_five"] = mean_score(dice(warped, labels[1], ABDOMEN_FIVE))
                rows[kind].append(row)
            print(name, {kind: round(rows[kind][-1]["dice"], 4) for kind in rows}, flush=True)
        report["sets"][name] = {
            kind: {key: round(float(np.mean([row[key] for row in found])), 5) for key in found[0]}
            for kind, found in rows.items()
        } | {"pairs": len(pairs)}
    report["peak_resident_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
