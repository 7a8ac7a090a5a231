"""Regions that move but do not bend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import Registration, gradicon, register, save
from carlreg.cli import main
from carlreg.errors import InputError
from carlreg.files import images, world_transform
from carlreg.files.images import Image, from_array, map_points
from carlreg.files.world_transform import WorldTransform
from carlreg.objective.rigidity import Rigidity
from carlreg.objective.windows import Picture
from carlreg.registration.rigid_regions import make_rigid

pytest.importorskip("SimpleITK")
SHAPE, SPACING = (36, 36, 30), (2.0, 2.0, 2.5)


def test_a_rotation_costs_nothing_and_a_stretch_its_square() -> None:
    """Maps of mm: rigid ones have ∇φᵀ∇φ = 1, a stretch by s along an axis (s² − 1)², counted inside the region."""
    picture = Picture(torch.rand(1, 1, *SHAPE), None, SPACING)
    mask = torch.zeros(1, 1, *SHAPE)
    mask[..., 10:26, 10:26, 8:22] = 1
    stiff, none = Rigidity(mask, None, weight=3.0).between(picture, picture)
    assert none is None
    assert stiff is not None
    grid = picture.grid.double()
    size = torch.tensor(picture.size, dtype=torch.float64).reshape(1, 3, 1, 1, 1)
    angle = torch.tensor(0.3, dtype=torch.float64)
    turn = torch.eye(3, dtype=torch.float64)
    turn[:2, :2] = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])

    def mapped(linear: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,bjxyz->bixyz", linear, grid * size) / size + 0.1

    assert float(stiff(mapped(turn))) < 1e-8
    share = float(stiff.inside.sum()) / grid[0, 0].numel()
    assert 0.02 < share < 0.3
    stretch = torch.diag(torch.tensor([1.2, 1.0, 1.0], dtype=torch.float64))
    assert float(stiff(mapped(stretch))) == pytest.approx(3 * share * (1.2**2 - 1) ** 2, rel=1e-4)


def grid_points(image: Image) -> np.ndarray:
    index = np.stack(np.meshgrid(*(np.arange(n) for n in image.shape), indexing="ij"), axis=-1)
    return map_points(image.affine, index.astype(float))


def missing_rigidity(transform: Any, points: np.ndarray) -> float:
    """How far, at most, a map takes points from the closest rigid map, in mm, by Kabsch's algorithm."""
    here, there = points - points.mean(0), transform(points)
    centred = there - there.mean(0)
    left, _, right = np.linalg.svd(centred.T @ here)
    turn = left @ np.diag([1, 1, np.linalg.det(left @ right)]) @ right
    return float(np.linalg.norm(centred - here @ turn.T, axis=1).max())


def test_regions_become_rigid_and_the_rest_stays() -> None:
    affine = np.diag([*SPACING, 1.0])
    affine[:3, 3] = (-30, 12, 40)
    fixed = Image(np.zeros(SHAPE, np.uint8), affine)
    points = grid_points(fixed)
    bend = np.stack([3 * np.sin(points[..., (axis + 1) % 3] / 9) for axis in range(3)], axis=-1).astype(np.float32)
    linear = np.eye(4)
    linear[:3, 3] = (5, -4, 3)
    world = WorldTransform(linear, bend, fixed.index_to_world())
    regions = np.zeros(SHAPE, np.uint8)
    regions[6:12, 8:14, 6:12], regions[22:28, 20:27, 16:22] = 1, 2
    result, changed = make_rigid(world, fixed, Image(regions, affine), None)
    for value in (1, 2):
        assert missing_rigidity(world, points[regions == value]) > 1
        assert missing_rigidity(result, points[regions == value]) < 0.1 * min(SPACING)
    assert changed > 1
    assert world_transform.folds_percent(world_transform.jacobian_determinant(result, fixed)) == 0
    far = points[:, :, 28:].reshape(-1, 3)
    assert np.abs(result(far) - world(far)).max() < 0.6 * changed
    # Of the moving image: the points that land in the region are those that are mapped rigidly.
    there = Image(regions, affine)
    other, _ = make_rigid(world, fixed, None, there)
    landed = world_transform.apply(other, there, fixed, "nearest").data
    for value in (1, 2):
        assert missing_rigidity(other, points[landed == value]) < 0.1 * min(SPACING)


