"""One definition of folds: every command gives the same share for the same transform."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")


def test_jacobian_and_evaluate_report_the_same_folds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Space is turned over in the outermost layer and in a few voxels inside; only the latter are folds."""
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
