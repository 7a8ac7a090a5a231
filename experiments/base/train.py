"""Train carl-base on brains, abdomens and hippocampi together, and score it on labelled pairs at the network's grid.

    python experiments/base/train.py carry/base.npz OUT --seconds 290

Continues from `--model`, if given, or starts from scratch. `--network gradicon` trains a GradICON network of the same
size for comparison; `--leave-out abdomen` trains without that anatomy, to test on one that was not trained on. Writes
the best model by mean Dice on the `dev` pairs (training subjects kept back), in half precision, and scores.json: Dice
per set on `dev` and `val` with and without instance optimisation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.fast.precision import mixed_precision
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Affine, Identity, Transform, compose, warp
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import load, save
from carlreg.model.shipped import pretrained
from carlreg.model.zoo import carl, gradicon
from carlreg.objective.instance import instance_optimize
from carlreg.objective.metrics import dice, mean_score
from carlreg.synthesis import random_anatomy
from carlreg.training.loop import Progress, train
from carlreg.training.stages import Stage

SIDE = 96
MIX = {"brain": 0.4, "abdomen": 0.4, "hippocampus": 0.2}
"""Relative frequency of each set."""
CROPPED = "abdomen"
"""The set whose field of view varies: some scans show the chest, some the pelvis."""
MOST_ROOM = 0.8
"""Largest empty space around a scan, as a fraction of its side."""
STRUCTURES = 14
"""Number of labels in the loss: enough for all of the brain's and the abdomen's."""
NETWORKS: dict[str, Callable[[int], RegistrationAlgorithm]] = {
    "carl": lambda width: carl(3, 2, width=width, unet_down=(16, 32, 64, 128, 160), unet_up=(128, 96, 64, 32, 16)),
    "gradicon": lambda _: gradicon(3, 2, unet_down=(16, 32, 64, 112, 128), unet_up=(112, 80, 48, 32, 16)),
}
"""Both have 10 M parameters."""
FROM_SCRATCH = ("network", "width", "diffusion")
"""Settings that apply only without `--model`."""
ABDOMEN_FIVE = (1, 2, 3, 6, 11)
"""Spleen, kidneys, liver, pancreas."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--refine", action="store_true", help="add a refinement to the model")
    parser.add_argument("--network", choices=NETWORKS, default="carl", help="network to train from scratch")
    parser.add_argument("--leave-out", choices=MIX, help="set to score but not to train on")
    parser.add_argument("--optimize", type=int, default=50, help="steps of instance optimisation in the evaluation")
    parser.add_argument("--optimized-pairs", type=int, default=4, help="pairs of each set to optimise")
    parser.add_argument("--abdomens", type=float, default=MIX["abdomen"], help="relative frequency of abdomens")
    parser.add_argument("--hippocampi", type=float, default=MIX["hippocampus"], help="relative frequency of hippocampi")
    parser.add_argument(
        "--cropped", type=float, default=0.0, help="share of abdomens to crop by some slices at either end"
    )
    parser.add_argument("--room", type=float, default=0.0, help="share of pairs with empty space around the scans")
    arguments = parser.parse_args()
    if arguments.refine and arguments.model is None:
        parser.error("--refine needs --model")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    data = Data(arguments.data, arguments.side, device, cropped=arguments.cropped, room=arguments.room)
    data.mix |= {"abdomen": arguments.abdomens, "hippocampus": arguments.hippocampi}
    data.drawn = [name for name in data.sets if name != arguments.leave_out]
    start = time.monotonic()
    common: dict[str, Any] = {
        "learning_rate": arguments.rate,
        "final_learning_rate": arguments.final_rate,
        "label_weight": arguments.label_weight,
    }
    if arguments.model is not None:
        model = start_from(arguments.model, device)
        stages = [Stage(arguments.steps, warm_up=100, refine=arguments.refine, **common)]
    else:
        model = NETWORKS[arguments.network](arguments.width).to(device)
        stages = [
            Stage(arguments.diffusion, "diffusion", learning_rate=arguments.rate, warm_up=50),
            Stage(arguments.steps, warm_up=50, **common),
        ]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(data.images)} volumes", flush=True
    )

    def on_dev(model: RegistrationAlgorithm) -> float:
        scores = data.evaluate(model, "dev", most_pairs=6)
        print("dev", {k: round(v["dice"], 4) for k, v in scores.items()}, flush=True)
        return float(np.mean([scores[name]["dice"] for name in data.drawn]))

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
    final = on_dev(model)
    best = arguments.out / "run" / "best.safetensors"
    if best.exists():
        candidate = load(best, device=device)
        model = candidate if on_dev(candidate) > final else model
    trained = time.monotonic() - start
    report: dict[str, Any] = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "seed": arguments.seed,
        "started_from": None if arguments.model is None else arguments.model.name,
        "training_seconds": round(trained, 1),
        "grid": arguments.side,
        "settings": {
            name: getattr(arguments, name)
            for name in vars(arguments)
            if name
            not in ("data", "out", "model", "commit", "seed", "seconds", *(FROM_SCRATCH if arguments.model else ()))
        },
    }
    save(
        model,
        arguments.out / "model.safetensors",
        dtype=torch.float16,
        metadata={"name": arguments.network, "ct_range": "-125 275", "grid": " ".join(3 * [str(arguments.side)])},
    )
    for split in ("dev", "val"):
        report[split] = {"network": data.evaluate(model, split)}
    write(report, arguments.out)
    if arguments.optimize:
        report["val"]["optimised"] = data.evaluate(
            model, "val", optimize=arguments.optimize, most_pairs=arguments.optimized_pairs
        )
        write(report, arguments.out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options shared by all training scripts that use these packs."""
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="model to continue from: a file or the name of a shipped model")
    parser.add_argument("--seconds", type=float, help="time limit of this call")
    parser.add_argument("--diffusion", type=int, default=500, help="steps of diffusion, first")
    parser.add_argument("--steps", type=int, default=4500, help="steps of GradICON")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--final-rate", type=float, default=2e-5, help="final learning rate of the cosine schedule")
    parser.add_argument("--pairs", type=int, default=4, help="pairs in a batch")
    parser.add_argument("--synthetic", type=float, default=0.0, help="share of pairs of random anatomy")
    parser.add_argument("--label-weight", type=float, default=0.0, help="weight of the overlap of the training labels")
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--width", type=int, default=64, help="width of the encoder")
    parser.add_argument(
        "--validate-every", type=int, default=500, help="steps between validations, and between checkpoints"
    )
    parser.add_argument("--no-graphs", action="store_true", help="do not replay steps as CUDA graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")


def start_from(model: Path, device: torch.device) -> RegistrationAlgorithm:
    """Load a model file, or a shipped model by its name."""
    return load(model, device=device) if model.is_file() else pretrained(str(model)).to(device)


def show(progress: Progress) -> None:
    if progress.step % 200 == 0:
        parts = ", ".join(f"{k} {v:.4f}" for k, v in progress.losses.items())
        print(f"stage {progress.stage} step {progress.step} ({progress.seconds:.0f} s): {parts}", flush=True)


def write(report: dict[str, Any], folder: Path) -> None:
    (folder / "scores.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


class Data:
    """Packed volumes on the device, drawn as augmented pairs for training and as labelled pairs for scoring."""

    def __init__(
        self,
        path: Path,
        side: int,
        device: torch.device,
        *,
        shift: float = 0.08,
        cropped: float = 0.0,
        room: float = 0.0,
        anatomy: dict[str, Any] | None = None,
    ) -> None:
        self.side, self.device, self.shift, self.cropped, self.room = side, device, shift, cropped, room
        self.anatomy = anatomy or {}
        self.mix = dict(MIX)
        packed = np.load(path)
        self.images = {key: torch.from_numpy(packed[key]).to(device) for key in packed.files}
        self.sets = sorted({key.split("/")[0] for key in packed.files})
        self.drawn = self.sets
        """Sets to train on."""
        self.names = {
            (name, split): sorted(
                key for key in packed.files if key.startswith(f"{name}/{split}/") and not key.endswith("labels")
            )
            for name in self.sets
            for split in ("train", "dev", "val")
        }

    def image(self, key: str) -> Tensor:
        """(1, 1, side, side, side) in [0, 1]."""
        scan = self.images[key][None, None].float() / 255
        if scan.shape[2:] == (self.side,) * 3:
            return scan
        return F.interpolate(scan, size=(self.side,) * 3, mode="trilinear", align_corners=True)

    def draw(
        self, generator: torch.Generator, pairs: int, synthetic: float = 0.0, labelled: bool = False
    ) -> tuple[Tensor, ...]:
        """Pairs of different training subjects of one set, each with a small random affine map and gamma, some pairs
        mirrored left to right; or, for a share of the pairs, two views of one random anatomy. With labels if
        `labelled`."""
        made = [self.draw_pair(generator, synthetic, labelled) for _ in range(pairs)]
        return tuple(torch.cat(parts) for parts in zip(*made, strict=True))

    def draw_pair(self, generator: torch.Generator, synthetic: float, labelled: bool) -> list[Tensor]:
        weights = torch.tensor([self.mix[name] for name in self.drawn])
        if torch.rand((), generator=generator) < synthetic:
            seed = int(torch.randint(2**62, (), generator=generator))
            own = torch.Generator(self.device).manual_seed(seed)
            made = random_anatomy((self.side,) * 3, generator=own, **self.anatomy)
            images, labels = [made.moving, made.fixed], [made.moving_labels, made.fixed_labels]
        else:
            name = self.drawn[int(torch.multinomial(weights, 1, generator=generator))]
            keys = self.names[name, "train"]
            mirror = bool(torch.rand((), generator=generator) < 0.5)
            has_room = self.room and torch.rand((), generator=generator) < self.room
            room = 1 + MOST_ROOM * float(torch.rand((), generator=generator)) if has_room else 1.0
            images, labels = [], []
            for index in torch.randperm(len(keys), generator=generator)[:2].tolist():
                scan, noise = self.image(keys[index]), self.affine_noise(generator, name, room)
                gamma = float(torch.exp(0.25 * torch.randn((), generator=generator)))
                views = [warp(scan, noise, like=scan, outside="zeros").clamp(0, 1) ** gamma]
                if labelled:
                    own_labels = self.images[f"{keys[index]}/labels"][None, None].float()
                    views.append(warp(own_labels, noise, like=scan, mode="nearest", outside="zeros"))
                views = [image.flip(2) if mirror else image for image in views]
                images.append(views[0])
                labels += views[1:]
        values = torch.arange(1, STRUCTURES + 1, device=self.device).reshape(-1, 1, 1, 1)
        return [*images, *((map_ == values).byte() for map_ in labels if labelled)]

    def affine_noise(self, generator: torch.Generator, name: str, room: float = 1.0) -> Affine:
        """A random affine map. Scales vary more than angles, as do fields of view. With `room` above 1, the image is
        that many times as large as the scan along each axis, and the scan lies at a random position in it."""
        linear = torch.eye(3) + 0.05 * torch.randn(3, 3, generator=generator)
        linear += torch.diag(0.06 * torch.randn(3, generator=generator))
        shift = self.shift * torch.randn(3, generator=generator)
        centre = torch.full((3,), 0.5)
        if name == CROPPED and room == 1 and self.cropped and torch.rand((), generator=generator) < self.cropped:
            kept, where = torch.rand(2, generator=generator)
            kept = 0.55 + 0.45 * kept
            linear[:, 2] *= kept
            shift[2] += (1 - kept) * (where - 0.5)
        if room > 1:
            linear *= room
            shift += (room - 1) * (torch.rand(3, generator=generator) - 0.5)
        return Affine.from_parts(linear[None], (centre - linear @ centre + shift)[None]).to(
            torch.empty(0, device=self.device)
        )

    def pairs(self, name: str, split: str) -> list[tuple[str, str]]:
        """Ordered pairs of different subjects: all of them, or for the hippocampus 40 drawn with seed 0."""
        pairs = list(itertools.permutations(self.names[name, split], 2))
        return random.Random(0).sample(pairs, 40) if len(pairs) > 100 else pairs

    def evaluate(
        self, model: RegistrationAlgorithm, split: str, *, optimize: int = 0, most_pairs: int | None = None
    ) -> dict[str, dict[str, float]]:
        scores: dict[str, dict[str, float]] = {}
        for name in self.sets:
            pairs = self.pairs(name, split)
            if most_pairs is not None:
                pairs = random.Random(1).sample(pairs, min(most_pairs, len(pairs)))
            rows = [self.score(model, name, *pair, optimize) for pair in pairs]
            if rows:
                scores[name] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
                scores[name]["pairs"] = len(rows)
        return scores

    def score(
        self,
        model: RegistrationAlgorithm,
        name: str,
        moving: str,
        fixed: str,
        optimize: int,
        turn: Transform | None = None,
    ) -> dict[str, float]:
        """Score one pair, with the moving image M ∘ turn if a rotation is given."""
        m, f, turn = self.image(moving), self.image(fixed), turn or Identity()
        m = m if isinstance(turn, Identity) else warp(m, turn, like=m, outside="zeros")
        if optimize:
            phi: Transform = instance_optimize(model, m, f, steps=optimize).transform
        else:
            with torch.no_grad(), mixed_precision(self.device):
                phi = model(m, f)
        labels_m = self.images[f"{moving}/labels"][None, None].float()
        labels_f = self.images[f"{fixed}/labels"][None, None].float()
        with torch.no_grad():
            warped = warp(labels_m, compose(turn, phi), like=labels_f, mode="nearest")
            unmoved = warp(labels_m, turn, like=labels_f, mode="nearest")
            row = {
                "dice": mean_score(dice(warped, labels_f)),
                "before": mean_score(dice(unmoved, labels_f)),
                "folds": folding(phi, f),
            }
            if name == "abdomen":
                row["dice_five"] = mean_score(dice(warped, labels_f, ABDOMEN_FIVE))
        return row


if __name__ == "__main__":
    main()
