"""What only one of two scans shows around the anatomy of the other is left out of the optimisation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from carlreg.files.images import Image
from carlreg.geometry.grids import Grid
from carlreg.geometry.transforms import Affine, Identity
from carlreg.preparation import Frame, Prepared, PreparedPair
from carlreg.registration.options import RegisterOptions
from carlreg.registration.similarity import REGULARITY, compare
from carlreg.registration.surroundings import FILLED, anatomy, surrounded, without_surroundings

SIDE = 32
SHIFT = 3
"""By how many voxels the head lies further along the first axis."""


def radius(shift: float = 0.0) -> Tensor:
    """Distance from the middle in voxels: (1, 1, SIDE, SIDE, SIDE)."""
    points = (SIDE - 1) * Grid.of((SIDE,) * 3).points().reshape(SIDE, SIDE, SIDE, 3)
    return (points - torch.tensor([(SIDE - 1) / 2 + shift, (SIDE - 1) / 2, (SIDE - 1) / 2])).norm(dim=-1)[None, None]


def brain(shift: float = 0.0) -> Tensor:
    """Grey around a dark ventricle."""
    r = radius(shift)
    return 0.5 * ((r < 8) & (r > 3))


def head(shift: float = 0.0) -> Tensor:
    """A brain and, right outside of it, scalp."""
    r = radius(shift)
    return brain(shift) + 0.9 * ((r >= 8) & (r < 13))


def prepared(image: Tensor, mask: Tensor | None = None) -> Prepared:
    scan = Image(image[0, 0].numpy(), np.eye(4))
    return Prepared(scan, image, mask, "", scan.shape, "whole", (image, mask, Frame.whole(scan.shape)))


def moved(voxels: float) -> Affine:
    """Points that far along the first axis."""
    matrix = torch.eye(3, 4)[None].clone()
    matrix[0, 0, 3] = voxels / (SIDE - 1)
    return Affine(matrix)


@pytest.mark.parametrize("stripped", ["fixed", "moving"])
def test_scalp_is_left_out_where_the_other_scan_was_stripped(stripped: str) -> None:
    images = (
        {"fixed": brain(), "moving": head(SHIFT)} if stripped == "fixed" else {"fixed": head(), "moving": brain(SHIFT)}
    )
    pair = PreparedPair(prepared(images["fixed"]), prepared(images["moving"]))
    found, note = without_surroundings(pair, moved(SHIFT), moved(-SHIFT))
    larger = "moving" if stripped == "fixed" else "fixed"
    assert note == f"what the {larger} image shows around the anatomy of the {stripped} one was left out"
    assert getattr(found, stripped) is getattr(pair, stripped)
    expected = brain(SHIFT if larger == "moving" else 0)
    for shape in ((SIDE,) * 3, (SIDE - 2,) * 3):  # the network's grid, and the scan on another one
        image = getattr(found, larger).on_grid(shape)[0]
        there = getattr(replace(pair, **{larger: prepared(expected)}), larger).on_grid(shape)[0]
        assert (image - there).abs().mean() < 0.1 * there.mean(), shape


def test_ventricles_belong_to_the_anatomy() -> None:
    assert anatomy(brain()).equal(radius() < 8)


def test_scans_that_show_the_same_are_left_alone() -> None:
    for fixed, moving in ((brain(), brain()), (head(), head())):
        pair = PreparedPair(prepared(fixed), prepared(moving))
        assert without_surroundings(pair, Identity(), Identity()) == (pair, None)


def test_a_map_that_misses_the_other_anatomy_shows_nothing_around() -> None:
    assert surrounded(brain(), head(), Identity()) > FILLED > 1.5 * surrounded(brain(), head(), moved(20))


def test_stripped_pairs_stay_near_the_networks_result() -> None:
    pair = PreparedPair(prepared(head()), prepared(head()))
    for stripped in (False, True):
        found = compare(RegisterOptions(), Identity(), pair, stripped=stripped)
        assert found.is_uncertain is stripped
        assert found.options.regularity == (REGULARITY if stripped else None)
    asked = compare(RegisterOptions(regularity=0.5), Identity(), pair, stripped=True)
    assert asked.options.regularity == 0.5


def test_masks_of_the_user_take_precedence() -> None:
    pair = PreparedPair(prepared(brain(), torch.ones_like(brain())), prepared(head()))
    assert without_surroundings(pair, Identity(), Identity()) == (pair, None)
