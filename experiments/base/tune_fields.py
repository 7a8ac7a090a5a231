"""Compare settings of field optimisation on kept-back training subjects: Dice, folds and seconds.

    python benchmarks/pack.py DATA dev.npz --dev --sets brain abdomen abdomen_mr cardiac hippocampus
    PYTHONPATH=src python experiments/base/tune_fields.py dev.npz experiments/base/results/fields-5.json

Every pair is optimised with each setting, the arguments of `optimize_fields`, from the model's result. Settings that
the output already has are skipped. Results before fields-5.json are of an earlier implementation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.geometry.jacobian import folding
from carlreg.model.files import load
from carlreg.model.shipped import pretrained
from carlreg.objective.fields import optimize_fields

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fields import Pair, machine_name  # type: ignore[import-not-found]

GENTLE: dict[str, Any] = {"levels": 1, "learning_rate": 0.1}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"window": 1.5},
    {"window": 2.5},
    {"window": 3.0},
    {"weight": 0.1},
    {"weight": 0.3},
    {"weight": 1.5},
    {"fold_weight": 2.0},
    {"fold_weight": 10.0},
    {"fold_weight": 20.0},
    {"smoothing": 1.5},
    {"smoothing": 2.5},
    {"smoothing": 3.0},
    {"learning_rate": 0.5},
    {"steps": 10},
    {"steps": 40},
    {"levels": 3},
    {"levels": 5},
    GENTLE,
    {**GENTLE, "window": 2.5},
    {**GENTLE, "window": 3.0},
    {**GENTLE, "levels": 2},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="model file (default: the default model)")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="a JSON list of keyword arguments")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    arguments = parser.parse_args()
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = (load(arguments.model) if arguments.model else pretrained()).to(device).eval()
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    report |= {"machine": machine_name(device), "torch": torch.__version__, "seed": 0}
    with np.load(arguments.pairs) as arrays:
        pairs = {name: Pair(arrays, name, network, device) for name in sorted({key.split("/")[0] for key in arrays})}
    starts = {name: pair.answer() for name, pair in pairs.items()}
    for settings in [None, *arguments.settings]:
        for name in sorted({name.rpartition("-")[0] for name in pairs}):
            if (name, settings) in [(row["set"], row["settings"]) for row in report["rows"]]:
                continue
            if time.monotonic() - begin > arguments.seconds:
                return
            scores = [score(pair, starts[key], settings) for key, pair in pairs.items() if key.startswith(f"{name}-")]
            means = {part: round(float(np.mean([one[part] for one in scores])), 4) for part in scores[0]}
            report["rows"].append({"set": name, "settings": settings, "commit": arguments.commit, **means})
            print(json.dumps(report["rows"][-1]), flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def score(pair: Any, start: Any, settings: dict[str, Any] | None) -> dict[str, float]:
    """Of the network's result, without settings."""
    begin = time.perf_counter()
    phi = start[0]
    if settings is not None:
        options = {"moving": pair.moving, "fixed": pair.fixed, **pair.spacings, **settings}
        phi = optimize_fields(*start, **options).transform
    if pair.fixed.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {"dice": pair.dice(phi), "folds": folding(phi, pair.fixed), "seconds": seconds}


if __name__ == "__main__":
    main()
