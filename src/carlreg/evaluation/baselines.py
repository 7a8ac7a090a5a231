"""Other programs as methods of an evaluation, imported when they are used.

`pip install 'carlreg[baselines]'` installs them. Times are those of the registration alone, without reading images.
Methods that do not run here are evaluated from their files: `carl evaluate pairs.csv --method NAME=FOLDER`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.errors import CarlError, DependencyError
from carlreg.evaluation.sources import Method, Result, by_model, from_folder, identity
from carlreg.files import images, transform_files, world_transform
from carlreg.files.atomic import refuse_result, write_atomically, write_together
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, PathLike, map_points
from carlreg.files.results import INVERSE, REPORT, TRANSFORM
from carlreg.files.tables import SIDES, Pair
from carlreg.files.world_transform import PointMap, WorldTransform
from carlreg.model.files import ModelFileError
from carlreg.model.icon import from_icon
from carlreg.model.loaded import LoadedModel


class MethodError(CarlError):
    """Another program that failed on a pair."""


def guarded(method: Method) -> Method:
    """The same method; whatever another program raises is its failure on this pair, and stops nothing else."""

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        try:
            return method(pair, fixed, moving)
        except CarlError:
            raise
        except Exception as error:
            raise MethodError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    return run


def ants(kind: str) -> Method:
    """ANTs, from antspyx: "Affine", "antsRegistrationSyNQuick[s]", or another of its types of transform."""

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        package = _import("ants", "antspyx")
        with tempfile.TemporaryDirectory() as folder:
            paths = _written(folder, fixed, moving)
            read = [package.image_read(str(path)) for path in paths]
            started = time.perf_counter()
            output = package.registration(*read, type_of_transform=kind, outprefix=f"{folder}/")
            seconds = time.perf_counter() - started
            transform = transform_files.read(output["fwdtransforms"])
            backward = [path for path in output["invtransforms"] if path.endswith(".nii.gz")]
            inverse: PointMap | None = None
            if backward and isinstance(transform, WorldTransform):
                undo, warp = np.linalg.inv(transform.affine), transform_files.read(backward)
                inverse = lambda points: warp(map_points(undo, points))  # noqa: E731
        return Result(transform, inverse, seconds)

    return run


def greedy(iterations: str = "100x50x10") -> Method:
    """PICSL's greedy: an affine map from the images' centres, then a deformation, both by NCC, with so many iterations
    on each grid."""

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        package = _import("picsl_greedy", "picsl-greedy")
        program = package.Greedy3D() if fixed.dim == 3 else package.Greedy2D()
        radius = "x".join("2" * fixed.dim)
        with tempfile.TemporaryDirectory() as folder:
            first, second = _written(folder, fixed, moving)
            common = f"-i {first} {second} -m NCC {radius}"
            started = time.perf_counter()
            program.execute(f"{common} -n 100x50x10 -a -dof 12 -ia-image-centers -o {folder}/affine.mat")
            program.execute(f"{common} -n {iterations} -it {folder}/affine.mat -o {folder}/warp.nii.gz")
            seconds = time.perf_counter() - started
            field = transform_files.read(f"{folder}/warp.nii.gz")
            matrix = np.loadtxt(f"{folder}/affine.mat")  # RAS
        assert isinstance(field, WorldTransform)
        flip = np.diag([-1.0, -1.0, *(1.0,) * (fixed.dim - 1)])
        return Result(WorldTransform(flip @ matrix @ flip, field.displacement, field.lattice), seconds=seconds)

    return run


def convex_adam(pair: Pair, fixed: Image, moving: Image) -> Result:
    """ConvexAdam with MIND features, after aligning the centres of the images."""
    package = _import("convexAdam.convex_adam_MIND", "convexAdam")
    centres = [map_points(one.affine, (np.array(one.shape) - 1) / 2) for one in (fixed, moving)]
    shift = centres[1] - centres[0]
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
    """A network of icon_registration (GradICON, uniGradICON, the authors' CARL) from its weights, on its grid.

    It is evaluated as it is, without our fallback to the unregistered images.
    """
    try:
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ModelFileError(f"{checkpoint} cannot be read as weights; expected a state dict of tensors") from error
    provenance = {"name": Path(checkpoint).stem, "sha256": sha256(Path(checkpoint))}
    model = LoadedModel(from_icon(weights), grid, provenance, keeps_margins=True)
    return by_model(model, **{"allow_identity": False, **options})


BASELINES: dict[str, Method] = {
    "identity": identity,
    "ants-affine": guarded(ants("Affine")),
    "ants-synquick": guarded(ants("antsRegistrationSyNQuick[s]")),
    "greedy": guarded(greedy()),
    "convexadam": guarded(convex_adam),
}
"""The methods that `carl evaluate --method NAME=...` runs by name."""


def cached(method: Method, folder: PathLike) -> Method:
    """The same method, with the result or the failure of each pair kept in a folder and taken from there next time.

    To try again, delete the pair's folder.
    """
    root = Path(folder)

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        own = root / pair.name
        report = own / REPORT
        if report.is_file():
            failure = json.loads(report.read_text(encoding="utf-8")).get("failure")
            if failure is not None:
                raise MethodError(f"{failure} (as recorded in {report})")
            return from_folder(own, pair, fixed, moving, root=root)
        content: dict[str, Any] = {
            "inputs": {side: {"path": os.path.abspath(getattr(pair, side))} for side in SIDES},
            "cpus": os.cpu_count(),
        }
        refuse_result(own, (TRANSFORM, INVERSE), last=REPORT, overwrite=False)
        try:
            result = guarded(method)(pair, fixed, moving)
        except DependencyError:
            raise
        except CarlError as error:
            own.mkdir(parents=True, exist_ok=True)
            write_atomically(report, (json.dumps(content | {"failure": str(error)}, indent=2) + "\n").encode())
            raise
        figures = {"seconds": result.seconds, "peak_gib": result.peak_gib}
        content["metrics"] = {key: value for key, value in figures.items() if not math.isnan(value)}
        with write_together(own, (TRANSFORM, INVERSE), last=REPORT) as staging:
            transform_files.write(result.transform, staging / TRANSFORM)
            if result.inverse is not None:
                inverse = world_transform.sample(result.inverse, moving)
                transform_files.write(inverse, staging / INVERSE)
            write_atomically(staging / REPORT, (json.dumps(content, indent=2) + "\n").encode())
        return result

    return run


def _import(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DependencyError(
            f"{name} is not installed; expected it for this method: pip install {package} ({error})"
        ) from error


def _written(folder: str, *pair: Image) -> list[Path]:
    paths = [Path(folder) / name for name in ("fixed.nii.gz", "moving.nii.gz")]
    for image, path in zip(pair, paths, strict=True):
        images.write(image, path)
    return paths
