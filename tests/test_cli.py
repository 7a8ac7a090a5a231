"""The command line as a user runs it: exit codes, messages on stderr, and the files in the output folder."""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL

from carlreg import gradicon, save
from carlreg.cli import COMMANDS, functions, main
from carlreg.files import images, transform_files
from carlreg.files.images import Image, from_array, map_points
from carlreg.files.results import FILES, WARPED_LABELS
from carlreg.files.world_transform import WorldTransform
from carlreg.registration.options import PairInputs, RegisterOptions

sitk = pytest.importorskip("SimpleITK")
from test_images import BAD  # noqa: E402  (needs SimpleITK)
from test_product import blobs, oblique  # noqa: E402

Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair of images that differ by a known shift, their labels, and a model that does nothing."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    save(gradicon(3, 2, **SMALL), folder / "small.safetensors", metadata={"grid": "16 16 16", "licence": "yours"})
    save(gradicon(2, 2, **SMALL), folder / "plane.safetensors", metadata={"grid": "16 16"})
    affine = oblique((1.5, 1.2, 2.0), (10, -20, 30))
    fixed = blobs((20, 22, 18), affine)
    shifted = affine.copy()
    shifted[:3, 3] += (4, -3, 2)
    for name, matrix in (("fixed", affine), ("moving", shifted)):
        images.write(Image(fixed.data, matrix), folder / f"{name}.nii.gz")
        images.write(Image((fixed.data > 300).astype(np.uint8), matrix), folder / f"{name}_seg.nii.gz")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        call.out = out  # type: ignore[attr-defined]
        return code, err

    return call


def pair(data: Path, out: Path | None = None, *more: object) -> list[object]:
    words: list[object] = ["register", "-f", data / "fixed.nii.gz", "-m", data / "moving.nii.gz"]
    words += ["--model", data / "small.safetensors", "--io-iterations", 0, *more]
    return words if out is None else [*words, "-o", out]


def refused(run: Run, words: list[object], message: str, code: int = 1) -> None:
    """Assert one line with this text on stderr, and this exit code."""
    found, err = run(*words)
    assert found == code, err
    assert message in err, err
    if code == 1:
        assert len(err.strip().splitlines()) == 1, err
        assert err.startswith("carl: ")


# ---- what works -----------------------------------------------------------------------------------------------------


def test_help_does_not_import_torch() -> None:
    script = "import sys; from carlreg.cli import main; code = main({0}); assert not code, code; {1}"
    check = "assert not {'torch', 'numpy', 'SimpleITK'} & set(sys.modules)"
    for words in (["--help"], ["register", "--help"], ["models", "--help"], ["--version"]):
        subprocess.run([sys.executable, "-c", script.format(words, check)], check=True, capture_output=True)


def test_the_list_of_commands_has_the_first_paragraph_of_each() -> None:
    """They are written twice, so that `carl --help` need not import every command."""
    for name, (_, text) in COMMANDS.items():
        if name != "models":
            (function,) = functions(name).values()
            assert " ".join((function.__doc__ or "").partition("\n\n")[0].split()) == text, name


def test_a_mistyped_command_is_recognised(run: Run) -> None:
    code, err = run("regster", "--fixed", "a.nii.gz")
    assert code == 2
    assert "No such command 'regster'. Did you mean 'register'?" in err


