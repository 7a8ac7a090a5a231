"""Instance optimisation improves the pair and has no side effects."""

from __future__ import annotations

import hashlib

import pytest
import torch
from conftest import SMALL, randomize
from torch import Tensor

from carlreg import (
    ClosedFormXi,
    DisplacementField,
    Identity,
    RegistrationAlgorithm,
    carl,
    gradicon,
    instance_optimize,
    lncc,
    optimize_fields,
    registration_loss,
    warp,
)
from carlreg.geometry.grids import Grid
from carlreg.geometry.jacobian import folding
from carlreg.objective.fields import share_done
from carlreg.objective.losses import Loss
from carlreg.objective.metrics import inverse_consistency


def blobs(shift: float) -> Tensor:
    x = Grid.of((32, 32)).points()
    centres = torch.tensor([[0.4, 0.4], [0.6, 0.55], [0.45, 0.7]]) + shift
    return sum(torch.exp(-((x - c) ** 2).sum(-1) / 0.01) for c in centres)[None, None]


@pytest.fixture
def model() -> RegistrationAlgorithm:
    pair = blobs(0), blobs(0.05)
    return randomize(carl(2, width=4, **SMALL), *pair, move=0.5).requires_grad_(True)


def fingerprint(model: RegistrationAlgorithm) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_bit_for_bit_unchanged(model: RegistrationAlgorithm, training: bool) -> None:
    model.train(training)
    before = fingerprint(model)
    instance_optimize(model, blobs(0), blobs(0.05), steps=3, learning_rate=1e-2)
    assert fingerprint(model) == before
    assert model.training is training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_loss_falls_and_the_best_iterate_is_kept() -> None:
    moving, fixed = blobs(0), blobs(0.05)
    model = gradicon(2, **SMALL)  # starts at the identity: an untrained Ξθ would have to be trained first
    result = instance_optimize(model, moving, fixed, steps=20, learning_rate=1e-3)
    totals = [loss["total"] for loss in result.losses]
    assert len(totals) == 21
    assert result.best == totals.index(min(totals))
    assert min(totals) < 0.9 * totals[0]
    first = instance_optimize(model, moving, fixed, steps=0)
    assert len(first.losses) == 1

    def similarity(transform: object) -> float:
        return float(lncc(warp(moving, transform, like=fixed), fixed))

    assert similarity(result.transform) < similarity(first.transform)
    assert not result.transform.on_grid_of(fixed).requires_grad


def test_a_worsening_run_returns_the_best_not_the_last(model: RegistrationAlgorithm) -> None:
    result = instance_optimize(model, blobs(0), blobs(0.05), steps=8, learning_rate=1.0)
    totals = [loss["total"] for loss in result.losses]
    assert result.best == totals.index(min(totals)) < len(totals) - 1


def test_the_transforms_returned_are_those_of_the_best_step(model: RegistrationAlgorithm) -> None:
    """Recomputed similarity equals that of the best entry, and the inverse is the other direction's map."""
    moving, fixed = blobs(0), blobs(0.05)
    result = instance_optimize(model, moving, fixed, steps=8, learning_rate=1.0)
    best = result.losses[result.best]
    assert result.best < 8
    loss = registration_loss(result.transform, result.inverse, moving, fixed)
    assert float(loss.similarity) == pytest.approx(best["similarity"], abs=1e-5)
    assert not torch.allclose(result.transform.on_grid_of(fixed), result.inverse.on_grid_of(moving))


def test_statistics_are_not_used_and_masks_are(model: RegistrationAlgorithm) -> None:
    """BatchNorm stays in evaluation mode: before the first step, the result is the network's own."""
    moving, fixed = blobs(0), blobs(0.05)
    model.train()
    first = instance_optimize(model, moving, fixed, steps=0)
    with torch.no_grad():
        expected = model.eval()(moving, fixed).on_grid_of(fixed)
    assert torch.allclose(first.transform.on_grid_of(fixed), expected, atol=1e-3)
    for name in ("moving_mask", "fixed_mask"):
        mask = torch.zeros_like(moving)
        mask[..., :9] = 1
        masked = instance_optimize(model, moving, fixed, steps=0, **{name: mask})
        assert masked.losses[0]["similarity"] != first.losses[0]["similarity"]


def test_the_same_seed_gives_the_same_answer(model: RegistrationAlgorithm) -> None:
    runs = [instance_optimize(model, blobs(0), blobs(0.05), steps=3, seed=s) for s in (1, 1, 2)]
    fields = [run.transform.on_grid_of(blobs(0)) for run in runs]
    assert torch.equal(fields[0], fields[1])
    assert runs[0].losses == runs[1].losses != runs[2].losses


def test_the_callback_sees_every_step(model: RegistrationAlgorithm) -> None:
    seen: list[tuple[int, float]] = []

    def watch(step: int, loss: Loss) -> None:
        seen.append((step, float(loss.total.detach())))

    result = instance_optimize(model, blobs(0), blobs(0.05), steps=4, callback=watch)
    assert [step for step, _ in seen] == [0, 1, 2, 3, 4]
    assert [total for _, total in seen] == [loss["total"] for loss in result.losses]


