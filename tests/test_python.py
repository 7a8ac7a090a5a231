"""`register` and its result in Python, with the types that users have."""

from __future__ import annotations

import re
import subprocess
import sys
import types
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from conftest import SMALL

import carlreg
from carlreg import Registration, gradicon, preparation, register, save
from carlreg.errors import DependencyError, InputError
from carlreg.files import images, world_transform
from carlreg.files.images import Choice, Image, ImageError, as_image, from_array, map_points
from carlreg.files.results import Confidence
from carlreg.registration.picture import TITLES, slices
from carlreg.show.viewer.scene import load_scene

sitk = pytest.importorskip("SimpleITK")
nibabel = pytest.importorskip("nibabel")
from test_product import blobs, oblique  # noqa: E402

OPTIONS: dict[str, Any] = {"io_iterations": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": "16 16 16", "name": "small"})
    return path


@pytest.fixture(scope="module")
def pair() -> tuple[Image, Image]:
    """The same anatomy under two headers, (4, -3, 2) mm apart."""
    affine = oblique((1.5, 1.2, 2.0), (10, -20, 30))
    other = affine.copy()
    other[:3, 3] += (4, -3, 2)
    fixed = blobs((20, 22, 18), affine)
    return fixed, Image(fixed.data, other)


@pytest.fixture(scope="module")
def result(pair: tuple[Image, Image], model: Path) -> Registration:
    labels = [Image((image.data > 300).astype(np.uint8), image.affine) for image in pair]
    return register(fixed=pair[0], moving=pair[1], fixed_seg=labels[0], moving_seg=labels[1], model=model, **OPTIONS)


def test_a_result_prints_three_lines(result: Registration) -> None:
    first, second, third = repr(result).splitlines()
    assert first == "Registration of image to array, 20 × 22 × 18 voxels of 1.5 × 1.2 × 2 mm"
    assert re.fullmatch(r"deformable by small, [\d.]+ s on cpu", second)
    assert re.search(r"Dice 0\.\d+ before, 1\.000 after, 0\.000 % folds, SDlogJ 0\.000, inverse consistent", third)
    assert str(result) == repr(result)
    doubtful = Confidence(verdict="doubtful", expected_error_mm=4.04, reasons=["the network is unsure"])
    judged = replace(result, record=replace(result.record, confidence=doubtful))
    assert repr(judged).splitlines()[2].startswith("doubtful, expected error 4.0 mm; Dice 0.")
    assert "doubtful, expected error 4.0 mm" in judged._repr_html_()


def test_images_and_transforms_print_a_summary(result: Registration) -> None:
    """Not their voxels; the frame of coordinates is named."""
    summary = r"Image 'array': 20 × 22 × 18 voxels of 1.5 × 1.2 × 2 mm, \w+, first voxel at [-\d., ]+ \(LPS mm\)"
    assert re.fullmatch(summary, repr(result.fixed))
    head, *matrix = repr(result.transform).splitlines()
    assert head == (
        "3-D WorldTransform from fixed to moving points (LPS mm), affine after displacements on 20 × 22 × 18 points:"
    )
    assert len(matrix) == 4


def test_a_notebook_shows_a_picture_and_the_numbers(result: Registration) -> None:
    page = result._repr_html_()
    assert page.count('src="data:image/png;base64,') == 1
    assert f"<th>dice_after</th><td>{result.metrics['dice_after']:.4g}</td>" in page
    assert "http" not in page  # nothing is loaded from elsewhere
    for axis in range(3):
        fixed, before, after, board = slices(result, axis)
        assert fixed.shape == before.shape == after.shape == board.shape
        assert np.abs(after.astype(int) - fixed).mean() < 2 < np.abs(before.astype(int) - fixed).mean()
        assert (board == np.where(board == fixed, fixed, after)).all()
    axial, coronal, sagittal = (slices(result, axis)[0].shape for axis in (2, 1, 0))
    assert axial[1] == coronal[1]  # left to right, on square pixels
    assert coronal[0] == sagittal[0]


def test_each_image_of_a_picture_has_a_window_of_its_own_kind(result: Registration) -> None:
    """An MR image beside a CT is shown by its own range, whichever of the two is fixed."""
    fixed, moving = result.fixed, result.moving
    mr, after = slices(result)[0], slices(result)[2]
    hounsfield = [Image(image.data - np.float32(1000), image.affine) for image in (fixed, moving)]
    ct = slices(replace(result, fixed=hounsfield[0], moving=hounsfield[1]))[0]
    assert preparation.ct_pair(hounsfield[0], moving)[0] == (True, False)
    assert np.abs(mr.astype(int) - ct).mean() > 20  # the windows differ
    of_mr = slices(replace(result, fixed=hounsfield[0]))
    assert np.array_equal(of_mr[0], ct)
    assert np.array_equal(of_mr[2], after)
    of_ct = slices(replace(result, moving=hounsfield[1]))
    assert np.array_equal(of_ct[0], mr)
    assert np.abs(of_ct[2].astype(int) - ct).mean() < 2


def test_a_figure(result: Registration) -> None:
    pytest.importorskip("matplotlib")
    figure = result.plot()
    assert [place.get_title() for place in figure.axes[:4]] == [f"{title}, axial" for title in TITLES]
    assert len(figure.axes) == 12
    assert [figure.axes[row * 4].texts[0].get_text() for row in range(3)] == ["R", "R", "A"]  # as in the report


def test_warp_takes_what_register_takes(result: Registration, pair: tuple[Image, Image], tmp_path: Path) -> None:
    fixed, moving = pair
    expected = world_transform.apply(result.transform, moving, fixed).data
    images.write(moving, tmp_path / "moving.nii.gz")
    forms = [moving, moving.data, torch.from_numpy(moving.data)[None, None], moving.to_sitk(), moving.to_nibabel()]
    for form in [*forms, tmp_path / "moving.nii.gz"]:
        assert np.abs(result.warp(form).data.astype(int) - expected).max() <= 1
    labels = (moving.data > 300).astype(np.uint8) * 7
    warped = result.warp(labels)
    assert set(np.unique(warped.data)) == {0, 7}  # nearest by itself
    assert np.array_equal(warped.affine, fixed.affine)
    between = moving.affine.copy()
    between[:3, 3] += 0.5 * between[:3, 0]
    assert len(np.unique(result.warp(Image(labels, between), labels=False).data)) > 2
    back = result.warp(fixed, inverse=True)
    assert np.array_equal(back.affine, moving.affine)
    assert np.abs(back.data.astype(int) - moving.data).mean() < 2
    with pytest.raises(InputError, match=r"shape \(3, 3, 3\); expected the moving image's"):
        result.warp(np.zeros((3, 3, 3)))


def test_points_in_both_directions_and_frames(result: Registration, pair: tuple[Image, Image]) -> None:
    points = map_points(pair[0].affine, np.random.default_rng(0).uniform(3, 15, (10, 3)))
    moved = result.warp_points(points)
    assert np.allclose(moved, points + np.array([4, -3, 2]), atol=1e-2)
    assert np.allclose(result.warp_points(moved, "moving"), points, atol=1e-2)
    ras = np.array([-1, -1, 1])
    assert np.allclose(result.warp_points(points * ras, space="RAS"), moved * ras)
    with pytest.raises(InputError, match="unknown side 'here'"):
        result.warp_points(points, "here")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"points have shape \(10, 2\); expected \(N, 3\)"):
        result.warp_points(points[:, :2])
    with pytest.raises(InputError, match="points are a str that is not numbers"):
        result.warp_points("points.csv")  # type: ignore[arg-type]
    assert np.allclose(result.jacobian().data, 1, atol=1e-3)


