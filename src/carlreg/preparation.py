"""From a scan to a tensor: intensities, foreground, and the grid on which a network sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import full_precision
from carlreg.files.checks import ImageError, check_finite, times
from carlreg.files.images import Image, Matrix, check_same_grid, map_points
from carlreg.files.orientation import to_closest_ras
from carlreg.geometry.resizing import averaging, cover, resize, resize_mask
from carlreg.model.loaded import CT_RANGE, LoadedModel, Prepare

LEAST_SIDE = 4
PERCENTILES = (0.1, 99.9)
FOREGROUND = 0.05
"""Voxels darker than this, on a scale from 0 to 1, are background."""
FULL, MARGIN = 2 / 3, 0.05
"""An axis is cropped if the foreground covers less than `FULL` of it; then `MARGIN` of the grid stays free at each
end."""
LUNG = 0.11
"""In CT of chests, this share of the body is lung, or more; in CT of whole trunks, less."""
FAT = 0.005
"""In crops of CT, this share of the voxels is below 0 HU, or more: fat, and the noise of water. Other scans have fewer,
from resampling by splines."""
THIN = 24
"""Scans with this many slices or fewer are thin."""
RESOLVED = 0.9
"""Scans with at least this many voxels for one of the fine grid, along every axis, are seen on that grid."""
FILLED = 0.85
"""If the usual voxel size does not fit, choose one so that the wider scan spans this fraction of the grid."""


# ---- intensities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preprocessing:
    """What `preprocess` did: intensities from `low` to `high` became 0 to 1, those beyond were clamped."""

    kind: Literal["CT", "percentiles"]
    low: float
    high: float
    note: str


def preprocess(
    image: Image, mask: Image | None = None, *, ct_range: tuple[float, float] = CT_RANGE, ct: bool | None = None
) -> tuple[Tensor, Preprocessing]:
    """Scale intensities to 0…1, as (1, 1, *shape) float32, and describe how.

    `ct` is whether to treat the image as CT; by default `looks_like_ct` decides. CT is clamped to `ct_range`,
    −1000…1000 HU by default: a model needs the range of its training. Anything else runs from the 0.1st percentile of
    all voxels (the background, if there is one) to the 99.9th of the voxels above that, so that a large background does
    not count. A mask restricts the voxels that are counted, not those that are returned.

    >>> tensor, done = preprocess(read("scan.nii.gz"))
    """
    data = image.data
    if min(image.shape) < LEAST_SIDE:
        raise ImageError(
            f"{image.name} has {times(image.shape)} voxels; expected at least {LEAST_SIDE} along every axis: "
            "give the whole volume (for DICOM its folder), or save a single slice as a 2-D image"
        )
    check_finite(data, image.name)
    values = data if mask is None else data[mask_voxels(mask, image)]
    if values.min() == values.max():
        where = "" if mask is None else " inside its mask"
        raise ImageError(f"{image.name} is constant{where}: every voxel is {values.min()}; expected an image")
    if looks_like_ct(data) if ct is None else ct:
        low, high = ct_range
        done = Preprocessing("CT", low, high, f"CT; {low:g}…{high:g} HU scaled to 0…1")
    else:
        low, high = _percentiles(values)
        note = f"{low:g}…{high:g}, the {PERCENTILES[0]} and {PERCENTILES[1]} percentiles, scaled to 0…1"
        done = Preprocessing("percentiles", low, high, note)
    return torch.from_numpy(_scaled(image, low, high))[None, None], done


def foreground(image: Image) -> npt.NDArray[np.bool_]:
    """(*shape): the voxels that are not background; all of them if there are none, or nothing is to be seen."""
    try:
        inside = preprocess(image)[0][0, 0].numpy() > FOREGROUND
    except ImageError:  # a constant image, for example
        inside = np.zeros(image.shape, bool)
    return inside if inside.any() else ~inside


def _scaled(image: Image, low: float, high: float) -> npt.NDArray[np.float32]:
    """Clip to low…high and scale to 0…1."""
    if math.isinf(high - low):
        raise ImageError(f"{image.name} has values from {low:g} to {high:g}; expected a smaller range: rescale it")
    wide = np.float64 if image.data.dtype.itemsize == 8 or high - low > 1e38 else np.float32
    with np.errstate(over="ignore"):  # outliers, which are clipped
        scaled = image.data - wide(low)
    scaled /= wide(high - low)
    return np.clip(scaled, 0, 1, out=scaled).astype(np.float32, copy=False)


def _percentiles(values: npt.NDArray[Any]) -> tuple[float, float]:
    low = float(np.percentile(values, PERCENTILES[0]))
    above = values[values > low]
    high = float(np.percentile(above, PERCENTILES[1])) if above.size else low
    if high <= low:  # nearly every voxel is the maximum
        return float(values.min()), float(values.max())
    return low, high


def looks_like_ct(data: npt.NDArray[Any]) -> bool:
    """Recognise CT by its values: at least 0.1 % of the voxels between −1100 and −500 (air, lung, bowel gas), at least
    2 % between −200 and 300 (soft tissue), and at most 2 % below −1100 apart from the minimum itself, which may be
    padding."""
    minimum = data.min()
    if minimum > CT_RANGE[0] / 2:
        return False
    gas = np.mean((data >= -1100) & (data <= -500))
    tissue = np.mean((data >= -200) & (data <= 300))
    below = np.mean((data < -1100) & (data > minimum))
    return bool(gas >= 0.001 and tissue >= 0.02 and below <= 0.02)


def may_be_ct(data: npt.NDArray[Any]) -> bool:
    """Whether values may be Hounsfield units of a part of the body without air: at least 90 % of the voxels between
    −200 and 300, spread over more than 20, no background of equal values, and at least `FAT` of the voxels below 0."""
    tissue = (data >= -200) & (data <= 300)
    fat = np.mean(data < 0) >= FAT
    return bool(fat and tissue.mean() >= 0.9 and np.ptp(data) > 20 and np.mean(data == data.min()) < 0.05)


def ct_pair(fixed: Image, moving: Image) -> tuple[tuple[bool, bool], tuple[str, ...]]:
    """Which of two images to treat as CT, and a warning if that is doubtful.

    If only one of them looks like CT, a crop of soft tissue for instance does not, the other is treated as CT as well
    if it may be, so that both have one scale.
    """
    alone = looks_like_ct(fixed.data), looks_like_ct(moving.data)
    if alone[0] == alone[1]:
        return alone, ()
    other, name = (moving, "moving") if alone[0] else (fixed, "fixed")
    both = may_be_ct(other.data)
    how = "it is treated as CT as well" if both else "it is scaled by its own percentiles"
    warning = f"only one of the images looks like CT by its values, the {name} image does not: {how}"
    return (True, True) if both else alone, (warning,)


def shows_lungs(image: Image) -> bool:
    """Whether at least `LUNG` of the body in a CT is lung, in blocks of about 8 mm: most of a block between −950 and
    −500 HU. Skin, the couch and gas in the bowel are thinner."""
    data = torch.from_numpy(np.ascontiguousarray(image.data, np.float32))[None, None]
    pool = F.avg_pool2d if image.dim == 2 else F.avg_pool3d
    block = [min(max(1, round(8 / mm)), side) for mm, side in zip(image.spacing, image.shape, strict=True)]
    lung = pool(((data > -950) & (data < -500)).float(), block) > 0.75
    body = lung | (pool(data, block) > -500)
    return bool(lung.sum() >= LUNG * body.sum().clamp(min=1))


def mask_voxels(mask: Image, image: Image) -> npt.NDArray[np.bool_]:
    """Where the mask is not zero: its grid must be the image's, to a tenth of a voxel, and it must not be empty."""
    check_same_grid(mask, image, "a mask")
    chosen = np.asarray(mask.data != 0)
    if not chosen.any():
        raise ImageError(f"{mask.name} is empty; expected a mask with voxels other than 0")
    return chosen


