"""Grids and transforms: composition, inversion, extrapolation, pooling, interpolation."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import texture, voxels
from torch import Tensor

from carlreg import Affine, DisplacementField, Identity, Transform, compose, invert, warp
from carlreg.geometry.fitting import about_centre, fit_affine, fit_rigid, fit_robustly, random_rotation
from carlreg.geometry.grids import (
    Grid,
    _grid_sample,
    _sample_by_index,
    fine_to_coarse,
    interpolate,
    pool,
    voxel_points,
)
from carlreg.geometry.transforms import Composition

SHAPES = {1: (17,), 2: (17, 12), 3: (9, 12, 10)}


def smooth_field(dim: int, amplitude: float, batch: int = 1, side: int = 0) -> DisplacementField:
    """A diffeomorphism that keeps the cube: x + a · sin(πx) · cos(…), zero normal displacement on the faces."""
    shape = (side,) * dim if side else SHAPES[dim]
    x = Grid.of(shape).points(torch.float64)
    parts = []
    for axis in range(dim):
        across = torch.cos(2.0 * x[..., (axis + 1) % dim] + axis) if dim > 1 else 1.0
        parts.append(amplitude * torch.sin(torch.pi * x[..., axis]) * across)
    scale = torch.linspace(1.0, 0.5, batch, dtype=torch.float64).reshape(-1, *(1,) * (dim + 1))
    return DisplacementField(scale * torch.stack(parts)[None])


def random_affine(dim: int, batch: int = 1) -> Affine:
    linear = torch.eye(dim, dtype=torch.float64) + 0.3 * torch.randn(batch, dim, dim, dtype=torch.float64)
    return Affine.from_parts(linear, torch.randn(batch, dim, dtype=torch.float64))


def some_points(dim: int, batch: int = 1, low: float = -0.5, high: float = 1.5) -> Tensor:
    return low + (high - low) * torch.rand(batch, 50, dim, dtype=torch.float64)


# ---- grids ----------------------------------------------------------------------------------------------------------


def test_unit_coordinates_run_from_first_to_last_voxel_centre() -> None:
    points = Grid.of((5, 3)).points(torch.float64)
    assert points[0, 0].tolist() == [0, 0]
    assert points[-1, -1].tolist() == [1, 1]
    assert points[1, 0].tolist() == [0.25, 0]  # array-axis order: the first coordinate is the first axis
    padded = Grid.of((5, 3)).pad(2)
    assert padded.shape == (9, 7)
    assert torch.allclose(padded.points(torch.float64)[2:-2, 2:-2], points)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_interpolation_reproduces_voxels_and_linear_functions(dim: int) -> None:
    image = texture(*SHAPES[dim])
    assert torch.allclose(interpolate(image, voxel_points(image)), image)
    points = some_points(dim, low=0, high=1)
    coefficients = torch.arange(1.0, dim + 1, dtype=torch.float64)
    ramp = (voxel_points(image) @ coefficients)[:, None]
    assert torch.allclose(interpolate(ramp, points), (points @ coefficients)[:, None])


def test_interpolation_against_a_direct_sum() -> None:
    """Trilinear interpolation written out: a weighted sum over the eight corners."""
    image = texture(5, 6, 7)
    point = torch.tensor([0.33, 0.81, 0.52], dtype=torch.float64)
    index = point * torch.tensor([4, 5, 6])
    low, total = index.floor().long(), 0.0
    for corner in itertools.product((0, 1), repeat=3):
        weight = torch.prod(torch.where(torch.tensor(corner) == 1, index - low, 1 - (index - low)))
        total += float(weight * image[0, 0][tuple(low + torch.tensor(corner))])
    assert float(interpolate(image, point[None, None])) == pytest.approx(total, abs=1e-12)


def test_interpolation_outside() -> None:
    image = texture(4, 4)
    beyond = torch.tensor([[[-3.0, 0.0], [2.0, 1.0]]], dtype=torch.float64)
    border = interpolate(image, beyond)[0, 0]
    assert torch.equal(border, torch.stack([image[0, 0, 0, 0], image[0, 0, 3, 3]]))
    assert interpolate(image, beyond, outside="zeros").abs().max() == 0


@pytest.mark.parametrize("shape", [(9,), (9, 1), (9, 8, 7)], ids=str)
@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize("outside", ["border", "zeros"])
def test_sampling_by_index_is_sampling_by_kernel(shape: tuple[int, ...], mode: str, outside: str) -> None:
    """The deterministic variant for GPUs, and its gradients."""
    image = torch.rand(2, 3, *shape, dtype=torch.float64, requires_grad=True)
    points = some_points(len(shape), batch=2, low=-0.3, high=1.3)
    if outside == "zeros" and 1 in shape:
        pytest.skip("an axis of one voxel has no outside")
    by_index, by_grid_sample = (f(image, points, mode, outside) for f in (_sample_by_index, _grid_sample))
    assert torch.allclose(by_index, by_grid_sample)
    gradients = [torch.autograd.grad(values.square().sum(), image)[0] for values in (by_index, by_grid_sample)]
    assert torch.allclose(*gradients)


def test_nearest_interpolation_keeps_labels() -> None:
    labels = torch.randint(0, 5, (1, 1, 8, 9)).double()
    values = interpolate(labels, some_points(2, low=0, high=1), mode="nearest")
    assert set(values.unique().tolist()) <= set(labels.unique().tolist())


@pytest.mark.parametrize("shape", [(8,), (7,), (1, 6), (5, 4, 7), (2, 1, 3)])
def test_pooling_against_loops(shape: tuple[int, ...]) -> None:
    image = texture(*shape)
    pooled = pool(image)
    for coarse in itertools.product(*(range(n) for n in pooled.shape[2:])):
        block = tuple(slice(2 * c, min(2 * c + 2, n)) for c, n in zip(coarse, shape, strict=True))
        assert float(pooled[(0, 0, *coarse)]) == pytest.approx(float(image[(0, 0, *block)].mean()))


def test_pooled_voxels_lie_half_a_voxel_further() -> None:
    """A pooled linear ramp has at the coarse unit coordinate A(x) the value that the ramp has at x."""
    image = voxel_points(torch.empty(1, 1, 8, 12, dtype=torch.float64)).movedim(-1, 1)
    scale, shift = (torch.tensor(values, dtype=torch.float64) for values in fine_to_coarse((8, 12)))
    points = some_points(2, low=0.2, high=0.8)
    assert torch.allclose(interpolate(pool(image), scale * points + shift).movedim(1, -1), points)


# ---- composition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_compose_is_associative(dim: int) -> None:
    f, g, h = smooth_field(dim, 0.1), random_affine(dim), smooth_field(dim, -0.08)
    points = some_points(dim)
    left, right = compose(compose(f, g), h)(points), compose(f, compose(g, h))(points)
    assert torch.equal(left, right)
    assert torch.allclose(left, f(g(h(points))))


def test_compose_simplifies() -> None:
    f, a, b = smooth_field(2, 0.1), random_affine(2), random_affine(2)
    assert compose(f, Identity()) is f
    assert isinstance(compose(), Identity)
    product = compose(a, b)
    assert isinstance(product, Affine)
    points = some_points(2)
    assert torch.allclose(product(points), a(b(points)))
    nested = compose(compose(f, a), compose(b, f))
    assert isinstance(nested, Composition)
    assert len(nested.transforms) == 3


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_affine_inverse_is_exact(dim: int) -> None:
    affine, points = random_affine(dim, batch=3), some_points(dim, batch=3)
    assert (affine.inverse()(affine(points)) - points).abs().max() < 1e-12
    assert torch.allclose(affine.inverse().linear, torch.linalg.inv(affine.linear), rtol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("extrapolate", ["clamp", "mirror"])
def test_on_grid_of_equals_calling_at_those_points(dim: int, extrapolate: str) -> None:
    field = smooth_field(dim, 0.2, batch=2)
    field = DisplacementField(field.displacement, extrapolate)
    same, other = texture(*SHAPES[dim]), texture(*(n + 3 for n in SHAPES[dim]))
    for transform in (field, compose(random_affine(dim), field), compose(field, random_affine(dim)), Identity()):
        for image in (same, other):
            assert torch.allclose(transform.on_grid_of(image), transform(voxel_points(image)), atol=1e-14)


def test_points_of_any_leading_shape() -> None:
    field = smooth_field(2, 0.1, batch=2)
    points = torch.rand(2, 3, 4, 5, 2, dtype=torch.float64)
    assert field(points).shape == points.shape
    assert torch.allclose(field(points)[:, 1, 2, 3], field(points[:, 1, 2, 3][:, None])[:, 0])


def test_batch_of_one_is_repeated() -> None:
    field = smooth_field(2, 0.1, batch=3)
    one = some_points(2)
    assert torch.allclose(field(one), field(one.expand(3, -1, -1)))
    assert torch.allclose(field[1:2](one), field(one)[1:2])
    both = compose(random_affine(2), field)
    assert torch.allclose(both[1:](one), both(one)[1:])


# ---- extrapolation --------------------------------------------------------------------------------------------------


def affine_as_field(affine: Affine, dim: int, extrapolate: str) -> DisplacementField:
    points = Grid.of(SHAPES[dim]).points(torch.float64)[None]
    return DisplacementField((affine(points) - points).movedim(-1, 1), extrapolate)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_mirror_reproduces_affine_fields_one_cube_further(dim: int) -> None:
    affine = random_affine(dim)
    points = some_points(dim, low=-1, high=2)
    mirror, clamp = (affine_as_field(affine, dim, kind) for kind in ("mirror", "clamp"))
    assert (mirror(points) - affine(points)).abs().max() < 1e-12
    assert (clamp(points) - affine(points)).abs().max() > 0.1


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_mirror_equals_clamp_inside(dim: int) -> None:
    field, points = smooth_field(dim, 0.2), some_points(dim, low=0, high=1)
    mirror = DisplacementField(field.displacement, "mirror")
    assert (mirror(points) - field(points)).abs().max() < 1e-14


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_mirror_is_smooth_across_the_faces_and_clamp_is_not(dim: int) -> None:
    """One-sided derivatives at points of every face: equal for mirror; for clamp they jump."""
    displacement = 0.1 * torch.randn(1, dim, *SHAPES[dim], dtype=torch.float64)
    step = 1e-4
    for kind, smooth in (("mirror", True), ("clamp", False)):
        field = DisplacementField(displacement, kind)
        worst = 0.0
        for axis, face in itertools.product(range(dim), (0.0, 1.0)):
            on_face = some_points(dim, low=0.1, high=0.9)
            on_face[..., axis] = face
            normal = torch.zeros(dim, dtype=torch.float64)
            normal[axis] = step
            above = (field(on_face + normal) - field(on_face)) / step
            below = (field(on_face) - field(on_face - normal)) / step
            worst = max(worst, float((above - below).abs().max()))
        assert (worst < 1e-8) is smooth


# ---- inversion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_invert_residual_on_a_diffeomorphism(dim: int) -> None:
    field, image = smooth_field(dim, 0.2, side=24), texture(*(24,) * dim)
    assert field.displacement.abs().max() * 23 > 4
    inverse = invert(field, like=image)
    residual = voxels(field(inverse.on_grid_of(image)) - voxel_points(image), image.shape[2:])
    assert residual.norm(dim=-1).max() < 1e-3


def test_invert_with_a_large_rotation() -> None:
    """Plain fixed-point iteration diverges here: the displacement's gradient is far above 1."""
    image = texture(20, 24, 16)
    rotation = random_rotation((20, 24, 16), 1, like=image, generator=torch.Generator().manual_seed(3))
    assert (rotation.linear - torch.eye(3)).norm() > 1.5
    transform = compose(rotation, DisplacementField(smooth_field(3, 0.05).displacement, "mirror"))
    inverse = invert(transform, like=image)
    residual = voxels(transform(inverse.on_grid_of(image)) - voxel_points(image), image.shape[2:])
    assert residual.norm(dim=-1).median() < 1e-3
    assert residual.norm(dim=-1).max() < 1e-2


