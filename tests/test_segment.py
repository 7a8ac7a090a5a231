"""`carl segment` and `carl atlas`: labels from labelled scans, packs of them, and bad input."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from safetensors.numpy import load_file, save_file
from shapes_with_labels import AFFINE, ellipsoid, write_model, write_scans

import carlreg
from carlreg.atlases import segment as segmenting
from carlreg.atlases import work
from carlreg.atlases.inputs import Atlas
from carlreg.atlases.options import SegmentOptions
from carlreg.atlases.pack import PackError, read_pack, write_pack
from carlreg.cli._shared import Stopped
from carlreg.errors import InputError
from carlreg.files import images
from carlreg.files.images import Image
from carlreg.files.results import ResultFolder
from carlreg.objective.metrics import dice

RADII = [(7, 8, 8), (8, 7, 8), (8, 8, 7)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three atlases, a scan whose labels are known, and a model that does nothing."""
    folder = tmp_path_factory.mktemp("segment")
    write_scans(folder / "atlases", RADII)
    scan, labels = ellipsoid((7.5, 7.5, 7.5))
    images.write(scan, folder / "scan.nii.gz")
    images.write(labels, folder / "truth.nii.gz")
    (folder / "names.csv").write_text("label,name\n1,shell\n2,core\n")
    write_model(folder / "model.safetensors")
    return folder


def words(data: Path, out: Path, *more: object, atlases: Path | None = None) -> list[object]:
    options = ["--model", data / "model.safetensors", "--io-iterations", 3, "--device", "cpu"]
    return ["segment", data / "scan.nii.gz", "-a", atlases or data / "atlases", "-o", out, *options, *more]


def tensor(image: Image) -> torch.Tensor:
    return torch.from_numpy(image.data.astype(np.int64))[None, None]


