"""Register pairs, gather all evidence about each result, and compare with the truth: one JSON line a pair."""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.confidence.error_map import smooth
from carlreg.confidence.gather import Answer, Budget, Gathered, gather
from carlreg.confidence.numbers import SMOOTH
from carlreg.fast.devices import choose_device
from carlreg.files.images import Image, Matrix, map_points
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.metrics import dice, mean_score, surface
from carlreg.preparation import PreparedPair, prepare_pair
from carlreg.registration.attempt import look_at_headers
from carlreg.registration.options import RegisterOptions
from carlreg.registration.progress import Progress
from carlreg.registration.solve import Maps, solve
from experiments.confidence.cases import LABELS, Loaded, Task, plan, prepare
from experiments.made import machine

SIDE = 144
"""Voxels a side, at most, of the grid on which labels are compared."""
POINTS = 100
"""Points of each pair at which local evidence and local truth are kept."""
SAMPLES = 600
"""Points, at most, of each surface whose distance from the other one is measured."""
AROUND = 16
"""How many of them around a point its local error is averaged over: single voxels of a surface are off by chance."""
LEAST_LANDMARKS = 10
GRACE = 30.0
"""Seconds after which workers that are not done in time are ended."""
MOST_REPLACED = 8
"""How many workers that died are replaced, at most."""
MOST_KEPT = 6 * 2**30
"""Bytes of a GPU's memory that a worker keeps for its next pair, at most."""
PointMap = Callable[[Tensor], Tensor]
"""World points (..., 3) of the fixed image to those of the moving one, in float64."""


# ---- workers --------------------------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace, mps: bool = False) -> bool:
    """Start as many workers as were asked for, and wait until they are done or time is up; False in a worker, and if
    there is one process only. A worker that dies is replaced."""
    if arguments.workers <= 1 or arguments.turns is not None:
        if arguments.turns is not None:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.workers))
        return False
    until = time.time() + arguments.seconds
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        shared_gpu(Path(folder), wanted=mps) as environment,
    ):
        turn = Path(folder) / "turn"
        turn.touch()
        environment = environment | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.workers))}
        words = [sys.executable, *sys.argv, "--turns", str(turn), "--until", str(until)]
        started = [subprocess.Popen(words, env=environment) for _ in range(arguments.workers)]
        left = MOST_REPLACED
        while started and time.time() < until + GRACE:
            time.sleep(0.2)
            died = [one for one in started if one.poll() not in (None, 0)]
            started = [one for one in started if one.poll() is None]
            for one in died:
                print(f"a worker ended with {one.returncode}", file=sys.stderr)
                if left and time.time() < until - GRACE:
                    left -= 1
                    started.append(subprocess.Popen(words, env=environment))
        for one in started:
            one.kill()
            one.wait()
    return True


