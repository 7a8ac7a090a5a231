"""`register` on pairs that are not what they should be, and what it reports about its results.

No test here needs `conftest.py` or a module path, so that the file also runs against earlier versions.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from carlreg import DisplacementField, Registration, carl, gradicon, optimize_fields, register, save
from carlreg.cli import main
from carlreg.demo import make_pair

sitk = pytest.importorskip("SimpleITK")
SMALL = {"unet_down": (4, 8, 8, 8, 8), "unet_up": (8, 8, 8, 8, 8)}


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A network whose result is the identity."""
    torch.manual_seed(0)
    save(gradicon(3, 2, **SMALL), tmp_path / "small.safetensors", metadata={"grid": "24 24 24"})
    return tmp_path / "small.safetensors"


def ball(shape: tuple[int, ...], centre: tuple[float, ...], radius: float) -> np.ndarray:
    """1 inside, 0 outside, smooth over two voxels."""
    index = np.stack(np.indices(shape), axis=-1)
    return np.clip((radius - np.linalg.norm(index - np.array(centre), axis=-1)) / 2 + 0.5, 0, 1)


def scan(data: np.ndarray, spacing: float = 1.0) -> Any:
    image = sitk.GetImageFromArray(np.ascontiguousarray(data.T))
    image.SetSpacing([spacing] * data.ndim)
    return image


def textured(seed: int = 0, shape: tuple[int, ...] = (28, 28, 28)) -> np.ndarray:
    """A body of smooth texture on a background of 0."""
    noise = np.random.default_rng(seed).random(shape)
    for axis in range(len(shape)):
        noise = sum(np.roll(noise, shift, axis) for shift in range(-2, 3)) / 5
    body = ball(shape, tuple(n / 2 for n in shape), 0.4 * min(shape))
    return np.rint(1000 * body * noise).astype(np.int16)


# ---- intensities ----------------------------------------------------------------------------------------------------


def ct(shape: tuple[int, ...] = (40, 40, 40)) -> np.ndarray:
    """Air, a body of fat and muscle, and an organ, in Hounsfield units with noise."""
    middle = tuple(n / 2 for n in shape)
    noise = np.random.default_rng(0).normal(0, 15, shape)
    values = -1000 + 900 * ball(shape, middle, 19) + 150 * ball(shape, middle, 16) + 80 * ball(shape, (22, 18, 20), 6)
    return np.rint(values + noise).astype(np.int16)


def intensities(result: Registration) -> list[str]:
    return [result.report()["inputs"][side]["intensities"] for side in ("fixed", "moving")]


def test_a_ct_scan_and_a_crop_of_it_without_air_have_one_scale(model_file: Path) -> None:
    whole = ct()
    crop = whole[10:31, 10:31, 10:31]  # without air, but with fat
    for fixed, moving in ((whole, crop), (crop, whole)):
        result = register(fixed=scan(fixed), moving=scan(moving), model=model_file, io_iterations=0, device="cpu")
        assert [" HU " in note for note in intensities(result)] == [True, True]
        assert any("looks like CT" in text for text in result.warnings)
    both = register(fixed=scan(whole), moving=scan(whole[:, :, 3:]), model=model_file, io_iterations=0, device="cpu")
    assert [" HU " in note for note in intensities(both)] == [True, True]
    assert not any("CT" in text for text in both.warnings)


