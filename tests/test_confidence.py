"""Confidence: each piece of evidence separates right from wrong, and verdicts follow from calibration."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg import register
from carlreg.cli import main
from carlreg.confidence import evidence as measure
from carlreg.confidence.calibration import (
    SUFFIX,
    Calibration,
    Linear,
    Steps,
    Typical,
    auroc,
    fit_isotonic,
    fit_log_linear,
    fit_logistic,
    read_calibration,
)
from carlreg.confidence.error_map import error_map
from carlreg.confidence.evidence import Evidence
from carlreg.confidence.gather import Gathered
from carlreg.confidence.verdict import Circumstances, find_calibration, judge
from carlreg.errors import InputError
from carlreg.evaluation.scores import score
from carlreg.evaluation.sources import from_folder
from carlreg.explain import Inside
from carlreg.files import images
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, map_points
from carlreg.files.orientation import to_closest_ras
from carlreg.files.results import EXPECTED_ERROR, TRANSFORM, WARPED, Confidence, ResultFolder
from carlreg.files.tables import Pair
from carlreg.files.transform_files import read as read_transform
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.resizing import resize
from carlreg.geometry.transforms import Affine, DisplacementField, Identity, Transform, warp
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.files import save
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.model.zoo import carl, xi
from carlreg.preparation import Prepared, preprocess
from carlreg.registration import watch
from carlreg.registration.affine_search import Scan
from carlreg.registration.attempt import _between
from carlreg.registration.case import Case
from carlreg.registration.options import PairInputs
from carlreg.registration.orientation_search import AXES, orientations, search_orientation
from carlreg.show.viewer.scene import load_scene
from carlreg.synthesis.patients import patient

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


def test_drift_is_that_of_the_shift_and_large_where_nothing_shows() -> None:
    fixed = body(side=48)
    size = [94.0] * 3  # voxels of 2 mm
    windows = measure.Windows(fixed)
    right = windows.median(windows.drift(fixed, size))
    shifted = [windows.median(windows.drift(fixed.roll(n, 2), size)) for n in (1, 2)]
    assert right < shifted[0] < shifted[1]
    assert shifted[1] == pytest.approx(4.0, abs=2.0)
    inverted = torch.where(fixed > 0.03, 1.3 - fixed, 0)
    assert windows.median(windows.drift(inverted, size)) < shifted[0]
    noise = torch.rand(fixed.shape, generator=torch.Generator().manual_seed(1))
    assert windows.median(windows.drift(noise, size)) > shifted[1]
    flat = measure.Windows(torch.full_like(fixed, 0.5)).drift(torch.full_like(fixed, 0.5), size)
    even = math.sqrt(3 * np.mean([n * n for n in range(-measure.SLIDES, measure.SLIDES + 1)])) * 2
    assert float(flat[24, 24, 24]) == pytest.approx(even, rel=1e-3)  # every shift is as likely


def test_intensities_tell_of_one_another_in_the_right_alignment_alone() -> None:
    fixed = body(side=48)
    windows = measure.Windows(fixed)
    other = torch.where(fixed > 0.03, (6 * fixed).sin().abs(), 0)  # a contrast without any order
    assert windows.information(fixed) == pytest.approx(1.0)
    assert windows.information(other) > 0.4
    for wrong in (other.roll(6, 2), other.flip(3), body(7, 48)):
        assert windows.information(wrong) < 0.15
    even = torch.randint(0, 2, (1, 1, 64, 64, 64), generator=torch.Generator().manual_seed(0)).float()
    everywhere = torch.ones_like(even, dtype=torch.bool)
    assert measure.mutual_information(even, 1 - even, everywhere) == pytest.approx(math.log(2), rel=1e-3)
    assert measure.mutual_information(even, even.roll(1, 2), everywhere) == pytest.approx(0, abs=1e-3)


def test_opinions_are_compared_with_their_mean() -> None:
    answers = [torch.full((1, 4, 4, 4, 3), value) for value in (0.1, 0.3)]
    scatter, apart = measure.opinions(answers, torch.full((1, 4, 4, 4, 3), 0.5), [10.0, 0.0, 0.0])
    torch.testing.assert_close(scatter, torch.full((4, 4, 4), 1.0))
    torch.testing.assert_close(apart, torch.full((4, 4, 4), 3.0))


def test_features_match_at_the_right_place() -> None:
    image = body(side=40)
    torch.manual_seed(0)
    inside = Inside.of(xi(width=8, length=16.0).eval(), image, image)
    counted = measure.foreground(inside.fixed)
    found = [
        measure.feature_match(inside, counted, Affine.translation(torch.tensor([[n / 39, 0.0, 0.0]])), [78.0] * 3)
        for n in (0, 4, 8)
    ]
    alike, drift, excess = zip(*found, strict=True)
    assert alike[0].shape == drift[0].shape == inside.fixed.shape[2:]
    assert float(alike[0].min()) > 0.999
    assert float(alike[0][counted].mean()) > float(alike[1][counted].mean()) > float(alike[2][counted].mean())
    assert excess[0] > excess[1] > excess[2]
    assert excess[0] == pytest.approx(1, abs=1e-3)
    assert float(drift[0][counted].median()) < float(drift[1][counted].median()) < float(drift[2][counted].median())


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
        spread = measure.attention_spread(inside.moments()[1], [78.0] * 3)
        assert spread.shape == inside.fixed.shape[2:]
        spreads.append(float(spread.mean()))
        entropies.append(measure.attention_entropy(inside, measure.foreground(inside.fixed), Identity())[0])
    assert spreads[1] < spreads[0] / 1.5
    assert entropies[1] < entropies[0] <= 1.0


def test_spread_of_even_attention_is_that_of_its_grid() -> None:
    inside = Inside.of(
        carl(width=8, length=0.0, unet_down=(4, 8, 8, 8, 8), unet_up=(8, 8, 8, 8, 8)).eval(), body(), body()
    )
    spread = measure.attention_spread(inside.moments()[1], SIZE)
    positions = torch.from_numpy(np.asarray(inside.keys.points(torch.float64, torch.device("cpu")))).reshape(-1, 3)
    expected = math.sqrt(float((positions.var(0, correction=0) * torch.tensor(SIZE).square()).sum()))
    torch.testing.assert_close(spread, torch.full_like(spread, expected), rtol=1e-3, atol=0)
    even = measure.attention_entropy(inside, measure.foreground(inside.fixed), Identity())
    assert even == pytest.approx((1.0, 1.0), abs=1e-4)


def test_a_result_that_attention_does_not_share_is_a_surprise() -> None:
    image = body(side=40)
    torch.manual_seed(0)
    inside = Inside.of(xi(width=8, length=16.0).eval(), image, image)
    counted = measure.foreground(inside.fixed)
    shifts = [Affine.translation(torch.tensor([[voxels / 39, 0.0, 0.0]])) for voxels in (0, 4, 10)]
    entropy, right = measure.attention_entropy(inside, counted, shifts[0])
    wrong = [measure.attention_entropy(inside, counted, shift)[1] for shift in shifts[1:]]
    # By hand: minus the logarithm of a voxel's attention to itself, since equal images have equal features.
    voxels = counted.nonzero().tolist()
    own = [
        -float(mask.log()[tuple(n + inside.xi.padding for n in at)])
        for mask, at in zip(inside.masks(voxels), voxels, strict=True)
    ]
    assert right == pytest.approx(np.mean(own) / math.log(inside.keys.count), rel=1e-3)
    assert right < entropy * 1.05
    assert right < wrong[0] < wrong[1]


def test_the_residual_is_that_of_the_shift() -> None:
    """Of a wave along one axis: contrast over gradient is 1 / k, and a shift by s leaves sin(k s) of it."""
    k = 2 * math.pi / 10  # per voxel of 2 mm
    index = torch.arange(40.0)
    fixed = 0.5 + 0.5 * torch.sin(k * index)[None, None, :, None, None].expand(1, 1, 40, 40, 40)
    size, inner = [78.0] * 3, (slice(12, 28),) * 3
    for voxels in (0.5, 1.0, 2.0):
        warped = 0.9 - 0.4 * torch.sin(k * (index + voxels))[None, None, :, None, None].expand(1, 1, 40, 40, 40)
        found = measure.residual(warped, fixed, size)[inner]
        expected = 2 * math.sin(k * voxels) / k
        assert float(found.mean()) == pytest.approx(expected, rel=0.15)
    flat = fixed.clone()
    flat[..., 20:] = 0.5
    assert float(measure.flatness(flat, size)[20, 20, 35]) > 10 * float(measure.flatness(flat, size)[20, 20, 5])
    assert float(measure.residual(flat, flat, size)[20, 20, 35]) > 10 * float(
        measure.residual(flat, flat, size)[20, 20, 5]
    )


def test_deformation_is_what_no_affine_map_explains() -> None:
    fixed, inside = body(), torch.ones((SIDE,) * 3, dtype=torch.bool)
    affine = Affine.from_parts(
        torch.tensor([[[1.2, 0.1, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 1.0]]]), torch.tensor([[0.1, 0.0, 0.0]])
    )
    bent, stretched, strain = measure.deformation(affine, fixed, inside, SIZE, SIZE)
    assert strain == pytest.approx(math.log(float(torch.linalg.svdvals(affine.linear[0]).max())), rel=1e-3)
    assert float(bent.max()) < 0.01
    assert float(stretched.max()) < 0.001
    points = voxel_points(fixed)
    wave = torch.zeros(1, 3, SIDE, SIDE, SIDE)
    wave[:, 0] = 0.02 * torch.sin(4 * math.pi * points[..., 0])  # whole waves: hardly any affine part
    bent, stretched, _ = measure.deformation(DisplacementField(wave), fixed, inside, SIZE, SIZE)
    assert float(bent.max()) == pytest.approx(0.02 * SIZE[0], rel=0.5)
    assert float(stretched.max()) == pytest.approx(0.02 * 4 * math.pi, rel=0.25)


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


# ---- verdicts -------------------------------------------------------------------------------------------------------


def linear(names: tuple[str, ...], weights: tuple[float, ...], intercept: float = 0.0) -> Linear:
    return Linear(names, (0.0,) * len(names), (1.0,) * len(names), weights, intercept)


def invented(model: str = "none", odds: float = 0.0, **more: Any) -> Calibration:
    """A calibration by which every deformable registration has the same odds of failure."""
    names = ("disagreement", "no_excess", "uncovered")
    values: dict[str, Any] = {
        "failure": (linear(names, (0.0, 0.0, 0.0), odds),),
        "error": ((linear(names, (0.0, 0.0, 0.0), -3.0), Steps((-3.0,), (math.log(0.05),))),),
        "usual": dict.fromkeys(names, -100.0),
        "median": dict.fromkeys(names, -101.0),
    }
    return Calibration(model=model, good=0.2, failed=0.8, **(values | more))


ABOUT = Circumstances("carl-base")


def gathered(**numbers: float) -> Gathered:
    usual = {"extent_mm": 100.0, "disagreement_mm": 2.0, "similarity_excess": 0.4, "covered": 0.4, "similarity": 0.5}
    return Gathered(Evidence(**(usual | numbers)))


@pytest.mark.parametrize(("odds", "verdict"), [(-4.0, "good"), (0.0, "doubtful"), (4.0, "failed")])
def test_verdicts_follow_from_the_odds(odds: float, verdict: str) -> None:
    found = judge(gathered(), invented(odds=odds), ABOUT)
    assert found.verdict == verdict
    assert found.failure_probability == pytest.approx(1 / (1 + math.exp(-odds)))
    assert found.expected_error_mm == pytest.approx(5.0)
    assert bool(found.reasons) == (verdict != "good")
    assert found.line().startswith(f"{verdict}, expected error 5.0 mm")
    assert Confidence(**json.loads(json.dumps(asdict(found)))).line() == found.line()


def test_reasons_name_what_is_unusual_the_strongest_first() -> None:
    names = ("disagreement", "uncovered", "contrast")
    usual = {"disagreement": math.log(0.01), "uncovered": 0.1, "contrast": 0.1}
    middle = {"disagreement": math.log(0.001), "uncovered": 0.0, "contrast": 0.05}
    model = invented(failure=(linear(names, (1.0, 0.0, 0.0), 9.0),), usual=usual, median=middle)
    found = judge(gathered(agreement=0.2), model, Circumstances("carl-base", io_sim="lncc"))
    assert found.reasons == (
        "the two contrasts differ: use --io-sim mind, or leave it at auto",
        "no common anatomy in 60 % of the fixed image",
        "the two directions disagree by 2.0 mm",
    )
    forgiving = {"disagreement": 0.0, "uncovered": 0.1, "contrast": 9.0}
    fewer = judge(gathered(agreement=0.2), invented(failure=model.failure, usual=forgiving, median=middle), ABOUT)
    assert fewer.reasons == ("no common anatomy in 60 % of the fixed image",)


def test_nothing_is_good_without_calibration_or_evidence() -> None:
    assert judge(gathered(), None, ABOUT, "why").reasons == ("why",)
    for about in (replace(ABOUT, transform="rigid"), replace(ABOUT, dim=1), replace(ABOUT, dim=2)):
        found = judge(gathered(), invented(odds=-9.0), about)
        assert found.verdict == "unknown"
        assert found.reasons
    assert judge(Gathered(Evidence()), invented(odds=-9.0), ABOUT).verdict == "unknown"
    assert judge(gathered(), None, ABOUT, "why").verdict == "unknown"


def test_models_with_less_evidence_step_in() -> None:
    full, cheap = linear(("turn",), (1.0,), 50.0), linear(("disagreement",), (0.0,), -9.0)
    both = invented(failure=(full, cheap))
    assert judge(gathered(), both, ABOUT).verdict == "good"
    assert judge(gathered(turn_mm=3.0), both, ABOUT).verdict == "failed"


def test_novelty_is_the_distance_from_the_nearest_kind() -> None:
    calibration = invented(kinds={"a": [0.0] * 4, "b": [10.0] * 4}, deviation=[1.0, 1.0, 1.0, 1.0])
    features = torch.zeros(4), torch.full((4,), 8.0)
    found = judge(Gathered(gathered().evidence, {}, features), calibration, ABOUT)
    assert found.evidence["novelty"] == pytest.approx(2.0)
    assert found.evidence["kinship"] == pytest.approx(8.0)


USUAL = Typical(
    {"a, a": {"uncovered": 0.1}, "b, b": {"uncovered": 0.5}, "a, b": {"uncovered": 0.7}}, {"uncovered": 0.1}
)


def test_numbers_are_compared_with_the_usual_ones_of_the_two_kinds() -> None:
    for pair, excess in ({("a", "a"): 5, ("b", "b"): 1, ("a", "b"): 0, ("b", "a"): 5, ("?", "b"): 1}).items():
        assert USUAL.beyond({"uncovered": 0.6}, *pair)["beyond_uncovered"] == pytest.approx(math.log1p(excess))
    assert math.isnan(USUAL.beyond({}, "a", "a")["beyond_uncovered"])
    strict = linear(("beyond_uncovered",), (10.0,), -7.0)
    kinds = {"kinds": {"a": [0.0] * 4, "b": [10.0] * 4}, "deviation": [1.0] * 4}
    calibration = Calibration.from_json(json.loads(json.dumps(invented(failure=(strict,), **kinds).to_json())))
    near = {kind: torch.full((4,), value) for kind, value in (("a", 1.0), ("b", 9.0))}
    assert judge(Gathered(gathered().evidence, {}, (near["a"],) * 2), calibration, ABOUT).verdict == "unknown"
    calibration = replace(calibration, typical=USUAL)
    for pair, verdict in ((("a", "a"), "failed"), (("b", "b"), "doubtful"), (("a", "b"), "good")):
        found = judge(Gathered(gathered().evidence, {}, (near[pair[0]], near[pair[1]])), calibration, ABOUT)
        assert found.verdict == verdict
    assert judge(gathered(), calibration, ABOUT).verdict == "unknown"  # without features


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"medians": {}}, "no medians"),
        ({"medians": []}, "no medians"),
        ({"medians": {"a, a": {}}}, "uncovered"),
        ({"medians": {"a, a": 3}}, "not iterable"),
        ({"deviation": {"uncovered": 0.0}}, "not positive"),
        ({"deviation": {"uncovered": "much"}}, "much"),
        ({"deviation": {"luck": 1.0}}, "luck"),
    ],
)
def test_a_damaged_calibration_is_refused_in_one_line(tmp_path: Path, damage: dict[str, Any], words: str) -> None:
    values = invented(typical=USUAL).to_json()
    path = tmp_path / f"own{SUFFIX}"
    path.write_text(json.dumps(values))
    assert read_calibration(path).typical == USUAL
    path.write_text(json.dumps(values | {"typical": values["typical"] | damage}))
    with pytest.raises(InputError, match=words) as refused:
        read_calibration(path)
    assert "\n" not in str(refused.value)


def test_a_calibration_of_another_model_is_not_used(tmp_path: Path) -> None:
    net = xi(width=4)
    path = tmp_path / "own.safetensors"
    save(net, path)
    loaded = load_model(path, "cpu")
    none, why = find_calibration(loaded)
    assert none is None
    assert "no calibration" in why
    target = tmp_path / f"own{SUFFIX}"
    target.write_text(json.dumps(invented("another checksum").to_json()))
    none, why = find_calibration(loaded)
    assert none is None
    assert "another version" in why
    target.write_text(json.dumps(invented(loaded.provenance["sha256"]).to_json()))
    assert find_calibration(loaded)[0] is not None
    target.write_text("{}")
    none, why = find_calibration(loaded)
    assert none is None
    assert "not a calibration" in why
    assert find_calibration(load_model(net, "cpu"))[0] is None


def test_error_map_follows_local_evidence_and_has_the_expected_mean() -> None:
    fixed = body()
    image = Image(fixed[0, 0].numpy(), np.diag([2.0, 2, 2, 1]))
    prepared = Prepared(image, fixed, None, "", image.shape, "")
    local = torch.ones(SIDE, SIDE, SIDE)
    local[: SIDE // 2] = 4.0
    found = Gathered(Evidence(extent_mm=50.0), {"disagreement": local, "similarity": torch.ones(16, 16, 16)})
    model = invented(local=linear(("disagreement", "turn", "dissimilarity"), (1.0, 1.0, 1.0)))
    errors = error_map(found, model, 3.0, prepared)
    assert errors is not None
    inside = measure.foreground(fixed).numpy()
    assert errors.data[inside].mean() == pytest.approx(3.0, rel=1e-4)
    assert errors.data[0, 0, 0] / errors.data[-1, 0, 0] == pytest.approx(4.0, rel=1e-3)
    np.testing.assert_allclose(errors.affine, image.affine, atol=1e-9)
    averaged = error_map(found, invented(local=linear(("smooth_disagreement",), (1.0,))), 3.0, prepared)
    assert averaged is not None
    profile = averaged.data[:, 0, 0] / averaged.data[-1, 0, 0]
    assert profile[0] == pytest.approx(4.0, rel=1e-3)
    assert profile[SIDE // 2 - 1] + profile[SIDE // 2] == pytest.approx(5.0, rel=1e-3)  # the step is no longer sharp
    assert 2.5 < profile[SIDE // 2 - 1] < 3.9
    assert Calibration.from_json(model.to_json()).local is not None
    assert error_map(found, invented(), 3.0, prepared) is None
    assert error_map(found, model, None, prepared) is None


# ---- registrations --------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "fixed.nii.gz", tmp_path / "moving.nii.gz"
    for path, phi in zip(paths, (Identity(), shift(2, 1, 0)), strict=True):
        moved = warp(body(), phi, like=body(), outside="zeros")
        images.write(Image((100 * moved[0, 0]).numpy().astype(np.float32), np.diag([2.0, 2, 2, 1])), path)
    return paths


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A narrow network, as a file."""
    path = tmp_path / "small.safetensors"
    net = carl(width=8, unet_down=(4, 8, 8, 8, 8), unet_up=(8, 8, 8, 8, 8))
    save(net, path, metadata={"grid": "32 32 32"})
    return path