def test_help_and_import_are_quick(tmp_path: Path) -> None:
    """Seconds of a process, compiled as after an installation, beside those of Python itself: the best of three."""
    free = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment = {**free, "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def seconds(*words: str) -> float:
        def once() -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        return min(once() for _ in range(4))

    assert seconds("-c", "import carlreg") < 0.2
    assert seconds("-m", "carlreg", "--help") < 0.3
    loaded = "import sys; from carlreg.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    inside = {name.rpartition(".")[2] for name in done.stderr.split() if name.startswith("carlreg.cli.")}
    assert inside <= {"_shared", "_threads"}  # no command


def test_help_fits_a_terminal_of_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("carl", *COMMANDS):
        run(*([] if name == "carl" else [name]), "--help")
        assert all(len(line) <= 80 for line in run.out.splitlines())  # type: ignore[attr-defined]
    run("register", "--help")
    options = [one.name.replace("_", "-") for kind in (PairInputs, RegisterOptions) for one in fields(kind)]
    assert all(f"--{name}" in run.out.replace(",", "").split() for name in options)  # type: ignore[attr-defined]
    run("train", "--help")
    for heading in ("Network", "Schedule", "Augmentation", "Validation", "Execution"):
        assert f"\n{heading}:\n" in run.out  # type: ignore[attr-defined]


def test_register_writes_a_folder_that_other_tools_understand(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "new" / "out"
    segs = ["--fixed-seg", data / "fixed_seg.nii.gz", "--moving-seg", data / "moving_seg.nii.gz"]
    code, err = run(*pair(data, out, *segs))
    assert code == 0
    assert "after" in err
    assert sorted(os.listdir(out)) == sorted([*FILES, WARPED_LABELS, "report.html"])
    assert "<th>label 1</th><td data-value=" in (out / "report.html").read_text(encoding="utf-8")
    assert os.listdir(out.parent) == ["out"]
    assert run(*pair(data, tmp_path / "bare", "--no-html"))[0] == 0
    assert sorted(os.listdir(tmp_path / "bare")) == sorted(FILES)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["metrics"]["dice_after"] == 1 > report["metrics"]["dice_before"] > 0
    assert report["dice"]["after"] == {"1": 1.0}
    entry = report["inputs"]["fixed"]
    assert entry["path"] == str(data / "fixed.nii.gz")
    wanted = subprocess.run(
        ["sha256sum", entry["path"]], capture_output=True, text=True, encoding="utf-8"
    ).stdout.split()[0]
    assert entry["sha256"] == wanted
    assert report["model"]["licence"] == "yours"
    assert {"total", "network", "reading"} <= report["seconds"].keys()
    assert report["peak_memory_gb"]["process"] > 0
    # By another tool, with the right side left: the header's shift is found again.
    fixed, moving = (sitk.ReadImage(str(data / f"{side}.nii.gz")) for side in ("fixed", "moving"))
    theirs = sitk.Resample(moving, fixed, sitk.ReadTransform(str(out / "transform.h5")), sitk.sitkLinear, 0.0)
    ours = sitk.GetArrayFromImage(sitk.ReadImage(str(out / "warped.nii.gz"))).astype(int)
    # truncation against rounding
    assert np.abs(sitk.GetArrayFromImage(theirs).astype(int) - ours).max() <= 1
    assert np.abs(ours - sitk.GetArrayFromImage(fixed)).max() <= 1


def test_a_result_that_the_optimisation_keeps_is_named(tmp_path: Path, run: Run) -> None:
    """In small crops, here with half of the network's voxels a side, the loss must fall by 40 %. Between two
    images of noise it does not, between shifted ones it does."""
    torch.manual_seed(0)
    save(gradicon(3, 2, **SMALL), tmp_path / "small.safetensors", metadata={"grid": "24 24 24"})
    noise = np.random.default_rng(0).random((2, 12, 12, 12), dtype=np.float32)
    words: list[object] = ["register", "--model", tmp_path / "small.safetensors"]
    for name, data in zip(("fixed", "moving"), noise, strict=True):
        images.write(Image(data, np.eye(4)), tmp_path / f"{name}.nii.gz")
        words += [f"--{name}", tmp_path / f"{name}.nii.gz"]
    code, err = run(*words, "--io-iterations", 1, "--out", tmp_path / "noise")
    assert code == 0
    report = json.loads((tmp_path / "noise" / "report.json").read_text(encoding="utf-8"))
    assert report["io_kept"].startswith("the optimisation kept the network's result: the loss fell by ")
    assert report["io_kept"].endswith(" %, less than the 40 % needed")
    assert report["io_kept"] in err
    assert "<td>the optimisation kept the network" in (tmp_path / "noise" / "report.html").read_text("utf-8")
    scan = blobs((12, 12, 12), np.eye(4))
    for name, data in (("fixed", scan.data), ("moving", np.roll(scan.data, 1, axis=0))):
        images.write(Image(data, np.eye(4)), tmp_path / f"{name}.nii.gz", overwrite=True)
    code, err = run(*words, "--io-iterations", 8, "--no-html", "--out", tmp_path / "shifted")
    assert code == 0
    assert "the optimisation kept" not in err


def test_options_as_other_tools_spell_them(data: Path, tmp_path: Path, run: Run) -> None:
    words = pair(data, None, "--transform_out", tmp_path / "t.hdf5", "--warped_moving_out", tmp_path / "w.nii.gz")
    words[words.index("--io-iterations") : words.index("--io-iterations") + 2] = ["--io_iterations=None"]
    code, err = run(*words, "--io_sim", "lncc2", "--quiet")
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path)) == ["t.hdf5", "w.nii.gz"]
    assert sitk.ReadTransform(str(tmp_path / "t.hdf5")).GetDimension() == 3


