"""The paper's claims about equivariance, as tests that can fail.

How they are built so that they mean something. Features are long (logits of ±length², so attention does not leak over
the whole image), last convolutions are random, and every refinement is shown to move points by at least two voxels.
The moving image shows a random texture on a blank canvas. The encoder sees 22 voxels to each side of a voxel, 9 of
which may lie in the padding; so an object 13 coarse voxels (52 fine ones) away from the canvas's ends along the
shifted axis, before and after the shift, is encoded without seeing them. Along the other axes nothing moves, and no
margin is needed.
"""

from __future__ import annotations

import pytest
import torch
from conftest import SMALL, displacement_in_voxels, paste, randomize, texture, voxels
from torch import Tensor

from carlreg import (
    Affine,
    CoordinateAttention,
    Downsample,
    PredictDisplacement,
    RegistrationAlgorithm,
    TwoStep,
    carl,
    carl_rot,
    gradicon,
)
from carlreg.geometry.grids import voxel_points
from carlreg.geometry.transforms import DisplacementField
from carlreg.model.algorithms import coordinate_matches
from carlreg.model.encoder import Encoder, Symmetrized, axis_rotations, rotate_grid
from carlreg.model.unet import UNet

LENGTH = 14.0
MARGIN = 13
"""Encoder's reach less the padding, in voxels of the grid on which attention works."""


def shift_of(voxels_: int, axis: int, shape: tuple[int, ...]) -> Tensor:
    """A shift by whole voxels along one axis, in unit coordinates: (1, D)."""
    shift = torch.zeros(1, len(shape), dtype=torch.float64)
    shift[0, axis] = voxels_ / (shape[axis] - 1)
    return shift


def moved_canvas(axis: int, dim: int, shift: int, coarse: int = 1, side: int = 9) -> tuple[Tensor, Tensor, int]:
    """A textured object on a canvas with room along `axis`, and the same with the object moved by `shift`."""
    side *= coarse
    margin = MARGIN * coarse
    shape = tuple(side + 2 * margin + shift if a == axis else side + 2 * coarse for a in range(dim))
    start = tuple(margin if a == axis else coarse for a in range(dim))
    after = tuple(s + shift * (a == axis) for a, s in enumerate(start))
    patch = texture(*(side,) * dim)
    return paste(patch, shape, start), paste(patch, shape, after), side


def assert_refinements_move(model: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, least: float = 2.0) -> None:
    """Assert that every Ψ of the tree moves points by at least this many voxels (RMS) on this pair."""
    seen: list[float] = []
    unets = [module for module in model.modules() if isinstance(module, UNet)]
    hooks = [
        unet.register_forward_hook(lambda _, __, output: seen.append(displacement_in_voxels(output))) for unet in unets
    ]
    model(moving, fixed)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(unets)
    assert min(seen) >= least, f"refinements move by {seen} voxels"


# ---- the encoder and Ξθ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_encoder_commutes_with_integer_shifts(dim: int) -> None:
    before, after, _ = moved_canvas(0, dim, shift=5, side=20)
    encoder = randomize(Encoder(dim, width=8).double(), before)
    # Away from the array's ends by the encoder's reach; `before` and `after` differ by a shift of 5 along axis 0.
    reach = encoder.reach
    difference = encoder(after)[:, :, 5:] - encoder(before)[:, :, :-5]
    assert difference[:, :, reach:-reach].numel() > 0
    assert difference[:, :, reach:-reach].abs().max() < 1e-12


