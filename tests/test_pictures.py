"""Pictures in colour, 4-D images, channels and NaN, as a user registers them."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from conftest import SMALL, Run
from PIL import Image as Picture

from carlreg import gradicon, register, save
from carlreg.files import images
from carlreg.files.images import Choice, Image, ImageError, from_array
from carlreg.files.results import ResultFolder
from carlreg.files.world_transform import WorldTransform, apply
from carlreg.model import loaded, shipped
from carlreg.show.viewer.scene import load_scene

SHIFT = (5, -3)
"""Columns and rows by which the moving picture is shifted."""


def discs(shift: tuple[int, int] = (0, 0)) -> np.ndarray:
    """A smooth picture (rows, columns, 3), one disc per channel."""
    rows, columns = np.mgrid[:72, :90]
    centres = ((30, 25, 12), (60, 40, 16), (35, 50, 9))
    away = [np.hypot(columns - x - shift[0], rows - y - shift[1]) - radius for x, y, radius in centres]
    return np.stack([255 / (1 + np.exp(one / 2)) for one in away], axis=-1).astype(np.uint8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    for dim in (2, 3):
        about = {"grid": " ".join(["32"] * dim)}
        save(gradicon(dim, 2, **SMALL), tmp_path / f"{dim}.safetensors", metadata=about)
    Picture.fromarray(discs()).save(tmp_path / "fixed.png")
    for ending in ("png", "jpg", "tif"):
        Picture.fromarray(discs(SHIFT)).save(tmp_path / f"moving.{ending}", quality=95)
    return tmp_path


def pair(data: Path, fixed: str, moving: str, *more: object, dim: int = 2) -> list[object]:
    model = ["--model", data / f"{dim}.safetensors"]
    return ["register", "-f", data / fixed, "-m", data / moving, "-o", data / "out", *model, *more]


# ---- colour ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["png", "jpg", "tif"])
def test_colour_in_colour_out(data: Path, run: Run, ending: str) -> None:
    code, err = run(*pair(data, "fixed.png", f"moving.{ending}"))
    assert code == 0, err
    warped = np.array(Picture.open(data / "out" / f"warped.{ending}")).astype(float)
    before, after = (np.abs(one - discs().astype(float)).mean() for one in (discs(SHIFT), warped))
    assert warped.shape == (72, 90, 3)
    assert after < before / 3  # optimised from where they lie; all three channels moved alike
    grey = images.read(data / "out" / "warped.nii.gz")
    assert grey.shape == (90, 72)
    assert '"shape":[90,72,1]' in (data / "out" / "report.html").read_text(encoding="utf-8")
    scene = load_scene(data / "out")
    assert not scene.notes
    assert np.array_equal(scene.images["moving"].data, images.read(data / f"moving.{ending}").data)


def test_luminance_is_that_of_pillow(data: Path) -> None:
    ours, theirs = images.read(data / "fixed.png"), Picture.open(data / "fixed.png").convert("L")
    assert np.abs(ours.data.T.astype(int) - np.array(theirs)).max() <= 1
    assert np.array_equal(ours.colours.swapaxes(0, 1), discs())
    blue = images.read(data / "fixed.png", Choice(channel=2))
    assert blue.colours is None
    assert np.array_equal(blue.data.T, discs()[..., 2])


def test_each_colour_is_warped_like_a_grey_image(data: Path) -> None:
    moving = images.read(data / "moving.png")
    matrix = np.array([[1, 0.1, 2.5], [-0.05, 0.9, -1.5], [0, 0, 1]])
    warped = apply(WorldTransform.linear(matrix), moving, moving)
    for channel in range(3):
        alone = apply(WorldTransform.linear(matrix), images.read(data / "moving.png", Choice(channel=channel)), moving)
        assert np.array_equal(warped.colours[..., channel], alone.data)


def test_warp_keeps_colours_and_transparency(data: Path, run: Run) -> None:
    assert run(*pair(data, "fixed.png", "moving.png", "--io-iterations", 0))[0] == 0
    Picture.fromarray(discs(SHIFT)).convert("RGBA").save(data / "clear.png")
    for name, mode in (("moving.png", "RGB"), ("clear.png", "RGBA")):
        code, err = run("warp", "-i", data / name, "-t", data / "out", "-o", data / f"warped-{name}")
        assert code == 0, err
        assert Picture.open(data / f"warped-{name}").mode == mode
    ours, theirs = (np.array(Picture.open(data / name)) for name in ("warped-moving.png", "out/warped.png"))
    assert np.array_equal(ours, theirs)


def test_pixel_sizes_are_read(tmp_path: Path) -> None:
    for ending in ("png", "jpg", "tif"):
        Picture.fromarray(discs()).save(tmp_path / f"a.{ending}")
        Picture.fromarray(discs()).save(tmp_path / f"b.{ending}", dpi=(254, 127))
        assert images.read(tmp_path / f"a.{ending}").spacing == (1, 1)
        assert np.allclose(images.read(tmp_path / f"b.{ending}").spacing, (0.1, 0.2), rtol=1e-3)


def test_a_mask_without_pixel_size_lies_on_its_picture(data: Path, run: Run) -> None:
    Picture.fromarray(discs()).save(data / "scanned.jpg", dpi=(300, 300))
    Picture.fromarray((discs()[..., 1] > 9).astype(np.uint8)).save(data / "mask.png")
    masked = ["--fixed-mask", data / "mask.png", "--fixed-seg", data / "mask.png", "--moving-seg", data / "mask.png"]
    code, err = run(*pair(data, "scanned.jpg", "moving.png", "--io-iterations", 0, *masked))
    assert code == 0, err
    code, err = run(*pair(data, "fixed.png", "moving.png", "--moving-seg", data / "fixed.png", "--overwrite"))
    assert (code, "is in colour; expected a label map" in err) == (1, True)


def test_the_dimension_chooses_the_default_model(data: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "2.safetensors").rename(data / "carl-2d.safetensors")
    (data / "3.safetensors").rename(data / "carl-base.safetensors")
    for module in (shipped, loaded):
        monkeypatch.setattr(module, "WEIGHTS", data)
    for words, name in (([], "carl-2d"), (["--model", "auto"], "carl-2d"), (["--model", "2d"], "carl-2d")):
        again = [*words, "--io-iterations", 0, "--overwrite"]
        code, err = run("register", "-f", data / "fixed.png", "-m", data / "moving.png", "-o", data / "out", *again)
        assert code == 0, err
        assert ResultFolder(data / "out").read_report().model["name"] == name
    (data / "pairs.csv").write_text("name,fixed,moving\na,fixed.png,moving.png\n")
    for status in ("1 pairs done, 0 were", "0 pairs done, 1 were"):
        code, err = run("register", "--pairs", data / "pairs.csv", "-o", data / "many", "--io-iterations", 0)
        assert (code, status in err) == (0, True), err
    base = ["--model", "base", "-o", data / "other"]
    code, err = run("register", "-f", data / "fixed.png", "-m", data / "moving.png", *base)
    assert (code, "is 2-D but the model is for 3-D images" in err) == (1, True)


# ---- frames, channels and NaN ---------------------------------------------------------------------------------------


def blob(shift: float = 0.0) -> np.ndarray:
    x, y, z = np.mgrid[:20, :18, :16]
    return (1000 * np.exp(-((x - 9 - shift) ** 2 + (y - 8) ** 2 + (z - 7) ** 2) / 20)).astype(np.float32)


@pytest.fixture
def odd(data: Path) -> Path:
    """A 4-D image, one with NaN, and one in colour."""
    affine = np.diag([2.0, 2.0, 3.0, 1.0])
    series = np.stack([blob(shift) for shift in (0, 1, 2)], axis=-1)
    nibabel.save(nibabel.Nifti1Image(series, affine), data / "series.nii.gz")
    holes = blob()
    holes[:2, 0, 0] = np.nan, np.inf
    nibabel.save(nibabel.Nifti1Image(holes, affine), data / "holes.nii.gz")
    rgb = np.zeros((20, 18, 16), [("R", "u1"), ("G", "u1"), ("B", "u1")])
    for number, name in enumerate("RGB"):
        rgb[name] = blob(number) / 4
    nibabel.save(nibabel.Nifti1Image(rgb, affine), data / "colour.nii.gz")
    images.write(from_array(blob(1)), data / "plain.mha")
    return data


@pytest.mark.parametrize(
    ("moving", "advice", "words"),
    [
        ("series.nii.gz", "--frame N, from 0 to 2", ["--frame", 1]),
        ("holes.nii.gz", "replace them by --nan 0", ["--nan", 0]),
        ("colour.nii.gz", "--channel N, from 0 to 2, or --channel luminance", ["--channel", 2]),
        ("colour.nii.gz", "--channel N", ["--channel", "luminance"]),
    ],
)
def test_what_a_refusal_advises_works(odd: Path, run: Run, moving: str, advice: str, words: list[object]) -> None:
    code, err = run(*pair(odd, "plain.mha", moving, "--io-iterations", 0, dim=3))
    assert (code, advice in err, len(err.splitlines())) == (1, True, 1), err
    code, err = run(*pair(odd, "plain.mha", moving, "--io-iterations", 0, *words, dim=3))
    assert code == 0, err
    assert not load_scene(odd / "out").notes  # the viewer takes the same part


def test_the_parts_are_those_of_nibabel(odd: Path) -> None:
    series = nibabel.load(odd / "series.nii.gz")
    for frame in range(3):
        for source in (odd / "series.nii.gz", series):
            taken = images.as_image(source, "series", Choice(frame=frame))
            assert np.array_equal(taken.data, series.dataobj[..., frame])
            assert np.allclose(taken.affine, np.diag([-2.0, -2.0, 3.0, 1.0]))
    green = images.read(odd / "colour.nii.gz", Choice(channel=1))
    assert np.array_equal(green.data, np.asarray(nibabel.load(odd / "colour.nii.gz").dataobj)["G"])
    filled = images.read(odd / "holes.nii.gz", Choice(nan=-7))
    assert filled.data[:3, 0, 0].tolist() == [-7, -7, blob()[2, 0, 0]]
    images.write(Image(blob(), np.eye(4)), odd / "a.nrrd")
    pages = [Picture.fromarray(discs((n, 0))) for n in range(3)]
    pages[0].save(odd / "pages.tif", save_all=True, append_images=pages[1:])
    assert np.array_equal(images.read(odd / "pages.tif", Choice(frame=2)).colours.swapaxes(0, 1), discs((2, 0)))


def test_other_commands_take_the_same_parts(odd: Path, run: Run) -> None:
    for name, words, wanted in (
        ("series.nii.gz", ["--frame", 2], Choice(frame=2)),
        ("colour.nii.gz", ["--channel", 1], Choice(channel=1)),
        ("holes.nii.gz", ["--nan", 3], Choice(nan=3)),
    ):
        code, err = run("convert", odd / name, odd / "part.nii.gz", *words, "--overwrite")
        assert code == 0, err
        assert np.array_equal(images.read(odd / "part.nii.gz").data, images.read(odd / name, wanted).data)
    assert run(*pair(odd, "plain.mha", "plain.mha", "--io-iterations", 0, dim=3))[0] == 0
    words = ["-i", odd / "series.nii.gz", "-t", odd / "out", "-o", odd / "warped.nii.gz"]
    assert "--frame N, from 0 to 2" in run("warp", *words)[1]
    assert run("warp", *words, "--frame", 1)[0] == 0


def test_complex_numbers_are_read_by_part(tmp_path: Path) -> None:
    values = (blob() + 2j * blob(1)).astype(np.complex64)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "a.nii")
    assert np.array_equal(images.read(tmp_path / "a.nii", Choice(channel=1)).data, values.imag)
    with pytest.raises(ImageError, match=r"--channel N, from 0 to 1$"):
        images.read(tmp_path / "a.nii", Choice(channel="luminance"))


def test_two_frames_of_one_file_in_python(odd: Path) -> None:
    model, path = odd / "3.safetensors", odd / "series.nii.gz"
    result = register(fixed=path, moving=path, model=model, frame=(0, 2), io_iterations=0, device="cpu")
    assert np.array_equal(result.fixed.data, blob(0))
    assert np.array_equal(result.moving.data, blob(2))
    series = np.stack([blob(0), blob(2)], axis=-1)
    other = register(fixed=series, moving=series, model=model, frame=(0, 1), io_iterations=0, device="cpu")
    assert np.array_equal(other.moving.data, result.moving.data)
    holes = np.where(blob() < 1, np.nan, blob())
    assert register(fixed=holes, moving=blob(), model=model, nan=0, io_iterations=0, device="cpu").fixed.data.min() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--frame", 3],
            "is 4-D (20 × 18 × 16 × 3); expected one image: choose a time point by --frame N, from 0 to 2",
        ),
        (["--frame", "x"], "frame is 'x'; expected a number from 0"),
        (["--frame", "0,1,2"], "expected one for both images, or one for each"),
        (["--channel", -1], "channel is '-1'; expected a number from 0 or 'luminance'"),
        (["--nan", "inf"], "nan is inf; expected a finite number"),
    ],
)
def test_wrong_choices(odd: Path, run: Run, words: list[object], message: str) -> None:
    code, err = run(*pair(odd, "series.nii.gz", "series.nii.gz", *words, dim=3))
    assert (code, message in err, len(err.splitlines())) == (1, True, 1), err


def test_a_picture_with_a_volume(odd: Path, run: Run) -> None:
    code, err = run(*pair(odd, "plain.mha", "moving.png", dim=3))
    assert (code, err) == (1, "carl: the fixed image is 3-D and the moving one 2-D; expected the same\n")
