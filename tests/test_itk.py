"""Transforms in the world: against SimpleITK, nibabel and ANTs, in every orientation, and through files."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from carlreg.files.images import Image, from_array, map_points
from carlreg.files.images import write as write_image
from carlreg.files.orientation import to_closest_ras
from carlreg.files.transform_files import (
    is_learn2reg,
    is_warp,
    read,
    read_learn2reg,
    write,
    write_learn2reg,
    write_warp,
)
from carlreg.files.world_transform import (
    ItkTransform,
    TransformError,
    WorldTransform,
    apply,
    invert,
    invert_points,
    jacobian_determinant,
    learn2reg,
    sample,
    to_world,
)
from carlreg.files.world_transform import compose as compose_maps
from carlreg.geometry.transforms import Affine, DisplacementField, Identity, Transform, compose

sitk = pytest.importorskip("SimpleITK")
nibabel = pytest.importorskip("nibabel")

SHAPES = {2: ((23, 31), (19, 26)), 3: ((14, 17, 11), (12, 15, 16))}  # of the fixed and the moving image


def rotation(dim: int, angle: float) -> np.ndarray:
    matrix = np.eye(dim)
    for i, j in itertools.combinations(range(dim), 2):
        turn = np.eye(dim)
        turn[[i, i, j, j], [i, j, i, j]] = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
        matrix = matrix @ turn
    return matrix


def affine_of(direction: np.ndarray, spacing: Any, origin: Any) -> np.ndarray:
    affine = np.eye(len(direction) + 1)
    affine[:-1, :-1], affine[:-1, -1] = direction * np.array(spacing), origin
    return affine


GRIDS = {
    "plain": lambda dim: affine_of(np.eye(dim), (1.0, 1.0, 1.0)[:dim], (0.0, 0.0, 0.0)[:dim]),
    "anisotropic": lambda dim: affine_of(np.eye(dim), (0.7, 1.9, 3.1)[:dim], (5.0, -7.0, 300.0)[:dim]),
    "oblique": lambda dim: affine_of(rotation(dim, 0.4), (0.7, 1.3, 2.9)[:dim], (-120.5, 33.25, 871.0)[:dim]),
    "left-handed": lambda dim: GRIDS["oblique"](dim) @ np.diag([1.0, -1.0, 1.0, 1.0][4 - dim - 1 :]),
}


def pair(dim: int = 3, kind: str = "left-handed") -> tuple[Image, Image]:
    rng = np.random.default_rng(1)
    shape, other = SHAPES[dim]
    fixed = from_array(rng.integers(0, 1000, shape).astype(np.int16), GRIDS[kind](dim))
    elsewhere = affine_of(rotation(dim, -0.3), (1.1, 1.4, 2.0)[:dim], (60.0, -45.0, 12.0)[:dim])
    return fixed, from_array(rng.integers(0, 1000, other).astype(np.int16), elsewhere)


def deformation(dim: int = 3, seed: int = 0, size: float = 0.03) -> Transform:
    """A smooth displacement, then a rotation and scaling of the unit cube."""
    rng = torch.Generator().manual_seed(seed)
    field = size * torch.randn(1, dim, *(5,) * dim, generator=rng)
    linear = torch.from_numpy(rotation(dim, 0.15) * 0.9).float()[None]
    shift = 0.5 - linear.sum(dim=-1) * 0.5 + 0.02
    return compose(Affine.from_parts(linear, shift), DisplacementField(field))


def inside(image: Image, count: int = 1000, margin: float = -0.5) -> np.ndarray:
    """Random world points of the image, its outer half voxels included."""
    rng = np.random.default_rng(2)
    return map_points(image.affine, rng.uniform(margin, np.array(image.shape) - 1 - margin, (count, image.dim)))


def by_sitk(transform: Any, points: np.ndarray) -> np.ndarray:
    return np.array([transform.TransformPoint(point) for point in points.tolist()])


def largest(difference: np.ndarray) -> float:
    return float(np.linalg.norm(difference, axis=-1).max())


EVERY_GRID = [(dim, kind) for dim in (2, 3) for kind in GRIDS]


# ---- meaning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "kind"), EVERY_GRID)
def test_world_transform_is_phi_between_unit_coordinates(dim: int, kind: str) -> None:
    (fixed, moving), phi = pair(dim, kind), deformation(dim)
    transform = to_world(phi, fixed, moving)
    index = np.stack(np.meshgrid(*map(np.arange, fixed.shape), indexing="ij"), axis=-1)
    unit = torch.from_numpy(index / (np.array(fixed.shape) - 1))[None]
    there = phi.to(unit)(unit)[0].numpy() * (np.array(moving.shape) - 1)  # moving indices
    for i in [(0,) * dim, tuple(n // 2 for n in fixed.shape), tuple(n - 1 for n in fixed.shape)]:
        x = fixed.to_sitk().TransformIndexToPhysicalPoint([int(n) for n in i])
        y = moving.to_sitk().TransformContinuousIndexToPhysicalPoint(there[i].tolist())
        assert largest(transform(np.array(x)) - y) < 1e-4
    assert largest(transform(map_points(fixed.affine, index)) - map_points(moving.affine, there)) < 1e-4
    assert largest(transform.displacement) > 1  # mm
    assert transform.displacement.dtype == np.float32


@pytest.mark.parametrize(("dim", "kind"), EVERY_GRID)
@pytest.mark.parametrize("ending", ["h5", "tfm"])
def test_sitk_agrees_on_the_file_and_its_parts(tmp_path: Path, dim: int, kind: str, ending: str) -> None:
    fixed, moving = pair(dim, kind)
    transform = to_world(deformation(dim), fixed, moving)
    write(transform, tmp_path / f"t.{ending}")
    theirs = sitk.ReadTransform(str(tmp_path / f"t.{ending}"))
    points = inside(fixed)
    assert largest(transform(points) - by_sitk(theirs, points)) < 1e-6
    outside = inside(fixed, margin=-5)
    assert largest(transform(outside) - by_sitk(theirs, outside)) < 1e-6
    assert not transform.covers(outside).all()
    parts = sitk.CompositeTransform(theirs)
    assert [parts.GetNthTransform(n).GetName() for n in (0, 1)] == ["AffineTransform", "DisplacementFieldTransform"]
    affine = dataclasses.replace(transform, displacement=np.zeros_like(transform.displacement))
    assert largest(affine(points) - by_sitk(parts.GetNthTransform(0), points)) < 1e-6
    shift = dataclasses.replace(transform, affine=np.eye(dim + 1))
    assert largest(shift(points) - by_sitk(parts.GetNthTransform(1), points)) < 1e-6
    assert largest(affine(shift(points)) - transform(points)) < 1e-9
    assert largest(shift(affine(points)) - transform(points)) > 1  # the order matters here


def test_displacement_ends_half_a_voxel_beyond_the_lattice_as_in_itk() -> None:
    transform = WorldTransform(np.eye(3), np.ones((4, 5, 2), np.float32), np.diag([2.0, 2.0, 1.0]))
    x = np.array([-1.001, -0.999, 0.0, 6.0, 6.999, 7.001])
    points = np.stack([x, np.full(6, 4.0)], axis=-1)
    assert (transform(points) - points)[:, 0].round(9).tolist() == [0, 1, 1, 1, 1, 0]
    assert largest(transform(points) - by_sitk(transform.to_sitk(), points)) < 1e-12


def test_affine_part_is_the_best_fit_or_the_one_given() -> None:
    fixed, moving = pair()
    linear = Affine(torch.tensor([[[0.9, 0.1, 0.0, 0.1], [-0.2, 1.1, 0.0, 0.0], [0.1, 0.0, 0.8, -0.1]]]))
    transform = to_world(linear, fixed, moving)
    assert np.abs(transform.displacement).max() < 1e-4
    points, exact = inside(fixed), moving.unit_to_world() @ np.vstack([linear.matrix[0].numpy(), [0, 0, 0, 1]])
    assert largest(transform(points) - map_points(exact @ fixed.world_to_unit(), points)) < 1e-4
    bent = to_world(deformation(), fixed, moving)
    given = to_world(deformation(), fixed, moving, affine=np.diag([2.0, 1.0, 1.0, 1.0]))
    assert np.array_equal(given.affine, np.diag([2.0, 1.0, 1.0, 1.0]))
    points = inside(fixed, margin=0)  # in the outer half voxels only u stays as it is, so that A matters
    assert largest(bent(points) - given(points)) < 1e-4
    # no other affine map comes closer: the remainder is orthogonal to affine maps
    grid = np.stack(np.meshgrid(*map(np.arange, fixed.shape), indexing="ij"), axis=-1).reshape(-1, 3)
    x = map_points(fixed.affine, grid)
    rest = bent(x) - map_points(bent.affine, x)
    assert np.abs(rest.mean(axis=0)).max() < 1e-5
    assert np.abs((x - x.mean(axis=0)).T @ rest / len(x)).max() < 1e-3


def test_maps_without_a_usable_affine_part() -> None:
    fixed, moving = pair()
    flat = to_world(Affine(torch.tensor([[[0.0, 0.0, 0.0, 0.5]] * 3])), fixed, moving)  # everything to the centre
    assert np.array_equal(flat.affine[:3, :3], np.eye(3))
    centre = map_points(moving.unit_to_world(), np.full(3, 0.5))
    # exact at the voxels, whose displacements are all different
    assert largest(flat(inside(fixed, margin=0)) - centre) < 1e-3
    thin = from_array(np.zeros((6, 7, 1)), GRIDS["oblique"](3))
    slice_ = sample(lambda x: x + 3, thin)
    assert np.allclose(slice_.affine, affine_of(np.eye(3), (1, 1, 1), (3, 3, 3)))


def test_batches_and_other_dimensions_are_refused() -> None:
    fixed, moving = pair()
    with pytest.raises(ValueError, match="batch of 2"):
        to_world(DisplacementField(torch.zeros(2, 3, 4, 4, 4)), fixed, moving)
    with pytest.raises(TransformError, match=r"points have shape \(5, 2\)"):
        to_world(Identity(), fixed, moving)(np.zeros((5, 2)))
    with pytest.raises(TransformError, match="do not match"):
        WorldTransform(np.eye(3), np.zeros((4, 4, 4, 3), np.float32), np.eye(4))


# ---- headers and orientations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3])
def test_moved_headers_conjugate(dim: int) -> None:
    (fixed, moving), phi = pair(dim), deformation(dim)
    rigid = affine_of(rotation(dim, 1.1), (1.0,) * dim, (200.0, -90.0, 33.0)[:dim])
    transform, points = to_world(phi, fixed, moving), inside(fixed)
    after = to_world(phi, fixed, dataclasses.replace(moving, affine=rigid @ moving.affine))
    before = to_world(phi, dataclasses.replace(fixed, affine=rigid @ fixed.affine), moving)
    assert largest(after(points) - map_points(rigid, transform(points))) < 1e-4  # G ∘ T
    assert largest(before(map_points(rigid, points)) - transform(points)) < 1e-4  # T ∘ G⁻¹


def test_all_48_ways_to_store_the_fixed_image_give_one_map(tmp_path: Path) -> None:
    fixed, moving = pair()
    phi, seen = deformation(), set()
    ras, points = to_closest_ras(fixed), inside(fixed, 200)
    expected = to_world(phi, ras, moving)(points)
    for order in itertools.permutations(range(3)):
        for flips in itertools.product((0, 1), repeat=3):
            data, affine = fixed.data.transpose(order), fixed.affine[:, [*order, 3]].copy()
            for axis in np.flatnonzero(flips):
                affine[:, 3] += (data.shape[axis] - 1) * affine[:, axis]
                affine[:, axis] *= -1
                data = np.flip(data, axis)
            stored = from_array(data, affine)
            seen.add(tuple(affine.round(6).ravel()))
            transform = to_world(phi, to_closest_ras(stored), moving, grid=stored)
            assert transform.displacement.shape == (*stored.shape, 3)
            assert np.array_equal(transform.lattice, stored.affine)
            assert largest(transform(points) - expected) < 1e-4
            assert largest(by_sitk(transform.to_sitk(), points[:20]) - expected[:20]) < 1e-4
    assert len(seen) == 48


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "kind"), EVERY_GRID)
def test_apply_is_sitk_resample(dim: int, kind: str) -> None:
    fixed, moving = pair(dim, kind)
    transform = to_world(deformation(dim), fixed, moving)
    floats = from_array(moving.data.astype(np.float64), moving.affine)
    kinds = {"linear": sitk.sitkLinear, "nearest": sitk.sitkNearestNeighbor}
    for interpolation, theirs in kinds.items():
        for image in (floats, moving):
            ours = apply(transform, image, fixed, interpolation, outside=-7)  # type: ignore[arg-type]
            resampled = sitk.Resample(image.to_sitk(), fixed.to_sitk(), transform.to_sitk(), theirs, -7.0)
            expected = sitk.GetArrayFromImage(resampled).T
            assert ours.data.dtype == image.data.dtype
            assert ours.shape == fixed.shape
            assert np.array_equal(ours.affine, fixed.affine)
            outside = expected == -7
            assert np.array_equal(ours.data == -7, outside)
            assert 0 < outside.mean() < 0.9
            if interpolation == "nearest":
                assert np.array_equal(ours.data, expected)
            elif image is floats:
                assert np.abs(ours.data - expected).max() < 1e-6
                exact = expected
            else:
                assert np.abs(ours.data - exact).max() < 0.501  # rounded; float32 decides about halves


def test_images_pull_and_points_push() -> None:
    fixed, moving = pair()
    transform = to_world(deformation(), fixed, moving)
    spot = np.array([6, 8, 5])
    there = transform(map_points(fixed.affine, spot))
    distance = np.stack(np.meshgrid(*map(np.arange, moving.shape), indexing="ij"), axis=-1)
    blob = np.exp(-((map_points(moving.affine, distance) - there) ** 2).sum(axis=-1) / 8)
    warped = apply(transform, from_array(blob, moving.affine), fixed)
    assert np.abs(np.unravel_index(warped.data.argmax(), fixed.shape) - spot).max() <= 1


def test_apply_keeps_types_and_refuses_what_does_not_fit() -> None:
    fixed, moving = pair()
    large = from_array(moving.data.astype(np.int64) + 2**60, moving.affine)
    result = apply(lambda x: x, large, large, "nearest")
    assert np.array_equal(result.data, large.data)
    with pytest.raises(ValueError, match=r"-1.*uint8 cannot hold"):
        apply(lambda x: x, from_array(np.zeros((4, 4, 4), np.uint8)), fixed, outside=-1)
    with pytest.raises(ValueError, match="cubic"):
        apply(lambda x: x, moving, fixed, "cubic")  # type: ignore[arg-type]


# ---- inverse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3])
def test_inverse_and_its_residual(dim: int) -> None:
    fixed, moving = pair(dim)
    transform = to_world(deformation(dim), fixed, moving)
    inverse, residual = invert(transform, moving)
    assert residual.shape == moving.shape
    assert 0.3 < np.isfinite(residual).mean() < 1
    assert np.nanmax(residual) < 2e-3
    index = np.stack(np.meshgrid(*map(np.arange, moving.shape), indexing="ij"), axis=-1)
    y = map_points(moving.affine, index)
    missed = np.linalg.norm(transform(inverse(y)) - y, axis=-1)
    known = np.isfinite(residual)
    assert np.abs(missed - residual)[known].max() < 1e-3  # it is what is reported
    assert np.array_equal(transform.covers(inverse(y)), known)
    # between the voxels, and in the other order, to the accuracy of linear interpolation
    x = inside(fixed, margin=2)
    back = np.linalg.norm(inverse(transform(x)) - x, axis=-1)[inverse.covers(transform(x))]
    assert len(back) > 100
    assert back.max() < 0.5 * max(moving.spacing)
    assert back.mean() < 0.05 * max(moving.spacing)


def test_strong_deformations_without_folds_are_inverted() -> None:
    fixed = from_array(np.zeros((48, 48, 48)), GRIDS["oblique"](3))
    fine = 0.005 * torch.randn(1, 3, 24, 24, 24, generator=torch.Generator().manual_seed(0))
    transform = to_world(compose(deformation(), DisplacementField(fine)), fixed, fixed)
    slopes = np.stack(np.gradient(transform.displacement.astype(float), axis=(0, 1, 2)), axis=-1)
    jacobian = np.linalg.det(np.eye(3) + slopes @ np.linalg.inv(transform.lattice[:3, :3]))
    assert 0.05 < jacobian.min() < 0.4
    assert np.nanmax(invert(transform, fixed)[1]) < 3e-3


def test_folds_show_in_the_residual() -> None:
    grid = from_array(np.zeros((32, 32)))
    smooth = sample(lambda x: x + np.sin(x / 2), grid, np.eye(3))
    folded = sample(lambda x: x + 6 * np.sin(x / 2), grid, np.eye(3))
    y = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), axis=-1).astype(float)
    worst = []
    for transform in (smooth, folded):
        inverse, residual = invert(transform, grid)
        missed = np.linalg.norm(transform(inverse(y)) - y, axis=-1)
        assert np.nanmax(np.abs(missed - residual)) < 1e-3
        worst.append(np.nanmax(residual))
    assert worst[0] < 2e-3
    assert worst[1] > 0.1


@pytest.mark.parametrize("dim", [2, 3])
def test_inverse_at_points(dim: int) -> None:
    fixed, moving = pair(dim)
    transform, x = to_world(deformation(dim), fixed, moving), inside(fixed, margin=1)
    found, missed = invert_points(transform, transform(x))
    assert largest(found - x) < 2e-3
    assert missed.max() < 1e-3
    far = invert_points(transform, transform(x) + 1e4)[1]
    assert np.isnan(far).all()  # said, not guessed
    linear = WorldTransform.linear(transform.affine)
    assert largest(invert_points(linear, linear(x))[0] - x) < 1e-9


# ---- compositions, affine maps, determinants ------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3])
def test_composition_is_one_map_after_the_other(dim: int) -> None:
    fixed, moving = pair(dim)
    bent = to_world(deformation(dim), fixed, moving)
    motion = WorldTransform.linear(affine_of(rotation(dim, 0.2), (1.1, 0.9, 1.2)[:dim], (3.0, -4.0, 5.0)[:dim]))
    x = inside(fixed, margin=1)
    exact = compose_maps(motion, bent, fixed)
    assert largest(exact(x) - motion(bent(x))) < 1e-4
    before = map_points(np.linalg.inv(motion.affine), x)
    assert largest(compose_maps(bent, motion, fixed)(before) - bent(motion(before))) < 1e-3
    again = to_world(deformation(dim, seed=5), moving, fixed)
    index = np.stack(np.meshgrid(*(np.arange(n) for n in fixed.shape), indexing="ij"), axis=-1).reshape(-1, dim)
    voxels = map_points(fixed.affine, index)  # sampled there, so exact there
    assert largest(compose_maps(again, bent, fixed)(voxels) - again(bent(voxels))) < 1e-3


@pytest.mark.parametrize("ending", ["h5", "tfm", "mat"])
@pytest.mark.parametrize("dim", [2, 3])
def test_affine_maps_are_files_of_an_affine_map(tmp_path: Path, dim: int, ending: str) -> None:
    motion = WorldTransform.linear(affine_of(rotation(dim, 0.2), (1.1, 0.9, 1.2)[:dim], (3.0, -4.0, 5.0)[:dim]))
    path, x = tmp_path / f"a.{ending}", inside(pair(dim)[0])
    write(motion, path)
    theirs = sitk.ReadTransform(str(path))
    assert theirs.GetName() == "AffineTransform"
    assert largest(by_sitk(theirs, x) - motion(x)) < 1e-6
    back = read(path)
    assert isinstance(back, WorldTransform)
    assert back.is_linear
    assert np.allclose(back.affine, motion.affine)
    with pytest.raises(TransformError, match="can hold an affine map only"):
        write(to_world(deformation(dim), *pair(dim)), tmp_path / "b.mat")
    for bad in (np.ones((2, 5)), np.diag([1.0, 1.0, 1.0, 2.0]), np.zeros((4, 4))):
        with pytest.raises(TransformError, match=r"is not an affine map|singular"):
            WorldTransform.linear(bad)


@pytest.mark.parametrize("kind", GRIDS)
def test_determinants_are_of_the_world_map(kind: str) -> None:
    """In every orientation, of an affine and of a bent map whose determinants are known; where axes are not turned,
    which SimpleITK's filter does not look at, also as SimpleITK has it."""
    fixed, moving = pair(3, kind)
    linear = np.diag([1.1, 0.8, 1.3, 1.0])
    assert np.allclose(jacobian_determinant(WorldTransform.linear(linear), fixed).data, 1.1 * 0.8 * 1.3, atol=1e-4)
    inner = (slice(1, -1),) * 3
    index = np.stack(np.meshgrid(*(np.arange(n) for n in fixed.shape), indexing="ij"), axis=-1)
    known = (1 + 0.3 * np.cos(map_points(fixed.affine, index) / 20)).prod(axis=-1)
    found = jacobian_determinant(lambda x: x + 6 * np.sin(x / 20), fixed).data
    assert known.std() > 0.01
    assert np.abs(found - known)[inner].max() < 0.02
    if kind in ("plain", "anisotropic"):
        bent = to_world(deformation(), fixed, moving)
        field = sitk.TransformToDisplacementField(
            bent.to_sitk(), sitk.sitkVectorFloat64, fixed.shape, fixed.affine[:-1, -1].tolist(), fixed.spacing
        )
        theirs = sitk.GetArrayFromImage(sitk.DisplacementFieldJacobianDeterminant(field)).T
        assert np.abs(jacobian_determinant(bent, fixed).data - theirs)[inner].max() < 1e-3
    mirrored = WorldTransform.linear(np.diag([-1.0, 1.0, 1.0, 1.0]))
    assert (jacobian_determinant(mirrored, fixed).data < 0).all()


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "kind"), EVERY_GRID)
@pytest.mark.parametrize("ending", ["h5", "tfm"])
def test_round_trip(tmp_path: Path, dim: int, kind: str, ending: str) -> None:
    fixed, moving = pair(dim, kind)
    transform = to_world(deformation(dim), fixed, moving)
    write(transform, tmp_path / f"t.{ending}")
    back = read(tmp_path / f"t.{ending}")
    assert isinstance(back, WorldTransform)
    assert np.abs(back.affine - transform.affine).max() < 1e-11
    assert np.array_equal(back.displacement, transform.displacement)
    assert np.abs(back.lattice - transform.lattice).max() < 1e-11
    if ending == "h5":
        assert os.path.getsize(tmp_path / "t.h5") < transform.displacement.nbytes + 32_000  # float32
        write(transform, tmp_path / "again.h5")
        assert (tmp_path / "again.h5").read_bytes() == (tmp_path / "t.h5").read_bytes()


