"""Run `carl register` on the validation pairs, at their own resolution, on the CPU.

    python experiments/native/run.py ../shared/data work --pairs 4 --kinds network fields

Each pair is one command, as a user would type it. Results are written to results/native.json after every pair; pairs
already registered by the same model are skipped, so the script can be stopped and restarted. `work` holds one result at
a time, and the warped images of each set's first pair for its picture. `--keep FOLDER` keeps each pair's transforms and
report in FOLDER/SET/KIND/MOVING_to_FIXED, for `carl evaluate` and experiments/accuracy; pairs missing there are
registered again.
Dice "before" is computed with the headers as they are, and with the moving image's box stretched onto the fixed image's
("stretched"), which is what the network starts from; "better" means better than both.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.files import images, orientation, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.checksums import sha256
from carlreg.files.images import Image
from carlreg.files.tables import Pair
from carlreg.files.world_transform import WorldTransform
from carlreg.model.loaded import find_model
from carlreg.objective.metrics import dice, mean_score

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

RESULTS = Path(__file__).with_name("results")
SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
SETS = {"hippocampus": (1, 2), "abdomen": tuple(range(1, 14)), "brain": SUBCORTICAL}
KINDS = {
    "network": ["--io-iterations", "0"],
    "fields": ["--optimize", "fields"],
    "affine": ["--transform", "affine"],
    "rigid": ["--transform", "rigid"],
    "affine-attention": ["--transform", "affine", "--fit-source", "attention"],
    "rigid-attention": ["--transform", "rigid", "--fit-source", "attention"],
}
SEED = 0
KEPT = ("transform.h5", "inverse_transform.h5", "report.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["network", "fields"])
    parser.add_argument("--pairs", type=int, help="pairs of each set, drawn with a fixed seed (default: all)")
    parser.add_argument("--model", default="default", help="name or file of a model (default: the default model)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep each pair's transforms and report there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.model != "default" and arguments.out == RESULTS:
        parser.error("the results beside this script belong to the default model: give --out with another --model")
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "native.json"
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"rows": []}
    report |= {"machine": machine(), "seed": SEED, "torch": torch.__version__}
    weights = sha256(find_model(arguments.model))
    for name in arguments.sets:
        pairs = validation_pairs(arguments.data / name / "val", name)[: arguments.pairs]
        for number, (fixed, moving) in enumerate(pairs):
            for kind in arguments.kinds:
                same = {"set": name, "fixed": fixed, "moving": moving, "kind": kind}
                known = next((row for row in report["rows"] if same.items() <= row.items()), None)
                folder = arguments.keep and arguments.keep / name / kind / f"{moving}_to_{fixed}"
                # Old rows do not name their model.
                if known and known.get("model", {}).get("sha256", weights) == weights and is_kept(folder, weights):
                    continue
                row = register(arguments.data / name / "val", same, arguments.work / "pair", arguments.model)
                if folder:
                    keep(arguments.work / "pair", folder)
                if number == 0:
                    shutil.copy(arguments.work / "pair" / "warped.nii.gz", arguments.work / f"{name}_{kind}.nii.gz")
                report["rows"] = [*(one for one in report["rows"] if one is not known), row]
                write_atomically(file, (json.dumps(report, indent=1) + "\n").encode())
                write_atomically(arguments.out / "table.md", table(report).encode())
                print(json.dumps({k: v for k, v in row.items() if k != "labels"}), flush=True)
            kept = {kind: arguments.work / f"{name}_{kind}.nii.gz" for kind in KINDS}
            shown = {kind: images.read(path) for kind, path in kept.items() if number == 0 and path.is_file()}
            if shown:
                picture(arguments.data / name / "val", fixed, moving, shown, arguments.out / f"{name}.png")
    write_atomically(arguments.out / "table.md", table(report).encode())
    print(table(report))


def validation_pairs(folder: Path, name: str) -> list[tuple[str, str]]:
    """Ordered pairs of different subjects: all of them, or for the hippocampus 40 drawn with seed 0. Their order is
    random with a fixed seed, so that the first few are always the same and of various subjects."""
    subjects = sorted(
        path.name.removesuffix(".nii.gz") for path in folder.glob("*.nii.gz") if "_labels" not in path.name
    )
    pairs = [(fixed, moving) for fixed in subjects for moving in subjects if fixed != moving]
    if not pairs:
        sys.exit(f"{folder} has {len(subjects)} images; expected at least two, NAME.nii.gz with NAME_labels.nii.gz")
    if name == "hippocampus":
        pairs = random.Random(0).sample(pairs, min(40, len(pairs)))
    return random.Random(SEED).sample(pairs, len(pairs))


def keep(work: Path, folder: Path) -> None:
    """Copy the transforms of a registration, and its report last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in KEPT:
        shutil.copy(work / name, folder / name)


def is_kept(folder: Path | None, weights: str) -> bool:
    """Whether a pair's folder is complete and was made with these weights."""
    if folder is None:
        return True
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(report.get("model", {}).get("sha256") == weights) and all((folder / name).is_file() for name in KEPT)