def test_invert_is_a_two_sided_inverse() -> None:
    field, image = smooth_field(2, 0.15, side=64), texture(64, 64)
    inverse = invert(field, like=image)
    inside = some_points(2, low=0.2, high=0.8)
    assert voxels(inverse(field(inside)) - inside, (64, 64)).abs().max() < 0.05  # interpolation error of the inverse


def test_fit_affine_recovers_an_affine_map_and_ignores_weightless_points() -> None:
    affine, points = random_affine(3, batch=2), some_points(3, batch=2)
    targets = affine(points)
    targets[:, :5] += 10
    weights = torch.ones(2, 50, dtype=torch.float64)
    weights[:, :5] = 0
    assert (fit_affine(points, targets, weights).matrix - affine.matrix).abs().max() < 1e-10


def test_a_quarter_turn_about_the_centre_is_that_of_the_array() -> None:
    quarter = torch.tensor([[[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]]])
    image = torch.rand(1, 1, 6, 8, 4, dtype=torch.float64)  # of a box, what lies in the middle square turns in itself
    turned = warp(image, about_centre(quarter, image.shape[2:], like=image), like=image)
    assert torch.allclose(turned[:, :, :, 1:7], image[:, :, :, 1:7].rot90(1, (2, 3)))


def test_random_rotations_are_rotations_about_the_centre() -> None:
    shape = (20, 30, 25)
    rotation = random_rotation(shape, 200, like=torch.empty((), dtype=torch.float64))
    centre = torch.full((200, 1, 3), 0.5, dtype=torch.float64)
    assert (rotation(centre) - centre).abs().max() < 1e-12
    size = torch.tensor([19.0, 29, 24], dtype=torch.float64)
    in_voxels = size[:, None] * rotation.linear / size
    eye = torch.eye(3, dtype=torch.float64)
    assert (in_voxels @ in_voxels.mT - eye).abs().max() < 1e-12
    assert (torch.linalg.det(in_voxels) - 1).abs().max() < 1e-12
    assert in_voxels.mean(dim=0).abs().max() < 0.2  # uniform: no direction preferred


