"""Pack retinas and slices of all datasets for `two_d.py` into one small file that a bare GPU machine can read.

    python experiments/base/prepare_2d.py DATA carry/p2d/two_d.npz

DATA is the folder described in `prepare.py`; its folder `retina` holds DRIVE's vessel segmentations. Slices at the same
place in several subjects are stored together: at a fraction of the brain's bounding box, or through the centre of an
organ. Each is cropped to its foreground and stretched to 176 × 176, with its labels. Only training subjects are packed;
the last three of each set are marked as `dev` and have slices at fewer places. Of `retina`, all 20 images are packed,
in the order of file names.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from numpy.typing import NDArray
from prepare import FREESURFER, SUBCORTICAL, numbers_of, splits  # type: ignore[import-not-found]

from carlreg.geometry.resizing import resize, resize_labels
from carlreg.paper_data import retina

SIDE = 176
FRACTIONS, MORE_FRACTIONS = (0.35, 0.5, 0.65), (0.2, 0.28, 0.42, 0.58, 0.72, 0.8)
"""Places of all subjects, and further ones of those to train on."""
HEART, MORE_HEART = (0.25, 0.5, 0.75), (0.1, 0.38, 0.62, 0.9)
MOST = {"hippocampus": 60}
"""Use only so many training subjects of a set."""
KIDNEYS = (2, 3)
Organs = tuple[tuple[int, tuple[int, ...]], ...]
ORGANS: Organs = ((2, (6,)), (2, (1,)), (2, KIDNEYS), (2, (11,)), (1, KIDNEYS), (1, (6,)), (0, (6,)))
"""Places of abdomens: the axis across a slice, and the organs through whose centre it passes."""
MORE_ORGANS: Organs = (
    (2, (7,)),
    (2, (4,)),
    (2, (12, 13)),
    (2, (8,)),
    (1, (8,)),
    (1, (11,)),
    (0, (8,)),
    (0, (2,)),
    (0, (3,)),
)
MR_ORGANS: Organs = ORGANS[:3]
MORE_MR_ORGANS: Organs = ((2, (2,)), (2, (3,)), (2, (1, 6)))
LUNG_WINDOW = (-1000.0, 275.0)
Volume = NDArray[np.float32]
Place = tuple[int, int]
"""The axis across a slice, and its index along that axis."""


@dataclass
class Bank:
    """The slices of one set."""

    images: list[NDArray[np.uint8]] = field(default_factory=list)
    labels: list[NDArray[np.uint8]] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    subject: list[int] = field(default_factory=list)
    dev: list[bool] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    drive = [file for split in ("train", "test") for file in retina.files(arguments.data / "retina", split)]
    vessels = np.stack([retina.read_gif(file) > 127 for file in drive])
    packed: dict[str, NDArray[np.generic]] = {
        "bits": np.packbits(vessels.reshape(len(vessels), -1), axis=1),
        "shape": np.array(vessels.shape),
    }
    for name in ("brain", "brain_ibsr", "brain_maps", "abdomen", "abdomen_mr", "cardiac", "hippocampus", "lung"):
        bank = slices(arguments.data, name)
        packed |= {f"{name}/{part}": np.array(values) for part, values in vars(bank).items()}
        print(f"{name}: {len(bank.images)} slices at {len(set(bank.place))} places", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **packed)  # type: ignore[arg-type]
    print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.1f} MiB")


def slices(data: Path, name: str) -> Bank:
    bank, parts = Bank(), splits(data, name)
    chosen = [(path, False) for path in parts["train"][: MOST.get(name)]] + [
        (path, True) for path in parts.get("dev", [])
    ]
    for number, (path, is_dev) in enumerate(chosen):
        scan, labels = volumes(path, name)
        for place, (axis, index) in places(scan, labels, name, more=not is_dev):
            image, map_ = (np.take(part, index, axis) for part in (scan, labels))
            box = foreground(image)
            is_map = name == "brain_maps"
            bank.images.append(stretched(image[box], as_labels=is_map))
            bank.labels.append(stretched(map_[box], as_labels=True))
            bank.place.append(place)
            bank.subject.append(number // 2 if name in ("cardiac", "lung") else number)
            bank.dev.append(is_dev)
    return bank


def volumes(path: Path, name: str) -> tuple[Volume, Volume]:
    """A scan from 0 to 255, or a label map of `brain_maps`, and its labels, closest to RAS."""
    scan = read(path)
    if name == "lung":
        low, high = LUNG_WINDOW
        scan = 255 * ((scan - low) / (high - low)).clip(0, 1)
    if name == "brain_maps":
        labels, values = scan, [numbers_of(path)[value] for value in FREESURFER]
    else:
        beside = path.with_name(path.name.replace(".nii", "_labels.nii"))
        labels, values = read(beside) if beside.exists() else np.zeros_like(scan), list(SUBCORTICAL)
    if name in ("brain", "brain_maps"):  # subcortical structures only, numbered from 1
        labels = sum((labels == value) * np.float32(i + 1) for i, value in enumerate(values))
    return scan, labels


def read(path: Path) -> Volume:
    return np.asarray(nib.as_closest_canonical(nib.load(path)).dataobj).astype(np.float32)


def places(scan: Volume, labels: Volume, name: str, *, more: bool) -> Iterator[tuple[int, Place]]:
    """The places of a set and where they are in this scan; those through organs that it does not show are left out."""
    if name in ("abdomen", "abdomen_mr"):
        organs, others = (ORGANS, MORE_ORGANS) if name == "abdomen" else (MR_ORGANS, MORE_MR_ORGANS)
        for number, (axis, values) in enumerate((*organs, *others) if more else organs):
            where = np.isin(labels, values).nonzero()[axis]
            if where.size:
                yield number, (axis, round(where.mean()))
        return
    axes: tuple[int, ...] = (0, 1, 2)
    fractions: tuple[float, ...] = FRACTIONS
    further: tuple[float, ...] = MORE_FRACTIONS
    if name == "cardiac":
        shown, axes, fractions, further = labels == 3, (2,), HEART, MORE_HEART
    elif name in ("brain", "brain_maps"):
        shown = scan > 0 if name == "brain" else labels > 0
    else:
        shown, fractions, further = scan > 0.1 * scan.max(), (0.5,), (0.35, 0.65)
    for axis in axes:
        where = shown.any(axis=tuple({0, 1, 2} - {axis})).nonzero()[0]
        for fraction in (*fractions, *further) if more else fractions:
            yield 100 * axis + round(100 * fraction), (axis, round(where[0] + fraction * (where[-1] - where[0])))


def foreground(image: Volume) -> tuple[slice, ...]:
    """The bounding box of what is not black, with a small margin."""
    shown, box = image > 0.06 * image.max(), []
    for axis in (0, 1):
        where = shown.any(axis=1 - axis).nonzero()[0]
        margin = round(0.04 * image.shape[axis])
        box.append(slice(max(int(where[0]) - margin, 0), int(where[-1]) + 1 + margin))
    return tuple(box)


def stretched(image: Volume, *, as_labels: bool) -> NDArray[np.uint8]:
    data = torch.from_numpy(np.ascontiguousarray(image))[None, None]
    data = (resize_labels if as_labels else resize)(data, (SIDE, SIDE))
    return data[0, 0].round().clamp(0, 255).byte().numpy()


if __name__ == "__main__":
    main()
