"""The network's result and its optimisation, as a map of the world."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from carlreg.errors import InputError, NotFiniteError
from carlreg.fast.devices import available_memory
from carlreg.fast.graphs import Graphs
from carlreg.files import world_transform
from carlreg.files.images import Image
from carlreg.files.world_transform import WorldTransform
from carlreg.geometry.transforms import Affine, Identity, Transform
from carlreg.model.algorithms import RegistrationAlgorithm
from carlreg.model.loaded import LoadedModel, NoNetwork
from carlreg.objective.fields import FIELD_STEPS, FIELD_WEIGHT, GAIN, LEVELS, Optimized, optimize_fields, share_done
from carlreg.objective.guide import Guide
from carlreg.objective.instance import WEIGHT_STEPS, Objective, instance_optimize, match_perfectly
from carlreg.objective.losses import Loss
from carlreg.objective.metrics import inverse_consistency
from carlreg.objective.rigidity import Rigidity
from carlreg.preparation import PreparedPair
from carlreg.registration.affine_search import AffineMatch, Scan, search_affine
from carlreg.registration.both import both_maps
from carlreg.registration.fit import fit_to_attention, fit_to_dense
from carlreg.registration.options import RegisterOptions
from carlreg.registration.progress import Progress
from carlreg.registration.similarity import STIFFNESS, Comparison, compare, mismatch
from carlreg.registration.surroundings import without_surroundings
from carlreg.registration.watch import watched

logger = logging.getLogger(__name__)

Way = Literal["weights", "fields"]
STEPS: dict[Way, int] = {"weights": WEIGHT_STEPS, "fields": FIELD_STEPS}
REGULARITY: dict[Way, float] = {"weights": 1.5, "fields": FIELD_WEIGHT}
SMALL: dict[str, Any] = {"levels": 3, "learning_rate": 0.3, "stiffness": 1.0, "gain": 0.4}
"""Networks learn from labels what the intensities of small crops do not show: their answer stands unless the loss falls
far, as it does where they failed."""
SLICES: dict[str, Any] = {"smoothing": 4.0, "stiffness": 1.0}
"""Little couples the field across thick slices, so its changes are smoothed more within them, and stiffer."""
THICK = 4.0
"""Slices are thick if they are this many times as far apart as voxels within them."""
FAR: dict[str, Any] = {"levels": 5, "fold_weight": 20.0, "stiffness": 0.0}
"""Without a network, the deformation that is left is larger: one more coarse grid, changes that may bend, and a higher
price of folds."""
FINEST = {1: 4096, 2: 1024, 3: 192}
"""Voxels a side of the grid on which fields are optimised, at most, by the number of axes: with local correlation."""
COARSEST = {1: 2048, 2: 512, 3: 96}
"""The same with any other similarity."""
RECOLOURED = 3
"""How often an image is recoloured again, each time at the map that its last colours led to."""
BYTES = 200
"""Memory for the optimisation of fields, for each voxel of both images."""
Shape = tuple[int, ...]
Maps = tuple[Transform, Transform]
"""Φ[moving, fixed] and Φ[fixed, moving]."""


@dataclass(frozen=True, eq=False)
class Optimization:
    """An instance optimisation, with its defaults filled in."""

    over: Way
    steps: int
    regularity: float
    grid: list[int] | None
    """The grid of the fields, if those were optimised."""
    result: Optimized
    gain: float = GAIN
    """The fraction by which the loss had to fall for the fields to change."""


@dataclass(frozen=True, eq=False)
class Solution:
    """A map between the worlds of a prepared pair, and how it was found."""

    transform: WorldTransform
    metrics: dict[str, float] = field(default_factory=dict)
    optimization: Optimization | None = None
    io_sim: str | None = None
    io_sim_reason: str | None = None
    contrasts_differ: bool = False
    io_kept: str | None = None
    """Why the optimisation left its start as it was, if it did."""
    search: AffineMatch | None = None
    maps: Maps | None = None
    """Both directions in unit coordinates, if they are dense."""
    first: Maps | None = None
    """The same before any optimisation, from the network or the search."""


def check_without_network(model: LoadedModel, options: RegisterOptions) -> None:
    """Refuse options that need a network if there is none."""
    for name, value, other in (("optimize", "weights", "fields"), ("fit_source", "attention", "network")):
        if model.searches_affine and getattr(options, name) == value:
            raise InputError(f"{name}={value!r} needs a network, but the model is 'none'; expected {other!r}")


def solve(
    model: LoadedModel,
    pair: PreparedPair,
    options: RegisterOptions,
    grid: Image,
    progress: Progress,
    callback: Callable[[int, Loss], None] | None = None,
    guide: Guide | None = None,
    rigidity: Rigidity | None = None,
    *,
    maps: Maps | None = None,
) -> Solution:
    """Run the network, optimise its result, and turn it into a map of the world, sampled on the voxels of `grid`. The
    network's `maps` may be known from before."""
    network, kind, steps = model.network, options.transform, options.io_iterations
    if kind != "deformable" and options.fit_source == "attention":
        progress.begin("network", "coordinate attention")
        fitted = fit_to_attention(network, pair, kind)
        progress.begin("world_space")
        return Solution(fitted)
    search = None
    if model.searches_affine:
        progress.begin("look", "searching for an affine map")
        search = _search(pair, rigid=kind == "rigid")
        maps = search.transform, search.transform.inverse()
    elif maps is None:
        progress.begin("network")
        with watched(network, pair.moving.tensor, pair.fixed.tensor, progress.advance):
            maps = _both(network, pair, model.graphs)
    alike, left_out = pair, None
    if options.optimize != "weights":  # then the network has to see the images as they are
        alike, left_out = without_surroundings(pair, *maps)
    comparison = compare(options, maps[0], alike, stripped=left_out is not None)
    options = comparison.options
    chosen: dict[str, Any] = {
        "io_sim": options.similarity_name,
        "io_sim_reason": "; ".join(filter(None, (comparison.reason, left_out))) or None,
        "contrasts_differ": comparison.differs,
        "search": search,
    }
    chosen["first"] = maps
    over: Way = "fields" if options.optimize == "auto" else options.optimize
    start = "the network's result" if search is None else "the map that the search found"
    if search is None and options.allow_identity and (why := _better_unregistered(maps, pair, comparison)):
        maps, over, start = (Identity(), Identity()), "fields", "the unregistered images"
        progress.warn(why)
    optimization = None
    if steps != 0 and (kind == "deformable" or steps is not None):
        progress.begin("optimisation")
        demands = {"guide": guide, "rigidity": rigidity, "graphs": model.graphs}
        optimization = _optimize(network, maps, comparison, alike, over, callback, demands, progress.advance)
        maps = optimization.result.transform, optimization.result.inverse
        if optimization.result.stopped is not None:
            progress.warn(f"the optimisation ended early: {optimization.result.stopped}")
        chosen["io_kept"] = _kept(optimization, start)
    progress.begin("world_space")
    if kind != "deformable":
        forward = maps[0].map_tensors(lambda tensor: tensor.detach().float().cpu())
        return Solution(fit_to_dense(forward, pair, kind), {}, optimization, **chosen)
    metrics, device = {"inverse_consistency_mm": _inverse_consistency(maps, pair)}, pair.fixed.tensor.device
    used = device if device.type == "cuda" else "cpu"
    world = world_transform.to_world(maps[0], pair.fixed.image, pair.moving.image, grid=grid, device=used)
    return Solution(world, metrics, optimization, **chosen, maps=maps)