def test_the_viewer_of_a_result_in_memory(result: Registration) -> None:
    viewer = result.view(browser=False)
    folder = Path(viewer.folder.name)
    try:
        with urllib.request.urlopen(viewer.url) as answer:
            assert answer.status == 200
        assert viewer.url in repr(viewer)
    finally:
        viewer.close()
    assert not folder.exists()


def test_the_viewer_finds_what_it_needs_to_register_again(tmp_path: Path, pair: tuple[Image, Image]) -> None:
    """The third time point of a 4-D file, and a mask, which is still a file."""
    series = np.stack([pair[0].data, pair[0].data, pair[1].data], axis=-1)
    nib.save(nib.Nifti1Image(series, np.diag([-1, -1, 1, 1]) @ pair[1].affine), tmp_path / "series.nii.gz")
    images.write(Image((pair[0].data > 300).astype(np.uint8), pair[0].affine), tmp_path / "mask.nii.gz")
    given: dict[str, Any] = {"model": "none", "transform": "rigid", "io_iterations": 0, "frame": 2}
    given["fixed_mask"] = tmp_path / "mask.nii.gz"
    result = register(fixed=pair[0], moving=tmp_path / "series.nii.gz", **given)
    viewer = result.view(browser=False)
    try:
        scene = load_scene(Path(viewer.folder.name) / "result")
        assert scene.notes == ()
        assert {"fixed", "moving"} <= set(scene.images)
        assert scene.images["moving"].shape == pair[1].shape
        assert scene.paths["fixed_mask"] == tmp_path / "mask.nii.gz"
    finally:
        viewer.close()


