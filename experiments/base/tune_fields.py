"""Compare settings of the optimisation of fields on kept-back training subjects (dev): Dice, folds and seconds.

    python experiments/base/tune_fields.py DATA --out experiments/base/results/fields-8.json
    python experiments/base/tune_fields.py DATA --out OUT.json --sets cardiac --settings '[{}, {"stiffness": 3}]'
    python experiments/base/tune_fields.py DATA --out OUT.json --val --settings '[null, {}]'

Every pair is prepared as `carl register` prepares it, and starts from the same answer of the network: on a CPU, from
the usual grid where scans have voxels for a fine one. "settings" are changed arguments of `optimize_fields`; {} has
those of `carl register`, null is the network alone. Labels are compared on the fixed scan's own voxels, at most 192 a
side. Results are written after each pair, and those that the output already has are skipped. `--table` prints the means
of a file. Files before fields-8.json were made by earlier versions of this script, from the network's usual grid.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.files.images import Image, read
from carlreg.files.orientation import to_closest_ras
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Transform, warp
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.fields import FIELD_WEIGHT, optimize_fields
from carlreg.objective.metrics import dice, mean_score
from carlreg.preparation import Prepared, prepare_pair
from carlreg.registration.options import RegisterOptions
from carlreg.registration.similarity import compare
from carlreg.registration.solve import _both, _field_grids, _field_settings, _with_better_colours

sys.path.insert(0, str(Path(__file__).parents[1]))
from made import commit, machine  # type: ignore[import-not-found]

LABELS = {
    "brain": (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60),
    "abdomen": tuple(range(1, 14)),
    "abdomen_mr": (1, 2, 3, 6),
    "ct_mr": (1, 2, 3, 6),
    "cardiac": (1, 2, 3),
    "hippocampus": (1, 2),
}
SCAN = ".nii.gz"
Settings = dict[str, Any]
SETTINGS: list[Settings | None] = [None, {}, *({"stiffness": amount} for amount in (0.3, 1.0, 3.0, 10.0))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="default", help="name or file of a model")
    parser.add_argument("--val", action="store_true", help="report pairs of validation subjects, with final settings")
    parser.add_argument("--sets", nargs="+", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--pairs", type=int, nargs="+", default=list(range(6)), help="numbers of the pairs of each set")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="a JSON list of keyword arguments")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--table", action="store_true", help="only print the means of the output")
    arguments = parser.parse_args()
    begin, rows = time.monotonic(), json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    if arguments.table:
        print("\n".join(means(rows)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(arguments.model, device)
    made = {"machine": torch.cuda.get_device_name() if device.type == "cuda" else machine(), "seed": 0}
    made |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "sha256": model.provenance["sha256"]}
    for name in arguments.sets:
        for number in arguments.pairs:
            known = [row["settings"] for row in rows if (row["set"], row["pair"]) == (name, number)]
            missing = [settings for settings in arguments.settings if settings not in known]
            if not missing or time.monotonic() - begin > arguments.seconds:
                continue
            pair = Pair.of(name, pairs(arguments.data, name, arguments.val)[number], model, device)
            for settings in missing:
                rows.append({"set": name, "pair": number, "settings": settings, "commit": commit()})
                rows[-1] |= pair.score(settings)
                print(json.dumps(rows[-1]), flush=True)
                arguments.out.write_text(json.dumps(made | {"rows": rows}, indent=1) + "\n")


def pairs(data: Path, name: str, val: bool) -> list[tuple[Path, Path]]:
    """(fixed, moving) of the last three training subjects, or the first three of val: for hearts the phases of one
    patient, for CT with MR one of each, otherwise different subjects."""

    def three(folder: str, each: int = 1) -> list[Path]:
        scans = sorted((data / folder / ("val" if val else "train")).glob(f"*{SCAN}"))
        scans = [path for path in scans if "_labels" not in path.name]
        return scans[: 3 * each] if val else scans[-3 * each :]

    if name == "cardiac":
        scans = three(name, 2)
        phases = [(scans[at], scans[at + 1]) for at in (0, 2, 4)]
        return phases + [(moving, fixed) for fixed, moving in phases]
    if name == "ct_mr":
        ct, mr = three("abdomen"), three("abdomen_mr")
        return [(ct[0], mr[0]), (mr[1], ct[1]), (ct[2], mr[2]), (mr[0], ct[1]), (ct[1], mr[2]), (mr[2], ct[0])]
    a, b, c = three(name)
    return [(a, b), (b, c), (c, a), (b, a), (c, b), (a, c)]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two scans on the grids of their fields, with labels, the network's answer, and what `carl register` would do."""

    maps: tuple[Transform, Transform]
    scans: dict[str, Any]
    labels: tuple[Tensor, Tensor]  # moving, fixed
    settings: Settings

    @classmethod
    def of(cls, name: str, paths: tuple[Path, Path], model: LoadedModel, device: torch.device) -> Pair:
        fixed, moving = paths
        quick = device.type == "cpu"
        pair = prepare_pair(read(fixed), read(moving), model, device, quick=quick)
        used = model.quickly() if quick and pair.fine else model.on_grid(pair.fixed.tensor.shape[2:])
        maps = _both(used.network, pair)
        comparison = compare(RegisterOptions(), maps[0], pair)
        options, shapes = comparison.options, _field_grids(pair, comparison.options)
        weight = FIELD_WEIGHT if options.regularity is None else options.regularity
        settings = {"similarity": options.io_sim, "weight": weight, **_field_settings(used.network, comparison)}
        settings["enough"] = comparison.enough
        pair = _with_better_colours(comparison, pair, maps, shapes, settings)
        scans: dict[str, Any] = {}
        for role, one, shape in zip(("moving", "fixed"), (pair.moving, pair.fixed), shapes, strict=True):
            scans |= {role: one.on_grid(shape)[0], f"{role}_spacing": one.spacing(shape)}
        labels = (
            on_grid(moving, pair.moving, shapes[0], LABELS[name]),
            on_grid(fixed, pair.fixed, shapes[1], LABELS[name]),
        )
        return cls(maps, scans, labels, settings)

    def score(self, settings: Settings | None) -> dict[str, Any]:
        begin, phi = time.perf_counter(), self.maps[0]
        if settings is not None:
            options: dict[str, Any] = {**self.scans, **self.settings, **settings}
            phi = optimize_fields(*self.maps, **options).transform
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        row = {"similarity": self.settings["similarity"], "seconds": round(time.perf_counter() - begin, 2)}
        moving, fixed = self.labels
        scores = dice(warp(moving, phi, like=fixed, mode="nearest"), fixed)
        return row | {"dice": round(mean_score(scores), 4), "folds": round(folding(phi, self.scans["fixed"]), 5)}


def on_grid(path: Path, one: Prepared, shape: tuple[int, ...], kept: tuple[int, ...]) -> Tensor:
    """The labels of a scan over what the network sees of it."""
    labels: Image = to_closest_ras(read(path.with_name(path.name.replace(SCAN, f"_labels{SCAN}"))))
    values = torch.from_numpy((np.isin(labels.data, kept) * labels.data).astype(np.int16))[None, None]
    assert one.source is not None
    return one.source[2].on(shape).resample_labels(values).to(one.tensor)


def means(rows: list[dict[str, Any]]) -> list[str]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["set"], json.dumps(row["settings"])), []).append(row)
    lines = []
    for (name, settings), group in sorted(found.items()):
        values = [float(np.mean([row[part] for row in group])) for part in ("dice", "folds", "seconds")]
        lines.append("{:12} {:2} pairs {:.4f} {:.4f} % {:6.2f} s  ".format(name, len(group), *values) + settings)
    return lines


if __name__ == "__main__":
    main()
