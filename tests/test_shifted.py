"""The experiment on shifted brains, with stand-in networks whose results are known; and the training's random pairs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg import Affine, DisplacementField, Identity, Transform
from carlreg.evaluation.sources import Result
from carlreg.files.images import Image
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.transforms import warp

ROOT = Path(__file__).parent.parent
SIDE = 24


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import experiments/moved/grid.py; unload it afterwards, since other experiments use the same module names."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "base"))
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "moved"))
    for name in ("grid", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import grid

    yield grid
    for name in ("grid", "train"):
        sys.modules.pop(name, None)


@pytest.fixture
def data(grid: ModuleType, tmp_path: Path) -> Any:
    """Three brains: balls with two labels at different positions, with 4 empty voxels around them."""
    packed = {}
    index = np.stack(np.meshgrid(*3 * [np.arange(SIDE)], indexing="ij"), axis=-1)
    for number, split in enumerate(("val", "val", "val", "train", "train")):
        distance = np.linalg.norm(index - [11 + number % 2, 12, 11], axis=-1)
        labels = np.where(distance < 4, 1, np.where(distance < 7, 2, 0)).astype(np.uint8)
        for name in ("brain", "abdomen") if split == "train" else ("brain",):
            packed[f"{name}/{split}/{number}"] = (100 * labels).astype(np.uint8)
            packed[f"{name}/{split}/{number}/labels"] = labels
    np.savez(tmp_path / "pack.npz", **packed)
    return grid.Data(tmp_path / "pack.npz", SIDE, torch.device("cpu"))


def centres_onto_one_another(moving: Tensor, fixed: Tensor) -> Transform:
    """A stand-in that is exactly equivariant to every shift that keeps the images in view."""
    points = voxel_points(fixed)[0]
    there, here = (
        torch.stack([(one[0, ..., None] * points).sum((0, 1, 2)) / one.sum() for one in images])
        for images in (moving, fixed)
    )
    return Affine.from_parts(torch.eye(3).expand(len(fixed), 3, 3), there - here)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_equivariant_answer_scores_the_same_wherever_the_brain_is(grid: ModuleType, data: Any, axis: int) -> None:
    pairs = data.pairs("brain", "val")
    rows = [
        {"axis": "a", "voxels": voxels, **grid.sweep(centres_onto_one_another, data, pairs, axis, voxels, 48)}
        for voxels in (0, 3, 7, 12)
    ]
    assert all(share == 1 for row in rows for share in row["visible"])
    found = grid.in_view(rows)
    assert found["cases"] == 3 * len(pairs) == 18
    assert found["at_rest"] > 0.95
    assert found["mean_absolute_change"] < 1e-6
    still = grid.sweep(lambda moving, fixed: Identity(), data, pairs, axis, 12, 48)
    assert max(still["dice"]) < 0.1  # nobody follows


def test_what_leaves_the_view_is_lost_to_the_network_and_not_to_the_score(grid: ModuleType, data: Any) -> None:
    """The stand-in knows the shift, so labels come back whole, even where the image has lost them."""
    pairs = data.pairs("brain", "val")

    def told(moving: Tensor, fixed: Tensor) -> Transform:
        by = torch.tensor([[10 / (SIDE - 1), 0, 0]])
        return Affine.from_parts(torch.eye(3)[None], by)

    found = grid.sweep(told, data, pairs, 0, 10, SIDE)
    at_rest = grid.sweep(lambda moving, fixed: Identity(), data, pairs, 0, 0, SIDE)
    assert all(0.2 < share < 0.9 for share in found["visible"])
    assert found["dice"] == pytest.approx(at_rest["dice"], abs=1e-6)
    assert grid.in_view([{"axis": "a", "voxels": 0, **at_rest}, {"axis": "a", "voxels": 10, **found}]) == {"cases": 0}


def test_a_network_sees_a_cube_on_its_own_grid(grid: ModuleType, data: Any) -> None:
    """Half as many voxels over the same cube; the score is that of the cube's own voxels."""
    pairs = data.pairs("brain", "val")
    seen = []

    def told(moving: Tensor, fixed: Tensor) -> Transform:
        seen.append(tuple(fixed.shape[2:]))
        return Affine.from_parts(torch.eye(3)[None], torch.tensor([[0.0, 6 / 47, 0.0]]))

    found = grid.sweep(told, data, pairs, 1, 6, 48, 24)
    at_rest = grid.sweep(lambda moving, fixed: Identity(), data, pairs, 1, 0, 48)
    assert set(seen) == {(24, 24, 24)}
    assert found["dice"] == pytest.approx(at_rest["dice"], abs=1e-6)


