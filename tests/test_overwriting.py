"""Files that are written: private, whole, never mixed with older ones, and nothing left behind.

Only the command line and public names are used.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import carlreg
from carlreg.cli import main
from carlreg.files import nifti_write
from carlreg.files.atomic import write_together

sitk = pytest.importorskip("SimpleITK")

TINY = {"unet_down": (2, 4, 4, 4, 4), "unet_up": (4, 4, 4, 4, 4)}
RESULT = {"warped.nii.gz", "transform.h5", "inverse_transform.h5", "report.json"}


def scan(seed: int, origin: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Any:
    """A smooth image with noise, which does not compress well."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, 20)] * 3, indexing="ij"))
    blob = np.exp(-4 * ((grid - rng.uniform(-0.2, 0.2, (3, 1, 1, 1))) ** 2).sum(0))
    image = sitk.GetImageFromArray((1000 * blob + 20 * rng.random(blob.shape)).astype(np.float32))
    image.SetOrigin(origin)
    return image


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scans with labels, masks and landmarks, two models that do nothing, and a transform."""
    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    for name in ("model", "other_model"):
        carlreg.save(carlreg.gradicon(3, 2, **TINY), folder / f"{name}.safetensors", metadata={"grid": "16 16 16"})
    for number, name in enumerate(("fixed", "moving", "third")):
        image = scan(number, (4.0 * number, -3.0 * number, 2.0))
        sitk.WriteImage(image, str(folder / f"{name}.nii.gz"))
        sitk.WriteImage(sitk.Cast(image > 300, sitk.sitkUInt8), str(folder / f"{name}_seg.nii.gz"))
        (folder / f"{name}.csv").write_text(f"x,y,z\n{5 + number},6,7\n8,9,10\n")
    sitk.WriteImage(sitk.Cast(scan(1, (4.0, -3.0, 2.0)) > 500, sitk.sitkUInt8), str(folder / "other_seg.nii.gz"))
    sitk.WriteTransform(sitk.TranslationTransform(3, (1.0, 0.0, 0.0)), str(folder / "guess.tfm"))
    return folder


def pair(data: Path, *more: object, moving: str = "moving") -> list[object]:
    words: list[object] = ["register", "-f", data / "fixed.nii.gz", "-m", data / f"{moving}.nii.gz", "--no-html"]
    return [*words, "--model", data / "model.safetensors", "--io-iterations", 0, *more]


def carl(*words: object) -> int:
    return main([str(word) for word in words])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# ---- permissions ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_outputs_are_private_under_a_private_umask(data: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        out = tmp_path / "out"
        table = tmp_path / "pairs.csv"
        table.write_text(f"fixed,moving\n{data / 'fixed.nii.gz'},{data / 'moving.nii.gz'}\n")
        alone = ("--transform-out", tmp_path / "t.tfm", "--warped-moving-out", tmp_path / "w.nii.gz")
        assert carl(*pair(data, "-o", out, *alone)) == 0
        batch = ("register", "--pairs", table, "-o", tmp_path / "many", "--model", data / "model.safetensors")
        assert carl(*batch, "--io-iterations", 0) == 0
        assert carl("warp", "-i", data / "moving.nii.gz", "-t", out, "-o", tmp_path / "warped.nii.gz") == 0
        assert carl("convert", out, tmp_path / "t.h5") == 0
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    shared = {name: oct(mode) for name, mode in modes.items() if mode & 0o077}
    assert not shared, f"others may read {shared}"


# ---- disks that are full --------------------------------------------------------------------------------------------


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """Refuse to write more than so many bytes to a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


COMMANDS: dict[str, Callable[[Path, Path, Path], list[object]]] = {
    "w.nii.gz": lambda data, result, out: ["warp", "-i", data / "moving.nii.gz", "-t", result, "-o", out],
    "w.nii": lambda data, result, out: ["warp", "-i", data / "moving.nii.gz", "-t", result, "-o", out],
    "w.nrrd": lambda data, result, out: ["warp", "-i", data / "moving.nii.gz", "-t", result, "-o", out],
    "m.nii.gz": lambda data, result, out: pair(data, "--warped-moving-out", out),
    "t.tfm": lambda data, result, out: pair(data, "--transform-out", out),
    "c.tfm": lambda data, result, out: ["convert", result, out],
    "c.nii.gz": lambda data, result, out: ["convert", result, out, "-r", data / "fixed.nii.gz"],
    "c.mha": lambda data, result, out: ["convert", data / "fixed.nii.gz", out],
}


