"""Other people's methods in the same harness: each an `evaluation.Method`, imported when it is used.

`pip install 'carlreg[baselines]'` brings what they need. Times are of the registration alone, without reading images.
Methods that cannot run here enter a table by their files: `carl evaluate pairs.csv --method NAME=FOLDER`.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.evaluation.sources import Method, Result, by_model, identity, in_folder
from carlreg.files import images, transform_files, world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, PathLike, map_points
from carlreg.files.tables import Pair
from carlreg.files.world_transform import PointMap, WorldTransform
from carlreg.model.files import ModelFileError, save
from carlreg.model.icon import from_icon


def ants(kind: str) -> Method:
    """ANTs by antspyx: "Affine", "antsRegistrationSyNQuick[s]", or another of its types of transform."""

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        package = _import("ants", "antspyx")
        with tempfile.TemporaryDirectory() as folder:
            paths = _written(folder, fixed, moving)
            read = [package.image_read(str(path)) for path in paths]
            started = time.perf_counter()
            found = package.registration(*read, type_of_transform=kind, outprefix=f"{folder}/")
            seconds = time.perf_counter() - started
            transform = transform_files.read(found["fwdtransforms"])
            backward = [path for path in found["invtransforms"] if path.endswith(".nii.gz")]
            inverse: PointMap | None = None
            if backward and isinstance(transform, WorldTransform):
                undo, warp = np.linalg.inv(transform.affine), transform_files.read(backward)
                inverse = lambda points: warp(map_points(undo, points))  # noqa: E731
        return Result(transform, inverse, seconds)

    return run


def greedy(pair: Pair, fixed: Image, moving: Image) -> Result:
    """PICSL's greedy: an affine map from the images' centres, then a deformation, both by NCC."""
    package = _import("picsl_greedy", "picsl-greedy")
    program = package.Greedy3D() if fixed.dim == 3 else package.Greedy2D()
    radius = "x".join("2" * fixed.dim)
    with tempfile.TemporaryDirectory() as folder:
        first, second = _written(folder, fixed, moving)
        common = f"-i {first} {second} -m NCC {radius} -n 100x50x10"
        started = time.perf_counter()
        program.execute(f"{common} -a -dof 12 -ia-image-centers -o {folder}/affine.mat")
        program.execute(f"{common} -it {folder}/affine.mat -o {folder}/warp.nii.gz")
        seconds = time.perf_counter() - started
        field = transform_files.read(f"{folder}/warp.nii.gz")
        matrix = np.loadtxt(f"{folder}/affine.mat")  # RAS
    assert isinstance(field, WorldTransform)
    flip = np.diag([-1.0, -1.0, *(1.0,) * (fixed.dim - 1)])
    return Result(WorldTransform(flip @ matrix @ flip, field.displacement, field.lattice), seconds=seconds)


def convex_adam(pair: Pair, fixed: Image, moving: Image) -> Result:
    """ConvexAdam with MIND features, after the images' centres have been laid upon one another."""
    package = _import("convexAdam.convex_adam_MIND", "convexAdam")
    middle = [map_points(one.affine, (np.array(one.shape) - 1) / 2) for one in (fixed, moving)]
    shift = middle[1] - middle[0]
    centred = world_transform.apply(lambda points: points + shift, moving, fixed, outside=float(moving.data.min()))
    started = time.perf_counter()
    field = package.convex_adam_pt(
        img_fixed=fixed.data.astype(np.float32), img_moving=centred.data.astype(np.float32)
    )  # (*shape, D), in voxels
    seconds = time.perf_counter() - started
    index = np.stack(np.meshgrid(*(np.arange(n) for n in fixed.shape), indexing="ij"), axis=-1)
    moved = map_points(fixed.affine, index + np.asarray(field)) - map_points(fixed.affine, index)
    affine = np.eye(fixed.dim + 1)
    affine[:-1, -1] = shift
    return Result(WorldTransform(affine, moved.astype(np.float32), fixed.index_to_world()), seconds=seconds)


def icon(checkpoint: PathLike, *, grid: tuple[int, ...] = (175, 175, 175), **options: Any) -> Method:
    """A network of icon_registration (GradICON, uniGradICON, the authors' CARL) from its weights, on its grid."""
    try:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelFileError(f"{checkpoint} cannot be read as weights; expected a state dict of tensors") from error
    model = from_icon(weights)

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "icon.safetensors"
            save(model, path, metadata={"grid": " ".join(str(side) for side in grid), "view": "whole"})
            # Theirs is judged as it is, without our safeguard.
            return by_model(str(path), **{"allow_identity": False, **options})(pair, fixed, moving)

    return run


BASELINES: dict[str, Method] = {
    "identity": identity,
    "ants-affine": ants("Affine"),
    "ants-synquick": ants("antsRegistrationSyNQuick[s]"),
    "greedy": greedy,
    "convexadam": convex_adam,
}
"""What `carl evaluate --method NAME=...` knows by name."""


def cached(method: Method, folder: PathLike) -> Method:
    """The same method, its results and its failures kept in a folder for each pair, and taken from there next time.

    To try again, delete the pair's folder.
    """
    root = Path(folder)

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        place = root / pair.name
        report = place / "report.json"
        if report.is_file():
            failure = json.loads(report.read_text(encoding="utf-8")).get("failure")
            if failure is not None:
                raise RuntimeError(f"{failure} (as recorded in {report})")
            return in_folder(root)(pair, fixed, moving)
        told: dict[str, Any] = {
            "inputs": {side: {"name": str(getattr(pair, side))} for side in ("fixed", "moving")},
            "cpus": os.cpu_count(),
        }
        place.mkdir(parents=True, exist_ok=True)
        try:
            result = method(pair, fixed, moving)
        except ImportError:
            raise
        except Exception as error:
            told["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            write_atomically(report, (json.dumps(told, indent=2) + "\n").encode())
            raise RuntimeError(told["failure"]) from error
        transform_files.write(result.transform, place / "transform.h5", overwrite=True)
        if result.inverse is not None:
            transform_files.write(
                world_transform.sample(result.inverse, moving), place / "inverse_transform.h5", overwrite=True
            )
        known = {"seconds": result.seconds, "peak_gib": result.peak_gib}
        told["metrics"] = {key: value for key, value in known.items() if value == value}
        write_atomically(report, (json.dumps(told, indent=2) + "\n").encode())
        return result

    return run


def _import(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed; expected it for this method: pip install {package} ({error})"
        ) from error


def _written(folder: str, *pair: Image) -> list[Path]:
    paths = [Path(folder) / name for name in ("fixed.nii.gz", "moving.nii.gz")]
    for image, path in zip(pair, paths, strict=True):
        images.write(image, path)
    return paths
