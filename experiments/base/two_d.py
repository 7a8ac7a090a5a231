"""Train carl-2d on retinas, slices of all datasets and random shapes, and score it.

    python experiments/base/two_d.py carry/p2d/two_d.npz --out OUT --seconds 200
    python experiments/base/two_d.py carry/p2d/two_d.npz --out OUT --score OUT/model.safetensors

The pack is made by `prepare_2d.py`. A batch holds pairs of five kinds: a retina's vessels warped as in
`experiments/retina`; the same place in two subjects; a slice, deformed; label maps of two heads, each rendered in its
own contrast; and random shapes, deformed and rendered likewise. Pairs are mirrored, transposed and placed at random,
many in a larger, empty image. The network sees some images in a random contrast; the loss is computed on the original
ones and on their labels. A batch is drawn in one pass on the device.

Training has two parts, both on pairs of which most show the same source twice, so that their true map is known. First
Ξθ alone learns this map: by the cross-entropy between the attention of a voxel and its true position, and by the
distance of the whole map and of its slopes from the true ones, since a map that folds where there is nothing to match
cannot be unfolded by what follows. With diffusion or GradICON from the start, a new network maps all points to the same
place. Then the whole network is trained with GradICON, the overlap of labels and, for pairs whose map is known, the
distance from it. Where maps fold, the gradient of GradICON can be a thousand times as large as
usual, and one step of Adam with it undoes what was learnt, so its norm is limited. Images are halved three times before
Ξθ, so that its encoder sees two thirds of an image at once, as in `experiments/retina`: what it sees must include
something to match.

The learning rate follows the time, so that a run ends within `--seconds`. The best model on `dev` (training subjects
kept back) is written whenever there is a better one, in half precision, with the settings in trained.json. If the score
falls far below the best, training continues from that model at half the rate. `--score` writes scores.json: Dice on
`dev`, and of the vessels on all test pairs of `experiments/retina`, of the network alone and with the default
optimisation of the fields.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import Affine, RegistrationAlgorithm, load, save, warp
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.grids import interpolate, pool, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.resizing import resize, resize_labels
from carlreg.geometry.transforms import DisplacementField, Transform
from carlreg.model.algorithms import CoordinateAttention, Downsample, PredictDisplacement, TwoStep
from carlreg.model.encoder import Encoder
from carlreg.model.unet import UNet
from carlreg.model.zoo import first_step
from carlreg.objective.fields import FIELD_STEPS, optimize_fields
from carlreg.objective.losses import Loss, registration_loss
from carlreg.synthesis import random_anatomy
from carlreg.synthesis.contrast import random_colours, random_contrast, render
from carlreg.training.stages import Stage
from carlreg.training.step import Inputs, TrainingStep

sys.path.insert(0, str(Path(__file__).parent.parent / "retina"))
from data import (  # type: ignore[import-not-found]
    ELASTIC,
    PADDING,
    VARIANTS,
    Pairs,
    build,
    spline_matrix,
)
from data import load as load_retinas

SIDE, DOWNS = 256, 3
"""Side of the grid, and how often it is halved for Ξθ."""
WIDTH, DOWN, UP = 64, (16, 32, 64, 128), (64, 48, 32, 16)
"""Widths of the encoder and of the U-Nets: 1.47 M parameters, 2.8 MiB in half precision."""
COUNTS = {"retina": 5, "subjects": 3, "deformed": 2, "maps": 1, "shapes": 1}
"""Pairs of each kind in a batch."""
SETS = {"brain": 0.3, "brain_ibsr": 0.08, "abdomen": 0.25, "abdomen_mr": 0.08, "cardiac": 0.2, "hippocampus": 0.07}
SETS |= {"lung": 0.02}
"""Relative frequency of each set among the pairs of slices."""
STRUCTURES, MAP_LABELS = 14, 64
"""Numbers of labels in the loss and, at most, in a label map."""
SHAPES = 320
"""Number of random shapes."""
FINER = 1.125
"""Side of the source images for one of the network's grid."""
DEV_RETINAS = 3
"""The last training retinas are kept back."""
VESSEL = 0.2
"""Threshold for vessels after averaging, as in `experiments/retina`."""
DISC = 0.48
"""Radius of a camera's field of view, in widths of the picture."""
MOST_ROOM = 0.7
"""Largest empty space around an image, as a fraction of its side."""
CONTENT = 0.03
"""Least local contrast of voxels to match."""
WEIGHTS = {"entropy": 1.0, "first": 1.0, "slopes": 0.3, "gradicon": 1.5, "labels": 0.5, "map": 1.0}
"""Weights of the losses: the first three are of the first part."""
MATCHING, MATCHING_RATE = 0.15, 1e-3
"""Share of the time for the first part, and its learning rate."""
RATE, FINAL, WARM_UP = 4e-4, 0.02, 100
"""First learning rate of the second part, the fraction of it at the end, and steps over which it rises."""
CLIP = 1.0
"""Largest norm of a gradient."""
WORSE = 0.8
"""Return to the best model if the score on `dev` falls below this fraction of its own."""
LEAST, MOST_FALLS = 0.3, 3
"""Stop if the first part ends with a lower score on `dev`, or if that of the second has fallen so often."""
AHEAD = 4
"""Batches that are drawn in one pass."""
LOG_EVERY = 100
RESERVE = 8.0
"""Seconds at the end of the time limit."""


