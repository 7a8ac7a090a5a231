"""Prepared images as pairs: drawn at random for training, and the same ones each time for validation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from carlreg.augmentation import Augmentation, apply
from carlreg.datasets.cache import Prepared
from carlreg.datasets.manifest import Cohort, DatasetError, Pair
from carlreg.distributed import Team
from carlreg.images import Matrix, map_points
from carlreg.losses import SIMILARITIES
from carlreg.metrics import dice, folding, mean_score, target_registration_error
from carlreg.precision import Precision, mixed_precision
from carlreg.registration import RegistrationAlgorithm
from carlreg.transforms import Affine, Identity, Transform, warp


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


@dataclass(frozen=True)
class Score:
    """What a validation found: means over the pairs."""

    value: float
    folds: float
    """In per cent."""


class Validation:
    """Scores a model on pairs: by Dice where both have labels, else by the distance of landmarks, else by similarity.

    `measure` says which. Calling it gives a number of which more is better: distances and losses are negated.
    """

    def __init__(
        self,
        cohort: Cohort,
        prepared: Sequence[Prepared],
        *,
        device: torch.device,
        most_pairs: int = 20,
        similarity: str = "lncc",
        precision: Precision = "auto",
    ) -> None:
        self.prepared, self.device, self.similarity, self.precision = prepared, device, similarity, precision
        pairs = cohort.some_pairs(most=10**9)
        labelled = [p for p in pairs if all(prepared[i].labels is not None for i in (p.moving, p.fixed))]
        marked = [p for p in pairs if p.fixed_landmarks is not None]
        self.measure = "Dice" if labelled else "landmark error, mm" if marked else similarity
        usable = Cohort(cohort.cases, tuple(labelled or marked or pairs))
        self.pairs = usable.some_pairs(most_pairs)
        used = self.pairs if self.measure == "landmark error, mm" else []
        self.landmarks = {pair: self._landmarks(pair) for pair in used}
        self.latest: Score | None = None

    def __call__(self, model: RegistrationAlgorithm | None = None) -> float:
        """Of a model, or of no registration at all."""
        rows = [self._score(model, pair) for pair in self.pairs]
        values = [value for value, _ in rows if not math.isnan(value)]
        value = sum(values) / len(values) if values else math.nan
        self.latest = Score(value, sum(folds for _, folds in rows) / len(rows))
        return value if self.measure == "Dice" else -value

    def images(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Moving and fixed, (1, 1, *grid) each."""
        moving, fixed = (intensities([self.prepared[i].image], self.device) for i in (pair.moving, pair.fixed))
        return moving, fixed

    @torch.no_grad()
    def register(self, model: RegistrationAlgorithm | None, pair: Pair) -> Transform:
        if model is None:
            return Identity()
        with mixed_precision(self.device, self.precision):
            return model(*self.images(pair))

    @torch.no_grad()
    def _score(self, model: RegistrationAlgorithm | None, pair: Pair) -> tuple[float, float]:
        moving, fixed = self.images(pair)
        phi = self.register(model, pair)
        folds = folding(phi, fixed)
        if self.measure == "Dice":
            labels = [self.prepared[i].labels for i in (pair.moving, pair.fixed)]
            of_moving, of_fixed = (part[None].to(self.device).float() for part in labels if part is not None)
            return mean_score(dice(warp(of_moving, phi, like=of_fixed, mode="nearest"), of_fixed)), folds
        if pair in self.landmarks:
            of_moving, of_fixed = self.landmarks[pair]
            size = self.prepared[pair.moving].size
            return float(target_registration_error(phi, of_fixed, of_moving, size=size).mean()), folds
        return float(SIMILARITIES[self.similarity](warp(moving, phi, like=fixed), fixed)), folds

    def _landmarks(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Of the moving and the fixed image, (1, N, D) each, in unit coordinates."""
        files = (pair.moving_landmarks, pair.fixed_landmarks)
        points = []
        for path, number in zip(files, (pair.moving, pair.fixed), strict=True):
            assert path is not None  # the manifest has both or neither
            to_unit = np.array(self.prepared[number].world_to_unit)
            found = read_points(path, dim=len(to_unit) - 1)
            points.append(torch.from_numpy(map_points(to_unit, found)).float()[None].to(self.device))
        moving, fixed = points
        if moving.shape != fixed.shape:
            raise DatasetError(
                f"{files[0]} has {moving.shape[1]} landmarks and {files[1]} has {fixed.shape[1]}; expected as many"
            )
        return moving, fixed


def read_points(path: Path, dim: int) -> Matrix:
    """Landmarks, one a line, as world positions in millimetres (LPS), commas or spaces between: (N, D). A first line
    without numbers is a header."""
    lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if lines and re.search(r"[a-z]", re.sub(r"\d[eE]", "", lines[0]), re.IGNORECASE):
        lines = lines[1:]
    try:
        points = np.array([[float(word) for word in re.split(r"[\s,;]+", line.strip())] for line in lines])
    except ValueError as error:  # words, or rows of different lengths
        raise DatasetError(f"{path} is not a list of landmarks ({error}); expected {dim} numbers a line") from error
    if points.ndim != 2 or points.shape[1] != dim or not np.isfinite(points).all():
        raise DatasetError(f"{path} holds landmarks of shape {points.shape}; expected {dim} finite numbers a line")
    return points
