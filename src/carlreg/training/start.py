"""The network that a run starts from: a new one, or a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from carlreg.errors import InputError
from carlreg.files.checksums import sha256
from carlreg.model import zoo
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.encoder import Encoder
from carlreg.model.files import load, read_metadata
from carlreg.model.loaded import CT_RANGE, ct_range_of, find_model, voxel_of
from carlreg.model.shipped import available
from carlreg.model.unet import UNet
from carlreg.training.settings import NETWORKS, Settings

SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "paper": (128, {"unet_down": (16, 32, 64, 256, 512), "unet_up": (256, 128, 64, 32, 16)}),
    "small": (64, {"unet_down": (16, 32, 64, 128, 160), "unet_up": (128, 96, 64, 32, 16)}),
    "tiny": (8, {"unet_down": (4, 8, 8, 8, 8), "unet_up": (8, 8, 8, 8, 8)}),
}
"""Channels of encoder and refinements: the paper's network, the one of `carl-base`, and one for quick trials."""


@dataclass(frozen=True)
class Start:
    """The network that a run starts from, and how its images are prepared."""

    file: Path | None = None
    """The trained model; None for a new network."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    checksum: str = "new"
    grid: tuple[int, ...] | None = None
    ct_range: tuple[float, float] = CT_RANGE
    voxel: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> Start:
        if settings.is_new:
            return cls(grid=settings.grid, voxel=settings.voxel)
        if settings.width is not None:
            raise InputError(f"width is for a new network, but the model is {settings.model}; leave one of them out")
        try:
            file = find_model(settings.model)
        except ValueError as error:
            raise InputError(
                f"no model {settings.model!r}; expected one of {', '.join(NETWORKS)} for a new network, or "
                f"{', '.join(available())} or a model file to continue from"
            ) from error
        metadata = read_metadata(file)
        grid = settings.grid or tuple(int(side) for side in metadata.get("grid", "").split()) or None
        voxel = settings.voxel or voxel_of(metadata, file)
        return cls(file, metadata, sha256(file)[:32], grid, ct_range_of(metadata, file), voxel)

    def network(self, settings: Settings, dim: int) -> RegistrationAlgorithm:
        return _new_network(settings, dim) if self.file is None else _trained_network(self.file, dim)


def _new_network(settings: Settings, dim: int) -> RegistrationAlgorithm:
    usual, sizes = SIZES[settings.size]
    width = settings.width or usual
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        if settings.model == "xi":
            return zoo.xi(dim, width=width)
        if settings.model == "gradicon":
            return zoo.gradicon(dim, 2, **sizes)
        if settings.model == "carl_rot":
            return zoo.carl_rot(dim, 2, **sizes, width=width, handed=settings.handed or 0)
        return zoo.carl(dim, 2, **sizes, width=width)


def _trained_network(file: Path, dim: int) -> RegistrationAlgorithm:
    model = load(file)
    network = next((m for m in model.modules() if isinstance(m, (Encoder, UNet))), None)
    if network is None:
        raise InputError(f"{file} has no weights to train; expected a network with an Encoder or a UNet")
    if (network.dim, network.channels) != (dim, 1):
        raise InputError(
            f"{file} is for {network.dim}-D images with {network.channels} channels, but these are {dim}-D with one; "
            "choose another model, or train a new one"
        )
    return model
