"""Two scans in, a registration out: files, headers and intensities taken care of.

The way of the data: read, turn to RAS, cut empty margins, stretch to the network's grid, register, optimise, and back
to the world.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from carlreg.explain import Explanation, Inside
from carlreg.fast.devices import choose_device
from carlreg.fast.precision import mixed_precision
from carlreg.files import world_transform
from carlreg.files.checksums import sha256
from carlreg.files.images import Image
from carlreg.files.results import InputRecord, Report
from carlreg.files.world_transform import WorldTransform
from carlreg.model.algorithms import CoordinateAttention, RegistrationAlgorithm
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.losses import Loss, Similarity
from carlreg.preparation import Prepared
from carlreg.registration.case import Case, read_case
from carlreg.registration.options import (
    FitSource,
    Optimize,
    PairInputs,
    RegisterOptions,
    SimilarityName,
    TransformKind,
)
from carlreg.registration.result import Registration, make_request, peak_memory
from carlreg.registration.rotation_search import RigidMatch, search_rotation
from carlreg.registration.score import _score
from carlreg.registration.solve import (
    USUAL,
    WEIGHT,
    Way,
    _Clock,
    _field_sides,
    _fit_to_attention,
    _solve,
    _Solved,
)

logger = logging.getLogger(__name__)
DEFAULT = RegisterOptions()
Model = str | os.PathLike[str] | RegistrationAlgorithm | LoadedModel
LOOK_SIDE, LOOK_MM = 96, 2.0
"""The grid on which `model="auto"` looks whether scans are turned against each other, and its usual voxels."""


def register(
    *,
    fixed: Any,
    moving: Any,
    model: Model = "default",
    transform: TransformKind = DEFAULT.transform,
    initial_transform: Any = None,
    io_iterations: int | None = DEFAULT.io_iterations,
    io_sim: str | Similarity = DEFAULT.io_sim,
    optimize: Optimize = DEFAULT.optimize,
    regularity: float | None = DEFAULT.regularity,
    fixed_mask: Any = None,
    moving_mask: Any = None,
    fixed_seg: Any = None,
    moving_seg: Any = None,
    fixed_landmarks: Any = None,
    moving_landmarks: Any = None,
    fit_source: FitSource = DEFAULT.fit_source,
    allow_identity: bool = DEFAULT.allow_identity,
    certainty: bool | None = DEFAULT.certainty,
    device: str | torch.device = DEFAULT.device,
    seed: int = DEFAULT.seed,
    callback: Callable[[int, Loss], None] | None = None,
    progress: Callable[[str], None] | None = None,
    over: Optimize | None = None,
    fit_to: FitSource | None = None,
) -> Registration:
    """Register two images: paths, SimpleITK or nibabel images, `carlreg.files.images.Image`, or arrays.

    `model` is the name of a shipped model, the path of a model file, or a model in memory. "auto" first searches for a
    rotation between the images; if there is one, carl-base sees the moving image rotated back.

    `io_iterations` steps of instance optimisation follow the network's result. They change the network's weights, as in
    the paper (50 steps by default, on a GPU), or the displacement fields (20 by default, elsewhere, and more on coarser
    grids); 0 skips them. Masks restrict where `io_sim` is measured. `regularity` is the weight of GradICON: 1.5 by
    default for the weights, as in training, and 0.75 for the fields. If the unregistered images match better than the
    network's result, the optimisation starts from those, unless `allow_identity` is False.

    "rigid" and "affine" transforms are closed-form robust least-squares fits, in millimetres, to the network's dense
    result over the foreground of the fixed image; with `fit_source="attention"` to the matches of its coordinate
    attention alone, weighted by their certainty: faster, and less accurate where attention is blurred. They are
    optimised before the fit only if `io_iterations` is given.

    `initial_transform` maps fixed to moving world points (LPS, mm): the path of a transform file, a transform, or a
    matrix (D + 1, D + 1). The network then sees the moving image through it, on the fixed image's grid; the result
    contains it.

    Labels (`fixed_seg`, `moving_seg`) and landmarks (files, or world points (N, D) in LPS) are scored before and after;
    they do not influence the registration. `certainty` adds the spread of the network's attention, which is quick on a
    GPU and by default computed only there. `progress(text)` is called when a part of the work begins,
    `callback(step, loss)` at every step of the optimisation. `over` and `fit_to` are older names of `optimize` and
    `fit_source`.

    >>> result = register(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> result.save("out")
    """
    inputs = PairInputs(
        fixed=fixed,
        moving=moving,
        fixed_mask=fixed_mask,
        moving_mask=moving_mask,
        fixed_seg=fixed_seg,
        moving_seg=moving_seg,
        fixed_landmarks=fixed_landmarks,
        moving_landmarks=moving_landmarks,
        initial_transform=initial_transform,
    )
    options = RegisterOptions(
        transform=transform,
        io_iterations=io_iterations,
        io_sim=cast(SimilarityName, io_sim),
        optimize=optimize if over is None else over,
        regularity=regularity,
        fit_source=fit_source if fit_to is None else fit_to,
        allow_identity=allow_identity,
        certainty=certainty,
        device=str(device),
        seed=seed,
    )
    return register_pair(inputs, model, options, callback=callback, progress=progress)


def register_pair(
    inputs: PairInputs,
    model: Model = "default",
    options: RegisterOptions = DEFAULT,
    *,
    callback: Callable[[int, Loss], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Registration:
    """`register`, with its arguments in two values."""

    def say(text: str) -> None:
        logger.info("%s", text)
        if progress is not None:
            progress(text)

    clock = _Clock()
    place = choose_device(options.device)

    say("reading")
    loaded = load_model(model, place)
    case = read_case(inputs, loaded, place)
    clock.lap("reading")

    given, seen = case.initial, None
    if loaded.searches_rotation:
        say("looking whether the scans are turned")
        seen, rigid = _look(case, loaded, place)
        if seen.is_rotated:
            logger.info("the moving scan is turned back by %.0f°", seen.degrees)
            guess = rigid if given is None else world_transform.compose(given, rigid, case.fixed)
            case = case.through(guess, loaded, place)
        clock.lap("look")

    chosen: Way = ("weights" if place.type == "cuda" else "fields") if options.optimize == "auto" else options.optimize
    transform, regularity = options.transform, options.regularity
    steps = 0 if options.io_iterations is None and transform != "deformable" else options.io_iterations
    metrics: dict[str, float] = {}
    if transform != "deformable" and options.fit_source == "attention":
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
            allow_identity=options.allow_identity,
            loss={"similarity": options.io_sim} | ({} if regularity is None else {"weight": regularity}),
            options={"seed": options.seed, "callback": callback},
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
    if options.certainty if options.certainty is not None else place.type == "cuda":
        say("certainty")
        spread = _spread(loaded.network, case)
        clock.lap("certainty")

    say("scores")
    labels = None if case.moving_seg is None else world_transform.apply(world, case.moving_seg, case.fixed, "nearest")
    scores = _score(case, given, world, metrics)
    clock.lap("scores")

    records = _describe_inputs(inputs, case)
    record = Report(
        model=loaded.provenance,
        look=None if seen is None else _told(seen),
        device=str(place),
        transform=transform,
        fit_to=None if transform == "deformable" else options.fit_source,
        io_iterations=0 if solved.over is None else USUAL[solved.over] if steps is None else steps,
        io_over=solved.over,
        io_sim=options.similarity_name,
        regularity=regularity if regularity is not None or solved.over is None else WEIGHT[solved.over],
        allow_identity=options.allow_identity,
        seed=options.seed,
        grid=list(case.f.tensor.shape[2:]),
        io_grid=_field_sides(case.m, case.f)[1] if solved.over == "fields" else None,
        inputs=records,
        seconds=clock.seconds(),
        peak_memory_gb=peak_memory(str(place)),
        metrics=metrics,
        dice=scores,
        losses=[] if solved.optimized is None else solved.optimized.losses,
        warnings=_warnings(metrics, solved),
        request=make_request(loaded, options, {name: one.sha256 for name, one in records.items()}),
    )
    return Registration(world, inverse, warped, case.fixed, case.moving, record, labels, spread)


# ---- whether the scans are turned -----------------------------------------------------------------------------------


def _look(case: Case, loaded: LoadedModel, place: torch.device) -> tuple[RigidMatch, WorldTransform]:
    """At both scans with the same cubic voxels: what was seen, and the rigid map of the world."""
    common = replace(loaded, grid=(LOOK_SIDE,) * case.fixed.dim, voxel=LOOK_MM, prepare=None)
    f, m = case.prepared_for(common, torch.device("cpu") if place.type == "mps" else place, masks=False)
    seen = search_rotation(m.tensor, f.tensor)
    unit = np.eye(case.fixed.dim + 1)
    unit[:-1] = seen.transform.matrix[0].cpu().double().numpy()
    return seen, WorldTransform.linear(m.image.unit_to_world() @ unit @ f.image.world_to_unit())


def _told(seen: RigidMatch) -> dict[str, Any]:
    return {
        "degrees": round(seen.degrees, 1),
        "likeness": round(seen.correlation, 4),
        "likeness_upright": round(seen.upright_correlation, 4),
        "turned_back": seen.is_rotated,
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


def _describe_inputs(inputs: PairInputs, case: Case) -> dict[str, InputRecord]:
    images = {"fixed": (case.fixed, case.f), "moving": (case.moving, case.m)}
    return {name: _describe(source, *images.get(name, ())) for name, source in inputs.sources().items()}


def _describe(source: Any, image: Image | None = None, prepared: Prepared | None = None) -> InputRecord:
    """Describe an input: a file or folder by its path and checksum, and an image also by its voxels."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).absolute()  # so that the report can be read from another folder
        record = InputRecord(path=str(path), sha256=sha256(path))
    else:
        record = InputRecord(given_as=type(source).__name__)
    if image is None or prepared is None:
        return record
    return replace(
        record,
        shape=list(image.shape),
        spacing_mm=[round(float(s), 6) for s in image.spacing],
        sha256_voxels=hashlib.sha256(np.ascontiguousarray(image.data).tobytes()).hexdigest(),
        intensities=prepared.intensity_note,
        seen=prepared.crop_note,
    )
