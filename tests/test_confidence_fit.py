"""The experiment that calibrates verdicts, on invented rows whose truth is known."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from carlreg.confidence.calibration import Calibration
from carlreg.files.images import Image, map_points, write

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def fit() -> ModuleType:
    sys.path.insert(0, str(ROOT))
    try:
        spec = importlib.util.spec_from_file_location("confidence_fit", ROOT / "experiments" / "confidence" / "fit.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT))
    return module


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
    calibration = fit.fit_calibration("sum", train, (fit.FULL, fit.CHEAP), means, deviation, {})
    found = fit.test(calibration, train, val)
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
