"""A model in memory, together with the settings stored in its file."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.devices import choose_device
from carlreg.fast.graphs import Graphs
from carlreg.files.checksums import sha256
from carlreg.files.images import Image
from carlreg.geometry.transforms import Identity, Transform
from carlreg.model.algorithms import RegistrationAlgorithm, TwoStep
from carlreg.model.files import load, read_metadata
from carlreg.model.shipped import DEFAULT, DEFAULT_2D, SHORT, WEIGHTS, available

LARGEST_SIDE, MOST_PASSES = 1024, 10
CT_RANGE = (-1000.0, 1000.0)  # air and dense bone, in Hounsfield units
SOFT_TISSUE = (-125.0, 275.0)
AUTO, NONE = "auto", "none"  # the default model, after a search for a rotation; an affine search instead of a model
Prepare = Callable[[Image, Image | None], tuple[Tensor, str]]
"""From an image and its mask, if any, to the tensor (1, 1, *grid) that a network sees, and a note for the report. The
tensor spans the whole image, in the axis order closest to RAS."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory and the settings of its file, for many pairs: `register(model=load_model("default"), ...)`."""

    network: RegistrationAlgorithm
    grid: tuple[int, ...] | None
    """The grid it was trained on, if its file states one. Images with wide margins are cropped to their foreground, and
    stretched to the grid unless there is a `voxel`."""
    provenance: dict[str, Any]  # name, checksum and licence, for the report
    ct_range: tuple[float, float] = CT_RANGE  # Hounsfield units that become 0 and 1
    voxel: float | None = None  # side in mm of the cubic voxels it was trained with, if images are not to be stretched
    searches_rotation: bool = False  # whether to search for a rotation between the images first
    climbs: bool = False  # whether to try other ways where the verdict on the result is not good
    searches_affine: bool = False  # there is no network: instead, search for an affine map between the images
    keeps_margins: bool = False  # however wide: networks of the paper's authors were trained with them
    thin_grid: tuple[int, ...] | None = None  # for scans of few slices, its shortest side across them
    fine_grid: tuple[int, ...] | None = None  # for scans with this many voxels or more along every axis
    prepare: Prepare | None = None  # instead of as described above, such as the paper prepares one of its datasets
    source: Path | None = None  # its file, if it came from one
    once: RegistrationAlgorithm | None = None  # the network without its further passes, for the fine grid
    is_default: bool = False  # no model was chosen, so that the dimension of the images may choose another one
    graphs: Graphs | None = None  # on a GPU: what was captured for one pair serves all further ones of its shapes

    def for_dimension(self, dim: int) -> "LoadedModel":
        """The default model for 2-D images instead of the one for volumes; any other model as it is."""
        if not self.is_default or dim != 2 or DEFAULT_2D not in available():
            return self
        loaded = load_model(DEFAULT_2D, next(self.network.parameters()).device)
        return replace(loaded, searches_rotation=self.searches_rotation, prepare=self.prepare)

    def on_grid(self, grid: Sequence[int]) -> "LoadedModel":
        """The model for images on one of its grids: on the fine one, which costs more and needs it less, the network is
        applied once."""
        return self.quickly() if tuple(grid) == self.fine_grid else self

    def quickly(self) -> "LoadedModel":
        """The model without further passes."""
        return self if self.once is None else replace(self, network=self.once)


class NoNetwork(RegistrationAlgorithm):
    """The identity, in the place of a network where there is none."""

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return Identity()


def find_model(model: str | os.PathLike[str]) -> Path:
    """The file of a model of the package, by name, or a model file itself."""
    if model in (AUTO, NONE):
        what = f"{DEFAULT} after a rotation search" if model == AUTO else "an affine search"
        raise InputError(f"{model!r} is {what}, not a model of its own; expected {DEFAULT}")
    name = os.fspath(model)
    stem = SHORT.get(name, name)
    path = WEIGHTS / f"{stem}.safetensors" if stem in available() else Path(stem)
    if not path.is_file():
        raise InputError(f"no model {name!r}; expected the path of a model file, or one of {', '.join(available())}")
    return path