@pytest.mark.parametrize("kind", GRIDS)
def test_warp_is_what_ants_writes(tmp_path: Path, kind: str) -> None:
    fixed, moving = pair(3, kind)
    transform = to_world(deformation(), fixed, moving)
    write_warp(transform, fixed, tmp_path / "warp.nii.gz")
    header = nibabel.load(tmp_path / "warp.nii.gz").header
    assert header["dim"].tolist()[:6] == [5, *fixed.shape, 1, 3]
    assert int(header["intent_code"]) == 1007
    assert header.get_data_dtype() == np.float32
    assert header.get_xyzt_units()[0] == "mm"
    stored = np.asarray(nibabel.load(tmp_path / "warp.nii.gz").dataobj)[3, 4, 5, 0]
    x = map_points(fixed.affine, [3, 4, 5])
    assert largest(stored - (transform(x) - x)) < 1e-4  # LPS, no sign changed
    theirs = sitk.DisplacementFieldTransform(sitk.ReadImage(str(tmp_path / "warp.nii.gz"), sitk.sitkVectorFloat64))
    # x + u(x) is not stored as A(x + u(x)): both are linear between voxels, so they agree everywhere on the lattice
    points = inside(fixed, margin=0)
    assert largest(transform(points) - by_sitk(theirs, points)) < 1e-3  # NIfTI's header is float32
    back = read(tmp_path / "warp.nii.gz")
    assert largest(transform(points) - back(points)) < 1e-3


