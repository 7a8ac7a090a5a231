"""Equivariant image registration: CARL in Python.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carlreg.attention import coordinate_attention
    from carlreg.losses import Loss, diffusion, lncc, lncc2, mind, registration_loss, ssd
    from carlreg.models import add_refinement, carl, carl_rot, gradicon, load, save, xi
    from carlreg.optimize import Optimized, instance_optimize
    from carlreg.registration import (
        Augmented,
        ClosedFormXi,
        CoordinateAttention,
        Downsample,
        PredictDisplacement,
        RegistrationAlgorithm,
        TwoStep,
    )
    from carlreg.transforms import Affine, Composition, DisplacementField, Identity, Transform, compose, invert, warp

__version__ = "0.1.0"

_HOME = {
    "attention": ["coordinate_attention"],
    "losses": ["Loss", "diffusion", "lncc", "lncc2", "mind", "registration_loss", "ssd"],
    "models": ["add_refinement", "carl", "carl_rot", "gradicon", "load", "save", "xi"],
    "optimize": ["Optimized", "instance_optimize"],
    "registration": [
        "Augmented",
        "ClosedFormXi",
        "CoordinateAttention",
        "Downsample",
        "PredictDisplacement",
        "RegistrationAlgorithm",
        "TwoStep",
    ],
    "transforms": [
        "Affine",
        "Composition",
        "DisplacementField",
        "Identity",
        "Transform",
        "compose",
        "invert",
        "warp",
    ],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Affine",
    "Augmented",
    "ClosedFormXi",
    "Composition",
    "CoordinateAttention",
    "DisplacementField",
    "Downsample",
    "Identity",
    "Loss",
    "Optimized",
    "PredictDisplacement",
    "RegistrationAlgorithm",
    "Transform",
    "TwoStep",
    "add_refinement",
    "carl",
    "carl_rot",
    "compose",
    "coordinate_attention",
    "diffusion",
    "gradicon",
    "instance_optimize",
    "invert",
    "lncc",
    "lncc2",
    "load",
    "mind",
    "registration_loss",
    "save",
    "ssd",
    "warp",
    "xi",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'carlreg' has no attribute {name!r}")
    return getattr(importlib.import_module(f"carlreg.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
