"""Dice on `dev` after one and two passes of a model, at the network's grid.

    python experiments/base/passes.py carry/all-1.npz carry/all-2.npz carry/all-3.npz --out passes.json --commit HASH

A second pass registers the images as the first one aligned them: TwoStep{Φ, Φ}.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from universal import Mixture, start_from, write  # type: ignore[import-not-found]

from carlreg.model.algorithms import TwoStep

sys.path.append(str(Path(__file__).parents[2]))
from experiments.made import machine

KINDS = ("brain", "abdomen", "abdomen_mr", "cardiac_systole_fixed", "cardiac_diastole_fixed", "hippocampus")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("carl-base"))
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, once = Mixture(arguments.packs, 96, device), start_from(arguments.model, device)
    report = {"commit": arguments.commit, "machine": machine(), "model": arguments.model.name, "split": "dev"}
    model, rows = once, {}
    for number in range(1, arguments.passes + 1):
        for kind in KINDS:
            pairs = data.scored_pairs("dev")[kind]
            scores = [data.score(model, kind, *pair, n % 10) for n, pair in enumerate(pairs)]
            rows[f"{kind}, {number}"] = {key: float(np.mean([row[key] for row in scores])) for key in scores[0]}
        model = TwoStep(model, once).eval()
    write({**report, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
