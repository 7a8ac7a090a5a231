"""`carl warp`: an image or a label map through a transform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import (
    FORWARD,
    IMAGES,
    Interpolation,
    Overwrite,
    Quiet,
    Reference,
    Transforms,
    Verbose,
    check_new,
    is_registration,
    read_reference,
    read_transform,
    say,
    set_loudness,
    working,
)


def warp(
    image: Annotated[Path, typer.Option("--image", "-i", help="The image, in the moving image's world.")],
    transform: Transforms,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    reference: Reference = None,
    inverse: Annotated[
        bool,
        typer.Option("--inverse", help="Bring an image from the fixed image's world to the moving one's instead."),
    ] = False,
    labels: Annotated[bool, typer.Option("--labels", help="It is a label map: take the nearest voxel.")] = False,
    interpolation: Annotated[Interpolation, typer.Option(help="Between voxels.")] = "linear",
    outside: Annotated[
        float | None,
        typer.Option(help="The value where the image does not reach; else 0, or the lowest if negative, as in a CT."),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Bring an image or a label map from the moving to the fixed image's grid, in its own type."""
    set_loudness(quiet, verbose)
    check_new(out, overwrite, IMAGES)
    from carlreg.files import images, world_transform

    with working("reading", quiet) as progress:
        source = images.read_labels(image) if labels else images.read(image)
        if inverse and not all(is_registration(path) for path in transform):
            raise ValueError(f"--inverse needs a folder of `carl register`, which has {FORWARD} and its inverse")
        if inverse and reference is None:
            raise ValueError("--inverse needs --reference: the moving image, whose grid the result gets")
        found = read_transform(transform, inverse=inverse)
        grid = read_reference(reference, transform, found)
        if not source.dim == found.dim == grid.dim:
            sides = f"the image is {source.dim}-D, the transform {found.dim}-D, the reference {grid.dim}-D"
            raise ValueError(f"{sides}; expected the same")
        nearest = labels or interpolation == "nearest"
        if not nearest and images.looks_like_labels(source):
            say(f"{image} looks like a label map; if it is one, say --labels", quiet)
        progress.say("warping")
        warped = world_transform.apply(found, source, grid, "nearest" if nearest else "linear", outside)
        images.write(warped, out, overwrite=overwrite)
