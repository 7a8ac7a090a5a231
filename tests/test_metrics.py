"""Metrics on cases with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import texture
from torch import Tensor

from carlreg import Affine, DisplacementField, Identity
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.jacobian import (
    determinant_per_voxel,
    folding,
    jacobian_determinant,
    sd_log_jacobian,
)
from carlreg.objective.metrics import (
    dice,
    hd95,
    inverse_consistency,
    mean_score,
    mean_surface_distance,
    target_registration_error,
)

sitk = pytest.importorskip("SimpleITK")


def ball(side: int, centre: tuple[float, ...], radius: float) -> Tensor:
    index = torch.stack(torch.meshgrid(*(torch.arange(float(side)),) * len(centre), indexing="ij"), dim=-1)
    return ((index - torch.tensor(centre)).norm(dim=-1) <= radius).int()[None, None]


def test_dice_by_hand() -> None:
    first = torch.tensor([[[0, 1, 1, 2, 2, 3]]])
    second = torch.tensor([[[1, 1, 0, 2, 2, 4]]])
    scores = dice(first, second)
    assert scores[1] == pytest.approx(2 * 1 / (2 + 2))
    assert scores[2] == 1
    assert scores[3] == scores[4] == 0  # a structure that was lost counts
    assert mean_score(scores) == pytest.approx(1.5 / 4)
    assert list(dice(first, second, labels=[2])) == [2]
    assert math.isnan(dice(first, second, labels=[9])[9])
    assert math.isnan(mean_score({}))


def test_hd95_of_shifted_and_of_concentric_balls() -> None:
    first = ball(40, (20, 20, 20), 8)
    assert hd95(first, first, 1) == 0
    shifted = ball(40, (20, 20, 24), 8)
    assert hd95(first, shifted, 1) == pytest.approx(4, abs=0.35)  # the poles move by 4, the equator by less
    assert hd95(first, shifted, 1, spacing=(1, 1, 2.5)) > 7
    larger = ball(40, (20, 20, 20), 13)
    assert hd95(first, larger, 1) == pytest.approx(5, abs=0.8)
    assert math.isnan(hd95(first, first * 0, 1))


def test_hd95_against_all_pairs() -> None:
    first, second = ball(15, (7, 6), 4), ball(15, (8, 8), 3)

    def rim(mask: Tensor) -> Tensor:
        inside = {tuple(p) for p in mask[0, 0].nonzero().tolist()}
        steps = [(0, 1), (0, -1), (1, 0), (-1, 0)]
        return torch.tensor([p for p in inside if any((p[0] + i, p[1] + j) not in inside for i, j in steps)]).double()

    distances = torch.cdist(rim(first), rim(second))
    expected = max(float(distances.amin(d).quantile(0.95)) for d in (0, 1))
    assert hd95(first, second, 1) == pytest.approx(expected)


def two_blobs() -> tuple[Tensor, Tensor]:
    """Two structures in each of two label maps, none of them a ball, none at the border."""
    first = ball(30, (14, 12, 15), 7) + 2 * ball(30, (22, 22, 22), 4)
    second = ball(30, (15, 14, 13), 6) | ball(30, (15, 19, 13), 3)
    return first, second + 2 * ball(30, (23, 21, 23), 4) * (1 - second)


def as_sitk(labels: Tensor, spacing: tuple[float, ...]) -> object:
    image = sitk.GetImageFromArray(labels[0, 0].permute(2, 1, 0).numpy().astype(np.uint8))
    image.SetSpacing(spacing)
    return image


def test_dice_against_simpleitk() -> None:
    first, second = two_blobs()
    overlap = sitk.LabelOverlapMeasuresImageFilter()
    overlap.Execute(as_sitk(first, (1, 1, 1)), as_sitk(second, (1, 1, 1)))
    for label, score in dice(first, second).items():
        assert score == pytest.approx(overlap.GetDiceCoefficient(label), abs=1e-12)


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.7, 1.3, 2.5)])
def test_hd95_against_the_distance_maps_of_simpleitk(spacing: tuple[float, ...]) -> None:
    first, second = two_blobs()
    for label in (1, 2):
        masks = [as_sitk(labels, spacing) == label for labels in (first, second)]
        rims = [sitk.LabelContour(mask, fullyConnected=False) for mask in masks]
        maps = [sitk.SignedMaurerDistanceMap(rim, squaredDistance=False, useImageSpacing=True) for rim in rims]
        there, back = (
            np.abs(sitk.GetArrayFromImage(maps[b]))[sitk.GetArrayFromImage(rims[a]) > 0] for a, b in ((0, 1), (1, 0))
        )
        expected = max(np.percentile(there, 95), np.percentile(back, 95))
        assert hd95(first, second, label, spacing=spacing) == pytest.approx(expected, abs=1e-5)


def test_hd95_of_a_slab_moved_along_its_normal() -> None:
    """Every point of each face lies exactly 3 voxels of 2 mm from the other, so the 95th percentile is 6 mm."""
    first, second = (torch.zeros(1, 1, 20, 8, 8, dtype=torch.int32) for _ in range(2))
    first[:, :, 4], second[:, :, 7] = 1, 1
    assert hd95(first, second, 1, spacing=(2, 5, 5)) == 6


def test_target_registration_error_of_a_translation() -> None:
    shift = Affine.translation(torch.tensor([[0.1, 0.0, -0.2]], dtype=torch.float64))
    landmarks = torch.rand(1, 7, 3, dtype=torch.float64)
    error = target_registration_error(shift, landmarks, landmarks, size=(100, 50, 200))
    assert torch.allclose(error, torch.tensor(math.hypot(10, 40), dtype=torch.float64))
    assert target_registration_error(shift, landmarks, shift(landmarks)).max() < 1e-12


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_jacobian_of_an_affine_map(dim: int) -> None:
    matrix = torch.eye(dim, dtype=torch.float64) + 0.2 * torch.randn(dim, dim, dtype=torch.float64)
    affine = Affine.from_parts(matrix[None], torch.zeros(1, dim, dtype=torch.float64))
    image = texture(*(6, 7, 8)[:dim])
    determinants = jacobian_determinant(affine, image)
    assert determinants.shape == (1, *(n - 2 for n in image.shape[2:]))
    assert torch.allclose(determinants, torch.linalg.det(matrix))
    assert folding(affine, image) == 0
    assert sd_log_jacobian(determinants) < 1e-12


def test_a_fold_made_by_hand() -> None:
    """x ↦ x − 0.5 in one slab of a 1-D image: the map runs backwards where the slab begins."""
    image = texture(22)
    displacement = torch.zeros(1, 1, 22, dtype=torch.float64)
    displacement[..., 10:] = -0.5
    # Central differences over the step see it at voxels 9 and 10, of the 20 inner ones.
    assert folding(DisplacementField(displacement), image) == pytest.approx(10)
    assert sd_log_jacobian(jacobian_determinant(DisplacementField(displacement), image)) > 1


def wavy(shape: tuple[int, ...]) -> np.ndarray:
    """A smooth displacement in voxels with folds: (*shape, 3)."""
    rng = np.random.default_rng(0)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    waves = [np.sin(index @ rng.uniform(0.2, 0.5, 3) + rng.uniform(0, 6)) for _ in range(3)]
    return 2.5 * np.stack(waves, axis=-1)


def test_determinants_against_simpleitk() -> None:
    shape, spacing = (12, 13, 11), (1.5, 0.8, 2.0)
    field = wavy(shape) * spacing
    vectors = sitk.GetImageFromArray(np.ascontiguousarray(field.transpose(2, 1, 0, 3)), isVector=True)
    vectors.SetSpacing(spacing)
    expected = sitk.GetArrayFromImage(sitk.DisplacementFieldJacobianDeterminant(vectors)).T[1:-1, 1:-1, 1:-1]
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    world = torch.from_numpy(index * spacing + field)[None]
    ours = determinant_per_voxel(world)[0].numpy() / math.prod(spacing)
    assert (expected < 0).any()
    assert np.allclose(ours, expected, atol=1e-5)


def test_sd_log_jacobian_by_learn2reg_s_definition() -> None:
    """np.gradient of a displacement in voxels, plus one on the diagonal; two layers off; log of det + 3."""
    shape = (12, 13, 11)
    field = wavy(shape)
    jacobian = np.stack([np.stack(np.gradient(field[..., i]), axis=-1) for i in range(3)], axis=-2) + np.eye(3)
    determinants = np.linalg.det(jacobian)[2:-2, 2:-2, 2:-2]
    expected = np.log((determinants + 3).clip(1e-9, 1e9)).std()
    unit = torch.from_numpy(field / (np.array(shape) - 1)).movedim(-1, 0)[None]
    ours = jacobian_determinant(DisplacementField(unit), texture(*shape))
    assert sd_log_jacobian(ours) == pytest.approx(expected, rel=1e-6)
    plain = np.log(determinants.clip(1e-9, 1e9)).std()
    assert sd_log_jacobian(ours, shift=0) == pytest.approx(plain, rel=1e-6)


def test_inverse_consistency_of_a_map_and_a_wrong_inverse() -> None:
    image = texture(11, 21)
    forward = Affine.translation(torch.tensor([[0.1, 0.2]], dtype=torch.float64))
    assert inverse_consistency(forward, forward.inverse(), image).max() < 1e-12
    wrong = inverse_consistency(forward, Identity(), image, spacing=(2, 1))
    assert torch.allclose(wrong, torch.full_like(voxel_points(image)[..., 0], math.hypot(2 * 1, 1 * 4)))


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"the first label map has shape .* but the second has"):
        dice(torch.zeros(1, 1, 4), torch.zeros(1, 1, 5))
    with pytest.raises(ValueError, match="expected at least 3 voxels a side"):
        jacobian_determinant(Identity(), texture(2, 5))
    with pytest.raises(ValueError, match="expected one item and one channel"):
        hd95(torch.ones(2, 1, 4), torch.ones(2, 1, 4), 1)


def test_mean_surface_distance_is_the_mean_over_both_surfaces() -> None:
    torch.manual_seed(0)
    first = (torch.rand(1, 1, 7, 6, 5) > 0.5).long()
    second = (torch.rand(1, 1, 7, 6, 5) > 0.5).long()
    spacing = torch.tensor([1.0, 2.0, 0.5])

    def points(labels: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(labels[0, 0], (1,) * 6)
        kept = [
            voxel
            for voxel in labels[0, 0].nonzero()
            if any(
                not padded[tuple((voxel + 1 + sign * torch.eye(3).long()[axis]).tolist())]
                for axis in range(3)
                for sign in (-1, 1)
            )
        ]
        return torch.stack(kept) * spacing

    apart = torch.cdist(points(first), points(second))
    expected = torch.cat([apart.amin(1), apart.amin(0)]).mean()
    assert mean_surface_distance(first, second, 1, spacing=spacing.tolist()) == pytest.approx(float(expected), rel=1e-4)
    assert math.isnan(mean_surface_distance(first, torch.zeros_like(first), 1))
