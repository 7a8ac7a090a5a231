"""Optimisation of fields: its arithmetic against direct sums and differences, thick slices, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg import DisplacementField, Identity, optimize_fields, warp
from carlreg.fast import exact
from carlreg.files.images import Image
from carlreg.geometry.grids import Grid, interpolate, sample_with_slopes, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.model.loaded import NoNetwork
from carlreg.objective import fields
from carlreg.objective.fields import _Level, _Settings
from carlreg.objective.windows import CONTRAST, EPSILON, Picture, Windows
from carlreg.preparation import Prepared, PreparedPair
from carlreg.registration import similarity, solve
from carlreg.registration.options import RegisterOptions

GRIDS = [((40,), (33,), (1.0,)), ((40, 37), (33, 50), (1.0, 1.0)), ((34, 18, 6), (33, 20, 9), (1.0, 1.2, 5.0))]
SETTINGS = _Settings("lncc", 1.5, 0.75, 20.0, 1.0, 2.0, 0)


def texture(shape: tuple[int, ...], shift: float, spacing: tuple[float, ...]) -> Tensor:
    """Waves of at least 12 mm, moved by `shift` mm, from 0 to 1."""
    axes = [torch.arange(n) * mm - shift for n, mm in zip(shape, spacing, strict=True)]
    at = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    generator = torch.Generator().manual_seed(3)
    waves = (2 * torch.rand(len(shape), 30, generator=generator) - 1) * (6.28 / 12 / math.sqrt(len(shape)))
    values = torch.cos(at @ waves + 6.28 * torch.rand(30, generator=generator)).sum(-1)
    return (0.5 + values / 40)[None, None]


@pytest.mark.parametrize(("squared", "chessboard"), [(False, False), (True, False), (False, True)])
def test_windows_are_gaussian_around_every_second_voxel(squared: bool, chessboard: bool) -> None:
    """Against sums over each window, written out."""
    torch.manual_seed(0)
    source, target = torch.rand(2, 1, 1, 16, 32, dtype=torch.float64)
    windows = Windows(source, Picture(target, None, (1.0, 1.0)), 1.5, squared, chessboard=chessboard)
    grid = _Level(windows.target, windows.target, 1.0, SETTINGS).sides[0].grid.double()
    sigma = math.sqrt(1.5**2 - 0.25) / 2
    apart, a, b = [], source[0, 0].numpy(), target[0, 0].numpy()
    for centre in itertools.product(range(8), range(16)):
        offsets = [np.arange(n) // 2 - c for n, c in zip((16, 32), centre, strict=True)]
        taps = [np.exp(-0.5 * (o / sigma) ** 2) * (np.abs(o) <= 3 * sigma) for o in offsets]
        weight = np.outer(*taps)
        if chessboard:
            weight *= np.add.outer(np.arange(16), np.arange(32)) % 2 == 0
        weight /= weight.sum()
        da, db = a - (weight * a).sum(), b - (weight * b).sum()
        va, vb = (weight * da**2).sum() + EPSILON, (weight * db**2).sum() + EPSILON
        correlation = (weight * da * db).sum() / np.sqrt(va * vb)
        contrast = vb - EPSILON
        apart.append((1 - (correlation**2 if squared else correlation)) * contrast / (contrast + CONTRAST))
    assert float(windows(grid)) == pytest.approx(np.mean(apart), abs=1e-9)


@pytest.mark.parametrize("finest", [False, True])
@pytest.mark.parametrize(("fixed", "moving", "spacing"), GRIDS)
def test_gradients_are_those_of_the_loss(
    fixed: tuple[int, ...], moving: tuple[int, ...], spacing: tuple[float, ...], finest: bool
) -> None:
    torch.manual_seed(1)
    f, m = (Picture(torch.rand(1, 2, *shape, dtype=torch.float64), None, spacing) for shape in (fixed, moving))
    level = _Level(f, m, 1.0, SETTINGS, finest)
    positions = [side.grid + 0.02 * torch.randn_like(side.grid) for side in level.sides]
    moves = [torch.randn_like(at) for at in positions]
    phase = torch.tensor(1)
    _, gradients = level._gradients(positions, phase)
    step = 1e-7
    ends = [
        level._gradients([at + sign * step * move for at, move in zip(positions, moves, strict=True)], phase)[0][0]
        for sign in (1, -1)
    ]
    slope = sum((g * move).sum() for g, move in zip(gradients, moves, strict=True))
    assert float(slope) == pytest.approx(float((ends[0] - ends[1]) / (2 * step)), rel=1e-3)


@pytest.mark.parametrize(("fixed", "moving", "spacing"), GRIDS)
def test_bending_is_the_mean_square_of_differences(
    fixed: tuple[int, ...], moving: tuple[int, ...], spacing: tuple[float, ...]
) -> None:
    """Against NumPy, in mm; its gradient against autograd."""
    torch.manual_seed(1)
    f, m = (Picture(torch.rand(1, 1, *shape, dtype=torch.float64), None, spacing) for shape in (fixed, moving))
    side = _Level(f, m, 1.0, SETTINGS).sides[0]
    moves = torch.randn_like(side.grid)
    places = (moves[0] * torch.tensor(m.size).reshape(-1, *(1,) * len(fixed))).numpy()
    expected = sum(
        ((np.diff(places, axis=axis) / (k * mm)) ** 2).sum(0).mean()
        for axis, (k, mm) in enumerate(zip(f.stride, spacing, strict=True), start=1)
    )
    found, gradient = side.bending(moves)
    assert float(found) == pytest.approx(expected)
    leaf = moves.clone().requires_grad_()
    (right,) = torch.autograd.grad(side.bending(leaf)[0], leaf)
    assert torch.allclose(gradient, right)


def test_stiff_changes_are_smooth() -> None:
    """A start that a stiff optimisation may move as a whole, but hardly bend."""
    shape, spacing = (48, 40), (1.0, 1.0)
    fixed, moving = texture(shape, 0.0, spacing), texture(shape, 1.5, spacing)
    moving[..., 24:, :] = texture(shape, -1.5, spacing)[..., 24:, :]  # halves that move apart
    bent = {}
    for stiffness in (0.0, 1.0, 1000.0):
        result = optimize_fields(
            Identity(), Identity(), moving, fixed, steps=8, levels=2, weight=0.0, stiffness=stiffness
        )
        field = result.transform.on_grid_of(fixed)[0] - Identity().on_grid_of(fixed)[0]
        bent[stiffness] = float(field.diff(dim=0).square().mean())
    assert bent[0.0] > 2 * bent[1.0] > 0
    assert bent[1.0] > 20 * bent[1000.0]


def test_cells_without_contrast_are_not_sampled_and_do_not_count() -> None:
    picture = Picture(torch.zeros(1, 1, 64, 64), None, (1.0, 1.0))
    picture.image[..., 20:30, 20:30] = torch.rand(10, 10)
    source = torch.rand(1, 1, 64, 64)
    windows = Windows(source, picture, 1.5, False)
    assert 0 < len(windows.cells) <= 13**2 < math.prod(windows.pooled)
    grid = _Level(picture, picture, 1.0, SETTINGS).sides[0].grid
    elsewhere = source.clone()
    elsewhere[..., 50:, :] += 1
    assert float(windows(grid)) == float(Windows(elsewhere, picture, 1.5, False)(grid))


@pytest.mark.parametrize("shape", [(7,), (5, 6), (5, 6, 4)])
def test_exact_sampling_is_linear_interpolation(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    dim = len(shape)
    values = torch.rand(1, 3, *shape, dtype=torch.float64, requires_grad=True)
    points = (1.2 * torch.rand(1, dim, *(5,) * dim, dtype=torch.float64) - 0.1).requires_grad_()
    found, expected = exact.sample(values, points), interpolate(values, points.movedim(1, -1))
    assert torch.allclose(found, expected)
    found_too, slopes = sample_with_slopes(values.detach(), points[0].detach().flatten(1))
    assert torch.allclose(found_too, expected[0].flatten(1))
    for channel in range(3):
        (right,) = torch.autograd.grad(expected[0, channel].sum(), points, retain_graph=True)
        assert torch.allclose(slopes[:, channel], right[0].flatten(1), atol=1e-9)
    factor = torch.rand_like(found)
    ours, theirs = (torch.autograd.grad((one * factor).sum(), (values, points)) for one in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-9)


def test_thick_slices_stay_and_are_not_smoothed_across() -> None:
    picture = Picture(torch.rand(1, 1, 64, 48, 10), None, (1.5, 1.5, 10.0))
    assert picture.control == (33, 25, 16)
    assert [picture.shrink(1.5 * factor).shape for factor in (2, 4, 8)] == [(33, 25, 10), (17, 13, 10), (9, 8, 9)]
    side = _Level(picture, picture, 1.5, SETTINGS).sides[0]
    assert [blur is None for blur in side.blur] == [False, False, False]  # 3 mm in plane, and 0.3 slices
    assert float(side.blur[2][4, 5]) < 0.01 < float(side.blur[0][4, 5])  # type: ignore[index]
    windows = side.measures[0]
    assert isinstance(windows, Windows)
    assert windows.blur[2] is None or float(windows.blur[2][4, 5]) < 0.01


def test_fields_of_coarse_grids_have_no_creases_on_fine_ones() -> None:
    fine = Picture(torch.rand(1, 1, 128, 96), None, (1.0, 1.0))
    coarse = fine.shrink(8.0)
    torch.manual_seed(5)
    field = torch.rand(1, 2, *coarse.control)
    bends = coarse.resampled(field, fine).diff(n=2, dim=2).abs().amax()
    creases = (field.diff(n=2, dim=2) / 8).abs().amax()  # of linear interpolation: all of a bend at one voxel
    assert 0 < bends < 0.5 * creases
    line = coarse.grid.expand(1, 2, *coarse.control)
    inner = (slice(None), slice(None), slice(16, -16), slice(16, -16))
    assert torch.allclose(coarse.resampled(line, fine)[inner], fine.grid[inner], atol=1e-5)


def test_coarse_grids_alone_register_and_do_not_fold() -> None:
    moving, fixed = (texture((96, 96), shift, (1.0, 1.0)) for shift in (4.0, 0.0))
    phi = optimize_fields(Identity(), Identity(), moving, fixed, steps=0, coarse_steps=40).transform
    moved = (phi.on_grid_of(fixed) - Grid.of((96, 96)).points())[0, 24:72, 24:72] * 95
    assert float((moved - 4).abs().mean()) < 1
    assert folding(phi, fixed) == 0


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (1.0, 1.0, 4.0)])
def test_a_shift_in_millimetres_is_found(spacing: tuple[float, float, float]) -> None:
    shape = (40, 36, round(40 / spacing[2]))
    moving, fixed = texture(shape, 2.0, spacing), texture(shape, 0.0, spacing)
    options = {"moving_spacing": spacing, "fixed_spacing": spacing}
    result = optimize_fields(Identity(), Identity(), moving, fixed, **options)  # type: ignore[arg-type]
    before, after = ((warp(moving, phi, like=fixed) - fixed).square().mean() for phi in (Identity(), result.transform))
    assert after < 0.3 * before
    assert folding(result.transform, fixed) == 0
    inner = tuple(slice(n // 4, n - n // 4) for n in shape)
    moved = (result.transform.on_grid_of(fixed) - Grid.of(shape).points())[0][inner].flatten(0, 2)
    millimetres = moved * torch.tensor([(n - 1) * mm for n, mm in zip(shape, spacing, strict=True)])
    assert torch.allclose(millimetres.mean(0), torch.full((3,), 2.0), atol=0.7), millimetres.mean(0)


@pytest.mark.parametrize("masked", [False, True])
def test_squared_differences_converge_like_correlations(masked: bool) -> None:
    """Also where contrast is weak, so that squared differences are small from the start."""
    fixed, moving = (0.4 + 0.1 * texture((40, 36), by, (1.0, 1.0)) for by in (0.0, 2.0))
    mask = torch.ones_like(fixed) if masked else None
    options: dict[str, Any] = {"fixed_mask": mask, "moving_mask": mask}
    inner = Grid.of((20, 20)).points() / 2 + 0.25

    def missed(**others: Any) -> float:
        found = optimize_fields(Identity(), Identity(), moving, fixed, **options, **others).transform
        moves = (found(inner[None]) - inner) * torch.tensor([39.0, 35.0])
        return float((moves - 2).norm(dim=-1).mean())

    assert missed(similarity="ssd") < 1.2 * missed(similarity="lncc") < 0.4
    flat = torch.full_like(fixed, 0.4)
    result = optimize_fields(Identity(), Identity(), moving, flat, similarity="ssd", steps=1)
    assert all(math.isfinite(loss["total"]) for loss in result.losses)


def test_where_nothing_can_be_compared_the_start_stands() -> None:
    start = DisplacementField(0.01 * torch.rand(1, 2, 12, 12))
    empty, image = torch.zeros(1, 1, 32, 32), torch.rand(1, 1, 32, 32)
    far = DisplacementField(torch.full((1, 2, 32, 32), 5.0))
    for forward, moving in ((start, empty), (far, image)):
        result = optimize_fields(forward, start, moving, image, steps=2)
        assert result.transform.on_grid_of(image).equal(forward.on_grid_of(image))
        assert result.stopped == "where the images overlap, at least one of them is constant"
        assert result.losses == []


@pytest.mark.parametrize(
    ("sides", "slices", "grid", "expected"),
    [
        ((160, 160, 90), 2.4, (96, 96, 96), {}),
        ((180, 180, 10), 6.0, (96, 96, 16), solve.SLICES),
        ((36, 50, 38), 1.0, (96, 96, 96), solve.SMALL),
    ],
    ids=["abdomen", "heart", "hippocampus"],
)
def test_settings_depend_on_the_voxels_of_the_scans(
    sides: tuple[int, ...], slices: float, grid: tuple[int, ...], expected: dict[str, Any]
) -> None:
    image = Image(np.zeros(sides, np.float32), np.diag([1.0, 1.0, slices, 1.0]), "scan")
    one = Prepared(image, torch.zeros(1, 1, *grid), None, "", sides, "whole")
    network: Any = torch.nn.Identity()

    def settings(pair: PreparedPair, network: Any = network, which: Any = None) -> dict[str, Any]:
        return solve._field_settings(network, similarity.Comparison(RegisterOptions(), pair, which=which))

    pair = PreparedPair(one, one)
    assert settings(pair) == expected
    assert settings(pair, which="fixed") == (expected or {"stiffness": similarity.STIFFNESS})
    assert settings(pair, NoNetwork()) == settings(pair, NoNetwork(), "fixed") == solve.FAR
    fine = Image(np.zeros((160, 160, 120), np.float32), np.eye(4), "scan")
    other = Prepared(fine, torch.zeros(1, 1, *grid), None, "", fine.shape, "whole")
    assert settings(PreparedPair(one, other)) == (solve.SLICES if slices > 5 else {})


# ---- the early end --------------------------------------------------------------------------------------------------


def small_level(rate: float) -> _Level:
    spacing = (1.0, 1.0)
    images = (Picture(texture((40, 36), shift, spacing), None, spacing) for shift in (0.0, 3.0))
    return _Level(*images, 1.0, dataclasses.replace(SETTINGS, learning_rate=rate))


def descended(level: _Level, steps: int) -> tuple[list[Tensor], list[dict[str, float]], int]:
    return level.descend([torch.zeros_like(side.grid) for side in level.sides], steps)


def test_a_level_ends_when_its_loss_stands_still() -> None:
    """Without any change of the fields, it does so from the start: one check is enough."""
    assert len(descended(small_level(0.0), 60)[1]) == fields.CHECK + 1
    assert len(descended(small_level(0.0), fields.CHECK - 1)[1]) == fields.CHECK


def test_a_level_goes_on_while_its_loss_falls_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    early = descended(small_level(0.1), 400)
    totals = [loss["total"] for loss in early[1]]
    taken = len(totals)
    assert taken % fields.CHECK == 1
    assert 2 * fields.CHECK < taken < 400
    lowest = [min(totals[: n + 1]) for n in range(0, taken, fields.CHECK)]
    falls = [(before - after) / before for before, after in itertools.pairwise(lowest)]
    assert min(falls[:-1]) > fields.STILL >= falls[-1]
    monkeypatch.setattr(fields, "STILL", -1.0)
    full = descended(small_level(0.1), 400)
    assert len(full[1]) == 401
    assert full[1][:taken] == early[1]  # the same steps, but for those that are left out
    assert totals[early[2]] == min(totals)


def test_levels_that_end_early_are_no_failure() -> None:
    spacing = (1.0, 1.0)
    fixed, moving = (texture((40, 36), shift, spacing) for shift in (0.0, 3.0))
    seen: list[int] = []
    options: dict[str, Any] = {"steps": 500, "coarse_steps": 400, "levels": 2, "learning_rate": 0.1}
    options["callback"] = lambda number, _: seen.append(number)
    result = optimize_fields(Identity(), Identity(), moving, fixed, **options)
    assert result.stopped is None
    assert len(result.losses) < 501
    assert all(math.isfinite(loss["total"]) for loss in result.losses)
    assert seen == [*range(len(seen) - len(result.losses)), *range(400, 400 + len(result.losses))]


def in_another_contrast(shift: float, side: int = 28) -> PreparedPair:
    """Two textures, shifted by so many mm along every axis, of which one shows dark and bright alike."""
    fixed, moved = (texture((side,) * 3, by, (1.0,) * 3) for by in (0.0, shift))
    image = Image(fixed[0, 0].numpy(), np.eye(4))
    images = fixed, 0.1 + 2 * (moved - 0.45).abs()
    return PreparedPair(*(Prepared(image, one, None, "", image.shape, "whole") for one in images))


def shifts(found: fields.Optimized, side: int = 28) -> Tensor:
    """By how many mm points in the middle were shifted: (8000, 3)."""
    inner = Grid.of((20, 20, 20)).points() / 2 + 0.25
    return (side - 1) * (found.transform(inner[None]) - inner).flatten(0, -2)


def test_another_contrast_is_recoloured() -> None:
    """A shift of 2 mm is found though dark and bright of one image are alike in the other; the start is kept where the
    images stay unlike."""
    comparison = similarity.compare(RegisterOptions(), Identity(), in_another_contrast(2.0))
    assert comparison.differs
    images = comparison.pair.moving.tensor, comparison.pair.fixed.tensor
    found = optimize_fields(Identity(), Identity(), *images, enough=comparison.enough)
    assert found.unlike is None
    assert shifts(found).mean(dim=0).numpy() == pytest.approx([2, 2, 2], abs=0.3)
    kept = optimize_fields(Identity(), Identity(), *images, steps=2, enough=0.0)
    assert kept.unlike == kept.losses[-1]["similarity"] > 0 == shifts(kept).abs().max()


def test_colours_are_taken_again_from_a_better_map() -> None:
    """A start that is 4 mm off mixes the colours; those that its own optimisation finds halve the error."""
    pair, start = in_another_contrast(4.0), (Identity(), Identity())
    comparison = similarity.compare(RegisterOptions(), start[0], pair)
    images = comparison.pair.moving.tensor, comparison.pair.fixed.tensor
    settings = {"weight": similarity.REGULARITY, "stiffness": similarity.STIFFNESS}
    once = optimize_fields(*start, *images, **settings)
    twice = solve._optimize(torch.nn.Identity(), start, comparison, pair, "fields", None).result  # type: ignore[arg-type]
    errors = [float((shifts(found) - 4).norm(dim=-1).mean()) for found in (once, twice)]
    assert errors[1] < 0.6 * errors[0] < 0.6 * 4 * 3**0.5, errors


def test_where_scans_stay_unlike_the_networks_result_stands() -> None:
    """The contrasts of two images agree, but one is so noisy that they hardly correlate. A network may know better than
    their intensities; a map that was searched for does not."""
    fixed, moved = (texture((28, 28, 28), by, (1.0,) * 3) for by in (0.0, 1.0))
    noise = torch.randn(moved.shape, generator=torch.Generator().manual_seed(0))
    image = Image(fixed[0, 0].numpy(), np.eye(4))
    images = fixed, (moved + 0.85 * float(moved.std()) * noise).clamp(0.1, 1)
    pair = PreparedPair(*(Prepared(image, one, None, "", image.shape, "whole") for one in images))
    comparison = similarity.compare(RegisterOptions(), Identity(), pair)
    assert not comparison.differs
    for network, kept in ((torch.nn.Identity(), True), (NoNetwork(), False)):
        found = solve._optimize(network, (Identity(), Identity()), comparison, pair, "fields", None)  # type: ignore[arg-type]
        assert (found.result.unlike is not None) == kept, found.result.losses[-1]
        assert bool(shifts(found.result).abs().max() == 0) == kept
        assert (solve._kept(found, "the start") is not None) == kept


def test_a_small_start_that_stays_is_unfolded_without_loss_of_detail() -> None:
    """Waves of four voxels, of which every second voxel would lose half, and a fold in one corner."""
    shape = (24, 26, 28)
    image = texture(shape, 0.0, (1.0, 1.0, 1.0))
    points = voxel_points(image)
    size = torch.tensor(shape) - 1
    waves = 0.25 * torch.sin(torch.pi / 2 * (points * size).round()) / size
    near = ((points - 0.25) * 8).square().sum(-1, keepdim=True)
    start = DisplacementField((waves + 2.5 * near.neg().exp() * (0.25 - points)).movedim(-1, 1))
    assert 0.01 < folding(start, image) < 5
    found = optimize_fields(start, Identity(), image, image.flip(2), steps=1, gain=1.0)
    assert found.too_little is not None
    assert folding(found.transform, image) == 0
    apart = (found.transform.on_grid_of(image) - start.on_grid_of(image)).abs() * size
    assert apart[near[..., 0] > 4].max() < 0.02  # 0.4 if only every second voxel had been unfolded