def calibrate(path: Path, **more: Any) -> None:
    target = path.with_name(path.stem + SUFFIX)
    target.write_text(json.dumps(invented(sha256(path), **more).to_json()))


LOCAL = {"local": linear(("disagreement", "network_disagreement", "turn"), (0.5, 0.5, 0.5))}


def test_a_registration_carries_its_verdict(pair: tuple[Path, Path], small: Path, tmp_path: Path) -> None:
    fixed, moving = pair
    common = {"fixed": fixed, "moving": moving, "model": small, "device": "cpu", "io_iterations": 1}
    unjudged = register(**common)
    assert unjudged.confidence is not None
    assert unjudged.confidence.verdict == "unknown"
    assert "no calibration was made for the model small" in unjudged.confidence.reasons[0]
    assert unjudged.expected_error is None
    assert register(**common, confidence="off").confidence is None
    calibrate(small, odds=-4.0, **LOCAL)
    result = register(**common, confidence="full")
    found = result.confidence
    assert found is not None
    assert found.verdict == "good"
    assert {"turn_mm", "shift_mm", "spread_mm", "entropy", "network_disagreement_mm", "gain"} <= set(found.evidence)
    assert result.expected_error is not None
    assert result.expected_error.shape == (32, 32, 32)
    result.save(tmp_path / "out")
    report = ResultFolder(tmp_path / "out").read_report()
    assert report.confidence == replace(found, reasons=[], tried=[])
    stored = images.read(tmp_path / "out" / EXPECTED_ERROR)
    np.testing.assert_allclose(stored.data, result.expected_error.data, rtol=1e-5)
    assert "confidence" in report.seconds


