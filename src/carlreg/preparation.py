"""From a scan to a tensor: intensities, foreground, and the grid on which a network sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from carlreg.fast.precision import full_precision
from carlreg.files.images import Image, ImageError, Matrix, _check_finite, _times, check_same_grid, map_points
from carlreg.files.orientation import to_closest_ras
from carlreg.geometry.resizing import averaging, resize, resize_labels
from carlreg.model.loaded import CT_RANGE, LoadedModel, Prepare

LEAST_SIDE = 4
PERCENTILES = (0.1, 99.9)
FULL, MARGIN = 2 / 3, 0.05
"""A side that shows something along less of its length than `FULL` is cut to it; so much stays free at either end."""


# ---- intensities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preprocessing:
    """What `preprocess` did: intensities from `low` to `high` became 0 to 1, those beyond were clamped."""

    kind: str  # "CT" or "percentiles"
    low: float
    high: float
    note: str


def preprocess(
    image: Image, mask: Image | None = None, *, ct_range: tuple[float, float] = CT_RANGE
) -> tuple[Tensor, Preprocessing]:
    """Intensities as (1, 1, *shape) float32 from 0 to 1, and what was done. Needs no modality.

    CT is recognised by its values: at least 0.1 % of the voxels between −1100 and −500 (air, lung, bowel gas), at
    least 2 % between −200 and 300 (soft tissue), and at most 2 % below −1100 apart from the minimum itself, which may
    be padding. It is clamped to `ct_range`, −1000…1000 HU if not said otherwise: a model wants what it saw in training.

    Anything else runs from the 0.1st percentile of all voxels (the background, where there is one) to the 99.9th of
    the voxels above that, so that a large background does not count. A mask restricts the voxels that are counted,
    not those that are returned.

    >>> tensor, done = preprocess(read("scan.nii.gz"))
    """
    data = image.data
    if min(image.shape) < LEAST_SIDE:
        raise ImageError(
            f"{image.name} has {_times(image.shape)} voxels; expected at least {LEAST_SIDE} along every axis: "
            "give the whole volume (for DICOM its folder), or save a single slice as a 2-D image"
        )
    _check_finite(data, image.name)
    values = data if mask is None else data[inside(mask, image)]
    if values.min() == values.max():
        where = "" if mask is None else " inside its mask"
        raise ImageError(f"{image.name} is constant{where}: every voxel is {values.min()}; expected an image")
    if _is_ct(data):
        low, high = ct_range
        done = Preprocessing("CT", low, high, f"recognised as CT by its values; {low:g}…{high:g} HU scaled to 0…1")
    else:
        low = float(np.percentile(values, PERCENTILES[0]))
        above = values[values > low]
        high = float(np.percentile(above, PERCENTILES[1])) if above.size else low
        if high <= low:  # nearly every voxel is the maximum
            low, high = float(values.min()), float(values.max())
        note = f"{low:g}…{high:g}, the {PERCENTILES[0]} and {PERCENTILES[1]} percentiles, scaled to 0…1"
        done = Preprocessing("percentiles", low, high, note)
    wide = np.float64 if data.dtype.itemsize == 8 else np.float32
    scaled = np.clip((data - wide(low)) / wide(high - low), 0, 1).astype(np.float32)
    return torch.from_numpy(scaled)[None, None], done


def _is_ct(data: npt.NDArray[Any]) -> bool:
    minimum = data.min()
    if minimum > CT_RANGE[0] / 2:
        return False
    gas = np.mean((data >= -1100) & (data <= -500))
    tissue = np.mean((data >= -200) & (data <= 300))
    below = np.mean((data < -1100) & (data > minimum))
    return bool(gas >= 0.001 and tissue >= 0.02 and below <= 0.02)


def inside(mask: Image, image: Image) -> npt.NDArray[np.bool_]:
    """Where the mask is not zero, on the image's voxels: the two must lie on the same grid to a tenth of a voxel."""
    check_same_grid(mask, image, "a mask")
    chosen = mask.data != 0
    if not chosen.any():
        raise ImageError(f"{mask.name} is empty; expected a mask with voxels other than 0")
    return cast("npt.NDArray[np.bool_]", chosen)