@pytest.mark.parametrize(("dim", "axis"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_xi_is_equivariant_to_shifts_of_the_moving_image(dim: int, axis: int) -> None:
    """Ξθ[M ∘ W, F] = W⁻¹ ∘ Ξθ[M, F] for every fixed voxel, whatever the fixed image is."""
    shift = 7
    before, after, side = moved_canvas(axis, dim, shift)
    fixed = before[(..., *(slice(MARGIN, MARGIN + side) if a == axis else slice(None) for a in range(dim)))]
    xi = randomize(CoordinateAttention(Encoder(dim, width=16), length=LENGTH).double(), fixed, fixed)
    # The object moved up by `shift` voxels: W⁻¹(x) = x + shift.
    expected = xi(before, fixed).on_grid_of(fixed) + shift_of(shift, axis, before.shape[2:])
    error = voxels(xi(after, fixed).on_grid_of(fixed) - expected, before.shape[2:])
    assert error.abs().max() <= 1e-6


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_xi_is_equivariant_to_shifts_of_the_fixed_image(dim: int) -> None:
    """Ξθ[M, F ∘ U] = Ξθ[M, F] ∘ U on voxels whose features do not see the fixed image's ends."""
    shift = 6
    before, after, side = moved_canvas(0, dim, shift)
    moving = before[:, :, 10:50]
    xi = randomize(CoordinateAttention(Encoder(dim, width=16), length=LENGTH).double(), moving, moving)
    whole, shifted = xi(moving, before).on_grid_of(before), xi(moving, after).on_grid_of(after)
    error = voxels(shifted[:, 13 + shift : 13 + shift + side] - whole[:, 13 : 13 + side], moving.shape[2:])
    assert error.abs().max() <= 1e-6


# ---- Ψ and TwoStep --------------------------------------------------------------------------------------------------

REACH_OF_UNET = 94
"""Voxels to each side that a U-Net of five levels sees."""


def unet_step(dim: int) -> PredictDisplacement:
    return PredictDisplacement(UNet(dim, down=SMALL["unet_down"], up=SMALL["unet_up"])).double()


@pytest.mark.parametrize("dim", [1, 2])
def test_psi_is_equivariant_to_shifting_both_images(dim: int) -> None:
    """Ψ[M ∘ U, F ∘ U] = U⁻¹ ∘ Ψ[M, F] ∘ U for U a multiple of the stride, 32, away from the ends by its reach."""
    long = [texture(512 + 32, *(24,) * (dim - 1)) for _ in range(2)]
    moving, fixed = (image[:, :, 32:] for image in long)
    psi = randomize(unet_step(dim), moving, fixed)
    plain = psi(moving, fixed).displacement
    shifted = psi(*(image[:, :, :-32] for image in long)).displacement
    inside = slice(REACH_OF_UNET, 512 - 32 - REACH_OF_UNET)
    assert displacement_in_voxels(plain) >= 2
    assert (shifted[:, :, 32:] - plain[:, :, :-32])[:, :, inside].abs().max() * 511 <= 1e-9


def test_psi_is_not_equivariant_to_shifting_one_image() -> None:
    moving, fixed = texture(512), texture(512)
    psi = randomize(unet_step(1), moving, fixed)
    shifted = psi(moving.roll(32, -1), fixed).displacement
    # [W, U] equivariance would add 32 voxels to the answer; predicting displacements cannot.
    error = (shifted - psi(moving, fixed).displacement) * 511 - 32
    assert error.abs().mean() > 10


def test_two_step_of_equivariant_steps_is_equivariant() -> None:
    """TwoStep{[W, U], [U, U]} is [W, U]: Ξθ then Ψ, no Downsample, W by any whole voxel."""
    before, after, side = moved_canvas(0, 1, shift=7, side=64)
    fixed = before[:, :, MARGIN : MARGIN + side]
    xi = CoordinateAttention(Encoder(1, width=16), length=LENGTH).double()
    model = randomize(TwoStep(xi, unet_step(1)), fixed, fixed)
    assert_refinements_move(model, before, fixed)
    expected = model(before, fixed).on_grid_of(fixed) + shift_of(7, 0, before.shape[2:])
    error = voxels(model(after, fixed).on_grid_of(fixed) - expected, before.shape[2:])
    assert error.abs().max() <= 1e-6


# ---- the whole network ----------------------------------------------------------------------------------------------


def small_carl(dim: int) -> RegistrationAlgorithm:
    return carl(dim, width=16, length=LENGTH, **SMALL).double()


def w_error(model: RegistrationAlgorithm, dim: int, axis: int, shift: int, move: float = 4.0, extra: int = 0) -> Tensor:
    """How far Φ[M ∘ W, F] is from W⁻¹ ∘ Φ[M, F], in voxels, at every voxel of F; `extra` voxels make the moving
    image longer along the axis, and its side odd."""
    before, after, side = moved_canvas(axis, dim, shift, coarse=4, side=8)
    blank = (0, 0) * (dim - 1 - axis) + (0, extra)
    before, after = (torch.nn.functional.pad(image, blank) for image in (before, after))
    inside = slice(MARGIN * 4, MARGIN * 4 + side)
    fixed = before[(..., *(inside if a == axis else slice(None) for a in range(dim)))]
    randomize(model, before, fixed, move=move)
    assert_refinements_move(model, before, fixed, least=move / 2)
    expected = model(before, fixed).on_grid_of(fixed) + shift_of(shift, axis, before.shape[2:])
    return voxels(model(after, fixed).on_grid_of(fixed) - expected, before.shape[2:])


@pytest.mark.parametrize(("dim", "axis"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_carl_is_equivariant_to_shifts_of_the_moving_image(dim: int, axis: int) -> None:
    """W a multiple of 4 voxels, since CARL pools twice before it attends."""
    assert w_error(small_carl(dim), dim, axis, shift=12).abs().max() <= 1e-3


@pytest.mark.parametrize("extra", [1, 2, 3, 5])
def test_carl_is_equivariant_on_grids_of_any_side(extra: int) -> None:
    """Sides that are not multiples of 4, such as 175."""
    assert w_error(small_carl(1), 1, 0, shift=12, extra=extra).abs().max() <= 1e-3


@pytest.mark.parametrize("dim", [1, 2])
def test_carl_is_equivariant_to_shifts_of_the_fixed_image(dim: int) -> None:
    """U a multiple of 64 voxels, the stride of Ψ1, which works at half the resolution.

    Margin: the U-Nets see 94 (Ψ2, Ψ3) and 188 (Ψ1) voxels to each side and the encoder 52, and the steps read one
    another at displaced points (below 30 voxels): 2 · 94 + 188 + 52 + 32 = 460 of the 1 152 voxels at each end.
    """
    shift, side, margin = 64, 1152, 460
    other = (16,) * (dim - 1)
    long = texture(side + shift, *other)
    moving = paste(texture(64, *other), (200, *other), (60, *(0,) * (dim - 1)))
    fixed, moved = long[:, :, shift:], long[:, :, :-shift]
    model = randomize(small_carl(dim), moving, fixed)
    assert_refinements_move(model, moving, fixed)
    plain, shifted = model(moving, fixed).on_grid_of(fixed), model(moving, moved).on_grid_of(moved)
    error = voxels((shifted[:, shift:] - plain[:, :-shift])[:, margin : side - margin - shift], moving.shape[2:])
    assert error.abs().max() <= 1e-3


def test_gradicon_is_not_equivariant() -> None:
    """The same test, the same shift: a network of displacement steps misses by more than a voxel."""
    assert w_error(gradicon(2, **SMALL).double(), 2, 0, shift=12).square().sum(-1).sqrt().mean() > 1


@pytest.mark.parametrize("shift", [12, 24])
def test_pooling_without_alignment_stretches_translations(shift: int) -> None:
    """Treating the pooled grid as the same box scales a shift of s voxels to s · (n − 1) / (4 (m − 1)).

    Seen exactly where refinements are at zero, as they start; moving ones turn the wrong image that they get into
    still larger errors.
    """
    model = small_carl(1)
    for module in model.modules():
        if isinstance(module, Downsample):
            module.aligned = False
    fine = 8 * 4 + 2 * MARGIN * 4 + shift
    predicted = shift * ((fine - 1) / (4 * (fine // 4 - 1)) - 1)
    assert predicted > 0.2
    assert (w_error(model, 1, 0, shift, move=0) - predicted).abs().max() <= 1e-6
    assert w_error(model, 1, 0, shift).abs().max() > predicted


# ---- rotations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "group"), [(2, "pi"), (2, "quarter"), (3, "pi"), (3, "quarter")])
def test_symmetrized_xi_is_equivariant_to_rotations_of_the_grid(dim: int, group: str) -> None:
    """Ξ[M ∘ W, F ∘ U] = W⁻¹ ∘ Ξ[M, F] ∘ U for W and U any two rotations of the group, pooling included."""
    moving, fixed = texture(*(8,) * dim), texture(*(8,) * dim)
    encoder = Symmetrized(Encoder(dim, width=4, dilations=(1, 2, 4, 8), handed=1), group)
    xi = Downsample(CoordinateAttention(encoder, padding=3, extrapolate="mirror")).double()
    randomize(xi, moving, fixed)
    rotations = list(axis_rotations(dim, group))
    assert len(rotations) == {("pi", 2): 2, ("quarter", 2): 4, ("pi", 3): 4, ("quarter", 3): 24}[group, dim]
    plain = xi(moving, fixed)
    for w, u in [(rotations[-1], rotations[0]), (rotations[0], rotations[-1]), (rotations[-1], rotations[1])]:
        answer = xi(rotate_grid(moving, *w), rotate_grid(fixed, *u)).on_grid_of(fixed)
        # rotate_grid(image, g) is image ∘ g with g(x) as an affine map of the unit cube.
        expected = as_affine(w, dim).inverse()(plain(as_affine(u, dim).on_grid_of(fixed)))
        assert voxels(answer - expected, fixed.shape[2:]).abs().max() <= 1e-6


def test_without_averaging_a_half_turn_changes_the_answer() -> None:
    moving, fixed = texture(12, 12), texture(12, 12)
    xi = randomize(CoordinateAttention(Encoder(2, width=12)).double(), moving, fixed)
    expected = 1 - xi(moving, fixed).on_grid_of(fixed)
    answer = xi(moving.flip(2, 3), fixed).on_grid_of(fixed)
    assert voxels(answer - expected, fixed.shape[2:]).abs().max() > 1


def as_affine(rotation: tuple[tuple[int, ...], tuple[int, ...]], dim: int) -> Affine:
    """The map g with rotate_grid(image, *rotation) = image ∘ g.

    The turned image at index y is the image at x with x[axes[i]] = y[i], or 1 − y[i] where axis i was flipped.
    """
    axes, flips = rotation
    matrix = torch.zeros(1, dim, dim + 1, dtype=torch.float64)
    for i, axis in enumerate(axes):
        flipped = i in flips
        matrix[0, axis, i] = -1 if flipped else 1
        matrix[0, axis, dim] = float(flipped)
    return Affine(matrix)


def test_carl_rot_is_built_as_the_paper_says() -> None:
    model = carl_rot(3, width=8, **SMALL)
    (xi,) = (module for module in model.modules() if isinstance(module, CoordinateAttention))
    assert isinstance(xi.encoder, Symmetrized)
    assert xi.encoder.encoder.dilations == (1, 2, 4, 8)
    assert xi.extrapolate == "mirror"
    field = model.eval()(torch.rand(1, 1, 20, 20, 20), torch.rand(1, 1, 20, 20, 20))
    assert {t.extrapolate for t in field.transforms if isinstance(t, DisplacementField)} == {"mirror"}


@pytest.mark.parametrize("aligned", [True, False])
def test_coordinate_matches_are_the_first_steps_answer(aligned: bool) -> None:
    """Attention inside the tree is Ξθ's own map at its points; also for images of two shapes."""
    xi = CoordinateAttention(Encoder(2, 1, 8), length=LENGTH)
    psi = PredictDisplacement(UNet(2, 1, **{key.removeprefix("unet_"): value for key, value in SMALL.items()}))
    moving, fixed = texture(22, 19), texture(17, 24)
    inner = Downsample(Downsample(xi, aligned), aligned)
    model = randomize(TwoStep(inner, psi).double(), moving, fixed)
    found = coordinate_matches(model, moving, fixed)
    assert found is not None
    assert found.points.shape[1] == 5 * 6
    assert torch.allclose(inner(moving, fixed)(found.points), found.targets, atol=1e-9)
    spread = torch.linalg.eigvalsh(found.covariance)
    assert spread.min() > -1e-9
    assert spread.max() > 1e-6
    assert coordinate_matches(psi, moving, fixed) is None


def test_sharp_matches_have_a_small_covariance() -> None:
    """With long features, each voxel of an image finds itself in the same image; with short ones, attention spreads."""
    image = texture(16, 16)
    sure, unsure = (CoordinateAttention(Encoder(2, 1, 16), length=length).double() for length in (40.0, 0.1))
    unsure.encoder.load_state_dict(sure.encoder.state_dict())
    for xi in (sure, unsure):
        randomize(xi, image, image)
    found = [coordinate_matches(xi, image, image) for xi in (sure, unsure)]
    spreads = [m.covariance.diagonal(dim1=-2, dim2=-1).sum(-1).mean() for m in found if m is not None]
    assert spreads[0] < 1e-3 * spreads[1]
    assert found[0] is not None
    assert (found[0].targets - voxel_points(image).flatten(1, -2)).abs().max() < 1e-3
