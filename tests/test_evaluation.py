"""Evaluation as a user runs it: scores from files; a problem with one pair is reported, and the others continue."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, write_pairs
from test_metrics import wavy

from carlreg import gradicon, register, save
from carlreg.cli import main
from carlreg.evaluation.api import Evaluation, evaluate
from carlreg.evaluation.scores import Scores, score
from carlreg.evaluation.sources import Result, by_model, identity, in_folder, listed
from carlreg.evaluation.statistics import sign_flip_test
from carlreg.files import transform_files, world_transform
from carlreg.files.images import Image, from_array, map_points, write
from carlreg.files.landmarks import read_landmarks
from carlreg.files.tables import Pair, read_pairs
from carlreg.files.world_transform import WorldTransform
from carlreg.paper_data.dataset import PLAIN, Dataset

sitk = pytest.importorskip("SimpleITK")
nibabel = pytest.importorskip("nibabel")

SHIFT = np.array([6.0, 0.0, -5.0])
"""From fixed to moving points, mm."""
FIXED = np.array([[1.5, 0, 0, -20], [0, 2, 0, 10], [0, 0, 2.5, 5], [0, 0, 0, 1]])


def anatomy(affine: np.ndarray, shift: np.ndarray, seed: int = 0) -> tuple[Image, Image]:
    """An image and two labelled boxes at given world positions, shifted by `shift`."""
    index = np.stack(np.meshgrid(*(np.arange(n) for n in (24, 20, 16)), indexing="ij"), axis=-1)
    world = map_points(affine, index) - shift
    centre = map_points(FIXED, [11.5, 9.5, 7.5])
    first = (np.abs(world - centre) < [8, 9, 8]).all(-1)
    second = (np.abs(world - centre - [0, 14, 0]) < [6, 4, 8]).all(-1)
    image = 100 * first + 50 * second + np.random.default_rng(seed).normal(0, 1, first.shape)
    return from_array(image.astype(np.float32), affine), from_array((first + 2 * second).astype(np.uint8), affine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two pairs related by a shift of whole voxels, their labels and landmarks, and the true transforms in files."""
    for name, shift in (("a", 0 * SHIFT), ("b", SHIFT), ("c", -SHIFT)):
        image, labels = anatomy(FIXED, shift)
        write(image, tmp_path / f"{name}.nii.gz")
        write(labels, tmp_path / f"{name}_seg.nii.gz")
        points = map_points(FIXED, [[8, 9, 7], [12, 10, 8], [14, 8, 9]]) + shift
        np.savetxt(tmp_path / f"{name}.csv", points, delimiter=",", header="x,y,z", comments="")
    for name, shift in (("b", SHIFT), ("c", -SHIFT)):
        image, _ = anatomy(FIXED, shift)
        truth = world_transform.sample(lambda points, shift=shift: points + shift, image)
        (tmp_path / "true" / f"{name}_to_a").mkdir(parents=True)
        transform_files.write(truth, tmp_path / "true" / f"{name}_to_a" / "transform.h5")
        back = world_transform.sample(lambda points, shift=shift: points - shift, image)
        transform_files.write(back, tmp_path / "true" / f"{name}_to_a" / "inverse_transform.h5")
    listing(tmp_path / "pairs.csv", [row("b"), row("c")])
    return tmp_path


def row(moving: str, **changes: str) -> dict[str, str]:
    given = {"fixed": "a.nii.gz", "moving": f"{moving}.nii.gz", "fixed_seg": "a_seg.nii.gz"}
    given |= {"moving_seg": f"{moving}_seg.nii.gz", "fixed_landmarks": "a.csv", "moving_landmarks": f"{moving}.csv"}
    return given | changes