# ---- warping --------------------------------------------------------------------------------------------------------


def test_warp_pulls_images_and_pushes_points() -> None:
    """moving ∘ φ: a point p of fixed shows what moving has at φ(p)."""
    moving = torch.zeros(1, 1, 11, 11, dtype=torch.float64)
    moving[0, 0, 7, 4] = 1
    phi = Affine.translation(torch.tensor([[0.2, -0.1]], dtype=torch.float64))  # two voxels down, one left
    warped = warp(moving, phi, like=moving, outside="zeros")
    assert float(warped[0, 0, 5, 5]) == pytest.approx(1)
    assert float(warped.sum()) == pytest.approx(1)
    assert torch.allclose(
        phi(torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)) * 10, torch.tensor([7.0, 4.0]).double()
    )


def test_warp_onto_another_grid() -> None:
    moving, like = texture(9, 7), texture(17, 13)
    assert torch.allclose(warp(moving, Identity(), like=like)[..., ::2, ::2], moving)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_wrong_dimensions_are_named() -> None:
    field: Transform = smooth_field(3, 0.1)
    with pytest.raises(ValueError, match="points have 2 coordinates but the field has 3 spatial axes"):
        field(some_points(2))
    with pytest.raises(ValueError, match="points have 2 coordinates but the affine map has 3"):
        random_affine(3)(some_points(2))
    with pytest.raises(ValueError, match=r"displacement field has shape \(1, 2, 4, 4, 4\); expected \(B, D, \*shape\)"):
        DisplacementField(torch.zeros(1, 2, 4, 4, 4))
    with pytest.raises(ValueError, match=r"affine matrix has shape \(3, 3\)"):
        Affine(torch.eye(3))
    with pytest.raises(ValueError, match="'reflect'; expected 'clamp' or 'mirror'"):
        DisplacementField(torch.zeros(1, 1, 4), "reflect")
    with pytest.raises(ValueError, match=r"points have shape \(3, 50, 2\) but the affine map has batch size 2"):
        random_affine(2, batch=2)(some_points(2, batch=3))
    with pytest.raises(ValueError, match=r"add the batch axis with points\[None\]"):
        random_affine(2)(torch.rand(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"use phi\[0:1\] for one item"):
        field[0]
    with pytest.raises(ValueError, match=r"points have shape \(3, 5, 1\) but the image has batch size 2"):
        interpolate(torch.rand(2, 1, 4), torch.rand(3, 5, 1))


# ---- fits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [2, 3])
def test_rigid_fit_finds_rotations_and_never_reflects(dim: int) -> None:
    points = torch.randn(2, 40, dim, dtype=torch.float64)
    motion = random_rotation((9,) * dim, 2, like=points)
    found = fit_rigid(points, motion(points))
    assert torch.allclose(found.matrix, motion.matrix)
    # Of a reflection, it is the closest rotation: no small turn of it comes closer.
    mirrored = points * torch.tensor([-1.0] + [1.0] * (dim - 1), dtype=torch.float64)
    best = fit_rigid(points, mirrored)
    assert torch.allclose(torch.linalg.det(best.linear), torch.ones(2, dtype=torch.float64))
    error = (best(points) - mirrored).square().sum(dim=(1, 2))
    for angle in (0.05, -0.05):
        turn = torch.eye(dim, dtype=torch.float64)
        a = torch.tensor(angle)
        turn[:2, :2] = torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]])
        other = Affine.from_parts(best.linear @ turn, best.shift)
        assert bool(((other(points) - mirrored).square().sum(dim=(1, 2)) >= error - 1e-9).all())


