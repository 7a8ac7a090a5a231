"""`carl evaluate` on results that are damaged, do not belong together or would leave their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carlreg import gradicon, save
from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")

SHAPE = (12, 11, 10)


def volume(path: Path, data: np.ndarray, origin: tuple[float, ...] = (0.0, 0.0, 0.0)) -> None:
    image = sitk.GetImageFromArray(data)
    image.SetOrigin(origin)
    sitk.WriteImage(image, str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images with labels, and a table of two pairs."""
    rng = np.random.default_rng(0)
    for name in "abc":
        volume(tmp_path / f"{name}.nii.gz", rng.random(SHAPE).astype(np.float32))
        volume(tmp_path / f"{name}_seg.nii.gz", rng.integers(1, 3, SHAPE).astype(np.uint8))
    table(tmp_path)
    return tmp_path


def table(folder: Path, **columns: tuple[str, str]) -> Path:
    """The pairs of a with b and with c, and more columns with a cell for each."""
    header = ["fixed", "moving", "fixed_seg", "moving_seg", *columns]
    rows = [["a.nii.gz", f"{name}.nii.gz", "a_seg.nii.gz", f"{name}_seg.nii.gz"] for name in "bc"]
    cells = [[*row, *(column[number] for column in columns.values())] for number, row in enumerate(rows)]
    path = folder / "pairs.csv"
    path.write_text("\n".join(",".join(row) for row in [header, *cells]) + "\n")
    return path


def scores(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "out" / "scores.json").read_text(encoding="utf-8"))["scores"]
    return rows


def write_field(path: Path, dim: int) -> None:
    image = sitk.GetImageFromArray(np.zeros((*SHAPE[:dim], dim)), isVector=True)
    sitk.WriteImage(image, str(path))


def test_an_inverse_of_another_dimension_does_not_stop_the_evaluation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, dim in (("b_to_a", 2), ("c_to_a", 3)):
        own = folder / "ants" / name
        own.mkdir(parents=True)
        sitk.WriteTransform(sitk.AffineTransform(3), str(own / "x0GenericAffine.mat"))
        write_field(own / "x1Warp.nii.gz", 3)
        write_field(own / "x1InverseWarp.nii.gz", dim)
    words = ["evaluate", str(folder / "pairs.csv"), "--method", f"ants={folder / 'ants'}", "-o", str(folder / "out")]
    assert main(words) == 1
    assert (folder / "out" / "scores.json").is_file(), "the evaluation stopped at the first pair"
    first, second = scores(folder)
    assert len(first["failures"]) == 1
    assert first["dice"] is not None
    assert first["inverse_consistency_mm"] is None
    assert second["failures"] == []
    assert second["inverse_consistency_mm"] == pytest.approx(0)
    assert "b_to_a by ants: inverse consistency: " in capsys.readouterr().err


def test_a_damaged_inverse_costs_one_figure(folder: Path) -> None:
    sitk.WriteTransform(sitk.AffineTransform(3), str(folder / "good.tfm"))
    (folder / "bad.h5").write_bytes(b"not a transform")
    path = table(folder, transform=("good.tfm", "good.tfm"), inverse=("bad.h5", "good.tfm"))
    assert main(["evaluate", str(path), "-o", str(folder / "out")]) == 1
    first, second = scores(folder)
    assert "bad.h5" in first["failures"][0]
    assert first["dice"] is not None
    assert second["failures"] == []


def test_results_stay_in_their_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(folder, name=("../../x", "fine"))
    words = ["evaluate", str(path), "--method", "before=identity", "--save", str(folder / "kept")]
    code = main(words)
    assert not (folder / "x").exists(), "a result was written outside of --save"
    assert code == 1
    assert "invalid name '../../x': it must not contain a path separator" in capsys.readouterr().err


def test_a_model_is_loaded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    loads = []
    load_file = safetensors.torch.load_file
    monkeypatch.setattr("carlreg.model.files.load_file", lambda *a, **k: loads.append(a) or load_file(*a, **k))
    model = folder / "net.safetensors"
    save(gradicon(3, 2, unet_down=(4,) * 5, unet_up=(4,) * 5), model, metadata={"grid": "16 16 16"})
    words = ["evaluate", str(folder / "pairs.csv"), "--model", str(model), "--io-iterations", "0", "--device", "cpu"]
    assert main([*words, "-o", str(folder / "out")]) == 0
    assert len(scores(folder)) == 2
    assert len(loads) == 1


def test_labels_of_another_grid_are_not_scored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = np.random.default_rng(1).integers(1, 3, SHAPE).astype(np.uint8)
    volume(folder / "b_seg.nii.gz", labels, origin=(0.0, 0.0, 3.0))
    words = ["evaluate", str(folder / "pairs.csv"), "--method", "before=identity", "-o", str(folder / "out")]
    assert main(words) == 1
    assert "b_seg.nii.gz lies up to 3 mm away from" in capsys.readouterr().err
    first, second = scores(folder)
    assert first["dice"] is None
    assert second["dice"] is not None
