"""Build a template of training subjects, brains by default, and register validation subjects through it.

    python experiments/template/run.py ../shared/data results --iterations 3

Writes results.json after every part, the last and the affine average as small images, and the page of the template.
Sharpness is the mean gradient magnitude per mm in the foreground, of intensities whose 5th and 95th percentile in the
foreground are 0 and 1 (`carlreg.atlases.average.sharpness`), before sharpening; this was fixed before anything was
measured. Pairs of validation subjects are a ring: each is the fixed image once and the moving one once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.atlases.average import mapped, mapped_by, sharpness, world_points
from carlreg.atlases.page import page
from carlreg.atlases.template import Iteration, template
from carlreg.fast.devices import choose_device
from carlreg.files import images, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image
from carlreg.files.world_transform import WorldTransform
from carlreg.model.loaded import load_model
from carlreg.registration.api import align_pair
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.progress import Progress

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
    parser.add_argument("--io-iterations", type=int, help="steps of optimisation, to try the script")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    device, started = choose_device(arguments.device), time.monotonic()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    report: dict[str, Any] = {"commit": commit(), "machine": machine(), "gpu": gpu, "seed": SEED}
    report |= {"torch": torch.__version__, "workers": arguments.workers, "iterations": []}
    report |= {"set": arguments.set, "model": arguments.model}
    steps = {"io_iterations": arguments.io_iterations, "device": arguments.device, "seed": SEED}

    def save() -> None:
        write_atomically(arguments.out / "results.json", (json.dumps(report, indent=1) + "\n").encode())

    def note(row: Iteration, average: Image) -> None:
        report["iterations"].append(asdict(row))
        save()
        print(json.dumps(asdict(row)), f"{time.monotonic() - started:.1f} s", flush=True)
        if row.kind == "affine":
            images.write(small(average), arguments.out / "affine.nii.gz", overwrite=True)

    scans = subjects(arguments.data / arguments.set / "train")[: arguments.scans]
    model = arguments.model if arguments.workers > 1 else load_model(arguments.model, device)
    began = time.monotonic()
    built = template(
        scans, model=model, iterations=arguments.iterations, workers=arguments.workers, callback=note, **steps
    )
    report |= {
        "scans": len(scans),
        "seconds": round(time.monotonic() - began, 1),
        "residual_mm": built.residual_mm,
        "sharpness": {"template": sharpness(built.mean), "template_sharpened": sharpness(built.image)},
    }
    save()
    images.write(small(built.image), arguments.out / "template.nii.gz", overwrite=True)
    blank = {"displacement_mm": float("nan"), "folds_percent": float("nan"), "inverse_error_mm": float("nan")}
    rows = [{"name": one.name, **blank} for one in built.subjects]
    write_atomically(arguments.out / "template.html", page(built.image, built.iterations, rows, built.record).encode())
    through(arguments, built.image, model, RegisterOptions(**steps, confidence="off"), device, report)
    report["seconds_in_all"] = round(time.monotonic() - started, 1)
    save()
    print(f"finished after {report['seconds_in_all']} s", flush=True)


def through(
    arguments: argparse.Namespace,
    target: Image,
    model: Any,
    options: RegisterOptions,
    device: torch.device,
    report: dict[str, Any],
) -> None:
    """Dice of pairs of validation subjects, registered directly and through the template."""
    paths = subjects(arguments.data / arguments.set / "val")
    loaded = load_model(model, device)
    paths = paths[: arguments.pairs]
    ring = [(paths[n], paths[(n + 1) % len(paths)]) for n in range(len(paths))]

    def align(fixed: Any, moving: Any) -> WorldTransform:
        return align_pair(PairInputs(fixed=fixed, moving=moving), loaded, options, Progress()).transform

    scans = {path: images.read(path) for pair in ring for path in pair}
    labels = {path: images.read_labels(path.with_name(path.name.replace(".nii", "_labels.nii"))) for path in scans}
    to_scan = {path: align(target, scan) for path, scan in scans.items()}
    rows: list[dict[str, Any]] = []
    for fixed, moving in ring:
        points = world_points(scans[fixed], device)
        back, residual = world_transform.invert(to_scan[fixed], scans[fixed])
        ways = {
            "direct": mapped(align(scans[fixed], scans[moving]), points),
            "through": mapped(to_scan[moving], mapped(back, points)),
        }
        truth = torch.from_numpy(labels[fixed].data.astype(np.int32)).to(device)
        row = {way: overlap(nearest(labels[moving], there), truth, SETS[arguments.set]) for way, there in ways.items()}
        rows.append(
            {"fixed": fixed.name, "moving": moving.name, **row, "inverse_error_mm": float(np.nanmean(residual))}
        )
        print(json.dumps(rows[-1]), flush=True)
        report["pairs"] = rows
        write_atomically(arguments.out / "results.json", (json.dumps(report, indent=1) + "\n").encode())
    report["dice"] = {way: mean(row[way] for row in rows) for way in ("direct", "through")}


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
