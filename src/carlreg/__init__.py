"""Equivariant image registration: CARL in Python.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carlreg.fast.precision import mixed_precision
    from carlreg.geometry.inversion import invert
    from carlreg.geometry.transforms import Affine, Composition, DisplacementField, Identity, Transform, compose, warp
    from carlreg.model.algorithms import (
        Augmented,
        ClosedFormXi,
        CoordinateAttention,
        Downsample,
        PredictDisplacement,
        RegistrationAlgorithm,
        TwoStep,
    )
    from carlreg.model.attention import attention_moments, coordinate_attention
    from carlreg.model.files import load, save
    from carlreg.model.shipped import pretrained
    from carlreg.model.zoo import add_refinement, carl, carl_rot, gradicon, xi
    from carlreg.objective.instance import Optimized, instance_optimize, optimize_fields
    from carlreg.objective.losses import Loss, diffusion, lncc, lncc2, mind, registration_loss, ssd
    from carlreg.registration.api import register
    from carlreg.registration.result import Registration
    from carlreg.training.loop import train
    from carlreg.training.stages import Stage

__version__ = "0.1.0"

_HOME = {
    "fast.precision": ["mixed_precision"],
    "geometry.inversion": ["invert"],
    "geometry.transforms": [
        "Affine",
        "Composition",
        "DisplacementField",
        "Identity",
        "Transform",
        "compose",
        "warp",
    ],
    "model.algorithms": [
        "Augmented",
        "ClosedFormXi",
        "CoordinateAttention",
        "Downsample",
        "PredictDisplacement",
        "RegistrationAlgorithm",
        "TwoStep",
    ],
    "model.attention": ["attention_moments", "coordinate_attention"],
    "model.files": ["load", "save"],
    "model.shipped": ["pretrained"],
    "model.zoo": ["add_refinement", "carl", "carl_rot", "gradicon", "xi"],
    "objective.instance": ["Optimized", "instance_optimize", "optimize_fields"],
    "objective.losses": ["Loss", "diffusion", "lncc", "lncc2", "mind", "registration_loss", "ssd"],
    "registration.api": ["register"],
    "registration.result": ["Registration"],
    "training.loop": ["train"],
    "training.stages": ["Stage"],
}
_ROOM_OF = {name: room for room, names in _HOME.items() for name in names}

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
    "Registration",
    "RegistrationAlgorithm",
    "Stage",
    "Transform",
    "TwoStep",
    "add_refinement",
    "attention_moments",
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
    "mixed_precision",
    "optimize_fields",
    "pretrained",
    "register",
    "registration_loss",
    "save",
    "ssd",
    "train",
    "warp",
    "xi",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'carlreg' has no attribute {name!r}")
    return getattr(importlib.import_module(f"carlreg.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
