"""`register` with a small, fast model: two images in, world-space results and files out."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from conftest import SMALL, randomize
from torch import Tensor

from carlreg import DisplacementField, Registration, RegistrationAlgorithm, Transform, carl, gradicon, register, save
from carlreg.files import transform_files, world_transform
from carlreg.files.images import Image, from_array, map_points
from carlreg.files.results import FILES
from carlreg.files.world_transform import ItkTransform, WorldTransform
from carlreg.model.algorithms import TwoStep
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.model.zoo import xi
from carlreg.objective.fields import FIELD_STEPS, Optimized, optimize_fields
from carlreg.objective.instance import WEIGHT_STEPS
from carlreg.objective.losses import SIMILARITIES, gaussian_blur
from carlreg.preparation import choose_grid, prepare_pair
from carlreg.registration.api import _invert
from carlreg.registration.attempt import attempt
from carlreg.registration.case import Case
from carlreg.registration.options import PairInputs, RegisterOptions, SimilarityName
from carlreg.registration.progress import Progress

sitk = pytest.importorskip("SimpleITK")
CPU = torch.device("cpu")


def oblique(spacing: tuple[float, ...], origin: tuple[float, ...]) -> np.ndarray:
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    closest = np.eye(3) + 0.2 * rotation
    direction = np.linalg.qr(closest)[0]
    affine = np.eye(4)
    affine[:3, :3] = direction * np.sign(np.diag(direction)) * spacing
    affine[:3, 3] = origin
    return affine


def blobs(shape: tuple[int, ...], affine: np.ndarray, seed: int = 0) -> Image:
    """Balls at fixed world positions, so that images with any header show the same anatomy."""
    rng = np.random.default_rng(seed)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1)
    world = map_points(affine, index.astype(float))
    total = np.zeros(shape)
    for _ in range(12):
        centre = map_points(affine, rng.uniform(0.2, 0.8, 3) * (np.array(shape) - 1))
        total += np.exp(-((world - centre) ** 2).sum(-1) / 40)
    return from_array((1000 * total).astype(np.int16), affine)


@pytest.fixture(scope="module")
def pair() -> tuple[Image, Image]:
    fixed = blobs((28, 30, 26), oblique((1.5, 1.2, 2.0), (10, -20, 30)))
    moving_affine = oblique((1.5, 1.2, 2.0), (10, -20, 30))
    moving_affine[:3, 3] += (4, -3, 2)
    return fixed, Image(fixed.data, moving_affine)


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "small.safetensors"
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": "24 24 24"})  # starts at the identity of the unit cubes
    return path


def test_the_same_voxels_under_another_header(pair: tuple[Image, Image], model_file: Path, tmp_path: Path) -> None:
    """The network returns the identity of the grids, so the world map is exactly the change of header."""
    fixed, moving = pair
    result = register(fixed=fixed, moving=moving, model=model_file, io_iterations=0)
    assert isinstance(result, Registration)
    points = map_points(fixed.index_to_world(), np.random.default_rng(0).uniform(2, 20, (50, 3)))
    assert np.abs(result.transform(points) - (points + np.array([4, -3, 2]))).max() < 1e-3
    assert np.abs(result.inverse(result.transform(points)) - points).max() < 1e-2
    assert np.abs(result.warped.data.astype(int) - fixed.data).max() <= 1
    assert result.warped.data.dtype == moving.data.dtype
    folder = result.save(tmp_path / "out")
    assert sorted(os.listdir(folder)) == sorted(FILES)
    transform = sitk.ReadTransform(str(folder / "transform.h5"))
    for point in points[:10]:
        assert np.allclose(transform.TransformPoint(point.tolist()), result.transform(point), atol=1e-4)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["inputs"]["fixed"]["shape"] == [28, 30, 26]
    assert report["metrics"]["folds_percent"] == 0


def test_a_model_file_may_ask_for_several_passes(tmp_path: Path) -> None:
    """The network is applied again to the images as aligned so far: TwoStep{Φ, Φ}."""
    torch.manual_seed(0)
    network, affine = xi(3, width=8).eval(), oblique((1.5, 1.2, 2.0), (0, 0, 0))
    fixed = blobs((26, 26, 26), affine)
    moving = Image(np.roll(fixed.data, 2, axis=0), affine)
    maps = {}
    for name, model in (("1", network), ("2", TwoStep(network, network).eval())):
        save(network, path := tmp_path / f"{name}.safetensors", metadata={"grid": "24 24 24", "passes": name})
        options: dict[str, Any] = {"fixed": fixed, "moving": moving, "io_iterations": 0, "allow_identity": False}
        maps[name] = register(model=path, **options).transform.displacement
        expected = register(
            model=dataclasses.replace(load_model(path), network=model), **options
        ).transform.displacement
        assert np.array_equal(maps[name], expected)
    assert np.abs(maps["1"] - maps["2"]).max() > 0.1
    save(network, path, metadata={"passes": "0"})
    with pytest.raises(ValueError, match="states '0' passes; expected a number from 1 to 10"):
        register(model=path, **options)


def test_a_model_file_may_have_a_grid_for_thin_and_one_for_fine_scans(tmp_path: Path) -> None:
    """Its shortest side lies across the slices, whichever axis that is. On the fine grid there is a single pass."""
    torch.manual_seed(0)
    facts = {"grid": "16 16 16", "thin_grid": "28 28 8", "fine_grid": "24 24 24", "passes": "2"}
    save(xi(3, width=8).eval(), path := tmp_path / "grids.safetensors", metadata=facts)
    model, affine = load_model(path), np.diag([1.0, 1.0, 1.0, 1.0])
    for shape, grid in (
        ((40, 40, 10), [28, 28, 8]),
        ((10, 40, 40), [8, 28, 28]),
        ((30, 25, 26), [24, 24, 24]),
        ((30, 30, 21), [28, 28, 8]),
    ):
        image = blobs(shape, affine)
        result = register(fixed=image, moving=image, model=model, io_iterations=0)
        assert result.record.grid == grid
    assert choose_grid(model, [(40, 40, 10), (40, 40, 30)]) == (16, 16, 16)  # only one of them is thin
    assert choose_grid(model, [(20, 20, 20), (18, 18, 18)]) == (16, 16, 16)  # thin along every axis: small
    assert choose_grid(dataclasses.replace(model, voxel=2.0), [(40, 40, 10)] * 2) == (16, 16, 16)
    assert isinstance(model.on_grid((16, 16, 16)).network, TwoStep)
    assert not isinstance(model.on_grid((24, 24, 24)).network, TwoStep)
    save(model.once, path, metadata=facts | {"thin_grid": "28 8"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="states the thin_grid '28 8'; expected as many sides as its grid has"):
        load_model(path)


def test_on_a_cpu_fields_start_from_the_usual_grid(tmp_path: Path) -> None:
    """The fine grid is for the network alone, for rigid and affine maps, and for the weights; and for a GPU."""
    torch.manual_seed(0)
    facts = {"grid": "16 16 16", "fine_grid": "24 24 24", "passes": "2"}
    save(xi(3, width=8).eval(), path := tmp_path / "grids.safetensors", metadata=facts)
    model, passes = load_model(path, "cpu"), list[bool]()
    options: dict[str, Any] = {"model": model, "device": "cpu", "confidence": "off", "io_sim": "lncc"}
    fine, coarse = (blobs((side,) * 3, np.diag([1.0, 1.0, 1.0, 1.0])) for side in (30, 20))

    def grid(image: Image, **more: Any) -> list[int] | None:
        shifted = dataclasses.replace(image, data=np.roll(image.data, 1, axis=0))
        return register(fixed=image, moving=shifted, **options | more).record.grid

    assert grid(fine, io_iterations=1) == [16, 16, 16]
    assert grid(fine, io_iterations=0) == [24, 24, 24]
    assert grid(fine, io_iterations=1, optimize="weights") == [24, 24, 24]
    assert grid(fine, transform="affine") == [24, 24, 24]
    for image in (fine, coarse):
        case = Case.read(PairInputs(fixed=image, moving=image))
        made = attempt("", model, case, RegisterOptions(io_iterations=1, confidence="off"), Progress(), device=CPU)
        passes.append(isinstance(made.model.network, TwoStep))
        assert made.pair.fixed.tensor.shape[2:] == (16, 16, 16)
    assert passes == [False, True]  # scans without so many voxels keep both passes


@pytest.mark.parametrize("over", ["fields", "weights"])
def test_optimisation_brings_the_images_together(over: str, model_file: Path) -> None:
    affine = oblique((1.5, 1.2, 2.0), (0, 0, 0))
    fixed = blobs((26, 26, 26), affine)
    moving = Image(np.roll(fixed.data, 2, axis=0), affine)
    plain = register(fixed=fixed, moving=moving, model=model_file, io_iterations=0)
    better = register(fixed=fixed, moving=moving, model=model_file, over=over, io_iterations=6, seed=1)

    def difference(result: Registration) -> float:
        return float(np.abs(result.warped.data.astype(float) - fixed.data).mean())

    assert difference(better) < difference(plain)
    assert len(better.losses) > 0
    again = register(fixed=fixed, moving=moving, model=model_file, over=over, io_iterations=6, seed=1)
    assert np.array_equal(again.warped.data, better.warped.data)


def test_inputs_of_every_kind(pair: tuple[Image, Image], model_file: Path, tmp_path: Path) -> None:
    import nibabel as nib

    fixed, moving = pair
    path = tmp_path / "fixed.nii.gz"
    sitk.WriteImage(fixed.to_sitk(), str(path))
    expected = register(fixed=fixed, moving=moving, model=model_file, io_iterations=0).transform.displacement
    for source in (path, str(path), fixed.to_sitk(), nib.load(path)):
        result = register(fixed=source, moving=moving, model=model_file, io_iterations=0)
        assert np.abs(result.transform.displacement - expected).max() < 1e-2
    arrays = register(fixed=fixed.data, moving=moving.data, model=gradicon(3, 2, **SMALL), io_iterations=0)
    assert arrays.warped.shape == fixed.shape
    mask = Image((fixed.data > 100).astype(np.uint8), fixed.affine)
    masked = register(fixed=fixed, moving=moving, model=model_file, io_iterations=2, fixed_mask=mask)
    assert masked.settings["io_over"] == "fields" or torch.cuda.is_available()


def test_nothing_is_overwritten_or_half_written(
    pair: tuple[Image, Image], model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = register(fixed=pair[0], moving=pair[1], model=model_file, io_iterations=0)
    out = tmp_path / "out"
    result.save(out)
    with pytest.raises(FileExistsError, match=r"already holds report.json; choose another folder"):
        result.save(out)
    result.save(out, overwrite=True)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("carlreg.files.transform_files.write", full)
    with pytest.raises(OSError, match="No space left"):
        result.save(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["out", "small.safetensors"]


def test_bad_input_is_named(pair: tuple[Image, Image], model_file: Path, tmp_path: Path) -> None:
    fixed, moving = pair
    with pytest.raises(
        ValueError, match="no model 'magic'; expected the path of a model file, or one of carl-2d, carl-base"
    ):
        register(fixed=fixed, moving=moving, model="magic")
    with pytest.raises(TypeError, match="fixed is a list; expected a path, an Image, an array"):
        register(fixed=[1, 2], moving=moving, model=model_file)
    with pytest.raises(ValueError, match="the fixed image is 2-D and the moving one 3-D"):
        register(fixed=fixed.data[:, :, 3], moving=moving, model=model_file)
    with pytest.raises(ValueError, match="unknown device 'gpu'; expected 'auto', 'cpu', 'cuda'"):
        register(fixed=fixed, moving=moving, model=model_file, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch finds no CUDA GPU; expected 'cpu' or 'auto'"):
            register(fixed=fixed, moving=moving, model=model_file, device="cuda")
    with pytest.raises(ValueError, match="io_iterations is -1; expected 0 or more"):
        register(fixed=fixed, moving=moving, model=model_file, io_iterations=-1)
    with pytest.raises(ValueError, match="unknown io_sim='ncc'"):
        register(fixed=fixed, moving=moving, model=model_file, io_iterations=0, io_sim="ncc")
    with pytest.raises(ValueError, match="has nothing to optimise"):
        register(fixed=fixed, moving=moving, model=model_file, transform="rigid", fit_to="attention", io_iterations=3)
    with pytest.raises(ValueError, match="unknown transform='bent'; expected 'deformable', 'affine' or 'rigid'"):
        register(fixed=fixed, moving=moving, model=model_file, transform="bent")
    with pytest.raises(ValueError, match="unknown optimize='both'"):
        register(fixed=fixed, moving=moving, model=model_file, over="both")
    with pytest.raises(ValueError, match="absent"):
        register(fixed=tmp_path / "absent.nii.gz", moving=moving, model=model_file)
    constant = Image(np.full_like(fixed.data, 7), fixed.affine)
    with pytest.raises(ValueError, match=r"constant|same value"):
        register(fixed=constant, moving=moving, model=model_file)


def test_options_have_one_default_and_older_names_work(model_file: Path) -> None:
    fixed, moving = (blobs((26, 26, 26), np.eye(4), seed) for seed in (0, 1))
    options = {"fixed": fixed, "moving": moving, "model": model_file, "io_iterations": 1}
    assert register(**options, over="weights").settings["io_over"] == "weights"
    assert register(**options, optimize="weights").settings["io_over"] == "weights"
    with pytest.raises(ValueError, match="optimize='fields' and over='weights' were given; expected optimize alone"):
        register(**options, over="weights", optimize="fields")
    defaults = inspect.signature(register).parameters
    for option in dataclasses.fields(RegisterOptions):
        assert defaults[option.name].default == option.default
    assert set(get_args(SimilarityName)) == set(SIMILARITIES)
    text = get_type_hints(RegisterOptions, include_extras=True)["io_iterations"].__metadata__[0]
    assert f"{WEIGHT_STEPS}" in text
    assert f"{FIELD_STEPS}" in text


# ---- physical space, with a network that moves things ---------------------------------------------------------------


class Bending(RegistrationAlgorithm):
    """A smooth map that depends on both images, and differently on each axis."""

    def transform(self, moving: Tensor, fixed: Tensor) -> Transform:
        parts = [gaussian_blur(image, 2.0) for image in (moving, fixed, moving * fixed)]
        return DisplacementField(0.25 * torch.cat(parts, dim=1) - 0.05)


@pytest.fixture(scope="module")
def moving_network() -> LoadedModel:
    return LoadedModel(Bending(), (20, 20, 20), {"name": "bending"})


def turn(degrees: float, axis: int, shift: tuple[float, ...]) -> np.ndarray:
    """A rigid motion of the world."""
    angle, matrix = np.deg2rad(degrees), np.eye(4)
    a, b = [n for n in range(3) if n != axis]
    matrix[[a, a, b, b], [a, b, a, b]] = [np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)]
    matrix[:3, 3] = shift
    return matrix


def restored(image: Image, order: tuple[int, ...], flips: tuple[bool, ...]) -> Image:
    """The same voxels at the same world positions, stored in another order."""
    change = np.zeros((4, 4))
    change[3, 3] = 1
    for new, old in enumerate(order):
        change[old, new] = -1 if flips[new] else 1
        change[old, 3] = image.shape[old] - 1 if flips[new] else 0
    data = np.flip(image.data.transpose(order), [axis for axis in range(3) if flips[axis]])
    return Image(np.ascontiguousarray(data), image.affine @ change)


@pytest.fixture(scope="module")
def unlike() -> tuple[Image, Image]:
    """Two different images, oblique and anisotropic, at different world positions."""
    return blobs((20, 22, 18), oblique((1.5, 1.2, 2.5), (10, -20, 30))), blobs(
        (18, 20, 24), oblique((2.0, 1.1, 1.4), (-50, 15, 7)), seed=5
    )


def answer(fixed: Image, moving: Image, model: LoadedModel, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    result = register(fixed=fixed, moving=moving, model=model, io_iterations=0, allow_identity=False)
    there = result.transform(points)
    return there, result.inverse(there)


def test_moved_headers_move_the_answer(moving_network: LoadedModel, unlike: tuple[Image, Image]) -> None:
    """Applying G to the moving header gives G ∘ T, to the fixed one T ∘ G⁻¹; the inverse changes accordingly."""
    fixed, moving = unlike
    points = map_points(fixed.affine, np.random.default_rng(0).uniform(3, 14, (200, 3)))
    there, back = answer(fixed, moving, moving_network, points)
    straight = map_points(moving.unit_to_world() @ fixed.world_to_unit(), points)
    assert np.linalg.norm(there - straight, axis=1).mean() > 0.5  # the network does something
    for motion in (turn(12, 2, (30, -100, 5)), turn(-8, 0, (0, 0, 400))):
        moved = Image(moving.data, motion @ moving.affine)
        after, after_back = answer(fixed, moved, moving_network, points)
        assert np.abs(after - map_points(motion, there)).max() < 0.1
        assert np.abs(after_back - back).max() < 0.1
        shifted = Image(fixed.data, motion @ fixed.affine)
        after, _ = answer(shifted, moving, moving_network, map_points(motion, points))
        assert np.abs(after - there).max() < 0.1


def test_however_the_images_are_stored_the_answer_is_one(
    moving_network: LoadedModel, unlike: tuple[Image, Image]
) -> None:
    """All 48 axis orders of both images, each combined with a different one of the other image."""
    fixed, moving = unlike
    points = map_points(fixed.affine, np.random.default_rng(0).uniform(3, 14, (200, 3)))
    there, _ = answer(fixed, moving, moving_network, points)
    ways = list(itertools.product(itertools.permutations(range(3)), itertools.product((False, True), repeat=3)))
    for one, other in zip(ways, ways[::-1], strict=True):
        found, _ = answer(restored(fixed, *one), restored(moving, *other), moving_network, points)
        assert np.abs(found - there).max() < 0.1


def test_points_and_images_agree_in_direction(moving_network: LoadedModel, unlike: tuple[Image, Image]) -> None:
    fixed, moving = unlike
    result = register(fixed=fixed, moving=moving, model=moving_network, io_iterations=0, allow_identity=False)
    index = np.random.default_rng(1).integers(2, 16, (300, 3))
    there = result.transform(map_points(fixed.affine, index))
    nearest = np.rint(map_points(np.linalg.inv(moving.affine), there))
    close = np.abs(map_points(np.linalg.inv(moving.affine), there) - nearest).max(axis=1) < 0.15
    inside = ((nearest >= 0) & (nearest < moving.shape)).all(axis=1) & close
    assert inside.sum() > 3
    seen = result.warped.data[tuple(index[inside].T)].astype(float)
    truth = moving.data[tuple(nearest[inside].astype(int).T)].astype(float)
    assert np.corrcoef(seen, truth)[0, 1] > 0.95


def test_the_reported_inverse_error_is_true(moving_network: LoadedModel, unlike: tuple[Image, Image]) -> None:
    fixed, moving = unlike
    result = register(fixed=fixed, moving=moving, model=moving_network, io_iterations=0, allow_identity=False)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in moving.shape), indexing="ij"), axis=-1)
    y = map_points(moving.affine, index)
    x = result.inverse(y)
    missed = np.linalg.norm(result.transform(x) - y, axis=-1)[result.transform.covers(x)]
    assert missed.mean() == pytest.approx(result.metrics["inverse_error_mm"], abs=1e-3)
    assert missed.max() == pytest.approx(result.metrics["inverse_error_max_mm"], abs=1e-3)


# ---- rigid, affine, first guesses -----------------------------------------------------------------------------------


def test_a_rigid_answer_is_rigid_and_an_affine_one_is_not(unlike: tuple[Image, Image]) -> None:
    image = torch.rand(1, 1, 20, 20, 20)
    network = randomize(carl(3, 2, width=32, **SMALL), image, image.flip(2), move=0.7)
    fixed, moving = unlike
    options = {"fixed": fixed, "moving": moving, "model": LoadedModel(network, (20, 20, 20), {"name": "random"})}
    options["allow_identity"] = False
    for fit_to in ("network", "attention"):
        rigid = register(**options, transform="rigid", fit_to=fit_to)
        affine = register(**options, transform="affine", fit_to=fit_to)
        for result in (rigid, affine):
            assert result.transform.is_linear
            assert np.allclose(result.inverse.affine @ result.transform.affine, np.eye(4))
        linear = rigid.transform.affine[:3, :3]
        assert np.allclose(linear @ linear.T, np.eye(3), atol=1e-6)
        assert np.linalg.det(linear) > 0
        assert not np.allclose(affine.transform.affine, rigid.transform.affine, atol=1e-2)
    options["model"] = LoadedModel(gradicon(3, 2, **SMALL), (20, 20, 20), {})
    with pytest.raises(ValueError, match="no coordinate attention; expected fit_source='network'"):
        register(**options, transform="rigid", fit_to="attention")


@pytest.mark.parametrize("kind", ["rigid", "affine", "deformable"])
def test_a_first_guess_is_part_of_the_answer(model_file: Path, tmp_path: Path, kind: str) -> None:
    """The network does nothing, so through the right guess it sees the fixed image itself, and the guess is the answer:
    however it is given. The image turned by far more than a header could hide."""
    fixed = blobs((26, 26, 26), np.diag([1.5, 1.5, 1.5, 1]))
    motion = turn(35, 2, (5, -12, 3))
    moving = world_transform.apply(
        WorldTransform.linear(np.linalg.inv(motion)), fixed, from_array(fixed.data, fixed.affine)
    )
    transform_files.write(WorldTransform.linear(motion), tmp_path / "guess.tfm")
    bent = ItkTransform(WorldTransform.linear(motion).to_sitk())
    points = map_points(fixed.affine, np.random.default_rng(0).uniform(6, 20, (50, 3)))
    for guess in (motion, motion.tolist(), tmp_path / "guess.tfm", bent):
        result = register(
            fixed=fixed, moving=moving, model=model_file, io_iterations=0, transform=kind, initial_transform=guess
        )
        assert np.abs(result.transform(points) - map_points(motion, points)).max() < 1e-2
        assert np.abs(result.inverse(result.transform(points)) - points).max() < 2e-2
    assert "initial_transform" in result.report()["inputs"]
    with pytest.raises(ValueError, match="the initial transform is 2-D but the images are 3-D"):
        register(fixed=fixed, moving=moving, model=model_file, initial_transform=np.eye(3))
    with pytest.raises(ValueError, match="singular or not finite"):
        register(fixed=fixed, moving=moving, model=model_file, initial_transform=np.diag([1, 0, 1, 1]))
    with pytest.raises(TypeError, match="initial_transform is a int"):
        register(fixed=fixed, moving=moving, model=model_file, initial_transform=3)


def test_landmarks_are_scored(pair: tuple[Image, Image], model_file: Path) -> None:
    fixed, moving = pair
    points = map_points(fixed.affine, np.random.default_rng(0).uniform(5, 20, (9, 3)))
    result = register(
        fixed=fixed,
        moving=moving,
        model=model_file,
        io_iterations=0,
        fixed_landmarks=points,
        moving_landmarks=points + np.array([4, -3, 2]),
    )
    assert result.metrics["tre_before_mm"] == pytest.approx(np.sqrt(29))
    assert result.metrics["tre_after_mm"] < 1e-3


# ---- many pairs -----------------------------------------------------------------------------------------------------


def resident() -> float:
    """Megabytes of memory held by this process."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_thirty_pairs_leave_the_weights_and_the_memory_as_they_were() -> None:
    """Every fifth registration optimises the weights, of which a copy is made."""
    torch.manual_seed(0)
    network = carl(2, 2, width=8, **SMALL)
    loaded = load_model(LoadedModel(network, (32, 32), {"name": "small"}), "cpu")
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    rng = np.random.default_rng(0)
    held = []
    for number in range(30):
        fixed, moving = rng.random((2, 90, 80)).astype(np.float32)
        steps = {"io_iterations": 0} if number % 5 else {"over": "weights", "io_iterations": 1}
        result = register(fixed=fixed, moving=moving, model=loaded, device="cpu", **steps)
        assert np.isfinite(result.warped.data).all()
        if number % 10 == 9:
            gc.collect()
            held.append(resident())
    after = network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert held[-1] - held[0] < 8, held