@pytest.mark.parametrize("kind", ["rigid", "affine"])
def test_linear_registrations_are_affine_files(data: Path, tmp_path: Path, run: Run, kind: str) -> None:
    code, _ = run(*pair(data, tmp_path / "out", "--transform", kind))
    assert code == 0
    for name in ("transform.h5", "inverse_transform.h5"):
        found = sitk.ReadTransform(str(tmp_path / "out" / name))
        assert found.GetName() == "AffineTransform"
    forward = transform_files.read(tmp_path / "out" / "transform.h5")
    assert np.abs(forward([[1.0, 2.0, 3.0]]) - [[5, -1, 5]]).max() < 1e-3  # the header's shift


def test_warp_and_warp_points_agree_in_direction(data: Path, tmp_path: Path, run: Run) -> None:
    """A blob of the moving image is warped to where its centre is mapped as a point of the moving image."""
    out = tmp_path / "out"
    run(*pair(data, out))
    moving = images.read(data / "moving.nii.gz")
    spot = np.zeros(moving.shape, np.uint8)
    spot[9:12, 10:13, 8:11] = 7
    images.write(Image(spot, moving.affine), tmp_path / "spot.nii.gz")
    centre = map_points(moving.affine, [[10, 11, 9]])[0]
    (tmp_path / "spot.csv").write_text("x,y,z,label\n" + ",".join(map(str, centre)) + ",spot\n")
    code, err = run("warp", "-i", tmp_path / "spot.nii.gz", "-t", out, "-o", tmp_path / "seen.nii.gz", "--labels")
    assert (code, err) == (0, "")
    words = ["warp-points", "-p", tmp_path / "spot.csv", "-t", out, "-o", tmp_path / "seen.csv"]
    assert run(*words, "--from", "moving") == (0, "")
    seen = images.read(tmp_path / "seen.nii.gz")
    assert set(np.unique(seen.data)) == {0, 7}
    where = map_points(seen.affine, np.argwhere(seen.data == 7)).mean(axis=0)
    rows = list(csv.DictReader((tmp_path / "seen.csv").open()))
    point = np.array([float(rows[0][axis]) for axis in "xyz"])
    assert rows[0]["label"] == "spot"
    assert np.abs(point - where).max() < 0.1
    assert np.abs(point - (centre - [4, -3, 2])).max() < 1e-2
    # and back again, by the other direction and by a single file
    back = ["warp-points", "-p", tmp_path / "seen.csv", "-t", out / "transform.h5", "--from", "fixed"]
    assert run(*back, "-o", tmp_path / "back.csv")[0] == 0
    rows = list(csv.DictReader((tmp_path / "back.csv").open()))
    assert np.abs(np.array([float(rows[0][axis]) for axis in "xyz"]) - centre).max() < 1e-3
    # the inverse brings fixed labels to the moving image
    code, err = run("warp", "-i", tmp_path / "seen.nii.gz", "-t", out, "--inverse", "--labels", "-r",
                    data / "moving.nii.gz", "-o", tmp_path / "again.nii.gz")  # fmt: skip
    assert code == 0, err
    assert (images.read(tmp_path / "again.nii.gz").data == spot).mean() > 0.99


def test_jacobian_of_a_scaling(data: Path, tmp_path: Path, run: Run) -> None:
    transform_files.write(WorldTransform.linear(np.diag([1.1, 0.9, 1.2, 1])), tmp_path / "t.tfm")
    code, _ = run("jacobian", "-t", tmp_path / "t.tfm", "-r", data / "fixed.nii.gz", "-o", tmp_path / "j.nii.gz")
    assert code == 0
    assert "folds 0.0000 %" in run.out  # type: ignore[attr-defined]
    assert np.abs(images.read(tmp_path / "j.nii.gz").data - 1.1 * 0.9 * 1.2).max() < 1e-4
    refused(run, ["jacobian", "-t", tmp_path / "t.tfm", "-o", tmp_path / "k.nii.gz"], "give an image with --reference")


