"""What the ladder gains: pairs registered once, and then by the other ways wherever the verdict is not good."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.fast.devices import choose_device
from carlreg.files import world_transform
from carlreg.files.atomic import write_atomically
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.registration.attempt import Attempt, attempt, climb, is_calibrated, with_orientation
from carlreg.registration.case import Case
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.progress import Progress
from experiments.confidence.cases import LABELS, Loaded, Task, plan, prepare
from experiments.confidence.collect import accelerator, append, named, on_labels, on_landmarks, turns, work
from experiments.confidence.fit import TRE
from experiments.made import commit, machine

HERE = Path(__file__).parent
KINDS = (
    "plain",
    "turned by 90°",
    "turned by 20 to 60°",
    "contrast, LNCC forced",
    "contrast, SSD forced",
    "CT and MR, SSD forced",
    "half empty",
    "cropped",
    "noisy",
)
"""Pairs of common anatomy, most of which should not fail."""
WORSE = 0.02
"""A result got worse if its Dice is lower by more than this, or its landmarks are further off by a millimetre."""


def run(arguments: argparse.Namespace) -> None:
    """Register pairs in so many processes, and write a row for each; or sum up the rows."""
    if arguments.summarise:
        report(arguments.rows)
        return
    if not is_calibrated(load_model(arguments.model, "cpu")):
        raise SystemExit("the model has no calibration: run collect and fit first")
    if work(arguments, arguments.mps):
        report(arguments.rows)
        return
    device = choose_device(arguments.device)
    model = replace(load_model(arguments.model, device), graphs=None)
    tasks = [task for task in plan(arguments.data) if task.split == "val" and task.kind in KINDS][: arguments.limit]
    for number in turns(arguments, len(tasks)):
        task = tasks[number]
        row = {"commit": commit(), "machine": f"{machine()}, {accelerator(device)}", **named(task)}
        try:
            row |= compare(arguments.data, task, model, device)
        except Exception as error:  # one pair must not end the run; the row has the reason
            row["error"] = f"{type(error).__name__}: {error}"
        append(arguments.rows, row)


def compare(data: Path, task: Task, model: LoadedModel, device: torch.device) -> dict[str, Any]:
    """One row: verdict, truth and time of the first way and of the best one."""
    fixed, moving = prepare(data, task, device)
    options = RegisterOptions(device=str(device), **dict(task.options))
    case = Case.read(PairInputs(fixed=fixed.image, moving=moving.image), options)
    began, work = time.perf_counter(), Progress()
    first = attempt("the network", model, case, options, work, device=device)
    once = time.perf_counter() - began
    first = with_orientation(first, options, work, case)
    best = climb(first, options, work, None, device=device, case=case)
    every = time.perf_counter() - began
    assert best.confidence is not None
    return {
        "first": _described(task, fixed, moving, case, first, device),
        "best": _described(task, fixed, moving, case, best, device),
        "way": best.way,
        "tried": list(best.confidence.tried),
        "seconds": {"first": round(once, 3), "all": round(every, 3)},
    }


def _described(
    task: Task, fixed: Loaded, moving: Loaded, case: Case, made: Attempt, device: torch.device
) -> dict[str, Any]:
    world = made.solution.transform
    if made.case.initial is not None:
        world = world_transform.compose(made.case.initial, world, case.fixed)

    def after(points: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(world(points.cpu().numpy()))).to(points)

    scores: dict[str, float] = {}
    if fixed.labels is not None and moving.labels is not None and task.set in LABELS:
        scores |= on_labels(task, fixed.labels, moving.labels, after, device)[0]
    scores |= on_landmarks(fixed, moving, after, device)[0]
    assert made.confidence is not None
    return {"verdict": made.confidence.verdict, "probability": made.probability, **scores}


def failed(row: Mapping[str, Any], one: Mapping[str, Any], medians: Mapping[str, float]) -> bool:
    """By the definition of the calibration's failures."""
    worse = one.get("dice_after", 1.0) < max(one.get("dice_before", 0.0), medians.get(row["set"], 0.0) / 2)
    return bool(worse or one.get("tre_mm", 0.0) > TRE)


def summary(rows: Sequence[Mapping[str, Any]], medians: Mapping[str, float]) -> dict[str, Any]:
    """What the ladder changed, over all pairs and for each kind."""
    found: dict[str, Any] = {}
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        mine = [row for row in rows if kind in (row["kind"], "all")]
        before, after = ([failed(row, row[when], medians) for row in mine] for when in ("first", "best"))
        worse = [
            row["best"].get("dice_after", 0.0) < row["first"].get("dice_after", 0.0) - WORSE
            or row["best"].get("tre_mm", 0.0) > row["first"].get("tre_mm", 0.0) + 1.0
            for row in mine
        ]
        found[kind] = {
            "pairs": len(mine),
            "climbed": sum(bool(row["tried"]) for row in mine),
            "failed_before": sum(before),
            "failed_after": sum(after),
            "mended": sum(a and not b for a, b in zip(before, after, strict=True)),
            "mended_and_good": sum(
                a and not b and row["best"]["verdict"] == "good" for a, b, row in zip(before, after, mine, strict=True)
            ),
            "worse": sum(worse),
            "median_time": median(row["seconds"]["all"] / row["seconds"]["first"] for row in mine),
        }
    return found


def report(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    medians = json.loads((HERE / "results.json").read_text(encoding="utf-8"))["medians"]
    known = [row for row in rows if "error" not in row]
    made = {name: rows[0][name] for name in ("commit", "machine")} | {"seed": 0, "errors": len(rows) - len(known)}
    found = {"made": made, "summary": summary(known, medians)}
    write_atomically(HERE / "ladder.json", (json.dumps(found | {"rows": known}, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))
