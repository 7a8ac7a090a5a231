"""What equivariance cannot give, and what it guarantees: the appendix's two counterexamples and its guarantee.

All on networks with random weights, in float64, so that what remains is rounding. Distances are in voxels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from carlreg import Affine, CoordinateAttention, RegistrationAlgorithm, Transform, carl, carl_rot, gradicon, warp, xi
from carlreg.geometry.grids import voxel_points
from carlreg.model.encoder import Encoder
from carlreg.model.unet import UNet

DOWN, UP = (4, 8, 8, 8, 8), (8, 8, 8, 8, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: for networks this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ready(network: RegistrationAlgorithm) -> RegistrationAlgorithm:
    """The model in float64 and evaluation mode, without gradients."""
    return network.double().eval().requires_grad_(False)


def in_voxels(difference: Tensor, image: Tensor) -> Tensor:
    return difference * (torch.tensor(image.shape[2:]) - 1)


def distance(difference: Tensor, image: Tensor) -> Tensor:
    return in_voxels(difference, image).norm(dim=-1)


def translation(voxels: tuple[int, ...], image: Tensor) -> Affine:
    return Affine.translation(torch.tensor([voxels], dtype=image.dtype) / (torch.tensor(image.shape[2:]) - 1))


def half_turn(image: Tensor) -> Affine:
    """x ↦ 1 − x, its own inverse; on the voxels, a flip of both axes."""
    eye = torch.eye(2, dtype=image.dtype)[None]
    return Affine.from_parts(-eye, torch.ones(1, 2, dtype=image.dtype))


# ---- blank images ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["carl", "xi"])
def test_no_network_is_equivariant_on_blank_images(name: str) -> None:
    torch.manual_seed(0)
    network = ready(
        carl(dim=2, refinements=2, width=16, unet_down=DOWN, unet_up=UP) if name == "carl" else xi(dim=2, width=16)
    )
    for unet in (module for module in network.modules() if isinstance(module, UNet)):
        nn.init.normal_(unet.last.weight)
    blank = torch.zeros(1, 1, 64, 48, dtype=torch.float64)
    shift = (8, -4)
    w = translation(shift, blank)

    phi = network(blank, blank).on_grid_of(blank)
    assert distance(phi - voxel_points(blank), blank).max() > 2  # the network does something
    # Φ[0 ∘ W, 0] = Φ[0, 0], the images being the same, where equivariance asks for W⁻¹ ∘ Φ[0, 0].
    of_warped = network(warp(blank, w, like=blank), blank).on_grid_of(blank)
    torch.testing.assert_close(of_warped, phi, rtol=0, atol=0)
    violation = in_voxels(of_warped - w.inverse()(phi), blank)
    torch.testing.assert_close(violation, torch.tensor(shift).to(violation).expand_as(violation), rtol=0, atol=1e-9)


# ---- symmetric images -----------------------------------------------------------------------------------------------


def symmetric_pair() -> tuple[Tensor, Tensor]:
    """An image equal to its own half turn, and one that is not."""
    image, other = torch.rand(2, 1, 1, 24, 20, dtype=torch.float64)
    image = image + image.flip(2, 3)
    assert torch.equal(image, image.flip(2, 3))
    return image, other


def xi_of_carl_rot(group: str) -> RegistrationAlgorithm:
    network = carl_rot(dim=2, width=16, length=12.0, group=group, unet_down=DOWN, unet_up=UP)  # type: ignore[arg-type]
    return ready(next(module for module in network.modules() if isinstance(module, CoordinateAttention)))


def equivariance_error(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> Tensor:
    """Φ[M ∘ W, F] against W⁻¹ ∘ Φ[M, F] for the half turn W."""
    w: Transform = half_turn(moving).inverse()
    return distance(
        network(moving.flip(2, 3), fixed).on_grid_of(fixed) - w(network(moving, fixed).on_grid_of(fixed)), moving
    )


@pytest.mark.parametrize("group", ["pi", "quarter"])
def test_equivariance_to_half_turns_sends_everything_to_the_centre_of_a_symmetric_image(group: str) -> None:
    torch.manual_seed(0)
    network = xi_of_carl_rot(group)
    symmetric, other = symmetric_pair()
    # It is equivariant, and on an image without symmetry that forces nothing.
    assert equivariance_error(network, other, symmetric).max() < 1e-9
    assert distance(network(other, symmetric).on_grid_of(symmetric) - 0.5, other).max() > 4
    # On a symmetric one, Φ[I, F] = Φ[I ∘ W, F] = W⁻¹ ∘ Φ[I, F]: only the centre of rotation is its own half turn.
    for fixed in (symmetric, other):
        phi = network(symmetric, fixed).on_grid_of(fixed)
        assert distance(phi - 0.5, symmetric).max() < 1e-9
    # So even two identical images are not registered by the identity.
    phi = network(symmetric, symmetric).on_grid_of(symmetric)
    assert distance(phi - voxel_points(symmetric), symmetric).mean() > 6


def test_a_network_that_registers_symmetric_images_is_not_equivariant_to_half_turns() -> None:
    torch.manual_seed(0)
    network = ready(CoordinateAttention(Encoder(2, width=16), length=12.0))
    symmetric, other = symmetric_pair()
    for fixed in (symmetric, other):
        from_centre = distance(network(symmetric, fixed).on_grid_of(fixed) - 0.5, symmetric)
        assert from_centre.mean() > 1
        # Φ[I ∘ W, F] = Φ[I, F] lies opposite to W⁻¹ ∘ Φ[I, F]: the violation is twice the way to the centre.
        torch.testing.assert_close(equivariance_error(network, symmetric, fixed), 2 * from_centre)


# ---- the guarantee --------------------------------------------------------------------------------------------------

SIDE, SHIFT = 64, (7, -5)
PADDING, MARGIN = 9, 13
"""The encoder reaches 22 voxels: an object 13 voxels inside an image padded by 9 has features without border."""


def shifted_object() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """I, I ∘ U, U at the voxels of I ∘ U, and where its object is: noise on a blank canvas, U a shift by SHIFT."""
    mask = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    mask[20:44, 20:44] = True
    image = torch.zeros(1, 1, SIDE, SIDE, dtype=torch.float64)
    image[0, 0, mask] = torch.randn(24 * 24, dtype=torch.float64)
    back = tuple(-s for s in SHIFT)  # (I ∘ U)(x) = I(x + shift)
    fixed, mask = image.roll(back, dims=(2, 3)), mask.roll(back, dims=(0, 1))
    rows, columns = mask.nonzero().unbind(-1)
    assert min(rows.min(), columns.min(), SIDE - 1 - rows.max(), SIDE - 1 - columns.max()) == MARGIN
    return image, fixed, translation(SHIFT, image).on_grid_of(image), mask[None]


@pytest.mark.parametrize("length", [4.0, 40.0])
def test_identity_on_identical_images_and_equivariance_give_the_true_shift(length: float) -> None:
    torch.manual_seed(0)
    encoder = Encoder(2, width=32)
    assert encoder.reach == PADDING + MARGIN
    network = ready(CoordinateAttention(encoder, padding=PADDING, length=length))
    image, fixed, u, mask = shifted_object()
    points = voxel_points(image)
    on_identical = network(image, image).on_grid_of(image)
    found = network(image, fixed).on_grid_of(image)

    # Φ[I, I ∘ U] = Φ[I, I] ∘ U, whatever Φ[I, I] is: a shift by whole voxels only picks other voxels.
    expected = on_identical.roll(tuple(-s for s in SHIFT), dims=(1, 2))
    assert distance(found - expected, image)[mask].max() < 1e-9

    original = mask.roll(SHIFT, dims=(1, 2))
    from_identity = distance(on_identical - points, image)[original].max()
    if length == 40:  # sharp features: the identity on identical images, and so U
        assert from_identity < 1e-6
        assert distance(found - u, image)[mask].max() < 1e-6
    else:  # the paper's length: no identity before training, and so no U
        assert from_identity > 4
        assert distance(found - u, image)[mask].max() > 4


def test_identity_on_identical_images_is_not_enough() -> None:
    """Displacements that are zero at first give the identity, but are [U, U] equivariant only."""
    torch.manual_seed(0)
    network = ready(gradicon(dim=2, unet_down=DOWN, unet_up=UP))
    image, fixed, u, mask = shifted_object()
    assert distance(network(image, image).on_grid_of(image) - voxel_points(image), image).max() < 1e-9
    error = distance(network(image, fixed).on_grid_of(fixed) - u, image)[mask]
    torch.testing.assert_close(error, torch.full_like(error, torch.tensor(SHIFT).double().norm().item()))
