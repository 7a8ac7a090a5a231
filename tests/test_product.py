"""The product call: two images in, world-space results and files out. A small model, so that it is quick."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import Registration, gradicon, register, save
from carlreg.images import Image, from_array, map_points
from carlreg.product import FILES

sitk = pytest.importorskip("SimpleITK")


def oblique(spacing: tuple[float, ...], origin: tuple[float, ...]) -> np.ndarray:
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    closest = np.eye(3) + 0.2 * rotation
    direction = np.linalg.qr(closest)[0]
    affine = np.eye(4)
    affine[:3, :3] = direction * np.sign(np.diag(direction)) * spacing
    affine[:3, 3] = origin
    return affine


def blobs(shape: tuple[int, ...], affine: np.ndarray, seed: int = 0) -> Image:
    """Balls at fixed world places, so that the same anatomy can be seen through any header."""
    rng = np.random.default_rng(seed)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    world = map_points(affine, index.astype(float))
    total = np.zeros(shape)
    for _ in range(12):
        centre = map_points(affine, rng.uniform(0.2, 0.8, 3) * (np.array(shape) - 1))
        total += np.exp(-((world - centre) ** 2).sum(-1) / 40)
    return from_array((1000 * total).astype(np.int16), affine)


@pytest.fixture(scope="module")
def pair() -> tuple[Image, Image]:
    fixed = blobs((28, 30, 26), oblique((1.5, 1.2, 2.0), (10, -20, 30)))
    moving_affine = oblique((1.5, 1.2, 2.0), (10, -20, 30))
    moving_affine[:3, 3] += (4, -3, 2)
    return fixed, Image(fixed.data, moving_affine)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "small.safetensors"
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": "24 24 24"})  # starts at the identity of the unit cubes
    return path


def test_the_same_voxels_under_another_header(pair: tuple[Image, Image], model_file: Path, tmp_path: Path) -> None:
    """The network's answer is the identity of the grids, so the world map is exactly the change of header."""
    fixed, moving = pair
    result = register(fixed=fixed, moving=moving, model=model_file, io_iterations=0)
    assert isinstance(result, Registration)
    points = map_points(fixed.index_to_world(), np.random.default_rng(0).uniform(2, 20, (50, 3)))
    assert np.abs(result.transform(points) - (points + np.array([4, -3, 2]))).max() < 1e-3
    assert np.abs(result.inverse(result.transform(points)) - points).max() < 1e-2
    assert np.abs(result.warped.data.astype(int) - fixed.data).max() <= 1
    assert result.warped.data.dtype == moving.data.dtype
    folder = result.save(tmp_path / "out")
    assert sorted(os.listdir(folder)) == sorted(FILES)
    transform = sitk.ReadTransform(str(folder / "transform.h5"))
    for point in points[:10]:
        assert np.allclose(transform.TransformPoint(point.tolist()), result.transform(point), atol=1e-4)
    report = json.loads((folder / "report.json").read_text())
    assert report["inputs"]["fixed"]["shape"] == [28, 30, 26]
    assert report["metrics"]["folds_percent"] == 0


@pytest.mark.parametrize("over", ["fields", "weights"])
def test_optimisation_brings_the_images_together(over: str, model_file: Path) -> None:
    affine = oblique((1.5, 1.2, 2.0), (0, 0, 0))
    fixed = blobs((26, 26, 26), affine)
    moving = Image(np.roll(fixed.data, 2, axis=0), affine)
    plain = register(fixed=fixed, moving=moving, model=model_file, io_iterations=0)
    better = register(fixed=fixed, moving=moving, model=model_file, over=over, io_iterations=6, seed=1)

    def difference(result: Registration) -> float:
        return float(np.abs(result.warped.data.astype(float) - fixed.data).mean())

    assert difference(better) < difference(plain)
    assert len(better.losses) > 0
    again = register(fixed=fixed, moving=moving, model=model_file, over=over, io_iterations=6, seed=1)
    assert np.array_equal(again.warped.data, better.warped.data)


def test_inputs_of_every_kind(pair: tuple[Image, Image], model_file: Path, tmp_path: Path) -> None:
    import nibabel as nib

    fixed, moving = pair
    path = tmp_path / "fixed.nii.gz"
    sitk.WriteImage(fixed.to_sitk(), str(path))
    expected = register(fixed=fixed, moving=moving, model=model_file, io_iterations=0).transform.displacement
    for source in (path, str(path), fixed.to_sitk(), nib.load(path)):
        result = register(fixed=source, moving=moving, model=model_file, io_iterations=0)
        assert np.abs(result.transform.displacement - expected).max() < 1e-2
    arrays = register(fixed=fixed.data, moving=moving.data, model=gradicon(3, 2, **SMALL), io_iterations=0)
    assert arrays.warped.shape == fixed.shape
    mask = Image((fixed.data > 100).astype(np.uint8), fixed.affine)
    masked = register(fixed=fixed, moving=moving, model=model_file, io_iterations=2, fixed_mask=mask)
    assert masked.settings["io_over"] == "fields" or torch.cuda.is_available()


def test_nothing_is_overwritten_or_half_written(
    pair: tuple[Image, Image], model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = register(fixed=pair[0], moving=pair[1], model=model_file, io_iterations=0)
    out = tmp_path / "out"
    result.save(out)
    with pytest.raises(FileExistsError, match=r"already holds warped.nii.gz; choose another folder"):
        result.save(out)
    result.save(out, overwrite=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("carlreg.itk.write_warp", full)
    with pytest.raises(OSError, match="No space left"):
        result.save(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["out", "small.safetensors"]


def test_bad_input_is_named(pair: tuple[Image, Image], model_file: Path, tmp_path: Path) -> None:
    fixed, moving = pair
    with pytest.raises(ValueError, match="no model 'magic'; expected the path of a model file, or one of carl-base"):
        register(fixed=fixed, moving=moving, model="magic")
    with pytest.raises(TypeError, match="fixed is a list; expected a path, an Image, an array"):
        register(fixed=[1, 2], moving=moving, model=model_file)
    with pytest.raises(ValueError, match="the fixed image is 2-D and the moving one 3-D"):
        register(fixed=fixed.data[:, :, 3], moving=moving, model=model_file)
    with pytest.raises(ValueError, match="unknown device 'gpu'; expected 'auto', 'cpu', 'cuda'"):
        register(fixed=fixed, moving=moving, model=model_file, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch sees no CUDA GPU here; expected 'cpu' or 'auto'"):
            register(fixed=fixed, moving=moving, model=model_file, device="cuda")
    with pytest.raises(ValueError, match="io_iterations is -1; expected 0 or more"):
        register(fixed=fixed, moving=moving, model=model_file, io_iterations=-1)
    with pytest.raises(ValueError, match="unknown over='both'"):
        register(fixed=fixed, moving=moving, model=model_file, over="both")
    with pytest.raises(ValueError, match="absent"):
        register(fixed=tmp_path / "absent.nii.gz", moving=moving, model=model_file)
    constant = Image(np.full_like(fixed.data, 7), fixed.affine)
    with pytest.raises(ValueError, match=r"constant|same value"):
        register(fixed=constant, moving=moving, model=model_file)
