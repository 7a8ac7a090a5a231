"""Training data: CSV files and folders, the cache, and the pairs that are drawn."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from carlreg import gradicon, preparation
from carlreg.atlases.inputs import list_atlases, list_scans
from carlreg.cohort.sources import read_folder
from carlreg.errors import InputError
from carlreg.files import images, orientation
from carlreg.files.images import Image
from carlreg.geometry import resizing
from carlreg.geometry.grids import Grid
from carlreg.geometry.transforms import Affine
from carlreg.model.algorithms import ClosedFormXi
from carlreg.model.loaded import LoadedModel
from carlreg.preparation import prepare_pair
from carlreg.training import cache
from carlreg.training import cohort as manifest
from carlreg.training.batches import Batch
from carlreg.training.cache import Prepared, choose_grid, prepare
from carlreg.training.cohort import Case, Cohort, DatasetError, Pair
from carlreg.training.pairs import STRUCTURES, Augmentation, TrainingPairs
from carlreg.training.validation import Validation

pytest.importorskip("SimpleITK")

CPU = torch.device("cpu")


def write(path: Path, shape: tuple[int, ...] = (12, 10), seed: int = 0, flip: bool = False) -> Path:
    """A bright ball; if flipped, the same ball stored in reverse order."""
    rng = np.random.default_rng(seed)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    centre = (np.array(shape) - 1) * rng.uniform(0.35, 0.65, len(shape))
    data = (200 * np.exp(-((index - centre) ** 2).sum(-1) / 12)).astype(np.uint8)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) if len(shape) == 3 else np.eye(3)  # RAS
    if flip:
        affine = affine @ np.array([[-1, 0, 0, shape[0] - 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
        data = data[::-1]
    images.write(images.from_array(np.ascontiguousarray(data), affine), path)
    return path


def write_labels(image: Path, path: Path) -> Path:
    source = images.read(image)
    images.write(Image((source.data > 80).astype(np.uint8), source.affine), path)
    return path


def table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    for number in range(6):
        image = write(tmp_path / f"s{number}.nii.gz", seed=number)
        write_labels(image, tmp_path / f"s{number}_labels.nii.gz")
    return tmp_path


# ---- the manifest ---------------------------------------------------------------------------------------------------


def test_a_csv_file_of_images(scans: Path) -> None:
    rows = [f"s{i}.nii.gz,s{i}_labels.nii.gz,{'val' if i > 3 else 'train'}" for i in range(6)]
    training, validation = manifest.read(table(scans / "a.csv", "image,labels,split", *rows))
    assert [case.image.name for case in training.cases] == [f"s{i}.nii.gz" for i in range(4)]
    assert training.pairs is None
    assert validation is not None
    assert validation.cases[1] == Case(scans / "s5.nii.gz", scans / "s5_labels.nii.gz")
    assert validation.some_pairs(9) == [Pair(0, 1), Pair(1, 0)]


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_csv_file_of_pairs(scans: Path, mark: str) -> None:
    rows = ["fixed,moving,fixed_seg,moving_seg", "s0.nii.gz,s1.nii.gz,,", "s2.nii.gz,s0.nii.gz,,", ""]
    path = table(scans / "a.csv", *(row.replace(",", mark) for row in rows))
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"))  # as Excel writes it
    training, validation = manifest.read(path, fraction=0)
    assert validation is None
    assert [case.image.name for case in training.cases] == ["s1.nii.gz", "s0.nii.gz", "s2.nii.gz"]  # each once
    assert training.pairs == (Pair(moving=0, fixed=1), Pair(moving=1, fixed=2))


def test_a_folder(scans: Path) -> None:
    (scans / "notes.txt").write_text("not an image")
    training, validation = manifest.read(scans)
    assert validation is not None
    assert (len(training), len(validation)) == (4, 2)  # a tenth, at least two
    assert {c.image for c in training.cases}.isdisjoint(c.image for c in validation.cases)
    assert all(c.labels == c.image.with_name(c.image.name.replace(".nii", "_labels.nii")) for c in training.cases)
    assert manifest.read(scans) == (training, validation)  # always the same


@pytest.mark.parametrize("end", ["_seg", "_dseg"])
def test_label_maps_and_masks_of_a_folder_are_not_images(scans: Path, end: str) -> None:
    """They are called as in a cohort."""
    for number in range(6):
        labels = (scans / f"s{number}_labels.nii.gz").rename(scans / f"s{number}{end}.nii.gz")
        shutil.copy(labels, scans / f"s{number}_mask.nii.gz")
    training, _ = manifest.read(scans, fraction=0)
    pairs = [(f"s{number}.nii.gz", f"s{number}{end}.nii.gz") for number in range(6)]
    assert [(case.image.name, case.labels and case.labels.name) for case in training.cases] == pairs
    assert [case.image.name for case in manifest.read_label_maps(str(scans))] == [name for _, name in pairs]
    assert [path.name for _, path in list_scans([scans])] == [name for name, _ in pairs]
    assert [(image.name, labels and labels.name) for _, (image, labels) in list_atlases(scans)] == pairs
    assert [subject.image.name for subject in read_folder(scans)] == [name for name, _ in pairs]


def test_a_folder_with_a_split(scans: Path) -> None:
    for name, numbers in (("train", range(4)), ("val", range(4, 6))):
        (scans / name).mkdir()
        for number in numbers:
            (scans / f"s{number}.nii.gz").rename(scans / name / f"s{number}.nii.gz")
    training, validation = manifest.read(scans)
    assert validation is not None
    assert (len(training), len(validation)) == (4, 2)


def test_the_fraction_for_validation(scans: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = table(scans / "a.csv", "image", *(f"s{i}.nii.gz" for i in range(6)))
    training, validation = manifest.read(path, fraction=0.5)
    assert validation is not None
    assert (len(training), len(validation)) == (3, 3)
    assert manifest.read(path, fraction=0) == (Cohort(tuple(Case(scans / f"s{i}.nii.gz") for i in range(6))), None)
    few = table(scans / "few.csv", "image,age", *(f"s{i}.nii.gz,50" for i in range(3)))
    with caplog.at_level(logging.WARNING):
        assert manifest.read(few)[1] is None
    assert "none is kept for validation" in caplog.text
    assert "ignoring unknown columns: age" in caplog.text
    other = table(scans / "other.csv", "image", "s3.nii.gz", "s4.nii.gz")
    assert manifest.read(few, val=other)[1] == Cohort((Case(scans / "s3.nii.gz"), Case(scans / "s4.nii.gz")))
    with caplog.at_level(logging.WARNING):
        manifest.read(few, val=few)
    assert "3 images are used for training and for validation" in caplog.text


def test_pairs_are_divided_with_their_images(scans: Path) -> None:
    path = table(scans / "a.csv", "fixed,moving", *(f"s{i}.nii.gz,s{(i + 1) % 6}.nii.gz" for i in range(6)))
    training, validation = manifest.read(path, fraction=0.34)
    assert training.pairs is not None
    assert validation is not None
    assert validation.pairs is not None
    names = [
        (cohort.cases[p.fixed].image.name, cohort.cases[p.moving].image.name)
        for cohort in (training, validation)
        for p in cohort.pairs or ()
    ]
    assert sorted(names) == [(f"s{i}.nii.gz", f"s{(i + 1) % 6}.nii.gz") for i in range(6)]
    assert (len(training), len(validation)) == (4, 2)


BAD_TABLES = {
    "empty": ([""], "has no rows"),
    "header only": (["image"], "has no rows"),
    "no column": (["picture", "s0.nii.gz"], "has the columns picture; expected 'image', or 'fixed' and 'moving'"),
    "one image": (["image", "s0.nii.gz"], r"only one image \(.*s0.nii.gz\) to train on; expected at least two"),
    "missing": (["image", "s0.nii.gz", "no.nii.gz", "nor.nii.gz"], "no.nii.gz, which does not exist, and 1 more"),
    "twice": (["image", "s0.nii.gz", "s0.nii.gz"], "lists .*s0.nii.gz twice"),
    "a hole": (["image,labels", "s0.nii.gz,", ",s0_labels.nii.gz"], "line 3: image is empty"),
    "a split": (["image,split", "s0.nii.gz,train", "s1.nii.gz,evaluate"], "line 3: split is 'evaluate'"),
    "no val": (["image,split", "s0.nii.gz,train", "s1.nii.gz,train"], "the validation set is empty"),
    "one val": (["image,split", "s0.nii.gz,train", "s1.nii.gz,train", "s2.nii.gz,val"], "one image .* to validate"),
    "no train": (["image,split", "s0.nii.gz,val", "s1.nii.gz,val"], "split without 'train'"),
    "landmarks": (["fixed,moving,fixed_landmarks", "s0.nii.gz,s1.nii.gz,s2.nii.gz"], "landmarks for one image only"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_are_named(scans: Path, case: str) -> None:
    rows, message = BAD_TABLES[case]
    with pytest.raises(InputError, match=message) as error:
        manifest.read(table(scans / "a.csv", *rows))
    assert "a.csv" in str(error.value)


def test_other_bad_sources_are_named(scans: Path) -> None:
    path = table(scans / "a.csv", "image", *(f"s{i}.nii.gz" for i in range(6)))
    with pytest.raises(InputError, match="leaves 1 for validation and 5 for training; expected at least 2 of each"):
        manifest.read(path, fraction=0.1)
    with pytest.raises(InputError, match=r"1\.5; expected 0 or more, and less than 1"):
        manifest.read(path, fraction=1.5)
    with pytest.raises(InputError, match="expected one of them"):
        manifest.read(path, val=path, fraction=0.5)
    with pytest.raises(InputError, match="does not exist; expected a CSV file or a folder"):
        manifest.read(scans / "no.csv")
    with pytest.raises(InputError, match="is not text; expected a CSV file"):
        manifest.read(scans / "s0.nii.gz")
    (scans / "hollow").mkdir()
    with pytest.raises(InputError, match="hollow holds no image"):
        manifest.read(scans / "hollow")
    (scans / "s0.nii.gz").unlink()
    with pytest.raises(InputError, match=r"s0_labels.* has no image s0 beside it"):
        manifest.read(scans)


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_prepared_images_are_what_register_would_see(tmp_path: Path) -> None:
    image = write(tmp_path / "a.nii.gz", (12, 10, 8))
    labels = write_labels(image, tmp_path / "labels.nii.gz")
    (prepared,) = prepare([Case(image, labels)], (9, 10, 7), tmp_path / "cache")
    source = orientation.to_closest_ras(images.read(image))
    expected = resizing.resize(preparation.preprocess(source)[0], (9, 10, 7))[0]
    assert prepared.image.dtype == torch.uint8
    assert (prepared.image.float() / 255 - expected).abs().max() <= 0.5 / 255 + 1e-6
    assert prepared.labels is not None
    mask = torch.from_numpy((source.data > 80).astype(np.uint8))[None, None]
    assert torch.equal(prepared.labels, resizing.resize_labels(mask, (9, 10, 7))[0])


def test_headers_are_heeded(tmp_path: Path) -> None:
    """The same ball, stored the other way round with a header that says so, gives the same tensor."""
    paths = [write(tmp_path / f"{flip}.nii.gz", (12, 10, 8), flip=flip) for flip in (False, True)]
    one, other = prepare([Case(path) for path in paths], (12, 10, 8), tmp_path / "cache")
    assert not np.array_equal(images.read(paths[0]).data, images.read(paths[1]).data)
    assert torch.equal(one.image, other.image)
    assert one.digest == other.digest


def test_a_body_in_a_large_image_is_learnt_as_it_is_registered(tmp_path: Path) -> None:
    """Images and labels are cropped to the foreground."""
    data = np.zeros((60, 50, 40), np.float32)
    data[30:50, 2:48, 5:30] = np.random.default_rng(0).uniform(50, 200, (20, 46, 25))
    images.write(Image(data, np.eye(4)), tmp_path / "s.nii.gz")
    images.write(Image((data > 0).astype(np.uint8), np.eye(4)), tmp_path / "l.nii.gz")
    scan = images.read(tmp_path / "s.nii.gz")
    _, seen = prepare_pair(scan, scan, LoadedModel(ClosedFormXi(3), (32, 32, 32), {}), CPU)
    (case,) = prepare([Case(tmp_path / "s.nii.gz", tmp_path / "l.nii.gz")], (32, 32, 32), tmp_path / "cache")
    assert torch.equal(case.image, (255 * seen.tensor[0]).round().byte())
    assert np.allclose(np.array(case.world_to_unit), seen.image.world_to_unit())
    assert case.labels is not None
    both = (case.labels[0] > 0) & (case.image[0] > 30)  # up to half a voxel at the edges
    assert both.sum() > 0.9 * max((case.labels[0] > 0).sum(), (case.image[0] > 30).sum())


def test_cubic_voxels_lie_around_what_an_image_shows(tmp_path: Path) -> None:
    """Two scans of one body with different voxels, fields of view and axes become the same cube."""
    spacings, corners, sides = [(1.0, 1.5, 2.0), (1.4, 1.1, 1.0)], [(-20, -25, -30), (-35, -26, -24)], (60, 62, 58)
    made = []
    for number, (spacing, corner) in enumerate(zip(spacings, corners, strict=True)):
        affine = np.diag([*spacing, 1.0]) * np.array([[-1] if number else [1], [1], [1], [1]])
        affine[:3, 3] = np.array(corner) * np.array([-1 if number else 1, 1, 1])
        world = images.map_points(affine, np.moveaxis(np.indices(sides), 0, -1))
        away = np.linalg.norm((world - (5.0, 8.0, 3.0)) / (14.0, 20.0, 11.0), axis=-1)
        body, part = (200 * np.clip(1.5 - away, 0, 1)).astype(np.float32), (away < 0.8).astype(np.uint8)
        for data, name in ((body, f"s{number}.nii.gz"), (part, f"l{number}.nii.gz")):
            images.write(Image(data, affine), tmp_path / name)
        made.append(Case(tmp_path / f"s{number}.nii.gz", tmp_path / f"l{number}.nii.gz"))
    one, other = prepare(made, (40, 40, 40), tmp_path / "cache", voxel=1.6)
    assert one.size == other.size == pytest.approx((1.6 * 39,) * 3)
    # Up to the half voxel of a scan by which the middles of their boxes may differ.
    seen = torch.stack([case.image.float().flatten() for case in (one, other)])
    assert torch.corrcoef(seen)[0, 1] > 0.97
    assert one.labels is not None
    assert other.labels is not None
    volume = 4 / 3 * np.pi * np.prod([0.8 * 14, 0.8 * 20, 0.8 * 11])
    for case in (one, other):
        assert int(case.labels.sum()) * 1.6**3 == pytest.approx(volume, rel=0.05)
        middle = images.map_points(np.array(case.world_to_unit), [5.0, 8.0, 3.0])
        assert np.abs(middle - 0.5).max() < 0.03
    assert not torch.equal(one.image, prepare(made, (40, 40, 40), tmp_path / "cache")[0].image)
    with pytest.raises(DatasetError, match=r"40 voxels of 0\.5 mm are 20 mm; expected it to fit, .* larger voxels"):
        prepare(made, (40, 40, 40), tmp_path / "cache", voxel=0.5)
    with pytest.raises(DatasetError, match="to fill half of that: use smaller voxels or a smaller grid"):
        prepare(made, (40, 40, 40), tmp_path / "cache", voxel=5.0)


def test_the_cache_notices_what_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = write(tmp_path / "a.nii.gz")
    case, folder = Case(image), tmp_path / "cache"
    made = []
    make = cache._make
    monkeypatch.setattr(cache, "_make", lambda *given: made.append(1) or make(*given))
    first = prepare([case], (8, 8), folder)[0]
    again = prepare([case], (8, 8), folder)[0]
    assert len(made) == 1
    assert torch.equal(first.image, again.image)
    prepare([case], (8, 9), folder)  # another grid
    assert len(made) == 2
    prepare([Case(image, write_labels(image, tmp_path / "l.nii.gz"))], (8, 8), folder)  # labels
    assert len(made) == 3
    image.unlink()
    write(image, seed=5)
    os.utime(image, ns=(1, 1))
    assert not torch.equal(prepare([case], (8, 8), folder)[0].image, first.image)  # another file of that name
    assert len(made) == 4
    monkeypatch.setattr(cache, "PREPARATION", cache.PREPARATION + 1)
    prepare([case], (8, 8), folder)  # other code
    assert len(made) == 5
    prepare([case], (8, 8), folder, ct_range=(-125, 275))  # other intensities
    assert len(made) == 6
    for path in folder.iterdir():
        path.write_bytes(b"damaged")
    prepare([case], (8, 8), folder)
    assert len(made) == 7
    assert all(path.suffix == ".safetensors" for path in folder.iterdir())  # nothing half written


def test_the_grid(tmp_path: Path) -> None:
    cases = [Case(write(tmp_path / f"{n}.nii.gz", (n, 10))) for n in (8, 12, 300)]
    assert choose_grid(cases) == (12, 10)
    assert choose_grid(cases[2:]) == (256, 10)
    assert choose_grid(cases, (32,)) == (32, 32)
    assert choose_grid(cases, (32, 16)) == (32, 16)
    with pytest.raises(ValueError, match="the grid has 3 sides"):
        choose_grid(cases, (8, 8, 8))
    with pytest.raises(ValueError, match="at least 4"):
        choose_grid(cases, (2, 8))


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "carlreg"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "carlreg"


def test_bad_images_are_named_all_together(tmp_path: Path) -> None:
    good = write(tmp_path / "good.nii.gz")
    (tmp_path / "broken.nii.gz").write_bytes(b"no image")
    images.write(images.from_array(np.full((8, 8), 3, np.uint8)), tmp_path / "flat.nii.gz")
    volume = write(tmp_path / "volume.nii.gz", (8, 8, 8))
    small = write_labels(write(tmp_path / "other.nii.gz", (11, 10)), tmp_path / "small.nii.gz")
    empty = tmp_path / "empty.nii.gz"
    images.write(images.from_array(np.zeros((12, 10), np.uint8), images.read(good).affine), empty)
    elsewhere = tmp_path / "elsewhere.nii.gz"
    moved = np.eye(3)
    moved[0, 2] = 2.0
    images.write(images.from_array(np.ones((12, 10), np.uint8), moved), elsewhere)
    ramp = tmp_path / "ramp.nii.gz"
    images.write(images.from_array(np.linspace(0, 1, 120, dtype=np.float32).reshape(12, 10)), ramp)
    bad = {
        Case(tmp_path / "broken.nii.gz"): "broken.nii.gz",
        Case(tmp_path / "flat.nii.gz"): "flat.nii.gz is constant: every voxel is 3",
        Case(volume): "volume.nii.gz is 3-D but the others are 2-D",
        Case(good, small): "small.nii.gz has 11 × 10 voxels but .*good.nii.gz has 12 × 10; expected a label map",
        Case(good, elsewhere): "elsewhere.nii.gz lies up to 2 mm away from .*good.nii.gz",
        Case(good, empty): "empty.nii.gz is empty",
        Case(good, ramp): "ramp.nii.gz holds values that are not whole numbers",
    }
    for case, message in bad.items():
        with pytest.raises(DatasetError, match=message):
            prepare([Case(good), case], (8, 8), tmp_path / "cache")
    with pytest.raises(DatasetError, match=r"broken.* \(also unusable: .*flat.nii.gz, .*volume.nii.gz\)"):
        prepare([Case(good), *list(bad)[:3]], (8, 8), tmp_path / "cache")


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    case = Case(write(tmp_path / "a.nii.gz"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="File too large") as error:
            prepare([case], (8, 8), tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(error.value.filename).parent == tmp_path / "cache"
    assert list((tmp_path / "cache").iterdir()) == []


# ---- pairs ----------------------------------------------------------------------------------------------------------


def constant_images(count: int) -> list[Prepared]:
    """Image number i has the value i everywhere, so that a batch shows which images were drawn."""
    eye = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    return [Prepared(torch.full((1, 8, 8), i, dtype=torch.uint8), None, eye, (7.0, 7.0), "", "") for i in range(count)]


def who(batch: torch.Tensor) -> list[int]:
    return (255 * batch[:, 0, 4, 4]).round().int().tolist()


def test_any_two_different_images_are_drawn() -> None:
    cohort = Cohort(tuple(Case(Path(str(i))) for i in range(4)))
    draw = TrainingPairs(cohort, constant_images(4), batch=50, device=CPU)
    moving, fixed = (who(images) for images in draw(torch.Generator().manual_seed(0))[:2])
    assert len({*zip(moving, fixed, strict=True)}) == 12
    assert all(a != b for a, b in zip(moving, fixed, strict=True))


def test_given_pairs_are_drawn() -> None:
    cohort = Cohort(tuple(Case(Path(str(i))) for i in range(4)), (Pair(1, 0), Pair(2, 3)))
    draw = TrainingPairs(cohort, constant_images(4), batch=20, device=CPU)
    moving, fixed = (who(images) for images in draw(torch.Generator().manual_seed(0))[:2])
    assert {*zip(moving, fixed, strict=True)} == {(1, 0), (2, 3)}
    with pytest.raises(ValueError, match="the batch is 0"):
        TrainingPairs(cohort, constant_images(4), batch=0, device=CPU)


def test_parts_of_a_drawn_batch_join(monkeypatch: pytest.MonkeyPatch) -> None:
    from carlreg.training.distributed import Team

    rng = torch.Generator().manual_seed(1)
    eye = constant_images(1)[0].world_to_unit

    def noise(most: int) -> torch.Tensor:
        return torch.randint(most, (1, 8, 8), generator=rng).byte()

    prepared = [Prepared(noise(255), noise(30), eye, (7.0, 7.0), "", "") for _ in range(5)]
    cohort = Cohort(tuple(Case(Path(str(i))) for i in range(5)))

    def part(rank: int, size: int) -> torch.Tensor:
        monkeypatch.setattr(Team, "current", lambda: Team(rank, size))
        draw = TrainingPairs(
            cohort, prepared, batch=4, device=CPU, augmentation=EVERYTHING, labelled=True, maps=prepared, map_share=0.5
        )
        moving, fixed, *structures, moving_target, fixed_target = draw(torch.Generator().manual_seed(3))
        assert [part.shape[1] for part in structures] == [STRUCTURES] * 2
        parts = ((moving, structures[0], moving_target), (fixed, structures[1], fixed_target))
        return torch.stack([torch.cat(part, dim=1) for part in parts])

    whole = part(0, 1)
    assert torch.equal(part(0, 2), whole[:, 0::2])
    assert torch.equal(part(1, 2), whole[:, 1::2])


def test_structures_are_those_that_both_images_show() -> None:
    """Images that equal their own labels, so that both can be compared in a batch."""
    rng = torch.Generator().manual_seed(2)
    shown = [(3, 7, 200), (7, 200, 9), (4, 200), ()]
    plain = constant_images(4)
    maps = [torch.tensor((0, *values))[torch.randint(len(values) + 1, (1, 8, 8), generator=rng)] for values in shown]
    prepared = [replace(case, image=m.byte(), labels=m.byte()) for case, m in zip(plain, maps, strict=True)]
    prepared[3] = replace(prepared[3], labels=None)
    cohort = Cohort(tuple(Case(Path(str(i))) for i in range(4)))
    still = Augmentation(affine=0)
    draw = TrainingPairs(cohort, prepared, batch=40, device=CPU, augmentation=still, labelled=True)
    moving, fixed, of_moving, of_fixed = draw(torch.Generator().manual_seed(0))[:4]
    for m, f, mm, ff in zip((255 * moving).round(), (255 * fixed).round(), of_moving, of_fixed, strict=True):
        common = sorted((set(m.unique().tolist()) & set(f.unique().tolist())) - {0})
        expected = {tuple((m == value).flatten().tolist()) for value in common}
        used = [number for number in range(STRUCTURES) if mm[number].any()]
        assert {tuple(mm[number].bool().flatten().tolist()) for number in used} == expected
        assert [number for number in range(STRUCTURES) if ff[number].any()] == used
        for number in used:
            value = m[mm[number][None].bool()].unique()
            assert torch.equal(f == value, ff[number][None].bool())


def test_flips_and_permutations_are_exact_and_common_to_the_pair() -> None:
    image = torch.rand(1, 1, 5, 5, 5)
    pairs = 600
    turned = Augmentation(affine=0, flips=True, permutations=True)
    views = turned.draw(pairs, 3, torch.Generator().manual_seed(0))
    seen, again = views.sample(image.expand(2 * pairs, -1, -1, -1, -1))[0].chunk(2)
    assert torch.equal(seen, again)
    expected = torch.stack(
        [
            image[0, 0].permute(order).flip(axes)
            for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
            for axes in ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
        ]
    )
    distance = torch.cdist(seen.flatten(1).double(), expected.flatten(1).double())
    assert distance.amin(dim=1).max() < 1e-3
    assert len(distance.argmin(dim=1).unique()) == 48  # each of them occurs


def test_affine_noise_has_the_size_that_was_asked_for() -> None:
    drawn = Augmentation(affine=0.05).draw(4000, 2, torch.Generator().manual_seed(0)).affine.matrix
    of_moving, of_fixed = (Affine(matrix) for matrix in drawn.chunk(2))
    for maps in (of_moving, of_fixed):
        off = maps.linear - torch.eye(2)
        assert off.std().item() == pytest.approx(0.05, rel=0.05)
        centre = maps(torch.full((4000, 1, 2), 0.5)) - 0.5
        assert (2 * centre).std().item() == pytest.approx(0.05, rel=0.05)  # in coordinates from −1 to 1
    assert abs(float((of_moving.linear - torch.eye(2)).mul(of_fixed.linear - torch.eye(2)).mean())) < 1e-3
    x = torch.rand(4, 9, 3)
    assert torch.allclose(Augmentation(affine=0).draw(2, 3, torch.Generator()).affine(x), x)


EVERYTHING = Augmentation(flips=True, mirror=True, contrast=0.5, deform=0.5, margins=0.5, crop=0.5, thick_slices=0.5)
ROWS = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0))


def ball(side: int = 24, label: int = 7, seed: int = 0) -> Prepared:
    """A smooth bright ball on grey; the label is where it is brighter than a half."""
    centre = torch.tensor((0.35, 0.5, 0.55)) + 0.1 * torch.rand(3, generator=torch.Generator().manual_seed(seed))
    far = (Grid.of((side,) * 3).points() - centre).square().sum(-1)
    image = (51 + 204 * torch.sigmoid(40 * (0.05 - far))).round().byte()[None]
    return Prepared(image, label * (image > 153).byte(), ROWS, (side - 1.0,) * 3, "", "")


def balls(count: int, *modalities: str) -> tuple[Cohort, list[Prepared]]:
    names = modalities or ("",) * count
    return Cohort(tuple(Case(Path(str(i)), None, names[i]) for i in range(count))), [ball(seed=i) for i in range(count)]


def overlap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def bytes_of(batch: Batch) -> list[bytes]:
    return [part.numpy().tobytes() for part in batch if part is not None]


def test_labels_follow_the_image_through_everything() -> None:
    """A label that is defined by the intensity still is, in the images that the loss compares."""
    draw = TrainingPairs(*balls(3), batch=12, device=CPU, augmentation=EVERYTHING, labelled=True)
    batch = draw(torch.Generator().manual_seed(0))
    bright = torch.cat(batch.compared) > 0.6
    labels = torch.cat([batch.moving_labels, batch.fixed_labels])[:, :1].bool()  # type: ignore[list-item]
    overlaps = [overlap(one, other) for one, other in zip(bright, labels, strict=True)]
    assert min(overlaps) > 0.85  # of balls of a few voxels: linear and nearest interpolation differ at the surface
    unmoved = [max(overlap(one, other > 0) for other in draw.labels) for one in labels]
    assert sorted(unmoved)[12] < 0.7


def test_the_same_seed_gives_the_same_batch() -> None:
    draw = TrainingPairs(
        *balls(4), batch=4, device=CPU, augmentation=EVERYTHING, labelled=True, maps=[ball(seed=9), ball(seed=8)],
        map_share=0.5,
    )  # fmt: skip
    first, again, other = (bytes_of(draw(torch.Generator().manual_seed(seed))) for seed in (1, 1, 2))
    assert len(first) == 6
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("change", [{"contrast": 1.0}, {"thick_slices": 1.0}])
def test_the_loss_compares_the_original_images(change: dict[str, float]) -> None:
    cohort, prepared = balls(2)
    draw = TrainingPairs(cohort, prepared, batch=3, device=CPU, augmentation=Augmentation(affine=0, **change))  # type: ignore[arg-type]
    batch = draw(torch.Generator().manual_seed(0))
    known = torch.stack([case.image for case in prepared]).float() / 255
    for seen, compared in zip(torch.cat(batch[:2]), torch.cat(batch.compared), strict=True):
        assert min((compared - image).abs().max() for image in known) < 1e-5
        assert (seen - compared).abs().max() > 0.02
    half = TrainingPairs(cohort, prepared, batch=100, device=CPU, augmentation=Augmentation(contrast=0.3))
    batch = half(torch.Generator().manual_seed(0))
    changed = (torch.cat(batch[:2]) != torch.cat(batch.compared)).flatten(1).any(1)
    assert 40 <= int(changed.sum()) <= 80


def test_thick_slices_are_linear_between_the_slices() -> None:
    image = torch.rand(1, 1, 29, 9, 9)
    views = Augmentation(affine=0).draw(1, 3, torch.Generator())
    seen = replace(views, thickness=torch.tensor([[7.0, 1.0, 1.0]])).in_thick_slices(image.clone())
    # 29 voxels become 4 slices, 28/3 voxels apart.
    bends = (seen[:, :, 2:] - 2 * seen[:, :, 1:-1] + seen[:, :, :-2]).abs().amax((0, 1, 3, 4)) > 1e-4
    assert bends.nonzero()[:, 0].add(1).tolist() == [9, 10, 18, 19]


def test_only_left_and_right_are_mirrored_and_both_alike() -> None:
    views = Augmentation(affine=0, flips=True, mirror=True).draw(40, 3, torch.Generator().manual_seed(0))
    image = torch.rand(1, 1, 5, 6, 7)
    moving, fixed = views.sample(image.expand(80, -1, -1, -1, -1))[0].chunk(2)
    assert torch.equal(moving, fixed)
    mirrored = [torch.allclose(one, image.flip(2)[0], atol=1e-5) for one in moving]
    assert all(torch.allclose(one, image[0], atol=1e-5) for one, m in zip(moving, mirrored, strict=True) if not m)
    assert 10 <= sum(mirrored) <= 30


def test_margins_are_empty_and_crops_lose_only_slices() -> None:
    image = torch.full((1, 1, 20, 20, 20), 0.5)
    views = Augmentation(affine=0, margins=1).draw(20, 3, torch.Generator().manual_seed(0))
    seen, labels = views.sample(image.expand(40, -1, -1, -1, -1), torch.ones(40, 1, 20, 20, 20))
    assert labels is not None
    assert torch.allclose(seen, 0.5 * (seen > 0))
    assert torch.equal(seen > 0, labels > 0)
    filled = (seen > 0).float().mean((1, 2, 3, 4))
    assert 0.1 < filled.min() < 0.3 < 0.8 < filled.max() <= 1
    views = Augmentation(affine=0, crop=1).draw(20, 3, torch.Generator().manual_seed(0))
    ramps = Grid.of((20,) * 3).points().movedim(-1, 0)[None]
    across, along, up = views.sample(ramps.expand(40, -1, -1, -1, -1))[0].unbind(1)
    for seen, ramp in ((across, ramps[:, 0]), (along, ramps[:, 1])):
        assert torch.allclose(seen, ramp.expand_as(seen), atol=1e-5)
    kept = up[:, 0, 0, -1] - up[:, 0, 0, 0]
    assert 0.54 < kept.min() < 0.65
    assert 0.9 < kept.max() <= 1
    assert up[:, 0, 0, 0].max() > 0.1  # at either end
    assert up[:, 0, 0, -1].min() < 0.9


def test_label_maps_are_rendered_in_two_contrasts_and_compared_in_one() -> None:
    """Two copies of one map with large, negative and missing numbers."""
    labels = torch.zeros(1, 16, 16, 16, dtype=torch.int32)
    labels[:, 2:8, 2:14, 2:14], labels[:, 8:14, 2:14, 2:14] = 2035, -3
    map_ = replace(ball(16), image=(labels != 0).byte() * 255, labels=labels)
    still = Augmentation(affine=0)
    draw = TrainingPairs(
        *balls(2), batch=4, device=CPU, augmentation=still, labelled=True, maps=[map_, map_], map_share=1.0
    )
    batch = draw(torch.Generator().manual_seed(0))
    moving, fixed = batch.compared
    assert torch.equal(moving, fixed)
    inside = [(0, slice(3, 7)), (0, slice(9, 13))]
    first, second = ([image[:, 0, part, 6:10, 6:10] for _, part in inside] for image in (batch.moving, batch.fixed))
    assert min((a.mean((1, 2, 3)) - b.mean((1, 2, 3))).abs().amax() for a, b in zip(first, second, strict=True)) > 0.1
    assert moving[:, 0, 3:7, 6:10, 6:10].std((1, 2, 3)).max() < 0.02  # a structure is uniform
    sizes = batch.moving_labels.sum((2, 3, 4)).sort(descending=True).values  # type: ignore[union-attr]
    assert sizes[:, :3].tolist() == [[6 * 12 * 12, 6 * 12 * 12, 0]] * 4
    none = TrainingPairs(*balls(2), batch=4, device=CPU, augmentation=still, maps=[map_, map_], map_share=0.0)
    batch = none(torch.Generator().manual_seed(0))
    assert torch.equal(batch.moving, batch.compared[0])
    assert batch.labels is None


def test_images_of_different_modality_are_compared_by_shared_structures() -> None:
    cohort, prepared = balls(2, "CT", "MR")
    prepared[1] = replace(prepared[1], image=255 - prepared[1].image)
    extra = prepared[1].labels
    assert extra is not None
    extra[:, :3, :3, :3] = 9  # a structure of one image only
    draw = TrainingPairs(cohort, prepared, batch=1, device=CPU, augmentation=Augmentation(affine=0))
    batch = draw(torch.Generator().manual_seed(0))
    for seen, compared in zip(batch[:2], batch.compared, strict=True):
        number = min((0, 1), key=lambda i: (255 * seen[0] - prepared[i].image).abs().max())  # type: ignore[index]
        known = prepared[number].labels == 7
        assert torch.equal(compared[0] > 0.14, known)
        assert compared[0, :, :3, :3, :3].max() == 0
    plain = TrainingPairs(balls(2, "CT", "CT")[0], prepared, batch=1, device=CPU)
    assert plain(torch.Generator()).moving_target is None


def test_modalities_without_shared_labels_are_refused() -> None:
    cohort, prepared = balls(3, "CT", "MR", "MR")
    bare = [replace(prepared[0], labels=None), *prepared[1:]]
    draw = TrainingPairs(cohort, bare, batch=30, device=CPU, augmentation=Augmentation(affine=0))
    images = torch.cat(draw(torch.Generator().manual_seed(0))[:2])
    assert (images - bare[0].image / 255).abs().amax((1, 2, 3, 4)).min() > 0.01  # the CT is in no pair
    listed = replace(cohort, pairs=(Pair(1, 2), Pair(1, 0)))
    for wrong in (listed, cohort.part([0, 1])):
        with pytest.raises(DatasetError, match="are of different modality and share no label; expected label maps"):
            TrainingPairs(wrong, bare[: len(wrong.cases)], batch=1, device=CPU)


# ---- validation -----------------------------------------------------------------------------------------------------


def shifted(tmp_path: Path) -> tuple[Cohort, list[Prepared]]:
    """Two images of one square, two voxels apart along the first axis, with labels. Corners show something, too."""
    cases = []
    for name, start in (("a", 4), ("b", 6)):
        data = np.zeros((17, 17), np.uint8)
        data[start : start + 6, 5:12] = 200
        data[0, 0] = data[16, 16] = 20
        images.write(images.from_array(data), tmp_path / f"{name}.nii.gz")
        images.write(images.from_array((data > 100).astype(np.uint8)), tmp_path / f"{name}_labels.nii.gz")
        cases.append(Case(tmp_path / f"{name}.nii.gz", tmp_path / f"{name}_labels.nii.gz"))
    return Cohort(tuple(cases)), prepare(cases, (17, 17), tmp_path / "cache")


def test_validation_by_dice(tmp_path: Path) -> None:
    cohort, prepared = shifted(tmp_path)
    judge = Validation(cohort, prepared, device=CPU)
    assert judge.measure == "Dice"
    unregistered = judge.score()
    assert (
        unregistered.merit == unregistered.value == pytest.approx(2 * 4 * 7 / (2 * 6 * 7))
    )  # four of six rows overlap
    identity = gradicon(2, 2, unet_down=(4,) * 5, unet_up=(4,) * 5).eval()  # its last convolutions are zero
    assert judge.score(identity).value == pytest.approx(unregistered.value)
    assert judge.score(identity).folds == 0


def test_validation_by_landmarks_and_by_similarity(tmp_path: Path) -> None:
    cohort, prepared = shifted(tmp_path)
    bare = [Prepared(p.image, None, p.world_to_unit, p.size, p.intensities, p.digest) for p in prepared]
    (tmp_path / "a.csv").write_text("x,y\n4,5\n9,11\n")
    (tmp_path / "b.txt").write_text("6 5\n1.3e1 11\n")
    pair = Pair(0, 1, tmp_path / "a.csv", tmp_path / "b.txt")
    judge = Validation(Cohort(cohort.cases, (pair,)), bare, device=CPU)
    assert judge.measure == "landmark error, mm"
    assert judge.score().value == pytest.approx(3.0, abs=1e-4)  # 2 mm and 4 mm
    assert judge.score().merit == pytest.approx(-3.0, abs=1e-4)
    plain = Validation(cohort, bare, device=CPU, similarity="ssd")
    assert plain.measure == "ssd"
    a, b = (p.image.float() / 255 for p in prepared)
    assert plain.score().merit == pytest.approx(-float(((a - b) ** 2).mean()), rel=1e-5)
    (tmp_path / "b.txt").write_text("6 5\n")
    with pytest.raises(DatasetError, match=r"a\.csv has 2 landmarks and .*b\.txt has 1; expected the same number"):
        Validation(Cohort(cohort.cases, (pair,)), bare, device=CPU)
    (tmp_path / "b.txt").write_text("6 5\nhere 3\n")
    with pytest.raises(InputError, match=r"line 2: 'here 3' is not a point; expected 2 numbers"):
        Validation(Cohort(cohort.cases, (pair,)), bare, device=CPU)
    (tmp_path / "b.txt").write_text("6 5 4\n")
    with pytest.raises(InputError, match="holds 3-D points; expected 2-D ones"):
        Validation(Cohort(cohort.cases, (pair,)), bare, device=CPU)


def test_validation_pairs_are_limited_and_always_the_same() -> None:
    cohort = Cohort(tuple(Case(Path(str(i))) for i in range(9)))
    chosen = cohort.some_pairs(10)
    assert len({*chosen}) == 10
    assert chosen == cohort.some_pairs(10)
