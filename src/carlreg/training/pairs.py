"""Prepared images as pairs: drawn at random for training, and the same ones each time for validation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from carlreg.geometry.transforms import Affine, warp
from carlreg.training.augmentation import Augmentation, apply
from carlreg.training.cache import Prepared
from carlreg.training.cohort import Cohort
from carlreg.training.distributed import Team


def hold(tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """All of them on the GPU, where they take at most half of its free memory; else where they are, on disk."""
    if device.type != "cuda":
        return tensors
    free, _ = torch.cuda.mem_get_info(device)
    if sum(tensor.nbytes for tensor in tensors) > free / 2:
        return tensors
    return [tensor.to(device) for tensor in tensors]


def intensities(images: Sequence[Tensor], device: torch.device) -> Tensor:
    """Prepared images (1, *grid) as one batch (B, 1, *grid), from 0 to 1."""
    return torch.stack(list(images)).to(device, non_blocking=True).float() / 255


STRUCTURES = 16
"""Of a pair, at most, that are learnt from in one step: so many maps of the image's size are held in memory."""


class TrainingPairs:
    """Draws a batch of pairs, each varied as the augmentation says; `labelled`, with structures that both images show,
    chosen anew each time where there are many.

    Of several processes that train together, each makes its own part of the batch. All random numbers are drawn for
    the whole, so that the parts fit together whatever their number.

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
            raise ValueError(f"the batch is {batch}; expected 1 or more")
        self.pairs, self.batch, self.device = cohort.pairs, batch, device
        self.augmentation = augmentation or Augmentation()
        self.images = hold([case.image for case in prepared], device)
        self.dim = prepared[0].image.dim() - 1
        self.labels: Sequence[Tensor] = ()
        if labelled:
            known = [torch.zeros_like(case.image) if case.labels is None else case.labels for case in prepared]
            self.labels = hold(known, device)
            self.values = [set(labels.unique().tolist()) - {0} for labels in known]

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        chosen = torch.tensor([self._choose(generator) for _ in range(self.batch)])  # (B, 2): moving, fixed
        maps = self.augmentation.draw(self.batch, self.dim, generator)
        images = [self._part(chosen[:, i], maps[i].matrix) for i in range(2)]
        if not self.labels:
            return tuple(images)
        values = torch.stack([self._pick(moving, fixed, generator) for moving, fixed in chosen.tolist()])
        return (*images, *(self._structures(chosen[:, i], maps[i].matrix, values) for i in range(2)))

    def _choose(self, generator: torch.Generator) -> tuple[int, int]:
        if self.pairs is not None:
            pair = self.pairs[int(torch.randint(len(self.pairs), (), generator=generator))]
            return pair.moving, pair.fixed
        first, second = torch.randperm(len(self.images), generator=generator)[:2].tolist()
        return first, second

    def _part(self, indices: Tensor, matrices: Tensor) -> Tensor:
        team = Team.current()
        images = intensities([self.images[i] for i in team.part(indices).tolist()], self.device)
        return apply(Affine(team.part(matrices)), images)

    def _pick(self, moving: int, fixed: int, generator: torch.Generator) -> Tensor:
        """Labels that both have, (STRUCTURES,), filled up with 0."""
        common = sorted(self.values[moving] & self.values[fixed])
        order = torch.randperm(len(common), generator=generator)[:STRUCTURES].tolist()
        return torch.tensor([common[i] for i in order] + [0] * (STRUCTURES - len(order)))

    def _structures(self, indices: Tensor, matrices: Tensor, values: Tensor) -> Tensor:
        """One map for each of the labels, (B, STRUCTURES, *grid): 1 where it is, else 0."""
        team = Team.current()
        labels = torch.stack([self.labels[i] for i in team.part(indices).tolist()]).to(self.device).float()
        warped = warp(labels, Affine(team.part(matrices)).to(labels), like=labels, mode="nearest")
        wanted = team.part(values).to(self.device).reshape(-1, STRUCTURES, *[1] * self.dim)
        return ((warped == wanted) & (wanted > 0)).byte()
