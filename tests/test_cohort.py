"""Cohorts as a user runs them: tables and folders, bad files, killed runs, shards, settings, the gallery."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import chromium, needs_browser

import carlreg
from carlreg.cli import main
from carlreg.cli.cohort import _conclude
from carlreg.cohort.bids import find_bids_pairs
from carlreg.cohort.check import BadPairsError
from carlreg.cohort.folder import RESERVED, Board, CohortFolder
from carlreg.cohort.gallery import gallery
from carlreg.cohort.options import CohortOptions
from carlreg.cohort.rows import Row
from carlreg.cohort.shard import Shard
from carlreg.cohort.sources import find_pairs
from carlreg.errors import InputError, OutputError
from carlreg.files import images
from carlreg.files.atomic import append_lines
from carlreg.files.images import Choice, from_array
from carlreg.files.results import Confidence
from carlreg.show import report

sitk = pytest.importorskip("SimpleITK")
from test_report import registration  # noqa: E402  (needs SimpleITK)

SOURCE = str(Path(__file__).parents[1] / "src")
TINY = {"unet_down": (2, 4, 4, 4, 4), "unet_up": (4, 4, 4, 4, 4)}
NAMES = ("a", "b", "c")


def blob(seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 18)] * 3, indexing="ij"))
    values = np.exp(-4 * ((grid - rng.uniform(-0.2, 0.2, (3, 1, 1, 1))) ** 2).sum(0))
    return (1000 * values + 20 * rng.random(values.shape)).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a fixed image, and a folder `scans` of three images, two of them with labels."""
    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    carlreg.save(carlreg.gradicon(3, 2, **TINY), folder / "model.safetensors", metadata={"grid": "16 16 16"})
    (folder / "scans").mkdir()
    for number, name in enumerate(("fixed", *NAMES)):
        path = folder / ("" if name == "fixed" else "scans") / name
        images.write(from_array(blob(number)), f"{path}.nii.gz")
        if name != "c":
            images.write(from_array((blob(number) > 300).astype(np.uint8)), f"{path}_labels.nii.gz")
    return folder


def words(data: Path, out: Path, *more: object) -> list[str]:
    quick = ["--model", data / "model.safetensors", "--transform", "affine", "--threads", 1, "--out", out]
    return [str(word) for word in ["cohort", *quick, *more]]


def carl(data: Path, out: Path, *more: object) -> int:
    return main(words(data, out, *more))


def rows(out: Path) -> dict[str, dict[str, str]]:
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        listed = list(csv.DictReader(file))
    found = {row["name"]: row for row in listed}
    assert len(found) == len(listed), "a pair is listed twice"
    return found


def shown(out: Path) -> list[dict[str, Any]]:
    """The rows of the gallery."""
    text = (out / "index.html").read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])["rows"]


def bits(out: Path) -> dict[str, str]:
    """Checksums of what is computed; reports hold times."""
    files = (path for path in out.glob("*/*") if path.suffix in (".h5", ".gz"))
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


# ---- tables and folders ---------------------------------------------------------------------------------------------


