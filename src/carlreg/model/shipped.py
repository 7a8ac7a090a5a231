"""The trained models that come with the package."""

from pathlib import Path

import torch

from carlreg.errors import InputError
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import load

WEIGHTS = Path(__file__).parent / "weights"
DEFAULT, DEFAULT_2D = "carl-base", "carl-2d"
SHORT = {"default": DEFAULT, "base": "carl-base", "rot": "carl-rot", "2d": "carl-2d"}  # aliases


def available() -> list[str]:
    """Names of the trained models that come with the package."""
    return sorted(path.stem for path in WEIGHTS.glob("*.safetensors"))


def pretrained(name: str = "default", *, device: torch.device | str = "cpu") -> RegistrationAlgorithm:
    """Load a model that comes with the package by name, in evaluation mode. docs/models.md describes the models.

    The weights are for research use, because they were trained on data under CC BY-NC; `read_metadata` shows the terms.
    Pass `register` the name instead of the network, because the file also contains the grid and voxel size to use.

    >>> model = pretrained()
    """
    stem = SHORT.get(name, name)
    if stem not in available():
        names = ", ".join(available()) or "none"
        raise InputError(f"no model named {name!r}; this package has {names}: use carlreg.load for a file of your own")
    return load(WEIGHTS / f"{stem}.safetensors", device=device)
