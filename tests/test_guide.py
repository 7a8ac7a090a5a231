"""Guide points: corresponding points that pull the optimisation of fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import Identity, gradicon, optimize_fields, register, save
from carlreg.cli import main
from carlreg.errors import InputError
from carlreg.files import images
from carlreg.files.images import Image, from_array, map_points
from carlreg.geometry.jacobian import folding
from carlreg.objective.guide import NEAR, Guide
from carlreg.objective.windows import Picture
from carlreg.show.viewer.scene import load_scene

OPTIONS: dict[str, Any] = {"io_iterations": 5, "io_sim": "lncc", "device": "cpu"}
SHIFT = np.array([3.0, -2.0, 2.0])


def smooth(*shape: int) -> torch.Tensor:
    """A smooth image (1, 1, *shape) from 0 to 1."""
    axes = [torch.linspace(0, 3 + 2 * n, side) for n, side in enumerate(shape)]
    points = torch.meshgrid(*axes, indexing="ij")
    value = sum(torch.sin(2 * one + n) for n, one in enumerate(points)) + torch.sin(points[0] * points[1])
    return ((value - value.min()) / (value.max() - value.min()))[None, None]


@pytest.mark.parametrize("shape", [(24, 20), (20, 24, 16)])
def test_the_loss_is_the_distance_of_the_points_from_their_partners(shape: tuple[int, ...]) -> None:
    """The identity leaves each point where it is: its distance to its partner, in mm, is known."""
    dim, spacing = len(shape), (1.5, 2.0, 3.0)[: len(shape)]
    picture = Picture(torch.rand(1, 1, *shape), None, spacing)
    points = torch.rand(5, dim) * 0.8 + 0.1
    partners = points + 0.05 * torch.rand(5, dim)
    pulls = Guide(points, partners, weight=7.0).between(picture, picture)
    loss = sum(float(pull(picture.grid)) for pull in pulls)
    apart = ((points - partners) * torch.tensor(picture.size)).norm(dim=1) / 1.5  # the smallest voxel
    expected = 2 * 7.0 * (((apart / NEAR) ** 2 + 1).sqrt() - 1).sum() * NEAR / np.prod(picture.control)
    assert loss == pytest.approx(float(expected), rel=1e-4)


def test_points_are_pulled_to_their_partners_and_other_places_stay() -> None:
    """Equal images, which would stay as they are: a point that is given another partner goes there, without folds."""
    image = smooth(40, 40, 40)
    points, partners = torch.tensor([[0.3, 0.3, 0.3]]), torch.tensor([[0.42, 0.3, 0.25]])
    options: dict[str, Any] = {"steps": 10, "levels": 3}
    alone = optimize_fields(Identity(), Identity(), image, image, **options)
    assert isinstance(alone.transform, Identity)
    found = optimize_fields(Identity(), Identity(), image, image, guide=Guide(points, partners), **options)
    assert 39 * float((found.transform(points[None]) - partners).norm()) < 1  # voxels; 5.1 before
    assert 39 * float((found.inverse(partners[None]) - points).norm()) < 1
    assert folding(found.transform, image) == 0
    far = torch.tensor([[[0.8, 0.8, 0.8]]])
    assert 39 * float((found.transform(far) - far).norm()) < 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that starts at the identity of the unit cubes."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": "16 16 16"})
    return path


@pytest.fixture(scope="module")
def pair() -> tuple[Image, Image]:
    """Two equal scans of which one lies elsewhere."""
    affine = np.diag([2.0, 2.0, 3.0, 1.0])
    affine[:3, 3] = (-30, 10, 5)
    other = affine.copy()
    other[:3, 3] += (20, 0, -10)
    data = (1000 * smooth(28, 30, 26)[0, 0].numpy()).astype(np.int16)
    return from_array(data, affine), from_array(data, other)


@pytest.fixture(scope="module")
def points(pair: tuple[Image, Image]) -> tuple[np.ndarray, np.ndarray]:
    """Places of the fixed image, and where they are to go: off the match of the images by `SHIFT` mm."""
    index = np.array([[10.0, 12.0, 9.0], [12.0, 12.0, 10.0]])
    fixed, moving = (map_points(image.index_to_world(), index) for image in pair)
    return fixed, moving + SHIFT


def missed(result: Any, points: tuple[np.ndarray, np.ndarray]) -> float:
    return float(np.linalg.norm(result.transform(points[0]) - points[1], axis=1).max())


def test_every_form_of_guide_points_is_the_same(
    pair: tuple[Image, Image], points: tuple[np.ndarray, np.ndarray], tmp_path: Path, model: Path
) -> None:
    """Arrays, a file of both in RAS, and two files, of which one holds voxel indices."""
    fixed, moving = pair
    given = register(fixed=fixed, moving=moving, guide=points, model=model, **OPTIONS)
    before, after = given.metrics["guide_before_max_mm"], given.metrics["guide_after_max_mm"]
    assert before == pytest.approx(np.linalg.norm(SHIFT + np.array([20, 0, -10])), rel=1e-6)
    assert after == pytest.approx(missed(given, points), abs=1e-6)
    assert after < 2
    alone = register(fixed=fixed, moving=moving, model=model, **OPTIONS)
    assert missed(alone, points) > 3
    ras = np.array([-1, -1, 1])
    table = ["name,fixed_r,fixed_a,fixed_s,moving_x,moving_y,moving_z"]
    for number, (a, b) in enumerate(zip(*points, strict=True)):
        table.append(",".join([f"p{number}", *(repr(float(x)) for x in (*(a * ras), *b))]))
    (tmp_path / "both.csv").write_text("\n".join(table) + "\n", encoding="utf-8")
    index = map_points(np.linalg.inv(fixed.affine), points[0])
    for name, header, rows in (("f", "i,j,k", index), ("m", "l,p,s", points[1])):
        lines = [",".join(map(repr, row)) for row in rows.tolist()]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    forms: list[dict[str, Any]] = [
        {"guide": tmp_path / "both.csv"},
        {"guide_fixed": tmp_path / "f.csv", "guide_moving": tmp_path / "m.csv"},
    ]
    for form in forms:
        other = register(fixed=fixed, moving=moving, **form, model=model, **OPTIONS)
        assert np.abs(other.transform(points[0]) - given.transform(points[0])).max() < 1e-2
        assert np.allclose(other.record.guide, given.record.guide, atol=1e-4)
    assert np.allclose(given.record.guide, np.hstack(points))
    assert load_scene(given.save(tmp_path / "out")).guide() == given.record.guide  # for a further correction
    assert not alone.record.guide


def test_an_initial_transform_and_a_guide(
    pair: tuple[Image, Image], points: tuple[np.ndarray, np.ndarray], model: Path
) -> None:
    """The moving image is resampled first: its guide points are mapped alike."""
    first = np.eye(4)
    first[:3, 3] = (18, 1, -9)
    fixed, moving = pair
    result = register(fixed=fixed, moving=moving, guide=points, initial_transform=first, model=model, **OPTIONS)
    assert missed(result, points) < 2


def test_the_command_line_takes_guide_points(
    pair: tuple[Image, Image],
    points: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["register", "--model", str(model), "--io-iterations", "3", "--guide", str(tmp_path / "points.csv")]
    for name, image in zip(("fixed", "moving"), pair, strict=True):
        images.write(image, tmp_path / f"{name}.nii.gz")
        words += [f"--{name}", str(tmp_path / f"{name}.nii.gz")]
    header = "fixed_x,fixed_y,fixed_z,moving_x,moving_y,moving_z"
    rows = [",".join(map(repr, [*a.tolist(), *b.tolist()])) for a, b in zip(*points, strict=True)]
    (tmp_path / "points.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    assert main([*words, "--out", str(tmp_path / "out"), "--no-html"]) == 0
    assert "guide points" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["inputs"]["guide"]["sha256"]
    assert report["metrics"]["guide_after_mm"] < report["metrics"]["guide_before_mm"]
    for more, expected in (
        (["--transform", "rigid"], "transform='rigid'"),
        (["--optimize", "weights"], "optimize='weights'"),
        (["--guide-fixed", "a.csv", "--guide-moving", "b.csv"], "expected one of them"),
    ):
        assert main([*words, *more, "--out", str(tmp_path / "other")]) == 1
        err = capsys.readouterr().err
        assert expected in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "other").exists()


def test_bad_guide_points_are_refused_in_one_line(pair: tuple[Image, Image], tmp_path: Path, model: Path) -> None:
    def refused(expected: str, **more: Any) -> None:
        with pytest.raises(InputError, match=expected):
            register(fixed=pair[0], moving=pair[1], model=model, **OPTIONS | more)

    centre = [map_points(image.affine, [[10.0, 10.0, 10.0]]) for image in pair]
    refused("1 of 1 guide points lie outside the fixed image; expected .* LPS", guide=(-10 * centre[0], centre[1]))
    refused("outside the moving image", guide=(centre[0], centre[1] + 1000))
    refused(r"shapes \(1, 3\) and \(2, 3\)", guide=(centre[0], np.repeat(centre[1], 2, axis=0)))
    refused("for one image only", guide_fixed=centre[0])
    refused("io_iterations=0", guide=centre, io_iterations=0)
    path = tmp_path / "points.csv"
    path.write_text("fixed_x,fixed_y,fixed_z,x,y,z\n1,2,3,4,5,6\n", encoding="utf-8")
    refused("expected also moving_x, moving_y, moving_z", guide=path)
    path.write_text("1,2,3,4,5,6\n", encoding="utf-8")
    refused("expected also fixed_x", guide=path)
    path.write_text("fixed_x,fixed_y,fixed_z,moving_x,moving_y,moving_z\n1,2,3,4,5\n", encoding="utf-8")
    refused("line 2: '1,2,3,4,5' is not a point", guide=path)
    refused("does not exist", guide=tmp_path / "none.csv")
    refused("not a text file of corresponding points", guide=tmp_path / "points.fcsv")
    with pytest.raises(TypeError, match="guide is a int"):
        register(fixed=pair[0], moving=pair[1], guide=3, model=model, **OPTIONS)
