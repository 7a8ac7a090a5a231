"""The report of a registration: its inputs, options, results and warnings."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.files.checksums import sha256
from carlreg.files.images import Image
from carlreg.files.results import InputRecord
from carlreg.preparation import Prepared, PreparedPair
from carlreg.registration.affine_search import AffineMatch
from carlreg.registration.case import Case
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.orientation_search import Orientation
from carlreg.registration.rotation_search import RigidMatch
from carlreg.registration.solve import Solution


def describe_inputs(inputs: PairInputs, case: Case, pair: PreparedPair) -> dict[str, InputRecord]:
    """Each input by its name in `PairInputs`."""
    images = {"fixed": (case.fixed, pair.fixed), "moving": (case.moving, pair.moving)}
    return {name: _describe(source, *images.get(name, ())) for name, source in inputs.sources().items()}


def _describe(source: Any, image: Image | None = None, prepared: Prepared | None = None) -> InputRecord:
    """Describe an input: a file or folder by its path and checksum, and an image also by its voxels."""
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).absolute()  # so that the report can be read from another folder
        record = InputRecord(path=str(path), sha256=sha256(path) if path.exists() else None)
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


def describe_options(options: RegisterOptions, solution: Solution) -> dict[str, Any]:
    """The options, with the defaults of the optimisation filled in."""
    optimization = solution.optimization
    return {
        "transform": options.transform,
        "fit_to": None if options.transform == "deformable" else options.fit_source,
        "io_iterations": 0 if optimization is None else optimization.steps,
        "io_over": None if optimization is None else optimization.over,
        "io_sim": solution.io_sim or options.similarity_name,
        "io_sim_reason": solution.io_sim_reason,
        "io_kept": solution.io_kept,
        "io_grid": None if optimization is None else optimization.grid,
        "regularity": options.regularity if optimization is None else optimization.regularity,
        "allow_identity": options.allow_identity,
        "seed": options.seed,
    }


def describe_search(match: RigidMatch | AffineMatch | None) -> dict[str, Any] | None:
    """The result of the search for a rotation or an affine map."""
    if match is None:
        return None
    if isinstance(match, AffineMatch):
        return {"start": match.start, "likeness": round(match.similarity, 4)}
    return {
        "degrees": round(match.degrees, 1),
        "likeness": round(match.correlation, 4),
        "likeness_upright": round(match.upright_correlation, 4),
        "turned_back": match.is_rotated,
    }


def describe_orientation(found: Orientation | None, *, applied: bool) -> dict[str, Any] | None:
    """How the axes of the moving scan seem to run; None if that was not looked into."""
    if found is None:
        return None
    return {
        "seems": found.describe() if found.is_wrong else "as in its header",
        "applied": applied and found.is_wrong,
        "mirrored": applied and found.is_wrong and found.is_reflection,
        "likeness": round(found.similarity, 4),
        "likeness_as_given": round(found.given_similarity, 4),
        "cannot_tell": found.undecided,
    }


def metric_warnings(metrics: dict[str, float]) -> list[str]:
    """What the metrics warn of."""
    warnings = []
    if metrics.get("folds_percent", 0) > 1:
        warnings.append(f"{metrics['folds_percent']:.1f} % of the fixed image is folded: the match is doubtful there")
    if metrics.get("dice_after", 1) < metrics.get("dice_before", 0):
        warnings.append("the labels overlap less after the registration than before it")
    return warnings