FACTS = {
    "name": "carl-2d",
    "version": "2",
    "intensities": "0 to 1",
    "training": "experiments/base/two_d.py, in changed contrasts, with labels and true maps in the loss; "
    "see experiments/LEDGER.md",
    "data": "DRIVE vessel segmentations (11 retinas), slices of OASIS brain MRI with Neuromorphometrics labels (12 "
    "subjects), of IBSR brain MRI with its labels (11), of SynthSeg's label maps of heads (17), of BTCV abdominal CT "
    "with its labels (17), of CHAOS abdominal MRI with its labels (8), of ACDC cine MRI of hearts with its labels (27 "
    "patients), of MSD hippocampus MRI with its labels (60) and of lung CT of the plastimatch and elastix projects "
    "(one pair each), and random procedural anatomy",
    "licence": "for research use only; trained on data under CC BY-NC (OASIS with Neuromorphometrics labels), CC "
    "BY-NC-SA 4.0 (CHAOS, ACDC), CC BY-SA 4.0 (MSD), research terms (DRIVE, IBSR, BTCV), Apache-2.0 (SynthSeg, "
    "elastix) and free terms (plastimatch)",
}
"""What the model file states about itself."""


@dataclass(frozen=True)
class Spread:
    """How far apart the two images of a pair may lie."""

    rotation: float
    """Standard deviation in radians; the others are fractions."""
    scale: float
    shear: float
    shift: float
    room: float
    """Share of the pairs whose images are placed at random in larger, empty ones."""
    shifted: float
    """Share of the retinas that are placed as in Shift and Scale Shift."""


STILL = Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
FAR = Spread(0.15, 0.10, 0.05, 0.06, 0.3, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="continue from this model file, with the second part alone")
    parser.add_argument("--seconds", type=float, default=200.0, help="time limit of this call")
    parser.add_argument("--steps", type=int, nargs=2, help="steps of the two parts, instead of shares of --seconds")
    parser.add_argument("--rate", type=float, default=RATE, help="first learning rate of the second part")
    parser.add_argument("--changed", type=float, default=0.35, help="share of input images in a random contrast")
    parser.add_argument("--counts", type=json.loads, default={}, help="numbers that replace those of COUNTS, as JSON")
    parser.add_argument("--weights", type=json.loads, default={}, help="weights that replace those of WEIGHTS, as JSON")
    parser.add_argument("--clip", type=float, default=CLIP, help="largest norm of a gradient")
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--downs", type=int, default=DOWNS)
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the encoder, to try the script")
    parser.add_argument("--validate-every", type=int, default=500)
    parser.add_argument("--score", type=Path, metavar="MODEL", help="score this model; do not train")
    parser.add_argument("--retinas", type=int, help="score only N test retinas, to try the script")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    began = time.monotonic()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Pictures(arguments.pack, arguments.side, device, COUNTS | arguments.counts, arguments.changed)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "seed": arguments.seed,
        "grid": arguments.side,
    }
    if arguments.score is not None:
        model = load(arguments.score, device=device)
        report = about | {"model": arguments.score.name, "dev": data.evaluate(model, optimized=True)}
        report["test"] = data.test(model, arguments.retinas)
        write(report, out / "scores.json")
        return
    torch.manual_seed(arguments.seed)
    if arguments.model is not None:
        model = load(arguments.model, device=device)
    else:
        model = network(arguments.width, arguments.downs).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {data}", flush=True)
    kept = ("seconds", "steps", "rate", "changed", "clip", "side", "downs", "width")
    settings = {name: getattr(arguments, name) for name in kept}
    settings |= {"weights": WEIGHTS | arguments.weights, "far": asdict(FAR), "counts": data.counts}
    Training(model, data, arguments, about | {"settings": settings}, began).run()