def test_a_folder_against_a_fixed_image(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert carl(data, out, data / "scans", "--fixed", data / "fixed.nii.gz") == 0
    assert set(os.listdir(out)) == {*RESERVED, *(f"{name}_to_fixed" for name in NAMES)}
    found = rows(out)
    assert list(found) == [f"{name}_to_fixed" for name in NAMES]
    for name, row in found.items():
        report = json.loads((out / name / "report.json").read_text(encoding="utf-8"))
        assert row["status"] == "done"
        assert ("dice_after" in report["metrics"]) == (name != "c_to_fixed"), "labels are found by their names"
        for metric, value in report["metrics"].items():
            assert float(row[metric]) == pytest.approx(value, abs=1e-4)
        assert float(row["seconds"]) == pytest.approx(report["seconds"]["total"], abs=0.01)
    for row in shown(out):
        assert (out / row["page"]).is_file()
        assert (out / row["thumbnail"]).read_bytes()[:3] == b"\xff\xd8\xff"
    err = capsys.readouterr().err
    assert "3 of 3: " in err
    assert " pairs/min, " in err
    assert "3 pairs done, 0 were done already" in err


def test_all_pairs_of_a_folder_and_what_to_keep(data: Path, tmp_path: Path) -> None:
    assert carl(data, tmp_path, data / "scans", "--all-pairs", "--keep", "transform,seg") == 0
    names = [f"{moving}_to_{fixed}" for fixed in NAMES for moving in NAMES if moving != fixed]
    assert list(rows(tmp_path)) == names
    kept = {"transform.h5", "report.json", "thumbnail.jpg"}
    assert set(os.listdir(tmp_path / "c_to_a")) == kept
    assert set(os.listdir(tmp_path / "b_to_a")) == {*kept, "warped_seg.nii.gz"}
    assert carl(data, tmp_path, data / "scans", "--all-pairs", "--keep", "seg,transform") == 0
    assert {row["status"] for row in rows(tmp_path).values()} == {"was done"}
    (tmp_path / "b_to_a" / "warped_seg.nii.gz").unlink()
    assert carl(data, tmp_path, data / "scans", "--all-pairs", "--keep", "seg,transform") == 1
    assert "no warped_seg.nii.gz" in rows(tmp_path)["b_to_a"]["error"]


def test_the_fixed_image_of_a_folder_is_not_registered_to_itself(data: Path) -> None:
    pairs = find_pairs(data / "scans", fixed=data / "scans" / "a.nii.gz")
    assert [pair.name for pair in pairs] == ["b_to_a", "c_to_a"]
    assert pairs[0].fixed_seg == data / "scans" / "a_labels.nii.gz"
    assert pairs[1].fixed_seg is None, "there is nothing to compare them with"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["scans"], "expected either --fixed IMAGE"),
        (["scans", "--all-pairs", "--fixed", "fixed.nii.gz"], "expected either --fixed IMAGE"),
        (["pairs.csv", "--all-pairs"], "pairs.csv is not a folder; expected a folder of images"),
        (["pairs.csv", "--fixed", "fixed.nii.gz"], "pairs.csv is not a folder"),
        (["absent.csv"], "absent.csv does not exist"),
        (["empty", "--all-pairs"], "holds no image"),
        (["scans", "--all-pairs", "--shard", "4/3"], "expected 1/3 to 3/3"),
        (["scans", "--all-pairs", "--shard", "3"], "such as 3/40"),
        (["scans", "--all-pairs", "--keep", "warped,everything"], "'everything'; expected some of transform"),
        (["scans", "--all-pairs", "--workers", "0"], "expected 1 or more"),
        (["scans", "--all-pairs", "--gpus-per-worker", "0.5"], "without a Ray cluster"),
    ],
)
def test_wrong_usage_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    (data / "pairs.csv").write_text("fixed,moving\nfixed.nii.gz,scans/a.nii.gz\n")
    (data / "empty").mkdir(exist_ok=True)
    given = [data / word if not word.startswith("-") and (data / word).exists() else word for word in more]
    assert carl(data, tmp_path / "out", *given) in (1, 2)
    err = capsys.readouterr().err
    assert expected in " ".join(err.split())
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


# ---- bad files ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bad_table(data: Path, tmp_path: Path) -> Path:
    """A table with one good pair, and one pair for each thing that can be wrong."""
    scans = data / "scans"
    whole = (scans / "a.nii.gz").read_bytes()
    (tmp_path / "cut.nii.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.nii.gz").write_text("this is not an image")
    (tmp_path / "empty.nrrd").write_bytes(b"")
    images.write(from_array(np.zeros((5, 6, 7), np.uint8)), tmp_path / "small_labels.nii.gz")
    images.write(from_array(np.random.default_rng(0).random((20, 20)).astype(np.float32)), tmp_path / "flat.nii.gz")
    (tmp_path / "points.csv").write_text("x,y\n1\n")
    table = tmp_path / "bad.csv"
    table.write_text(
        "name,fixed,moving,fixed_seg,moving_seg,fixed_landmarks,moving_landmarks\n"
        f"good,{data}/fixed.nii.gz,{scans}/a.nii.gz,,,,\n"
        f"missing,{data}/fixed.nii.gz,{scans}/absent.nii.gz,,,,\n"
        f"cut,{data}/fixed.nii.gz,cut.nii.gz,,,,\n"
        f"text,text.nii.gz,{scans}/a.nii.gz,,,,\n"
        f"empty,{data}/fixed.nii.gz,empty.nrrd,,,,\n"
        f"grid,{data}/fixed.nii.gz,{scans}/a.nii.gz,{data}/fixed_labels.nii.gz,small_labels.nii.gz,,\n"
        f"flat,{data}/fixed.nii.gz,flat.nii.gz,,,,\n"
        f"alone,{data}/fixed.nii.gz,{scans}/a.nii.gz,{data}/fixed_labels.nii.gz,,,\n"
        f"points,{data}/fixed.nii.gz,{scans}/a.nii.gz,,,points.csv,points.csv\n"
        f"twice,{data}/fixed.nii.gz,{scans}/a.nii.gz,,,,\n"
        f"twice,{data}/fixed.nii.gz,{scans}/b.nii.gz,,,,\n"
        f"index.html,{data}/fixed.nii.gz,{scans}/a.nii.gz,,,,\n"
    )
    return table


