"""Pairs to be judged: intact ones of every set, and deliberate failures of many kinds, in a balanced order."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.files.images import Image, Matrix, map_points, read
from carlreg.files.landmarks import read_landmarks
from carlreg.geometry.grids import interpolate
from carlreg.geometry.transforms import Affine, DisplacementField, Transform

SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
LABELS = {
    "brain": SUBCORTICAL,
    "abdomen": tuple(range(1, 14)),
    "abdomen_mr": (1, 2, 3, 6),
    "ct_mr": (1, 2, 3, 6),
    "cardiac": (1, 2, 3),
    "hippocampus": (1, 2),
    "lung": (1,),
}
TAKEN = {
    "brain": (3, 3),
    "abdomen": (3, 3),
    "abdomen_mr": (3, 3),
    "cardiac": (4, 3),
    "hippocampus": (20, 16),
}
"""Subjects of train and of val that are used. Of train they are the last ones; training kept back the last three."""
SPLITS = {"train": 0.7, "val": 1.0}
"""The splits, and how often a task is of each."""
LUNGS = {
    "train": ("lung/elastix/baseline", "lung/elastix/followup"),
    "val": ("lung/popi/inhale", "lung/popi/exhale"),
}
FAMILIES = {
    "brain": "brain",
    "abdomen": "trunk",
    "abdomen_mr": "trunk",
    "lung": "trunk",
    "cardiac": "heart",
    "hippocampus": "hippocampus",
}
CPU = torch.device("cpu")
SEED = 0
PLAIN = 1.5
"""How often an intact pair of each set is taken."""


@dataclass(frozen=True)
class Scan:
    """A scan of a set, by its path without endings."""

    set: str
    split: str
    stem: str

    @property
    def subject(self) -> str:
        name = Path(self.stem).name
        return f"{self.set}/{name.split('_E')[0] if self.set == 'cardiac' else name}"

    def files(self) -> list[str]:
        """What is needed of it, relative to the data."""
        return [f"{self.stem}.nii.gz", f"{self.stem}{'_landmarks.csv' if self.has_landmarks else '_labels.nii.gz'}"]

    @property
    def has_landmarks(self) -> bool:
        """Instead of labels."""
        return self.stem.startswith("lung/popi")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A scan in memory, with labels or landmarks, and perhaps altered."""

    image: Image
    labels: Image | None = None
    landmarks: Matrix | None = None
    truth: Callable[[Matrix], Matrix] | None = None
    """For a synthetic moving scan, the map from points of the fixed scan."""


@dataclass(frozen=True)
class Task:
    """A pair, what was done to it, and how it is registered."""

    kind: str
    set: str
    split: str
    fixed: Scan
    moving: Scan
    alteration: str = ""
    amount: float = 0.0
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    network: str = "default"
    """"default", "untrained" or "none"."""
    no_common_anatomy: bool = False


def scans(data: Path, taken: Mapping[str, tuple[int, int]] = TAKEN) -> dict[tuple[str, str], list[Scan]]:
    """The scans that are used, by set and split; sets that are not there have none."""
    found: dict[tuple[str, str], list[Scan]] = {}
    for (name, counts), (index, split) in itertools.product(taken.items(), enumerate(SPLITS)):
        paths = sorted(path for path in (data / name / split).glob("*.nii.gz") if "_labels" not in path.name)
        stems = [f"{name}/{split}/{path.name.removesuffix('.nii.gz')}" for path in paths]
        each = 2 if name == "cardiac" else 1
        chosen = stems[-each * counts[index] :] if split == "train" else stems[: each * counts[index]]
        found[name, split] = [Scan(name, split, stem) for stem in chosen]
    for split, lungs in LUNGS.items():
        found["lung", split] = [Scan("lung", split, stem) for stem in lungs if (data / f"{stem}.nii.gz").is_file()]
    return found


def intact(found: dict[tuple[str, str], list[Scan]], split: str) -> dict[str, list[tuple[Scan, Scan]]]:
    """Ordered pairs (fixed, moving) of each set, and of CT with MR."""
    pairs = {name: list(itertools.permutations(found[name, split], 2)) for name in (*TAKEN, "lung")}
    pairs["cardiac"].sort(key=lambda pair: pair[0].subject != pair[1].subject)  # phases of one heart first
    ct, mr = found["abdomen", split], found["abdomen_mr", split]
    pairs["ct_mr"] = [pair for a, b in itertools.product(ct, mr) for pair in ((a, b), (b, a))]
    return pairs


