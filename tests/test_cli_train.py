"""`carl train` as a user runs it: from a table of images to a model file, interrupted and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from carlreg import load, register, save
from carlreg.cli import main
from carlreg.files import images
from carlreg.model.files import read_metadata
from carlreg.model.zoo import xi

pytest.importorskip("SimpleITK")

DATA = Path(__file__).parents[2] / "shared" / "data"
SHAPE = (24, 20)
QUICK = ["--size", "tiny", "--batch", "2", "--diffusion-steps", "2", "--steps", "4", "--log-every", "1"]
QUICK += ["--validate-every", "2", "--save-every", "2", "--val-pairs", "2", "--device", "cpu"]


def write(folder: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in SHAPE), indexing="ij"), axis=-1)
    centre = (np.array(SHAPE) - 1) * rng.uniform(0.4, 0.6, 2)
    data = (250 * np.exp(-((index - centre) ** 2).sum(-1) / 30)).astype(np.uint8)
    images.write(images.from_array(data), folder / f"s{number}.nii.gz")
    images.write(images.from_array((data > 100).astype(np.uint8)), folder / f"l{number}.nii.gz")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    for number in range(6):
        write(folder, number)
    rows = [f"s{i}.nii.gz,l{i}.nii.gz,{'val' if i > 3 else 'train'}" for i in range(6)]
    (folder / "scans.csv").write_text("\n".join(["image,labels,split", *rows]) + "\n")
    return folder


def command(data: Path, out: Path, *more: str) -> list[str]:
    return ["train", str(data), "--out", str(out), "--cache", str(out.parent / "cache"), *QUICK, *more]


@pytest.fixture(scope="module")
def whole(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main(command(scans / "scans.csv", out)) == 0
    return out


def entries(run: Path) -> list[dict[str, Any]]:
    """The log without the time."""
    kept = ("stage", "step", "losses", "skipped", "folds", "validation")
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{key: entry[key] for key in kept if key in entry} for entry in lines]


def start(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    source = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **variables}
    program = [sys.executable, "-m", "carlreg", *arguments]
    return subprocess.Popen(
        program, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def same_weights(one: Path, other: Path, compare: Callable[..., bool] = torch.equal) -> bool:
    first, second = (load(run / "last.safetensors").state_dict() for run in (one, other))
    return first.keys() == second.keys() and all(compare(first[name], second[name]) for name in first)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    if code == 1:
        assert captured.err.count("\n") == 1, captured.err
    return captured.err


# ---- what a run leaves ----------------------------------------------------------------------------------------------


def test_a_run_leaves_a_model_that_registers(whole: Path, scans: Path) -> None:
    metadata = read_metadata(whole / "best.safetensors")
    assert metadata["grid"] == "24 20"
    assert metadata["name"] == "whole"
    assert metadata["data"] == "4 images for training, 2 for validation"
    assert json.loads(metadata["training"])["steps"] == 4
    result = register(
        fixed=scans / "s0.nii.gz", moving=scans / "s1.nii.gz", model=whole / "best.safetensors", io_iterations=0
    )
    assert result.warped.shape == SHAPE


def test_a_run_leaves_its_log(whole: Path) -> None:
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    assert config["settings"]["size"] == "tiny"
    assert config["grid"] == [24, 20]
    assert config["data"]["training"] == {"images": 4}
    log = entries(whole)
    assert [(e["stage"], e["step"]) for e in log if "losses" in e] == [(0, 1), (0, 2), *((1, i) for i in range(1, 5))]
    scores = [e["validation"] for e in log if "validation" in e]
    assert len(scores) == 3
    assert all(0 <= score <= 1 for score in scores)  # Dice
    names = {path.name for path in whole.iterdir()}
    assert {"state.pt", "last.safetensors", "best.safetensors"} < names
    assert not any(name.startswith(".") for name in names)


def test_a_run_leaves_curves(whole: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_leaves_pictures_for_tensorboard(whole: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("training/total")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Scalars("validation/Dice")] == [2, 4, 6]
    (picture,) = events.Tags()["images"]
    shown = events.Images(picture)[0]
    assert (shown.width, shown.height) == (4 * SHAPE[0], SHAPE[1])  # moving, warped, fixed, grid


def test_a_picture_of_the_identity_shows_straight_lines_and_the_image_itself() -> None:
    from carlreg import Identity
    from carlreg.training.logging import picture

    moving, fixed = torch.rand(2, 1, 1, 25, 13)
    shown = picture(moving, fixed, Identity())[0]
    a, warped, b, grid = shown.split(25, dim=1)
    assert torch.allclose(a, warped, atol=1e-5)
    assert torch.equal(b, fixed[0, 0].mT)  # x to the right
    expected = torch.zeros(13, 25)
    expected[::4], expected[:, ::4] = 1, 1
    assert torch.allclose(grid, expected, atol=1e-5)


def test_a_run_learns(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On images that were not trained on, labels overlap more than before."""
    more = ["--model", "gradicon", "--similarity", "ssd", "--regularity", "0.05", "--rate", "2e-3", "--batch", "4"]
    more += ["--diffusion-steps", "40", "--steps", "0", "--validate-every", "10", "--no-tensorboard"]
    assert main(command(scans / "scans.csv", tmp_path / "run", *more)) == 0
    before = float(capsys.readouterr().err.split("Dice ")[1].split(" unregistered")[0])
    best = max(e["validation"] for e in entries(tmp_path / "run") if "validation" in e)
    assert best > before + 0.03, (before, best)