@dataclass(frozen=True)
class Frame:
    """Another grid of voxels in an image: `step` of the image's voxels apart, its middle at the fractional index
    `centre`. Beyond the image there are zeros."""

    shape: tuple[int, ...]
    centre: tuple[float, ...]
    step: tuple[float, ...]

    @classmethod
    def cubic(cls, image: Image, shape: Sequence[int], centre: Sequence[float], voxel: float) -> Frame:
        """Of cubic voxels, of so many millimetres."""
        return cls(tuple(shape), tuple(centre), tuple(voxel / mm for mm in image.spacing))

    @classmethod
    def cut(cls, there: Tensor, shape: Sequence[int], sides: Sequence[bool]) -> Frame:
        """Of an image that shows something where `there` is true. The named sides are cut to it, wherever in the image
        it lies, and leave `MARGIN` of the frame free at either end; the others are seen whole."""
        centre, step = [], []
        for (low, high), cut, old, new in zip(_ends(there), sides, there.shape, shape, strict=True):
            long = max(high - low + 1, LEAST_SIDE) / (1 - 2 * MARGIN) - 1 if cut else old - 1
            centre.append((low + high if cut else old - 1) / 2)
            step.append(long / max(new - 1, 1))
        return cls(tuple(shape), tuple(centre), tuple(step))

    @full_precision
    def see(self, data: Tensor) -> Tensor:
        """(B, C, *sides) → (B, C, *shape), averaged as by `resize` where it is coarser."""
        for axis, (positions, gap) in enumerate(zip(self._positions(), self.step, strict=True), start=2):
            matrix = averaging(data.shape[axis], positions, gap).to(data)
            data = (data.movedim(axis, -1) @ matrix).movedim(-1, axis)
        return data.contiguous()

    def see_labels(self, labels: Tensor) -> Tensor:
        """The same for labels of any type: the nearest voxel."""
        for axis, positions in enumerate(self._positions(), start=2):
            nearest = (positions + 0.5).floor().long()
            inside = (nearest >= 0) & (nearest < labels.shape[axis])
            taken = labels.index_select(axis, nearest.clamp(0, labels.shape[axis] - 1).to(labels.device))
            labels = taken * inside.reshape(-1, *(1,) * (labels.dim() - 1 - axis)).to(labels)
        return labels.contiguous()

    def affine(self, image: Image) -> Matrix:
        """From the frame's voxels to the world."""
        affine = image.affine.copy()
        affine[:-1, :-1] *= np.array(self.step)
        corner = np.array(self.centre) - np.array(self.step) * (np.array(self.shape) - 1) / 2
        affine[:-1, -1] = map_points(image.affine, corner)
        return affine

    def _positions(self) -> list[Tensor]:
        """Of the frame's voxels along each axis, as fractional indices of the image."""
        return [
            middle + gap * (torch.arange(new, dtype=torch.float64) - (new - 1) / 2)
            for new, middle, gap in zip(self.shape, self.centre, self.step, strict=True)
        ]


def shown_box(there: Tensor, spacing: Sequence[float]) -> tuple[list[float], float]:
    """The middle, as a fractional index, of the box around the voxels (*shape) that are true, all of them if none is;
    and how wide that box is at most, in millimetres."""
    ends = _ends(there)
    sides = [(high - low + 1) * mm for (low, high), mm in zip(ends, spacing, strict=True)]
    return [(low + high) / 2 for low, high in ends], max(sides)


def _ends(there: Tensor) -> list[tuple[float, float]]:
    """Along each axis the first and the last voxel that is true; of the whole where none is."""
    ends = []
    for axis in range(there.dim()):
        found = there.movedim(axis, 0).flatten(1).any(dim=1).nonzero()
        ends.append((float(found.min()), float(found.max())) if len(found) else (0.0, there.shape[axis] - 1.0))
    return ends


def sparse_sides(there: Tensor) -> list[bool]:
    """Which sides of an image show something, where `there` is true, along less than `FULL` of their length."""
    return [high - low + 1 < FULL * side for (low, high), side in zip(_ends(there), there.shape, strict=True)]