def test_warp_of_a_plane(tmp_path: Path) -> None:
    for kind in GRIDS:
        fixed, moving = pair(2, kind)
        transform = to_world(deformation(2), fixed, moving)
        write_warp(transform, fixed, tmp_path / f"{kind}.mha")
        points = inside(fixed, margin=0)
        assert largest(transform(points) - read(tmp_path / f"{kind}.mha")(points)) < 1e-4
    fixed, moving = pair(2, "anisotropic")
    transform = to_world(deformation(2), fixed, moving)
    write_warp(transform, fixed, tmp_path / "warp.nii.gz")
    assert nibabel.load(tmp_path / "warp.nii.gz").header["dim"].tolist()[:6] == [5, *fixed.shape, 1, 1, 2]
    points = inside(fixed, margin=0)
    assert largest(transform(points) - read(tmp_path / "warp.nii.gz")(points)) < 1e-3


def test_files_by_others(tmp_path: Path) -> None:
    fixed, moving = pair()
    transform, points = to_world(deformation(), fixed, moving), inside(fixed)
    centre = map_points(fixed.unit_to_world(), np.full(3, 0.5)).tolist()
    euler = sitk.Euler3DTransform(centre, 0.1, 0.2, -0.1, (0.5, -0.6, 0.7))  # stays on the lattice, mostly
    assert transform.covers(by_sitk(euler, points)).mean() > 0.7
    affine, field = (sitk.CompositeTransform(transform.to_sitk()).GetNthTransform(n) for n in (0, 1))
    spline = sitk.BSplineTransform(3, 3)
    spline.SetTransformDomainOrigin((-300.0, -300.0, 600.0))
    spline.SetTransformDomainPhysicalDimensions((600.0, 600.0, 600.0))
    spline.SetTransformDomainMeshSize((4, 4, 4))
    spline.SetParameters(np.random.default_rng(3).normal(0, 3, len(spline.GetParameters())).tolist())
    cases = {
        "euler.tfm": euler,
        "affine.mat": affine,
        "field.h5": field,
        "nested.h5": sitk.CompositeTransform([affine, sitk.CompositeTransform([field, euler])]),
        "between.tfm": sitk.CompositeTransform([affine, field, euler]),
        "before.tfm": sitk.CompositeTransform([field, euler, sitk.Euler3DTransform(centre, 0.0, 0.0, 0.2)]),
        "after.tfm": sitk.CompositeTransform([euler, affine, field]),
        "spline.tfm": sitk.CompositeTransform([euler, spline]),
        "two fields.h5": sitk.CompositeTransform([field, euler, field]),
    }
    for name, theirs in cases.items():
        if name == "nested.h5":
            theirs = sitk.CompositeTransform(theirs)
            theirs.FlattenTransform()
        sitk.WriteTransform(theirs, str(tmp_path / name))
        ours = read(tmp_path / name)
        assert isinstance(ours, ItkTransform if "spline" in name or "two" in name else WorldTransform), name
        assert largest(ours(points) - by_sitk(theirs, points)) < 1e-4, name
        write(ours, tmp_path / "copy.tfm", overwrite=True)
        assert largest(read(tmp_path / "copy.tfm")(points) - ours(points)) < 1e-4, name
    sampled = sample(read(tmp_path / "spline.tfm"), fixed)
    voxel = map_points(fixed.affine, [3, 4, 5])
    assert largest(sampled(voxel) - cases["spline.tfm"].TransformPoint(voxel.tolist())) < 1e-4