# ---- broken off and taken up again ----------------------------------------------------------------------------------


def test_a_killed_run_goes_on_as_if_nothing_had_happened(scans: Path, tmp_path: Path) -> None:
    """After SIGKILL halfway, the same command gives the same losses, scores and weights as without it."""
    longer = ["--steps", "16", "--save-every", "4", "--validate-every", "8", "--no-tensorboard"]
    arguments = command(scans / "scans.csv", tmp_path / "run", *longer)
    log = tmp_path / "run" / "log.jsonl"
    process = start(arguments)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (
            log.exists() and log.read_text(encoding="utf-8").count('"losses"') >= 9
        ):  # past a checkpoint, before the next
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert (0, 0) < (state["stage"], state["step"]) < (2, 0)
    for words in (arguments, command(scans / "scans.csv", tmp_path / "unbroken", *longer)):
        again = start(words)  # in processes of their own, with as many threads as the first
        again.communicate()
        assert again.returncode == 0
    assert entries(tmp_path / "run") == entries(tmp_path / "unbroken")
    assert len(entries(tmp_path / "run")) == 18 + 1 + 2
    assert same_weights(tmp_path / "run", tmp_path / "unbroken")


def test_a_run_that_is_finished_stays_as_it_is(
    whole: Path, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "whole")
    before = (tmp_path / "whole" / "last.safetensors").read_bytes()
    assert main(command(scans / "scans.csv", tmp_path / "whole")) == 0
    assert "already holds this run: it is finished" in capsys.readouterr().err
    assert (tmp_path / "whole" / "last.safetensors").read_bytes() == before
    assert entries(tmp_path / "whole") == entries(whole)