def _search(pair: PreparedPair, *, rigid: bool) -> AffineMatch:
    """The affine or rigid map between two scans that no network knows; the identity between equal ones."""
    device = pair.fixed.tensor.device
    fixed, moving = (
        Scan(one.tensor.cpu() if device.type == "mps" else one.tensor, one.spacing(one.tensor.shape[2:]), one.mask)
        for one in pair
    )
    headers = pair.moving.image.world_to_unit() @ pair.fixed.image.unit_to_world()
    match = search_affine(moving, fixed, Affine(torch.from_numpy(headers[None, :-1]).float()), rigid=rigid)
    return replace(match, transform=match.transform.to(pair.fixed.tensor))


@torch.no_grad()
def _inverse_consistency(maps: Maps, pair: PreparedPair) -> float:
    """Mean distance in mm of φ(ψ(x)) from x, at the voxels of the moving image as the network sees it."""
    image, grid = pair.moving.image, pair.moving.tensor.shape[2:]
    spacing = [s * (n - 1) / (g - 1) for s, n, g in zip(image.spacing, image.shape, grid, strict=True)]
    seen = pair.moving.tensor.float()
    seen = seen if seen.is_cuda else seen.cpu()
    return float(inverse_consistency(maps[0].to(seen), maps[1].to(seen), seen, spacing=spacing).mean())


def _both(network: RegistrationAlgorithm, pair: PreparedPair, graphs: Graphs | None = None) -> Maps:
    """Both directions, computed on the CPU if the GPU has too little memory, on the device of the images."""
    moving, fixed = pair.moving.tensor, pair.fixed.tensor
    try:
        return _run(network, moving, fixed, graphs)
    except torch.cuda.OutOfMemoryError:
        if graphs is not None and graphs.release():
            return _both(network, pair)
        logger.warning("the GPU has too little memory for the network: running it on the CPU, which is slower")
    try:
        forward, backward = _run(network.cpu(), moving.cpu(), fixed.cpu())
    finally:
        network.to(fixed.device)
    return forward.to(fixed), backward.to(fixed)