def test_a_pair_in_ants_order(tmp_path: Path) -> None:
    fixed, moving = pair(3, "anisotropic")
    transform, points = to_world(deformation(), fixed, moving), inside(fixed, margin=0)
    bent = dataclasses.replace(transform, affine=np.eye(4))
    write_warp(bent, fixed, tmp_path / "1Warp.nii.gz")
    sitk.WriteTransform(sitk.CompositeTransform(transform.to_sitk()).GetNthTransform(0), str(tmp_path / "0Affine.mat"))
    both = read([tmp_path / "1Warp.nii.gz", str(tmp_path / "0Affine.mat")])
    assert isinstance(both, WorldTransform)
    assert largest(both(points) - transform(points)) < 1e-3
    other = read([tmp_path / "0Affine.mat", tmp_path / "1Warp.nii.gz"])
    assert largest(other(points) - bent(map_points(transform.affine, points))) < 1e-3
    assert largest(other(points) - both(points)) > 1


def test_ants_reads_the_files_alike(tmp_path: Path) -> None:
    ants = pytest.importorskip("ants")
    fixed, moving = pair(3, "oblique")
    moving = from_array(moving.data.astype(np.float32), moving.affine)
    transform, points = to_world(deformation(), fixed, moving), inside(fixed, margin=0)
    write(transform, tmp_path / "t.h5")
    write_warp(transform, fixed, tmp_path / "warp.nii.gz")
    write_image(fixed, tmp_path / "fixed.nii.gz")
    write_image(moving, tmp_path / "moving.nii.gz")
    theirs = ants.read_transform(str(tmp_path / "t.h5"), precision="double")
    assert largest(np.array([theirs.apply_to_point(p.tolist()) for p in points]) - transform(points)) < 1e-3
    ours = apply(transform, moving, fixed)
    for name in ("t.h5", "warp.nii.gz"):
        warped = ants.apply_transforms(
            ants.image_read(str(tmp_path / "fixed.nii.gz")),
            ants.image_read(str(tmp_path / "moving.nii.gz")),
            [str(tmp_path / name)],
        ).numpy()
        both = (warped != 0) & (ours.data != 0)
        assert both.mean() > 0.3
        assert np.abs(warped - ours.data)[both].max() < 0.5  # of 1000: header rounding


