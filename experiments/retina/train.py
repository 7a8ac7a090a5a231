"""Train the three networks of the paper's retina experiment, several runs in parallel on one GPU, and score them.

    python experiments/retina/train.py carry/retina.npz OUT --networks CARL --variants Baseline Shift --seeds 0 1 2

The schedule is the authors': Adam with a learning rate of 3e-4, batches of 10 pairs, one epoch of diffusion and 145 of
GradICON. Each run is captured as a CUDA graph on its own stream, so that the small kernels of one run fill the gaps of
another. Writes runs.json with the Dice of every run on all three test sets, and each network's model trained on
Baseline with seed 0, at the end and after diffusion. Runs that runs.json already has are skipped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from data import VARIANTS, Pairs, Variant, build, load  # type: ignore[import-not-found]
from torch import Tensor

from carlreg.fast.precision import mixed_precision
from carlreg.files.atomic import write_atomically
from carlreg.geometry.transforms import Identity, Transform, warp
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import save
from carlreg.model.zoo import carl, gradicon, xi
from carlreg.training.batches import Batch
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

NETWORKS = {
    "displacement": lambda: gradicon(2, 2),  # TwoStep{Down{TwoStep{Down{Ψ0}, Ψ1}}, Ψ2}
    "Ξ": lambda: xi(2),  # Down{Down{Ξθ}}
    "CARL": lambda: carl(2, 2),  # TwoStep{Down{TwoStep{Down{Ξθ}, Ψ1}}, Ψ2}
}
BATCH, RATE, EPOCHS = 10, 3e-4, 145
DATA_SEEDS = {"train": 0, "test": 1}
CAPTURED = 5
"""Steps after which a stage's graph has been captured."""
VESSEL = 0.2
"""Threshold for vessels after averaging."""


@dataclass
class Run:
    """The training of one network."""

    network: str
    variant: Variant
    seed: int
    pairs: Pairs
    stages: tuple[Stage, ...]
    device: torch.device
    losses: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model: RegistrationAlgorithm = NETWORKS[self.network]().to(self.device).train()
        self.order = torch.Generator().manual_seed(self.seed)
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    @property
    def name(self) -> str:
        return f"{self.network}, {self.variant}, seed {self.seed}"

    @property
    def kept(self) -> bool:
        """Whether to keep the model: one of each network."""
        return self.variant == "Baseline" and self.seed == 0

    def batches(self) -> Iterator[Tensor]:
        while True:
            yield from torch.randperm(len(self.pairs), generator=self.order).to(self.device).split(BATCH)

    def steps(self, keep: Path | None) -> Iterator[None]:
        """Train, one step at a time."""
        batches = self.batches()
        for number, stage in enumerate(self.stages):
            step = TrainingStep(self.model, stage, device=self.device)
            for n in range(stage.steps):
                with torch.cuda.stream(self.stream):
                    moving, fixed = self.pairs.at(next(batches))
                    loss = step(Batch(moving, fixed), stage.rate(n), seed=(self.seed * 2 + number) * 10**6 + n)
                    if (n + 1) % 400 == 0 or n + 1 == stage.steps:
                        self.losses.append({"stage": number, "step": n + 1, **loss.floats()})
                yield
            if self.stream is not None:
                self.stream.synchronize()
            if int(step.skipped):
                self.losses.append({"stage": number, "skipped": int(step.skipped)})
            if keep is not None and number == 0:
                save_small(self.model, keep)

    def score(self, tests: Mapping[str, Pairs]) -> dict[str, Any]:
        self.model.eval()
        return {
            "network": self.network,
            "trained on": self.variant,
            "seed": self.seed,
            "dice": {variant: dice_of(self.model, pairs) for variant, pairs in tests.items()},
            "losses": self.losses,
        }


@torch.no_grad()
def dice_of(model: RegistrationAlgorithm | None, pairs: Pairs, batch: int = 40) -> list[float]:
    """Dice of each pair's warped and fixed vessels; unregistered without a model."""
    scores = []
    for index in torch.arange(len(pairs), device=pairs.fixed.device).split(batch):
        moving, fixed = pairs.at(index)
        phi: Transform = Identity()
        if model is not None:
            with mixed_precision(moving.device):
                phi = model(moving, fixed)
        scores += vessel_dice(moving, fixed, phi)
    return scores


def vessel_dice(moving: Tensor, fixed: Tensor, phi: Transform) -> list[float]:
    """Dice of each pair of a batch."""
    first, second = (image > VESSEL for image in (warp(moving, phi, like=fixed), fixed))
    common, total = ((first & second).flatten(1).sum(1), first.flatten(1).sum(1) + second.flatten(1).sum(1))
    return [round(score, 5) for score in (2 * common / total.clamp(min=1)).tolist()]


