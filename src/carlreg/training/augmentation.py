"""Augmentation of image pairs: affine noise of each image, flips and permuted axes of both.

Everything is one affine map per image, so that images are interpolated once. Rotations inside the loss are separate:
`Stage(rotate=True)` trains through `Augmented`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.geometry.transforms import Affine, compose, warp


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a pair before the network sees it.

    >>> of_moving, of_fixed = Augmentation().draw(len(moving), 3, generator)
    >>> moving, fixed = apply(of_moving, moving), apply(of_fixed, fixed)
    """

    affine: float = 0.05
    """Standard deviation of the noise on each entry of an affine map in coordinates from −1 to 1; independent for each
    image."""
    flips: bool = False
    """Mirror each axis with probability ½, both images alike."""
    permutations: bool = False
    """Permute the axes at random, both images alike. Sides of different lengths are stretched."""

    def draw(self, pairs: int, dim: int, generator: torch.Generator) -> tuple[Affine, Affine]:
        """Draw a map for each moving and each fixed image of a batch, for `apply`."""
        common = torch.eye(dim).repeat(pairs, 1, 1)
        if self.permutations:
            order = torch.rand(pairs, dim, generator=generator).argsort(dim=1)
            common = torch.eye(dim)[order]
        if self.flips:
            signs = 1 - 2 * torch.randint(2, (pairs, dim, 1), generator=generator)
            common = signs * common
        both = _about_centre(common, torch.zeros(pairs, dim))
        moving, fixed = (compose(self._noise(pairs, dim, generator), both) for _ in range(2))
        assert isinstance(moving, Affine)  # as two affine maps compose to one
        assert isinstance(fixed, Affine)
        return moving, fixed

    def _noise(self, pairs: int, dim: int, generator: torch.Generator) -> Affine:
        linear = torch.eye(dim) + self.affine * torch.randn(pairs, dim, dim, generator=generator)
        return _about_centre(linear, 0.5 * self.affine * torch.randn(pairs, dim, generator=generator))


def apply(maps: Affine, images: Tensor) -> Tensor:
    """Resample images (B, C, *shape), each through its map, on their own grid."""
    return warp(images, maps.to(images), like=images)


def _about_centre(linear: Tensor, shift: Tensor) -> Affine:
    """x ↦ c + A (x − c) + b with the centre c of the unit cube."""
    centre = torch.full(shift.shape, 0.5)
    return Affine.from_parts(linear, centre - (linear @ centre[..., None])[..., 0] + shift)
