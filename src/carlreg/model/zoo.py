"""The paper's networks as expressions, and how they are kept in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from carlreg.model.algorithms import (
    CoordinateAttention,
    Downsample,
    PredictDisplacement,
    RegistrationAlgorithm,
    TwoStep,
)
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.unet import UNet

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


def _filled(network: Any, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> Any:
    renamed = {f"{names[old.rpartition('.')[0]]}.{old.rpartition('.')[2]}": tensor for old, tensor in weights.items()}
    network.load_state_dict(renamed, strict=True)
    return network
