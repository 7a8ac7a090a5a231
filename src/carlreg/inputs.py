"""What a user gives: images, masks, labels, landmarks, transforms and models, from files or from memory.

All of it is read and checked before any network runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg import images, itk
from carlreg.images import Image, Matrix
from carlreg.models import DEFAULT, WEIGHTS, available, load, read_metadata
from carlreg.points import read_points
from carlreg.registration import RegistrationAlgorithm


@dataclass(frozen=True, eq=False)
class Case:
    """A pair with all that came with it."""

    fixed: Image
    moving: Image
    f: Prepared
    m: Prepared
    """The moving image as the network sees it: through the first guess, if there is one."""
    fixed_seg: Image | None
    moving_seg: Image | None
    landmarks: tuple[Matrix, Matrix] | None
    initial: itk.WorldTransform | itk.ItkTransform | None


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
    f, m = prepare(fixed, fixed_mask, model, place), prepare(seen, seen_mask, model, place)
    return Case(fixed, moving, f, m, labels["fixed"], labels["moving"], landmarks, initial)


@dataclass(frozen=True, eq=False)
class Prepared:
    """An image as a network takes it."""

    image: Image  # closest to RAS
    tensor: Tensor  # (1, 1, *grid), from 0 to 1
    mask: Tensor | None
    words: str


def prepare(image: Image, mask: Image | None, model: LoadedModel, device: torch.device) -> Prepared:
    """Turned closest to RAS, with intensities and on the grid that the model wants."""
    turned = images.to_closest_ras(image)
    turned_mask = None if mask is None else images.to_closest_ras(mask)
    data, done = images.preprocess(turned, turned_mask, ct_range=model.ct_range)
    grid = tuple(turned.shape) if model.grid is None else model.grid
    if len(grid) != turned.dim:
        raise ValueError(f"{image.name} is {turned.dim}-D but the model is for {len(grid)}-D images")
    small_mask = None
    if turned_mask is not None:
        labels = torch.from_numpy((np.asarray(turned_mask.data) != 0).astype(np.float32))[None, None]
        small_mask = images.resize_labels(labels, grid).to(device)
        if not bool(small_mask.any()):
            raise ValueError(f"{turned_mask.name} has too few voxels: none is left on the network's grid")
    return Prepared(turned, images.resize(data, grid).to(device), small_mask, done.words)


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
    """The grid it was trained on, if its file says so; each image is stretched to it."""
    facts: dict[str, Any]
    """Name, checksum and licence, for the report."""
    ct_range: tuple[float, float] = images.CT_RANGE
    """Hounsfield units that become 0 and 1."""


def find_model(model: str | os.PathLike[str]) -> Path:
    """The file of a model of the package, by name, or a model file itself."""
    stem = DEFAULT if model == "default" else model
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
    path = find_model(model)
    about = read_metadata(path)
    grid = tuple(int(n) for n in _numbers(about, "grid", path, "sides such as '96 96 96'"))
    facts = {"name": path.stem, "sha256": sha256(path), "licence": about.get("licence")}
    return LoadedModel(load(path, device=place), grid or None, facts, ct_range_of(about, path))


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
