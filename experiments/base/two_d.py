"""Train carl-2d on retinas, slices of all datasets and random shapes, and score it.

    python experiments/base/two_d.py carry/p2d/two_d.npz --out OUT --seconds 240
    python experiments/base/two_d.py carry/p2d/two_d.npz --out OUT --score OUT/model.safetensors

The pack is made by `prepare_2d.py`. A batch holds pairs of five kinds: a retina's vessels warped as in
`experiments/retina`; the same place in two subjects; a slice and the same slice deformed; label maps of two heads, each
rendered in its own contrast; and two views of random shapes. Pairs are mirrored, transposed and placed at random, many
in a larger, empty image. The network sees some images in a random contrast; the loss is computed on the original ones
and on their labels.

Training has two parts: first pairs in nearly the same place, with diffusion and then with GradICON; then pairs with
large shifts, rotations and scales. By default, the second part has as many steps as fit into `--seconds`, measured on
the first part. A run that was cut off resumes with the same command. Writes the best model on `dev` (training subjects
kept back), in half precision. `--score` writes scores.json: Dice on `dev`, and of the vessels on all test pairs of
`experiments/retina`, of the network alone and with the default optimisation of the fields.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import Affine, RegistrationAlgorithm, carl, load, save, warp
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Transform
from carlreg.objective.instance import FIELD_STEPS, optimize_fields
from carlreg.synthesis import random_anatomy
from carlreg.synthesis.contrast import random_colours, random_contrast, render
from carlreg.synthesis.waves import Waves
from carlreg.training.batches import Batch
from carlreg.training.loop import Progress, train
from carlreg.training.stages import Stage

sys.path.insert(0, str(Path(__file__).parent.parent / "retina"))
from data import (  # type: ignore[import-not-found]
    ELASTIC,
    PADDING,
    POOLING,
    VARIANTS,
    Pairs,
    build,
    spline_matrix,
)
from data import load as load_retinas

SIDE = 256
WIDTH, DOWN, UP = 64, (16, 32, 64, 128), (64, 48, 32, 16)
"""Widths of the encoder and of the U-Nets: 1.47 M parameters, 2.8 MiB in half precision."""
COUNTS = {"retina": 4, "subjects": 3, "deformed": 2, "maps": 1, "shapes": 2}
"""Pairs of each kind in a batch."""
SETS = {"brain": 0.3, "brain_ibsr": 0.08, "abdomen": 0.25, "abdomen_mr": 0.08, "cardiac": 0.2, "hippocampus": 0.07}
SETS |= {"lung": 0.02}
"""Relative frequency of each set among the pairs of slices."""
STRUCTURES, HEAD_LABELS = 14, 64
"""Numbers of labels in the loss and, at most, in a map of `brain_maps`."""
DEV_RETINAS = 3
"""The last training retinas are kept back."""
VESSEL = 0.2
"""Threshold for vessels after averaging, as in `experiments/retina`."""
NEAR = (150, 1350)
"""Steps of the first part: with diffusion, then with GradICON."""
MOST_ROOM = 0.7
"""Largest empty space around an image, as a fraction of its side."""


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


CLOSE = Spread(0.03, 0.03, 0.02, 0.02, 0.0, 0.0)
FAR = Spread(0.15, 0.10, 0.05, 0.06, 0.3, 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="continue from this model file, with the second part only")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of this call")
    parser.add_argument("--steps", type=int, help="steps of the second part; by default as many as fit into --seconds")
    parser.add_argument("--near", type=int, nargs=2, default=NEAR, help="steps of the first part")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate")
    parser.add_argument("--final-rate", type=float, default=5e-6, help="final learning rate of the cosine schedule")
    parser.add_argument("--changed", type=float, default=0.35, help="share of input images in a random contrast")
    parser.add_argument("--counts", type=json.loads, default={}, help="numbers that replace those of COUNTS, as JSON")
    parser.add_argument("--label-weight", type=float, default=1.0, help="weight of the overlap of the training labels")
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--validate-every", type=int, default=1000)
    parser.add_argument("--no-graphs", action="store_true", help="do not replay steps as CUDA graphs")
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
        report = about | {"model": arguments.score.name, "dev": data.evaluate(model)}
        report["test"] = data.test(model, arguments.retinas)
        write(report, out / "scores.json")
        return

    torch.manual_seed(arguments.seed)
    if arguments.model is not None:
        model = load(arguments.model, device=device)
    else:
        model = carl(2, 3, width=WIDTH, unet_down=DOWN, unet_up=UP).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {data}", flush=True)

    def on_dev(model: RegistrationAlgorithm) -> float:
        start, scores = time.monotonic(), data.evaluate(model)
        mean = float(np.mean([score["dice"] for score in scores.values()]))
        short = {name: round(score["dice"], 4) for name, score in scores.items()}
        print(f"dev {mean:.4f} ({time.monotonic() - start:.1f} s)", short, flush=True)
        return mean

    def run(
        model: RegistrationAlgorithm, spread: Spread, stages: Sequence[Stage], folder: Path
    ) -> RegistrationAlgorithm:
        return train(
            model,
            lambda generator: data.draw(generator, spread),
            stages,
            out=folder,
            seed=arguments.seed,
            validate=on_dev,
            validate_every=arguments.validate_every,
            save_every=arguments.validate_every,
            log_every=100,
            seconds=max(arguments.seconds - (time.monotonic() - began), 0),
            graphs=False if arguments.no_graphs else None,
            callback=show,
        )

    plan = out / "plan.json"
    if arguments.steps is None and not plan.exists() and (arguments.model or (out / "near").exists()):
        parser.error("expected --steps: the speed is measured only if the first part runs in this call")
    if arguments.model is None:
        first, second = arguments.near
        labels = arguments.label_weight
        near = [
            Stage(first, "diffusion", learning_rate=arguments.rate, label_weight=labels),
            Stage(second, learning_rate=arguments.rate, label_weight=labels),
        ]
        start = time.monotonic()
        model = run(model, CLOSE, near, out / "near")
        pace = (time.monotonic() - start) / (first + second)
        if time.monotonic() - began > arguments.seconds:
            print("time limit reached in the first part", flush=True)
            return
    if not plan.exists():
        left = arguments.seconds - (time.monotonic() - began) - 10  # for the last validations
        plan.write_text(json.dumps({"steps": arguments.steps or max(int(0.97 * left / pace), 1)}) + "\n")
    steps = json.loads(plan.read_text())["steps"]
    print(f"{steps} steps in the second part", flush=True)
    far = Stage(
        steps,
        warm_up=50,
        learning_rate=arguments.rate,
        final_learning_rate=arguments.final_rate,
        label_weight=arguments.label_weight,
    )
    model = run(model, FAR, [far], out / "run")
    final = on_dev(model)
    best = out / "run" / "best.safetensors"
    if best.exists():
        candidate = load(best, device=device)
        if (score := on_dev(candidate)) > final:
            model, final = candidate, score
    facts = {"name": "carl-2d", "grid": f"{arguments.side} {arguments.side}"}
    save(model, out / "model.safetensors", dtype=torch.float16, metadata=facts)
    log = [line for part in ("near", "run") for line in lines(out / part / "log.jsonl")]
    (out / "log.jsonl").write_text("".join(log))
    size = (out / "model.safetensors").stat().st_size / 2**20
    settings = {
        "near": arguments.near,
        "steps": steps,
        "rate": arguments.rate,
        "far": asdict(FAR),
        "counts": data.counts,
    }
    write(about | {"dev_mean": final, "model_mib": round(size, 3), "settings": settings}, out / "trained.json")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def show(progress: Progress) -> None:
    if progress.step % 500 == 0:
        parts = ", ".join(f"{k} {v:.4f}" for k, v in progress.losses.items())
        print(f"step {progress.step} ({progress.seconds:.0f} s): {parts}, skipped {progress.skipped}", flush=True)


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


Views = tuple[Tensor, Tensor, Tensor]
"""Input images, images for the loss, (2n, 1, side, side), and labels, (2n, STRUCTURES, side, side) with 0 and 1: those
of all moving images, then those of all fixed ones."""


class Pictures:
    """Retinas and slices on the device, drawn as pairs for training and as labelled pairs for scoring."""

    def __init__(self, path: Path, side: int, device: torch.device, counts: dict[str, int], changed: float) -> None:
        self.side, self.device, self.counts, self.changed = side, device, counts, changed
        every, self.test_retinas = load_retinas(path, device)
        self.retinas, self.dev_retinas = every[:-DEV_RETINAS], every[-DEV_RETINAS:]
        height, width = every.shape[2:]
        self.splines = [[spline_matrix(count, n).float().to(device) for n in (height, width)] for _, count in ELASTIC]
        centred = voxel_points(every[:1]) - 0.5
        away = (centred * torch.tensor([height, width], device=device)).square().sum(-1)
        self.disc = (away < (0.48 * width) ** 2).float()[None]  # what a camera sees
        self.grid = voxel_points(torch.zeros(1, 1, side, side, device=device))
        images: list[Tensor] = []
        labels: list[Tensor] = []
        self.groups: dict[tuple[str, bool], list[list[int]]] = {}
        """Numbers of the slices of a set, for training (False) or dev (True), that can be paired."""
        with np.load(path) as pack:
            for name in (*SETS, "brain_maps"):
                first = sum(len(part) for part in images)
                images.append(torch.from_numpy(pack[f"{name}/images"]))
                labels.append(torch.from_numpy(pack[f"{name}/labels"]))
                places, subjects, dev = (pack[f"{name}/{part}"].tolist() for part in ("place", "subject", "dev"))
                groups: dict[Any, list[int]] = {}
                for number, (place, subject, kept) in enumerate(zip(places, subjects, dev, strict=True)):
                    groups.setdefault((kept, place, subject if name == "lung" else 0), []).append(first + number)
                for (kept, *_), members in groups.items():
                    self.groups.setdefault((name, kept), []).append(members)
        self.images, self.labels = (torch.cat(parts)[:, None].to(device) for parts in (images, labels))
        self.dev = {variant: some(build(self.dev_retinas, variant, seed=2)) for variant in VARIANTS[:2]}

    def __repr__(self) -> str:
        return f"{len(self.retinas)} retinas for training, {len(self.images)} slices for training and dev"

    # ---- training ----

    def draw(self, generator: torch.Generator, spread: Spread) -> Batch:
        """A batch with `counts` pairs of each kind."""
        own = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        kinds = {
            "retina": self._retinas,
            "subjects": self._subjects,
            "deformed": self._deformed,
            "maps": self._maps,
            "shapes": self._shapes,
        }
        parts = [kinds[kind](count, spread, generator, own) for kind, count in self.counts.items() if count]
        halves = [list(zip(*(part.chunk(2) for part in same), strict=True)) for same in zip(*parts, strict=True)]
        (moving, fixed), (moving_target, fixed_target), (moving_labels, fixed_labels) = (
            (torch.cat(first), torch.cat(second)) for first, second in halves
        )
        return Batch(moving, fixed, moving_labels, fixed_labels, moving_target, fixed_target)

    def _retinas(self, count: int, spread: Spread, generator: torch.Generator, own: torch.Generator) -> Views:
        """Vessels, the fixed ones warped, and half of the moving ones a little; some as they look in a photograph."""
        chosen = torch.randint(len(self.retinas), (count,), generator=generator).to(self.device)
        source = torch.cat([self.retinas[chosen], self.disc.expand(count, -1, -1, -1)], dim=1)
        strength = torch.cat([0.6 * flip(count, 0.5, generator), torch.ones(count)]).to(self.device)
        warped = interpolate(torch.cat([source, source]), self._elastic(strength, own), outside="zeros")
        matrix = place(count, spread, generator)
        exact = flip(count, 0.5, generator).bool().repeat(2)  # as they are tested
        matrix = torch.where(exact[:, None, None], place(count, STILL, generator), matrix)
        height = source.shape[2]
        tall = torch.tensor([1 + PADDING / height, 1.0])
        matrix = tall[:, None] * matrix  # padded below
        shifted, swapped, small = (flip(count, share, generator) for share in (spread.shifted, 0.5, 0.3))
        above = torch.cat([shifted * swapped, shifted * (1 - swapped)])
        matrix[:, 0, 2] -= above * PADDING / height
        zoom = 1 + 0.25 * torch.cat([torch.zeros(count), shifted * small])
        matrix = zoom[:, None, None] * matrix
        matrix[..., 2] += 0.5 * (1 - zoom[:, None])
        placed = interpolate(F.avg_pool2d(warped, POOLING), self._points(matrix), outside="zeros")
        vessels, disc = placed.split(1, dim=1)
        photographed = self._some(2 * count, 0.25, own)
        inputs = torch.where(photographed, photograph(vessels, disc, own), self._recoloured(vessels, own))
        labels = torch.zeros(2 * count, STRUCTURES, self.side, self.side, dtype=torch.uint8, device=self.device)
        labels[:, :1] = vessels > VESSEL
        return inputs, vessels, labels

    def _elastic(self, strength: Tensor, own: torch.Generator) -> Tensor:
        """Source points of warps as in `experiments/retina`, of this strength each: (n, height, width, 2)."""
        points, fields = voxel_points(self.retinas[:1]), []
        size = torch.tensor(self.retinas.shape[2:], device=self.device) - 1
        for (sigma, count), (rows, columns) in zip(ELASTIC, self.splines, strict=True):
            shifts = torch.randn(len(strength), 2, count, count, generator=own, device=self.device)
            fields.append(sigma * strength[:, None, None, None] * (rows @ shifts @ columns.mT) / size[:, None, None])
        second = points + fields[1].movedim(1, -1)
        return second + interpolate(fields[0], second).movedim(1, -1)

    def _subjects(self, count: int, spread: Spread, generator: torch.Generator, own: torch.Generator) -> Views:
        """The same place in two subjects, or in two scans of one."""
        pairs = [self._choose(generator) for _ in range(count)]
        return self._slices([*zip(*pairs, strict=True)], self._points(place(count, spread, generator)), own)

    def _deformed(self, count: int, spread: Spread, generator: torch.Generator, own: torch.Generator) -> Views:
        """A slice twice, each time deformed in another way."""
        same = [self._choose(generator)[0] for _ in range(count)]
        slope = 0.2 + 0.5 * torch.rand(2 * count, generator=own, device=self.device)
        waves = Waves.random(2 * count, 2, wavelength=(0.25, 1.2), slope=slope, generator=own)
        return self._slices([same, same], waves(self._points(place(count, spread, generator))), own)

    def _slices(self, numbers: Sequence[Sequence[int]], points: Tensor, own: torch.Generator) -> Views:
        index = torch.tensor([*itertools.chain(*numbers)]).to(self.device)
        images = interpolate(self.images[index].float() / 255, points, outside="zeros")
        labels = interpolate(self.labels[index].float(), points, mode="nearest", outside="zeros")
        return self._recoloured(images, own), images, one_hot(labels)

    def _maps(self, count: int, spread: Spread, generator: torch.Generator, own: torch.Generator) -> Views:
        """Label maps of two heads, each in its own contrast, and in a common one for the loss."""
        pairs = [self._choose(generator, "brain_maps") for _ in range(count)]
        index = torch.tensor([*itertools.chain(*zip(*pairs, strict=True))]).to(self.device)
        points = self._points(place(count, spread, generator))
        heads, labels = (
            interpolate(maps[index].float(), points, mode="nearest", outside="zeros")
            for maps in (self.images, self.labels)
        )
        inputs = render(heads, own, colours=random_colours(2 * count, HEAD_LABELS, own))
        common = random_colours(count, HEAD_LABELS, own).repeat(2, 1)
        return inputs, render(heads, own, colours=common, plain=True), one_hot(labels)

    def _shapes(self, count: int, spread: Spread, generator: torch.Generator, own: torch.Generator) -> Views:
        """Two views of random shapes, and the same in a common contrast for the loss."""
        shift = 0.15 if spread.room else 0.02
        made = random_anatomy((self.side, self.side), count, generator=own, affine=spread.scale, shift=shift)
        maps = torch.cat([made.moving_labels, made.fixed_labels])
        common = random_colours(count, HEAD_LABELS, own).repeat(2, 1)
        return torch.cat([made.moving, made.fixed]), render(maps, own, colours=common, plain=True), one_hot(maps)

    def _choose(self, generator: torch.Generator, name: str | None = None) -> tuple[int, int]:
        """Numbers of two training slices at the same place of a random set."""

        def below(count: int) -> int:
            return int(torch.randint(count, (), generator=generator))

        if name is None:
            weights = torch.tensor(list(SETS.values()))
            name = list(SETS)[int(torch.multinomial(weights, 1, generator=generator))]
        groups = self.groups[name, False]
        first, second = torch.randperm(len(members := groups[below(len(groups))]), generator=generator)[:2].tolist()
        return members[first], members[second]

    def _points(self, matrix: Tensor) -> Tensor:
        """The points (n, side, side, 2) to which matrices (n, 2, 3) take the voxels of the network's grid."""
        return Affine(matrix.to(self.device, non_blocking=True))(self.grid)

    def _recoloured(self, images: Tensor, own: torch.Generator) -> Tensor:
        return torch.where(self._some(len(images), self.changed, own), random_contrast(images, own), images)

    def _some(self, count: int, share: float, own: torch.Generator) -> Tensor:
        return torch.rand(count, 1, 1, 1, generator=own, device=self.device) < share

    # ---- scores ----

    def evaluate(self, model: RegistrationAlgorithm) -> dict[str, dict[str, float]]:
        """Mean Dice of every kind of pair of `dev`."""
        scores = {}
        for name, pairs in self.dev.items():
            index = torch.arange(len(pairs), device=self.device)
            moving, fixed = pairs.at(index)
            phi = self.register(model, moving, fixed)
            scores[f"retina {name}"] = mean_dice(
                moving > VESSEL, fixed > VESSEL, warp(moving, phi, like=fixed) > VESSEL
            )
        for name in ("brain", "abdomen", "abdomen_mr", "cardiac"):
            pairs = [pair for group in self.groups[name, True] for pair in itertools.permutations(group, 2)]
            chosen = random.Random(0).sample(pairs, min(len(pairs), 40))
            first, second = (torch.tensor(numbers).to(self.device) for numbers in zip(*chosen, strict=True))
            moving, fixed = (self.images[index].float() / 255 for index in (first, second))
            labels = self.labels[first].float()
            phi = self.register(model, moving, fixed)
            warped = warp(labels, phi, like=fixed, mode="nearest")
            scores[name] = mean_dice(*(one_hot(part) > 0 for part in (labels, self.labels[second].float(), warped)))
        return scores

    def test(self, model: RegistrationAlgorithm, retinas: int | None) -> dict[str, dict[str, float]]:
        """Mean Dice of the vessels on the test pairs of each variant, of the network alone and optimised."""
        scores = {}
        for variant in VARIANTS:
            pairs = build(self.test_retinas[:retinas], variant, seed=1)
            rows = []
            for index in torch.arange(len(pairs), device=self.device).split(40):
                moving, fixed = pairs.at(index)
                row: dict[str, float] = {"pairs": len(index)}
                for name, steps in (("dice", 0), ("dice_optimized", None)):
                    phi = self.register(model, moving, fixed, steps)
                    score = mean_dice(moving > VESSEL, fixed > VESSEL, warp(moving, phi, like=fixed) > VESSEL)
                    row |= {name: score["dice"], "before": score["before"]}
                    row[name.replace("dice", "folds")] = folding(phi, fixed)
                rows.append(row)
            total = sum(row["pairs"] for row in rows)
            scores[variant] = {key: sum(row[key] * row["pairs"] for row in rows) / total for key in rows[0]}
            scores[variant]["pairs"] = total
            print(variant, scores[variant], flush=True)
        return scores

    def register(self, model: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, steps: int | None = 0) -> Transform:
        """The network's result for images stretched to its grid, optimised if `steps` is not 0; None is the default."""
        moving, fixed = (resize(image, (self.side, self.side)) for image in (moving, fixed))
        with torch.no_grad(), mixed_precision(self.device):
            both = model.both(moving, fixed)
        if steps == 0:
            return both[0]
        return optimize_fields(*both, moving, fixed, steps=FIELD_STEPS if steps is None else steps).transform


STILL = Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


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
