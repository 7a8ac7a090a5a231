"""The scripts of the rotation experiment, with tiny networks for two steps; and that they turn what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "experiments" / "rotation"


def run(script: str | Path, *words: object) -> str:
    """What a script prints; it must end well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    command = [sys.executable, str(FOLDER / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def retinas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty drawings of 96 × 96: thick arcs of circles, each its own way."""
    random = np.random.default_rng(0)
    i, j = np.mgrid[:96, :96]
    images = np.zeros((20, 96, 96), bool)
    for image in images:
        for _ in range(5):
            (y, x), radius = random.uniform(0, 96, 2), random.uniform(20, 70)
            image |= np.abs(np.hypot(i - y, j - x) - radius) < 2
    path = tmp_path_factory.mktemp("data") / "retina.npz"
    np.savez(path, bits=np.packbits(images.reshape(20, -1), axis=1), shape=images.shape)
    return path


def test_retinas_from_training_to_the_figure(retinas: Path, tmp_path: Path) -> None:
    small = ("--side", 32, "--angles", 0, 90)
    words = (retinas, tmp_path, "--tiny", "--images", 1, "--steps", 2, "--diffusion", 2, *small)
    run("train.py", *words, "--networks", "rot", "outside", "displacement")
    assert "1 runs" in run("train.py", *words, "--networks", "rot", "CARL")  # the other one is there
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [one["network"] for one in runs["runs"]] == ["rot", "outside", "displacement", "CARL"]
    assert {angle: len(scores) for angle, scores in runs["runs"][0]["dice"].items()} == {"0": 40, "90": 40}
    assert [entry["step"] for entry in runs["runs"][0]["losses"]] == [2, 2]
    methods = [f"--method={name}={tmp_path / f'{name}-Baseline-0.safetensors'}" for name in ("rot", "CARL")]
    run("sweep.py", retinas, tmp_path, *methods, "--pairs", 1, "--optimize", 1, *small)
    sweep = json.loads((tmp_path / "sweep.json").read_text())
    assert {name: list(scores) for name, scores in sweep["optimised"].items()} == {
        "rot": ["0", "90"],
        "CARL": ["0", "90"],
    }
    run("plot.py", tmp_path)
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("angles", "grids"))


def test_a_turned_retina_is_the_retina_turned(retinas: Path) -> None:
    """At quarter turns the array itself can be turned; the fixed images are those of upright pairs, in their places."""
    code = (
        "import torch, angles, data; "
        f"images = data.load({str(retinas)!r}, 'cpu')[1][:2]; "
        "made = angles.square(images, 1, [0, 90, 180], 32); "
        "assert torch.allclose(made['90'].moving, made['0'].moving.rot90(-1, (2, 3)), atol=1e-5); "
        "assert torch.allclose(made['180'].moving, made['0'].moving.rot90(2, (2, 3)), atol=1e-5); "
        "flat = data.build(images, 'Baseline', 1); "
        "assert torch.equal(made['0'].fixed[:, :, 4:28, 4:28], flat.fixed[:, :, :24]); "
        "assert torch.allclose(made['0'].moving[:, :, 4:28, 4:28], flat.moving[:, :, :24], atol=1e-5); "
        "assert made['0'].moving.sum() > 100"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True
    )
