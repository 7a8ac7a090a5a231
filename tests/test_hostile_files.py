"""Damaged and hostile files: one clear line, no crash, no more memory than the file calls for, nothing private read."""

from __future__ import annotations

import gzip
import json
import logging
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import carlreg
from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")
nibabel = pytest.importorskip("nibabel")
h5py = pytest.importorskip("h5py")

Err = pytest.CaptureFixture[str]


def run(capsys: Err, *words: object) -> str:
    """The one line with which a command refuses its input."""
    try:
        code: object = main([str(word) for word in words])
    except Exception as error:  # a traceback
        code = repr(error)
    err = capsys.readouterr().err
    assert code == 1, f"not refused as a user's mistake: exit code {code}"
    assert len(err.strip().splitlines()) == 1, f"not one line: {err}"
    return err


def refused(capsys: Err, path: Path, *expected: str) -> None:
    """`carl info` refuses a file in one line that names it."""
    err = run(capsys, "info", path)
    for words in (path.name, *expected):
        assert words in err, f"{words!r} is not in the message: {err}"


def in_a_process(*words: object, gigabytes: float = 3, seconds: int = 60) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with limited memory."""

    def limit() -> None:
        size = int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    command = [sys.executable, "-m", "carlreg", *map(str, words)]
    options = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "check": False}
    return subprocess.run(command, timeout=seconds, preexec_fn=limit, **options)


def refused_in_a_process(path: Path, *expected: str) -> None:
    done = in_a_process("info", path)
    assert done.returncode == 1, f"exit code {done.returncode} for {path.name}: {done.stderr[-300:]}"
    assert all(words in done.stderr for words in (path.name, *expected)), done.stderr


# ---- files that crash ITK and HDF5 ----------------------------------------------------------------------------------


def crashing_transform(path: Path) -> Path:
    """A transform of SimpleITK's with one byte changed: the length of a text, which HDF5 believes."""
    field = sitk.GetImageFromArray(np.random.default_rng(0).normal(size=(5, 6, 7, 3)), isVector=True)
    sitk.WriteTransform(sitk.DisplacementFieldTransform(field), str(path))
    content = bytearray(path.read_bytes())
    content[content.index(b"DisplacementFieldTransform") - 2] = 255
    path.write_bytes(content)
    return path


def test_a_transform_with_one_wrong_byte_does_not_crash(tmp_path: Path) -> None:
    refused_in_a_process(crashing_transform(tmp_path / "a.h5"), "cannot be read")


def test_a_bspline_of_a_million_million_points_does_not_crash(tmp_path: Path) -> None:
    lines = ["#Insight Transform File V1.0", "#Transform 0", "Transform: BSplineTransform_double_3_3", "Parameters: 0"]
    lines += ["FixedParameters: 10000 10000 10000 0 0 0 1 1 1 1 0 0 0 1 0 0 0 1"]
    (tmp_path / "a.tfm").write_text("\n".join(lines) + "\n")
    refused_in_a_process(tmp_path / "a.tfm", "BSplineTransform")


def test_one_crashing_file_fails_one_row(tmp_path: Path) -> None:
    scan = sitk.GetImageFromArray(np.random.default_rng(0).normal(size=(10, 11, 12)).astype(np.float32))
    sitk.WriteImage(scan, str(tmp_path / "scan.nii.gz"))
    sitk.WriteTransform(sitk.TranslationTransform(3, (1.0, 0.0, 0.0)), str(tmp_path / "good.h5"))
    crashing_transform(tmp_path / "bad.h5")
    rows = ["name,fixed,moving,transform"]
    rows += [f"{name},scan.nii.gz,scan.nii.gz,{name}.h5" for name in ("bad", "good")]
    (tmp_path / "pairs.csv").write_text("\n".join(rows) + "\n")
    done = in_a_process("evaluate", tmp_path / "pairs.csv", "--out", tmp_path / "scores")
    assert done.returncode == 1, f"exit code {done.returncode}: {done.stderr[-300:]}"
    scores = (tmp_path / "scores" / "scores.csv").read_text()
    assert "good" in scores, scores
    assert "bad.h5" in done.stderr + done.stdout, done.stderr


# ---- bombs ----------------------------------------------------------------------------------------------------------


def nifti(path: Path, *patches: tuple[int, bytes], data: np.ndarray | None = None) -> Path:
    """A NIfTI file with some bytes of its header replaced."""
    voxels = np.arange(8**3, dtype=np.int16).reshape(8, 8, 8) if data is None else data
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
    content = bytearray(path.read_bytes() if path.suffix == ".nii" else gzip.decompress(path.read_bytes()))
    for offset, values in patches:
        content[offset : offset + len(values)] = values
    path.write_bytes(content if path.suffix == ".nii" else gzip.compress(bytes(content)))
    return path


def test_voxels_far_behind_the_header_are_refused(tmp_path: Path, capsys: Err) -> None:
    path = nifti(tmp_path / "a.nii.gz", (108, struct.pack("<f", 1e9)))
    zeros = gzip.compress(bytes(2**26))
    with open(path, "ab") as file:  # a gzip file may have many parts
        for _ in range(16):
            file.write(zeros)
    refused(capsys, path, "voxels start at byte 1e+09")


