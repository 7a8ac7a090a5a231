"""Where the transforms to be evaluated come from: folders, tables, models."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.files import images, transform_files
from carlreg.files.images import Image, PathLike, map_points
from carlreg.files.tables import FILES, SIDES, Pair, stem
from carlreg.files.world_transform import ItkTransform, PointMap, WorldTransform

WorldMap = WorldTransform | ItkTransform
BAD_INPUT = (ValueError, TypeError, OSError, RuntimeError, ImportError, ArithmeticError, LookupError, MemoryError)


# ---- results and where they come from -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Result:
    """What a method made of a pair: T from fixed to moving world points, and what it took."""

    transform: WorldMap
    inverse: PointMap | None = None
    seconds: float = math.nan
    peak_gib: float = math.nan
    inverse_consistency_mm: float = math.nan
    """Where the method says it itself; otherwise it is measured, if there is an inverse."""


Method = Callable[[Pair, Image, Image], Result]
"""A pair and its fixed and moving image to a result."""


def identity(pair: Pair, fixed: Image, moving: Image) -> Result:
    """Before registration: the two worlds as their headers have them."""
    dim = fixed.dim
    still = WorldTransform(np.eye(dim + 1), np.zeros((*(1,) * dim, dim), np.float32), np.eye(dim + 1))
    return Result(still, still)


def listed(pair: Pair, fixed: Image, moving: Image) -> Result:
    """The files in the pair's columns `transform` and `inverse`."""
    if not pair.transform:
        raise ValueError("no result is given; expected its file in the column 'transform'")
    return _from_files(pair.transform, pair.inverse, fixed, moving)


def from_list(pairs: Sequence[Pair]) -> Method:
    """The files that another list of pairs gives for the same images, or for a pair of the same name."""
    by_images = {(_absolute(pair.fixed), _absolute(pair.moving)): pair for pair in pairs}
    by_name = {pair.name: pair for pair in pairs}

    def find(pair: Pair, fixed: Image, moving: Image) -> Result:
        found = by_images.get((_absolute(pair.fixed), _absolute(pair.moving)), by_name.get(pair.name))
        if found is None:
            raise ValueError("the list of results does not have it; expected the same images in a row of it")
        return listed(found, fixed, moving)

    return find


def in_folder(folder: PathLike) -> Method:
    """Results in a folder: each pair's in a folder of its name, as `carl register` or ANTs write them, or in a file.

    Folders of `carl register` are also known by the images that their report names.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected a folder of results, a CSV of pairs or a model")
    reported = {}
    for report in sorted(root.glob("**/report.json")):
        inputs = _read_json(report).get("inputs", {})
        reported[tuple(_absolute(_path(inputs, side)) for side in ("fixed", "moving"))] = report.parent

    def find(pair: Pair, fixed: Image, moving: Image) -> Result:
        place = reported.get((_absolute(pair.fixed), _absolute(pair.moving)), root / pair.name)
        forward, backward = _find_files(place, root, pair)
        if not forward:
            raise ValueError(f"{root} holds no result for it; expected {pair.name}/transform.h5, say")
        return _from_files(forward, backward, fixed, moving)

    return find


def _from_files(forward: Sequence[Path], backward: Sequence[Path], fixed: Image, moving: Image) -> Result:
    inverse: PointMap | None = None
    if len(backward) == 2 and backward[0].suffix == ".mat":  # ANTs: the affine part is to be inverted, the warp is
        affine, warp = transform_files.read(backward[0]), transform_files.read(backward[1])
        if isinstance(affine, WorldTransform):
            undo = np.linalg.inv(affine.affine)
            inverse = lambda points: warp(map_points(undo, points))  # noqa: E731
    elif backward:
        inverse = read_result(backward, moving)
    return Result(read_result(forward, fixed), inverse, **_told(forward[0].parent))


def by_model(model: str, *, save: PathLike | None = None, **options: Any) -> Method:
    """Register again, by `carlreg.register` with these options. Results are kept in `save`, a folder a pair.

    Time is that of the whole call, the reading of the images included.
    """

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        from carlreg.registration.api import register

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # By their paths, so that the report names them; what SimpleITK cannot read is given as it was read.
        files = {"fixed": pair.fixed, "moving": pair.moving}
        inputs: dict[str, Any] = files if pair.read_image is images.read else {"fixed": fixed, "moving": moving}
        masks = {f"{side}_mask": getattr(pair, f"{side}_mask") for side in files}
        started = time.perf_counter()
        registration = register(**inputs, model=model, **masks, **options)
        seconds = time.perf_counter() - started
        if save is not None:
            registration.save(Path(save) / pair.name, overwrite=True)
        consistency = registration.metrics.get("inverse_consistency_mm", math.nan)
        return Result(registration.transform, registration.inverse, seconds, peak_memory(), consistency)

    return run


def peak_memory() -> float:
    """GiB: of the GPU since its count was reset, where there is one; otherwise the most this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def read_result(files: Sequence[Path], fixed: Image) -> WorldMap:
    """T from the files of a result: a transform of ITK's, displacements in millimetres on the fixed grid, ANTs' pair of
    both, or displacements in voxels as Learn2Reg wants them, (*shape, D) in a plain NIfTI image."""
    if len(files) == 1 and transform_files.is_learn2reg(files[0]):
        return transform_files.read_learn2reg(files[0], fixed)
    found = transform_files.read(list(files))
    dim = found.dim if isinstance(found, WorldTransform) else found.transform.GetDimension()
    if dim != fixed.dim:
        raise ValueError(f"{files[0]} is a {dim}-D transform for {fixed.dim}-D images; expected the same")
    if isinstance(found, WorldTransform) and max(found.displacement.shape[:-1]) > 1:
        _check_cover(found, files[0], fixed)
    return found