def test_images_of_other_libraries(pair: tuple[Image, Image]) -> None:
    """There and back, at the same places."""
    image = pair[0]
    assert np.array_equal(image.to_numpy(), image.data)
    theirs = image.to_nibabel()
    assert np.allclose(theirs.affine, np.diag([-1, -1, 1, 1]) @ image.affine)
    assert theirs.get_data_dtype() == image.data.dtype
    for other in (theirs, image.to_sitk()):
        again = as_image(other, "image")
        assert np.array_equal(again.data, image.data)
        assert np.allclose(again.affine, image.affine, atol=1e-4)
    plane = from_array(np.arange(12.0).reshape(3, 4), np.diag([2.0, 3.0, 1.0]))
    assert plane.to_nibabel().shape == (3, 4, 1)
    assert np.allclose(plane.to_nibabel().header.get_zooms()[:2], (2, 3))


@pytest.fixture
def ants(monkeypatch: pytest.MonkeyPatch) -> Any:
    """ANTsPy, or what it does with arrays and positions where it is not installed."""
    try:
        import ants
    except ImportError:

        def from_numpy(data: Any, **places: Any) -> Any:
            kept = data if data.dtype == np.uint8 else data.astype(np.uint32 if data.dtype.kind in "iu" else np.float32)
            dimension = len(places["spacing"])
            values = {"dimension": dimension, **places, "__module__": "ants.core", "numpy": lambda self: kept}
            return type("ANTsImage", (), values)()

        ants = types.SimpleNamespace(from_numpy=from_numpy)
        monkeypatch.setitem(sys.modules, "ants", ants)
    return ants


