"""Registration algorithms, the paper's capital Greek letters: Φ[moving, fixed] gives a transform.

Each is a module that takes images of any shape, any batch, in one to three dimensions, and returns a Transform from
the fixed image's points to the moving image's. None of them keeps anything from one call to the next.
"""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import Grid, constant, fine_to_coarse, pool, voxel_points
from carlreg.geometry.transforms import (
    Affine,
    DisplacementField,
    Extrapolation,
    Identity,
    Scaling,
    Transform,
    compose,
    warp,
)
from carlreg.model.attention import attention_moments, coordinate_attention
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.unet import UNet

logger = logging.getLogger(__name__)


class RegistrationAlgorithm(nn.Module, ABC):
    """Φ: call it with a moving and a fixed image, (B, C, *shape) each.

    >>> phi = algorithm(moving, fixed)
    >>> phi, inverse = algorithm.both(moving, fixed)

    To write a new one, subclass this and define `register`. Calling checks the images once, at the door; steps
    inside one another use `register`.
    """

    def forward(self, moving: Tensor, fixed: Tensor) -> Transform:
        check_pair(moving, fixed)
        check_finite(moving, "moving")
        check_finite(fixed, "fixed")
        return self.register(moving, fixed)

    @abstractmethod
    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        """The transform itself. `swapped` says that fixed is moving with the two halves of the batch exchanged, so
        that work done for one image can serve both directions."""

    def both(self, moving: Tensor, fixed: Tensor) -> tuple[Transform, Transform]:
        """Φ[moving, fixed] and Φ[fixed, moving], in one batch where the shapes allow it, and the GPU's memory."""
        if moving.shape != fixed.shape:
            return self(moving, fixed), self(fixed, moving)
        check_pair(moving, fixed)
        images = torch.cat([moving, fixed])
        check_finite(images, "the pair")
        try:
            transform = self.register(images, exchange_halves(images), swapped=True)
            return transform[: len(moving)], transform[len(moving) :]
        except torch.cuda.OutOfMemoryError:
            if self.training:  # the statistics of half a batch are others
                raise
        _say_once("the GPU has too little memory for both directions at once: one after the other, more slowly")
        return self.register(moving, fixed), self.register(fixed, moving)


@functools.cache
def _say_once(text: str) -> None:
    logger.warning("%s", text)


