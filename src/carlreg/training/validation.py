"""Validation pairs and their score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from carlreg.fast.precision import Precision, mixed_precision
from carlreg.files.images import map_points
from carlreg.files.landmarks import read_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Identity, Transform, warp
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.objective.losses import SIMILARITIES
from carlreg.objective.metrics import dice, mean_score, target_registration_error
from carlreg.training.cache import Prepared
from carlreg.training.cohort import Cohort, DatasetError, Pair
from carlreg.training.pairs import intensities


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
        self.cases = cohort.cases
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
            found = read_points(path, dim=len(to_unit) - 1, image=self.cases[number].image).positions
            points.append(torch.from_numpy(map_points(to_unit, found)).float()[None].to(self.device))
        moving, fixed = points
        if moving.shape != fixed.shape:
            raise DatasetError(
                f"{files[0]} has {moving.shape[1]} landmarks and {files[1]} has {fixed.shape[1]}; expected as many"
            )
        return moving, fixed