FOREGROUND = 0.05
"""Darker voxels, on a scale from 0 to 1, are background."""
FILLED = 0.85
"""Of a side of the grid that scans fill which are too wide or too small for its usual voxels."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """An image as a network takes it."""

    image: Image  # closest to RAS
    tensor: Tensor  # (1, 1, *grid), from 0 to 1
    mask: Tensor | None
    intensity_note: str
    """How intensities were scaled."""
    sides: tuple[int, ...]
    """Sides of what the network sees, in voxels of the scan."""
    crop_note: str
    """Which part of the scan the network sees."""


def prepare_pair(
    fixed: Image,
    moving: Image,
    model: LoadedModel,
    device: torch.device,
    *,
    fixed_mask: Image | None = None,
    moving_mask: Image | None = None,
    guessed: bool = False,
) -> tuple[Prepared, Prepared]:
    """The fixed and the moving image, turned closest to RAS, with intensities and on the grid that the model wants.

    A model whose file names a `voxel` gets both images with the same cubic voxels, around what each of them shows: a
    rotation of the one against the other is then a rotation of the grid, too. All other models get each image stretched
    to their grid. Where a side of either shows something along less than two thirds of its length, that side of both is
    cut to what is shown first, unless the model is one for `whole` images; if the moving image is seen through a first
    guess (`guessed`), both are cut alike, so that the guess remains the identity.
    """
    if model.prepare is not None:
        given = ((fixed, fixed_mask), (moving, moving_mask))
        f, m = (_prepared_by(model.prepare, image, mask, device) for image, mask in given)
        return f, m
    scans = [_Scan.of(fixed, fixed_mask, model), _Scan.of(moving, moving_mask, model)]
    frames, view = _frames(scans, model, guessed)
    if frames is None:
        f, m = (scan.stretched(model.grid or scan.image.shape, view, device) for scan in scans)
    else:
        f, m = (scan.through(frame, view, device) for scan, frame in zip(scans, frames, strict=True))
    return f, m


def _prepared_by(prepare: Prepare, image: Image, mask: Image | None, device: torch.device) -> Prepared:
    """The whole image as `prepare` makes it; what the mask is for is up to `prepare`."""
    tensor, note = prepare(image, mask)
    upright = to_closest_ras(image)
    return Prepared(upright, tensor.to(device), None, note, upright.shape, "whole")


def _frames(scans: Sequence[_Scan], model: LoadedModel, guessed: bool) -> tuple[list[Frame] | None, str]:
    """What the model sees of the scans, None if all of it; and that in words."""
    if model.grid is not None and model.voxel is not None:
        shown = [scan.shown() for scan in scans]
        voxel = common_voxel([wide for _, wide in shown], model.voxel, min(model.grid))
        pairs = zip(scans, shown, strict=True)
        frames = [Frame.cubic(scan.image, model.grid, centre, voxel) for scan, (centre, _) in pairs]
        return frames, f"cubic voxels of {voxel:g} mm"
    if model.grid is not None and not model.keeps_margins:
        there = [scan.there() for scan in scans]
        if guessed:
            there = [there[0] | there[1]] * 2
        cut = [a or b for a, b in zip(*map(sparse_sides, there), strict=True)]
        if any(cut):
            return [Frame.cut(one, model.grid, cut) for one in there], "without empty margins"
    return None, "whole"


def common_voxel(extents: Sequence[float], usual: float, side: int) -> float:
    """The size of a voxel, in millimetres, for scans that show something so many millimetres wide: the usual one where
    they fill at least half of the grid with it and fit in; otherwise one with which the wider fills most of it."""
    widest = max(extents)
    return usual if side / 2 <= widest / usual <= side else widest / (FILLED * side)


@dataclass(frozen=True, eq=False)
class _Scan:
    """An image and its mask closest to RAS, and its intensities from 0 to 1, (1, 1, *shape)."""

    image: Image
    mask: Image | None
    data: Tensor
    note: str

    @classmethod
    def of(cls, image: Image, mask: Image | None, model: LoadedModel) -> _Scan:
        turned = to_closest_ras(image)
        turned_mask = None if mask is None else to_closest_ras(mask)
        data, done = preprocess(turned, turned_mask, ct_range=model.ct_range)
        if model.grid is not None and len(model.grid) != turned.dim:
            raise ValueError(f"{image.name} is {turned.dim}-D but the model is for {len(model.grid)}-D images")
        return cls(turned, turned_mask, data, done.note)

    def there(self) -> Tensor:
        """(*shape): where it shows something, or has a mask."""
        mask = self._ones()
        return ((self.data > FOREGROUND) if mask is None else (self.data > FOREGROUND) | (mask > 0))[0, 0]

    def stretched(self, grid: Sequence[int], view: str, device: torch.device) -> Prepared:
        mask = self._ones()
        small = None if mask is None else resize_labels(mask, grid)
        return self._prepared(self.image, resize(self.data, grid), small, device, self.image.shape, view)

    def shown(self) -> tuple[list[float], float]:
        """The middle, as a fractional index, of the box around the mask, or else around what is not background; and how
        wide that box is at most, in millimetres."""
        mask = self._ones()
        return shown_box((self.data > FOREGROUND if mask is None else mask > 0)[0, 0], self.image.spacing)

    def through(self, frame: Frame, view: str, device: torch.device) -> Prepared:
        mask = self._ones()
        data = frame.see(self.data)
        small = None if mask is None else frame.see_labels(mask)
        framed = Image(data[0, 0].numpy(), frame.affine(self.image), self.image.name)
        sides = [round(step * (side - 1)) + 1 for step, side in zip(frame.step, frame.shape, strict=True)]
        return self._prepared(framed, data, small, device, sides, view)

    def _ones(self) -> Tensor | None:
        """The mask as 1 inside, 0 outside."""
        if self.mask is None:
            return None
        return torch.from_numpy((np.asarray(self.mask.data) != 0).astype(np.float32))[None, None]

    def _prepared(
        self, image: Image, tensor: Tensor, mask: Tensor | None, device: torch.device, sides: Sequence[int], view: str
    ) -> Prepared:
        if self.mask is not None and mask is not None and not bool(mask.any()):
            raise ValueError(f"{self.mask.name} has too few voxels: none is left on the network's grid")
        inside = None if mask is None else mask.to(device)
        return Prepared(image, tensor.to(device), inside, self.note, tuple(sides), view)
