"""Confidence: each piece of evidence separates right from wrong, and verdicts follow from calibration."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg.confidence import evidence as measure
from carlreg.confidence.calibration import auroc, fit_isotonic, fit_log_linear, fit_logistic
from carlreg.explain import Inside
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine, DisplacementField, Identity, Transform, warp
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.zoo import carl, xi

SIDE = 32
SIZE = [62.0, 62.0, 62.0]


def body(seed: int = 0, side: int = SIDE) -> Tensor:
    """(1, 1, side, side, side): an ellipsoid of smooth random texture, from 0 to 1."""
    noise = torch.rand(1, 1, 8, 8, 8, generator=torch.Generator().manual_seed(seed))
    radius = ((voxel_points(torch.empty(1, 1, side, side, side)) - 0.5) / torch.tensor([0.34, 0.4, 0.3])).norm(dim=-1)
    return (0.3 + 0.7 * resize(noise, (side,) * 3)) * (1 - radius).mul(8).clamp(0, 1)[:, None]


def shift(*voxels: float) -> Affine:
    return Affine.translation(torch.tensor([[n / (SIDE - 1) for n in voxels]]))


class Follows(RegistrationAlgorithm):
    """Finds the shift between the centres of mass: equivariant to shifts, and to turns about the centre of mass."""

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return Affine.translation((centre(moving) - centre(fixed))[None])


class Ignores(RegistrationAlgorithm):
    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        return Identity()


def centre(image: Tensor) -> Tensor:
    weight = image[0, 0][..., None]
    return (weight * voxel_points(image)[0]).sum((0, 1, 2)) / weight.sum()


def test_directions_that_invert_each_other_agree() -> None:
    fixed = body()
    apart = measure.disagreement(shift(3, 0, 0), shift(-3, 0, 0), fixed, SIZE)
    assert apart.shape == (SIDE,) * 3
    assert float(apart.max()) < 1e-3
    wrong = measure.disagreement(shift(3, 0, 0), shift(0, -4, 0), fixed, SIZE)
    torch.testing.assert_close(wrong, torch.full_like(wrong, 10.0), rtol=1e-4, atol=0)  # 5 voxels of 2 mm


def test_distance_of_two_maps_is_in_mm_of_the_moving_image() -> None:
    apart = measure.difference(shift(1, 0, 0), shift(0, 1, 0), body(), [31.0, 62.0, 62.0])
    assert float(apart.mean()) == pytest.approx(math.hypot(1, 2), rel=1e-4)


def test_an_algorithm_that_follows_a_shift_has_a_certificate() -> None:
    fixed, moving = body(), warp(body(), shift(2, 1, 0), like=body(), outside="zeros")
    for probe in (measure.shift_probe(moving), measure.shift_probe(moving, -1)):
        found = measure.certificate(Follows(), moving, fixed, Follows()(moving, fixed), probe, SIZE)
        assert float(found.max()) < 0.1
        ignored = measure.certificate(Ignores(), moving, fixed, Ignores()(moving, fixed), probe, SIZE)
        assert float(ignored.median()) == pytest.approx(2 * math.sqrt(3), rel=1e-3)  # one voxel along each axis


def test_an_algorithm_that_ignores_a_turn_has_none() -> None:
    fixed = moving = body()
    probe = measure.turn_probe(moving, SIZE)
    turned = probe.linear[0].double()
    torch.testing.assert_close(turned @ turned.mT, torch.eye(3).double(), atol=1e-5, rtol=0)
    assert math.degrees(math.acos((float(turned.trace()) - 1) / 2)) == pytest.approx(measure.DEGREES, rel=1e-3)
    ignored = measure.certificate(Ignores(), moving, fixed, Identity(), probe, SIZE)
    points = voxel_points(fixed)
    expected = ((probe(points) - points) * torch.tensor(SIZE)).norm(dim=-1)[0]
    torch.testing.assert_close(ignored, expected, atol=1e-3, rtol=1e-3)


def test_shift_probes_move_by_odd_whole_voxels() -> None:
    for side in (24, 40, 96, 160):
        step = float(measure.shift_probe(torch.empty(1, 1, side, side)).shift[0, 0]) * (side - 1)
        assert round(step) % 2 == 1
        assert step == pytest.approx(round(step), abs=1e-4)


@pytest.mark.parametrize("contrast", [lambda image: image, lambda image: torch.where(image > 0.03, 1.3 - image, 0)])
def test_right_alignments_are_more_similar_than_wrong_ones(contrast: Callable[[Tensor], Tensor]) -> None:
    fixed = body()
    right = measure.similarity(contrast(fixed), fixed)
    assert right.mean > 0.6
    assert right.excess > 0.6
    for wrong in (contrast(fixed).roll(4, 2), contrast(body(7)), contrast(fixed).flip(3)):
        found = measure.similarity(wrong, fixed)
        assert found.excess < right.excess / 2
        assert found.mean < right.mean
    noise = measure.similarity(torch.rand(fixed.shape, generator=torch.Generator().manual_seed(1)), fixed)
    assert abs(noise.excess) < 0.1


def test_agreement_is_the_sign_of_contrast() -> None:
    fixed = body()
    inner = fixed > 0.25
    assert measure.similarity(fixed, fixed).agreement > 0.95
    assert measure.similarity(1 - fixed, fixed, inner[0, 0]).agreement < -0.95


def test_overlap_counts_what_the_foregrounds_share() -> None:
    inside = torch.zeros(8, 8, 8, dtype=torch.bool)
    inside[2:6] = True
    warped = torch.zeros(1, 1, 8, 8, 8)
    warped[:, :, 4:8] = 1
    assert measure.overlap(warped, inside) == (0.5, 0.5)
    assert measure.overlap(inside[None, None].float(), inside) == (1.0, 1.0)


def test_folds_and_extreme_volumes_are_seen() -> None:
    fixed, everywhere = body(), torch.ones(SIDE, SIDE, SIDE, dtype=torch.bool)
    assert measure.volume_change(Identity(), fixed, everywhere) == pytest.approx((0.0, 0.0, 0.0), abs=1e-5)
    grown = Affine.from_parts(2 * torch.eye(3)[None], torch.zeros(1, 3))
    assert measure.volume_change(grown, fixed, everywhere) == pytest.approx((0.0, 100.0, 0.0), abs=1e-4)
    assert measure.volume_change(grown, fixed, everywhere, 1 / 8) == pytest.approx((0.0, 0.0, 0.0), abs=1e-4)
    mirrored = Affine.from_parts(torch.diag(torch.tensor([-1.0, 1, 1]))[None], torch.tensor([[1.0, 0, 0]]))
    assert measure.volume_change(mirrored, fixed, everywhere)[0] == 100.0
    rough = DisplacementField(0.1 * torch.rand(1, 3, SIDE, SIDE, SIDE, generator=torch.Generator().manual_seed(0)))
    folds, extreme, deviation = measure.volume_change(rough, fixed, everywhere)
    assert folds > 1
    assert extreme > 1
    assert deviation > 0.1


def test_gain_is_the_fraction_of_the_loss_that_was_removed() -> None:
    assert measure.optimisation_gain([{"total": 0.8}, {"total": 0.6}, {"total": 0.7}]) == pytest.approx(0.25)
    assert math.isnan(measure.optimisation_gain([]))


def test_sharper_attention_has_less_spread_and_entropy() -> None:
    fixed = moving = body(side=40)
    spreads, entropies = [], []
    for length in (1.0, 16.0):
        torch.manual_seed(0)
        inside = Inside.of(xi(width=8, length=length).eval(), moving, fixed)
        spread = measure.attention_spread(inside, [78.0] * 3)
        assert spread.shape == inside.fixed.shape[2:]
        spreads.append(float(spread.mean()))
        entropies.append(measure.attention_entropy(inside, measure.foreground(inside.fixed)))
    assert spreads[1] < spreads[0] / 1.5
    assert entropies[1] < entropies[0] <= 1.0


def test_spread_of_even_attention_is_that_of_its_grid() -> None:
    inside = Inside.of(
        carl(width=8, length=0.0, unet_down=(4, 8, 8, 8, 8), unet_up=(8, 8, 8, 8, 8)).eval(), body(), body()
    )
    spread = measure.attention_spread(inside, SIZE)
    positions = torch.from_numpy(np.asarray(inside.keys.points(torch.float64, torch.device("cpu")))).reshape(-1, 3)
    expected = math.sqrt(float((positions.var(0, correction=0) * torch.tensor(SIZE).square()).sum()))
    torch.testing.assert_close(spread, torch.full_like(spread, expected), rtol=1e-3, atol=0)
    assert measure.attention_entropy(inside, measure.foreground(inside.fixed)) == pytest.approx(1.0, abs=1e-4)


def test_features_far_from_training_have_a_large_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, deviation = torch.randn(64, generator=generator), torch.rand(64, generator=generator) + 0.5
    usual = mean + deviation * torch.randn(64, generator=generator)
    assert measure.mahalanobis(usual, mean, deviation) == pytest.approx(1, abs=0.3)
    assert measure.mahalanobis(usual + 5 * deviation, mean, deviation) > 4


# ---- calibration ----------------------------------------------------------------------------------------------------


def test_logistic_fit_recovers_odds_and_never_rewards_risk() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(4000, 3))
    odds = 2 * table[:, 0] - 1.5 * table[:, 1] - 1
    failed = (random.random(4000) < 1 / (1 + np.exp(-odds))).astype(float)
    model = fit_logistic(table[:, :2] * [1, -1], failed, ("turn", "shift"), ridge=0.0)
    weights = np.array(model.weights) / np.array(model.scale)
    assert weights == pytest.approx([2, 1.5], rel=0.15)
    assert fit_logistic(table[:, 1:2], failed, ("turn",)).weights == (0.0,)  # it falls with the risk


def test_log_linear_fit_is_least_squares() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(500, 2))
    model = fit_log_linear(table, 3 * table[:, 0] + 0.5 * table[:, 1] + 2, ("turn", "shift"), ridge=0.0)
    assert model.apply(table[:1])[0] == pytest.approx(3 * table[0, 0] + 0.5 * table[0, 1] + 2, abs=1e-3)


def test_isotonic_fit_is_monotone_and_keeps_the_mean() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(0, 1, 400)
    y = x**2 + 0.3 * random.normal(size=400)
    steps = fit_isotonic(x, y)
    assert list(steps.y) == sorted(steps.y)
    assert len(steps.y) > 3
    assert np.mean([steps(value) for value in x]) == pytest.approx(y.mean(), abs=0.02)
    assert steps(0.9) - steps(0.1) > 0.5


def test_auroc_counts_ordered_pairs() -> None:
    random = np.random.default_rng(0)
    score, failed = random.integers(0, 5, 60).astype(float), (random.random(60) < 0.4).astype(float)
    pairs = [(a > b) + (a == b) / 2 for a in score[failed == 1] for b in score[failed == 0]]
    assert auroc(score, failed) == pytest.approx(np.mean(pairs))
    assert math.isnan(auroc(score, np.zeros(60)))
