"""Two scans in, a registration out: files, headers and intensities taken care of.

The way of the data: read, turn to RAS, stretch to the network's grid, register, optimise, and back to the world.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import carlreg
from carlreg import images, itk
from carlreg.grids import interpolate, voxel_points
from carlreg.images import Image, Matrix, map_points
from carlreg.losses import Loss, Similarity, find_similarity
from carlreg.metrics import dice, folding, inverse_consistency, mean_score
from carlreg.models import DEFAULT, WEIGHTS, available, load, read_metadata, write_atomically
from carlreg.optimize import Optimized, instance_optimize, optimize_fields
from carlreg.points import read_points
from carlreg.precision import mixed_precision
from carlreg.registration import RegistrationAlgorithm, coordinate_matches
from carlreg.transforms import Transform, fit_affine, fit_rigid, fit_robustly

logger = logging.getLogger(__name__)

Over = Literal["auto", "weights", "fields"]
Kind = Literal["deformable", "affine", "rigid"]
FitTo = Literal["network", "attention"]
FILES = ("warped.nii.gz", "transform.h5", "inverse_transform.h5", "warp.nii.gz", "report.json")
LABELS = "warped_seg.nii.gz"
"""Written beside `FILES` where the moving image came with labels."""
FOREGROUND = 0.05
"""Darker voxels of the fixed image, on a scale from 0 to 1, have no say in a rigid or affine fit."""


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
    regularity: float = 1.5,
    fixed_mask: Any = None,
    moving_mask: Any = None,
    fixed_seg: Any = None,
    moving_seg: Any = None,
    fixed_landmarks: Any = None,
    moving_landmarks: Any = None,
    fit_to: FitTo = "network",
    device: str | torch.device = "auto",
    seed: int = 0,
    callback: Callable[[int, Loss], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Registration:
    """Register two images: paths, SimpleITK or nibabel images, `carlreg.images.Image`, or arrays.

    `model` is a name of the package's models, the path of a model file, or a model. After the network's answer,
    `io_iterations` steps of instance optimisation follow: over the network's weights, as in the paper (50 by default,
    where there is a GPU), or over the displacement fields (40 by default, elsewhere); 0 leaves them out. Masks say
    where `io_sim` is measured. `regularity` is the weight of GradICON in the optimisation.

    "rigid" and "affine" are closed-form robust least squares, in millimetres, to the network's dense answer where the
    fixed image is not background; with `fit_to="attention"` to the matches of its coordinate attention alone, weighted
    by their certainty: faster, and less accurate where attention is blurred. They are optimised before the fit only if
    `io_iterations` is given.

    `initial_transform`, a first guess of the map from fixed to moving world points (LPS, mm), is the path of a
    transform file, a transform, or a matrix (D + 1, D + 1). The network then sees the moving image through it, on the
    fixed image's grid; the result contains it.

    Labels (`fixed_seg`, `moving_seg`) and landmarks (files, or world points (N, D) in LPS) are scored before and after;
    they play no part in the registration. `progress` is told what is being done, `callback(step, loss)` how the
    optimisation goes.

    >>> result = register(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> result.save("out")
    """
    for name, value, known in (
        ("over", over, ("auto", "weights", "fields")),
        ("transform", transform, ("deformable", "affine", "rigid")),
        ("fit_to", fit_to, ("network", "attention")),
    ):
        if value not in known:
            raise ValueError(f"unknown {name}={value!r}; expected {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
    if io_iterations is not None and io_iterations < 0:
        raise ValueError(f"io_iterations is {io_iterations}; expected 0 or more")
    if not (math.isfinite(regularity) and regularity >= 0):
        raise ValueError(f"regularity is {regularity}; expected a number, 0 or more")
    if fixed_seg is not None and moving_seg is None:
        raise ValueError("fixed_seg was given without moving_seg; expected labels of both images, to be compared")
    if io_iterations and transform != "deformable" and fit_to == "attention":
        raise ValueError("fit_to='attention' has nothing to optimise; expected io_iterations=0, or fit_to='network'")
    find_similarity(io_sim)

    def say(text: str) -> None:
        logger.info("%s", text)
        if progress is not None:
            progress(text)

    clock = _Clock()
    place = choose_device(device)

    say("reading")
    loaded = load_model(model, place)
    network = loaded.network
    inputs = {"fixed": as_image(fixed, "fixed"), "moving": as_image(moving, "moving")}
    dim = inputs["fixed"].dim
    if dim != inputs["moving"].dim:
        raise ValueError(f"the fixed image is {dim}-D and the moving one {inputs['moving'].dim}-D; expected the same")
    masks = {
        side: None if mask is None else as_image(mask, f"{side} mask")
        for side, mask in (("fixed", fixed_mask), ("moving", moving_mask))
    }
    segs = {
        side: None if seg is None else images.as_labels(as_image(seg, f"{side} labels"))
        for side, seg in (("fixed", fixed_seg), ("moving", moving_seg))
    }
    for side, seg in segs.items():
        if seg is not None and seg.dim != dim:
            raise ValueError(f"the {side} labels are {seg.dim}-D but the images {dim}-D; expected the same")
    landmarks = _landmarks(fixed_landmarks, moving_landmarks, dim)
    initial = None if initial_transform is None else _as_transform(initial_transform, dim)
    seen = {"fixed": (inputs["fixed"], masks["fixed"]), "moving": _pulled(inputs, masks["moving"], initial)}
    prepared = {side: prepare(image, mask, loaded.grid, place) for side, (image, mask) in seen.items()}
    f, m = prepared["fixed"], prepared["moving"]
    clock.lap("reading")

    chosen: Literal["weights", "fields"] = ("weights" if place.type == "cuda" else "fields") if over == "auto" else over
    usual = {"weights": 50, "fields": 40}[chosen] if transform == "deformable" else 0
    steps = usual if io_iterations is None else io_iterations
    by_attention = transform != "deformable" and fit_to == "attention"
    metrics: dict[str, float] = {}
    optimized: Optimized | None = None
    if by_attention:
        say("coordinate attention")
        world = _fit_to_attention(network, m, f, transform)
        steps = 0
        clock.lap("network")
    else:
        say("network")
        forward, backward = _answer(network, m, f)
        clock.lap("network")
        if steps:
            say("optimisation")
            options = {"similarity": io_sim, "weight": regularity, "seed": seed, "callback": callback}
            optimized, chosen = _optimize(network, (forward, backward), m, f, over=chosen, steps=steps, **options)
            forward, backward = optimized.transform, optimized.inverse
            clock.lap("optimisation")
        say("world space")
        forward, backward = _to_cpu(forward), _to_cpu(backward)
        like_f, like_m = f.tensor.cpu(), m.tensor.cpu()
        extent = [
            s * (n - 1) / (g - 1) for s, n, g in zip(m.image.spacing, m.image.shape, like_m.shape[2:], strict=True)
        ]
        metrics["inverse_consistency_mm"] = float(inverse_consistency(forward, backward, like_m, spacing=extent).mean())
        if transform == "deformable":
            metrics["folds_percent"] = folding(forward, like_f)
            world = itk.to_world(forward, f.image, m.image, grid=inputs["fixed"])
        else:
            world = _fit_to_network(forward, m, f, transform)

    say("world space")
    if initial is not None:
        world = itk.compose(initial, world, inputs["fixed"])
    if world.is_linear:
        inverse = itk.WorldTransform.linear(np.linalg.inv(world.affine))
        metrics["inverse_error_mm"] = metrics["inverse_error_max_mm"] = 0.0
    else:
        inverse, residual = itk.invert(world, inputs["moving"])
        missed = residual[np.isfinite(residual)]
        metrics["inverse_error_mm"] = float(missed.mean()) if missed.size else math.nan
        metrics["inverse_error_max_mm"] = float(missed.max()) if missed.size else math.nan
    warped = itk.apply(world, inputs["moving"], inputs["fixed"])
    clock.lap("world_space")

    labels, scores = None, {}
    if segs["moving"] is not None:
        say("labels")
        labels = itk.apply(world, segs["moving"], inputs["fixed"], "nearest")
    start = itk.WorldTransform.linear(np.eye(dim + 1)) if initial is None else initial
    for when, map_ in (("before", start), ("after", world)):
        if segs["moving"] is not None and segs["fixed"] is not None:
            scores[when] = _dice(itk.apply(map_, segs["moving"], segs["fixed"], "nearest"), segs["fixed"])
            metrics[f"dice_{when}"] = mean_score(scores[when])
        if landmarks is not None:
            metrics[f"tre_{when}_mm"] = float(np.linalg.norm(map_(landmarks[0]) - landmarks[1], axis=-1).mean())
    clock.lap("scores")

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
    settings = {
        "model": loaded.facts,
        "device": str(place),
        "transform": transform,
        "fit_to": None if transform == "deformable" else fit_to,
        "io_iterations": steps,
        "io_over": chosen if steps else None,
        "io_sim": io_sim if isinstance(io_sim, str) else getattr(io_sim, "__name__", "a function"),
        "regularity": regularity,
        "seed": seed,
        "grid": list(f.tensor.shape[2:]),
        "inputs": {
            name: _source(source) | (_describe(inputs[name], prepared[name].words) if name in inputs else {})
            for name, source in sources.items()
            if source is not None
        },
        "seconds": clock.seconds(),
        "peak_memory_gb": _peak_memory(place),
    }
    return Registration(
        world,
        inverse,
        warped,
        inputs["fixed"],
        inputs["moving"],
        metrics,
        settings,
        [] if optimized is None else optimized.losses,
        _warnings(metrics, optimized),
        labels,
        scores,
    )


# ---- what comes in --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Prepared:
    """An image as a network takes it."""

    image: Image  # closest to RAS
    tensor: Tensor  # (1, 1, *grid), from 0 to 1
    mask: Tensor | None
    words: str


def prepare(image: Image, mask: Image | None, shape: tuple[int, ...] | None, device: torch.device) -> Prepared:
    turned = images.to_closest_ras(image)
    turned_mask = None if mask is None else images.to_closest_ras(mask)
    data, done = images.preprocess(turned, turned_mask)
    grid = tuple(turned.shape) if shape is None else shape
    if len(grid) != turned.dim:
        raise ValueError(f"{image.name} is {turned.dim}-D but the model is for {len(grid)}-D images")
    small_mask = None
    if turned_mask is not None:
        labels = torch.from_numpy((np.asarray(turned_mask.data) != 0).astype(np.float32))[None, None]
        small_mask = images.resize_labels(labels, grid).to(device)
        if not bool(small_mask.any()):
            raise ValueError(f"{turned_mask.name} has too few voxels: none is left on the network's grid")
    return Prepared(turned, images.resize(data, grid).to(device), small_mask, done.words)


def _pulled(
    inputs: Mapping[str, Image], mask: Image | None, initial: itk.WorldTransform | itk.ItkTransform | None
) -> tuple[Image, Image | None]:
    """The moving image and its mask, seen through the first guess on the fixed image's grid."""
    fixed, moving = inputs["fixed"], inputs["moving"]
    if mask is not None:
        images.inside(mask, moving)
    if initial is None:
        return moving, mask
    seen = itk.apply(initial, moving, fixed, outside=float(moving.data.min()))
    if seen.data.min() == seen.data.max():
        raise ValueError(
            "through the initial transform nothing of the moving image is seen from the fixed one; expected a map from "
            "fixed to moving world points (LPS, mm): is it the inverse, or in RAS?"
        )
    return seen, None if mask is None else itk.apply(initial, mask, fixed, "nearest")


def as_image(source: Any, name: str) -> Image:
    if isinstance(source, Image):
        return source
    if isinstance(source, (str, os.PathLike)):
        return images.read(source)
    if isinstance(source, np.ndarray):
        return images.from_array(source, name=name)
    if isinstance(source, Tensor):
        return images.from_array(source.detach().cpu().numpy(), name=name)
    kind = type(source).__module__.partition(".")[0]
    if kind == "SimpleITK":
        return images.from_sitk(source, name=name)
    if kind == "nibabel":
        return images.from_nibabel(source, name=name)
    raise TypeError(f"{name} is a {type(source).__name__}; expected a path, an Image, an array, SimpleITK or nibabel")


def _landmarks(fixed: Any, moving: Any, dim: int) -> tuple[Matrix, Matrix] | None:
    """World points (N, D) of both images, the n-th of one lying where the n-th of the other does."""
    if fixed is None and moving is None:
        return None
    if fixed is None or moving is None:
        raise ValueError("landmarks of one image only were given; expected those of both, in the same order")
    both = tuple(
        read_points(source).positions if isinstance(source, (str, os.PathLike)) else np.asarray(source, np.float64)
        for source in (fixed, moving)
    )
    shapes = [points.shape for points in both]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] != dim:
        raise ValueError(f"the landmarks have shapes {shapes[0]} and {shapes[1]}; expected the same, (N, {dim})")
    return both[0], both[1]