def saved(path: Path) -> Path:
    fixed, moving = pair()
    transform = to_world(deformation(), fixed, moving)
    write_warp(transform, fixed, path) if "nii" in path.name or "mha" in path.name else write(transform, path)
    return path


def cut(path: Path, part: float = 0.6) -> None:
    content = saved(path).read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def cut_mat(path: Path) -> None:
    sitk.WriteTransform(sitk.AffineTransform(3), str(path))
    path.write_bytes(path.read_bytes()[:100])


def with_nan(path: Path) -> None:
    fixed, moving = pair()
    transform = to_world(deformation(), fixed, moving)
    transform.displacement[3, 3, 3] = np.nan
    write(transform, path)


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("a.h5", lambda p: None, "does not exist"),
    "folder": ("a.h5", lambda p: p.mkdir(), "folder"),
    "empty": ("a.h5", lambda p: p.write_bytes(b""), "cannot be read"),
    "empty text": ("a.tfm", lambda p: p.write_bytes(b""), "cannot be read"),
    "text": ("a.tfm", lambda p: p.write_text("hello\n" * 50), "cannot be read"),
    "not HDF5": ("a.h5", lambda p: p.write_bytes(b"hello" * 500), "cannot be read"),
    "not Matlab": ("a.mat", lambda p: p.write_bytes(b"hello" * 500), "cannot be read"),
    "truncated h5": ("a.h5", cut, "cannot be read"),
    "almost whole h5": ("a.h5", lambda p: cut(p, 0.99), "cannot be read"),
    "truncated tfm": ("a.tfm", cut, "is truncated"),
    "header of tfm": ("a.tfm", lambda p: cut(p, 0.001), "is truncated"),
    "almost whole tfm": ("a.tfm", lambda p: cut(p, 0.999), "is truncated"),
    "truncated mat": ("a.mat", cut_mat, "cannot be read"),
    "truncated warp": ("a.nii.gz", cut, "truncated"),
    "truncated mha": ("a.mha", cut, "cannot be read"),
    "not finite": ("a.h5", with_nan, "not finite"),
    "an image": ("a.nii.gz", lambda p: write_image(pair()[0], p), "1 numbers per voxel"),
    "no known type": ("a.xyz", lambda p: p.write_bytes(b"hello"), "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_clear_line(tmp_path: Path, case: str) -> None:
    name, make, message = BAD[case]
    make(tmp_path / name)
    with pytest.raises(TransformError, match=message) as caught:
        read(tmp_path / name)
    line = str(caught.value)
    assert line.startswith(str(tmp_path / name))
    assert "\n" not in line
    assert "0x" not in line


def test_overwriting_needs_leave(tmp_path: Path) -> None:
    fixed, moving = pair()
    transform = to_world(deformation(), fixed, moving)
    for name in ("t.h5", "t.tfm", "warp.nii.gz"):
        content = saved(tmp_path / name).read_bytes()
        with pytest.raises(FileExistsError, match="exists already"):
            saved(tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    write(to_world(Identity(), fixed, moving), tmp_path / "t.h5", overwrite=True)
    assert largest(read(tmp_path / "t.h5")(inside(fixed)) - transform(inside(fixed))) > 1
    write_warp(transform, fixed, tmp_path / "warp.nii.gz", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["t.h5", "t.tfm", "warp.nii.gz"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, moving = pair()
    transform = to_world(deformation(), fixed, moving)
    sheared = from_array(np.zeros((4, 5, 6)), [[1, 0.3, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    with pytest.raises(TransformError, match=r"extension '.nii'"):
        write(transform, tmp_path / "a.nii")
    with pytest.raises(OSError, match="No such file"):
        write(transform, tmp_path / "none" / "a.h5")
    with pytest.raises(TransformError, match="voxels would move by"):
        write_warp(transform, sheared, tmp_path / "a.nii.gz")
    with pytest.raises(TransformError, match="cannot be written"):
        write_warp(transform, fixed, tmp_path / "a.png")
    with pytest.raises(TransformError, match="cannot be written"):
        write_warp(transform, fixed, tmp_path / "a.xyz")
    for failure in (OSError(28, "No space left on device"), KeyboardInterrupt()):

        def fail(parts: object, path: Path, packed: bool, failure: BaseException = failure) -> None:
            path.write_bytes(b"half")
            raise failure

        monkeypatch.setattr("carlreg.files.transform_files._write_hdf5", fail)
        with pytest.raises((OSError, KeyboardInterrupt)):
            write(transform, tmp_path / "a.h5")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dim", [2, 3])
def test_learn2reg_displaces_indices(dim: int) -> None:
    fixed, other = pair(dim)
    moving = dataclasses.replace(fixed, data=fixed.data[::-1].copy())
    transform = to_world(deformation(dim), fixed, moving)
    field = learn2reg(transform, fixed, moving)
    assert field.shape == (*fixed.shape, dim)
    assert field.dtype == np.float32
    index = np.stack(np.meshgrid(*map(np.arange, fixed.shape), indexing="ij"), axis=-1)
    there = np.rint(index + field).astype(int)
    inside = ((there >= 0) & (there < fixed.shape)).all(axis=-1)
    warped = apply(transform, moving, fixed, "nearest")
    assert np.array_equal(moving.data[tuple(there[inside].T)], warped.data[inside])
    with pytest.raises(TransformError, match="different grids"):
        learn2reg(transform, fixed, other)
    with pytest.raises(TransformError, match="different grids"):
        learn2reg(transform, fixed, dataclasses.replace(fixed, affine=2 * fixed.affine - np.diag([0] * dim + [1])))


def test_importing_does_not_import_simpleitk() -> None:
    code = "import sys, carlreg.files.transform_files; sys.exit('SimpleITK' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_learn2reg_files_round_trip(tmp_path: Path) -> None:
    fixed, _ = pair(3, "left-handed")
    bent, path = to_world(deformation(), fixed, fixed), tmp_path / "disp_0001_0002.nii.gz"
    write_learn2reg(bent, fixed, fixed, path)
    assert is_learn2reg(path)
    assert not is_warp(path)
    stored = nibabel.load(path)
    assert np.allclose(np.asarray(stored.dataobj), learn2reg(bent, fixed, fixed))
    assert np.allclose(np.diag([-1, -1, 1, 1]) @ stored.affine, fixed.affine, atol=1e-3)
    x = inside(fixed, margin=0)
    assert largest(read_learn2reg(path, fixed)(x) - bent(x)) < 1e-2
    write_warp(bent, fixed, tmp_path / "warp.nii.gz")
    assert is_warp(tmp_path / "warp.nii.gz")
    assert not is_learn2reg(tmp_path / "warp.nii.gz")
    with pytest.raises(TransformError, match="is not a NIfTI image of shape"):
        read_learn2reg(tmp_path / "warp.nii.gz", fixed)
    with pytest.raises(TransformError, match="expected the same grid"):
        read_learn2reg(path, pair()[1])
    with pytest.raises(TransformError, match="3-D and in NIfTI"):
        write_learn2reg(bent, fixed, fixed, tmp_path / "disp.mha")


@pytest.mark.parametrize(("lowest", "expected"), [(-1024, -1024), (0, 0), (7, 0)])
def test_beyond_the_image_there_is_air(lowest: int, expected: int) -> None:
    """The value outside the image: 0, or the lowest value if the image has negative ones, like CT."""
    data = np.arange(4 * 4 * 4, dtype=np.int16).reshape(4, 4, 4) + lowest
    image = from_array(data)
    shifted = apply(lambda points: points + 2.0, image, image)
    assert (shifted.data == expected).any()
    assert shifted.data[0, 0, 0] == data[2, 2, 2]
    assert (apply(lambda points: points + 2.0, image, image, outside=5).data == 5).any()
