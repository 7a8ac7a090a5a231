"""`carl jacobian`: where a transform stretches, shrinks and folds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import (
    IMAGES,
    Overwrite,
    Quiet,
    Reference,
    Transforms,
    Verbose,
    check_new,
    read_reference,
    read_transform,
    working,
)
from carlreg.errors import InputError


def jacobian(
    transform: Transforms,
    out: Annotated[Path, typer.Option("--out", "-o", help="Image to write.")],
    reference: Reference = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write the Jacobian determinant on the fixed image's grid, and print the percentage of folds.

    The determinant is above 1 where the anatomy is larger in the moving image, below 1 where it is smaller, and below
    0 where the transform folds.
    """
    check_new(out, overwrite, IMAGES)
    from carlreg.files import images, world_transform

    with working("determinants"):
        world = read_transform(transform)
        grid = read_reference(reference, transform, world)
        if grid.dim != world.dim:
            raise InputError(f"the transform is {world.dim}-D but the reference is {grid.dim}-D; expected the same")
        result = world_transform.jacobian_determinant(world, grid)
        images.write(result, out, overwrite=overwrite)
    values = result.data
    typer.echo(
        f"folds {world_transform.folds_percent(result):.4f} %, determinants from {values.min():.3f} to "
        f"{values.max():.3f}, mean {values.mean():.3f}"
    )