def exchange_halves(batch: Tensor) -> Tensor:
    return batch.roll(len(batch) // 2, dims=0)


class TwoStep(RegistrationAlgorithm):
    """TwoStep{Φ, Ψ}: register, warp, and register what is left. [W, U] equivariant if Φ is and Ψ is [U, U]."""

    def __init__(self, phi: RegistrationAlgorithm, psi: RegistrationAlgorithm) -> None:
        super().__init__()
        self.phi, self.psi = phi, psi

    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        phi = self.phi.register(moving, fixed, swapped=swapped)
        psi = self.psi.register(warp(moving, phi, like=fixed), fixed)
        return compose(phi, psi)  # Φ[M, F] ∘ Ψ[M ∘ Φ[M, F], F]


class Downsample(RegistrationAlgorithm):
    """Down{Φ}: Φ at half the resolution, A_M⁻¹ ∘ Φ[pool M, pool F] ∘ A_F.

    A takes an image's unit coordinates to those of its pooled image, whose voxels lie elsewhere (`fine_to_coarse`).
    `aligned=False` leaves A out, as the authors' implementation does: needed for weights trained that way, at the
    price of stretched translations.
    """

    def __init__(self, phi: RegistrationAlgorithm, aligned: bool = True) -> None:
        super().__init__()
        self.phi, self.aligned = phi, aligned

    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        phi = self.phi.register(pool(moving), pool(fixed), swapped=swapped)
        if not self.aligned:
            return phi
        return compose(_to_coarse(moving).inverse(), phi, _to_coarse(fixed))


def _to_coarse(image: Tensor) -> Scaling:
    scale, shift = (constant(values, image.dtype, image.device) for values in fine_to_coarse(image.shape[2:]))
    return Scaling(scale[None], shift[None])


class PredictDisplacement(RegistrationAlgorithm):
    """Ψ: x ↦ x + Conv_θ[cat(M, F)](x). [U, U] equivariant to translation, as VoxelMorph and its successors are."""

    def __init__(self, network: UNet, extrapolate: Extrapolation = "clamp") -> None:
        super().__init__()
        self.network, self.extrapolate = network, extrapolate

    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        _check_network(self.network, fixed)
        if moving.shape != fixed.shape:
            moving = warp(moving, Identity(), like=fixed)
        return DisplacementField(self.network(moving, fixed).to(fixed.dtype), self.extrapolate)


class CoordinateAttention(RegistrationAlgorithm):
    """Ξθ: each fixed voxel attends to every moving voxel and goes to the attention's centre of mass.

    Images are padded with zeros before they are encoded, and the keys' positions continue beyond [0, 1], so that
    voxels can be sent outside of the moving image. Features have the same `length`, so logits lie in ±length².
    """

    def __init__(
        self,
        encoder: Encoder | Symmetrized,
        padding: int = 9,
        length: float = 4.0,
        extrapolate: Extrapolation = "clamp",
    ) -> None:
        super().__init__()
        self.encoder, self.padding, self.length, self.extrapolate = encoder, padding, length, extrapolate

    def features(self, image: Tensor) -> Tensor:
        """Feature vectors of the padded image: (B, C, *shape) → (B, *padded shape, width)."""
        return self.encoder(F.pad(image, (self.padding, self.padding) * (image.dim() - 2))).movedim(1, -1)

    def crop(self, features: Tensor) -> Tensor:
        """The features of the image itself, without the padding."""
        inside = (slice(None), *(slice(self.padding, n - self.padding) for n in features.shape[1:-1]))
        return features[inside]

    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        _check_network(self.encoder, fixed)
        keys = self.features(moving)
        queries = self.crop(keys if swapped else self.features(fixed)).flatten(1, -2)
        matches = coordinate_attention(
            exchange_halves(queries) if swapped else queries,
            keys.flatten(1, -2),
            Grid.of(moving.shape[2:]).pad(self.padding),
            length=self.length,
        ).to(fixed.dtype)
        displacement = matches.reshape(-1, *fixed.shape[2:], fixed.dim() - 2) - voxel_points(fixed)
        return DisplacementField(displacement.movedim(-1, 1), self.extrapolate)


class ClosedFormXi(RegistrationAlgorithm):
    """Ξ_F: Ξ[M, F] = M⁻¹ ∘ F for images that are diffeomorphisms of [0, 1]^D, without training (Appendix).

    Each voxel's value, a point of [0, 1]^D in D channels, is embedded by a 1×1 convolution with large weights and a
    sine: embeddings have a large product only where values are close, so attention finds where in the moving image
    the same value lies. `bandwidth` is how close, as a Gaussian's width: about half a voxel is the sharpest that
    still interpolates between voxels.
    """

    weights: Tensor
    phases: Tensor

    def __init__(self, dim: int, bandwidth: float = 0.01, frequencies: int = 256, sharpness: float = 200.0) -> None:
        super().__init__()
        self.dim, self.bandwidth, self.frequencies, self.sharpness = dim, bandwidth, frequencies, sharpness
        # Σ_k cos(w_k·(a − b)) over Gaussian w is a Gaussian bump in a − b, up to noise of 1/√(2·frequencies) of its
        # height; scaled to height `sharpness`, its top curves like −|a − b|² / (2·bandwidth²).
        scale = 1 / (bandwidth * math.sqrt(sharpness))
        weights = scale * torch.randn(frequencies, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        self.register_buffer("weights", torch.cat([weights, weights]), persistent=False)
        phases = torch.tensor([0.0, math.pi / 2], dtype=torch.float64).repeat_interleave(frequencies)
        self.register_buffer("phases", phases, persistent=False)

    def embed(self, image: Tensor) -> Tensor:  # (B, D, *shape) → (B, voxels, features)
        if image.shape[1] != self.dim or image.dim() != self.dim + 2:
            raise ValueError(
                f"image has {image.shape[1]} channels and {image.dim() - 2} spatial axes; "
                f"a diffeomorphism of [0, 1]^{self.dim} has {self.dim} of each"
            )
        angles = image.flatten(2).mT.to(self.weights) @ self.weights.mT + self.phases
        return math.sqrt(self.sharpness / self.frequencies) * angles.sin().to(image.dtype)

    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        matches = coordinate_attention(self.embed(fixed), self.embed(moving), Grid.of(moving.shape[2:]))
        displacement = matches.reshape(-1, *fixed.shape[2:], self.dim) - voxel_points(fixed)
        return DisplacementField(displacement.movedim(-1, 1))


class Augmented(RegistrationAlgorithm):
    """R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹: Φ behind an augmentation that its result does not show (Appendix, Extension to
    Rotational Equivariance).

    `draw(image)` gives an affine map for each item of the batch, anew at each call; `random_rotation` is the paper's.
    What the regulariser sees stays near the identity, however far R and Q turn the images.
    """

    def __init__(self, phi: RegistrationAlgorithm, draw: Callable[[Tensor], Affine]) -> None:
        super().__init__()
        self.phi, self.draw = phi, draw

    def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Transform:
        r = self.draw(moving)
        q = r.map_tensors(exchange_halves) if swapped else self.draw(fixed)
        phi = self.phi.register(warp(moving, r, like=moving), warp(fixed, q, like=fixed), swapped=swapped)
        return compose(r, phi, q.inverse())  # R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹


@dataclass(frozen=True, eq=False)
class Matches:
    """Where coordinate attention found points of the fixed image in the moving one, and how sure it was."""

    points: Tensor  # (B, N, D), fixed unit coordinates
    targets: Tensor  # (B, N, D), moving unit coordinates
    covariance: Tensor  # (B, N, D, D), of the attention around each target


@torch.no_grad()
def coordinate_matches(algorithm: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Matches | None:
    """The matches of the Ξθ that an algorithm starts with, before any refinement; None where it starts otherwise.

    >>> matches = coordinate_matches(model, moving, fixed)
    """
    if isinstance(algorithm, TwoStep):
        return coordinate_matches(algorithm.phi, moving, fixed)
    if isinstance(algorithm, Downsample):
        found = coordinate_matches(algorithm.phi, pool(moving), pool(fixed))
        if found is None or not algorithm.aligned:
            return found
        to_moving, to_fixed = _to_coarse(moving).inverse(), _to_coarse(fixed).inverse()
        scale = to_moving.scale[:, None, :, None] * to_moving.scale[:, None, None, :]
        return Matches(to_fixed(found.points), to_moving(found.targets), scale * found.covariance)
    if not isinstance(algorithm, CoordinateAttention):
        return None
    mean, covariance = attention_moments(
        algorithm.crop(algorithm.features(fixed)).flatten(1, -2),
        algorithm.features(moving).flatten(1, -2),
        Grid.of(moving.shape[2:]).pad(algorithm.padding),
        length=algorithm.length,
    )
    points = voxel_points(fixed).flatten(1, -2).expand(len(mean), -1, -1)
    return Matches(points, mean, covariance)


def _check_network(network: Encoder | Symmetrized | UNet, image: Tensor) -> None:
    if image.dim() - 2 != network.dim or image.shape[1] != network.channels:
        raise ValueError(
            f"the images are {image.dim() - 2}-D with {image.shape[1]} channels; this network was built for "
            f"{network.dim}-D with {network.channels}"
        )
    weight = next(network.parameters())
    if (image.dtype, image.device) != (weight.dtype, weight.device) and not torch.is_autocast_enabled(
        image.device.type
    ):
        raise TypeError(
            f"the images are {image.dtype} on {image.device} but the network's weights are {weight.dtype} on "
            f"{weight.device}; expected the same: move either with .to(...)"
        )