# ---- too little memory ----------------------------------------------------------------------------------------------


def no_room(*_: object, **__: object) -> None:
    raise torch.cuda.OutOfMemoryError("no room")


def test_without_room_for_both_directions_they_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = carl(3, 2, width=8, **SMALL).double().eval()
    moving, fixed = torch.rand(2, 1, 1, 16, 17, 18, dtype=torch.float64)
    randomize(model, moving, fixed, move=1.0)
    expected = [phi.on_grid_of(fixed) for phi in model.both(moving, fixed)]
    monkeypatch.setattr(type(model), "_both", no_room)
    found = [phi.on_grid_of(fixed) for phi in model.both(moving, fixed)]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-9)
    assert "one after the other" in caplog.text
    with pytest.raises(torch.cuda.OutOfMemoryError):
        model.train().both(moving, fixed)


def test_without_room_on_a_gpu_the_inverse_is_computed_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    invert, asked = world_transform.invert, []

    def crowded(world: Any, grid: Image, *, device: Any = "cpu") -> Any:
        asked.append(str(device))
        return no_room() if asked[-1] == "cuda" else invert(world, grid)

    monkeypatch.setattr(world_transform, "invert", crowded)
    grid = Image(np.zeros((8, 9, 10), np.float32), np.eye(4))
    moves = WorldTransform(np.eye(4), np.full((8, 9, 10, 3), 0.5, np.float32), grid.affine)
    inverse, metrics = _invert(moves, SimpleNamespace(moving=grid), torch.device("cuda"))  # type: ignore[arg-type]
    assert asked == ["cuda", "cpu"]
    assert inverse(np.array([[4.0, 4, 4]])) == pytest.approx(np.array([[3.5, 3.5, 3.5]]), abs=1e-3)
    assert metrics["inverse_error_max_mm"] < 1e-3