def test_the_size_of_an_image_counts_its_own_bytes(
    tmp_path: Path, capsys: Err, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nifti(tmp_path / "a.nii.gz", data=np.random.default_rng(0).normal(size=(60, 60, 60)))  # 1.7 MB, float64
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 300 if name == "SC_PHYS_PAGES" else real(name))  # 1.2 MB
    refused(capsys, path, "60 × 60 × 60 voxels", "8 bytes each")


def model_file(path: Path, architecture: str) -> Path:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(4)}, path, {"format": "carlreg-1", "architecture": architecture})
    return path


def test_a_model_file_takes_no_more_memory_than_its_tensors(tmp_path: Path) -> None:
    encoder = {"part": "Encoder", "dim": 3, "channels": 1, "width": 6000, "blocks": 3, "dilations": [1, 2, 4]}
    attention = {"part": "CoordinateAttention", "encoder": encoder}
    path = model_file(tmp_path / "a.safetensors", json.dumps(attention))
    done = in_a_process("models", "verify", path, gigabytes=6)
    assert done.returncode == 1
    assert "does not match its own architecture" in done.stderr, done.stderr


def gif_bomb(path: Path, count: int) -> None:
    """A GIF of 8 × 8 pixels whose codes, 12 bits each, stand for up to 3839 pixels each."""
    codes = [(256, 9), (0, 9)]
    width = 9
    for code in range(258, 4096):
        codes.append((code, width))
        width += code + 1 == 1 << width and width < 12
    bits = held = 0
    data = bytearray()
    for code, wide in codes:
        bits |= code << held
        held += wide
        while held >= 8:
            data.append(bits & 255)
            bits, held = bits >> 8, held - 8
    assert held == 0
    data += bytes([0xFF, 0xFF, 0xFF]) * (count // 2)  # twice the last code
    blocks = b"".join(bytes([len(data[i : i + 255])]) + data[i : i + 255] for i in range(0, len(data), 255))
    head = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0xF7, 0, 0) + bytes(768)
    path.write_bytes(head + b"," + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\x08" + blocks + b"\0;")


def test_a_gif_takes_no_more_memory_than_its_pixels(tmp_path: Path) -> None:
    gif_bomb(tmp_path / "21_manual1.gif", 1_000_000)  # 1.5 MB, or 4 GB if all of it is decoded
    code = """if 1:
        import importlib, importlib.util, sys
        rooms = importlib.util.find_spec("carlreg.paper_data")
        retina = importlib.import_module("carlreg.paper_data.retina" if rooms else "carlreg.datasets.retina")
        print(retina.read(sys.argv[1]).shape)
    """
    limit = 3 * 2**30
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "21_manual1.gif")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        check=False,
    )
    assert "MemoryError" not in done.stderr, "8 × 8 pixels take more than 3 GB"
    assert done.stdout.strip() == "(8, 8)" or "cannot be read" in done.stderr, done.stderr[-300:]


# ---- private files --------------------------------------------------------------------------------------------------

META = """ObjectType = Image
NDims = 3
DimSize = 4 4 4
ElementSpacing = 1 1 1
ElementType = MET_UCHAR
ElementDataFile = {}
"""
NRRD = """NRRD0004
type: uint8
dimension: 3
sizes: 4 4 4
encoding: raw
data file: {}
"""
DETACHED: dict[str, Callable[[Path], tuple[str, str]]] = {
    "parent folder": lambda _: ("a.mhd", META.format("../secret.raw")),
    "in an mha": lambda _: ("a.mha", META.format("../secret.raw")),
    "absolute": lambda secret: ("a.nhdr", NRRD.format(secret)),
    "in an nrrd": lambda secret: ("a.nrrd", NRRD.format(secret)),
    "list": lambda _: ("a.mhd", META.format("LIST\n" + "../secret.raw\n" * 4)),
    "pattern": lambda _: ("a.nhdr", NRRD.format("../secret%d.raw 0 3 1")),
    "link": lambda _: ("a.mhd", META.format("link.raw")),
}


@pytest.mark.parametrize("case", DETACHED)
def test_voxels_outside_of_the_images_folder_are_refused(tmp_path: Path, capsys: Err, case: str) -> None:
    secret = tmp_path / "secret.raw"
    secret.write_bytes(bytes(range(64)))
    for number in range(4):
        (tmp_path / f"secret{number}.raw").write_bytes(bytes(range(16)))
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link.raw").symlink_to(secret)
    name, header = DETACHED[case](secret)
    (tmp_path / "open" / name).write_text(header)
    refused(capsys, tmp_path / "open" / name, "outside its own folder")


def test_voxels_beside_the_header_are_read(tmp_path: Path, capsys: Err) -> None:
    (tmp_path / "voxels.raw").write_bytes(bytes(range(64)))
    for name, header in (("a.mhd", META.format("voxels.raw")), ("a.nhdr", NRRD.format("voxels.raw"))):
        (tmp_path / name).write_text(header)
        assert main(["info", str(tmp_path / name)]) == 0
        assert "highest: 63" in capsys.readouterr().out


