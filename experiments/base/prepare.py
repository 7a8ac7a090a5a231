"""Pack scans for training into small files that a bare GPU machine can read.

    python experiments/base/prepare.py DATA carry/base.npz
    python experiments/base/prepare.py DATA carry/all.npz --sets all --most-mib 20
    python experiments/base/prepare.py DATA carry/turned.npz --sets brain --isotropic 2
    python experiments/base/prepare.py DATA carry/turned_labels.npz --sets brain --isotropic 1 --side 191 --labels-only

DATA holds a folder for each set, most of them with `train` and `val` folders of NAME.nii.gz and NAME_labels.nii.gz.
Scans are reoriented to the axes closest to RAS and resampled to the network's grid (small hippocampus crops keep their
own grid; hearts and abdominal MRI keep their slices). For networks that learn rotations, `--isotropic` uses cubic
voxels of that many mm around the centre of the scan instead, with zeros beyond the scan. `--labels-only` packs only the
labels of `dev` and `val`, for instance on a finer grid than the images. `--structures` adds NAME/structures, a label
map of the structures of `structure_net.py` (255 where a voxel is part of one, but the labels do not tell of which), for
the sets whose labels name them. The last three training subjects of each set (patients of `cardiac`) are kept back as
`dev`.

For `brain_maps`, which has label maps only, NAME is the whole map and NAME/labels the subcortical structures, numbered
as in `brain`. Lung CT is packed in steps of 8 HU from −1024; both of its pairs are for training. With `--most-mib`, the
output is split into files of at most that size: all-1.npz, all-2.npz and so on.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from carlreg.geometry.grids import Grid, interpolate
from carlreg.objective.losses import gaussian_blur

sys.path.insert(0, str(Path(__file__).parents[2]))
from experiments.base.structure_net import STRUCTURES

SIDE = 96
DEV = 3
SETS = ("brain", "abdomen", "hippocampus")
MORE = ("brain_ibsr", "brain_maps", "abdomen_mr", "cardiac", "lung")
SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
"""Right and left accumbens, amygdala, caudate, hippocampus, pallidum, putamen, thalamus."""
FREESURFER = (58, 26, 54, 18, 50, 11, 53, 17, 52, 13, 51, 12, 49, 10)
"""The same structures in FreeSurfer's numbering."""
UNSURE = 255
"""In maps of structures: tissue of which the labels do not say what it is."""
VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    "brain": {
        **{
            f"{side} {name}": (values[number],)
            for name, *values in (
                ("cerebral white matter", 45, 44),
                ("cerebellar white matter", 41, 40),
                ("cerebellar cortex", 39, 38),
                ("thalamus", 60, 59),
                ("caudate", 37, 36),
                ("putamen", 58, 57),
                ("pallidum", 56, 55),
                ("hippocampus", 48, 47),
                ("amygdala", 32, 31),
                ("accumbens", 30, 23),
                ("ventral diencephalon", 62, 61),
            )
            for number, side in enumerate(("left", "right"))
        },
        "left cerebral cortex": tuple(range(101, 208, 2)),
        "right cerebral cortex": tuple(range(100, 208, 2)),
        "left lateral ventricle": (50, 52),
        "right lateral ventricle": (49, 51),
        "third ventricle": (4,),
        "fourth ventricle": (11,),
        "brain stem": (35,),
        "unsure": (53, 54, 71, 72, 73, 75, 76),
    },
    "abdomen": {
        name: (number,)
        for number, name in enumerate(
            (
                *("spleen", "right kidney", "left kidney", "gallbladder", "oesophagus", "liver", "stomach", "aorta"),
                *("inferior vena cava", "portal and splenic veins", "pancreas", "right adrenal", "left adrenal"),
            ),
            start=1,
        )
    },
    "abdomen_mr": {"spleen": (1,), "right kidney": (2,), "left kidney": (3,), "liver": (6,)},
    "cardiac": {"right ventricle of the heart": (1,), "myocardium": (2,), "left ventricle of the heart": (3,)},
    "hippocampus": {"anterior hippocampus": (1,), "posterior hippocampus": (2,)},
}
"""The labels of each structure in the sets. Those of `brain_maps` are derived from the maps themselves."""
LUNGS = {"lung/plastimatch": ("t0", "t5"), "lung/elastix": ("baseline", "followup")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=(*SETS, *MORE, "all"))
    parser.add_argument("--most-mib", type=float, help="split the output into files of at most this size")
    parser.add_argument(
        "--isotropic", type=float, metavar="MM", help="use cubic voxels of this size instead of stretching scans"
    )
    parser.add_argument("--side", type=int, default=SIDE, help="side of the network's grid")
    parser.add_argument("--labels-only", action="store_true", help="pack only the labels of dev and val, for scoring")
    parser.add_argument("--structures", action="store_true", help="add label maps of all known structures")
    parser.add_argument("--most", type=int, help="use at most N subjects of each set and split, to try the script")
    arguments = parser.parse_args()
    packed: dict[str, NDArray[np.uint8]] = {}
    for name in (*SETS, *MORE) if "all" in arguments.sets else arguments.sets:
        for split, paths in splits(arguments.data, name).items():
            if arguments.labels_only and split == "train":
                continue
            for path in paths[: arguments.most]:
                key = f"{name}/{split}/{path.name.removesuffix('.nii.gz')}"
                if not arguments.labels_only:
                    packed[key] = image(path, arguments.side, arguments.isotropic, name)
                labels = path if name == "brain_maps" else path.with_name(path.name.replace(".nii", "_labels.nii"))
                if labels.exists():
                    packed[f"{key}/labels"] = label_map(labels, arguments.side, arguments.isotropic, name)
                    if arguments.structures and name in VALUES:
                        packed[f"{key}/structures"] = structures(labels, arguments.side, arguments.isotropic, name)
    write(packed, arguments.out, arguments.most_mib)


