"""Two scans in, a registration out: files, headers and intensities taken care of.

The way of the data: read, turn to RAS, cut empty margins, stretch to the network's grid, register, optimise, and back
to the world.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.explain import Explanation, Inside
from carlreg.fast.devices import choose_device
from carlreg.fast.precision import mixed_precision
from carlreg.files import world_transform
from carlreg.files.checksums import sha256
from carlreg.files.images import Image
from carlreg.files.world_transform import WorldTransform
from carlreg.model.algorithms import CoordinateAttention, RegistrationAlgorithm
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.losses import Loss, Similarity, find_similarity
from carlreg.preparation import Prepared
from carlreg.registration.case import Case, read_case
from carlreg.registration.result import Registration
from carlreg.registration.rotation_search import Look, look
from carlreg.registration.score import _score
from carlreg.registration.solve import (
    USUAL,
    WEIGHT,
    FitTo,
    Kind,
    Over,
    Way,
    _Clock,
    _field_sides,
    _fit_to_attention,
    _solve,
    _Solved,
)

logger = logging.getLogger(__name__)
LOOK_SIDE, LOOK_MM = 96, 2.0
"""The grid on which `model="auto"` looks whether scans are turned against each other, and its usual voxels."""


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
            guess = rigid if given is None else world_transform.compose(given, rigid, case.fixed)
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
    world = solved.world if case.initial is None else world_transform.compose(case.initial, solved.world, case.fixed)
    if world.is_linear:
        inverse = WorldTransform.linear(np.linalg.inv(world.affine))
        metrics["inverse_error_mm"] = metrics["inverse_error_max_mm"] = 0.0
    else:
        inverse, residual = world_transform.invert(world, case.moving)
        missed = residual[np.isfinite(residual)]
        metrics["inverse_error_mm"] = float(missed.mean()) if missed.size else math.nan
        metrics["inverse_error_max_mm"] = float(missed.max()) if missed.size else math.nan
    warped = world_transform.apply(world, case.moving, case.fixed)
    clock.lap("world_space")

    spread = None
    if certainty if certainty is not None else place.type == "cuda":
        say("certainty")
        spread = _spread(loaded.network, case)
        clock.lap("certainty")

    say("scores")
    labels = None if case.moving_seg is None else world_transform.apply(world, case.moving_seg, case.fixed, "nearest")
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


def _look(case: Case, loaded: LoadedModel, place: torch.device) -> tuple[Look, WorldTransform]:
    """At both scans with the same cubic voxels: what was seen, and the rigid map of the world."""
    common = replace(loaded, grid=(LOOK_SIDE,) * case.fixed.dim, voxel=LOOK_MM, prepare=None)
    f, m = case.prepared_for(common, torch.device("cpu") if place.type == "mps" else place, masks=False)
    seen = look(m.tensor, f.tensor)
    unit = np.eye(case.fixed.dim + 1)
    unit[:-1] = seen.transform.matrix[0].cpu().double().numpy()
    return seen, WorldTransform.linear(m.image.unit_to_world() @ unit @ f.image.world_to_unit())


def _told(seen: Look) -> dict[str, Any]:
    return {
        "degrees": round(seen.degrees, 1),
        "likeness": round(seen.likeness, 4),
        "likeness_upright": round(seen.upright, 4),
        "turned_back": seen.turned,
    }


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
