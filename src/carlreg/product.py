"""Two scans in, a registration out: files, headers and intensities taken care of.

The way of the data: read, turn to RAS, cut empty margins, stretch to the network's grid, register, optimise, and back
to the world.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import carlreg
from carlreg import images, itk
from carlreg.explain import Explanation, Inside
from carlreg.grids import interpolate, voxel_points
from carlreg.images import Image, map_points
from carlreg.inputs import FOREGROUND, Case, LoadedModel, Prepared, choose_device, load_model, read_case, sha256
from carlreg.look import Look, look
from carlreg.losses import Loss, Similarity, find_similarity, registration_loss
from carlreg.metrics import dice, folding, inverse_consistency, mean_score
from carlreg.models import write_atomically
from carlreg.optimize import FIELD_STEPS, FIELD_WEIGHT, WEIGHT_STEPS, Optimized, instance_optimize, optimize_fields
from carlreg.precision import mixed_precision
from carlreg.registration import CoordinateAttention, RegistrationAlgorithm, coordinate_matches
from carlreg.transforms import Identity, Transform, fit_affine, fit_rigid, fit_robustly

logger = logging.getLogger(__name__)

Over = Literal["auto", "weights", "fields"]
Way = Literal["weights", "fields"]
USUAL: dict[Way, int] = {"weights": WEIGHT_STEPS, "fields": FIELD_STEPS}
WEIGHT: dict[Way, float] = {"weights": 1.5, "fields": FIELD_WEIGHT}
"""Of the regulariser, where none is given."""
SMALL: dict[str, Any] = {"levels": 1, "learning_rate": 0.1}
"""How the fields of small scans are optimised, more gently than others: no coarser grids, a tenth of a voxel at a
time."""
Kind = Literal["deformable", "affine", "rigid"]
FitTo = Literal["network", "attention"]
FILES = ("warped.nii.gz", "transform.h5", "inverse_transform.h5", "warp.nii.gz", "report.json")
LABELS = "warped_seg.nii.gz"
"""Written beside `FILES` where the moving image came with labels."""
LOOK_SIDE, LOOK_MM = 96, 2.0
"""The grid on which `model="auto"` looks whether scans are turned against each other, and its usual voxels."""


@dataclass(frozen=True, eq=False)
class Registration:
    """What a registration gives. Points of the fixed image go to the moving one by `transform`, back by `inverse`."""

    transform: itk.WorldTransform
    inverse: itk.WorldTransform
    warped: Image
    """The moving image's intensities, in its own type, on the fixed image's grid."""
    fixed: Image
    moving: Image
    metrics: dict[str, float]
    settings: dict[str, Any]
    losses: list[dict[str, float]] = field(default_factory=list)
    """Of the optimisation: total, similarity, regularity at each step."""
    warnings: tuple[str, ...] = ()
    labels: Image | None = None
    """The moving image's labels on the fixed image's grid, if there were any."""
    dice: dict[str, dict[int, float]] = field(default_factory=dict)
    """"before" and "after": the Dice overlap of each label, where both images had labels."""
    spread: Image | None = None
    """Of each fixed point's attention, in mm, on a coarse grid: small where the network is sure of its match."""

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Path:
        """Write `warped.nii.gz`, `transform.h5`, `inverse_transform.h5`, `warp.nii.gz` and `report.json`, and
        `warped_seg.nii.gz` where there were labels. `extra` are further texts, by the names of their files.

        All appear or none: they are written to a temporary folder first. Folders made for them go if they fail.
        """
        target = check_folder(folder, overwrite=overwrite, also=extra or ())
        made = [one for one in target.parents if not one.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        new, moved = not target.exists(), list[Path]()
        waiting = Path(tempfile.mkdtemp(dir=target.parent if new else target, prefix=f".{target.name}."))
        try:
            images.write(self.warped, waiting / "warped.nii.gz")
            itk.write(self.transform, waiting / "transform.h5")
            itk.write(self.inverse, waiting / "inverse_transform.h5")
            itk.write_warp(self.transform, self.fixed, waiting / "warp.nii.gz")
            if self.labels is not None:
                images.write(self.labels, waiting / LABELS)
            for name, text in (extra or {}).items():
                write_atomically(waiting / name, text.encode())
            write_atomically(waiting / "report.json", (json.dumps(self.report(), indent=2) + "\n").encode())
            if new:
                waiting.chmod(0o755)
                waiting.rename(target)
            else:
                for path in sorted(waiting.iterdir(), key=lambda path: path.name == "report.json"):  # that one last
                    moved.append(target / path.name)
                    os.replace(path, moved[-1])
        except BaseException:
            for path in () if overwrite else moved:
                path.unlink(missing_ok=True)
            shutil.rmtree(waiting, ignore_errors=True)
            for one in made:
                one.rmdir()
            raise
        shutil.rmtree(waiting, ignore_errors=True)
        return target

    def report(self) -> dict[str, Any]:
        """Versions, inputs, settings, metrics and warnings, for a machine to read."""
        return {
            "versions": _versions(),
            **self.settings,
            "metrics": {name: value if math.isfinite(value) else None for name, value in self.metrics.items()},
            "dice": {
                when: {str(label): score for label, score in scores.items()} for when, scores in self.dice.items()
            },
            "losses": self.losses,
            "warnings": list(self.warnings),
        }


def check_folder(folder: str | os.PathLike[str], *, overwrite: bool = False, also: Iterable[str] = ()) -> Path:
    """The folder as a path, if a registration may be saved there: it can be made or written to, and it holds none."""
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file; expected a folder for the results: choose another name")
    taken = [name for name in (*FILES, LABELS, *also) if (target / name).exists()]
    if taken and not overwrite:
        raise FileExistsError(f"{target} already holds {taken[0]}; choose another folder, or allow overwriting")
    above = next(one for one in (target, *target.absolute().parents) if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{target} cannot be written: no permission in {above}; expected a folder one may write to"
        )
    return target


def register(
    *,
    fixed: Any,
    moving: Any,
    model: str | os.PathLike[str] | RegistrationAlgorithm | LoadedModel = "default",
    transform: Kind = "deformable",
    initial_transform: Any = None,
    io_iterations: int | None = None,
    io_sim: str | Similarity = "lncc",
    over: Over = "auto",
    regularity: float | None = None,
    fixed_mask: Any = None,
    moving_mask: Any = None,
    fixed_seg: Any = None,
    moving_seg: Any = None,
    fixed_landmarks: Any = None,
    moving_landmarks: Any = None,
    fit_to: FitTo = "network",
    allow_identity: bool = True,
    certainty: bool | None = None,
    device: str | torch.device = "auto",
    seed: int = 0,
    callback: Callable[[int, Loss], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Registration:
    """Register two images: paths, SimpleITK or nibabel images, `carlreg.images.Image`, or arrays.

    `model` is a name of the package's models, the path of a model file, or a model. "auto" looks first, by trying many
    rotations, whether the images are turned against each other; if they are, carl-base sees the moving one turned back.

    After the network's answer, `io_iterations` steps of instance optimisation follow: over the network's weights, as in
    the paper (50 by default, where there is a GPU), or over the displacement fields (20 by default, elsewhere, and more
    on coarser grids); 0 leaves them out. Masks say where `io_sim` is measured. `regularity` is the weight of GradICON:
    1.5 by default over the weights, as in training, and 0.75 over the fields. Where the images, laid onto one another
    box by box, match better than by the network's answer, that is what the optimisation starts from, unless
    `allow_identity` is False.

    "rigid" and "affine" are closed-form robust least squares, in millimetres, to the network's dense answer where the
    fixed image is not background; with `fit_to="attention"` to the matches of its coordinate attention alone, weighted
    by their certainty: faster, and less accurate where attention is blurred. They are optimised before the fit only if
    `io_iterations` is given.

    `initial_transform`, a first guess of the map from fixed to moving world points (LPS, mm), is the path of a
    transform file, a transform, or a matrix (D + 1, D + 1). The network then sees the moving image through it, on the
    fixed image's grid; the result contains it.

    Labels (`fixed_seg`, `moving_seg`) and landmarks (files, or world points (N, D) in LPS) are scored before and after;
    they play no part in the registration. `certainty` asks for the spread of the network's attention as well; that is
    quick on a GPU, and given there if not said otherwise, but not on a CPU. `progress` is told what is being done,
    `callback(step, loss)` how the optimisation goes.

    >>> result = register(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> result.save("out")
    """
    _check_choices(over=over, transform=transform, fit_to=fit_to, io_iterations=io_iterations, regularity=regularity)
    find_similarity(io_sim)
    if fixed_seg is not None and moving_seg is None:
        raise ValueError("fixed_seg was given without moving_seg; expected labels of both images, to be compared")

    def say(text: str) -> None:
        logger.info("%s", text)
        if progress is not None:
            progress(text)

    clock = _Clock()
    place = choose_device(device)

    say("reading")
    sources = {
        "fixed": fixed,
        "moving": moving,
        "fixed_mask": fixed_mask,
        "moving_mask": moving_mask,
        "fixed_seg": fixed_seg,
        "moving_seg": moving_seg,
        "fixed_landmarks": fixed_landmarks,
        "moving_landmarks": moving_landmarks,
        "initial_transform": initial_transform,
    }
    loaded = load_model(model, place)
    case = read_case(sources, loaded, place)
    clock.lap("reading")

    given, seen = case.initial, None
    if loaded.looks:
        say("looking whether the scans are turned")
        seen, rigid = _look(case, loaded, place)
        if seen.turned:
            logger.info("the moving scan is turned back by %.0f°", seen.degrees)
            guess = rigid if given is None else itk.compose(given, rigid, case.fixed)
            case = case.through(guess, loaded, place)
        clock.lap("look")

    chosen: Way = ("weights" if place.type == "cuda" else "fields") if over == "auto" else over
    steps = 0 if io_iterations is None and transform != "deformable" else io_iterations
    metrics: dict[str, float] = {}
    if transform != "deformable" and fit_to == "attention":
        say("coordinate attention")
        solved = _Solved(_fit_to_attention(loaded.network, case.m, case.f, transform))
        clock.lap("network")
    else:
        solved = _solve(
            loaded.network,
            case,
            transform,
            steps=steps,
            over=chosen,
            allow_identity=allow_identity,
            loss={"similarity": io_sim} | ({} if regularity is None else {"weight": regularity}),
            options={"seed": seed, "callback": callback},
            say=say,
            clock=clock,
        )
        metrics |= solved.metrics

    say("world space")
    world = solved.world if case.initial is None else itk.compose(case.initial, solved.world, case.fixed)
    if world.is_linear:
        inverse = itk.WorldTransform.linear(np.linalg.inv(world.affine))
        metrics["inverse_error_mm"] = metrics["inverse_error_max_mm"] = 0.0
    else:
        inverse, residual = itk.invert(world, case.moving)
        missed = residual[np.isfinite(residual)]
        metrics["inverse_error_mm"] = float(missed.mean()) if missed.size else math.nan
        metrics["inverse_error_max_mm"] = float(missed.max()) if missed.size else math.nan
    warped = itk.apply(world, case.moving, case.fixed)
    clock.lap("world_space")

    spread = None
    if certainty if certainty is not None else place.type == "cuda":
        say("certainty")
        spread = _spread(loaded.network, case)
        clock.lap("certainty")

    say("scores")
    labels = None if case.moving_seg is None else itk.apply(world, case.moving_seg, case.fixed, "nearest")
    scores = _score(case, given, world, metrics)
    clock.lap("scores")

    settings = {
        "model": loaded.facts,
        "look": None if seen is None else _told(seen),
        "device": str(place),
        "transform": transform,
        "fit_to": None if transform == "deformable" else fit_to,
        "io_iterations": 0 if solved.over is None else USUAL[solved.over] if steps is None else steps,
        "io_over": solved.over,
        "io_sim": io_sim if isinstance(io_sim, str) else getattr(io_sim, "__name__", "a function"),
        "regularity": regularity if regularity is not None or solved.over is None else WEIGHT[solved.over],
        "allow_identity": allow_identity,
        "seed": seed,
        "grid": list(case.f.tensor.shape[2:]),
        "io_grid": _field_sides(case.m, case.f)[1] if solved.over == "fields" else None,
        "inputs": _describe_inputs(sources, case),
        "seconds": clock.seconds(),
        "peak_memory_gb": _peak_memory(place),
    }
    warnings = _warnings(metrics, solved)
    losses = [] if solved.optimized is None else solved.optimized.losses
    return Registration(
        world, inverse, warped, case.fixed, case.moving, metrics, settings, losses, warnings, labels, scores, spread
    )


def _check_choices(
    *, over: str, transform: str, fit_to: str, io_iterations: int | None, regularity: float | None
) -> None:
    for name, value, known in (
        ("over", over, ("auto", "weights", "fields")),
        ("transform", transform, ("deformable", "affine", "rigid")),
        ("fit_to", fit_to, ("network", "attention")),
    ):
        if value not in known:
            raise ValueError(f"unknown {name}={value!r}; expected {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
    if io_iterations is not None and io_iterations < 0:
        raise ValueError(f"io_iterations is {io_iterations}; expected 0 or more")
    if regularity is not None and not (math.isfinite(regularity) and regularity >= 0):
        raise ValueError(f"regularity is {regularity}; expected a number, 0 or more")
    if io_iterations and transform != "deformable" and fit_to == "attention":
        raise ValueError("fit_to='attention' has nothing to optimise; expected io_iterations=0, or fit_to='network'")


# ---- whether the scans are turned -----------------------------------------------------------------------------------


def _look(case: Case, loaded: LoadedModel, place: torch.device) -> tuple[Look, itk.WorldTransform]:
    """At both scans with the same cubic voxels: what was seen, and the rigid map of the world."""
    common = replace(loaded, grid=(LOOK_SIDE,) * case.fixed.dim, voxel=LOOK_MM)
    f, m = case.prepared_for(common, torch.device("cpu") if place.type == "mps" else place, masks=False)
    seen = look(m.tensor, f.tensor)
    unit = np.eye(case.fixed.dim + 1)
    unit[:-1] = seen.transform.matrix[0].cpu().double().numpy()
    return seen, itk.WorldTransform.linear(m.image.unit_to_world() @ unit @ f.image.world_to_unit())


def _told(seen: Look) -> dict[str, Any]:
    return {
        "degrees": round(seen.degrees, 1),
        "likeness": round(seen.likeness, 4),
        "likeness_upright": round(seen.upright, 4),
        "turned_back": seen.turned,
    }


# ---- the registration itself ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Solved:
    """A map between the worlds of the fixed image and of the moving one as the network sees it."""

    world: itk.WorldTransform
    metrics: dict[str, float] = field(default_factory=dict)
    optimized: Optimized | None = None
    over: Way | None = None
    notes: tuple[str, ...] = ()


def _solve(
    network: RegistrationAlgorithm,
    case: Case,
    transform: Kind,
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
        world = itk.to_world(forward, f.image, m.image, grid=case.fixed)
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
            options[key] = images.resize_labels(options[key], sides)
    moving, fixed = images.resize(m.tensor, m_sides), images.resize(f.tensor, f_sides)
    return optimize_fields(*answer, moving, fixed, **options), "fields"


def _field_sides(m: Prepared, f: Prepared) -> tuple[list[int], list[int]]:
    """Of the moving and of the fixed image's grid that fields are optimised on: the network's, or half of it where that
    has as many voxels as each of the scans. More would show nothing but interpolation."""
    whole = list(m.tensor.shape[2:]), list(f.tensor.shape[2:])
    half = [(n + 1) // 2 for n in whole[0]], [(n + 1) // 2 for n in whole[1]]
    scans = m.sides, f.sides
    return half if all(math.prod(scan) <= math.prod(sides) for scan, sides in zip(scans, half, strict=True)) else whole


def _fit_to_network(forward: Transform, m: Prepared, f: Prepared, kind: Kind) -> itk.WorldTransform:
    """The rigid or affine map closest to the dense one, at every second voxel of the fixed image."""
    every = (slice(None), *[slice(None, None, 2)] * f.image.dim)
    like = f.tensor.cpu()
    points = voxel_points(like)[every].flatten(1, -2)
    return _fit(points, forward(points), _foreground(f, points), m, f, kind)


def _fit_to_attention(network: RegistrationAlgorithm, m: Prepared, f: Prepared, kind: Kind) -> itk.WorldTransform:
    """The rigid or affine map closest to where coordinate attention points, each match weighted by 1 / its variance."""
    with mixed_precision(m.tensor.device):
        matches = coordinate_matches(network, m.tensor, f.tensor)
    if matches is None:
        raise ValueError("this model has no coordinate attention; expected fit_to='network'")
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


def _fit(points: Tensor, targets: Tensor, weights: Tensor, m: Prepared, f: Prepared, kind: Kind) -> itk.WorldTransform:
    """Points and targets (1, N, D) in unit coordinates; the fit is in millimetres."""
    here = torch.from_numpy(map_points(f.image.unit_to_world(), points.double().numpy()))
    there = torch.from_numpy(map_points(m.image.unit_to_world(), targets.double().numpy()))
    found = fit_robustly(fit_rigid if kind == "rigid" else fit_affine, here, there, weights.double())
    matrix = np.eye(f.image.dim + 1)
    matrix[:-1] = found.matrix[0].numpy()
    return itk.WorldTransform.linear(matrix)


def _spread(network: RegistrationAlgorithm, case: Case) -> Image | None:
    """None for a network that does not begin with coordinate attention."""
    if not any(isinstance(module, CoordinateAttention) for module in network.modules()):
        return None
    try:
        with mixed_precision(case.f.tensor.device):
            inside = Inside.of(network, case.m.tensor, case.f.tensor)
            return Explanation(inside, case.f.image, case.m.image).certainty()
    except torch.cuda.OutOfMemoryError:
        logger.warning("the GPU has too little memory to say how sure the network is: the report goes without")
        return None


def _score(
    case: Case,
    given: itk.WorldTransform | itk.ItkTransform | None,
    world: itk.WorldTransform,
    metrics: dict[str, float],
) -> dict[str, dict[int, float]]:
    """Dice of each label "before", with the first guess that was given, and "after", where both images have labels;
    means and landmark errors go into the metrics."""
    scores: dict[str, dict[int, float]] = {}
    start = itk.WorldTransform.linear(np.eye(case.fixed.dim + 1)) if given is None else given
    for when, map_ in (("before", start), ("after", world)):
        if case.moving_seg is not None and case.fixed_seg is not None:
            scores[when] = _dice(itk.apply(map_, case.moving_seg, case.fixed_seg, "nearest"), case.fixed_seg)
            metrics[f"dice_{when}"] = mean_score(scores[when])
        if case.landmarks is not None:
            here, there = case.landmarks
            metrics[f"tre_{when}_mm"] = float(np.linalg.norm(map_(here) - there, axis=-1).mean())
    return scores


def _dice(warped: Image, fixed: Image) -> dict[int, float]:
    first, second = (torch.from_numpy(image.data.astype(np.int64))[None, None] for image in (warped, fixed))
    return dice(first, second)


def _to_cpu(transform: Transform) -> Transform:
    return transform.map_tensors(lambda tensor: tensor.detach().float().cpu())


# ---- what is told ---------------------------------------------------------------------------------------------------


def _warnings(metrics: dict[str, float], solved: _Solved) -> tuple[str, ...]:
    found = list(solved.notes)
    if metrics.get("folds_percent", 0) > 1:
        found.append(f"{metrics['folds_percent']:.1f} % of the fixed image is folded: the match is doubtful there")
    if metrics.get("dice_after", 1) < metrics.get("dice_before", 0):
        found.append("the labels overlap less after the registration than before it")
    if solved.optimized is not None and solved.optimized.stopped is not None:
        found.append(f"the optimisation ended early: {solved.optimized.stopped}")
    for text in found:
        logger.warning("%s", text)
    return tuple(found)


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


def _versions() -> dict[str, str]:
    sitk = sys.modules.get("SimpleITK")
    return {
        "carlreg": carlreg.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        **({} if sitk is None else {"SimpleITK": sitk.__version__}),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory that this process ever held, and the most tensors on its GPU, in GiB."""
    peak = {}
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak["process"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)
    if device.type == "cuda":
        peak["gpu"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    return peak


def _describe_inputs(sources: Mapping[str, Any], case: Case) -> dict[str, Any]:
    told = {name: _source(source) for name, source in sources.items() if source is not None}
    told["fixed"] |= _describe(case.fixed, case.f)
    told["moving"] |= _describe(case.moving, case.m)
    return told


def _describe(image: Image, prepared: Prepared) -> dict[str, Any]:
    return {
        "shape": list(image.shape),
        "spacing_mm": [round(float(s), 6) for s in image.spacing],
        "sha256_voxels": hashlib.sha256(np.ascontiguousarray(image.data).tobytes()).hexdigest(),
        "intensities": prepared.words,
        "seen": prepared.view,
    }


def _source(source: Any) -> dict[str, Any]:
    """Where an input came from: a file with its checksum, a folder, or memory."""
    if not isinstance(source, (str, os.PathLike)):
        return {"given_as": type(source).__name__}
    path = Path(source).absolute()  # it is looked for again, perhaps from another folder
    return {"path": str(path)} | ({"sha256": sha256(path)} if path.is_file() else {})