def test_a_pair_of_ct_and_mr_is_reported(model_file: Path) -> None:
    """An MR image is not scaled as CT, because it has a background and no Hounsfield units; one without a background
    of equal values, 8-bit or resampled by splines, has hardly any value below 0."""
    small = np.clip(textured() // 2, 0, 255).astype(np.uint8)
    noisy = np.clip(np.abs(np.random.default_rng(0).normal(0, 9, small.shape)) + small, 0, 255)
    ringing = noisy - 25.0 * (np.random.default_rng(1).random(small.shape) < 0.002)
    for mr in (textured(), small, noisy.astype(np.uint8), ringing.astype(np.float32)):
        result = register(fixed=scan(ct()), moving=scan(mr), model=model_file, io_iterations=0, device="cpu")
        assert [" HU " in note for note in intensities(result)] == [True, False]
        assert any("looks like CT" in text and "percentiles" in text for text in result.warnings)


# ---- inputs that do not belong together -----------------------------------------------------------------------------


def test_labels_must_lie_on_the_grid_of_their_image(model_file: Path, tmp_path: Path, capfd: Any) -> None:
    image, labels = textured(), (textured() > 300).astype(np.uint8)
    shifted = scan(labels)
    shifted.SetOrigin((0, 0, 40))
    wrong = {"larger": scan(np.pad(labels, 3)), "elsewhere": shifted}
    for name, data in {"image": scan(image), "labels": scan(labels), **wrong}.items():
        sitk.WriteImage(data, str(tmp_path / f"{name}.nii.gz"))

    def run(out: str, fixed_seg: str, moving_seg: str) -> int:
        words = ["--fixed", "image", "--moving", "image", "--fixed-seg", fixed_seg, "--moving-seg", moving_seg]
        files = [word if word.startswith("--") else str(tmp_path / f"{word}.nii.gz") for word in words]
        rest = ["--model", str(model_file), "--io-iterations", "0", "--no-html", "--out", str(tmp_path / out)]
        return main(["register", *files, *rest, "--device", "cpu"])

    assert run("right", "labels", "labels") == 0
    for number, (one, other) in enumerate((("labels", "larger"), ("elsewhere", "labels"), ("larger", "larger"))):
        assert run(f"wrong{number}", one, other) == 1
        assert "a label map on the image's own grid" in capfd.readouterr().err
        assert not (tmp_path / f"wrong{number}").exists()


def test_probable_mistakes_are_reported(model_file: Path, tmp_path: Path) -> None:
    first, second = textured(0), textured(1)
    labels = np.zeros(first.shape, np.uint8)
    labels[5:12, 8:20, 8:20], labels[15:22, 5:20, 6:18] = 1, 2
    path = tmp_path / "scan.nii.gz"
    sitk.WriteImage(scan(first), str(path))

    def warnings(fixed: Any, moving: Any, **more: Any) -> str:
        options = {"model": model_file, "io_iterations": 0, "device": "cpu"}
        return "\n".join(register(fixed=fixed, moving=moving, **options, **more).warnings)

    assert "the moving image looks like a label map" in warnings(scan(first), scan(labels))
    assert "the fixed and the moving image are the same" in warnings(path, path)
    assert "is a header not in mm?" in warnings(scan(first), scan(second, 0.001))
    segs = {"fixed_seg": scan(labels), "moving_seg": scan(labels)}
    assert "the fixed and the moving labels are the same" in warnings(scan(first), scan(second), **segs)
    normal = warnings(scan(first), scan(second), fixed_seg=scan(labels), moving_seg=scan(labels[::-1]))
    assert not any(word in normal for word in ("label", "same", "mm"))


# ---- what is reported of the result ---------------------------------------------------------------------------------


def test_a_rigid_result_is_consistent_with_its_exact_inverse() -> None:
    torch.manual_seed(0)
    network = carl(3, 2, width=8, **SMALL)
    options = {"model": network, "io_iterations": 0, "allow_identity": False, "device": "cpu"}
    for kind in ("rigid", "affine"):
        result = register(fixed=scan(textured(0)), moving=scan(textured(1)), transform=kind, **options)
        points = np.random.default_rng(0).uniform(0, 28, (100, 3))
        assert np.allclose(result.inverse(result.transform(points)), points)
        assert result.metrics["inverse_consistency_mm"] == pytest.approx(0, abs=1e-6)


def test_folds_are_those_of_the_resulting_map(tmp_path: Path) -> None:
    """At the inner voxels of the fixed image, by central differences: the definition of `carl jacobian`."""
    torch.manual_seed(0)
    network = carl(3, 2, width=8, **SMALL)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save(network, tmp_path / "folding.safetensors", metadata={"grid": "16 16 16"})
    fixed, moving = textured(0, (30, 20, 26)), textured(1, (30, 20, 26))
    options = {"model": tmp_path / "folding.safetensors", "io_iterations": 0, "allow_identity": False, "device": "cpu"}
    result = register(fixed=scan(fixed), moving=scan(moving), **options)
    index = np.stack(np.indices(fixed.shape), axis=-1).astype(float)
    jacobian = np.stack(np.gradient(result.transform(index), axis=(0, 1, 2)), axis=-1)
    expected = 100 * np.mean(np.linalg.det(jacobian)[1:-1, 1:-1, 1:-1] < 0)
    assert 1 < expected < 99
    assert result.metrics["folds_percent"] == pytest.approx(expected, abs=0.02)


# ---- what must not change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_callers_network_is_left_as_it_was(training: bool) -> None:
    torch.manual_seed(0)
    network = carl(2, 2, width=8, **SMALL).train(training)
    next(network.children()).eval()
    flags = [module.training for module in network.modules()]
    fixed, moving = np.random.default_rng(0).random((2, 40, 36)).astype(np.float32)
    for steps in ({"io_iterations": 0}, {"io_iterations": 1, "over": "weights"}):
        result = register(fixed=fixed, moving=moving, model=network, device="cpu", **steps)
        assert np.isfinite(result.warped.data).all()
        assert [module.training for module in network.modules()] == flags


def smooth() -> np.ndarray:
    """A faint gradual change beside a bright ball: correlation gains by moving such images apart."""
    x, y, z = np.indices((40, 40, 40)) / 39
    faint = 15 * np.sin(3 * x + 2 * y) * np.cos(2 * z + y)
    return (faint + 1000 * ball((40, 40, 40), (33, 33, 33), 6)).astype(np.float32)


def balls() -> np.ndarray:
    """Flat inside and outside, where coarse grids find something to gain."""
    return sum(300 * ball((40, 40, 40), centre, 5) for centre in ((12, 14, 16), (25, 20, 20), (18, 28, 25)))


@pytest.mark.parametrize("data", [smooth(), balls()], ids=["smooth", "balls"])
def test_identical_images_give_the_identity(data: np.ndarray, tmp_path: Path) -> None:
    save(gradicon(3, 2, **SMALL), tmp_path / "small.safetensors", metadata={"grid": "40 40 40"})
    options = {"model": tmp_path / "small.safetensors", "over": "fields", "io_iterations": 10, "device": "cpu"}
    result = register(fixed=scan(data, 2.0), moving=scan(data, 2.0), **options)
    points = 2.0 * np.stack(np.indices(data.shape), axis=-1)
    assert np.linalg.norm(result.transform(points) - points, axis=-1).max() <= 0.01  # millimetres


def test_a_loss_that_fails_on_a_coarse_grid_does_not_end_the_optimisation() -> None:
    """Steps on the finest grid are all taken, so nothing ended early."""
    torch.manual_seed(0)
    moving, fixed = torch.rand(2, 1, 1, 32, 32)
    still = torch.zeros(1, 2, 32, 32)

    def breaks_on_coarse(
        warped: torch.Tensor, other: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return ((warped - other) ** 2).mean() * (torch.nan if warped.shape[-1] < 32 and calls > 4 else 1.0)

    calls = 0
    start = DisplacementField(still)
    result = optimize_fields(start, start, moving, fixed, steps=4, levels=2, similarity=breaks_on_coarse)
    assert len(result.losses) == 5
    assert result.stopped is None


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_a_mask_changes_the_result(model_file: Path) -> None:
    """Two structures moved apart by two voxels each. With a mask of the first one, the second has no say."""
    shape, centres = (40, 32, 32), ((11, 16, 16), (29, 16, 16))
    fixed, moving = (
        500 * ball(shape, (11, 16 + shift, 16), 5) + 500 * ball(shape, (29, 16 - shift, 16), 5) for shift in (0, 2)
    )
    mask = np.zeros(shape, np.uint8)
    mask[3:19, 6:26, 6:26] = 1
    options = {"model": model_file, "over": "fields", "io_sim": "ssd", "regularity": 0.01, "device": "cpu"}

    def moves(**masks: Any) -> list[float]:
        result = register(fixed=scan(fixed), moving=scan(moving), **options, **masks)
        return [float(result.transform(np.array([centre], float))[0, 1] - centre[1]) for centre in centres]

    first, second = moves()
    assert first > 1
    assert second < -1
    first, second = moves(fixed_mask=scan(mask), moving_mask=scan(mask))
    assert first > 1
    assert second > -0.5


@pytest.mark.parametrize("slices", [slice(37, 38), slice(21, 23)])
def test_thin_masks_are_kept_on_every_grid(model_file: Path, slices: slice) -> None:
    """A region of interest of one or two slices, on a grid of half as many and on coarser ones."""
    shape = (48, 48, 48)
    fixed, moving = (1000 * ball(shape, (24, 24, middle), 16) for middle in (24, 26))
    mask = np.zeros(shape, np.uint8)
    mask[6:42, 6:42, slices] = 1
    masks = {"fixed_mask": scan(mask), "moving_mask": scan(mask)}
    options: dict[str, Any] = {"model": model_file, "over": "fields", "device": "cpu", "confidence": "full"}
    for name in ("lncc", "ssd"):
        result = register(fixed=scan(fixed), moving=scan(moving), io_sim=name, **options, **masks)
        assert math.isfinite(result.record.losses[-1]["total"])


# ---- the shipped model ----------------------------------------------------------------------------------------------


def test_the_shipped_model_registers_two_synthetic_patients() -> None:
    """Fields of view that differ by a third of the image, so that hardly any labels overlap before."""
    pair = make_pair(seed=0, size=48)
    labels = {"fixed_seg": pair.fixed_labels, "moving_seg": pair.moving_labels}
    result = register(fixed=pair.fixed, moving=pair.moving, **labels, io_iterations=0, confidence="off", device="cpu")
    assert result.metrics["dice_before"] < 0.1
    assert result.metrics["dice_after"] > 0.5
    assert result.metrics["folds_percent"] < 0.1


def test_a_beating_heart_in_a_still_body_is_worth_registering() -> None:
    """A map that is right about the heart and 0.4 voxels off elsewhere: over the whole image, the loss prefers the
    unregistered images. A map that is wrong everywhere is worse than those by either measure."""
    from carlreg import DisplacementField, lncc, warp
    from carlreg.objective.losses import gaussian_blur
    from carlreg.registration.similarity import mismatch

    side, (big, small) = 96, (13.0, 8.0)
    body = gaussian_blur(torch.rand(1, 1, side, side, generator=torch.Generator().manual_seed(0)), 1.5)
    body = 0.3 + 2 * (body - body.mean()).abs()
    index = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).float() - (side - 1) / 2
    radius = index.norm(dim=0)
    fixed, moving = (torch.where(radius < r, 0.9, body) for r in (big, small))
    inward = (small / big - 1) * index * (1 - ((radius - big) / big).clamp(0, 1))
    still = torch.full_like(index, 0.4)
    right, wrong = (
        DisplacementField((field / (side - 1))[None]) for field in (inward + still, 6 * torch.randn(2, 1, 1) + still)
    )
    unmoved = float(lncc(moving, fixed))
    assert float(lncc(warp(moving, right, like=fixed), fixed)) > unmoved
    before, after = mismatch(moving, fixed, right)
    assert after < 0.8 * before
    assert mismatch(moving, fixed, wrong)[1] > 1.1 * before


@pytest.mark.parametrize("masked", [("fixed", "moving"), ("fixed",), ("moving",)])
@pytest.mark.parametrize("thickness", [24, 1])
def test_masks_restrict_where_contrasts_and_maps_are_judged(masked: tuple[str, ...], thickness: int) -> None:
    """A contrast that agrees inside the masks and is inverted outside, and a map that is right inside alone."""
    from carlreg.files.images import from_array
    from carlreg.geometry.transforms import Affine
    from carlreg.objective.losses import gaussian_blur
    from carlreg.preparation import Prepared, PreparedPair
    from carlreg.registration.options import RegisterOptions
    from carlreg.registration.similarity import compare, mismatch

    noise = gaussian_blur(torch.randn(1, 1, 40, 40, 40, generator=torch.Generator().manual_seed(0)), 2.0)
    fixed = 0.5 + 0.4 * (noise / noise.abs().max())  # inside a body
    inside = torch.zeros_like(fixed)
    inside[..., 4:34, 4:34, 8 : 8 + thickness] = 1
    moved = torch.where(inside > 0, fixed**2, 1 - fixed).roll(5, 2)
    masks = {"fixed": inside, "moving": inside.roll(5, 2)}
    shift = Affine(torch.tensor([[[1.0, 0, 0, 5 / 39], [0, 1, 0, 0], [0, 0, 1, 0]]]))
    about = from_array(fixed[0, 0].numpy())

    def prepared(side: str, image: torch.Tensor) -> Prepared:
        return Prepared(about, image, masks[side] if side in masked else None, "", about.shape, "whole")

    pair = PreparedPair(prepared("fixed", fixed), prepared("moving", moved))
    found = compare(RegisterOptions(), shift, pair)
    assert found.reason == "the contrasts agree (agreement 1.00, limit 0.7)"
    without = PreparedPair(*(Prepared(about, one.tensor, None, "", about.shape, "whole") for one in pair))
    assert compare(RegisterOptions(), shift, without).differs
    if thickness > 1:
        given = {f"{side}_mask": masks[side] for side in masked}
        before, after = mismatch(moved, fixed, shift, **given)
        assert after < 0.5 * before
        assert mismatch(moved, fixed, shift)[1] > 0.8 * mismatch(moved, fixed, shift)[0]


def test_the_similarity_follows_the_contrast_of_the_scans() -> None:
    """Local correlation where it has one sign, squared where it has both, and what the user asks for always."""
    from carlreg.files.images import from_array
    from carlreg.geometry.transforms import Affine, Identity, Transform
    from carlreg.objective.losses import gaussian_blur
    from carlreg.preparation import Prepared, PreparedPair
    from carlreg.registration.options import RegisterOptions
    from carlreg.registration.similarity import Comparison, agreement, compare

    noise = gaussian_blur(torch.randn(1, 1, 40, 40, 40, generator=torch.Generator().manual_seed(0)), 2.0)
    scan = 0.5 + 0.4 * (noise / noise.abs().max())  # inside a body
    folded = (scan - 0.5).abs() * 2 + 0.1  # as bright for dark as for bright
    assert agreement(scan, 0.8 * scan**2) > 0.95
    assert agreement(scan, 1 - scan) < -0.95
    assert abs(agreement(scan, folded)) < 0.5
    assert np.isnan(agreement(scan, torch.zeros_like(scan)))

    for slices in (4, 5, 7):  # windows are wider than that
        assert agreement(scan[..., :slices], 0.8 * scan[..., :slices] ** 2) > 0.95
        assert agreement(scan[..., :slices], 1 - scan[..., :slices]) < -0.95

    def decide(
        moving: torch.Tensor, phi: Transform | None = None, ct: tuple[bool, bool] = (False, False), **options: Any
    ) -> Comparison:
        image = from_array(scan[0, 0].numpy())
        images = zip((scan, moving), ct, strict=True)
        pair = PreparedPair(*(Prepared(image, t, None, "", image.shape, "whole", is_ct=is_ct) for t, is_ct in images))
        return compare(RegisterOptions(**options), Identity() if phi is None else phi, pair)

    def chosen(moving: torch.Tensor, **options: Any) -> tuple[object, str | None]:
        found = decide(moving, **options)
        return found.options.io_sim, found.reason

    def weight(moving: torch.Tensor, **options: Any) -> float | None:
        return decide(moving, **options).options.regularity

    assert chosen(scan**2) == ("lncc", "the contrasts agree (agreement 1.00, limit 0.7)")
    assert chosen(1 - scan)[0] == chosen(folded)[0] == "lncc"
    assert chosen(1 - scan, optimize="weights")[0] == chosen(folded, optimize="weights")[0] == "lncc2"
    assert "the contrasts differ (agreement -1.00, limit 0.7)" in str(chosen(1 - scan)[1])
    assert chosen(1 - scan, io_sim="mind") == ("mind", None)
    assert weight(1 - scan) == 3 > weight(1 - scan, regularity=1.0) == 1
    assert weight(scan**2) is None
    for other in (1 - scan, folded):  # what an intensity of the fixed scan becomes is found again
        pair, reason = decide(other).pair, decide(other).reason
        assert (pair.moving.tensor - pair.fixed.tensor).abs().mean() < 0.01
        assert str(reason).endswith("image was recoloured")
    assert str(chosen(folded)[1]).endswith(": the fixed image was recoloured")  # the moving one cannot tell
    assert decide(scan**2, io_sim="lncc").enough == math.inf > decide(folded).enough == decide(scan**2).enough
    assert chosen(torch.zeros_like(scan)) == ("lncc2", "the images hardly overlap")
    partly = torch.where(scan > 0.65, 1.3 - scan, scan)  # inverted where it is bright, and there is little of that
    assert agreement(partly, scan) > 0.7
    assert re.search(r"recolouring raises their correlation by 0\.[01].*: the fixed", str(chosen(partly)[1]))
    torn = Affine(torch.tensor([[[1.0, 0, 0, 0.3], [0, 1, 0, 0], [0, 0, 1, 0]]]))
    assert decide(scan, torn).reason == "the contrasts agree (agreement 1.00 before the network, limit 0.7)"
    assert decide(1 - scan, torn).differs
    assert decide(partly, ct=(True, True)).reason == "both scans are CTs"  # in the same units
    assert str(decide(scan**2, ct=(True, False)).reason).startswith("one scan is a CT, the other is not: the ")
