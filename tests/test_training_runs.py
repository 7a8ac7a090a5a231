"""Runs of `carl train` that are stopped, killed, repeated, replaced or started twice: no model is lost or wrong.

Everything is driven through the command line and public names.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import carlreg
from carlreg.cli import main

sitk = pytest.importorskip("SimpleITK")

SHAPE = (24, 20)
SOURCE = str(Path(carlreg.__file__).parents[1])
QUICK = ["--size", "tiny", "--batch", "2", "--diffusion-steps", "1", "--steps", "3", "--log-every", "1"]
QUICK += ["--validate-every", "2", "--save-every", "2", "--device", "cpu", "--no-tensorboard"]


def write(data: np.ndarray, path: Path) -> None:
    sitk.WriteImage(sitk.GetImageFromArray(data), str(path))


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of four blobs with labels: two to train on, two to validate with."""
    folder = tmp_path_factory.mktemp("scans")
    index = np.stack(np.meshgrid(*(np.arange(n) for n in SHAPE), indexing="ij"), axis=-1)
    rows = ["image,labels,split"]
    for number in range(4):
        centre = (np.array(SHAPE) - 1) * np.random.default_rng(number).uniform(0.4, 0.6, 2)
        data = (250 * np.exp(-((index - centre) ** 2).sum(-1) / 30)).astype(np.uint8)
        write(data, folder / f"s{number}.nii.gz")
        write((data > 100).astype(np.uint8), folder / f"l{number}.nii.gz")
        rows.append(f"s{number}.nii.gz,l{number}.nii.gz,{'val' if number > 1 else 'train'}")
    (folder / "scans.csv").write_text("\n".join(rows) + "\n")
    return folder


def command(scans: Path, out: Path, *more: str) -> list[str]:
    return ["train", str(scans / "scans.csv"), "--out", str(out), "--cache", str(scans / "cache"), *QUICK, *more]