def _as_transform(source: Any, dim: int) -> itk.WorldTransform | itk.ItkTransform:
    if isinstance(source, (str, os.PathLike)):
        found = itk.read(source)
    elif isinstance(source, (itk.WorldTransform, itk.ItkTransform)):
        found = source
    elif isinstance(source, (np.ndarray, list, tuple)):
        found = itk.WorldTransform.linear(source)
    else:
        raise TypeError(
            f"initial_transform is a {type(source).__name__}; expected a path, a transform of carlreg.itk or a matrix"
        )
    if found.dim != dim:
        raise ValueError(f"the initial transform is {found.dim}-D but the images are {dim}-D; expected the same")
    return found


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory with what its file says, for many pairs: `register(model=load_model("default"), ...)`."""

    network: RegistrationAlgorithm
    grid: tuple[int, ...] | None
    """The grid it was trained on, if its file says so; each image is stretched to it."""
    facts: dict[str, Any]
    """Name, checksum and licence, for the report."""


def find_model(model: str | os.PathLike[str]) -> Path:
    """The file of a model of the package, by name, or a model file itself."""
    stem = DEFAULT if model == "default" else model
    path = WEIGHTS / f"{stem}.safetensors" if stem in available() else Path(stem)
    if not path.is_file():
        raise ValueError(
            f"no model {os.fspath(model)!r}; expected the path of a model file, or one of {', '.join(available())}"
        )
    return path


def load_model(
    model: str | os.PathLike[str] | RegistrationAlgorithm | LoadedModel, device: str | torch.device = "auto"
) -> LoadedModel:
    """A model by name or file, or one that is in memory already, on its device and in evaluation mode."""
    place = choose_device(device)
    if isinstance(model, LoadedModel):
        return LoadedModel(model.network.to(place).eval(), model.grid, model.facts)
    if isinstance(model, RegistrationAlgorithm):
        return LoadedModel(model.to(place).eval(), None, {"name": type(model).__name__})
    path = find_model(model)
    about = read_metadata(path)
    try:
        grid = tuple(int(n) for n in about["grid"].split()) if "grid" in about else None
    except ValueError as error:
        raise ValueError(f"{path} says its grid is {about['grid']!r}; expected sides such as '96 96 96'") from error
    facts = {"name": path.stem, "sha256": sha256(path), "licence": about.get("licence")}
    return LoadedModel(load(path, device=place), grid, facts)


def choose_device(device: str | torch.device) -> torch.device:
    """A device by name; 'auto' is the GPU, where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but PyTorch sees no CUDA GPU here; expected 'cpu' or 'auto'")
    return place


