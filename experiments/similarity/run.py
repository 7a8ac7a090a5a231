"""Test the rule of `--io-sim auto` on kept-back training subjects: do two scans have the same contrast, and which
similarity gives the better overlap?

    python experiments/similarity/run.py DATA experiments/similarity/results/dev.json

For pairs within a set, across modalities, and with the contrast of one scan changed at random, the agreement of their
contrasts is computed from the network's maps, and the fields are optimised with each similarity, all on coarse grids.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from made import commit, machine  # type: ignore[import-not-found]

from carlreg.files import images, world_transform
from carlreg.files.images import Image
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Transform, warp
from carlreg.model.loaded import load_model
from carlreg.objective.metrics import dice, mean_score
from carlreg.preparation import Prepared, PreparedPair, prepare_pair
from carlreg.registration.options import RegisterOptions
from carlreg.registration.similarity import compare
from carlreg.synthesis.contrast import random_contrast

GRID, SIDE = (
    64,
    40,
)  # voxels a side for the network, and for the optimisation of fields: coarse, so that it runs on a CPU
TRIED: dict[str, dict[str, Any]] = {
    "network": {"steps": 0},
    "lncc": {},
    "lncc2": {"similarity": "lncc2"},
    "lncc2, weight 3": {"similarity": "lncc2", "weight": 3.0},
    "mind": {"similarity": "mind", "weight": 0.1, "fold_weight": 2.0},
}


def dev(folder: Path, count: int = 3) -> list[Path]:
    scans = sorted(path for path in folder.glob("*.nii.gz") if not path.name.endswith("_labels.nii.gz"))
    return [path for path in scans if labels_of(path).is_file()][-count:]


def labels_of(path: Path) -> Path:
    return path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz"))


def cases(data: Path) -> list[tuple[str, bool, Path, Path, int | None]]:
    """Set, same contrast, fixed, moving, and the seed of a change of contrast."""
    brain, ct, mr = (dev(data / name / "train") for name in ("brain", "abdomen", "abdomen_mr"))
    ibsr, small = dev(data / "brain_ibsr"), dev(data / "hippocampus" / "train")
    hearts, lung = dev(data / "cardiac" / "train", 4), data / "lung"
    same = [
        *(("brain", *pair) for pair in ((brain[0], brain[1]), (brain[1], brain[2]))),
        *(("abdomen", *pair) for pair in ((ct[0], ct[1]), (ct[1], ct[2]))),
        *(("abdomen_mr", *pair) for pair in ((mr[0], mr[1]), (mr[1], mr[2]))),
        *(("hippocampus", *pair) for pair in ((small[0], small[1]), (small[1], small[2]))),
        *(("cardiac", *pair) for pair in ((hearts[0], hearts[1]), (hearts[1], hearts[3]))),
        ("brain_ibsr", ibsr[0], ibsr[1]),
        ("brain to brain_ibsr", ibsr[0], brain[0]),
        ("lung", lung / "plastimatch" / "t0.nii.gz", lung / "plastimatch" / "t5.nii.gz"),
        ("lung", lung / "elastix" / "baseline.nii.gz", lung / "elastix" / "followup.nii.gz"),
    ]
    across = [(ct[0], mr[0]), (mr[1], ct[1]), (ct[2], mr[2]), (mr[0], ct[1])]
    changed = [("brain", brain), ("abdomen", ct), ("abdomen_mr", mr), ("hippocampus", small)]
    return [
        *((name, True, fixed, moving, None) for name, fixed, moving in same),
        *(("CT to MR", False, fixed, moving, None) for fixed, moving in across),
        *((f"{name}, changed", False, scans[0], scans[1], seed) for seed in (1, 2) for name, scans in changed),
    ]


def recoloured(prepared: Prepared, seed: int) -> Prepared:
    tensor = random_contrast(prepared.tensor, torch.Generator().manual_seed(seed))
    low, high = tensor.aminmax()
    return replace(prepared, tensor=(tensor - low) / (high - low))


def labels(path: Path, like: Image) -> torch.Tensor | None:
    if not labels_of(path).is_file():
        return None
    found = world_transform.apply(lambda points: points, images.read_labels(labels_of(path)), like, "nearest")
    return torch.from_numpy(found.data.astype("int64"))[None, None].float()


def overlaps(maps: tuple[Transform, Transform], pair: PreparedPair, fixed: Path, moving: Path) -> dict[str, float]:
    """Mean Dice of each way to optimise."""
    from carlreg import optimize_fields

    f_labels, m_labels = labels(fixed, pair.fixed.image), labels(moving, pair.moving.image)
    if f_labels is None or m_labels is None:
        return {}
    m, f = (resize(one.tensor, (SIDE,) * 3) for one in (pair.moving, pair.fixed))
    common = sorted(set(f_labels.unique().int().tolist()) & set(m_labels.unique().int().tolist()) - {0})
    found = {}
    for name, settings in TRIED.items():
        phi = optimize_fields(maps[0], maps[1], m, f, **settings).transform
        found[name] = mean_score(dice(warp(m_labels, phi, like=f_labels, mode="nearest"), f_labels, common))
    return {name: round(score, 4) for name, score in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    model = replace(load_model("default", "cpu"), grid=(GRID,) * 3)
    rows: list[dict[str, Any]] = []
    for name, same, fixed, moving, seed in cases(arguments.data):
        pair = prepare_pair(images.read(fixed), images.read(moving), model, torch.device("cpu"))
        if seed is not None:
            pair = replace(pair, moving=recoloured(pair.moving, seed))
        with torch.no_grad():
            maps = model.network.both(pair.moving.tensor, pair.fixed.tensor)
        row = {"set": name, "same": same, "fixed": fixed.name, "moving": moving.name, "seed": seed}
        chosen = compare(RegisterOptions(), maps[0], pair)
        rows.append(
            row
            | {"chosen": chosen.options.io_sim, "reason": chosen.reason, "dice": overlaps(maps, pair, fixed, moving)}
        )
        print(json.dumps(rows[-1]), flush=True)
        about = {"commit": commit(), "machine": machine(), "torch": torch.__version__, "model": model.provenance}
        arguments.out.write_text(json.dumps(about | {"grid": GRID, "side": SIDE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