def listing(path: Path, rows: list[dict[str, str]]) -> Path:
    columns = sorted({key for one in rows for key in one})
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_translation_has_the_known_error_before_and_none_after(folder: Path) -> None:
    pairs = read_pairs(folder / "pairs.csv")
    assert [pair.name for pair in pairs] == ["b_to_a", "c_to_a"]
    found = evaluate(pairs, {"before": identity, "true": in_folder(folder / "true")})
    before, true = found.means("before"), found.means("true")
    assert before["tre_mm"] == pytest.approx(np.linalg.norm(SHIFT))
    assert before["dice"] < 0.7
    assert true["tre_mm"] < 1e-4
    assert true["dice"] == 1
    assert true["hd95_mm"] == 0
    assert true["inverse_consistency_mm"] < 1e-4
    for means in (before, true):
        assert means["folds_percent"] == 0
        assert means["sd_log_jacobian"] < 1e-5
    assert not any(scores.failures for scores in found.scores)


def test_dice_and_hd95_are_those_of_labels_warped_by_simpleitk(folder: Path) -> None:
    """A transform between voxels, on a moving image with another, oblique header."""
    turn = np.eye(4)
    turn[:2, :2] = [[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]]
    image, labels = anatomy(turn @ FIXED @ np.diag([1.1, 0.9, 1, 1]), SHIFT)
    write(image, folder / "d.nii.gz")
    write(labels, folder / "d_seg.nii.gz")
    fixed, _ = anatomy(FIXED, 0 * SHIFT)
    transform_files.write(
        world_transform.sample(lambda points: points + SHIFT + np.sin(points / 7), fixed), folder / "d.h5"
    )
    pair = Pair(
        "d",
        *(folder / name for name in ("a.nii.gz", "d.nii.gz", "a_seg.nii.gz", "d_seg.nii.gz")),
        transform=(folder / "d.h5",),
    )
    scores = score(pair, listed)
    assert scores.failures == []
    moved = sitk.Resample(
        sitk.ReadImage(str(folder / "d_seg.nii.gz")),
        sitk.ReadImage(str(folder / "a_seg.nii.gz")),
        sitk.ReadTransform(str(folder / "d.h5")),
        sitk.sitkNearestNeighbor,
    )
    overlap = sitk.LabelOverlapMeasuresImageFilter()
    overlap.Execute(moved, sitk.ReadImage(str(folder / "a_seg.nii.gz")))
    for label in (1, 2):
        assert scores.dice[label] == pytest.approx(overlap.GetDiceCoefficient(label), abs=2e-3)


def test_files_of_other_tools_give_the_same_figures(folder: Path) -> None:
    """The same map as a displacement field, an ITK transform, ANTs' two files or Learn2Reg's file scores the same."""
    image, _ = anatomy(FIXED, 0 * SHIFT)

    def bend(points: np.ndarray) -> np.ndarray:
        return points + SHIFT + np.sin(points / 6)

    bent = world_transform.sample(bend, image)
    transform_files.write(bent, folder / "itk.h5")
    transform_files.write_warp(bent, image, folder / "field.nii.gz")
    affine = sitk.AffineTransform(3)
    affine.SetTranslation(SHIFT.tolist())
    sitk.WriteTransform(affine, str(folder / "x0GenericAffine.mat"))
    transform_files.write_warp(lambda points: bend(points) - SHIFT, image, folder / "x1Warp.nii.gz")
    field = world_transform.learn2reg(bent, image, image)
    nibabel.save(nibabel.Nifti1Image(field, np.eye(4)), folder / "disp_a_b.nii.gz")  # (x, y, z, 3)
    files = ["itk.h5", "field.nii.gz", "x1Warp.nii.gz;x0GenericAffine.mat", "disp_a_b.nii.gz"]
    figures = []
    for text in files:
        (pair,) = read_pairs(listing(folder / "one.csv", [row("b", transform=text)]))
        scores = score(pair, listed)
        assert scores.failures == []
        figures.append([*scores.dice.values(), *scores.hd95_mm.values(), scores.figures["tre_mm"]])
    assert np.ptp(figures, axis=0).max() < 1e-3
    assert figures[0][-1] > 0.1


