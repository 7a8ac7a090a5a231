"""Compare weights of the training loss by short trainings of the same model, scored on `dev`.

    python experiments/base/weights.py carry/*.npz --out weights.json --steps 400 --commit HASH

Every training starts from `--model` and draws the same batches; the learning rate decays to zero.
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
from universal import CHOSEN_BY, Mixture, start_from, write  # type: ignore[import-not-found]

from carlreg.training.loop import train
from carlreg.training.stages import Stage

sys.path.append(str(Path(__file__).parents[2]))
from experiments.made import machine

VARIANTS: dict[str, dict[str, float]] = {
    "as before": {},
    "labels 3": {"label_weight": 3.0},
    "labels 3, window 2": {"label_weight": 3.0, "window": 2.0},
    "labels 3, window 2, λ 0.5": {"label_weight": 3.0, "window": 2.0, "weight": 0.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the trainings")
    parser.add_argument("--model", type=Path, default=Path("carl-base"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--variants", type=json.loads, default=VARIANTS, help="settings of a Stage by name, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Mixture(arguments.packs, device, {"thin": 0.25, "fine": 0.33})
    data.changed, data.cropped, data.room, data.synthetic, data.bent, data.across = 0.6, 0.5, 0.3, 0.1, 0.6, 0.4
    report: dict[str, Any] = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else machine(),
        "seed": arguments.seed,
        "split": "dev",
    }
    report |= {"model": arguments.model.name, "steps": arguments.steps, "rate": arguments.rate, "rows": {}}
    for name, settings in arguments.variants.items():
        began = time.monotonic()
        base = {"warm_up": 50, "learning_rate": arguments.rate, "final_learning_rate": 0.0, "label_weight": 1.0}
        model = train(
            start_from(arguments.model, device),
            lambda generator: data.draw(generator, arguments.pairs),
            [Stage(arguments.steps, **{**base, **settings})],
            out=arguments.work / str(len(report["rows"])),
            seed=arguments.seed,
            save_every=10**9,
        )
        scores = data.evaluate(model, "dev")
        mean = float(np.mean([scores[kind]["dice"] for kind in CHOSEN_BY if kind in scores]))
        report["rows"][name] = {"settings": settings, "mean": mean, "scores": scores}
        short = {kind: round(row["dice"], 4) for kind, row in scores.items()}
        print(f"{name}: {mean:.4f} ({time.monotonic() - began:.0f} s)", short, flush=True)
        write(report, arguments.out)


if __name__ == "__main__":
    main()
