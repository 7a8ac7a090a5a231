"""Registration algorithms, the paper's capital Greek letters: Φ[moving, fixed] is a transform.

Each is a module that takes images of any shape and batch size, in one to three dimensions, and returns a Transform from
points of the fixed image to points of the moving image. None of them keeps state between calls.
"""

import functools
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from carlreg.errors import InputError
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import Grid, constant, fine_to_coarse, interpolate, pool, voxel_points
from carlreg.geometry.transforms import Affine, DisplacementField, Extrapolation, Scaling, Transform, compose, warp
from carlreg.model.attention import attention_moments, coordinate_attention
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.model.unet import UNet

logger = logging.getLogger(__name__)


class RegistrationAlgorithm(nn.Module, ABC):
    """Φ: call it with a moving and a fixed image, (B, C, *shape) each.

    >>> phi = algorithm(moving, fixed)
    >>> phi, inverse = algorithm.both(moving, fixed)

    To write your own, subclass this and define `transform`. Calling the algorithm checks the images and then calls
    `transform`; algorithms made of others call `transform` of their parts, so images are checked once.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "register" in vars(cls):  # what `transform` was called first
            warnings.warn(f"rename {cls.__name__}.register to transform(moving, fixed)", DeprecationWarning, 2)
            cls.transform = vars(cls)["register"]  # type: ignore[method-assign]

    def forward(self, moving: Tensor, fixed: Tensor) -> Transform:
        check_pair(moving, fixed)
        check_finite(moving, "moving")
        check_finite(fixed, "fixed")
        return self.transform(moving, fixed)

    @abstractmethod
    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        """Φ[moving, fixed] of two images that have been checked."""

    def both(self, moving: Tensor, fixed: Tensor) -> tuple[Transform, Transform]:
        """Φ[moving, fixed] and Φ[fixed, moving], as one batch if the shapes are equal and the GPU's memory suffices."""
        if moving.shape != fixed.shape:
            return self(moving, fixed), self(fixed, moving)
        check_pair(moving, fixed)
        images = torch.cat([moving, fixed])
        check_finite(images, "the pair")
        try:
            transform = self._both(images)
            return transform[: len(moving)], transform[len(moving) :]
        except torch.cuda.OutOfMemoryError:
            if self.training:  # half a batch has other BatchNorm statistics
                raise
        _warn_once("the GPU has too little memory for both directions at once: running them one after the other")
        return self.transform(moving, fixed), self.transform(fixed, moving)

    def _both(self, images: Tensor) -> Transform:
        """Φ[M, F] and Φ[F, M] as one batch, of images = cat(M, F). Algorithms that share work override this."""
        return self.transform(images, _swap(images))