@pytest.fixture(scope="module")
def scans() -> tuple[Image, Image, Image, Image]:
    """A body with a hard ball and three soft ones; in the moving image everything is stretched but the hard ball, which
    is shifted. With labels: 1 is hard."""
    affine = np.diag([*SPACING, 1.0])
    fixed = Image(np.zeros(SHAPE, np.float32), affine)
    points, centre = grid_points(fixed), np.array([35.0, 35.0, 36.0])
    soft = np.array([[18.0, 20.0, 22.0], [52.0, 24.0, 50.0], [22.0, 52.0, 46.0]])

    def draw(hard: np.ndarray, balls: np.ndarray, stretch: np.ndarray) -> tuple[Image, Image]:
        labels = np.zeros(SHAPE, np.uint8)
        value = 200 + 60 * np.sin(points[..., 0] / 5) * np.sin(points[..., 1] / 6)
        inside = np.linalg.norm((points - centre) / (30 * stretch), axis=-1) < 1
        value = np.where(inside, value, 0)
        for number, ball in enumerate(balls, 2):
            labels[np.linalg.norm((points - ball) / stretch, axis=-1) < 8] = number
        labels[np.linalg.norm(points - hard, axis=-1) < 9] = 1
        value = value + 120 * labels + 30 * np.sin(np.linalg.norm(points - hard, axis=-1))
        return from_array(value.astype(np.float32), affine), from_array(labels, affine)

    stretch = np.array([1.15, 1.0, 0.9])
    one, first = draw(np.array([36.0, 34.0, 34.0]), soft, np.ones(3))
    two, second = draw(np.array([39.0, 36.0, 33.0]), centre + (soft - centre) * stretch, stretch)
    return one, two, first, second


def test_a_registration_with_a_rigid_region(
    scans: tuple[Image, Image, Image, Image], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside, the map is rigid within 0.1 voxels; nothing folds; the Dice elsewhere is not hurt."""
    fixed, moving, first, second = scans
    torch.manual_seed(0)
    model = tmp_path / "small.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "24 24 24"})
    hard = Image((first.data == 1).astype(np.uint8), first.affine)
    options: dict[str, Any] = {"fixed_seg": first, "moving_seg": second, "model": model, "io_iterations": 8}
    free = register(fixed=fixed, moving=moving, device="cpu", **options)
    kept = register(fixed=fixed, moving=moving, device="cpu", rigid_mask=hard, **options)
    inside = grid_points(fixed)[hard.data == 1]
    assert missing_rigidity(free.transform, inside) > 0.3 * min(SPACING)
    assert missing_rigidity(kept.transform, inside) < 0.1 * min(SPACING)
    assert kept.metrics["folds_percent"] == 0
    assert kept.metrics["rigid_correction_mm"] > 0

    def elsewhere(result: Registration) -> float:
        return float(np.mean([score for label, score in result.dice["after"].items() if label != 1]))

    assert elsewhere(kept) > elsewhere(free) - 0.02
    assert kept.dice["after"][1] > 0.8
    there = Image((second.data == 1).astype(np.uint8), second.affine)
    other = register(fixed=fixed, moving=moving, device="cpu", moving_rigid_mask=there, **options)
    landed = world_transform.apply(other.transform, there, fixed, "nearest").data
    assert missing_rigidity(other.transform, grid_points(fixed)[landed == 1]) < 0.1 * min(SPACING)
    # As a user types it, and with input that cannot be used.
    words = ["register", "--model", str(model), "--io-iterations", "2", "--no-html", "--rigid-mask"]
    for name, image in (("fixed", fixed), ("moving", moving), ("hard", hard)):
        images.write(image, tmp_path / f"{name}.nii.gz")
    words += [
        str(tmp_path / "hard.nii.gz"),
        "-f",
        str(tmp_path / "fixed.nii.gz"),
        "-m",
        str(tmp_path / "moving.nii.gz"),
    ]
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "no"), "--transform", "affine"]) == 1
    err = capsys.readouterr().err
    assert "rigid_mask was given with transform='affine'; expected 'deformable'" in err
    assert len(err.splitlines()) == 1
    empty = Image(np.zeros(SHAPE, np.uint8), hard.affine)
    with pytest.raises(InputError, match="is empty; expected a rigid region"):
        register(fixed=fixed, moving=moving, rigid_mask=empty, **options)
    speck = Image(np.zeros(SHAPE, np.uint8), hard.affine)
    speck.data[3, 3, 3] = 1
    with pytest.raises(InputError, match="covers 1 voxels of the fixed image; expected a larger rigid region"):
        register(fixed=fixed, moving=moving, rigid_mask=speck, **options)