def test_convert_there_and_back(data: Path, tmp_path: Path, run: Run) -> None:
    fixed = images.read(data / "fixed.nii.gz")
    rng = np.random.default_rng(0)
    bend = rng.normal(size=(*fixed.shape, 3)).astype(np.float32)
    bent = WorldTransform(np.eye(4), bend, fixed.index_to_world())
    transform_files.write(bent, tmp_path / "t.h5")
    reference = ["-r", data / "fixed.nii.gz"]
    points = map_points(fixed.affine, rng.uniform(1, 15, (50, 3)))
    for name in ("t.tfm", "warp.nii.gz", "disp_0001_0002.nii.gz"):
        assert run("convert", tmp_path / "t.h5", tmp_path / name, *reference) == (0, "")
        assert run("convert", tmp_path / name, tmp_path / f"{name}.h5", *reference) == (0, "")
        assert np.abs(transform_files.read(tmp_path / f"{name}.h5")(points) - bent(points)).max() < 1e-3, name
    refused(run, ["convert", tmp_path / "t.h5", tmp_path / "a.mat"], "can hold an affine map only")
    assert run("convert", tmp_path / "t.h5", tmp_path / "a.mat", "--part", "affine") == (0, "")
    assert np.allclose(transform_files.read(tmp_path / "a.mat")(points), points)
    assert run("convert", data / "fixed.nii.gz", tmp_path / "fixed.nrrd") == (0, "")
    assert np.array_equal(images.read(tmp_path / "fixed.nrrd").data, fixed.data)


def test_convert_refuses_options_of_the_other_kind(data: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "result").mkdir()
    for path in ("t.h5", "result/transform.h5"):
        transform_files.write(WorldTransform.linear(np.eye(4)), tmp_path / path)
    image, out = data / "fixed.nii.gz", tmp_path / "out.nii.gz"
    for name, value in (("reference", image), ("moving", image), ("part", "affine")):
        refused(run, ["convert", image, out, f"--{name}", value], f"--{name} is for transforms")
    for name, value in (("frame", 0), ("channel", 1), ("nan", 0), ("series", 1)):
        for source in ("t.h5", "result"):
            refused(run, ["convert", tmp_path / source, out, f"--{name}", value], f"--{name} is for images")
    assert not out.exists()
    refused(run, ["convert", tmp_path / "missing.nii.gz", out, "-r", image], "does not exist")


