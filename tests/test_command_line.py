"""The command line as a person meets it: help, advice, directions, progress, and one number for one thing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import carl, gradicon, register
from carlreg.cli._shared import Part, time_left
from carlreg.cli.evaluate import _table
from carlreg.errors import ExistsError, OutputError, user_message
from carlreg.evaluation.scores import FIGURES
from carlreg.files import atomic, images, transform_files, world_transform
from carlreg.files.images import Image, map_points
from carlreg.files.world_transform import WorldTransform
from carlreg.registration.api import register_pair
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.watch import watched

sitk = pytest.importorskip("SimpleITK")
from test_cli import Run, data, pair, refused, run  # noqa: E402, F401

SECTIONS = ("Images", "Quality", "Labels and landmarks", "Output", "Advanced")


def test_help_of_register_at_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Examples first, then options in five groups, none of them cut; what is required is marked."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run("register", "--help")[0] == 0
    text: str = run.out  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in re.sub(r"fixed_s,\s+…", "", text)
    places = [text.index(f"\n{title}:\n") for title in ("Examples", *SECTIONS)]
    assert places == sorted(places)
    assert "Options:" not in text
    assert len([line for line in text.splitlines() if line.startswith("  carl register ")]) == 3
    parts = re.split(r"\n([A-Z][a-z ]+):\n", text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    for section, names in (
        ("Images", ("fixed", "moving", "pairs", "initial-transform", "frame")),
        ("Quality", ("model", "transform", "io-iterations")),
        ("Labels and landmarks", ("fixed-seg", "moving-landmarks", "guide")),
        ("Output", ("out", "overwrite", "html")),
        ("Advanced", ("device", "seed", "threads", "quiet", "help")),
    ):
        for name in names:
            assert re.search(rf"--{name}\b", sections[section]), (section, name)
    for name in ("-f, --fixed", "-m, --moving", "-o, --out"):
        where = text.index(name)
        assert "[required" in text[where : text.index("\n  -", where)], name


def test_types_in_a_help_are_what_a_user_types(run: Run) -> None:  # noqa: F811
    for command, lines in (
        ("evaluate", ("-m, --method <str> ", "--threads <int> ")),
        ("view", ("--port <int> ",)),
        ("register", ("--regularity <float> ", "-f, --fixed <path> ")),
        ("template", ("scans... <path> ",)),
    ):
        assert run(command, "--help")[0] == 0
        text: str = run.out  # type: ignore[attr-defined]
        assert all(line in text for line in lines), command
        assert " range>" not in text
        assert "list[" not in text


def test_tables_at_80_columns_cut_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    headings = ["method", "pairs", *FIGURES.values()]
    name = "a-name-longer-than-others"
    Console(width=80).print(_table("Means over pairs", headings, [(name, *["0.1234"] * (len(headings) - 1))]))
    text = capsys.readouterr().out
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_every_error_about_existing_results_names_overwrite(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    out = tmp_path / "out"
    assert run(*pair(data, out, "--no-html"))[0] == 0
    refused(run, pair(data, out), "--overwrite")
    refused(run, ["warp", "-i", data / "moving.nii.gz", "-t", out, "-o", out / "warped.nii.gz"], "--overwrite")
    refused(run, ["jacobian", "-t", out, "-o", out / "warped.nii.gz"], "--overwrite")
    refused(run, ["convert", out, out / "transform.h5"], "--overwrite")
    table = tmp_path / "pairs.csv"
    table.write_text(f"name,fixed,moving\nout,{data / 'fixed.nii.gz'},{data / 'moving.nii.gz'}\n", encoding="utf-8")
    words = ["register", "--pairs", table, "-o", tmp_path, "--model", data / "small.safetensors", "--io-iterations", 1]
    code, err = run(*words)
    assert code == 1
    assert "io_iterations=0 instead of 1" in err
    assert "--overwrite" in err
    made = tmp_path / "template"
    made.mkdir()
    (made / "template.json").write_text("{}", encoding="utf-8")
    words = [
        "template",
        data / "fixed.nii.gz",
        data / "moving.nii.gz",
        "-o",
        made,
        "--model",
        data / "small.safetensors",
    ]
    refused(run, words, "--overwrite")
    (tmp_path / "cohort.json").write_text("{", encoding="utf-8")
    code, err = run("cohort", table, "-o", tmp_path, "--model", data / "small.safetensors")
    assert code == 1
    assert "is damaged" in err
    assert "--overwrite" in err
    with pytest.raises(ExistsError, match="--overwrite"):
        atomic.refuse_existing(out / "report.json", False)
    for names in ((), ("warped.nii.gz",)):
        last = "none.json" if names else "report.json"
        with pytest.raises(ExistsError, match="--overwrite"):
            atomic.refuse_result(out, names, last=last, overwrite=False)


def test_a_result_folder_defines_both_grids(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """`warp --inverse` needs no reference: the displacements of the inverse lie on the moving image's voxels, and a
    rigid result's report names the moving image."""
    moving = images.read(data / "moving.nii.gz")
    for number, more in enumerate(([], ["--transform", "rigid"])):
        out, target = tmp_path / f"out{number}", tmp_path / f"back{number}.nii.gz"
        assert run(*pair(data, out, "--no-html", *more))[0] == 0
        assert run("warp", "-i", data / "fixed.nii.gz", "-t", out, "--inverse", "-o", target)[0] == 0
        back = images.read(target)
        assert back.shape == moving.shape
        assert np.allclose(back.affine, moving.affine, atol=1e-4)
        assert np.abs(back.data.astype(int) - moving.data).mean() < 0.1 * moving.data.mean()
    frames = np.stack([moving.data, moving.data[::-1]], axis=-1)
    affine = np.diag([-1, -1, 1, 1]) @ moving.affine
    nib.save(nib.Nifti1Image(frames, affine), tmp_path / "frames.nii.gz")
    words = ["register", "-f", data / "fixed.nii.gz", "-m", tmp_path / "frames.nii.gz", "--frame", 0, "--no-html"]
    assert run(*words, "-o", tmp_path / "one", "--model", "none", "--transform", "rigid")[0] == 0
    shutil.copy(tmp_path / "frames.nii.gz", tmp_path / "one")
    (tmp_path / "frames.nii.gz").unlink()  # it is found beside the result, too
    target = tmp_path / "back.nii.gz"
    assert run("warp", "-i", data / "fixed.nii.gz", "-t", tmp_path / "one", "--inverse", "-o", target)[0] == 0
    assert images.read(target).shape == moving.shape


