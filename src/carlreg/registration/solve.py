"""The network's answer, its optimisation, and rigid and affine fits to it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from carlreg.fast.precision import mixed_precision
from carlreg.files import world_transform
from carlreg.files.images import map_points
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry import resizing
from carlreg.geometry.fitting import fit_affine, fit_rigid, fit_robustly
from carlreg.geometry.grids import interpolate, voxel_points
from carlreg.geometry.jacobian import folding
from carlreg.geometry.transforms import Identity, Transform
from carlreg.model.algorithms import RegistrationAlgorithm, coordinate_matches
from carlreg.objective.instance import (
    FIELD_STEPS,
    FIELD_WEIGHT,
    WEIGHT_STEPS,
    Optimized,
    instance_optimize,
    optimize_fields,
)
from carlreg.objective.losses import registration_loss
from carlreg.objective.metrics import inverse_consistency
from carlreg.preparation import FOREGROUND, Prepared
from carlreg.registration.case import Case
from carlreg.registration.options import TransformKind

logger = logging.getLogger(__name__)

Way = Literal["weights", "fields"]
USUAL: dict[Way, int] = {"weights": WEIGHT_STEPS, "fields": FIELD_STEPS}
WEIGHT: dict[Way, float] = {"weights": 1.5, "fields": FIELD_WEIGHT}
"""Of the regulariser, where none is given."""
SMALL: dict[str, Any] = {"levels": 1, "learning_rate": 0.1}
"""How the fields of small scans are optimised, more gently than others: no coarser grids, a tenth of a voxel at a
time."""


# ---- the registration itself ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Solved:
    """A map between the worlds of the fixed image and of the moving one as the network sees it."""

    world: WorldTransform
    metrics: dict[str, float] = field(default_factory=dict)
    optimized: Optimized | None = None
    over: Way | None = None
    notes: tuple[str, ...] = ()


def _solve(
    network: RegistrationAlgorithm,
    case: Case,
    transform: TransformKind,
    *,
    steps: int | None,
    over: Way,
    allow_identity: bool,
    loss: dict[str, Any],
    options: dict[str, Any],
    say: Callable[[str], None],
    clock: _Clock,
) -> _Solved:
    """The network's answer, optimised, and as a map of the world."""
    m, f = case.m, case.f
    say("network")
    forward, backward = _answer(network, m, f)
    notes, none = [], Identity()
    if allow_identity and _loss(none, none, m, f, **loss) < _loss(forward, backward, m, f, **loss):
        forward, backward, over = none, none, "fields"
        notes.append("the images, laid onto one another, match better as they are than by the network's answer")
    clock.lap("network")
    optimized: Optimized | None = None
    if steps != 0:
        say("optimisation")
        optimized, over = _optimize(network, (forward, backward), m, f, over=over, steps=steps, **loss, **options)
        forward, backward = optimized.transform, optimized.inverse
        clock.lap("optimisation")
    say("world space")
    forward, backward = _to_cpu(forward), _to_cpu(backward)
    like_f, like_m = f.tensor.cpu(), m.tensor.cpu()
    spacing = [s * (n - 1) / (g - 1) for s, n, g in zip(m.image.spacing, m.image.shape, like_m.shape[2:], strict=True)]
    metrics = {"inverse_consistency_mm": float(inverse_consistency(forward, backward, like_m, spacing=spacing).mean())}
    if transform == "deformable":
        metrics["folds_percent"] = folding(forward, like_f)
        world = world_transform.to_world(forward, f.image, m.image, grid=case.fixed)
    else:
        world = _fit_to_network(forward, m, f, transform)
    return _Solved(world, metrics, optimized, None if optimized is None else over, tuple(notes))


def _finite(phi: Transform) -> Transform:
    def check(tensor: Tensor) -> Tensor:
        if not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError("the network's answer for this pair is not finite: are its weights damaged?")
        return tensor

    return phi.map_tensors(check)


def _answer(network: RegistrationAlgorithm, m: Prepared, f: Prepared) -> tuple[Transform, Transform]:
    """Both directions, on the CPU where the GPU has no room for them; they come back to where the images are."""
    try:
        return _both(network, m.tensor, f.tensor)
    except torch.cuda.OutOfMemoryError:
        logger.warning("the GPU has too little memory for the network: the CPU does its work, more slowly")
    answer = _both(network.cpu(), m.tensor.cpu(), f.tensor.cpu())
    network.to(f.tensor.device)
    return answer[0].to(f.tensor), answer[1].to(f.tensor)


def _both(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor) -> tuple[Transform, Transform]:
    with torch.no_grad(), mixed_precision(fixed.device):
        forward, backward = network.both(moving, fixed)
    return _finite(forward), _finite(backward)


def _loss(forward: Transform, backward: Transform, m: Prepared, f: Prepared, **options: Any) -> float:
    options |= {"moving_mask": m.mask, "fixed_mask": f.mask}
    generator = torch.Generator(f.tensor.device).manual_seed(0)
    with torch.no_grad():
        loss = registration_loss(forward, backward, m.tensor, f.tensor, generator=generator, **options)
    return float(loss.total)