@contextlib.contextmanager
def shared_gpu(folder: Path, *, wanted: bool) -> Iterator[dict[str, str]]:
    """The environment of processes that share a GPU. With NVIDIA's multi-process service their kernels run side by side
    instead of in turns; without it if it is not wanted, not there, or does not work."""
    plain, control = dict(os.environ), shutil.which("nvidia-cuda-mps-control")
    if not wanted or control is None:
        print("each process has the GPU in turns", file=sys.stderr)
        yield plain
        return
    environment = plain | {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/mps", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    for name in ("mps", "log"):
        (folder / name).mkdir()
    trial = [sys.executable, "-c", "import torch; assert float(torch.ones(9, device='cuda').sum()) == 9"]
    try:
        none = subprocess.DEVNULL  # so that nothing waits for the end of what the service might print
        subprocess.run([control, "-d"], env=environment, timeout=60, check=True, stdin=none, stdout=none, stderr=none)
        subprocess.run(trial, env=environment, timeout=60, check=True)
        works = True
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the multi-process service does not work here: {error}", file=sys.stderr)
        works = False
    try:
        yield environment if works else plain
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([control], input="quit\n", text=True, env=environment, timeout=20)


def turns(arguments: argparse.Namespace, count: int) -> Iterator[int]:
    """Numbers below a count in order, each for one worker only, until time is up."""
    until = arguments.until if arguments.turns is not None else time.time() + arguments.seconds
    numbers = itertools.count() if arguments.turns is None else iter(lambda: _next(arguments.turns), None)
    while time.time() < until and (number := next(numbers)) < count:
        yield number


def _next(path: Path) -> int:
    with path.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # until the file is closed
        number = int(file.read() or 0)
        file.seek(0)
        file.write(str(number + 1))
    return number


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to a file that several workers write."""
    with path.open("ab", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        file.write(json.dumps(row).encode() + b"\n")


def is_lost(error: Exception) -> bool:
    """Whether an error leaves the process without a GPU."""
    return "CUDA error" in str(error) or "CUDA driver" in str(error)


# ---- rows -----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Collect rows in so many processes, until all tasks are done or time is up."""
    if work(arguments, arguments.mps):
        print(sum_up(arguments.out), file=sys.stderr)
        return
    device = choose_device(arguments.device)
    # Pairs have many shapes, so that captured networks would not be repeated often enough to pay.
    models = {name: replace(load_model(name, device), graphs=None) for name in (arguments.model, "none")}
    models["default"] = models[arguments.model]
    models["untrained"] = _untrained(models["default"])
    tasks = [task for task in plan(arguments.data) if not arguments.sets or task.set in arguments.sets]
    tasks = [task for task in tasks if not arguments.kinds or task.kind in arguments.kinds]
    tasks = [task for task in tasks if arguments.split in (None, task.split)][: arguments.limit]
    done = _done(arguments.out) if arguments.resume else set()
    where = f"{machine()}, {accelerator(device)}"
    for number in turns(arguments, len(tasks)):
        if number in done:
            continue
        task, lost = tasks[number], False
        try:
            row = collect(arguments.data, task, models, device)
        except Exception as error:  # one pair must not end the run; the row has the reason
            row, lost = named(task) | {"error": f"{type(error).__name__}: {error}"}, is_lost(error)
        append(arguments.out, {"number": number, "machine": where, **row})
        if lost:
            sys.exit(1)
        if device.type == "cuda" and torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _done(path: Path) -> set[int]:
    return {row["number"] for row in _rows(path)}


def sum_up(path: Path) -> str:
    """How many rows there are, and what went wrong."""
    rows = _rows(path)
    errors = [row["error"] for row in rows if "error" in row]
    return f"{len(rows)} rows, {len(errors)} of them errors{': ' if errors else ''}{'; '.join(sorted(set(errors))[:5])}"


def accelerator(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _untrained(model: LoadedModel) -> LoadedModel:
    """The same architecture with random weights."""
    torch.manual_seed(0)
    network = copy.deepcopy(model.network)
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    return replace(model, network=network)


def named(task: Task) -> dict[str, Any]:
    """What identifies a task in a row."""
    return {
        "kind": task.kind,
        "set": task.set,
        "split": task.split,
        "fixed": task.fixed.stem,
        "moving": task.moving.stem,
        "subjects": [task.fixed.subject, task.moving.subject],
        "amount": task.amount,
        "network": task.network,
        "no_common_anatomy": task.no_common_anatomy,
    }


def collect(data: Path, task: Task, models: dict[str, LoadedModel], device: torch.device) -> dict[str, Any]:
    """One row: the evidence about a pair, and the truth."""
    began = time.perf_counter()
    fixed, moving = prepare(data, task, device)
    model = models[task.network]
    pair = prepare_pair(fixed.image, moving.image, model, device)
    model = model.on_grid(pair.fixed.tensor.shape[2:])
    options = RegisterOptions(device=str(device), **dict(task.options))
    prepared, work = time.perf_counter(), Progress()
    corner = Image(np.zeros((4, 4, 4), np.uint8), fixed.image.affine)  # the map of the world is not needed here
    solution = solve(model, pair, options, corner, work)
    seconds = work.seconds()["total"]
    assert solution.maps is not None
    none = task.network == "none"
    answer = Answer(
        pair,
        solution.maps,
        None if none else model.network,
        None if none else solution.first,
        [] if solution.optimization is None else solution.optimization.result.losses,
    )
    times = [time.perf_counter()]
    found = gather(answer, Budget.of(seconds, 0.0, full=True))
    times.append(time.perf_counter())
    gain = look_at_headers(pair).gain
    found = replace(found, evidence=replace(found.evidence, misorientation=gain))
    times.append(time.perf_counter())
    truth, points = _compare(task, fixed, moving, pair, solution.maps, found)
    return named(task) | {
        "model": "none" if none else model.provenance["sha256"],
        "io_sim": solution.io_sim,
        "evidence": {name: float(f"{value:.5g}") for name, value in found.evidence.to_json().items()},
        "features": None if found.features is None else [[round(v, 4) for v in one.tolist()] for one in found.features],
        **truth,
        "points": points,
        "seconds": {
            "preparation": round(prepared - began, 3),
            "registration": seconds,
            "evidence": round(times[1] - times[0], 3),
            "headers": round(times[2] - times[1], 3),
            "all": round(time.perf_counter() - began, 3),
        },
    }


def _compare(
    task: Task, fixed: Loaded, moving: Loaded, pair: PreparedPair, maps: Maps, found: Gathered
) -> tuple[dict[str, float], dict[str, list[float]] | None]:
    """Dice and surface distances of labels, errors of landmarks and of synthetic truth, before and after; and local
    evidence beside local truth at some points."""

    device = pair.fixed.tensor.device

    def after(points: Tensor) -> Tensor:
        unit = _mapped(pair.fixed.image.world_to_unit(), points).float()
        there = maps[0].to(unit)(unit.reshape(1, -1, 3))[0].double()
        return _mapped(pair.moving.image.unit_to_world(), there).reshape(points.shape)

    if task.no_common_anatomy:
        return {}, None
    scores, where, errors = on_landmarks(fixed, moving, after, device)
    if moving.truth is not None:
        inside = fixed.image.data > np.percentile(fixed.image.data, 50)
        chosen = np.random.default_rng(task.seed).choice(np.flatnonzero(inside), 2 * POINTS)
        points = map_points(fixed.image.affine, np.stack(np.unravel_index(chosen, inside.shape), axis=-1))
        where = points[_inside(moving.image, moving.truth(points))][:POINTS]
        truth = moving.truth(where)
        errors = _missed(where, truth, after, device)
        scores["true_error_mm"] = float(errors.mean())
        scores["true_error_before_mm"] = float(np.linalg.norm(where - truth, axis=-1).mean())
    if fixed.labels is not None and moving.labels is not None and task.set in LABELS:
        more, *local_truth = on_labels(task, fixed.labels, moving.labels, after, device)
        scores |= more
        if moving.truth is None:
            where, errors = local_truth
    if not len(where):
        return scores, None
    unit = torch.from_numpy(map_points(pair.fixed.image.world_to_unit(), where)).float()
    local = sample(found.local, unit.to(device))
    return scores, local | {"truth": [round(float(mm), 3) for mm in errors]}


def on_landmarks(
    fixed: Loaded, moving: Loaded, after: PointMap, device: torch.device
) -> tuple[dict[str, float], Matrix, Matrix]:
    """Errors of landmarks, and where they are; those that an alteration has removed from a scan do not count."""
    if fixed.landmarks is None or moving.landmarks is None:
        return {}, np.zeros((0, 3)), np.zeros(0)
    seen = _inside(moving.image, moving.landmarks) & _inside(fixed.image, fixed.landmarks)
    here, there = fixed.landmarks[seen], moving.landmarks[seen]
    if len(here) < LEAST_LANDMARKS:
        return {}, np.zeros((0, 3)), np.zeros(0)
    apart = _missed(here, there, after, device)
    before = float(np.linalg.norm(here - there, axis=-1).mean())
    return {"tre_before_mm": before, "tre_mm": float(apart.mean())}, here, apart


def _missed(points: Matrix, truth: Matrix, after: PointMap, device: torch.device) -> Matrix:
    there = after(torch.from_numpy(points).double().to(device)).cpu().numpy()
    return np.asarray(np.linalg.norm(there - truth, axis=-1))


def sample(local: Mapping[str, Tensor], unit: Tensor) -> dict[str, list[float]]:
    """Maps, and the same averaged over windows, at unit points (N, 3)."""
    found = {}
    for shape in sorted({tuple(one.shape) for one in local.values()}):
        names = [name for name, one in local.items() if tuple(one.shape) == shape]
        maps = torch.stack([local[name].float() for name in names])
        for prefix, window in {"": 0.0, **SMOOTH}.items():
            values = interpolate((smooth(maps, window) if window else maps)[None], unit[None])[0]
            for name, row in zip(names, values.tolist(), strict=True):
                found[prefix + name] = [float(f"{value:.3g}") for value in row]
    return found


def _inside(image: Image, points: Matrix) -> npt.NDArray[np.bool_]:
    """Whether world points lie inside an image; those that are NaN do not."""
    unit = map_points(image.world_to_unit(), points)
    return np.asarray(((unit >= 0) & (unit <= 1)).all(-1))


def on_labels(
    task: Task, fixed: Image, moving: Image, after: PointMap, device: torch.device
) -> tuple[dict[str, float], Matrix, Matrix]:
    """Scores of labels on a coarse grid, and points on surfaces of the fixed labels with mean distances around."""
    shape = tuple(min(n, SIDE) for n in fixed.shape)
    spacing = [mm * (n - 1) / max(m - 1, 1) for mm, n, m in zip(fixed.spacing, fixed.shape, shape, strict=True)]
    world = _mapped(fixed.unit_to_world(), voxel_points(torch.empty(1, 1, *shape, device=device))[0].double())
    here = _at(fixed, world)
    labels = [label for label in LABELS[task.set] if bool((here == label).any()) and (moving.data == label).any()]
    scores: dict[str, float] = {}
    for when, points in (("before", world), ("after", after(world))):
        there = _at(moving, points)
        if task.alteration == "half empty":
            there = torch.where(_not_empty(fixed, world), there, 0)
        scores[f"dice_{when}"] = mean_score(dice(there, here, labels))
    generator = torch.Generator().manual_seed(task.seed)
    step = torch.tensor(spacing, device=device)
    where, errors, distances = [], [], []
    for label in labels:
        mine, other = (surface(one == label).nonzero() for one in (here, there))
        if not len(other):
            continue
        chosen, back = (each[torch.randperm(len(each), generator=generator)[:SAMPLES]] for each in (mine, other))
        out = _nearest(chosen * step, other * step)
        both = (float(out.mean()), len(mine)), (float(_nearest(back * step, mine * step).mean()), len(other))
        distances.append(sum(mm * count for mm, count in both) / (len(mine) + len(other)))
        first = chosen[: POINTS // len(labels)]
        around = torch.cdist(first * step, chosen * step).topk(min(AROUND, len(chosen)), largest=False).indices
        where.append(world[tuple(first.T)].cpu().numpy())
        errors.append(out[around].mean(1).cpu().numpy())
    scores["surface_after_mm"] = mean_score(dict(enumerate(distances)))
    kept = (np.concatenate(where), np.concatenate(errors)) if where else (np.zeros((0, 3)), np.zeros(0))
    return {name: value for name, value in scores.items() if math.isfinite(value)}, *kept


def _nearest(points: Tensor, others: Tensor) -> Tensor:
    """The distance of each of N points to the nearest of M others."""
    return torch.cdist(points.float(), others.float()).amin(1)


def _mapped(matrix: npt.NDArray[Any], points: Tensor) -> Tensor:
    """Points (..., D) through a homogeneous matrix, on their device."""
    homogeneous = torch.from_numpy(matrix).to(points)
    return points @ homogeneous[:-1, :-1].mT + homogeneous[:-1, -1]


def _not_empty(labels: Image, world: Tensor) -> Tensor:
    """Whether points lie in the part of the fixed scan that was not emptied, judging by the extent of its labels."""
    box = np.argwhere(labels.data > 0)
    if not len(box):
        return torch.ones(1, 1, *world.shape[:-1], dtype=torch.bool, device=world.device)
    index = _mapped(np.linalg.inv(labels.affine), world)
    low, high = (torch.from_numpy(corner).to(index) for corner in (box.min(0) - 1, box.max(0) + 1))
    return ((index >= low) & (index <= high)).all(-1)[None, None]


def _at(labels: Image, world: Tensor) -> Tensor:
    """(1, 1, *shape): labels at points, by the nearest voxel; 0 outside."""
    index = _mapped(np.linalg.inv(labels.affine), world).round().long()
    last = torch.tensor(labels.shape, device=world.device) - 1
    inside = ((index >= 0) & (index <= last)).all(-1)
    data = torch.from_numpy(labels.data.astype(np.int64)).to(world.device)
    clamped = torch.minimum(index.clamp(min=0), last)
    return torch.where(inside, data[tuple(clamped.movedim(-1, 0))], 0)[None, None]