def save_small(model: RegistrationAlgorithm, path: Path) -> None:
    """Save in half precision if the values fit."""
    try:
        save(model, path, dtype=torch.float16)
    except ValueError as error:
        print(f"saving {path.name} in float32: {error}")
        save(model, path)


def side_by_side(runs: list[Run], folder: Path, deadline: float) -> bool:
    """Train runs in parallel; False if the deadline came first.

    Graphs are captured one run at a time. Then each run has a thread, since replaying a graph of two thousand kernels
    keeps a thread busy for milliseconds.
    """
    keep = [folder / f"{safe(run)}-diffusion.safetensors" if run.kept else None for run in runs]
    going = [run.steps(path) for run, path in zip(runs, keep, strict=True)]
    for run, steps in zip(runs, going, strict=True):
        for _ in itertools.islice(steps, run.stages[0].steps + CAPTURED):
            pass
    with ThreadPoolExecutor(len(runs)) as pool:
        return all(pool.map(lambda steps: finish(steps, deadline), going))


def finish(steps: Iterator[None], deadline: float) -> bool:
    return all(time.monotonic() < deadline for _ in steps)


def safe(run: Run) -> str:
    return f"{run.network.replace('Ξ', 'xi')}-{run.variant.replace(' ', '')}-{run.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--together", type=int, default=4, help="runs to train in parallel")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="epochs of GradICON")
    parser.add_argument("--images", type=int, help="use only N images, to try the script")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="time limit; a group of runs that exceeds it is discarded"
    )
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    sources = dict(zip(("train", "test"), load(arguments.data, device), strict=True))
    sources = {name: images[: arguments.images] for name, images in sources.items()}
    sets = {
        part: {variant: build(images, variant, DATA_SEEDS[part]) for variant in VARIANTS}
        for part, images in sources.items()
    }
    epoch = len(sets["train"]["Baseline"]) // BATCH
    stages = (
        Stage(epoch, "diffusion", learning_rate=RATE),
        Stage(arguments.epochs * epoch, learning_rate=RATE),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "runs.json"
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "data_seeds": DATA_SEEDS,
        "unregistered": {variant: dice_of(None, pairs) for variant, pairs in sets["test"].items()},
        "speed": [],
        "runs": [],
    }
    if path.exists():
        result = json.loads(path.read_text())
    done = {(run["network"], run["trained on"], run["seed"]) for run in result["runs"]}
    wanted = [
        (network, variant, seed)
        for network in arguments.networks
        for variant in arguments.variants
        for seed in arguments.seeds
        if (network, variant, seed) not in done
    ]
    print(f"data ready after {time.monotonic() - start:.0f} s; {len(wanted)} runs of {epoch} + {stages[1].steps} steps")
    train_in_groups(
        [
            functools.partial(Run, network, variant, seed, sets["train"][variant], stages, device)
            for network, variant, seed in wanted
        ],
        sets["test"],
        result,
        path,
        together=arguments.together,
        deadline=start + arguments.seconds,
        commit=arguments.commit,
    )


def train_in_groups(
    wanted: Sequence[Callable[[], Run]],
    tests: Mapping[str, Pairs],
    result: dict[str, Any],
    path: Path,
    *,
    together: int,
    deadline: float,
    commit: str,
) -> None:
    """Train runs in parallel groups, score them, and write scores first, then models."""
    for first in range(0, len(wanted), together):
        runs = [make() for make in wanted[first : first + together]]
        began = time.monotonic()
        if not side_by_side(runs, path.parent, deadline):
            print("time limit reached")
            return
        seconds = time.monotonic() - began
        speed = sum(stage.steps for run in runs for stage in run.stages) / seconds
        result["speed"].append({"runs": [run.name for run in runs], "steps_per_second": round(speed, 1)})
        for run in runs:
            result["runs"].append({"commit": commit, **run.score(tests)})
            means = {k: sum(v) / len(v) for k, v in result["runs"][-1]["dice"].items()}
            words = ", ".join(f"{test} {value:.3f}" for test, value in means.items())
            print(f"{seconds:.0f} s, {speed:.0f} steps/s, {run.name}: {words}", flush=True)
        write_atomically(path, (json.dumps(result) + "\n").encode())
        for run in runs:
            if run.kept:
                save_small(run.model, path.parent / f"{safe(run)}.safetensors")


if __name__ == "__main__":
    main()
