"""`carl warp-points`: landmarks through a registration, in the direction that they need."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import (
    Overwrite,
    Quiet,
    Side,
    Transforms,
    Verbose,
    check_new,
    read_transform,
    say,
    set_loudness,
)


class Space(str, Enum):
    """The axes of the positions in a CSV file."""

    LPS = "LPS"
    RAS = "RAS"


def warp_points(
    points: Annotated[Path, typer.Option("--points", "-p", help="A .csv, or Slicer's .fcsv or .mrk.json.")],
    transform: Transforms,
    side: Annotated[Side, typer.Option("--from", help="The image that the points belong to.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, in the same format.")],
    space: Annotated[
        Space, typer.Option(help="Of a CSV file, which does not say: LPS as in ITK and ANTs, or RAS as in NIfTI.")
    ] = Space.LPS,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find points of one image in the other, in world millimetres.

    Points of the fixed image go through the transform, points of the moving image through its inverse, which is
    solved for at each point.
    """
    set_loudness(quiet, verbose)
    check_new(out, overwrite)
    import numpy as np

    from carlreg.files import world_transform
    from carlreg.files.landmarks import read_points, write_points
    from carlreg.files.world_transform import WorldTransform

    given = read_points(points, space=space.value)
    backwards = side == "moving"
    found = read_transform(transform)
    dim = given.positions.shape[1]
    if found.dim != dim:
        raise ValueError(f"{points} holds {dim}-D points but the transform is {found.dim}-D; expected the same")
    if not backwards:
        moved = found(given.positions)
    elif isinstance(found, WorldTransform):
        moved, missed = world_transform.invert_points(found, given.positions)
        doubtful = int((~(missed < 0.1)).sum())
        if doubtful:
            say(
                f"{doubtful} of {len(moved)} points lie outside of the fixed image, or where the transform folds", quiet
            )
    else:
        raise ValueError(
            f"{transform[0]} has no inverse that can be computed; give the transform of the other direction"
        )
    if not np.isfinite(moved).all():
        raise ValueError(f"{transform[0]} sends points of {points} to infinity")
    write_points(given, moved, out, overwrite=overwrite)