def test_the_wrong_direction_is_noticed(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    out = tmp_path / "out"
    segs = ["--fixed-seg", data / "fixed_seg.nii.gz", "--moving-seg", data / "moving_seg.nii.gz"]
    assert run(*pair(data, out, "--no-html", *segs))[0] == 0
    to = ["-t", out, "-o", tmp_path / "warped.nii.gz"]
    refused(run, ["warp", "-i", data / "fixed.nii.gz", *to], "belongs to the fixed image of")
    refused(run, ["warp", "-i", data / "fixed_seg.nii.gz", "--labels", *to], "give --inverse")
    refused(run, ["warp", "-i", data / "moving.nii.gz", "--inverse", *to], "leave --inverse out")
    assert run("warp", "-i", data / "moving_seg.nii.gz", "--labels", *to)[0] == 0
    rigid = ["--rigid-mask", data / "fixed_seg.nii.gz", "--moving-rigid-mask", data / "moving_seg.nii.gz"]
    assert run(*pair(data, tmp_path / "rigid", "--no-html", "--io-iterations", 1, *rigid))[0] == 0
    to = ["-t", tmp_path / "rigid", "-o", tmp_path / "warped_again.nii.gz"]
    refused(run, ["warp", "-i", data / "fixed_seg.nii.gz", "--labels", *to], "belongs to the fixed image of")
    assert run("warp", "-i", data / "moving_seg.nii.gz", "--labels", *to)[0] == 0
    same = tmp_path / "same"
    words = ["register", "-f", data / "fixed.nii.gz", "-m", data / "fixed.nii.gz", "-o", same, "--no-html"]
    assert run(*words, "--model", data / "small.safetensors", "--io-iterations", 0)[0] == 0
    assert run("warp", "-i", data / "fixed.nii.gz", "-t", same, "-o", tmp_path / "fine.nii.gz")[0] == 0


def test_the_inverse_of_a_chain(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """(B ∘ A)⁻¹ = A⁻¹ ∘ B⁻¹ warps the fixed image of A to the moving one of B; a turn and a stretch do not commute."""
    turn, stretch = np.eye(4), np.diag([1.3, 1.0, 0.8, 1.0])
    turn[:2, :2] = [[0.8, -0.6], [0.6, 0.8]]
    for name, matrix in (("a", turn), ("b", stretch)):
        (tmp_path / name).mkdir()
        transform_files.write(WorldTransform.linear(matrix), tmp_path / name / "transform.h5")
        transform_files.write(WorldTransform.linear(np.linalg.inv(matrix)), tmp_path / name / "inverse_transform.h5")
    image, back = images.read(data / "fixed.nii.gz"), tmp_path / "back.nii.gz"
    chain = ["-t", tmp_path / "a", "-t", tmp_path / "b"]
    words = ["warp", "-i", data / "fixed.nii.gz", "-r", data / "moving.nii.gz"]
    assert run(*words, *chain, "--inverse", "-o", back)[0] == 0
    inverse = WorldTransform.linear(np.linalg.inv(stretch @ turn))
    expected = world_transform.apply(inverse, image, images.read(data / "moving.nii.gz"))
    assert np.abs(images.read(back).data - expected.data.astype(float)).max() <= 1  # rounding
    swapped = world_transform.apply(WorldTransform.linear(np.linalg.inv(turn @ stretch)), image, expected)
    assert np.abs(swapped.data - expected.data.astype(float)).max() > 100


def test_points_go_back_through_a_chain_of_dense_transforms(tmp_path: Path, run: Run) -> None:  # noqa: F811
    numbers = np.random.default_rng(0)
    grid = Image(np.zeros((16, 18, 14), np.float32), np.diag([2.0, 2.0, 2.5, 1.0]))
    for name in ("a.h5", "b.h5"):
        coarse = torch.from_numpy(numbers.normal(size=(1, 3, 4, 4, 4))).float()
        shift = torch.nn.functional.interpolate(coarse, grid.shape, mode="trilinear", align_corners=True)
        moves = WorldTransform(np.eye(4), shift[0].movedim(0, -1).numpy(), grid.affine)
        transform_files.write(moves, tmp_path / name)
    points = numbers.uniform(8, 22, (20, 3))
    np.savetxt(tmp_path / "fixed.csv", points, delimiter=",", header="x,y,z", comments="")
    chain = ["-t", tmp_path / "a.h5", "-t", tmp_path / "b.h5"]
    there, back = tmp_path / "moving.csv", tmp_path / "back.csv"
    assert run("warp-points", "-p", tmp_path / "fixed.csv", *chain, "--from", "fixed", "-o", there)[0] == 0
    assert run("warp-points", "-p", there, *chain, "--from", "moving", "-o", back)[0] == 0
    moved, returned = (np.loadtxt(path, delimiter=",", skiprows=1)[:, :3] for path in (there, back))
    assert np.linalg.norm(moved - points, axis=1).max() > 1
    assert np.linalg.norm(returned - points, axis=1).max() < 1e-2


def test_the_wrong_direction_of_a_chain_is_noticed(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    first, last = tmp_path / "first", tmp_path / "last"
    assert run(*pair(data, first, "--no-html", "--transform", "rigid"))[0] == 0
    images.write(images.read(data / "fixed.nii.gz"), tmp_path / "other.nrrd")
    other = ["register", "-f", data / "moving.nii.gz", "-m", tmp_path / "other.nrrd", "-o", last, "--no-html"]
    assert run(*other, "--model", data / "small.safetensors", "--transform", "rigid", "--io-iterations", 0)[0] == 0
    to = ["-t", first, "-t", last, "-r", data / "moving.nii.gz", "-o", tmp_path / "warped.nii.gz"]
    refused(run, ["warp", "-i", data / "fixed.nii.gz", *to], f"fixed image of {first}")
    refused(run, ["warp", "-i", tmp_path / "other.nrrd", "--inverse", *to], f"moving image of {last}")
    assert run("warp", "-i", tmp_path / "other.nrrd", *to)[0] == 0
    assert run("warp", "-i", data / "fixed.nii.gz", "--inverse", *to, "--overwrite")[0] == 0


def test_an_initial_transform_from_a_result_folder(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    first = tmp_path / "first"
    assert run(*pair(data, first, "--no-html", "--transform", "rigid"))[0] == 0
    for number, source in enumerate((first, first / "transform.h5")):
        assert run(*pair(data, tmp_path / f"{number}", "--no-html", "--initial-transform", source))[0] == 0
    one, two = (transform_files.read(tmp_path / f"{number}" / "transform.h5") for number in range(2))
    points = np.random.default_rng(0).uniform(0, 20, (20, 3))
    assert np.array_equal(one(points), two(points))
    report = json.loads((tmp_path / "0" / "report.json").read_text(encoding="utf-8"))
    assert report["inputs"]["initial_transform"]["sha256"]


def test_a_folder_without_a_result_is_no_transform(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    expected = "expected a transform file or a result folder of `carl register`"
    (tmp_path / "empty").mkdir()
    for name, problem in (("empty", "is a folder without a result"), ("none", "does not exist")):
        words = ["register", "-f", data / "fixed.nii.gz", "-m", data / "moving.nii.gz", "-o", tmp_path / "out"]
        code, err = run(*words, "--model", "none", "--initial-transform", tmp_path / name)
        assert (code, err) == (1, f"carl: {tmp_path / name} {problem}; {expected}: check the path\n")
        assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named(
    data: Path,  # noqa: F811
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, err = run(*pair(data, tmp_path / "out", "--no-html"))
    assert code == 1
    assert "the disk is full; free some space, then run the same command again" in err
    assert not (tmp_path / "out").exists()
    quota = OutputError(errno.EDQUOT, "Disk quota exceeded", "/home/me/scan.nii.gz")
    assert user_message(quota).startswith("/home/me/scan.nii.gz cannot be written: your quota")  # type: ignore[union-attr]


def test_the_network_reports_its_share(data: Path) -> None:  # noqa: F811
    """Shares rise from 0 to 1, and the result is the same as without a report."""
    shares: list[float] = []
    fixed, moving = (data / f"{name}.nii.gz" for name in ("fixed", "moving"))
    inputs, options = PairInputs(fixed=fixed, moving=moving), RegisterOptions(io_iterations=0, device="cpu")
    watched_result = register_pair(inputs, data / "small.safetensors", options, advance=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 10
    assert shares[0] < 0.5
    assert shares[-1] == pytest.approx(1, abs=0.1)
    alone = register_pair(inputs, data / "small.safetensors", options)  # and without a report
    assert np.array_equal(watched_result.transform.displacement, alone.transform.displacement)
    network, image = gradicon(3, 2, **SMALL).eval(), torch.rand(1, 1, 16, 16, 16)
    with watched(network, image, image, shares.append):
        pass
    assert not any(module._forward_hooks for module in network.modules())
    # Counted beforehand exactly, although deep networks do relatively more on small images; attention included.
    for dim, shape in ((3, (40, 48, 40)), (2, (72, 40))):
        for network in (gradicon(dim, 2, **SMALL).eval(), carl(dim, width=8, **SMALL).eval()):
            shares.clear()
            image = torch.rand(1, 1, *shape)
            with torch.no_grad(), watched(network, image, image, shares.append):
                network.both(image, image)
            assert shares[-2] < 0.9999
            assert shares[-1] == pytest.approx(1, abs=1e-6)
    assert time_left(40.2, 75) == "40 %, 1:15 left"
    assert time_left(0, None) == "0 %"


def test_progress_is_of_the_present_part(data: Path, tmp_path: Path) -> None:  # noqa: F811
    """The time that is left follows from the average speed of the part; nothing is known of one that has just begun."""
    now = [100.0]
    part = Part("network", lambda: now[0])
    assert part.left() == ""
    now[0] += 20
    part.advance(0)  # counting begins here
    now[0] += 1
    part.advance(0.001)
    assert part.left() == "0 %"
    now[0] += 29
    part.advance(0.25)
    assert part.left() == "25 %, 1:30 left"
    now[0] += 60
    assert part.left() == "25 %, 0:30 left"
    now[0] += 31
    assert part.left() == "25 %"  # and not 0:00 for as long as the step takes
    part.begin("judging the result")
    assert (part.name, part.left()) == ("judging the result", "")
    # Every part ends near its end: also the optimisation, whose steps on coarse grids are quick.
    events: list[tuple[str, list[float]]] = []
    moving = images.read(data / "moving.nii.gz")
    images.write(Image(np.roll(moving.data, 2, axis=0), moving.affine), tmp_path / "moving.nii.gz")
    inputs = PairInputs(fixed=data / "fixed.nii.gz", moving=tmp_path / "moving.nii.gz")
    register_pair(
        inputs,
        data / "small.safetensors",
        RegisterOptions(io_iterations=3, device="cpu"),
        progress=lambda text: events.append((text, [])),
        advance=lambda share: events[-1][1].append(share),
    )
    shares = dict(events)["optimisation"]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


def numbers_in(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(folds|SDlogJ) ([\d.]+)", text)}


def test_one_number_for_one_thing(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """report.json, `carl info`, `carl jacobian` and `carl evaluate` agree on folds, SDlogJ, Dice and landmarks."""
    fixed, moving = (images.read(data / f"{name}.nii.gz") for name in ("fixed", "moving"))
    rng = np.random.default_rng(0)
    noisy = Image((moving.data + rng.normal(0, 60, moving.shape)).astype(np.int16), moving.affine)
    images.write(Image(np.roll(noisy.data, 2, axis=0), noisy.affine), tmp_path / "moving.nii.gz")
    for name, image in (("fixed", fixed), ("moving", noisy)):
        labels = np.digitize(image.data, [200, 500, 900]).astype(np.uint8)
        if name == "moving":
            labels[0, 0, 0] = 7  # which the fixed image has not
        images.write(Image(labels, image.affine), tmp_path / f"{name}_seg.nii.gz")
        corners = image.affine @ np.array([[5, 5, 5, 1], [10, 8, 9, 1]]).T
        rows = "\n".join(",".join(map(str, point)) for point in corners[:3].T)
        (tmp_path / f"{name}.csv").write_text(f"x,y,z\n{rows}\n", encoding="utf-8")
    columns = "name,fixed,moving,fixed_seg,moving_seg,fixed_landmarks,moving_landmarks"
    row = f"one,{data / 'fixed.nii.gz'},moving.nii.gz,fixed_seg.nii.gz,moving_seg.nii.gz,fixed.csv,moving.csv"
    (tmp_path / "pairs.csv").write_text(f"{columns}\n{row}\n", encoding="utf-8")
    words = ["register", "--pairs", tmp_path / "pairs.csv", "-o", tmp_path / "out", "--model"]
    code, err = run(*words, data / "small.safetensors", "--io-iterations", 4, "--regularity", 0, "--io-sim", "ssd")
    assert code == 0, err
    assert "not scored: 7" in err
    one = tmp_path / "out" / "one"
    report = json.loads((one / "report.json").read_text(encoding="utf-8"))
    metrics, close, same = report["metrics"], {"abs": 1e-4}, {"abs": 1e-6}  # as printed, and as written
    assert metrics["sd_log_jacobian"] > 0.01  # something bends
    assert sorted(report["dice"]["after"]) == ["1", "2", "3"]
    run("info", one, "--json")
    facts = json.loads(run.out)  # type: ignore[attr-defined]
    assert facts["metrics"] == metrics
    assert facts["verdict"].startswith(report["confidence"]["verdict"])
    run("jacobian", "-t", one)
    printed = numbers_in(run.out)  # type: ignore[attr-defined]
    assert printed["folds"] == pytest.approx(metrics["folds_percent"], **close)
    assert printed["SDlogJ"] == pytest.approx(metrics["sd_log_jacobian"], **close)
    _, err = run("evaluate", tmp_path / "pairs.csv", "--method", f"ours={tmp_path / 'out'}", "-o", tmp_path / "scores")
    assert "label 7 is missing from the fixed labels" in err
    text = (tmp_path / "scores" / "scores.json").read_text(encoding="utf-8")
    (scores,) = [entry for entry in json.loads(text)["scores"] if entry["method"] == "ours"]
    assert scores["dice"] == pytest.approx(metrics["dice_after"], **same)
    assert scores["dice_per_label"] == pytest.approx(report["dice"]["after"], **same)
    assert scores["tre_mm"] == pytest.approx(metrics["tre_after_mm"], **same)
    assert scores["folds_percent"] == pytest.approx(metrics["folds_percent"], **same)
    assert scores["sd_log_jacobian"] == pytest.approx(metrics["sd_log_jacobian"], **same)
    assert scores["inverse_consistency_mm"] == pytest.approx(metrics["inverse_consistency_mm"], **same)
    run("warp", "-i", tmp_path / "moving_seg.nii.gz", "-t", one, "-o", tmp_path / "again.nii.gz", "--labels")
    again, written = (images.read(path) for path in (tmp_path / "again.nii.gz", one / "warped_seg.nii.gz"))
    assert np.array_equal(again.data, written.data)


def test_shells_complete_commands_and_options() -> None:
    def complete(words: str, number: int) -> list[str]:
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(number), "_CARL_COMPLETE": "complete_bash"}
        command = [sys.executable, "-m", "carlreg"]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        return done.stdout.split()

    assert complete("carl reg", 1) == ["register"]
    assert {"--fixed", "--fixed-seg"} <= set(complete("carl register --fix", 2))


def test_a_rigid_result_has_the_same_metrics(data: Path) -> None:  # noqa: F811
    result = register(
        fixed=data / "fixed.nii.gz",
        moving=data / "moving.nii.gz",
        model=data / "small.safetensors",
        transform="rigid",
        device="cpu",
    )
    assert result.metrics["folds_percent"] == result.metrics["sd_log_jacobian"] == 0


# ---- coordinates ----------------------------------------------------------------------------------------------------


def test_points_outside_the_image_are_warned_of(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """Points in RAS, read as LPS, lie elsewhere: the hint is the option that reads them right."""
    out = tmp_path / "out"
    assert run(*pair(data, out, "--no-html"))[0] == 0
    for side in ("fixed", "moving"):
        image = images.read(data / f"{side}.nii.gz")
        inside = map_points(image.affine, [[3.0, 4.0, 5.0], [15.0, 12.0, 10.0]])
        for name, points in (("lps", inside), ("ras", inside * [-1, -1, 1]), ("far", inside + 5000)):
            rows = "\n".join(",".join(map(str, point)) for point in points)
            (tmp_path / f"{name}.csv").write_text(f"x,y,z\n{rows}\n", encoding="utf-8")

        def warned(name: str, *more: str, side: str = side) -> str:
            words = ["warp-points", "-p", tmp_path / f"{name}.csv", "-t", out, "--from", side, "--overwrite"]
            code, err = run(*words, "-o", tmp_path / "moved.csv", *more)
            assert code == 0, err
            return err

        assert "outside" not in warned("lps")
        assert "outside" not in warned("ras", "--space", "RAS")
        hint = f"2 of 2 points lie outside the {side} image if read as LPS mm; are they RAS? Then give --space RAS"
        assert hint in warned("ras")
        assert "give --space LPS" in warned("lps", "--space", "RAS")
        assert "check that they belong to it" in warned("far")


def test_landmarks_outside_their_image_are_warned_of(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    """They are scored, but the scores mean nothing if they were read in the wrong frame."""
    words: list[object] = [*pair(data, tmp_path / "out", "--no-html", "--overwrite")]
    for side in ("fixed", "moving"):
        image = images.read(data / f"{side}.nii.gz")
        points = map_points(image.affine, [[3.0, 4.0, 5.0], [15.0, 12.0, 10.0]]) * [-1, -1, 1]
        rows = "\n".join(",".join(map(str, point)) for point in points)
        (tmp_path / f"{side}.csv").write_text(f"x,y,z\n{rows}\n", encoding="utf-8")
        words += [f"--{side}-landmarks", tmp_path / f"{side}.csv"]
    code, err = run(*words)
    assert code == 0
    for side in ("fixed", "moving"):
        hint = f"2 of 2 landmarks lie outside the {side} image if read as LPS mm; are they RAS? Then name the columns"
        assert hint in err
        text = (tmp_path / f"{side}.csv").read_text(encoding="utf-8")
        (tmp_path / f"{side}.csv").write_text(text.replace("x,y,z", "r,a,s"), encoding="utf-8")
    code, err = run(*words)
    assert code == 0
    assert "lie outside" not in err


def test_info_names_the_frame_and_switches_it(data: Path, tmp_path: Path, run: Run) -> None:  # noqa: F811
    image = images.read(data / "fixed.nii.gz")
    first = image.affine[:3, 3]
    for space, sign in (("LPS", 1), ("RAS", -1)):
        run("info", data / "fixed.nii.gz", "--json", "--space", space)
        text = json.loads(run.out)[f"first_voxel_{space}_mm"]  # type: ignore[attr-defined]
        assert np.allclose([float(x) for x in text.split()], first * [sign, sign, 1], atol=1e-3)
    matrix = np.eye(4)
    matrix[:3] = [[0.9, 0.1, 0.2, 3], [-0.1, 1, 0, 4], [0.3, 0, 1, 5]]
    transform_files.write(WorldTransform.linear(matrix), tmp_path / "a.tfm")
    run("info", tmp_path / "a.tfm", "--json", "--space", "RAS")
    facts, flip = json.loads(run.out), np.diag([-1.0, -1.0, 1.0, 1.0])  # type: ignore[attr-defined]
    assert "RAS mm" in facts["kind"]
    assert np.allclose(facts["affine"], flip @ matrix @ flip, atol=1e-5)
