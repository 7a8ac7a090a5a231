"""One table of pairs and one landmark file mean the same to every command, and what is unclear is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from carlreg import gradicon, save
from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")

Run = Callable[..., tuple[int | str, str]]
POINTS = np.array([[4.0, 5.0], [9.0, 11.0], [7.0, 3.0]])
SHIFT = np.array([2.0, 1.0])
"""World positions of the fixed image's landmarks, LPS, and from there to those of the moving image, mm."""
ORIGIN = np.array([1.0, -2.0])
HEADERS = {
    "x,y": POINTS + SHIFT,
    "l,p": POINTS + SHIFT,
    "r,a": -(POINTS + SHIFT),
    "i,j": POINTS + SHIFT - ORIGIN,
    "y,name,x": POINTS + SHIFT,
}
"""The landmarks of the moving image as they are written under each header."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int | str, str]:
        """The exit code, or the exception that a user would see as a traceback; and what was printed."""
        capsys.readouterr()
        try:
            code: int | str = main([str(word) for word in words])
        except Exception as error:
            code = type(error).__name__
        printed = capsys.readouterr()
        return code, printed.err + printed.out

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A 2-D pair of images, and a network that does nothing."""
    rng = np.random.default_rng(0)
    for name in ("fixed", "moving"):
        image = sitk.GetImageFromArray(rng.random((20, 24)).astype(np.float32))
        image.SetOrigin(ORIGIN)
        sitk.WriteImage(image, str(tmp_path / f"{name}.nii.gz"))
    save(gradicon(2, 2, unet_down=(4,) * 5, unet_up=(4,) * 5), tmp_path / "net.safetensors", metadata={"grid": "24 20"})
    return tmp_path


