"""Scans that are turned against each other: common cubic voxels, the look of `model="auto"`, and how rotations are
learnt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SMALL

from carlreg import Registration, gradicon, preparation, register
from carlreg.explain import explain
from carlreg.files import images
from carlreg.files.images import Image, map_points
from carlreg.geometry import resizing
from carlreg.geometry.fitting import about_centre, random_rotation
from carlreg.geometry.jacobian import determinant
from carlreg.geometry.transforms import Identity, warp
from carlreg.model.algorithms import ClosedFormXi
from carlreg.model.encoder import Encoder, Handedness, axis_rotations, rotate_grid
from carlreg.model.files import describe, load, save
from carlreg.model.loaded import LoadedModel, find_model, load_model
from carlreg.model.zoo import carl_rot
from carlreg.objective.losses import diffusion, lncc, nearness
from carlreg.preparation import Frame, common_voxel, prepare_pair
from carlreg.registration.rotation_search import TRIED, RigidMatch, many_rotations, search_rotation
from carlreg.synthesis import random_anatomy

CPU = torch.device("cpu")


def ball(shape: tuple[int, ...], affine: np.ndarray, centre: tuple[float, ...], radius: float) -> Image:
    """A smooth ball at a point of the world, in millimetres."""
    grid = np.moveaxis(np.indices(shape), 0, -1)
    away = np.linalg.norm(map_points(affine, grid) - np.array(centre), axis=-1)
    return Image((100 * np.clip(1.2 - away / radius, 0, 1)).astype(np.float32), affine)


def centre_of(image: Image) -> np.ndarray:
    weight = image.data / image.data.sum()
    points = map_points(image.affine, np.moveaxis(np.indices(image.shape), 0, -1))
    return np.asarray((weight[..., None] * points).sum(axis=tuple(range(image.dim))))


# ---- common voxels --------------------------------------------------------------------------------------------------


def test_a_frame_reads_a_ramp_where_it_says_and_nothing_beyond() -> None:
    data = torch.arange(40, dtype=torch.float64).reshape(1, 1, 40, 1).expand(1, 1, 40, 30).contiguous()
    seen = Frame((11, 9), (17.25, 14.0), (2.5, 1.0)).resample(data)[0, 0]
    want = 17.25 + 2.5 * (torch.arange(11, dtype=torch.float64) - 5)
    assert torch.allclose(seen, want[:, None].expand(11, 9))
    assert Frame.whole((30, 20)).resample(data[..., :30, :20]).equal(data[..., :30, :20])
    wide = Frame((40, 40), (9.5, 9.5), (1.0, 1.0)).resample(torch.ones(1, 1, 20, 20))[0, 0]
    assert wide[10:30, 10:30].min() == 1
    assert wide.sum() == 400
    labels = Frame((40, 40), (9.5, 9.5), (0.5, 1.0)).resample_labels(torch.full((1, 1, 20, 20), 7, dtype=torch.uint8))
    assert labels.dtype == torch.uint8
    assert torch.equal(labels[0, 0], F.pad(torch.full((40, 20), 7, dtype=torch.uint8), (10, 10)))


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.7, 2.5, 1.3)])
def test_framed_images_lie_where_they_lay(spacing: tuple[float, ...]) -> None:
    """Both scans get cubic voxels of one size, for any storage order, and world positions do not change."""
    model = LoadedModel(ClosedFormXi(3), (48, 48, 48), {}, voxel=2.0)
    shape = tuple(int(80 / mm) for mm in spacing)
    oblique = np.eye(4)
    tilted = np.linalg.qr(np.eye(3) + 0.2 * np.random.default_rng(1).normal(size=(3, 3)))[0]
    oblique[:3, :3] = tilted * np.sign(np.diag(tilted)) * np.array(spacing)
    oblique[:3, 3] = (-30, 10, 5)
    plain = np.diag([-1.2, 1.2, 1.2, 1.0])
    pair = (
        ball(shape, oblique, tuple(map_points(oblique, [n * 0.4 for n in shape])), 28),
        ball((60, 60, 60), plain, (-33.0, 31.0, 36.0), 28),
    )
    prepared = prepare_pair(*pair, model, CPU)
    for scan, seen in zip(pair, prepared, strict=True):
        assert tuple(seen.tensor.shape) == (1, 1, 48, 48, 48)
        assert np.allclose(seen.image.spacing, 2.0)
        shown = Image(seen.tensor[0, 0].numpy(), seen.image.affine)
        assert np.abs(centre_of(shown) - centre_of(scan)).max() < 0.1
        # In the middle of the cube, up to half a voxel of the scan.
        assert np.abs(map_points(seen.image.unit_to_world(), [0.5] * 3) - centre_of(scan)).max() < max(spacing)


def test_empty_margins_are_left_away_wherever_the_body_lies() -> None:
    """A body in a much larger image is resampled as large as in one that it fills, and the same at any whole shift."""
    model = LoadedModel(ClosedFormXi(3), (32, 32, 32), {})
    affine = np.diag([1.5, 2.0, 1.0, 1.0])
    body = ball((50, 50, 40), affine, (37.0, 50.0, 20.0), 24)  # wider than the image's third axis
    far = np.pad(body.data, ((37, 3), (0, 70), (0, 0)))
    other = np.pad(body.data, ((9, 31), (41, 29), (0, 0)))
    there = affine.copy()
    there[:3, 3] = map_points(affine, (-37, 0, 0))
    seen, moved = prepare_pair(Image(far, there), Image(other, affine), model, CPU)
    assert (seen.tensor - moved.tensor).abs().max() < 1e-5
    for scan in (seen, moved):
        shown = (scan.tensor > 0.05)[0, 0].nonzero()
        for axis in range(2):
            filled = int(shown[:, axis].max() - shown[:, axis].min() + 1)
            assert filled / 32 == pytest.approx(0.9, abs=2 / 32)
        assert scan.image.spacing[2] * 31 == pytest.approx(39.0)  # whole
    here = Image(seen.tensor[0, 0].numpy(), seen.image.affine)
    assert np.abs(centre_of(here) - centre_of(body)).max() < 0.1  # it stays where it is


def test_narrow_margins_stay() -> None:
    """One side of the fixed scan is cut, so that of the moving one is cut, too, though it is nearly full; and none is
    for a model that wants whole images, or if both fill more than two thirds."""
    model = LoadedModel(ClosedFormXi(3), (32, 32, 32), {})
    scans = []
    for filled in (30, 35, 48):
        data = np.zeros((50, 50, 50), np.float32)
        data[:filled] = 100 + np.arange(50)
        scans.append(Image(data, np.diag([-1.0, -1.0, 1.0, 1.0])))
    whole = [resizing.resize(preparation.preprocess(scan)[0], (32, 32, 32)) for scan in scans]
    for pair, sort, cut in (
        ((0, 2), model, True),
        ((1, 2), model, False),
        ((0, 2), replace(model, keeps_margins=True), False),
    ):
        for number, seen in zip(pair, prepare_pair(*(scans[n] for n in pair), sort, CPU), strict=True):
            shown = int((seen.tensor[0, 0, :, 16, 16] > 0.05).sum())
            assert torch.equal(seen.tensor, whole[number]) == (not cut)
            assert shown / 32 == pytest.approx(0.9 if cut else (30, 35, 48)[number] / 50, abs=2 / 32)
            assert seen.crop_note == ("without empty margins" if cut else "whole")
            assert seen.sides == ((round((30, 35, 48)[number] / 0.9), 50, 50) if cut else (50, 50, 50))


def test_through_a_first_guess_both_are_cut_alike() -> None:
    """The initial transform is the identity between the network's inputs, though the moving scan is smaller."""
    model = LoadedModel(gradicon(3, 2, **SMALL).eval(), (16, 16, 16), {})
    fixed = ball((40, 40, 40), np.eye(4), (20, 20, 20), 9)
    moving = ball((40, 40, 40), np.eye(4), (26, 20, 20), 5)
    guess = np.eye(4)
    guess[0, 3] = 6
    answer = register(fixed=fixed, moving=moving, model=model, initial_transform=guess, io_iterations=0, device="cpu")
    assert answer.settings["inputs"]["fixed"]["seen"] == "without empty margins"
    points = np.array([[20.0, 20.0, 20.0], [15.0, 24.0, 18.0]])
    assert np.abs(answer.transform(points) - points - (6, 0, 0)).max() < 1e-3  # this network finds nothing


