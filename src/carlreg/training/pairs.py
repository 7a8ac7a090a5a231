"""Pairs of prepared images, drawn at random for training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.geometry.transforms import Affine, warp
from carlreg.training.augmentation import Augmentation, apply
from carlreg.training.batches import Batch
from carlreg.training.cache import Prepared
from carlreg.training.cohort import Cohort
from carlreg.training.distributed import Team

STRUCTURES = 16
"""Maximum number of structures of a pair that one step learns from; each needs a map of the image's size in memory."""


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
        moving, fixed = (self._images(chosen[:, i], maps[i].matrix) for i in range(2))
        if not self.labels:
            return Batch(moving, fixed)
        values = torch.stack([self._common_labels(first, second, generator) for first, second in chosen.tolist()])
        return Batch(moving, fixed, *(self._structures(chosen[:, i], maps[i].matrix, values) for i in range(2)))

    def _choose(self, generator: torch.Generator) -> tuple[int, int]:
        if self.pairs is not None:
            pair = self.pairs[int(torch.randint(len(self.pairs), (), generator=generator))]
            return pair.moving, pair.fixed
        first, second = torch.randperm(len(self.images), generator=generator)[:2].tolist()
        return first, second

    def _images(self, indices: Tensor, matrices: Tensor) -> Tensor:
        team = Team.current()
        images = intensities([self.images[i] for i in team.part(indices).tolist()], self.device)
        return apply(Affine(team.part(matrices)), images)

    def _common_labels(self, moving: int, fixed: int, generator: torch.Generator) -> Tensor:
        """Labels that both images have, (STRUCTURES,), padded with 0."""
        common = sorted(self.values[moving] & self.values[fixed])
        order = torch.randperm(len(common), generator=generator)[:STRUCTURES].tolist()
        return torch.tensor([common[i] for i in order] + [0] * (STRUCTURES - len(order)))

    def _structures(self, indices: Tensor, matrices: Tensor, values: Tensor) -> Tensor:
        """One map for each label, (B, STRUCTURES, *grid): 1 inside the structure, 0 elsewhere."""
        team = Team.current()
        labels = torch.stack([self.labels[i] for i in team.part(indices).tolist()]).to(self.device).float()
        maps = Affine(team.part(matrices)).to(labels)
        warped = warp(labels, maps, like=labels, mode="nearest", outside="zeros")
        wanted = team.part(values).to(self.device).reshape(-1, STRUCTURES, *[1] * self.dim)
        return ((warped == wanted) & (wanted > 0)).byte()


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The tensors in GPU memory if they need at most half of what is free, otherwise where they are: on disk."""
    if device.type != "cuda":
        return tensors
    free, _ = torch.cuda.mem_get_info(device)
    if sum(tensor.nbytes for tensor in tensors) > free / 2:
        return tensors
    return [tensor.to(device) for tensor in tensors]
