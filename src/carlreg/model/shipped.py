"""The trained models that come with the package."""

from __future__ import annotations

from pathlib import Path

import torch

from carlreg.errors import InputError
from carlreg.model.algorithms import (
    RegistrationAlgorithm,
)
from carlreg.model.files import load

# ---- trained models -------------------------------------------------------------------------------------------------

WEIGHTS = Path(__file__).parent / "weights"
DEFAULT = "carl-base"
SHORT = {"default": DEFAULT, "base": "carl-base", "rot": "carl-rot"}
"""Other names of the package's models."""


def available() -> list[str]:
    """The trained models that come with the package."""
    return sorted(path.stem for path in WEIGHTS.glob("*.safetensors"))


def pretrained(name: str = "default", *, device: torch.device | str = "cpu") -> RegistrationAlgorithm:
    """A trained model of the package, by name, in evaluation mode. docs/models.md says what each is good for.

    Shipped weights are for research use: they were trained on data under CC BY-NC. `read_metadata` shows the terms. To
    `register` give the name, not the network: the file also says which grid and voxels the network wants.

    >>> model = pretrained()
    """
    stem = SHORT.get(name, name)
    if stem not in available():
        raise InputError(
            f"no model named {name!r}; this package has {', '.join(available()) or 'none'} "
            "(a model file of your own is read by carlreg.load)"
        )
    return load(WEIGHTS / f"{stem}.safetensors", device=device)
