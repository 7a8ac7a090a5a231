"""Any shape, batch and dimension; bad input is refused immediately."""

from __future__ import annotations

import pytest
import torch
from conftest import SMALL, randomize, texture
from torch import Tensor

from carlreg import Identity, RegistrationAlgorithm, carl, carl_rot, gradicon, warp, xi
from carlreg.geometry.fitting import random_rotation
from carlreg.geometry.transforms import Affine
from carlreg.model.encoder import Encoder

NETWORKS = {
    "carl": lambda dim: carl(dim, width=4, **SMALL),
    "carl_rot": lambda dim: carl_rot(dim, width=2, **SMALL),
    "gradicon": lambda dim: gradicon(dim, **SMALL),
    "xi": lambda dim: xi(dim, width=4),
}
PAIRS = [
    ((16,), (16,)),
    ((37,), (16,)),
    ((16, 16), (16, 16)),
    ((41, 18), (23, 30)),
    ((16, 16, 16), (16, 16, 16)),
    ((17, 24, 21), (16, 19, 33)),
]


def network(name: str, *pair: Tensor) -> RegistrationAlgorithm:
    return randomize(NETWORKS[name](pair[0].dim() - 2).to(pair[0].dtype), *pair, move=2.0)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("moving", "fixed"), PAIRS, ids=str)
def test_any_shapes(name: str, moving: tuple[int, ...], fixed: tuple[int, ...]) -> None:
    m, f = texture(*moving, dtype=torch.float32), texture(*fixed, dtype=torch.float32)
    phi = network(name, m, f)(m, f)
    assert phi.on_grid_of(f).shape == (1, *fixed, len(fixed))
    warped = warp(m, phi, like=f)
    assert warped.shape == f.shape
    assert torch.isfinite(warped).all()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("side", [16, 17])
def test_training_mode_at_the_smallest_size(name: str, side: int) -> None:
    """One pair of side 16: coarse levels shrink to a single voxel, which BatchNorm must accept."""
    images = torch.rand(2, 1, 1, side, side, side)
    model = NETWORKS[name](3).train()
    sum(phi.on_grid_of(images[0]).square().sum() for phi in model.both(*images)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [(40,), (21, 32), (16, 17, 18)], ids=str)
def test_batch_equals_one_at_a_time(name: str, shape: tuple[int, ...]) -> None:
    """In evaluation mode; in training mode BatchNorm sees the whole batch."""
    moving, fixed = (torch.rand(3, 1, *shape, dtype=torch.float64) for _ in range(2))
    model = network(name, moving, fixed)
    together = model(moving, fixed).on_grid_of(fixed)
    for i in range(3):
        alone = model(moving[i : i + 1], fixed[i : i + 1]).on_grid_of(fixed[i : i + 1])
        assert torch.allclose(together[i : i + 1], alone, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("moving", "fixed"), [((24, 20), (24, 20)), ((24, 20), (19, 31))], ids=str)
def test_both_equals_two_calls(name: str, moving: tuple[int, ...], fixed: tuple[int, ...]) -> None:
    m, f = (torch.rand(2, 1, *shape, dtype=torch.float64) for shape in (moving, fixed))
    model = network(name, m, f)
    phi, inverse = model.both(m, f)
    assert torch.allclose(phi.on_grid_of(f), model(m, f).on_grid_of(f), atol=1e-10)
    assert torch.allclose(inverse.on_grid_of(m), model(f, m).on_grid_of(m), atol=1e-10)


def test_each_image_is_encoded_once_for_both_directions() -> None:
    images = torch.rand(2, 1, 1, 24, 20)
    model = network("carl", *images)
    seen: list[int] = []
    (encoder,) = (module for module in model.modules() if isinstance(module, Encoder))
    encoder.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    model.both(*images)
    assert sum(seen) == 2


def test_labels_and_half_precision_images_have_full_coordinates() -> None:
    image = texture(200, 9, dtype=torch.float32)
    labels = torch.randint(0, 5, (1, 1, 200, 9), dtype=torch.uint8)
    assert torch.equal(warp(image, Identity(), like=labels), warp(image, Identity(), like=image))
    assert torch.equal(warp(labels, Identity(), like=image, mode="nearest"), labels)
    half = image.bfloat16()
    assert torch.equal(warp(half, Identity(), like=half), half)
    with pytest.raises(TypeError, match=r"dtype torch.uint8; expected floating point, or mode='nearest' for labels"):
        warp(labels, Identity(), like=image)


def test_weights_and_images_of_different_types() -> None:
    images = torch.rand(2, 1, 1, 24, 20, dtype=torch.float64)
    with pytest.raises(
        TypeError, match=r"the images are torch.float64 on cpu but the network's weights are torch.float32"
    ):
        NETWORKS["carl"](2).eval()(*images)
    with pytest.raises(ValueError, match="dim is 4; expected 1, 2 or 3"):
        carl(4)


