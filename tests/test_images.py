"""Image files: positions in the world, orientation, intensities, the network's grid, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from carlreg.files import isolated
from carlreg.files.images import (
    Image,
    ImageError,
    from_array,
    from_nibabel,
    from_sitk,
    map_points,
    read,
    read_labels,
    write,
)
from carlreg.files.orientation import to_closest_ras
from carlreg.geometry.grids import Grid, interpolate
from carlreg.geometry.resizing import averaging, resize, resize_labels, resize_mask
from carlreg.preparation import Frame, looks_like_ct, may_be_ct, preprocess

sitk = pytest.importorskip("SimpleITK")
nibabel = pytest.importorskip("nibabel")

DATA = Path(__file__).parents[2] / "shared" / "data"
RNG = np.random.default_rng(0)
SHAPE = (7, 9, 5)
LPS_FROM_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def rotation(angles: tuple[float, ...]) -> np.ndarray:
    """A rotation of the plane by one angle, or of space by three."""
    matrix = np.eye(2 if len(angles) == 1 else 3)
    for angle, (i, j) in zip(angles, [(0, 1), (1, 2), (0, 2)], strict=False):
        turn = np.eye(len(matrix))
        turn[[i, i, j, j], [i, j, i, j]] = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
        matrix = matrix @ turn
    return matrix


def affine_of(direction: np.ndarray, spacing: tuple[float, ...], origin: tuple[float, ...]) -> np.ndarray:
    affine = np.eye(len(spacing) + 1)
    affine[:-1, :-1] = direction * np.array(spacing)
    affine[:-1, -1] = origin
    return affine


OBLIQUE = affine_of(rotation((0.4, -0.7, 0.25)), (0.7, 1.3, 4.1), (-120.5, 33.25, 871.0))
LEFT_HANDED = OBLIQUE @ np.diag([1.0, -1.0, 1.0, 1.0])
PERMUTED = OBLIQUE[:, [2, 0, 1, 3]]


def oblique(dtype: str = "int16", affine: np.ndarray = OBLIQUE) -> Image:
    return from_array(RNG.integers(0, 100, SHAPE).astype(dtype), affine)


def indices(shape: tuple[int, ...]) -> np.ndarray:
    """Random continuous indices, inside and outside the image."""
    return RNG.uniform(-3, np.array(shape) + 3, (100, len(shape)))


def by_sitk(image: Any, points: np.ndarray) -> np.ndarray:
    return np.array([image.TransformContinuousIndexToPhysicalPoint(p.tolist()) for p in points])


# ---- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [OBLIQUE, LEFT_HANDED, PERMUTED], ids=["oblique", "left-handed", "permuted"])
@pytest.mark.parametrize("ending", ["nii", "nii.gz", "nrrd", "mha"])
def test_round_trip_keeps_voxels_type_and_positions(tmp_path: Path, ending: str, affine: np.ndarray) -> None:
    image, path = oblique(affine=affine), tmp_path / f"a.{ending}"
    write(image, path)
    back = read(path)
    assert back.data.dtype == np.int16
    assert np.array_equal(back.data, image.data)
    points = indices(SHAPE)
    world = map_points(back.index_to_world(), points)
    assert np.abs(world - by_sitk(sitk.ReadImage(str(path)), points)).max() < 1e-5
    tolerance = 1e-3 if "nii" in ending else 1e-5  # NIfTI's header is float32
    assert np.abs(world - map_points(affine, points)).max() < tolerance
    assert np.sign(np.linalg.det(back.affine)) == np.sign(np.linalg.det(affine))
    assert np.allclose(back.spacing, image.spacing)
    if "nii" in ending:
        other = from_nibabel(nibabel.load(path))
        assert np.array_equal(other.data, image.data)
        assert np.abs(map_points(other.affine, points) - world).max() < 1e-3


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32", "uint32", "int64", "float32", "float64"])
@pytest.mark.parametrize("ending", ["nii.gz", "nrrd", "mha"])
def test_every_type_is_kept(tmp_path: Path, ending: str, dtype: str) -> None:
    image = oblique(dtype)
    write(image, tmp_path / f"a.{ending}")
    back = read(tmp_path / f"a.{ending}")
    assert back.data.dtype == image.data.dtype
    assert np.array_equal(back.data, image.data)


@pytest.mark.parametrize("ending", ["png", "tif", "tiff", "jpg"])
def test_pictures(tmp_path: Path, ending: str) -> None:
    data = np.add.outer(np.arange(30), 3 * np.arange(20)).astype(np.uint8)
    write(from_array(data), tmp_path / f"a.{ending}")
    back = read(tmp_path / f"a.{ending}")
    assert back.shape == (30, 20)
    assert back.dim == 2
    assert np.abs(back.data.astype(int) - data).max() <= (3 if ending == "jpg" else 0)
    raw = sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / f"a.{ending}")))
    assert np.array_equal(back.data, raw.T)  # first axis x, left to right


@pytest.mark.parametrize("mirror", [1, -1])
def test_oblique_plane(tmp_path: Path, mirror: int) -> None:
    affine = affine_of(rotation((0.3,)) @ np.diag([1, mirror]), (0.5, 2.0), (10.0, -7.0))
    image = from_array(RNG.random((8, 6)).astype(np.float32), affine)
    for ending in ("nrrd", "mha"):
        write(image, tmp_path / f"a.{ending}")
        assert np.allclose(read(tmp_path / f"a.{ending}").affine, affine, atol=1e-9)


@pytest.mark.parametrize("affine", [OBLIQUE, LEFT_HANDED, PERMUTED], ids=["oblique", "left-handed", "permuted"])
def test_positions_agree_with_simpleitk_and_nibabel_in_memory(affine: np.ndarray) -> None:
    image, points = oblique(affine=affine), indices(SHAPE)
    world = map_points(image.index_to_world(), points)
    assert np.abs(world - by_sitk(image.to_sitk(), points)).max() < 1e-9
    back = from_sitk(image.to_sitk())
    assert np.array_equal(back.data, image.data)
    assert np.allclose(back.affine, affine, rtol=0, atol=1e-9)
    ras = nibabel.Nifti1Image(image.data, LPS_FROM_RAS @ affine)
    theirs = nibabel.affines.apply_affine(ras.affine, points) * [-1, -1, 1]
    assert np.abs(world - theirs).max() < 1e-9
    assert np.allclose(from_nibabel(ras).affine, affine, rtol=0, atol=1e-9)


def test_a_file_by_nibabel_lies_where_nibabel_says(tmp_path: Path) -> None:
    for number, affine in enumerate((OBLIQUE, LEFT_HANDED, PERMUTED)):
        data, points = RNG.random(SHAPE).astype(np.float32), indices(SHAPE)
        nibabel.save(nibabel.Nifti1Image(data, LPS_FROM_RAS @ affine), tmp_path / f"{number}.nii.gz")
        image, theirs = read(tmp_path / f"{number}.nii.gz"), nibabel.load(tmp_path / f"{number}.nii.gz")
        assert np.array_equal(image.data, data)
        world = nibabel.affines.apply_affine(theirs.affine, points) * [-1, -1, 1]
        assert np.abs(map_points(image.affine, points) - world).max() < 1e-4


def test_nibabel_trailing_axis_and_plane() -> None:
    data = RNG.random((5, 6, 7, 1)).astype(np.float32)
    assert from_nibabel(nibabel.Nifti1Image(data, np.eye(4))).shape == (5, 6, 7)
    plane = from_nibabel(nibabel.Nifti1Image(data[:, :, 0, 0], np.diag([2.0, 3.0, 1.0, 1.0])))
    assert plane.shape == (5, 6)
    assert np.array_equal(plane.affine, np.diag([-2.0, -3.0, 1.0]))


@pytest.mark.parametrize("shape", [(7, 9, 5), (7, 1, 5), (6, 4)])
def test_unit_and_world(shape: tuple[int, ...]) -> None:
    dim = len(shape)
    affine = OBLIQUE if dim == 3 else affine_of(rotation((0.3,)), (0.5, 2.0), (10.0, -7.0))
    image = from_array(np.zeros(shape), affine)
    assert np.abs(image.world_to_unit() @ image.unit_to_world() - np.eye(dim + 1)).max() < 1e-11
    unit = Grid.of(shape).points(torch.float64).numpy()
    index = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    assert np.abs(map_points(image.unit_to_world(), unit) - map_points(image.index_to_world(), index)).max() < 1e-9
    assert image.index_to_world() is not image.affine


# ---- orientation ----------------------------------------------------------------------------------------------------


def stored_otherwise(image: Image, order: tuple[int, ...], flips: tuple[int, ...]) -> Image:
    """The same anatomy with other array axes, computed without the code under test."""
    data, affine = image.data.transpose(order), image.affine[:, [*order, 3]].copy()
    for axis in np.flatnonzero(flips):
        affine[:, 3] += (data.shape[axis] - 1) * affine[:, axis]
        affine[:, axis] *= -1
        data = np.flip(data, axis)
    return from_array(data, affine)


@pytest.mark.parametrize("angles", [(0.0, 0.0, 0.0), (0.4, -0.7, 0.25), (np.pi / 4, 0.0, 0.0)])
def test_all_48_orientations_become_one(angles: tuple[float, ...]) -> None:
    base = oblique(affine=affine_of(rotation(angles), (0.7, 1.3, 4.1), (-120.5, 33.25, 871.0)))
    expected = to_closest_ras(base)
    seen = set()
    for order in itertools.permutations(range(3)):
        for flips in itertools.product((0, 1), repeat=3):
            stored = stored_otherwise(base, order, flips)
            where = np.array(np.unravel_index(17, stored.shape))
            seen.add(tuple(stored.affine.round(6).ravel()))
            result = to_closest_ras(stored)
            assert np.array_equal(result.data, expected.data)
            assert np.abs(result.affine - expected.affine).max() < 1e-9
            # the voxel that lay there still does, with its value
            position = map_points(stored.affine, where)
            there = map_points(np.linalg.inv(result.affine), position)
            assert np.abs(there - there.round()).max() < 1e-9
            assert result.data[tuple(there.round().astype(int))] == stored.data[tuple(where)]
    assert len(seen) == 48


def test_closest_ras_is_ras_and_uses_the_best_order_as_a_whole() -> None:
    lps = from_array(np.arange(24).reshape(2, 3, 4), np.eye(4))
    ras = to_closest_ras(lps)
    assert np.array_equal(ras.data, lps.data[::-1, ::-1])
    assert np.array_equal(ras.affine, affine_of(np.diag([-1.0, -1.0, 1.0]), (1, 1, 1), (1, 2, 0)))
    # Axis by axis, R would take array axis 0 (0.74 > 0.67) and leave the other two with small cosines.
    direction = LPS_FROM_RAS[:3, :3] @ np.array([[0.74, 0.67, 0.06], [-0.67, 0.74, 0.02], [-0.03, -0.06, 0.99]])
    result = to_closest_ras(from_array(np.zeros((2, 3, 4)), affine_of(direction, (1, 1, 1), (0, 0, 0))))
    assert result.shape == (2, 3, 4)
    for _ in range(50):
        turned, _ = np.linalg.qr(RNG.normal(size=(3, 3)))
        result = to_closest_ras(from_array(np.zeros((2, 3, 4)), affine_of(turned, (1, 2, 3), (0, 0, 0))))
        cosines = LPS_FROM_RAS[:3, :3] @ result.affine[:3, :3] / result.spacing
        best = max(sum(abs(turned[i, p[i]]) for i in range(3)) for p in itertools.permutations(range(3)))
        assert cosines.trace() == pytest.approx(best)


def test_planes_stay_as_they_are() -> None:
    plane = from_array(np.zeros((4, 5)), np.diag([-1.0, 2.0, 1.0]))
    assert to_closest_ras(plane) is plane


# ---- DICOM ----------------------------------------------------------------------------------------------------------


def write_dicom(folder: Path, image: Image, series: str, skip: tuple[int, ...] = ()) -> None:
    folder.mkdir(exist_ok=True)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    volume = image.to_sitk()
    d = volume.GetDirection()
    for k in range(image.shape[2]):
        if k in skip:
            continue
        piece = volume[:, :, k]
        tags = {
            "0008|0060": "CT",
            "0008|0016": "1.2.840.10008.5.1.4.1.1.2",
            "0020|000d": "1.2.3",
            "0020|000e": series,
            "0008|0018": f"{series}.{k + 1}",
            "0020|0037": "\\".join(f"{x:.10f}" for x in (d[0], d[3], d[6], d[1], d[4], d[7])),
            "0020|0032": "\\".join(f"{x:.8f}" for x in map_points(image.affine, [0, 0, k])),
            "0020|0013": str(k + 1),
        }
        for key, value in tags.items():
            piece.SetMetaData(key, value)
        writer.SetFileName(str(folder / f"{series}_{k}.dcm"))
        writer.Execute(piece)


def test_a_dicom_folder_with_one_series(tmp_path: Path) -> None:
    large = oblique()
    write_dicom(tmp_path / "d", large, "1.2.3.5")
    image = read(tmp_path / "d")
    assert "1.2.3.5 (CT, 5 files)" in image.name
    assert np.array_equal(to_closest_ras(image).data, to_closest_ras(large).data)
    assert np.abs(to_closest_ras(image).affine - to_closest_ras(large).affine).max() < 1e-4


def test_dicom_with_a_missing_slice_is_refused(tmp_path: Path) -> None:
    write_dicom(tmp_path / "d", oblique(), "1.2.3.4", skip=(1,))
    with pytest.raises(ImageError, match=r"1\.2\.3\.4 \(CT, 4 files\).*mm away from even steps"):
        read(tmp_path / "d")


# ---- intensities ----------------------------------------------------------------------------------------------------


def body(inside: float, outside: float, noise: float, side: int = 24) -> np.ndarray:
    """A ball of one intensity in a background of another, with noise inside."""
    x = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 3, indexing="ij"))
    ball = (x**2).sum(axis=0) < 0.6
    return np.where(ball, inside + noise * RNG.normal(size=ball.shape), outside)


def test_ct_is_recognised_and_clamped() -> None:
    ct = body(40, -1000, 20).round().astype(np.int16)
    ct[12, 12, 12], ct[12, 12, 13] = 3000, 500
    for outside in (-1000, -1024):
        data = np.where(ct == -1000, np.int16(outside), ct)
        tensor, done = preprocess(from_array(data))
        assert (done.kind, done.low, done.high) == ("CT", -1000, 1000)
        assert "CT" in done.note
        assert tensor.shape == (1, 1, 24, 24, 24)
        assert tensor.dtype == torch.float32
        assert tensor[0, 0, 0, 0, 0] == 0
        assert tensor[0, 0, 12, 12, 12] == 1
        assert tensor[0, 0, 12, 12, 13] == 0.75


def test_ct_with_padding_and_lungs_is_recognised() -> None:
    ct = body(40, -1000, 20)
    ct[10:14, 10:14, 10:14] = -850
    ct[:4] = -3024
    assert preprocess(from_array(ct))[1].kind == "CT"
    cropped = body(40, 40, 20)
    cropped[10:14, 10:14, 10:14] = -900  # no air but a little bowel gas
    assert preprocess(from_array(cropped))[1].kind == "CT"


@pytest.mark.parametrize(
    "data",
    [
        body(500, 0, 80).clip(0).astype(np.uint16),
        body(0, 0, 1.0),  # z-scores
        RNG.uniform(-4096, 4096, (16, 16, 16)),  # a phase image
        body(120, 0, 30).clip(0, 255).astype(np.uint8),
        (body(40, -1000, 20) + 1024).astype(np.int16),  # CT without its rescaling is not in HU
    ],
    ids=["MRI", "z-scores", "phase", "uint8", "shifted CT"],
)
def test_other_images_are_not_taken_for_ct(data: np.ndarray) -> None:
    tensor, done = preprocess(from_array(data))
    assert done.kind == "percentiles"
    assert tensor.min() == 0
    assert tensor.max() == 1
    assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("name", ["ct_hu/body_3mm", "lung/elastix/followup", "lung/popi/exhale"])
def test_crops_of_soft_tissue_may_be_ct_and_mr_may_not(name: str) -> None:
    path, mr = DATA / f"{name}.nii.gz", DATA / "brainweb" / "t1.nii.gz"
    if not path.exists() or not mr.exists():
        pytest.skip("needs the data for experiments")
    data = read(path).data
    assert looks_like_ct(data)
    corners = itertools.product(*(range(0, n - 32, 8) for n in data.shape))
    crops = (data[tuple(slice(n, n + 32) for n in corner)] for corner in corners)
    without_air = [crop for crop in crops if not looks_like_ct(crop) and np.mean((crop >= -200) & (crop <= 300)) > 0.9]
    assert len(without_air) > 5
    assert np.mean([may_be_ct(crop) for crop in without_air]) > 0.95
    assert not may_be_ct(read(mr).data)


def test_percentiles_leave_outliers_out_and_background_at_zero() -> None:
    mri = body(500, 0, 50).clip(0)
    spoiled = mri.copy()
    spoiled[0, 0, 0], spoiled[-1, -1, -1] = 1e6, -1e6
    tensor, done = preprocess(from_array(mri))
    other, done_other = preprocess(from_array(spoiled))
    assert done.low == 0
    assert 600 < done.high < 720
    assert done_other.high == pytest.approx(done.high, rel=0.05)
    assert (tensor - other)[0, 0, 1:-1].abs().max() < 0.05
    assert (tensor[0, 0].numpy()[mri == 0] == 0).all()


def test_a_large_background_does_not_count() -> None:
    mri = body(500, 0, 50).clip(0).astype(np.float32)
    padded = np.pad(mri, 60)
    assert (padded == 0).mean() > 0.99
    assert preprocess(from_array(padded))[1].high == preprocess(from_array(mri))[1].high


def test_windowed_uint8_and_binary_images_keep_their_range() -> None:
    window = body(140, 0, 60).clip(0, 255).astype(np.uint8)
    assert (preprocess(from_array(window))[1].low, preprocess(from_array(window))[1].high) == (0, 255)
    vessels = np.zeros((50, 50), np.uint8)
    vessels[20] = 255
    for data in (vessels, 255 - vessels, np.eye(60, dtype=bool)):
        tensor, _ = preprocess(from_array(data))
        assert sorted(tensor.unique().tolist()) == [0, 1]
    almost_white = np.full((50, 50), 255, np.uint8)
    almost_white[0, 0] = 0
    assert sorted(preprocess(from_array(almost_white))[0].unique().tolist()) == [0, 1]


def test_mask_restricts_what_is_counted() -> None:
    mri = body(500, 0, 50).clip(0)
    mri[:3] = 5000  # something bright that is of no interest
    mask = np.ones(mri.shape, bool)
    mask[:3] = False
    tensor, done = preprocess(from_array(mri), from_array(mask))
    assert done.high < 720
    assert (tensor[0, 0, :3] == 1).all()
    image = from_array(mri, name="scan")
    with pytest.raises(ImageError, match="m is empty"):
        preprocess(image, from_array(np.zeros(mri.shape), name="m"))
    with pytest.raises(ImageError, match="m has 24 × 24 × 23 voxels but scan has 24 × 24 × 24"):
        preprocess(image, from_array(mask[..., 1:], name="m"))
    with pytest.raises(ImageError, match="m lies up to 2 mm away from scan"):
        preprocess(image, from_array(mask, affine_of(np.eye(3), (1, 1, 1), (2, 0, 0)), name="m"))
    with pytest.raises(ImageError, match="scan is constant inside its mask: every voxel is 5000"):
        preprocess(image, from_array(~mask))


# ---- the network's grid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(30, 17, 9), (12, 40, 5), (9, 9, 9), (200, 3, 2)])
def test_resize_is_exact_on_ramps_and_keeps_constants_and_ends(shape: tuple[int, ...]) -> None:
    old = (23, 19, 31)
    slope = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def ramp(sides: tuple[int, ...]) -> torch.Tensor:
        return (Grid.of(sides).points(torch.float64) @ slope + 0.3)[None, None]

    assert torch.allclose(resize(ramp(old), shape), ramp(shape), rtol=0, atol=1e-12)
    assert torch.allclose(resize(torch.full((2, 3, *old), 7.0), shape), torch.tensor(7.0), atol=1e-5)
    image = torch.rand(1, 1, *old, dtype=torch.float64)
    result = resize(image, shape)
    assert torch.allclose(result[..., 0, 0, 0], image[..., 0, 0, 0])
    assert torch.allclose(result[..., -1, -1, -1], image[..., -1, -1, -1])


def test_resize_interpolates_when_growing_and_averages_when_shrinking() -> None:
    image = torch.rand(1, 2, 12, 11, dtype=torch.float64)
    points = Grid.of((31, 27)).points(torch.float64)[None]
    assert torch.allclose(resize(image, (31, 27)), interpolate(image, points))
    assert torch.equal(resize(image, (12, 11)), image)
    stripes = (torch.arange(401) % 2).double()[None, None]  # would alias to all 0 or all 1
    assert (resize(stripes, (51,))[..., 1:-1] - 0.5).abs().max() < 0.1
    noise = torch.randn(1, 1, 4001, dtype=torch.float64)
    assert resize(noise, (501,)).var() == pytest.approx(1 / 8, rel=0.3)


def test_averaging_is_the_mean_of_linear_interpolations() -> None:
    """The weight of each old voxel in each new one, sample by sample; samples beyond the image count as zeros."""
    for old, new, step in ((40, 7, 6.5), (40, 7, 2.0), (9, 30, 0.3), (2, 2, 1.0), (1, 3, 1.0), (30, 5, 1.2)):
        centre = torch.linspace(-1.7, old + 0.4, new, dtype=torch.float64)
        width = [min(math.sqrt(max(step**2 - 1, 0)), 2 * min(c, old - 1 - c)) for c in centre.tolist()]
        count = 2 * math.ceil(step) if step > 1 else 1
        expected = torch.zeros(old, new, dtype=torch.float64)
        for column, (middle, wide) in enumerate(zip(centre.tolist(), width, strict=True)):
            for k, row in itertools.product(range(count), range(old)):
                sample = middle + max(wide, 0) * ((k + 0.5) / count - 0.5)
                expected[row, column] += max(0, 1 - abs(sample - row)) / count
        assert torch.allclose(averaging(old, centre, step), expected, rtol=0, atol=1e-14), (old, new, step)


def test_averaging_takes_no_more_memory_than_its_matrix() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            self.numel = max(self.numel, result.numel())
            return result

    with Largest() as largest:
        averaging(3000, torch.linspace(0, 2999, 30, dtype=torch.float64), 2999 / 29)
    assert largest.numel == 3000 * 30


def test_resize_labels_takes_the_nearest() -> None:
    labels = torch.randint(0, 2**40, (1, 1, 13, 8))
    result = resize_labels(labels, (40, 4))
    assert result.dtype == torch.int64
    rows, columns = (np.floor(np.arange(n) * (o - 1) / (n - 1) + 0.5).astype(int) for o, n in ((13, 40), (8, 4)))
    assert np.array_equal(result[0, 0].numpy(), labels[0, 0].numpy()[np.ix_(rows, columns)])


@pytest.mark.parametrize("shape", [(13, 40), (96, 24), (160, 96), (64, 8), (30, 30)])
def test_resized_masks_lose_no_voxel_and_stay_thin(shape: tuple[int, int]) -> None:
    old, new = shape
    voxels = torch.eye(old)[:, None]  # masks of one voxel, one at each place
    result = resize_mask(voxels, (new,))
    kept = resize_mask(voxels[:, :, None].expand(-1, -1, 3, -1), (2, new))
    framed = Frame((new,), ((old - 1) / 2,), ((old - 1) / (new - 1),)).resample_mask(voxels)
    assert kept.eq(result[:, :, None]).all()
    assert framed.equal(result)
    assert bool(result.sum(-1).ge(1).all())
    assert result.sum(-1).max() <= math.ceil(max(new / old, 1))
    assert result.unique().tolist() == [0, 1]
    assert old != new or result.equal(voxels)
    apart = ((result * torch.linspace(0, 1, new)).sum(-1) / result.sum(-1))[:, 0] - torch.linspace(0, 1, old)
    assert apart.abs().max() <= 0.5 / (min(old, new) - 1) + 1e-6
    beside = Frame((4,), (old - 2.5,), (1.0,)).resample_mask(voxels)
    assert beside.flatten(1).any(dim=1).sum() == 4  # those outside the frame are not in it


def test_resize_refuses_what_has_no_ends() -> None:
    with pytest.raises(ValueError, match="sides of at least 2"):
        resize(torch.rand(1, 1, 5, 5), (5, 1))
    with pytest.raises(ValueError, match="2 spatial axes"):
        resize_labels(torch.ones(1, 1, 5, 5), (5, 5, 5))
    assert resize(torch.rand(1, 1, 5, 1), (3, 1)).shape == (1, 1, 3, 1)
    assert resize(torch.ones(1, 1, 5, 1), (3, 4)).eq(1).all()


# ---- labels ---------------------------------------------------------------------------------------------------------


def test_labels_are_integers(tmp_path: Path) -> None:
    write(oblique("uint8"), tmp_path / "int.nii.gz")
    assert read_labels(tmp_path / "int.nii.gz").data.dtype == np.uint8
    image = oblique("float32")
    write(image, tmp_path / "float.nii.gz")
    assert read_labels(tmp_path / "float.nii.gz").data.dtype == np.int32
    assert np.array_equal(read_labels(tmp_path / "float.nii.gz").data, image.data)
    for number in (0.5, 1e20):
        image.data[0, 0, 0] = number
        write(image, tmp_path / "float.nii.gz", overwrite=True)
        with pytest.raises(ImageError, match=r"float\.nii\.gz holds values that are not whole"):
            read_labels(tmp_path / "float.nii.gz")


# ---- refused --------------------------------------------------------------------------------------------------------


def cut(path: Path, fraction: float = 0.6) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])
    return path


def saved(path: Path, data: np.ndarray | None = None) -> Path:
    sitk.WriteImage(sitk.GetImageFromArray(RNG.integers(0, 999, (20, 22, 24)) if data is None else data), str(path))
    return path


def patched(path: Path, *changes: tuple[int, bytes]) -> Path:
    """A NIfTI file with bytes of its header replaced."""
    nibabel.save(nibabel.Nifti1Image(np.ones((6, 7, 8), np.int16), np.eye(4)), path)
    content = bytearray(path.read_bytes())
    for offset, value in changes:
        content[offset : offset + len(value)] = value
    path.write_bytes(content)
    return path


def meta(path: Path, **fields: str) -> Path:
    header = {
        "ObjectType": "Image",
        "NDims": "3",
        "BinaryData": "True",
        "TransformMatrix": "1 0 0 0 1 0 0 0 1",
        "Offset": "0 0 0",
        "ElementSpacing": "1 1 1",
        "DimSize": "6 7 8",
        "ElementType": "MET_SHORT",
        "ElementDataFile": "LOCAL",
    } | fields
    path.write_bytes("".join(f"{k} = {v}\n" for k, v in header.items()).encode() + bytes(2 * 6 * 7 * 8))
    return path


def text(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def float32(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def int16(*numbers: int) -> bytes:
    return np.array(numbers, "<i2").tobytes()


COLOUR = np.zeros((8, 9, 3), np.uint8)
VECTORS = np.zeros((6, 7, 8, 1, 3), np.float32)
BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("a.nii.gz", lambda p: None, "does not exist"),
    "empty": ("a.nii.gz", lambda p: text(p, b""), "is empty"),
    "text": ("a.nii.gz", lambda p: text(p, b"hello" * 500), "not an image"),
    "gzipped text": ("a.nii.gz", lambda p: text(p, gzip.compress(b"hello" * 500)), "not an image"),
    "text file": ("a.txt", lambda p: text(p, b"hello"), "not an image"),
    "no extension": ("a", lambda p: text(p, b"hello"), "not an image"),
    "gif": ("a.gif", lambda p: text(p, b"GIF89a" + bytes(100)), "GIF.*convert"),
    "folder": ("a", lambda p: p.mkdir(), "without a DICOM series"),
    "truncated nii": ("a.nii", lambda p: cut(saved(p)), "is truncated"),
    "truncated nii.gz": ("a.nii.gz", lambda p: cut(saved(p)), "is truncated"),
    "truncated nii in gz": (
        "a.nii.gz",
        lambda p: text(p, gzip.compress(cut(saved(p.with_name("b.nii"))).read_bytes())),
        "is truncated: it holds",
    ),
    "only a header": ("a.nii", lambda p: cut(patched(p), 0.4), "not an image|cannot be read|truncated"),
    "truncated nrrd": ("a.nrrd", lambda p: cut(saved(p)), "cannot be read"),
    "truncated mha": ("a.mha", lambda p: cut(saved(p)), "end too early"),
    "truncated png": ("a.png", lambda p: cut(saved(p, COLOUR[..., 0])), "cannot be read"),
    "truncated jpg": ("a.jpg", lambda p: cut(saved(p, RNG.integers(0, 255, (99, 99)).astype(np.uint8))), "truncated"),
    "truncated tif": ("a.tif", lambda p: cut(saved(p, COLOUR[..., 0])), "cannot be read"),
    "4-D": (
        "a.nii.gz",
        lambda p: nibabel.save(nibabel.Nifti1Image(np.zeros((6, 7, 8, 3), np.float32), np.eye(4)), p),
        "is 4-D .6 × 7 × 8 × 3.*--frame N, from 0 to 2",
    ),
    "colour": (
        "a.mha",
        lambda p: sitk.WriteImage(sitk.GetImageFromArray(COLOUR, isVector=True), str(p)),
        "has 3 components.*--channel N, from 0 to 2, or --channel luminance",
    ),
    "vectors": (
        "a.mha",
        lambda p: sitk.WriteImage(sitk.GetImageFromArray(VECTORS[:, :, :, 0], isVector=True), str(p)),
        "has 3 components",
    ),
    "complex": (
        "a.nii",
        lambda p: nibabel.save(nibabel.Nifti1Image(np.zeros((6, 7, 8), np.complex64), np.eye(4)), p),
        "complex",
    ),
    "a terabyte": ("a.nii", lambda p: patched(p, (42, int16(32000, 32000, 32000))), "32000 × 32000 × 32000 voxels"),
    "a terabyte mha": ("a.mha", lambda p: meta(p, DimSize="100000 100000 100"), "100000 × 100000 × 100 voxels"),
    "no voxels": ("a.mha", lambda p: meta(p, DimSize="0 7 8"), "0 × 7 × 8 voxels"),
    "zero spacing": ("a.nii", lambda p: patched(p, (80, float32(0))), "spacing of 0 × 1 × 1 mm"),
    "negative spacing": ("a.nii", lambda p: patched(p, (84, float32(-2))), "spacing of 1 × -2 × 1 mm"),
    "NaN spacing": ("a.nii", lambda p: patched(p, (80, float32(np.nan))), "spacing of nan × 1 × 1 mm"),
    "zero spacing mha": ("a.mha", lambda p: meta(p, ElementSpacing="0 1 1"), "spacing of 0 × 1 × 1 mm"),
    "negative spacing mha": ("a.mha", lambda p: meta(p, ElementSpacing="-1 1 1"), "spacing of -1 × 1 × 1 mm"),
    "singular": ("a.mha", lambda p: meta(p, TransformMatrix="1 0 0 1 0 0 0 0 1"), "singular direction"),
    "singular nii": (
        "a.nii",
        lambda p: patched(p, (296, float32(1, 0, 0))),
        "singular or whose axes are not at right angles.*header",
    ),
    "sheared nii": ("a.nii", lambda p: patched(p, (284, float32(0.3))), "not at right angles"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_clear_line(tmp_path: Path, case: str) -> None:
    name, make, message = BAD[case]
    make(tmp_path / name)
    with pytest.raises(ImageError, match=message) as caught:
        read(tmp_path / name)
    line = str(caught.value)
    assert line.startswith(str(tmp_path / name))
    assert "\n" not in line
    assert "0x" not in line  # none of SimpleITK's internals
    assert ".cxx" not in line
    assert len(line) < len(str(tmp_path / name)) + 260


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    saved(tmp_path / "a.nii.gz").chmod(0)
    with pytest.raises(ImageError, match="permission"):
        read(tmp_path / "a.nii.gz")


def test_unreadable_file_is_told_from_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "a.nii.gz")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ImageError, match="permission"):
        read(tmp_path / "a.nii.gz")


def test_nifti_2(tmp_path: Path) -> None:
    data = RNG.integers(0, 99, SHAPE).astype(np.int16)
    nibabel.save(nibabel.Nifti2Image(data, LPS_FROM_RAS @ OBLIQUE), tmp_path / "a.nii.gz")
    image = read(tmp_path / "a.nii.gz")
    assert np.array_equal(image.data, data)
    assert np.abs(image.affine - OBLIQUE).max() < 1e-9


def test_big_endian_nifti(tmp_path: Path) -> None:
    data = RNG.integers(0, 99, (6, 7, 8)).astype(np.float32)
    for number in (1.0, np.nan):
        data[0, 0, 0] = number
        image = nibabel.Nifti1Image(data, np.eye(4), nibabel.Nifti1Header(endianness=">"))
        image.to_filename(tmp_path / f"{number}.nii")
    assert np.array_equal(read(tmp_path / "1.0.nii").data[1:], data[1:])
    with pytest.raises(ImageError, match="truncated"):
        read(cut(tmp_path / "1.0.nii", 0.9))
    with pytest.raises(ImageError, match="1 NaN or infinite voxels out of 336"):
        read(tmp_path / "nan.nii")


@pytest.mark.parametrize(
    ("shape", "ok"), [((24, 24, 3), False), ((24, 24, 1), False), ((24, 24, 4), True), ((3, 24), False), ((4, 4), True)]
)
def test_thin_images_are_read_but_not_registered(tmp_path: Path, shape: tuple[int, ...], ok: bool) -> None:
    write(from_array(RNG.random(shape)), tmp_path / "a.nrrd")
    image = read(tmp_path / "a.nrrd")
    if ok:
        preprocess(image)
        return
    with pytest.raises(ImageError, match=r"a\.nrrd has .* voxels; expected at least 4 along every axis"):
        preprocess(image)


def test_values_that_cannot_be_registered(tmp_path: Path) -> None:
    data = RNG.random((6, 6, 6)).astype(np.float32)
    data[0, 0, :2], data[1, 1, 1] = np.nan, -np.inf
    for name in ("a.nii", "a.nii.gz", "a.nrrd", "a.mha", "a.tif"):
        flat = data if name != "a.tif" else data.reshape(18, 12)
        write(from_array(flat), tmp_path / name)
        with pytest.raises(ImageError, match=f"{name} has 3 NaN or infinite voxels out of 216"):
            read(tmp_path / name)
    with pytest.raises(ImageError, match="array has 3 NaN"):
        preprocess(from_array(data))
    with pytest.raises(ImageError, match="array is constant: every voxel is 7"):
        preprocess(from_array(np.full((6, 6), 7)))


def test_bad_arrays_are_refused() -> None:
    with pytest.raises(ImageError, match="has 4 axes"):
        from_array(np.zeros((2, 2, 2, 2)))
    with pytest.raises(ImageError, match="complex128"):
        from_array(np.zeros((4, 4), complex))
    with pytest.raises(ImageError, match=r"affine of shape \(3, 3\); expected \(4, 4\)"):
        from_array(np.zeros((4, 4, 4)), np.eye(3))
    with pytest.raises(ImageError, match="not finite"):
        from_array(np.zeros((4, 4)), np.diag([np.nan, 1, 1]))
    with pytest.raises(ImageError, match="singular"):
        from_array(np.zeros((4, 4)), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    with pytest.raises(ImageError, match="spacing of 0 × 1"):
        from_array(np.zeros((4, 4)), np.diag([0, 1, 1]))
    with pytest.raises(ImageError, match="is 4-D"):
        from_sitk(sitk.Image([4, 4, 4, 2], sitk.sitkFloat32))
    with pytest.raises(ImageError, match="2 components"):
        from_sitk(sitk.Image([4, 4, 4], sitk.sitkVectorFloat32, 2))


# ---- writing --------------------------------------------------------------------------------------------------------


def test_overwriting_needs_leave(tmp_path: Path) -> None:
    first, second = oblique(), oblique()
    write(first, tmp_path / "a.nii.gz")
    with pytest.raises(FileExistsError, match="exists already"):
        write(second, tmp_path / "a.nii.gz")
    assert np.array_equal(read(tmp_path / "a.nii.gz").data, first.data)
    write(second, tmp_path / "a.nii.gz", overwrite=True)
    assert np.array_equal(read(tmp_path / "a.nii.gz").data, second.data)
    assert os.listdir(tmp_path) == ["a.nii.gz"]


SHEARED = from_array(np.zeros(SHAPE), [[1, 0.3, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
UNWRITABLE = {
    "a.png": (oblique("uint8"), "cannot hold a size of 7 × 9 × 5"),
    "b.png": (from_array(np.zeros((4, 4), np.float32)), "cannot be written: PNG supports"),
    "a.jpg": (from_array(np.zeros((4, 4), np.uint16)), "cannot be written: JPEG supports"),
    "a.nii.gz": (SHEARED, "cannot hold these directions"),
    "a.xyz": (oblique(), "cannot be written: not an image of a format"),
    "a.mhd": (oblique(), "takes two files"),
    "a": (oblique(), "no extension"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_a_format_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    image, message = UNWRITABLE[name]
    with pytest.raises(ImageError, match=message) as caught:
        write(image, tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


def test_sheared_images_go_through_nrrd(tmp_path: Path) -> None:
    write(SHEARED, tmp_path / "a.nrrd")
    assert np.allclose(read(tmp_path / "a.nrrd").affine, SHEARED.affine)


@pytest.mark.parametrize("failure", [RuntimeError("disk full"), KeyboardInterrupt()])
def test_failing_in_the_middle_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    image = oblique()
    write(image, tmp_path / "a.nrrd")

    def fail(_: object, name: str, *rest: object) -> None:
        Path(name).write_bytes(b"half")
        raise failure

    monkeypatch.setattr(sitk, "WriteImage", fail)
    with pytest.raises((ImageError, KeyboardInterrupt)):
        write(oblique(), tmp_path / "a.nrrd", overwrite=True)
    assert os.listdir(tmp_path) == ["a.nrrd"]
    assert np.array_equal(read(tmp_path / "a.nrrd").data, image.data)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        write(oblique(), tmp_path / "none" / "a.nii.gz")


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_importing_does_not_import_simpleitk() -> None:
    code = "import sys, carlreg.files.images; sys.exit('SimpleITK' in sys.modules or 'nibabel' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")
@pytest.mark.parametrize("folder", ["abdomen", "brain", "hippocampus"])
def test_real_scans(folder: str) -> None:
    path = sorted(p for p in (DATA / folder / "val").glob("*.nii.gz") if "labels" not in p.name)[0]
    image, labels = read(path), read_labels(path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz")))
    assert labels.shape == image.shape
    points = indices(image.shape)
    theirs = nibabel.affines.apply_affine(nibabel.load(path).affine, points) * [-1, -1, 1]
    assert np.abs(map_points(image.affine, points) - theirs).max() < 1e-3
    tensor, done = preprocess(to_closest_ras(image))
    assert done.kind == "percentiles"
    assert done.low < 5
    assert done.high > 100
    assert 0.02 < tensor.mean() < 0.8


def test_files_are_read_by_children_of_one_process_that_may_die(tmp_path: Path) -> None:
    """Threads and forked processes may read at the same time; a killed nursery is replaced."""
    sitk = pytest.importorskip("SimpleITK")
    voxels = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
    sitk.WriteImage(sitk.GetImageFromArray(voxels), str(path := tmp_path / "a.nrrd"))
    read(path)
    nursery = isolated._nurseries[-1]
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(read, [path] * 8))
    assert all(np.array_equal(image.data, voxels.T) for image in images)
    assert isolated._nurseries[-1] is nursery
    nursery.process.kill()
    nursery.process.wait()
    assert np.array_equal(read(path).data, voxels.T)