# ---- foreground and grid --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Another grid in an image: voxels `step` of the image's voxels apart, centred at the fractional index `centre`.
    Beyond the image there are zeros."""

    shape: tuple[int, ...]
    centre: tuple[float, ...]
    step: tuple[float, ...]

    @classmethod
    def cubic(cls, image: Image, shape: Sequence[int], centre: Sequence[float], voxel: float) -> Frame:
        """A grid of cubic voxels of `voxel` millimetres."""
        return cls(tuple(shape), tuple(centre), tuple(voxel / mm for mm in image.spacing))

    @classmethod
    def cropped(cls, foreground: Tensor, shape: Sequence[int], axes: Sequence[bool]) -> Frame:
        """A grid that covers the foreground (*shape of the image) along the chosen axes, with `MARGIN` free at either
        end, and the whole image along the others."""
        centre, step = [], []
        for (low, high), crop, old, new in zip(_ends(foreground), axes, foreground.shape, shape, strict=True):
            length = max(high - low + 1, LEAST_SIDE) / (1 - 2 * MARGIN) - 1 if crop else old - 1
            centre.append((low + high if crop else old - 1) / 2)
            step.append(length / max(new - 1, 1))
        return cls(tuple(shape), tuple(centre), tuple(step))

    @classmethod
    def whole(cls, sides: Sequence[int]) -> Frame:
        """All voxels of an image."""
        return cls(tuple(sides), tuple((side - 1) / 2 for side in sides), (1.0,) * len(sides))

    @full_precision
    def resample(self, data: Tensor) -> Tensor:
        """(B, C, *sides) → (B, C, *shape), averaged like `resize` if the frame is coarser."""
        for axis, (positions, gap) in enumerate(zip(self._positions(), self.step, strict=True), start=2):
            if gap == 1 and positions.equal(torch.arange(data.shape[axis], dtype=positions.dtype)):
                continue  # the scan's own voxels
            matrix = averaging(data.shape[axis], positions, gap).to(data)
            data = (data.movedim(axis, -1) @ matrix).movedim(-1, axis)
        return data.contiguous()

    def resample_labels(self, labels: Tensor) -> Tensor:
        """The same for labels of any type, by the nearest voxel."""
        for axis, positions in enumerate(self._positions(), start=2):
            nearest = (positions + 0.5).floor().long()
            inside = (nearest >= 0) & (nearest < labels.shape[axis])
            taken = labels.index_select(axis, nearest.clamp(0, labels.shape[axis] - 1).to(labels.device))
            labels = taken * inside.reshape(-1, *(1,) * (labels.dim() - 1 - axis)).to(labels)
        return labels.contiguous()

    def resample_mask(self, mask: Tensor) -> Tensor:
        """The same for a mask: 1 inside, 0 outside. No nonzero voxel within the frame is lost."""
        return cover(mask, list(zip(self._positions(), self.step, strict=True)))

    def affine(self, image: Image) -> Matrix:
        """From the frame's voxels to the world."""
        affine = image.affine.copy()
        affine[:-1, :-1] *= np.array(self.step)
        corner = np.array(self.centre) - np.array(self.step) * (np.array(self.shape) - 1) / 2
        affine[:-1, -1] = map_points(image.affine, corner)
        return affine

    def sides(self) -> tuple[int, ...]:
        """The extent of the frame in voxels of the image."""
        return tuple(round(step * (side - 1)) + 1 for step, side in zip(self.step, self.shape, strict=True))

    def on(self, shape: Sequence[int]) -> Frame:
        """Another grid over the same extent."""
        sides = zip(self.step, self.shape, shape, strict=True)
        return replace(self, shape=tuple(shape), step=tuple(s * (a - 1) / max(b - 1, 1) for s, a, b in sides))

    def _positions(self) -> list[Tensor]:
        """Fractional indices in the image of the frame's voxels, along each axis."""
        return [
            middle + gap * (torch.arange(new, dtype=torch.float64) - (new - 1) / 2)
            for new, middle, gap in zip(self.shape, self.centre, self.step, strict=True)
        ]


