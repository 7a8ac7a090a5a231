"""What a user gives: images, masks, labels, landmarks, transforms and models, from files or from memory.

All of it is read and checked before any network runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg import images, itk
from carlreg.images import Image, Matrix
from carlreg.models import DEFAULT, SHORT, WEIGHTS, available, load, read_metadata
from carlreg.points import read_points
from carlreg.registration import RegistrationAlgorithm

FOREGROUND = 0.05
"""Darker voxels, on a scale from 0 to 1, are background."""
FILLED = 0.85
"""Of a side of the grid that scans fill which are too wide or too small for its usual voxels."""


@dataclass(frozen=True, eq=False)
class Case:
    """A pair with all that came with it."""

    fixed: Image
    moving: Image
    f: Prepared
    m: Prepared
    """The moving image as the network sees it: through the first guess, if there is one."""
    fixed_mask: Image | None
    moving_mask: Image | None
    fixed_seg: Image | None
    moving_seg: Image | None
    landmarks: tuple[Matrix, Matrix] | None
    initial: itk.WorldTransform | itk.ItkTransform | None

    def through(self, initial: itk.WorldTransform, model: LoadedModel, place: torch.device) -> Case:
        """The same pair with another first guess."""
        case = replace(self, initial=initial)
        f, m = case.prepared_for(model, place)
        return replace(case, f=f, m=m)

    def prepared_for(self, model: LoadedModel, place: torch.device, *, masks: bool = True) -> tuple[Prepared, Prepared]:
        """The fixed and the moving image as a model sees them, the latter through the first guess if there is one."""
        seen, mask = _pulled(self.fixed, self.moving, self.moving_mask, self.initial)
        inside = {"fixed_mask": self.fixed_mask, "moving_mask": mask} if masks else {}
        return prepare_pair(self.fixed, seen, model, place, **inside, guessed=self.initial is not None)


def read_case(sources: Mapping[str, Any], model: LoadedModel, place: torch.device) -> Case:
    def image(name: str, what: str) -> Image | None:
        return None if sources[name] is None else as_image(sources[name], what)

    fixed, moving = (as_image(sources[side], side) for side in ("fixed", "moving"))
    if fixed.dim != moving.dim:
        raise ValueError(f"the fixed image is {fixed.dim}-D and the moving one {moving.dim}-D; expected the same")
    fixed_mask, moving_mask = (image(f"{side}_mask", f"{side} mask") for side in ("fixed", "moving"))
    segs = {side: image(f"{side}_seg", f"{side} labels") for side in ("fixed", "moving")}
    labels = {side: None if seg is None else images.as_labels(seg) for side, seg in segs.items()}
    for side, seg in labels.items():
        if seg is not None and seg.dim != fixed.dim:
            raise ValueError(f"the {side} labels are {seg.dim}-D but the images {fixed.dim}-D; expected the same")
    landmarks = _landmarks(sources["fixed_landmarks"], sources["moving_landmarks"], fixed.dim)
    guess = sources["initial_transform"]
    initial = None if guess is None else _as_transform(guess, fixed.dim)
    seen, seen_mask = _pulled(fixed, moving, moving_mask, initial)
    inside = {"fixed_mask": fixed_mask, "moving_mask": seen_mask}
    f, m = prepare_pair(fixed, seen, model, place, **inside, guessed=initial is not None)
    return Case(fixed, moving, f, m, fixed_mask, moving_mask, labels["fixed"], labels["moving"], landmarks, initial)


@dataclass(frozen=True, eq=False)
class Prepared:
    """An image as a network takes it."""

    image: Image  # closest to RAS
    tensor: Tensor  # (1, 1, *grid), from 0 to 1
    mask: Tensor | None
    words: str
    sides: tuple[int, ...]
    """Of what the network sees, in voxels of the scan."""
    view: str
    """What that is, in words."""


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
    scans = [_Scan.of(fixed, fixed_mask, model), _Scan.of(moving, moving_mask, model)]
    frames, view = _frames(scans, model, guessed)
    if frames is None:
        f, m = (scan.stretched(model.grid or scan.image.shape, view, device) for scan in scans)
    else:
        f, m = (scan.through(frame, view, device) for scan, frame in zip(scans, frames, strict=True))
    return f, m


def _frames(scans: Sequence[_Scan], model: LoadedModel, guessed: bool) -> tuple[list[images.Frame] | None, str]:
    """What the model sees of the scans, None if all of it; and that in words."""
    if model.grid is not None and model.voxel is not None:
        shown = [scan.shown() for scan in scans]
        voxel = common_voxel([wide for _, wide in shown], model.voxel, min(model.grid))
        pairs = zip(scans, shown, strict=True)
        frames = [images.Frame.cubic(scan.image, model.grid, centre, voxel) for scan, (centre, _) in pairs]
        return frames, f"cubic voxels of {voxel:g} mm"
    if model.grid is not None and not model.whole:
        there = [scan.there() for scan in scans]
        if guessed:
            there = [there[0] | there[1]] * 2
        cut = [a or b for a, b in zip(*map(images.sparse_sides, there), strict=True)]
        if any(cut):
            return [images.Frame.cut(one, model.grid, cut) for one in there], "without empty margins"
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
    words: str

    @classmethod
    def of(cls, image: Image, mask: Image | None, model: LoadedModel) -> _Scan:
        turned = images.to_closest_ras(image)
        turned_mask = None if mask is None else images.to_closest_ras(mask)
        data, done = images.preprocess(turned, turned_mask, ct_range=model.ct_range)
        if model.grid is not None and len(model.grid) != turned.dim:
            raise ValueError(f"{image.name} is {turned.dim}-D but the model is for {len(model.grid)}-D images")
        return cls(turned, turned_mask, data, done.words)

    def there(self) -> Tensor:
        """(*shape): where it shows something, or has a mask."""
        mask = self._ones()
        return ((self.data > FOREGROUND) if mask is None else (self.data > FOREGROUND) | (mask > 0))[0, 0]

    def stretched(self, grid: Sequence[int], view: str, device: torch.device) -> Prepared:
        mask = self._ones()
        small = None if mask is None else images.resize_labels(mask, grid)
        return self._prepared(self.image, images.resize(self.data, grid), small, device, self.image.shape, view)

    def shown(self) -> tuple[list[float], float]:
        """The middle, as a fractional index, of the box around the mask, or else around what is not background; and how
        wide that box is at most, in millimetres."""
        mask = self._ones()
        return images.shown_box((self.data > FOREGROUND if mask is None else mask > 0)[0, 0], self.image.spacing)

    def through(self, frame: images.Frame, view: str, device: torch.device) -> Prepared:
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
        return Prepared(image, tensor.to(device), inside, self.words, tuple(sides), view)


def _pulled(
    fixed: Image, moving: Image, mask: Image | None, initial: itk.WorldTransform | itk.ItkTransform | None
) -> tuple[Image, Image | None]:
    """The moving image and its mask, seen through the first guess on the fixed image's grid."""
    if mask is not None:
        images.inside(mask, moving)
    if initial is None:
        return moving, mask
    seen = itk.apply(initial, moving, fixed, outside=float(moving.data.min()))
    if seen.data.min() == seen.data.max():
        raise ValueError(
            "through the initial transform nothing of the moving image is seen from the fixed one; expected a map from "
            "fixed to moving world points (LPS, mm): is it the inverse, or in RAS?"
        )
    return seen, None if mask is None else itk.apply(initial, mask, fixed, "nearest")


