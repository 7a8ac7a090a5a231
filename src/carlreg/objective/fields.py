"""Optimisation of the two displacement fields of one pair, on the images' own voxels.

Everything is measured in millimetres, so that ten slices of 10 mm are not treated like voxels of 1 mm. Three things
keep the finest grid affordable without a GPU. Fields have half as many voxels a side as the images, and are
interpolated. Local correlation is computed in windows around every second voxel, and from every second voxel of the
finer grids. And GradICON and folds are measured on the grid of the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from carlreg import fast
from carlreg.errors import InputError, NotFiniteError
from carlreg.fast import exact
from carlreg.fast.devices import on_device
from carlreg.fast.graphs import Graphs
from carlreg.fast.precision import full_precision
from carlreg.geometry.checks import check_finite, check_pair
from carlreg.geometry.grids import interpolate, multiply_axes, voxel_points, voxel_size
from carlreg.geometry.jacobian import determinant, folding
from carlreg.geometry.transforms import DisplacementField, Transform
from carlreg.geometry.unfolding import LEAST, smallest_determinant, unfold
from carlreg.objective.guide import Guide
from carlreg.objective.losses import Loss, Similarity, extrapolation, find_similarity
from carlreg.objective.rigidity import Rigidity
from carlreg.objective.windows import LEAST_SIDE, Picture, Windows, gaussian

logger = logging.getLogger(__name__)

FIELD_STEPS = 20
"""Default steps on the finest grid."""
FIELD_WEIGHT = 0.75
"""Default weight of GradICON when fields are optimised."""
FIELD_STIFFNESS = 0.1
"""Default weight of the bending of changes."""
LEVELS = 4
"""Grids on which fields are optimised."""
COARSE = 3
"""Steps on each coarser grid for one on the finest."""
SAME = 1e-3
"""Images that differ by no more than this fraction of their intensity range match perfectly."""
SLOW = 0.02
"""Fields change more slowly where the gradient of the loss by a voxel, times the number of voxels, is below this."""
GAIN = 0.02
"""By default, a start stays as it is if the loss does not fall by this fraction."""
REPAIRS = 20
"""Where folds are left in the end, the result is smoothed, at most so many times."""
FEW = 0.005
"""A start that stays keeps its folds if they are no more than this percentage."""
SMALL = 2**18
"""A start that stays is unfolded on all voxels of images with so many, or fewer; otherwise on every second one."""
CHECK, STILL = 10, 0.002
"""A level ends early if the lowest loss has fallen by no more than this fraction in so many steps."""
CHESSBOARD = 2
"""Local correlation is measured at every second voxel if voxels are at most so many times as large as the finest."""
MARGIN = 0.1
"""Determinants below this count as folds in the loss."""

Callback = Callable[[int, Loss], None]


@dataclass(frozen=True)
class Optimized:
    """The best pair of transforms, and the course of the loss."""

    transform: Transform
    """Φ[moving, fixed]."""
    inverse: Transform
    """Φ[fixed, moving], optimised with it; not exactly its inverse."""
    losses: list[dict[str, float]]
    """total, similarity and regularity before each step and after the last."""
    best: int
    """Which entry of `losses` belongs to the transforms."""
    stopped: str | None = None
    """Why the optimisation ended early, if it did."""
    coarse: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """Losses on coarser grids before, with their `level`: how many times as large their voxels are."""
    too_little: float | None = None
    """The fraction by which the loss fell, if the given transforms were kept because it fell by too little."""
    unlike: float | None = None
    """The similarity that was reached, if the given transforms were kept because the images stayed too unlike."""

    @property
    def course(self) -> list[dict[str, float]]:
        """All losses in order, each with its level if there are several."""
        return [*self.coarse, *({**loss, "level": 1.0} if self.coarse else loss for loss in self.losses)]


def share_done(done: int, steps: int, dim: int, levels: int = LEVELS) -> float:
    """The share of the work of `optimize_fields` that so many of its steps are, from 0 to 1. On a grid with twice the
    spacing, a step costs 2^dim times less."""
    counts = [COARSE * steps] * (levels - 1) + [steps]
    costs = [2.0 ** (-dim * level) for level in reversed(range(levels))]
    work, left = 0.0, done
    for count, cost in zip(counts, costs, strict=True):
        work += cost * min(left, count)
        left = max(left - count, 0)
    return work / max(sum(cost * count for cost, count in zip(costs, counts, strict=True)), 1e-9)


def optimize_fields(
    transform: Transform,
    inverse: Transform,
    moving: Tensor,
    fixed: Tensor,
    *,
    steps: int = FIELD_STEPS,
    coarse_steps: int | None = None,
    levels: int = LEVELS,
    learning_rate: float = 1.0,
    decay: float = 0.0,
    smoothing: float = 2.0,
    stiffness: float = FIELD_STIFFNESS,
    similarity: str | Similarity = "lncc",
    window: float = 2.0,
    weight: float = FIELD_WEIGHT,
    fold_weight: float = 1.0,
    gain: float = GAIN,
    enough: float = math.inf,
    moving_mask: Tensor | None = None,
    fixed_mask: Tensor | None = None,
    moving_spacing: Sequence[float] | None = None,
    fixed_spacing: Sequence[float] | None = None,
    guide: Guide | None = None,
    rigidity: Rigidity | None = None,
    seed: int = 0,
    callback: Callback | None = None,
    graphs: Graphs | None = None,
) -> Optimized:
    """Minimise the GradICON loss of one pair over its two displacement fields, from a network's result.

    Spacings are the sizes of the images' voxels in mm, 1 by default. The finest of them is the unit of `window`, the
    standard deviation of the Gaussian windows of "lncc" and "lncc2", of `smoothing`, that of the Gaussian by which
    changes of the fields are smoothed, and of `learning_rate`, by which Adam changes them in a step. A field can fold
    more easily than a network's output, so `fold_weight` times a penalty is added, and any remaining folds are
    removed at the end. `weight` is that of GradICON. `stiffness` is the weight of the mean square of the gradient of
    the changes on each grid: it preserves the shape of the network's map, which may reflect more than the intensities
    show. `guide` pulls points of one image to their partners in the other, `rigidity` keeps regions from bending.

    "ssd" is divided by the variance of the image that the other one is compared with, also in `losses`, so that the
    other weights mean the same for it as for correlations.

    There are `steps` on the finest of the `levels`, the images' own grid, preceded by `coarse_steps`, by default three
    times as many, on each of the coarser ones, where they cost little. Their unit doubles with each level; only axes
    with smaller voxels than that are made coarser. In the course of each level the learning rate falls by the fraction
    `decay`. A level ends early if its loss falls by no more than 0.2 % in ten steps.

    Returns the best iterate on the finest grid; `losses` are those of that grid. If the loss does not fall by the
    fraction `gain`, or if its similarity stays above `enough`, or if the images already match perfectly or cannot be
    compared, the given transforms are returned, in the first two cases unfolded if they fold at more than 0.005 % of
    the voxels; with a guide, only if the images cannot be compared. `callback(step, loss)` is called at every step of
    every level. On a GPU, steps are captured as CUDA graphs; further pairs of the same shapes share them if they are
    given the same `graphs`.

    >>> result = optimize_fields(*model.both(moving, fixed), moving, fixed)
    """
    if steps < 0 or levels < 1:
        raise InputError(f"steps is {steps} and levels {levels}; expected 0 or more, and 1 or more")
    check_pair(moving, fixed)
    check_finite(moving, "moving")
    check_finite(fixed, "fixed")
    ones = (1.0,) * (fixed.dim() - 2)
    demands: dict[str, Any] = {"guide": guide, "rigidity": rigidity}
    settings = _Settings(
        similarity, window, weight, fold_weight, learning_rate, smoothing, seed, decay, stiffness, **demands
    )
    if graphs is None and fixed.is_cuda:
        graphs = Graphs()
    with torch.inference_mode(False), torch.no_grad(), on_device(fixed):
        f = Picture(fixed.detach().clone(), fixed_mask, tuple(fixed_spacing or ones))
        m = Picture(moving.detach().clone(), moving_mask, tuple(moving_spacing or ones))
        finest = _Level(f, m, max(min(f.spacing), min(m.spacing)), settings)
        given = transform.detach(), inverse.detach()
        start = fields = finest.displacements(given)
        if not all(bool(torch.isfinite(field).all()) for field in start):
            raise NotFiniteError("the transform that the optimisation starts from is not finite")
        if (reason := finest.meaningless(start)) is not None or (guide is None and finest.matches(start)):
            return Optimized(*given, [] if reason else [finest.loss(start).floats()], 0, reason)
        done, coarse_steps = 0, COARSE * steps if coarse_steps is None else coarse_steps
        course: list[dict[str, float]] = []
        for level in reversed(range(1, levels)):
            coarse = finest.shrink(2**level)
            begin = [own.resampled(field, other) for field, own, other in zip(fields, (f, m), coarse.both, strict=True)]
            found, losses, _ = coarse.descend(begin, coarse_steps, done, callback, graphs)
            moves = (new - old for new, old in zip(found, begin, strict=True))
            parts = zip(fields, moves, coarse.both, (f, m), strict=True)
            fields = [field + other.resampled(move, own) for field, move, other, own in parts]
            course += [{**loss, "level": 2.0**level} for loss in losses if math.isfinite(loss["total"])]
            done += coarse_steps
        first = float(finest.loss(start).total)
        least = (1 - gain) * first if guide is None else math.inf
        found, losses, best = finest.descend(fields, steps, done, callback, graphs)
        bad = next((step for step, loss in enumerate(losses) if not math.isfinite(loss["total"])), None)
        stopped = None if bad is None else f"the loss became {losses[bad]['total']} at step {done + bad}"
        if stopped is not None:
            logger.warning("instance optimisation stopped: %s; keeping the best step before it", stopped)
        lowest = losses[best]["total"]
        unlike = losses[best]["similarity"] if guide is None and losses[best]["similarity"] > enough else None
        better = lowest < least and unlike is None
        fall = (first - lowest) / max(abs(first), 1e-9)
        phi, psi = (
            side.transform(field, old, keep=not better)
            for field, side, old in zip(found if better else start, finest.sides, given, strict=True)
        )
        too_little = max(fall, 0.0) if lowest >= least and math.isfinite(fall) else None
        return Optimized(phi, psi, losses[:bad], best if better else 0, stopped, course, too_little, unlike)


@dataclass(frozen=True)
class _Settings:
    similarity: str | Similarity
    window: float
    weight: float
    fold_weight: float
    learning_rate: float
    smoothing: float
    seed: int
    decay: float = 0.0
    stiffness: float = 0.0
    guide: Guide | None = None
    rigidity: Rigidity | None = None


@dataclass(frozen=True, eq=False)
class _Level:
    """Two images, and the descent of the fields between them: of the map on the fixed image, whose values are points of
    the moving image, and of its inverse. Fields are displacements (B, D, *control) in unit coordinates."""

    fixed: Picture
    moving: Picture
    voxel: float
    """The unit of the settings, in mm."""
    settings: _Settings
    chessboard: bool = True
    """Whether local correlation is measured at every second voxel: all of them cost little on coarse grids."""

    def shrink(self, factor: int) -> _Level:
        voxel = factor * self.voxel
        return _Level(self.fixed.shrink(voxel), self.moving.shrink(voxel), voxel, self.settings, factor <= CHESSBOARD)

    @functools.cached_property
    def sides(self) -> tuple[_Side, _Side]:
        """Of the map on the fixed image, and of its inverse."""
        return _Side(self.moving, self.fixed, self), _Side(self.fixed, self.moving, self)

    @property
    def both(self) -> tuple[Picture, Picture]:
        return self.fixed, self.moving

    def displacements(self, maps: Sequence[Transform]) -> list[Tensor]:
        """The displacements of both maps."""
        fields = []
        for phi, side in zip(maps, self.sides, strict=True):
            field = phi(side.grid.movedim(1, -1)).movedim(-1, 1) - side.grid
            fields.append(field.expand(len(side.target.image), *field.shape[1:]).clone())
        return fields

    def matches(self, fields: Sequence[Tensor]) -> bool:
        """Whether each image, warped, is the other at every voxel, so that a lower loss would mean nothing."""
        for field, side in zip(fields, self.sides, strict=True):
            other = side.target.image
            apart = (side.target.warp(side.source.image, side.target.grid + field) - other).abs().amax()
            if bool(apart > SAME * (other.amax() - other.amin())):
                return False
        return True

    def meaningless(self, fields: Sequence[Tensor]) -> str | None:
        """Why the similarity of the images cannot be computed, if it cannot."""
        for field, side in zip(fields, self.sides, strict=True):
            for measure, at in zip(side.measures, (side.grid + field).split(1), strict=True):
                if isinstance(measure, Windows) and not measure.shows(at):
                    return "where the images overlap, at least one of them is constant"
                if not bool(torch.isfinite(measure(at))):
                    return "the similarity of the images is not a finite number"
        return None

    def loss(self, fields: Sequence[Tensor]) -> Loss:
        positions = [side.grid + field for field, side in zip(fields, self.sides, strict=True)]
        similar = sum(side.similarity(at) for at, side in zip(positions, self.sides, strict=True))
        regular, folded = self._regularity(positions, self.first_phase)
        total = self._total(similar, regular, folded) + self._demanded(positions)
        return Loss(total, similar, regular)  # type: ignore[arg-type]

    @functools.cached_property
    def ends(self) -> Tensor:
        """Unit coordinates of the last voxels of the fixed image's field."""
        sides = zip(self.fixed.control, self.fixed.steps, strict=True)
        return _across([max(n - 1, 1) * step for n, step in sides], self.fixed.image)

    @functools.cached_property
    def first_phase(self) -> Tensor:
        return torch.tensor(self.settings.seed % 2, device=self.fixed.image.device)

    def _total(self, similar: Any, regular: Tensor, folded: Tensor) -> Tensor:
        return similar + self.settings.weight * regular + self.settings.fold_weight * folded

    @functools.cached_property
    def demands(self) -> list[tuple[int, Callable[[Tensor], Tensor]]]:
        """What users ask of the maps, each with the number of its map: guide points, and regions that do not bend."""
        given = [one for one in (self.settings.guide, self.settings.rigidity) if one is not None]
        terms = [one.between(self.fixed, self.moving) for one in given]
        return [(number, term) for pair in terms for number, term in enumerate(pair) if term is not None]

    def _demanded(self, positions: Sequence[Tensor]) -> Tensor | int:
        return sum(term(positions[number]) for number, term in self.demands)

    def _regularity(self, positions: Sequence[Tensor], phase: Tensor) -> tuple[Tensor, Tensor]:
        """GradICON on every second voxel of the moving image's field, from the first or the second one, and folds."""
        (forward, backward), side = positions, self.sides[1]
        grid, steps = side.grid.expand_as(backward), []
        for axis, (n, stride) in enumerate(zip(backward.shape[2:], self._strides(backward.shape[2:]), strict=True)):
            at = stride * torch.arange(n // stride, device=grid.device) + (phase if stride == 2 else 0)
            backward, grid = backward.index_select(axis + 2, at), grid.index_select(axis + 2, at)
            steps.append(stride * self.moving.stride[axis] * self.moving.spacing[axis])
        inner = (backward / self.ends).clamp(0, 1)
        field = forward - self.sides[0].grid
        sampled = exact.sample(field, inner) if field.is_cuda else interpolate(field, inner.movedim(1, -1))
        error = (backward + sampled - grid) * self.sides[0].size
        slopes = [error.diff(dim=axis) / mm for axis, mm in enumerate(steps, start=2) if error.shape[axis] > 1]
        regular = sum(slope.square().mean() for slope in slopes)
        return regular, _folds(forward, self.fixed) + _folds(positions[1], self.moving)  # type: ignore[return-value]

    def _gradients(self, positions: Sequence[Tensor], phase: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(total, similarity, regularity), and the gradients of the total by the positions."""
        parts = [side.gradient(at) for at, side in zip(positions, self.sides, strict=True)]
        similar, gradients = sum(part for part, _ in parts), [gradient.contiguous() for _, gradient in parts]
        if self._fused:
            regular, folded = self._add_regularity(positions, phase, gradients)
            rest = self._total(0, regular, folded)
            more: Sequence[Tensor] = ()
            if self.demands:
                guided, more = _differentiate(self._demanded, positions)
                rest = rest + guided
        else:
            regular = torch.zeros_like(phase, dtype=positions[0].dtype)

            def others(leaves: Sequence[Tensor]) -> Tensor:
                found, folded = self._regularity(leaves, phase)
                regular.copy_(found.detach())
                return self._total(0, found, folded) + self._demanded(leaves)

            rest, more = _differentiate(others, positions)
        for gradient, other in zip(gradients, more, strict=False):
            gradient.add_(other)
        return torch.stack([similar + rest, similar, regular]), gradients  # type: ignore[list-item]

    @functools.cached_property
    def _fused(self) -> bool:
        """Whether the regularity has kernels of its own."""
        image = self.fixed.image
        return image.dim() == 5 and len(image) == 1 and min(self.fixed.control) > 1 and fast.descends_on(image)

    def _add_regularity(
        self, positions: Sequence[Tensor], phase: Tensor, gradients: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`_regularity`, whose gradients are added to the given ones."""
        from carlreg.fast.kernels import descent

        forward, backward = (at.contiguous() for at in positions)
        strides = self._strides(backward.shape[2:])
        lengths = [a * b * mm for a, b, mm in zip(strides, self.moving.stride, self.moving.spacing, strict=True)]
        sides = zip(self.fixed.control, self.fixed.steps, strict=True)
        ends = [max(n - 1, 1) * step for n, step in sides]
        out, weight = (gradients[0], gradients[1]), self.settings.weight
        size, steps = self.moving.size, self.moving.steps
        arguments = (forward, backward, phase, strides, steps, ends, size, lengths, weight, out)
        regular = descent.add_inverse_error(*arguments)
        folded = torch.zeros_like(regular)
        for at, one, gradient in zip((forward, backward), self.both, gradients, strict=True):
            folded = folded + descent.add_folds(at, one.steps, MARGIN, self.settings.fold_weight, gradient)
        return regular, folded

    @staticmethod
    def _strides(shape: Sequence[int]) -> list[int]:
        """GradICON is measured on every second voxel of a field, along axes that are long enough."""
        return [2 if n >= 2 * LEAST_SIDE else 1 for n in shape]

    @full_precision
    def descend(
        self,
        start: Sequence[Tensor],
        steps: int,
        first: int = 0,
        callback: Callback | None = None,
        graphs: Graphs | None = None,
    ) -> tuple[list[Tensor], list[dict[str, float]], int]:
        """Take steps, numbered from `first`: the fields with the lowest loss, all losses, and which was the lowest."""
        if graphs is None or not self._captured():
            descent = _Descent(self, steps)
            descent.descend(self, start, descent.run, first, callback)
            return descent.found()
        with graphs.lend(self._key(steps), lambda: _Descent(self, steps)) as (descent, repeat):
            descent.descend(self, start, repeat, first, callback)
            return descent.found()

    def tensors(self) -> list[Tensor]:
        """What a step reads of the images themselves; all else depends on shapes and settings."""
        measures = [measure for side in self.sides for measure in side.measures]
        return [tensor for one in measures if isinstance(one, Windows) for tensor in one.tensors()]

    def _key(self, steps: int) -> Hashable | None:
        """What a captured step depends on; None if that includes more than shapes and settings."""
        if self.demands or self.settings.similarity not in ("lncc", "lncc2"):
            return None
        pictures = [(one.image.shape, one.spacing) for one in self.both]
        image, shapes = self.fixed.image, tuple(tensor.shape for tensor in self.tensors())
        key = "descent", *pictures, self.voxel, self.chessboard, self.settings, steps, shapes
        return *key, image.dtype, image.device

    def _captured(self) -> bool:
        """Whether nothing in a step waits for the GPU: other similarities with masks do, and users' functions may."""
        name, masks = self.settings.similarity, (self.fixed.mask, self.moving.mask)
        return name in ("lncc", "lncc2") or (isinstance(name, str) and masks == (None, None))


class _Descent:
    """Adam on the changes of both fields of a level. Its tensors stay where they are, so that a step can be captured
    once, and repeated for other pairs of the same shapes."""

    def __init__(self, level: _Level, steps: int) -> None:
        self.level, self.steps, self.taken = level, steps, 0
        size, image = len(level.fixed.image), level.fixed.image
        shapes = [(size, len(one.shape), *one.control) for one in level.both]
        self.start, self.changes, self.mean, self.square, self.best = (
            [image.new_zeros(shape) for shape in shapes] for _ in range(5)
        )
        self.lowest, self.history = image.new_zeros(()), image.new_zeros(steps + 1, 3)
        self.count = torch.zeros(1, dtype=torch.long, device=image.device)

    def descend(
        self,
        level: _Level,
        start: Sequence[Tensor],
        step: Callable[[], Any],
        first: int,
        callback: Callback | None,
    ) -> None:
        """Take all steps for a level with the same shapes and settings, from these fields."""
        pairs = [*zip(self.level.tensors(), level.tensors(), strict=True)] if level is not self.level else []
        for own, other in (*pairs, *zip(self.start, start, strict=True), *zip(self.best, start, strict=True)):
            own.copy_(other)
        for tensor in (*self.changes, *self.mean, *self.square, self.count):
            tensor.zero_()
        self.lowest.fill_(math.inf)
        self.history.fill_(math.nan)
        before = math.inf
        for number in range(self.steps + 1):
            step()
            self.taken = number + 1
            if callback is not None:
                callback(first + number, Loss(*self.history[number].clone()))  # others overwrite the history
            if number % CHECK == 0:
                lowest = float(self.lowest)
                if number and before - lowest <= STILL * abs(before):
                    break
                before = lowest

    def run(self) -> None:
        """Take a step."""
        level, settings, count = self.level, self.level.settings, self.count
        moves = [side.moves(change) for change, side in zip(self.changes, level.sides, strict=True)]
        fields = [field + move for field, move in zip(self.start, moves, strict=True)]
        positions = [side.grid + field for field, side in zip(fields, level.sides, strict=True)]
        parts, gradients = level._gradients(positions, (count[0] + settings.seed) % 2)
        if settings.stiffness:
            for move, gradient, side in zip(moves, gradients, level.sides, strict=True):
                bent, by_move = side.bending(move)
                parts[0].add_(bent, alpha=settings.stiffness)
                gradient.add_(by_move, alpha=settings.stiffness)
        self.history.index_copy_(0, count, parts[None])
        better = parts[0] < self.lowest
        self.lowest.copy_(torch.where(better, parts[0], self.lowest))
        count.add_(1)
        pace = settings.learning_rate * (1 - settings.decay * count / (self.steps + 1))
        paces = torch.cat([1 - 0.999**count, pace / (1 - 0.9**count)]).to(self.history.dtype)
        for n, side in enumerate(level.sides):
            gradient, state = side.moves_backward(gradients[n]), (self.changes[n], self.mean[n], self.square[n])
            _adam(gradient, *state, fields[n], self.best[n], better, paces)

    def found(self) -> tuple[list[Tensor], list[dict[str, float]], int]:
        """The fields with the lowest loss, all losses, and which was the lowest."""
        names = ("total", "similarity", "regularity")
        losses = [dict(zip(names, row, strict=True)) for row in self.history[: self.taken].tolist()]
        totals = [row["total"] if math.isfinite(row["total"]) else math.inf for row in losses]
        return [field.clone() for field in self.best], losses, totals.index(min(totals))


def _differentiate(
    function: Callable[[Sequence[Tensor]], Any], positions: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    """A function of positions, and its gradients by them."""
    with torch.enable_grad():
        leaves = [at.detach().requires_grad_() for at in positions]
        value = function(leaves)
        return value.detach(), torch.autograd.grad(value, leaves, materialize_grads=True)


def _adam(
    gradient: Tensor,
    change: Tensor,
    mean: Tensor,
    square: Tensor,
    field: Tensor,
    best: Tensor,
    better: Tensor,
    paces: Tensor,
) -> None:
    """A step of Adam, in place; if the loss was `better`, the field is the best one so far. `paces` are 1 − 0.999ⁿ, and
    the learning rate over 1 − 0.9ⁿ."""
    if fast.descends_on(field):
        from carlreg.fast.kernels import descent

        return descent.adam(gradient, change, mean, square, field, best, better, paces, SLOW)
    best.copy_(torch.where(better, field, best))
    mean.lerp_(gradient, 0.1)
    square.lerp_(gradient.square(), 0.001)
    speed = (square / paces[0]).sqrt_().add_(SLOW)
    change.sub_(torch.div(mean, speed, out=speed).mul_(paces[1]))
    return None


def _folds(positions: Tensor, picture: Picture) -> Tensor:
    """Mean of relu(margin − det ∇φ), by differences of one voxel of the field."""
    shape = positions.shape[2:]
    if min(shape) < 2:
        return positions.new_zeros(())
    cells = tuple(n - 1 for n in shape)
    if positions.is_cuda:  # it must not wait to see which cells fold
        return F.relu(MARGIN - _determinants(positions, picture.steps)).sum() / (len(positions) * math.prod(cells))
    with torch.no_grad():
        item, *corner = (_determinants(positions, picture.steps) < MARGIN).nonzero(as_tuple=True)

    def ahead(axis: int | None) -> Tensor:
        """Positions one voxel along an axis from the first corners of these cells, or at them: (N, D)."""
        index = (item, *(at + int(axis == other) for other, at in enumerate(corner)))
        return positions.movedim(1, -1)[index]

    columns = [(ahead(axis) - ahead(None)) / step for axis, step in enumerate(picture.steps)]
    return (MARGIN - determinant(columns)).sum() / (len(positions) * math.prod(cells))


def _determinants(positions: Tensor, steps: Sequence[float]) -> Tensor:
    """det ∇φ in the cells of a field, by differences of one voxel: (B, D, *shape) → (B, *(shape − 1))."""
    shape, columns = positions.shape[2:], []
    for axis, step in enumerate(steps, start=2):
        change = positions.diff(dim=axis) / step
        for other in range(2, len(shape) + 2):
            change = change if other == axis else change.narrow(other, 0, shape[other - 2] - 1)
        columns.append(change.movedim(1, -1))
    return determinant(columns)


class _Side:
    """One direction of a level: the field on the grid of `target`, whose values are points of `source`."""

    def __init__(self, source: Picture, target: Picture, level: _Level) -> None:
        settings, like = level.settings, target.image
        self.source, self.target = source, target
        self.grid = target.grid
        sigma = settings.smoothing * level.voxel
        sides = zip(target.control, target.spacing, target.stride, strict=True)
        self.blur = [gaussian(n, sigma / (mm * k), like) for n, mm, k in sides]
        self.size = _across(source.size, like)
        self.unit = level.voxel / self.size
        name, width = settings.similarity, settings.window * level.voxel
        self.measures: list[Callable[[Tensor], Tensor]] = []
        for item in range(len(like)):
            one = slice(item, item + 1)
            mask = None if target.mask is None else target.mask[one if len(target.mask) > 1 else slice(None)]
            image, picture = source.image[one], Picture(like[one], mask, target.spacing)
            if name in ("lncc", "lncc2"):
                self.measures.append(Windows(image, picture, width, name == "lncc2", chessboard=level.chessboard))
            else:
                scale = _variance(picture) if name == "ssd" else 1.0
                self.measures.append(functools.partial(_dense, find_similarity(name), scale, image, picture))

    def similarity(self, positions: Tensor) -> Tensor:
        parts = zip(self.measures, positions.split(1), strict=True)
        return torch.stack([measure(at) for measure, at in parts]).mean()

    def gradient(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The similarity, and its gradient by the positions, one item at a time, for less memory."""
        values, gradients = [], []
        for measure, at in zip(self.measures, positions.split(1), strict=True):
            if isinstance(measure, Windows):
                value, gradient = measure.gradient(at)
            else:
                value, (gradient,) = _differentiate(lambda leaves, one=measure: one(leaves[0]), [at])  # type: ignore[misc]
            values.append(value)
            gradients.append(gradient)
        if len(values) == 1:
            return values[0], gradients[0]
        return torch.stack(values).mean(), torch.cat(gradients) / len(values)

    def moves(self, change: Tensor) -> Tensor:
        """Changes in units of the level, smoothed, in unit coordinates."""
        return multiply_axes(change, self.blur) * self.unit

    def moves_backward(self, gradient: Tensor) -> Tensor:
        """The gradient by the changes, per voxel, so that it does not depend on the number of voxels."""
        return multiply_axes(gradient * (self.unit * gradient[0, 0].numel()), self.blur)  # symmetric

    def bending(self, moves: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of ‖∇m‖² for moves m (B, D, *control), in mm for each mm, and its gradient by them."""
        places, by_places, total = moves * self.size, torch.zeros_like(moves), moves.new_zeros(())
        for axis, (step, mm) in enumerate(zip(self.target.steps, self.target.size, strict=True), start=2):
            if (cells := places.shape[axis] - 1) < 1:
                continue
            slope = places.diff(dim=axis) / (step * mm)
            share = 1 / slope[:, 0].numel()
            total = total + slope.square().sum() * share
            slope = slope * (2 * share / (step * mm))
            by_places.narrow(axis, 0, cells).sub_(slope)
            by_places.narrow(axis, 1, cells).add_(slope)
        return total, by_places * self.size

    def transform(self, field: Tensor, old: Transform, *, keep: bool) -> Transform:
        """The map of a field, unfolded; or the `old` one that it comes from, if that is to be kept and hardly folds.
        That of a small image is unfolded on all of its voxels, since every second one would lose detail of it."""
        image = self.target.image
        if keep and (min(self.target.shape) < 3 or folding(old, image) <= FEW):
            return old
        if keep and image[0, 0].numel() <= SMALL:
            grid, steps = voxel_points(image).movedim(-1, 1), voxel_size(image.shape[2:], image).tolist()
            return DisplacementField(
                self.unfolded(old.on_grid_of(image).movedim(-1, 1) - grid, grid, steps), extrapolation(old)
            )
        field = self.unfolded(field, self.grid, self.target.steps)
        return DisplacementField(multiply_axes(field, self.target.finer), extrapolation(old))

    def unfolded(self, field: Tensor, grid: Tensor, steps: Sequence[float]) -> Tensor:
        """The displacements of a grid without folds, nearly the same; if they have very many, smoothed around them."""
        field = torch.stack([unfold(one, steps, self.source.size) for one in field])
        for number in range(REPAIRS):
            bad = smallest_determinant(grid + field, steps)[:, None] < LEAST
            if not bool(bad.any()):
                break
            near = [gaussian(n, 1.0 + number // 4, field) for n in field.shape[2:]]
            share = (10 * multiply_axes(bad.to(field), near)).clamp(max=1)
            inside = multiply_axes(torch.ones_like(field[:1, :1]), near)
            field = torch.lerp(field, multiply_axes(field, near) / inside, share)
        return field


def _across(values: Sequence[float], like: Tensor) -> Tensor:
    """One value for each coordinate, (1, D, 1, …)."""
    return torch.tensor(values, dtype=like.dtype).to(like.device).reshape(1, -1, *(1,) * len(values))


def _dense(measure: Similarity, scale: Tensor | float, source: Tensor, target: Picture, positions: Tensor) -> Tensor:
    """A similarity, divided by `scale`: weights, and the pace of Adam, suit values of about 1."""
    return measure(target.warp(source, positions), target.image, mask=target.mask) / scale


def _variance(picture: Picture) -> Tensor:
    """Of the image, inside its mask; 1 if it is constant."""
    image, mask = picture.image, picture.mask
    values = image if mask is None else image[(mask != 0).expand_as(image)]
    variance = values.var(correction=0)
    return torch.where(variance > 0, variance, torch.ones_like(variance))
