"""Losses against direct sums and known answers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import texture
from torch import Tensor

from carlreg import Affine, DisplacementField, Identity, diffusion, lncc, lncc2, mind, registration_loss, ssd
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.objective.losses import (
    SIMILARITIES,
    folds,
    gaussian_blur,
    gradicon,
    gradicon_on_grid,
    jittered_points,
    label_loss,
    local_correlation,
    mind_ssc,
)
from carlreg.objective.metrics import dice


def test_lncc_against_a_direct_sum() -> None:
    """Weighted correlation in a 17 × 17 Gaussian window, written out for a few voxels; zeros outside the image."""
    first, second = texture(23, 26)[0, 0], texture(23, 26)[0, 0]
    taps = [math.exp(-0.5 * (k / 4) ** 2) for k in range(-8, 9)]
    total = sum(taps)
    correlation = local_correlation(first[None, None], second[None, None])[0, 0]
    for row, column in [(0, 0), (11, 13), (22, 3)]:
        sums = dict.fromkeys(("a", "b", "aa", "bb", "ab"), 0.0)
        for i, j in itertools.product(range(-8, 9), repeat=2):
            if 0 <= row + i < 23 and 0 <= column + j < 26:
                weight = taps[i + 8] * taps[j + 8] / total**2
                a, b = float(first[row + i, column + j]), float(second[row + i, column + j])
                for name, value in (("a", a), ("b", b), ("aa", a * a), ("bb", b * b), ("ab", a * b)):
                    sums[name] += weight * value
        va, vb = (max(sums[n * 2] - sums[n] ** 2, 0) + 1e-5 for n in "ab")
        assert float(correlation[row, column]) == pytest.approx(
            (sums["ab"] - sums["a"] * sums["b"]) / math.sqrt(va * vb)
        )
    assert float(lncc(first[None, None], second[None, None])) == pytest.approx(1 - float(correlation.mean()))


def test_lncc_far_from_zero() -> None:
    """A CT in HU, in float32: as in float64, and equal images give nearly 0."""
    image = (1000 * texture(24, 24, 24) - 1000).float()
    other = (1000 * texture(24, 24, 24) - 1000).float()
    for second in (image, other):
        assert float(lncc(image, second)) == pytest.approx(float(lncc(image.double(), second.double())), abs=1e-3)
    inside = torch.zeros_like(image)
    inside[..., 8:-8, 8:-8, 8:-8] = 1
    assert float(lncc(image, image, mask=inside)) < 1e-3
    assert local_correlation(image, other).abs().max() < 1.001


def test_the_loss_respects_masks_and_what_is_outside() -> None:
    moving, fixed = texture(20, 20), texture(20, 20)
    shift = Affine.translation(torch.tensor([[0.4, 0.0]], dtype=torch.float64))
    mask = torch.zeros_like(moving)
    mask[..., :7] = 1

    def similarity(**options: object) -> float:
        return float(registration_loss(shift, Identity(), moving, fixed, **options).similarity)

    values = [similarity(), similarity(moving_mask=mask), similarity(fixed_mask=mask), similarity(outside="zeros")]
    assert len({round(value, 8) for value in values}) == 4


def test_mind_of_a_blank_image_has_gradients() -> None:
    blank = torch.zeros(1, 1, 12, 12, requires_grad=True)
    mind(blank, texture(12, 12, dtype=torch.float32)).backward()
    assert torch.isfinite(blank.grad).all()


def test_blur_preserves_constants_inside_and_is_separable() -> None:
    ones = torch.ones(1, 1, 40, 30, dtype=torch.float64)
    assert (gaussian_blur(ones, 4)[..., 8:-8, 8:-8] - 1).abs().max() < 1e-12
    impulse = torch.zeros(1, 1, 41, 41, dtype=torch.float64)
    impulse[..., 20, 20] = 1
    blurred = gaussian_blur(impulse, 2)[0, 0]
    profile = blurred[20] / blurred[20].sum()
    assert torch.allclose(blurred, profile[:, None] * profile)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_similarities_prefer_equal_images(dim: int) -> None:
    image, other = texture(*(24,) * dim), texture(*(24,) * dim)
    for name, similarity in SIMILARITIES.items():
        if name == "mind" and dim == 1:
            continue
        assert float(similarity(image, image)) < 2e-3, name
        assert float(similarity(other, image)) > float(similarity(image, image)) + 0.01, name


def test_what_each_similarity_is_blind_to() -> None:
    image = texture(32, 32)
    inside = torch.zeros_like(image)
    inside[..., 8:-8, 8:-8] = 1  # nearer to the border, windows see the zeros outside
    assert float(lncc(3 * image + 7, image, mask=inside)) < 1e-3  # brightness and contrast
    assert float(lncc(-image, image)) > 1.99
    assert float(lncc2(-image, image)) < 1e-3  # inverted contrast
    assert float(mind(1 - image, image)) < 1e-12
    assert float(ssd(image + 2, image)) == pytest.approx(4)


def test_mind_against_a_direct_sum() -> None:
    """MIND-SSC of one interior voxel in 2-D: box-averaged squared differences of neighbours at right angles."""
    image = texture(20, 20)
    row, column, radius, dilation = 9, 11, 2, 2
    offsets = {(a, s): tuple(s * dilation * (a == b) for b in range(2)) for a in range(2) for s in (-1, 1)}
    pairs = [(p, q) for p, q in itertools.combinations(offsets, 2) if p[0] != q[0]]
    assert len(pairs) == 4

    def distances(r: int, c: int) -> Tensor:
        values = []
        for p, q in pairs:
            patch = [
                (
                    image[0, 0, r + i + offsets[p][0], c + j + offsets[p][1]]
                    - image[0, 0, r + i + offsets[q][0], c + j + offsets[q][1]]
                )
                ** 2
                for i, j in itertools.product(range(-radius, radius + 1), repeat=2)
            ]
            values.append(torch.stack(patch).mean())
        distance = torch.stack(values)
        return distance - distance.min()

    here = distances(row, column)
    expected = torch.exp(-here / here.mean())  # the clamp to the image's average does not bite in plain noise
    assert torch.allclose(mind_ssc(image)[0, :, row, column], expected)
    assert mind_ssc(texture(9, 9, 9)).shape == (1, 12, 9, 9, 9)


def test_masks_restrict_the_average() -> None:
    first, second = texture(20, 20).repeat(2, 1, 1, 1), texture(20, 20).repeat(2, 1, 1, 1)
    mask = torch.zeros(2, 1, 20, 20)
    mask[0, :, :5] = 1
    mask[1, :, 3, 4] = 7
    difference = (first - second).square()
    expected = (difference[0, :, :5].mean() + difference[1, 0, 3, 4]) / 2
    assert float(ssd(first, second, mask=mask)) == pytest.approx(float(expected))
    for similarity in SIMILARITIES.values():
        everywhere = similarity(first, second, mask=torch.ones(2, 1, 20, 20))
        assert float(everywhere) == pytest.approx(float(similarity(first, second)))
    with pytest.raises(ValueError, match="mask is empty"):
        ssd(first, second, mask=torch.zeros(2, 1, 20, 20))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1, 20, 19\)"):
        lncc(first, second, mask=mask[..., :-1])


# ---- regularity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_diffusion_of_a_linear_map_is_its_frobenius_norm(dim: int) -> None:
    """‖∇φ − I‖²_F / D, whatever the grid: here φ(x) = (I + G) x."""
    gradient = torch.randn(dim, dim, dtype=torch.float64)
    points = voxel_points(texture(*(7, 9, 12)[:dim]))
    displacement = (points @ gradient.mT).movedim(-1, 1)
    assert float(diffusion(displacement)) == pytest.approx(float(gradient.square().sum()) / dim)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gradicon_of_affine_maps_is_the_frobenius_norm_of_their_product(dim: int) -> None:
    first, second = (Affine(torch.randn(1, dim, dim + 1, dtype=torch.float64)) for _ in range(2))
    points = torch.rand(1, 40, dim, dtype=torch.float64)
    product = (first.linear @ second.linear)[0] - torch.eye(dim, dtype=torch.float64)
    assert float(gradicon(first, second, points)) == pytest.approx(float(product.square().sum()) / dim, rel=1e-6)
    assert float(gradicon(first, first.inverse(), points)) < 1e-18


def test_gradicon_allows_what_diffusion_forbids() -> None:
    """A large rotation and its inverse: no GradICON cost; the diffusion cost is large."""
    angle = torch.tensor(1.2, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])[None]
    centre = torch.full((1, 2), 0.5, dtype=torch.float64)
    rotation = Affine.from_parts(turn, centre - (turn @ centre[..., None])[..., 0])
    image = texture(16, 16)
    loss = registration_loss(rotation, rotation.inverse(), image, image)
    assert float(loss.regularity) < 1e-15
    loss = registration_loss(rotation, rotation.inverse(), image, image, regularity="diffusion")
    assert float(loss.regularity) == pytest.approx(2 * (1 - math.cos(1.2)))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gradicon_on_the_grid_agrees_with_gradicon(dim: int) -> None:
    """On smooth maps a one-voxel difference is the derivative; on affine ones it is so exactly."""
    image = texture(*(24,) * dim)
    first, second = (Affine(torch.randn(1, dim, dim + 1, dtype=torch.float64)) for _ in range(2))
    expected = gradicon(first, second, jittered_points(image))
    assert float(gradicon_on_grid(first, second, image)) == pytest.approx(float(expected), rel=1e-6)
    x = voxel_points(image)
    wave = DisplacementField((0.05 * torch.sin(3 * x + 1)).movedim(-1, 1))
    expected = gradicon(wave, wave, x.clamp(0.1, 0.9))
    assert float(gradicon_on_grid(wave, wave, image)) == pytest.approx(float(expected), rel=0.1)


def test_jittered_points_are_the_voxels_on_average() -> None:
    image = texture(60, 50)
    points = jittered_points(image, generator=torch.Generator().manual_seed(1))
    noise = (points - voxel_points(image)) * torch.tensor([59.0, 49.0], dtype=torch.float64)
    assert noise.mean().abs() < 0.05
    assert noise.std(dim=(0, 1, 2)).tolist() == pytest.approx([1, 1], abs=0.05)
    again = jittered_points(image, generator=torch.Generator().manual_seed(1))
    assert torch.equal(points, again)


# ---- the training loss ----------------------------------------------------------------------------------------------


def test_registration_loss_adds_up() -> None:
    moving, fixed = texture(24, 20), texture(22, 26)
    ab = DisplacementField(0.05 * torch.randn(1, 2, 22, 26, dtype=torch.float64))
    ba = DisplacementField(0.05 * torch.randn(1, 2, 24, 20, dtype=torch.float64))
    loss = registration_loss(ab, ba, moving, fixed, weight=0.7, exact=True, generator=torch.Generator().manual_seed(0))
    assert float(loss.total) == pytest.approx(float(loss.similarity) + 0.7 * float(loss.regularity))
    points = jittered_points(moving, generator=torch.Generator().manual_seed(0))
    assert float(loss.regularity) == pytest.approx(float(gradicon(ab, ba, points)))
    assert loss.floats().keys() == {"total", "similarity", "regularity"}


def test_registration_loss_of_a_perfect_answer() -> None:
    image = texture(24, 24)
    loss = registration_loss(Identity(), Identity(), image, image)
    assert float(loss.total) < 5e-3


@pytest.mark.parametrize("similarity", [*SIMILARITIES, lambda a, b, *, mask=None: (a - b).abs().mean()])
def test_any_similarity_gives_gradients(similarity: object) -> None:
    moving, fixed = texture(16, 16), texture(16, 16)
    displacement = (0.01 * torch.randn(1, 2, 16, 16, dtype=torch.float64)).requires_grad_()
    registration_loss(
        DisplacementField(displacement), Identity(), moving, fixed, similarity=similarity
    ).total.backward()
    assert displacement.grad.abs().max() > 0


def test_bad_input_is_named() -> None:
    image = texture(16, 16)
    with pytest.raises(ValueError, match="unknown similarity 'ncc'; expected one of"):
        registration_loss(Identity(), Identity(), image, image, similarity="ncc")
    with pytest.raises(ValueError, match="unknown regularity 'bending'"):
        registration_loss(Identity(), Identity(), image, image, regularity="bending")
    with pytest.raises(ValueError, match=r"first image has shape .* but second image has"):
        lncc(image, texture(16, 15))
    with pytest.raises(TypeError, match=r"second image has dtype torch.int64"):
        ssd(image, image.long())
    with pytest.raises(ValueError, match="a 1-D image has none"):
        mind(texture(30), texture(30))
    with pytest.raises(ValueError, match=r"displacement has shape \(1, 3, 4, 4\)"):
        diffusion(torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_folds_against_the_determinant(dim: int) -> None:
    """det ∇φ of a linear map is det A everywhere; the penalty of a smooth map without folds is 0."""
    torch.manual_seed(dim)
    image = torch.zeros(1, 1, *(9, 7, 8)[:dim])
    points = voxel_points(image)
    for _ in range(5):
        matrix = torch.randn(dim, dim)
        displacement = (points @ matrix.mT - points).movedim(-1, 1)
        expected = (0.1 - torch.linalg.det(matrix)).clamp(min=0)
        assert folds(displacement) == pytest.approx(float(expected), abs=1e-4)
    assert folds(0.05 * torch.sin(3 * points).movedim(-1, 1)) == 0


def test_folds_lead_out_of_a_fold() -> None:
    """Gradient descent on the penalty alone removes a fold."""
    torch.manual_seed(0)
    field = torch.zeros(1, 2, 16, 16)
    field[:, 0, 7] = 0.2  # one row is pushed past its neighbours
    field.requires_grad_()
    image = torch.zeros(1, 1, 16, 16)
    assert folding(DisplacementField(field), image) > 0
    optimizer = torch.optim.Adam([field], lr=0.003)
    for _ in range(200):
        optimizer.zero_grad()
        folds(field).backward()
        optimizer.step()
    assert folds(field) < 1e-3
    assert folding(DisplacementField(field), image) == 0


def test_the_label_loss_is_dice_where_nothing_is_interpolated() -> None:
    """Labels shifted by whole voxels, with one label missing on either side."""
    labels = torch.zeros(2, 1, 12, 10, dtype=torch.long)
    labels[0, 0, 2:6, 3:8], labels[0, 0, 7:10, 1:4], labels[1, 0, 4:9, 4:9] = 1, 2, 3
    maps = torch.cat([labels == value for value in (1, 2, 3)], dim=1).float()
    fixed_labels = labels.roll(1, dims=2)
    fixed_labels[0][fixed_labels[0] == 2] = 0
    fixed = torch.cat([fixed_labels == value for value in (1, 2, 3)], dim=1).float()
    found = label_loss(maps, fixed, voxel_points(fixed).expand(2, -1, -1, -1))
    expected = [dice(labels[i : i + 1], fixed_labels[i : i + 1], [value])[value] for i, value in ((0, 1), (1, 3))]
    assert float(found) == pytest.approx(1 - sum(expected) / 2, abs=1e-6)
    assert float(label_loss(maps, maps, voxel_points(maps).expand(2, -1, -1, -1))) == pytest.approx(0, abs=1e-6)
    assert float(label_loss(maps, torch.zeros_like(maps), voxel_points(maps).expand(2, -1, -1, -1))) == 0


def test_labels_pull_images_without_contrast_into_place() -> None:
    """With constant images, the labels alone move the field towards the true shift, in both directions."""
    blank = torch.zeros(1, 1, 24, 24)
    moving, fixed = blank.clone(), blank.clone()
    moving[..., 8:16, 8:16], fixed[..., 8:16, 10:18] = 1, 1
    there, back = (torch.zeros(1, 2, 1, 1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([there, back], lr=5e-3)
    for _ in range(60):
        fields = [DisplacementField(shift.expand(1, 2, 24, 24)) for shift in (there, back)]
        loss = registration_loss(*fields, blank, blank, similarity="ssd", labels=(moving, fixed), label_weight=2.0)
        assert loss.label_loss is not None
        expected = loss.similarity + 1.5 * loss.regularity + 2 * loss.label_loss
        assert torch.allclose(loss.total, expected)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert float(there[0, 1]) * 23 == pytest.approx(-2, abs=0.3)
    assert float(back[0, 1]) * 23 == pytest.approx(2, abs=0.3)
