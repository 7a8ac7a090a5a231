"""Test the rule of `--io-sim auto` on kept-back training subjects: do two scans have the same contrast, and what does
the optimisation make of them?

    python experiments/similarity/run.py DATA experiments/similarity/results/dev.json

For pairs within a set, across modalities, and with the contrast of one scan changed at random, the fields are optimised
from the network's maps as the rule says, and with local correlation or its square whatever it says, at most 64 voxels a
side.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from carlreg.files import images, world_transform
from carlreg.files.images import Image
from carlreg.geometry.transforms import Transform, warp
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.fields import FIELD_WEIGHT, optimize_fields
from carlreg.objective.metrics import dice, mean_score
from carlreg.preparation import Prepared, PreparedPair, prepare_pair
from carlreg.registration.options import RegisterOptions
from carlreg.registration.similarity import REGULARITY, Comparison, compare
from carlreg.registration.solve import _at_most, _both, _field_settings, _with_better_colours

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "base"))

from universal import other_contrast  # type: ignore[import-not-found]

from experiments.made import commit, machine

SIDE = 64
"""Voxels a side on which fields are optimised, at most, so that this runs on a CPU."""


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
    changed = [*(("brain", seed) for seed in range(20, 32)), *(("abdomen_mr", seed) for seed in range(50, 54))]
    scans = {"brain": brain, "abdomen_mr": mr}
    return [
        *((name, True, fixed, moving, None) for name, fixed, moving in same),
        *(("CT to MR", False, fixed, moving, None) for fixed, moving in across),
        *(
            (f"{name}, changed", False, scans[name][seed % 3], scans[name][(seed + 1) % 3], seed)
            for name, seed in changed
        ),
    ]


def in_other_contrast(prepared: Prepared, seed: int) -> Prepared:
    assert prepared.source is not None
    source = other_contrast(prepared.source[0], seed), *prepared.source[1:]
    return replace(prepared, tensor=other_contrast(prepared.tensor, seed), source=source)


def labels(path: Path, like: Image) -> torch.Tensor | None:
    if not labels_of(path).is_file():
        return None
    found = world_transform.apply(lambda points: points, images.read_labels(labels_of(path)), like, "nearest")
    return torch.from_numpy(found.data.astype("int64"))[None, None].float()


def ways(comparison: Comparison, pair: PreparedPair) -> dict[str, Comparison]:
    plain, squared = RegisterOptions(io_sim="lncc"), RegisterOptions(io_sim="lncc2", regularity=REGULARITY)
    return {"auto": comparison, "lncc": Comparison(plain, pair), "lncc2": Comparison(squared, pair)}


def overlaps(
    model: LoadedModel, maps: tuple[Transform, Transform], comparison: Comparison, pair: PreparedPair, *paths: Path
) -> dict[str, float]:
    """Mean Dice of the network, and of each way to optimise its result; none without labels that both scans have."""
    on_fixed, on_moving = (labels(path, one.image) for path, one in zip(paths, pair, strict=True))
    if on_fixed is None or on_moving is None:
        return {}
    common = sorted(set(on_fixed.unique().int().tolist()) & set(on_moving.unique().int().tolist()) - {0})
    if not common:
        return {}
    found = {"network": maps[0]}
    for name, way in ways(comparison, pair).items():
        weight = FIELD_WEIGHT if way.options.regularity is None else way.options.regularity
        settings: dict[str, Any] = {"similarity": way.options.io_sim, "weight": weight, "enough": way.enough}
        settings |= _field_settings(model.network, way)
        grids = [_at_most(one.sides, SIDE) for one in (pair.moving, pair.fixed)]
        images = _with_better_colours(way, pair, maps, grids, settings)
        for role, one, grid in zip(("moving", "fixed"), (images.moving, images.fixed), grids, strict=True):
            settings |= {role: one.on_grid(grid)[0], f"{role}_spacing": one.spacing(grid)}
        found[name] = optimize_fields(*maps, **settings).transform
    scores = {
        name: dice(warp(on_moving, phi, like=on_fixed, mode="nearest"), on_fixed, common) for name, phi in found.items()
    }
    return {name: round(mean_score(score), 4) for name, score in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    model, cpu = load_model("default", "cpu"), torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for name, same, fixed, moving, seed in cases(arguments.data):
        pair = prepare_pair(images.read(fixed), images.read(moving), model, cpu, quick=True)
        if seed is not None:
            pair = replace(pair, moving=in_other_contrast(pair.moving, seed))
        used = model.quickly() if pair.fine else model.on_grid(pair.fixed.tensor.shape[2:])
        maps = _both(used.network, pair)
        comparison = compare(RegisterOptions(), maps[0], pair)
        row = {"set": name, "same": same, "fixed": fixed.name, "moving": moving.name, "seed": seed}
        row |= {"differs": comparison.differs, "reason": comparison.reason}
        rows.append(row | {"dice": overlaps(used, maps, comparison, pair, fixed, moving)})
        print(json.dumps(rows[-1]), flush=True)
        about = {"commit": commit(), "machine": machine(), "torch": torch.__version__, "model": model.provenance}
        arguments.out.write_text(json.dumps(about | {"side": SIDE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