def plan(data: Path) -> list[Task]:
    """All tasks, in an order of which every beginning is balanced over kinds, sets and splits."""
    found = scans(data)
    timed: list[tuple[float, Task]] = []
    for split, share in SPLITS.items():
        generator = random.Random(f"{SEED} {split}")
        pairs = {name: each for name, each in intact(found, split).items() if each}
        for name in pairs:
            first, rest = (pairs[name][:6], pairs[name][6:]) if name == "cardiac" else ([], pairs[name])
            pairs[name] = [*first, *generator.sample(rest, len(rest))]
        plain = [(PLAIN, [Task("plain", name, split, *pair) for pair in each]) for name, each in pairs.items()]
        for rate, tasks in (*plain, *_failures(pairs, found, split, generator)):
            timed += [((index + 0.5) / (share * rate), task) for index, task in enumerate(tasks)]
    return [task for _, task in sorted(timed, key=lambda one: one[0])]


def _failures(
    pairs: dict[str, list[tuple[Scan, Scan]]], found: dict[tuple[str, str], list[Scan]], split: str, draw: random.Random
) -> Iterator[tuple[float, list[Task]]]:
    """Streams of tasks, one for each kind of failure, alternating between sets; and how often each kind is taken."""
    same = [name for name in pairs if name != "ct_mr"]

    def stream(kind: str, sets: Sequence[str] = same, **more: Any) -> list[Task]:
        names = [name for name in sets if name in pairs]
        start = draw.randrange(max(len(names), 1))  # so that kinds do not all begin with the same set
        turns = itertools.zip_longest(*([(n, pair) for pair in pairs[n][:12]] for n in names[start:] + names[:start]))
        tasks = [one for one in itertools.chain.from_iterable(turns) if one is not None]
        return [Task(kind, name, split, a, b, seed=draw.randrange(10**6), **more) for name, (a, b) in tasks]

    def cycle(tasks: list[Task], changes: Sequence[dict[str, Any]]) -> list[Task]:
        return [replace(task, **change) for task, change in zip(tasks, itertools.cycle(changes), strict=False)]

    def amounts(tasks: list[Task], values: Sequence[float]) -> list[Task]:
        return cycle(tasks, [{"amount": value} for value in values])

    lncc, ssd = (("io_sim", "lncc"),), (("io_sim", "ssd"),)
    alone: dict[str, Any] = {"options": (("io_iterations", 0), ("allow_identity", False))}
    turned: dict[str, Any] = {"alteration": "turned", "amount": 90.0}
    everything = [scan for (name, part), each in found.items() if part == split for scan in each]
    other = [(a, b) for a, b in itertools.permutations(everything, 2) if FAMILIES[a.set] != FAMILIES[b.set]]
    draw.shuffle(other)
    yield 2, [Task("other anatomy", "none", split, a, b, no_common_anatomy=True) for a, b in other[:60]]
    parts = ["brain", "abdomen", "abdomen_mr", "lung"]
    yield 1, stream("other part", parts, alteration="parts", no_common_anatomy=True)
    yield 3, stream("contrast, LNCC forced", alteration="inverted", options=lncc)
    yield 3, stream("contrast, SSD forced", alteration="inverted", options=ssd)
    yield 2, stream("CT and MR, SSD forced", ["ct_mr"], options=ssd)
    yield 3, stream("turned by 90°", **turned)
    yield 1, amounts(stream("turned by 20 to 60°", alteration="turned"), [25, 50, 35, 60, 20, 45])
    yield 3, stream("half empty", alteration="half empty")
    yield 1, stream("noise instead", alteration="noise", no_common_anatomy=True)
    yield 1, amounts(stream("noisy", alteration="noisy"), [0.3, 0.6, 1.0])
    yield 2, cycle(stream("untrained", network="untrained"), [alone, {}])
    yield 2.5, amounts(stream("mirrored", alteration="mirrored"), [0, 1, 2])
    yield 2, amounts(stream("cropped", alteration="cropped"), [0.35, 0.5, 0.65])
    yield (
        0.5,
        stream("too little regularity", options=(("regularity", 0.005), ("io_sim", "ssd"), ("io_iterations", 60))),
    )
    yield 1, stream("network alone", [*same, "ct_mr"], options=(("io_iterations", 0),))
    yield 2, amounts(stream("synthetic", alteration="synthetic"), [0.03, 0.1, 0.2])
    yield (
        3.5,
        cycle(stream("no network", [*same, "ct_mr"], network="none"), [{}, turned, {}, {"alteration": "half empty"}]),
    )


