"""Dice of brains while the moving image is rotated, for whole registrations, as in the paper's figure on rotation.

    python experiments/rotation/turned.py carry/turned.npz carry/turned_labels.npz experiments/rotation/results \\
        --method base-optimised=carl-base --method auto-optimised=auto --method ANTs=ants-synquick

The data are packed by experiments/base/prepare.py: validation brains with 2 mm voxels in a cube of 190 mm, and their
labels with 1 mm voxels. The moving brain is rotated about the centre of the cube in each of three planes, and
registered by a baseline or by `carlreg.register`, with its fields optimised as on a machine without a GPU, or without
optimisation (`--no-optimisation`). Labels are not rotated: they are warped once by the composition of both maps, and
scored on 14 subcortical structures. Writes turned-NAME.json for each method, with all pairs at every angle; angles it
already has are skipped. `--dev` uses kept-back training subjects instead.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from angles import MM, PLANES, turn  # type: ignore[import-not-found]
from torch import Tensor

from carlreg.evaluation.baselines import BASELINES
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, map_points
from carlreg.files.tables import Pair
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.transforms import DisplacementField, compose, warp
from carlreg.model.loaded import load_model
from carlreg.objective.metrics import dice, mean_score
from carlreg.registration.api import register

sys.path.insert(0, str(Path(__file__).parent.parent / "base"))

from train import Data  # type: ignore[import-not-found]

ANGLES = (0, 15, 30, 45, 60, 90, 135, 180)
Algorithm = Callable[[Image, Image], tuple[Any, dict[str, Any]]]
"""Maps a moving and a fixed image to a map of world points, and to what the rotation search found."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append", default=[], help="NAME=MODEL or NAME=BASELINE; may be repeated")
    parser.add_argument("--no-optimisation", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--planes", nargs="+", default=list(PLANES), choices=PLANES)
    parser.add_argument("--angles", nargs="+", type=float, default=ANGLES, help="degrees")
    parser.add_argument("--dev", action="store_true", help="use kept-back training subjects")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Data(arguments.images, 96, device)
    with np.load(arguments.labels) as packed:
        fine = {key: torch.from_numpy(packed[key]).to(device) for key in packed.files}
    pairs = drawn(data.pairs("brain", "dev" if arguments.dev else "val"), arguments.pairs)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, source in (method.split("=", 1) for method in arguments.method):
        algorithm, facts = by_program(source) if source in BASELINES else by_model(source, arguments.no_optimisation)
        path = arguments.out / f"turned-{name}.json"
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        names = ["_to_".join(key.split("/")[-1] for key in pair) for pair in pairs]
        how = {"pairs": names, "method": Path(source).name, "optimised": not arguments.no_optimisation}
        others = [key for key, value in how.items() if report.get(key, value) != value]
        others += [key for key, value in facts.items() if report.get(key) != value]
        if report["rows"] and others:
            sys.exit(f"{path} has other pairs or another method: choose another name")
        report |= how | facts
        for key, value in (("commit", arguments.commit), ("machine", machine)):  # rows may come from several
            report[key] = ", ".join(dict.fromkeys([*filter(None, report.get(key, "").split(", ")), value]))
        for angle in arguments.angles:
            for plane in arguments.planes if angle else arguments.planes[:1]:  # 0° is the same in all of them
                done = any((row["degrees"], row["plane"]) == (angle, plane) for row in report["rows"])
                if done or time.monotonic() - start > arguments.seconds:
                    continue
                scores = [score(algorithm, data, fine, pair, angle, plane) for pair in pairs]
                row = {"degrees": angle, "plane": plane, "dice": [dice for dice, _ in scores]}
                if any(rotation for _, rotation in scores):
                    row["told"] = [rotation for _, rotation in scores]
                report["rows"].append(row)
                write_atomically(path, (json.dumps(report) + "\n").encode())
                print(name, plane, angle, [round(value, 3) for value in row["dice"]], row.get("told", ""), flush=True)


def drawn(pairs: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Random pairs, with different moving brains as far as possible."""
    mixed = random.Random(0).sample(pairs, len(pairs))
    order = sorted(range(len(mixed)), key=lambda n: [pair[0] for pair in mixed[:n]].count(mixed[n][0]))
    return [mixed[n] for n in order[:count]]


def by_model(source: str, alone: bool) -> tuple[Algorithm, dict[str, Any]]:
    """A model as an algorithm, and its checksum."""
    model = load_model(source)
    options: dict[str, Any] = {"io_iterations": 0 if alone else None, "optimize": "fields", "certainty": False}

    def run(moving: Image, fixed: Image) -> tuple[Any, dict[str, Any]]:
        result = register(fixed=fixed, moving=moving, model=model, **options)
        return result.transform, dict(result.record.look or {})

    return run, {"sha256": model.provenance["sha256"]}


def by_program(source: str) -> tuple[Algorithm, dict[str, Any]]:
    pair = Pair("pair", Path("fixed"), Path("moving"))
    return lambda moving, fixed: (BASELINES[source](pair, fixed, moving).transform, {}), {}


@torch.no_grad()
def score(
    algorithm: Algorithm, data: Any, labels: dict[str, Tensor], pair: tuple[str, str], angle: float, plane: str
) -> tuple[float, dict[str, Any]]:
    moving, fixed = (data.image(key) for key in pair)
    by = turn(angle, moving.shape[2:], like=moving, plane=PLANES[plane])
    turned = warp(moving, by, like=moving, outside="zeros") if angle else moving
    m, f = (image_of(tensor) for tensor in (turned, fixed))
    transform, rotation = algorithm(m, f)
    points = voxel_points(fixed).cpu().double().numpy()[0]
    matches = map_points(m.world_to_unit(), transform(map_points(f.unit_to_world(), points)))
    phi = DisplacementField(torch.from_numpy(matches - points).movedim(-1, 0)[None].to(fixed))
    of_moving, of_fixed = (labels[f"{key}/labels"][None, None].float() for key in pair)
    warped = warp(of_moving, compose(by, phi), like=of_fixed, mode="nearest")
    return mean_score(dice(warped, of_fixed)), rotation


def image_of(tensor: Tensor) -> Image:
    """An image whose array axes run to the right, to the front and up; world coordinates are LPS."""
    return Image(tensor[0, 0].cpu().numpy(), np.diag([-MM, -MM, MM, 1.0]))


if __name__ == "__main__":
    main()
