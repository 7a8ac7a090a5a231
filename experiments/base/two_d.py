"""Train carl-2d on retinas, slices of all datasets and random shapes, and score it.

    python experiments/base/two_d.py carry/p2d/two_d.npz --out OUT --seconds 240
    python experiments/base/two_d.py carry/p2d/two_d.npz --out OUT --score OUT/model.safetensors

The pack is made by `prepare_2d.py`. A batch holds pairs of five kinds: a retina's vessels warped as in
`experiments/retina`; the same place in two subjects; a slice, deformed; label maps of two heads, each rendered in its
own contrast; and random shapes, deformed and rendered likewise. Pairs are mirrored, transposed and placed at random,
many in a larger, empty image. The network sees some images in a random contrast; the loss is computed on the original
ones and on their labels. A batch is drawn in one pass on the device.

Training has two parts. First the encoder alone learns to match positions, from pairs whose true map is known: the
cross-entropy between the attention of a voxel and its true position, as in `experiments/rotation/encoder.py`, and the
distance of the whole map and its slopes from the true ones, since a map that folds where there is nothing to match
cannot be unfolded by what follows. With diffusion or GradICON from the start, a new network maps all points to the same
place. Then the network is trained with
GradICON, by default for as many steps as fit into `--seconds`, measured on its first `WARM_UP` steps. For some of them
the encoder stays as it is, since the untrained refinements would undo what it has learnt; then it is trained with the
rest, at a tenth of the rate. A run that was cut off in the second part resumes with the same command.

Writes the best model on `dev` (training subjects kept back), in half precision. `--score` writes scores.json: Dice on
`dev`, and of the vessels on all test pairs of `experiments/retina`, of the network alone and with the default
optimisation of the fields. `--measure` writes the time of a step and of drawing a batch to speed.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import Affine, RegistrationAlgorithm, carl, load, save, warp
from carlreg.fast.precision import mixed_precision
from carlreg.geometry.grids import interpolate, pool, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.resizing import resize, resize_labels
from carlreg.geometry.transforms import Transform
from carlreg.model.algorithms import CoordinateAttention
from carlreg.model.zoo import first_step
from carlreg.objective.fields import FIELD_STEPS, optimize_fields
from carlreg.synthesis import random_anatomy
from carlreg.synthesis.contrast import random_colours, random_contrast, render
from carlreg.training.batches import Batch
from carlreg.training.loop import Progress, train
from carlreg.training.stages import Stage
from carlreg.training.step import TrainingStep

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

SIDE = 256
WIDTH, DOWN, UP = 64, (16, 32, 64, 128), (64, 48, 32, 16)
"""Widths of the encoder and of the U-Nets: 1.47 M parameters, 2.8 MiB in half precision."""
COUNTS = {"retina": 4, "subjects": 3, "deformed": 2, "maps": 1, "shapes": 2}
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
QUERIES = 1024
"""Voxels of the coarse grid to match in the other image."""
CONTENT = 0.03
"""Least local contrast of voxels to match."""
SMOOTH = 1.0
"""Weight of the map's distance from the true one, beside the cross-entropy."""
WARM_UP = 200
"""Steps of the second part before its speed is known."""


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
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of this call")
    parser.add_argument("--matching", type=int, default=2000, help="steps of the first part")
    parser.add_argument("--matching-rate", type=float, default=1e-3, help="learning rate of the first part")
    parser.add_argument("--steps", type=int, help="steps of the second part; by default as many as fit into --seconds")
    parser.add_argument("--rate", type=float, default=4e-4, help="learning rate of the second part")
    parser.add_argument("--final-rate", type=float, default=5e-6, help="final learning rate of its cosine schedule")
    parser.add_argument("--frozen", type=float, default=0.3, help="share of these steps in which the encoder is frozen")
    parser.add_argument("--changed", type=float, default=0.35, help="share of input images in a random contrast")
    parser.add_argument("--counts", type=json.loads, default={}, help="numbers that replace those of COUNTS, as JSON")
    parser.add_argument("--label-weight", type=float, default=1.0, help="weight of the overlap of the training labels")
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the encoder, to try the script")
    parser.add_argument("--validate-every", type=int, default=1000)
    parser.add_argument("--no-graphs", action="store_true", help="do not replay steps as CUDA graphs")
    parser.add_argument("--score", type=Path, metavar="MODEL", help="score this model; do not train")
    parser.add_argument("--measure", action="store_true", help="time training steps; do not train")
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
        model = carl(2, 3, width=arguments.width, unet_down=DOWN, unet_up=UP).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {data}", flush=True)
    if arguments.measure:
        write(about | measure(model, data, arguments.label_weight), out / "speed.json")
        return

    def on_dev(model: RegistrationAlgorithm) -> float:
        start, scores = time.monotonic(), data.evaluate(model)
        mean = float(np.mean([score["dice"] for score in scores.values()]))
        short = {name: round(score["dice"], 4) for name, score in scores.items()}
        print(f"dev {mean:.4f} ({time.monotonic() - start:.1f} s)", short, flush=True)
        return mean

    clock: dict[int, float] = {}

    def show(progress: Progress) -> None:
        clock[progress.step] = progress.seconds
        if progress.step % 500 == 0 or progress.step <= WARM_UP:
            parts = ", ".join(f"{k} {v:.4f}" for k, v in progress.losses.items())
            print(f"step {progress.step} ({progress.seconds:.0f} s): {parts}, folds {progress.folds:.1f} %", flush=True)

    def run(model: RegistrationAlgorithm, stage: Stage, folder: Path) -> RegistrationAlgorithm:
        return train(
            model,
            lambda generator: data.draw(generator, FAR).batch(),
            [stage],
            out=folder,
            seed=arguments.seed,
            validate=on_dev,
            validate_every=arguments.validate_every,
            save_every=arguments.validate_every,
            log_every=50,
            seconds=max(arguments.seconds - (time.monotonic() - began), 0),
            graphs=False if arguments.no_graphs else None,
            callback=show,
        )

    matched = out / "matched.safetensors"
    if arguments.model is None and matched.exists():
        model = load(matched, device=device)
    elif arguments.model is None:
        match(model, data, arguments.matching, arguments.matching_rate, arguments.seed, out / "matching.jsonl")
        save(model, matched)
        on_dev(first_step(model).eval())
    rate, weight = arguments.rate, arguments.label_weight
    attention(model).requires_grad_(False)
    model = run(model, Stage(WARM_UP, warm_up=50, learning_rate=rate, label_weight=weight), out / "start")
    plan = out / "plan.json"
    if not plan.exists():
        left = arguments.seconds - (time.monotonic() - began) - 10  # for the last validations
        if arguments.steps is None and not {WARM_UP // 2, WARM_UP} <= clock.keys():
            parser.error("expected --steps: the speed is measured only if the second part begins in this call")
        steps = arguments.steps or int(0.95 * left * (WARM_UP / 2) / (clock[WARM_UP] - clock[WARM_UP // 2]))
        plan.write_text(json.dumps({"steps": max(steps, 1)}) + "\n")
    steps = json.loads(plan.read_text())["steps"]
    print(f"{steps} steps after {time.monotonic() - began:.0f} s", flush=True)
    frozen = int(arguments.frozen * steps)
    if frozen:
        attention(model).requires_grad_(False)
        stage = Stage(frozen, learning_rate=rate, final_learning_rate=rate / 10, label_weight=weight)
        model = run(model, stage, out / "frozen")
    attention(model).requires_grad_(True)
    stage = Stage(
        steps - frozen,
        warm_up=50,
        learning_rate=rate / 10,
        final_learning_rate=arguments.final_rate,
        label_weight=weight,
    )
    model = run(model, stage, out / "run")
    final = on_dev(model)
    best = out / "run" / "best.safetensors"
    if best.exists():
        candidate = load(best, device=device)
        if (score := on_dev(candidate)) > final:
            model, final = candidate, score
    facts = {"name": "carl-2d", "grid": f"{arguments.side} {arguments.side}"}
    save(model, out / "model.safetensors", dtype=torch.float16, metadata=facts)
    parts = (out / "matching.jsonl", *(out / part / "log.jsonl" for part in ("start", "frozen", "run")))
    (out / "log.jsonl").write_text("".join(part.read_text() for part in parts if part.exists()))
    size = (out / "model.safetensors").stat().st_size / 2**20
    kept = ("matching", "rate", "final_rate", "frozen", "changed", "label_weight")
    settings = {name: getattr(arguments, name) for name in kept}
    settings |= {"steps": steps, "far": asdict(FAR), "counts": data.counts}
    write(about | {"dev_mean": final, "model_mib": round(size, 3), "settings": settings}, out / "trained.json")


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


def measure(model: RegistrationAlgorithm, data: Pictures, label_weight: float) -> dict[str, float]:
    """Milliseconds of a training step alone and of drawing a batch alone."""
    on_gpu = data.device.type == "cuda"
    count, warm = (100, 20) if on_gpu else (2, 1)
    step = TrainingStep(model.train(), Stage(1, label_weight=label_weight), device=data.device)
    batch = data.draw(torch.Generator().manual_seed(0), FAR).batch()

    def milliseconds(work: Callable[[int], object]) -> float:
        began = 0.0
        for number in range(warm + count):
            if number == warm:
                if on_gpu:
                    torch.cuda.synchronize()
                began = time.monotonic()
            work(number)
        if on_gpu:
            torch.cuda.synchronize()
        return 1000 * (time.monotonic() - began) / count

    return {
        "step_ms": milliseconds(lambda number: step(batch, 1e-6, number)),
        "drawing_ms": milliseconds(lambda number: data.draw(torch.Generator().manual_seed(number), FAR).batch()),
    }


# ---- matching positions ---------------------------------------------------------------------------------------------


def match(model: RegistrationAlgorithm, data: Pictures, steps: int, rate: float, seed: int, log: Path) -> None:
    """Train the encoder alone to match positions."""
    xi = attention(model)
    optimizer = torch.optim.Adam(xi.parameters(), lr=rate, fused=True)
    stage = Stage(steps, warm_up=50, learning_rate=rate, final_learning_rate=rate / 50)
    began = time.monotonic()
    xi.train()
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = stage.rate(step)
        optimizer.zero_grad(set_to_none=True)
        drawn = data.draw(generator, FAR, known=True)
        loss = matching_loss(xi, drawn, generator)
        (loss + SMOOTH * map_loss(xi, drawn)).backward()
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            entry = {"matching": step + 1, "loss": float(loss.detach()), "seconds": round(time.monotonic() - began, 1)}
            if (step + 1) % 500 == 0 or step + 1 == steps:
                entry |= errors(first_step(model), data)
            print(entry, flush=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def attention(model: RegistrationAlgorithm) -> CoordinateAttention:
    """The first step, Ξθ, without what surrounds it."""
    return next(part for part in model.modules() if isinstance(part, CoordinateAttention))


def matching_loss(xi: CoordinateAttention, drawn: Drawn, generator: torch.Generator) -> Tensor:
    """Mean cross-entropy between the attention of voxels with content and the weights of linear interpolation at their
    true position in the moving image."""
    coarse = pool(pool(drawn.inputs))
    with mixed_precision(coarse.device):
        features = xi.features(coarse)
    keys, queries = (xi.length * F.normalize(features.float(), dim=-1)).chunk(2)
    chosen = torch.randint(coarse.shape[2] * coarse.shape[3], (QUERIES,), generator=generator).to(coarse.device)
    asked = xi.crop(queries).flatten(1, -2)[:, chosen]
    truth, weight = (part.flatten(1, 2)[:, chosen] for part in drawn.coarse_truth())
    at = (truth * (coarse.shape[-1] - 1) + xi.padding) / (keys.shape[1] - 1)
    weight = weight * ((at > 0) & (at < 1)).all(-1)
    right = interpolate(keys.movedim(-1, 1), at).mT
    with mixed_precision(keys.device):
        logits = asked @ keys.flatten(1, -2).mT
    loss = logits.float().logsumexp(dim=-1) - (asked * right).sum(dim=-1)
    return (weight * loss).sum() / weight.sum().clamp(min=1)


def map_loss(xi: CoordinateAttention, drawn: Drawn) -> Tensor:
    """Mean distance in voxels between Ξθ's map on the coarse grid and the true one, and the mean squared difference of
    their slopes, where the true position lies in the moving image."""
    coarse = pool(pool(drawn.inputs))
    moving, fixed = coarse.chunk(2)
    with mixed_precision(coarse.device):
        points = xi.transform(moving, fixed).on_grid_of(fixed).float()
    truth, _ = drawn.coarse_truth()
    inside = ((truth > 0) & (truth < 1)).all(-1)[..., None].float()
    wrong = (points - truth) * (coarse.shape[-1] - 1)
    loss = (inside * F.smooth_l1_loss(wrong, torch.zeros_like(wrong), reduction="none")).sum() / inside.sum()
    for axis in (1, 2):
        n = wrong.shape[axis] - 1
        both = inside.narrow(axis, 1, n) * inside.narrow(axis, 0, n)
        loss = loss + (both * wrong.diff(dim=axis).square()).sum() / both.sum()
    return loss


@torch.no_grad()
def errors(xi: RegistrationAlgorithm, data: Pictures) -> dict[str, float]:
    """Median distance of Ξθ's matches from the true positions, in voxels of its coarse grid, and its folds in per cent,
    on one batch."""
    drawn = data.draw(torch.Generator().manual_seed(0), FAR, known=True)
    moving, fixed = drawn.inputs.chunk(2)
    was = xi.training
    with mixed_precision(data.device):
        phi = xi.eval()(moving, fixed)
    points, folds = phi.on_grid_of(fixed), folding(phi, fixed)
    xi.train(was)
    truth, weight = drawn.coarse_truth()
    found = to_coarse(pool(pool(points.movedim(-1, 1).float())), drawn.inputs.shape[-1]).movedim(1, -1)
    apart = ((found - truth) * (truth.shape[1] - 1)).norm(dim=-1)
    return {"median_error_in_voxels": float(apart[weight > 0].median()), "folds": folds}


def to_coarse(points: Tensor, side: int) -> Tensor:
    """Unit coordinates of an image of this side as those of the image pooled twice, whose outermost voxel centres lie
    inside the image's."""
    return 0.5 + (points - 0.5) / (1 - 3 / (side - 1))


# ---- pairs ----------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """All moving, then all fixed images of a batch."""

    inputs: Tensor  # (2n, 1, side, side), like `targets`, the images for the loss
    targets: Tensor
    labels: Tensor  # (2n, STRUCTURES, side, side) with 0 and 1
    points: Tensor  # (2n, side, side, 2), positions in the source images
    matrix: Tensor  # (2n, 2, 3), the affine part of `points`

    def batch(self) -> Batch:
        (moving, fixed), (moving_target, fixed_target), (moving_labels, fixed_labels) = (
            part.chunk(2) for part in (self.inputs, self.targets, self.labels)
        )
        return Batch(moving, fixed, moving_labels, fixed_labels, moving_target, fixed_target)

    def coarse_truth(self) -> tuple[Tensor, Tensor]:
        """Where the voxels of the fixed images, pooled twice, lie in the moving ones, in unit coordinates of the pooled
        images, (n, *coarse, 2); and 1 where there is content, else 0, (n, *coarse). For pairs with a known map."""
        source = pool(pool(self.points.chunk(2)[1].movedim(-1, 1))).movedim(1, -1)
        truth = to_coarse(Affine(self.matrix.chunk(2)[0]).inverse()(source), self.points.shape[1])
        image = pool(pool(self.targets.chunk(2)[1]))
        contrast = F.max_pool2d(image, 5, 1, 2) + F.max_pool2d(-image, 5, 1, 2)
        return truth, (contrast[:, 0] > CONTENT).float()


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

    def draw(self, generator: torch.Generator, spread: Spread, known: bool = False) -> Drawn:
        """A batch with `counts` pairs of each kind. If their maps are to be `known`, both images of a pair have the
        same source, and only the fixed one is deformed."""
        own = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        kinds = [kind for kind, count in self.counts.items() for _ in range(count)]
        pairs, count, retinas = [self._choose(generator, kind) for kind in kinds], len(kinds), kinds.count("retina")
        if known:
            pairs = [(first, first) for first, _ in pairs]
        strength = 0.3 + 0.7 * torch.rand(2, count, generator=generator)
        strength[0] *= 0.0 if known else 0.6 * flip(count, 0.5, generator)
        strength[1, :retinas] = 1.0
        strength *= torch.tensor([first == second for first, second in pairs])  # subjects differ as they are
        matrix = place(count, spread, generator)
        where = torch.cat([torch.arange(retinas), count + torch.arange(retinas)])
        matrix[where] = self._retina_places(matrix[where], spread, generator)
        matrix = matrix.to(self.device, non_blocking=True)
        points = self._deformed(Affine(matrix)(self.grid), strength.flatten().to(self.device), own)
        index = torch.tensor(pairs).T.flatten().to(self.device)
        return Drawn(*self._views(index, points, kinds, own), points, matrix)

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
            return torch.tensor([n for n, kind in enumerate(both) if kind in wanted]).to(self.device)

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