def write(packed: dict[str, NDArray[np.uint8]], out: Path, most_mib: float | None) -> None:
    """Write one file, or several if a volume would make the current one too large."""
    out.parent.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, NDArray[np.uint8]]] = [{}]
    size = 0.0
    for key, volume in packed.items():
        own = len(zlib.compress(volume.tobytes())) / 2**20 + 0.001
        if most_mib is not None and files[-1] and size + own > most_mib:
            files.append({})
            size = 0.0
        files[-1][key] = volume
        size += own
    for number, content in enumerate(files, start=1):
        path = out if most_mib is None else out.with_name(f"{out.stem}-{number}{out.suffix}")
        np.savez_compressed(path, **content)  # type: ignore[arg-type]
        print(f"{path.name}: {len(content)} volumes, {path.stat().st_size / 2**20:.1f} MiB")


def splits(data: Path, name: str) -> dict[str, list[Path]]:
    """The scans of a set: `train`, `dev` and `val`."""
    if name == "lung":
        return {"train": [data / folder / f"{scan}.nii.gz" for folder, pair in LUNGS.items() for scan in pair]}
    if name in ("brain_ibsr", "brain_maps"):
        scans = subjects(data / name)
        return {"train": scans[:-DEV], "dev": scans[-DEV:]}
    scans, kept = subjects(data / name / "train"), DEV * (2 if name == "cardiac" else 1)
    return {"train": scans[:-kept], "dev": scans[-kept:], "val": subjects(data / name / "val")}


def subjects(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.nii.gz") if not p.name.endswith("_labels.nii.gz"))


def volume(path: Path, side: int, isotropic: float | None, name: str) -> tuple[Tensor, Tensor | None]:
    """A scan, and the network's voxels in its unit coordinates; None if the scan keeps its own grid."""
    scan = nib.as_closest_canonical(nib.load(path))
    data = torch.from_numpy(np.asarray(scan.dataobj).astype(np.float32))[None, None]
    if name == "hippocampus":
        return data, None
    if isotropic is None:
        shape = [min(side, n) for n in scan.shape] if name in ("cardiac", "abdomen_mr") else [side] * 3
        return data, Grid.of(shape).points()[None]
    steps = [isotropic / (n - 1) / float(mm) for n, mm in zip(scan.shape, scan.header.get_zooms(), strict=True)]
    grid = Grid((side,) * 3, tuple(0.5 - (side - 1) / 2 * step for step in steps), tuple(steps))
    return data, grid.points()[None]


def image(path: Path, side: int, isotropic: float | None, name: str) -> NDArray[np.uint8]:
    if name == "brain_maps":
        return label_map(path, side, isotropic, "whole")
    scan, points = volume(path, side, isotropic, name)
    if name == "lung":
        scan = (scan + 1024) / 8
    if points is not None:
        if name in SETS:
            scan = gaussian_blur(scan, 0.5) if max(scan.shape) > 1.5 * side else scan
        else:  # blur within slices, which are finer than the grid
            slices = scan[0].movedim(-1, 0)
            width = max(scan.shape[2:4]) / side / 2.5
            scan = gaussian_blur(slices, width).movedim(0, -1)[None] if width > 0.5 else scan
        scan = interpolate(scan, points, outside="zeros" if isotropic else "border")
    return scan[0, 0].round().clamp(0, 255).byte().numpy()


def label_map(path: Path, side: int, isotropic: float | None, name: str) -> NDArray[np.uint8]:
    labels, points = volume(path, side, isotropic, name)
    if points is not None:
        labels = interpolate(labels, points, mode="nearest", outside="zeros" if isotropic else "border")
    if name in ("brain", "brain_maps"):  # subcortical structures only, numbered from 1
        values = SUBCORTICAL if name == "brain" else [numbers_of(path)[value] for value in FREESURFER]
        labels = sum((labels == value).float() * (i + 1) for i, value in enumerate(values))  # type: ignore[assignment]
    return labels[0, 0].byte().numpy()


def structures(path: Path, side: int, isotropic: float | None, name: str) -> NDArray[np.uint8]:
    """The label map as one of `STRUCTURES`."""
    labels, points = volume(path, side, isotropic, name)
    if points is not None:
        labels = interpolate(labels, points, mode="nearest", outside="zeros" if isotropic else "border")
    table = np.zeros(256, dtype=np.uint8)
    for structure, values in VALUES[name].items():
        table[list(values)] = UNSURE if structure == "unsure" else 1 + STRUCTURES.index(structure)
    return table[labels[0, 0].byte().numpy()]


def numbers_of(path: Path) -> dict[int, int]:
    """FreeSurfer's numbers mapped to those in the label maps of this folder."""
    values = json.loads((path.parent / "label_values.json").read_text())
    return {freesurfer: int(own) for own, freesurfer in values.items()}


if __name__ == "__main__":
    main()
