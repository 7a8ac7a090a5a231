"""Registration without a network: the affine search, and `carl register --model none`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import carlreg
from carlreg.cli import main
from carlreg.errors import InputError
from carlreg.files import images, transform_files
from carlreg.files.images import Image
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.transforms import Affine, warp
from carlreg.registration.affine_search import Scan, search_affine


def blobs(shape: tuple[int, ...], spacing: tuple[float, ...], seed: int = 0) -> torch.Tensor:
    """(1, 1, *shape): an ellipsoid of smooth random texture in the middle of an empty image, from 0 to 1."""
    noise = torch.rand(
        1,
        1,
        *[max(3, round(n * mm / 7)) for n, mm in zip(shape, spacing, strict=True)],
        generator=torch.Generator().manual_seed(seed),
    )
    texture = torch.nn.functional.interpolate(noise, shape, mode=("bilinear", "trilinear")[len(shape) - 2])
    radius = ((voxel_points(texture) - 0.5) / torch.tensor([0.3, 0.36, 0.33][: len(shape)])).norm(dim=-1)[:, None]
    return texture.mul(0.7).add(0.3) * (1 - radius).mul(8).clamp(0, 1)


def truth(dim: int, degrees: float, scales: tuple[float, ...], shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A linear map in mm, and a translation."""
    angle = np.deg2rad(degrees)
    turn = np.eye(dim)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return torch.tensor(turn @ np.diag(scales[:dim])).float(), torch.full((dim,), shift)


def moved(
    fixed: torch.Tensor, spacing: tuple[float, ...], linear: torch.Tensor, shift: torch.Tensor
) -> tuple[torch.Tensor, Affine]:
    """An image for which y = A (x − centre) + centre + shift, in mm, is the map from `fixed`, and that map."""
    size = torch.tensor([(n - 1) * mm for n, mm in zip(fixed.shape[2:], spacing, strict=True)])
    unit = linear * size / size[:, None]
    half = torch.full_like(shift, 0.5)
    phi = Affine.from_parts(unit[None], (half + shift / size - unit @ half)[None])
    return warp(fixed, phi.inverse(), like=fixed, outside="zeros"), phi


def error(found: Affine, true: Affine, fixed: torch.Tensor, spacing: tuple[float, ...]) -> float:
    """The mean distance of two maps over the foreground, in mm."""
    points = voxel_points(fixed)[fixed[:, 0] > 0.05][None]
    size = torch.tensor([(n - 1) * mm for n, mm in zip(fixed.shape[2:], spacing, strict=True)])
    return float(((found(points) - true(points)) * size).norm(dim=-1).mean())


CASES = [((72, 80), (1.0, 1.0)), ((48, 44, 31), (1.0, 1.0, 1.5))]


@pytest.mark.parametrize(("shape", "spacing"), CASES)
@pytest.mark.parametrize("invert", [False, True])
def test_affine_truth_is_recovered_within_a_voxel(
    shape: tuple[int, ...], spacing: tuple[float, ...], invert: bool
) -> None:
    fixed = blobs(shape, spacing)
    moving, true = moved(fixed, spacing, *truth(len(shape), 12, (1.1, 0.9, 0.95), 3.0))
    assert error(Affine.translation(torch.zeros(1, len(shape))), true, fixed, spacing) > 3
    seen = torch.where(moving > 0.03, 1.3 - moving, 0) if invert else moving
    match = search_affine(Scan(seen, spacing), Scan(fixed, spacing))
    assert error(match.transform, true, fixed, spacing) < max(spacing)
    assert match.similarity > 0.5


def test_rigid_search_finds_a_rigid_map() -> None:
    shape, spacing = CASES[1]
    fixed = blobs(shape, spacing)
    moving, true = moved(fixed, spacing, *truth(3, 15, (1.0, 1.0, 1.0), 2.0))
    found = search_affine(Scan(moving, spacing), Scan(fixed, spacing), rigid=True).transform
    size = torch.tensor([47.0, 43.0, 45.0])
    linear = found.linear[0] * size[:, None] / size
    torch.testing.assert_close(linear @ linear.T, torch.eye(3), atol=1e-4, rtol=0)
    assert error(found, true, fixed, spacing) < 1


def test_a_mirror_image_is_not_matched_by_a_reflection() -> None:
    shape, spacing = CASES[1]
    fixed = blobs(shape, spacing)
    found = search_affine(Scan(fixed.flip(2), spacing), Scan(fixed, spacing)).transform
    assert float(torch.linalg.det(found.linear[0])) > 0


