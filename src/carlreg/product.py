"""Two scans in, a registration out: files, headers and intensities taken care of.

The way of the data: read, turn to RAS, stretch to the network's grid, register, optimise, and back to the world.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import carlreg
from carlreg import images, itk
from carlreg.images import Image
from carlreg.losses import Loss, Similarity
from carlreg.metrics import folding, inverse_consistency
from carlreg.models import DEFAULT, WEIGHTS, available, load, read_metadata, write_atomically
from carlreg.optimize import Optimized, instance_optimize, optimize_fields
from carlreg.precision import mixed_precision
from carlreg.registration import RegistrationAlgorithm
from carlreg.transforms import Transform, invert

logger = logging.getLogger(__name__)

Over = Literal["auto", "weights", "fields"]
FILES = ("warped.nii.gz", "transform.h5", "inverse_transform.h5", "warp.nii.gz", "report.json")


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

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `warped.nii.gz`, `transform.h5`, `inverse_transform.h5`, `warp.nii.gz` and `report.json`.

        All appear or none: they are written beside their names first.
        """
        target = Path(folder)
        taken = [name for name in FILES if (target / name).exists()]
        if taken and not overwrite:
            raise FileExistsError(f"{target} already holds {taken[0]}; choose another folder, or overwrite=True")
        target.mkdir(parents=True, exist_ok=True)
        waiting = {name: target / f".{os.getpid()}.{name}" for name in FILES}
        try:
            images.write(self.warped, waiting["warped.nii.gz"], overwrite=True)
            itk.write(self.transform, waiting["transform.h5"], overwrite=True)
            itk.write(self.inverse, waiting["inverse_transform.h5"], overwrite=True)
            itk.write_warp(self.transform, self.fixed, waiting["warp.nii.gz"], overwrite=True)
            write_atomically(waiting["report.json"], (json.dumps(self.report(), indent=2) + "\n").encode())
            for name, path in waiting.items():
                os.replace(path, target / name)
        finally:
            for path in waiting.values():
                path.unlink(missing_ok=True)
        return target

    def report(self) -> dict[str, Any]:
        """Inputs, settings, metrics and warnings, for a machine to read."""
        return {
            "carlreg": carlreg.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **self.settings,
            "metrics": self.metrics,
            "losses": self.losses,
            "warnings": list(self.warnings),
        }


def register(
    *,
    fixed: Any,
    moving: Any,
    model: str | os.PathLike[str] | RegistrationAlgorithm = "default",
    io_iterations: int | None = None,
    io_sim: str | Similarity = "lncc",
    over: Over = "auto",
    regularity: float = 1.5,
    fixed_mask: Any = None,
    moving_mask: Any = None,
    device: str | torch.device = "auto",
    seed: int = 0,
    callback: Callable[[int, Loss], None] | None = None,
) -> Registration:
    """Register two images: paths, SimpleITK or nibabel images, `carlreg.images.Image`, or arrays.

    `model` is a name of the package's models, the path of a model file, or a model. After the network's answer,
    `io_iterations` steps of instance optimisation follow: over the network's weights, as in the paper (50 by default,
    where there is a GPU), or over the displacement fields (40 by default, elsewhere); 0 leaves them out. Masks say
    where `io_sim` is measured. `regularity` is the weight of GradICON in the optimisation.

    >>> result = register(fixed="fixed.nii.gz", moving="moving.nii.gz")
    >>> result.save("out")
    """
    if over not in ("auto", "weights", "fields"):
        raise ValueError(f"unknown over={over!r}; expected 'auto', 'weights' or 'fields'")
    if io_iterations is not None and io_iterations < 0:
        raise ValueError(f"io_iterations is {io_iterations}; expected 0 or more")
    started = time.perf_counter()
    place = _device(device)
    network, name, shape = _model(model, place)
    inputs = {"fixed": _as_image(fixed, "fixed"), "moving": _as_image(moving, "moving")}
    if inputs["fixed"].dim != inputs["moving"].dim:
        raise ValueError(
            f"the fixed image is {inputs['fixed'].dim}-D and the moving one {inputs['moving'].dim}-D; expected the same"
        )
    masks = {"fixed": fixed_mask, "moving": moving_mask}
    prepared = {side: _prepare(inputs[side], masks[side], shape, place) for side in inputs}
    f, m = prepared["fixed"], prepared["moving"]

    with torch.no_grad(), mixed_precision(place):
        forward, backward = network.both(m.tensor, f.tensor)
    network_seconds = time.perf_counter() - started
    chosen = ("weights" if place.type == "cuda" else "fields") if over == "auto" else over
    steps = {"weights": 50, "fields": 40}[chosen] if io_iterations is None else io_iterations
    optimized: Optimized | None = None
    if steps:
        options: dict[str, Any] = {
            "steps": steps,
            "similarity": io_sim,
            "weight": regularity,
            "moving_mask": m.mask,
            "fixed_mask": f.mask,
            "seed": seed,
            "callback": callback,
        }
        if chosen == "weights":
            optimized = instance_optimize(network, m.tensor, f.tensor, **options)
        else:
            optimized = optimize_fields(forward, backward, m.tensor, f.tensor, **options)
        forward, backward = optimized.transform, optimized.inverse
    optimized_seconds = time.perf_counter() - started - network_seconds

    forward, backward = _to_cpu(forward), _to_cpu(backward)
    like_f, like_m = f.tensor.cpu(), m.tensor.cpu()
    undone = invert(forward, like=like_m)
    transform = itk.to_world(forward, f.image, m.image, grid=inputs["fixed"])
    inverse = itk.to_world(undone, m.image, f.image, grid=inputs["moving"])
    warped = itk.apply(transform, inputs["moving"], inputs["fixed"])

    size = [s * (n - 1) / (g - 1) for s, n, g in zip(m.image.spacing, m.image.shape, like_m.shape[2:], strict=True)]
    metrics = {
        "folds_percent": folding(forward, like_f),
        "inverse_consistency_mm": float(inverse_consistency(forward, backward, like_m, spacing=size).mean()),
        "seconds": round(time.perf_counter() - started, 2),
        "network_seconds": round(network_seconds, 2),
        "optimisation_seconds": round(optimized_seconds, 2),
    }
    warnings = _warnings(metrics, optimized)
    settings = {
        "model": name,
        "device": str(place),
        "io_iterations": steps,
        "io_over": chosen if steps else None,
        "io_sim": io_sim if isinstance(io_sim, str) else getattr(io_sim, "__name__", "a function"),
        "regularity": regularity,
        "seed": seed,
        "grid": list(like_f.shape[2:]),
        "inputs": {side: _describe(inputs[side], prepared[side].words) for side in inputs},
    }
    losses = [] if optimized is None else optimized.losses
    return Registration(
        transform, inverse, warped, inputs["fixed"], inputs["moving"], metrics, settings, losses, warnings
    )