def test_ants_is_missing(pair: tuple[Image, Image], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ants", None)
    with pytest.raises(DependencyError, match="pip install antspyx"):
        pair[0].to_ants()


@pytest.mark.parametrize("kind", ["uint8", "int16", "int32", "int64", "uint64", "float32", "float64"])
def test_ants_keeps_values_and_positions(ants: Any, kind: str) -> None:
    """It would wrap what is neither a byte, nor uint32, nor floating point: -1000 HU became 4294966296."""
    low, high = (0, 255) if kind == "uint8" else (0, 2**33) if kind == "uint64" else (-1000, 3000)
    data = np.linspace(low, high, 60).reshape(3, 4, 5).astype(kind)
    mirrored = oblique((1.5, 1.2, 2.0), (10, -20, 30)) @ np.diag([-1.0, 1.0, 1.0, 1.0])
    image = from_array(data, mirrored)
    again = as_image(image.to_ants(), "image")
    assert np.allclose(again.data.astype(float), data.astype(float), rtol=1e-6)
    assert np.allclose(again.affine, mirrored, atol=1e-5)
    plane = from_array(data[0], np.array([[0.0, -2.0, 1.0], [3.0, 0.0, 2.0], [0.0, 0.0, 1.0]]))
    assert np.allclose(as_image(plane.to_ants(), "plane").affine, plane.affine)


def test_ants_images_with_components(ants: Any) -> None:
    """One is chosen, as of other images."""
    data = np.random.default_rng(0).random((4, 5, 3)).astype(np.float32)
    image = ants.from_numpy(data, origin=[1.0, 2.0], spacing=[2.0, 3.0], direction=np.eye(2), has_components=True)
    with pytest.raises(ImageError, match=r"scan has 3 components per voxel .*--channel"):
        as_image(image, "scan")
    chosen = as_image(image, "scan", Choice(channel=1))
    assert np.array_equal(chosen.data, data[..., 1])
    assert np.array_equal(chosen.affine, [[2, 0, 1], [0, 3, 2], [0, 0, 1]])


def test_registration_of_ants_images(ants: Any, pair: tuple[Image, Image], model: Path, result: Registration) -> None:
    """ANTs' images are registered like ours, and the warped one lies on the fixed one."""
    fixed, moving = (image.to_ants() for image in pair)
    theirs = register(fixed=fixed, moving=moving, model=model, **OPTIONS)
    assert np.allclose(theirs.warped.data, result.warped.data, atol=0.1)  # of 1000
    warped = theirs.warped.to_ants()
    for name in ("spacing", "origin", "direction"):
        assert np.allclose(getattr(warped, name), getattr(fixed, name), atol=1e-5)


def test_channels_first_with_an_affine_in_ras(pair: tuple[Image, Image]) -> None:
    """As MONAI's MetaTensor and TorchIO's ScalarImage are: neither needs to be installed to be recognised."""
    image = pair[0]
    kept = {"data": torch.from_numpy(image.data)[None], "affine": np.diag([-1, -1, 1, 1]) @ image.affine}
    for module in ("monai.data.meta_tensor", "torchio.data.image"):
        other = type("Other", (), {**kept, "__module__": module})()
        again = as_image(other, "image")
        assert np.array_equal(again.data, image.data)
        assert np.allclose(again.affine, image.affine)


def test_tensors_and_arrays_with_spacing_or_affine(pair: tuple[Image, Image], model: Path) -> None:
    fixed, moving = pair
    expected = register(fixed=fixed, moving=moving, model=model, **OPTIONS)
    arrays: dict[str, Any] = {"fixed": torch.from_numpy(fixed.data)[None, None], "moving": moving.data}
    flip = np.diag([-1, -1, 1, 1])
    for space, affines in (
        ("LPS", (fixed.affine, moving.affine)),
        ("RAS", (flip @ fixed.affine, flip @ moving.affine)),
    ):
        given = register(**arrays, affine=affines, space=space, model=model, **OPTIONS)  # type: ignore[arg-type]
        assert np.allclose(given.transform.displacement, expected.transform.displacement, atol=1e-4)
    spaced = register(**arrays, spacing=(1.5, 1.2, 2.0), model=model, **OPTIONS)
    assert spaced.fixed.spacing == spaced.moving.spacing == pytest.approx((1.5, 1.2, 2.0))
    apart = register(**arrays, spacing=((1.5, 1.2, 2.0), (1.0, 1.0, 1.0)), model=model, **OPTIONS)
    assert apart.moving.spacing == (1.0, 1.0, 1.0)
    with pytest.raises(InputError, match="both given"):
        register(**arrays, spacing=(1, 1, 1), affine=np.eye(4), model=model, **OPTIONS)
    with pytest.raises(InputError, match=r"has shape \(3, 3\); expected \(4, 4\)"):
        register(**arrays, affine=np.eye(3), model=model, **OPTIONS)
    for there in (fixed, fixed.to_nibabel()):  # which has positions of its own
        with pytest.raises(InputError, match=f"fixed is a {type(there).__name__}; expected an array"):
            register(fixed=there, moving=moving, spacing=(1, 1, 1), model=model, **OPTIONS)
    for wrong in ((1.5, 1.2), (1, 1, 0), (1, 1, -2), "wide", (1, 1, float("nan"))):
        with pytest.raises(InputError, match=r"the spacing of fixed is .*; expected"):
            register(**arrays, spacing=wrong, model=model, **OPTIONS)


def test_only_public_names_are_listed() -> None:
    """Also after submodules were imported, which are attributes of the package."""
    code = "import carlreg, carlreg.files.images, carlreg.cli; print(*dir(carlreg))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted([*carlreg.__all__, "__version__"])