def test_hdf5_with_external_data_is_refused(tmp_path: Path, capsys: Err) -> None:
    """HDF5 can take a dataset from any file."""
    np.full(12, 7.0).tofile(tmp_path / "secret.raw")
    path = tmp_path / "a.h5"
    sitk.WriteTransform(sitk.AffineTransform(3), str(path))
    with h5py.File(path, "a") as file:
        group = file["TransformGroup/0"]
        del group["TransformParameters"]
        outside = [(str(tmp_path / "secret.raw"), 0, 96)]
        group.create_dataset("TransformParameters", (12,), np.float64, external=outside)
    refused(capsys, path, "other files")


# ---- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patches", "expected"),
    [
        ([(108, struct.pack("<f", float("nan")))], "voxels start at byte nan"),
        ([(72, struct.pack("<h", 8))], "8 bits per voxel for int16; expected 16"),
        ([(70, struct.pack("<hh", 16, 8))], "8 bits per voxel for float32; expected 32"),
    ],
    ids=["offset is NaN", "too few bits", "too few bits of a float"],
)
def test_headers_that_contradict_themselves(
    tmp_path: Path, capsys: Err, patches: list[tuple[int, bytes]], expected: str
) -> None:
    refused(capsys, nifti(tmp_path / "a.nii", *patches), expected)


def test_very_large_values_are_finite(tmp_path: Path) -> None:
    network = carlreg.gradicon(3, 2, unet_down=(2, 2, 2, 2, 2), unet_up=(2, 2, 2, 2, 2))
    ramp = np.linspace(-3e38, 3e38, 16, dtype=np.float32)[:, None, None] * np.ones((16, 16, 16), np.float32)
    error = None
    try:
        carlreg.register(fixed=ramp, moving=ramp[::-1].copy(), model=network, io_iterations=0, device="cpu")
    except ValueError as caught:
        error = str(caught)
    assert error is None, f"±3e38 was refused: {error}"


def turned(degrees: float, offset: tuple[float, ...] = (0, 0, 0)) -> np.ndarray:
    angle, affine = np.deg2rad(degrees), np.eye(4)
    affine[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    affine[:3, 3] = offset
    return affine


SHEARED = np.eye(4)
SHEARED[0, 1] = 0.4
FORMS = {
    "sform in MNI space": (turned(20, (5, 6, 7)), 4, turned(0), 1, turned(0)),
    "scanner sform": (turned(20), 1, turned(0), 1, turned(20)),
    "sheared sform": (SHEARED, 1, turned(0), 1, turned(0)),
}
"""sform and its code, qform and its code, and the positions, all in RAS."""


@pytest.mark.parametrize("case", FORMS)
def test_a_path_and_a_nibabel_image_lie_in_one_world(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """sform and qform disagree: ITK's rule decides for both, and a warning gives the distance."""
    sform, scode, qform, qcode, expected = FORMS[case]
    image = nibabel.Nifti1Image(np.random.default_rng(0).normal(size=(16, 16, 16)).astype(np.float32), np.eye(4))
    image.set_sform(sform, scode)
    image.set_qform(qform, qcode)
    nibabel.save(image, tmp_path / "a.nii.gz")
    network = carlreg.gradicon(3, 2, unet_down=(2, 2, 2, 2, 2), unet_up=(2, 2, 2, 2, 2))
    worlds = []
    for source in (tmp_path / "a.nii.gz", nibabel.load(tmp_path / "a.nii.gz")):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            result = carlreg.register(fixed=source, moving=source, model=network, io_iterations=0, device="cpu")
        worlds.append(result.fixed.index_to_world())
        assert "mm" in caplog.text, "no warning about sform and qform"
        assert "disagree" in caplog.text
    assert np.abs(worlds[0] - worlds[1]).max() < 1e-4, "a path and a nibabel image lie in different worlds"
    assert np.abs(worlds[0] - np.diag([-1, -1, 1, 1]) @ expected).max() < 1e-4


# ---- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_deeply_nested_architecture_is_refused(tmp_path: Path, capsys: Err, depth: int) -> None:
    down = '{"part": "Downsample", "aligned": true, "phi": '
    path = model_file(tmp_path / "a.safetensors", down * depth + "{}" + "}" * depth)
    err = run(capsys, "models", "verify", path)
    assert "a.safetensors" in err, f"the message does not name the file: {err[:300]}"


def test_a_checkpoint_whose_weights_have_too_few_axes_is_refused(tmp_path: Path, capsys: Err) -> None:
    names = ("downConvs.0.weight", "upConvs.0.weight", "batchNorms.0.weight", "lastConv.weight")
    torch.save({f"regis_net.net.{name}": torch.zeros(4) for name in names}, tmp_path / "a.trch")
    err = run(capsys, "models", "import", tmp_path / "a.trch", tmp_path / "a.safetensors")
    assert "does not match a network of icon_registration" in err, err[-300:]