def network(width: int, downs: int) -> RegistrationAlgorithm:
    """TwoStep{Down{TwoStep{Down{TwoStep{Down{Ξθ}, Ψ1}}, Ψ2}}, Ψ3} for three `downs`."""
    model: RegistrationAlgorithm = CoordinateAttention(Encoder(2, 1, width))
    for _ in range(downs):
        model = TwoStep(Downsample(model), PredictDisplacement(UNet(2, 1, DOWN, UP)))
    return model


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


# ---- training -------------------------------------------------------------------------------------------------------


class Training:
    """Both parts of the training, with the best model on `dev` in `out` at all times."""

    def __init__(
        self,
        model: RegistrationAlgorithm,
        data: Pictures,
        arguments: argparse.Namespace,
        about: dict[str, Any],
        began: float,
    ) -> None:
        self.model, self.data, self.arguments, self.about, self.began = model, data, arguments, about, began
        self.best, self.weights = 0.0, about["settings"]["weights"]
        self.out: Path = arguments.out
        (self.out / "log.jsonl").unlink(missing_ok=True)

    def run(self) -> None:
        parts = self.arguments.steps or (None, None)
        seconds = self.arguments.seconds - RESERVE
        if self.arguments.model is None:
            step: KnownStep = Matching(first_step(self.model), self.data.device, self.weights, self.arguments.clip)
            self.train(step, 0, MATCHING_RATE, parts[0], MATCHING * seconds)
            if self.validate(0, 0) < LEAST:  # the refinements change nothing yet
                raise SystemExit(f"the first part ended below {LEAST} on dev")
        else:
            self.validate(1, 0)  # what the run has to exceed
        step = Registering(self.model, self.data.device, self.weights, self.arguments.clip)
        self.train(step, 1, self.arguments.rate, parts[1], seconds)
        print(f"best on dev: {self.best:.4f}, {time.monotonic() - self.began:.0f} s", flush=True)

    def train(self, step: KnownStep, part: int, rate: float, steps: int | None, until: float) -> None:
        """Train for so many steps, or until so many seconds after the beginning; the rate falls along a half-cosine."""
        begun, number, done, falls = time.monotonic() - self.began, 0, 0.0, 0
        while done < 1:
            if number % AHEAD == 0:
                generator = torch.Generator().manual_seed((self.arguments.seed * 10 + part) * 10**7 + number)
                drawn = self.data.draw(generator, FAR, AHEAD, same=part == 0).split(AHEAD)
            cosine = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * done))
            loss = step.on(drawn[number % AHEAD], rate * cosine * min(1.0, (number + 1) / WARM_UP), number)
            number += 1
            seconds = time.monotonic() - self.began
            done = number / steps if steps is not None else (seconds - begun) / (until - begun)
            if number % LOG_EVERY == 0 or done >= 1:
                self.log({"part": part, "step": number, "seconds": round(seconds, 1), **step.floats(loss)})
            if part == 1 and (number % self.arguments.validate_every == 0 or done >= 1):
                best = self.best
                if self.validate(part, number) < WORSE * best:
                    print("back to the best model, at half the rate", flush=True)
                    self.model.load_state_dict(load(self.out / "model.safetensors").state_dict())
                    step.forget()
                    rate, falls = rate / 2, falls + 1
                    if falls == MOST_FALLS:
                        return
                self.model.train()

    def validate(self, part: int, number: int) -> float:
        """Mean Dice on `dev`; the model is saved if it is the best so far."""
        scores = self.data.evaluate(self.model.eval())
        mean = float(np.mean([score["dice"] for score in scores.values()]))
        short = {name: round(score["dice"], 4) for name, score in scores.items()}
        self.log({"part": part, "step": number, "dev": mean, **short, "folds": scores["brain"]["folds"]})
        if mean > self.best:
            self.best = mean
            grid = {"grid": f"{self.data.side} {self.data.side}"}
            save(self.model, self.out / "model.safetensors", dtype=torch.float16, metadata=FACTS | grid)
            size = (self.out / "model.safetensors").stat().st_size / 2**20
            report = self.about | {"dev": scores, "dev_mean": mean, "step": number, "model_mib": round(size, 3)}
            (self.out / "trained.json").write_text(json.dumps(report, indent=2) + "\n")
        return mean

    def log(self, entry: dict[str, Any]) -> None:
        print(json.dumps(entry), flush=True)
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class KnownStep(TrainingStep, ABC):
    """A training step, captured as a CUDA graph, that compares maps with true ones and limits the gradient's norm."""

    norm: Tensor
    apart: Tensor  # mean distance from the true map, in voxels of Ξθ's grid

    def __init__(
        self, model: RegistrationAlgorithm, device: torch.device, weights: dict[str, float], clip: float
    ) -> None:
        super().__init__(model.train(), Stage(1), device=device)
        self.weights, self.clip = weights, clip

    def on(self, drawn: Drawn, rate: float, seed: int) -> Loss:
        """Train on a batch."""
        return self.launch(tuple(drawn), rate, seed)

    @abstractmethod
    def loss(self, drawn: Drawn) -> Loss: ...

    def _run(self, inputs: Inputs) -> Loss:
        self.optimizer.zero_grad(set_to_none=True)
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        before = torch._foreach_add(statistics, 0)
        loss = self.loss(Drawn(*inputs))  # type: ignore[arg-type]
        loss.total.backward()
        return self._update(loss, statistics, before)

    def _update(self, loss: Loss, statistics: list[Tensor], before: Sequence[Tensor]) -> Loss:
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip).detach()
        return super()._update(loss, statistics, before)

    def forget(self) -> None:
        """Forget the gradients so far, in place, since a graph may have been captured."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def floats(self, loss: Loss) -> dict[str, float]:
        own = {"apart": float(self.apart), "norm": float(self.norm), "folds": self.folds()}
        return {name: round(value, 5) for name, value in (loss.floats() | own | {"skipped": int(self.skipped)}).items()}

    def compare(self, points: Tensor, truth: Tensor, known: Tensor, unit: float) -> Tensor:
        """Mean distance of the points from the true ones, in multiples of `unit`, where the truth is known."""
        away = F.smooth_l1_loss(points / unit, truth / unit, reduction="none", beta=0.1)
        return (known[..., None] * away).sum() / known.sum().clamp(min=1)


class Matching(KnownStep):
    """Train Ξθ alone to find the true positions of voxels: cross-entropy of its attention, and distance of its map."""

    def loss(self, drawn: Drawn) -> Loss:
        xi = next(part for part in self.model.modules() if isinstance(part, CoordinateAttention))
        downs = sum(isinstance(part, Downsample) for part in self.model.modules())
        side, coarse, content, true = drawn.truth.shape[1], drawn.inputs, drawn.targets, drawn.truth.movedim(-1, 1)
        for _ in range(downs):
            coarse, content, true = pool(coarse), pool(content), pool(true)
        true = 0.5 + (true.movedim(1, -1) - 0.5) / (1 - (2**downs - 1) / (side - 1))  # in units of the coarse image
        grid = coarse.shape[-1]
        with mixed_precision(coarse.device):
            features = xi.features(coarse)
        known = drawn.known[:, None, None] * inside(true)
        keys, queries = (xi.length * F.normalize(features.float(), dim=-1)).chunk(2)
        asked = xi.crop(queries).flatten(1, -2)
        shown = content.chunk(2)[1]
        contrast = F.max_pool2d(shown, 5, 1, 2) + F.max_pool2d(-shown, 5, 1, 2)
        weight = (known * (contrast[:, 0] > CONTENT)).flatten(1)
        at = (true.flatten(1, 2) * (grid - 1) + xi.padding) / (keys.shape[1] - 1)
        with mixed_precision(coarse.device):
            logits = (asked @ keys.flatten(1, -2).mT).float()
        right = (asked * interpolate(keys.movedim(-1, 1), at).mT).sum(dim=-1)
        entropy = (weight * (logits.logsumexp(dim=-1) - right)).sum() / weight.sum().clamp(min=1)
        moving, fixed = coarse.chunk(2)
        with mixed_precision(coarse.device):
            first, second = features.chunk(2)
            phi = xi._attend(first, xi.crop(second), moving, fixed)
        points = phi.on_grid_of(fixed).float()
        self.apart = (weight * (points - true).flatten(1, 2).norm(dim=-1)).sum().detach() / weight.sum() * (grid - 1)
        away = self.compare(points, true, known, 1 / (grid - 1))
        wrong, bend = (points - true) * (grid - 1), points.new_zeros(())
        for axis in (1, 2):
            n = grid - 1
            both = known.narrow(axis, 1, n) * known.narrow(axis, 0, n)
            bend = bend + (both[..., None] * wrong.diff(dim=axis).square()).sum() / both.sum().clamp(min=1)
        total = self.weights["entropy"] * entropy + self.weights["first"] * away + self.weights["slopes"] * bend
        self.phi, self.image = phi[:1].detach(), fixed[:1]
        return Loss(total, entropy, bend)


class Registering(KnownStep):
    """Train the whole network with GradICON, labels and true maps."""

    def loss(self, drawn: Drawn) -> Loss:
        (moving, fixed), truth = drawn.inputs.chunk(2), drawn.truth
        with mixed_precision(moving.device):
            maps = self.model.both(moving, fixed)
        grid = voxel_points(fixed)
        fields = [DisplacementField((phi.on_grid_of(fixed).float() - grid).movedim(-1, 1)) for phi in maps]
        moving_target, fixed_target = drawn.targets.chunk(2)
        moving_labels, fixed_labels = drawn.labels.float().chunk(2)
        loss = registration_loss(
            fields[0],
            fields[1],
            moving_target,
            fixed_target,
            weight=self.weights["gradicon"],
            generator=self.generator,
            labels=(moving_labels, fixed_labels),
            label_weight=self.weights["labels"],
        )
        known = drawn.known[:, None, None] * inside(truth)
        points, unit = fields[0].on_grid_of(fixed), 8 / (truth.shape[1] - 1)
        self.apart = (known * (points - truth).norm(dim=-1)).sum().detach() / known.sum() / unit
        away = self.compare(points, truth, known, unit)
        away = away + self.compare(fields[1](truth), grid.expand_as(truth), known, unit)
        total = loss.total + self.weights["map"] * away
        self.phi, self.image = fields[0][:1].detach(), fixed[:1]
        return Loss(total, loss.similarity, loss.regularity, loss.label_loss)


def inside(points: Tensor) -> Tensor:
    """1 for points (..., 2) within the image, else 0."""
    return ((points > 0) & (points < 1)).all(-1).float()


# ---- pairs ----------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """All moving, then all fixed images of a batch."""

    inputs: Tensor  # (2n, 1, side, side), like `targets`, the images for the loss
    targets: Tensor
    labels: Tensor  # (2n, STRUCTURES, side, side) with 0 and 1
    truth: Tensor  # (n, side, side, 2): where the voxels of the fixed image lie in the moving one
    known: Tensor  # (n,): 1 for pairs of the same source, whose `truth` this is, else 0

    def split(self, batches: int) -> list[Drawn]:
        """The same as so many batches."""
        images = (part.unflatten(0, (2, batches, -1)).unbind(1) for part in self[:3])
        parts = [[batch.flatten(0, 1) for batch in part] for part in images]
        return [Drawn(*part) for part in zip(*parts, *(part.chunk(batches) for part in self[3:]), strict=True)]


class Pictures:
    """Retinas, slices and shapes on the device, drawn as pairs for training and as labelled pairs for scoring."""

    def __init__(self, path: Path, side: int, device: torch.device, counts: dict[str, int], changed: float) -> None:
        self.side, self.device, self.counts, self.changed = side, device, counts, changed
        every, self.test_retinas = load_retinas(path, device)
        retinas, kept_back = every[:-DEV_RETINAS], every[-DEV_RETINAS:]
        self.height = every.shape[2]
        self.sizes = torch.tensor(every.shape[2:], device=device)
        self.splines = [spline_matrix(count, 48).float().to(device) for _, count in ELASTIC]
        self.grid = voxel_points(torch.zeros(1, 1, side, side, device=device))
        sides = (round(FINER * side),) * 2
        images = [resize(retinas, sides).mul(255).round().byte()]
        labels = [torch.zeros_like(images[0])]
        self.groups: dict[tuple[str, bool], list[list[int]]] = {}
        """Numbers of the images of a kind, for training (False) or dev (True), that can be paired."""
        self.groups["retina", False] = [[number] for number in range(len(retinas))]
        with np.load(path) as pack:
            for name in (*SETS, "brain_maps"):
                first = sum(len(part) for part in images)
                slices, maps = (
                    torch.from_numpy(pack[f"{name}/{part}"])[:, None].to(device) for part in ("images", "labels")
                )
                is_map = name == "brain_maps"
                images.append(resize_labels(slices, sides) if is_map else resize(slices.float(), sides).round().byte())
                labels.append(resize_labels(maps, sides))
                places, subjects, dev = (pack[f"{name}/{part}"].tolist() for part in ("place", "subject", "dev"))
                groups: dict[Any, list[int]] = {}
                for number, (place, subject, kept) in enumerate(zip(places, subjects, dev, strict=True)):
                    groups.setdefault((kept, place, subject if name == "lung" else 0), []).append(first + number)
                for (kept, *_), members in groups.items():
                    self.groups.setdefault((name, kept), []).append(members)
        first = sum(len(part) for part in images)
        own = torch.Generator(device).manual_seed(0)
        shapes = [random_anatomy(sides, 16, generator=own).moving_labels.byte() for _ in range(SHAPES // 16)]
        self.groups["shapes", False] = [[first + number] for number in range(SHAPES)]
        self.images, self.labels = (torch.cat([*parts, *shapes]) for parts in (images, labels))
        self.dev = {variant: some(build(kept_back, variant, seed=2)) for variant in VARIANTS[:2]}

    def __repr__(self) -> str:
        return f"{len(self.groups['retina', False])} retinas for training, {len(self.images)} sources in all"

    def draw(self, generator: torch.Generator, spread: Spread, batches: int, *, same: bool) -> Drawn:
        """Batches with `counts` pairs of each kind, in which both images have the `same` source if that is wanted. Only
        the fixed one is then deformed, so that the map between them is known."""
        own = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        kinds = [kind for kind, count in self.counts.items() for _ in range(count)] * batches
        pairs, count = [self._choose(generator, kind) for kind in kinds], len(kinds)
        if same:
            pairs = [(first, first) for first, _ in pairs]
        known = torch.tensor([float(first == second) for first, second in pairs])
        retinas = torch.tensor([number for number, kind in enumerate(kinds) if kind == "retina"], dtype=torch.long)
        strength = 0.3 + 0.7 * torch.rand(2, count, generator=generator)
        strength[0] = 0.0
        strength[1, retinas] = 1.0
        strength *= known  # subjects differ as they are
        matrix = place(count, spread, generator)
        where = torch.cat([retinas, count + retinas])
        matrix[where] = self._retina_places(matrix[where], spread, generator)
        matrix = matrix.to(self.device, non_blocking=True)
        points = self._deformed(Affine(matrix)(self.grid), strength.flatten().to(self.device, non_blocking=True), own)
        index = torch.tensor(pairs).T.flatten().to(self.device, non_blocking=True)
        truth = Affine(matrix[:count]).inverse()(points[count:])
        return Drawn(*self._views(index, points, kinds, own), truth, known.to(self.device, non_blocking=True))

    def _choose(self, generator: torch.Generator, kind: str) -> tuple[int, int]:
        """Numbers of the moving and the fixed source of a pair."""

        def below(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        name = "brain_maps" if kind == "maps" else kind
        if kind in ("subjects", "deformed"):
            weights = torch.tensor(list(SETS.values()))
            name = list(SETS)[int(torch.multinomial(weights, 1, generator=generator))]
        groups = self.groups[name, False]
        members = groups[below(len(groups))]
        if kind in ("subjects", "maps"):
            first, second = torch.randperm(len(members), generator=generator)[:2].tolist()
            return members[first], members[second]
        one = members[below(len(members))]
        return one, one

    def _retina_places(self, matrix: Tensor, spread: Spread, generator: torch.Generator) -> Tensor:
        """Pad as in `experiments/retina`: both images below, or one of them above, and of those some shrunk."""
        count, padding = len(matrix) // 2, PADDING / self.height
        exact = flip(count, 0.5, generator).bool().repeat(2)[:, None, None]  # as they are tested
        matrix = torch.where(exact, place(count, STILL, generator), matrix)
        matrix = torch.tensor([1 + padding, 1.0])[:, None] * matrix
        shifted, swapped, small = (flip(count, share, generator) for share in (spread.shifted, 0.5, 0.3))
        matrix[:, 0, 2] -= padding * torch.cat([shifted * swapped, shifted * (1 - swapped)])
        zoom = 1 + 0.25 * torch.cat([torch.zeros(count), shifted * small])
        matrix = zoom[:, None, None] * matrix
        matrix[..., 2] += 0.5 * (1 - zoom[:, None])
        return matrix

    def _deformed(self, points: Tensor, strength: Tensor, own: torch.Generator) -> Tensor:
        """Points (m, side, side, 2), moved by elastic grids as in `experiments/retina`, of this strength each."""
        scale = strength[:, None, None, None] / self.sizes[:, None, None]
        for (sigma, count), spline in reversed(list(zip(ELASTIC, self.splines, strict=True))):
            shifts = torch.randn(len(strength), 2, count, count, generator=own, device=self.device)
            points = points + interpolate(spline @ (sigma * scale * shifts) @ spline.mT, points).movedim(1, -1)
        return points

    def _views(
        self, index: Tensor, points: Tensor, kinds: list[str], own: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Input images, images for the loss and labels."""
        count, both = len(kinds), 2 * kinds

        def numbers(*wanted: str) -> Tensor:
            return torch.tensor([n for n, kind in enumerate(both) if kind in wanted]).to(self.device, non_blocking=True)

        def chance(count: int, share: float) -> Tensor:
            return torch.rand(count, 1, 1, 1, generator=own, device=self.device) < share

        labels = interpolate(self.labels[index].float(), points, mode="nearest", outside="zeros")
        inputs, targets = torch.empty_like(labels), torch.empty_like(labels)
        maps, pictures = numbers("maps", "shapes"), numbers("retina", "subjects", "deformed")
        images = interpolate(self.images[index[pictures]].float() / 255, points[pictures], outside="zeros")
        targets[pictures] = images
        inputs[pictures] = torch.where(chance(len(images), self.changed), random_contrast(images, own), images)
        if "retina" in kinds:
            retinas = numbers("retina")
            vessels, away = targets[retinas], ((points[retinas] - 0.5) * self.sizes).norm(dim=-1)
            photo = photograph(vessels, (away < DISC * self.sizes[1]).float()[:, None], own)
            inputs[retinas] = torch.where(chance(len(photo), 0.25), photo, inputs[retinas])
            labels[retinas] = (vessels > VESSEL).float()
        if len(maps):
            shown = interpolate(self.images[index[maps]].float(), points[maps], mode="nearest", outside="zeros")
            inputs[maps] = render(shown, own, colours=random_colours(len(maps), MAP_LABELS, own))
            common = random_colours(count, MAP_LABELS, own)[maps % count]
            targets[maps] = render(shown, own, colours=common, plain=True)
        return inputs, targets, one_hot(labels)

    # ---- scores ----

    def evaluate(self, model: RegistrationAlgorithm, *, optimized: bool = False) -> dict[str, dict[str, float]]:
        """Mean Dice of each kind of pair of `dev`; if `optimized`, also after optimisation."""
        scores = {}
        for variant, pairs in self.dev.items():
            moving, fixed = pairs.at(torch.arange(len(pairs), device=self.device))
            scores[f"retina {variant}"] = self._score(model, moving, fixed, vessels(moving, fixed), optimized)
        for name in ("brain", "abdomen", "abdomen_mr", "cardiac"):
            pairs = [pair for group in self.groups[name, True] for pair in itertools.permutations(group, 2)]
            chosen = random.Random(0).sample(pairs, min(len(pairs), 40))
            first, second = (torch.tensor(numbers).to(self.device) for numbers in zip(*chosen, strict=True))
            moving, fixed = (self.images[index].float() / 255 for index in (first, second))
            measure = structures(self.labels[first].float(), self.labels[second].float())
            scores[name] = self._score(model, moving, fixed, measure, optimized)
            changed = self._score(model, other_contrast(moving), fixed, measure, optimized, "lncc2")
            scores[f"{name}, other contrast"] = changed
        return scores

    def test(self, model: RegistrationAlgorithm, retinas: int | None) -> dict[str, dict[str, float]]:
        """Mean Dice of the vessels on the test pairs of each variant, of the network alone and optimised."""
        scores = {}
        for variant in VARIANTS:
            pairs, rows = build(self.test_retinas[:retinas], variant, seed=1), []
            for index in torch.arange(len(pairs), device=self.device).split(40):
                moving, fixed = pairs.at(index)
                rows.append(self._score(model, moving, fixed, vessels(moving, fixed), True))
            total = sum(row["pairs"] for row in rows)
            scores[variant] = {key: sum(row[key] * row["pairs"] for row in rows) / total for key in rows[0]}
            scores[variant]["pairs"] = total
            print(variant, scores[variant], flush=True)
        return scores

    def _score(
        self,
        model: RegistrationAlgorithm,
        moving: Tensor,
        fixed: Tensor,
        measure: Measure,
        optimized: bool,
        similarity: str = "lncc",
    ) -> dict[str, float]:
        """Mean Dice and folds, for images stretched to the network's grid, of the network alone and, if `optimized`,
        with the default optimisation of the fields."""
        small = [resize(image, (self.side, self.side)) for image in (moving, fixed)]
        with torch.no_grad(), mixed_precision(self.device):
            both = model.both(*small)
        row: dict[str, float] = {"pairs": len(fixed), **measure(both[0]), "folds": folding(both[0], fixed)}
        if optimized:
            phi = optimize_fields(*both, *small, steps=FIELD_STEPS, similarity=similarity).transform
            row |= {"dice_optimized": measure(phi)["dice"], "folds_optimized": folding(phi, fixed)}
        return row