def test_learn2reg_files_are_read_as_its_evaluation_does(data: Path, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    fixed = images.read(data / "fixed.nii.gz")
    shift = map_points(fixed.affine, [[2, -1, 3]]) - map_points(fixed.affine, [[0, 0, 0]])
    matrix = np.eye(4)
    matrix[:3, 3] = shift[0]
    transform_files.write_learn2reg(WorldTransform.linear(matrix), fixed, fixed, tmp_path / "disp_0001_0002.nii.gz")
    field = nibabel.load(tmp_path / "disp_0001_0002.nii.gz").get_fdata()
    assert field.shape == (*fixed.shape, 3)
    assert np.abs(field - [2, -1, 3]).max() < 1e-4


def test_info_names_everything(data: Path, tmp_path: Path, run: Run) -> None:
    run(*pair(data, tmp_path / "out", "--transform", "affine", "--ants-warp"))
    for path, kind in (
        (data / "fixed.nii.gz", "3-D image"),
        (data / "small.safetensors", "model"),
        (tmp_path / "out", "folder of `carl register`"),
        (tmp_path / "out" / "transform.h5", "3-D transform from fixed to moving"),
        (tmp_path / "out" / "warp.nii.gz", "3-D transform from fixed to moving"),
    ):
        assert run("info", path, "--json")[0] == 0
        assert json.loads(run.out)["kind"].startswith(kind)  # type: ignore[attr-defined]
        assert run("info", path)[0] == 0
    images.write(from_array(np.eye(9, dtype=np.uint8)), tmp_path / "eye.nii.gz")
    assert run("info", tmp_path / "eye.nii.gz")[0] == 0
    refused(run, ["info", tmp_path / "nothing"], "does not exist")


def test_models_are_listed_verified_and_imported(data: Path, tmp_path: Path, run: Run) -> None:
    assert run("models", "list")[0] == 0
    listed = [line.split("\t") for line in run.out.splitlines()]  # type: ignore[attr-defined]
    assert [words[0] for words in listed] == ["carl-base", "carl-2d", "carl-rot", "auto"]
    assert all(words[1].startswith("for research use") for words in listed[:3])
    for name in ((), ("rot",)):
        assert run("models", "verify", *name)[0] == 0
        assert "complete, sha256" in run.out  # type: ignore[attr-defined]
    assert run("models", "licence")[0] == 0
    assert run("models", "show", data / "small.safetensors")[0] == 0
    assert "licence: yours" in run.out  # type: ignore[attr-defined]
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((data / "small.safetensors").read_bytes()[:-50])
    refused(run, ["models", "verify", damaged], "damaged")
    torch.save({"a": torch.zeros(3)}, tmp_path / "odd.trch")
    refused(run, ["models", "import", tmp_path / "odd.trch", tmp_path / "odd.safetensors"], "unknown parts")
    torch.save({"a": Path("x")}, tmp_path / "pickle.trch")
    words = ["models", "import", tmp_path / "pickle.trch", tmp_path / "odd.safetensors"]
    refused(run, words, "cannot be read as a file of weights alone")
    refused(run, [*words, "--grid", "big"], "expected two or three sides")
    assert not (tmp_path / "odd.safetensors").exists()


# ---- many pairs -----------------------------------------------------------------------------------------------------


def test_pairs_share_a_model_and_do_not_stop_one_another(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from carlreg.model import files

    loads = []
    monkeypatch.setattr("carlreg.model.loaded.load", lambda *a, load=files.load, **k: loads.append(a) or load(*a, **k))
    table = data / "pairs.csv"
    table.write_text(
        "name,fixed,moving,fixed_seg,moving_seg\n"
        "one,fixed.nii.gz,moving.nii.gz,fixed_seg.nii.gz,moving_seg.nii.gz\n"
        "two,fixed.nii.gz,absent.nii.gz,,\n"
        ",moving.nii.gz,fixed.nii.gz,,\n"
    )
    words = ["register", "--pairs", table, "-o", tmp_path, "--model", data / "small.safetensors"]
    words += ["--transform", "affine"]
    code, err = run(*words)
    assert code == 1
    assert "absent.nii.gz does not exist" in err
    assert "2 pairs done, 0 were done already, 1 failed: two" in err
    assert len(loads) == 1
    assert sorted(os.listdir(tmp_path)) == [
        ".rows",
        "cohort.json",
        "fixed_to_moving",
        "index.html",
        "one",
        "summary.csv",
    ]
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "summary.csv").open())}
    assert rows["one"]["dice_after"] == "1.0000"
    assert rows["two"]["status"] == "failed"
    before = (tmp_path / "one" / "report.json").stat().st_mtime_ns
    code, err = run(*words, "--quiet")
    assert code == 1
    assert "0 pairs done, 2 were done already, 1 failed" in err
    assert (tmp_path / "one" / "report.json").stat().st_mtime_ns == before
    table.write_text("name,fixed,moving\none,moving.nii.gz,fixed.nii.gz\n")
    code, err = run(*words)
    assert code == 1
    assert "holds a registration with another fixed image" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("fixed,moving\n", "has no rows"),
        ("a,b\n1,2\n", "has the columns a, b; expected 'fixed' and 'moving'"),
        ("fixed\n1\n", "has the columns fixed; expected 'fixed' and 'moving'"),
        ("fixed,moving\na.nii,\n", "line 2: moving is empty"),
        ("fixed,moving\na.nii,b.nii\na.nii,b.nii\n", "lines 2 and 3: both pairs are called 'b_to_a'"),
        ("fixed,moving,name\na.nii,b.nii,../x\n", "invalid name '../x': it must not contain a path separator"),
        ('fixed,moving\n"a.nii,b.nii\na.nii,b.nii\n', "is not valid CSV"),
        ("fixed,moving\na.nii,b.nii,c.nii\n", "line 2: 3 cells for 2 columns"),
    ],
)
def test_bad_tables(tmp_path: Path, run: Run, content: str, message: str) -> None:
    (tmp_path / "pairs.csv").write_text(content)
    refused(run, ["register", "--pairs", tmp_path / "pairs.csv", "-o", tmp_path / "out"], message)
    assert not (tmp_path / "out").exists()


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", BAD)
def test_bad_images(data: Path, tmp_path: Path, run: Run, case: str) -> None:
    name, make, _ = BAD[case]
    make(tmp_path / name)
    words = ["register", "-f", data / "fixed.nii.gz", "-m", tmp_path / name, "-o", tmp_path / "out"]
    refused(run, [*words, "--model", data / "small.safetensors"], str(tmp_path / name))
    assert not (tmp_path / "out").exists()


