"""The experiment that calibrates verdicts, on invented rows whose truth is known."""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from carlreg.confidence.calibration import NUMBERS, SUFFIX, Calibration, Linear, Steps, numbers_of
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, map_points, write
from carlreg.model.files import save
from carlreg.model.loaded import load_model
from carlreg.model.zoo import carl

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module("experiments.confidence.fit")
    finally:
        sys.path.remove(str(ROOT))


def invented(number: int, split: str, kind: str) -> dict[str, Any]:
    """A row whose disagreement, turn and error grow with a hidden quality; features differ between sets."""
    draw = random.Random(number)
    name = ("brain", "abdomen")[number % 2]
    other = kind == "other anatomy"
    badness = draw.uniform(0, 0.3) if kind == "plain" else draw.uniform(0.7, 1.6)
    mm = 1 + 20 * badness
    evidence = {
        "extent_mm": 100.0,
        "disagreement_mm": 0.1 * mm * draw.uniform(0.8, 1.2),
        "network_disagreement_mm": mm * draw.uniform(0.5, 2),
        "turn_mm": mm * draw.uniform(0.5, 2),
        "turn_95_mm": 2 * mm,
        "shift_mm": mm * draw.uniform(0.5, 2),
        "spread_mm": 5 + mm,
        "entropy": draw.uniform(0.2, 0.3),
        "similarity": max(0.9 - 0.4 * badness, 0.1),
        "similarity_excess": max(0.8 - 0.4 * badness, 0.0),
        "agreement": draw.uniform(0.7, 1.0),
        "covered": draw.uniform(0.8, 1.0),
        "volume": draw.uniform(0.2, 0.4),
        "moved_mm": mm,
        "gain": draw.uniform(0.1, 0.2),
    }
    mean = {"brain": 0.0, "abdomen": 5.0}
    features = [[mean[n] + draw.gauss(0, 1) for _ in range(8)] for n in (name, "abdomen" if other else name)]
    row = {
        "kind": kind,
        "set": name,
        "split": split,
        "subjects": [f"{name}/{split}{number % 7}", f"{name}/{split}{number % 5 + 7}"],
        "network": "default",
        "no_common_anatomy": other,
        "model": "sum",
        "evidence": evidence,
        "features": features,
        "seconds": {"registration": 1.0, "evidence": 0.2},
        "points": None,
    }
    if not other:
        truth = [mm * draw.uniform(0.2, 3) for _ in range(30)]
        names = ("network_disagreement", "disagreement", "turn", "shift", "spread")
        points = {name: [t * draw.uniform(0.7, 1.4) for t in truth] for name in names}
        row["points"] = points | {"similarity": [0.5] * 30, "truth": truth}
        row |= {"dice_before": 0.3, "dice_after": max(0.8 - 0.5 * badness, 0.05), "surface_after_mm": mm}
    return row