def test_a_small_scan_in_a_large_image_is_a_small_scan() -> None:
    model = LoadedModel(ClosedFormXi(3), (32, 32, 32), {})
    scans = [ball(shape, np.eye(4), (30, 30, 30), 9) for shape in ((60, 60, 60), (42, 42, 42))]
    seen = [prepare_pair(scan, scan, model, CPU).fixed for scan in scans]
    assert seen[0].sides == seen[1].sides
    assert max(seen[0].sides) < 30


def test_nearly_nothing_is_seen_with_some_room() -> None:
    data = np.zeros((30, 30, 30), np.float32)
    data[12, 14, 15], data[13, 14, 15] = 100, 50
    scan = Image(data, np.eye(4))
    seen, _ = prepare_pair(scan, scan, LoadedModel(ClosedFormXi(3), (16, 16, 16), {}), CPU)
    assert seen.tensor.min() < 0.05 < 0.3 < seen.tensor.max()


def test_networks_of_the_authors_see_whole_images(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for about, whole in (({}, False), ({"view": "whole"}, True)):
        save(gradicon(3, 2, **SMALL), path, metadata={"grid": "16 16 16", **about})
        assert load_model(path, "cpu").keeps_margins == whole


def test_a_mask_is_no_margin() -> None:
    """Voxels inside a mask are never cropped, and the mask stays aligned with its image."""
    model = LoadedModel(ClosedFormXi(3), (32, 32, 32), {})
    scan = ball((40, 40, 40), np.eye(4), (12, 12, 12), 7)
    data = np.zeros(scan.shape, np.uint8)
    data[9:16, 9:16, 9:25] = 1
    _, seen = prepare_pair(scan, scan, model, CPU, moving_mask=replace(scan, data=data))
    assert seen.mask is not None
    assert float(seen.mask.sum()) * np.prod(seen.image.spacing) == pytest.approx(data.sum(), rel=0.15)
    want = centre_of(replace(scan, data=data))
    assert np.abs(centre_of(Image(seen.mask[0, 0].numpy(), seen.image.affine)) - want).max() < 0.5


def test_where_empty_margins_lie_does_not_matter() -> None:
    """The answer is the same map of the world."""
    made = random_anatomy((24, 24, 24), generator=torch.Generator().manual_seed(0), body=(0.42, 0.46))
    fixed, moving = (Image(image[0, 0].numpy(), np.eye(4)) for image in (made.fixed, made.moving))
    model = LoadedModel(gradicon(3, 2, **SMALL).eval(), (16, 16, 16), {})
    answers = []
    for margins in (((15, 15),) * 3, ((3, 27), (25, 5), (15, 15))):
        origin = np.eye(4)
        origin[:3, 3] = [-before for before, _ in margins]
        scan = Image(np.pad(moving.data, margins), origin)
        answer = register(fixed=fixed, moving=scan, model=model, io_iterations=5, over="fields", device="cpu")
        answers.append(answer.transform(np.array([[5.0, 12.0, 12.0], [12.0, 10.0, 15.0], [17.0, 15.0, 7.0]])))
        assert answer.settings["inputs"]["moving"]["seen"] == "without empty margins"
        assert answer.warped.shape == fixed.shape
    assert np.abs(answers[0] - answers[1]).max() < 1e-3


@pytest.mark.parametrize(
    ("extents", "voxel"),
    [((150.0, 180.0), 2.0), ((96.0, 100.0), 2.0), ((40.0, 35.0), 40 / 81.6), ((180.0, 400.0), 400 / 81.6)],
)
def test_voxels_are_the_usual_ones_unless_the_scans_are_too_small_or_too_wide(
    extents: tuple[float, ...], voxel: float
) -> None:
    assert common_voxel(extents, 2.0, 96) == pytest.approx(voxel)


def test_a_mask_is_framed_along() -> None:
    model = LoadedModel(ClosedFormXi(3), (24, 24, 24), {}, voxel=2.0)
    scan = ball((40, 40, 40), np.eye(4), (20, 20, 20), 15)
    mask = replace(scan, data=(scan.data > 50).astype(np.uint8))
    _, seen = prepare_pair(scan, scan, model, CPU, moving_mask=mask)
    assert seen.mask is not None
    inside = seen.mask.sum() * 8
    assert 1 <= inside / mask.data.sum() < 1.3  # half a voxel of the grid at each side


def test_a_file_that_names_a_voxel_without_a_grid_is_refused(tmp_path: Path) -> None:
    small = carl_rot(3, 2, width=8, unet_down=(4, 4), unet_up=(4, 4))
    for about in ({"voxel": "2"}, {"voxel": "-2", "grid": "16 16 16"}, {"voxel": "2 2", "grid": "16 16 16"}):
        save(small, tmp_path / "model.safetensors", metadata=about)
        with pytest.raises(ValueError, match="voxel"):
            load_model(tmp_path / "model.safetensors", "cpu")


# ---- how rotations are learnt -----------------------------------------------------------------------------


def test_nearness_has_a_slope_where_all_points_go_to_one_and_diffusion_has_none() -> None:
    axes = torch.meshgrid(*[torch.linspace(0, 1, 9, dtype=torch.float64)] * 3, indexing="ij")
    to_one_point = (0.5 - torch.stack(axes))[None].requires_grad_()
    inside = (slice(None), slice(None), *[slice(1, -1)] * 3)
    (slope,) = torch.autograd.grad(diffusion(to_one_point), to_one_point)
    assert slope[inside].abs().max() < 1e-12
    (slope,) = torch.autograd.grad(nearness(to_one_point), to_one_point)
    assert (slope[inside] * to_one_point[inside]).sum() > 0
    assert nearness(torch.tensor([3.0, 4.0, 0.0]).reshape(1, 3, 1, 1, 1).expand(1, 3, 2, 2, 2)) == 25


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_determinants_are_determinants(dim: int) -> None:
    matrices = torch.randn(50, dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    assert torch.allclose(determinant(matrices.unbind(-1)), torch.linalg.det(matrices))


def sides_of(features: torch.Tensor) -> torch.Tensor:
    """The value that `Handedness` adds to the first channel: one determinant, unscaled."""
    dim = features.dim() - 2
    layer = Handedness(dim, features.shape[1], count=1).to(features.dtype).eval()
    torch.nn.init.ones_(layer.mix.weight)
    torch.nn.init.zeros_(layer.mix.bias)
    return (layer(features) - features)[:, :1]


def test_sides_of_half_precision_features_are_as_good_as_those_features() -> None:
    """Determinants are taken in float32: products of small differences would otherwise be noise."""
    smooth = torch.linspace(0, 8, 12)[:, None, None] + torch.rand(1, 3, 12, 12, 12, generator=torch.manual_seed(0))
    features = smooth.bfloat16()
    layer = Handedness(3, 3, count=1).eval()
    torch.nn.init.ones_(layer.mix.weight)
    torch.nn.init.zeros_(layer.mix.bias)
    added = []
    layer.mix.register_forward_hook(lambda _, given, __: added.append(given[0]))
    layer(features.float())
    layer.bfloat16()
    layer.norm.float()
    layer(features)
    exact, fast = added
    assert fast.dtype == torch.bfloat16
    assert torch.equal(fast, exact.bfloat16())
    assert exact.std() > 0.05


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_sides_of_linear_features_are_their_determinant(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    slopes = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    places = torch.stack(torch.meshgrid(*[torch.arange(9, dtype=torch.float64)] * dim, indexing="ij"))
    features = torch.einsum("cd,d...->c...", slopes, places)[None]
    inside = (0, 0, *[slice(2, -2)] * dim)
    # Differences are over two voxels to either side, so twice the slopes; 1e-5 is BatchNorm's.
    assert torch.allclose(sides_of(features)[inside], 2**dim * torch.linalg.det(slopes), rtol=1e-5)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_sides_turn_with_the_image_and_change_sign_in_a_mirror(dim: int) -> None:
    features = torch.randn(1, dim, *[7] * dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sides = sides_of(features)
    for turn in axis_rotations(dim, "quarter"):
        assert torch.allclose(sides_of(rotate_grid(features, *turn)), rotate_grid(sides, *turn))
    assert torch.allclose(sides_of(features.flip(2)), -sides.flip(2))
    assert sides.abs().max() > 0.1


def test_an_encoder_with_sides_reaches_as_far_as_it_says_and_is_kept_in_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = Encoder(2, width=8, blocks=2, dilations=(1, 2), handed=4).double().eval()
    image = torch.rand(1, 1, 41, 41, dtype=torch.float64)
    other = image.clone()
    other[0, 0, 20, 20] += 1
    rows, columns = (encoder(image) - encoder(other)).detach().abs().amax(dim=(0, 1)).nonzero().T
    assert encoder.reach == 1 + 2 * 3 + 2
    assert (int(rows.min()), int(rows.max())) == (20 - encoder.reach, 20 + encoder.reach)
    assert (int(columns.min()), int(columns.max())) == (20 - encoder.reach, 20 + encoder.reach)
    model = carl_rot(2, 2, width=8, handed=2, unet_down=(4, 4), unet_up=(4, 4)).eval()
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert len(list(model.parameters())) == len(list(again.parameters()))
    # A network without is described as it was before there were any: older runs go on, older versions read the file.
    assert "handed" not in json.dumps(describe(carl_rot(2, 2, width=8, unet_down=(4, 4), unet_up=(4, 4))))
    with pytest.raises(ValueError, match="3 determinants of 3 channels each need 9 channels; the encoder has 8"):
        Encoder(3, width=8, handed=3)


# ---- a look ---------------------------------------------------------------------------------------------------------


def rotation(degrees: float, plane: tuple[int, int], dim: int = 3) -> torch.Tensor:
    linear = torch.eye(dim, dtype=torch.float64)
    (i, j), angle = plane, math.radians(degrees)
    linear[i, i] = linear[j, j] = math.cos(angle)
    linear[j, i], linear[i, j] = math.sin(angle), -math.sin(angle)
    return linear


@pytest.fixture(scope="module")
def anatomy() -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one random body, in the same contrast, that fits into the image."""
    made = random_anatomy(
        (32, 32, 32),
        generator=torch.Generator().manual_seed(3),
        body=(0.3, 0.4),
        shift=0.03,
        same_contrast=1.0,
        slope=0.3,
    )
    return made.moving, made.fixed


@pytest.fixture(scope="module")
def straight(anatomy: tuple[torch.Tensor, torch.Tensor]) -> RigidMatch:
    return search_rotation(*anatomy)


def test_rotations_cover_all_rotations() -> None:
    """Every rotation is within 20° of a candidate, in 2-D within 2.5°; every candidate is a rotation."""
    for dim, least in ((2, 2.6), (3, 20.0)):
        tried = many_rotations(TRIED[dim], dim)
        assert torch.allclose(tried @ tried.mT, torch.eye(dim, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(torch.linalg.det(tried), torch.ones(len(tried), dtype=torch.float64))
        any_ = random_rotation((9,) * dim, 300, like=tried, generator=torch.Generator().manual_seed(0))
        trace = torch.einsum("nij,mij->nm", any_.matrix[:, :, :dim], tried)
        angle = ((trace - dim + 2) / 2).clamp(-1, 1).acos().amin(dim=1)
        assert torch.rad2deg(angle).max() < least


@pytest.mark.parametrize(("degrees", "plane"), [(45, (0, 1)), (100, (1, 2)), (180, (0, 2))])
def test_a_look_finds_how_an_image_is_turned(
    anatomy: tuple[torch.Tensor, torch.Tensor], straight: RigidMatch, degrees: float, plane: tuple[int, int]
) -> None:
    moving, fixed = anatomy
    assert straight.degrees < 15
    by = about_centre(rotation(degrees, plane)[None], moving.shape[2:], like=moving)
    seen = search_rotation(warp(moving, by, like=moving, outside="zeros"), fixed)
    # M ∘ R is turned by R⁻¹: the look of the turned image is R⁻¹ after the look of the straight one.
    want = torch.linalg.inv(rotation(degrees, plane)).float() @ straight.transform.matrix[0, :, :3]
    apart = (torch.trace(want.mT @ seen.transform.matrix[0, :, :3]) - 1) / 2
    assert math.degrees(math.acos(min(1.0, float(apart)))) < 6
    assert seen.correlation > 0.8 * straight.correlation
    assert seen.correlation > 1.1 * seen.upright_correlation


def test_a_look_works_in_the_plane_and_between_different_shapes() -> None:
    i, j = np.mgrid[:64, :80]
    picture = np.zeros((64, 80), np.float32)
    for y, x, r, value in ((30, 40, 18, 0.4), (24, 46, 6, 0.5), (38, 34, 4, 0.6), (34, 50, 3, 0.3)):
        picture += value * (np.hypot(i - y, j - x) < r)
    fixed = torch.from_numpy(picture)[None, None]
    by = about_centre(rotation(130, (0, 1), 2)[None], (64, 80), like=fixed)
    moving = F.pad(warp(fixed, by, like=fixed, outside="zeros"), (5, 3, 2, 8))
    seen = search_rotation(moving, fixed)
    assert seen.degrees == pytest.approx(130, abs=2)
    missed = [(warp(moving, map_, like=fixed) - fixed).abs().mean() for map_ in (seen.transform, Identity())]
    assert missed[0] < 0.2 * missed[1]


def drawing() -> torch.Tensor:
    """Discs on a black background, without any rotational symmetry."""
    i, j = torch.meshgrid(torch.arange(40.0), torch.arange(40.0), indexing="ij")
    discs = ((20, 20, 12, 0.4), (15, 24, 4, 0.5), (26, 16, 3, 0.6), (22, 27, 2, 0.3))
    return sum(value * ((i - y).hypot(j - x) < r).float() for y, x, r, value in discs)[None, None]  # type: ignore[return-value, misc]


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.double(),
        lambda image: 1000 * image - 1024,  # Hounsfield units
        lambda image: torch.cat([image, image], dim=1),
        lambda image: image.half(),
    ],
    ids=["double", "negative", "channels", "half"],
)
def test_a_look_takes_what_images_there_are(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fixed = drawing()
    by = about_centre(rotation(70, (0, 1), 2)[None], (40, 40), like=fixed)
    turned = warp(fixed, by, like=fixed, outside="zeros")
    want = search_rotation(turned, fixed)
    assert want.degrees == pytest.approx(70, abs=2)
    assert want.is_rotated
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        seen = search_rotation(change(turned), change(fixed))
    assert seen.degrees == pytest.approx(want.degrees, abs=1)


def test_images_that_are_alike_as_they_are_are_not_turned() -> None:
    fixed = drawing()
    seen = search_rotation(fixed, fixed)
    assert seen.degrees < 1
    assert not seen.is_rotated
    # Nothing is known of images without a difference, or of one another's negative: nothing is turned.
    assert not search_rotation(torch.zeros_like(fixed), fixed).is_rotated
    assert not search_rotation(fixed, 1 - fixed).is_rotated


def test_bad_images_are_not_looked_at() -> None:
    with pytest.raises(ValueError, match="one 2-D or 3-D image each"):
        search_rotation(torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8))
    with pytest.raises(ValueError, match="moving"):
        search_rotation(torch.full((1, 1, 8, 8), math.nan), torch.rand(1, 1, 8, 8))


# ---- auto -----------------------------------------------------------------------------------------------------------


def in_ras(tensor: torch.Tensor) -> Image:
    """Voxels of 6 mm whose axes run to the right, to the front and up."""
    return Image(tensor[0, 0].numpy(), np.diag([-6.0, -6.0, 6.0, 1.0]))


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    """ "base" and "auto" around a network that does nothing: what is found is found by the search."""
    auto = load_model("auto", "cpu")
    assert (auto.source, auto.searches_rotation) == (find_model("base"), True)
    torch.manual_seed(0)
    small = {"network": gradicon(3, 2, **SMALL).eval(), "once": None, "grid": (24, 24, 24), "fine_grid": None}
    return replace(auto, searches_rotation=False, **small), replace(auto, **small)


def test_auto_leaves_upright_scans_alone_and_turns_others_back(
    anatomy: tuple[torch.Tensor, torch.Tensor], models: tuple[LoadedModel, LoadedModel]
) -> None:
    moving, fixed = anatomy
    options = {"fixed": in_ras(fixed), "io_iterations": 0, "device": "cpu", "confidence": "off"}
    base, auto = (register(moving=in_ras(moving), model=model, **options) for model in models)
    assert base.settings["look"] is None
    assert auto.settings["look"]["turned_back"] is False
    points = map_points(auto.fixed.affine, np.random.default_rng(0).uniform(8, 24, (200, 3)))
    assert np.array_equal(base.transform(points), auto.transform(points))

    by = about_centre(rotation(120, (0, 1))[None], moving.shape[2:], like=moving)
    turned = warp(moving, by, like=moving, outside="zeros")
    lost, found = (register(moving=in_ras(turned), model=model, **options) for model in models)
    assert found.settings["look"]["turned_back"] is True
    assert found.settings["look"]["degrees"] == pytest.approx(120, abs=15)

    def alike(result: Registration) -> float:
        warped = torch.from_numpy(result.warped.data)[None, None]
        return 1 - float(lncc(warped, fixed))

    assert alike(found) > 0.85 * alike(base)
    assert alike(found) > alike(lost) + 0.1
    # Both ways, and through the file's parts: T⁻¹ ∘ T is the identity.
    assert np.abs(found.inverse(found.transform(points)) - points).max() < 2


def test_auto_goes_on_from_a_first_guess(
    anatomy: tuple[torch.Tensor, torch.Tensor], models: tuple[LoadedModel, LoadedModel]
) -> None:
    """After a right initial transform there is no rotation left to find; after a wrong one the rest is found."""
    moving, fixed = anatomy
    by = about_centre(rotation(90, (0, 1))[None], moving.shape[2:], like=moving)
    turned, straight = in_ras(warp(moving, by, like=moving, outside="zeros")), in_ras(moving)
    unit = np.vstack([by.inverse().matrix[0].numpy(), [[0, 0, 0, 1]]])
    right = turned.unit_to_world() @ unit @ straight.world_to_unit()
    wrong = np.eye(4)
    wrong[:3, 3] = (6, -8, 4)
    options = {"fixed": in_ras(fixed), "transform": "rigid", "device": "cpu"}
    labels = Image((in_ras(fixed).data > 0.3).astype(np.uint8), in_ras(fixed).affine)
    options |= {"moving": turned, "fixed_seg": labels, "moving_seg": labels, "model": models[1]}
    found = [register(initial_transform=guess, **options) for guess in (right, wrong, None)]
    assert [one.settings["look"]["turned_back"] for one in found] == [False, True, True]
    points = map_points(straight.affine, np.random.default_rng(0).uniform(11, 21, (200, 3)))
    for one in found[:2]:
        assert np.linalg.norm(one.transform(points) - found[2].transform(points), axis=-1).mean() < 12  # 2 voxels
    # "Before" is the guess that was given, not what the look made of it.
    assert found[2].metrics["dice_before"] == pytest.approx(1.0)
    assert found[1].metrics["dice_before"] < 1.0


def test_auto_cannot_be_explained(anatomy: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="not a model of its own"):
        explain(fixed=in_ras(anatomy[1]), moving=in_ras(anatomy[0]), model="auto", device="cpu")


def test_auto_is_no_single_model() -> None:
    with pytest.raises(ValueError, match="expected carl-base"):
        find_model("auto")


# ---- carl-rot -------------------------------------------------------------------------------------------------------

BRAINS = Path(__file__).parents[2] / "shared" / "data" / "brain" / "val"


@pytest.mark.skipif(not BRAINS.exists(), reason="needs the brains, which do not come with the package")
def test_the_shipped_network_turns_its_answer_with_a_brain() -> None:
    """Φ[M ∘ W, F] = W⁻¹ ∘ Φ[M, F] for W any rotation: nearly, over the brain, by the network alone."""
    model = replace(load_model("rot", "cpu"), grid=(48, 48, 48), voxel=4.0)
    scans = [images.read(BRAINS / f"{name}.nii.gz") for name in ("1101", "1104")]
    fixed, moving = (scan.tensor for scan in prepare_pair(*scans, model, CPU))
    by = random_rotation((48, 48, 48), 1, like=fixed, generator=torch.Generator().manual_seed(1))
    assert math.degrees(math.acos((float(torch.trace(by.linear[0])) - 1) / 2)) > 60
    turned = warp(moving, by, like=moving, outside="zeros")
    with torch.no_grad():
        upright, answer = (model.network(image, fixed) for image in (moving, turned))
    inside = fixed[0, 0] > 0.1
    points = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, 48)] * 3, indexing="ij"), dim=-1)[inside][None, ::50]
    apart = (by(answer(points)) - upright(points)).norm(dim=-1) * 188
    assert apart.median() < 4  # millimetres
    assert (apart > 20).float().mean() < 0.05