VOLUME = np.random.default_rng(0).random((12, 12, 12)).astype(np.float32)


def spoilt(value: float) -> np.ndarray:
    data = VOLUME.copy()
    data[3, 4, 5] = value
    return data


@pytest.mark.parametrize(
    ("voxels", "message"),
    [
        (np.full((12, 12, 12), 7, np.int16), "is constant: every voxel is 7"),
        (spoilt(np.nan), "1 NaN or infinite voxels"),
        (spoilt(np.inf), "1 NaN or infinite voxels"),
        (VOLUME[:, :, :3], "12 × 12 × 3 voxels; expected at least 4 along every axis"),
        (VOLUME[0], "the fixed image is 3-D and the moving one 2-D"),
    ],
)
def test_bad_voxels(data: Path, tmp_path: Path, run: Run, voxels: np.ndarray, message: str) -> None:
    images.write(from_array(voxels), tmp_path / "a.nrrd")
    words = ["register", "-f", data / "fixed.nii.gz", "-m", tmp_path / "a.nrrd", "-o", tmp_path / "out"]
    refused(run, [*words, "--model", data / "small.safetensors"], message)
    assert not (tmp_path / "out").exists()


def test_bad_masks_labels_and_landmarks(data: Path, tmp_path: Path, run: Run) -> None:
    fixed = images.read(data / "fixed.nii.gz")
    images.write(Image(np.zeros(fixed.shape, np.uint8), fixed.affine), tmp_path / "empty.nii.gz")
    images.write(from_array(np.ones((5, 6, 7), np.uint8)), tmp_path / "small.nii.gz")
    images.write(Image(np.ones(fixed.shape, np.uint8), np.eye(4)), tmp_path / "elsewhere.nii.gz")
    images.write(Image(fixed.data + 0.5, fixed.affine), tmp_path / "halves.nii.gz")
    (tmp_path / "one.csv").write_text("x,y,z\n1,2,3\n")
    (tmp_path / "two.csv").write_text("x,y,z\n1,2,3\n4,5,6\n")
    (tmp_path / "no.csv").write_text("x,y,z\n1,two,3\n")
    out = tmp_path / "out"
    for side in ("--fixed-mask", "--moving-mask"):
        refused(run, pair(data, out, side, tmp_path / "small.nii.gz"), "5 × 6 × 7 voxels but")
        refused(run, pair(data, out, side, tmp_path / "elsewhere.nii.gz"), "mm away from")
        refused(run, pair(data, out, side, tmp_path / "absent.nii.gz"), "absent.nii.gz does not exist")
    refused(run, pair(data, out, "--fixed-mask", tmp_path / "empty.nii.gz"), "empty.nii.gz is empty")
    refused(run, pair(data, out, "--moving-seg", tmp_path / "halves.nii.gz"), "not whole numbers")
    refused(run, pair(data, out, "--fixed-seg", data / "fixed_seg.nii.gz"), "without moving_seg")
    both = ["--fixed-landmarks", tmp_path / "one.csv", "--moving-landmarks"]
    refused(run, pair(data, out, *both, tmp_path / "two.csv"), "shapes (1, 3) and (2, 3); expected the same")
    refused(run, pair(data, out, *both, tmp_path / "no.csv"), "no.csv, line 2: '1,two,3' is not a point")
    assert not out.exists()


