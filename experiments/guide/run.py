"""Correct a registration by hand, in the way a user would: `carl register`, then again with `--guide`.

    python experiments/guide/run.py --data DATA

For each pair of validation abdomens, the organ that fits worst among the compact ones is "clicked" at three places that
are easy to find in both scans: its centre and the centres of its upper and lower ends, taken from the label maps. The
second registration differs from the first by these points alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.files import images
from carlreg.files.images import Image, Matrix, map_points
from carlreg.model.files import read_metadata
from carlreg.model.loaded import find_model

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

PAIRS = (("20", "21"), ("22", "23"))
COMPACT = {1: "spleen", 2: "right kidney", 3: "left kidney", 4: "gallbladder"}
END = 0.05
"""The share of an organ's voxels at its upper and lower ends."""


def clicks(labels: Image, organ: int) -> Matrix:
    """The centre of an organ, and the centres of its upper and lower ends: (3, D), LPS mm."""
    points = map_points(labels.affine, np.argwhere(labels.data == organ))
    low, high = np.quantile(points[:, 2], [END, 1 - END])
    parts = points, points[points[:, 2] >= high], points[points[:, 2] <= low]
    return np.stack([part.mean(axis=0) for part in parts])


def register(folder: Path, pair: tuple[str, str], out: Path, *more: object) -> dict[str, Any]:
    """Run the command; its report."""
    words: list[object] = [sys.executable, "-m", "carlreg", "register", "--out", out, "--no-html", "--device", "cpu"]
    for side, name in zip(("fixed", "moving"), pair, strict=True):
        words += [f"--{side}", folder / f"{name}.nii.gz", f"--{side}-seg", folder / f"{name}_labels.nii.gz"]
    subprocess.run([str(word) for word in [*words, *more]], check=True)
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


def correct(folder: Path, pair: tuple[str, str], work: Path) -> dict[str, Any]:
    """Register a pair, click into its worst organ, and register it again."""
    first = register(folder, pair, work / "first")
    dice = {int(label): score for label, score in first["dice"]["after"].items()}
    organ = min((label for label in COMPACT if label in dice), key=lambda label: dice[label])
    maps = [images.read_labels(folder / f"{name}_labels.nii.gz") for name in pair]
    here, there = (clicks(one, organ) for one in maps)
    with open(work / "points.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([f"{side}_{axis}" for side in ("fixed", "moving") for axis in "xyz"])
        writer.writerows(np.hstack([here, there]).tolist())
    second = register(folder, pair, work / "second", "--guide", work / "points.csv")
    from carlreg.files import transform_files

    before = np.linalg.norm(transform_files.read(work / "first" / "transform.h5")(here) - there, axis=1)
    after = np.linalg.norm(transform_files.read(work / "second" / "transform.h5")(here) - there, axis=1)
    others = [label for label in dice if label != organ]
    return {
        "fixed": pair[0],
        "moving": pair[1],
        "organ": COMPACT[organ],
        "clicks": {"before_mm": before.tolist(), "after_mm": after.tolist()},
        "organ_dice": [one["dice"]["after"][str(organ)] for one in (first, second)],
        "others_dice": [float(np.mean([one["dice"]["after"][str(k)] for k in others])) for one in (first, second)],
        "folds_percent": [one["metrics"]["folds_percent"] for one in (first, second)],
        "dice": {"first": first["dice"]["after"], "second": second["dice"]["after"]},
        "seconds": [one["seconds"]["total"] for one in (first, second)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with abdomen/val")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "val.json")
    options = parser.parse_args()
    rows = []
    for pair in PAIRS:
        with tempfile.TemporaryDirectory() as work:
            rows.append(correct(options.data / "abdomen" / "val", pair, Path(work)))
        version = read_metadata(find_model("default"))["version"]
        made = {"commit": commit(), "machine": machine(), "seed": 0, "model": f"carl-base {version}"}
        options.out.write_text(json.dumps({**made, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
