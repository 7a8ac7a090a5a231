"""Register pairs, gather all evidence about each result, and compare with the truth: one JSON line a pair."""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.confidence.error_map import smooth
from carlreg.confidence.gather import Answer, Budget, Gathered, gather
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
POINTS = 120
"""Points of each pair at which local evidence and local truth are kept."""
SAMPLES = 600
"""Points, at most, of each surface whose distance from the other one is measured."""
AROUND = 16
"""How many of them around a point its local error is averaged over: single voxels of a surface are off by chance."""
LEAST_LANDMARKS = 10
PointMap = Callable[[Tensor], Tensor]
"""World points (..., 3) of the fixed image to those of the moving one, in float64."""


def work_of(arguments: argparse.Namespace) -> slice | None:
    """Which of the tasks are this process's; None once so many others have done them all."""
    if arguments.workers > 1:
        words = [sys.executable, *sys.argv, "--worker"]
        work = [
            subprocess.Popen([*words, f"{index}/{arguments.workers}", "--workers", "1"])
            for index in range(arguments.workers)
        ]
        codes = [one.wait() for one in work]
        if any(codes):
            sys.exit(f"workers ended with {codes}")
        return None
    index, of = map(int, arguments.worker.split("/"))
    if of > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // of))
    return slice(index, None, of)


def run(arguments: argparse.Namespace) -> None:
    """Collect rows in so many processes, until all tasks are done or time is up."""
    mine = work_of(arguments)
    if mine is None:
        return
    began = time.monotonic()
    device = choose_device(arguments.device)
    models = {"default": load_model(arguments.model, device), "none": load_model("none", device)}
    models["untrained"] = _untrained(models["default"])
    tasks = [task for task in plan(arguments.data) if not arguments.sets or task.set in arguments.sets]
    tasks = [task for task in tasks if not arguments.kinds or task.kind in arguments.kinds]
    done = _done(arguments.out) if arguments.resume else set()
    for number, task in list(enumerate(tasks[: arguments.limit]))[mine]:
        if number in done:
            continue
        if time.monotonic() - began > arguments.seconds:
            break
        try:
            row = collect(arguments.data, task, models, device)
        except Exception as error:  # one pair must not end the run; the row has the reason
            row = named(task) | {"error": f"{type(error).__name__}: {error}"}
        row = {"number": number, "machine": f"{machine()}, {accelerator(device)}", **row}
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _done(path: Path) -> set[int]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {json.loads(line)["number"] for line in lines}


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
    work = Progress()
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
    judged = time.perf_counter()
    found = gather(answer, Budget.of(seconds, 0.0, full=True))
    gain = look_at_headers(pair).gain
    found = replace(found, evidence=replace(found.evidence, misorientation=gain))
    judged = time.perf_counter() - judged
    truth, points = _compare(task, fixed, moving, pair, solution.maps, found)
    return named(task) | {
        "model": "none" if none else model.provenance["sha256"],
        "io_sim": solution.io_sim,
        "evidence": {name: float(f"{value:.5g}") for name, value in found.evidence.to_json().items()},
        "features": None if found.features is None else [[round(v, 4) for v in one.tolist()] for one in found.features],
        **truth,
        "points": points,
        "seconds": {"registration": seconds, "evidence": round(judged, 3), "all": time.perf_counter() - began},
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
    local = {name: _sample(values, unit) for name, values in found.local.items()}
    local |= {f"smooth_{name}": _sample(smooth(values), unit) for name, values in found.local.items()}
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


def _sample(values: Tensor, unit: Tensor) -> list[float]:
    sampled = interpolate(values[None, None].float(), unit[None].to(values.device))[0, 0]
    return [float(f"{value:.4g}") for value in sampled.tolist()]


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