def test_without_room_for_the_weights_the_fields_are_optimised(
    pair: tuple[Image, Image], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("carlreg.registration.solve.instance_optimize", no_room)
    fixed, moving = pair
    model = LoadedModel(carl(3, 2, width=32, **SMALL), (16, 16, 16), {"name": "small"})
    options = {"over": "weights", "io_iterations": 2, "device": "cpu", "allow_identity": False}
    result = register(fixed=fixed, moving=moving, model=model, **options)
    assert result.settings["io_over"] == "fields"
    levels = [8.0] * 7 + [4.0] * 7 + [2.0] * 7 + [1.0] * 3  # on each grid the start, and the steps
    assert [loss["level"] for loss in result.losses] == levels
    usual = register(fixed=fixed, moving=moving, model=model, **options | {"io_iterations": None})
    assert usual.settings["io_iterations"] == FIELD_STEPS == [loss["level"] for loss in usual.losses].count(1.0) - 1
    assert "the fields are optimised instead" in caplog.text


def test_without_room_for_the_network_the_cpu_does_its_work(
    pair: tuple[Image, Image], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fixed, moving = pair
    model = LoadedModel(randomize_small(), (16, 16, 16), {"name": "small"})
    options = {"fixed": fixed, "moving": moving, "model": model, "io_iterations": 0, "device": "cpu"}
    options["allow_identity"] = False
    expected = register(**options)
    once = iter([no_room])
    both = RegistrationAlgorithm.both
    monkeypatch.setattr(RegistrationAlgorithm, "both", lambda *pair: next(once, lambda: both(*pair))())
    assert np.array_equal(register(**options).warped.data, expected.warped.data)
    assert "running it on the CPU" in caplog.text


def randomize_small() -> RegistrationAlgorithm:
    moving, fixed = torch.rand(2, 1, 1, 16, 16, 16)
    return randomize(carl(3, 2, width=32, **SMALL), moving, fixed, move=1.0).eval()


def test_identical_images_give_the_identity(unlike: tuple[Image, Image]) -> None:
    """Whatever the network predicts, with a warning; nearly identical images stay nearly where they are."""
    image, _ = unlike
    noisy = Image(image.data + np.random.default_rng(0).integers(0, 20, image.shape, np.int16), image.affine)
    model = LoadedModel(randomize_small(), (16, 16, 16), {"name": "small"})
    points = map_points(image.affine, np.random.default_rng(0).uniform(0, 20, (50, 3)))
    for steps in (0, 4):
        result = register(fixed=image, moving=image, model=model, io_iterations=steps, device="cpu")
        assert np.abs(result.transform(points) - points).max() < 1e-3
        assert result.warnings[0] == "the fixed and the moving image are the same"
        assert "already match voxel by voxel" in result.warnings[1]
        result = register(fixed=image, moving=noisy, model=model, io_iterations=steps, device="cpu")
        assert np.abs(result.transform(points) - points).max() < 0.1 * min(image.spacing)
        assert "matched worse than the unregistered images" in result.warnings[0]
    given = register(fixed=image, moving=image, model=model, io_iterations=0, device="cpu", allow_identity=False)
    assert np.abs(given.transform(points) - points).max() > 0.5 * min(image.spacing)


def test_a_warning_says_what_was_done_instead_of_the_network(unlike: tuple[Image, Image]) -> None:
    """Scans that match once they are cropped were moved, and a rigid map is not optimised unless that is asked for."""
    head, _ = unlike
    wide = [np.pad(head.data, [(n, 60 - n), (30, 30), (30, 30)]) for n in (20, 40)]
    fixed, moving = (Image(data, np.diag([1.25, 1.25, 1.25, 1])) for data in wide)
    model = LoadedModel(randomize_small(), (16, 16, 16), {"name": "small"})
    options: dict[str, Any] = {"fixed": fixed, "model": model, "device": "cpu"}
    result = register(**options, moving=moving, io_iterations=0)
    assert np.abs(result.transform([[40.0, 40.0, 40.0]]) - [[65, 40, 40]]).max() < 0.1
    assert result.warnings == (
        "the images match voxel by voxel once their margins are cropped: this alignment was kept",
    )
    noise = np.random.default_rng(0).integers(0, 20, moving.shape, np.int16) * (moving.data > 0)
    noisy = Image((moving.data + noise).astype(np.int16), moving.affine)
    start = "the network's result matched worse than the images without their margins"
    for kind, steps, end in (
        ("rigid", None, "those were kept"),
        ("rigid", 2, "optimisation started from those"),
        ("deformable", 0, "those were kept"),
        ("deformable", 2, "optimisation started from those"),
    ):
        result = register(**options, moving=noisy, transform=kind, io_iterations=steps)
        assert f"{start}; {end}" in result.warnings
        assert bool(result.losses) == (end[0] == "o")
    whole = register(**options | {"fixed": head}, moving=head, transform="rigid")
    assert "the unregistered images already match voxel by voxel: they were left as they are" in whole.warnings


def test_two_chests_are_seen_from_the_density_of_air(tmp_path: Path) -> None:
    """A window of soft tissue would leave nothing of the lungs."""
    rng, radius = np.random.default_rng(0), np.linalg.norm(np.indices((40, 40, 40)) - 19.5, axis=0)
    trunk = np.where(radius < 19, 40, -1000) + rng.normal(0, 5, radius.shape)
    chest = np.where(radius < 12, -800 + 30 * np.sin(radius), trunk)
    skin = np.where(abs(radius - 19) < 0.5, -700, trunk)
    spacing = np.diag([4.0, 4.0, 4.0, 1.0])
    lungs, belly = (from_array(data.astype(np.int16), spacing) for data in (chest, skin))
    path = tmp_path / "abdomen.safetensors"
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": "40 40 40", "ct_range": "-125 275"})

    def notes(fixed: Image, moving: Image) -> list[str]:
        return [one.intensity_note for one in prepare_pair(fixed, moving, load_model(path, "cpu"), torch.device("cpu"))]

    assert notes(lungs, lungs) == ["CT; -1000…275 HU scaled to 0…1"] * 2
    for pair in ((lungs, belly), (belly, lungs), (belly, belly)):  # both in one scale
        assert notes(*pair) == ["CT; -125…275 HU scaled to 0…1"] * 2


def test_a_model_gets_the_hounsfield_units_it_was_trained_with(tmp_path: Path) -> None:
    """`ct_range` in a model's file applies to CT only."""
    rng = np.random.default_rng(0)
    ct = from_array(rng.choice([-1000, -100, 50, 400], (12, 12, 12)).astype(np.int16))
    path = tmp_path / "abdomen.safetensors"
    for text, expected in (("-100 300", [0, 0, 0.375, 1]), ("-1000 1000", [0, 0.45, 0.525, 0.7])):
        save(gradicon(3, 2, **SMALL), path, metadata={"grid": "12 12 12", "ct_range": text})
        _, prepared = prepare_pair(ct, ct, load_model(path, "cpu"), torch.device("cpu"))
        assert prepared.tensor.unique().tolist() == pytest.approx(sorted(set(expected)), abs=1e-4)
    for text, message in (("wide", "expected two Hounsfield units"), ("5 -5", "expected a lower and a higher number")):
        save(gradicon(3, 2, **SMALL), path, metadata={"ct_range": text})
        with pytest.raises(ValueError, match=message):
            load_model(path, "cpu")


def test_certainty_is_the_spread_of_attention(unlike: tuple[Image, Image]) -> None:
    """The spread is on the fixed image, in millimetres; a network without attention has none."""
    fixed, moving = unlike
    options = {"fixed": fixed, "moving": moving, "io_iterations": 0, "device": "cpu"}
    network = LoadedModel(randomize_small(), (16, 16, 16), {"name": "small"})
    spread = register(**options, model=network, certainty=True).spread
    assert spread is not None
    corners = map_points(spread.affine, np.array([[0, 0, 0], np.array(spread.shape) - 1]))
    unit = map_points(fixed.world_to_unit(), corners)
    assert np.all(np.abs(unit - 0.5) < 0.55)  # its outermost voxels are the middles of blocks
    size = np.linalg.norm(np.array(moving.spacing) * (np.array(moving.shape) - 1))
    assert 0 < spread.data.min() <= spread.data.max() < size
    assert register(**options, model=network).spread is None
    plain = LoadedModel(gradicon(3, 2, **SMALL), (16, 16, 16), {"name": "plain"})
    assert register(**options, model=plain, certainty=True).spread is None


def test_without_room_for_certainty_there_is_none(
    unlike: tuple[Image, Image], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("carlreg.registration.api.Inside.of", no_room)
    fixed, moving = unlike
    model = LoadedModel(randomize_small(), (16, 16, 16), {"name": "small"})
    options = {"model": model, "io_iterations": 0, "device": "cpu", "certainty": True}
    assert register(fixed=fixed, moving=moving, **options).spread is None
    assert "the report omits it" in caplog.text


@pytest.mark.parametrize("grid", ["24 24 24", "57 56 60"])
def test_fields_are_optimised_on_the_voxels_of_the_scans(
    grid: str, pair: tuple[Image, Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scans are 28 × 30 × 26, whatever the grid of the network."""
    path = tmp_path / "model.safetensors"
    save(gradicon(3, 2, **SMALL), path, metadata={"grid": grid})
    seen: list[tuple[int, ...]] = []
    sizes: list[list[float]] = []

    def spy(forward: Transform, backward: Transform, moving: Tensor, fixed: Tensor, **options: Any) -> Optimized:
        given = (moving, fixed, options["moving_mask"], options["fixed_mask"])
        seen.extend(tuple(one.shape[2:]) for one in given if one is not None)
        sizes.append(sorted(options["fixed_spacing"]))
        return optimize_fields(forward, backward, moving, fixed, **options)

    monkeypatch.setattr("carlreg.registration.solve.optimize_fields", spy)
    fixed, moving = pair
    other = blobs(moving.shape, moving.affine, seed=1)
    mask = from_array(np.ones(other.shape, np.uint8), other.affine)
    options = {"model": path, "io_sim": "lncc", "io_iterations": 3, "device": "cpu"}
    result = register(fixed=fixed, moving=other, moving_mask=mask, **options)  # type: ignore[arg-type]
    assert [sorted(one) for one in seen] == [sorted(other.shape), sorted(fixed.shape), sorted(other.shape)]
    assert sizes == [pytest.approx(sorted(fixed.spacing))]
    totals = [loss["total"] for loss in result.losses if loss.get("level", 1) == 1]
    assert totals[-1] < totals[0]
    assert result.warped.shape == fixed.shape
    assert sorted(result.settings["io_grid"]) == sorted(fixed.shape)


def test_with_little_memory_the_fields_have_coarser_grids(
    pair: tuple[Image, Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(gradicon(3, 2, **SMALL), tmp_path / "model.safetensors", metadata={"grid": "16 16 16"})
    monkeypatch.setattr("carlreg.registration.solve.available_memory", lambda _: 2e6)
    monkeypatch.setattr("carlreg.registration.solve.COARSEST", {3: 20})
    fixed, _ = pair
    moving = blobs(fixed.shape, fixed.affine, seed=1)
    options = {"model": tmp_path / "model.safetensors", "io_iterations": 1, "device": "cpu"}
    result = register(fixed=fixed, moving=moving, **options)
    assert max(result.settings["io_grid"]) < max(fixed.shape)
    assert caplog.text.count("too little memory") == 1


def test_without_a_grid_of_the_model_fields_are_optimised_on_each_scans_own(
    pair: tuple[Image, Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(gradicon(3, 2, **SMALL), tmp_path / "model.safetensors")
    shapes = []

    def spy(forward: Transform, backward: Transform, moving: Tensor, fixed: Tensor, **options: Any) -> Optimized:
        shapes.extend(tuple(one.shape[2:]) for one in (moving, fixed))
        return optimize_fields(forward, backward, moving, fixed, **options)

    monkeypatch.setattr("carlreg.registration.solve.optimize_fields", spy)
    fixed, _ = pair
    moving = blobs((36, 24, 33), np.diag([1.2, 1.5, 1.6, 1.0]), seed=1)
    options = {"model": tmp_path / "model.safetensors", "over": "fields", "io_iterations": 1, "io_sim": "lncc"}
    result = register(fixed=fixed, moving=moving, **options)  # type: ignore[arg-type]
    assert len(shapes) == 2
    assert [sorted(shape) for shape in shapes] == [sorted(moving.shape), sorted(fixed.shape)]
    assert result.warped.shape == fixed.shape


def test_fields_of_small_scans_are_kept_unless_much_is_gained(
    moving_network: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def note(*answer: Any, **options: Any) -> Optimized:
        asked.append(options)
        return optimize_fields(*answer, **options)

    monkeypatch.setattr("carlreg.registration.solve.optimize_fields", note)
    model = LoadedModel(moving_network.network, (32, 32, 32), {})
    for side, regularity in ((12, None), (40, None), (40, 2.0)):
        image = blobs((side,) * 3, np.eye(4))
        result = register(
            fixed=image, moving=image, model=model, over="fields", io_iterations=1, regularity=regularity, device="cpu"
        )
        assert result.settings["regularity"] == (0.75 if regularity is None else regularity)
    assert [one.get("gain") for one in asked] == [0.4, None, None]
    assert [one["weight"] for one in asked] == [0.75, 0.75, 2.0]