def scan(data: torch.Tensor, spacing: tuple[float, ...], origin: float = 0.0) -> Image:
    affine = np.diag([*spacing, 1.0])
    affine[:-1, -1] = origin
    return Image((255 * data[0, 0]).numpy().astype(np.float32), affine, "scan")


@pytest.mark.parametrize(("shape", "spacing"), CASES)
def test_identical_images_stay_as_they_are(shape: tuple[int, ...], spacing: tuple[float, ...]) -> None:
    image = scan(blobs(shape, spacing), spacing)
    result = carlreg.register(fixed=image, moving=image, model="none", device="cpu")
    points = np.random.default_rng(0).uniform(0, 30, (50, len(shape)))
    np.testing.assert_allclose(result.transform(points), points, atol=1e-3)


def test_the_command_registers_and_resumes_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, spacing = CASES[1]
    fixed = blobs(shape, spacing)
    moving, true = moved(fixed, spacing, *truth(3, 10, (1.1, 0.95, 1.0), 3.0))
    images.write(scan(fixed, spacing), tmp_path / "fixed.nii.gz")
    images.write(scan(moving, spacing, origin=200), tmp_path / "moving.nii.gz")  # headers do not overlap
    (tmp_path / "pairs.csv").write_text("name,fixed,moving\na,fixed.nii.gz,moving.nii.gz\n")
    words = ["register", "--pairs", str(tmp_path / "pairs.csv"), "--out", str(tmp_path / "out"), "--model", "none"]
    assert main([*words, "--device", "cpu"]) == 0
    report = json.loads((tmp_path / "out" / "a" / "report.json").read_text())
    assert report["model"] == {"name": "none"}
    assert report["look"]["likeness"] > 0.5
    found = transform_files.read(tmp_path / "out" / "a" / "transform.h5")
    points = voxel_points(fixed)[fixed[:, 0] > 0.2]
    size = torch.tensor([47.0, 43.0, 45.0])
    expected = (true(points[None])[0] * size).numpy() + 200
    assert np.linalg.norm(found((points * size).numpy()) - expected, axis=-1).mean() < 1
    assert main([*words, "--device", "cpu"]) == 0
    assert "1 were done already" in capsys.readouterr().err
    assert main([*words, "--device", "cpu", "--model", "default"]) == 1
    assert re.search("holds a cohort with .*none.*carl-base", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimize": "weights"}, "optimize='weights' needs a network"),
        ({"transform": "rigid", "fit_source": "attention"}, "fit_source='attention' needs"),
    ],
)
def test_options_that_need_a_network_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        carlreg.register(fixed="a.nii.gz", moving="b.nii.gz", model="none", **options)  # type: ignore[arg-type]


def test_2d_and_3d_are_not_registered() -> None:
    flat, volume = (scan(blobs(*case), case[1]) for case in CASES)
    with pytest.raises(InputError, match="the fixed image is 2-D and the moving one 3-D"):
        carlreg.register(fixed=flat, moving=volume, model="none")


def test_pictures_are_optimised_on_their_own_pixels() -> None:
    """Fine texture, and a wave that moves it by three pixels."""
    side = 448
    moving = blobs((side, side), (2.0, 2.0))
    points = voxel_points(moving)
    expected = points + 3 / side * torch.sin(4 * torch.pi * points.flip(-1))
    fixed = torch.nn.functional.grid_sample(moving, (2 * expected - 1).flip(-1), align_corners=True)
    result = carlreg.register(fixed=fixed[0, 0].numpy(), moving=moving[0, 0].numpy(), model="none", device="cpu")
    assert result.record.io_grid == [side, side]
    inside = fixed[0, 0] > 0.3
    there = result.transform(points[0][inside].numpy() * (side - 1))
    error = np.linalg.norm(there - expected[0][inside].numpy() * (side - 1), axis=1)
    assert error.mean() < 0.2  # 0.34 on 192 pixels a side


@pytest.mark.parametrize("slices", [5, 7])
def test_contrasts_of_few_slices_agree(slices: int) -> None:
    """A body that goes on beyond the first and the last slice, and the same 2 voxels further."""
    fixed = blobs((48, 48, 48), (1.0, 1.0, 1.0))[0, 0, :, :, 24 : 24 + slices].numpy()
    pair = {"fixed": fixed, "moving": 0.8 * np.roll(fixed, 2, axis=0)}
    result = carlreg.register(**pair, model="none", io_iterations=2, confidence="off", device="cpu")
    assert str(result.record.io_sim_reason).startswith("the contrasts agree")
