"""The paper's networks as expressions, and how they are kept in files."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from carlreg.networks import Encoder, Symmetrized, UNet
from carlreg.registration import (
    ClosedFormXi,
    CoordinateAttention,
    Downsample,
    PredictDisplacement,
    RegistrationAlgorithm,
    TwoStep,
)

FORMAT = "carlreg-1"

# ---- the paper's equations ------------------------------------------------------------------------------------------

UNET_DOWN = (16, 32, 64, 256, 512)
UNET_UP = (256, 128, 64, 32, 16)


def carl(
    dim: int = 3,
    refinements: int = 3,
    *,
    channels: int = 1,
    width: int = 128,
    length: float = 4.0,
    unet_down: Sequence[int] = UNET_DOWN,
    unet_up: Sequence[int] = UNET_UP,
) -> RegistrationAlgorithm:
    """CARL, Eq. (CARL): TwoStep{TwoStep{Down{TwoStep{Down{Ξθ}, Ψ1}}, Ψ2}, Ψ3}. 57 M parameters in 3-D.

    With two refinements Ψ3 is left out, as in the first half of training; `add_refinement` adds it later.

    >>> phi = carl()(moving, fixed)
    """
    xi = CoordinateAttention(Encoder(dim, channels, width), length=length)
    return _refined(xi, refinements, dim, channels, unet_down, unet_up)


def carl_rot(
    dim: int = 3,
    refinements: int = 3,
    *,
    channels: int = 1,
    width: int = 128,
    length: float = 4.0,
    group: Literal["pi", "quarter"] = "pi",
    handed: int = 0,
    unet_down: Sequence[int] = UNET_DOWN,
    unet_up: Sequence[int] = UNET_UP,
) -> RegistrationAlgorithm:
    """CARL{ROT}: CARL with an encoder that reaches further (dilation 8) and is averaged over rotations of the grid
    ("pi" as in the paper, or "quarter"), and with fields continued beyond the image by mirroring. With `handed`, its
    encoder is told left from right (`Handedness`), which it otherwise has to learn.
    """
    encoder = Symmetrized(Encoder(dim, channels, width, dilations=(1, 2, 4, 8), handed=handed), group)
    xi = CoordinateAttention(encoder, length=length, extrapolate="mirror")
    return _refined(xi, refinements, dim, channels, unet_down, unet_up)


def gradicon(
    dim: int = 3,
    refinements: int = 3,
    *,
    channels: int = 1,
    unet_down: Sequence[int] = UNET_DOWN,
    unet_up: Sequence[int] = UNET_UP,
) -> RegistrationAlgorithm:
    """GradICON's network: CARL with a displacement-predicting Ψ0 in the place of Ξθ, so [U, U] equivariant only."""
    psi0 = PredictDisplacement(UNet(dim, channels, unet_down, unet_up))
    return _refined(psi0, refinements, dim, channels, unet_down, unet_up)


def xi(dim: int = 3, *, channels: int = 1, width: int = 128, length: float = 4.0) -> RegistrationAlgorithm:
    """Down{Down{Ξθ}}: coordinate attention alone, at a quarter of the resolution."""
    return Downsample(Downsample(CoordinateAttention(Encoder(dim, channels, width), length=length)))


def add_refinement(
    model: RegistrationAlgorithm, *, unet_down: Sequence[int] | None = None, unet_up: Sequence[int] | None = None
) -> RegistrationAlgorithm:
    """TwoStep{model, Ψ} with a new Ψ whose last convolution is zero: the answers stay as they are until it is trained.

    The new U-Net is as wide as the model's own, unless said otherwise.
    """
    network = next((m for m in model.modules() if isinstance(m, (UNet, Encoder))), None)
    if network is None:
        raise ValueError(f"{type(model).__name__} holds no Encoder or UNet; expected a network of this package")
    steps = [m for m in model.modules() if isinstance(m, (PredictDisplacement, CoordinateAttention))]
    unets = [m.network for m in steps if isinstance(m, PredictDisplacement)]
    down = unet_down or (unets[-1].down if unets else UNET_DOWN)
    up = unet_up or (unets[-1].up if unets else UNET_UP)
    psi = PredictDisplacement(UNet(network.dim, network.channels, down, up), steps[0].extrapolate)
    weights = next(model.parameters())
    return TwoStep(model, psi.to(weights.device, weights.dtype)).train(model.training)


