"""Build a template of training subjects, brains by default, and register validation subjects through it.

    python experiments/template/run.py ../shared/data results --iterations 3

Writes results.json after every part, and the last and the affine average as small images; with --page, also the page of
the template. All averages are kept in the folder `averages`: if the script is stopped, the same command goes on after
the last average or pair that was finished.

Without a GPU, `--device cpu --workers N` registers in N processes of one thread each; torch, numpy and safetensors are
all that is needed, but for the page.

Sharpness is the mean gradient magnitude per mm in the foreground, of intensities whose 5th and 95th percentile in the
foreground are 0 and 1 (`carlreg.atlases.average.sharpness`), before sharpening; this was fixed before anything was
measured. Pairs of validation subjects are a ring: each is the fixed image once and the moving one once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.atlases.average import mapped, mapped_by, sharpness, world_points
from carlreg.atlases.page import page
from carlreg.atlases.template import Iteration, Journal, prepare
from carlreg.atlases.work import Task, register_each
from carlreg.fast.devices import choose_device
from carlreg.files import images, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image
from carlreg.files.world_transform import WorldTransform
from carlreg.registration.options import PairInputs, RegisterOptions

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

SETS = {"brain": (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60), "hippocampus": (1, 2)}
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path, help="folder for results.json and the images")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--scans", type=int, help="training subjects (default: all)")
    parser.add_argument("--set", choices=SETS, default="brain")
    parser.add_argument("--pairs", type=int, help="validation pairs (default: all)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="default")
    parser.add_argument("--page", action="store_true", help="write template.html")
    parser.add_argument("--io-iterations", type=int, help="steps of optimisation, to try the script")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = choose_device(arguments.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    path = arguments.out / "results.json"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    report |= {"commit": commit(), "machine": machine(), "gpu": gpu, "seed": SEED, "torch": torch.__version__}
    report |= {"workers": arguments.workers, "set": arguments.set, "model": arguments.model}
    through(arguments, build(arguments, report), device, report)
    print("finished", flush=True)


def save(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    write_atomically(arguments.out / "results.json", (json.dumps(report, indent=1) + "\n").encode())


def build(arguments: argparse.Namespace, report: dict[str, Any]) -> Image:
    """The template, from the last average that is kept."""

    def note(row: Iteration, average: Image) -> None:
        report["iterations"].append(asdict(row))
        report["seconds"] = round(sum(one["seconds"] for one in report["iterations"]), 1)
        save(arguments, report)
        print(json.dumps(asdict(row)), flush=True)
        if row.kind == "affine":
            images.write(small(average), arguments.out / "affine.nii.gz", overwrite=True)

    builder = prepare(
        subjects(arguments.data / arguments.set / "train")[: arguments.scans],
        model=arguments.model,
        iterations=arguments.iterations,
        workers=arguments.workers,
        callback=note,
        io_iterations=arguments.io_iterations,
        device=arguments.device,
        seed=SEED,
    )
    journal = Journal.open(arguments.out / "averages", builder.record, overwrite=False)
    journal = replace(journal, keeps_registrations=False)  # their files would need h5py
    report |= {"scans": len(builder.subjects), "iterations": [asdict(row) for row in journal.rows]}
    if len(journal.rows) == 2 + arguments.iterations:
        return journal.read(len(journal.rows) - 1)
    built = builder.run(journal)
    report["residual_mm"] = built.residual_mm
    report["sharpness"] = {"template": sharpness(built.mean), "template_sharpened": sharpness(built.image)}
    save(arguments, report)
    images.write(small(built.image), arguments.out / "template.nii.gz", overwrite=True)
    if arguments.page:
        blank = dict.fromkeys(("displacement_mm", "folds_percent", "inverse_error_mm"), math.nan)
        rows = [{"name": one.name, **blank} for one in built.subjects]
        text = page(built.image, built.iterations, rows, built.record)
        write_atomically(arguments.out / "template.html", text.encode())
    journal.add(built.iterations, built.image)
    return built.image


def through(arguments: argparse.Namespace, target: Image, device: torch.device, report: dict[str, Any]) -> None:
    """Dice of pairs of validation subjects, registered directly and through the template."""
    paths = subjects(arguments.data / arguments.set / "val")[: arguments.pairs]
    rows: list[dict[str, Any]] = report.setdefault("pairs", [])
    done = {(row["fixed"], row["moving"]) for row in rows}
    ring = [(paths[n], paths[(n + 1) % len(paths)]) for n in range(len(paths))]
    ring = [pair for pair in ring if (pair[0].name, pair[1].name) not in done]
    tasks: dict[str, Task] = {}
    for fixed, moving in ring:
        for path in (fixed, moving):
            tasks[path.name] = Task(path.name, PairInputs(fixed=target, moving=path))
        tasks[f"{fixed.name} {moving.name}"] = Task(
            f"{fixed.name} {moving.name}", PairInputs(fixed=fixed, moving=moving)
        )
    options = RegisterOptions(
        io_iterations=arguments.io_iterations, device=arguments.device, seed=SEED, confidence="off"
    )
    found: dict[str, WorldTransform] = {}
    for one in register_each(list(tasks.values()), arguments.model, options, "transform", arguments.workers):
        assert one.transform is not None
        found[one.name] = one.transform
        report.setdefault("seconds_a_registration", []).append(round(one.seconds, 1))
        for pair in [pair for pair in ring if needed(*pair) <= found.keys()]:
            ring.remove(pair)
            rows.append(compared(*pair, found, device, SETS[arguments.set]))
            print(json.dumps(rows[-1]), flush=True)
            report["dice"] = {way: mean(row[way] for row in rows) for way in ("direct", "through")}
            save(arguments, report)


def needed(fixed: Path, moving: Path) -> set[str]:
    """The names of the registrations from which a pair is compared."""
    return {fixed.name, moving.name, f"{fixed.name} {moving.name}"}


def compared(
    fixed: Path, moving: Path, found: Mapping[str, WorldTransform], device: torch.device, structures: Sequence[int]
) -> dict[str, Any]:
    """The Dice of a pair by both ways."""
    scan = images.read(fixed)
    truth, labels = (
        images.read_labels(path.with_name(path.name.replace(".nii", "_labels.nii"))) for path in (fixed, moving)
    )
    points = world_points(scan, device)
    back, residual = world_transform.invert(found[fixed.name], scan)
    ways = {
        "direct": mapped(found[f"{fixed.name} {moving.name}"], points),
        "through": mapped(found[moving.name], mapped(back, points)),
    }
    expected = torch.from_numpy(truth.data.astype(np.int32)).to(device)
    dice = {way: overlap(nearest(labels, there), expected, structures) for way, there in ways.items()}
    return {"fixed": fixed.name, "moving": moving.name, **dice, "inverse_error_mm": float(np.nanmean(residual))}


def subjects(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("*.nii.gz") if not path.name.endswith("_labels.nii.gz"))
    if len(found) < 2:
        sys.exit(f"{folder} has {len(found)} scans; expected at least two")
    return found


def nearest(labels: Image, points: Tensor) -> Tensor:
    """Labels at world points (*shape, D), 0 beyond the image."""
    index = (mapped_by(np.linalg.inv(labels.affine), points) + 0.5).floor().long()
    sides = torch.tensor(labels.shape, device=points.device)
    inside = ((index >= 0) & (index < sides)).all(dim=-1)
    index = torch.minimum(index.clamp(min=0), sides - 1)
    values = torch.from_numpy(labels.data.astype(np.int32)).to(points.device)
    return torch.where(inside, values[tuple(index.unbind(-1))], 0)


def overlap(found: Tensor, truth: Tensor, structures: Sequence[int]) -> float:
    """Mean Dice of these structures."""
    each = []
    for label in structures:
        a, b = found == label, truth == label
        each.append(2 * int((a & b).sum()) / max(1, int(a.sum() + b.sum())))
    return mean(each)


def small(image: Image) -> Image:
    """In 256 steps."""
    data = image.data / max(float(np.percentile(image.data, 99.9)), 1e-6)
    return Image(np.rint(255 * data.clip(0, 1)).astype(np.uint8), image.affine, image.name)


if __name__ == "__main__":
    main()