def landmarks(path: Path, header: str, points: np.ndarray) -> Path:
    names = header.split(",")
    axes = sorted(names) if "name" in names else names
    columns = dict(zip([axis for axis in axes if axis != "name"], points.T, strict=True)) | {"name": np.array([*"abc"])}
    rows = zip(*(columns[name] for name in names), strict=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def both(folder: Path, header: str) -> list[Path]:
    """Landmarks of the fixed image under x,y, and of the moving one under the header."""
    return [
        landmarks(folder / "fixed.csv", "x,y", POINTS),
        landmarks(folder / "moving.csv", header, HEADERS[header]),
    ]


@pytest.mark.parametrize("header", HEADERS)
def test_register_reads_the_header(folder: Path, run: Run, header: str) -> None:
    fixed, moving = both(folder, header)
    words = ["register", "-f", folder / "fixed.nii.gz", "-m", folder / "moving.nii.gz", "-o", folder / "out"]
    words += ["--fixed-landmarks", fixed, "--moving-landmarks", moving, "--model", folder / "net.safetensors"]
    code, printed = run(*words, "--io-iterations", "0", "--device", "cpu", "--no-html")
    assert code == 0, printed
    report = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["metrics"]["tre_before_mm"] == pytest.approx(np.sqrt(5))


@pytest.mark.parametrize("header", HEADERS)
def test_evaluate_reads_the_header(folder: Path, run: Run, header: str) -> None:
    both(folder, header)
    table = folder / "pairs.csv"
    table.write_text("fixed,moving,fixed_landmarks,moving_landmarks\nfixed.nii.gz,moving.nii.gz,fixed.csv,moving.csv\n")
    code, printed = run("evaluate", table, "--method", "before=identity", "-o", folder / "scores")
    assert code == 0, printed
    scores = json.loads((folder / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert scores["methods"]["before"]["tre_mm"] == pytest.approx(np.sqrt(5))


@pytest.mark.parametrize("header", HEADERS)
def test_training_reads_the_header(folder: Path, run: Run, header: str) -> None:
    both(folder, header)
    table = folder / "pairs.csv"
    rows = [f"fixed.nii.gz,moving.nii.gz,fixed.csv,moving.csv,{split}" for split in ("train", "val")]
    table.write_text("\n".join(["fixed,moving,fixed_landmarks,moving_landmarks,split", *rows]) + "\n")
    words = ["--size", "tiny", "--batch", "1", "--diffusion-steps", "1", "--steps", "1", "--device", "cpu"]
    code, printed = run("train", table, "--out", folder / "run", "--cache", folder / "cache", *words)
    assert code == 0, printed
    (error,) = re.findall(r"landmark error, mm ([\d.]+) unregistered", printed)
    assert float(error) == pytest.approx(np.sqrt(5), abs=1e-3)


@pytest.mark.parametrize("header", ["x,y", "l,p", "r,a", "y,name,x"])
def test_warp_points_reads_the_header_and_keeps_it(folder: Path, run: Run, header: str) -> None:
    sitk.WriteTransform(sitk.TranslationTransform(2, (-2.0, -1.0)), str(folder / "back.tfm"))
    _, moving = both(folder, header)
    words = ["warp-points", "--points", moving, "--from", "fixed", "-t", folder / "back.tfm"]
    code, printed = run(*words, "-o", folder / "moved.csv")
    assert code == 0, printed
    sign = -1 if header == "r,a" else 1
    expected = landmarks(folder / "expected.csv", header, HEADERS[header] - sign * SHIFT)
    zeros = re.compile(r"(\.\d)0*")
    assert zeros.sub(r"\1", (folder / "moved.csv").read_text(encoding="utf-8")) == expected.read_text(encoding="utf-8")


UNCLEAR = {
    "voxels": ("i,j\n4,5\n", "voxel indices i,j,k"),
    "unknown names": ("lat,lon\n4,5\n", "has the columns lat, lon; expected one set of x,y,z"),
    "two meanings": ("x,y,r,a\n4,5,-4,-5\n", "expected one set of x,y,z"),
    "four columns": ("1,4,5,6\n2,9,11,6\n", "4 columns without a header"),
    "quotes": ('x,y,name\n4,5,"a\n', "is not valid CSV"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_unclear_landmarks_are_refused(folder: Path, run: Run, case: str) -> None:
    text, message = UNCLEAR[case]
    (folder / "points.csv").write_text(text)
    sitk.WriteTransform(sitk.TranslationTransform(3 if case == "four columns" else 2), str(folder / "t.tfm"))
    words = ["warp-points", "--points", folder / "points.csv", "--from", "fixed", "-t", folder / "t.tfm"]
    code, printed = run(*words, "-o", folder / "out.csv")
    assert code == 1, printed
    assert message in printed
    assert not (folder / "out.csv").exists()


def test_deeply_nested_markups_are_an_error_of_one_line(folder: Path, run: Run) -> None:
    (folder / "deep.mrk.json").write_text("[" * 200_000 + "]" * 200_000)
    sitk.WriteTransform(sitk.TranslationTransform(3), str(folder / "t.tfm"))
    words = ["warp-points", "--points", folder / "deep.mrk.json", "--from", "fixed", "-t", folder / "t.tfm"]
    code, printed = run(*words, "-o", folder / "out.mrk.json")
    assert code == 1
    assert "is not a markups file of 3D Slicer" in printed
    assert len(printed.splitlines()) == 1


# ---- tables ---------------------------------------------------------------------------------------------------------


def commands(folder: Path, table: Path) -> dict[str, list[object]]:
    net = ["--model", folder / "net.safetensors", "--io-iterations", "0", "--device", "cpu"]
    tiny = ["--size", "tiny", "--batch", "1", "--diffusion-steps", "1", "--steps", "1", "--device", "cpu"]
    return {
        "register": ["register", "--pairs", table, "-o", folder / "results", *net, "--no-html"],
        "evaluate": ["evaluate", table, "--method", "before=identity"],
        "train": ["train", table, "--out", folder / "run", "--cache", folder / "cache", *tiny, "--val-fraction", "0"],
    }


@pytest.mark.parametrize("command", ["register", "evaluate", "train"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_every_command_reads_the_same_table(folder: Path, run: Run, command: str, separator: str) -> None:
    table = folder / "pairs.csv"
    rows = ["fixed, moving, patient", "fixed.nii.gz, moving.nii.gz, Smith", "", ",,"]
    table.write_text("\ufeff" + "\n".join(rows).replace(", ", separator).replace(",", separator), encoding="utf-8")
    code, printed = run(*commands(folder, table)[command])
    assert code == 0, printed
    assert "ignoring unknown columns: patient" in printed


@pytest.mark.parametrize("command", ["register", "evaluate", "train"])
def test_every_command_refuses_the_same_tables(folder: Path, run: Run, command: str) -> None:
    table = folder / "pairs.csv"
    pair = "fixed.nii.gz,moving.nii.gz"
    for text, message in (
        (f'fixed,moving\n"{pair}\n{pair}\n' + 200_000 * "x", "is not valid CSV"),
        (f"fixed,moving,name\n{pair},../x\n", "invalid name '../x': it must not contain a path separator"),
        (f"fixed,moving,name\n{pair},a\nmoving.nii.gz,fixed.nii.gz,a\n", "both pairs are called 'a'"),
        (f"fixed,moving\n{pair},more\n", "line 2: 3 cells for 2 columns"),
        ("fixed,moving\nfixed.nii.gz,\n", "line 2: moving is empty"),
    ):
        table.write_text(text)
        code, printed = run(*commands(folder, table)[command])
        assert code == 1, (message, printed)
        assert message in printed
        assert len(printed.splitlines()) == 1
