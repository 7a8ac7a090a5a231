"""Our numbers against those of the authors' implementation; see reference/README.md for how theirs were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import rule
from torch import Tensor

from carlreg.geometry.grids import voxel_points
from carlreg.geometry.transforms import DisplacementField, Transform
from carlreg.model import files, icon, zoo
from carlreg.model.algorithms import CoordinateAttention, Downsample, PredictDisplacement, RegistrationAlgorithm
from carlreg.model.encoder import Encoder, Symmetrized
from carlreg.objective import losses

ICON = np.load(Path(__file__).parent / "reference" / "icon.npz")
TOLERANCE = 1e-4
REGISTRATIONS = ("carl-2d", "carl-3d", "carl-rot-3d", "gradicon-2d")


def theirs(case: str, name: str) -> Tensor:
    return torch.from_numpy(ICON[f"{case}/{name}"])


def relative_error(ours: Any, expected: Tensor) -> float:
    ours = torch.as_tensor(ours).double()
    assert ours.shape == expected.shape
    return float((ours - expected.double()).norm() / expected.double().norm())


def state_dict(case: str) -> dict[str, Tensor]:
    shapes = rule.from_text(ICON[f"{case}/names"])
    return {name: torch.from_numpy(value) for name, value in rule.fill(shapes).items()}


def network(case: str) -> RegistrationAlgorithm:
    return icon.from_icon(state_dict(case))


def images(case: str) -> tuple[Tensor, Tensor]:
    moving, fixed = (torch.from_numpy(rule.image(rule.SHAPES[case], which)) for which in (0, 1))
    return moving, fixed


def displacement(transform: Transform, image: Tensor) -> Tensor:
    """(B, D, *shape). Coordinates themselves would agree even if nothing moved."""
    return (transform.on_grid_of(image) - voxel_points(image)).movedim(-1, 1)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


# ---- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["encoder-2d", "encoder-3d", "broad-3d"])
def test_encoders_agree(case):
    xi = network(case)
    assert isinstance(xi, CoordinateAttention)
    assert isinstance(xi.encoder, Symmetrized if case == "broad-3d" else Encoder)
    assert xi.encoder.width == 128
    assert relative_error(rule.thin(xi.encoder(images(case)[0])), theirs(case, "output")) <= TOLERANCE


@pytest.mark.parametrize("case", ["unet-2d", "unet-3d"])
def test_unets_agree(case):
    psi = network(case)
    assert isinstance(psi, PredictDisplacement)
    assert relative_error(rule.thin(psi.network(*images(case))), theirs(case, "output")) <= TOLERANCE


# ---- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "name"),
    [(case, name) for case in ("similarity-2d", "similarity-3d") for name in ("lncc", "lncc2", "ssd")]
    + [("similarity-3d", "mind")],
)
def test_similarities_agree(case, name):
    assert relative_error(losses.SIMILARITIES[name](*images(case)), theirs(case, name)) <= TOLERANCE


@pytest.mark.parametrize("case", ["similarity-2d", "similarity-3d"])
def test_local_correlation_agrees_at_each_voxel(case):
    ours = rule.thin(losses.local_correlation(*images(case), sigma=4))
    assert relative_error(ours, theirs(case, "correlation")) <= TOLERANCE


@pytest.mark.parametrize("case", ["diffusion-2d", "diffusion-3d"])
def test_diffusion_agrees(case):
    shape = rule.SHAPES[case]
    ours = losses.diffusion(torch.from_numpy(rule.field(shape, 0)))
    # Neighbours of n voxels are 1/(n − 1) apart, by which we divide; the authors divide by 1/n, n of the first axis.
    (side,) = set(shape)
    assert relative_error(ours, theirs(case, "value") * ((side - 1) / side) ** 2) <= TOLERANCE


@pytest.mark.parametrize("case", ["regularity-2d", "regularity-3d"])
def test_gradicon_agrees_at_the_same_points(case):
    phi_ab, phi_ba = (DisplacementField(torch.from_numpy(rule.field(rule.SHAPES[case], which))) for which in (0, 1))
    points = theirs(case, "points").movedim(1, -1)
    # Noise of one voxel takes points off the grid, and some out of the image.
    assert points.min() < 0 < 1 < points.max()
    assert relative_error(losses.gradicon(phi_ab, phi_ba, points), theirs(case, "value")) <= TOLERANCE


# ---- whole registrations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_registrations_agree(case):
    moving, fixed = images(case)
    ours = displacement(network(case)(moving, fixed), fixed)
    assert relative_error(rule.thin(ours), theirs(case, "output")) <= TOLERANCE
    # It means something only if every step of the tree moves its points, in voxels of its own grid.
    assert theirs(case, "moves").min() >= 2
    voxels = ours * (torch.tensor(rule.SHAPES[case]) - 1).reshape(1, -1, *(1,) * (ours.dim() - 2))
    assert voxels.square().sum(dim=1).mean().sqrt() >= 2


@pytest.mark.parametrize(("case", "sigma"), [("carl-2d", 4), ("gradicon-2d", 5)])
def test_training_losses_agree(case, sigma):
    moving, fixed = images(case)
    phi_ab, phi_ba = network(case).both(moving, fixed)
    assert relative_error(rule.thin(displacement(phi_ab, fixed)), theirs(case, "output")) <= TOLERANCE
    assert relative_error(rule.thin(displacement(phi_ba, moving)), theirs(case, "backward")) <= TOLERANCE

    def similarity(warped: Tensor, image: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return losses.lncc(warped, image, sigma=sigma, mask=mask)

    loss = losses.registration_loss(phi_ab, phi_ba, moving, fixed, similarity=similarity)
    assert relative_error(loss.similarity, theirs(case, "similarity")) <= TOLERANCE
    # The authors draw the points inside the loss, so theirs are given to ours.
    regularity = losses.gradicon(phi_ab, phi_ba, theirs(case, "points").movedim(1, -1))
    assert relative_error(regularity, theirs(case, "regularity")) <= TOLERANCE


def test_exact_downsampling_would_not_agree():
    """The results agree for `aligned=False`, and the tolerance is tight enough to rule out `aligned=True`."""
    moving, fixed = images("carl-2d")
    model = network("carl-2d")
    for module in model.modules():
        if isinstance(module, Downsample):
            module.aligned = True
    ours = rule.thin(displacement(model(moving, fixed), fixed))
    assert relative_error(ours, theirs("carl-2d", "output")) > 100 * TOLERANCE


# ---- from_icon ------------------------------------------------------------------------------------------------------


def without_alignment(description: Any) -> Any:
    if not isinstance(description, dict):
        return description
    changed = {name: without_alignment(value) for name, value in description.items()}
    return changed | ({"aligned": False} if description["part"] == "Downsample" else {})


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("carl-2d", lambda: zoo.carl(2, refinements=2)),
        ("carl-3d", lambda: zoo.carl(3, refinements=2, width=64)),
        ("gradicon-2d", lambda: zoo.gradicon(2)),
    ],
)
def test_from_icon_finds_the_papers_tree(case, expected):
    assert files.describe(network(case)) == without_alignment(files.describe(expected()))


@pytest.mark.parametrize(("case", "poolings"), [("carl-2d", 2), ("gradicon-2d", 2), ("carl-rot-3d", 3)])
def test_from_icon_downsamples_as_the_authors_do(case, poolings):
    downsamples = [module for module in network(case).modules() if isinstance(module, Downsample)]
    assert len(downsamples) == poolings
    assert not any(module.aligned for module in downsamples)


def test_from_icon_returns_evaluation_mode():
    assert not any(module.training for module in network("encoder-2d").modules())


@pytest.mark.parametrize("prefix", ["", "regis_net.", "module.regis_net.", "module."])
def test_from_icon_accepts_prefixes(prefix):
    weights = state_dict("carl-2d")
    assert all(name.startswith("regis_net.") for name in weights)
    bare = {name.removeprefix("regis_net."): tensor for name, tensor in weights.items()}
    expected = icon.from_icon(bare).state_dict()
    ours = icon.from_icon({prefix + name: tensor for name, tensor in bare.items()}).state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_from_icon_ignores_identity_maps():
    """Older versions of icon_registration kept them in checkpoints."""
    weights = state_dict("carl-2d")
    stray = {
        f"{part}identity_map": torch.zeros(1, 2, 3, 3) for part in ("", "regis_net.", "regis_net.netPhi.net.netPsi.")
    }
    assert icon.from_icon(weights | stray).state_dict().keys() == icon.from_icon(weights).state_dict().keys()


@pytest.mark.parametrize(
    "name", ["regis_net.netPsi.net.middle_dense.0.weight", "regis_net.netPhi.velocity", "fc.weight"]
)
def test_from_icon_names_unknown_parts(name):
    with pytest.raises(ValueError, match=r"unknown parts: .*(middle_dense|velocity|fc).*icon_registration"):
        icon.from_icon(state_dict("carl-2d") | {name: torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("case", "wrapping"), [("encoder-2d", "net.net."), ("encoder-2d", "net."), ("unet-2d", "net.")]
)
def test_from_icon_refuses_a_bare_network(case, wrapping):
    bare = {name.removeprefix(wrapping): tensor for name, tensor in state_dict(case).items()}
    with pytest.raises(ValueError, match="bare network; expected a whole registration network"):
        icon.from_icon(bare)


@pytest.mark.parametrize("weights", [{}, {"regis_net.identity_map": torch.zeros(1, 2, 3, 3)}])
def test_from_icon_refuses_a_state_dict_without_weights(weights):
    with pytest.raises(ValueError, match="no weights"):
        icon.from_icon(weights)
