"""Validation pairs and their score."""

from __future__ import annotations

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

DICE, LANDMARKS = "Dice", "landmark error, mm"


@dataclass(frozen=True)
class Score:
    """The means of a measure and of the folds over the validation pairs."""

    measure: str
    value: float
    folds: float
    """In per cent."""

    @property
    def merit(self) -> float:
        """The value, or its negative if lower is better."""
        return self.value if is_higher_better(self.measure) else -self.value


def is_higher_better(measure: str) -> bool:
    """Distances and similarity losses are better if they are lower."""
    return measure == DICE


class Validation:
    """Score models on pairs: by Dice if both images have labels, else by landmarks, else by the similarity."""

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
        self.measure = DICE if labelled else LANDMARKS if marked else similarity
        self.pairs = Cohort(cohort.cases, tuple(labelled or marked or pairs)).some_pairs(most_pairs)
        self.landmarks = {pair: self._landmarks(pair) for pair in self.pairs if self.measure == LANDMARKS}

    def score(self, model: RegistrationAlgorithm | None = None) -> Score:
        """The score of a model, or of the unregistered images."""
        rows = [self._score_pair(model, pair) for pair in self.pairs]
        value = mean_score(dict(enumerate(value for value, _ in rows)))
        return Score(self.measure, value, sum(folds for _, folds in rows) / len(rows))

    def images(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Moving and fixed, (1, 1, *grid) each."""
        moving, fixed = (intensities([self.prepared[i].image], self.device) for i in (pair.moving, pair.fixed))
        return moving, fixed

    @torch.no_grad()
    def transform(self, model: RegistrationAlgorithm | None, pair: Pair) -> Transform:
        if model is None:
            return Identity()
        with mixed_precision(self.device, self.precision):
            return model(*self.images(pair))

    @torch.no_grad()
    def _score_pair(self, model: RegistrationAlgorithm | None, pair: Pair) -> tuple[float, float]:
        moving, fixed = self.images(pair)
        phi = self.transform(model, pair)
        folds = folding(phi, fixed)
        if self.measure == DICE:
            labels = [self.prepared[i].labels for i in (pair.moving, pair.fixed)]
            of_moving, of_fixed = (part[None].to(self.device).float() for part in labels if part is not None)
            warped = warp(of_moving, phi, like=of_fixed, mode="nearest", outside="zeros")
            return mean_score(dice(warped, of_fixed)), folds
        if self.measure == LANDMARKS:
            of_moving, of_fixed = self.landmarks[pair]
            size = self.prepared[pair.moving].size
            return float(target_registration_error(phi, of_fixed, of_moving, size=size).mean()), folds
        return float(SIMILARITIES[self.similarity](warp(moving, phi, like=fixed), fixed)), folds

    def _landmarks(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """The landmarks of the moving and of the fixed image, (1, N, D) each, in unit coordinates."""
        files = (pair.moving_landmarks, pair.fixed_landmarks)
        points = []
        for path, number in zip(files, (pair.moving, pair.fixed), strict=True):
            assert path is not None  # the table has both or neither
            to_unit = np.array(self.prepared[number].world_to_unit)
            world = read_points(path, dim=len(to_unit) - 1, image=self.cases[number].image).positions
            points.append(torch.from_numpy(map_points(to_unit, world)).float()[None].to(self.device))
        moving, fixed = points
        if moving.shape != fixed.shape:
            raise DatasetError(
                f"{files[0]} has {moving.shape[1]} landmarks and {files[1]} has {fixed.shape[1]}; "
                "expected the same number"
            )
        return moving, fixed
