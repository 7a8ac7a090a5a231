"""Where the transforms to evaluate come from: folders, tables, models."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carlreg.errors import OVERWRITE, ExistsError, InputError
from carlreg.files import images, transform_files
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, PathLike, map_points
from carlreg.files.results import INVERSE, REPORT, TRANSFORM, WARP, Report, ResultFolder, find_results
from carlreg.files.tables import FILES, SIDES, Pair, stem
from carlreg.files.world_transform import ItkTransform, PointMap, WorldTransform
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.paper_data.dataset import PLAIN, Dataset
from carlreg.registration.api import register_pair
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.result import make_request

log = logging.getLogger(__name__)

WorldMap = WorldTransform | ItkTransform
SCORED = ("fixed_seg", "moving_seg", "fixed_landmarks", "moving_landmarks")
"""Columns that are measured here, and change no registration."""


@dataclass(frozen=True, eq=False)
class Result:
    """A method's result for a pair: T from fixed to moving world points, with time and memory."""

    transform: WorldMap
    inverse: PointMap | None = None
    seconds: float = math.nan
    peak_gib: float = math.nan
    inverse_consistency_mm: float = math.nan
    """As the method reports it; otherwise it is measured, if there is an inverse."""
    mirrored: bool = False
    """Whether a scan was mirrored on purpose, so that determinants are negative where nothing folds."""


Method = Callable[[Pair, Image, Image], Result]
"""From a pair, its fixed and its moving image to a result."""


def identity(pair: Pair, fixed: Image, moving: Image) -> Result:
    """No registration: the two worlds as the images' headers place them."""
    still = WorldTransform.linear(np.eye(fixed.dim + 1))
    return Result(still, still)


# ---- results in files -----------------------------------------------------------------------------------------------


def listed(pair: Pair, fixed: Image, moving: Image) -> Result:
    """The files in the pair's columns `transform` and `inverse`."""
    if not pair.transform:
        raise InputError("this pair has no result; expected its file in the column 'transform'")
    return _from_files(pair.transform, pair.inverse, fixed, moving)


def from_list(pairs: Sequence[Pair]) -> Method:
    """The files that another table gives for the same images, or for a pair of the same name."""
    by_images = {image_files(pair): pair for pair in pairs}
    by_name = {pair.name: pair for pair in pairs}

    def find(pair: Pair, fixed: Image, moving: Image) -> Result:
        match = by_images.get(image_files(pair), by_name.get(pair.name))
        if match is None:
            raise InputError("the table of results does not list this pair; expected a row with the same images")
        return listed(match, fixed, moving)

    return find


def in_folder(folder: PathLike) -> Method:
    """Results in a folder: each pair's in a folder of its name, as `carl register` or ANTs write them, or in a file.

    Folders of `carl register` are also found by the images that their report names.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root} is not a folder; expected a folder of results, a CSV file of pairs or a model")
    reported = {image_files(pair): root / pair.name for pair in _reported_pairs(root)}

    def find(pair: Pair, fixed: Image, moving: Image) -> Result:
        return from_folder(reported.get(image_files(pair), root / pair.name), pair, fixed, moving, root=root)

    return find


def from_folder(own: Path, pair: Pair, fixed: Image, moving: Image, *, root: Path) -> Result:
    """The result in a pair's own folder, or in a file of `root` with the pair in its name."""
    forward, backward = _find_files(own, root, pair)
    if not forward:
        raise InputError(f"{root} holds no result for this pair; expected for example {pair.name}/{TRANSFORM}")
    return _from_files(forward, backward, fixed, moving)


def pairs_of(folder: PathLike) -> list[Pair]:
    """The pairs whose results `carl register` wrote to a folder, with the input files that the reports name."""
    pairs = _reported_pairs(Path(folder))
    if not pairs:
        raise InputError(f"{folder} holds no {REPORT} of `carl register`; expected results, or a CSV file of pairs")
    return [pair if pair.name != "." else replace(pair, name=stem(Path(folder).resolve())) for pair in pairs]


def _reported_pairs(root: Path) -> list[Pair]:
    """A pair for each report, named after its folder within `root`."""
    pairs = []
    for folder in find_results(root):
        files: dict[str, Any] = {side: folder[f"{side} image, given in memory"] for side in SIDES}
        inputs = _report(folder.path).inputs.items()
        files |= {name: Path(record.path) for name, record in inputs if record.path and name in FILES}
        pairs.append(Pair(str(folder.path.relative_to(root)), **files))
    return pairs


def image_files(pair: Pair) -> tuple[str, str]:
    """The real paths of both images, by which results are found."""
    return os.path.realpath(pair.fixed), os.path.realpath(pair.moving)


