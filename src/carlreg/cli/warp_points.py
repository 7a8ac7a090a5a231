"""`carl warp-points`: map landmarks from one image to the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from carlreg.cli._shared import Overwrite, Quiet, Side, Transforms, Verbose, check_new, message, read_transform
from carlreg.errors import InputError


def warp_points(
    points: Annotated[
        Path, typer.Option("--points", "-p", help="A text file (.csv, .tsv, .txt), or Slicer's .fcsv or .mrk.json.")
    ],
    transform: Transforms,
    side: Annotated[Side, typer.Option("--from", help="The image that the points belong to.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, in the same format.")],
    space: Annotated[
        Literal["LPS", "RAS"],
        typer.Option(help="The meaning of columns x, y, z: LPS as in ITK and ANTs, or RAS as in NIfTI."),
    ] = "LPS",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Map points from one image to the other, in world millimetres.

    Points of the fixed image go through the transform, points of the moving image through its inverse, which is
    computed at each point. Everything else in the file is kept.
    """
    check_new(out, overwrite)
    import numpy as np

    from carlreg.files import world_transform
    from carlreg.files.landmarks import read_points, write_points
    from carlreg.files.world_transform import WorldTransform

    source = read_points(points, space=space)
    mapping = read_transform(transform)
    dim = source.positions.shape[1]
    if mapping.dim != dim:
        raise InputError(f"{points} holds {dim}-D points but the transform is {mapping.dim}-D; expected the same")
    if side == "fixed":
        moved = mapping(source.positions)
    elif isinstance(mapping, WorldTransform):
        moved, residual = world_transform.invert_points(mapping, source.positions)
        doubtful = int((~(residual < 0.1)).sum())
        if doubtful:
            message(f"{doubtful} of {len(moved)} points lie outside the fixed image, or where the transform folds")
    else:
        raise InputError(f"{transform[0]} cannot be inverted; give the transform of the other direction, --from fixed")
    if not np.isfinite(moved).all():
        raise InputError(f"{transform[0]} maps points of {points} to infinity; expected a transform of these images")
    write_points(source, moved, out, overwrite=overwrite)