PROBLEMS = {
    "missing": "absent.nii.gz does not exist",
    "cut": "cut.nii.gz is truncated",
    "text": "text.nii.gz is not an image",
    "empty": "empty.nrrd is empty",
    "grid": "5 × 6 × 7 voxels but",
    "flat": "is 3-D and",
    "alone": "fixed_seg was given without moving_seg",
    "points": "points.csv",
    "twice": "2 pairs are called 'twice'",
    "index.html": "invalid name 'index.html'",
}


def test_all_problems_are_listed_before_anything_is_done(
    data: Path, bad_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carl(data, tmp_path / "out", bad_table) == 1
    lines = capsys.readouterr().err.splitlines()
    for name, problem in PROBLEMS.items():
        assert any(line.startswith(f"carl: {name}: ") and problem in line for line in lines), (name, lines)
    assert "10 of 12 pairs cannot be registered, and nothing was done" in lines[-1]
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadPairsError, match="10 of 12 pairs cannot be registered") as caught:
        carlreg.register_many(bad_table, tmp_path / "out", model=data / "model.safetensors")
    assert set(caught.value.problems) == set(PROBLEMS)


def test_pairs_of_one_name_in_different_shards_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, scans = tmp_path / "pairs.csv", data / "scans"
    table.write_text(
        f"name,fixed,moving\np,{data}/fixed.nii.gz,{scans}/a.nii.gz\np,{data}/fixed.nii.gz,{scans}/b.nii.gz\n"
    )
    for number in (1, 2):
        assert carl(data, tmp_path / "out", table, "--shard", f"{number}/2") == 1
        assert "2 pairs are called 'p'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_images_that_differ_in_format_alone_are_refused(data: Path, tmp_path: Path) -> None:
    scans = tmp_path / "scans"
    shutil.copytree(data / "scans", scans)
    images.write(from_array(blob(1)), scans / "a.nii")
    with pytest.raises(InputError, match=r"a\.nii and a\.nii\.gz differ only in their formats"):
        find_pairs(scans, all_pairs=True)
    others = find_pairs(data / "scans", fixed=scans / "b.nii.gz")  # the folder of a fixed image may hold anything
    assert all(pair.fixed_seg is not None for pair in others if pair.moving_seg is not None)


def test_initial_transforms_and_rigid_masks_are_checked_before_anything_is_done(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, labels = f"{data}/fixed.nii.gz,{data}/scans/a.nii.gz", f"{data}/fixed_labels.nii.gz"
    images.write(from_array(np.ones((5, 6, 7), np.uint8)), tmp_path / "small.nii.gz")
    table = tmp_path / "pairs.csv"
    table.write_text(f"name,fixed,moving\nfirst,{pair}\n")
    assert carl(data, tmp_path / "before", table) == 0
    header = "name,fixed,moving,initial_transform,rigid_mask,moving_rigid_mask\n"
    table.write_text(f"{header}folder,{pair},before/first,,\n")
    assert carl(data, tmp_path / "out", table) == 0
    assert carl(data, tmp_path / "out", table) == 0
    assert rows(tmp_path / "out")["folder"]["status"] == "was done"
    bad = f"none,{pair},before,,\ngrid,{pair},,small.nii.gz,\nmissing,{pair},,{labels},absent.nii.gz\n"
    table.write_text(header + bad)
    capsys.readouterr()
    assert carl(data, tmp_path / "other", table) == 1
    message = capsys.readouterr().err
    assert "rigid_mask was given with transform='affine'" in message
    for text in (
        "before holds no transform.h5",
        "5 × 6 × 7 voxels but",
        "absent.nii.gz does not exist",
        "3 of 3 pairs",
    ):
        assert text in message
    assert not (tmp_path / "other").exists()


def test_bad_pairs_are_skipped_on_request(data: Path, bad_table: Path, tmp_path: Path) -> None:
    assert carl(data, tmp_path / "out", bad_table, "--skip-bad") == 0
    found = rows(tmp_path / "out")
    assert found.pop("good")["status"] == "done"
    assert {row["status"] for row in found.values()} == {"skipped"}
    assert all(problem in found[name]["error"] for name, problem in PROBLEMS.items())


def test_a_file_that_many_pairs_share_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert carl(data, tmp_path / "out", data / "scans", "--fixed", data / "gone.nii.gz") == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "gone.nii.gz does not exist" in line]
    assert "a_to_gone, b_to_gone, c_to_gone: " in line


