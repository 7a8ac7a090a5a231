"""The files of a result: NIfTI without ITK, rounded and compressed transforms, and what a folder holds."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from conftest import SMALL

from carlreg import gradicon, register
from carlreg.files import images, nifti, transform_files
from carlreg.files.compression import in_threads, write_gzip
from carlreg.files.images import Image, from_array, map_points
from carlreg.files.results import WITHIN, Report
from carlreg.files.world_transform import WorldTransform
from carlreg.registration.result import Registration

sitk = pytest.importorskip("SimpleITK")
RNG = np.random.default_rng(7)


def any_affine(seed: int, dim: int = 3) -> npt.NDArray[np.float64]:
    """Random directions, mirrored for odd seeds, and a random spacing and origin."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
    turn[:, 0] *= np.sign(np.linalg.det(turn)) * (-1) ** seed
    affine = np.eye(dim + 1)
    affine[:-1, :-1] = turn * rng.uniform(0.5, 3, dim)
    affine[:-1, -1] = rng.normal(size=dim) * 100
    return affine


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_nifti_headers_are_those_of_itk(tmp_path: Path, seed: int, dim: int) -> None:
    kind = ["u1", "i2", "u2", "f4", "i4", "f8"][seed]
    affine = any_affine(seed, dim)
    if dim == 2 and seed % 2:
        affine[:2, :2] = np.diag([1.5, -2])
    image = from_array((RNG.random((6, 5, 4)[:dim]) * 200).astype(kind), affine)
    images.write(image, tmp_path / "ours.nii")
    sitk.WriteImage(image.to_sitk(), str(tmp_path / "itk.nii"))
    ours, itk = ((tmp_path / f"{name}.nii").read_bytes() for name in ("ours", "itk"))
    assert ours[352:] == itk[352:]
    for name in nifti.NAMES:
        mine, theirs = (np.frombuffer(one[:348], nifti.LAYOUTS[0])[0][name] for one in (ours, itk))
        assert mine == pytest.approx(theirs, abs=1e-6), name
    assert ours[344:352] == itk[344:352]


def test_quaternions_of_half_turns(tmp_path: Path) -> None:
    for signs in ((1, 1), (-1, 1), (1, -1), (-1, -1)):
        for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)):
            affine = np.eye(4)
            affine[:3, :3] = np.diag([*signs, 1.0])[:, order]
            images.write(from_array(np.zeros((4, 5, 6), np.uint8), affine), tmp_path / "a.nii", overwrite=True)
            found = sitk.ReadImage(str(tmp_path / "a.nii"))
            assert np.allclose(np.reshape(found.GetDirection(), (3, 3)), affine[:3, :3])


def test_gzip_streams_are_whole_single_and_the_same_every_time() -> None:
    blocks = [RNG.integers(0, 9, size, dtype=np.uint8).tobytes() for size in (352, 2**20, 3, 2**20)]
    first, second = io.BytesIO(), io.BytesIO()
    for file in (first, second):
        write_gzip(file, iter(blocks))
    assert first.getvalue() == second.getvalue()
    assert gzip.decompress(first.getvalue()) == b"".join(blocks)
    one = zlib.decompressobj(wbits=31)
    assert one.decompress(first.getvalue()) == b"".join(blocks)
    assert one.eof
    assert one.unused_data == b""  # some readers stop at the end of the first stream


def test_threads_keep_the_order_and_raise() -> None:
    assert list(in_threads(lambda n: n * n, range(50))) == [n * n for n in range(50)]
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda n: 1 // n, [1, 0, 2]))


def bent(shape: tuple[int, ...] = (40, 36, 30)) -> WorldTransform:
    """Smooth displacements of a few millimetres, and an affine part that stretches them."""
    axes = np.meshgrid(*(np.linspace(0, 3, n) for n in shape), indexing="ij")
    field = np.stack([np.sin(sum(axes) + k) * 4 for k in range(len(shape))], axis=-1)
    affine = any_affine(3, len(shape))
    affine[:-1, :-1] = np.diag(np.linspace(0.9, 1.3, len(shape)))
    return WorldTransform(affine, field.astype(np.float32), any_affine(4, len(shape)))


