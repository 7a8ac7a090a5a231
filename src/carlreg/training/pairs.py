"""Pairs of prepared images, drawn at random and augmented for training.

The augmentation is one affine map per image, so that images are interpolated once. Rotations inside the loss are
separate: `Stage(rotate=True)` trains through `Augmented`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.transforms import Affine, compose, warp
from carlreg.training.batches import Batch
from carlreg.training.cache import Prepared
from carlreg.training.cohort import Cohort
from carlreg.training.distributed import Team

STRUCTURES = 16
"""Maximum number of structures of a pair that one step learns from; each needs a map of the image's size in memory."""


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
            common = torch.eye(dim)[torch.rand(pairs, dim, generator=generator).argsort(dim=1)]
        if self.flips:
            common = (1 - 2 * torch.randint(2, (pairs, dim, 1), generator=generator)) * common
        both = _about_centre(common, torch.zeros(pairs, dim))
        maps = [compose(self._noise(pairs, dim, generator), both) for _ in range(2)]
        moving, fixed = (map_ for map_ in maps if isinstance(map_, Affine))  # as two affine maps compose to one
        return moving, fixed

    def _noise(self, pairs: int, dim: int, generator: torch.Generator) -> Affine:
        linear = torch.eye(dim) + self.affine * torch.randn(pairs, dim, dim, generator=generator)
        return _about_centre(linear, 0.5 * self.affine * torch.randn(pairs, dim, generator=generator))


def _about_centre(linear: Tensor, shift: Tensor) -> Affine:
    """x ↦ c + A (x − c) + b with the centre c of the unit cube."""
    centre = torch.full(shift.shape, 0.5)
    return Affine.from_parts(linear, centre - (linear @ centre[..., None])[..., 0] + shift)


def apply(maps: Affine, images: Tensor) -> Tensor:
    """Resample images (B, C, *shape), each through its map, on their own grid."""
    return warp(images, maps.to(images), like=images)


def intensities(images: Sequence[Tensor], device: torch.device) -> Tensor:
    """Prepared images (1, *grid) as one batch (B, 1, *grid), from 0 to 1."""
    return torch.stack(list(images)).to(device, non_blocking=True).float() / 255


class TrainingPairs:
    """Draw batches of augmented pairs; if `labelled`, with structures that both images show, up to 16 chosen at random.

    If several processes train together, each makes its own part of the batch. Random numbers are drawn for the joint
    batch, so that the parts belong together whatever the number of processes.

    >>> train(model, TrainingPairs(cohort, prepared, batch=4, device=device), stages, out="run")
    """

    def __init__(
        self,
        cohort: Cohort,
        prepared: Sequence[Prepared],
        *,
        batch: int,
        device: torch.device,
        augmentation: Augmentation | None = None,
        labelled: bool = False,
    ) -> None:
        if batch < 1:
            raise InputError(f"the batch is {batch}; expected 1 or more")
        self.pairs, self.batch, self.device = cohort.pairs, batch, device
        self.augmentation = augmentation or Augmentation()
        self.images = _on_device([case.image for case in prepared], device)
        self.dim = prepared[0].image.dim() - 1
        self.labels: Sequence[Tensor] = ()
        if labelled:
            maps = [torch.zeros_like(case.image) if case.labels is None else case.labels for case in prepared]
            self.labels = _on_device(maps, device)
            self.values = [set(labels.unique().tolist()) - {0} for labels in maps]

    def __call__(self, generator: torch.Generator) -> Batch:
        chosen = torch.tensor([self._choose(generator) for _ in range(self.batch)])  # (B, 2): moving, fixed
        maps = self.augmentation.draw(self.batch, self.dim, generator)
        values = None
        if self.labels:
            values = torch.stack([self._common_labels(first, second, generator) for first, second in chosen.tolist()])
        team = Team.current()
        own = [(team.part(chosen[:, i]).tolist(), Affine(team.part(maps[i].matrix))) for i in range(2)]
        moving, fixed = (apply(map_, intensities([self.images[i] for i in cases], self.device)) for cases, map_ in own)
        if values is None:
            return Batch(moving, fixed)
        wanted = team.part(values).to(self.device).reshape(-1, STRUCTURES, *[1] * self.dim)
        return Batch(moving, fixed, *(self._structures(cases, map_, wanted) for cases, map_ in own))

    def _choose(self, generator: torch.Generator) -> tuple[int, int]:
        if self.pairs is not None:
            pair = self.pairs[int(torch.randint(len(self.pairs), (), generator=generator))]
            return pair.moving, pair.fixed
        first, second = torch.randperm(len(self.images), generator=generator)[:2].tolist()
        return first, second

    def _common_labels(self, moving: int, fixed: int, generator: torch.Generator) -> Tensor:
        """Labels that both images have, (STRUCTURES,), padded with 0."""
        common = sorted(self.values[moving] & self.values[fixed])
        order = torch.randperm(len(common), generator=generator)[:STRUCTURES].tolist()
        return torch.tensor([common[i] for i in order] + [0] * (STRUCTURES - len(order)))

    def _structures(self, cases: Sequence[int], maps: Affine, wanted: Tensor) -> Tensor:
        """One map for each wanted label, (B, STRUCTURES, *grid): 1 inside the structure, 0 elsewhere."""
        labels = torch.stack([self.labels[i] for i in cases]).to(self.device).float()
        warped = warp(labels, maps.to(labels), like=labels, mode="nearest", outside="zeros")
        return ((warped == wanted) & (wanted > 0)).byte()


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The tensors in GPU memory if they need at most half of what is free, otherwise where they are: on disk."""
    if device.type != "cuda" or sum(tensor.nbytes for tensor in tensors) > torch.cuda.mem_get_info(device)[0] / 2:
        return tensors
    return [tensor.to(device) for tensor in tensors]