# ---- scans and alterations ------------------------------------------------------------------------------------------


@functools.cache
def load(data: Path, scan: Scan) -> Loaded:
    image = read(data / f"{scan.stem}.nii.gz")
    if scan.has_landmarks:
        return Loaded(image, landmarks=read_landmarks(data / f"{scan.stem}_landmarks.csv", image))
    return Loaded(image, read(data / f"{scan.stem}_labels.nii.gz"))


def prepare(data: Path, task: Task, device: torch.device = CPU) -> tuple[Loaded, Loaded]:
    """The fixed and the moving scan of a task, altered; scans are resampled on the device."""
    fixed, moving = load(data, task.fixed), load(data, task.moving)
    random_ = np.random.default_rng(task.seed)
    axis = int(random_.integers(3))
    if task.alteration == "inverted":
        return fixed, replace(moving, image=_inverted(moving.image))
    if task.alteration == "turned":
        return fixed, _turned(moving, task.amount, random_, device)
    if task.alteration == "half empty":
        return _kept(fixed, axis, 0.5, bool(random_.integers(2)), empty=True), moving
    if task.alteration == "cropped":
        return fixed, _kept(moving, axis, task.amount, bool(random_.integers(2)))
    if task.alteration == "parts":
        up = int(np.argmax(np.abs(moving.image.affine[2, :3]))), int(np.argmax(np.abs(fixed.image.affine[2, :3])))
        return _kept(fixed, up[1], 0.4, True), _kept(moving, up[0], 0.4, False)
    if task.alteration in ("noise", "noisy"):
        return fixed, replace(moving, image=_noisy(moving.image, task.amount or math.inf, random_))
    if task.alteration == "mirrored":
        return fixed, _mirrored(moving, int(task.amount))
    if task.alteration == "synthetic":
        return fixed, _synthetic(fixed, task.amount, task.seed, device)
    return fixed, moving


def _inverted(image: Image) -> Image:
    """Dark tissue bright and bright tissue dark; the background stays."""
    low, high = (float(value) for value in np.percentile(image.data, (0.1, 99.9)))
    tissue = image.data > low + 0.05 * (high - low)
    return replace(image, data=np.where(tissue, (low + 1.1 * high - image.data).clip(low), low).astype(np.float32))


def _noisy(image: Image, amount: float, draw: np.random.Generator) -> Image:
    """With noise of this fraction of the range, or noise alone."""
    low, high = (float(value) for value in np.percentile(image.data, (0.1, 99.9)))
    noise = draw.normal(size=image.shape).astype(np.float32)
    if math.isinf(amount):
        return replace(image, data=(low + (high - low) * (0.5 + 0.2 * noise)).clip(low, high).astype(np.float32))
    return replace(image, data=(image.data + amount * (high - low) * noise).clip(low, high).astype(np.float32))


def _kept(one: Loaded, axis: int, share: float, first: bool, *, empty: bool = False) -> Loaded:
    """A part of a scan along an axis, cut out, or with the rest empty. Labels are cut alike, and landmarks of the rest
    are NaN."""
    side = one.image.shape[axis]
    length = max(8, round(share * side))
    part = slice(0, length) if first else slice(side - length, side)
    where = tuple(part if a == axis else slice(None) for a in range(one.image.dim))

    def cut(image: Image) -> Image:
        if empty:
            data = np.full_like(image.data, image.data.min())
            data[where] = image.data[where]
            return replace(image, data=data)
        affine = image.affine.copy()
        affine[:-1, -1] = map_points(affine, [part.start if a == axis else 0 for a in range(image.dim)])
        return replace(image, data=image.data[where], affine=affine)

    landmarks = one.landmarks
    if landmarks is not None:
        position = map_points(np.linalg.inv(one.image.affine), landmarks)[:, axis, None]
        landmarks = np.where((position >= part.start) & (position < part.stop), landmarks, np.nan)
    return Loaded(cut(one.image), None if one.labels is None else cut(one.labels), landmarks)


