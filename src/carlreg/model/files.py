"""Model files: weights and architecture in one safetensors file."""

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import nn

from carlreg.errors import InputError
from carlreg.files.atomic import PathLike, write_atomically
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
STEPS = (TwoStep, Downsample, PredictDisplacement, CoordinateAttention, ClosedFormXi)
LATER = {"handed": 0}  # arguments that older versions do not have, with the value that a file may omit
PARTS: dict[str, type[nn.Module]] = {part.__name__: part for part in (*STEPS, Encoder, Symmetrized, UNet)}


class ModelFileError(InputError):
    """A file that is not a model, or not one that this version can read."""


def describe(module: nn.Module) -> dict[str, Any]:
    """A module as plain data: its class and the arguments that build it, nested."""
    name = type(module).__name__
    if PARTS.get(name) is not type(module):
        raise TypeError(f"cannot describe a {name}; a model in a file is made of {sorted(PARTS)}")

    def value(argument: Any) -> Any:
        if isinstance(argument, nn.ModuleList):
            return len(argument)
        if isinstance(argument, nn.Module):
            return describe(argument)
        return list(argument) if isinstance(argument, tuple) else argument

    arguments = {p: value(getattr(module, p)) for p in inspect.signature(type(module)).parameters}
    return {"part": name} | {p: argument for p, argument in arguments.items() if LATER.get(p, ...) != argument}


def build(description: Mapping[str, Any]) -> nn.Module:
    """The module that `describe` describes, with new random weights."""
    arguments = dict(description)
    name = arguments.pop("part", None)
    if not isinstance(name, str) or name not in PARTS:
        raise ModelFileError(f"the model has an unknown part {name!r}; expected one of {', '.join(sorted(PARTS))}")
    try:
        return PARTS[name](**{k: build(v) if isinstance(v, Mapping) else v for k, v in arguments.items()})
    except (ModelFileError, RecursionError):
        raise
    except Exception as error:  # whatever a constructor makes of arguments from a damaged file
        raise ModelFileError(f"the model's {name} cannot be built from {arguments}: {error}") from error


def save(
    model: RegistrationAlgorithm,
    path: PathLike,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model as one safetensors file with its architecture inside. The file appears whole or not at all.

    `dtype=torch.float16` halves the file; tensors with values too large for it stay float32, and all load back as
    float32. `metadata` is free text (name, licence, …).
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} has values that are not finite; the file was not written")
        narrow = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        # A variance, for example, may be too large for half floats.
        tensors[name] = (narrow if bool(torch.isfinite(narrow).all()) else tensor).contiguous().cpu()
    header = {**(metadata or {}), "format": FORMAT, "architecture": json.dumps(describe(model))}
    write_atomically(path, to_bytes(tensors, header))


def load(path: PathLike, *, device: torch.device | str = "cpu") -> RegistrationAlgorithm:
    """Read a model written by `save`, in evaluation mode. Nothing but this file is needed.

    >>> model = load("carl.safetensors")
    """
    try:
        architecture = json.loads(read_metadata(path)["architecture"])
        _check_shapes(path, architecture)
        model = build(architecture)
    except json.JSONDecodeError as error:
        raise ModelFileError(f"{path} is damaged: its architecture is not valid JSON ({error})") from error
    except RecursionError as error:
        raise ModelFileError(f"{path} is damaged: its architecture is nested too deeply") from error
    assert isinstance(model, RegistrationAlgorithm)
    tensors = load_file(path)
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ModelFileError(f"{path} is damaged: {bad[0]} holds values that are not finite")
    model.load_state_dict(tensors, strict=True)
    return model.to(device).eval()


def _check_shapes(path: PathLike, architecture: Any) -> None:
    """Refuse an architecture that does not match the tensors of its file, before memory is taken for either."""
    if not isinstance(architecture, dict):
        raise ModelFileError(f"{path} is damaged: its architecture is {architecture!r}; expected an object")
    with safe_open(path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    largest = max([64, len(shapes), *(side for shape in shapes.values() for side in shape)])
    if any(number > largest for number in _integers(architecture)):
        raise ModelFileError(f"{path} does not match its own architecture, which is larger than all of its tensors")
    try:
        with torch.device("meta"):  # without memory
            model = build(architecture)
    except ModelFileError as error:
        raise ModelFileError(f"{path} is damaged: {error}") from error
    if not isinstance(model, RegistrationAlgorithm):
        raise ModelFileError(f"{path} holds a {type(model).__name__}, which is not a registration algorithm")
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, unknown = sorted(own.keys() - shapes.keys()), sorted(shapes.keys() - own.keys())
    wrong = sorted(name for name in own.keys() & shapes.keys() if own[name] != shapes[name])
    for problem, names in (("lacks", missing), ("has unknown", unknown), ("has wrong shapes for", wrong)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelFileError(f"{path} does not match its own architecture: it {problem} {names[0]}{more}")


def _integers(value: Any) -> Iterator[int]:
    """All integers of nested data."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def read_metadata(path: PathLike) -> dict[str, str]:
    """The text that `save` put into a model file, without reading its weights."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path} is not a model file, or it is damaged: {error}") from error
    if header.get("format") != FORMAT or "architecture" not in header:
        expected = f"{FORMAT!r}, as written by carlreg.save (use `carl models import` for the authors' checkpoints)"
        raise ModelFileError(f"{path} has the format {header.get('format')!r}; expected {expected}")
    return header
