"""Train carl-base on all datasets together, in any contrast, and score it on labelled pairs at the network's grid.

    python experiments/base/universal.py carry/all-1.npz carry/all-2.npz carry/all-3.npz --out OUT --model carl-base
    python experiments/base/universal.py carry/all-*.npz --out OUT --model carl-base --score OUT/model.safetensors
    python experiments/base/universal.py carry/all-*.npz --out OUT --model carl-base --measure

The packs are made by `prepare.py --sets all`. The network gets half of the images in a random contrast; the loss is
computed on the original ones. Images of `brain_maps` are rendered from label maps, each in its own contrast, and the
loss is computed on renderings in a shared contrast. CT and MR of the abdomen are compared by the organs labelled in
both. With `--passes 2` the network is applied twice on all but the finer grid, in training and in scores, as `register`
does if the model's file has `passes`. A run cut off by `--seconds` resumes with the same command.

Writes the best model by the mean of `CHOSEN_BY` on `dev` (training subjects kept back), in half precision. `--score`
writes the Dice on `dev` and `val` of the initial and of the given model to scores.json; `--measure` writes the time of
a training step with and without drawing batches to speed.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import Affine, RegistrationAlgorithm, load, pretrained, save, warp
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.model.algorithms import TwoStep
from carlreg.objective.metrics import dice, mean_score
from carlreg.synthesis import random_anatomy
from carlreg.synthesis.contrast import random_colours, random_contrast, render
from carlreg.training.batches import Batch
from carlreg.training.loop import Progress, train
from carlreg.training.pairs import LEAST_KEPT, ROOM, about_centre, deformations, framed
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

GRIDS = {"cube": (96, 96, 96), "thin": (160, 160, 32), "fine": (128, 128, 128)}
"""The grids on which the network is trained: the usual one, one for stacks of few slices, and a finer one."""
MIX = {
    "brain": 0.18,
    "brain_ibsr": 0.05,
    "brain_maps": 0.11,
    "map_with_brain": 0.07,
    "abdomen": 0.2,
    "abdomen_mr": 0.1,
    "ct_mr": 0.11,
    "cardiac": 0.02,
    "hippocampus": 0.08,
    "lung": 0.04,
}
"""Relative frequency of each kind of pair in the usual grid, apart from random anatomy."""
OTHER_MIXES = {
    "thin": {"cardiac": 0.8, "abdomen_mr": 0.1, "brain": 0.1},
    "fine": {"brain": 0.5, "brain_ibsr": 0.1, "brain_maps": 0.15, "map_with_brain": 0.25},
}
"""The same for the other grids."""
CROPPED = ("abdomen", "abdomen_mr")
"""The sets whose field of view varies: some scans show the chest, some the pelvis."""
WITHIN = ("cardiac", "lung")
"""The sets whose pairs show the same patient twice, in the same position."""
BENT, BENT_WITHIN, BENT_TOGETHER = 0.6, 0.3, 0.8
"""Largest slopes of the random deformations: of each image, of each image of the same patient, and of both alike."""
STRUCTURES = 14
"""Number of labels in the loss."""
SHARED = (1, 2, 3, 6)
"""Spleen, kidneys and liver: labelled in both CT and MR."""
ABDOMEN_FIVE = (1, 2, 3, 6, 11)
"""Spleen, kidneys, liver, pancreas."""
VALUES = (
    *(
        0,
        *range(2, 6),
        7,
        8,
        *range(10, 19),
        *range(24, 27),
        28,
        30,
        *range(41, 45),
        46,
        47,
        *range(49, 55),
        57,
        58,
        60,
        62,
    ),
    *(72, 85, 136, 137, 163, 164, 502, *range(506, 510), 511, 512, *range(514, 517), 530),
)
"""FreeSurfer's numbers of the structures in `brain_maps`, in the order of their labels."""
HEAD = 500
"""Structures from this number on are not part of the brain."""
FLUID = (4, 5, 14, 15, 24, 43, 44, 72)
WHITE = (2, 7, 16, 28, 41, 46, 60, 85)
OUTSIDE_FLUID = 24
T1 = dict.fromkeys(FLUID, 0.15) | {2: 0.8, 41: 0.8, 7: 0.78, 46: 0.78, 16: 0.75, 28: 0.7, 60: 0.7, 85: 0.6}
T1 |= {3: 0.52, 42: 0.52, 8: 0.5, 47: 0.5, 10: 0.66, 49: 0.66, 11: 0.55, 50: 0.55, 12: 0.6, 51: 0.6, 13: 0.72, 52: 0.72}
T1 |= {17: 0.52, 53: 0.52, 18: 0.5, 54: 0.5, 26: 0.55, 58: 0.55, 30: 0.3, 62: 0.3}
"""Approximate intensity of each structure in T1 MRI."""
LUNG_WINDOW = (-1000.0, 275.0)
"""CT window in which lungs are scored, in HU."""
CHOSEN_BY = (
    "brain",
    "brain_other_contrast",
    "brain_ibsr",
    "brain_maps",
    "head_to_brain",
    "abdomen",
    "abdomen_mr",
    "ct_mr",
    "cardiac_diastole_fixed",
    "cardiac_systole_fixed",
    "hippocampus",
)
"""Kinds of pairs whose mean Dice chooses the model. Not lungs: both of their pairs are for training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--model", type=Path, required=True, help="model to continue from: a file or the name of a shipped model"
    )
    parser.add_argument("--seconds", type=float, help="time limit of this call")
    parser.add_argument("--steps", type=int, default=18_000)
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--final-rate", type=float, default=5e-6, help="final learning rate of the cosine schedule")
    parser.add_argument("--pairs", type=int, default=4, help="pairs in a batch")
    parser.add_argument("--synthetic", type=float, default=0.1, help="share of pairs of random anatomy")
    parser.add_argument("--mix", type=json.loads, default={}, help="frequencies that replace those of MIX, as JSON")
    parser.add_argument("--changed", type=float, default=0.5, help="share of input images in a random contrast")
    parser.add_argument(
        "--cropped", type=float, default=0.5, help="share of abdomens to crop by some slices at either end"
    )
    parser.add_argument("--room", type=float, default=0.3, help="share of pairs with empty space around the scans")
    parser.add_argument("--bent", type=float, default=0.6, help="share of images to deform at random")
    parser.add_argument("--label-weight", type=float, default=1.0, help="weight of the overlap of the training labels")
    parser.add_argument("--weight", type=float, default=1.5, help="λ, the weight of the regulariser")
    parser.add_argument("--window", type=float, help="standard deviation of LNCC's windows in voxels (default: 4)")
    parser.add_argument("--across", type=float, default=0.15, help="share of pairs of hearts of two patients")
    parser.add_argument("--thin", type=float, default=0.2, help="share of batches on the grid for few slices")
    parser.add_argument("--fine", type=float, default=0.0, help="share of batches of half the pairs on the finer grid")
    parser.add_argument("--passes", type=int, default=1, help="passes of the network, but for one on the finer grid")
    parser.add_argument(
        "--validate-every", type=int, default=2500, help="steps between validations, and between checkpoints"
    )
    parser.add_argument("--no-graphs", action="store_true", help="do not replay steps as CUDA graphs")
    parser.add_argument(
        "--score", type=Path, metavar="MODEL", help="score this model and the initial one; do not train"
    )
    parser.add_argument("--measure", action="store_true", help="time training steps; do not train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Mixture(arguments.packs, device, {"thin": arguments.thin, "fine": arguments.fine})
    data.changed, data.cropped, data.room = arguments.changed, arguments.cropped, arguments.room
    data.synthetic, data.bent, data.passes = arguments.synthetic, arguments.bent, arguments.passes
    data.across = arguments.across
    arguments.out.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "commit": arguments.commit,
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "seed": arguments.seed,
        "grids": {name: list(shape) for name, shape in GRIDS.items()},
        "passes": arguments.passes,
    }
    if arguments.score is not None:
        report = {**about, "started_from": arguments.model.name, "model": arguments.score.name}
        for name, path in (("before", arguments.model), ("after", arguments.score)):
            model = start_from(path, device)
            report[name] = {split: data.evaluate(model, split) for split in ("dev", "val")}
            write(report, arguments.out / "scores.json")
        return

    model = start_from(arguments.model, device)
    data.mixes["cube"] |= arguments.mix
    stage = Stage(
        arguments.steps,
        warm_up=100,
        learning_rate=arguments.rate,
        final_learning_rate=arguments.final_rate,
        weight=arguments.weight,
        window=arguments.window,
        label_weight=arguments.label_weight,
        passes=arguments.passes,
        once_above=math.prod(GRIDS["fine"]) - 1,
    )
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(data.packed)} volumes", flush=True
    )
    if arguments.measure:
        times = measure(model, data, stage, arguments.pairs, arguments.out / "measured")
        write({**about, **times}, arguments.out / "speed.json")
        return

    def on_dev(model: RegistrationAlgorithm) -> float:
        began = time.monotonic()
        scores = data.evaluate(model, "dev")
        mean = float(np.mean([scores[name]["dice"] for name in CHOSEN_BY if name in scores]))
        short = {name: round(row["dice"], 4) for name, row in scores.items()}
        print(f"dev {mean:.4f} ({time.monotonic() - began:.1f} s)", short, flush=True)
        return mean

    start = on_dev(model)
    model = train(
        model,
        lambda generator: data.draw(generator, arguments.pairs),
        [stage],
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
        if (score := on_dev(candidate)) > final:
            model, final = candidate, score
    print(f"dev {start:.4f} before, {final:.4f} after", flush=True)
    facts = {"name": "carl-base", "grid": "96 96 96", "thin_grid": "160 160 32", "fine_grid": "128 128 128"}
    save(model, arguments.out / "model.safetensors", dtype=torch.float16, metadata=facts)


def start_from(model: Path, device: torch.device) -> RegistrationAlgorithm:
    """Load a model file, or a shipped model by its name."""
    return load(model, device=device) if model.is_file() else pretrained(str(model)).to(device)


def show(progress: Progress) -> None:
    if progress.step % 200 == 0:
        parts = ", ".join(f"{k} {v:.4f}" for k, v in progress.losses.items())
        print(f"step {progress.step} ({progress.seconds:.0f} s): {parts}, skipped {progress.skipped}", flush=True)


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


def measure(model: RegistrationAlgorithm, data: Mixture, stage: Stage, pairs: int, out: Path) -> dict[str, float]:
    """Milliseconds of a step alone, of drawing a batch alone, and of both as in `train`."""
    device, cuda = data.device, data.device.type == "cuda"
    count, warm = (200, 20) if cuda else (2, 1)

    def clock() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    data.shares = {}  # the usual grid alone
    runner = TrainingStep(model.train(), stage, device=device)
    batch = data.draw(torch.Generator().manual_seed(0), pairs)
    for number in range(warm + count):
        if number == warm:
            began = clock()
        runner(batch, 1e-6, number)
    alone = (clock() - began) / count
    for number in range(warm + count):
        if number == warm:
            began = clock()
        data.draw(torch.Generator().manual_seed(number), pairs)
    drawing = (clock() - began) / count
    seconds: dict[int, float] = {}
    train(
        model,
        lambda generator: data.draw(generator, pairs),
        [replace(stage, steps=warm + count, learning_rate=1e-6, final_learning_rate=None)],
        out=out,
        save_every=10**9,
        log_every=warm if cuda else 1,
        callback=lambda progress: seconds.__setitem__(progress.step, progress.seconds),
    )
    both = (seconds[warm + count] - seconds[warm]) / count
    return {"step_ms": 1000 * alone, "drawing_ms": 1000 * drawing, "both_ms": 1000 * both, "ratio": both / alone}


@dataclass
class View:
    """How to draw one image of a pair."""

    key: str
    matrix: Tensor  # (3, 4), from the image's unit coordinates to the scan's
    changed: bool = False
    wide: float = 0.0
    """Intensity of the darkest tissue in a CT shown in a wider window; 0 for the usual window."""
    window: tuple[float, float] | None = None
    """CT window of a scan in HU."""
    gamma: float = 1.0
    slope: float = 0.0
    """Slope of the random deformation of this image alone."""
    stripped: bool = False
    """For label maps: render only the brain."""
    dry: bool = False
    """For label maps: also leave out the fluid around the brain."""

    @property
    def is_map(self) -> bool:
        return self.key.startswith("brain_maps/")


@dataclass
class Pair:
    moving: View
    fixed: View
    compare: str = "images"
    """What the loss is computed on: the original `images`; renderings of the shared `organs`; `structures` of two maps
    in the same contrast; or `t1`, the original image of a brain and a map rendered in T1 contrast."""
    labels: str | None = "labels"
    """`labels` of the pack, `tissues` (fluid, grey and white matter), or None."""
    slope: float = 0.0
    """Slope of the random deformation of both images alike."""


class Mixture:
    """Packed volumes on the device, drawn as pairs for training and as labelled pairs for scoring."""

    synthetic, changed, cropped, room, shift, bent, across = 0.0, 0.5, 0.0, 0.0, 0.08, 0.0, 0.15
    passes = 1

    def __init__(self, paths: list[Path], device: torch.device, shares: dict[str, float]) -> None:
        self.device, self.shares = device, shares
        self.packed: dict[str, Tensor] = {}
        for path in paths:
            packed = np.load(path)
            self.packed |= {key: torch.from_numpy(packed[key]).to(device) for key in packed.files}
        self.names: dict[tuple[str, str], list[str]] = {}
        for key in sorted(self.packed):
            name, split, *rest = key.split("/")
            if len(rest) == 1:
                self.names.setdefault((name, split), []).append(key)
        self.resampled: dict[tuple[str, str], Tensor] = {}
        table = torch.zeros(3, 256, device=device)
        for number, value in enumerate(VALUES):
            in_brain = 0 < value < HEAD
            table[0, number] = T1.get(value, 0.5) if in_brain else 0.0
            table[1, number] = (1 if value in FLUID else 3 if value in WHITE else 2) if in_brain else 0
            table[2, number] = in_brain
        self.t1, self.tissue, self.in_brain = table[0, : len(VALUES)], table[1], table[2]
        self.boxes = {key: self._brain_box(key) for key in self.names.get(("brain_maps", "train"), [])}
        needs = {"map_with_brain": ("brain_maps", "brain"), "ct_mr": ("abdomen", "abdomen_mr")}
        self.mixes = {
            grid: {
                kind: share
                for kind, share in mix.items()
                if all((name, "train") in self.names for name in needs.get(kind, (kind,)))
            }
            for grid, mix in {"cube": MIX, **OTHER_MIXES}.items()
        }

    def on_grid(self, key: str, grid: str) -> Tensor:
        """A packed volume (*shape) on a grid; zeros where the pack has none. Kept for the next time."""
        if (key, grid) not in self.resampled:
            shape, volume = GRIDS[grid], self.packed.get(key)
            if volume is None:
                volume = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            elif key.endswith(("labels", "structures")) or key.startswith("brain_maps/"):
                volume = F.interpolate(volume[None, None].float(), shape, mode="nearest-exact")[0, 0].byte()
            else:
                volume = self._image(volume, grid).mul(255).round().byte()[0, 0]
            self.resampled[key, grid] = volume
        return self.resampled[key, grid]

    @staticmethod
    def _image(volume: Tensor, grid: str) -> Tensor:
        """(1, 1, *shape) in [0, 1]."""
        scan, shape = volume[None, None].float() / 255, GRIDS[grid]
        if volume.shape == shape:
            return scan
        return F.interpolate(scan, size=shape, mode="trilinear", align_corners=True)

    def _brain_box(self, key: str) -> tuple[Tensor, Tensor]:
        """Bounding box of the brain in a label map of the head, in unit coordinates."""
        volume = self.packed[key]
        brain = self.in_brain[volume.long()].nonzero().float() / (torch.tensor(volume.shape).to(volume.device) - 1)
        return brain.amin(0).cpu(), brain.amax(0).cpu()

    # ---- training ----

    def draw(self, generator: torch.Generator, count: int) -> Batch:
        """Pairs of random kinds, each image with a small random affine map, some pairs mirrored left to right; or, for
        a share of the pairs, two views of one random anatomy."""
        own = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        grid, left = "cube", float(torch.rand((), generator=generator))
        for name, share in self.shares.items():
            grid = name if 0 <= left < share else grid
            left -= share
        count = max(1, count // 2) if grid == "fine" else count
        synthetic = 0.0 if grid == "fine" else self.synthetic
        pairs = [None if self._chance(synthetic, generator) else self._choose(grid, generator) for _ in range(count)]
        shape = (2 * count, 1, *GRIDS[grid])
        inputs, targets, labels = (torch.zeros(shape, device=self.device) for _ in range(3))
        real = [number for number, pair in enumerate(pairs) if pair is not None]
        if real:
            views = [pair.moving for pair in pairs if pair] + [pair.fixed for pair in pairs if pair]
            at = torch.tensor(real + [count + number for number in real], device=self.device)
            made = self._views(grid, views, [pair for pair in pairs if pair], own)
            for all_, part in zip((inputs, targets, labels), made, strict=True):
                all_.index_copy_(0, at, part)
        for number, pair in enumerate(pairs):
            if pair is None:
                anatomy = random_anatomy(shape[2:], generator=own)
                maps = torch.cat([anatomy.moving_labels, anatomy.fixed_labels])
                colours = random_colours(1, int(maps.max()), own).expand(2, -1)
                for all_, part in zip(
                    (inputs, targets, labels),
                    (
                        torch.cat([anatomy.moving, anatomy.fixed]),
                        render(maps, own, colours=colours, plain=True),
                        maps.float(),
                    ),
                    strict=True,
                ):
                    all_[number], all_[count + number] = part[0], part[1]
        values = torch.arange(1, STRUCTURES + 1, device=self.device).reshape(-1, 1, 1, 1)
        known = (labels == values).byte()
        return Batch(*inputs.split(count), *known.split(count), *targets.split(count))

    def _views(
        self, grid: str, views: list[View], pairs: list[Pair], own: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The network's input images, the images for the loss, and the labels, for all views at once."""
        volumes = torch.stack([self.on_grid(view.key, grid) for view in views])[:, None].float()
        points = self._points(volumes, views, pairs, own)
        tone = torch.tensor([self._tone(view) for view in views]).to(self.device).T.reshape(3, -1, 1, 1, 1, 1)
        images = interpolate(volumes, points, outside="zeros")
        images = (images * tone[0] + tone[1]).clamp(0, 1) ** tone[2]
        known = torch.stack([self._known(grid, view, pair) for view, pair in zip(views, 2 * pairs, strict=True)])
        labels = interpolate(known[:, None].float(), points, mode="nearest", outside="zeros")
        inputs, targets = images.clone(), images
        changed = [number for number, view in enumerate(views) if view.changed and not view.is_map]
        if changed:
            inputs[changed] = random_contrast(images[changed], own)
        for number, view in enumerate(views):
            if view.wide:
                inputs[number] = in_wide_window(images[number], view.wide)
        maps = [number for number, view in enumerate(views) if view.is_map]
        if maps:
            whole = interpolate(volumes[maps], points[maps], mode="nearest", outside="zeros")
            shown = self._shown(whole, [views[n].stripped for n in maps], [views[n].dry for n in maps])
            inputs[maps] = render(shown, own)
            of_pair = [pairs[n % len(pairs)] for n in maps]
            bare = [p.compare == "t1" or p.moving.stripped or p.fixed.stripped for p in of_pair]
            compared = self._shown(whole, bare, [False] * len(maps))
            common = random_colours(len(pairs), len(VALUES) - 1, own)
            common = torch.where(
                torch.tensor([pair.compare == "t1" for pair in pairs]).to(self.device)[:, None], self.t1, common
            )
            colours = torch.stack([common[n % len(pairs)] for n in maps])
            targets[maps] = render(compared, own, colours=colours, plain=True)
        organs = [number for number in range(len(views)) if pairs[number % len(pairs)].compare == "organs"]
        if organs:
            common = random_colours(len(pairs), STRUCTURES, own)
            common = 0.3 + 0.7 * common
            rest = [value for value in range(STRUCTURES + 1) if value not in SHARED]
            common[:, rest] = 0.0
            colours = torch.stack([common[n % len(pairs)] for n in organs])
            targets[organs] = render(labels[organs], own, colours=colours, plain=True)
        return inputs, targets, labels

    def _points(self, volumes: Tensor, views: list[View], pairs: list[Pair], own: torch.Generator) -> Tensor:
        """Where each image samples its scan, (B, *shape, 3): a deformation shared by the pair, the image's affine map,
        and a deformation of its own."""

        grid = voxel_points(volumes).expand(len(pairs), *(-1,) * 4)
        points = deformations(torch.tensor([pair.slope for pair in pairs]), 3, own)(grid).repeat(2, 1, 1, 1, 1)
        points = Affine(torch.stack([view.matrix for view in views]).to(self.device))(points)
        return deformations(torch.tensor([view.slope for view in views]), 3, own)(points)

    @staticmethod
    def _tone(view: View) -> tuple[float, float, float]:
        """Factor, offset and exponent that map packed intensities to 0…1."""
        if view.window is None:
            return 1 / 255, 0.0, view.gamma
        low, high = view.window
        return 8 / (high - low), (-1024 - low) / (high - low), view.gamma

    def _known(self, grid: str, view: View, pair: Pair) -> Tensor:
        if pair.labels is None:
            return self.on_grid("nothing", grid)
        if pair.labels == "tissues" and view.is_map:
            return self.tissue[self.on_grid(view.key, grid).long()].byte()
        return self.on_grid(f"{view.key}/labels", grid)

    def _shown(self, maps: Tensor, stripped: list[bool], dry: list[bool]) -> Tensor:
        """Label maps as they are, reduced to the brain and its fluid, or also without the fluid around the brain."""
        shown = maps.clone()
        for number, (only_brain, no_fluid) in enumerate(zip(stripped, dry, strict=True)):
            if only_brain:
                shown[number] *= self.in_brain[maps[number].long()]
                if no_fluid:
                    shown[number].masked_fill_(maps[number] == VALUES.index(OUTSIDE_FLUID), 0)
        return shown

    @staticmethod
    def _chance(share: float, generator: torch.Generator) -> bool:
        return bool(torch.rand((), generator=generator) < share)

    def _choose(self, grid: str, generator: torch.Generator) -> Pair:
        mix = self.mixes[grid]
        kind = list(mix)[int(torch.multinomial(torch.tensor(list(mix.values())), 1, generator=generator))]

        def chance(share: float) -> bool:
            return self._chance(share, generator)

        def uniform(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator))

        def some(name: str, count: int = 1) -> list[str]:
            keys = self.names[name, "train"]
            return [keys[i] for i in torch.randperm(len(keys), generator=generator)[:count].tolist()]

        compare, labels, within = "images", "labels", False
        if kind == "ct_mr":
            keys, compare = some("abdomen") + some("abdomen_mr"), "organs"
        elif kind == "map_with_brain":
            other = "brain" if chance(0.7) else "brain_ibsr"
            other = other if (other, "train") in self.names else "brain"
            keys, compare = some("brain_maps") + some(other), "t1"
            labels = "labels" if other == "brain" else "tissues"
        elif kind == "brain_maps":
            keys, compare = some(kind, 2), "structures"
        elif kind == "brain_ibsr" and chance(0.4) and ("brain", "train") in self.names:
            keys, labels = some(kind) + some("brain"), None  # type: ignore[assignment]
        elif kind in WITHIN and (kind == "lung" or not chance(self.across)):
            keys, within = self._twice(kind, some(kind)[0]), True
        else:
            keys = some(kind, 2)
        if chance(0.5):
            keys = keys[::-1]
        mirror = chance(0.5)
        room = 1 + ROOM * uniform(0, 1) if chance(self.room) else 1.0
        common = self._noise(generator, keys[0], room, 1.0)
        if kind == "cardiac":  # hearts are small in the image and lie at any angle
            angle, zoom = 0.35 * float(torch.randn((), generator=generator)), uniform(0.55, 1.1)
            common = zoomed(common, zoom, angle)
        window = (uniform(-1024, -850), uniform(0, 600)) if kind == "lung" else None
        one_stripped, views = int(torch.randint(4, (), generator=generator)), []
        for number, key in enumerate(keys):
            if within:
                matrix = common + torch.cat([0.01 * torch.randn(3, 3, generator=generator), torch.zeros(3, 1)], 1)
                matrix[:, 3] += 0.01 * torch.randn(3, generator=generator)
            elif kind == "cardiac":
                matrix = zoomed(self._noise(generator, key, room, 1.0), zoom, angle)
            else:
                matrix = self._noise(generator, key, room, 1.0)
            view = View(key, matrix, chance(self.changed), window=window)
            view.slope = uniform(0, BENT_WITHIN if within else BENT) if chance(self.bent) else 0.0
            view.gamma = float(torch.exp(0.25 * torch.randn((), generator=generator)))
            if key.startswith("abdomen/") and chance(0.25):
                view.changed, view.wide = False, uniform(0.3, 0.75)
            if view.is_map:  # strip one of two maps half of the time; with a brain, half of the maps
                view.stripped = chance(0.5) if compare == "t1" else one_stripped == number
                view.dry = chance(0.5)
                if view.stripped and chance(0.7):
                    low, high = self.boxes[key]
                    view.matrix = torch.diag(high - low) @ view.matrix
                    view.matrix[:, 3] += low
            if mirror:
                view.matrix[:, 3] += view.matrix[:, 0]
                view.matrix[:, 0] *= -1
            views.append(view)
        slope = uniform(0, BENT_TOGETHER) if within and chance(self.bent) else 0.0
        return Pair(views[0], views[1], compare, labels, slope)

    def _twice(self, kind: str, key: str) -> list[str]:
        """Both scans of the patient shown in this one."""
        if kind == "cardiac":
            patient = key.rpartition("_")[0]
            return [f"{patient}_ED", f"{patient}_ES"]
        pairs = (("t0", "t5"), ("baseline", "followup"))
        both = next(pair for pair in pairs if key.rpartition("/")[2] in pair)
        return [f"lung/train/{scan}" for scan in both]

    def _noise(self, generator: torch.Generator, key: str, room: float, amount: float) -> Tensor:
        """A random affine map, (3, 4). Scales vary more than angles, as do fields of view. With `room` above 1, the
        image is that many times as large as the scan along each axis, and the scan lies at a random position in it."""
        linear = torch.eye(3) + 0.05 * amount * torch.randn(3, 3, generator=generator)
        linear += torch.diag(0.06 * amount * torch.randn(3, generator=generator))
        shift = self.shift * amount * torch.randn(3, generator=generator)
        scale = torch.full((1, 3), room)
        if key.split("/")[0] in CROPPED and room == 1 and self._chance(self.cropped, generator):
            scale[0, 2] = LEAST_KEPT + (1 - LEAST_KEPT) * float(torch.rand((), generator=generator))
        return about_centre(*framed(linear[None], shift[None], scale, generator)).matrix[0]

    # ---- scores ----

    def evaluate(self, model: RegistrationAlgorithm, split: str) -> dict[str, dict[str, float]]:
        """Mean Dice of every kind of pair of a split."""
        scores: dict[str, dict[str, float]] = {}
        for name, pairs in self.scored_pairs(split).items():
            rows = [self.score(model, name, *pair, number % 10) for number, pair in enumerate(pairs)]
            scores[name] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
            scores[name]["pairs"] = len(rows)
        return scores

    def scored_pairs(self, split: str) -> dict[str, list[tuple[str, str]]]:
        """Moving and fixed scans of every kind of pair: all ordered pairs of a set, or 40 drawn with seed 0 if there
        are more than 100."""
        found: dict[str, list[tuple[str, str]]] = {}
        for name in ("brain", "brain_ibsr", "brain_maps", "abdomen", "abdomen_mr", "hippocampus"):
            keys = [key for key in self.names.get((name, split), []) if f"{key}/labels" in self.packed]
            pairs = list(itertools.permutations(keys, 2))
            found[name] = random.Random(0).sample(pairs, 40) if len(pairs) > 100 else pairs
        found["brain_other_contrast"] = found["brain"]
        maps, brains = self.names.get(("brain_maps", split), []), self.names.get(("brain", split), [])
        found["head_to_brain"] = list(itertools.product(maps, brains))[:6]
        ct, mr = self.names.get(("abdomen", split), []), self.names.get(("abdomen_mr", split), [])
        found["ct_mr"] = [*itertools.product(ct, mr), *itertools.product(mr, ct)]
        hearts = self.names.get(("cardiac", split), [])
        ends = [(key, key.replace("_ED", "_ES")) for key in hearts if key.endswith("_ED")]
        found["cardiac_systole_fixed"] = ends
        found["cardiac_diastole_fixed"] = [(late, early) for early, late in ends]
        if split == "dev" and "lung/train/baseline/labels" in self.packed:
            found["lung_trained_on"] = [("lung/train/baseline", "lung/train/followup")]
        return {name: pairs for name, pairs in found.items() if pairs}

    def scored_grid(self, name: str) -> str:
        """The grid on which a kind of pair is registered: its own, if the network was trained on it."""
        own = "thin" if name.startswith("cardiac") else "fine" if "brain" in name else "cube"
        return own if self.shares.get(own) else "cube"

    def scored_image(self, key: str, grid: str, seed: int) -> Tensor:
        """A scan as it is, or a label map rendered in a contrast determined by its name and the seed."""
        volume = self.packed[key]
        if key.startswith("brain_maps/"):
            own = torch.Generator(self.device).manual_seed(1000 * seed + sum(map(ord, key)))
            return render(self.on_grid(key, grid)[None, None], own)
        if key.startswith("lung/"):
            low, high = LUNG_WINDOW
            hu = self._image(volume, grid) * 255 * 8 - 1024
            return ((hu - low) / (high - low)).clamp(0, 1)
        return self._image(volume, grid)

    def score(self, model: RegistrationAlgorithm, name: str, moving: str, fixed: str, seed: int) -> dict[str, float]:
        grid = self.scored_grid(name)
        m, f = self.scored_image(moving, grid, seed), self.scored_image(fixed, grid, seed + 10)
        if name == "brain_other_contrast":
            m = other_contrast(m, seed)
        repeated = model
        for _ in range(self.passes - 1 if grid != "fine" else 0):
            repeated = TwoStep(repeated, model)
        with torch.no_grad(), mixed_precision(self.device):
            phi = repeated(m, f)
        labels_m = self.packed[f"{moving}/labels"][None, None].float()
        labels_f = self.packed[f"{fixed}/labels"][None, None].float()
        only = SHARED if name == "ct_mr" else None
        with torch.no_grad():
            warped = warp(labels_m, phi, like=labels_f, mode="nearest")
            unmoved = F.interpolate(labels_m, labels_f.shape[2:], mode="nearest-exact")
            row = {
                "dice": mean_score(dice(warped, labels_f, only)),
                "before": mean_score(dice(unmoved, labels_f, only)),
                "folds": folding(phi, f),
            }
            if name == "abdomen":
                row["dice_five"] = mean_score(dice(warped, labels_f, ABDOMEN_FIVE))
        return row


