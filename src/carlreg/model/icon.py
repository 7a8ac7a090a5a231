"""Checkpoints of the paper's authors, from icon_registration."""

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.model.algorithms import (
    CoordinateAttention,
    Downsample,
    PredictDisplacement,
    RegistrationAlgorithm,
    TwoStep,
)
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.unet import UNet

Network = TypeVar("Network", UNet, Encoder)


def from_icon(state_dict: Mapping[str, Tensor]) -> RegistrationAlgorithm:
    """A network of icon_registration (CARL, CARL{ROT}, GradICON, uniGradICON) from its state dict alone.

    The tree follows from the parameters' names. Pooling is `aligned=False`, as those weights were trained.

    >>> model = from_icon(torch.load("network_weights.trch", weights_only=True))
    """
    weights = {}
    for name, tensor in state_dict.items():
        bare = name.removeprefix("module.").removeprefix("regis_net.")
        if not bare.endswith("identity_map") and not bare.startswith("similarity"):
            weights[bare] = tensor
    if not weights:
        raise InputError("the state dict holds no weights; expected one from icon_registration")
    try:
        return _icon_module(weights).eval()
    except (KeyError, IndexError, RuntimeError, RecursionError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise InputError(f"the state dict does not match a network of icon_registration: {reason}") from error


def _icon_module(weights: Mapping[str, Tensor]) -> RegistrationAlgorithm:
    """One node of the authors' tree: 'netPhi' and 'netPsi' make a TwoStep; 'net' is any wrapper of one module."""
    wraps = 0
    while (heads := {name.partition(".")[0] for name in weights}) == {"net"}:
        weights, wraps = _below(weights, "net"), wraps + 1
    if heads == {"netPhi", "netPsi"}:
        module: RegistrationAlgorithm = TwoStep(*(_icon_module(_below(weights, head)) for head in sorted(heads)))
    elif heads == {"batchNorms", "downConvs", "lastConv", "upConvs"}:
        module, wraps = PredictDisplacement(_icon_unet(weights)), wraps - 1  # FunctionFromVectorField
    elif heads == {"batchnorms", "convs"}:
        encoder = _icon_encoder(weights)
        if 8 in encoder.dilations:  # RotationFunctionFromVectorField, AttentionRegistration, Equivariantize
            module, wraps = CoordinateAttention(Symmetrized(encoder), extrapolate="mirror"), wraps - 3
        else:  # FunctionFromVectorField, AttentionRegistration
            module, wraps = CoordinateAttention(encoder), wraps - 2
    else:
        parts = ", ".join(sorted(heads))[:200]
        raise InputError(f"the state dict has unknown parts: {parts}; expected a network of icon_registration")
    if wraps < 0:
        raise InputError("the state dict is that of a bare network; expected a whole registration network")
    for _ in range(wraps):
        module = Downsample(module, aligned=False)
    return module


def _below(weights: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{head}."): tensor for name, tensor in weights.items() if name.startswith(f"{head}.")}


def _icon_unet(weights: Mapping[str, Tensor]) -> UNet:
    levels = _count(weights, "downConvs")
    first = weights["downConvs.0.weight"]
    down = [weights[f"downConvs.{i}.weight"].shape[0] for i in range(levels)]
    up = [weights[f"upConvs.{i}.weight"].shape[1] for i in reversed(range(levels))]
    make = partial(UNet, first.dim() - 2, first.shape[1] // 2, down, up)
    # The authors number the way up from the finest level, we from the coarsest, in the order of use.
    names = {f"downConvs.{i}": f"down_convs.{i}" for i in range(levels)}
    names |= {f"upConvs.{i}": f"up_convs.{levels - 1 - i}" for i in range(levels)}
    names |= {f"batchNorms.{i}": f"norms.{levels - 1 - i}" for i in range(levels)}
    return _filled(make, weights, names | {"lastConv": "last"})


def _icon_encoder(weights: Mapping[str, Tensor]) -> Encoder:
    stem, blocks = weights["convs.0.weight"], _count(weights, "batchnorms")
    depth = (_count(weights, "convs") - 1) // blocks
    dilations = tuple(2**i for i in range(depth))
    make = partial(Encoder, stem.dim() - 2, stem.shape[1], stem.shape[0], blocks, dilations)
    names = {"convs.0": "stem"} | {f"batchnorms.{b}": f"blocks.{b}.norm" for b in range(blocks)}
    names |= {f"convs.{1 + d * blocks + b}": f"blocks.{b}.convs.{d}" for b in range(blocks) for d in range(depth)}
    return _filled(make, weights, names)


def _count(weights: Mapping[str, Tensor], head: str) -> int:
    return len({name.partition(".")[0] for name in _below(weights, head)})


def _filled(make: partial[Network], weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Network:
    """A network with these weights under its own names. It is built without memory first, to compare shapes."""
    renamed = {f"{names[old.rpartition('.')[0]]}.{old.rpartition('.')[2]}": tensor for old, tensor in weights.items()}
    with torch.device("meta"):
        own = make().state_dict()
    if {name: own[name].shape for name in own} != {name: renamed[name].shape for name in renamed}:
        raise InputError("the state dict's weights do not have the shapes of a network of icon_registration")
    network = make()
    network.load_state_dict(renamed, strict=True)
    return network