def _optimize(
    network: RegistrationAlgorithm,
    answer: tuple[Transform, Transform],
    m: Prepared,
    f: Prepared,
    *,
    over: Way,
    steps: int | None,
    **options: Any,
) -> tuple[Optimized, Way]:
    """Over the weights or the fields, and over which: the fields where the GPU has no room for the weights. Without
    `steps`, each way takes its usual number."""
    options |= {"moving_mask": m.mask, "fixed_mask": f.mask}
    given = options.pop("weight", None)
    if steps is not None:
        options["steps"] = steps
    if over == "weights":
        weight = WEIGHT["weights"] if given is None else given
        try:
            return instance_optimize(network, m.tensor, f.tensor, weight=weight, **options), over
        except torch.cuda.OutOfMemoryError:
            logger.warning("the GPU has too little memory to optimise the weights: the fields are optimised instead")
    options["weight"] = WEIGHT["fields"] if given is None else given
    m_sides, f_sides = _field_sides(m, f)
    if f_sides != list(f.tensor.shape[2:]):  # scans so small that the network has seen all there is to see
        options |= SMALL
    for key, sides in (("moving_mask", m_sides), ("fixed_mask", f_sides)):
        if options[key] is not None:
            options[key] = resizing.resize_labels(options[key], sides)
    moving, fixed = resizing.resize(m.tensor, m_sides), resizing.resize(f.tensor, f_sides)
    return optimize_fields(*answer, moving, fixed, **options), "fields"


def _field_sides(m: Prepared, f: Prepared) -> tuple[list[int], list[int]]:
    """Of the moving and of the fixed image's grid that fields are optimised on: the network's, or half of it where that
    has as many voxels as each of the scans. More would show nothing but interpolation."""
    whole = list(m.tensor.shape[2:]), list(f.tensor.shape[2:])
    half = [(n + 1) // 2 for n in whole[0]], [(n + 1) // 2 for n in whole[1]]
    scans = m.sides, f.sides
    return half if all(math.prod(scan) <= math.prod(sides) for scan, sides in zip(scans, half, strict=True)) else whole


def _fit_to_network(forward: Transform, m: Prepared, f: Prepared, kind: TransformKind) -> WorldTransform:
    """The rigid or affine map closest to the dense one, at every second voxel of the fixed image."""
    every = (slice(None), *[slice(None, None, 2)] * f.image.dim)
    like = f.tensor.cpu()
    points = voxel_points(like)[every].flatten(1, -2)
    return _fit(points, forward(points), _foreground(f, points), m, f, kind)


def _fit_to_attention(network: RegistrationAlgorithm, m: Prepared, f: Prepared, kind: TransformKind) -> WorldTransform:
    """The rigid or affine map closest to where coordinate attention points, each match weighted by 1 / its variance."""
    with mixed_precision(m.tensor.device):
        matches = coordinate_matches(network, m.tensor, f.tensor)
    if matches is None:
        raise ValueError("this model has no coordinate attention; expected fit_source='network'")
    points, targets, covariance = (t.cpu() for t in (matches.points, matches.targets, matches.covariance))
    to_world = torch.from_numpy(m.image.unit_to_world()[:-1, :-1])
    variance = torch.einsum("ij,bnjk,ik->bn", to_world, covariance.double(), to_world)
    least = float(np.mean(m.image.spacing)) ** 2  # nothing is surer than a voxel
    return _fit(points, targets, _foreground(f, points) / variance.clamp(min=least), m, f, kind)


def _foreground(f: Prepared, points: Tensor) -> Tensor:
    """(1, N): 1 at fixed points inside of the mask, if there is one, or else of the object; 0 elsewhere."""
    source = f.tensor if f.mask is None else f.mask
    inside = (interpolate(source.cpu().float(), points)[:, 0] > (FOREGROUND if f.mask is None else 0.5)).double()
    return inside if bool(inside.any()) else torch.ones_like(inside)


def _fit(
    points: Tensor, targets: Tensor, weights: Tensor, m: Prepared, f: Prepared, kind: TransformKind
) -> WorldTransform:
    """Points and targets (1, N, D) in unit coordinates; the fit is in millimetres."""
    here = torch.from_numpy(map_points(f.image.unit_to_world(), points.double().numpy()))
    there = torch.from_numpy(map_points(m.image.unit_to_world(), targets.double().numpy()))
    found = fit_robustly(fit_rigid if kind == "rigid" else fit_affine, here, there, weights.double())
    matrix = np.eye(f.image.dim + 1)
    matrix[:-1] = found.matrix[0].numpy()
    return WorldTransform.linear(matrix)


def _to_cpu(transform: Transform) -> Transform:
    return transform.map_tensors(lambda tensor: tensor.detach().float().cpu())


class _Clock:
    """Seconds of each part of the work, in order, and in all."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def seconds(self) -> dict[str, float]:
        laps = self._laps | {"total": time.perf_counter() - self._start}
        return {name: round(seconds, 2) for name, seconds in laps.items()}