@dataclass(frozen=True, eq=False)
class _Prepared:
    image: Image  # closest to RAS
    tensor: Tensor  # (1, 1, *grid), from 0 to 1
    mask: Tensor | None
    words: str


def _prepare(image: Image, mask: Any, shape: tuple[int, ...] | None, device: torch.device) -> _Prepared:
    turned = images.to_closest_ras(image)
    turned_mask = None if mask is None else images.to_closest_ras(_as_image(mask, "mask"))
    data, done = images.preprocess(turned, turned_mask)
    grid = tuple(turned.shape) if shape is None else shape
    if len(grid) != turned.dim:
        raise ValueError(f"{image.name} is {turned.dim}-D but the model is for {len(grid)}-D images")
    small_mask = None
    if turned_mask is not None:
        labels = torch.from_numpy((np.asarray(turned_mask.data) != 0).astype(np.float32))[None, None]
        small_mask = images.resize_labels(labels, grid).to(device)
    return _Prepared(turned, images.resize(data, grid).to(device), small_mask, done.words)


def _as_image(source: Any, name: str) -> Image:
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


def _model(
    model: str | os.PathLike[str] | RegistrationAlgorithm, device: torch.device
) -> tuple[RegistrationAlgorithm, str, tuple[int, ...] | None]:
    """A model on its device, what it is called, and the grid it was trained on, if its file says so."""
    if isinstance(model, RegistrationAlgorithm):
        return model.to(device).eval(), type(model).__name__, None
    stem = DEFAULT if model == "default" else model
    path = WEIGHTS / f"{stem}.safetensors" if stem in available() else Path(stem)
    if not path.is_file():
        raise ValueError(
            f"no model {os.fspath(model)!r}; expected the path of a model file, or one of {', '.join(available())}"
        )
    grid = read_metadata(path).get("grid")
    return load(path, device=device), path.stem, None if grid is None else tuple(int(n) for n in grid.split())


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but PyTorch sees no CUDA GPU here; expected 'cpu' or 'auto'")
    return place


def _to_cpu(transform: Transform) -> Transform:
    return transform.map_tensors(lambda tensor: tensor.detach().float().cpu())


def _warnings(metrics: dict[str, float], optimized: Optimized | None) -> tuple[str, ...]:
    found = []
    if metrics["folds_percent"] > 1:
        found.append(f"{metrics['folds_percent']:.1f} % of the fixed image is folded: the match is doubtful there")
    if optimized is not None and optimized.stopped is not None:
        found.append(f"the optimisation ended early: {optimized.stopped}")
    for text in found:
        logger.warning("%s", text)
    return tuple(found)


def _describe(image: Image, words: str) -> dict[str, Any]:
    return {
        "name": image.name,
        "shape": list(image.shape),
        "spacing_mm": [round(float(s), 6) for s in image.spacing],
        "sha256": hashlib.sha256(np.ascontiguousarray(image.data).tobytes()).hexdigest(),
        "intensities": words,
    }
