"""Pack brain, abdomen and hippocampus scans for training: one small file that a bare GPU machine can read.

    python experiments/base/prepare.py DATA carry/base.npz
    python experiments/base/prepare.py DATA carry/turned.npz --sets brain --isotropic 2
    python experiments/base/prepare.py DATA carry/turned_labels.npz --sets brain --isotropic 1 --side 191 --labels-only

DATA holds `brain`, `abdomen` and `hippocampus`, each with `train` and `val` folders of NAME.nii.gz and
NAME_labels.nii.gz. Scans are turned to the axis order and directions closest to RAS and stretched to the network's
grid (hippocampus crops, which are small, keep their own). For a network that learns rotations, `--isotropic` keeps
their proportions instead: voxels of so many mm around the middle of the scan, empty where it ends. `--labels-only`
packs the labels of the subjects that are scored, on a finer grid than their images. The last three training subjects of
each set are kept back as `dev`, to choose on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carlreg.geometry.grids import Grid, interpolate
from carlreg.objective.losses import gaussian_blur

SIDE = 96
DEV = 3
SETS = ("brain", "abdomen", "hippocampus")
SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--isotropic", type=float, metavar="MM", help="size of a voxel, where scans are not stretched")
    parser.add_argument("--side", type=int, default=SIDE, help="of the network's grid")
    parser.add_argument("--labels-only", action="store_true", help="of dev and val, to score by")
    parser.add_argument("--most", type=int, help="subjects per set and split at most, to try things out")
    arguments = parser.parse_args()
    packed: dict[str, NDArray[np.uint8]] = {}
    for name in arguments.sets:
        train = subjects(arguments.data / name / "train")
        splits = {"train": train[:-DEV], "dev": train[-DEV:], "val": subjects(arguments.data / name / "val")}
        for split, paths in splits.items():
            if arguments.labels_only and split == "train":
                continue
            for path in paths[: arguments.most]:
                side = None if name == "hippocampus" else arguments.side
                if not arguments.labels_only:
                    stem = path.name.removesuffix(".nii.gz")
                    packed[f"{name}/{split}/{stem}"] = image(path, side, arguments.isotropic)
                labels = path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz"))
                packed[f"{name}/{split}/{path.name.removesuffix('.nii.gz')}/labels"] = label_map(
                    labels, side, arguments.isotropic, name
                )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **packed)  # type: ignore[arg-type]
    print(f"{len(packed)} volumes, {arguments.out.stat().st_size / 2**20:.1f} MiB")


def subjects(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.nii.gz") if not p.name.endswith("_labels.nii.gz"))


def volume(path: Path, side: int | None, isotropic: float | None) -> tuple[Tensor, Tensor]:
    """A scan, and where in its unit coordinates the network's voxels lie."""
    scan = nib.as_closest_canonical(nib.load(path))
    data = torch.from_numpy(np.asarray(scan.dataobj).astype(np.float32))[None, None]
    if isotropic is None or side is None:
        grid = Grid.of(scan.shape if side is None else (side,) * 3)
    else:
        steps = [isotropic / (n - 1) / float(mm) for n, mm in zip(scan.shape, scan.header.get_zooms(), strict=True)]
        grid = Grid((side,) * 3, tuple(0.5 - (side - 1) / 2 * step for step in steps), tuple(steps))
    return data, grid.points()[None]


def image(path: Path, side: int | None, isotropic: float | None) -> NDArray[np.uint8]:
    scan, points = volume(path, side, isotropic)
    if side is not None:
        scan = gaussian_blur(scan, 0.5) if max(scan.shape) > 1.5 * side else scan
        scan = interpolate(scan, points, outside="zeros" if isotropic else "border")
    return scan[0, 0].round().clamp(0, 255).byte().numpy()


def label_map(path: Path, side: int | None, isotropic: float | None, name: str) -> NDArray[np.uint8]:
    labels, points = volume(path, side, isotropic)
    if side is not None:
        labels = interpolate(labels, points, mode="nearest", outside="zeros" if isotropic else "border")
    if name == "brain":  # numbered from 1, what is not subcortical left out
        labels = sum((labels == value).float() * (i + 1) for i, value in enumerate(SUBCORTICAL))  # type: ignore[assignment]
    return labels[0, 0].byte().numpy()


if __name__ == "__main__":
    main()