def _find_files(own: Path, root: Path, pair: Pair) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The files of T and of its inverse; empty if there is no result."""
    ids = "_".join(re.sub(r"^\D+_?|_0000$", "", stem(path)) for path in (pair.fixed, pair.moving))
    candidates = [
        ([own / TRANSFORM], [own / INVERSE]),
        ([own / WARP], [own / "inverse_warp.nii.gz"]),
        *(
            ([warp, affine], [affine, Path(f"{start}1InverseWarp.nii.gz")])
            for warp in sorted(own.glob("*1Warp.nii.gz"))
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


def _from_files(forward: Sequence[Path], backward: Sequence[Path], fixed: Image, moving: Image) -> Result:
    @cache
    def inverse() -> PointMap:
        """Read when it is used, so that a damaged file costs one figure and not the pair."""
        if len(backward) == 2 and backward[0].suffix == ".mat":  # ANTs: invert the affine part, the warp is inverted
            affine, warp = (transform_files.read(path) for path in backward)
            if not isinstance(affine, WorldTransform):
                raise InputError(f"{backward[0]} is not an affine transform; expected one, as ANTs writes it")
            _check_dim(warp, backward[1], moving)
            undo = np.linalg.inv(affine.affine)
            return lambda points: warp(map_points(undo, points))
        return read_result(backward, moving)

    backward_map: PointMap | None = (lambda points: inverse()(points)) if backward else None
    return Result(read_result(forward, fixed), backward_map, **_figures(_report(forward[0].parent)))


def _report(folder: Path) -> Report:
    """The report of a result; an empty one if there is none or it is damaged, as the result can still be measured."""
    try:
        return ResultFolder(folder).read_report()
    except InputError:
        return Report()


def _figures(report: Report) -> dict[str, Any]:
    """Time, memory, inverse consistency and orientation as a report has them."""
    memory, metrics = report.peak_memory_gb, report.metrics
    figures = {
        "seconds": report.seconds.get("total", metrics.get("seconds")),
        "peak_gib": memory.get("gpu", memory.get("process", metrics.get("peak_gib"))),
        "inverse_consistency_mm": metrics.get("inverse_consistency_mm"),
        "mirrored": report.is_mirrored,
    }
    return {key: value for key, value in figures.items() if value is not None}


def read_result(files: Sequence[Path], fixed: Image) -> WorldMap:
    """T from the files of a result: an ITK transform, displacements in millimetres on the fixed grid, ANTs' pair of
    both, or displacements in voxels as in Learn2Reg, (*shape, D) in a plain NIfTI image."""
    if len(files) == 1 and transform_files.is_learn2reg(files[0]):
        return transform_files.read_learn2reg(files[0], fixed)
    transform = transform_files.read(list(files))
    _check_dim(transform, files[0], fixed)
    if isinstance(transform, WorldTransform) and not transform.is_linear:
        _check_cover(transform, files[0], fixed)
    return transform


def _check_dim(transform: WorldMap, path: Path, image: Image) -> None:
    if transform.dim != image.dim:
        raise InputError(f"{path} is a {transform.dim}-D transform but the images are {image.dim}-D; expected the same")


def _check_cover(transform: WorldTransform, path: Path, fixed: Image) -> None:
    shape = transform.displacement.shape[:-1]
    if path.name.lower().endswith((".nii", ".nii.gz")) and shape != fixed.shape:
        raise InputError(f"{path} has {_times(shape)} voxels; expected {_times(fixed.shape)}, as the fixed image has")
    ends = np.stack(np.meshgrid(*([0, n - 1] for n in fixed.shape), indexing="ij"), axis=-1).reshape(-1, fixed.dim)
    index = map_points(np.linalg.inv(transform.lattice), map_points(fixed.affine, ends))
    if ((index < -1) | (index > np.array(shape))).any():
        raise InputError(
            f"{path} has displacements on {_times(shape)} points that do not cover the fixed image of "
            f"{_times(fixed.shape)} voxels; expected a result for this pair"
        )


def _times(shape: Sequence[int]) -> str:
    return " × ".join(str(n) for n in shape)


# ---- models ---------------------------------------------------------------------------------------------------------


def by_model(
    model: str | LoadedModel,
    *,
    save: PathLike | None = None,
    overwrite: bool = False,
    dataset: Dataset = PLAIN,
    device: str = "auto",
    **options: Any,
) -> Method:
    """Register by `carlreg.register` with these options, one model for all pairs, prepared as `dataset` has it.

    Results are kept in a folder for each pair within `save`, and taken from there if they are of the same registration;
    others are refused unless `overwrite`. Time and memory are those of the report.
    """
    chosen = RegisterOptions(device=device, **options)

    checksum = cache(sha256)

    @cache
    def loaded() -> LoadedModel:
        ready = load_model(model, device)
        if dataset.prepare is None:
            return ready
        if ready.grid is not None and not ready.keeps_margins:
            text = "%s was trained on a grid of %s but sees images as the paper prepares them; see --preparation"
            log.warning(text, ready.provenance["name"], _times(ready.grid))
        return replace(ready, prepare=dataset.prepare)

    def run(pair: Pair, fixed: Image, moving: Image) -> Result:
        network = loaded()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # By their paths, so that the report names them; what SimpleITK cannot read is passed as it was read.
        scans = {} if dataset.read_image is images.read else {"fixed": fixed, "moving": moving}
        given = {name: path for name, path in pair.files().items() if name not in SCORED} | scans
        own = None if save is None else ResultFolder(Path(save) / pair.name)
        is_plain = dataset.prepare is None and not scans  # how a dataset prepares images is not in a report
        if own is not None and own[REPORT].is_file() and is_plain and not overwrite:
            checksums = {name: checksum(path) for name, path in given.items()}
            request = make_request(network.for_dimension(fixed.dim), chosen, checksums)
            if different := own.differences(request, full_precision=True):
                held = f"{own.path} holds a registration with {', '.join(different)}"
                raise ExistsError(f"{held}; choose another folder, or {OVERWRITE}")
            return from_folder(own.path, pair, fixed, moving, root=own.path)
        if own is not None:
            own.check_free(overwrite=overwrite, inputs=given)
        registration = register_pair(PairInputs(**given), network, chosen)
        if own is not None:
            if not is_plain and registration.record.request is not None:  # so that it equals no other
                request = replace(registration.record.request, model=None)
                registration = replace(registration, record=replace(registration.record, request=request))
            registration.save(own, overwrite=overwrite, full_precision=True)  # for the same figures
        return Result(registration.transform, registration.inverse, **_figures(registration.record))

    return run
