"""Score `register` on hearts, breathing lungs and heads in two contrasts, in the scans' own space.

    python experiments/base/native.py DATA carl-base experiments/base/results/native.json
    python experiments/base/native.py DATA MODEL.safetensors OUT.json --steps 0 --lung-window -1000 275

Hearts are the val patients of `cardiac`, with each phase once as the fixed image, scored by mean Dice. Lungs are
`lung/popi` with inhale fixed, scored by the mean landmark error in mm, in the model's own window or the given one.
Heads are BrainWeb's T1 and T2, which show the same anatomy, each registered to the first val brain, and scored by the
mean distance in mm between the two maps over every 50th of its labelled voxels. `--steps 0` uses the network alone;
without it, `register` uses its defaults.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from nibabel.affines import apply_affine

from carlreg import register
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.metrics import mean_score

SCAN = ".nii.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, help="steps of optimisation; 0 for the network alone")
    parser.add_argument("--lung-window", type=float, nargs=2, metavar=("LOW", "HIGH"), help="CT window for lungs, HU")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    options: dict[str, Any] = {"io_iterations": arguments.steps, "allow_identity": arguments.steps != 0}
    report: dict[str, Any] = {"commit": arguments.commit, "model": Path(arguments.model).name, "steps": arguments.steps}
    report["sha256"] = model.provenance["sha256"]
    report["lung_window"] = arguments.lung_window or list(model.ct_range)
    lungs = replace(model, ct_range=tuple(report["lung_window"]))
    report["lung_mm"] = landmark_error(lungs, arguments.data / "lung" / "popi", options)
    write(report, arguments.out)
    report["heads_mm"] = contrast_distance(model, arguments.data, options)
    write(report, arguments.out)
    for fixed, moving in (("ED", "ES"), ("ES", "ED")):
        report[f"hearts_{fixed}_fixed"] = hearts(model, arguments.data / "cardiac" / "val", fixed, moving, options)
        write(report, arguments.out)


def landmark_error(model: LoadedModel, folder: Path, options: dict[str, Any]) -> dict[str, float]:
    result = register(fixed=folder / f"inhale{SCAN}", moving=folder / f"exhale{SCAN}", model=model, **options)
    inhale, exhale = (
        np.loadtxt(folder / f"{name}_landmarks.csv", delimiter=",", skiprows=1) for name in ("inhale", "exhale")
    )
    before = np.linalg.norm(inhale - exhale, axis=1)
    after = np.linalg.norm(result.transform(inhale) - exhale, axis=1)
    return {"before": float(before.mean()), "after": float(after.mean()), "most": float(after.max())}


def contrast_distance(model: LoadedModel, data: Path, options: dict[str, Any]) -> float:
    brain = min((data / "brain" / "val").glob(f"*[0-9]{SCAN}"))
    labels = nib.load(brain.with_name(brain.name.replace(SCAN, f"_labels{SCAN}")))
    voxels = np.argwhere(np.asarray(labels.dataobj) > 0)[::50]
    points = apply_affine(labels.affine, voxels) * (-1, -1, 1)  # transforms use LPS
    one, other = (
        register(fixed=brain, moving=data / "brainweb" / f"{name}{SCAN}", model=model, **options).transform(points)
        for name in ("t1", "t2")
    )
    return float(np.linalg.norm(one - other, axis=1).mean())


def hearts(model: LoadedModel, folder: Path, fixed: str, moving: str, options: dict[str, Any]) -> dict[str, float]:
    rows = []
    for path in sorted(folder.glob(f"*_{fixed}{SCAN}")):
        other = path.with_name(path.name.replace(fixed, moving))
        segmentations: dict[str, Any] = {
            name: scan.with_name(scan.name.replace(SCAN, f"_labels{SCAN}"))
            for name, scan in (("fixed_seg", path), ("moving_seg", other))
        }
        result = register(fixed=path, moving=other, model=model, **segmentations, **options)
        rows.append({when: mean_score(scores) for when, scores in result.dice.items()})
    return {when: float(np.mean([row[when] for row in rows])) for when in rows[0]}


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
