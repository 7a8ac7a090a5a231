"""Prepare pairs of kept-apart subjects for `fields.py`, which runs where neither the data nor their readers are.

    python benchmarks/pack.py DATA pairs.npz
    python benchmarks/pack.py DATA dev-brain.npz --dev --sets brain --most 2

Of the first two val subjects of each set, or with `--dev` of ordered pairs of the last three train subjects, what the
network sees, on the scans' own voxels: images and labels as bytes, and the size of the voxels in mm. Patient data: do
not commit the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.files.images import read
from carlreg.files.orientation import to_closest_ras
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.preparation import prepare_pair

SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
SCAN = ".nii.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dev", action="store_true", help="pairs to choose settings on")
    parser.add_argument("--sets", nargs="+", default=["brain", "abdomen"])
    parser.add_argument("--most", type=int, help="pairs of each set, at most")
    arguments = parser.parse_args()
    model = load_model("default", "cpu")
    arrays: dict[str, Any] = {}
    for name in arguments.sets:
        for number, paths in enumerate(pairs(arguments.data / name, arguments.dev)[: arguments.most]):
            key = f"{name}-{number}" if arguments.dev else name
            arrays |= {f"{key}/{part}": array for part, array in packed(name, paths, model).items()}
    np.savez_compressed(arguments.out, **arrays)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.1f} MiB")


def pairs(folder: Path, dev: bool) -> list[tuple[Path, Path]]:
    """(fixed, moving): for hearts the phases of one patient, otherwise different subjects."""
    split = folder / ("train" if dev else "val")
    paths = sorted(path for path in split.glob(f"*{SCAN}") if "_labels" not in path.name)
    if not dev:
        return [(paths[0], paths[1])]
    if folder.name == "cardiac":
        phases = [(paths[at], paths[at + 1]) for at in (-6, -4, -2)]
        return phases + [(moving, fixed) for fixed, moving in phases]
    a, b, c = paths[-3:]
    return [(a, b), (b, c), (c, a), (b, a), (c, b), (a, c)]


def packed(name: str, paths: tuple[Path, Path], model: LoadedModel) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    pair = prepare_pair(read(paths[0]), read(paths[1]), model, torch.device("cpu"))
    for role, path, one in zip(("fixed", "moving"), paths, pair, strict=True):
        shape = [min(192, side) for side in one.sides]
        labels = to_closest_ras(read(path.with_name(path.name.replace(SCAN, f"_labels{SCAN}")))).data
        values: Any = np.isin(labels, SUBCORTICAL) * labels if name == "brain" else labels
        assert one.source is not None
        of_frame = one.source[2].on(shape).resample_labels(torch.from_numpy(values.astype(np.int16))[None, None])
        arrays[f"{role}/image"] = (255 * one.on_grid(shape)[0]).round().byte()[0, 0].numpy()
        arrays[f"{role}/labels"] = of_frame.byte()[0, 0].numpy()
        arrays[f"{role}/spacing"] = np.array(one.spacing(shape))
    return arrays


if __name__ == "__main__":
    main()