def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_good_result(model: RegistrationAlgorithm) -> None:
    calls = 0

    def breaks_later(warped: Tensor, fixed: Tensor, *, mask: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        return lncc(warped, fixed) * (torch.nan if calls > 6 else 1.0)

    result = instance_optimize(model, blobs(0), blobs(0.05), steps=10, similarity=breaks_later)
    assert result.stopped == "the loss became nan at step 3"
    assert len(result.losses) == 3
    assert torch.isfinite(result.transform.on_grid_of(blobs(0))).all()


def test_a_first_loss_that_is_not_finite_is_an_error(model: RegistrationAlgorithm) -> None:
    def broken(warped: Tensor, fixed: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return warped.sum() * torch.inf

    with pytest.raises(FloatingPointError, match="at step 0: the transform that the optimisation starts from"):
        instance_optimize(model, blobs(0), blobs(0.05), similarity=broken)


def test_it_works_where_gradients_are_switched_off(model: RegistrationAlgorithm) -> None:
    for switch in (torch.no_grad, torch.inference_mode):
        with switch():
            result = instance_optimize(model, blobs(0), blobs(0.05), steps=2)
        assert result.losses[-1] != result.losses[0]


def test_masks_and_different_shapes(model: RegistrationAlgorithm) -> None:
    moving, fixed = blobs(0), blobs(0.05)[..., 3:, 1:]
    result = instance_optimize(
        model, moving, fixed, steps=2, moving_mask=torch.ones_like(moving), fixed_mask=(fixed > 0.1).float()
    )
    assert result.transform.on_grid_of(fixed).shape == (1, 29, 31, 2)
    assert isinstance(result.inverse[:1].on_grid_of(moving), Tensor)


# ---- of the fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_fields_improve_on_the_answer_they_start_from(levels: int) -> None:
    moving, fixed = blobs(0), blobs(0.05)
    options = {"steps": 24, "levels": levels, "learning_rate": 0.2, "weight": 1.5, "window": 2.0}
    result = optimize_fields(Identity(), Identity(), moving, fixed, **options)

    def similarity(transform: object) -> float:
        return float(lncc(warp(moving, transform, like=fixed), fixed))

    assert similarity(result.transform) < 0.5 * similarity(Identity())
    assert folding(result.transform, fixed) == 0
    assert inverse_consistency(result.transform, result.inverse, moving).mean() < 1  # voxel
    totals = [loss["total"] for loss in result.losses]
    assert 20 < len(totals) <= 25  # fewer if the loss stands still
    assert result.best == totals.index(min(totals))


def test_fields_stay_where_nothing_can_be_gained() -> None:
    image = blobs(0)
    start = DisplacementField(torch.zeros(1, 2, 32, 32))
    result = optimize_fields(start, start, image, image, steps=0, levels=1)
    assert torch.equal(result.transform.on_grid_of(image), start.on_grid_of(image))
    assert result.best == 0


def test_fields_with_masks_shapes_seeds_and_batches() -> None:
    moving, fixed = (torch.cat([blobs(s), blobs(s + 0.02)]) for s in (0.0, 0.04))
    fixed = fixed[..., 3:, 1:]
    options = {"steps": 4, "levels": 2, "moving_mask": torch.ones_like(moving), "fixed_mask": (fixed > 0.1).float()}
    seen: list[int] = []
    runs = [
        optimize_fields(Identity(), Identity(), moving, fixed, callback=lambda s, _: seen.append(s), **options)
        for _ in range(2)
    ]
    assert runs[0].transform.on_grid_of(fixed).shape == (2, 29, 31, 2)
    assert runs[0].losses == runs[1].losses
    assert seen[: len(seen) // 2] == [*range(13), *range(12, 17)]
    shares = [share_done(step, 4, dim=2, levels=2) for step in seen[: len(seen) // 2]]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[12] == pytest.approx(3 / 7)  # 12 steps that cost a quarter, then 4
    assert shares[-1] == 1
    alone = optimize_fields(Identity(), Identity(), moving[:1], fixed[:1], steps=0, levels=1)
    assert alone.transform.on_grid_of(fixed[:1]).shape == (1, 29, 31, 2)


def test_bad_fields_are_named() -> None:
    with pytest.raises(ValueError, match="steps is 3 and levels 0; expected 0 or more, and 1 or more"):
        optimize_fields(Identity(), Identity(), blobs(0), blobs(0), steps=3, levels=0)
    bad = DisplacementField(torch.full((1, 2, 32, 32), torch.nan))
    with pytest.raises(FloatingPointError, match="starts from is not finite"):
        optimize_fields(bad, Identity(), blobs(0), blobs(0))


def test_bad_input_is_named(model: RegistrationAlgorithm) -> None:
    with pytest.raises(ValueError, match="steps is -1; expected 0 or more"):
        instance_optimize(model, blobs(0), blobs(0), steps=-1)
    with pytest.raises(ValueError, match="non-finite"):
        instance_optimize(model, blobs(0) * torch.nan, blobs(0))
    with pytest.raises(ValueError, match="ClosedFormXi has no weights to optimise"):
        instance_optimize(ClosedFormXi(1), torch.rand(1, 1, 9), torch.rand(1, 1, 9))