def _check_cover(transform: WorldTransform, path: Path, fixed: Image) -> None:
    shape = transform.displacement.shape[:-1]
    if path.name.lower().endswith((".nii", ".nii.gz")) and shape != fixed.shape:
        raise ValueError(f"{path} has {_times(shape)} voxels; expected {_times(fixed.shape)}, as the fixed image has")
    ends = np.stack(np.meshgrid(*([0, n - 1] for n in fixed.shape), indexing="ij"), axis=-1).reshape(-1, fixed.dim)
    index = map_points(np.linalg.inv(transform.lattice), map_points(fixed.affine, ends))
    if ((index < -1) | (index > np.array(shape))).any():
        raise ValueError(
            f"{path} has displacements on {_times(shape)} points that do not cover the fixed image of "
            f"{_times(fixed.shape)} voxels; expected a result for this pair"
        )


def _find_files(place: Path, root: Path, pair: Pair) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files of T and of its inverse: in the pair's own folder, or in the common one with the pair in their name."""
    ids = "_".join(re.sub(r"^\D+_?|_0000$", "", stem(path or "")) for path in (pair.fixed, pair.moving))
    candidates = [
        ([place / "transform.h5"], [place / "inverse_transform.h5"]),
        ([place / "warp.nii.gz"], [place / "inverse_warp.nii.gz"]),
        *(
            ([warp, affine], [affine, Path(f"{start}1InverseWarp.nii.gz")])
            for warp in sorted(place.glob("*1Warp.nii.gz"))
            for start in [str(warp)[: -len("1Warp.nii.gz")]]
            for affine in [Path(f"{start}0GenericAffine.mat")]
        ),
        *(([root / f"{pair.name}{ending}"], []) for ending in (".h5", ".tfm", ".nii.gz")),
        ([root / f"disp_{ids}.nii.gz"], []),  # Learn2Reg's names have the fixed image first
    ]
    for forward, backward in candidates:
        if all(path.is_file() for path in forward):
            return tuple(forward), tuple(backward) if all(path.is_file() for path in backward) else ()
    return (), ()


def _told(folder: Path) -> dict[str, float]:
    """What the report beside a result says of it."""
    report = _read_json(folder / "report.json")
    metrics, seconds, memory = (report.get(key) or {} for key in ("metrics", "seconds", "peak_memory_gb"))
    found = {
        "seconds": seconds.get("total", metrics.get("seconds")),
        "peak_gib": memory.get("gpu", memory.get("process", metrics.get("peak_gib"))),
        "inverse_consistency_mm": metrics.get("inverse_consistency_mm"),
    }
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def pairs_of(folder: PathLike) -> list[Pair]:
    """The pairs that a folder of results of `carl register` is about, by the files that the reports name."""
    pairs = []
    for report in sorted(Path(folder).glob("**/report.json")):
        inputs = _read_json(report).get("inputs", {})
        name = str(report.parent.relative_to(folder)) if report.parent != Path(folder) else stem(folder)
        files: dict[str, Any] = {column: _path(inputs, column) for column in FILES}
        for side in SIDES:
            files[side] = files[side] or report.parent / f"{side} image, given in memory"
        pairs.append(Pair(name, **files))
    if not pairs:
        raise ValueError(f"{folder} holds no report.json of `carl register`; expected results, or give a CSV of pairs")
    return pairs


def _path(inputs: dict[str, Any], name: str) -> Path | None:
    """The file of an input, as a report names it."""
    described = inputs.get(name, {})
    path = described.get("path", described.get("name"))
    return Path(path) if path else None


def _absolute(path: PathLike | None) -> str | None:
    return None if path is None else os.path.realpath(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _times(shape: Sequence[int]) -> str:
    return " × ".join(str(n) for n in shape)