def load_model(
    model: str | os.PathLike[str] | RegistrationAlgorithm | LoadedModel, device: str | torch.device = "auto"
) -> LoadedModel:
    """A model by name or file, or one in memory, on its device and in evaluation mode. A network that is passed in is
    not changed."""
    device = choose_device(device)
    if isinstance(model, LoadedModel):
        once = None if model.once is None else _ready(model.once, device)
        graphs = _graphs(device) if model.graphs is None or device.type != "cuda" else model.graphs
        return replace(model, network=_ready(model.network, device), once=once, graphs=graphs)
    if isinstance(model, RegistrationAlgorithm):
        return LoadedModel(_ready(model, device), None, {"name": type(model).__name__}, graphs=_graphs(device))
    if model in (AUTO, "default"):
        return replace(load_model(DEFAULT, device), searches_rotation=model == AUTO, is_default=True, climbs=True)
    if model == NONE:
        none = NoNetwork().eval()
        return LoadedModel(none, None, {"name": NONE}, SOFT_TISSUE, searches_affine=True, graphs=_graphs(device))
    path = find_model(model)
    about = read_metadata(path)
    network = once = load(path, device=device)
    for _ in range(passes_of(about, path) - 1):
        network = TwoStep(network, once).eval()
    return LoadedModel(
        grid=grid_of(about, path) or None,
        thin_grid=grid_of(about, path, "thin_grid") or None,
        fine_grid=grid_of(about, path, "fine_grid") or None,
        voxel=voxel_of(about, path),
        ct_range=ct_range_of(about, path),
        keeps_margins=about.get("view") == "whole",
        provenance={"name": path.stem, "sha256": sha256(path), "licence": about.get("licence")},
        network=network,
        once=once,
        source=path,
        graphs=_graphs(device),
    )


def _graphs(device: torch.device) -> Graphs | None:
    return Graphs() if device.type == "cuda" else None


def _ready(network: RegistrationAlgorithm, device: torch.device) -> RegistrationAlgorithm:
    """The network on a device and in evaluation mode: itself if it is, otherwise a copy."""
    devices = {p.device for p in network.parameters()}
    on_device = all(d.type == device.type and device.index in (None, d.index) for d in devices)
    if on_device and not any(module.training for module in network.modules()):
        return network
    return copy.deepcopy(network).to(device).eval()


def grid_of(about: Mapping[str, str], path: Path, name: str = "grid") -> tuple[int, ...]:
    """The sides of a grid that a model was trained on; empty if its file states none."""
    sides = _numbers(about, name, path, "sides such as '96 96 96'")
    if not all(0 < side <= LARGEST_SIDE and side % 1 == 0 for side in sides):
        raise InputError(f"{path} states the {name} {about[name]!r}; expected sides from 1 to {LARGEST_SIDE}")
    if name != "grid" and sides and len(sides) != len(grid_of(about, path)):
        raise InputError(f"{path} states the {name} {about[name]!r}; expected as many sides as its grid has")
    return tuple(int(side) for side in sides)


def passes_of(about: Mapping[str, str], path: Path) -> int:
    """How often a network is applied, each time to the images as aligned so far; once if its file does not state it."""
    passes = _numbers(about, "passes", path, "a number such as '2'") or (1.0,)
    if len(passes) != 1 or passes[0] not in range(1, MOST_PASSES + 1):
        raise InputError(f"{path} states {about['passes']!r} passes; expected a number from 1 to {MOST_PASSES}")
    return int(passes[0])


def voxel_of(about: Mapping[str, str], path: Path) -> float | None:
    """The side of the cubic voxels that a model was trained with, in mm; None if images are stretched to its grid."""
    sides = _numbers(about, "voxel", path, "a number of millimetres such as '2'")
    if sides and (len(sides) != 1 or not 0 < sides[0] < np.inf or "grid" not in about):
        raise InputError(f"{path} states the voxel {about['voxel']!r}; expected a number of mm above 0, and a grid")
    return sides[0] if sides else None


def ct_range_of(about: Mapping[str, str], path: Path) -> tuple[float, float]:
    """The Hounsfield units that a model was trained with."""
    ends = _numbers(about, "ct_range", path, "two Hounsfield units such as '-1000 1000'") or CT_RANGE
    if len(ends) != 2 or not -np.inf < ends[0] < ends[1] < np.inf:
        raise InputError(f"{path} states the ct_range {about['ct_range']!r}; expected a lower and a higher number")
    return ends[0], ends[1]


def _numbers(about: Mapping[str, str], name: str, path: Path, expected: str) -> tuple[float, ...]:
    """The numbers that a model's file states under a name; none if it has no such entry."""
    try:
        return tuple(float(word) for word in about.get(name, "").split())
    except ValueError as error:
        raise InputError(f"{path} states the {name} {about[name]!r}; expected {expected}") from error
