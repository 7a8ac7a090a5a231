"""Maps of the world, as commands use them: one definition of folds, no loops over voxels, and little memory."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")


def test_jacobian_and_evaluate_report_the_same_folds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The map folds in the outermost layer and in a few voxels inside; only the latter are counted."""
    side = 10
    image = sitk.GetImageFromArray(np.random.default_rng(0).normal(size=(side,) * 3).astype(np.float32))
    field = np.zeros((side,) * 3 + (3,))
    field[..., 0, 0] = 1.5  # beyond their neighbours along x: the first layer alone has a negative determinant
    field[5, 5, 4] = (4.0, 0.0, 0.0)
    vectors = sitk.GetImageFromArray(field, isVector=True)
    sitk.WriteImage(image, str(tmp_path / "scan.nii.gz"))
    sitk.WriteTransform(sitk.DisplacementFieldTransform(vectors), str(tmp_path / "t.h5"))
    table = "fixed,moving,transform\nscan.nii.gz,scan.nii.gz,t.h5\n"
    (tmp_path / "pairs.csv").write_text(table)

    assert main(["jacobian", "-t", str(tmp_path / "t.h5"), "-o", str(tmp_path / "j.nii.gz")]) == 0
    printed = float(re.search(r"folds ([\d.]+) %", capsys.readouterr().out)[1])
    assert main(["evaluate", str(tmp_path / "pairs.csv"), "--out", str(tmp_path / "scores")]) == 0
    with open(tmp_path / "scores" / "scores.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["folds_percent"]) > 0
    assert printed == pytest.approx(float(row["folds_percent"]), abs=1e-3), "one transform, two shares of folds"


def bspline(image: object, seed: int = 0) -> object:
    """A cubic B-spline over the image's field of view that moves points by up to a few millimetres."""
    spline = sitk.BSplineTransformInitializer(image, [4, 5, 3])
    count = len(spline.GetParameters())
    spline.SetParameters(np.random.default_rng(seed).uniform(-4, 4, count).tolist())
    return spline


def test_a_bspline_is_evaluated_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`carl warp` agrees with SimpleITK's resampling, without a call for every voxel."""
    values = np.random.default_rng(0).uniform(0, 1000, (12, 14, 16)).astype(np.float32)
    image = sitk.GetImageFromArray(values)
    image.SetSpacing((1.5, 0.8, 2.0))
    image.SetOrigin((-20.0, 5.0, 30.0))
    spline = bspline(image)
    sitk.WriteImage(image, str(tmp_path / "scan.nii.gz"))
    sitk.WriteTransform(spline, str(tmp_path / "spline.tfm"))
    calls = []
    transform_point = sitk.Transform.TransformPoint

    def counted(*arguments: object) -> object:
        calls.append(1)
        return transform_point(*arguments)

    monkeypatch.setattr(sitk.Transform, "TransformPoint", counted)
    scan, out = str(tmp_path / "scan.nii.gz"), tmp_path / "warped.nii.gz"
    assert main(["warp", "-i", scan, "-t", str(tmp_path / "spline.tfm"), "-r", scan, "-o", str(out)]) == 0
    expected = sitk.GetArrayFromImage(sitk.Resample(image, image, spline, sitk.sitkLinear, 0.0))
    assert np.abs(sitk.GetArrayFromImage(sitk.ReadImage(str(out))) - expected).max() < 0.01
    assert len(calls) < 100, f"TransformPoint was called {len(calls)} times for {values.size} voxels"


MEASURE = """if 1:
    import resource, sys
    import SimpleITK, h5py, torch
    from carlreg.cli import main

    small, large, out = sys.argv[1:]
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert main(["convert", small, out]) == 0
    before = peak()
    assert main(["convert", large, out, "--overwrite"]) == 0
    print(peak() - before)
"""


def test_a_field_is_converted_in_about_twice_its_memory(tmp_path: Path) -> None:
    """From an ITK file to an image of displacements: the field itself, and what is written. Before, it took seven."""
    megabytes = {}
    for name, shape in (("small", (4, 4, 4)), ("large", (256, 256, 128))):
        field = np.zeros((*shape[::-1], 3), np.float32)
        field[1:3, 1:3, 1:3] = 1.5
        megabytes[name] = field.nbytes / 2**20
        write_field(tmp_path / f"{name}.h5", field)
    arguments = [str(tmp_path / name) for name in ("small.h5", "large.h5", "warp.nii.gz")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, encoding="utf-8", check=True
    )
    used = float(done.stdout.split()[-1])
    allowed = 3 * megabytes["large"] + 250  # slabs of points
    assert used < allowed, f"{used:.0f} MB for a field of {megabytes['large']:.0f} MB"


def write_field(path: Path, field: np.ndarray) -> None:
    """An ITK file with a displacement field (z, y, x, 3) of 1 mm voxels."""
    h5py = pytest.importorskip("h5py")
    text = h5py.string_dtype("ascii")
    with h5py.File(path, "w") as file:
        for name, version in (("ITKVersion", "5.4.0"), ("HDFVersion", "1.8.0")):
            file.create_dataset(name, data=[version], dtype=text)
        group = file.create_group("TransformGroup/0")
        group.create_dataset("TransformType", data=["DisplacementFieldTransform_float_3_3"], dtype=text)
        group["TransformParameters"] = field.ravel()
        group["TransformFixedParameters"] = [*field.shape[2::-1], 0.0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1]