def test_folders_of_ants_and_of_learn2reg(folder: Path) -> None:
    """ANTs' inverse is its affine part undone, then the inverse warp."""
    fixed, _ = anatomy(FIXED, 0 * SHIFT)
    place = folder / "ants" / "b_to_a"
    place.mkdir(parents=True)
    turn = np.array([[0.98, -0.1, 0], [0.1, 0.98, 0], [0, 0, 1.02]])
    affine = sitk.AffineTransform(3)
    affine.SetMatrix(turn.ravel().tolist())
    affine.SetTranslation(SHIFT.tolist())
    sitk.WriteTransform(affine, str(place / "x0GenericAffine.mat"))
    bent = world_transform.sample(lambda points: points + np.sin(points / 6), fixed)
    transform_files.write_warp(bent, fixed, place / "x1Warp.nii.gz")
    transform_files.write_warp(world_transform.invert(bent, fixed)[0], fixed, place / "x1InverseWarp.nii.gz")
    (pair, _) = read_pairs(folder / "pairs.csv")
    scores = score(pair, in_folder(folder / "ants"))
    assert scores.failures == []
    assert scores.figures["inverse_consistency_mm"] < 0.2  # the two fields are interpolated
    expected = transform_files.read([place / "x1Warp.nii.gz", place / "x0GenericAffine.mat"])
    points = [read_landmarks(folder / f"{name}.csv", fixed) for name in "ab"]
    assert scores.tre_mm == pytest.approx(np.linalg.norm(expected(points[0]) - points[1], axis=-1).tolist())
    (folder / "l2r").mkdir()
    field = world_transform.learn2reg(lambda points: points + SHIFT, fixed, fixed)
    nibabel.save(nibabel.Nifti1Image(field, np.eye(4)), folder / "l2r" / "disp_0001_0002.nii.gz")
    files = []
    for name, number in (("a", 1), ("b", 2)):
        files.append(folder / f"AbdomenCTCT_{number:04}_0000.nii.gz")
        (folder / f"{name}.nii.gz").rename(files[-1])
    other = dataclasses.replace(pair, name="0002_to_0001", fixed=files[0], moving=files[1])
    assert score(other, in_folder(folder / "l2r")).figures["tre_mm"] < 1e-4


def test_a_composite_of_two_fields_is_evaluated_too(folder: Path) -> None:
    image, _ = anatomy(FIXED, 0 * SHIFT)
    for name in ("one", "two"):
        transform_files.write_warp(lambda points: points + SHIFT / 2, image, folder / f"{name}.nii.gz")
    (pair,) = read_pairs(listing(folder / "x.csv", [row("b", transform="one.nii.gz;two.nii.gz")]))
    scores = score(pair, listed)
    assert scores.figures["tre_mm"] < 1e-4
    assert scores.figures["folds_percent"] < 30  # beyond the field the map jumps back


def test_determinants_in_the_world_do_not_depend_on_how_the_image_is_stored() -> None:
    shape = (12, 10, 9)
    for flip in (1, -1):
        affine = np.diag([2.0 * flip, 1.0, 3.0, 1.0])
        image = from_array(np.zeros(shape, np.float32), affine)
        found = world_transform.jacobian_determinant(lambda points: points * [1.1, 0.5, 2.0], image).data
        assert found.shape == shape
        assert np.allclose(found, 1.1)
    image = from_array(np.zeros(shape, np.float32), np.diag([2.0, 1.0, 3.0, 1.0]))
    field = wavy(shape) * [2.0, 1.0, 3.0]
    transform = WorldTransform(np.eye(4), field.astype(np.float32), image.affine)
    vectors = sitk.GetImageFromArray(np.ascontiguousarray(field.transpose(2, 1, 0, 3)), isVector=True)
    vectors.SetSpacing((2.0, 1.0, 3.0))
    expected = sitk.GetArrayFromImage(sitk.DisplacementFieldJacobianDeterminant(vectors)).T[1:-1, 1:-1, 1:-1]
    found = world_transform.jacobian_determinant(transform, image).data[1:-1, 1:-1, 1:-1]
    assert np.allclose(found, expected, atol=1e-4)


