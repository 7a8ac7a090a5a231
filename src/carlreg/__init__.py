"""Equivariant image registration: CARL in Python.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carlreg.attention import attention_moments, coordinate_attention
    from carlreg.losses import Loss, diffusion, lncc, lncc2, mind, registration_loss, ssd
    from carlreg.models import add_refinement, carl, carl_rot, gradicon, load, pretrained, save, xi
    from carlreg.optimize import Optimized, instance_optimize, optimize_fields
    from carlreg.precision import mixed_precision
    from carlreg.product import Registration, register
    from carlreg.registration import (
        Augmented,
        ClosedFormXi,
        CoordinateAttention,
        Downsample,
        PredictDisplacement,
        RegistrationAlgorithm,
        TwoStep,
    )
    from carlreg.training import Stage, train
    from carlreg.transforms import Affine, Composition, DisplacementField, Identity, Transform, compose, invert, warp

__version__ = "0.1.0"

_HOME = {
    "attention": ["attention_moments", "coordinate_attention"],
    "losses": ["Loss", "diffusion", "lncc", "lncc2", "mind", "registration_loss", "ssd"],
    "models": ["add_refinement", "carl", "carl_rot", "gradicon", "load", "pretrained", "save", "xi"],
    "optimize": ["Optimized", "instance_optimize", "optimize_fields"],
    "precision": ["mixed_precision"],
    "product": ["Registration", "register"],
    "training": ["Stage", "train"],
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
_MODULES = {
    *_HOME,
    *(
        "augmentation",
        "baselines",
        "datasets",
        "distributed",
        "evaluation",
        "explain",
        "grids",
        "images",
        "inputs",
        "itk",
        "look",
    ),
    *("metrics", "networks", "points", "report", "runs", "synthesis"),
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
    if name in _MODULES:
        return importlib.import_module(f"carlreg.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'carlreg' has no attribute {name!r}")
    return getattr(importlib.import_module(f"carlreg.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