def test_a_network_sees_a_cube_without_its_margins(grid: ModuleType, data: Any) -> None:
    """However the cube is cut, and wherever the scan lies in it: shifted scans look the same, and an answer in the
    network's unit box is one of the cube's."""
    pairs = data.pairs("brain", "val")
    seen = []

    def told(moving: Tensor, fixed: Tensor) -> Transform:
        seen.append(moving)
        return Identity()

    at_rest, found = (grid.sweep(told, data, pairs, 1, shift, 64, 24, True) for shift in (0, 9))
    half = len(seen) // 2
    for still, moved in zip(seen[:half], seen[half:], strict=True):
        assert tuple(still.shape[2:]) == (24, 24, 24)
        assert (still - moved).abs().max() < 1e-4
    # The boxes around both scans are laid onto one another, so the shift is undone.
    assert found["dice"] == pytest.approx(at_rest["dice"], abs=1e-6)
    assert min(found["dice"]) > 0


def test_a_cube_is_cut_where_the_frame_says(grid: ModuleType) -> None:
    """One of two pairs is cropped along two axes, the other along none; positions agree with the returned map."""
    moving, fixed = torch.zeros(2, 1, 40, 40, 40), torch.zeros(2, 1, 40, 40, 40)
    moving[0, 0, 20:36, 2:38, 4:20] = torch.rand(16, 36, 16) + 0.1
    moving[1, 0, 2:38, 2:38, 2:38] = 1
    fixed[:, 0, 2:38, 2:38, 2:38] = 1
    cut = grid.cut_sides(moving, fixed)
    assert cut == [[True, False, True], [False, False, False]]
    seen, there, back = grid.at_grid(moving, 41, cut)
    read = warp(moving, there, like=seen, outside="zeros")
    assert (read - seen).abs().max() < 1e-4  # nothing shrinks, so nothing is averaged
    low, high = 39 * there(torch.tensor([[[0.0] * 3, [1.0] * 3]]).expand(2, 2, 3))[0]
    assert ((low + high) / 2).tolist() == pytest.approx([27.5, 19.5, 11.5], abs=1e-3)
    assert (high - low + 1).tolist() == pytest.approx([16 / 0.9, 40, 16 / 0.9], abs=1e-3)
    points = torch.rand(2, 50, 3)
    assert torch.allclose(back(there(points)), points, atol=1e-5)


def test_with_room_a_scan_is_smaller_whole_and_anywhere(data: Any) -> None:
    data.cropped = 1.0
    generator = torch.Generator().manual_seed(0)
    seen = torch.stack([data.affine_noise(generator, "abdomen", 1.8).matrix[0] for _ in range(300)])
    linear, middle = seen[:, :, :3], seen[:, :, :3].sum(-1) / 2 + seen[:, :, 3]
    assert torch.allclose(linear.mean(0), 1.8 * torch.eye(3), atol=0.05)  # along the cut axis, too: nothing is cut
    assert torch.allclose(middle.mean(0), torch.full((3,), 0.5), atol=0.05)
    plain = torch.stack([data.affine_noise(generator, "brain").matrix[0] for _ in range(300)])
    assert (middle.std(0) > 2 * (plain[:, :, :3].sum(-1) / 2 + plain[:, :, 3]).std(0)).all()


def test_abdomens_lose_slices_and_brains_do_not(data: Any) -> None:
    data.cropped = 1.0
    generator = torch.Generator().manual_seed(0)
    seen = {name: [data.affine_noise(generator, name).matrix[0] for _ in range(200)] for name in ("abdomen", "brain")}
    height = {name: torch.stack([matrix[2, 2] for matrix in found]) for name, found in seen.items()}
    assert 0.7 < height["abdomen"].mean() < 0.85  # between 0.55 and all of them are left
    assert 0.97 < height["brain"].mean() < 1.03
    middle = {
        name: torch.stack([matrix[2, :3].sum() / 2 + matrix[2, 3] for matrix in found]) for name, found in seen.items()
    }
    assert abs(middle["abdomen"].mean() - 0.5) < 0.05  # from both ends
    assert middle["abdomen"].std() > 1.2 * middle["brain"].std()  # and not from both alike


def test_another_program_as_if_it_were_a_network(grid: ModuleType, data: Any) -> None:
    """A program that shifts by whole millimetres, which are voxels."""

    def told(pair: Any, fixed: Image, moving: Image) -> Result:
        assert fixed.shape == moving.shape == (SIDE,) * 3
        return Result(lambda points: points + np.array([0.0, 5.0, 0.0]))

    phi = grid.by_program(told)(torch.rand(2, 1, SIDE, SIDE, SIDE), torch.rand(2, 1, SIDE, SIDE, SIDE))
    assert isinstance(phi, DisplacementField)
    expected = torch.tensor([0, 5 / (SIDE - 1), 0]).reshape(1, 3, 1, 1, 1).expand_as(phi.displacement)
    assert torch.allclose(phi.displacement, expected, atol=1e-6)
    found = grid.sweep(grid.by_program(told), data, data.pairs("brain", "val"), 1, 5, SIDE)
    at_rest = grid.sweep(lambda moving, fixed: Identity(), data, data.pairs("brain", "val"), 1, 0, SIDE)
    assert found["dice"] == pytest.approx(at_rest["dice"], abs=1e-6)
