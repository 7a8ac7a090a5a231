"""Measure what `carl register` gives by default: seconds, memory, Dice, folds, and whether two runs have the same bits.

    PYTHONPATH=src python benchmarks/answer.py DATA --out benchmarks/results/answer-gpu.json --work /tmp/answer

DATA has `brain/val`, `abdomen/val` and `hippocampus/val`, each with NAME.nii.gz and NAME_labels.nii.gz. Dice is of the
network alone, after optimisation of the fields on at most 96 voxels a side, and as by default, for the first `--pairs`
pairs of neighbours in each list of subjects. Results are written after every part; `--seconds` starts nothing later.

The part "weights" compares the fields with the network's weights, as in the paper, and with both, one after the other.
The part "others" runs ANTs and greedy on the same pairs of brains and abdomens, with settings for a quick answer and
for a better one; it has to be asked for:

    PYTHONPATH=src python benchmarks/answer.py DATA --out answer-others.json --work /tmp/answer --parts others
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.evaluation.baselines import ants, greedy
from carlreg.fast.devices import choose_device
from carlreg.files import world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.tables import Pair
from carlreg.files.world_transform import PointMap, folds_percent, jacobian_determinant
from carlreg.geometry.transforms import Identity
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.fields import optimize_fields
from carlreg.objective.metrics import mean_score
from carlreg.registration import solve
from carlreg.registration.api import Alignment, align_pair
from carlreg.registration.case import Case, score
from carlreg.registration.options import Optimize, PairInputs, RegisterOptions
from carlreg.registration.progress import Progress
from carlreg.registration.similarity import compare

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments.made import commit, machine

SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
SETS = {"brain": SUBCORTICAL, "abdomen": tuple(range(1, 14)), "hippocampus": (1, 2)}
LIST = 20
SIDE = 192
RUNS = 3
Files = tuple[Path, Path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="a folder for results, emptied at the end")
    parser.add_argument("--commit", help="the commit that is measured (default: of this checkout)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="default")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of each set for Dice")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "others"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of the part dice")
    parser.add_argument("--others", nargs="+", choices=OTHERS, default=list(OTHERS), help="programs of the part others")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no part after this time")
    arguments = parser.parse_args()
    begin, device = time.monotonic(), choose_device(arguments.device)
    report: dict[str, Any] = {"commit": arguments.commit or commit(), "machine": name_of(device), "seed": 0}
    report |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "model": arguments.model}
    model = load_model(arguments.model, device)
    bench = Bench(arguments.data, arguments.work, model, arguments.model, str(device), arguments.pairs)
    bench.kinds, bench.others = arguments.kinds, arguments.others
    report["sha256"] = model.provenance.get("sha256")
    for name in arguments.parts:
        for row in PARTS[name](bench):
            report.setdefault(name, []).append(row)
            print(name, json.dumps(row), flush=True)
            write_atomically(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
            if time.monotonic() - begin > arguments.seconds:
                print("out of time", flush=True)
                shutil.rmtree(arguments.work, ignore_errors=True)
                return
    shutil.rmtree(arguments.work, ignore_errors=True)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else machine()


class Bench:
    """The pairs, and the model that registers them."""

    kinds: Sequence[str]
    others: Sequence[str]

    def __init__(self, data: Path, work: Path, model: LoadedModel, name: str, device: str, count: int) -> None:
        self.data, self.work, self.model, self.name, self.device, self.count = data, work, model, name, device, count

    def files(self, name: str) -> list[Files]:
        """(fixed, moving): each subject with the next one of the list, the last with the first."""
        scans = sorted(p for p in (self.data / name / "val").glob("*.nii.gz") if "_labels" not in p.name)
        return list(zip(scans, scans[1:] + scans[:1], strict=True))

    def inputs(self, files: Files) -> PairInputs:
        fixed, moving = files
        return PairInputs(fixed=fixed, moving=moving, fixed_seg=labels_of(fixed), moving_seg=labels_of(moving))

    def align(
        self, files: Files, steps: int | None = None, finest: int = solve.FINEST[3], optimize: Optimize = "auto"
    ) -> tuple[Alignment, Progress]:
        """Without results on a disk; `steps` of 0 are the network alone."""
        work, usual = Progress(), solve.FINEST[3]
        options = RegisterOptions(device=self.device, io_iterations=steps, optimize=optimize, confidence="off")
        options = replace(options, allow_identity=steps != 0)
        solve.FINEST[3] = finest
        try:
            return align_pair(self.inputs(files), self.model, options, work), work
        finally:
            solve.FINEST[3] = usual

    def command(self, *words: str | Path) -> float:
        """Seconds of a whole command, without the verdict."""
        every = [sys.executable, "-m", "carlreg", "register", *words, "--model", self.name, "--device", self.device]
        every += ["--confidence", "off"]
        begin = time.perf_counter()
        subprocess.run([*map(str, every), "--quiet", "--overwrite"], check=True)
        return time.perf_counter() - begin


def labels_of(path: Path) -> Path:
    return path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz"))


def times(bench: Bench) -> Iterator[dict[str, Any]]:
    """Network and optimisation of one brain pair, with whatever is on the device already; the same bits twice."""
    files = bench.files("brain")[0]
    found, rows = [], []
    for _ in range(RUNS + 1):
        alignment, work = bench.align(files)
        found.append(alignment.transform.displacement)
        rows.append(work.seconds())
    middle = {part: statistics.median(row[part] for row in rows[1:]) for part in ("network", "optimisation")}
    same = all(np.array_equal(found[0], one) for one in found)
    yield {"seconds": middle, "first": rows[0], "same_bits": same, "pair": [path.name for path in files]}


def memory(bench: Bench) -> Iterator[dict[str, Any]]:
    """The most memory that fields of 192³ need, beside the images."""
    if bench.device == "cpu":
        return
    torch.manual_seed(0)
    fixed, moving = (torch.rand(1, 1, *(SIDE // 4,) * 3, device=bench.device) for _ in range(2))
    fixed, moving = (torch.nn.functional.interpolate(one, (SIDE,) * 3, mode="trilinear") for one in (fixed, moving))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimize_fields(Identity(), Identity(), moving, fixed, steps=2, coarse_steps=2)
    yield {"side": SIDE, "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3)}


def commands(bench: Bench) -> Iterator[dict[str, Any]]:
    """Whole commands for one brain pair: the second finds compiled kernels."""
    fixed, moving = bench.files("brain")[0]
    words = ("--fixed", fixed, "--moving", moving, "-o", bench.work / "one")
    seconds = [round(bench.command(*words), 2) for _ in range(2)]
    size = sum(path.stat().st_size for path in (bench.work / "one").rglob("*") if path.is_file())
    parts = json.loads((bench.work / "one" / "report.json").read_text(encoding="utf-8"))["seconds"]
    yield {"first_s": seconds[0], "seconds": seconds[1], "parts": parts, "folder_mb": round(size / 1e6, 1)}


def lists(bench: Bench) -> Iterator[dict[str, Any]]:
    """A list of pairs of brains, everything written."""
    files = bench.files("brain")
    both = [(fixed, moving) for shift in range(len(files)) for (fixed, _), (_, moving) in zip(
        files, files[shift:] + files[:shift], strict=True) if fixed != moving][:LIST]  # fmt: skip
    table = bench.work / "pairs.csv"
    bench.work.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["name", "fixed", "moving"])
        rows.writerows(
            [f"pair{n}", os.path.abspath(fixed), os.path.abspath(moving)] for n, (fixed, moving) in enumerate(both)
        )
    seconds = bench.command("--pairs", table, "-o", bench.work / "list")
    yield {"pairs": len(both), "seconds": round(seconds, 1), "each": round(seconds / len(both), 2)}


def dice(bench: Bench) -> Iterator[dict[str, Any]]:
    """Network alone, fields on at most 96 voxels a side, and the default; folds of the latter."""
    for name in SETS:
        for files in bench.files(name)[: bench.count]:
            row: dict[str, Any] = {"set": name, "pair": [path.name for path in files]}
            for kind in bench.kinds:
                alignment, work = bench.align(files, **KINDS[kind])
                row["before"], row[kind] = scored(name, alignment.case, alignment.transform)
            row["folds_percent"] = folds_percent(jacobian_determinant(alignment.transform, alignment.case.fixed))
            yield row | {"seconds": work.seconds(), "warnings": work.warnings}


def scored(name: str, case: Case, transform: PointMap) -> tuple[float, float]:
    """Mean Dice before and after."""
    scores = score(case, lambda points: points, transform)[1]
    before, after = ({k: v for k, v in scores[when].items() if k in SETS[name]} for when in ("before", "after"))
    return round(mean_score(before), 4), round(mean_score(after), 4)


def weights(bench: Bench) -> Iterator[dict[str, Any]]:
    """Seconds of the optimisation and Dice: of the network's weights, and of the fields after them."""
    for name in ("brain", "abdomen"):
        for files in bench.files(name)[: bench.count]:
            alignment, work = bench.align(files, optimize="weights")
            made, case = alignment.made, alignment.case
            row: dict[str, Any] = {"set": name, "pair": [path.name for path in files]}
            row |= {"weights": scored(name, case, alignment.transform)[1], "weights_s": work.seconds()["optimisation"]}
            assert made.solution.maps is not None
            network, begin = made.model.on_grid(made.pair.fixed.tensor.shape[2:]).network, time.perf_counter()
            comparison = compare(RegisterOptions(device=bench.device), made.solution.maps[0], made.pair)
            found = solve._optimize(network, made.solution.maps, comparison, made.pair, "fields", None)
            phi = found.result.transform.map_tensors(lambda tensor: tensor.detach().float().cpu())
            row["fields_after_s"] = round(time.perf_counter() - begin, 2)
            images = made.pair.fixed.image, made.pair.moving.image
            row["fields_after"] = scored(name, case, world_transform.to_world(phi, *images, grid=case.fixed))[1]
            yield row


def others(bench: Bench) -> Iterator[dict[str, Any]]:
    """Other programs on this machine's CPU: Dice, and seconds of the registration alone."""
    for other in bench.others:
        for name in ("brain", "abdomen"):
            for files in bench.files(name)[: bench.count]:
                inputs = bench.inputs(files)
                case = Case.read(inputs)
                found = OTHERS[other](Pair("pair", *files), case.fixed, case.moving)
                row = {"program": other, "set": name, "pair": [path.name for path in files]}
                after = scored(name, case, found.transform)[1]
                yield row | {"dice": after, "seconds": round(found.seconds, 1)}


KINDS: dict[str, dict[str, Any]] = {"network": {"steps": 0}, "fields_96": {"finest": 96}, "default": {}}
OTHERS = {
    "ANTs SyNQuick": ants("antsRegistrationSyNQuick[s]"),
    "greedy": greedy(),
    "greedy, five times the steps": greedy("500x250x50"),
    "ANTs SyN": ants("SyN"),
}


PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "times": times,
    "memory": memory,
    "commands": commands,
    "lists": lists,
    "dice": dice,
    "weights": weights,
    "others": others,
}

if __name__ == "__main__":
    main()