def corrupt(folder: Path, what: str) -> dict[str, str]:
    """A table row with one error."""
    good = row("c", transform="true/c_to_a/transform.h5")
    if what == "missing label":
        image, labels = anatomy(FIXED, -SHIFT)
        write(Image(labels.data * (labels.data < 2), labels.affine), folder / "less.nii.gz")
        return good | {"moving_seg": "less.nii.gz"}
    if what == "no label file":
        return good | {"moving_seg": "nowhere.nii.gz"}
    if what == "one side":
        return good | {"moving_seg": ""}
    if what == "outside":
        (folder / "far.csv").write_text("x,y,z\n0,10,20\n900,0,0\n1,11,20\n")
        return good | {"moving_landmarks": "far.csv"}
    if what == "number":
        (folder / "two.csv").write_text("x,y,z\n0,10,20\n1,11,20\n")
        return good | {"moving_landmarks": "two.csv"}
    if what == "wrong size":
        image, _ = anatomy(FIXED, 0 * SHIFT)
        small = from_array(image.data[:10], image.affine)
        transform_files.write_warp(lambda points: points - SHIFT, small, folder / "small.nii.gz")
        return good | {"transform": "small.nii.gz"}
    if what == "small transform":
        image, _ = anatomy(FIXED, 0 * SHIFT)
        part = from_array(image.data[:10], image.affine)
        transform_files.write(world_transform.sample(lambda points: points + np.sin(points), part), folder / "s.h5")
        return good | {"transform": "s.h5"}
    if what == "no result":
        return good | {"transform": ""}
    if what == "twice":
        return row("b", transform="true/b_to_a/transform.h5")
    raise AssertionError(what)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing label", "label 2 is missing from the moving labels"),
        ("no label file", "nowhere.nii.gz does not exist"),
        ("one side", "labels are missing for the moving image"),
        ("outside", "1 moving landmarks lie outside the image, the first of them (number 2) at"),
        ("number", "3 fixed and 2 moving landmarks"),
        ("wrong size", "has 10 × 20 × 16 voxels; expected 24 × 20 × 16"),
        ("small transform", "do not cover the fixed image"),
        ("no result", "this pair has no result"),
        ("twice", "listed twice"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_the_rest_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str, said: str
) -> None:
    good = row("b", transform="true/b_to_a/transform.h5")
    path = listing(folder / "list.csv", [good, corrupt(folder, what)])
    assert main(["evaluate", str(path), "--out", str(folder / "out")]) == 1
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if said in line]
    assert len(lines) == 1
    assert ("b_to_a" if what == "twice" else "c_to_a") in lines[0]
    assert "1 of 2 failed" in printed.err.splitlines()[-1]
    scores = json.loads((folder / "out" / "scores.json").read_text(encoding="utf-8"))["scores"]
    assert scores[0]["dice"] == 1
    assert scores[0]["failures"] == []
    assert len(scores[1]["failures"]) == 1


def test_a_label_that_one_map_lacks_is_not_scored(folder: Path) -> None:
    (pair,) = read_pairs(listing(folder / "x.csv", [corrupt(folder, "missing label")]))
    assert list(score(pair, listed).dice) == [1]
    assert score(pair, listed, partial=True).failures == []
    assert score(pair, listed, labels=[1]).failures == []
    lost = score(pair, lambda *_: identity(*_), labels=[1])
    assert 0 < lost.dice[1] < 1