@pytest.mark.parametrize("fit", [fit_affine, fit_rigid])
def test_weights_of_zero_leave_points_out(fit: object) -> None:
    points = torch.randn(1, 50, 3, dtype=torch.float64)
    motion = random_rotation((9, 9, 9), 1, like=points)
    targets = motion(points)
    targets[:, 25:] += 100
    weights = (torch.arange(50) < 25).double()[None]
    assert torch.allclose(fit(points, targets, weights).matrix, motion.matrix)  # type: ignore[operator]


@pytest.mark.parametrize("fit", [fit_affine, fit_rigid])
def test_a_third_of_wrong_matches_hardly_counts(fit: object) -> None:
    points = 100 * torch.rand(1, 300, 3, dtype=torch.float64)
    motion = random_rotation((9, 9, 9), 1, like=points)
    targets = motion(points) + 0.1 * torch.randn(1, 300, 3, dtype=torch.float64)
    targets[:, :100] = 100 * torch.rand(1, 100, 3, dtype=torch.float64)
    right = points[:, 100:]

    def missed(found: Affine) -> float:
        return float((found(right) - motion(right)).norm(dim=-1).mean())

    assert missed(fit(points, targets)) > 5  # type: ignore[operator]
    assert missed(fit_robustly(fit, points, targets)) < 0.1  # type: ignore[arg-type]


def test_a_shared_batch_of_one_gives_what_a_small_one_does() -> None:
    """Many points of one item are passed to PyTorch as several items."""
    image, points = torch.rand(1, 2, 9, 8, 7), torch.rand(1, 2**14 + 5, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        many = interpolate(image, points)
        few = torch.cat([interpolate(image, part) for part in points.split(1000, dim=1)], dim=-1)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(many, few)