def zoomed(matrix: Tensor, zoom: float, angle: float) -> Tensor:
    """The map (3, 4) after a rotation within slices and a zoom about the centre of the image."""
    cos, sin = math.cos(angle), math.sin(angle)
    linear = zoom * torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0 / max(zoom, 0.8)]])
    centre = torch.full((3,), 0.5)
    return torch.cat(
        [matrix[:, :3] @ linear, (matrix @ torch.cat([centre - linear @ centre, torch.ones(1)]))[:, None]], 1
    )


def in_wide_window(image: Tensor, black: float) -> Tensor:
    """A soft-tissue CT as shown in a wider window: air stays black, and tissue starts at the intensity `black`."""
    return black * (25 * image).clamp(0, 1) + (1 - black) * image


def other_contrast(image: Tensor, seed: int) -> Tensor:
    """An image in a kind of contrast that training does not use: a sum of three sine waves of the intensity, scaled to
    0…1, with black unchanged."""
    numbers = np.random.default_rng(seed)
    waves = [(numbers.normal(), numbers.uniform(0.3, 1.5), numbers.uniform(0, 2 * np.pi)) for _ in range(3)]

    def curve(x: Tensor) -> Tensor:
        return sum((a * torch.sin(2 * np.pi * f * x + p) for a, f, p in waves), torch.zeros_like(x))

    reached = curve(torch.linspace(0.05, 1, 200))
    low, high = float(reached.min()), float(reached.max())
    return ((curve(image) - low) / (high - low)).clamp(0, 1) * (image / 0.05).clamp(0, 1)


if __name__ == "__main__":
    main()