def test_attention_is_evidence_however_long_the_network_takes(
    pair: tuple[Path, Path], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(small, odds=-4.0)
    network, given = watch.watched, {"fixed": pair[0], "moving": pair[1], "model": small, "device": "cpu"}

    @contextmanager
    def slowly(*arguments: Any) -> Iterator[None]:
        with network(*arguments):
            time.sleep(1.0)
            yield

    monkeypatch.setattr("carlreg.registration.solve.watched", slowly)
    found = register(**given, io_iterations=0).confidence
    assert found is not None
    assert {"spread_mm", "feature_excess"} <= set(found.evidence)


@pytest.mark.parametrize(("odds", "verdict", "code"), [(-4.0, "good", 0), (0.0, "doubtful", 0), (4.0, "failed", 3)])
def test_strict_exits_with_3_for_failed_results(
    pair: tuple[Path, Path],
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    odds: float,
    verdict: str,
    code: int,
) -> None:
    calibrate(small, odds=odds)
    out = tmp_path / "out"
    words = ["register", "-f", str(pair[0]), "-m", str(pair[1]), "--model", str(small), "--io-iterations", "0"]
    words += ["--device", "cpu"]
    assert main([*words, "-o", str(out), "--strict"]) == code
    assert f"{out}: {verdict}, expected error" in capsys.readouterr().err
    page = (out / "report.html").read_text(encoding="utf-8")
    assert f'class="verdict {verdict}"' in page
    assert ("do not use it" in page) == (verdict == "failed")
    if verdict == "failed":
        table = tmp_path / "pairs.csv"
        table.write_text(f"name,fixed,moving\na,{pair[0]},{pair[1]}\n")
        many = ["register", "--pairs", str(table), "-o", str(tmp_path / "many"), *words[5:]]
        assert main([*many, "--strict"]) == 3
        row = next(csv.DictReader((tmp_path / "many" / "summary.csv").open(encoding="utf-8")))
        assert row["verdict"] == "failed"
        assert float(row["expected_error_mm"]) > 0
        assert row["reasons"]
        assert main(many) == 0


# ---- the ladder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def calibrated(small: Path) -> Callable[[float, float], LoadedModel]:
    """A model that climbs, by whose calibration the network and the affine search have these odds of failure: only what
    was optimised from the network's result has a gain over it."""

    def make(network: float, search: float) -> LoadedModel:
        odds = linear(("gain",), (0.0,), network), linear(("disagreement",), (0.0,), search)
        calibrate(small, failure=odds)
        return replace(load_model(small, "cpu"), climbs=True)

    return make


def test_a_good_pair_pays_for_no_other_way(
    pair: tuple[Path, Path], calibrated: Callable[[float, float], LoadedModel]
) -> None:
    common = {"fixed": pair[0], "moving": pair[1], "device": "cpu", "io_iterations": 1}
    result = register(**common, model=calibrated(-4.0, -4.0))
    assert result.confidence is not None
    assert result.confidence.tried == ()
    assert "ladder" not in result.record.seconds


def test_a_failed_pair_takes_another_way_that_is_good(
    pair: tuple[Path, Path], calibrated: Callable[[float, float], LoadedModel]
) -> None:
    common = {"fixed": pair[0], "moving": pair[1], "device": "cpu", "io_iterations": 1}
    result = register(**common, model=calibrated(4.0, -4.0))
    assert result.confidence is not None
    assert result.confidence.verdict == "good"
    assert len(result.confidence.tried) >= 3
    assert result.record.look is not None  # what the affine search found
    assert any("without a network" in text for text in result.warnings)
    assert result.record.model["name"] == "none"
    alone = register(**common, model="none")
    points = np.array([[20.0, 30, 30], [40, 20, 35]])
    np.testing.assert_allclose(result.transform(points), alone.transform(points), atol=1e-3)
    assert result.record.seconds["ladder"] > 0


def test_the_network_judges_what_was_found_without_it(small: Path, tmp_path: Path) -> None:
    """In its own coordinates, where it sees the scans without their margins."""
    images_ = [torch.nn.functional.pad(body(seed), (14, 10, 16, 12, 11, 15)) for seed in (0, 5)]
    for name, image in zip(("fixed", "moving"), images_, strict=True):
        data = (100 * image[0, 0]).numpy().astype(np.float32)
        images.write(Image(data, np.diag([2.0, 2, 2, 1])), tmp_path / f"{name}.nii.gz")
    case = Case.read(PairInputs(fixed=tmp_path / "fixed.nii.gz", moving=tmp_path / "moving.nii.gz"))
    seen, whole = (case.prepare(load_model(model, "cpu"), torch.device("cpu")) for model in (small, "none"))
    assert not np.allclose(seen.fixed.image.unit_to_world(), whole.fixed.image.unit_to_world())
    phi = Affine(torch.tensor([[[0.9, 0.1, 0, 0.02], [0, 1.1, 0, -0.03], [0, 0.05, 1, 0.01]]]))
    there, back = _between(whole, seen, (phi, phi.inverse()))
    points = torch.rand(1, 50, 3)
    world = map_points(seen.fixed.image.unit_to_world(), points[0].numpy())
    through = torch.from_numpy(map_points(whole.fixed.image.world_to_unit(), world)).float()[None]
    expected = map_points(whole.moving.image.unit_to_world(), phi(through)[0].numpy())
    found = map_points(seen.moving.image.unit_to_world(), there(points)[0].numpy())
    np.testing.assert_allclose(found, expected, atol=1e-3)  # mm
    torch.testing.assert_close(back(there(points)), points, atol=1e-5, rtol=0)


def test_warnings_are_those_of_the_way_that_was_taken(
    pair: tuple[Path, Path],
    calibrated: Callable[[float, float], LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And the network runs once for the ways that share its result."""
    asked: list[object] = []

    def unregistered(maps: object, *rest: object) -> str | None:
        asked.append(maps)
        return "the unregistered images match better"

    monkeypatch.setattr("carlreg.registration.solve._better_unregistered", unregistered)
    common = {"fixed": pair[0], "moving": pair[1], "device": "cpu", "io_iterations": 1}
    result = register(**common, model=calibrated(4.0, -4.0))
    assert result.record.model["name"] == "none"
    assert len(asked) >= 2  # the network's result, and the same with another similarity
    assert asked[0] is asked[-1]
    assert not any("match better" in text for text in result.warnings)
    assert sum("match better" in one.message for one in caplog.records if one.levelname == "WARNING") == 1


@pytest.mark.parametrize(("network", "verdict", "search"), [(1.0, "doubtful", 1.2), (4.0, "failed", 0.0)])
def test_ways_that_are_not_good_change_nothing(
    pair: tuple[Path, Path],
    calibrated: Callable[[float, float], LoadedModel],
    network: float,
    verdict: str,
    search: float,
) -> None:
    """Not even a doubtful one after a failure."""
    common = {"fixed": pair[0], "moving": pair[1], "device": "cpu", "io_iterations": 1}
    model = calibrated(network, search)
    result = register(**common, model=model)
    plain = register(**common, model=replace(model, climbs=False))
    assert result.confidence is not None
    assert result.confidence.verdict == verdict
    assert result.confidence.tried
    points = np.array([[20.0, 30, 30], [40, 20, 35]])
    np.testing.assert_allclose(result.transform(points), plain.transform(points))
    assert plain.confidence is not None
    assert plain.confidence.tried == ()


def test_warp_points_adds_the_expected_error(pair: tuple[Path, Path], small: Path, tmp_path: Path) -> None:
    calibrate(small, odds=-4.0, **LOCAL)
    result = register(fixed=pair[0], moving=pair[1], model=small, device="cpu", io_iterations=0)
    assert result.expected_error is not None
    out, points = result.save(tmp_path / "out"), tmp_path / "points.csv"
    at = np.array([[20.0, 30.0, 30.0], [40.0, 20.0, 36.0]])
    points.write_text("name,x,y,z\na,20,30,30\nb,40,20,36\n")
    words = ["warp-points", "-p", str(points), "-t", str(out), "--from", "fixed", "-o", str(tmp_path / "moved.csv")]
    assert main(words) == 0
    rows = list(csv.DictReader((tmp_path / "moved.csv").open(encoding="utf-8")))
    index = np.rint(map_points(np.linalg.inv(result.expected_error.affine), at)).astype(int)
    expected = result.expected_error.data[tuple(index.T)]
    assert [float(row["expected_error_mm"]) for row in rows] == pytest.approx(expected.tolist(), abs=0.01)
    assert [row["name"] for row in rows] == ["a", "b"]
    assert float(rows[0]["x"]) == pytest.approx(float(result.transform(at)[0, 0]), abs=0.02)
    back = ["warp-points", "-p", str(tmp_path / "moved.csv"), "-t", str(out), "--from", "moving"]
    assert main([*back, "-o", str(tmp_path / "back.txt")]) == 1  # another ending
    (out / EXPECTED_ERROR).unlink()
    assert main([*words[:-1], str(tmp_path / "plain.csv")]) == 0
    assert (tmp_path / "plain.csv").read_text().startswith("name,x,y,z\n")


# ---- headers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torsos() -> tuple[Scan, Scan]:
    """Two invented patients, on coarse voxels with axes closest to RAS."""
    scans = []
    for seed in (1, 2):
        scan = patient(seed).scan((36, 30, 26), 12.0)
        image = to_closest_ras(Image(scan.data, scan.affine))
        tensor, _ = preprocess(image, ct_range=(-125.0, 275.0))
        scans.append(Scan(tensor, image.spacing))
    return scans[0], scans[1]


@pytest.mark.parametrize("axes", [(), (0,), (1,)])
def test_mirrored_torsos_are_named(torsos: tuple[Scan, Scan], axes: tuple[int, ...]) -> None:
    fixed, moving = torsos
    flipped = Scan(moving.image.flip([2 + axis for axis in axes]), moving.spacing)
    found = search_orientation(flipped, fixed)
    assert found.is_wrong == bool(axes)
    if axes:
        assert found.describe() == f"mirrored {AXES[axes[0]]}"
        assert found.is_reflection
        assert found.gain == pytest.approx(found.similarity - found.given_similarity)
    else:
        assert found.is_given
        assert found.gain == 0


def test_quarter_turns_of_a_torso_are_named(torsos: tuple[Scan, Scan]) -> None:
    fixed, moving = torsos
    a, b, c = moving.spacing
    found = search_orientation(Scan(moving.image.transpose(2, 3).flip(2), (b, a, c)), fixed)
    assert found.is_wrong
    assert not found.is_reflection
    assert found.describe() == "turned by 90° about the axis from head to foot"


def test_symmetric_anatomy_cannot_tell() -> None:
    image = body()
    symmetric = (image + image.flip(2)) / 2
    other = (body(5) + body(5).flip(2)) / 2
    found = search_orientation(Scan(0.7 * symmetric + 0.3 * other, (2.0,) * 3), Scan(symmetric, (2.0,) * 3))
    assert not found.is_wrong
    assert found.undecided == ["left to right"]


def test_all_orientations_are_tried_once() -> None:
    for dim, count in ((2, 8), (3, 48)):
        turns = orientations(dim)
        assert len({tuple(turn.flatten().tolist()) for turn in turns}) == count
        assert torch.equal(turns.abs().sum(1), torch.ones(count, dim))
        assert torch.equal(turns[0], torch.eye(dim))


def test_a_mirrored_scan_is_named_and_mirrored_only_on_request(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed, moving = images.read(pair[0]), images.read(pair[1])
    mirrored = tmp_path / "mirrored.nii.gz"
    images.write(replace(moving, data=moving.data[:, ::-1].copy()), mirrored)
    words = ["register", "-f", str(pair[0]), "-m", str(mirrored), "--model", "none", "--io-iterations", "0"]
    words += ["--device", "cpu", "--no-html"]
    assert main([*words, "-o", str(tmp_path / "as-is"), "--confidence", "full"]) == 0
    assert "mirrored front to back" in capsys.readouterr().err
    kept = ResultFolder(tmp_path / "as-is")
    assert np.linalg.det(read_transform(kept[TRANSFORM]).affine) > 0
    assert kept.read_report().orientation["seems"] == "mirrored front to back"
    assert not kept.read_report().orientation["applied"]
    assert main([*words, "-o", str(tmp_path / "fixed"), "--fix-orientation"]) == 0
    assert "as --fix-orientation asks" in capsys.readouterr().err
    done = ResultFolder(tmp_path / "fixed")
    report = done.read_report()
    assert report.orientation["applied"]
    assert report.metrics["folds_percent"] < 1
    capsys.readouterr()
    assert main(["jacobian", "-t", str(done.path), "-o", str(tmp_path / "jacobian.nii.gz")]) == 0
    assert f"folds {report.metrics['folds_percent']:.4f} %" in capsys.readouterr().out  # the same everywhere
    pairs = Pair("fixed", pair[0], mirrored)
    scores = score(pairs, lambda *scans: from_folder(done.path, *scans, root=tmp_path))
    assert scores.figures["folds_percent"] == pytest.approx(report.metrics["folds_percent"], abs=1e-6)
    assert np.median(load_scene(done.path, trust=True).determinant.data) > 0
    warped = images.read(done[WARPED]).data.astype(float)
    assert np.corrcoef(warped.ravel(), fixed.data.astype(float).ravel())[0, 1] > 0.95
    assert main([*words[:2], str(pair[0]), "-m", str(pair[1]), *words[5:], "-o", str(tmp_path / "right")]) == 0


ABDOMENS = Path(__file__).parents[2] / "shared" / "data" / "abdomen" / "val"


@pytest.mark.skipif(not ABDOMENS.is_dir(), reason="needs the abdominal scans")
@pytest.mark.parametrize("axis", [None, 1, 2])
def test_mirrored_abdomens_are_named(axis: int | None) -> None:
    scans = []
    for path in sorted(path for path in ABDOMENS.glob("*.nii.gz") if "_labels" not in path.name)[:2]:
        image = to_closest_ras(images.read(path))
        scans.append(Scan(preprocess(image)[0], image.spacing).at_most(48))
    fixed, moving = scans
    seen = moving if axis is None else Scan(moving.image.flip(2 + axis), moving.spacing)
    found = search_orientation(seen, fixed)
    assert found.is_wrong == (axis is not None)
    assert axis is None or found.describe() == f"mirrored {AXES[axis]}"