def _run(network: RegistrationAlgorithm, moving: Tensor, fixed: Tensor, graphs: Graphs | None = None) -> Maps:
    def check(tensor: Tensor) -> Tensor:
        if not bool(torch.isfinite(tensor).all()):
            raise NotFiniteError("the network's result for this pair is not finite: are its weights damaged?")
        return tensor

    forward, backward = both_maps(network, moving, fixed, graphs)
    return forward.map_tensors(check), backward.map_tensors(check)


def _better_unregistered(maps: Maps, pair: PreparedPair, comparison: Comparison) -> str | None:
    """Why to prefer the unregistered images to the network's result; None if there is no reason."""
    moving, fixed, options = pair.moving.tensor, pair.fixed.tensor, comparison.options
    apart = pair.fixed.crop_note != "whole" and not _same_place(pair)
    if match_perfectly(Identity(), Identity(), moving, fixed):
        if apart:
            return "the images match voxel by voxel once their margins are cropped: this alignment was kept"
        return "the unregistered images already match voxel by voxel: they were left as they are"
    moving, fixed = comparison.pair.moving.tensor, comparison.pair.fixed.tensor
    masks = {"fixed_mask": pair.fixed.mask, "moving_mask": pair.moving.mask}
    before, after = mismatch(moving, fixed, maps[0], squared=options.io_sim != "lncc", **masks)
    if before < after:
        steps, images = options.io_iterations, "images without their margins" if apart else "unregistered images"
        optimised = steps != 0 and (options.transform == "deformable" or steps is not None)
        end = "optimisation started from those" if optimised else "those were kept"
        return f"the network's result matched worse than the {images}; {end}"
    return None


def _same_place(pair: PreparedPair) -> bool:
    """Whether the network sees the same part of the world of both scans, so that the identity moves nothing."""
    first, second = (one.image.unit_to_world() for one in pair)
    return bool(abs(first - second).max() < 1e-3)


def _kept(optimization: Optimization, start: str) -> str | None:
    """Why the optimisation left its start as it was, if the loss fell by too little or the images stayed unlike."""
    if (fall := optimization.result.too_little) is not None:
        need = 100 * optimization.gain
        return f"the optimisation kept {start}: the loss fell by {100 * fall:.1f} %, less than the {need:.0f} % needed"
    if optimization.result.unlike is not None:
        return (
            f"the optimisation kept {start}: the scans look too different to improve it by their intensities; "
            "--io-sim mind tries that by their texture, which takes longer"
        )
    return None


def _objective(pair: PreparedPair, options: RegisterOptions, over: Way) -> Objective:
    weight = REGULARITY[over] if options.regularity is None else options.regularity
    return Objective(options.io_sim, weight, pair.moving.mask, pair.fixed.mask)


def _optimize(
    network: RegistrationAlgorithm,
    maps: Maps,
    comparison: Comparison,
    original: PreparedPair,
    over: Way,
    callback: Callable[[int, Loss], None] | None,
    demands: dict[str, Any] | None = None,
    advance: Callable[[float], None] | None = None,
) -> Optimization:
    """Optimise the weights or the fields: also the fields if the GPU has too little memory for the weights."""
    pair, options = comparison.pair, comparison.options
    moving, fixed = pair.moving.tensor, pair.fixed.tensor
    steps = STEPS[over] if options.io_iterations is None else options.io_iterations
    objective = _objective(pair, options, over)
    common: dict[str, Any] = {"steps": steps, "seed": options.seed}
    if over == "weights":
        count = _counting(callback, advance, lambda done: done / max(steps, 1))
        try:
            result = instance_optimize(network, moving, fixed, **common, **vars(objective), callback=count)
        except torch.cuda.OutOfMemoryError:
            logger.warning("the GPU has too little memory to optimise the weights: the fields are optimised instead")
            return _optimize(network, maps, comparison, original, "fields", callback, demands, advance)
        return Optimization(over, steps, objective.weight, None, result)
    grids = _field_grids(pair, options, (demands or {}).get("graphs"))
    settings = _field_settings(network, comparison)
    levels = settings.get("levels", LEVELS) + _more_levels(grids)
    searched = comparison.which is None and isinstance(network, NoNetwork)  # there is no network's result to keep
    common |= {
        "similarity": options.io_sim,
        "weight": objective.weight,
        "enough": math.inf if searched else comparison.enough,
        **(demands or {}),
        **settings,
        "levels": levels,
        "callback": _counting(callback, advance, lambda done: share_done(done, steps, fixed.dim() - 2, levels)),
    }
    grid, result = _optimize_fields(
        maps, _with_better_colours(comparison, original, maps, grids, common), grids, common
    )
    return Optimization(over, steps, objective.weight, list(grid), result, settings.get("gain", GAIN))


