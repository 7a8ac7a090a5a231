"""Model files: weights and architecture in one safetensors file."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from carlreg.errors import InputError
from carlreg.files.atomic import write_atomically
from carlreg.model.algorithms import (
    ClosedFormXi,
    CoordinateAttention,
    Downsample,
    PredictDisplacement,
    RegistrationAlgorithm,
    TwoStep,
)
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.unet import UNet

FORMAT = "carlreg-1"


# ---- files ----------------------------------------------------------------------------------------------------------

STEPS = (TwoStep, Downsample, PredictDisplacement, CoordinateAttention, ClosedFormXi)
LATER = {"handed": 0}
"""Arguments that older versions do not know: left out where they say what those do."""
PARTS: dict[str, type[nn.Module]] = {part.__name__: part for part in (*STEPS, Encoder, Symmetrized, UNet)}


class ModelFileError(InputError):
    """A file that is not a model, or not one that this version can read."""


def describe(module: nn.Module) -> dict[str, Any]:
    """A module's equation as plain data: its class and the arguments that build it, nested."""
    name = type(module).__name__
    if PARTS.get(name) is not type(module):
        raise TypeError(f"cannot describe a {name}; a model in a file is made of {sorted(PARTS)}")

    def value(argument: Any) -> Any:
        if isinstance(argument, nn.ModuleList):
            return len(argument)
        if isinstance(argument, nn.Module):
            return describe(argument)
        return list(argument) if isinstance(argument, tuple) else argument

    given = {p: value(getattr(module, p)) for p in inspect.signature(type(module)).parameters}
    return {"part": name} | {p: argument for p, argument in given.items() if LATER.get(p, ...) != argument}


def build(description: Mapping[str, Any]) -> nn.Module:
    """The module that `describe` described, with fresh weights."""
    arguments = dict(description)
    name = arguments.pop("part", None)
    if not isinstance(name, str) or name not in PARTS:
        raise ModelFileError(f"the model has a part {name!r}; this version knows {sorted(PARTS)}")
    try:
        return PARTS[name](**{k: build(v) if isinstance(v, Mapping) else v for k, v in arguments.items()})
    except ModelFileError:
        raise
    except Exception as error:  # whatever a constructor makes of arguments from a damaged file
        raise ModelFileError(f"the model's {name} cannot be built from {arguments}: {error}") from error


def save(
    model: RegistrationAlgorithm,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model as one safetensors file with its architecture inside. The file appears whole or not at all.

    `dtype=torch.float16` halves the file; weights load back as float32, and tensors with values too large for it stay
    that. `metadata` is free text (name, licence, …).
    """
    from safetensors.torch import save as to_bytes

    tensors = {}
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} holds values that are not finite; the file was not written")
        narrow = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        # A variance, say, may be too large for half floats.
        tensors[name] = (narrow if bool(torch.isfinite(narrow).all()) else tensor).contiguous().cpu()
    header = {**(metadata or {}), "format": FORMAT, "architecture": json.dumps(describe(model))}
    write_atomically(path, to_bytes(tensors, header))


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> RegistrationAlgorithm:
    """Read a model written by `save`, in evaluation mode. Nothing but this file is needed.

    >>> model = load("carl.safetensors")
    """
    try:
        architecture = json.loads(read_metadata(path)["architecture"])
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path} is damaged: its architecture is not readable ({error})") from error
    if not isinstance(architecture, dict):
        raise ModelFileError(f"{path} is damaged: its architecture is {architecture!r}; expected an object")
    model = build(architecture)
    if not isinstance(model, RegistrationAlgorithm):
        raise ModelFileError(f"{path} holds a {type(model).__name__}, which is not a registration algorithm")
    from safetensors.torch import load_file

    tensors = load_file(path)
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    for problem, names in (("lacks", missing), ("has unknown", unknown), ("has wrong shapes for", wrong)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelFileError(f"{path} does not fit its own architecture: it {problem} {names[0]}{more}")
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ModelFileError(f"{path} is damaged: {bad[0]} holds values that are not finite")
    model.load_state_dict(tensors, strict=True)
    return model.to(device).eval()


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The text that `save` put into a model file, without reading its weights."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no model file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is not a model file, or it is damaged: {error}") from error
    if header.get("format") != FORMAT or "architecture" not in header:
        raise ModelFileError(
            f"{path} says format {header.get('format')!r}; expected {FORMAT!r}, as written by carlreg.save "
            "(the authors' checkpoints come in through carlreg.models.from_icon)"
        )
    return header
