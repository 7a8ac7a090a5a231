"""Pack brain, abdomen and hippocampus scans for training: one small file that a bare GPU machine can read.

    python experiments/base/prepare.py DATA carry/base.npz

DATA holds `brain`, `abdomen` and `hippocampus`, each with `train` and `val` folders of NAME.nii.gz and
NAME_labels.nii.gz. Scans are turned to the axis order and directions closest to RAS and stretched to the network's
grid (hippocampus crops, which are small, keep their own). The last three training subjects of each set are kept back
as `dev`, to choose on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carlreg.grids import Grid, interpolate
from carlreg.losses import gaussian_blur

SIDE = 96
DEV = 3
SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, help="subjects per set and split at most, to try things out")
    arguments = parser.parse_args()
    packed: dict[str, NDArray[np.uint8]] = {}
    for name in ("brain", "abdomen", "hippocampus"):
        train = subjects(arguments.data / name / "train")
        splits = {"train": train[:-DEV], "dev": train[-DEV:], "val": subjects(arguments.data / name / "val")}
        for split, paths in splits.items():
            for path in paths[: arguments.most]:
                side = None if name == "hippocampus" else SIDE
                packed[f"{name}/{split}/{path.name.removesuffix('.nii.gz')}"] = image(path, side)
                labels = path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz"))
                packed[f"{name}/{split}/{path.name.removesuffix('.nii.gz')}/labels"] = label_map(labels, side, name)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **packed)  # type: ignore[arg-type]
    print(f"{len(packed)} volumes, {arguments.out.stat().st_size / 2**20:.1f} MiB")


def subjects(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.nii.gz") if not p.name.endswith("_labels.nii.gz"))


def volume(path: Path) -> Tensor:
    data = np.asarray(nib.as_closest_canonical(nib.load(path)).dataobj)
    return torch.from_numpy(data.astype(np.float32))[None, None]


def image(path: Path, side: int | None) -> NDArray[np.uint8]:
    scan = volume(path)
    if side is not None:
        scan = gaussian_blur(scan, 0.5) if max(scan.shape) > 1.5 * side else scan
        scan = interpolate(scan, Grid.of((side,) * 3).points()[None])
    return scan[0, 0].round().clamp(0, 255).byte().numpy()


def label_map(path: Path, side: int | None, name: str) -> NDArray[np.uint8]:
    labels = volume(path)
    if side is not None:
        labels = interpolate(labels, Grid.of((side,) * 3).points()[None], mode="nearest")
    if name == "brain":  # numbered from 1, what is not subcortical left out
        labels = sum((labels == value).float() * (i + 1) for i, value in enumerate(SUBCORTICAL))  # type: ignore[assignment]
    return labels[0, 0].byte().numpy()


if __name__ == "__main__":
    main()
