"""The search for trouble with headers: scans that seem mirrored, or turned by quarter turns, against one another.

All reflections and quarter turns are tried on coarse images, each refined to an affine map. No network is involved.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from carlreg.errors import InputError
from carlreg.fast.precision import full_precision
from carlreg.geometry.checks import check_finite
from carlreg.geometry.transforms import Affine
from carlreg.registration.affine_search import MOST, Level, Scan

LEVELS = ((24, 25, 14), (32, 15, 3))
"""Voxels along the foreground of the fixed image, steps of gradient descent, and how many orientations are refined,
besides the given one and the reflections along one axis."""
CLEARLY = 0.02
"""By how much another orientation must be more similar than the given one, to be believed."""
TELLING = 0.015
"""If the given orientation and a reflection differ by less than this, the anatomy cannot tell them apart."""
AXES = ("left to right", "front to back", "head to foot")


@dataclass(frozen=True, eq=False)
class Orientation:
    """How the axes of the moving scan seem to run, relative to those of the fixed one; both are closest to RAS."""

    matrix: Tensor  # (D, D): a signed permutation, from axes of the fixed scan to the moving one's
    similarity: float
    given_similarity: float
    """That of the scans as their headers place them, after the same refinement."""
    mirrored_similarity: tuple[float, ...]
    """Those of the reflections along each axis alone."""
    unit: Affine
    """The same about the centres of the foregrounds, from the fixed scan's unit coordinates to the moving one's."""

    @property
    def gain(self) -> float:
        """By how much another orientation is more similar than the given one."""
        return 0.0 if self.is_given else max(self.similarity - self.given_similarity, 0.0)

    @property
    def is_wrong(self) -> bool:
        """Whether another orientation is clearly better than the given one."""
        return not self.is_given and self.similarity > self.given_similarity + CLEARLY

    @property
    def is_given(self) -> bool:
        return torch.equal(self.matrix, torch.eye(len(self.matrix)).to(self.matrix))

    @property
    def is_reflection(self) -> bool:
        return bool(torch.linalg.det(self.matrix.float()) < 0)

    @property
    def undecided(self) -> list[str]:
        """Axes along which the anatomy is too symmetric to tell a reflection from the given orientation."""
        close = [abs(one - self.given_similarity) < TELLING for one in self.mirrored_similarity]
        return [name for name, undecided in zip(AXES, close, strict=False) if undecided]

    def describe(self) -> str:
        """What seems wrong, in words."""
        matrix = self.matrix.round().long()
        diagonal = matrix.diagonal()
        flipped = [name for name, sign in zip(AXES, diagonal.tolist(), strict=False) if sign < 0]
        if bool(diagonal.abs().all()):
            if len(flipped) == 2:
                axis = next(name for name in AXES if name not in flipped)
                return f"turned by 180° about the axis from {axis}"
            return f"mirrored {' and '.join(flipped)}"
        mirrored = "mirrored and " if self.is_reflection else ""
        if int(diagonal.abs().sum()) == 1:
            kept = next(name for name, sign in zip(AXES, diagonal.tolist(), strict=False) if sign)
            return f"{mirrored}turned by 90° about the axis from {kept}"
        return f"{mirrored}turned by quarter turns, with its axes in another order"


def orientations(dim: int) -> Tensor:
    """(N, D, D): all signed permutations of the axes; the identity first, then the reflections along one axis."""
    found = []
    for order, signs in itertools.product(itertools.permutations(range(dim)), itertools.product((1, -1), repeat=dim)):
        matrix = torch.zeros(dim, dim)
        for row, (column, sign) in enumerate(zip(order, signs, strict=True)):
            matrix[row, column] = sign
        found.append(matrix)
    flips = [int((matrix.diagonal() < 0).sum()) if bool(matrix.diagonal().all()) else dim for matrix in found]
    first = [torch.diag(torch.tensor([-1.0 if a == axis else 1.0 for a in range(dim)])) for axis in range(dim)]
    rest = [matrix for matrix, count in zip(found, flips, strict=True) if count > 1]
    return torch.stack([torch.eye(dim), *first, *rest])


@full_precision
def search_orientation(moving: Scan, fixed: Scan) -> Orientation:
    """Find the reflection or quarter turns under which two scans, with axes closest to RAS, correlate best.

    >>> search_orientation(moving, fixed).is_wrong
    """
    dim = fixed.image.dim() - 2
    if dim not in (2, 3) or moving.image.dim() != dim + 2:
        raise InputError(f"the images are {moving.image.dim() - 2}-D and {dim}-D; expected both 2-D or both 3-D")
    check_finite(moving.image, "moving")
    check_finite(fixed.image, "fixed")
    with torch.inference_mode(False), torch.no_grad():
        moving, fixed = moving.at_most(MOST), fixed.at_most(MOST)
        (low, high, _), (low_m, high_m, _) = fixed.foreground(), moving.foreground()
        turns = orientations(dim).to(low)
        # Each orientation starts with the size of the moving foreground along each axis, but none is stretched much.
        ratio = (high_m - low_m).clamp(min=1e-6)[None] / (turns.abs() @ (high - low).clamp(min=1e-6))
        linear = turns * ratio.clamp(0.7, 1.4)[..., None]
        target = ((low_m + high_m) / 2).expand(len(turns), -1).clone()
        chosen = torch.arange(len(turns), device=low.device)
        for side, steps, kept in LEVELS:
            level = Level.of(moving, fixed, low, high, float((high - low).amax()) / side)
            ranked = level.similarity(linear, target).argsort(descending=True)
            always = chosen[ranked] <= dim
            ranked = torch.cat([ranked[always], ranked[~always][:kept]])
            chosen, linear, target = chosen[ranked], linear[ranked], target[ranked]
            linear, target = level.descend(linear, target, steps, False)
        similarity = level.similarity(linear, target)
    best = int(similarity.argmax())
    alone = [float(similarity[chosen == index].amax()) for index in range(dim + 1)]
    turn = turns[chosen[best]]
    linear = turn * fixed.size / moving.size[:, None]
    shift = ((low_m + high_m) / 2 - turn @ (low + high) / 2) / moving.size
    unit = Affine.from_parts(linear[None].cpu(), shift[None].cpu())
    return Orientation(turn.cpu(), float(similarity[best]), alone[0], tuple(alone[1:]), unit)
