"""Maps without folds: closed forms, brute force, and how little is changed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg.geometry.unfolding import AIM, LEAST, cofactors, smallest_determinant, unfold
from carlreg.objective.losses import gaussian_blur

SHAPES = [(200,), (60, 50), (30, 28, 26)]


def steps_of(shape: tuple[int, ...]) -> list[float]:
    return [1 / (n - 1) for n in shape]


def grid_of(shape: tuple[int, ...]) -> Tensor:
    axes = [torch.arange(n) * step for n, step in zip(shape, steps_of(shape), strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"))


def waves(shape: tuple[int, ...], share: float) -> Tensor:
    """Smooth displacements, so large that about this share of the voxels is folded."""
    generator = torch.Generator().manual_seed(len(shape))
    field = gaussian_blur(torch.randn(1, len(shape), *shape, generator=generator), 2.5)[0]
    size = 1e-3
    while (
        float((smallest_determinant((grid_of(shape) + size * field)[None], steps_of(shape)) < LEAST).float().mean())
        < share
    ):
        size *= 1.05
    return size * field


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_folded_afterwards_and_little_is_changed(shape: tuple[int, ...]) -> None:
    field, steps = waves(shape, 0.02), steps_of(shape)
    before = smallest_determinant((grid_of(shape) + field)[None], steps)[0]
    found = unfold(field, steps, [1.0] * len(shape))
    after = smallest_determinant((grid_of(shape) + found)[None], steps)[0]
    assert float(after.min()) >= LEAST
    changed = (found != field).any(0)
    assert 0.02 <= float(changed.float().mean()) < 0.35
    assert bool(changed[before < LEAST].any())
    smoothed = field
    for width in range(1, 40):  # what smoothing alone would have changed, with the narrowest windows that suffice
        smoothed = gaussian_blur(field[None], 0.5 * width)[0]
        if float(smallest_determinant((grid_of(shape) + smoothed)[None], steps).min()) >= LEAST:
            break
    assert float((found - field).square().sum()) < 0.25 * float((smoothed - field).square().sum())


def test_two_crossed_places_meet_half_way() -> None:
    """In 1-D the constraint is linear, so its projection is exact."""
    field = torch.zeros(1, 40)
    field[0, 20] = 1.1  # beyond its neighbour
    expected = field.clone()
    expected[0, 20:22] += torch.tensor([-0.5, 0.5]) * (0.1 + AIM)
    assert torch.allclose(unfold(field, [1.0], [1.0]), expected)
    assert float(field[0, 20]) == pytest.approx(1.1), "the argument is left as it is"


def test_changes_are_short_in_the_scale_of_the_coordinates() -> None:
    """A coordinate that counts more changes less."""
    shape = (30, 30)
    field = waves(shape, 0.02)
    moved = {
        size: (unfold(field, steps_of(shape), size) - field).square().sum((1, 2)) for size in ((1.0, 1.0), (5.0, 1.0))
    }
    ratio = [float(change[0] / change[1]) for change in moved.values()]
    assert ratio[1] < 0.3 * ratio[0]


def test_maps_without_folds_stay_and_hopeless_ones_too() -> None:
    shape = (24, 24)
    flat, hopeless = waves(shape, 1e-9) * 0.5, waves(shape, 0.3)
    for field in (flat, hopeless, torch.zeros(2, 24, 1)):
        assert torch.equal(unfold(field, [1 / 23, 1 / 23], [1.0, 1.0]), field)


def test_the_smallest_determinant_is_that_of_all_corners() -> None:
    torch.manual_seed(0)
    shape, steps = (4, 5, 3), (0.2, 0.3, 0.5)
    places = torch.randn(1, 3, *shape, dtype=torch.float64)
    found = smallest_determinant(places, steps)[0]
    values = places[0].numpy()
    for voxel in itertools.product(*map(range, shape)):
        determinants = []
        for choice in itertools.product((-1, 1), repeat=3):
            columns = []
            for axis, sign in enumerate(choice):
                way = sign if 0 <= voxel[axis] + sign < shape[axis] else -sign
                other = tuple(at + way * (axis == n) for n, at in enumerate(voxel))
                columns.append(way * (values[(slice(None), *other)] - values[(slice(None), *voxel)]) / steps[axis])
            determinants.append(np.linalg.det(np.stack(columns, axis=1)))
        assert float(found[voxel]) == pytest.approx(min(determinants))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_cofactors_are_derivatives(dim: int) -> None:
    torch.manual_seed(0)
    columns = torch.randn(dim, 7, dim, dtype=torch.float64, requires_grad=True)
    values = torch.linalg.det(columns.permute(1, 2, 0))
    (right,) = torch.autograd.grad(values.sum(), columns)
    assert torch.allclose(cofactors(columns.detach()), right)
