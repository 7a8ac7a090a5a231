"""The scripts that register and score the validation pairs, run as a user runs them, on small synthetic subjects."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import SMALL, write_pairs

from carlreg.cli import main
from carlreg.evaluation.baselines import BASELINES
from carlreg.evaluation.sources import Result, identity
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, from_array, write
from carlreg.files.tables import Pair
from carlreg.files.transform_files import write as write_transform
from carlreg.files.world_transform import WorldTransform
from carlreg.model.files import save
from carlreg.model.zoo import carl

pytest.importorskip("SimpleITK")
pytest.importorskip("matplotlib")

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SIDE = 24
SUBJECTS = {"a": (0.0, 0.0, 0.0), "b": (3.0, 0.0, -1.0), "c": (0.0, -2.0, 2.0)}
"""Shift of each subject's structures relative to a's, in voxels."""
CENTRES = {1: (7, 7, 7), 2: (16, 8, 8), 6: (8, 16, 15), 7: (16, 16, 16)}
PLAIN = ("unregistered", "boxes aligned", "CARL", "CARL with optimisation")
NOTHING = ("--carl-pairs", 0, "--ants-pairs", 0, "--other-pairs", 0)
"""Register nothing: score what there is."""
ORGANS, FIVE = ",".join(map(str, range(1, 14))), "1,2,3,6,11"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three subjects per set: four labelled balls, shifted as a whole."""
    index = np.stack(np.meshgrid(*(np.arange(SIDE),) * 3, indexing="ij"), axis=-1)
    for name in ("abdomen", "hippocampus"):
        folder = tmp_path / "data" / name / "val"
        folder.mkdir(parents=True)
        for subject, shift in SUBJECTS.items():
            labels = np.zeros((SIDE,) * 3, np.uint8)
            for label, centre in CENTRES.items():
                labels[np.linalg.norm(index - centre - shift, axis=-1) < 3.5] = label
            write(from_array(labels * 20, np.eye(4)), folder / f"{subject}.nii.gz")
            write(from_array(labels, np.eye(4)), folder / f"{subject}_labels.nii.gz")
    return tmp_path / "data"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    save(carl(3, 2, width=8, **SMALL), path, metadata={"grid": "16 16 16"})
    return path


