"""Templates: averages of intensities and of shapes, and `carl template` as a user runs it."""

from __future__ import annotations

import json
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import chromium, needs_browser
from conftest import SMALL, Run
from shapes_with_labels import AFFINE, ellipsoid, write_model, write_scans

import carlreg
from carlreg import gradicon, save
from carlreg.atlases import average, work
from carlreg.atlases import template as builder
from carlreg.atlases.average import centring, common_grid, make_subject, mean_map, sharpen, sharpness, trimmed_mean
from carlreg.atlases.page import page
from carlreg.atlases.template import Iteration
from carlreg.atlases.work import RegisterEach, Task
from carlreg.cli._shared import Stopped
from carlreg.errors import ExistsError
from carlreg.files import images, transform_files, world_transform
from carlreg.files.images import Image
from carlreg.files.results import FILES
from carlreg.files.world_transform import WorldTransform
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.show.viewer.scene import load_scene

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three scans with labels, and a model that does nothing."""
    folder = tmp_path_factory.mktemp("template")
    write_scans(folder / "scans", [(7, 8, 8), (8, 7, 8), (8, 8, 6)])
    write_model(folder / "model.safetensors")
    return folder


# ---- intensities ----------------------------------------------------------------------------------------------------


def test_trimmed_mean_against_sorting_each_voxel() -> None:
    stack = torch.rand(9, 4, 5).half()
    stack[torch.rand(9, 4, 5) < 0.3] = torch.nan
    stack[:, 0, 0] = torch.nan
    mean, spread = trimmed_mean(stack, empty=-7.0)
    for index in np.ndindex(4, 5):
        values = sorted(float(v) for v in stack[(slice(None), *index)] if not torch.isnan(v))
        if not values:
            assert mean[index] == -7
            continue
        cut = int(0.25 * len(values))
        assert float(mean[index]) == pytest.approx(np.mean(values[cut : len(values) - cut]), abs=1e-5)
        assert float(spread[index]) == pytest.approx(np.std(values), abs=1e-5)


def test_an_outlier_does_not_change_the_mean() -> None:
    stack = torch.full((5, 3, 3), 0.5).half()
    stack[2] = 100
    assert torch.allclose(trimmed_mean(stack, 0.0)[0], torch.full((3, 3), 0.5))


def test_scans_of_different_brightness_are_comparable() -> None:
    scan, _ = ellipsoid((8, 8, 8))
    brighter = Image((scan.data * 3 + 50).astype(np.int16), scan.affine)
    first, second = (make_subject("a", one, ct=False).values(CPU) for one in (scan, brighter))
    assert torch.allclose(first, second, atol=0.01)
    assert float(first[first > 0.05].median()) == pytest.approx(0.5, abs=0.02)


def test_sharpening_sharpens_and_keeps_the_range() -> None:
    scan, _ = ellipsoid((8, 8, 8))
    image = Image(scan.data.astype(np.float32), scan.affine)
    sharper = sharpen(image, 1.0)
    assert sharpness(sharper) > 1.05 * sharpness(image)
    assert sharper.data.min() >= image.data.min()
    assert sharper.data.max() <= image.data.max()
    assert sharpen(image, 0.0) is image


# ---- shapes ---------------------------------------------------------------------------------------------------------


def scaling(factors: tuple[float, ...], centre: np.ndarray) -> WorldTransform:
    matrix = np.diag([*factors, 1.0])
    matrix[:-1, -1] = centre - matrix[:-1, :-1] @ centre
    return WorldTransform.linear(matrix)


def test_the_average_has_the_mean_shape_and_not_that_of_its_start() -> None:
    """Ellipsoids, each a scaled copy of the smallest: the average must have the mean of their radii, from there."""
    radii = [(6, 6, 6), (8, 6, 7), (7, 9, 8)]
    subjects = [make_subject(str(n), ellipsoid(one)[0], ct=False) for n, one in enumerate(radii)]
    grid = Image(np.zeros((20, 20, 20), np.float32), AFFINE)
    centre = images.map_points(AFFINE, [9.5, 9.5, 9.5])
    transforms = [scaling(tuple(r / 6 for r in one), centre) for one in radii]
    result = average.average(subjects, transforms, grid, CPU)
    expected = make_subject("mean", ellipsoid(np.mean(radii, axis=0))[0], ct=False)
    assert result.moved_mm > 0.3
    assert result.residual_mm < 0.01
    inside = expected.values(CPU).numpy() > 0.1
    missed = np.abs(result.image.data - expected.values(CPU).numpy())[inside]
    start = np.abs(subjects[0].values(CPU).numpy() - expected.values(CPU).numpy())[inside]
    assert missed.mean() < 0.2 * start.mean()
    # Its maps take its points to the scans, and their mean is the identity.
    again = mean_map(result.transforms, grid, CPU)
    body = average.foreground(result.image).numpy()
    assert np.linalg.norm(again.displacement, axis=-1)[body].max() < 0.02


def test_the_mean_map_is_the_mean_of_maps() -> None:
    rng = np.random.default_rng(0)
    grid = Image(np.zeros((9, 8, 7), np.float32), AFFINE)
    fields = [rng.normal(size=(9, 8, 7, 3)).astype(np.float32) for _ in range(3)]
    transforms = [WorldTransform(np.diag([1.1, 0.9, 1.0, 1.0]), field, AFFINE) for field in fields]
    mean = mean_map(transforms, grid, CPU)
    points = images.map_points(AFFINE, rng.integers(0, 7, (50, 3)))
    expected = np.mean([one(points) for one in transforms], axis=0)
    assert np.allclose(mean(points), expected, atol=1e-3)


def test_centring_maps_the_common_centre_to_each() -> None:
    subjects = [make_subject("a", ellipsoid((6, 6, 6), shift)[0], ct=False) for shift in ((2, 0, 0), (-2, 1, 0))]
    centre = np.mean([one.centre for one in subjects], axis=0)
    for one, transform in zip(subjects, centring(subjects), strict=True):
        assert np.allclose(transform(centre[None])[0], one.centre)


def test_the_grid_covers_the_scans_in_voxels_of_theirs() -> None:
    far = AFFINE.copy()
    far[:3, 3] = (500, -300, 20)
    scan = ellipsoid((8, 8, 8))[0]
    subjects = [make_subject("a", scan, ct=False), make_subject("b", Image(scan.data, far), ct=False)]
    grid = common_grid(subjects)
    assert grid.spacing == pytest.approx((1.0, 1.0, 1.5))
    middle = images.map_points(grid.affine, [(n - 1) / 2 for n in grid.shape])
    assert np.allclose(middle, np.mean([one.centre for one in subjects], axis=0), atol=0.8)
    assert all(20 <= n <= 24 for n in grid.shape)
    assert common_grid(subjects, 2.0).spacing == pytest.approx((2.0, 2.0, 2.0))


def test_registrations_make_the_average_sharper(data: Path) -> None:
    """Deformed copies of a shape: the template is sharper than their affine mean, and unbiased."""
    grid = np.stack(np.meshgrid(*[np.arange(20) - 9.5] * 3, indexing="ij"), axis=-1)
    scans = {}
    for number, sign in enumerate((-1, 1, 1, -1)):
        bent = grid.copy()
        bent[..., number % 2] += sign * 1.5 * np.sin(bent[..., 2] / 4)
        radius = np.linalg.norm(bent / 8, axis=-1)
        value = np.clip(4 * (1 - radius), 0, 1) * (0.6 + 0.4 * np.sin(bent[..., 0]) * np.sin(bent[..., 1]))
        scans[f"scan {number}"] = Image((1000 * value).astype(np.int16), np.eye(4))
    rows = []
    result = carlreg.template(
        scans,
        model=data / "model.safetensors",
        iterations=1,
        io_iterations=20,
        device="cpu",
        callback=lambda row, image: rows.append((row, image)),
    )
    assert [row.kind for row in result.iterations] == ["centred", "affine", "deformable"]
    assert [row for row, _ in rows] == list(result.iterations)
    affine, last = result.iterations[1], result.iterations[-1]
    assert last.sharpness > 1.01 * affine.sharpness
    assert last.spread < 0.5 * affine.spread
    assert result.residual_mm < 0.1
    assert sharpness(result.image) > sharpness(result.mean)


# ---- the command ----------------------------------------------------------------------------------------------------


def words(data: Path, out: Path, *more: object) -> list[object]:
    options = ["--model", data / "model.safetensors", "--io-iterations", 2, "--device", "cpu", "--iterations", 1]
    return ["template", data / "scans", "-o", out, *options, *more]


def test_command_writes_everything(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    code, text = run(*words(data, out))
    assert code == 0, text
    assert "3 scans" in text
    template = images.read(out / "template.nii.gz")
    page = (out / "template.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 3
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http-equiv", "")
    record = json.loads((out / "template.json").read_text(encoding="utf-8"))
    assert record["iterations"][-1]["residual_mm"] < 0.1
    assert [row["name"] for row in record["subjects"]] == ["s0", "s1", "s2"]
    shifts = []
    points = images.map_points(template.unit_to_world(), np.random.default_rng(0).uniform(0.3, 0.7, (200, 3)))
    for number in range(3):
        folder = out / "subjects" / f"s{number}"
        assert all((folder / name).is_file() for name in FILES)
        there, back = (transform_files.read(folder / name) for name in ("transform.h5", "inverse_transform.h5"))
        assert np.abs(back(there(points)) - points).max() < 0.1
        shifts.append(there(points) - points)
        scan = images.read(data / "scans" / f"s{number}.nii.gz")
        warped = world_transform.apply(there, scan, template)
        assert np.abs(warped.data.astype(int) - images.read(folder / "warped.nii.gz").data).max() <= 40
    assert np.linalg.norm(np.mean(shifts, axis=0), axis=-1).max() < 0.1  # unbiased
    assert not (out / builder.WORK).exists()
    scene = load_scene(out / "subjects" / "s1")  # as `carl view` shows it
    assert {"fixed", "moving", "warped"} <= set(scene.images)
    assert not scene.notes
    code, text = run(*words(data, out))
    assert code == 1
    assert "already holds this template" in text


@pytest.mark.browser
@needs_browser
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    scan = ellipsoid((7, 8, 6))[0]
    row = Iteration("deformable", 0.5, 0.01, 0.2, 0.1, 3.0)
    numbers = {"displacement_mm": 1.0, "folds_percent": 0.0, "inverse_error_mm": 0.1}
    record = {"model": {"name": "<b>"}, "device": "cpu", "options": {"seed": 0, "spacing": None}}
    text = page(scan, [row, row], [{"name": "a & b", **numbers}], record)
    (tmp_path / "template.html").write_text(text, encoding="utf-8")
    with chromium() as tab:
        tab.open((tmp_path / "template.html").as_uri())
        tab.wait("document.images.length === 3 && [...document.images].every((one) => one.naturalWidth > 0)")
        assert tab.get("document.querySelectorAll('svg circle').length") == 6
        assert tab.get("document.querySelector('tbody a').getAttribute('href')") == "subjects/a%20%26%20b/"
        assert tab.get("document.documentElement.scrollWidth <= window.innerWidth")
        assert not tab.complaints
        assert all(url.startswith(("file:", "data:")) for url in tab.requests)


def test_command_goes_on_where_it_was_stopped(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two registrations of the last iteration: only the third is registered again."""
    whole, out, calls = tmp_path / "whole", tmp_path / "out", []
    assert run(*words(data, whole))[0] == 0
    real = work.align_pair

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 6:  # three affine ones, then the third deformable one
            raise Stopped(signal.SIGTERM)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(work, "align_pair", counted)
    assert run(*words(data, out))[0] == 128 + signal.SIGTERM
    assert not (out / "template.json").exists()
    assert run(*words(data, out))[0] == 0
    assert len(calls) == 7
    assert np.array_equal(*(images.read(folder / "template.nii.gz").data for folder in (whole, out)))
    code, text = run(*words(data, out, "--iterations", 2))
    assert code == 0, text
    assert len(calls) == 10
    assert len(json.loads((out / "template.json").read_text(encoding="utf-8"))["iterations"]) == 4


