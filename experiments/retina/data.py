"""Warped vessel segmentations of the DRIVE dataset: pairs of the same retina, in three variants.

    python experiments/retina/data.py FOLDER carry/retina.npz     # packs the 20 segmentations, 0.2 MB

FOLDER is a DRIVE download, or a folder with its twenty `*_manual1.gif` (vessels of images 21 to 40). In the order of
file names, the first 14 are for training and the last 6 for testing. Each image and its vertical flip is the moving
image of 20 pairs; the fixed image is that retina warped by two elastic grids. Baseline pads both images by 200 pixels
below. Shift pads the fixed image above instead, and Scale Shift also shrinks it to 80 %. All are averaged over blocks
of 4 × 4.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.geometry.grids import interpolate, voxel_points

Variant = Literal["Baseline", "Shift", "Scale Shift"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
TRAINING = 14
"""Images for training; the others are for testing."""
WARPS, PADDING, POOLING, ZOOM = 20, 200, 4, 0.8
ELASTIC = ((25.0, 3), (12.0, 6))
"""Standard deviation at the control points in pixels, and the number of control points along each axis."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of images: pair n is moving[retina[n]] and fixed[n], vessels 1 and background 0."""

    moving: Tensor  # (retinas, 1, height, width)
    fixed: Tensor  # (pairs, 1, height, width)
    retina: Tensor  # (pairs,)

    def __len__(self) -> int:
        return len(self.fixed)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Moving and fixed images of these pairs."""
        return self.moving[self.retina[index]], self.fixed[index]


def build(segmentations: Tensor, variant: Variant, seed: int) -> Pairs:
    """Pairs made from binary images (N, 1, height, width), on their device. The warps depend on the seed alone, so that
    the same seed gives the same retinas in every variant."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; expected one of {', '.join(VARIANTS)}")
    zoom = ZOOM if variant == "Scale Shift" else 1.0
    generator = torch.Generator().manual_seed(seed)
    retinas = torch.cat([segmentations, segmentations.flip(2)])
    warped = []
    for retina in retinas.split(1):
        points = torch.cat([elastic_points(retina, zoom, generator) for _ in range(WARPS)])
        warped.append(interpolate(retina, points, outside="zeros"))
    above = PADDING if variant != "Baseline" else 0
    return Pairs(
        shrink(retinas, above=0),
        shrink(torch.cat(warped), above=above),
        torch.arange(len(retinas), device=retinas.device).repeat_interleave(WARPS),
    )


def shrink(images: Tensor, above: int) -> Tensor:
    """Pad by 200 pixels, this many of them above and the rest below, and average over blocks."""
    return F.avg_pool2d(F.pad(images, (0, 0, above, PADDING - above)), POOLING)


def elastic_points(image: Tensor, zoom: float, generator: torch.Generator) -> Tensor:
    """Source point of each pixel of a warped image, (1, height, width, 2): first grid ∘ second grid.

    The second grid includes the zoom: points move away from the centre, so that the retina becomes smaller.
    """
    points = voxel_points(image)
    size = torch.tensor([n - 1 for n in image.shape[2:]], dtype=points.dtype, device=points.device)
    fields = []
    for sigma, count in ELASTIC:
        shifts = sigma * torch.randn(1, 2, count, count, dtype=torch.float64, generator=generator)
        rows, columns = (spline_matrix(count, n) for n in image.shape[2:])
        fields.append((rows @ shifts @ columns.mT).to(points) / size[:, None, None])
    second = 0.5 + (points - 0.5) / zoom + fields[1].movedim(1, -1)
    return second + interpolate(fields[0], second).movedim(1, -1)


def spline_matrix(count: int, size: int) -> Tensor:
    """(size, count): the cubic spline through `count` evenly spaced values, mirrored at the ends, at `size` points."""

    def basis(position: Tensor) -> Tensor:
        index, fraction = position.floor(), position - position.floor()
        weights = [
            (1 - fraction) ** 3 / 6,
            (4 - 6 * fraction**2 + 3 * fraction**3) / 6,
            (1 + 3 * fraction + 3 * fraction**2 - 3 * fraction**3) / 6,
            fraction**3 / 6,
        ]
        matrix = torch.zeros(len(position), count, dtype=torch.float64)
        for offset, weight in zip((-1, 0, 1, 2), weights, strict=True):
            mirrored = (count - 1) - ((index + offset).abs() - (count - 1)).abs()
            matrix += weight[:, None] * F.one_hot(mirrored.long(), count)
        return matrix

    through = basis(torch.arange(count, dtype=torch.float64))
    return basis(torch.linspace(0, count - 1, size, dtype=torch.float64)) @ torch.linalg.inv(through)


def load(path: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Segmentations for training and for testing, (N, 1, 584, 565), from a file of this script."""
    with np.load(path) as pack:
        bits, shape = pack["bits"], tuple(pack["shape"])
    images = np.unpackbits(bits, axis=1)[:, : shape[1] * shape[2]].reshape(shape)
    every = torch.from_numpy(images).float()[:, None].to(device)
    return every[:TRAINING], every[TRAINING:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    from carlreg.paper_data import retina

    files = [file for split in ("train", "test") for file in retina.files(arguments.folder, split)]
    images = np.stack([retina.read_gif(file) > 127 for file in files])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.out, bits=np.packbits(images.reshape(20, -1), axis=1), shape=images.shape)
    print(f"{len(images)} segmentations of {images.shape[1]} × {images.shape[2]}, {images.mean():.1%} vessels")


if __name__ == "__main__":
    main()