def in_process(
    arguments: list[str], program: tuple[str, ...] = ("-m", "carlreg"), **more: str
) -> subprocess.Popen[str]:
    path = os.pathsep.join([*([more.pop("PYTHONPATH")] if "PYTHONPATH" in more else []), SOURCE])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    program = (sys.executable, *program, *arguments)
    return subprocess.Popen(
        program, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def wait_for_lines(log: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.read_text(encoding="utf-8").count("\n") >= count:
            return
        time.sleep(0.005)
    raise AssertionError(process.communicate())


def weights(path: Path) -> dict[str, torch.Tensor]:
    return carlreg.load(path).state_dict()


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- stopped and killed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_run_which_is_then_resumed(
    scans: Path, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command(scans, tmp_path / "run", "--steps", "100000", "--save-every", "5")
    process = in_process(arguments)
    wait_for_lines(tmp_path / "run" / "log.jsonl", 12, process)
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    last = printed.splitlines()[-1]
    assert "the same command resumes the run from its last checkpoint" in last
    before = torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"]
    assert before >= 5
    assert main([*arguments, "--seconds", "0"]) == 0
    assert f"after step {before + 1} of 100001" in capsys.readouterr().err
    assert torch.load(tmp_path / "run" / "state.pt", weights_only=True)["step"] == before


class Killed(BaseException):
    """Takes the place of SIGKILL at a rename."""


@contextmanager
def killed_at_rename(target: int | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count renames of files of a run; stop before one of them happens."""
    renamed: list[str] = []
    replace = os.replace

    def counted(source: object, destination: object, **more: object) -> None:
        name = Path(str(destination)).name
        if name in ("config.json", "state.pt", "last.safetensors", "best.safetensors", "log.jsonl"):
            if len(renamed) == target:
                raise Killed
            renamed.append(name)
        replace(source, destination, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted)
        yield renamed


def test_a_run_killed_at_any_rename_ends_with_the_same_models(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ["--diffusion-steps", "0", "--steps", "2", "--save-every", "1", "--quiet"]
    whole = tmp_path / "whole"
    with killed_at_rename(None, monkeypatch) as renamed:
        assert main(command(scans, whole, *short)) == 0
    assert renamed.count("state.pt") == 2
    for number, name in enumerate(renamed):
        run = tmp_path / f"killed-{number}"
        with killed_at_rename(number, monkeypatch), pytest.raises(Killed):
            main(command(scans, run, *short))
        assert main(command(scans, run, *short)) == 0
        for model in ("last.safetensors", "best.safetensors"):
            assert (run / model).exists(), f"killed before {name} (rename {number}), a finished run has no {model}"
            assert same(run / model, whole / model), f"killed before {name} (rename {number}), {model} is stale"


def test_leftovers_of_a_killed_run_are_removed(scans: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(command(scans, run, "--quiet", "--seconds", "0")) == 0
    (run / ".state.pt.k2j3h4").write_bytes(b"half a checkpoint")
    (run / ".best.safetensors.0123abcd.carl-tmp").mkdir()
    assert main(command(scans, run, "--quiet")) == 0
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


# ---- the folder -----------------------------------------------------------------------------------------------------


def test_overwriting_keeps_the_old_model_until_there_is_a_new_one(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(command(scans, run, "--quiet")) == 0
    old = (run / "best.safetensors").read_bytes()
    again = command(scans, run, "--quiet", "--overwrite", "--seed", "7")

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", kill)
        with pytest.raises(Killed):
            main(again)
    kept = [path for path in run.rglob("*") if path.is_file() and path.read_bytes() == old]
    assert kept, "the old model is gone, and the new run has not made one"
    assert main(again) == 0
    assert (run / "best.safetensors").read_bytes() != old
    # A run without validation has no best model: the old one must not be taken for its own.
    assert main([*again, "--val-fraction", "0"]) == 0
    assert not (run / "best.safetensors").exists()


def test_a_second_run_in_the_same_folder_is_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = in_process(command(scans, run, "--steps", "100000"))
    try:
        wait_for_lines(run / "log.jsonl", 3, process)
        for more in ([], ["--overwrite"]):
            code = main(command(scans, run, "--steps", "100000", "--seconds", "0", "--quiet", *more))
            printed = capsys.readouterr().err
            assert code == 1, "two runs write to one folder"
            assert "is in use by another training run" in printed
            assert printed.count("\n") == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert main(command(scans, run, "--steps", "100000", "--seconds", "0", "--quiet")) == 0  # free again


@pytest.mark.parametrize("content", ['{"format": "carlreg-run-2"}', '{"format": "carlreg-run-2", "settings": []}', "{"])
def test_a_damaged_config_is_one_line(
    scans: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(command(scans, run, "--quiet")) == 0
    (run / "config.json").write_text(content)
    capsys.readouterr()
    try:
        code = main(command(scans, run, "--quiet"))
    except Exception as error:
        raise AssertionError(f"a traceback instead of one line: {error!r}") from error
    printed = capsys.readouterr().err
    assert code == 1
    assert printed.count("\n") == 1, printed
    assert "config.json is damaged" in printed
    assert main(command(scans, run, "--quiet", "--overwrite")) == 0
    assert json.loads((run / "config.json").read_text())["settings"]["steps"] == 3


def test_a_run_of_an_earlier_version_is_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(command(scans, run, "--quiet")) == 0
    config = json.loads((run / "config.json").read_text())
    del config["digests"]
    config |= {"format": "carlreg-run-1", "data": {**config["data"], "digest": "0" * 32}}
    (run / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert main(command(scans, run, "--quiet")) == 1
    printed = capsys.readouterr().err
    assert "holds a run of an earlier version" in printed
    assert printed.count("\n") == 1, printed
    assert main(command(scans, run, "--quiet", "--overwrite")) == 0


def test_a_damaged_checkpoint_is_one_line(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(command(scans, run, "--quiet", "--seconds", "0")) == 0
    state = run / "state.pt"
    for content in (b"", b"nothing", state.read_bytes()[:-200]):
        state.write_bytes(content)
        capsys.readouterr()
        try:
            code = main(command(scans, run, "--quiet"))
        except Exception as error:
            raise AssertionError(f"a traceback instead of one line: {error!r}") from error
        printed = capsys.readouterr().err
        assert code == 1
        assert "state.pt is damaged" in printed
        assert printed.count("\n") == 1, printed


def test_one_process_of_a_machine_prepares_the_images(scans: Path, tmp_path: Path) -> None:
    """Preparation is slowed down, so that two processes which both prepare the images would be seen to do so."""
    pytest.importorskip("lightning_fabric")
    cache, record = tmp_path / "cache", tmp_path / "prepared.txt"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "replace = os.replace\n"
        "def slow(source, destination, **more):\n"
        f"    if os.path.dirname(os.path.realpath(destination)) == {os.path.realpath(cache)!r}:\n"
        "        time.sleep(0.7)\n"
        f"        with open({str(record)!r}, 'a') as file: file.write(os.path.basename(destination) + '\\n')\n"
        "    replace(source, destination, **more)\n"
        "os.replace = slow\n"
    )
    arguments = command(scans, tmp_path / "run", "--steps", "1", "--cache", str(cache))
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "carlreg")
    process = in_process(arguments, program, PYTHONPATH=str(tmp_path))
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert set(Counter(record.read_text().split()).values()) == {1}, "images were prepared by both processes"


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_validation_scores_a_pair_as_evaluate_does(tmp_path: Path) -> None:
    """A network that knows the true shift: six voxels, over the border that a structure of the moving image reaches."""
    base = np.random.default_rng(0).integers(60, 250, (38, 28)).astype(np.uint8)
    labels = np.zeros((2, 32, 28), np.uint8)
    labels[0, 14:28, 4:24] = labels[1, 20:, 4:24] = 1
    for number, (name, start) in enumerate((("fixed", 6), ("moving", 0))):
        write(base[start : start + 32], tmp_path / f"{name}.nii.gz")
        write(labels[number], tmp_path / f"{name}_labels.nii.gz")
    pair = "fixed.nii.gz,moving.nii.gz,fixed_labels.nii.gz,moving_labels.nii.gz"
    header = "fixed,moving,fixed_seg,moving_seg"
    (tmp_path / "pairs.csv").write_text(f"{header}\n{pair}\n")
    (tmp_path / "scans.csv").write_text(f"{header},split\n{pair},train\n{pair},val\n")
    model = carlreg.gradicon(2, 2, unet_down=(4,) * 5, unet_up=(4,) * 5).eval()
    last = [module.last for module in model.modules() if hasattr(module, "last")]
    last[-1].bias.data[1] = 10 * 6 / 31  # in tenths of the image
    network = tmp_path / "shift.safetensors"
    carlreg.save(model, network, metadata={"grid": "28 32"})
    arguments = command(tmp_path, tmp_path / "run", "--model", str(network), "--rate", "0", "--freeze-batch-norm")
    assert main([*arguments, "--steps", "1", "--diffusion-steps", "0", "--quiet"]) == 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    evaluate = ["evaluate", str(tmp_path / "pairs.csv"), "--model", str(network), "--io-iterations", "0"]
    assert main([*evaluate, "--device", "cpu", "--out", str(tmp_path / "scores")]) == 0
    with (tmp_path / "scores" / "scores.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["dice"]) == pytest.approx(2 * 12 / (12 + 14), abs=1e-4)  # of 14 rows, 12 lie inside
    assert log[-1]["validation"] == pytest.approx(float(row["dice"]), abs=1e-4)


def test_the_label_loss_knows_no_structures_outside_of_the_image() -> None:
    """A structure of six columns reaches the right border, and the images are shifted by four columns, both ways."""
    image, labels = torch.rand(1, 1, 11, 11), torch.zeros(1, 1, 11, 11)
    labels[..., 5:] = 1
    shift = carlreg.Affine(torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.4]]]))
    back = carlreg.Affine(torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, -0.4]]]))
    loss = carlreg.registration_loss(shift, back, image, image, labels=(labels, labels))
    there = 1 - 2 * 2 / (6 + 6)  # columns 1 to 6 have the label after warping, 5 to 10 before
    back_again = 1 - 2 * 2 / (2 + 6)  # columns 9 and 10 have it
    assert loss.label_loss is not None
    assert float(loss.label_loss) == pytest.approx(there + back_again, abs=1e-4)


def test_a_run_reports_what_is_better_and_warns_if_the_model_is_useless(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(scans, tmp_path / "run", "--rate", "0")) == 0  # an untrained network
    printed = capsys.readouterr().err
    assert "unregistered; higher is better" in printed
    assert "the best model is worse than no registration: Dice" in printed
    rows = [f"{scans}/s{i}.nii.gz,{'val' if i > 1 else 'train'}" for i in range(4)]
    (tmp_path / "scans.csv").write_text("\n".join(["image,split", *rows]) + "\n")
    assert main(command(tmp_path, tmp_path / "bare", "--model", "gradicon", "--similarity", "ssd", "--rate", "0")) == 0
    printed = capsys.readouterr().err
    assert "unregistered; lower is better" in printed
    assert "worse than no registration" not in printed  # which is what this network computes