def test_bad_outputs(data: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("")
    refused(run, pair(data, tmp_path / "file"), "is a file; expected a folder")
    refused(run, pair(data, tmp_path / "file" / "below"), "cannot be written")
    out = tmp_path / "out"
    assert run(*pair(data, out))[0] == 0
    before = {name: (out / name).read_bytes() for name in FILES}
    refused(run, pair(data, out), "already holds report.json")
    assert {name: (out / name).read_bytes() for name in FILES} == before
    assert run(*pair(data, out, "--overwrite"))[0] == 0
    for flag, name, message in (
        ("--transform-out", "t.mat", "unknown extension"),
        ("--transform-out", "absent/t.h5", "does not exist; create it first"),
        ("--warped-moving-out", "w.doc", "unknown extension"),
        ("--warped-moving-out", "out/warped.nii.gz", "exists already; choose another name, or give --overwrite"),
    ):
        refused(run, pair(data, None, flag, tmp_path / name), message)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_unwritable_output(data: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    refused(run, pair(data, tmp_path / "closed" / "out"), "no permission")


def test_an_unwritable_folder_is_refused_before_the_network_runs(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    monkeypatch.setattr("carlreg.registration.api.register", lambda **_: pytest.fail("the network ran"))
    refused(run, pair(data, tmp_path / "out"), "no permission")


def test_bad_models_devices_and_guesses(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    base = ["register", "-f", data / "fixed.nii.gz", "-m", data / "moving.nii.gz", "-o", out]
    refused(
        run,
        [*base, "--model", "magic"],
        "no model 'magic'; expected the path of a model file, or one of carl-2d, carl-base",
    )
    whole = (data / "small.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(run, [*base, "--model", tmp_path / "cut.safetensors"], "is not a model file, or it is damaged")
    (tmp_path / "text.safetensors").write_text("hello")
    refused(run, [*base, "--model", tmp_path / "text.safetensors"], "is not a model file, or it is damaged")
    refused(run, [*base, "--model", data / "plane.safetensors"], "is 3-D but the model is for 2-D images")
    refused(run, pair(data, out, "--device", "gpu"), "unknown device 'gpu'")
    refused(run, pair(data, out, "--initial-transform", tmp_path / "no.h5"), "no.h5 does not exist")
    far = np.eye(4)
    far[:3, 3] = 1e4
    transform_files.write(WorldTransform.linear(far), tmp_path / "far.tfm")
    refused(run, pair(data, out, "--initial-transform", tmp_path / "far.tfm"), "maps the fixed image outside")
    refused(run, pair(data, out, "--regularity", -1), "regularity is -1.0; expected")
    assert not out.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["register", "-f", "a.nii"],
        ["register", "-f", "a.nii", "-m", "b.nii"],
        ["register", "-f", "a.nii", "-m", "b.nii", "-o", "out", "--io-iterations", "many"],
        ["register", "-f", "a.nii", "-m", "b.nii", "-o", "out", "--io-sim", "ncc"],
        ["register", "-f", "a.nii", "-m", "b.nii", "-o", "out", "--transform", "bent"],
        ["register", "-f", "a.nii", "-m", "b.nii", "-o", "out", "--quiet", "--verbose"],
        ["register", "--pairs", "pairs.csv"],
        ["register", "--pairs", "pairs.csv", "-o", "out", "-f", "a.nii"],
        ["register", "--magic"],
        ["magic"],
        ["warp", "-i", "a.nii"],
        ["warp-points", "-p", "a.csv", "-t", "t.h5", "-o", "b.csv", "--from", "nowhere"],
    ],
)
def test_wrong_usage_is_exit_code_2(
    words: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, err = run(*words)
    assert code == 2
    assert err.strip()
    assert os.listdir(tmp_path) == []


# ---- stopped in the middle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_optimising(data: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    words = pair(data, tmp_path / "out" / "deep", "--verbose")
    words[words.index("--io-iterations") + 1] = 10**6
    command = [sys.executable, "-m", "carlreg", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "optimisation" in line:
                break
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(30) == code
    assert rest.strip().splitlines()[-1] == "carl: stopped; no unfinished file was left"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    "where",
    [
        "files.images.write",
        "files.transform_files.write",
        "files.transform_files.write_warp",
        "registration.result.write_atomically",
    ],
)
def test_stopped_while_writing(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, where: str, exists: bool
) -> None:
    out = tmp_path / "out"
    if exists:
        out.mkdir()
        (out / "mine.txt").write_text("stays")

    def stop(*arguments: object, **_: object) -> None:
        Path(str(arguments[-1] if where != "registration.result.write_atomically" else arguments[0])).write_bytes(
            b"half"
        )
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(f"carlreg.{where}", stop)
    assert run(*pair(data, out, "--ants-warp"))[0] == 143
    assert os.listdir(tmp_path) == (["out"] if exists else [])
    if exists:
        assert os.listdir(out) == ["mine.txt"]