def test_methods_are_compared_on_the_same_pairs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out"
    words = ["evaluate", str(folder / "pairs.csv"), "--method", "before=identity", "--method"]
    assert main([*words, f"true={folder / 'true'}", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "true − before, Dice: +" in printed
    assert "better on 2 of 2 pairs" in printed
    found = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert found["methods"]["true"]["dice"] == 1
    assert {row["figure"] for row in found["comparisons"]} == {"dice", "tre_mm"}
    with open(out / "scores.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["pair"]) for row in rows] == [
        (method, pair) for method in ("before", "true") for pair in ("b_to_a", "c_to_a")
    ]
    assert float(rows[2]["dice_1"]) == 1
    assert (out / "dice.png").read_bytes()[1:4] == b"PNG"
    assert main([*words, f"true={folder / 'true'}", "-o", str(out)]) == 1
    assert "already holds scores.json" in capsys.readouterr().err


def test_a_model_registers_and_its_saved_results_give_the_same_figures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = folder / "small.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "16 16 16"})
    common = ["evaluate", str(folder / "pairs.csv"), "--device", "cpu"]
    kept, again = folder / "kept", folder / "again"
    first = [*common, "--model", str(model), "--io-iterations", "2", "--save", str(kept), "-o", str(folder / "one")]
    assert main(first) == 0
    assert main([*common, "--method", f"kept={kept}", "-o", str(again)]) == 0
    assert main(["evaluate", str(kept), "-o", str(folder / "alone")]) == 0
    capsys.readouterr()
    one, two = (
        json.loads((folder / name / "scores.json").read_text(encoding="utf-8"))["scores"] for name in ("one", "again")
    )
    for before, after in zip(one, two, strict=True):
        assert before["dice_per_label"] == after["dice_per_label"]
        for key in ("tre_mm", "inverse_consistency_mm"):
            assert before[key] == pytest.approx(after[key], abs=1e-4)
    (alone, _) = json.loads((folder / "alone" / "scores.json").read_text(encoding="utf-8"))["scores"]
    assert alone["dice"] is None
    assert alone["folds_percent"] == pytest.approx(one[0]["folds_percent"])


def test_saved_results_are_recognised_or_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder / "small.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "16 16 16"})
    words = ["evaluate", str(folder / "pairs.csv"), "--model", str(model), "--device", "cpu"]
    words += ["--save", str(folder / "kept"), "--io-iterations"]
    assert main([*words, "0"]) == 0
    made = {path: path.read_bytes() for path in (folder / "kept").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*words, "1"]) == 1
    assert "holds a registration with io_iterations=0 instead of 1" in (message := capsys.readouterr().err)
    assert "--overwrite" in message
    assert main([*words, "0"]) == 0
    assert {path: path.read_bytes() for path in made} == made, "a saved result was replaced"
    assert main([*words, "1", "--overwrite"]) == 0
    assert {path: path.read_bytes() for path in made} != made


def test_results_of_other_preparations_are_not_recognised(folder: Path) -> None:
    model = folder / "small.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "16 16 16"})
    (pair, _) = read_pairs(folder / "pairs.csv")

    def prepare(image: Image, mask: Image | None) -> tuple[torch.Tensor, str]:
        return torch.rand(1, 1, 16, 16, 16), "noise"

    def scored(dataset: Dataset) -> list[str]:
        method = by_model(str(model), save=folder / "kept", dataset=dataset, device="cpu", io_iterations=0)
        return score(pair, method).failures

    assert scored(replace(PLAIN, prepare=prepare)) == []
    assert "another model" in scored(PLAIN)[0]
    assert "already holds report.json" in scored(replace(PLAIN, prepare=prepare))[0]


def test_a_model_uses_the_columns_that_change_the_registration(folder: Path) -> None:
    model = folder / "small.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "16 16 16"})
    columns = {"initial_transform": "true/b_to_a/transform.h5", "rigid_mask": "a_seg.nii.gz"}
    columns |= {"moving_rigid_mask": "b_seg.nii.gz"}
    table = listing(folder / "given.csv", [row("b", **columns)])
    words = ["evaluate", str(table), "--model", str(model), "--device", "cpu", "--io-iterations", "1"]
    assert main([*words, "--save", str(folder / "kept")]) == 0
    inputs = json.loads((folder / "kept" / "b_to_a" / "report.json").read_text(encoding="utf-8"))["inputs"]
    assert columns.keys() <= inputs.keys()


def test_methods_of_one_name_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "last.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "16 16 16"})
    for more in (["--model", str(model)], ["-m", "last=identity"]):
        assert main(["evaluate", str(folder / "pairs.csv"), "-m", "last=identity", *more]) == 2
        assert "two methods are called 'last'" in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_a_folder_of_register_is_found_by_the_images_that_its_report_names(folder: Path) -> None:
    torch.manual_seed(0)
    model = folder / "small.safetensors"
    save(gradicon(3, 2, **SMALL), model, metadata={"grid": "16 16 16"})
    result = register(fixed=folder / "a.nii.gz", moving=folder / "b.nii.gz", model=model, io_iterations=0)
    result.save(folder / "results" / "some name")
    (pair, _) = read_pairs(folder / "pairs.csv")
    scores = score(pair, in_folder(folder / "results"))
    assert scores.failures == []
    assert scores.figures["seconds"] > 0
    assert scores.figures["inverse_consistency_mm"] == pytest.approx(result.metrics["inverse_consistency_mm"])


def test_wrong_calls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate"]) == 2
    assert main(["evaluate", str(folder / "pairs.csv"), "--method", "nothing"]) == 2
    assert main(["evaluate", str(folder / "pairs.csv"), "--method", "a=identity", "--method", "a=identity"]) == 2
    assert main(["evaluate", str(folder / "pairs.csv"), "--labels", "liver"]) == 2
    assert main(["evaluate", "--dataset", "abdomen1k"]) == 2
    capsys.readouterr()
    assert main(["evaluate", str(folder / "pairs.csv"), "--method", "a=nowhere"]) == 1
    assert "nowhere is not a folder of results" in capsys.readouterr().err
    (folder / "bad.csv").write_text("fixed,movin\na,b\n")
    assert main(["evaluate", str(folder / "bad.csv")]) == 1
    assert "has the columns fixed, movin" in capsys.readouterr().err


def test_landmark_files(tmp_path: Path) -> None:
    image = from_array(np.zeros((5, 6, 7), np.float32), FIXED)
    path = tmp_path / "points.txt"
    path.write_text("1 2 3\n4\t5\t6\n")
    assert read_landmarks(path, image).tolist() == [[1, 2, 3], [4, 5, 6]]
    path.write_text("label,r,a,s\nhead,1,2,3\n")
    assert read_landmarks(path, image).tolist() == [[-1, -2, 3]]
    path.write_text("i,j,k\n1,2,3\n")
    assert read_landmarks(path, image).tolist() == [[-18.5, 14, 12.5]]
    path.write_text("x,y,z\n1,2\n")
    with pytest.raises(ValueError, match=r"line 2: '1,2' is not a point; expected 3 numbers"):
        read_landmarks(path, image)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no points"):
        read_landmarks(path, image)


def test_pairs_with_the_same_file_names_are_told_apart(tmp_path: Path) -> None:
    rows = [{"fixed": f"s{n}/t1.nii.gz", "moving": f"s{n}/t2.nii.gz"} for n in (1, 2)]
    pairs = read_pairs(listing(tmp_path / "pairs.csv", rows))
    assert [pair.name for pair in pairs] == ["s1-t2_to_s1-t1", "s2-t2_to_s2-t1"]
    write_pairs(pairs, tmp_path / "again.csv")
    assert read_pairs(tmp_path / "again.csv") == pairs


def test_the_sign_flip_test() -> None:
    """All of n differences positive: only the two extremes of 2ⁿ sign patterns are as far off."""
    assert sign_flip_test(np.array([0.1, 0.2, 0.3, 0.05])) == 2 / 2**4
    assert sign_flip_test(np.array([0.1, -0.1])) == 1
    many = np.random.default_rng(0).normal(0.5, 1, 40)
    assert sign_flip_test(many) < 0.05
    assert sign_flip_test(many - many.mean() + 0.02) > 0.1


def test_comparisons_use_pairs_that_both_methods_have() -> None:
    rows = [Scores("a", str(n)) for n in range(3)] + [Scores("b", str(n)) for n in range(1, 4)]
    for number, one in enumerate(rows):
        one.figures["dice"] = [0.1, 0.2, 0.3, 0.5, 0.5, 0.9][number]
    found = Evaluation(rows).compare("b", "a")
    assert found is not None
    assert found.pairs == 2
    assert found.mean_difference == pytest.approx(0.25)
    assert found.won == 2


def test_a_bug_keeps_its_traceback(folder: Path) -> None:
    """An error of ours is not a failure of the pair."""

    def broken(*_: object) -> Result:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        evaluate(read_pairs(folder / "pairs.csv"), {"broken": broken})
