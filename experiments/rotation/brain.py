"""Train CARL{ROT} in 3-D on brains and random anatomy.

    python experiments/base/prepare.py DATA carry/turned.npz --sets brain --isotropic 2
    python experiments/rotation/brain.py carry/turned.npz OUT --seconds 500          # again, until all steps are done

This follows the authors' procedure: R and Q are random rotations inside the loss; Ξ is trained alone first (`--first`:
with diffusion, as theirs, or with nearness; `--diffusion` is its number of steps), then the whole network with
GradICON. carl-rot was trained from the output of encoder.py instead of that first stage (`--model`). The same command
resumes the run in OUT/run. Checkpoints are chosen by Dice on the `dev` pairs (training subjects kept back), each moving
brain rotated once at random. Writes scores.json, and the best model in half precision. turned.py scores it at every
angle.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from angles import MM  # type: ignore[import-not-found]

from carlreg.files.atomic import write_atomically
from carlreg.geometry.fitting import random_rotation
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import load, save
from carlreg.model.zoo import carl_rot
from carlreg.training.loop import train
from carlreg.training.stages import Stage

sys.path.insert(0, str(Path(__file__).parent.parent / "base"))

from train import Data, add_arguments, show, start_from  # type: ignore[import-not-found]

UNETS: dict[str, Any] = {"unet_down": (16, 32, 64, 64, 64), "unet_up": (64, 64, 48, 32, 16)}
"""With an encoder of width 64, 4.70 M parameters: 9.0 MiB in half precision."""
HANDED = 16
"""Determinants in the encoder, which distinguish left from right."""
FIRST = {"diffusion": 10.5, "nearness": 50.0}
"""Regularisers of the first stage and their weights. With diffusion, the paper's, training did not start in 800 steps:
all points map to the same place, where diffusion has no gradient."""
BODY = (0.25, 0.42)
"""Half axes of the random anatomy, chosen so that it stays in view at every rotation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(diffusion=1500, steps=6000, synthetic=0.3)
    parser.add_argument(
        "--handed", type=int, default=HANDED, help="determinants in the encoder that distinguish left from right"
    )
    parser.add_argument("--first", default="nearness", choices=FIRST, help="regulariser of the first stage")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    # A rotated brain nearly fills the image, so shifts are small.
    data = Data(arguments.data, arguments.side, device, shift=0.04, anatomy={"body": BODY, "shift": 0.05})
    later = {"learning_rate": arguments.rate, "final_learning_rate": arguments.final_rate, "rotate": True}
    later |= {"label_weight": arguments.label_weight}
    stages = [Stage(arguments.steps, warm_up=100, **later)]
    if arguments.model is not None:
        model = start_from(arguments.model, device)
    else:
        model = carl_rot(3, 2, width=arguments.width, handed=arguments.handed, **UNETS).to(device)
        common: dict[str, Any] = {"learning_rate": arguments.rate, "warm_up": 50, "rotate": True}
        common |= {"label_weight": arguments.label_weight}
        weight = FIRST[arguments.first]
        stages.insert(0, Stage(arguments.diffusion, arguments.first, weight, first_step_alone=True, **common))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.2f} M parameters, {2 * count / 2**20:.1f} MiB in half precision", flush=True)

    dev = data.pairs("brain", "dev")
    like = torch.empty(0, device=device)
    turns = random_rotation((arguments.side,) * 3, len(dev), like=like, generator=torch.Generator().manual_seed(0))

    def on_dev(model: RegistrationAlgorithm) -> float:
        rows = [data.score(model, "brain", *pair, 0, turns[n : n + 1]) for n, pair in enumerate(dev)]
        dice, before = (float(np.mean([row[key] for row in rows])) for key in ("dice", "before"))
        print(f"dev, rotated at random: Dice {dice:.4f}, before {before:.4f}", flush=True)
        return dice

    model = train(
        model,
        lambda generator: data.draw(generator, arguments.pairs, arguments.synthetic, arguments.label_weight > 0),
        stages,
        out=arguments.out / "run",
        seed=arguments.seed,
        validate=on_dev,
        validate_every=arguments.validate_every,
        save_every=arguments.validate_every,
        seconds=arguments.seconds,
        graphs=False if arguments.no_graphs else None,
        callback=show,
    )
    best = arguments.out / "run" / "best.safetensors"
    model = load(best, device=device) if arguments.steps and best.exists() else model
    settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    report = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "parameters": count,
        "settings": settings,
        "dev": on_dev(model),
    }
    write_atomically(arguments.out / "scores.json", (json.dumps(report, indent=2) + "\n").encode())
    about = {"name": "carl-rot", "grid": " ".join(3 * [str(arguments.side)]), "voxel": str(MM)}
    save(model, arguments.out / "model.safetensors", dtype=torch.float16, metadata=about)


if __name__ == "__main__":
    main()