def test_a_time_limit(whole: Path, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(scans / "scans.csv", tmp_path / "run", "--no-tensorboard")
    assert main([*arguments, "--seconds", "0"]) == 0
    err = capsys.readouterr().err
    steps = int(arguments[arguments.index("--steps") + 1]) + int(arguments[arguments.index("--diffusion-steps") + 1])
    assert re.search(rf"stopped after 0 seconds, at step \d of {steps}: the same command continues from there", err)
    assert "higher is better" in err
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert same_weights(tmp_path / "run", whole)


def test_another_run_in_the_folder_is_refused(
    whole: Path, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    table = scans / "scans.csv"
    assert "holds a run with another rate (0.0001, now 0.01)" in fails(command(table, run, "--rate", "0.01"), capsys)
    assert "another grid" in fails(command(table, run, "--grid", "16"), capsys)
    assert "another model (carl, now xi)" in fails(command(table, run, "--model", "xi"), capsys)
    others = tmp_path / "others"
    shutil.copytree(scans, others)
    shutil.copy(others / "s0.nii.gz", others / "s1.nii.gz")
    assert "holds a run with another training set" in fails(command(others / "scans.csv", run), capsys)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept
    assert main(command(table, run, "--rate", "0.01", "--overwrite", "--no-tensorboard", "--quiet")) == 0
    assert json.loads((run / "config.json").read_text(encoding="utf-8"))["settings"]["rate"] == 0.01
    assert len(entries(run)) == len(entries(whole))


def test_a_folder_with_something_else_is_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    for more in ([], ["--overwrite"]):
        message = fails(command(scans / "scans.csv", tmp_path / "thesis", *more), capsys)
        assert "thesis holds chapter.tex, but no run of carl train" in message
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]
    assert "is a file" in fails(command(scans / "scans.csv", tmp_path / "thesis" / "chapter.tex"), capsys)


# ---- other ways to train --------------------------------------------------------------------------------------------


def test_going_on_from_a_trained_model(whole: Path, scans: Path, tmp_path: Path) -> None:
    """Fine-tuning: no diffusion, and the model's own grid, weights and terms."""
    trained = tmp_path / "trained.safetensors"
    metadata = {"grid": "24 20", "licence": "for research"}
    save(load(whole / "best.safetensors"), trained, metadata=metadata)
    arguments = command(scans, tmp_path / "run", "--model", str(trained), "--no-tensorboard")
    arguments[arguments.index("--diffusion-steps") : arguments.index("--diffusion-steps") + 2] = ["--rate", "0"]
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        shutil.copy(scans / f"s{number}.nii.gz", folder)
    arguments[1] = str(folder)  # no labels, no validation
    assert main(arguments) == 0
    assert {e["stage"] for e in entries(tmp_path / "run")} == {0}
    assert not (tmp_path / "run" / "best.safetensors").exists()
    before, after = (
        load(path).state_dict() for path in (whole / "best.safetensors", tmp_path / "run/last.safetensors")
    )
    assert all(torch.equal(before[k], after[k]) for k in before if "running" not in k and "num" not in k)
    assert metadata.items() <= read_metadata(tmp_path / "run" / "last.safetensors").items()


def test_cubic_voxels_stay_with_a_model(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--model", "carl_rot", "--handed", "2", "--grid", "24", "--voxel", "1.25", "--no-tensorboard", "--quiet"]
    assert main(command(scans / "scans.csv", tmp_path / "first", *more)) == 0
    trained = tmp_path / "first" / "best.safetensors"
    assert read_metadata(trained)["voxel"] == "1.25"
    assert '"handed": 2' in read_metadata(trained)["architecture"]
    more = ["--model", str(trained), "--no-tensorboard", "--quiet"]
    assert main(command(scans / "scans.csv", tmp_path / "second", *more)) == 0
    state = torch.load(tmp_path / "second" / "state.pt", weights_only=True)
    assert all(stage["rotate"] for stage in state["run"]["stages"])
    assert read_metadata(tmp_path / "second" / "last.safetensors")["voxel"] == "1.25"
    result = register(fixed=scans / "s0.nii.gz", moving=scans / "s1.nii.gz", model=trained, io_iterations=0)
    assert result.warped.shape == SHAPE
    wrong = command(scans / "scans.csv", tmp_path / "third", "--grid", "24", "--voxel")
    assert "voxel is -1.0; expected a number of millimetres above 0" in fails([*wrong, "-1"], capsys, code=2)
    wrong_handed = command(scans / "scans.csv", tmp_path / "third", "--handed", "2")
    assert "handed is 2 for carl; expected 0 or more, and only for a new carl_rot" in fails(
        wrong_handed, capsys, code=2
    )
    assert "use larger voxels or a larger grid" in fails([*wrong, "0.1"], capsys)
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("model", ["gradicon", "xi", "carl_rot"])
def test_other_networks(scans: Path, tmp_path: Path, model: str) -> None:
    more = ["--model", model, "--permute", "--refine-steps", "1", "--similarity", "ssd", "--no-tensorboard", "--quiet"]
    assert main(command(scans / "scans.csv", tmp_path / "run", *more)) == 0
    settings = json.loads(read_metadata(tmp_path / "run" / "best.safetensors")["training"])
    assert settings["model"] == model
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert {stage["rotate"] for stage in state["run"]["stages"]} == {model == "carl_rot"}
    assert state["refined"] == [2]


def test_a_run_with_another_split_or_other_pairs_is_not_resumed(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same images in the same order, but divided, paired or compared in another way."""
    for number in range(6):
        (tmp_path / f"{number}.csv").write_text(f"x,y\n{number},5\n{number + 1},9\n{number},12\n")
    table, run = tmp_path / "scans.csv", tmp_path / "run"
    quick = ("--seconds", "0", "--no-tensorboard", "--quiet")

    def write_table(columns: str, *rows: str) -> None:
        lines = [",".join(f"{scans}/{c}" if c.endswith(".gz") else c for c in row.split(",")) for row in rows]
        table.write_text("\n".join([columns, *lines]) + "\n")

    def refused(what: str) -> None:
        assert f"holds a run with another {what}; repeat" in fails(command(table, run, *quick), capsys)

    def of_images(training: int, modality: str = "") -> None:
        splits = ["train" if i < training else "val" for i in range(6)]
        rows = [f"s{i}.nii.gz,l{i}.nii.gz,{split},{modality if i == 5 else ''}" for i, split in enumerate(splits)]
        write_table("image,labels,split,modality", *rows)

    def of_pairs(first: str = "s0.nii.gz,s1.nii.gz", landmarks: str = "4.csv,5.csv") -> None:
        rows = [f"{first},0.csv,1.csv,train", "s2.nii.gz,s3.nii.gz,2.csv,3.csv,train"]
        columns = "fixed,moving,fixed_landmarks,moving_landmarks,split"
        write_table(columns, *rows, f"s4.nii.gz,s5.nii.gz,{landmarks},val")

    of_images(4)
    assert main(command(table, run, *quick)) == 0
    of_images(3)
    refused("training set")
    of_images(4, "CT")
    refused("validation set")
    of_pairs()
    refused("training set")
    assert main(command(table, run, *quick, "--overwrite")) == 0
    assert main(command(table, run, *quick)) == 0
    of_pairs(first="s1.nii.gz,s0.nii.gz")
    refused("training set")
    of_pairs(landmarks="4.csv,2.csv")
    refused("validation set")


def test_given_pairs_with_landmarks(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("3 4\n10 12\n")
    (tmp_path / "b.txt").write_text("3 4\n10 15\n")
    rows = ["fixed,moving,fixed_landmarks,moving_landmarks,split"]
    rows += [f"{scans}/s{i}.nii.gz,{scans}/s{i + 1}.nii.gz,a.txt,b.txt,{'val' if i else 'train'}" for i in range(2)]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    assert main(command(tmp_path / "pairs.csv", tmp_path / "run", "--no-tensorboard")) == 0
    assert "landmark error, mm 1.5000 unregistered" in capsys.readouterr().err
    assert all(e["validation"] < 0 for e in entries(tmp_path / "run") if "validation" in e)


def test_learning_from_labels(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--label-weight", "1", "--no-tensorboard"]
    assert main(command(scans / "scans.csv", tmp_path / "run", *more)) == 0
    losses = [entry["losses"] for entry in entries(tmp_path / "run") if "losses" in entry]
    assert all(0 < part["label_loss"] < 2 for part in losses)
    weights = {"similarity": 1.0, "regularity": 1.5, "label_loss": 1.0}
    for part in losses:
        assert part["total"] == pytest.approx(sum(weight * part[name] for name, weight in weights.items()), rel=1e-4)
    rows = [f"{scans}/s{i}.nii.gz" for i in range(4)]
    (tmp_path / "bare.csv").write_text("\n".join(["image", *rows]) + "\n")
    message = fails(command(tmp_path / "bare.csv", tmp_path / "bare", *more, "--val-fraction", "0"), capsys)
    assert "fewer than two of the training images" in message
    assert not (tmp_path / "bare").exists()
    fails(command(scans / "scans.csv", tmp_path / "other", "--label-weight", "-1"), capsys, 2)


@pytest.mark.parametrize(
    "more",
    [
        ["--contrast", "0.5"],
        ["--deform", "0.6", "--label-weight", "1"],
        ["--mirror"],
        ["--margins", "0.3", "--crop", "0.5"],
        ["--thick-slices", "0.5"],
    ],
    ids=lambda more: more[0],
)
def test_options_for_harder_images(whole: Path, scans: Path, tmp_path: Path, more: list[str]) -> None:
    """Each changes what is learnt, and the same command does so in the same way."""
    for name in ("one", "two"):
        assert main(command(scans / "scans.csv", tmp_path / name, *more, "--no-tensorboard", "--quiet")) == 0
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert not same_weights(tmp_path / "one", whole)


def test_pairs_made_from_label_maps(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On scans without labels, from a folder and from a pattern; overlap is then part of the loss."""
    (tmp_path / "maps").mkdir()
    for number in range(3):
        shutil.copy(scans / f"l{number}.nii.gz", tmp_path / "maps")
    (tmp_path / "bare.csv").write_text("\n".join(["image", *(f"{scans}/s{i}.nii.gz" for i in range(4))]) + "\n")
    for name, maps in (("folder", "maps"), ("pattern", "maps/l[0-2].nii*")):
        more = ["--label-maps", str(tmp_path / maps), "--label-map-share", "1", "--no-tensorboard"]
        assert main(command(tmp_path / "bare.csv", tmp_path / name, *more)) == 0
        assert "0 for validation, 3 label maps, grid 24 × 20" in capsys.readouterr().err
        assert all(0 < entry["losses"]["label_loss"] < 2 for entry in entries(tmp_path / name))
    assert same_weights(tmp_path / "folder", tmp_path / "pattern")
    assert read_metadata(tmp_path / "folder" / "last.safetensors")["data"] == "4 images for training, 3 label maps"


def test_pairs_across_modalities(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{scans}/s{i}.nii.gz,{scans}/l{i}.nii.gz,{'MR' if i % 2 else 'CT'},train" for i in range(4)]
    rows += [f"{scans}/s{i}.nii.gz,{scans}/l{i}.nii.gz,MR,val" for i in (4, 5)]
    (tmp_path / "both.csv").write_text("\n".join(["image,labels,modality,split", *rows]) + "\n")
    assert main(command(tmp_path / "both.csv", tmp_path / "run", "--no-tensorboard", "--label-weight", "1")) == 0
    assert "ignoring" not in capsys.readouterr().err
    row = f"{scans}/s0.nii.gz,{scans}/s1.nii.gz,CT,MR"
    (tmp_path / "pairs.csv").write_text(f"fixed,moving,fixed_modality,moving_modality\n{row}\n")
    message = fails(command(tmp_path / "pairs.csv", tmp_path / "other", "--val-fraction", "0"), capsys)
    assert "are of different modality and share no label; expected label maps of both" in message
    assert not (tmp_path / "other").exists()


def test_wrong_shares_and_label_maps(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("contrast", "deform", "margins", "crop", "thick-slices", "label-map-share"):
        for value in ("1.5", "-0.1", "nan"):
            message = fails(command(scans / "scans.csv", tmp_path / "run", f"--{name}", value), capsys, code=2)
            assert f"{name.replace('-', '_')} is {value}; expected a share from 0 to 1" in message
    message = fails(command(scans / "scans.csv", tmp_path / "run", "--label-map-share", "0.5"), capsys, code=2)
    assert "label_map_share is 0.5, but there are no label maps" in message
    (tmp_path / "empty").mkdir()
    (tmp_path / "one").mkdir()
    shutil.copy(scans / "l0.nii.gz", tmp_path / "one")
    for name, found in (("empty", "no label map"), ("one", "only one label map"), ("*.mha", "no label map")):
        message = fails(command(scans / "scans.csv", tmp_path / "run", "--label-maps", str(tmp_path / name)), capsys)
        assert f"{name} has {found}" in message
        assert "expected a folder or a quoted pattern with at least two" in message
    images_only = fails(command(scans / "scans.csv", tmp_path / "run", "--label-maps", str(scans / "*.csv")), capsys)
    assert "has no label map" in images_only
    assert not (tmp_path / "run").exists()


def test_two_processes_do_what_one_does(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Started by the command itself, by lightning-fabric."""
    pytest.importorskip("lightning_fabric")
    more = ["--freeze-batch-norm", "--no-tensorboard", "--steps", "1", "--diffusion-steps", "1", "--rotate"]
    more += ["--label-weight", "1", "--contrast", "0.5", "--deform", "0.5", "--margins", "0.5"]
    process = start(command(scans / "scans.csv", tmp_path / "two", "--devices", "2", *more))
    _, words = process.communicate(timeout=120)
    assert process.returncode == 0, words
    assert words.count("the model is") == 1
    assert main(command(scans / "scans.csv", tmp_path / "one", *more)) == 0
    assert same_weights(tmp_path / "one", tmp_path / "two", lambda a, b: torch.allclose(a, b, atol=1e-5))
    losses = [[e["losses"]["total"] for e in entries(tmp_path / run) if "losses" in e] for run in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # of the whole batch
    message = fails(command(scans / "scans.csv", tmp_path / "three", "--devices", "3"), capsys)
    assert "a batch of 2 cannot be shared by 3 processes" in message


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")
def test_hippocampi(tmp_path: Path) -> None:
    folder = DATA / "hippocampus"
    names = sorted(p.name.removesuffix("_labels.nii.gz") for p in (folder / "train").glob("*_labels.nii.gz"))[:6]
    rows = ["image,labels,split"]
    for number, name in enumerate(names):
        image, labels = (folder / "train" / f"{name}{end}.nii.gz" for end in ("", "_labels"))
        rows.append(f"{image},{labels},{'val' if number > 3 else 'train'}")
    (tmp_path / "hippocampi.csv").write_text("\n".join(rows))
    short = ["--grid", "16", "--steps", "1", "--diffusion-steps", "1"]
    assert main(command(tmp_path / "hippocampi.csv", tmp_path / "run", *short)) == 0
    best = tmp_path / "run" / "best.safetensors"
    assert read_metadata(best)["grid"] == "16 16 16"
    two = [folder / "train" / f"{name}.nii.gz" for name in names[:2]]
    assert register(fixed=two[0], moving=two[1], model=best, io_iterations=0).warped.data.ndim == 3


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_images_are_found_before_training(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        shutil.copy(scans / f"s{number}.nii.gz", tmp_path)
    images.write(images.from_array(np.full(SHAPE, 7, np.uint8)), tmp_path / "flat.nii.gz")
    images.write(images.from_array(np.arange(512, dtype=np.int16).reshape(8, 8, 8)), tmp_path / "volume.nii.gz")
    images.write(images.from_array(np.ones((8, 8), np.uint8)), tmp_path / "small.nii.gz")
    (tmp_path / "broken.nii.gz").write_bytes((scans / "s0.nii.gz").read_bytes()[:100])
    table = tmp_path / "table.csv"
    for row, message in {
        "broken.nii.gz,": "broken.nii.gz is truncated",
        "flat.nii.gz,": "flat.nii.gz is constant: every voxel is 7",
        "volume.nii.gz,": "volume.nii.gz is 3-D but the others are 2-D",
        "s2.nii.gz,small.nii.gz": "small.nii.gz has 8 × 8 voxels but",
        "s2.nii.gz,missing.nii.gz": "missing.nii.gz, which does not exist",
    }.items():
        table.write_text(f"image,labels\ns0.nii.gz,\ns1.nii.gz,\n{row}\n")
        assert message in fails(command(table, tmp_path / "run", "--val-fraction", "0"), capsys)
    table.write_text("image\ns0.nii.gz\n")
    assert "only one image" in fails(command(table, tmp_path / "run"), capsys)
    table.write_text("image,split\ns0.nii.gz,train\ns1.nii.gz,train\n")
    assert "the validation set is empty" in fails(command(table, tmp_path / "run"), capsys)
    assert "does not exist" in fails(command(tmp_path / "no.csv", tmp_path / "run"), capsys)
    assert not (tmp_path / "run").exists()


def test_bad_models_are_found_before_training(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = scans / "scans.csv"
    save(xi(3, width=4), tmp_path / "xi3.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for model, message in {
        str(tmp_path / "xi3.safetensors"): "is for 3-D images with 1 channels, but these are 2-D",
        str(tmp_path / "broken.safetensors"): "is not a model file, or it is damaged",
        "carl-base": "carl-base.safetensors is for 3-D images with 1 channels, but these are 2-D",
        "carl-bse": "no model 'carl-bse'; expected one of carl, carl_rot, gradicon, xi",
    }.items():
        assert message in fails(command(table, tmp_path / "run", "--model", model), capsys)
    message = fails(command(table, tmp_path / "run", "--model", "carl-base", "--width", "8"), capsys)
    assert "width is for a new network" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--batch", "0"],
        ["--similarity", "lnc"],
        ["--size", "huge"],
        ["--grid", "many"],
        ["--precision", "half"],
        ["--rate", "nan"],
        ["--steps", "0", "--diffusion-steps", "0"],
        ["--devices", "0"],
        ["--no-such-option"],
    ],
)
def test_wrong_usage(scans: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fails(command(scans / "scans.csv", tmp_path / "run", *more), capsys, code=2)
    assert not (tmp_path / "run").exists()


def test_a_full_disk(scans: Path, tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = command(scans / "scans.csv", tmp_path / "run", "--quiet")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        message = fails(arguments, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "best.safetensors cannot be written: File too large; training has stopped" in message
    assert main(arguments) == 0
    assert same_weights(tmp_path / "run", whole)


def test_a_device_that_is_not_there(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("speaks of machines without a GPU")
    assert "finds no CUDA GPU" in fails(command(scans / "scans.csv", tmp_path / "run", "--device", "cuda"), capsys)
