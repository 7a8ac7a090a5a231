"""One way to register a pair, with its verdict; and the ladder of further ways where the verdict is not good."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from carlreg.confidence.calibration import Calibration
from carlreg.confidence.error_map import error_map
from carlreg.confidence.gather import Answer, Budget, gather
from carlreg.confidence.verdict import Circumstances, find_calibration, judge
from carlreg.errors import CarlError
from carlreg.files import world_transform
from carlreg.files.images import Image
from carlreg.files.results import Confidence, Verdict
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.transforms import Affine, compose
from carlreg.model.loaded import NONE, LoadedModel, load_model
from carlreg.objective.losses import Loss
from carlreg.preparation import PreparedPair
from carlreg.registration.affine_search import Scan
from carlreg.registration.case import Case
from carlreg.registration.options import RegisterOptions, SimilarityChoice
from carlreg.registration.orientation_search import Orientation, search_orientation
from carlreg.registration.progress import Progress
from carlreg.registration.rotation_search import RigidMatch, search_rotation
from carlreg.registration.solve import Maps, Solution, solve

logger = logging.getLogger(__name__)

SEARCH_SIDE, SEARCH_MM = 96, 2.0
"""The grid on which a rotation is searched for, and its usual voxel size."""
CLEARLY = 0.2
"""A later way replaces the first one if its probability of failure is lower by this, and its verdict good."""
LOOK_SECONDS = {"cuda": 0.3, "cpu": 5.0}
"""What it takes to look into the headers."""
Callback = Callable[[int, Loss], None]


@dataclass(frozen=True, eq=False)
class Attempt:
    """A registration by one model from one start, and what is thought of it."""

    way: str
    model: LoadedModel
    case: Case
    pair: PreparedPair
    solution: Solution
    rotation: RigidMatch | None = None
    confidence: Confidence | None = None
    expected_error: Image | None = None
    orientation: Orientation | None = None
    """What was found about the headers, if that was looked into."""
    network_seconds: float = 0.0
    """What the network took for both directions."""
    warnings: tuple[str, ...] = ()
    """Its own, without those of headers or of the ladder."""

    @property
    def is_mirrored(self) -> bool:
        """Whether it was asked to exchange two sides of the moving scan, and did."""
        first, found = self.case.initial, self.orientation
        asked = found is not None and found.is_wrong and found.is_reflection
        return asked and isinstance(first, WorldTransform) and bool(np.linalg.det(first.affine) < 0)

    @property
    def probability(self) -> float:
        """The probability that it failed; 1 if that is unknown."""
        known = None if self.confidence is None else self.confidence.failure_probability
        return 1.0 if known is None else known

    def replaces(self, other: Attempt) -> bool:
        """Whether it is judged good, with a clearly lower probability of failure. Nothing less will do: the best of
        several guesses looks better than it is."""
        assert self.confidence is not None
        return self.confidence.verdict == "good" and self.probability < other.probability - CLEARLY


def attempt(
    way: str,
    model: LoadedModel,
    case: Case,
    options: RegisterOptions,
    work: Progress,
    callback: Callback | None = None,
    *,
    device: torch.device,
    rotation: RigidMatch | None = None,
    like: Attempt | None = None,
    judged_by: Attempt | None = None,
) -> Attempt:
    """Register a case, and judge the result unless that is not wanted. An earlier attempt with the same model and case
    (`like`) spares the network's run. Without a network, the result is judged by that of an earlier attempt at the same
    case (`judged_by`): its features tell more than intensities do, and results are compared by the same evidence.

    On a CPU, the network sees finely resolved scans on its usual grid, once, if the fields are optimised on their own
    voxels afterwards: its fine grid takes much longer there, and the optimisation makes up for most of it.
    """
    known = len(work.warnings)
    if like is None:
        quick = device.type == "cpu" and options.optimizes_fields
        pair = case.prepare(model, device, quick=quick)
        model = model.quickly() if quick and pair.fine else model.on_grid(pair.fixed.tensor.shape[2:])
    else:
        model, pair = like.model, like.pair
    work.warn(*case.warnings(), *pair.warnings)
    demands = case.guide_on(pair), case.rigidity_on(pair)
    maps = None if like is None else like.solution.first
    solution = solve(model, pair, options, case.fixed, work, callback, *demands, maps=maps)
    spent = work.seconds().get("network", 0.0) if like is None else like.network_seconds
    made = Attempt(way, model, case, pair, solution, rotation, network_seconds=spent)
    if options.confidence != "off":
        made = _judged(made, options, work, made if judged_by is None else judged_by)
    return replace(made, warnings=tuple(work.warnings[known:]))


def _judged(made: Attempt, options: RegisterOptions, work: Progress, by: Attempt) -> Attempt:
    seconds = work.seconds()
    total = seconds["total"] + (0.0 if "network" in seconds else made.network_seconds)
    work.begin("confidence", "judging the result")
    model, pair, solution = by.model, by.pair, made.solution
    calibration, why = find_calibration(model)
    about = Circumstances(
        str(model.provenance.get("name")),
        options.transform,
        pair.fixed.image.dim,
        None if options.io_sim == "auto" or solution.optimization is None else solution.io_sim,
    )
    if solution.maps is None:
        reason = f"only deformable transforms can be judged, and this one is {options.transform}"
        return replace(made, confidence=Confidence(verdict="unknown", reasons=(reason,)))
    has_network, own = not model.searches_affine, by is made
    losses = [] if not own or solution.optimization is None else solution.optimization.result.losses
    answer = Answer(
        pair,
        solution.maps if own else _between(made.pair, pair, solution.maps),
        model.network if has_network else None,
        by.solution.first if has_network else None,
        losses,
    )
    budget = Budget.of(total, by.network_seconds, full=options.confidence == "full")
    if calibration is None and options.confidence != "full":
        budget = replace(budget, seconds=0.0)  # nothing could be made of costly evidence
    began = time.perf_counter()
    found, orientation = gather(answer, budget), None
    spent = time.perf_counter() - began + LOOK_SECONDS.get(pair.fixed.tensor.device.type, LOOK_SECONDS["cpu"])
    if made.case.initial is None and pair.fixed.image.dim > 1 and spent <= budget.seconds:
        orientation = look_at_headers(pair)
        found = replace(found, evidence=replace(found.evidence, misorientation=orientation.gain))
    confidence = judge(found, calibration, about, why)
    errors = error_map(found, calibration, confidence.expected_error_mm, pair.fixed)
    return replace(made, confidence=confidence, expected_error=errors, orientation=orientation)


def _between(given: PreparedPair, wanted: PreparedPair, maps: Maps) -> Maps:
    """Maps between the unit coordinates of a prepared pair, as maps between those of another one of the same scans,
    whose margins were cropped, for example."""
    there = []
    for one, other in zip(given, wanted, strict=True):
        matrix = one.image.world_to_unit() @ other.image.unit_to_world()
        there.append(Affine(torch.from_numpy(matrix[None, :-1]).float()).to(one.tensor))
    fixed, moving = there
    return compose(moving.inverse(), maps[0], fixed), compose(fixed.inverse(), maps[1], moving)


# ---- headers --------------------------------------------------------------------------------------------------------


def look_at_headers(pair: PreparedPair) -> Orientation:
    """How the axes of the moving scan seem to run against those of the fixed one, on coarse images."""
    device = pair.fixed.tensor.device if pair.fixed.tensor.is_cuda else torch.device("cpu")
    fixed, moving = (Scan(one.tensor.float().to(device), one.spacing(one.tensor.shape[2:])) for one in pair)
    return search_orientation(moving, fixed)


def _as_given(case: Case) -> PreparedPair:
    """Both scans as they are prepared without a network, to look into their headers."""
    return case.prepare(load_model(NONE, "cpu"), torch.device("cpu"), masks=False)


def reoriented(case: Case, work: Progress) -> tuple[Orientation, Case]:
    """The case with the moving scan the way it seems to lie, by the initial transform."""
    work.begin("orientation", "looking into the headers")
    pair = _as_given(case)
    found = look_at_headers(pair)
    if not found.is_wrong:
        return found, case
    work.warn(f"the moving scan was registered as if {found.describe()}, as --fix-orientation asks")
    unit = np.eye(case.fixed.dim + 1)
    unit[:-1] = found.unit.matrix[0].double().numpy()
    world = WorldTransform.linear(pair.moving.image.unit_to_world() @ unit @ pair.fixed.image.world_to_unit())
    initial = world if case.initial is None else world_transform.compose(case.initial, world, case.fixed)
    return found, replace(case, initial=initial)


def with_orientation(made: Attempt, options: RegisterOptions, work: Progress, case: Case) -> Attempt:
    """Look into the headers, if that was not done, where the verdict is not good or all evidence is wanted. What seems
    mirrored is never good, and stays as it is."""
    judged, found = made.confidence, made.orientation
    if judged is None or case.fixed.dim not in (2, 3) or case.initial is not None:
        return made
    if found is None and (options.confidence == "full" or judged.verdict in ("doubtful", "failed")):
        work.begin("orientation", "looking into the headers")
        found = look_at_headers(made.pair if made.case.initial is None else _as_given(case))
        made = replace(made, orientation=found)
    if found is None or not found.is_wrong:
        return made
    text = f"the moving header seems wrong, or the fixed one: {found.describe()}; check it, or give --fix-orientation"
    work.warn(text)
    if not found.is_reflection:
        return made  # a rotation, which may be found
    doubt: Verdict = "doubtful" if judged.verdict == "good" else judged.verdict
    return replace(made, confidence=replace(judged, verdict=doubt, reasons=(text, *judged.reasons)))


# ---- the ladder -----------------------------------------------------------------------------------------------------


def climb(
    first: Attempt,
    options: RegisterOptions,
    work: Progress,
    callback: Callback | None,
    *,
    device: torch.device,
    case: Case,
) -> Attempt:
    """The first attempt, unless its verdict is not good and that of another way is, clearly: after a search for a
    rotation, with another similarity, or without a network."""
    if first.confidence is None or first.confidence.verdict not in ("doubtful", "failed"):
        return first
    if first.orientation is not None and first.orientation.is_wrong and first.orientation.is_reflection:
        return first  # no other way can mend that
    work.begin("ladder", "trying other ways")
    best, tried = first, [_described(first)]
    for way in _rungs(first, options, case, device):
        part = Progress(work.report, work.advance, quiet=True)
        try:
            other = attempt(
                *way.arguments,
                part,
                callback,
                device=device,
                rotation=way.rotation,
                like=way.like,
                judged_by=way.judged_by,
            )
        except CarlError as error:
            logger.info("%s: %s", way.arguments[0], error)
            continue
        tried.append(_described(other))
        if other.replaces(first):
            best = other
            break
    if best is not first:
        assert first.confidence is not None
        work.warnings = [text for text in work.warnings if text not in first.warnings]
        work.warn(*best.warnings)
        work.warn(f"{first.way} was judged {first.confidence.verdict}; the result is that of {best.way}")
    assert best.confidence is not None
    judged = replace(best.confidence, tried=tuple(tried))
    return replace(best, confidence=judged, orientation=first.orientation)


@dataclass(frozen=True, eq=False)
class _Rung:
    arguments: tuple[str, LoadedModel, Case, RegisterOptions]
    rotation: RigidMatch | None = None
    like: Attempt | None = None
    """An attempt with the same model and case."""
    judged_by: Attempt | None = None
    """An attempt at the same case, whose network judges a result without one."""


def _rungs(first: Attempt, options: RegisterOptions, case: Case, device: torch.device) -> Iterator[_Rung]:
    if first.rotation is None and case.fixed.dim in (2, 3):
        match, turned = rotated_back(case, first.model, device)
        if match.is_rotated:
            yield _Rung(("the network after a rotation search", first.model, turned, options), match)
    if options.io_sim == "auto" and first.solution.optimization is not None:
        other: SimilarityChoice = "mind" if first.solution.contrasts_differ else "lncc2"
        changed = replace(options, io_sim=other)
        yield _Rung((f"the network with {other}", first.model, case, changed), first.rotation, first)
    none = replace(load_model(NONE, device), graphs=first.model.graphs)
    if options.optimize != "weights" and options.fit_source != "attention":
        yield _Rung(("an affine search without a network", none, case, options), judged_by=first)


def _described(one: Attempt) -> str:
    assert one.confidence is not None
    chance = "" if math.isnan(one.probability) else f", probability of failure {one.probability:.2f}"
    return f"{one.way}: {one.confidence.verdict}{chance}"


def rotated_back(case: Case, loaded: LoadedModel, device: torch.device) -> tuple[RigidMatch, Case]:
    """Search for a rotation between the scans, and undo it by the initial transform."""
    cubic = replace(loaded, grid=(SEARCH_SIDE,) * case.fixed.dim, voxel=SEARCH_MM, prepare=None)
    fixed, moving = case.prepare(cubic, torch.device("cpu") if device.type == "mps" else device, masks=False)
    match = search_rotation(moving.tensor, fixed.tensor)
    if not match.is_rotated:
        return match, case
    logger.info("the moving scan is rotated back by %.0f°", match.degrees)
    unit = np.eye(case.fixed.dim + 1)
    unit[:-1] = match.transform.matrix[0].cpu().double().numpy()
    rigid = WorldTransform.linear(moving.image.unit_to_world() @ unit @ fixed.image.world_to_unit())
    initial = rigid if case.initial is None else world_transform.compose(case.initial, rigid, case.fixed)
    return match, replace(case, initial=initial)


def is_calibrated(model: LoadedModel) -> bool:
    calibration: Calibration | None = find_calibration(model)[0]
    return calibration is not None