def as_image(source: Any, name: str) -> Image:
    if isinstance(source, Image):
        return source
    if isinstance(source, (str, os.PathLike)):
        return images.read(source)
    if isinstance(source, np.ndarray):
        return images.from_array(source, name=name)
    if isinstance(source, Tensor):
        return images.from_array(source.detach().cpu().numpy(), name=name)
    kind = type(source).__module__.partition(".")[0]
    if kind == "SimpleITK":
        return images.from_sitk(source, name=name)
    if kind == "nibabel":
        return images.from_nibabel(source, name=name)
    raise TypeError(f"{name} is a {type(source).__name__}; expected a path, an Image, an array, SimpleITK or nibabel")


def _landmarks(fixed: Any, moving: Any, dim: int) -> tuple[Matrix, Matrix] | None:
    """World points (N, D) of both images, the n-th of one lying where the n-th of the other does."""
    if fixed is None and moving is None:
        return None
    if fixed is None or moving is None:
        raise ValueError("landmarks of one image only were given; expected those of both, in the same order")
    both = tuple(
        read_points(source).positions if isinstance(source, (str, os.PathLike)) else np.asarray(source, np.float64)
        for source in (fixed, moving)
    )
    shapes = [points.shape for points in both]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != dim:
        raise ValueError(f"the landmarks have shapes {shapes[0]} and {shapes[1]}; expected the same, (N, {dim})")
    return both[0], both[1]