def test_several_channels() -> None:
    moving, fixed = torch.rand(1, 3, 24, 20), torch.rand(1, 3, 24, 20)
    model = carl(2, channels=3, width=4, **SMALL).eval()
    assert warp(moving, model(moving, fixed), like=fixed).shape == fixed.shape


def test_augmented_is_the_network_behind_its_augmentation() -> None:
    """R ∘ Φ[M ∘ R, F ∘ Q] ∘ Q⁻¹, with R and Q drawn at each call and shared by both directions."""
    from carlreg import Augmented
    from carlreg.geometry.transforms import compose

    moving, fixed = texture(24, 24), texture(24, 24)
    inner = network("carl", moving, fixed)
    drawn: list[Affine] = []

    def draw(image: Tensor) -> Affine:
        drawn.append(random_rotation(image.shape[2:], len(image), like=image))
        return drawn[-1]

    answer = Augmented(inner, draw)(moving, fixed)
    r, q = drawn
    expected = compose(r, inner(warp(moving, r, like=moving), warp(fixed, q, like=fixed)), q.inverse())
    points = torch.rand(1, 30, 2, dtype=torch.float64)
    assert torch.allclose(answer(points), expected(points))
    drawn.clear()
    phi, inverse = Augmented(inner, draw).both(moving, fixed)
    (r_and_q,) = drawn
    r, q = r_and_q[:1], r_and_q[1:]
    backward = compose(q, inner(warp(fixed, q, like=fixed), warp(moving, r, like=moving)), r.inverse())
    assert torch.allclose(inverse(points), backward(points))
    assert not torch.allclose(phi(points), answer(points))


def test_subclasses_that_define_register_still_work() -> None:
    """`transform` was called `register` first, with a keyword that is no longer passed."""
    with pytest.warns(DeprecationWarning, match=r"rename Shift.register to transform\(moving, fixed\)"):

        class Shift(RegistrationAlgorithm):
            def register(self, moving: Tensor, fixed: Tensor, *, swapped: bool = False) -> Affine:
                return Affine.translation(torch.tensor([[0.1, 0.2]], dtype=fixed.dtype))

    points = torch.rand(1, 5, 2)
    phi, back = Shift().both(texture(6, 6, dtype=torch.float32), texture(6, 6, dtype=torch.float32))
    assert torch.allclose(phi(points), points + torch.tensor([0.1, 0.2]))
    assert torch.equal(back(points), phi(points))


# ---- bad input ------------------------------------------------------------------------------------------------------

GOOD = torch.rand(1, 1, 20, 20)
BAD = {
    "an array": (GOOD.numpy(), GOOD, TypeError, "moving is a ndarray; expected a torch.Tensor"),
    "no batch axis": (GOOD[0, 0], GOOD, ValueError, r"moving has shape \(20, 20\).*image\[None, None\]"),
    "four spatial axes": (torch.rand(1, 1, 4, 4, 4, 4), GOOD, ValueError, "1 to 3 spatial axes"),
    "integers": (GOOD, (GOOD * 255).byte(), TypeError, "fixed has dtype torch.uint8; expected floating point"),
    "an empty axis": (GOOD[..., :0], GOOD, ValueError, "no axis may be empty"),
    "2-D with 3-D": (GOOD, torch.rand(1, 1, 20, 20, 20), ValueError, "moving is 2-D but fixed is 3-D"),
    "another batch": (GOOD, GOOD.repeat(2, 1, 1, 1), ValueError, "batch size 1 but fixed has 2"),
    "other channels": (GOOD.repeat(1, 2, 1, 1), GOOD, ValueError, "number of channels 2 but fixed has 1"),
    "two dtypes": (GOOD.double(), GOOD, ValueError, "moving is torch.float64 on cpu but fixed is torch.float32"),
    "not finite": (
        GOOD.clone().index_fill_(2, torch.tensor(3), torch.nan),
        GOOD,
        ValueError,
        "moving has 20 non-finite",
    ),
    "infinite": (GOOD, GOOD.clone().index_fill_(3, torch.tensor(0), torch.inf), ValueError, "fixed has 20 non-finite"),
    "channels unlike the network's": (GOOD.repeat(1, 2, 1, 1), GOOD.repeat(1, 2, 1, 1), ValueError, "2 channels; this"),
    "dimension unlike the network's": (
        torch.rand(1, 1, 9),
        torch.rand(1, 1, 9),
        ValueError,
        "1-D with 1 channels; this",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("name", NETWORKS)
def test_bad_images_are_refused_at_the_door(case: str, name: str) -> None:
    moving, fixed, error, message = BAD[case]
    with pytest.raises(error, match=message):
        NETWORKS[name](2).eval()(moving, fixed)


@pytest.mark.parametrize("case", ["not finite", "integers", "2-D with 3-D"])
def test_both_has_the_same_door(case: str) -> None:
    moving, fixed, error, _ = BAD[case]
    with pytest.raises(error):
        NETWORKS["carl"](2).eval().both(moving, fixed)
