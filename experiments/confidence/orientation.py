"""How often mirrored and turned headers are named: one scan of a pair altered, both altered alike, and neither."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.fast.devices import choose_device
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, read
from carlreg.files.orientation import to_closest_ras
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.preparation import prepare_pair
from carlreg.registration.attempt import look_at_headers
from carlreg.registration.orientation_search import Orientation
from experiments.confidence import cases
from experiments.made import commit, machine

HERE = Path(__file__).parent
MIRRORED = {"left to right": 0, "front to back": 1, "head to foot": 2}
SIDES = ("abdomen", "abdomen_mr", "lung")
"""Sets whose anatomy tells left from right."""
Matrix = np.ndarray[Any, np.dtype[np.int64]]


def alterations(name: str) -> dict[str, Matrix]:
    """Signed permutations of the axes of a scan of this set, by their names."""
    found = {}
    for axis, index in MIRRORED.items():
        if index > 0 or name in SIDES:
            found[f"mirrored {axis}"] = np.diag([-1 if a == index else 1 for a in range(3)])
        for sign in (1, -1):
            one, other = (a for a in range(3) if a != index)
            turn = np.zeros((3, 3), np.int64)
            turn[index, index], turn[one, other], turn[other, one] = 1, -sign, sign
            found[f"turned by {90 * sign}° about the axis from {axis}"] = turn
    return found


def altered(image: Image, matrix: Matrix) -> Image:
    """A scan whose voxel i is voxel M i of the given one, counted from the far end where M is negative, under a header
    that shows nothing of it."""
    new_from_old = np.abs(matrix).argmax(axis=1)  # old axis → new axis
    order = np.argsort(new_from_old)
    flipped = tuple(int(new_from_old[old]) for old in range(3) if matrix[old].sum() < 0)
    data = np.ascontiguousarray(np.flip(image.data.transpose(order), flipped))
    spacing = np.array(image.spacing)
    affine = image.affine.copy()
    affine[:-1, :-1] *= spacing[order] / spacing
    return replace(image, data=data, affine=affine)


@functools.cache
def scan(data: Path, stem: str) -> Image:
    return to_closest_ras(read(data / f"{stem}.nii.gz"))


def look(fixed: Image, moving: Image, model: LoadedModel, device: torch.device) -> Orientation:
    """As `carl register` looks into headers, on what the network sees."""
    return look_at_headers(prepare_pair(fixed, moving, model, device))


def chosen(data: Path, split: str, name: str) -> list[tuple[cases.Scan, cases.Scan]]:
    """Ordered pairs of a set, shuffled: of all its subjects, and of two phases for hearts."""
    every = dict.fromkeys(cases.TAKEN, (10**6, 10**6))
    pairs = cases.intact(cases.scans(data, every), split)[name]
    if name == "cardiac":
        pairs = [(a, b) for a, b in pairs if a.subject == b.subject]
    return random.Random(cases.SEED).sample(pairs, len(pairs))


def rows(
    data: Path, split: str, sets: Sequence[str], counts: tuple[int, int], done: set[Any], device: torch.device
) -> Iterator[dict[str, Any]]:
    """One row for each search that is not done: so many altered pairs of each set, and so many as they are. Sets take
    turns, so that every beginning is balanced."""
    model = load_model("default", device)
    pairs = {name: chosen(data, split, name) for name in sets}
    for index, name in itertools.product(range(max(counts)), sets):
        changes = alterations(name) if index < counts[0] else {}
        for pair in pairs[name][index : index + 1]:
            yield from _of_pair(data, name, pair, index, changes, done, model, device)


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about."""
    return row["set"], *row["pair"], row["altered"], row["alike"]


def _of_pair(
    data: Path,
    name: str,
    pair: tuple[cases.Scan, cases.Scan],
    index: int,
    changes: Mapping[str, Matrix],
    done: set[Any],
    model: LoadedModel,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """The pair as it is, with the moving scan altered, and for the first pair with both mirrored front to back."""
    both = [scan(data, one.stem) for one in pair]
    for what, matrix in {"nothing": np.eye(3, dtype=np.int64), **changes}.items():
        for alike in (False, True) if index == 0 and what == "mirrored front to back" else (False,):
            names = [Path(one.stem).name for one in pair]
            about = {"set": name, "pair": names, "altered": what, "alike": alike}
            if key(about) in done:
                continue
            began = time.perf_counter()
            fixed = altered(both[0], matrix) if alike else both[0]
            found = look(fixed, altered(both[1], matrix), model, device)
            truth = torch.from_numpy(matrix.T.copy()).to(found.matrix)
            yield {
                **about,
                "wrong": found.is_wrong,
                "named": found.describe() if found.is_wrong else "",
                "right": bool(torch.equal(found.matrix, truth)) and found.is_wrong,
                "similarity": [round(found.similarity, 4), round(found.given_similarity, 4)],
                "mirrored": [round(one, 4) for one in found.mirrored_similarity],
                "undecided": found.undecided,
                "seconds": round(time.perf_counter() - began, 2),
            }


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts for each set, and for all."""
    counts: dict[str, dict[str, Any]] = {}
    for name in [*dict.fromkeys(row["set"] for row in found), "all"]:
        mine = [row for row in found if name in (row["set"], "all")]
        single = [row for row in mine if row["altered"] != "nothing" and not row["alike"]]
        intact = [row for row in mine if row["altered"] == "nothing"]
        alike = [row for row in mine if row["alike"]]
        counts[name] = {
            "altered": len(single),
            "noticed": sum(row["wrong"] for row in single),
            "named_rightly": sum(row["right"] for row in single),
            "unaltered": len(intact),
            "false_alarms": sum(row["wrong"] for row in intact),
            "alike": len(alike),
            "alike_found": sum(row["wrong"] for row in alike),
        }
    return counts


def run(arguments: argparse.Namespace) -> None:
    device = choose_device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    made: dict[str, Any] = {
        "commit": commit(),
        "machine": f"{machine()}, {device.type}",
        "seed": cases.SEED,
        "split": arguments.split,
    }
    began, found = time.monotonic(), []
    if arguments.resume and arguments.out.is_file():
        earlier = json.loads(arguments.out.read_text(encoding="utf-8"))
        found, made["resumed"] = earlier["rows"], earlier["made"]
    counts, done = (arguments.pairs, arguments.unaltered), {key(row) for row in found}
    for row in rows(arguments.data, arguments.split, arguments.sets, counts, done, device):
        found.append(row)
        report = {"made": made, "summary": summary(found), "rows": found}
        write_atomically(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
        if time.monotonic() - began > arguments.seconds:
            break
    print(json.dumps(summary(found), indent=1))