@pytest.mark.parametrize("ending", [".nii", ".nii.gz", ".nrrd", ".mha", ".png"])
def test_an_outline_is_what_reading_gives_without_the_voxels(tmp_path: Path, ending: str) -> None:
    flat = ending == ".png"
    values = (
        np.arange(7 * 9, dtype=np.uint8).reshape(7, 9) if flat else np.arange(210).reshape(7, 6, 5).astype(np.int16)
    )
    affine = np.diag([1.0] * 3) if flat else np.diag([1.0, 2.0, 3.0, 1.0]) + np.outer([4, 5, 6, 0], [0, 0, 0, 1])
    images.write(from_array(values, affine), tmp_path / f"image{ending}")
    outline, whole = images.read_outline(tmp_path / f"image{ending}"), images.read(tmp_path / f"image{ending}")
    assert outline is not None
    assert outline.shape == whole.shape
    assert np.allclose(outline.affine, whole.affine)
    assert outline.data.strides == (0,) * whole.dim, "the voxels take memory"


def test_an_outline_of_a_time_point(tmp_path: Path) -> None:
    for ending in (".nii.gz", ".nrrd"):
        frames = [sitk.GetImageFromArray(np.full((4, 5, 6), n, np.float32)) for n in range(3)]
        sitk.WriteImage(sitk.JoinSeries(frames), str(tmp_path / f"time{ending}"))
        with pytest.raises(InputError, match="choose a time point"):
            images.read_outline(tmp_path / f"time{ending}")
        outline = images.read_outline(tmp_path / f"time{ending}", Choice(frame=1))
        assert outline is not None
        assert outline.shape == images.read(tmp_path / f"time{ending}", Choice(frame=1)).shape == (6, 5, 4)


# ---- resumed, shared and repeated -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pairs of the scans, registered by two workers."""
    out = tmp_path_factory.mktemp("unbroken")
    assert carl(data, out, data / "scans", "--all-pairs", "--workers", 2) == 0
    return out


def test_several_workers_give_the_same_bits_as_one(data: Path, unbroken: Path, tmp_path: Path) -> None:
    assert carl(data, tmp_path, data / "scans", "--all-pairs", "--workers", 1) == 0
    for out in (unbroken, tmp_path):
        assert {row["status"] for row in rows(out).values()} == {"done"}
    assert bits(tmp_path) == bits(unbroken) != {}


