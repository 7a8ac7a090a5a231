"""Optimisation of the fields on training subjects kept back: Dice, folds and seconds for each choice of its settings.

    python experiments/base/tune_fields.py carry/base.npz experiments/base/results/fields.json

Two pairs of each set, carl-base's answer as the start. What is there already is skipped.
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
from train import Data  # type: ignore[import-not-found]

from carlreg.metrics import dice, folding, mean_score
from carlreg.models import pretrained
from carlreg.optimize import optimize_fields
from carlreg.transforms import Transform, warp

SETTINGS: list[dict[str, float]] = [
    {},
    {"learning_rate": 0.5},
    {"smoothing": 3.0},
    {"weight": 0.75},
    {"steps": 40},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--pairs", type=int, default=2, help="of each set")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="a JSON list of keyword arguments")
    arguments = parser.parse_args()
    data = Data(arguments.data, 96, torch.device("cpu"))
    model = pretrained().eval()
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    report |= {"machine": f"{platform.machine()}, {os.cpu_count()} CPU cores", "torch": torch.__version__, "seed": 0}
    done = [(row["set"], row["settings"]) for row in report["rows"]]
    for name in data.sets:
        pairs = random.Random(2).sample(data.pairs(name, "dev"), arguments.pairs)
        answers: list[tuple[Transform, Transform]] = []
        for settings in [{"steps": 0}, *arguments.settings]:
            if (name, settings) in done:
                continue
            if not answers:
                with torch.no_grad():
                    answers = [model.both(data.image(moving), data.image(fixed)) for moving, fixed in pairs]
            rows = [score(data, m, f, answer, settings) for (m, f), answer in zip(pairs, answers, strict=True)]
            means = {key: round(float(np.mean([row[key] for row in rows])), 4) for key in rows[0]}
            report["rows"].append({"set": name, "settings": settings, "commit": arguments.commit, **means})
            print(json.dumps(report["rows"][-1]), flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def score(
    data: Any, moving: str, fixed: str, answer: tuple[Transform, Transform], settings: dict[str, Any]
) -> dict[str, float]:
    m, f = data.image(moving), data.image(fixed)
    labels = [data.images[f"{key}/labels"][None, None].float() for key in (moving, fixed)]
    start = time.perf_counter()
    phi = optimize_fields(*answer, m, f, **settings).transform
    seconds = time.perf_counter() - start
    warped = warp(labels[0], phi, like=labels[1], mode="nearest")
    return {"dice": mean_score(dice(warped, labels[1])), "folds": folding(phi, f), "seconds": seconds}


if __name__ == "__main__":
    main()