def _mirrored(one: Loaded, axis: int) -> Loaded:
    """Voxels in the opposite order along an axis, as if the header had exchanged the two ends."""
    matrix = np.eye(4)
    matrix[axis, axis], matrix[axis, 3] = -1, one.image.shape[axis] - 1
    world = one.image.affine @ matrix @ np.linalg.inv(one.image.affine)
    flipped = [None if i is None else replace(i, data=np.flip(i.data, axis).copy()) for i in (one.image, one.labels)]
    assert flipped[0] is not None
    points = None if one.landmarks is None else map_points(world, one.landmarks)
    return Loaded(flipped[0], flipped[1], points)


def _turned(one: Loaded, degrees: float, draw: np.random.Generator, device: torch.device) -> Loaded:
    """A scan turned about its centre around a random axis, on its own grid."""
    axis = draw.normal(size=3)
    x, y, z = math.radians(degrees) * axis / np.linalg.norm(axis)
    skew = torch.tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]], dtype=torch.float64)
    turn = torch.linalg.matrix_exp(skew).numpy()
    to_world = one.image.unit_to_world()
    centre = map_points(to_world, [0.5] * 3)
    world = np.eye(4)
    world[:3, :3], world[:3, 3] = turn, centre - turn @ centre
    unit = (np.linalg.inv(to_world) @ world @ to_world)[None, :3]
    points = None if one.landmarks is None else map_points(np.linalg.inv(world), one.landmarks)
    return replace(_resampled(one, Affine(torch.from_numpy(unit).float()), device), landmarks=points)


def _synthetic(one: Loaded, noise: float, seed: int, device: torch.device) -> Loaded:
    """A scan deformed by a random field of known displacements, up to a tenth of its sides, with noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 3, 5, 5, 5, generator=generator)
    field = torch.nn.functional.interpolate(coarse, (48,) * 3, mode="trilinear", align_corners=True)
    field = 0.04 * field + 0.04 * torch.randn(1, 3, 1, 1, 1, generator=generator)
    backward = DisplacementField(field)  # points of the moving scan → points of the fixed one
    to_world, to_unit = one.image.unit_to_world(), one.image.world_to_unit()

    def truth(points: Matrix) -> Matrix:
        unit = torch.from_numpy(map_points(to_unit, points)).float().reshape(1, -1, 3)
        return map_points(to_world, _inverse(backward, unit)[0].double().numpy()).reshape(np.shape(points))

    moved = _resampled(one, backward, device)
    points = None if one.landmarks is None else truth(one.landmarks)
    image = _noisy(moved.image, noise, np.random.default_rng(seed))
    return replace(moved, image=image, truth=truth, landmarks=points)


def _inverse(phi: Transform, points: torch.Tensor, steps: int = 30) -> torch.Tensor:
    """φ⁻¹(x), by the fixed-point iteration y ← x − (φ(y) − y), which moderate displacements allow."""
    there = points
    for _ in range(steps):
        there = points - (phi(there) - there)
    return there


def _resampled(one: Loaded, transform: Transform, device: torch.device) -> Loaded:
    """A scan and its labels through a map of unit coordinates, on their own grid."""

    def through(image: Image, mode: Any) -> Image:
        low = float(image.data.min())
        tensor = torch.from_numpy(np.ascontiguousarray(image.data, np.float32))[None, None].to(device) - low
        points = transform.to(tensor).on_grid_of(tensor)
        moved = interpolate(tensor, points, mode=mode, outside="zeros")[0, 0].cpu().numpy() + low
        return replace(image, data=moved.astype(np.float32 if mode == "linear" else image.data.dtype))

    labels = None if one.labels is None else through(one.labels, "nearest")
    return replace(one, image=through(one.image, "linear"), labels=labels)