Measure = Callable[[Transform], dict[str, float]]
"""Mean Dice of a batch, before and after."""


def vessels(moving: Tensor, fixed: Tensor) -> Measure:
    return lambda phi: mean_dice(moving > VESSEL, fixed > VESSEL, warp(moving, phi, like=fixed) > VESSEL)


def structures(moving: Tensor, fixed: Tensor) -> Measure:
    def measure(phi: Transform) -> dict[str, float]:
        maps = (moving, fixed, warp(moving, phi, like=fixed, mode="nearest"))
        return mean_dice(*(one_hot(part) > 0 for part in maps))

    return measure


def other_contrast(image: Tensor) -> Tensor:
    """Bright intensities become darker than those of the middle, by a smooth curve; training has others, of lines."""
    return torch.sin(3 * image)


def place(count: int, spread: Spread, generator: torch.Generator) -> Tensor:
    """Affine maps (2 × count, 2, 3) from the grid to the unit coordinates of images, those of all moving images first.

    Both images of a pair are mirrored and transposed alike.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(2 * count, *shape, generator=generator)

    angle = spread.rotation * normal()
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(-1, 2, 2)
    scales = torch.exp(spread.scale * normal(1) + spread.shear * normal(2))
    linear = rotation * scales[:, None] + spread.shear * normal(2, 2) / 2
    offset = spread.shift * normal(2)
    roomy = flip(count, spread.room, generator).repeat(2)[:, None]
    room = 1 + MOST_ROOM * roomy * torch.rand(2 * count, 1, generator=generator)
    offset += (room - 1) * (torch.rand(2 * count, 2, generator=generator) - 0.5)
    signs = 1 - 2 * torch.stack([flip(count, 0.5, generator) for _ in range(2)], dim=1)
    swap = flip(count, 0.5, generator)[:, None, None]
    axes = torch.diag_embed(signs) @ (swap * torch.eye(2).flip(0) + (1 - swap) * torch.eye(2))
    linear = room[..., None] * linear @ axes.repeat(2, 1, 1)
    return torch.cat([linear, (0.5 - linear.sum(-1) / 2 + offset)[..., None]], dim=-1)


def flip(count: int, share: float, generator: torch.Generator) -> Tensor:
    """1 with this probability, else 0."""
    return (torch.rand(count, generator=generator) < share).float()


def photograph(vessels: Tensor, disc: Tensor, own: torch.Generator) -> Tensor:
    """Vessels as they look in a photograph: darker than the unevenly bright disc, on black."""
    bright, depth, noise = torch.rand(3, len(vessels), 1, 1, 1, generator=own, device=vessels.device)
    smooth = torch.randn(len(vessels), 1, 6, 6, generator=own, device=vessels.device)
    smooth = F.interpolate(smooth, vessels.shape[2:], mode="bicubic", align_corners=True)
    grain = torch.randn(vessels.shape, generator=own, device=vessels.device)
    image = 0.4 + 0.4 * bright + 0.06 * smooth - (0.1 + 0.3 * depth) * vessels + 0.04 * noise * grain
    return (disc * image).clamp(0, 1)


def one_hot(labels: Tensor) -> Tensor:
    """(n, 1, side, side) → (n, STRUCTURES, side, side)."""
    return (labels == torch.arange(1, STRUCTURES + 1, device=labels.device).reshape(-1, 1, 1)).byte()


def mean_dice(moving: Tensor, fixed: Tensor, warped: Tensor) -> dict[str, float]:
    """Mean over pairs of the mean Dice, before and after, of the structures that both images show, (n, K, ...)."""

    def dice(first: Tensor) -> Tensor:
        common, sizes = (first & fixed).flatten(2).sum(2), first.flatten(2).sum(2) + fixed.flatten(2).sum(2)
        return 2 * common / sizes.clamp(min=1)

    shown = moving.flatten(2).any(2) & fixed.flatten(2).any(2)
    counted = shown.any(1)
    means = [((dice(part) * shown).sum(1) / shown.sum(1).clamp(min=1))[counted].mean() for part in (warped, moving)]
    return {"dice": float(means[0]), "before": float(means[1])}


def some(pairs: Pairs) -> Pairs:
    """Every fourth pair."""
    return Pairs(pairs.moving, pairs.fixed[::4], pairs.retina[::4])


if __name__ == "__main__":
    main()