@pytest.mark.parametrize("within", [0.01, 0.001])
def test_rounded_transforms_are_read_by_itk_to_that_distance(tmp_path: Path, within: float) -> None:
    transform = bent()
    transform_files.write(transform, tmp_path / "full.h5")
    transform_files.write(transform, tmp_path / "small.h5", within=within)
    index = RNG.uniform(0, 1, (500, 3)) * (np.array(transform.displacement.shape[:3]) - 1)
    points = map_points(transform.lattice, index)
    itk = sitk.ReadTransform(str(tmp_path / "small.h5"))
    theirs = np.array([itk.TransformPoint(point) for point in points.tolist()])
    missed = np.linalg.norm(theirs - transform(points), axis=1).max()
    assert within / 10 < missed <= within
    assert np.abs(transform_files.read(tmp_path / "small.h5")(points) - theirs).max() < 1e-6
    same = transform_files.read(tmp_path / "full.h5")
    assert isinstance(same, WorldTransform)
    assert np.array_equal(same.displacement, transform.displacement)
    assert (tmp_path / "small.h5").stat().st_size < 0.6 * (tmp_path / "full.h5").stat().st_size


def test_each_input_is_decompressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a registration does with its files, their voxels are unpacked one time."""
    torch.manual_seed(0)
    network = gradicon(3, 2, **SMALL)
    names = {name: tmp_path / f"{name}.nii.gz" for name in ("fixed", "moving", "fixed_seg", "moving_seg")}
    for name, path in names.items():
        images.write(from_array((RNG.random((30, 28, 26)) * (3 if "seg" in name else 999)).astype(np.int16)), path)
    unpacked = 0

    class Counting(gzip.GzipFile):
        def readinto(self, buffer: Any) -> int:
            nonlocal unpacked
            count = super().readinto(buffer)
            unpacked += count
            return count

    monkeypatch.setattr(gzip, "GzipFile", Counting)
    register(**names, model=network, io_iterations=0, device="cpu").save(tmp_path / "out")
    assert unpacked == len(names) * 30 * 28 * 26 * 2


def test_what_a_folder_holds_by_default_and_on_request(tmp_path: Path) -> None:
    transform, scan = bent((20, 18, 16)), from_array(RNG.random((20, 18, 16)).astype(np.float32), any_affine(4))
    tiny = Image(scan.data, np.diag([0.01, 0.01, 0.01, 1]), "tiny")
    made = Registration(transform, transform, scan, scan, scan, Report(device="cpu"))
    made.save(tmp_path / "usual")
    made.save(tmp_path / "more", full_precision=True, ants_warp=True, extra={"report.html": lambda: "<p>"})
    usual, more = ({path.name for path in (tmp_path / name).iterdir()} for name in ("usual", "more"))
    assert usual == {"warped.nii.gz", "transform.h5", "inverse_transform.h5", "report.json"}
    assert more == {*usual, "warp.nii.gz", "report.html"}
    within = [
        json.loads((tmp_path / name / "report.json").read_text())["stored_within_mm"] for name in ("usual", "more")
    ]
    assert within == [WITHIN * min(1, *scan.spacing), 0]
    stored = transform_files.read(tmp_path / "more" / "transform.h5")
    assert isinstance(stored, WorldTransform)
    assert np.array_equal(stored.displacement, transform.displacement)
    Registration(transform, transform, tiny, tiny, tiny, Report(device="cpu")).save(tmp_path / "tiny")
    report = json.loads((tmp_path / "tiny" / "report.json").read_text())
    assert report["stored_within_mm"] == pytest.approx(0.0001)  # a hundredth of a voxel