def first_step(model: RegistrationAlgorithm) -> RegistrationAlgorithm:
    """Down{Down{Ξ}} of TwoStep{Down{TwoStep{Down{Ξ}, Ψ1}}, Ψ2}: a model without its refinements. The weights are the
    model's own, so that to train the one is to train the other.
    """
    if isinstance(model, TwoStep):
        return first_step(model.phi)
    if isinstance(model, Downsample):
        return Downsample(first_step(model.phi), model.aligned)
    return model


def _refined(
    first: CoordinateAttention | PredictDisplacement,
    refinements: int,
    dim: int,
    channels: int,
    unet_down: Sequence[int],
    unet_up: Sequence[int],
) -> RegistrationAlgorithm:
    """TwoStep{Down{TwoStep{Down{first}, Ψ1}}, Ψ2}, and Ψ3 around it."""
    if refinements not in (2, 3):
        raise ValueError(f"refinements is {refinements}; expected 2 (Ψ1 and Ψ2) or 3 (with Ψ3)")

    def psi() -> PredictDisplacement:
        return PredictDisplacement(UNet(dim, channels, unet_down, unet_up), first.extrapolate)

    model = TwoStep(Downsample(TwoStep(Downsample(first), psi())), psi())
    return TwoStep(model, psi()) if refinements == 3 else model


# ---- files ----------------------------------------------------------------------------------------------------------

STEPS = (TwoStep, Downsample, PredictDisplacement, CoordinateAttention, ClosedFormXi)
LATER = {"handed": 0}
"""Arguments that older versions do not know: left out where they say what those do."""
PARTS: dict[str, type[nn.Module]] = {part.__name__: part for part in (*STEPS, Encoder, Symmetrized, UNet)}


class ModelFileError(ValueError):
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
            raise ValueError(f"{name} holds values that are not finite; the file was not written")
        narrow = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        # A variance, say, may be too large for half floats.
        tensors[name] = (narrow if bool(torch.isfinite(narrow).all()) else tensor).contiguous().cpu()
    header = {**(metadata or {}), "format": FORMAT, "architecture": json.dumps(describe(model))}
    write_atomically(path, to_bytes(tensors, header))


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write beside the target, then rename: a reader never sees half a file, a failure leaves the old one."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(target)  # a disk that is full does not say for which file
        raise


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
        raise ValueError(
            f"no model named {name!r}; this package has {', '.join(available()) or 'none'} "
            "(a model file of your own is read by carlreg.load)"
        )
    return load(WEIGHTS / f"{stem}.safetensors", device=device)


# ---- the authors' checkpoints ---------------------------------------------------------------------------------------


def from_icon(state_dict: Mapping[str, Tensor]) -> RegistrationAlgorithm:
    """A network of icon_registration (CARL, CARL{ROT}, GradICON, uniGradICON) from its state dict alone.

    The tree is read off the parameter names. Pooling is `aligned=False`, as those weights were trained.

    >>> model = from_icon(torch.load("network_weights.trch", weights_only=True))
    """
    weights = {}
    for name, tensor in state_dict.items():
        bare = name.removeprefix("module.").removeprefix("regis_net.")
        if not bare.endswith("identity_map") and not bare.startswith("similarity"):
            weights[bare] = tensor
    if not weights:
        raise ValueError("the state dict holds no weights; expected one from icon_registration")
    try:
        return _icon_module(weights).eval()
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"the state dict does not fit a network of icon_registration: {error}") from error