def test_command_finds_the_labels(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    code, text = run(*words(data, out, "--label-names", data / "names.csv", "--probabilities"))
    assert code == 0, text
    assert "2 structures from 3 atlases" in text
    found, truth = images.read_labels(out / "labels.nii.gz"), images.read_labels(data / "truth.nii.gz")
    assert found.data.dtype == np.uint8
    assert np.allclose(found.affine, truth.affine)
    assert min(dice(tensor(found), tensor(truth)).values()) > 0.85
    maps = [images.read(out / f"probability_{label}.nii.gz").data for label in (1, 2)]
    assert np.all(sum(maps) <= 1.01)
    assert np.all(maps[1][found.data == 2] >= 0.33)
    uncertainty = images.read(out / "uncertainty.nii.gz").data
    assert uncertainty.max() > 0.5
    assert uncertainty[0, 0, 0] == 0
    rows = list(csv.DictReader((out / "volumes.csv").open(encoding="utf-8")))
    assert [(row["label"], row["name"]) for row in rows] == [("1", "shell"), ("2", "core")]
    for row, values in zip(rows, maps, strict=True):
        count = int((found.data == int(row["label"])).sum())
        assert int(row["voxels"]) == count
        assert float(row["volume_mm3"]) == pytest.approx(1.5 * count)
        assert float(row["expected_volume_mm3"]) == pytest.approx(1.5 * values.sum(), rel=0.01)
    record = json.loads((out / "segment.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in record["atlases"]] == ["s0", "s1", "s2"]
    assert record["options"]["fusion"] == "joint"
    assert not (out / "registrations").exists()
    code, text = run(*words(data, out))
    assert code == 1
    assert "already holds segment.json" in text


def test_a_pack_gives_what_its_folder_gives(data: Path, tmp_path: Path, run: Run) -> None:
    pack = tmp_path / "three.carlatlas"
    code, text = run("atlas", data / "atlases", "-o", pack, "--label-names", data / "names.csv")
    assert code == 0, text
    assert "3 atlases" in text
    assert run(*words(data, tmp_path / "a"))[0] == 0
    assert run(*words(data, tmp_path / "b", atlases=pack))[0] == 0
    for name in ("labels.nii.gz", "uncertainty.nii.gz"):
        assert np.array_equal(*(images.read(tmp_path / one / name).data for one in "ab")), name
    assert "shell" in (tmp_path / "b" / "volumes.csv").read_text(encoding="utf-8")
    assert run("atlas", data / "atlases", "-o", pack)[0] == 1  # not overwritten
    assert run("atlas", data / "atlases", "-o", tmp_path / "three.zip")[0] == 1


def test_a_table_names_the_atlases(data: Path, tmp_path: Path) -> None:
    table = tmp_path / "atlases.csv"
    rows = [f"{data / 'atlases' / f's{n}.nii.gz'},{data / 'atlases' / f's{n}_labels.nii.gz'}" for n in (0, 2)]
    table.write_text("image,labels\n" + "\n".join(rows) + "\n")
    atlases, _ = segmenting.read_atlases(table)
    assert [one.name for one in atlases] == ["s0", "s2"]


def test_finished_registrations_are_not_repeated(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = [], work.align_pair

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise Stopped(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(work, "align_pair", counted)
    assert run(*words(data, tmp_path / "out"))[0] == 128 + signal.SIGTERM
    assert run(*words(data, tmp_path / "out"))[0] == 0
    assert len(calls) == 4
    assert run(*words(data, tmp_path / "whole"))[0] == 0
    assert np.array_equal(*(images.read(tmp_path / one / "labels.nii.gz").data for one in ("out", "whole")))


def test_other_settings_repeat_registrations(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run with other steps must not be mixed into this one."""
    options: dict[str, Any] = {"model": data / "model.safetensors", "device": "cpu"}
    given = data / "scan.nii.gz", data / "atlases"
    carlreg.segment(*given, out=tmp_path / "out", io_iterations=3, keep_registrations=True, **options)
    calls, real = [], work.register_pair
    monkeypatch.setattr(work, "register_pair", lambda *a, **more: calls.append(1) or real(*a, **more))
    more: dict[str, Any] = {"keep_registrations": True, "overwrite": True}
    carlreg.segment(*given, out=tmp_path / "out", io_iterations=2, **more, **options)
    assert len(calls) == 3
    carlreg.segment(*given, out=tmp_path / "out", io_iterations=2, **more, **options)
    assert len(calls) == 3


def test_registrations_are_kept_on_request(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run(*words(data, out, "--keep-registrations", "--fusion", "majority"))[0] == 0
    for number in range(3):
        folder = ResultFolder(out / "registrations" / f"s{number}")
        assert not folder.missing("warped_seg.nii.gz")


def test_other_registrations_are_never_removed(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    mine = out / "registrations" / "s0" / "warped.nii.gz"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    quick = ("--fusion", "majority")
    assert run(*words(data, out, *quick))[0] == 0
    assert [path.name for path in mine.parent.parent.rglob("*")] == ["s0", "warped.nii.gz"]
    for name in segmenting._names(out):
        (out / name).unlink()
    code, text = run(*words(data, tmp_path / "out", *quick, "--keep-registrations"))
    assert code == 1
    assert str(mine.parent) in text
    assert text.count("\n") == 1
    assert mine.read_text() == "mine"


def test_kept_registrations_stay(data: Path, tmp_path: Path, run: Run) -> None:
    out, quick = tmp_path / "out", ("--fusion", "majority")
    assert run(*words(data, out, *quick, "--keep-registrations"))[0] == 0
    before = sorted(out.rglob("registrations/*/*"))
    assert run(*words(data, out, *quick, "--overwrite"))[0] == 0
    assert sorted(out.rglob("registrations/*/*")) == before
    assert not (out / segmenting.WORK).exists()


def test_the_nearest_atlases_are_used(data: Path, tmp_path: Path) -> None:
    """An atlas of quite another shape is left out."""
    sources = {f"s{n}": ellipsoid(radii) for n, radii in enumerate(RADII)} | {"odd": ellipsoid((4, 9, 3))}
    options: dict[str, Any] = {"model": data / "model.safetensors", "device": "cpu", "io_iterations": 0}
    result = carlreg.segment(data / "scan.nii.gz", sources, nearest=3, **options)
    assert [one["name"] for one in result.record["atlases"]] == ["s0", "s1", "s2"]
    assert result.record["not_used"] == ["odd"]
    assert SegmentOptions().chosen(30) == 30
    assert SegmentOptions().chosen(31) == 20
    assert SegmentOptions(nearest=50).chosen(31) == 31


def test_bad_atlases_are_listed_together(data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bad"
    write_scans(folder, RADII)
    (folder / "s0_labels.nii.gz").unlink()
    shifted = AFFINE.copy()
    shifted[0, 3] = 5
    _, labels = ellipsoid(RADII[1])
    images.write(Image(labels.data, shifted), folder / "s1_labels.nii.gz", overwrite=True)
    (folder / "s3.nii.gz").write_bytes(b"nothing")
    images.write(ellipsoid((5, 5, 5))[0], folder / "s2.nrrd")
    each = work.register_each
    monkeypatch.setattr(segmenting, "register_each", lambda *_: pytest.fail("something was registered"))
    code, text = run(*words(data, tmp_path / "out", atlases=folder))
    assert code == 1
    assert text.count("\n") == 1
    for part in ("5 of 5 atlases", "s0.nii.gz has no labels", "lies up to 5 mm away", "s3.nii.gz", "called 's2'"):
        assert part in text, part
    (folder / "s2.nrrd").unlink()
    monkeypatch.setattr(segmenting, "register_each", each)
    code, text = run(*words(data, tmp_path / "out", "--skip-bad", atlases=folder))
    assert code == 0, text
    assert "s0.nii.gz has no labels" in text
    assert "1 atlases" in text


@pytest.mark.parametrize(
    ("atlases", "expected"),
    [("none", "does not exist"), ("scan.nii.gz", "is not a folder"), (".", "cannot be used"), ("names.csv", "columns")],
)
def test_what_is_not_a_set_of_atlases(data: Path, tmp_path: Path, run: Run, atlases: str, expected: str) -> None:
    code, text = run(*words(data, tmp_path / "out", atlases=data / atlases))
    assert code == 1
    assert text.count("\n") == 1
    assert expected in text
    assert not (tmp_path / "out").exists()


def test_wrong_options(data: Path, tmp_path: Path, run: Run) -> None:
    assert run(*words(data, tmp_path / "out", "--fusion", "staple"))[0] == 2
    assert run(*words(data, tmp_path / "out", "--nearest", 0))[0] == 2
    with pytest.raises(InputError, match="unknown fusion"):
        carlreg.segment(data / "scan.nii.gz", data / "atlases", fusion="staple")


def test_dimensions_must_agree(data: Path) -> None:
    flat = Image(np.random.default_rng(0).random((30, 30)).astype(np.float32), np.eye(3))
    with pytest.raises(InputError, match="2-D but the atlases are 3-D"):
        carlreg.segment(flat, data / "atlases", model=data / "model.safetensors", device="cpu")


# ---- packs ----------------------------------------------------------------------------------------------------------


def test_packs_keep_voxels_and_positions(tmp_path: Path) -> None:
    scan, labels = ellipsoid((6, 7, 8))
    smooth = Image((scan.data / 7).astype(np.float32), scan.affine)
    many = Image(labels.data.astype(np.int32) * 300, labels.affine)
    write_pack([Atlas("whole", scan, labels), Atlas("real", smooth, many)], tmp_path / "a.carlatlas", {300: "shell"})
    (whole, real), names = read_pack(tmp_path / "a.carlatlas")
    assert np.array_equal(whole.image.data, scan.data)
    assert whole.image.data.dtype == np.int16
    assert np.array_equal(whole.labels.data, labels.data)
    assert whole.labels.data.dtype == np.uint8
    assert np.array_equal(whole.image.affine, scan.affine)
    step = np.ptp(smooth.data) / 65535
    assert np.abs(real.image.data - smooth.data).max() <= step
    assert np.array_equal(real.labels.data, many.data)
    assert real.labels.data.dtype == np.uint16
    assert names == {300: "shell"}


Change = Callable[[list[dict[str, Any]], dict[str, np.ndarray]], None]


def _shape(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["shape"] = [100_000, 100_000, 100_000]


def _larger(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["shape"] = [20, 20, 21]


def _smaller(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["shape"] = [20, 20, 19]


def _negative(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["shape"] = [-20, -20, 20]


def _type(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["image"] = "object"


def _labels_type(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["labels"] = "int8"


def _nan(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["affine"][0][0] = float("nan")


def _flat(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["affine"][0][0] = 0.0


def _missing(entries: list[dict[str, Any]], tensors: dict[str, np.ndarray]) -> None:
    del tensors["0/labels"]


def _noise(entries: list[dict[str, Any]], tensors: dict[str, np.ndarray]) -> None:
    tensors["0/image"] = np.arange(50, dtype=np.uint8)


def _scale(entries: list[dict[str, Any]], _: object) -> None:
    entries[0]["scale"] = [float("inf"), 0.0]


def _nothing(entries: list[dict[str, Any]], _: object) -> None:
    entries.clear()


def _words(entries: list[Any], _: object) -> None:
    entries[0] = "an atlas"


CHANGES = [
    _shape, _larger, _smaller, _negative, _type, _labels_type, _nan, _flat, _missing, _noise, _scale, _nothing, _words,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_damaged_packs_are_refused_in_one_line(tmp_path: Path, change: Change) -> None:
    path = tmp_path / "a.carlatlas"
    scan, labels = ellipsoid((6, 7, 8))
    write_pack([Atlas("one", scan, labels)], path, {})
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        header = dict(file.metadata())
    tensors, entries = load_file(path), json.loads(header["atlases"])
    change(entries, tensors)
    save_file(tensors, path, header | {"atlases": json.dumps(entries)})
    with pytest.raises(InputError) as caught:
        read_pack(path)
    assert "a.carlatlas" in str(caught.value)


def test_other_files_are_no_packs(data: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a.carlatlas"
    with pytest.raises(PackError, match="does not exist"):
        read_pack(path)
    path.write_bytes(b"PK\3\4 nothing")
    with pytest.raises(PackError, match="damaged"):
        read_pack(path)
    path.write_bytes((data / "model.safetensors").read_bytes())
    code, text = run(*words(data, tmp_path / "out", atlases=path))
    assert code == 1
    assert "has the format 'carlreg-1'; expected 'carlatlas-1'" in text


def test_packs_with_names_that_are_paths_are_refused(data: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a.carlatlas"
    scan, labels = ellipsoid((6, 7, 8))
    write_pack([Atlas("../../x", scan, labels)], path, {})
    code, text = run(*words(data, tmp_path / "out", atlases=path))
    assert code == 1
    assert "must not contain a path separator" in text