def run(monkeypatch: pytest.MonkeyPatch, script: str, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
    runpy.run_path(str(EXPERIMENTS / script / "run.py"), run_name="__main__")


def functions() -> dict[str, Any]:
    """The functions of the script that scores."""
    return runpy.run_path(str(EXPERIMENTS / "accuracy" / "run.py"))


def put(place: Path, shift: tuple[float, ...], model: Path | None = None) -> None:
    """Write a result: fixed points move by this shift, and a little more in the middle."""
    place.mkdir(parents=True, exist_ok=True)
    affine = np.eye(4)
    affine[:3, 3] = shift
    bump = np.exp(-((np.indices((SIDE,) * 3) - SIDE / 2) ** 2).sum(0) / 40)[..., None]  # (*shape, 1)
    transform = WorldTransform(affine, (0.8 * bump * [1, 1, 0]).astype(np.float32), np.eye(4))
    for name in ("transform.h5", "inverse_transform.h5"):
        write_transform(transform, place / name, overwrite=True)
    told: dict[str, Any] = {"metrics": {"seconds": 2.0}}
    if model is not None:
        told["model"] = {"name": "small", "sha256": sha256(model)}
    (place / "report.json").write_text(json.dumps(told), encoding="utf-8")


def names() -> list[tuple[str, str]]:
    return [(fixed, moving) for fixed in SUBJECTS for moving in SUBJECTS if fixed != moving]


def shift_of(fixed: str, moving: str, share: float) -> tuple[float, ...]:
    """A fraction of the shift from the fixed subject's structures to the moving one's."""
    return tuple(float(x) for x in np.subtract(SUBJECTS[moving], SUBJECTS[fixed]) * share)


@pytest.fixture
def work(tmp_path: Path, model: Path) -> Path:
    """Results: half of the true shift by the network, all of it with optimisation, a quarter by ANTs on four pairs and
    by the affine map on two."""
    folder = tmp_path / "work"
    for number, (fixed, moving) in enumerate(names()):
        pair = f"{moving}_to_{fixed}"
        put(folder / "carl" / "abdomen" / "network" / pair, shift_of(fixed, moving, 0.5), model)
        put(folder / "carl" / "abdomen" / "fields" / pair, shift_of(fixed, moving, 1.0), model)
        if number < 4:
            put(folder / "ants" / "abdomen" / pair, shift_of(fixed, moving, 0.25))
        if number < 2:
            put(folder / "carl" / "abdomen" / "affine" / pair, shift_of(fixed, moving, 0.25), model)
    return folder


def scored(out: Path, name: str = "abdomen") -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert len({(row["method"], row["pair"]) for row in rows}) == len(rows)
    return {(row["method"], row["pair"]): row for row in rows}


def line(out: Path, task: str, method: str) -> list[str]:
    """The cells of a row of the table after the first two."""
    rows = [[cell.strip() for cell in text.split(" | ")] for text in (out / "table.md").read_text("utf-8").splitlines()]
    (found,) = (row for row in rows if row[0].startswith(f"| {task}") and row[1] == method)
    return [cell.removesuffix(" |") for cell in found[2:]]


def evaluated(data: Path, work: Path, tmp_path: Path, labels: str) -> dict[str, Any]:
    """The scores of `carl evaluate` for the same files."""
    folder = data / "abdomen" / "val"
    pairs = []
    for fixed, moving in names():
        files = [folder / f"{case}{end}.nii.gz" for end in ("", "_labels") for case in (fixed, moving)]
        pairs.append(Pair(f"{moving}_to_{fixed}", files[0], files[1], files[2], files[3]))
    write_pairs(pairs, tmp_path / "pairs.csv")
    words = ["evaluate", str(tmp_path / "pairs.csv"), "--labels", labels, "--allow-missing-labels", "--overwrite"]
    words += ["--method", "unregistered=identity", "--out", str(tmp_path / "evaluated")]
    for method, place in (("CARL, affine", "affine"), ("CARL", "network"), ("CARL with optimisation", "fields")):
        words += ["--method", f"{method}={work / 'carl' / 'abdomen' / place}"]
    words += ["--method", f"ANTs SyNQuick={work / 'ants' / 'abdomen'}"]
    assert main(words) == 1  # ANTs has but four, the affine map two
    found: dict[str, Any] = json.loads((tmp_path / "evaluated" / "scores.json").read_text(encoding="utf-8"))
    return found


def test_accuracy_is_what_carl_evaluate_says_of_the_same_files(
    data: Path, work: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = (data, work, "--sets", "abdomen", "--model", model, *NOTHING, "--pictures", "--out", out)
    run(monkeypatch, "accuracy", *words)
    rows, told = scored(out), {labels: evaluated(data, work, tmp_path, labels) for labels in (ORGANS, FIVE)}
    others = {(row["method"], row["pair"]): row for row in told[ORGANS]["scores"] if not row["failures"]}
    assert {key for key in rows if not key[0].startswith("boxes")} == set(others)
    assert len(others) == 6 + 2 + 6 + 6 + 4
    for key, row in others.items():
        for figure in ("dice", "hd95_mm", "folds_percent", "seconds", "dice_per_label", "hd95_mm_per_label"):
            assert rows[key][figure] == row[figure], (key, figure)
    assert rows["CARL", "a_to_b"]["model"] == {"name": "small", "sha256": sha256(model)}

    four = [f"{moving}_to_{fixed}" for fixed, moving in names()[:4]]
    for task, labels in (("abdomen, 13 organs", ORGANS), ("abdomen, 5 organs", FIVE)):
        dice = {(row["method"], row["pair"]): row["dice"] for row in told[labels]["scores"]}
        for method in ("unregistered", "CARL", "CARL with optimisation", "ANTs SyNQuick"):
            cells = line(out, task, method)
            assert cells[:2] == ["4", f"{np.mean([dice[method, pair] for pair in four]):.3f}"]
            own = 4 if method.startswith("ANTs") else 6
            assert cells[-1] == f"{told[labels]['methods'][method]['dice']:.3f} ({own})"
        cells = line(out, task, "CARL, affine")  # beside CARL, CARL with optimisation and ANTs on the same pairs
        for cell, method in (
            (1, "CARL, affine"),
            (5, "CARL"),
            (6, "CARL with optimisation"),
            (7, "ANTs SyNQuick"),
        ):
            assert cells[cell] == f"{np.mean([dice[method, pair] for pair in four[:2]]):.3f}"
        assert cells[0] == "2"
        (best,) = (
            one
            for one in told[labels]["comparisons"]
            if (one["first"], one["second"]) == ("ANTs SyNQuick", "CARL with optimisation")
        )
        assert f"is {-best['mean_difference']:+.3f} Dice" in (out / "table.md").read_text("utf-8")
        assert best["mean_difference"] < -0.2
    for name in ("abdomen.png", "abdomen_pairs.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_what_is_scored_is_not_scored_again_until_its_file_changes(
    data: Path, work: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = (data, work, "--sets", "abdomen", "--model", model, *NOTHING, "--out", out)
    run(monkeypatch, "accuracy", *words, "--pairs", 2)
    first = scored(out)
    assert len({pair for _, pair in first}) == 2
    assert line(out, "abdomen, 13 organs", "CARL")[-1].endswith("(2)")
    kept, changed = sorted({pair for _, pair in first})

    report = json.loads((out / "abdomen.json").read_text(encoding="utf-8"))
    for row in report["rows"]:
        row["seconds"] = 1234.0
    (out / "abdomen.json").write_text(json.dumps(report), encoding="utf-8")
    shutil.rmtree(work / "carl" / "abdomen" / "network" / kept)  # what was scored needs its files no longer
    put(work / "carl" / "abdomen" / "fields" / changed, (0, 0, 0), model)
    run(monkeypatch, "accuracy", *words, "--pairs", 2)
    again = scored(out)
    assert set(again) == set(first)
    new = ("CARL with optimisation", changed)
    assert [key for key, row in again.items() if row["seconds"] != 1234.0] == [new]
    assert again[new]["dice"] < first[new]["dice"]

    run(monkeypatch, "accuracy", *words)
    assert len({pair for _, pair in scored(out)}) == 6


def test_rows_of_other_images_go(
    data: Path, work: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = (data, work, "--sets", "abdomen", "--model", model, *NOTHING, "--out", out)
    run(monkeypatch, "accuracy", *words)
    shutil.rmtree(work / "carl")
    image = data / "abdomen" / "val" / "a.nii.gz"
    write(from_array(np.ones((SIDE,) * 3, np.uint8), np.eye(4)), image, overwrite=True)
    run(monkeypatch, "accuracy", *words)
    assert {pair for method, pair in scored(out) if method == "CARL"} == {"b_to_c", "c_to_b"}
    assert len({pair for method, pair in scored(out) if method == "boxes aligned"}) == 6

    book, pairs_of = functions()["Book"], functions()["pairs_of"]
    old = json.loads((out / "abdomen.json").read_text(encoding="utf-8"))
    old["rows"] = [{key: value for key, value in row.items() if key != "inputs"} for row in old["rows"]]
    for name, kept in (("abdomen", 0), ("hippocampus", len(old["rows"]))):  # hippocampi never changed
        (out / f"{name}.json").write_text(json.dumps(old), encoding="utf-8")
        assert len(book.open(out / f"{name}.json", sha256(model), pairs_of(data, name)).rows) == kept


def test_pairs_of_two_modalities_and_of_two_phases(tmp_path: Path) -> None:
    for name, cases in (
        ("abdomen", ("20", "22")),
        ("abdomen_mr", ("22", "31")),
        ("cardiac", ("1_ED", "1_ES", "2_ED", "2_ES")),
    ):
        folder = tmp_path / name / "val"
        folder.mkdir(parents=True)
        for case in cases:
            (folder / f"{case}.nii.gz").touch()
            (folder / f"{case}_labels.nii.gz").touch()
    pairs_of = functions()["pairs_of"]
    hearts = {pair.name for pair in pairs_of(tmp_path, "cardiac")}
    assert hearts == {"1_ED_to_1_ES", "1_ES_to_1_ED", "2_ED_to_2_ES", "2_ES_to_2_ED"}
    both = {pair.name: pair for pair in pairs_of(tmp_path, "ct_mr")}
    ways = [(f"ct{ct}", f"mr{mr}") for ct in (20, 22) for mr in (22, 31)]
    assert sorted(both) == sorted(f"{a}_to_{b}" for one in ways for a, b in (one, one[::-1]))
    pair = both["mr22_to_ct22"]
    assert pair.fixed == tmp_path / "abdomen" / "val" / "22.nii.gz"
    assert pair.moving_seg == tmp_path / "abdomen_mr" / "val" / "22_labels.nii.gz"


def test_intervals_draw_subjects_and_not_pairs() -> None:
    by_subject, generator = functions()["by_subject"], np.random.default_rng(1)
    effects = dict(zip("abcdef", generator.normal(0, 1, 6), strict=True))
    ordered = {f"{m}_to_{f}": effects[m] + effects[f] for f in effects for m in effects if f != m}
    hearts = {f"{one}_ES_to_{one}_ED": effect for one, effect in effects.items()}
    means: dict[str, list[float]] = {"ordered": [], "hearts": []}
    for _ in range(4000):  # the reference: list every drawn pair
        drawn = generator.choice(list(effects), 6)
        found = [ordered[f"{m}_to_{f}"] for f in drawn for m in drawn if f != m]
        if found:
            means["ordered"].append(float(np.mean(found)))
        means["hearts"].append(float(np.mean([effects[one] for one in drawn])))
    for values, name in ((ordered, "ordered"), (hearts, "hearts")):
        assert by_subject(values) == pytest.approx(np.percentile(means[name], [2.5, 97.5]), abs=0.1)
        assert by_subject(values) == by_subject(values)
    low, high = by_subject(ordered)
    independent = np.percentile(generator.choice(list(ordered.values()), (4000, 30)).mean(axis=1), [2.5, 97.5])
    assert high - low > 1.5 * (independent[1] - independent[0])


def test_without_ants_it_says_so_and_the_others_go_on(
    data: Path,
    work: Path,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ants", None)  # as if it were not installed
    shutil.rmtree(work / "ants")
    out = tmp_path / "out"
    words = (data, work, "--sets", "abdomen", "--model", model, "--pairs", 2, "--out", out)
    run(monkeypatch, "accuracy", *words, "--methods", *PLAIN, "ANTs SyNQuick")
    said = capsys.readouterr().out
    assert "antspyx is not installed: skipping ANTs SyNQuick" in said
    assert "abdomen, ANTs SyNQuick: 0 of 6 pairs are scored" in said
    assert "CARL with optimisation and ANTs SyNQuick have no pair in common yet" in said
    assert line(out, "abdomen, 13 organs", "CARL")[0] == "2"
    assert {method for method, _ in scored(out)} == set(PLAIN)
    assert not (work / "ants").exists()


def test_ants_runs_on_so_many_pairs_a_call_and_never_twice(
    data: Path, work: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(work / "ants")
    calls = []

    def stand_in(pair: Pair, fixed: Image, moving: Image) -> Result:
        calls.append(pair.name)
        return Result(identity(pair, fixed, moving).transform, seconds=7.0)

    package = ModuleType("ants")
    package.__spec__ = ModuleSpec("ants", None)
    monkeypatch.setitem(sys.modules, "ants", package)
    monkeypatch.setitem(BASELINES, "ants-synquick", stand_in)
    out = tmp_path / "out"
    words = (data, work, "--sets", "abdomen", "--model", model, "--pairs", 2, "--carl-pairs", 0, "--out", out)
    for expected in (1, 2, 2):
        run(monkeypatch, "accuracy", *words, *(("--ants-pairs", 1) if expected == 1 else ()))
        assert len(calls) == len(set(calls)) == expected
        rows = [row for (method, _), row in scored(out).items() if method == "ANTs SyNQuick"]
        assert [row["seconds"] for row in rows] == [7.0] * expected
        assert line(out, "abdomen, 13 organs", "CARL")[0] == str(expected)
        assert all(row["made"]["program"].startswith("antspyx ") for row in rows)
        assert all(set(row["inputs"]) == {"fixed", "moving", "fixed_seg", "moving_seg"} for row in rows)
    assert sorted(path.name for path in (work / "ants" / "abdomen").iterdir()) == sorted(calls)


def test_a_failure_of_ants_is_told_and_the_table_has_the_other_pairs(
    data: Path, work: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = work / "ants" / "abdomen" / "b_to_a"
    for name in ("transform.h5", "inverse_transform.h5"):
        (place / name).unlink()
    (place / "report.json").write_text('{"failure": "RuntimeError: it fell over"}', encoding="utf-8")
    out = tmp_path / "out"
    words = (data, work, "--sets", "abdomen", "--model", model, *NOTHING, "--out", out)
    with pytest.raises(SystemExit, match="1 failed"):
        run(monkeypatch, "accuracy", *words)
    assert line(out, "abdomen, 13 organs", "ANTs SyNQuick")[0] == "3"
    assert "b_to_a by ANTs SyNQuick: RuntimeError: it fell over" in (out / "table.md").read_text("utf-8")


def test_results_of_another_model_are_not_taken_for_this_one(
    data: Path, work: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.safetensors"
    save(carl(3, 2, width=8, **SMALL), other, metadata={"grid": "16 16 16", "of": "another"})
    words = (data, work, "--sets", "abdomen", "--model", other, "--out", tmp_path / "out")
    with pytest.raises(SystemExit, match="was not made by"):
        run(monkeypatch, "accuracy", *words, "--methods", "CARL")


def test_missing_registrations_are_made_and_kept(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    words = (data, work, "--sets", "hippocampus", "--pairs", 1, "--model", model, "--methods", "CARL", "--out", out)
    run(monkeypatch, "accuracy", *words)
    ((method, pair),) = scored(out, "hippocampus")
    assert method == "CARL"
    row = scored(out, "hippocampus")[method, pair]
    kept = work / "carl" / "hippocampus" / "network" / pair
    assert sorted(path.name for path in kept.iterdir()) == [
        *("inverse_transform.h5", "made.json", "report.json", "transform.h5")
    ]
    assert row["model"] == {"name": "small", "sha256": sha256(model)}
    assert row["transform"] == sha256(kept / "transform.h5")
    assert set(row["made"]) == {"commit", "tree"}

    before = (kept / "report.json").stat().st_mtime_ns
    (out / "hippocampus.json").unlink()
    run(monkeypatch, "accuracy", *words)  # scored again, from the kept result
    assert (kept / "report.json").stat().st_mtime_ns == before
    assert scored(out, "hippocampus")[method, pair]["dice"] == row["dice"]
    (out / "hippocampus.json").unlink()
    (kept / "transform.h5").unlink()
    (kept / "report.json").unlink()
    run(monkeypatch, "accuracy", *words)  # made again
    assert (kept / "transform.h5").is_file()
    assert scored(out, "hippocampus")[method, pair]["dice"] == row["dice"]
