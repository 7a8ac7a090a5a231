"""The paper's networks, each as one expression."""

from collections.abc import Callable, Sequence
from typing import Literal

from carlreg.errors import InputError
from carlreg.geometry.transforms import Extrapolation
from carlreg.model.algorithms import (
    CoordinateAttention,
    Downsample,
    PredictDisplacement,
    RegistrationAlgorithm,
    TwoStep,
)
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.unet import UNet

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
    """CARL, Eq. (16): TwoStep{TwoStep{Down{TwoStep{Down{Ξθ}, Ψ1}}, Ψ2}, Ψ3}. 57 M parameters in 3-D.

    With two refinements Ψ3 is left out, as in the first half of training; `add_refinement` adds it later.

    >>> phi = carl()(moving, fixed)
    """
    xi = CoordinateAttention(Encoder(dim, channels, width), length=length)
    return _refined(xi, refinements, _unets(dim, channels, unet_down, unet_up))


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
    """CARL{ROT}: CARL with an encoder that has a further convolution (dilation 8) and is averaged over rotations of the
    grid ("pi" as in the paper, or "quarter"), and with displacement fields that are mirrored beyond the image.

    `handed` is the number of `Handedness` features, which distinguish left from right; without them this is learnt.
    """
    encoder = Encoder(dim, channels, width, dilations=(1, 2, 4, 8), handed=handed)
    xi = CoordinateAttention(Symmetrized(encoder, group), length=length, extrapolate="mirror")
    return _refined(xi, refinements, _unets(dim, channels, unet_down, unet_up, "mirror"))


def gradicon(
    dim: int = 3,
    refinements: int = 3,
    *,
    channels: int = 1,
    unet_down: Sequence[int] = UNET_DOWN,
    unet_up: Sequence[int] = UNET_UP,
) -> RegistrationAlgorithm:
    """GradICON's network: CARL with a displacement-predicting Ψ0 instead of Ξθ, so only [U, U] equivariant."""
    psi = _unets(dim, channels, unet_down, unet_up)
    return _refined(psi(), refinements, psi)


def xi(dim: int = 3, *, channels: int = 1, width: int = 128, length: float = 4.0) -> RegistrationAlgorithm:
    """Down{Down{Ξθ}}: coordinate attention alone, at a quarter of the resolution."""
    return Downsample(Downsample(CoordinateAttention(Encoder(dim, channels, width), length=length)))


Make = Callable[[], PredictDisplacement]


def _unets(dim: int, channels: int, down: Sequence[int], up: Sequence[int], outside: Extrapolation = "clamp") -> Make:
    """A function that makes a new Ψ at each call."""
    return lambda: PredictDisplacement(UNet(dim, channels, down, up), outside)


def _refined(first: RegistrationAlgorithm, refinements: int, psi: Make) -> RegistrationAlgorithm:
    """TwoStep{TwoStep{Down{TwoStep{Down{first}, Ψ1}}, Ψ2}, Ψ3}, or the same without Ψ3."""
    if refinements not in (2, 3):
        raise InputError(f"refinements is {refinements}; expected 2 (Ψ1 and Ψ2) or 3 (with Ψ3)")
    model = TwoStep(Downsample(TwoStep(Downsample(first), psi())), psi())
    return TwoStep(model, psi()) if refinements == 3 else model


def add_refinement(
    model: RegistrationAlgorithm, *, unet_down: Sequence[int] | None = None, unet_up: Sequence[int] | None = None
) -> RegistrationAlgorithm:
    """TwoStep{model, Ψ} with a new Ψ whose last convolution is zero, so that results do not change until it is trained.

    By default the new U-Net has the widths of the model's own.
    """
    network = next((m for m in model.modules() if isinstance(m, (UNet, Encoder))), None)
    if network is None:
        raise InputError(f"{type(model).__name__} contains no Encoder or UNet; expected a network of this package")
    steps = [m for m in model.modules() if isinstance(m, (PredictDisplacement, CoordinateAttention))]
    unets = [m.network for m in steps if isinstance(m, PredictDisplacement)]
    down = unet_down or (unets[-1].down if unets else UNET_DOWN)
    up = unet_up or (unets[-1].up if unets else UNET_UP)
    psi = PredictDisplacement(UNet(network.dim, network.channels, down, up), steps[0].extrapolate)
    weights = next(model.parameters())
    return TwoStep(model, psi.to(weights.device, weights.dtype)).train(model.training)


def first_step(model: RegistrationAlgorithm) -> RegistrationAlgorithm:
    """A model without its refinements: Down{Down{Ξ}} of TwoStep{Down{TwoStep{Down{Ξ}, Ψ1}}, Ψ2}.

    It shares the model's weights, so training one trains the other.
    """
    if isinstance(model, TwoStep):
        return first_step(model.phi)
    if isinstance(model, Downsample):
        return Downsample(first_step(model.phi), model.aligned)
    return model
