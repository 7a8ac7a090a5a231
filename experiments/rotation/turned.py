"""Dice of brains while the moving one is turned, for whole registrations: the paper's figure on rotation.

    python experiments/rotation/turned.py carry/turned.npz carry/turned_labels.npz experiments/rotation/results \\
        --method base-optimised=carl-base --method auto-optimised=auto --method ANTs=ants-synquick

What experiments/base/prepare.py packs: validation brains with voxels of 2 mm in a cube of 190 mm, and their labels with
voxels of 1 mm. The moving brain is turned about the middle of the cube, in each of three planes, and registered by
`carlreg.register` with its fields optimised as on a machine without a GPU, or without (`--no-optimisation`); or by
another program. Its labels are carried along unharmed: Dice of 14 subcortical structures is that of the two maps, not
of turned labels. Writes turned-NAME.json for each method, all pairs at every angle; those that are there are left out.
With `--dev` training subjects that were kept back, to choose on, and what `auto` saw.
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
"""A moving and a fixed image to a map of world points, and what else there is to tell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("labels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append", default=[], help="NAME=MODEL or NAME=PROGRAM, as often as need be")
    parser.add_argument("--no-optimisation", action="store_true")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--planes", nargs="+", default=list(PLANES), choices=PLANES)
    parser.add_argument("--angles", nargs="+", type=float, default=ANGLES, help="degrees")
    parser.add_argument("--dev", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="nothing is begun after that long")
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
        of = ["_to_".join(key.split("/")[-1] for key in pair) for pair in pairs]
        how = {"pairs": of, "method": Path(source).name, "optimised": not arguments.no_optimisation}
        others = [key for key, value in how.items() if report.get(key, value) != value]
        others += [key for key, value in facts.items() if report.get(key) != value]
        if report["rows"] and others:
            sys.exit(f"{path} holds other pairs or another method; expected the same: choose another name")
        report |= how | facts
        for key, value in (("commit", arguments.commit), ("machine", machine)):  # rows may be of several
            report[key] = ", ".join(dict.fromkeys([*filter(None, report.get(key, "").split(", ")), value]))
        for angle in arguments.angles:
            for plane in arguments.planes if angle else arguments.planes[:1]:  # 0° is the same in all of them
                known = any((row["degrees"], row["plane"]) == (angle, plane) for row in report["rows"])
                if known or time.monotonic() - start > arguments.seconds:
                    continue
                found = [score(algorithm, data, fine, pair, angle, plane) for pair in pairs]
                row = {"degrees": angle, "plane": plane, "dice": [score for score, _ in found]}
                if any(told for _, told in found):
                    row["told"] = [told for _, told in found]
                report["rows"].append(row)
                write_atomically(path, (json.dumps(report) + "\n").encode())
                print(name, plane, angle, [round(value, 3) for value in row["dice"]], row.get("told", ""), flush=True)


def drawn(pairs: list[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Pairs at random, as far as possible of different moving brains."""
    mixed = random.Random(0).sample(pairs, len(pairs))
    order = sorted(range(len(mixed)), key=lambda n: [pair[0] for pair in mixed[:n]].count(mixed[n][0]))
    return [mixed[n] for n in order[:count]]


def by_model(source: str, alone: bool) -> tuple[Algorithm, dict[str, Any]]:
    """A model's registrations, and its checksum."""
    model = load_model(source)
    options: dict[str, Any] = {"io_iterations": 0 if alone else None, "over": "fields", "certainty": False}

    def run(moving: Image, fixed: Image) -> tuple[Any, dict[str, Any]]:
        result = register(fixed=fixed, moving=moving, model=model, **options)
        return result.transform, result.settings["look"] or {}

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
    transform, told = algorithm(m, f)
    points = voxel_points(fixed).cpu().double().numpy()[0]
    found = map_points(m.world_to_unit(), transform(map_points(f.unit_to_world(), points)))
    phi = DisplacementField(torch.from_numpy(found - points).movedim(-1, 0)[None].to(fixed))
    of_moving, of_fixed = (labels[f"{key}/labels"][None, None].float() for key in pair)
    warped = warp(of_moving, compose(by, phi), like=of_fixed, mode="nearest")
    return mean_score(dice(warped, of_fixed)), told


def image_of(tensor: Tensor) -> Image:
    """Array axes run to the right, to the front and up: world coordinates are LPS."""
    return Image(tensor[0, 0].cpu().numpy(), np.diag([-MM, -MM, MM, 1.0]))


if __name__ == "__main__":
    main()
