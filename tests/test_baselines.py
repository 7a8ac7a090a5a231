"""Baselines: results are kept, failures recorded, and a missing package is reported in one line."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_pairs
from test_agreement import state_dict

from carlreg import register
from carlreg.cli import main
from carlreg.evaluation.baselines import BASELINES, cached, icon
from carlreg.evaluation.scores import score
from carlreg.evaluation.sources import Result, identity, in_folder
from carlreg.files.images import Image, from_array, read, write
from carlreg.files.tables import Pair
from carlreg.model.icon import from_icon
from carlreg.model.loaded import load_model

pytest.importorskip("SimpleITK")

NEEDS = {"ants-affine": "ants", "ants-synquick": "ants", "greedy": "picsl_greedy", "convexadam": "convexAdam"}
SHIFT = (4.0, -2.0, 3.0)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """The same blobs under two headers, the moving one shifted by SHIFT."""
    index = np.stack(np.meshgrid(*(np.arange(32),) * 3, indexing="ij"), axis=-1)
    rng = np.random.default_rng(0)
    image = sum(np.exp(-((index - rng.uniform(8, 24, 3)) ** 2).sum(-1) / 18) for _ in range(12))
    moved = np.eye(4)
    moved[:3, 3] = SHIFT
    files = []
    for name, affine in (("fixed", np.eye(4)), ("moving", moved)):
        files.append(tmp_path / f"{name}.nii.gz")
        write(from_array((1000 * np.asarray(image)).astype(np.float32), affine), files[-1])
    points = tmp_path / "points.csv"
    points.write_text("i,j,k\n10,12,14\n20,18,16\n15,15,15\n")
    return Pair("one", *files, fixed_landmarks=points, moving_landmarks=points)


def test_a_result_is_kept_and_taken_from_its_folder(pair: Pair, tmp_path: Path) -> None:
    calls = []

    def counted(pair: Pair, fixed: Image, moving: Image) -> Result:
        calls.append(pair.name)
        found = identity(pair, fixed, moving)
        return Result(found.transform, found.inverse, seconds=1.5)

    method = cached(counted, tmp_path / "kept")
    first, second = score(pair, method), score(pair, method)
    again = score(pair, in_folder(tmp_path / "kept"))
    assert calls == ["one"]
    for scores in (first, second, again):
        assert scores.failures == []
        assert scores.figures["tre_mm"] == pytest.approx(np.linalg.norm(SHIFT))
        assert scores.figures["seconds"] == 1.5
        assert scores.figures["inverse_consistency_mm"] < 1e-6


def test_a_failure_is_recorded_and_told_again(pair: Pair, tmp_path: Path) -> None:
    calls = []

    def fails(pair: Pair, fixed: Image, moving: Image) -> Result:
        calls.append(pair.name)
        raise ZeroDivisionError("it fell over")

    method = cached(fails, tmp_path / "kept")
    for _ in range(2):
        (text,) = score(pair, method).failures
        assert "ZeroDivisionError: it fell over" in text
    assert calls == ["one"]
    assert json.loads((tmp_path / "kept" / "one" / "report.json").read_text(encoding="utf-8"))["failure"].endswith(
        "it fell over"
    )


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_package_that_is_missing_is_named(name: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NEEDS[name], None)
    (text,) = score(pair, BASELINES[name]).failures
    assert "is not installed; expected it for this method: pip install" in text


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_baselines_undo_a_shift(name: str, pair: Pair) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    scores = score(pair, BASELINES[name])
    assert scores.failures == []
    assert scores.figures["tre_mm"] < 1.5
    assert scores.figures["seconds"] > 0


def test_by_name_from_the_command_line(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs([pair], tmp_path / "pairs.csv")
    words = ["evaluate", str(tmp_path / "pairs.csv"), "--method", "before=identity", "--save", str(tmp_path / "kept")]
    assert main(words) == 0
    assert "before" in capsys.readouterr().out
    assert (tmp_path / "kept" / "before" / "one" / "transform.h5").is_file()


def test_a_checkpoint_of_icon_registration(tmp_path: Path) -> None:
    """The same result as the network's when its weights are imported by hand, with margins uncropped."""
    weights = state_dict("gradicon-2d")
    torch.save(weights, tmp_path / "network.trch")
    files = []
    for seed, name in enumerate(("fixed", "moving")):
        files.append(tmp_path / f"{name}.nii.gz")
        data = np.random.default_rng(seed).random((40, 36)).astype(np.float32)
        data[22:] = 0
        write(from_array(data), files[-1])
    pair = Pair("flat", *files)
    method = icon(tmp_path / "network.trch", grid=(40, 36), io_iterations=0, device="cpu")
    result = method(pair, read(pair.fixed), read(pair.moving))
    options = {"io_iterations": 0, "device": "cpu", "allow_identity": False}
    by_hand = register(fixed=files[0], moving=files[1], model=from_icon(weights), **options)
    assert main(["models", "import", str(tmp_path / "network.trch"), str(tmp_path / "n.safetensors")]) == 0
    assert load_model(tmp_path / "n.safetensors", "cpu").keeps_margins
    points = np.random.default_rng(2).uniform(5, 30, (20, 2))
    assert np.abs(by_hand.transform(points) - points).max() > 0.01
    assert np.allclose(result.transform(points), by_hand.transform(points), atol=1e-5)
    (tmp_path / "bad.trch").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        icon(tmp_path / "bad.trch")
    torch.save({"a": torch.zeros(2)}, tmp_path / "other.trch")
    with pytest.raises(ValueError, match="expected a network of icon_registration"):
        icon(tmp_path / "other.trch")
