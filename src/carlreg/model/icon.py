"""The authors' checkpoints, from icon_registration."""

from __future__ import annotations

from collections.abc import Mapping

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
from carlreg.model.zoo import _filled

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
        raise InputError("the state dict holds no weights; expected one from icon_registration")
    try:
        return _icon_module(weights).eval()
    except (KeyError, RuntimeError) as error:
        raise InputError(f"the state dict does not fit a network of icon_registration: {error}") from error


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
        raise InputError(f"unknown parts {sorted(heads)} in the state dict; expected a network of icon_registration")
    if wraps < 0:
        raise InputError("the state dict is of a bare network; expected that of a whole registration network")
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


def _heads(weights: Mapping[str, Tensor]) -> list[str]:
    return [name.partition(".")[0] for name in weights]


def _below(weights: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{head}."): tensor for name, tensor in weights.items() if name.startswith(f"{head}.")}
