"""The same anatomy in another contrast, shifted, or rotated: does the default model still give the same answer?

    python experiments/conditions/run.py ../shared/data --parts brainweb contrast shifts rotations

Validation scans at their own resolution, registered as `carl register` does, by the network alone and with the default
optimisation:

- `brainweb`: T1 and T2 of the same simulated head, skull included, each registered to the same OASIS brain. Measured is
  the mean distance between the two answers over the labelled voxels of that brain. The headers of these files are
  turned by 180° about the axis from head to foot, which `carl register` warns of; they are corrected first.
- `contrast`: pairs of brains, with the moving one as it is and in a contrast of a kind that training does not use
  (`other_contrast` of experiments/base/universal.py, seeds 0 to 9).
- `shifts`: the moving scan shifted in an empty frame that is 48 mm wider on every side, by up to 48 mm along each axis.
- `heads`: whole heads, rendered from label maps as in T1 and in T2, registered to skull-stripped brains, with
  what the head shows around the brain left out (`registration/surroundings.py`) and not. These are training subjects
  that were kept back, on which that was tried: give --out another file.
- `rotations`: the moving brain rotated in the same frame, with `--model auto`. Its labels are not rotated, but sampled
  once through both maps.

Rows are added to the result file one by one, and those that it has are not repeated. After `--seconds`, none is begun.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.atlases.average import mapped, mapped_by, world_points
from carlreg.fast.devices import choose_device
from carlreg.files import world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, Matrix, map_points, read, read_labels
from carlreg.files.world_transform import WorldTransform, folds_percent, jacobian_determinant
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.metrics import dice, mean_score
from carlreg.registration import surroundings
from carlreg.registration.api import align_pair
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.progress import Progress
from carlreg.synthesis.contrast import random_colours, render

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "base"))

from prepare import FREESURFER, numbers_of  # type: ignore[import-not-found]
from universal import T1, other_contrast  # type: ignore[import-not-found]

from experiments.made import commit, machine

SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
STRUCTURES = {"brain": SUBCORTICAL, "abdomen": tuple(range(1, 14))}
FRAME = 48.0
"""Millimetres of empty space on every side of a scan that is shifted or rotated."""
SHIFTS = (0.0, 12.0, 24.0, 36.0, 48.0)
ANGLES = (0.0, 30.0, 60.0, 90.0, 135.0, 180.0)
PLANES = {"axial": (0, 1), "coronal": (0, 2), "sagittal": (1, 2)}
SEEDS = range(10)
KEPT_BACK = 3
"""Training subjects of each set by which settings are chosen, the last ones."""
SEED = 0
RESULTS = Path(__file__).parent / "results" / "val.json"
Row = dict[str, Any]
Case = tuple[Row, Callable[[], Row]]
"""What is registered, and how to measure it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=1, help="pairs of each set that are shifted or rotated")
    parser.add_argument("--brains", type=int, default=3, help="OASIS brains to which BrainWeb's head is registered")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="default")
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    began, device = time.monotonic(), choose_device(arguments.device)
    report: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    bench = Bench(arguments.data, load_model(arguments.model, device), device, arguments.pairs, arguments.brains)
    for part in arguments.parts:
        rows = report.setdefault(part, [])
        for case, measure in PARTS[part](bench):
            if any(case.items() <= row.items() for row in rows):
                continue
            if time.monotonic() - began > arguments.seconds:
                return
            began_row = time.monotonic()
            made = {"commit": commit(), "machine": name_of(device), "seed": SEED, "torch": torch.__version__}
            made |= {"sha256": bench.model.provenance["sha256"]}
            rows.append(case | measure() | {"seconds": round(time.monotonic() - began_row, 1)} | made)
            write_atomically(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
            print(part, json.dumps(rows[-1]), flush=True)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else machine()


@dataclass
class Bench:
    """The scans, and the model that registers them."""

    data: Path
    model: LoadedModel
    device: torch.device
    pairs: int
    brains: int

    def subjects(self, name: str) -> list[Path]:
        return sorted(path for path in (self.data / name / "val").glob("*.nii.gz") if "_labels" not in path.name)

    def ring(self, name: str) -> list[tuple[Path, Path]]:
        """(fixed, moving): each subject with the next one."""
        paths = self.subjects(name)
        return list(zip(paths, paths[1:] + paths[:1], strict=True))[: self.pairs]

    def register(self, fixed: Image, moving: Image, optimised: bool, rotated: bool = False) -> WorldTransform:
        options = RegisterOptions(
            device=str(self.device),
            io_iterations=None if optimised else 0,
            allow_identity=optimised,
            confidence="off",
            seed=SEED,
        )
        model = load_model("auto", self.device) if rotated else self.model
        return align_pair(PairInputs(fixed=fixed, moving=moving), model, options, Progress()).transform

    def scored(
        self, name: str, fixed: Path, moving: Image, labels: Image, back: Callable[[Tensor], Tensor], rotated: bool
    ) -> Row:
        """Dice of both ways; `back` maps world points of the moving image to those of its labels."""
        scan, truth, row = read(fixed), read_labels(labels_of(fixed)), {}
        points = world_points(scan, torch.device("cpu"))
        for way, optimised in (("network", False), ("optimised", True)):
            transform = self.register(scan, moving, optimised, rotated)
            found = nearest(labels, back(mapped(transform, points)))
            row[way] = overlap(found, truth, STRUCTURES[name])
        row["folds_percent"] = folds_percent(jacobian_determinant(transform, scan))
        return row


def labels_of(path: Path) -> Path:
    return path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz"))


def nearest(labels: Image, points: Tensor) -> Tensor:
    """Labels at world points (*shape, D), 0 beyond the image."""
    index = (mapped_by(np.linalg.inv(labels.affine), points) + 0.5).floor().long()
    sides = torch.tensor(labels.shape)
    inside = ((index >= 0) & (index < sides)).all(dim=-1)
    index = torch.minimum(index.clamp(min=0), sides - 1)
    return torch.where(inside, torch.from_numpy(labels.data.astype(np.int32))[tuple(index.unbind(-1))], 0)


def overlap(found: Tensor, truth: Image, structures: Sequence[int]) -> float:
    expected = torch.from_numpy(truth.data.astype(np.int32))
    return mean_score(dice(found[None, None], expected[None, None], structures))


def unchanged(points: Tensor) -> Tensor:
    return points


# ---- parts ----------------------------------------------------------------------------------------------------------


def brainweb(bench: Bench) -> Iterator[Case]:
    for path in bench.subjects("brain")[: bench.brains]:

        def measure(path: Path = path) -> Row:
            row: Row = {}
            scan = read(path)
            labelled = torch.from_numpy(read_labels(labels_of(path)).data > 0)
            points = world_points(scan, torch.device("cpu"))[labelled]
            heads = [turned_back(read(bench.data / "brainweb" / name)) for name in ("t1.nii.gz", "t2.nii.gz")]
            for way, optimised in (("network", False), ("optimised", True)):
                t1, t2 = (mapped(bench.register(scan, head, optimised), points) for head in heads)
                apart = (t1 - t2).norm(dim=-1)
                row |= {f"{way}_mm": float(apart.mean()), f"{way}_95_mm": float(apart.double().quantile(0.95))}
            return row

        yield {"fixed": path.name}, measure


def turned_back(image: Image) -> Image:
    """With a header that is turned by 180° about the axis from head to foot."""
    return replace(image, affine=np.diag([-1.0, -1.0, 1.0, 1.0]) @ image.affine)


def heads(bench: Bench) -> Iterator[Case]:
    brains = [path for path in (bench.data / "brain" / "train").glob("*.nii.gz") if "_labels" not in path.name]
    brains, maps = (sorted(one)[-KEPT_BACK:] for one in (brains, (bench.data / "brain_maps").glob("*.nii.gz")))
    for weighting, (seed, (fixed, moving)) in itertools.product(
        ("T1", "T2"), enumerate(zip(brains, maps, strict=True))
    ):

        def measure(fixed: Path = fixed, moving: Path = moving, seed: int = seed, weighting: str = weighting) -> Row:
            head, labels = rendered(moving, seed, weighting)
            row = bench.scored("brain", fixed, head, labels, unchanged, rotated=False)
            usual, surroundings.FILLED = surroundings.FILLED, math.inf
            try:
                whole = bench.scored("brain", fixed, head, labels, unchanged, rotated=False)
            finally:
                surroundings.FILLED = usual
            return row | {"optimised_whole": whole["optimised"]}

        yield {"fixed": fixed.name, "moving": moving.name, "weighting": weighting}, measure


def rendered(path: Path, seed: int, weighting: str) -> tuple[Image, Image]:
    """A label map as an image of a head, whose skull and scalp have random colours, and its subcortical structures in
    the numbering of the brains. In "T2", what is bright in T1 is dark."""
    labels, numbers, generator = read_labels(path), numbers_of(path), torch.Generator().manual_seed(seed)
    colours = random_colours(1, max(numbers.values()), generator)
    colours[:, 0] = 0.0
    for value, colour in T1.items():
        if value in numbers:
            colours[0, numbers[value]] = colour if weighting == "T1" else 1 - 0.9 * colour
    shown = render(torch.from_numpy(labels.data.astype(np.int64))[None, None], generator, colours=colours)
    found = np.zeros_like(labels.data)
    for value, structure in zip(FREESURFER, SUBCORTICAL, strict=True):
        found[labels.data == numbers[value]] = structure
    return replace(labels, data=shown[0, 0].numpy()), replace(labels, data=found)


def contrast(bench: Bench) -> Iterator[Case]:
    pairs = random.Random(SEED).sample(list(itertools.permutations(bench.subjects("brain"), 2)), len(SEEDS))
    for seed, (fixed, moving) in zip(SEEDS, pairs, strict=True):
        for changed in (False, True):

            def measure(fixed: Path = fixed, moving: Path = moving, changed: bool = changed, seed: int = seed) -> Row:
                scan, labels = read(moving), read_labels(labels_of(moving))
                if changed:
                    values = torch.from_numpy(scan.data.astype(np.float32))
                    scan = replace(scan, data=other_contrast(values / values.max(), seed).numpy())
                return bench.scored("brain", fixed, scan, labels, unchanged, rotated=False)

            yield {"fixed": fixed.name, "moving": moving.name, "contrast_seed": seed, "changed": changed}, measure


def shifts(bench: Bench) -> Iterator[Case]:
    for name in ("brain", "abdomen"):
        for (fixed, moving), axis, shift in itertools.product(bench.ring(name), range(3), SHIFTS):
            if shift == 0 and axis > 0:
                continue

            def measure(
                fixed: Path = fixed, moving: Path = moving, axis: int = axis, shift: float = shift, name: str = name
            ) -> Row:
                scan, labels = (framed(image) for image in (read(moving), read_labels(labels_of(moving))))
                steps = round(shift / scan.spacing[axis])
                scan, labels = (replace(one, data=np.roll(one.data, steps, axis)) for one in (scan, labels))
                return bench.scored(name, fixed, scan, labels, unchanged, rotated=False)

            yield {"set": name, "fixed": fixed.name, "moving": moving.name, "axis": axis, "shift_mm": shift}, measure


def rotations(bench: Bench) -> Iterator[Case]:
    for (fixed, moving), (plane, axes), angle in itertools.product(bench.ring("brain"), PLANES.items(), ANGLES):
        if angle == 0 and plane != "axial":
            continue

        def measure(
            fixed: Path = fixed, moving: Path = moving, axes: tuple[int, int] = axes, angle: float = angle
        ) -> Row:
            scan, labels = framed(read(moving)), read_labels(labels_of(moving))
            middle = map_points(scan.affine, (np.array(scan.shape) - 1) / 2)
            turn = rotation(axes, angle)

            def back(points: Matrix) -> Matrix:
                return (points - middle) @ turn + middle

            matrix = np.eye(4)
            matrix[:3, :3], matrix[:3, 3] = turn.T, middle - turn.T @ middle
            turned = world_transform.apply(back, scan, scan, "linear")
            return bench.scored("brain", fixed, turned, labels, lambda points: mapped_by(matrix, points), rotated=True)

        yield {"fixed": fixed.name, "moving": moving.name, "plane": plane, "degrees": angle}, measure


def rotation(axes: tuple[int, int], degrees: float) -> Matrix:
    matrix, (first, second) = np.eye(3), axes
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix[first, first], matrix[first, second] = cosine, -sine
    matrix[second, first], matrix[second, second] = sine, cosine
    return matrix


def framed(image: Image) -> Image:
    """In an empty frame."""
    voxels = [math.ceil(FRAME / size) for size in image.spacing]
    affine = image.affine.copy()
    affine[:-1, -1] = map_points(image.affine, -np.array(voxels, dtype=float))
    return replace(image, data=np.pad(image.data, [(n, n) for n in voxels]), affine=affine)


PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "brainweb": brainweb,
    "contrast": contrast,
    "shifts": shifts,
    "heads": heads,
    "rotations": rotations,
}

if __name__ == "__main__":
    main()
