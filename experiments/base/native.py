"""What `register` makes of hearts, breathing lungs and heads in two contrasts, in the scans' own space.

    python experiments/base/native.py DATA carl-base experiments/base/results/native.json
    python experiments/base/native.py DATA MODEL.safetensors OUT.json --steps 0 --lung-window -1000 275

Hearts are the val patients of `cardiac`, each phase once as the fixed image: mean Dice. Lungs are `lung/popi`, inhale
fixed: mean landmark error in mm, in the model's own window or the one given. Heads are BrainWeb's T1 and T2, which show
one anatomy, each registered to the first val brain: mean distance in mm between the two answers over its labelled
voxels, of which every 50th is taken. With `--steps 0` that is the network alone; without, `register` as it comes.
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
    parser.add_argument("--steps", type=int, help="of optimisation; 0 is the network alone")
    parser.add_argument("--lung-window", type=float, nargs=2, metavar=("LOW", "HIGH"), help="in HU")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    model = load_model(arguments.model)
    how: dict[str, Any] = {"io_iterations": arguments.steps, "allow_identity": arguments.steps != 0}
    report: dict[str, Any] = {"commit": arguments.commit, "model": Path(arguments.model).name, "steps": arguments.steps}
    report["sha256"] = model.provenance["sha256"]
    report["lung_window"] = arguments.lung_window or list(model.ct_range)
    lungs = replace(model, ct_range=tuple(report["lung_window"]))
    report["lung_mm"] = landmark_error(lungs, arguments.data / "lung" / "popi", how)
    write(report, arguments.out)
    report["heads_mm"] = apart(model, arguments.data, how)
    write(report, arguments.out)
    for fixed, moving in (("ED", "ES"), ("ES", "ED")):
        report[f"hearts_{fixed}_fixed"] = hearts(model, arguments.data / "cardiac" / "val", fixed, moving, how)
        write(report, arguments.out)


def landmark_error(model: LoadedModel, folder: Path, how: dict[str, Any]) -> dict[str, float]:
    found = register(fixed=folder / f"inhale{SCAN}", moving=folder / f"exhale{SCAN}", model=model, **how)
    inhale, exhale = (
        np.loadtxt(folder / f"{name}_landmarks.csv", delimiter=",", skiprows=1) for name in ("inhale", "exhale")
    )
    before = np.linalg.norm(inhale - exhale, axis=1)
    after = np.linalg.norm(found.transform(inhale) - exhale, axis=1)
    return {"before": float(before.mean()), "after": float(after.mean()), "most": float(after.max())}


def apart(model: LoadedModel, data: Path, how: dict[str, Any]) -> float:
    brain = min((data / "brain" / "val").glob(f"*[0-9]{SCAN}"))
    labels = nib.load(brain.with_name(brain.name.replace(SCAN, f"_labels{SCAN}")))
    voxels = np.argwhere(np.asarray(labels.dataobj) > 0)[::50]
    points = apply_affine(labels.affine, voxels) * (-1, -1, 1)  # transforms speak LPS
    one, other = (
        register(fixed=brain, moving=data / "brainweb" / f"{name}{SCAN}", model=model, **how).transform(points)
        for name in ("t1", "t2")
    )
    return float(np.linalg.norm(one - other, axis=1).mean())


def hearts(model: LoadedModel, folder: Path, fixed: str, moving: str, how: dict[str, Any]) -> dict[str, float]:
    rows = []
    for path in sorted(folder.glob(f"*_{fixed}{SCAN}")):
        other = path.with_name(path.name.replace(fixed, moving))
        segmentations: dict[str, Any] = {
            name: scan.with_name(scan.name.replace(SCAN, f"_labels{SCAN}"))
            for name, scan in (("fixed_seg", path), ("moving_seg", other))
        }
        made = register(fixed=path, moving=other, model=model, **segmentations, **how)
        rows.append({when: mean_score(scores) for when, scores in made.dice.items()})
    return {when: float(np.mean([row[when] for row in rows])) for when in rows[0]}


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