def _counting(
    callback: Callable[[int, Loss], None] | None,
    advance: Callable[[float], None] | None,
    share: Callable[[int], float],
) -> Callable[[int, Loss], None] | None:
    """The callback, preceded by a report of the share of the steps that are done."""
    if advance is None:
        return callback

    def both(step: int, loss: Loss) -> None:
        advance(share(step))
        if callback is not None:
            callback(step, loss)

    return both


def _with_better_colours(
    comparison: Comparison, original: PreparedPair, maps: Maps, grids: Sequence[Shape], common: dict[str, Any]
) -> PreparedPair:
    """The images to compare. If one was recoloured, it is recoloured again, several times, where an optimisation on
    coarser grids puts it: at the network's map, the colours of neighbouring tissues are mixed."""
    rough = [_at_most(grid, max(grid) // 2) for grid in grids]
    few = common | {"coarse_steps": common.get("steps", FIELD_STEPS), "callback": None}
    for _ in range(RECOLOURED if comparison.which else 0):
        phi = _optimize_fields(maps, comparison.pair, rough, few)[1].transform
        comparison = comparison.recoloured_at(phi, original)
    return comparison.pair


def _optimize_fields(
    maps: Maps, pair: PreparedPair, shapes: Sequence[Shape], common: dict[str, Any]
) -> tuple[Shape, Optimized]:
    """Optimise the fields on these grids, or on coarser ones if the GPU has too little memory."""
    options = dict(common)
    while True:
        for name, one, shape in zip(("moving", "fixed"), (pair.moving, pair.fixed), shapes, strict=True):
            options[name], options[f"{name}_mask"] = one.on_grid(shape)
            options[f"{name}_spacing"] = one.spacing(shape)
        try:
            return shapes[1], optimize_fields(*maps, **options)
        except torch.cuda.OutOfMemoryError:
            graphs = options.get("graphs")
            if graphs is not None and graphs.release():
                continue
            if max(max(shape) for shape in shapes) < COARSEST[len(shapes[0])]:
                raise
            shapes = [_at_most(shape, max(shape) // 2) for shape in shapes]
            logger.warning("too little memory to optimise the fields on the scans' own voxels: a coarser grid is used")


def _field_settings(network: RegistrationAlgorithm, comparison: Comparison) -> dict[str, Any]:
    """Those for pairs without a network, for pairs of small scans, of which neither has more voxels than a grid half
    the size of the network's along each axis, for pairs with a scan in thick slices, and for pairs whose contrasts
    differ or of which one was stripped."""
    pair = comparison.pair
    if isinstance(network, NoNetwork):
        return FAR
    if all(math.prod(one.sides) <= math.prod((n + 1) // 2 for n in one.tensor.shape[2:]) for one in pair):
        return SMALL
    voxels = [one.spacing(one.sides) for one in pair]
    if any(max(voxel) >= THICK * min(voxel) for voxel in voxels):
        return SLICES
    return {"stiffness": STIFFNESS} if comparison.is_uncertain else {}


def _field_grids(pair: PreparedPair, options: RegisterOptions, graphs: Graphs | None = None) -> list[Shape]:
    """The grids of the moving and of the fixed image on which fields are optimised: their own voxels, within reason."""
    dim = pair.fixed.tensor.dim() - 2
    most = (FINEST if options.io_sim in ("lncc", "lncc2") else COARSEST)[dim]
    own = [one.tensor.shape[2:] if one.source is None else one.sides for one in (pair.moving, pair.fixed)]
    shapes = [_at_most(shape, most) for shape in own]
    device, need = pair.fixed.tensor.device, BYTES * sum(map(math.prod, shapes))
    have = available_memory(device)
    if need > have / 2 and graphs is not None and graphs.release():
        have = available_memory(device)
    if need > have / 2:
        largest = max(map(max, shapes))
        most = max(COARSEST[dim] // 2, int(largest * (have / 2 / need) ** (1 / dim)))
        shapes = [_at_most(shape, most) for shape in shapes]
        logger.warning("too little memory for the scans' own voxels: fields are optimised on at most %d a side", most)
    return shapes


def _more_levels(grids: Sequence[Shape]) -> int:
    """How many more coarse grids the larger ones of pictures and curves need, to reach as far as in 3-D."""
    return max(0, math.ceil(math.log2(max(map(max, grids)) / FINEST[3])))


def _at_most(shape: Sequence[int], side: int) -> Shape:
    return tuple(min(n, side) for n in shape)
