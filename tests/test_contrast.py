"""Random contrast changes intensities and nothing else, and depends on the generator alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from carlreg.synthesis.contrast import random_colours, random_contrast, random_curves, render


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ramps(batch: int = 1) -> Tensor:
    return torch.linspace(0, 1, 24).expand(batch, 1, 20, 22, -1).contiguous()


def blocks(batch: int = 1) -> Tensor:
    labels = torch.zeros(batch, 1, 20, 22, 24)
    labels[:, :, 4:10, 5:17, 4:20] = 1
    labels[:, :, 10:16, 5:17, 4:20] = 2
    return labels


@pytest.mark.parametrize("shape", [(20, 22), (20, 22, 24)])
def test_images_stay_images(shape: tuple[int, ...]) -> None:
    images = torch.rand(3, 1, *shape, generator=generator())
    changed = random_contrast(images, generator(1))
    assert changed.shape == images.shape
    assert changed.dtype == images.dtype
    assert changed.isfinite().all()
    assert 0 <= changed.min() < 0.2 < 0.8 < changed.max() <= 1


def test_the_same_generator_gives_the_same_contrast_and_another_gives_another() -> None:
    first, again, other = (random_contrast(ramps(2), generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first - other).abs().mean() > 0.02
    assert (first[0] - first[1]).abs().mean() > 0.02  # and each image its own


def test_curves_are_piecewise_linear_and_span_all_intensities() -> None:
    curves = random_curves(400, generator())
    assert curves.shape == (400, 256)
    assert curves.amin() >= 0
    assert curves.amax() <= 1 + 1e-6
    assert torch.allclose(curves.amax(1), torch.ones(400))
    bends = (curves.diff(n=2).abs() > 1e-4).sum(1)
    assert bends.max() <= 2 * 4  # four knots within, each seen at two places of the table at most
    assert (bends > 0).float().mean() > 0.95
    black = (curves[:, 0] == 0).float().mean()
    assert 0.75 < black < 0.95
    assert (curves.diff().amin(1) < -1e-3).float().mean() > 0.5  # most are not monotone


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="expected floating point"):
        random_contrast(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), generator())


def test_each_structure_has_its_intensity() -> None:
    colours = torch.tensor([[0.0, 0.3, 0.9]])
    image = render(blocks(), generator(), colours=colours, plain=True)
    assert image[0, 0, 7, 11, 12] == pytest.approx(0.3, abs=0.01)
    assert image[0, 0, 13, 11, 12] == pytest.approx(0.9, abs=0.01)
    assert image[0, 0, 0, 0, 0] == pytest.approx(0.0, abs=0.01)


def test_random_colours_differ_between_images_and_background_is_mostly_black() -> None:
    labels = blocks(2)
    first, again, other = (render(labels, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert first.shape == labels.shape
    assert first.min() >= 0
    assert first.max() <= 1
    assert (first - other).abs().mean() > 0.02
    assert 0.75 < (random_colours(400, 5, generator())[:, 0] == 0).float().mean() < 0.95


def test_two_maps_share_a_contrast_if_they_are_given_one() -> None:
    colours = random_colours(1, 2, generator(3))
    one, other = (
        render(map_, generator(seed), colours=colours, plain=True) for seed, map_ in enumerate((blocks(), blocks()))
    )
    assert torch.equal(one, other)


def test_images_with_a_narrow_range_of_intensities_keep_contrast():
    noise = torch.rand(1, 1, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    images = (0.6 + 0.1 * noise).expand(400, -1, -1, -1, -1)
    chosen = random_contrast(images, torch.Generator().manual_seed(1)).flatten(1).std(dim=1)
    one_curve = random_curves(400, torch.Generator().manual_seed(1))[:, 153:179].std(dim=1)
    assert chosen.median() > 1.3 * one_curve.median()