def _swap(batch: Tensor) -> Tensor:
    """Exchange the two halves of a batch: cat(M, F) ↦ cat(F, M)."""
    return batch.roll(len(batch) // 2, dims=0)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


class TwoStep(RegistrationAlgorithm):
    """TwoStep{Φ, Ψ}: register, warp, and register the remainder. [W, U] equivariant if Φ is and Ψ is [U, U]."""

    def __init__(self, phi: RegistrationAlgorithm, psi: RegistrationAlgorithm) -> None:
        super().__init__()
        self.phi, self.psi = phi, psi

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return self._refine(self.phi.transform(moving, fixed), moving, fixed)

    def _both(self, images: Tensor) -> Transform:
        return self._refine(self.phi._both(images), images, _swap(images))

    def _refine(self, phi: Transform, moving: Tensor, fixed: Tensor) -> Transform:
        psi = self.psi.transform(warp(moving, phi, like=fixed), fixed)
        return compose(phi, psi)  # Φ[M, F] ∘ Ψ[M ∘ Φ[M, F], F]


class Downsample(RegistrationAlgorithm):
    """Down{Φ}: Φ at half the resolution, A_M⁻¹ ∘ Φ[pool M, pool F] ∘ A_F.

    A maps an image's unit coordinates to those of its pooled image, whose voxel centres lie elsewhere
    (`fine_to_coarse`). `aligned=False` leaves A out, as the authors' implementation does. Weights trained that way need
    it, at the cost of stretched translations.
    """

    def __init__(self, phi: RegistrationAlgorithm, aligned: bool = True) -> None:
        super().__init__()
        self.phi, self.aligned = phi, aligned

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return self._align(self.phi.transform(pool(moving), pool(fixed)), moving, fixed)

    def _both(self, images: Tensor) -> Transform:
        return self._align(self.phi._both(pool(images)), images, images)

    def _align(self, phi: Transform, moving: Tensor, fixed: Tensor) -> Transform:
        return compose(_to_coarse(moving).inverse(), phi, _to_coarse(fixed)) if self.aligned else phi


def _to_coarse(image: Tensor) -> Scaling:
    scale, shift = (constant(values, image.dtype, image.device) for values in fine_to_coarse(image.shape[2:]))
    return Scaling(scale[None], shift[None])


class PredictDisplacement(RegistrationAlgorithm):
    """Ψ: x ↦ x + Conv_θ[cat(M, F)](x). [U, U] equivariant to translation, like VoxelMorph and its successors."""

    def __init__(self, network: UNet, extrapolate: Extrapolation = "clamp") -> None:
        super().__init__()
        self.network, self.extrapolate = network, extrapolate

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        _check_network(self.network, fixed)
        if moving.shape != fixed.shape:
            moving = interpolate(moving, voxel_points(fixed))
        return DisplacementField(self.network(moving, fixed).to(fixed.dtype), self.extrapolate)


class CoordinateAttention(RegistrationAlgorithm):
    """Ξθ: each fixed voxel attends to all moving voxels and is mapped to the attention's centre of mass.

    Images are padded with zeros before they are encoded, and the keys' positions continue beyond [0, 1], so that voxels
    can be mapped outside the moving image. Features are scaled to one `length`, so logits lie in ±length².
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
        """Remove the padding: (B, *padded shape, width) → (B, *shape, width)."""
        inside = (slice(None), *(slice(self.padding, n - self.padding) for n in features.shape[1:-1]))
        return features[inside]

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        _check_network(self.encoder, fixed)
        return self._attend(self.features(moving), self.crop(self.features(fixed)), moving, fixed)

    def _both(self, images: Tensor) -> Transform:
        _check_network(self.encoder, images)
        features = self.features(images)
        return self._attend(features, _swap(self.crop(features)), images, images)

    def _attend(self, keys: Tensor, queries: Tensor, moving: Tensor, fixed: Tensor) -> Transform:
        positions = Grid.of(moving.shape[2:]).pad(self.padding)
        matches = coordinate_attention(queries.flatten(1, -2), keys.flatten(1, -2), positions, length=self.length)
        return _field_to(matches.to(fixed.dtype), fixed, self.extrapolate)


def _field_to(matches: Tensor, fixed: Tensor, extrapolate: Extrapolation = "clamp") -> DisplacementField:
    """The field that takes the fixed image's voxels to these points of the moving image, (B, voxels, D)."""
    points = voxel_points(fixed)
    displacement = matches.reshape(-1, *points.shape[1:]) - points
    return DisplacementField(displacement.movedim(-1, 1), extrapolate)


class ClosedFormXi(RegistrationAlgorithm):
    """Ξ_F: Ξ[M, F] = M⁻¹ ∘ F for images that are diffeomorphisms of [0, 1]^D, without training (Appendix).

    Each voxel's value, a point of [0, 1]^D in D channels, is embedded by a 1×1 convolution with large weights and a
    sine. Embeddings have a large product only where values are close, so attention finds the same value in the moving
    image. `bandwidth` is the width of the Gaussian that defines "close"; about half a voxel is the sharpest that still
    interpolates between voxels.
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
            found = f"{image.shape[1]} channels and {image.dim() - 2} spatial axes"
            raise InputError(f"image has {found}; a diffeomorphism of [0, 1]^{self.dim} has {self.dim} of each")
        angles = image.flatten(2).mT.to(self.weights) @ self.weights.mT + self.phases
        return math.sqrt(self.sharpness / self.frequencies) * angles.sin().to(image.dtype)

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return _field_to(coordinate_attention(self.embed(fixed), self.embed(moving), Grid.of(moving.shape[2:])), fixed)


class Augmented(RegistrationAlgorithm):
    """R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹: Φ behind an augmentation that cancels out (Appendix, Extension to Rotational
    Equivariance).

    `draw(image)` returns an affine map for each item of the batch, a new one at each call; the paper draws from
    `random_rotation`. The regulariser sees a map near the identity, however far R and Q rotate the images.
    """

    def __init__(self, phi: RegistrationAlgorithm, draw: Callable[[Tensor], Affine]) -> None:
        super().__init__()
        self.phi, self.draw = phi, draw

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        r, q = self.draw(moving), self.draw(fixed)
        phi = self.phi.transform(warp(moving, r, like=moving), warp(fixed, q, like=fixed))
        return compose(r, phi, q.inverse())  # R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹

    def _both(self, images: Tensor) -> Transform:
        r = self.draw(images)
        return compose(r, self.phi._both(warp(images, r, like=images)), r.map_tensors(_swap).inverse())


@dataclass(frozen=True, eq=False)
class Matches:
    """Points of the fixed image, their matches in the moving one by coordinate attention, and its uncertainty."""

    points: Tensor  # (B, N, D), fixed unit coordinates
    targets: Tensor  # (B, N, D), moving unit coordinates
    covariance: Tensor  # (B, N, D, D), of the attention around each target


@torch.no_grad()
def coordinate_matches(algorithm: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Matches | None:
    """Matches of the Ξθ that an algorithm starts with, before any refinement; None if it does not start with one.

    >>> matches = coordinate_matches(model, moving, fixed)
    """
    if isinstance(algorithm, TwoStep):
        return coordinate_matches(algorithm.phi, moving, fixed)
    if isinstance(algorithm, Downsample):
        coarse = coordinate_matches(algorithm.phi, pool(moving), pool(fixed))
        if coarse is None or not algorithm.aligned:
            return coarse
        to_moving, to_fixed = _to_coarse(moving).inverse(), _to_coarse(fixed).inverse()
        scale = to_moving.scale[:, None, :, None] * to_moving.scale[:, None, None, :]
        return Matches(to_fixed(coarse.points), to_moving(coarse.targets), scale * coarse.covariance)
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
        found = f"{image.dim() - 2}-D with {image.shape[1]} channels"
        raise InputError(f"the images are {found}; this network was built for {network.dim}-D with {network.channels}")
    weight = next(network.parameters())
    autocast = torch.is_autocast_enabled(image.device.type)
    if (image.dtype, image.device) != (weight.dtype, weight.device) and not autocast:
        images, weights = f"{image.dtype} on {image.device}", f"{weight.dtype} on {weight.device}; expected the same"
        raise TypeError(f"the images are {images} but the network's weights are {weights}: move either with .to(...)")
