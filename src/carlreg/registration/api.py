"""Register two scans: from files, headers and intensities to a map of the world.

The scans are read, reoriented to RAS, cropped to their foreground, resampled to the network's grid, registered and
optimised; the result is a map between world points.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from carlreg.errors import InputError
from carlreg.explain import Explanation, Inside
from carlreg.fast import wake
from carlreg.fast.devices import choose_device
from carlreg.fast.precision import mixed_precision
from carlreg.files import transform_files, world_transform
from carlreg.files.images import Image, placed
from carlreg.files.results import Report
from carlreg.files.world_transform import PointMap, WorldTransform
from carlreg.model.algorithms import CoordinateAttention, RegistrationAlgorithm
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.objective.losses import Loss, Similarity
from carlreg.preparation import PreparedPair
from carlreg.registration.attempt import (
    Attempt,
    attempt,
    climb,
    is_calibrated,
    reoriented,
    rotated_back,
    with_orientation,
)
from carlreg.registration.case import Case, score
from carlreg.registration.options import (
    ConfidenceLevel,
    FitSource,
    Optimize,
    PairInputs,
    RegisterOptions,
    TransformKind,
)
from carlreg.registration.progress import Progress
from carlreg.registration.record import (
    describe_inputs,
    describe_options,
    describe_orientation,
    describe_search,
    metric_warnings,
)
from carlreg.registration.result import Registration, make_request, peak_memory, precision
from carlreg.registration.rigid_regions import make_rigid
from carlreg.registration.solve import check_without_network

logger = logging.getLogger(__name__)
DEFAULT = RegisterOptions()
Model = str | os.PathLike[str] | RegistrationAlgorithm | LoadedModel


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
    guide: Any = None,
    guide_fixed: Any = None,
    guide_moving: Any = None,
    rigid_mask: Any = None,
    moving_rigid_mask: Any = None,
    fit_source: FitSource = DEFAULT.fit_source,
    allow_identity: bool = DEFAULT.allow_identity,
    confidence: ConfidenceLevel = DEFAULT.confidence,
    fix_orientation: bool = DEFAULT.fix_orientation,
    certainty: bool = DEFAULT.certainty,
    nan: float | None = DEFAULT.nan,
    frame: int | tuple[int, int] | None = DEFAULT.frame,
    channel: int | str | tuple[int | str, int | str] | None = DEFAULT.channel,
    series: str | None = DEFAULT.series,
    fixed_series: str | None = DEFAULT.fixed_series,
    moving_series: str | None = DEFAULT.moving_series,
    device: str | torch.device = DEFAULT.device,
    seed: int = DEFAULT.seed,
    spacing: Any = None,
    affine: Any = None,
    space: Literal["LPS", "RAS"] = "LPS",
    callback: Callable[[int, Loss], None] | None = None,
    progress: Callable[[str], None] | None = None,
    over: Optimize | None = None,
    fit_to: FitSource | None = None,
) -> Registration:
    """Register two images: paths, images of SimpleITK, nibabel, ANTsPy, MONAI or TorchIO, arrays, or tensors.

    Arrays (x, y, z) and tensors (1, 1, x, y, z) have voxels of 1 mm unless `spacing` is given, in mm along each axis,
    or `affine`, (D + 1, D + 1) from indices to millimetres in `space`, "LPS" or, as nibabel's, "RAS". Two of them, as a
    tuple, are for the fixed and the moving image.

    `model` is the name of a shipped model, the path of a model file, or a model in memory. "auto" first searches for a
    rotation between the images; if there is one, carl-base sees the moving image rotated back. "none" uses no network:
    the fields are optimised from an affine map, which is searched for.

    `io_iterations` steps of instance optimisation follow the network's result. They change the displacement fields, on
    the scans' own voxels (20 steps by default, and more on coarser grids), or with `optimize="weights"` the network's
    weights, as in the paper (50 by default); 0 skips them. `io_sim="auto"` takes lncc. If the contrasts of the
    scans differ, one is recoloured like the other first, and if they stay unlike, the network's result is kept; the
    weights are optimised with lncc2 then. Masks restrict where the similarity is measured. `regularity` is the weight
    of GradICON: 1.5 by default for the weights, as in training, and 0.75 for the fields. If the unregistered images
    match better than the network's result, the optimisation starts from those, unless `allow_identity` is False.

    "rigid" and "affine" transforms are closed-form robust least-squares fits, in millimetres, to the network's dense
    result over the foreground of the fixed image; with `fit_source="attention"` to the matches of its coordinate
    attention alone, weighted by their certainty: faster, and less accurate where attention is blurred. They are
    optimised before the fit only if `io_iterations` is given.

    `initial_transform` maps fixed to moving world points (LPS, mm): the path of a transform file or of a result
    folder, a transform, or a matrix (D + 1, D + 1). The network then sees the moving image through it, on the fixed
    image's grid; the result contains it.

    `guide` are corresponding points that pull the result, such as corrections by hand: a CSV file with the columns
    fixed_x, fixed_y, fixed_z, moving_x, moving_y, moving_z, or a pair of arrays (N, D) or landmark files, in LPS mm;
    `guide_fixed` and `guide_moving` are the same in two arguments. They act in the optimisation of the fields.

    `rigid_mask` holds regions of the fixed image that move but do not bend, such as a tumour or bones, and
    `moving_rigid_mask` those of the moving image: label maps on the images' own grids, each number other than 0 a
    region. Their maps are kept nearly rigid while the fields are optimised, and made exactly so at the end.

    Labels (`fixed_seg`, `moving_seg`) and landmarks (files, or world points (N, D) in LPS) are scored before and after;
    they do not influence the registration. `certainty` adds the spread of the network's attention, which is quick on a
    GPU. `progress(text)` is called when a part of the work begins, `callback(step, loss)` at every step of the
    optimisation.

    `series` chooses among the DICOM series of a folder, by number, UID, or a part of the description; `fixed_series`
    and `moving_series` do so for one image. `nan` replaces values that are not finite. `frame` is the time point of 4-D
    images and `channel` that of images in colour, or "luminance"; two values are for the fixed and the moving image.
    `over` and `fit_to` are older names of `optimize` and `fit_source`.

    >>> result = register(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> result.save("out")
    """
    given = locals() | {"device": str(device)}
    for name, older in (("optimize", "over"), ("fit_source", "fit_to")):
        if given[older] is not None and given[name] not in (given[older], getattr(DEFAULT, name)):
            raise InputError(f"{name}={given[name]!r} and {older}={given[older]!r} were given; expected {name} alone")
        given[name] = given[name] if given[older] is None else given[older]
    for number, name in enumerate(("fixed", "moving") if spacing is not None or affine is not None else ()):
        given[name] = placed(given[name], _one_of(spacing, number), _one_of(affine, number), space, name)
    inputs = PairInputs(**{one.name: given[one.name] for one in fields(PairInputs)})
    options = RegisterOptions(**{one.name: given[one.name] for one in fields(RegisterOptions)})
    return register_pair(inputs, model, options, callback=callback, progress=progress)


def _one_of(value: Any, number: int) -> Any:
    """What a tuple of two has for one image, or what is given for both."""
    return value[number] if isinstance(value, tuple) and len(value) == 2 and np.ndim(value[0]) > 0 else value


def register_pair(
    inputs: PairInputs,
    model: Model = "default",
    options: RegisterOptions = DEFAULT,
    *,
    callback: Callable[[int, Loss], None] | None = None,
    progress: Callable[[str], None] | None = None,
    advance: Callable[[float], None] | None = None,
    full_precision: bool = True,
) -> Registration:
    """`register`, with its arguments in two values. `advance(share)` is called with the share of the current part that
    is done, from 0 to 1, while the network runs on a CPU and at every step of the optimisation. For `full_precision`,
    see `complete`."""
    work = Progress(progress, advance)
    found = align_pair(inputs, model, options, work, callback)
    return complete(found, inputs, options, work, full_precision=full_precision)


def complete(
    found: Alignment, inputs: PairInputs, options: RegisterOptions, work: Progress, *, full_precision: bool = True
) -> Registration:
    """The part of `register_pair` that follows the map: its inverse, the warped scans, scores and the report.

    Without `full_precision`, the map is rounded first, as `Registration.save` rounds it, so that everything describes
    the map that the file holds.
    """
    device, made, world = choose_device(options.device), found.made, found.transform
    loaded, case, pair, solution = made.model, made.case, made.pair, made.solution
    if not full_precision:
        world = transform_files.rounded(world, precision(case.fixed, case.moving))
    with ThreadPoolExecutor() as pool:  # meanwhile, a GPU inverts
        warping = pool.submit(world_transform.apply, world, case.moving, case.fixed)
        volumes = pool.submit(_changes_of_volume, world, case, mirrored=made.is_mirrored)
        inverse, metrics = _invert(world, case, device)
    metrics |= volumes.result() | solution.metrics
    spread = _spread(loaded.network, pair, work) if options.certainty else None
    work.begin("scores")
    labels = None if case.moving_seg is None else world_transform.apply(world, case.moving_seg, case.fixed, "nearest")
    scores, dice = score(case, found.before, world)
    metrics |= scores
    work.warn(*metric_warnings(metrics))
    records = describe_inputs(inputs, case, pair)
    record = Report(
        model=loaded.provenance,
        look=describe_search(made.rotation or solution.search),
        device=str(device),
        **describe_options(options, solution),
        grid=list(pair.fixed.tensor.shape[2:]),
        inputs=records,
        seconds=work.seconds(),
        peak_memory_gb=peak_memory(str(device)),
        metrics=metrics,
        dice=dice,
        losses=[] if solution.optimization is None else solution.optimization.result.course,
        guide=() if case.guide is None else np.hstack(case.guide).tolist(),
        warnings=work.warnings,
        orientation=describe_orientation(made.orientation, applied=options.fix_orientation),
        confidence=made.confidence,
        request=make_request(found.asked, options, {name: one.sha256 for name, one in records.items()}),
    )
    given = {"fixed_labels": case.fixed_seg, "moving_labels": case.moving_seg, "expected_error": made.expected_error}
    return Registration(world, inverse, warping.result(), case.fixed, case.moving, record, labels, spread, **given)


@dataclass(frozen=True, eq=False)
class ReadPair:
    """Two scans that were read ahead, and how long that took."""

    case: Case
    seconds: float

    @classmethod
    def of(cls, inputs: PairInputs, options: RegisterOptions) -> ReadPair:
        start = time.perf_counter()
        return cls(Case.read(inputs, options), time.perf_counter() - start)


@dataclass(frozen=True, eq=False)
class Alignment:
    """Two scans as they were read, and the map between them."""

    asked: LoadedModel
    """The model that was asked for."""
    made: Attempt
    """The way that was taken, with its verdict."""
    before: PointMap
    """The map that was given, or the identity."""
    transform: WorldTransform
    """From points of the fixed scan to points of the moving one."""

    @property
    def case(self) -> Case:
        return self.made.case


def align_pair(
    inputs: PairInputs,
    model: Model,
    options: RegisterOptions,
    work: Progress,
    callback: Callable[[int, Loss], None] | None = None,
    read: ReadPair | None = None,
) -> Alignment:
    """The part of `register_pair` that finds the map, without its inverse and its scores. The scans may have been
    `read` before."""
    device = choose_device(options.device)
    work.begin("reading", earlier=0.0 if read is None else read.seconds)
    with ThreadPoolExecutor() as pool:  # a GPU and the model take as long as the scans
        pool.submit(wake, device)
        reading = pool.submit(lambda: Case.read(inputs, options) if read is None else read.case)
        loaded = load_model(model, device)
        check_without_network(loaded, options)
        if inputs.is_guided:
            options.check_guided()
        if inputs.has_rigid_regions:
            options.check_rigid_regions()
    case = reading.result()
    loaded = loaded.for_dimension(case.fixed.dim)
    before: PointMap = (lambda points: points) if case.initial is None else case.initial
    made = _best(loaded, case, options, work, callback, device)
    world = made.solution.transform
    if made.case.initial is not None:
        world = world_transform.compose(made.case.initial, world, case.fixed)
    if inputs.has_rigid_regions:
        world, changed = make_rigid(world, case.fixed, *case.rigid_masks)
        metrics = made.solution.metrics | {"rigid_correction_mm": changed}
        made = replace(made, solution=replace(made.solution, metrics=metrics))
    return Alignment(loaded, made, before, world)


def _best(
    loaded: LoadedModel,
    case: Case,
    options: RegisterOptions,
    work: Progress,
    callback: Callable[[int, Loss], None] | None,
    device: torch.device,
) -> Attempt:
    """Register a case by one model; by the best of several ways where a verdict is possible and not good."""
    climbs = loaded.climbs and options.confidence != "off" and is_calibrated(loaded)
    rotation, upright, way = None, case, "the network"
    if loaded.searches_rotation:
        work.begin("look", "searching for a rotation")
        rotation, case = rotated_back(case, loaded, device)
        way = "the network after a rotation search"
    orientation = None
    if options.fix_orientation:
        orientation, case = reoriented(case, work)
        upright = case
    first = attempt(way, loaded, case, options, work, callback, device=device, rotation=rotation)
    if orientation is not None:
        return replace(first, orientation=orientation)
    first = with_orientation(first, options, work, upright)
    return climb(first, options, work, callback, device=device, case=case) if climbs else first


def _invert(world: WorldTransform, case: Case, device: torch.device) -> tuple[WorldTransform, dict[str, float]]:
    """The inverse, and by how much it misses."""
    if world.is_linear:
        exact = dict.fromkeys(("inverse_consistency_mm", "inverse_error_mm", "inverse_error_max_mm"), 0.0)
        return WorldTransform.linear(np.linalg.inv(world.affine)), exact
    used = device if device.type == "cuda" else "cpu"
    try:
        inverse, residual = world_transform.invert(world, case.moving, device=used)
    except torch.cuda.OutOfMemoryError:
        inverse, residual = world_transform.invert(world, case.moving)
    missed = residual[np.isfinite(residual)]
    mean, largest = (float(missed.mean()), float(missed.max())) if missed.size else (math.nan, math.nan)
    return inverse, {"inverse_consistency_mm": mean, "inverse_error_mm": mean, "inverse_error_max_mm": largest}


def _changes_of_volume(world: WorldTransform, case: Case, *, mirrored: bool) -> dict[str, float]:
    """Metrics of the determinants. Where the scan was `mirrored` on purpose, folds are what was not."""
    if world.is_linear:
        folded = bool(np.linalg.det(world.affine) < 0) != mirrored
        return {"folds_percent": 100.0 * folded, "sd_log_jacobian": 0.0}
    determinants = world_transform.jacobian_determinant(world, case.fixed, mirrored=mirrored)
    return {
        "folds_percent": world_transform.folds_percent(determinants),
        "sd_log_jacobian": world_transform.sd_log_jacobian(determinants),
    }


def _spread(network: RegistrationAlgorithm, pair: PreparedPair, work: Progress) -> Image | None:
    """The spread of the network's attention; None for a network without coordinate attention."""
    work.begin("certainty")
    if not any(isinstance(module, CoordinateAttention) for module in network.modules()):
        return None
    fixed, moving = pair
    try:
        with mixed_precision(fixed.tensor.device):
            inside = Inside.of(network, moving.tensor, fixed.tensor)
            return Explanation(inside, fixed.image, moving.image).certainty()
    except torch.cuda.OutOfMemoryError:
        logger.warning("the GPU has too little memory to compute certainty: the report omits it")
        return None