@pytest.fixture(scope="module")
def result(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("result") / "out"
    assert carl(*pair(data, "-o", out)) == 0
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_an_error_and_the_old_file_stays(
    data: Path, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    target = tmp_path / name
    words = COMMANDS[name](data, result, target)
    assert carl(*words) == 0
    whole = target.read_bytes()
    for size in (len(whole) - 3, len(whole) // 2, 100):  # without its end, half of it, hardly anything
        target.write_bytes(b"the old file")
        capsys.readouterr()
        with small_disk(size):
            code = carl(*words, "--overwrite")
        assert code == 1, f"exit code {code}, and {len(target.read_bytes())} of {len(whole)} bytes were written"
        message = capsys.readouterr().err.strip()
        assert name in message
        assert "file too large" in message.lower()  # the reason that the operating system gives
        assert target.read_bytes() == b"the old file"
        assert os.listdir(tmp_path) == [name]


def test_a_failing_write_leaves_no_result_that_looks_complete(
    data: Path, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = (result / "warped.nii.gz").stat().st_size
    out = tmp_path / "out"
    with small_disk(size - 10):  # the other files of an affine result are smaller
        code = carl(*pair(data, "-o", out, "--transform", "affine"))
    written = sorted(os.listdir(out)) if out.exists() else []
    assert code == 1, f"exit code {code} with {written}, of which warped.nii.gz is cut"
    assert str(out / "warped.nii.gz") in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


# ---- overwriting ----------------------------------------------------------------------------------------------------


def test_overwriting_removes_the_whole_old_result_and_nothing_else(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    labels = ("--moving-seg", data / "moving_seg.nii.gz")
    words = [word for word in pair(data, "-o", out) if word != "--no-html"]
    assert carl(*words, *labels) == 0
    assert set(os.listdir(out)) == {*RESULT, "warped_seg.nii.gz", "report.html"}
    (out / "notes.txt").write_text("mine")
    inode = out.stat().st_ino
    assert carl(*pair(data, "-o", out, "--overwrite", moving="third")) == 0
    assert set(os.listdir(out)) == {*RESULT, "notes.txt"}, "files of the old result lie beside the new one"
    assert (out / "notes.txt").read_text() == "mine"
    assert out.stat().st_ino == inode  # still the folder that somebody's shell is in
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["inputs"]["moving"]["path"] == str(data / "third.nii.gz")


def test_a_failure_in_the_middle_keeps_the_old_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every single rename fails once."""
    out = tmp_path / "out"
    assert carl(*pair(data, "-o", out)) == 0
    before, calls = contents(out), 0

    def failing(function: Callable[..., None], at: int) -> Callable[..., None]:
        def rename(source: object, target: object, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(5, "Input/output error")
            function(source, target, **options)

        return rename

    for at in range(1, 30):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing(os.replace, at))
            patch.setattr(os, "rename", failing(os.rename, at))
            code = carl(*pair(data, "-o", out, "--overwrite", moving="third"))
        if code == 0:
            break
        assert contents(out) == before, f"old and new files are mixed after rename {at} has failed"
        assert os.listdir(tmp_path) == ["out"]
    assert code == 0
    assert at > 5


KILLS = """
import json, os, shutil, signal, sys
from pathlib import Path
import numpy as np, SimpleITK as sitk, torch
import carlreg

torch.set_num_threads(1)
folder, exists = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
network = carlreg.gradicon(3, 2, unet_down=(2, 4, 4, 4, 4), unet_up=(4, 4, 4, 4, 4))
image = sitk.GetImageFromArray(np.random.default_rng(0).random((20, 20, 20), dtype=np.float32))
results = {}
for name, origin in (("old", 5.0), ("new", -9.0)):
    moving = sitk.Image(image)
    moving.SetOrigin([origin, 0.0, 0.0])
    labels = {"moving_seg": sitk.Cast(moving > 0.5, sitk.sitkUInt8)} if name == "old" else {}
    results[name] = carlreg.register(fixed=image, moving=moving, model=network, io_iterations=0, device="cpu", **labels)
    results[name].save(folder / name)

def data(out):
    return {p.name: p.read_bytes() for p in Path(out).iterdir() if p.is_file() and p.name != "report.json"}

def save(out, kill_at):
    if os.fork() == 0:
        count = 0
        def hook(event, arguments):
            nonlocal count
            if event in ("os.rename", "os.remove", "os.mkdir") and str(folder) in str(arguments[0]):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        try:
            results["new"].save(out, overwrite=exists == "result")
        except FileExistsError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(-1, 0)[1]

whole = {name: data(folder / name) for name in results}
kill_at = status = 1
while status:
    out = folder / f"out{kill_at}"
    if exists == "result":
        shutil.copytree(folder / "old", out)
    elif exists == "empty":
        out.mkdir()
    status = save(out, kill_at)
    if (out / "report.json").exists():
        state = next((name for name in whole if data(out) == whole[name]), "mixed")
    else:
        state = "unfinished"
    if exists == "result":
        try:
            results["new"].save(out)
            state += ", taken for unfinished"
        except FileExistsError:
            state += "" if data(out) in whole.values() else ", not restored"
    refused = save(out, -1)
    left = [p.name for parent in (folder, out) for p in parent.iterdir() if p.name.startswith(".")]
    if data(out) != whole["new"] or (refused and not state.startswith("new")):
        state += ", not finished by the next run"
    print(json.dumps([kill_at, state, left]), flush=True)
    kill_at += 1
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("exists", ["result", "empty"])
def test_killed_at_any_moment(exists: str) -> None:
    """Old and new are never mixed, the next run finishes the work and sweeps what the killed one has left, and a result
    that was to be replaced is either still there or has been replaced."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # quicker than a disk
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        words = [sys.executable, "-c", KILLS, folder, exists]
        process = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", check=False)
    assert process.returncode == 0, process.stderr
    kills = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(kills) > 5
    wrong = [kill for kill in kills if "mixed" in kill[1] or "," in kill[1] or kill[2]]
    assert not wrong, f"{len(wrong)} of {len(kills)} kills: {wrong}"


def test_two_writers_of_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rename takes a while, so that two writers without a lock mix their files."""
    torch.manual_seed(0)
    network, image = carlreg.gradicon(3, 2, **TINY), scan(0)
    results = []
    for origin in (5.0, -9.0):
        moving = sitk.Image(image)
        moving.SetOrigin([origin, 0.0, 0.0])
        options = {"fixed": image, "moving": moving, "model": network, "io_iterations": 0, "device": "cpu"}
        results.append(carlreg.register(**options))
        results[-1].save(tmp_path / str(origin))
    whole = [contents(tmp_path / name) for name in ("5.0", "-9.0")]
    for files in whole:
        del files["report.json"]

    out = tmp_path / "out"
    delays = {"a": iter([0, 0] + [0.2] * 50), "b": iter([0.07] * 50)}  # each is the last to write some of the files

    def slow(function: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any, **options: Any) -> None:
            if Path(target).parent == out:
                time.sleep(next(delays[threading.current_thread().name]))
            function(source, target, **options)

        return call

    results[0].save(out)
    monkeypatch.setattr(os, "replace", slow(os.replace))
    monkeypatch.setattr(os, "rename", slow(os.rename))
    threads = [
        threading.Thread(target=one.save, args=(out,), kwargs={"overwrite": True}, name=name)
        for name, one in zip("ab", results, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = contents(out)
    del found["report.json"]
    assert found in whole, "the folder holds files of two results"
    assert not [name for name in os.listdir(out) if name.startswith(".")]


def test_links_and_long_names(data: Path, result: Path, tmp_path: Path) -> None:
    """A link to a folder stays a link, and so does one to a file; names may be as long as the disk allows."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert carl(*pair(data, "-o", tmp_path / "out")) == 0
    assert carl(*pair(data, "-o", tmp_path / "out", "--overwrite", moving="third")) == 0
    assert (tmp_path / "out").is_symlink()
    assert set(os.listdir(tmp_path / "disk")) == RESULT
    (tmp_path / "link.nii.gz").symlink_to(tmp_path / "real.nii.gz")
    assert carl("warp", "-i", data / "moving.nii.gz", "-t", result, "-o", tmp_path / "link.nii.gz") == 0
    assert (tmp_path / "link.nii.gz").is_symlink()
    assert (tmp_path / "real.nii.gz").is_file()
    long = tmp_path / ("ö" * 120 + ".nii.gz")
    assert carl("warp", "-i", data / "moving.nii.gz", "-t", result, "-o", long) == 0
    assert long.is_file()


def test_the_files_of_a_running_process_are_not_swept(
    data: Path, result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second writer of the same file begins and ends while the first one writes: both succeed."""
    target, nested = tmp_path / "w.nii.gz", []
    words = ["warp", "-i", data / "moving.nii.gz", "-t", result, "-o", target, "--overwrite"]

    def write(*arguments: Any, write: Callable[..., None] = nifti_write.write, **options: Any) -> None:
        write(*arguments, **options)
        if not nested:
            nested.append(None)
            nested.append(carl(*words))

    monkeypatch.setattr(nifti_write, "write", write)
    assert carl(*words) == 0
    assert nested == [None, 0]
    assert os.listdir(tmp_path) == ["w.nii.gz"]


# ---- files of the user ----------------------------------------------------------------------------------------------


def copied(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return target


@pytest.mark.parametrize("name", ["warped.nii.gz", "report.html", "warp.nii.gz"])
def test_a_file_of_the_user_is_refused_by_name_before_any_work(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mine = copied(data / "fixed.nii.gz", tmp_path / "out" / name)
    before = mine.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("carlreg.registration.api.register_pair", lambda *_: pytest.fail("it was registered"))
        assert carl(*pair(data, "-o", mine.parent)) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"{mine} exists already" in message
    assert "--overwrite" in message
    assert mine.read_bytes() == before
    assert os.listdir(mine.parent) == [name]


def test_an_input_is_not_replaced_even_when_overwriting(
    data: Path, result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = copied(data / "fixed.nii.gz", tmp_path / "out" / "warped.nii.gz")
    words: list[list[object]] = [
        ["-f", mine, "-o", mine.parent],
        ["-f", mine, "--warped-moving-out", mine],
        ["-f", data / "fixed.nii.gz", "-o", result, "--initial-transform", result],
    ]
    for more in words:
        before = contents(Path(more[1]).parent), contents(result)
        assert carl("register", *more, *pair(data, "--overwrite")[3:]) == 1
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "is an input of this run" in message
        assert (contents(Path(more[1]).parent), contents(result)) == before


def test_other_commands_refuse_files_of_the_user(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, files = data / "model.safetensors", {"fixed": data / "fixed.nii.gz", "moving": data / "moving.nii.gz"}
    table, atlases = tmp_path / "pairs.csv", tmp_path / "atlases"
    table.write_text("fixed,moving\n{fixed},{moving}\n".format(**files))
    copied(files["moving"], atlases / "a.nii.gz")
    copied(data / "moving_seg.nii.gz", atlases / "a_labels.nii.gz")
    scans, more = [files["fixed"], files["moving"]], ["--model", model]
    commands: dict[str, list[object]] = {
        "volumes.csv": ["segment", files["fixed"], "-a", atlases, *more],
        "labels.nii.gz": ["segment", files["fixed"], "-a", atlases, *more],
        "scores.csv": ["evaluate", table, "-m", "identity=identity"],
        "summary.csv": ["cohort", table, *more],
        "index.html": ["cohort", table, *more],
        "template.nii.gz": ["template", *scans, "--initial", tmp_path / "template.nii.gz" / "template.nii.gz", *more],
        "mask.nii.gz": ["explain", "-f", files["fixed"], "-m", files["moving"], *more],
    }
    for name, words in commands.items():
        mine = copied(files["fixed"], tmp_path / name / name)
        assert carl(*words, "-o", mine.parent) == 1, name
        message = capsys.readouterr().err.splitlines()[-1]
        assert name in message
        assert "--overwrite" in message
        assert contents(mine.parent) == {name: files["fixed"].read_bytes()}
    inputs: dict[str, list[object]] = {
        "labels.nii.gz": ["segment", tmp_path / "labels.nii.gz" / "labels.nii.gz", "-a", atlases, *more],
        "scores.csv": ["evaluate", tmp_path / "scores.csv" / "scores.csv", "-m", "identity=identity"],
        "template.nii.gz": commands["template.nii.gz"],
    }
    for name, words in inputs.items():
        assert carl(*words, "-o", tmp_path / name, "--overwrite") == 1, name
        assert f"{tmp_path / name / name} is an input of this run" in capsys.readouterr().err
        assert contents(tmp_path / name) == {name: files["fixed"].read_bytes()}


# ---- cohorts --------------------------------------------------------------------------------------------------------


def batch(data: Path, out: Path, *more: object, table: str | None = None, model: str = "model") -> list[object]:
    columns = "name,fixed,moving,fixed_seg,moving_seg,fixed_mask,moving_landmarks,fixed_landmarks,initial_transform"
    row = "one,fixed.nii.gz,moving.nii.gz,fixed_seg.nii.gz,moving_seg.nii.gz,,,,"
    (data / "pairs.csv").write_text(f"{columns}\n{row}\n" if table is None else table)
    words: list[object] = ["register", "--pairs", data / "pairs.csv", "-o", out, "--no-html"]
    return [*words, "--model", data / f"{model}.safetensors", "--transform", "affine", *more]


def rows(out: Path) -> dict[str, dict[str, str]]:
    with (out / "summary.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


CHANGES: dict[str, tuple[list[str], dict[str, str]]] = {
    "another model": ([], {"model": "other_model"}),
    "another kind of transform": (["--transform", "rigid"], {}),
    "other iterations": (["--io-iterations", "1"], {}),
    "a mask": ([], {"table": "name,fixed,moving,fixed_seg,moving_seg,fixed_mask\none,fixed.nii.gz,moving.nii.gz,"
                             "fixed_seg.nii.gz,moving_seg.nii.gz,fixed_seg.nii.gz\n"}),
    "an initial transform": ([], {"table": "name,fixed,moving,fixed_seg,moving_seg,initial_transform\none,fixed.nii.gz,"
                                           "moving.nii.gz,fixed_seg.nii.gz,moving_seg.nii.gz,guess.tfm\n"}),
    "landmarks": ([], {"table": "name,fixed,moving,fixed_seg,moving_seg,fixed_landmarks,moving_landmarks\none,"
                                "fixed.nii.gz,moving.nii.gz,fixed_seg.nii.gz,moving_seg.nii.gz,fixed.csv,moving.csv\n"}),
    "other labels": ([], {"table": "name,fixed,moving,fixed_seg,moving_seg\none,fixed.nii.gz,moving.nii.gz,"
                                   "fixed_seg.nii.gz,other_seg.nii.gz\n"}),
}  # fmt: skip


SETTINGS = {
    "another model": "model",
    "another kind of transform": "transform",
    "other iterations": "io_iterations",
}
"""Changes that are refused for the cohort as a whole, before anything is done."""


@pytest.fixture(scope="module")
def cohort(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cohort")
    assert carl(*batch(data, out)) == 0
    return out


@pytest.mark.parametrize("change", CHANGES)
def test_a_pair_is_skipped_only_if_nothing_has_changed(
    data: Path, cohort: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    before = (cohort / "one" / "report.json").read_bytes()
    options, other = CHANGES[change]
    capsys.readouterr()
    assert carl(*batch(data, cohort, *options, **other)) == 1, f"{change}, and the old result was taken for the new one"
    if setting := SETTINGS.get(change):
        assert f"{cohort} holds a cohort with {setting}=" in capsys.readouterr().err
    else:
        assert rows(cohort)["one"]["status"] == "failed"
        assert "holds a registration with" in capsys.readouterr().err
    assert (cohort / "one" / "report.json").read_bytes() == before


def test_a_changed_pair_is_registered_again_if_overwriting(data: Path, tmp_path: Path) -> None:
    assert carl(*batch(data, tmp_path)) == 0
    assert carl(*batch(data, tmp_path, "--transform", "rigid", "--overwrite")) == 0
    assert rows(tmp_path)["one"]["status"] == "done"
    assert json.loads((tmp_path / "one" / "report.json").read_text(encoding="utf-8"))["transform"] == "rigid"


def test_the_summary_keeps_the_metrics_of_pairs_that_were_done(data: Path, cohort: Path) -> None:
    assert carl(*batch(data, cohort)) == 0
    row = rows(cohort)["one"]
    assert row["status"] == "was done"
    assert row.get("dice_after"), f"the summary lost the metrics of a pair that was done: {row}"
    report = json.loads((cohort / "one" / "report.json").read_text(encoding="utf-8"))
    assert float(row["dice_after"]) == pytest.approx(report["metrics"]["dice_after"], abs=1e-4)


def test_a_result_that_is_an_input_of_another_pair_is_not_replaced(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "name,fixed,moving,initial_transform\none,fixed.nii.gz,moving.nii.gz,\n"
    assert carl(*batch(data, tmp_path, table=table)) == 0
    before = contents(tmp_path / "one")
    table += f"two,fixed.nii.gz,moving.nii.gz,{tmp_path / 'one' / 'transform.h5'}\n"
    assert carl(*batch(data, tmp_path, table=table)) == 0
    assert carl(*batch(data, tmp_path, "--overwrite", table=table)) == 1
    assert f"{tmp_path / 'one' / 'transform.h5'} is an input of this run" in capsys.readouterr().err
    assert contents(tmp_path / "one") == before


def test_dicom_folders_are_compared_by_their_files(data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        write_dicom(tmp_path / name, sitk.Cast(scan(seed), sitk.sitkInt16))
    table, model = tmp_path / "pairs.csv", data / "model.safetensors"
    words = ["register", "--pairs", table, "-o", tmp_path / "out", "--no-html", "--model", model]
    table.write_text("name,fixed,moving\none,a,b\n")
    assert carl(*words, "--transform", "affine") == 0
    assert carl(*words, "--transform", "affine") == 0
    assert rows(tmp_path / "out")["one"]["status"] == "was done"
    table.write_text("name,fixed,moving\none,a,c\n")
    carl(*words, "--transform", "affine")
    assert rows(tmp_path / "out")["one"]["status"] == "failed", "two different DICOM folders were taken for the same"


def write_dicom(folder: Path, image: Any) -> None:
    folder.mkdir()
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for number in range(image.GetSize()[2]):
        piece = image[:, :, number]
        position = "\\".join(map(str, image.TransformIndexToPhysicalPoint((0, 0, number))))
        tags = {"0008|0060": "CT", "0020|000e": "1.2.3.4", "0020|000d": "1.2.3", "0008|0018": f"1.2.3.4.{number + 1}"}
        for tag, text in {**tags, "0020|0032": position, "0020|0013": str(number)}.items():
            piece.SetMetaData(tag, text)
        writer.SetFileName(str(folder / f"{number:03}.dcm"))
        writer.Execute(piece)


def test_a_pair_called_like_the_summary_fails_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "name,fixed,moving\nsummary.csv,fixed.nii.gz,moving.nii.gz\ntwo,fixed.nii.gz,moving.nii.gz\n"
    code = carl(*batch(data, tmp_path, table=table))
    assert (tmp_path / "two" / "report.json").is_file(), f"the batch stopped: {capsys.readouterr().err}"
    assert {name: row["status"] for name, row in rows(tmp_path).items()} == {"summary.csv": "failed", "two": "done"}
    assert code == 1
    assert "invalid name 'summary.csv'" in capsys.readouterr().err


# ---- other commands -------------------------------------------------------------------------------------------------


def test_explain_does_not_replace_the_report_of_a_registration(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    carlreg.save(carlreg.carl(3, 2, width=4, **TINY), data / "carl.safetensors", metadata={"grid": "16 16 16"})
    out = tmp_path / "out"
    assert carl(*pair(data, "-o", out)) == 0
    before = contents(out)
    words = ["explain", "-f", data / "fixed.nii.gz", "-m", data / "moving.nii.gz", "-o", out, "--voxels", 1]
    code = carl(*words, "--model", data / "carl.safetensors", "--device", "cpu", "--overwrite")
    assert contents(out)["report.json"] == before["report.json"], "the registration's report was replaced"
    assert code == 1
    assert "holds a registration, which --overwrite does not replace here" in capsys.readouterr().err
    assert contents(out) == before


def test_the_reported_memory_includes_writing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 2**20  # KiB

    class Usage:
        @property
        def ru_maxrss(self) -> int:
            return peak * (1024 if sys.platform == "darwin" else 1)

    def write(*arguments: Any, write: Callable[..., None] = nifti_write.write, **options: Any) -> None:
        nonlocal peak
        peak = 3 * 2**20
        write(*arguments, **options)

    monkeypatch.setattr(resource, "getrusage", lambda who: Usage())
    monkeypatch.setattr(nifti_write, "write", write)
    assert carl(*pair(data, "-o", tmp_path / "out")) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["peak_memory_gb"]["process"] == 3.0


@pytest.mark.parametrize("names", ['["../precious"]', '["a/b"]', '[".."]', "[]", '{"a": 1}', "nonsense"])
def test_a_list_of_files_does_not_lead_out_of_the_folder(tmp_path: Path, names: str) -> None:
    """An interrupted exchange whose list was made up, or damaged, moves nothing and stays."""
    folder, precious = tmp_path / "out", tmp_path / "precious"
    staging = folder / ".files.0123abcd.carl-tmp"
    for part in ("new", "gone"):
        (staging / part).mkdir(parents=True)
    (staging / "names").write_text(names)
    precious.write_text("mine")
    with write_together(folder, ["a"], last="a") as new:
        (new / "a").write_text("new")
    assert precious.read_text() == "mine"
    assert (staging / "names").exists()
    assert (folder / "a").read_text() == "new"