def _icon_module(weights: Mapping[str, Tensor]) -> RegistrationAlgorithm:
    """One node of the authors' tree: 'netPhi'/'netPsi' is TwoStep, 'net' is everything that wraps one thing."""
    if set(_heads(weights)) == {"netPhi", "netPsi"}:
        return TwoStep(_icon_module(_below(weights, "netPhi")), _icon_module(_below(weights, "netPsi")))
    wraps = 0
    while set(_heads(weights)) == {"net"}:
        weights, wraps = _below(weights, "net"), wraps + 1
    heads = set(_heads(weights))
    if heads == {"netPhi", "netPsi"}:
        module = _icon_module(weights)
    elif heads == {"batchNorms", "downConvs", "lastConv", "upConvs"}:
        module, wraps = PredictDisplacement(_icon_unet(weights)), wraps - 1  # FunctionFromVectorField
    elif heads == {"batchnorms", "convs"}:
        encoder = _icon_encoder(weights)
        if 8 in encoder.dilations:  # RotationFunctionFromVectorField, AttentionRegistration, Equivariantize
            module, wraps = CoordinateAttention(Symmetrized(encoder), extrapolate="mirror"), wraps - 3
        else:  # FunctionFromVectorField, AttentionRegistration
            module, wraps = CoordinateAttention(encoder), wraps - 2
    else:
        raise ValueError(f"unknown parts {sorted(heads)} in the state dict; expected a network of icon_registration")
    if wraps < 0:
        raise ValueError("the state dict is of a bare network; expected that of a whole registration network")
    for _ in range(wraps):
        module = Downsample(module, aligned=False)
    return module


def _icon_unet(weights: Mapping[str, Tensor]) -> UNet:
    levels = len({name.split(".")[1] for name in weights if name.startswith("downConvs.")})
    first = weights["downConvs.0.weight"]
    network = UNet(
        dim=first.dim() - 2,
        channels=first.shape[1] // 2,
        down=[weights[f"downConvs.{i}.weight"].shape[0] for i in range(levels)],
        up=[weights[f"upConvs.{i}.weight"].shape[1] for i in reversed(range(levels))],
    )
    # The authors number the way up from the finest level, we from the coarsest, in the order of use.
    names = {f"downConvs.{i}": f"down_convs.{i}" for i in range(levels)}
    names |= {f"upConvs.{i}": f"up_convs.{levels - 1 - i}" for i in range(levels)}
    names |= {f"batchNorms.{i}": f"norms.{levels - 1 - i}" for i in range(levels)}
    return _filled(network, weights, names | {"lastConv": "last"})


def _icon_encoder(weights: Mapping[str, Tensor]) -> Encoder:
    blocks = len({name.split(".")[1] for name in weights if name.startswith("batchnorms.")})
    convs = len({name.split(".")[1] for name in weights if name.startswith("convs.")})
    stem = weights["convs.0.weight"]
    depth = (convs - 1) // blocks
    network = Encoder(stem.dim() - 2, stem.shape[1], stem.shape[0], blocks, dilations=tuple(2**i for i in range(depth)))
    names = {"convs.0": "stem"} | {f"batchnorms.{b}": f"blocks.{b}.norm" for b in range(blocks)}
    names |= {f"convs.{1 + d * blocks + b}": f"blocks.{b}.convs.{d}" for b in range(blocks) for d in range(depth)}
    return _filled(network, weights, names)


def _filled(network: Any, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Any:
    renamed = {f"{names[old.rpartition('.')[0]]}.{old.rpartition('.')[2]}": tensor for old, tensor in weights.items()}
    network.load_state_dict(renamed, strict=True)
    return network


def _heads(weights: Mapping[str, Tensor]) -> list[str]:
    return [name.partition(".")[0] for name in weights]


def _below(weights: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{head}."): tensor for name, tensor in weights.items() if name.startswith(f"{head}.")}
