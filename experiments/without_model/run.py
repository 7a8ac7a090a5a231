"""Register validation pairs without a network: `carl register --model none`, as a user would type it, on the CPU.

    python experiments/without_model/run.py ../shared/data work --pairs 4 --kinds deformable ants-synquick

Brains and abdomens are ordered pairs of different subjects, in a random order with a fixed seed; hearts are the end of
diastole registered to the end of systole of the same patient. Results are written to results/val.json after every pair.
Pairs already there are skipped, so the script can be stopped and restarted. `--split train` takes the last three
training subjects instead, on which settings are chosen, and needs `--out`. The kind `ants-synquick` registers the same
pairs by ANTs (antspyx); its seconds are of the registration alone, those of `carl register` of the whole command.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.evaluation.baselines import BASELINES
from carlreg.files import world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import read, read_labels
from carlreg.files.tables import Pair
from carlreg.objective.metrics import dice, mean_score

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

RESULTS = Path(__file__).with_name("results") / "val.json"
SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
SETS = {"brain": SUBCORTICAL, "abdomen": tuple(range(1, 14)), "cardiac": (1, 2, 3), "abdomen_mr": (1, 2, 3, 6)}
KINDS = {"deformable": [], "affine": ["--transform", "affine"]}
ANTS = "ants-synquick"
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path, help="a folder for one result at a time")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["brain", "abdomen", "cardiac"])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, ANTS], default=list(KINDS))
    parser.add_argument("--pairs", type=int, help="pairs of each set (default: all)")
    parser.add_argument("--split", choices=("train", "val"), default="val")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.split == "train" and arguments.out == RESULTS:
        parser.error("the results beside this script are of validation subjects: give --out with --split train")
    arguments.work.mkdir(parents=True, exist_ok=True)
    file = arguments.out
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"rows": []}
    for name in arguments.sets:
        folder = arguments.data / name / arguments.split
        for fixed, moving in pairs(folder, name, last=3 if arguments.split == "train" else None)[: arguments.pairs]:
            for kind in arguments.kinds:
                same = {"set": name, "fixed": fixed, "moving": moving, "kind": kind}
                if any(same.items() <= row.items() for row in report["rows"]):
                    continue
                row = ants(folder, same) if kind == ANTS else register(folder, same, arguments.work / "pair")
                report |= {"machine": machine(), "seed": SEED, "torch": torch.__version__}
                report["rows"] = [*report["rows"], row]
                write_atomically(file, (json.dumps(report, indent=1) + "\n").encode())
                print(json.dumps({key: value for key, value in row.items() if key != "labels"}), flush=True)


def pairs(folder: Path, name: str, last: int | None) -> list[tuple[str, str]]:
    """Names of fixed and moving images, in a random order; with `last`, of so many last subjects only."""
    scans = sorted(path.name.removesuffix(".nii.gz") for path in folder.glob("*.nii.gz") if "_labels" not in path.name)
    subjects = sorted({scan.split("_E")[0] for scan in scans} if name == "cardiac" else scans)[-(last or 0) :]
    if len(subjects) < 2:
        sys.exit(f"{folder} has {len(subjects)} subjects; expected at least two")
    if name == "cardiac":
        both = [(f"{subject}_ES", f"{subject}_ED") for subject in subjects]
    else:
        both = [(fixed, moving) for fixed in subjects for moving in subjects if fixed != moving]
    return random.Random(SEED).sample(both, len(both))


def register(folder: Path, pair: dict[str, str], work: Path) -> dict[str, Any]:
    """Register one pair; return its time and scores."""
    shutil.rmtree(work, ignore_errors=True)
    words = [sys.executable, "-m", "carlreg", "register", "--quiet", "--device", "cpu", "--seed", str(SEED)]
    words += ["--model", "none", "-o", str(work), *KINDS[pair["kind"]]]
    for side in ("fixed", "moving"):
        words += [f"--{side}", str(folder / f"{pair[side]}.nii.gz")]
        words += [f"--{side}-seg", str(folder / f"{pair[side]}_labels.nii.gz")]
    started = time.perf_counter()
    subprocess.run(words, check=True)
    seconds = time.perf_counter() - started
    report = json.loads((work / "report.json").read_text(encoding="utf-8"))
    wanted = SETS[pair["set"]]
    scores = {when: {k: v for k, v in dice.items() if int(k) in wanted} for when, dice in report["dice"].items()}
    return {
        **pair,
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "before": mean_score(scores["before"]),
        "after": mean_score(scores["after"]),
        "labels": scores["after"],
        "start": report["look"],
        "command_seconds": round(seconds, 1),
        "seconds": report["seconds"],
        "peak_gb": report["peak_memory_gb"]["process"],
        "metrics": report["metrics"],
        "warnings": report["warnings"],
    }


def ants(folder: Path, pair: dict[str, str]) -> dict[str, Any]:
    """The same for ANTs."""
    first, second = (folder / f"{pair[side]}.nii.gz" for side in ("fixed", "moving"))
    found = BASELINES[ANTS](Pair(pair["fixed"], first, second), read(first), read(second))
    fixed, moving = (read_labels(folder / f"{pair[side]}_labels.nii.gz") for side in ("fixed", "moving"))
    warped = world_transform.apply(found.transform, moving, fixed, "nearest")
    ours, expected = (torch.from_numpy(one.data.astype("int64"))[None, None] for one in (warped, fixed))
    known = set(np.unique(fixed.data)) & set(np.unique(moving.data))
    scores = dice(ours, expected, [label for label in SETS[pair["set"]] if label in known])
    return {
        **pair,
        "commit": commit(),
        "antspyx": importlib.metadata.version("antspyx"),
        "threads": os.environ.get("ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS", os.cpu_count()),
        "after": mean_score(scores),
        "labels": scores,
        "seconds": {"registration": found.seconds},
    }


if __name__ == "__main__":
    main()
