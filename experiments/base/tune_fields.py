"""Compare settings of field optimisation on kept-back training subjects: Dice, folds, losses and seconds.

    for set in brain abdomen cardiac hippocampus; do
        python benchmarks/pack.py DATA carry/dev-$set.npz --dev --sets $set --most 4
    done
    PYTHONPATH=src python experiments/base/tune_fields.py carry/dev-*.npz --out experiments/base/results/fields-6.json

Every pair is optimised with each of its set's settings, the arguments of `optimize_fields`, from the model's result or,
with "start", from an affine map found by search or from the identity. Results are written after each, and those that
the output already has are skipped. `--table` prints the means of a file. Results before fields-6.json are of earlier
implementations.
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
from carlreg.geometry.transforms import Identity, Transform
from carlreg.model.files import load
from carlreg.model.loaded import load_model
from carlreg.objective.fields import optimize_fields
from carlreg.registration.affine_search import Scan, search_affine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from fields import Pair, machine_name  # type: ignore[import-not-found]

Settings = dict[str, Any]
WIDE: list[Settings] = [
    {},
    {"window": 1.5},
    {"steps": 10},
    {"learning_rate": 0.5},
    {"start": "affine"},
    {"levels": 5},
    {"fold_weight": 20.0},
    {"weight": 2.0},
    {"coarse_steps": 30},
    {"steps": 10, "coarse_steps": 40, "decay": 0.9},
    {"smoothing": 3.0},
    {"window": 1.5, "weight": 2.0},
    {"coarse_steps": 120},
    {"levels": 3},
    {"weight": 0.3},
    {"window": 3.0},
    {"smoothing": 1.5},
    {"start": "affine", "levels": 5, "fold_weight": 20.0},
    {"learning_rate": 2.0, "decay": 0.9},
    {"similarity": "lncc2"},
    {"steps": 40},
]
"""For brains and abdomens, the most important first."""
SLICES: list[Settings] = [
    {},
    {"start": "identity"},
    {"levels": 3},
    {"weight": 10.0},
    {"learning_rate": 0.3},
    {"window": 4.0},
    {"smoothing": 3.0},
    {"smoothing": 4.0},
    {"smoothing": 6.0},
    {"smoothing": 4.0, "learning_rate": 0.3},
    {"smoothing": 4.0, "levels": 3, "window": 4.0},
    {"smoothing": 4.0, "start": "identity"},
]
"""For hearts in thick slices."""
SMALL: list[Settings] = [
    {"levels": levels, "learning_rate": rate, "smoothing": smoothing}
    for smoothing in (2.0, 4.0, 6.0, 8.0)
    for levels, rate in ((1, 0.1), (2, 0.1), (1, 0.3))
]
"""For crops of the hippocampus."""
SETTINGS = {"hippocampus": SMALL, "cardiac": SLICES}
Maps = tuple[Transform, Transform]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="model file (default: the default model)")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--settings", type=json.loads, help="a JSON list of keyword arguments, for all sets")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--table", action="store_true", help="only print the means of the output")
    arguments = parser.parse_args()
    begin = time.monotonic()
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    if arguments.table:
        print("\n".join(sorted(map(line, report["rows"]))))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load(arguments.model).to(device).eval() if arguments.model else load_model("default", device).network
    report |= {"machine": machine_name(device), "torch": torch.__version__, "seed": 0}
    pairs: dict[str, Any] = {}
    for path in arguments.pairs:
        with np.load(path) as arrays:
            names = sorted({key.split("/")[0] for key in arrays})
            pairs |= {name: Pair(arrays, name, network, device) for name in names}
    starts: dict[tuple[str, str], Maps] = {}
    sets = {name.rpartition("-")[0]: None for name in pairs}
    wanted = [(name, arguments.settings or SETTINGS.get(name, WIDE)) for name in sets]
    order = [(n, name, settings) for name, every in wanted for n, settings in enumerate([None, *every])]
    for _, name, settings in sorted(order, key=lambda one: (one[1] in ("abdomen", "brain"), one[0])):
        if (name, settings) in [(row["set"], row["settings"]) for row in report["rows"]]:
            continue
        if time.monotonic() - begin > arguments.seconds:
            print("out of time", flush=True)
            return
        scores = []
        for key in (key for key in pairs if key.rpartition("-")[0] == name):
            options = dict(settings or {})
            which = key, options.pop("start", "network")
            if which not in starts:
                starts[which] = start(pairs[key], which[1])
            scores.append({"pair": key, **score(pairs[key], starts[which], None if settings is None else options)})
        report["rows"].append({"set": name, "settings": settings, "commit": arguments.commit, "pairs": scores})
        print(line(report["rows"][-1]), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def start(pair: Any, name: str) -> Maps:
    if name == "network":
        forward, backward = pair.answer()
        return forward, backward
    if name == "identity":
        return Identity(), Identity()
    moving, fixed = (Scan(getattr(pair, role), pair.spacings[f"{role}_spacing"]) for role in ("moving", "fixed"))
    affine = search_affine(moving, fixed).transform
    return affine, affine.inverse()


def score(pair: Any, maps: Maps, settings: Settings | None) -> dict[str, float]:
    """Of the start, without settings."""
    begin, phi, losses = time.perf_counter(), maps[0], []
    if settings is not None:
        options = {"moving": pair.moving, "fixed": pair.fixed, **pair.spacings, **settings}
        result = optimize_fields(*maps, **options)
        phi, losses = result.transform, [result.losses[0]["total"], result.losses[result.best]["total"]]
    if pair.fixed.is_cuda:
        torch.cuda.synchronize()
    row: dict[str, Any] = {"seconds": round(time.perf_counter() - begin, 4), "losses": losses}
    return row | {"dice": pair.dice(phi), "folds": folding(phi, pair.fixed)}


def line(row: dict[str, Any]) -> str:
    means = {part: np.mean([one[part] for one in row["pairs"]]) for part in ("dice", "folds", "seconds")}
    text = "network" if row["settings"] is None else json.dumps(row["settings"])
    return f"{row['set']:12} {means['dice']:.4f} {means['folds']:.4f} % {means['seconds']:.3f} s  {text}"


if __name__ == "__main__":
    main()
