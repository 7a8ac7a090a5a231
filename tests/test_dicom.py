"""DICOM as clinics have it: several series in a folder, multi-frame files, and a tilted gantry."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carlreg import register
from carlreg.cli import main
from carlreg.errors import InputError
from carlreg.files import images
from carlreg.files.images import Choice, Image, ImageError, from_array, list_series, map_points, read
from carlreg.files.orientation import to_closest_ras

sitk = pytest.importorskip("SimpleITK")
RNG = np.random.default_rng(5)
CT = "1.2.840.10008.5.1.4.1.1.2"


def write_series(
    folder: Path,
    image: Image,
    uid: str,
    number: int = 0,
    description: str = "",
    shear: tuple[float, ...] = (0.0, 0.0, 0.0),
) -> None:
    """A file for each slice, each of them moved by `shear` mm more than the one before."""
    folder.mkdir(exist_ok=True)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    volume = image.to_sitk()
    d = volume.GetDirection()
    for k in range(image.shape[2]):
        piece, place = volume[:, :, k], map_points(image.affine, [0, 0, k]) + k * np.array(shear)
        tags = {
            **{"0008|0060": "CT", "0008|0016": CT, "0020|000d": "1.2.3", "0020|000e": uid, "0008|103e": description},
            **{"0008|0018": f"{uid}.{k + 1}", "0020|0013": str(k + 1), "0020|0011": str(number) if number else ""},
            "0020|0037": "\\".join(f"{x:.10f}" for x in (d[0], d[3], d[6], d[1], d[4], d[7])),
            "0020|0032": "\\".join(f"{x:.8f}" for x in place),
        }
        for key, value in tags.items():
            piece.SetMetaData(key, value)
        writer.SetFileName(str(folder / f"{uid}_{k}.dcm"))
        writer.Execute(piece)


def scan(*shape: int, spacing: tuple[float, ...] = (1.5, 1.5, 4.0)) -> Image:
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = (-20, 10, 35)
    return from_array(RNG.integers(-1000, 1000, shape).astype(np.int16), affine)


@pytest.fixture
def study(tmp_path: Path) -> tuple[Path, dict[str, Image]]:
    """A localizer, an arterial and a venous phase in one folder."""
    phases = {"localizer": scan(8, 9, 3), "arterial phase": scan(8, 9, 6), "venous phase": scan(8, 9, 6)}
    for number, (name, image) in enumerate(phases.items(), 1):
        write_series(tmp_path / "study", image, f"1.2.3.{number}", number, name)
    return tmp_path / "study", phases


def test_several_series_are_listed_and_one_is_chosen(study: tuple[Path, dict[str, Image]]) -> None:
    folder, phases = study
    assert [(one.number, one.description, one.files) for one in list_series(folder)] == [
        ("1", "localizer", 3),
        ("2", "arterial phase", 6),
        ("3", "venous phase", 6),
    ]
    listed = r"holds 3 DICOM series: 1 'localizer' \(CT, 3 files\), 2 'arterial phase' \(CT, 6 files\), 3 'venous"
    with pytest.raises(ImageError, match=rf"{listed}.*choose it by --series 1"):
        read(folder)
    for wanted, name in (("2", "arterial phase"), ("1.2.3.3", "venous phase"), ("LOCAL", "localizer")):
        image = read(folder, Choice(series=wanted))
        assert np.array_equal(to_closest_ras(image).data, to_closest_ras(phases[name]).data)
    with pytest.raises(ImageError, match="2 of them match 'phase'"):
        read(folder, Choice(series="phase"))
    with pytest.raises(ImageError, match="none matches '7'"):
        read(folder, Choice(series="7"))


def test_series_on_the_command_line(
    study: tuple[Path, dict[str, Image]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, phases = study
    out = tmp_path / "out"
    words = ["register", "-f", str(folder), "-m", str(folder), "-o", str(out), "--model", "none", "--no-html"]
    assert main([*words, "--transform", "rigid"]) == 1
    err = capsys.readouterr().err
    assert "holds 3 DICOM series" in err
    assert len(err.splitlines()) == 1
    chosen = ["--fixed-series", "2", "--moving-series", "venous", "--transform", "rigid"]
    assert main([*words, *chosen]) == 0
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["request"]["options"]["moving_series"] == "venous"
    assert report["inputs"]["fixed"]["shape"] == list(phases["arterial phase"].shape)
    capsys.readouterr()
    assert main(["info", str(folder)]) == 0
    assert "3 'venous phase' (CT, 6 files)" in capsys.readouterr().out
    assert main(["info", str(folder), "--series", "3"]) == 0
    assert "8 × 9 × 6" in capsys.readouterr().out
    assert main(["convert", str(folder), str(tmp_path / "a.nii.gz"), "--series", "arterial"]) == 0
    assert np.array_equal(
        to_closest_ras(read(tmp_path / "a.nii.gz")).data, to_closest_ras(phases["arterial phase"]).data
    )
    with pytest.raises(ImageError, match="is a file, but a DICOM series was chosen"):
        read(tmp_path / "a.nii.gz", Choice(series="1"))
    short: dict[str, Any] = {"model": "none", "transform": "rigid", "io_iterations": 0}
    one = register(fixed=tmp_path / "a.nii.gz", moving=folder, series="2", **short)  # the other image is a file
    assert "arterial" in one.moving.name
    with pytest.raises(InputError, match=r"a DICOM series was chosen \(2\), but .* are files; expected a folder"):
        register(fixed=tmp_path / "a.nii.gz", moving=tmp_path / "a.nii.gz", series="2", **short)
    both = register(fixed=folder, moving=folder, series="2", model="none", transform="rigid", io_iterations=0)
    assert "arterial" in both.fixed.name
    assert "arterial" in both.moving.name


def test_folders_of_series_below_one_without_are_named(
    study: tuple[Path, dict[str, Image]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a disc from a hospital, where a file DICOMDIR lies beside folders of folders."""
    disc = tmp_path / "disc"
    for name in ("ST0", "ST1"):
        shutil.copytree(study[0], disc / "DICOM" / name)
    (disc / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    for word in ("info", "convert"):
        assert main([word, str(disc), *([str(tmp_path / "a.nii.gz")] if word == "convert" else [])]) == 1
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        below = f"{disc / 'DICOM' / 'ST0'}, {disc / 'DICOM' / 'ST1'} below it have files"
        assert f"{disc} is a folder without a DICOM series; expected the folder of one: {below}" in err
    assert not (tmp_path / "a.nii.gz").exists()


@pytest.mark.parametrize("inside", [True, False])
def test_an_enhanced_multi_frame_file(tmp_path: Path, inside: bool) -> None:
    """One file with all slices: as it is, and as the only file of a folder."""
    image = scan(10, 8, 6, spacing=(1.0, 2.0, 3.0))
    volume = image.to_sitk()
    volume.SetMetaData("0008|0060", "MR")
    (tmp_path / "d").mkdir()
    sitk.WriteImage(volume, str(tmp_path / "d" / "enhanced.dcm"))
    header = sitk.ImageFileReader()
    header.SetFileName(str(tmp_path / "d" / "enhanced.dcm"))
    header.ReadImageInformation()
    assert header.GetMetaData("0008|0016").strip("\0 ") == "1.2.840.10008.5.1.4.1.1.4.1"  # Enhanced MR Image Storage
    found = read(tmp_path / "d" if inside else tmp_path / "d" / "enhanced.dcm")
    assert np.array_equal(found.data, image.data)
    assert np.allclose(found.affine, image.affine, atol=1e-5)


def test_a_tilted_gantry_is_corrected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A world-space pattern, sampled by slices that move 2 mm along y with each step of 4 mm: it comes out where it is,
    on axes at right angles. The pattern is linear, so that linear interpolation is exact."""
    shape, spacing = (9, 20, 7), np.array([1.5, 1.5, 4.0])
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = (-20, 10, 35)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1).astype(float)
    world = map_points(affine, index) + index[..., 2:] * np.array([0.0, 2.0, 0.0])
    pattern = np.array([3.0, 5.0, -4.0])
    image = Image(np.rint(world @ pattern + 100).astype(np.int16), affine)
    write_series(tmp_path / "d", image, "1.2.3.9", shear=(0.0, 2.0, 0.0))
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path / "d")
    assert "corrected a gantry tilt of 26.6°" in caplog.text
    assert np.allclose(found.affine[:3, :3].T @ found.affine[:3, :3], np.diag(spacing**2), atol=1e-4)
    assert found.shape == (9, 20 + 8, 7)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in found.shape), indexing="ij"), axis=-1).astype(float)
    expected = map_points(found.affine, index) @ pattern + 100
    scanned = found.data != found.data.min()
    assert scanned.sum() > 0.85 * image.data.size
    assert np.abs(found.data - expected)[scanned].max() <= 1


def test_a_missing_slice_is_refused(tmp_path: Path) -> None:
    write_series(tmp_path / "d", scan(8, 9, 6), "1.2.3.4")
    (tmp_path / "d" / "1.2.3.4_2.dcm").unlink()
    with pytest.raises(ImageError, match=r"mm away from even steps of .* expected every slice once"):
        images.read(tmp_path / "d")