def test_overlapped_reading_and_writing_give_the_same_bits(
    data: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; a scan that cannot be read and a folder that cannot be written fail their own rows."""
    from carlreg.cohort.register import RegisterPairs
    from carlreg.registration.case import Case
    from carlreg.registration.result import Registration

    def read(inputs: Any, *rest: Any, real: Callable[..., Any] = Case.read) -> Any:
        if Path(inputs.moving).name == "b.nii.gz" and Path(inputs.fixed).name == "a.nii.gz":
            raise InputError("b.nii.gz is damaged")
        return real(inputs, *rest)

    def save(result: Any, folder: Any, real: Callable[..., Any] = Registration.save, **more: Any) -> Any:
        if folder.path.name == "c_to_b":
            raise OutputError(28, "No space left on device", str(folder.path))
        return real(result, folder, **more)

    monkeypatch.setattr(RegisterPairs, "_overlaps", lambda *_: True)
    monkeypatch.setattr(Case, "read", read)
    monkeypatch.setattr(Registration, "save", save)
    assert carl(data, tmp_path, data / "scans", "--all-pairs", "--workers", 1) == 1
    found = rows(tmp_path)
    assert list(found) == list(rows(unbroken))
    assert {name for name, row in found.items() if row["status"] == "failed"} == {"b_to_a", "c_to_b"}
    assert found["b_to_a"]["error"] == "b.nii.gz is damaged"
    assert "the disk is full" in found["c_to_b"]["error"]
    assert not (tmp_path / "c_to_b" / "report.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(RegisterPairs, "_overlaps", lambda *_: True)
    assert carl(data, tmp_path, data / "scans", "--all-pairs", "--workers", 1) == 0
    status = [row["status"] for row in rows(tmp_path).values()]
    assert sorted(status) == ["done"] * 2 + ["was done"] * (len(status) - 2)
    assert bits(tmp_path) == bits(unbroken) != {}


def test_killed_at_random_moments_and_resumed(data: Path, unbroken: Path, tmp_path: Path) -> None:
    """Every pair is registered once, by a run or by one after it, and the bits are those of an unbroken run."""
    out, rng = tmp_path / "out", random.Random(0)
    command = [sys.executable, "-m", "carlreg", *words(data, out, data / "scans", "--all-pairs", "--workers", 2)]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    made: dict[Path, int] = {}
    for kill in range(3):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
        deadline, goal = time.monotonic() + 120, len(made) + 1
        while kill < 2 and len(list(out.glob("*/report.json"))) < goal and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if kill < 2:
            time.sleep(rng.random() * 0.3)
            process.send_signal(signal.SIGKILL)
        process.wait()
        now = {path: path.stat().st_mtime_ns for path in out.glob("*/report.json")}
        assert made.items() <= now.items(), "a pair was registered twice"
        made = now
        if (out / "summary.csv").exists():
            assert len(rows(out)) == len(shown(out)) == 6
    assert process.returncode == 0
    assert {row["status"] for row in rows(out).values()} <= {"done", "was done"}
    assert all(float(row["seconds"]) > 0 and row["inverse_error_mm"] for row in rows(out).values())
    assert bits(out) == bits(unbroken)
    assert not list(out.rglob("*.carl-tmp")), "leftovers of a killed run"


KILLED = """
import os, sys
from pathlib import Path
from carlreg.cohort.folder import CohortFolder

def replace(source, target, rename=os.replace):
    rename(source, target)
    os._exit(9)

os.replace = replace
CohortFolder(Path(sys.argv[1])).pin({"seed": 0}, {}, overwrite=False)
"""


def test_killed_when_the_settings_have_just_been_written(tmp_path: Path) -> None:
    """The next run has no reason to write them again, but cleans up."""
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    process = subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=environment, check=False)
    assert process.returncode == 9
    assert list(tmp_path.glob(".cohort.json.*.carl-tmp"))
    CohortFolder(tmp_path).pin({"seed": 0}, {}, overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["cohort.json"]


def test_shards_share_a_folder(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "carlreg", *words(data, tmp_path, data / "scans", "--all-pairs")]
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    shards = [
        subprocess.Popen([*command, "--shard", f"{number}/3"], env=environment, stderr=subprocess.DEVNULL)
        for number in (1, 2, 3)
    ]
    assert [process.wait() for process in shards] == [0, 0, 0]
    assert [row["status"] for row in rows(tmp_path).values()] == ["done"] * 6
    assert [row["status"] for row in shown(tmp_path)] == ["done"] * 6
    assert carl(data, tmp_path, data / "scans", "--all-pairs") == 0
    assert [row["status"] for row in rows(tmp_path).values()] == ["was done"] * 6


@pytest.mark.parametrize(("count", "pairs"), [(1, 5), (3, 10), (7, 7), (9, 4)])
def test_every_pair_is_in_one_shard(count: int, pairs: int) -> None:
    parts = [Shard(number, count).of(range(pairs)) for number in range(1, count + 1)]
    assert sorted(n for part in parts for n in part) == list(range(pairs))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_run_works_on_a_shard_at_a_time(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from carlreg.cohort.folder import CohortFolder

    with CohortFolder(tmp_path).board(["a"], Shard(), failed_first=False):
        code = main(words(data, tmp_path, data / "scans", "--all-pairs"))
    assert code == 1
    assert "another process works on" in capsys.readouterr().err


def test_an_overwriting_run_that_was_interrupted_is_resumed_without_overwriting(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left of the old cohort has other settings than the new one, and is replaced."""
    more = data / "scans", "--all-pairs"
    assert carl(data, tmp_path, *more) == 0
    assert carl(data, tmp_path, *more, "--transform", "rigid") == 1
    assert "holds a cohort with transform='affine' instead of 'rigid'; choose a new folder" in capsys.readouterr().err
    assert carl(data, tmp_path, *more, "--transform", "rigid", "--overwrite", "--shard", "1/2") == 0
    assert {row["status"] for row in list(rows(tmp_path).values())[::2]} == {"done"}
    assert carl(data, tmp_path, *more, "--transform", "rigid") == 0
    assert [row["status"] for row in rows(tmp_path).values()] == ["was done", "done"] * 3
    kinds = {json.loads(path.read_text(encoding="utf-8"))["transform"] for path in tmp_path.glob("*/report.json")}
    assert kinds == {"rigid"}


def test_a_damaged_file_of_settings_is_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cohort.json").write_text("[]")
    assert carl(data, tmp_path, data / "scans", "--all-pairs") == 1
    assert "cohort.json is damaged" in capsys.readouterr().err


def test_a_failure_stays_with_its_pair_and_is_tried_once_more(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from carlreg.cohort import register

    attempts: list[str] = []

    def fail(inputs: Any, *rest: Any, real: Callable[..., Any] = register.align_pair, **more: Any) -> Any:
        name = Path(inputs.moving).name
        attempts.append(name)
        if name == "a.nii.gz" or (name == "b.nii.gz" and attempts.count(name) == 1):
            raise RuntimeError(f"odd {name}")
        return real(inputs, *rest, **more)

    monkeypatch.setattr(register, "align_pair", fail)
    assert carl(data, tmp_path, data / "scans", "--fixed", data / "fixed.nii.gz") == 1
    assert attempts == ["a.nii.gz", "b.nii.gz", "c.nii.gz", "a.nii.gz", "b.nii.gz"]
    found = rows(tmp_path)
    assert [found[f"{name}_to_fixed"]["status"] for name in NAMES] == ["failed", "done", "done"]
    assert found["a_to_fixed"]["error"] == "RuntimeError: odd a.nii.gz"
    err = capsys.readouterr().err
    assert "1 failed: a_to_fixed" in err
    assert "this is a bug; please report it with the traceback" in err
    assert "in fail" in err


def test_rows_of_other_tables_stay_while_their_results_do(data: Path, tmp_path: Path) -> None:
    assert carl(data, tmp_path, data / "scans", "--fixed", data / "fixed.nii.gz") == 0
    shutil.rmtree(tmp_path / "b_to_fixed")
    (data / "more.csv").write_text("name,fixed,moving\nlater,fixed.nii.gz,scans/b.nii.gz\n")
    assert carl(data, tmp_path, data / "more.csv") == 0
    assert {name: row["status"] for name, row in rows(tmp_path).items()} == {
        "later": "done",
        "a_to_fixed": "done",
        "c_to_fixed": "done",
    }


def test_an_unfinished_line_is_ignored_and_removed(tmp_path: Path) -> None:
    journal = tmp_path / ".rows" / "1-of-1" / "rows.jsonl"
    journal.parent.mkdir(parents=True)
    append_lines(journal, [json.dumps(Row("a", "done").now().to_json())])
    with journal.open("ab") as file:
        file.write(b'{"name": "b", "stat')
    board = Board(tmp_path, ["a", "b"], journal)
    assert [row.status for row in board.rows] == ["done", "pending"]
    board.add(Row("b", "failed", error="odd"))
    board.close()
    assert [json.loads(line)["name"] for line in journal.read_text(encoding="utf-8").splitlines()] == ["a", "b"]
    assert rows(tmp_path)["b"]["error"] == "odd"


def test_the_summary_follows_within_moments(tmp_path: Path) -> None:
    board = Board(tmp_path, ["a", "b"], tmp_path / ".rows" / "1" / "rows.jsonl")
    (tmp_path / ".rows" / "1").mkdir(parents=True)
    try:
        for name in ("a", "b"):
            board.add(Row(name, "done", metrics={"dice_after": 0.5}, seconds=1.0))
            deadline = time.monotonic() + 20
            while rows(tmp_path)[name]["status"] != "done" if (tmp_path / "summary.csv").exists() else True:
                assert time.monotonic() < deadline, "the summary is not up to date while the run goes on"
                time.sleep(0.01)
    finally:
        board.close()


# ---- from Python ----------------------------------------------------------------------------------------------------


def test_register_many_from_python(data: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    found = carlreg.register_many(
        data / "scans",
        tmp_path,
        fixed=data / "fixed.nii.gz",
        model=data / "model.safetensors",
        transform="affine",
        keep="transform",
        progress=lambda row, tally: seen.append((row.name, tally.finished, tally.total)),
    )
    assert [row.name for row in found] == ["a_to_fixed", "b_to_fixed", "c_to_fixed"]
    assert all(row.status == "done" and row.finished for row in found)
    assert seen == [("a_to_fixed", 1, 3), ("b_to_fixed", 2, 3), ("c_to_fixed", 3, 3)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'iterations'"):
        carlreg.register_many(data / "scans", tmp_path, iterations=3)


# ---- verdicts and the gallery ---------------------------------------------------------------------------------------


def test_strict_lists_failed_registrations_first_and_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = Row("a", "done", verdict="good"), Row("b", "done", verdict="failed")
    assert _conclude([good, bad], tmp_path, CohortOptions(strict=True)) == 3
    assert capsys.readouterr().err.startswith("carl: 1 registrations are judged as failed: b\n")
    assert _conclude([good, bad], tmp_path, CohortOptions()) == 0
    assert _conclude([good, replace(bad, status="failed")], tmp_path, CohortOptions(strict=True)) == 1
    assert '"sort":"verdict"' in gallery([good, bad], failed_first=True)


def test_a_warning_that_is_a_reason_is_shown_once() -> None:
    words = "the two directions disagree by 21.5 mm"
    assert gallery([Row("a", "done", verdict="doubtful", reasons=(words,), warnings=(words,))]).count(words) == 1
    pair = registration(lambda points: points, warnings=(words, "there are no labels"))
    judged = Confidence(verdict="doubtful", reasons=(words,))
    page = report.page(replace(pair, record=replace(pair.record, confidence=judged)))
    assert page.count(words) == page.count("there are no labels") == 1


HOSTILE = "<script>alert(1)</script>\"'&"


@needs_browser
@pytest.mark.browser
def test_the_gallery_in_a_browser(data: Path, tmp_path: Path) -> None:
    """From file://, without a network: pictures, sorting, filtering, links, many rows, and hostile names."""
    out = tmp_path / "a cohort#1"
    assert carl(data, out, data / "scans", "--fixed", data / "fixed.nii.gz") == 0
    real = json.loads((out / ".rows" / "1-of-1" / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0])
    made = [
        Row.from_json({**real, "name": f"pair {n}", "verdict": ("good", "failed", "doubtful")[n % 3],
                       "metrics": {"dice_after": (n * 37 % 300) / 300, "folds_percent": n % 7}, "seconds": n})
        for n in range(300)
    ]  # fmt: skip
    made += [Row(HOSTILE, "failed", error=HOSTILE, warnings=(HOSTILE,)), Row("last")]
    (out / "index.html").write_text(gallery(made), encoding="utf-8")
    names = "[...document.querySelectorAll('.pair b')].map(one => one.textContent)"
    with chromium() as page:
        page.open((out / "index.html").as_uri())
        page.wait("document.body.dataset.ready === 'yes'")
        page.wait("document.querySelector('img').naturalWidth > 300")
        assert page.get("document.getElementById('counts').textContent").startswith("300 of 302 pairs registered")
        mark = "document.querySelectorAll('.mark')[{}]"  # good, failed, doubtful, as made above
        boxes = [page.get(f"getComputedStyle({mark.format(n)}).backgroundColor") for n in range(3)]
        green, red, amber = ([int(part) for part in box[4:-1].split(",")] for box in boxes)
        assert red[0] > max(red[1:]) + 20
        assert green[1] > max(green[0], green[2]) + 15
        assert min(amber[:2]) > amber[2] + 40
        assert 120 <= len(page.get(names)) < 302, "only what is near the window is drawn"
        page.get("window.scrollTo(0, 1e7)")
        page.wait(f"{names}.length >= 240")

        def sort(by: str) -> list[str]:
            select = f"document.getElementById('sort').value = '{by}'"
            page.get(f"({select}, document.getElementById('sort').dispatchEvent(new Event('change')), 0)")
            return page.get(names)

        dice = {f"pair {n}": (n * 37 % 300) / 300 for n in range(300)}
        found = [dice[name] for name in sort("dice")]
        assert found == sorted(found)
        assert sort("verdict")[:3] == [HOSTILE, "pair 1", "pair 4"], "what failed comes first, then what is doubtful"
        assert sort("folds")[0] == "pair 6"
        assert sort("seconds")[0] == "pair 299"
        page.get("(document.getElementById('direction').click(), 0)")
        assert page.get(names)[0] == "pair 0"
        page.get("(document.getElementById('show').value = 'with an error',"
                 " document.getElementById('show').dispatchEvent(new Event('change')), 0)")  # fmt: skip
        assert page.get(names) == [HOSTILE]
        assert page.get("document.querySelectorAll('#pairs script').length") == 0
        (out / "index.html").write_text(gallery(made[:1]), encoding="utf-8")
        page.open((out / "index.html").as_uri())
        page.wait("document.querySelector('a.pair')")
        page.get("(document.querySelector('a.pair').click(), 0)")
        page.wait("document.title !== 'Cohort' && document.body.dataset.ready === 'yes'")
        assert page.get("location.href").endswith("/a_to_fixed/report.html")
        assert all(request.startswith(("file:", "data:")) for request in page.requests)
        assert not page.complaints


# ---- BIDS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BIDS dataset: a subject with three sessions, one of them with labels, and a subject with one."""
    root = tmp_path_factory.mktemp("bids")
    (root / "dataset_description.json").write_text('{"Name": "raw", "BIDSVersion": "1.9.0"}')
    for seed, name in enumerate(("sub-01/ses-1", "sub-01/ses-2", "sub-01/ses-3", "sub-02/ses-1")):
        folder, prefix = root / name / "anat", name.replace("/", "_")
        folder.mkdir(parents=True)
        images.write(from_array(blob(seed)), folder / f"{prefix}_T1w.nii.gz")
        images.write(from_array(blob(seed)), folder / f"{prefix}_T2w.nii.gz")
        if seed < 2:
            images.write(from_array((blob(seed) > 300).astype(np.uint8)), folder / f"{prefix}_dseg.nii.gz")
        (folder / f"{prefix}_T1w.json").write_text("{}")
    return root


def test_later_sessions_are_registered_to_the_first_and_named_as_a_derivative(
    data: Path, dataset: Path, tmp_path: Path
) -> None:
    assert carl(data, tmp_path, "--bids", dataset) == 0
    assert list(rows(tmp_path)) == ["sub-01_ses-2_T1w_to_sub-01_ses-1_T1w", "sub-01_ses-3_T1w_to_sub-01_ses-1_T1w"]
    description = json.loads((tmp_path / "dataset_description.json").read_text(encoding="utf-8"))
    assert description["DatasetType"] == "derivative"
    assert description["GeneratedBy"][0]["Name"] == "carlreg"
    folder = tmp_path / "sub-01" / "ses-2" / "anat"
    warped = "sub-01_ses-2_space-sub01ses1_desc-registered_T1w"
    assert set(os.listdir(folder)) == {
        f"{warped}.nii.gz",
        f"{warped}.json",
        f"{warped}.html",
        f"{warped}.jpg",
        "sub-01_ses-2_space-sub01ses1_dseg.nii.gz",
        "sub-01_ses-2_from-T1w_to-sub01ses1_mode-image_xfm.h5",
        "sub-01_ses-2_from-sub01ses1_to-T1w_mode-image_xfm.h5",
    }
    moving = sitk.ReadImage(str(dataset / "sub-01/ses-2/anat/sub-01_ses-2_T1w.nii.gz"))
    fixed = sitk.ReadImage(str(dataset / "sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz"))
    forward = sitk.ReadTransform(str(folder / "sub-01_ses-2_from-T1w_to-sub01ses1_mode-image_xfm.h5"))
    again = sitk.GetArrayFromImage(sitk.Resample(moving, fixed, forward, sitk.sitkLinear, 0.0, sitk.sitkFloat32))
    written = sitk.GetArrayFromImage(sitk.ReadImage(str(folder / f"{warped}.nii.gz")))
    inner = (slice(3, -3),) * 3
    assert np.abs(again - written)[inner].max() < 2, "the transform called from-T1w_to-… resamples the T1w image"
    assert {row["page"] for row in shown(tmp_path)} == {
        f"sub-01/ses-{n}/anat/sub-01_ses-{n}_space-sub01ses1_desc-registered_T1w.html" for n in (2, 3)
    }
    assert carl(data, tmp_path, "--bids", dataset) == 0
    assert {row["status"] for row in rows(tmp_path).values()} == {"was done"}


def test_a_dataset_is_not_changed(
    data: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(dataset, raw)
    before = {path: path.read_bytes() for path in raw.rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    shutil.copy(raw / "dataset_description.json", tmp_path / "other")
    for out, text in ((raw, "is the dataset"), (tmp_path / "other", "describes another dataset")):
        assert carl(data, out, "--bids", raw, "--overwrite") == 1
        assert text in capsys.readouterr().err.splitlines()[-1]
    derivative = raw / "derivatives" / "carlreg"
    for status in ("done", "was done"):
        assert carl(data, derivative, "--bids", raw) == 0
        assert {row["status"] for row in rows(derivative).values()} == {status}
    assert {path: path.read_bytes() for path in before} == before
    assert {path for path in raw.rglob("*") if path.is_file() and derivative not in path.parents} == set(before)


def test_registered_images_are_not_images_of_a_dataset(dataset: Path, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    shutil.copytree(dataset, raw)
    image = raw / "sub-01/ses-2/anat/sub-01_ses-2_T1w.nii.gz"
    shutil.copy(image, image.with_name("sub-01_ses-2_space-sub01ses1_desc-registered_T1w.nii.gz"))
    assert [pair.name for pair in find_bids_pairs(raw)] == [pair.name for pair in find_bids_pairs(dataset)]


def test_other_pairs_of_a_dataset(data: Path, dataset: Path) -> None:
    target = data / "fixed.nii.gz"
    names = [pair.name for pair in find_bids_pairs(dataset, fixed=target)]
    assert names == [f"sub-{one}_T1w_to_fixed" for one in ("01_ses-1", "01_ses-2", "01_ses-3", "02_ses-1")]
    assert len(find_bids_pairs(dataset, all_pairs=True, suffix="T2w")) == 12
    assert all(pair.moving.name.endswith("_T2w.nii.gz") for pair in find_bids_pairs(dataset, suffix="T2w"))
    both = find_bids_pairs(dataset)
    assert both[0].moving_seg is not None
    assert both[1].moving_seg is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--suffix", "FLAIR"], "has no image FLAIR, but T1w, T2w"),
        (["--fixed", "x.nii", "--all-pairs"], "expected one of them"),
        (["somewhere"], "expected a table or a folder of images, or --bids"),
    ],
)
def test_wrong_usage_of_bids(
    data: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    assert carl(data, tmp_path / "out", "--bids", dataset, *more) in (1, 2)
    assert expected in " ".join(capsys.readouterr().err.replace("│", "").split())
    single = dataset.parent / "single"
    shutil.copytree(dataset / "sub-02", single / "sub-02", dirs_exist_ok=True)
    with pytest.raises(InputError, match=r"no subject of .* has several images"):
        find_bids_pairs(single)
    with pytest.raises(InputError, match="expected a BIDS dataset"):
        find_bids_pairs(data)
