"""The demo, with a small model and tiny images: correct scores, files a user can open, and one-line errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import gradicon, save
from carlreg.cli import main
from carlreg.demo import SHIFT, SyntheticPair, make_pair
from carlreg.files import transform_files
from carlreg.files.images import map_points, read, read_labels
from carlreg.files.results import FILES

pytest.importorskip("SimpleITK")
PICTURES = ["fixed.nii.gz", "fixed_labels.nii.gz", "moving.nii.gz", "moving_labels.nii.gz"]


@pytest.fixture(scope="module")
def pair() -> SyntheticPair:
    return make_pair(seed=1, size=32)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    about = {"grid": "16 16 16", "view": "whole"}
    save(gradicon(3, 2, **SMALL), path, metadata=about)  # starts at the identity of the unit cubes
    return path


def test_the_fields_of_view_differ_by_a_third(pair: SyntheticPair) -> None:
    length = pair.fixed.shape[2] * pair.fixed.spacing[2]
    points = pair.landmarks()
    away = (pair.truth(points) - points)[:, 2].mean()
    assert away == pytest.approx(-length / 3, abs=0.1 * length)
    assert pair.common.mean() == pytest.approx(2 / 3, abs=0.12)
    assert np.array_equal(pair.fixed.affine, pair.moving.affine)  # headers say nothing about it


def test_the_truth_scores_best(pair: SyntheticPair) -> None:
    true, identity = pair.score(pair.truth), pair.score(lambda points: points)
    off = pair.score(lambda points: pair.truth(points) + np.array([0.0, 3.0, 4.0]))
    assert true["error_mm"]["mean"] == 0
    assert off["error_mm"]["mean"] == pytest.approx(5)
    assert true["dice"] > 0.7 > 0.3 > identity["dice"]
    assert true["dice"] > off["dice"]
    assert {"liver", "right kidney", "left kidney", "spleen", "stomach", "aorta"} <= set(true["dice_of"])


def test_the_shifted_pair_is_the_same_pair_shifted(pair: SyntheticPair) -> None:
    shifted = make_pair(seed=1, size=32, shift=SHIFT)
    points = pair.landmarks()
    assert np.abs(shifted.truth(points) - pair.truth(points) - np.array(SHIFT)).max() < 1e-6
    assert np.array_equal(shifted.fixed.data, pair.fixed.data)
    assert not np.array_equal(shifted.moving.data, pair.moving.data)


def test_the_command(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    command = ["demo", "--out", str(out), "--size", "24", "--seed", "3", "--model", str(model_file), "--quick"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    assert sorted(os.listdir(out)) == ["demo.json", "pair", "shifted"]
    for name in ("pair", "shifted"):
        assert sorted(os.listdir(out / name)) == sorted({*FILES, *PICTURES, "report.html", "warped_seg.nii.gz"})
        assert str(out / name / "report.html") in printed
        for when in ("before", "after"):
            assert f"{report[name][when]['dice']:.3f}" in printed
            assert f"{report[name][when]['error_mm']['mean']:.1f}" in printed
        # This model's answer is the identity, so nothing changes but by rounding.
        assert report[name]["after"]["dice"] == pytest.approx(report[name]["before"]["dice"], abs=0.01)
    assert str(out / "demo.json") in printed
    assert report["answer_moved_mm"]["shift"] == pytest.approx([0, 0, 0], abs=0.01)
    assert report["answer_moved_mm"]["off_mean"] == pytest.approx(np.linalg.norm(SHIFT), abs=0.02)

    # The files are what was scored: the figures can be had again from them.
    fixed, labels = read(out / "pair" / "fixed.nii.gz"), read_labels(out / "pair" / "fixed_labels.nii.gz")
    assert fixed.shape == labels.shape == (24, 24, 18)
    pair = make_pair(seed=3, size=24)
    assert np.array_equal(fixed.data, pair.fixed.data)
    assert np.array_equal(labels.data, pair.fixed_labels.data)
    assert np.abs(map_points(fixed.affine, np.zeros(3)) - pair.fixed.affine[:3, 3]).max() < 1e-3
    transform = transform_files.read(out / "pair" / "transform.h5")
    again = pair.score(transform)
    assert again["error_mm"]["mean"] == pytest.approx(report["pair"]["after"]["error_mm"]["mean"], abs=0.02)


def test_what_is_there_is_kept(model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.json").write_text("mine")
    command = ["demo", "--out", str(tmp_path), "--size", "16", "--model", str(model_file)]
    assert main(command) == 1
    assert "already holds demo.json; choose another folder, or give --overwrite" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["demo.json"]
    assert (tmp_path / "demo.json").read_text(encoding="utf-8") == "mine"
    assert main([*command, "--overwrite"]) == 0
    report = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert report["size"] == 16
    # Without --quick the fields are optimised.
    assert json.loads((tmp_path / "pair" / "report.json").read_text(encoding="utf-8"))["io_over"] == "fields"
    assert report["pair"]["after"] != report["pair"]["before"]


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--size", "3"]) == 2
    assert main(["demo", "--out", str(tmp_path / "x"), "--size", "16", "--model", "magic"]) == 1
    assert "no model 'magic'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
