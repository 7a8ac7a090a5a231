"""The scripts of the rotation experiment, with tiny networks for two steps; and the rotations they apply."""

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
    """Run a script that must succeed; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    environment["PYTHONIOENCODING"] = "utf-8"
    command = [sys.executable, str(FOLDER / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def retinas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty different drawings of 96 × 96: thick circular arcs."""
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
    run("train.py", *words)
    runs = json.loads((tmp_path / "runs.json").read_text(encoding="utf-8"))
    assert [one["network"] for one in runs["runs"]] == ["rot", "outside", "CARL", "displacement"]
    assert {angle: len(scores) for angle, scores in runs["runs"][0]["dice"].items()} == {"0": 40, "90": 40}
    assert [entry["step"] for entry in runs["runs"][0]["losses"]] == [2, 2]
    methods = [f"--method={name}={tmp_path / f'{name}-Baseline-0.safetensors'}" for name in ("rot", "CARL")]
    run("sweep.py", retinas, tmp_path, *methods, "--pairs", 1, "--optimize", 1, *small)
    sweep = json.loads((tmp_path / "sweep.json").read_text(encoding="utf-8"))
    assert {name: list(scores) for name, scores in sweep["optimised"].items()} == {
        "rot": ["0", "90"],
        "CARL": ["0", "90"],
    }
    run("plot.py", tmp_path)
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("angles", "grids"))


def test_a_turned_retina_is_the_retina_turned(retinas: Path) -> None:
    """For quarter turns, the array itself can be rotated; the fixed images are those of upright pairs."""
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


def pack(path: Path) -> Path:
    """Boxes in balls, as experiments/base/prepare.py packs brains."""
    random = np.random.default_rng(0)
    i, j, k = np.mgrid[:32, :32, :32]
    packed = {}
    for n, split in enumerate(["train", "train", "dev", "dev", "val", "val"]):
        y, x = random.uniform(9, 14, 2)
        labels = ((abs(i - y) < 4) & (abs(j - x) < 3) & (abs(k - 16) < 5)).astype(np.uint8)
        ball = (i - 16) ** 2 + (j - 16) ** 2 + (k - 16) ** 2 < 13**2
        packed |= {
            f"brain/{split}/{n}": (100 * ball + 100 * labels).astype(np.uint8),
            f"brain/{split}/{n}/labels": labels,
        }
    np.savez(path, **packed)
    return path


def test_a_training_on_brains_is_taken_up_again(tmp_path: Path) -> None:
    words = (pack(tmp_path / "pack.npz"), tmp_path, "--side", 16, "--width", 4, "--handed", 1, "--pairs", 1)
    words += ("--diffusion", 1, "--steps", 1, "--synthetic", 0.5)
    run("brain.py", *words, "--seconds", 0)
    run("brain.py", *words)
    log = [json.loads(entry) for entry in (tmp_path / "run" / "log.jsonl").open(encoding="utf-8")]
    assert [(entry["stage"], entry["step"]) for entry in log if "losses" in entry] == [(0, 1), (1, 1)]
    assert 0 <= json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["dev"] <= 1


def test_an_encoder_is_taught_broken_off_and_given_to_the_rest(tmp_path: Path) -> None:
    packed, out = pack(tmp_path / "pack.npz"), tmp_path / "encoder"
    words = (packed, out, "--side", 16, "--width", 4, "--handed", 1, "--pairs", 2)
    run("encoder.py", *words, "--steps", 2)
    told = run("encoder.py", *words, "--steps", 4, "--validate-every", 3)
    (entry,) = (json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines())
    assert entry["step"] == 3
    assert entry["dev_median"] > 0
    assert json.loads((out / "encoder.json").read_text(encoding="utf-8"))["steps"] == 4
    assert "'steps': 4" in told
    rest = (packed, tmp_path / "rest", "--side", 16, "--pairs", 1, "--steps", 1)
    run("brain.py", *rest, "--model", out / "model.safetensors")
    log = [json.loads(line) for line in (tmp_path / "rest" / "run" / "log.jsonl").open(encoding="utf-8")]
    assert {(line["stage"], line["step"]) for line in log} == {(0, 1)}