def test_a_calibration_of_invented_rows_keeps_its_promises(fit: ModuleType) -> None:
    kinds = ("plain", "plain", "turned by 90°", "other anatomy", "noisy")
    rows = [invented(n, ("train", "val")[n // 5 % 2], kinds[n % 5]) for n in range(400)]
    medians = fit.mark_failures(rows)
    assert set(medians) == {"brain", "abdomen"}
    means, deviation = fit.add_features(rows)
    for row in rows:
        row["numbers"] = fit.numbers_of(row["evidence"])
    train, val = ([row for row in rows if row["split"] == split] for split in ("train", "val"))
    typical = fit.typical_of(train)
    for row in rows:
        row["numbers"] |= fit.beyond(row, typical)
    tiers = {name: fit.TIERS[name] for name in ("without headers", "cheap")}
    calibration, chosen = fit.fit_calibration("sum", train, tiers, means, deviation, {}, typical)
    cheap = [name for name, _ in chosen["failure"]["cheap"]]
    assert set(cheap) <= set(fit.TIERS["cheap"])
    found = fit.test(calibration, train, val, cheap)
    assert found["auroc"]["kinds_left_out"] > 0.95
    assert found["verdicts"]["failures_among_good"] <= 0.05
    assert found["verdicts"]["failures_among_failed"] >= 0.8
    assert found["error"]["rank_correlation"] > 0.9
    assert found["map"]["surfaces"]["rank_correlation"] > 0.5
    for one in found["error"]["bins"]:
        assert one["expected_mm"] == pytest.approx(one["true_mm"], rel=0.25)
    assert found["alone"]["kinship"]["all"] > found["alone"]["entropy"]["all"]
    again = Calibration.from_json(calibration.to_json())
    numbers = rows[0]["numbers"]
    assert again.probability(numbers) == pytest.approx(calibration.probability(numbers), rel=1e-3)
    assert again.expected_error(numbers, 100) == pytest.approx(calibration.expected_error(numbers, 100), rel=1e-3)


def told(number: int, kind: str, name: str, draw: np.random.Generator) -> dict[str, Any]:
    """A row that two numbers tell the truth about together; a third does so for one kind alone, the rest is chance."""
    failed = kind != "plain" and number % 3 > 0
    first, second = (float(failed) * draw.uniform(0.2, 1.2) + 0.25 * draw.normal() for _ in range(2))
    numbers = dict.fromkeys(NUMBERS, math.nan) | {f"{n}": draw.normal() for n in ("turn", "volume", "spread", "drift")}
    numbers |= {"no_excess": first, "scatter": second, "uncovered": float(failed and kind == "cropped")}
    mm = 2 * math.exp(first + second)
    common = {"kind": kind, "set": name, "failed": failed, "no_common_anatomy": kind == "noise instead"}
    common["subjects"] = [f"{name}/{number}", f"{name}/{number + 1}"]
    return common | {"numbers": numbers, "true_mm": mm, "evidence": {"extent_mm": 100.0}, "points": None}


def test_the_numbers_that_tell_are_chosen_and_chance_is_not(fit: ModuleType) -> None:
    draw = np.random.default_rng(1)
    kinds, sets = (
        ("plain", "turned by 90°", "cropped", "noise instead", "plain", "mirrored"),
        ("brain", "abdomen", "lung"),
    )
    rows = [told(n, kinds[n % 6], sets[n // 6 % 3], draw) for n in range(360)]
    course = fit.choose_failure(rows, fit.TIERS["without headers"])
    names, scores = zip(*course, strict=True)
    assert set(names[:2]) == {"no_excess", "scatter"}
    assert len(names) <= 4  # what tells of one kind alone is of no use for a kind that was left out
    assert list(scores) == sorted(scores)
    assert course == fit.choose_failure(rows, fit.TIERS["without headers"])
    assert {name for name, _ in fit.choose_failure(rows, fit.TIERS["cheap"])}.isdisjoint({"scatter", "turn", "spread"})
    error = fit.choose_error(rows, fit.TIERS["without headers"])
    assert {name for name, _ in error[:2]} == {"no_excess", "scatter"}
    assert error[1][1] > 0.95  # of the variance
    linear, _ = fit.fit_error(rows, ("no_excess", "scatter"))
    weights = np.array(linear.weights) / np.array(linear.scale)
    assert weights == pytest.approx([1, 1], rel=0.1)


def test_the_map_is_made_of_what_ranks_places(fit: ModuleType) -> None:
    """The error at a point is the product of smooth drift and flatness; its level differs between pairs."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(40):
        drift, flat = (np.exp(draw.normal(size=60)) for _ in range(2))
        points = {
            prefix + name: np.exp(draw.normal(size=60)) for prefix in ("", "smooth_") for name in ("turn", "drift")
        }
        points |= {"smooth_drift": 5 * drift, "flatness": flat, "truth": drift * flat**0.5 * math.exp(draw.normal())}
        points |= {"similarity": draw.uniform(0, 1, 60)}
        listed = {name: values.tolist() for name, values in points.items()}
        evidence = {"extent_mm": 50.0}
        rows.append(
            {"set": ("brain", "lung")[number % 2], "failed": number > 35, "points": listed, "evidence": evidence}
        )
    model, course = fit.fit_local(rows)
    assert [name for name, _ in course] == ["smooth_drift", "flatness"]
    assert course[-1][1] > 0.95
    weights = np.array(model.weights) / np.array(model.scale)
    assert weights == pytest.approx([1, 0.5], rel=0.05)
    calibration = Calibration("sum", (), (), 0.0, 1.0, local=model)
    assert fit.map_summary(calibration, rows)["surfaces"]["rank_correlation"] > 0.95
    again = Calibration.from_json(calibration.to_json()).local
    assert again is not None
    assert again.names == model.names


def test_rows_that_were_cut_off_or_compressed_are_read(fit: ModuleType, tmp_path: Path) -> None:
    text = '{"number": 0}\n{"number": 1}\n{"num'
    (tmp_path / "rows.jsonl").write_text(text)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("rows.jsonl", "rows.jsonl.gz"):
        assert fit.read_rows(tmp_path / name) == [{"number": 0}, {"number": 1}]


def test_failures_are_those_of_the_definition(fit: ModuleType) -> None:
    plain = [invented(n, "val", "plain") for n in range(6)]
    worse, half, tre, fine = (dict(plain[0]) for _ in range(4))
    worse |= {"dice_before": 0.9, "dice_after": 0.89}
    half |= {"dice_before": 0.0, "dice_after": 0.3}
    tre |= {"tre_mm": 5.1}
    fine |= {"dice_before": 0.0, "dice_after": 0.7}
    other = invented(3, "val", "other anatomy")
    fit.mark_failures([*plain, worse, half, tre, fine, other])
    assert [row["failed"] for row in (worse, half, tre, fine, other)] == [True, True, True, False, True]
    unknown = {name: value for name, value in plain[0].items() if not name.startswith("dice")}
    assert [fit.has_truth(row) for row in (plain[0], tre, other, unknown)] == [True, True, True, False]


def test_what_is_usual_is_that_of_intact_pairs_of_the_recognised_sets(fit: ModuleType) -> None:
    rows = [invented(n, "train", kind) for kind in ("plain", "mirrored") for n in range(20)]
    fit.mark_failures(rows)
    fit.add_features(rows)
    for row in rows:
        row["evidence"]["entropy"] = 0.2 if row["set"] == "brain" else 0.8
        row["numbers"] = fit.numbers_of(row["evidence"])
    typical = fit.typical_of(rows)
    assert {pair: one["entropy"] for pair, one in typical.medians.items()} == {
        "abdomen, abdomen": 0.8,
        "brain, brain": 0.2,
    }
    assert "folds" not in typical.deviation  # which is not known
    values = {n["set"]: fit.beyond(n | {"numbers": {"entropy": 0.7}}, typical)["beyond_entropy"] for n in rows}
    assert values["abdomen"] == 0
    assert values["brain"] > 2
    strange = next(row for row in rows if row["set"] == "brain") | {"numbers": {"entropy": 0.7}}
    assert fit.beyond(strange, typical, left_out="brain")["beyond_entropy"] == 0
    assert fit.typical_of([row for row in rows if row["kind"] != "plain"]) is None


def test_every_beginning_of_the_plan_is_balanced(fit: ModuleType, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence.cases import TAKEN, plan

    sys.path.remove(str(ROOT))
    for name in TAKEN:
        for split in ("train", "val"):
            (tmp_path / name / split).mkdir(parents=True)
            for number in range(20):
                for phase in ("_ED", "_ES") if name == "cardiac" else ("",):
                    (tmp_path / name / split / f"{number:02}{phase}.nii.gz").touch()
    tasks = plan(tmp_path)
    assert len(tasks) > 500
    kinds = {task.kind for task in tasks}
    for count in (150, 300):
        part = tasks[:count]
        assert {task.kind for task in part} == kinds
        assert 0.35 < sum(task.split == "train" for task in part) / count < 0.5
    assert all({task.fixed.split, task.moving.split} == {task.split} for task in tasks)


@pytest.mark.parametrize("alteration", ["synthetic", "turned", "cropped"])
def test_altered_scans_keep_their_truth(tmp_path: Path, alteration: str) -> None:
    """A bright ball at each landmark is found at the landmark of the altered scan, or the landmark is gone."""
    sys.path.insert(0, str(ROOT))
    from experiments.confidence.cases import Scan, Task, prepare

    sys.path.remove(str(ROOT))
    index = np.array([[20.0, 24, 18], [30, 12, 26], [14, 33, 30]])
    grid = np.stack(np.meshgrid(*(np.arange(n) for n in (44, 46, 42)), indexing="ij"), axis=-1)
    balls = sum(np.exp(-((grid - at) ** 2).sum(-1) / 8) for at in index)
    affine = np.array([[-2.0, 0, 0, 40], [0, 1.5, 0, -30], [0, 0, 2.5, 7], [0, 0, 0, 1]])
    (tmp_path / "lung" / "popi").mkdir(parents=True)
    for name in ("inhale", "exhale"):
        write(Image(100 * np.asarray(balls, np.float32), affine), tmp_path / "lung" / "popi" / f"{name}.nii.gz")
        rows = "\n".join(",".join(map(str, point)) for point in map_points(affine, index))
        (tmp_path / "lung" / "popi" / f"{name}_landmarks.csv").write_text(f"x,y,z\n{rows}\n")
    both = [Scan("lung", "val", f"lung/popi/{name}") for name in ("inhale", "exhale")]
    amount = {"synthetic": 1e-3, "turned": 40.0, "cropped": 0.5}[alteration]
    fixed, moving = prepare(tmp_path, Task("any", "lung", "val", *both, alteration, amount, seed=3))
    assert fixed.landmarks is not None
    assert moving.landmarks is not None
    assert (np.linalg.norm(fixed.landmarks - moving.landmarks, axis=-1) > 1).any() or alteration == "cropped"
    values = moving.image.data
    for point in moving.landmarks:
        if np.isnan(point).any():
            assert alteration == "cropped"
            continue
        at = np.rint(map_points(np.linalg.inv(moving.image.affine), point)).astype(int)
        if ((at >= 0) & (at < values.shape)).all():
            assert values[tuple(at)] > 50
    if moving.truth is not None:
        np.testing.assert_allclose(moving.truth(fixed.landmarks), moving.landmarks, atol=1e-6)


def test_a_row_and_the_ladder_of_a_small_pair(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence import collect, ladder
    from experiments.confidence.cases import Scan, Task

    sys.path.remove(str(ROOT))
    folder = tmp_path / "hippocampus" / "val"
    folder.mkdir(parents=True)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, 32),) * 3, indexing="ij"), axis=-1)
    for name, shift in (("a", 0.0), ("b", 0.1)):
        radius = np.linalg.norm((grid - [shift, 0, 0]) / [0.8, 0.6, 0.7], axis=-1)
        scan = np.where(radius < 1, 60 + 40 * np.cos(5 * grid[..., 1]) * np.sin(4 * (grid[..., 0] - shift)), 0)
        label = np.where(radius < 0.7, np.where(grid[..., 0] > shift, 1, 2), 0)
        write(Image(scan.astype(np.float32), np.diag([2.0, 2, 2, 1])), folder / f"{name}.nii.gz")
        write(Image(label.astype(np.uint8), np.diag([2.0, 2, 2, 1])), folder / f"{name}_labels.nii.gz")
    path = tmp_path / "small.safetensors"
    save(carl(width=8, unet_down=(4, 8, 8, 8, 8), unet_up=(8, 8, 8, 8, 8)), path, metadata={"grid": "32 32 32"})
    both = [Scan("hippocampus", "val", f"hippocampus/val/{name}") for name in "ab"]
    task = Task("plain", "hippocampus", "val", *both, options=(("io_iterations", 2),))
    cpu = torch.device("cpu")
    row = collect.collect(tmp_path, task, {"default": load_model(path, cpu)}, cpu)
    json.dumps(row)
    assert 0 < row["dice_before"] < row["dice_after"] <= 1  # the optimisation starts from the better of two maps
    assert 0 < row["surface_after_mm"] < 8
    assert len(row["points"]["truth"]) == collect.POINTS
    assert {"residual", "flatness", "deformation", "stretch", "moved", "attention", "turn"} <= row["points"].keys()
    numbers = numbers_of(row["evidence"])
    assert {name for name, value in numbers.items() if math.isnan(value)} == {"novelty", "kinship"}  # of the fit

    names = ("disagreement",)
    odds = Linear(names, (0.0,), (1.0,), (0.0,), -4.0)
    calibration = Calibration(sha256(path), (odds,), ((odds, Steps((-4.0,), (-3.0,))),), 0.2, 0.8)
    with pytest.raises(SystemExit, match="no calibration"):
        ladder.run(argparse.Namespace(summarise=False, model=str(path)))
    path.with_name(f"small{SUFFIX}").write_text(json.dumps(calibration.to_json()))
    found = ladder.compare(tmp_path, task, load_model(path, cpu), cpu)
    assert found["tried"] == []
    assert found["first"] == found["best"]
    assert found["first"]["verdict"] == "good"
    assert found["first"]["dice_after"] == pytest.approx(row["dice_after"], abs=0.02)


def test_the_ladder_is_summed_up() -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence.ladder import summary

    sys.path.remove(str(ROOT))

    def row(first: float, best: float, verdict: str, seconds: float) -> dict[str, Any]:
        scores = ({"dice_before": 0.2, "dice_after": dice, "verdict": verdict} for dice in (first, best))
        parts = dict(zip(("first", "best"), scores, strict=True))
        tried = ["a", "b"] if first != best else []
        return {"kind": "plain", "set": "brain", "tried": tried, "seconds": {"first": 1.0, "all": seconds}, **parts}

    rows = [
        row(0.1, 0.8, "good", 3),
        row(0.1, 0.7, "doubtful", 3),
        row(0.8, 0.8, "good", 1),
        row(0.8, 0.3, "good", 1.2),
    ]
    found = summary(rows, {"brain": 0.8})["all"]
    assert (found["failed_before"], found["failed_after"]) == (2, 1)
    assert (found["mended"], found["mended_and_good"], found["worse"], found["climbed"]) == (2, 1, 1, 3)
    assert found["median_time"] == pytest.approx(2.1)


def test_altered_headers_are_those_that_are_meant() -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence.orientation import alterations, altered

    sys.path.remove(str(ROOT))
    data = np.random.default_rng(0).random((5, 6, 7)).astype(np.float32)
    image = Image(data, np.diag([-1.0, -2, 3, 1]))
    changes = alterations("abdomen")
    assert len(changes) == 9
    assert len(alterations("brain")) == 8
    for matrix in changes.values():
        found = altered(image, matrix)
        centre, other = (np.array(data.shape) - 1) / 2, (np.array(found.shape) - 1) / 2
        for index in np.ndindex(*found.shape):
            old = np.rint(matrix @ (np.array(index) - other) + centre).astype(int)
            assert found.data[index] == data[tuple(old)]
        np.testing.assert_allclose(np.abs(matrix) @ found.spacing, image.spacing)


def test_workers_take_turns_and_an_earlier_file_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence import collect
    from experiments.confidence.cases import plan

    sys.path.remove(str(ROOT))
    (tmp_path / "hippocampus" / "val").mkdir(parents=True)
    for name in "abcd":
        (tmp_path / "hippocampus" / "val" / f"{name}.nii.gz").touch()
    seen = []

    def work(data: Path, task: Any, models: Any, device: Any) -> dict[str, Any]:
        seen.append(task)
        if task.kind == "mirrored":
            raise ValueError("a pair that fails")
        if len(seen) == 25:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {"kind": task.kind}

    monkeypatch.setattr(collect, "collect", work)
    monkeypatch.setattr(collect, "load_model", lambda *_: load_model("none", "cpu"))
    monkeypatch.setattr(collect, "_untrained", lambda _: None)
    common = {"data": tmp_path, "out": tmp_path / "rows.jsonl", "seconds": math.inf, "model": "default", "workers": 3}
    common |= {"device": "cpu", "sets": [], "kinds": [], "split": None, "mps": False, "until": math.inf}
    turn = tmp_path / "turn"
    turn.write_text("14")  # others have taken 14 turns
    threads = torch.get_num_threads()
    collect.run(argparse.Namespace(**common, limit=20, turns=turn, resume=False))
    torch.set_num_threads(threads)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(14, 20))
    assert seen == plan(tmp_path)[14:20]
    common["workers"] = 1
    with pytest.raises(SystemExit):  # without its GPU, a worker is of no use
        collect.run(argparse.Namespace(**common, limit=30, turns=None, resume=True))
    collect.run(argparse.Namespace(**common, limit=30, turns=None, resume=True))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["number"] for row in rows) == list(range(30))
    failed = [row for row in rows if row.get("kind") == "mirrored"]
    assert failed
    assert all(row["error"] == "ValueError: a pair that fails" for row in failed)
    collect.run(argparse.Namespace(**common | {"seconds": -1.0}, limit=None, turns=None, resume=True))
    assert len(seen) == 30


def test_workers_that_die_are_replaced_and_late_ones_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence import collect

    sys.path.remove(str(ROOT))
    script = tmp_path / "work.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "log = Path(__file__).with_name('log')\n"
        "first = not log.exists()\n"
        "with log.open('a') as file:\n    file.write(os.environ['OMP_NUM_THREADS'] + '\\n')\n"
        "sys.exit(1) if first else time.sleep(60)\n"
    )
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(collect, "GRACE", 0.1)
    arguments = argparse.Namespace(workers=2, turns=None, seconds=2.0)
    assert collect.work(arguments)
    assert 3 <= len((tmp_path / "log").read_text().splitlines()) <= 4  # two may die, if both are the first


def test_a_service_that_does_not_work_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence import collect

    sys.path.remove(str(ROOT))
    with collect.shared_gpu(tmp_path, wanted=False) as environment:
        assert "CUDA_MPS_PIPE_DIRECTORY" not in environment
    fake = tmp_path / "nvidia-cuda-mps-control"
    fake.write_text(f"#!/bin/sh\necho called $1 >> {tmp_path}/calls\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with collect.shared_gpu(tmp_path, wanted=True) as environment:
        works = "CUDA_MPS_PIPE_DIRECTORY" in environment
    assert works == torch.cuda.is_available()
    assert (tmp_path / "calls").read_text() == "called -d\ncalled\n"  # started, and ended


def test_packed_scans_are_the_same_again(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from experiments.confidence.cases import plan
    from experiments.confidence.pack import pack, unpack

    sys.path.remove(str(ROOT))
    draw = np.random.default_rng(0)
    for name in ("hippocampus", "brain"):
        for split in ("train", "val"):
            (tmp_path / name / split).mkdir(parents=True)
            for number in range(3):
                scan = draw.integers(0, 255, (16, 16, 16)).astype(np.uint8)
                write(Image(scan, np.diag([-1.0, -1, 2, 1])), tmp_path / name / split / f"{number}.nii.gz")
                write(Image(scan // 99, np.eye(4)), tmp_path / name / split / f"{number}_labels.nii.gz")
    parts = pack(tmp_path, tmp_path / "parts", 0.05)
    assert len(parts) > 2
    assert all(part.stat().st_size < 0.05 * 2**20 for part in parts)
    again = tmp_path / "again"
    unpack(parts, again)
    assert plan(again) == plan(tmp_path)
    for path in (tmp_path / "brain").rglob("*.nii.gz"):
        other = again / path.relative_to(tmp_path)
        assert gzip.decompress(other.read_bytes()) == gzip.decompress(path.read_bytes())
    with pytest.raises(SystemExit, match="expected --most-mib"):
        pack(tmp_path, tmp_path / "parts", 0.001)