def foreground_box(foreground: Tensor, spacing: Sequence[float]) -> tuple[list[float], float]:
    """The centre of the foreground's bounding box, as a fractional index, and its longest side in millimetres."""
    ends = _ends(foreground)
    sides = [(high - low + 1) * mm for (low, high), mm in zip(ends, spacing, strict=True)]
    return [(low + high) / 2 for low, high in ends], max(sides)


def _ends(foreground: Tensor) -> list[tuple[float, float]]:
    """The first and the last voxel of the foreground along each axis; those of the image if there is none."""
    ends = []
    for axis in range(foreground.dim()):
        planes = foreground.movedim(axis, 0).flatten(1).any(dim=1).nonzero()
        ends.append((float(planes.min()), float(planes.max())) if len(planes) else (0.0, foreground.shape[axis] - 1.0))
    return ends


def wide_margins(foreground: Tensor) -> list[bool]:
    """Along which axes the foreground covers less than `FULL` of the image."""
    return [high - low + 1 < FULL * side for (low, high), side in zip(_ends(foreground), foreground.shape, strict=True)]


def common_voxel(extents: Sequence[float], usual: float, side: int) -> float:
    """A voxel size for scans whose foregrounds are so many millimetres wide: the usual one if the wider scan then fits
    into the grid and fills at least half of it; otherwise one with which it fills most of it."""
    widest = max(extents)
    return usual if side / 2 <= widest / usual <= side else widest / (FILLED * side)