def test_the_encoder_is_taught_the_right_places() -> None:
    """Of one brain seen twice, the second view is the first one where the maps say; and the loss is the cross-entropy
    of plain attention, over all keys, with the weights of linear interpolation at that place."""
    code = """
import itertools, torch, encoder as e
from carlreg.geometry.grids import pool
from carlreg.model.encoder import Encoder
from carlreg.model.algorithms import CoordinateAttention
from carlreg.geometry.transforms import compose, warp

generator = torch.Generator().manual_seed(0)
coarse = torch.rand(1, 1, 5, 5, 5, generator=generator)
brain = torch.nn.functional.pad(torch.nn.functional.interpolate(coarse, size=(16,) * 3, mode="trilinear"), (8,) * 6)
moving, fixed, p, s = e.views(brain.expand(2, -1, -1, -1, -1), 3, generator)
found = warp(moving, compose(p.inverse(), s), like=fixed, outside="zeros")
for one, other in zip(found, fixed):
    assert torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1] > 0.97
assert torch.corrcoef(torch.stack([moving.flatten(), fixed.flatten()]))[0, 1] < 0.9

e.QUERIES = 20
xi = CoordinateAttention(Encoder(3, width=6), 4, 4.0)
features = torch.randn(2, 3, 16, 16, 16, 6, generator=generator)
keys, queries = 4 * torch.nn.functional.normalize(features, dim=-1)
small = pool(pool(fixed))
loss = e.cross_entropy(xi, keys, queries, compose(p.inverse(), s), small, torch.Generator().manual_seed(1))
chosen = torch.randint(8**3, (20,), generator=torch.Generator().manual_seed(1))
total = 0.0
for b, n in itertools.product(range(3), chosen.tolist()):
    place = torch.tensor([n // 64, n // 8 % 8, n % 8])
    log = (keys[b].reshape(-1, 6) @ queries[b][tuple(place + 4)]).log_softmax(0).reshape(16, 16, 16)
    there = p.inverse()(s(((4 * place + 1.5) / 31).expand(3, 1, 3)))[b, 0] * 31
    index = ((there - 1.5) / 4 + 4).clamp(0, 15)
    low = index.floor().long().clamp(max=14)
    for corner in itertools.product((0, 1), repeat=3):
        share = torch.where(torch.tensor(corner) == 1, index - low, 1 - (index - low)).prod()
        total -= float(share * log[tuple(low + torch.tensor(corner))])
assert abs(float(loss) - total / 60) < 1e-4, (float(loss), total / 60)
"""
    subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=True
    )


def test_isotropic_packs_keep_proportions(tmp_path: Path) -> None:
    """A ball of 24 mm, off centre and in anisotropic voxels, becomes a ball of 12 voxels of 2 mm in the pack."""
    nib = pytest.importorskip("nibabel")
    shape, spacing = (60, 30, 50), np.array([1.0, 2.5, 1.5])
    place = np.stack(np.mgrid[: shape[0], : shape[1], : shape[2]], -1) * spacing
    middle = (np.array(shape) - 1) / 2 * spacing
    ball = np.linalg.norm(place - middle - [4, 0, -6], axis=-1) < 24
    for split, count in (("train", 4), ("val", 1)):
        (tmp_path / "brain" / split).mkdir(parents=True)
        for n in range(count):
            for name, values in ((f"{n}", 200 * ball), (f"{n}_labels", 60 * ball)):
                scan = nib.Nifti1Image(values.astype(np.uint8), np.diag([*spacing, 1]))
                nib.save(scan, tmp_path / "brain" / split / f"{name}.nii.gz")
    run(ROOT / "experiments/base/prepare.py", tmp_path, tmp_path / "pack.npz", "--sets", "brain", "--isotropic", 2)
    with np.load(tmp_path / "pack.npz") as packed:
        assert len(packed.files) == 10
        image, labels = packed["brain/dev/1"], packed["brain/dev/1/labels"]
    assert image.shape == (96, 96, 96)
    for seen in (image > 100, labels == 14):
        inside = np.argwhere(seen)
        assert inside.mean(axis=0) == pytest.approx(47.5 + np.array([2, 0, -3]), abs=0.25)
        assert inside.max(axis=0) - inside.min(axis=0) + 1 == pytest.approx(24, abs=1.5)
