"""Train CARL{ROT} and the networks it is compared with on retinas, in parallel, and score them on rotated ones.

    python experiments/rotation/train.py carry/retina.npz OUT --seeds 0 1 2

`rot` is CARL{ROT} trained by the authors' procedure with a shorter first stage: both images of a pair are rotated at
random, and the result is rotated back before the loss is computed; first Ξ alone with diffusion, then the whole network
with GradICON. `outside` is the same network and schedule, but the loss is computed on the rotated images. `CARL` and
`displacement` are trained without rotations. All are trained and tested on Baseline, centred in a square. Writes
runs.json with the Dice of every run at every angle, and each network's models of seed 0, at the end and after
diffusion. Runs that runs.json already has are skipped.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import torch
from angles import ANGLES, SIDE, Turned, square  # type: ignore[import-not-found]
from data import load  # type: ignore[import-not-found]
from train import (  # type: ignore[import-not-found]
    BATCH,
    DATA_SEEDS,
    NETWORKS,
    RATE,
    Run,
    dice_of,
    train_in_groups,
)

from carlreg.model.zoo import carl, carl_rot, gradicon
from carlreg.training.stages import Stage

UNETS = {"unet_down": (4, 8, 8, 8, 8), "unet_up": (8, 8, 8, 8, 8)}
COMPARED = ("rot", "outside", "CARL", "displacement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(COMPARED), choices=COMPARED)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--together", type=int, default=4, help="runs to train in parallel")
    parser.add_argument("--diffusion", type=int, default=1500, help="steps of diffusion for rot and outside")
    parser.add_argument("--steps", type=int, default=8120, help="steps of GradICON")
    parser.add_argument("--angles", nargs="+", type=float, default=ANGLES, help="degrees")
    parser.add_argument("--side", type=int, default=SIDE, help="side of the square")
    parser.add_argument("--images", type=int, help="use only N images, to try the script")
    parser.add_argument("--tiny", action="store_true", help="use tiny networks, to try the script")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="time limit; a group of runs that exceeds it is discarded"
    )
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    training, test = (images[: arguments.images] for images in load(arguments.data, device))
    pairs = square(training, DATA_SEEDS["train"], [0], arguments.side)["0"]
    tests = square(test, DATA_SEEDS["test"], arguments.angles, arguments.side)
    unets: dict[str, Any] = UNETS if arguments.tiny else {}
    narrow: dict[str, Any] = {"width": 4, **unets} if arguments.tiny else {}
    NETWORKS.update(
        {
            "rot": lambda: carl_rot(2, 2, **narrow),
            "outside": lambda: carl_rot(2, 2, **narrow),
            "CARL": lambda: carl(2, 2, **narrow),
            "displacement": lambda: gradicon(2, 2, **unets),
        }
    )

    def run(network: str, seed: int) -> Run:
        rotates, inside = network in ("rot", "outside"), network == "rot"
        common: dict[str, Any] = {"learning_rate": RATE, "rotate": inside}
        first = Stage(len(pairs) // BATCH, "diffusion", **common)
        if rotates:
            first = Stage(arguments.diffusion, "diffusion", 10.5, first_step_alone=True, **common)
        stages = first, Stage(arguments.steps, **common)
        shown = Turned(pairs, torch.Generator().manual_seed(seed)) if rotates and not inside else pairs
        return Run(network, "Baseline", seed, shown, stages, device)

    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "runs.json"
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "unregistered": {angle: dice_of(None, turned) for angle, turned in tests.items()},
        "speed": [],
        "runs": [],
    }
    if path.exists():
        result = json.loads(path.read_text())
    done = {(run["network"], run["seed"]) for run in result["runs"]}
    wanted = [(network, seed) for seed in arguments.seeds for network in arguments.networks]
    wanted = [one for one in wanted if one not in done]
    print(f"data ready after {time.monotonic() - start:.0f} s; {len(wanted)} runs", flush=True)
    train_in_groups(
        [functools.partial(run, *one) for one in wanted],
        tests,
        result,
        path,
        together=arguments.together,
        deadline=start + arguments.seconds,
        commit=arguments.commit,
    )


if __name__ == "__main__":
    main()