# ---- a pair ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """An image as a network takes it."""

    image: Image  # closest to RAS
    tensor: Tensor  # (1, 1, *grid), from 0 to 1
    mask: Tensor | None
    intensity_note: str
    """How intensities were scaled."""
    sides: tuple[int, ...]
    """The extent of what the network sees, in voxels of the scan."""
    crop_note: str
    """Which part of the scan the network sees."""
    source: tuple[Tensor, Tensor | None, Frame] | None = None
    """The whole scan and its mask, and the part the network sees; None if only the tensor is known."""
    is_ct: bool = False
    """Whether its intensities are Hounsfield units."""

    def on_grid(self, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """What the network sees, and the mask, on another grid over the same extent."""
        if self.source is None or tuple(shape) == tuple(self.tensor.shape[2:]):
            data, mask = self.tensor, self.mask
            return resize(data, shape), None if mask is None else resize_mask(mask, shape)
        scan, labels, frame = self.source[0], self.source[1], self.source[2].on(shape)
        mask = None if labels is None else frame.resample_mask(labels).to(self.tensor)
        return frame.resample(scan.to(self.tensor)), mask

    def spacing(self, shape: Sequence[int]) -> tuple[float, ...]:
        """The size in mm of a voxel of such a grid."""
        sides = zip(self.image.spacing, self.image.shape, shape, strict=True)
        return tuple(float(mm) * (old - 1) / max(new - 1, 1) for mm, old, new in sides)


@dataclass(frozen=True, eq=False)
class PreparedPair:
    """Two images as a network takes them: `fixed, moving = pair`."""

    fixed: Prepared
    moving: Prepared
    warnings: tuple[str, ...] = ()
    fine: bool = False
    """Whether the scans have enough voxels for the model's fine grid."""

    def __iter__(self) -> Iterator[Prepared]:
        return iter((self.fixed, self.moving))


def prepare_pair(
    fixed: Image,
    moving: Image,
    model: LoadedModel,
    device: torch.device,
    *,
    fixed_mask: Image | None = None,
    moving_mask: Image | None = None,
    aligned: bool = False,
    quick: bool = False,
) -> PreparedPair:
    """Reorient both images closest to RAS, scale their intensities, and resample them to the grid of the model.

    A model whose file names a `voxel` gets both images with the same cubic voxels around the foreground of each: a
    rotation between the images is then a rotation of the grid, too. All other models get each image stretched to their
    grid. CT of two chests is seen from −1000 HU, whatever the model's window, so that lungs have a structure. If the
    foreground of either image covers less than two thirds of an axis, both are first cropped to their
    foreground along it, unless the model keeps margins; `aligned` images, of which one was resampled to the grid of the
    other, are cropped alike, so that the identity between them stays the identity. `quick` keeps to the model's usual
    grid where it has a fine one.
    """
    if model.prepare is not None:
        prepare = model.prepare
        return PreparedPair(_custom(prepare, fixed, fixed_mask, device), _custom(prepare, moving, moving_mask, device))
    ct, warnings = ct_pair(fixed, moving)
    if all(ct) and model.ct_range[0] > CT_RANGE[0] and shows_lungs(fixed) and shows_lungs(moving):
        model = replace(model, ct_range=(CT_RANGE[0], model.ct_range[1]))  # where the model's window is black
    scans = [_Scan.of(fixed, fixed_mask, model, ct[0]), _Scan.of(moving, moving_mask, model, ct[1])]
    shapes = [scan.image.shape for scan in scans]
    fine = is_fine(model, shapes)
    model = replace(model, grid=model.grid if fine and quick else choose_grid(model, shapes))
    frames, note = _frames(scans, model, aligned)
    f, m = (scan.prepared(frame, model.grid, note, device) for scan, frame in zip(scans, frames, strict=True))
    return PreparedPair(f, m, warnings, fine)


def choose_grid(model: LoadedModel, shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """The grid on which a model sees two scans of these shapes: the one for thin scans if both have few slices along
    the same axis, the fine one if both have about as many voxels along every axis, and otherwise the usual one."""
    if model.voxel is not None:
        return model.grid
    most = [max(sides) for sides in zip(*shapes, strict=True)]
    thin = [axis for axis, side in enumerate(most) if side <= THIN]
    if model.thin_grid is not None and len(thin) == 1:
        across, *within = sorted(model.thin_grid)
        within.insert(thin[0], across)
        return tuple(within)
    return model.fine_grid if is_fine(model, shapes) else model.grid


def is_fine(model: LoadedModel, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether two scans of these shapes have about as many voxels along every axis as the fine grid of a model."""
    if model.fine_grid is None or model.voxel is not None:
        return False
    least = [min(sides) for sides in zip(*shapes, strict=True)]
    return all(side >= RESOLVED * fine for side, fine in zip(least, model.fine_grid, strict=True))


def _custom(prepare: Prepare, image: Image, mask: Image | None, device: torch.device) -> Prepared:
    """The whole image as the model's own `prepare` makes it, which decides what the mask is for."""
    tensor, note = prepare(image, mask)
    upright = to_closest_ras(image)
    return Prepared(upright, tensor.to(device), None, note, upright.shape, "whole")


def _frames(scans: Sequence[_Scan], model: LoadedModel, aligned: bool) -> tuple[Sequence[Frame | None], str]:
    """Which part of each scan the model sees, None for all of it, and a note about it."""
    if model.grid is not None and model.voxel is not None:
        boxes = [scan.box() for scan in scans]
        voxel = common_voxel([width for _, width in boxes], model.voxel, min(model.grid))
        pairs = zip(scans, boxes, strict=True)
        frames = [Frame.cubic(scan.image, model.grid, centre, voxel) for scan, (centre, _) in pairs]
        return frames, f"cubic voxels of {voxel:g} mm"
    if model.grid is not None and not model.keeps_margins:
        foregrounds = [scan.foreground() for scan in scans]
        if aligned:
            foregrounds = [foregrounds[0] | foregrounds[1]] * 2
        axes = [a or b for a, b in zip(*map(wide_margins, foregrounds), strict=True)]
        if any(axes):
            return [Frame.cropped(one, model.grid, axes) for one in foregrounds], "without empty margins"
    return [None, None], "whole"


@dataclass(frozen=True, eq=False)
class _Scan:
    """An image and its mask closest to RAS, and its intensities from 0 to 1, (1, 1, *shape)."""

    image: Image
    mask: Image | None
    data: Tensor
    note: str
    is_ct: bool

    @classmethod
    def of(cls, image: Image, mask: Image | None, model: LoadedModel, ct: bool) -> _Scan:
        upright = to_closest_ras(image)
        upright_mask = None if mask is None else to_closest_ras(mask)
        data, done = preprocess(upright, upright_mask, ct_range=model.ct_range, ct=ct)
        if model.grid is not None and len(model.grid) != upright.dim:
            raise InputError(
                f"{image.name} is {upright.dim}-D but the model is for {len(model.grid)}-D images; expected another "
                "image or another model"
            )
        return cls(upright, upright_mask, data, done.note, ct)

    def foreground(self) -> Tensor:
        """(*shape): the foreground, or inside the mask."""
        bright, mask = self.data > FOREGROUND, self._ones()
        return (bright if mask is None else bright | (mask > 0))[0, 0]

    def box(self) -> tuple[list[float], float]:
        """`foreground_box` of the mask, if there is one, or else of the foreground."""
        mask = self._ones()
        return foreground_box((self.data > FOREGROUND if mask is None else mask > 0)[0, 0], self.image.spacing)

    def prepared(self, frame: Frame | None, grid: Sequence[int] | None, note: str, device: torch.device) -> Prepared:
        """The scan in a frame, or else stretched to a grid, or else as it is."""
        mask, image, sides = self._ones(), self.image, self.image.shape
        if frame is None:
            tensor = resize(self.data, grid or sides)
            mask = None if mask is None else resize_mask(mask, grid or sides)
        else:
            tensor, sides = frame.resample(self.data), frame.sides()
            mask = None if mask is None else frame.resample_mask(mask)
            image = Image(tensor[0, 0].numpy(), frame.affine(image), image.name)
        source = self.data, self._ones(), frame or Frame.whole(self.image.shape)
        on_device = None if mask is None else mask.to(device)
        return Prepared(image, tensor.to(device), on_device, self.note, sides, note, source, self.is_ct)

    def _ones(self) -> Tensor | None:
        """The mask as 1 inside, 0 outside."""
        if self.mask is None:
            return None
        return torch.from_numpy((np.asarray(self.mask.data) != 0).astype(np.float32))[None, None]