def test_files_of_others_are_never_removed(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    mine = [out / name for name in ("work/notes.txt", "iterations/mine.nii.gz", "subjects/s0/thesis.txt")]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    for path, left in zip(mine[1:], (mine[1:], mine[2:]), strict=True):
        code, text = run(*words(data, out))
        assert code == 1
        assert text.count("\n") == 1
        assert f"already holds {left[0].relative_to(out).parts[0]}" in text
        path.rename(tmp_path / path.name)
    mine[2].parent.rmdir()
    assert run(*words(data, out))[0] == 0
    for path in mine[1:]:
        (tmp_path / path.name).rename(path)
    code, text = run(*words(data, out, "--overwrite"))
    assert code == 0, text
    assert all(path.read_text() == "mine" for path in mine)


def test_overwriting_removes_scans_that_are_left_out(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run(*words(data, out))[0] == 0
    (out / "subjects" / "s1" / "notes.txt").write_text("mine")
    fewer = words(data, out, "--overwrite")
    fewer[1:2] = [data / "scans" / "s0.nii.gz", data / "scans" / "s3.nii.gz"]
    (data / "scans" / "s3.nii.gz").write_bytes((data / "scans" / "s2.nii.gz").read_bytes())
    try:
        code, text = run(*fewer)
    finally:
        (data / "scans" / "s3.nii.gz").unlink()
    assert code == 0, text
    assert sorted(path.name for path in (out / "subjects").iterdir()) == ["s0", "s1", "s3"]
    assert [path.name for path in (out / "subjects" / "s1").iterdir()] == ["notes.txt"]


def test_other_settings_are_refused_by_name(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run(*words(data, out))[0] == 0
    code, text = run(*words(data, out, "--sharpen", 0.1))
    assert code == 1
    assert "sharpen=0.5 instead of 0.1" in text
    (tmp_path / "scans").mkdir()
    for name in ("s0", "s1"):
        (tmp_path / "scans" / f"{name}.nii.gz").write_bytes((data / "scans" / f"{name}.nii.gz").read_bytes())
    changed = words(data, out)
    changed[1] = tmp_path / "scans"
    code, text = run(*changed)
    assert code == 1
    assert "a scan s2" in text


def test_all_bad_scans_are_listed_before_anything_runs(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "register_each", lambda *_: pytest.fail("something was registered"))
    empty, other = tmp_path / "empty.nii.gz", tmp_path / "more"
    empty.write_bytes(b"")
    write_scans(other, [(7, 7, 7)])  # s0, as in the other folder
    options = ["-o", tmp_path / "out", "--model", data / "model.safetensors", "--device", "cpu"]
    code, text = run("template", data / "scans", empty, tmp_path / "none.nii.gz", other, *options)
    assert code == 1
    assert text.count("\n") == 1
    for part in ("4 of 6 scans", "empty.nii.gz is empty", "none.nii.gz does not exist", "called 's0'"):
        assert part in text, part
    assert not (tmp_path / "out").exists()
    code, text = run("template", empty, data / "scans" / "s0.nii.gz", "--skip-bad", *options)
    assert code == 1
    assert "1 usable scans of 2; expected at least 2" in text


def test_an_image_to_start_from_is_centred_like_the_scans(data: Path) -> None:
    """Far away and of another size: it is put where the scans are."""
    far = AFFINE.copy()
    far[:3, 3] += (300, -200, 100)
    start = Image(ellipsoid((7, 7, 7))[0].data, far)
    subjects = tuple(make_subject(name, ellipsoid((8, 8, 7))[0], ct=False) for name in "ab")
    options = builder.TemplateOptions(device="cpu")
    build = builder.Builder(subjects, {}, "none", options, start, {}, 1, print, None)
    placed = build._placed(common_grid(subjects))
    assert np.allclose(make_subject("c", placed, ct=False).centre, subjects[0].centre, atol=0.2)


def test_bad_scans_are_skipped_on_request(data: Path, tmp_path: Path, run: Run) -> None:
    bad = tmp_path / "bad.nii.gz"
    bad.write_bytes(b"not an image")
    given = words(data, tmp_path / "out", "--skip-bad")
    code, text = run(given[0], bad, *given[1:])
    assert code == 0, text
    assert "bad.nii.gz" in text
    assert "3 scans" in text


@pytest.mark.parametrize("option", [("--iterations", 0), ("--sharpen", -1), ("--spacing", 0), ("--workers", 0)])
def test_wrong_options_are_wrong_usage(data: Path, tmp_path: Path, run: Run, option: tuple[str, int]) -> None:
    code, text = run(*words(data, tmp_path / "out", *option))
    assert code == 2
    assert option[0].strip("-") in text


def test_only_one_process_builds_a_template(data: Path, tmp_path: Path) -> None:
    from carlreg.files.atomic import only_writer

    folder = tmp_path / "out" / builder.ITERATIONS
    with only_writer(folder, RuntimeError()), pytest.raises(ExistsError, match="another process"):
        carlreg.template([data / "scans"], out=tmp_path / "out", model=data / "model.safetensors", device="cpu")


def test_rotated_scans_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    turns = []
    for degrees in (-30, 0, 30):
        c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        matrix = np.eye(4)
        matrix[:2, :2] = [[c, -s], [s, c]]
        turns.append(WorldTransform.linear(matrix))
    builder._warn_of_rotations(turns)
    assert "rotated against each other" in caplog.text
    caplog.clear()
    builder._warn_of_rotations([WorldTransform.linear(np.eye(4))] * 2)
    assert not caplog.text


def test_work_can_be_sent_to_other_processes(data: Path) -> None:
    task = Task("s0", PairInputs(fixed=ellipsoid((7, 7, 7))[0], moving=data / "scans" / "s0.nii.gz"))
    each = RegisterEach(data / "model.safetensors", RegisterOptions(), "transform")
    again, other = pickle.loads(pickle.dumps((each, task)))
    assert again.options == each.options
    assert other.name == "s0"


def test_two_dimensional_scans(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(32) - 15.5, np.arange(30) - 14.5, indexing="ij"), axis=-1)
    scans = []
    for radius in (9.0, 11.0):
        value = np.clip(3 - np.linalg.norm(grid, axis=-1) / radius * 3, 0, 1) + 0.02 * rng.random((32, 30))
        scans.append(Image((200 * value).astype(np.float32), np.eye(3)))
    torch.manual_seed(0)
    save(gradicon(2, 2, **SMALL), tmp_path / "plane.safetensors", metadata={"grid": "16 16"})
    options = {"model": tmp_path / "plane.safetensors", "io_iterations": 2, "device": "cpu"}
    result = carlreg.template(scans, iterations=1, out=tmp_path / "out", **options)
    assert result.image.dim == 2
    assert (tmp_path / "out" / "template.html").read_text(encoding="utf-8").count("data:image/png") == 1
