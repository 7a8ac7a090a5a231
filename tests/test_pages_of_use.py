"""Pages that promise what they show: commands of other tools beside ours, and the reference of the library."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL

import carlreg
from carlreg import gradicon, save
from carlreg.cli import main
from carlreg.files import images
from carlreg.files.images import Image, map_points
from carlreg.model import loaded
from carlreg.registration.viewing import Viewer

sitk = pytest.importorskip("SimpleITK")
from test_agreement import state_dict  # noqa: E402
from test_product import blobs, oblique  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the page speaks of, and a small model."""
    torch.manual_seed(0)
    save(gradicon(3, 2, **SMALL), tmp_path / "small.safetensors", metadata={"grid": "16 16 16"})
    affine = oblique((1.5, 1.2, 2.0), (10, -20, 30))
    shifted = affine.copy()
    shifted[:3, 3] += (4, -3, 2)
    scan = blobs((20, 22, 18), affine)
    for name, matrix in (("fixed", affine), ("moving", shifted)):
        images.write(Image(scan.data, matrix), tmp_path / f"{name}.nii.gz")
        for kind in ("labels", "mask"):
            images.write(Image((scan.data > 300).astype(np.uint8), matrix), tmp_path / f"{name}_{kind}.nii.gz")
        points = map_points(matrix, [[8.0, 9.0, 7.0], [11.0, 10.0, 9.0], [9.0, 12.0, 8.0]])
        rows = "\n".join(",".join(map(str, point)) for point in points)
        for file in (f"{name}.csv", *(["points.csv"] if name == "fixed" else [])):
            (tmp_path / file).write_text(f"x,y,z\n{rows}\n", encoding="utf-8")
    bone = np.zeros(scan.shape, np.uint8)
    bone[6:12, 7:13, 6:11] = 1
    images.write(Image(bone, affine), tmp_path / "bone.nii.gz")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_for_newcomers_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    commands = re.findall(r"\| `(carl [^`]*)` \|$", text, re.MULTILINE)
    assert len(commands) > 20
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "register":
            words += ["--model", "small.safetensors", "--no-html"]
            words += [] if "--io_iterations" in words else ["--io-iterations", "0" if "--transform" in words else "1"]
        assert main(words) == 0, f"{command}: {capsys.readouterr().err}"
        out = [word for flag, word in itertools.pairwise(words) if flag in ("-o", "--out")]
        assert all((folder / name).exists() for name in out)
    other = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert other == ["ANTs", "elastix", "uniGradICON", "FSL"]


SMALLER = {
    "steps=20_000": 'steps=2, model="small.safetensors"',
    "(128, 128, 96)": "(16, 16, 16)",
    '"cuda"': '"cpu"',
    "workers=4": "workers=1",
    'out="template"': 'out="template", iterations=1, io_iterations=1',
}
"""What takes long, needs a GPU, or would start processes that do not know the small model."""


@pytest.fixture
def everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file that pages name in Python, and the small model as the default one."""
    monkeypatch.setattr(loaded, "DEFAULT", "small.safetensors")
    monkeypatch.setattr(Viewer, "of", lambda result, browser: None)
    (folder / "atlases").mkdir()
    (folder / "scans").mkdir()
    scan, labels = images.read(folder / "fixed.nii.gz"), images.read(folder / "fixed_labels.nii.gz")
    for name in ("a", "b", "c", "scan", "template", "scans/one", "scans/two", "atlases/one", "atlases/two"):
        images.write(scan, folder / f"{name}.nii.gz")
        images.write(replace(labels, data=47 * labels.data), folder / f"{name}_labels.nii.gz")
    rows = [f"scans/{name}.nii.gz,scans/{name}_labels.nii.gz" for name in ("one", "two")]
    (folder / "scans.csv").write_text("\n".join(["image,labels", *rows, ""]), encoding="utf-8")
    torch.save(state_dict("gradicon-2d"), folder / "network_weights.trch")
    return folder


def test_python_that_needs_files_runs(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks that tests/test_docs.py does not run, in the order of the pages."""
    pages = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    blocks = [block for text in texts for block in re.findall(r"```python no-run\n(.*?)```", text, re.DOTALL)]
    assert len(blocks) >= 9
    assert all(any(word in block for block in blocks) for word in SMALLER)
    points = np.array([[10.0, -20.0, 30.0]])
    scans = {name: sitk.ReadImage(str(everything / f"{name}.nii.gz")) for name in ("fixed", "moving")}
    for block in blocks:
        for long, short in SMALLER.items():
            block = block.replace(long, short)
        if '.save("out")' in block:
            shutil.rmtree("out", ignore_errors=True)  # of an earlier page
        exec(block, {"carlreg": carlreg, "torch": torch, "landmarks": points, "points": points, **scans})
    made = ("out/transform.h5", "template/template.nii.gz", "labels/labels.nii.gz", "run/last.safetensors")
    assert all((everything / name).is_file() for name in (*made, "results/summary.csv", "imported.safetensors"))