# ---- the registration itself ----------------------------------------------------------------------------------------


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


def _optimize(
    network: RegistrationAlgorithm,
    answer: tuple[Transform, Transform],
    m: Prepared,
    f: Prepared,
    *,
    over: Literal["weights", "fields"],
    **options: Any,
) -> tuple[Optimized, Literal["weights", "fields"]]:
    """Over the weights or the fields, and over which: the fields where the GPU has no room for the weights."""
    options |= {"moving_mask": m.mask, "fixed_mask": f.mask}
    if over == "weights":
        try:
            return instance_optimize(network, m.tensor, f.tensor, **options), over
        except torch.cuda.OutOfMemoryError:
            logger.warning("the GPU has too little memory to optimise the weights: the fields are optimised instead")
    return optimize_fields(*answer, m.tensor, f.tensor, **options), "fields"


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


def _dice(warped: Image, fixed: Image) -> dict[int, float]:
    first, second = (torch.from_numpy(image.data.astype(np.int64))[None, None] for image in (warped, fixed))
    return dice(first, second)


def _to_cpu(transform: Transform) -> Transform:
    return transform.map_tensors(lambda tensor: tensor.detach().float().cpu())


# ---- what is told ---------------------------------------------------------------------------------------------------


def _warnings(metrics: dict[str, float], optimized: Optimized | None) -> tuple[str, ...]:
    found = []
    if metrics.get("folds_percent", 0) > 1:
        found.append(f"{metrics['folds_percent']:.1f} % of the fixed image is folded: the match is doubtful there")
    if metrics.get("dice_after", 1) < metrics.get("dice_before", 0):
        found.append("the labels overlap less after the registration than before it")
    if optimized is not None and optimized.stopped is not None:
        found.append(f"the optimisation ended early: {optimized.stopped}")
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


def _describe(image: Image, words: str) -> dict[str, Any]:
    return {
        "shape": list(image.shape),
        "spacing_mm": [round(float(s), 6) for s in image.spacing],
        "sha256_voxels": hashlib.sha256(np.ascontiguousarray(image.data).tobytes()).hexdigest(),
        "intensities": words,
    }


def _source(source: Any) -> dict[str, Any]:
    """Where an input came from: a file with its checksum, a folder, or memory."""
    if not isinstance(source, (str, os.PathLike)):
        return {"given_as": type(source).__name__}
    path = Path(source).absolute()  # it is looked for again, perhaps from another folder
    return {"path": str(path)} | ({"sha256": sha256(path)} if path.is_file() else {})


def sha256(path: str | os.PathLike[str]) -> str:
    """A file's checksum."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            total.update(block)
    return total.hexdigest()