def command(pair: Pair, kind: str, work: Path, model: str) -> list[str]:
    """The command that registers a pair into a folder, with the options of this kind. The verdict on the result, and
    the other ways that are tried if it is bad, are no part of this comparison."""
    words = [sys.executable, "-m", "carlreg", "register", "--quiet", "--device", "cpu", "--seed", str(SEED)]
    words += ["--model", model, "-f", str(pair.fixed), "-m", str(pair.moving), "-o", str(work)]
    words += ["--fixed-seg", str(pair.fixed_seg), "--moving-seg", str(pair.moving_seg)]
    return [*words, "--confidence", "off", *KINDS[kind]]


def register(folder: Path, pair: dict[str, str], work: Path, model: str) -> dict[str, Any]:
    """Register one pair with the options of its kind; return its time, memory and scores."""
    name, fixed, moving, kind = (pair[key] for key in ("set", "fixed", "moving", "kind"))
    shutil.rmtree(work, ignore_errors=True)
    segs = {side: folder / f"{case}_labels.nii.gz" for side, case in (("fixed", fixed), ("moving", moving))}
    scans = folder / f"{fixed}.nii.gz", folder / f"{moving}.nii.gz"
    words = command(Pair(f"{moving}_to_{fixed}", scans[0], scans[1], segs["fixed"], segs["moving"]), kind, work, model)
    start = time.perf_counter()
    subprocess.run(words, check=True)
    seconds = time.perf_counter() - start
    report = json.loads((work / "report.json").read_text(encoding="utf-8"))
    wanted = {
        when: {int(k): v for k, v in scores.items() if int(k) in SETS[name]} for when, scores in report["dice"].items()
    }
    return {
        **pair,
        "commit": commit(),
        "model": {key: report["model"].get(key) for key in ("name", "sha256")},
        "before_headers": mean_score(wanted["before"]),
        "before_stretched": stretched(segs["fixed"], segs["moving"], SETS[name]),
        "after": mean_score(wanted["after"]),
        "labels": {str(label): score for label, score in wanted["after"].items()},
        "command_seconds": round(seconds, 1),
        "seconds": report["seconds"],
        "peak_gb": report["peak_memory_gb"]["process"],
        "metrics": report["metrics"],
        "warnings": report["warnings"],
    }


def stretched(fixed: Path, moving: Path, labels: tuple[int, ...]) -> float:
    """Dice with the two boxes aligned."""
    f, m = (images.read_labels(path) for path in (fixed, moving))
    warped = world_transform.apply(boxes(f, m), m, f, "nearest")
    first, second = (torch.from_numpy(one.data.astype(np.int64))[None, None] for one in (warped, f))
    return mean_score(dice(first, second, labels))


def boxes(fixed: Image, moving: Image) -> WorldTransform:
    """T that maps the fixed image's box, with axes closest to RAS, onto the moving image's."""
    f, m = orientation.to_closest_ras(fixed), orientation.to_closest_ras(moving)
    return WorldTransform.linear(m.unit_to_world() @ f.world_to_unit())


def groups(report: dict[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    for name in SETS:
        for kind in KINDS:
            rows = [row for row in report["rows"] if (row["set"], row["kind"]) == (name, kind)]
            if rows:
                yield name, kind, rows


def table(report: dict[str, Any]) -> str:
    """Means over the pairs; for the time of the whole command the median, which other programs disturb less, and for
    its memory the maximum."""
    lines = [
        "| set | kind | pairs | headers | stretched | after | better | folds % | seconds | GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kind, rows in groups(report):
        means = {key: np.mean([row[key] for row in rows]) for key in ("before_headers", "before_stretched", "after")}
        better = np.mean([row["after"] > max(row["before_headers"], row["before_stretched"]) for row in rows])
        folds = np.mean([row["metrics"].get("folds_percent", 0.0) for row in rows])
        seconds, memory = np.median([row["command_seconds"] for row in rows]), max(row["peak_gb"] for row in rows)
        lines.append(
            f"| {name} | {kind} | {len(rows)} | {means['before_headers']:.3f} | {means['before_stretched']:.3f} "
            f"| {means['after']:.3f} | {100 * better:.0f} % | {folds:.3f} | {seconds:.0f} | {memory:.1f} |"
        )
    return "\n".join(lines) + "\n"


def picture(folder: Path, fixed: str, moving: str, shown: dict[str, Image], path: Path) -> None:
    """Draw one slice of the fixed image, of the moving image stretched to it, and of each result, with the outlines of
    the fixed labels on each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    f, m = images.read(folder / f"{fixed}.nii.gz"), images.read(folder / f"{moving}.nii.gz")
    labels = orientation.to_closest_ras(images.read_labels(folder / f"{fixed}_labels.nii.gz"))
    panels = {"fixed": f, "moving, stretched": world_transform.apply(boxes(f, m), m, f), **shown}
    middle = int(np.argmax((labels.data > 0).sum(axis=(0, 1))))
    figure, axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3.4), squeeze=False)
    for axis, (title, image) in zip(axes[0], panels.items(), strict=True):
        oriented = orientation.to_closest_ras(image)
        aspect = oriented.spacing[1] / oriented.spacing[0]
        axis.imshow(oriented.data[:, :, middle].T, cmap="gray", origin="lower", aspect=aspect)
        edges = labels.data[:, :, middle].T
        axis.contour(edges > 0, levels=[0.5], colors="tab:orange", linewidths=0.7)
        axis.set_title(title, fontsize=9)
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