def test_the_reference_has_every_public_name() -> None:
    text = load("api").page()
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert set(carlreg.__all__) <= set(headings)
    assert "- `warp(source, *, labels=None, inverse=False, outside=None)`: An image of the moving space" in text
    assert (DOCS / "api.md").read_text(encoding="utf-8") == text, "run python docs/api.py"


def transforms_of_the_page() -> dict[str, Any]:
    """What the page about MONAI and TorchIO defines."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "pipelines.md").read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(block, names)
    return names


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A scan, the same elsewhere, and its labels: checkered, so that a voxel between two others is noticed."""
    data = np.random.default_rng(0).random((20, 20, 18), dtype=np.float32)
    affine = np.diag([1.5, -1.5, 2.0, 1.0])
    shifted = affine.copy()
    shifted[:3, 3] = (6, -3, 4)
    images.write(Image(data, affine), tmp_path / "fixed.nii.gz")
    images.write(Image(data, shifted), tmp_path / "moving.nii.gz")
    images.write(Image((3 * (data > 0.5)).astype(np.uint8), shifted), tmp_path / "organs.nii.gz")
    return {name: str(tmp_path / f"{name}.nii.gz") for name in ("fixed", "moving", "organs")}


def test_the_transform_for_monai_in_monai(files: dict[str, str]) -> None:
    """As users have it: read from files, in a Compose, batched by a DataLoader."""
    pytest.importorskip("monai")
    from monai.data import DataLoader, Dataset, MetaTensor
    from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged

    names, keys = transforms_of_the_page(), list(files)
    steps = [LoadImaged(keys), EnsureChannelFirstd(keys), names["Registerd"](labels=["organs"], **names["quick"])]
    (batch,) = DataLoader(Dataset([files], Compose(steps)), batch_size=1)
    assert isinstance(batch["moving"], MetaTensor)
    assert batch["organs"].shape == (1, 1, 20, 20, 18)
    expected = 3 * (images.read(files["fixed"]).data > 0.5)
    assert np.array_equal(batch["organs"][0, 0].numpy(), expected)
    assert np.allclose(batch["moving"][0].affine, np.diag([-1.5, 1.5, 2.0, 1.0]))


def test_the_transform_for_torchio_in_torchio(files: dict[str, str]) -> None:
    tio = pytest.importorskip("torchio")
    names = transforms_of_the_page()
    scans = {name: tio.ScalarImage(files[name]) for name in ("fixed", "moving")}
    subject = tio.Subject(**scans, organs=tio.LabelMap(files["organs"]), age=62)
    moved = tio.Compose([names["RegisterSubject"](**names["quick"])])(subject)
    assert isinstance(moved["organs"], tio.LabelMap)
    assert moved["age"] == 62
    expected = 3 * (images.read(files["fixed"]).data > 0.5)
    assert np.array_equal(moved["organs"].data[0].numpy(), expected)
    assert np.allclose(moved["moving"].affine, np.diag([-1.5, 1.5, 2.0, 1.0]))