def _as_transform(source: Any, dim: int) -> itk.WorldTransform | itk.ItkTransform:
    if isinstance(source, (str, os.PathLike)):
        found = itk.read(source)
    elif isinstance(source, (itk.WorldTransform, itk.ItkTransform)):
        found = source
    elif isinstance(source, (np.ndarray, list, tuple)):
        found = itk.WorldTransform.linear(source)
    else:
        raise TypeError(
            f"initial_transform is a {type(source).__name__}; expected a path, a transform of carlreg.itk or a matrix"
        )
    if found.dim != dim:
        raise ValueError(f"the initial transform is {found.dim}-D but the images are {dim}-D; expected the same")
    return found


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory with what its file says, for many pairs: `register(model=load_model("default"), ...)`."""

    network: RegistrationAlgorithm
    grid: tuple[int, ...] | None
    """The grid it was trained on, if its file says so; each image is cut to what it shows if that is little, and
    stretched to it, unless there is a `voxel`."""
    facts: dict[str, Any]
    """Name, checksum and licence, for the report."""
    ct_range: tuple[float, float] = images.CT_RANGE
    """Hounsfield units that become 0 and 1."""
    voxel: float | None = None
    """The side of the cubic voxels that it was trained with, in millimetres, if images are not to be stretched."""
    looks: bool = False
    """Whether to look first if the images are turned against each other."""
    whole: bool = False
    """Whether empty margins stay, however wide they are: networks of the paper's authors were trained with them."""


AUTO = "auto"
"""carl-base, after such a look."""


def find_model(model: str | os.PathLike[str]) -> Path:
    """The file of a model of the package, by name, or a model file itself."""
    if model == AUTO:
        raise ValueError(f"{AUTO!r} is {DEFAULT} after a look at the scans, and no model by itself; expected {DEFAULT}")
    stem = SHORT.get(os.fspath(model), os.fspath(model))
    path = WEIGHTS / f"{stem}.safetensors" if stem in available() else Path(stem)
    if not path.is_file():
        raise ValueError(
            f"no model {os.fspath(model)!r}; expected the path of a model file, or one of {', '.join(available())}"
        )
    return path


def load_model(
    model: str | os.PathLike[str] | RegistrationAlgorithm | LoadedModel, device: str | torch.device = "auto"
) -> LoadedModel:
    """A model by name or file, or one that is in memory already, on its device and in evaluation mode."""
    place = choose_device(device)
    if isinstance(model, LoadedModel):
        return replace(model, network=model.network.to(place).eval())
    if isinstance(model, RegistrationAlgorithm):
        return LoadedModel(model.to(place).eval(), None, {"name": type(model).__name__})
    if model == AUTO:
        return replace(load_model(DEFAULT, place), looks=True)
    path = find_model(model)
    about = read_metadata(path)
    grid = tuple(int(n) for n in _numbers(about, "grid", path, "sides such as '96 96 96'"))
    facts = {"name": path.stem, "sha256": sha256(path), "licence": about.get("licence")}
    voxel, ct_range = voxel_of(about, path), ct_range_of(about, path)
    whole = about.get("view") == "whole"
    return LoadedModel(load(path, device=place), grid or None, facts, ct_range, voxel, whole=whole)


def voxel_of(about: Mapping[str, str], path: Path) -> float | None:
    """The millimetres of the cubic voxels that a model wants, by what its file says; None where it stretches images."""
    found = _numbers(about, "voxel", path, "a number of millimetres such as '2'")
    if found and (len(found) != 1 or not 0 < found[0] < np.inf or "grid" not in about):
        raise ValueError(f"{path} says its voxel is {about['voxel']!r}; expected a number of mm above 0, and a grid")
    return found[0] if found else None


def ct_range_of(about: Mapping[str, str], path: Path) -> tuple[float, float]:
    """The Hounsfield units that a model was trained with, by what its file says."""
    found = _numbers(about, "ct_range", path, "two Hounsfield units such as '-1000 1000'") or images.CT_RANGE
    if len(found) != 2 or not found[0] < found[1]:
        raise ValueError(f"{path} says its ct_range is {about['ct_range']!r}; expected a lower and a higher number")
    return found[0], found[1]


def _numbers(about: Mapping[str, str], name: str, path: Path, expected: str) -> tuple[float, ...]:
    """What a model's file says under a name; nothing if it says nothing."""
    try:
        return tuple(float(word) for word in about.get(name, "").split())
    except ValueError as error:
        raise ValueError(f"{path} says its {name} is {about[name]!r}; expected {expected}") from error


def choose_device(device: str | torch.device) -> torch.device:
    """A device by name; 'auto' is the GPU, where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but PyTorch sees no CUDA GPU here; expected 'cpu' or 'auto'")
    return place


def sha256(path: str | os.PathLike[str]) -> str:
    """A file's checksum."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            total.update(block)
    return total.hexdigest()
