"""`carl warp`: apply a transform to an image or a label map."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import (
    IMAGES,
    Interpolation,
    Overwrite,
    Quiet,
    Reference,
    Transforms,
    Verbose,
    check_new,
    message,
    read_reference,
    read_transform,
    working,
)
from carlreg.errors import InputError
from carlreg.files.results import TRANSFORM, ResultFolder


def warp(
    image: Annotated[Path, typer.Option("--image", "-i", help="The image, in the moving image's space.")],
    transform: Transforms,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    reference: Reference = None,
    inverse: Annotated[
        bool,
        typer.Option("--inverse", help="Warp from the fixed to the moving image instead."),
    ] = False,
    labels: Annotated[bool, typer.Option("--labels", help="The image is a label map: use the nearest voxel.")] = False,
    interpolation: Annotated[Interpolation, typer.Option(help="How to interpolate between voxels.")] = "linear",
    outside: Annotated[
        float | None,
        typer.Option(help="The value outside the image. By default 0, or the lowest value if negative, as in CT."),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Resample the moving image, or its labels, on the fixed image's grid. The data type is kept."""
    check_new(out, overwrite, IMAGES)
    from carlreg.files import images, world_transform

    with working("reading") as progress:
        source = images.read_labels(image) if labels else images.read(image)
        if inverse and not all(ResultFolder(path).holds_registration() for path in transform):
            raise InputError(f"--inverse needs a folder of `carl register`, which has {TRANSFORM} and its inverse")
        if inverse and reference is None:
            raise InputError("--inverse needs --reference: the moving image, which defines the output grid")
        mapping = read_transform(transform, inverse=inverse)
        grid = read_reference(reference, transform, mapping)
        if not source.dim == mapping.dim == grid.dim:
            sides = f"the image is {source.dim}-D, the transform {mapping.dim}-D, the reference {grid.dim}-D"
            raise InputError(f"{sides}; expected the same")
        nearest = labels or interpolation == "nearest"
        if not nearest and images.looks_like_labels(source):
            message(f"{image} looks like a label map; if it is one, give --labels")
        progress.start("warping")
        warped = world_transform.apply(mapping, source, grid, "nearest" if nearest else "linear", outside)
        images.write(warped, out, overwrite=overwrite)
