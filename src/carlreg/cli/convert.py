"""`carl convert`: transforms and images in other formats."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carlreg.cli._shared import (
    Overwrite,
    Quiet,
    Reference,
    Verbose,
    check_new,
    read_reference,
    read_transform,
    set_loudness,
    working,
)

if TYPE_CHECKING:
    from carlreg.files.world_transform import ItkTransform, WorldTransform


class Part(str, Enum):
    """Of T(x) = A(x + u(x)): both, A, or x + u(x)."""

    whole = "whole"
    affine = "affine"
    displacement = "displacement"


def convert(
    source: Annotated[Path, typer.Argument(help="A transform file, a folder of `carl register`, or an image.")],
    target: Annotated[
        Path,
        typer.Argument(
            help="Of a transform: .h5, .tfm, .mat (affine ones), an image such as .nii.gz for displacements in mm, or "
            "disp_*.nii.gz for Learn2Reg's in voxels. Of an image: any image format."
        ),
    ],
    reference: Reference = None,
    moving: Annotated[Path | None, typer.Option("--moving", "-m", help="The moving image, for Learn2Reg.")] = None,
    part: Annotated[Part, typer.Option(help="Of a transform of two parts.")] = Part.whole,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a transform or an image in another format."""
    set_loudness(quiet, verbose)
    check_new(target, overwrite)
    from carlreg.files import images, transform_files

    with working("converting", quiet):
        if not is_transform(source):
            images.write(images.read(source), target, overwrite=overwrite)
            return
        transform = _part(_read(source, reference), part)
        name = target.name.lower()
        if name.endswith((*transform_files.HDF5, *transform_files.TEXT, ".mat")):
            transform_files.write(transform, target, overwrite=overwrite)
            return
        grid = read_reference(reference, [source], transform)
        if name.startswith("disp_"):
            other = grid if moving is None else images.read(moving)
            transform_files.write_learn2reg(transform, grid, other, target, overwrite=overwrite)
        else:
            transform_files.write_warp(transform, grid, target, overwrite=overwrite)


def is_transform(path: Path) -> bool:
    """Whether a path is a transform, as far as its name and header say, and not an image."""
    from carlreg.cli._shared import is_registration
    from carlreg.files import transform_files

    if is_registration(path) or path.name.lower().endswith(
        (*transform_files.HDF5, *transform_files.TEXT, *transform_files.ALONE)
    ):
        return True
    return path.is_file() and (transform_files.is_learn2reg(path) or transform_files.is_warp(path))


def _read(path: Path, reference: Path | None) -> WorldTransform | ItkTransform:
    from carlreg.files import images, transform_files

    if not transform_files.is_learn2reg(path):
        return read_transform([path])
    if reference is None:
        raise ValueError(f"{path} holds displacements in voxels; give the fixed image with --reference")
    return transform_files.read_learn2reg(path, images.read(reference))


def _part(transform: WorldTransform | ItkTransform, part: Part) -> WorldTransform | ItkTransform:
    import numpy as np

    from carlreg.files.world_transform import WorldTransform

    if part is Part.whole:
        return transform
    if not isinstance(transform, WorldTransform):
        raise ValueError("this transform does not split into an affine and a displacement part; expected --part whole")
    if part is Part.affine:
        return WorldTransform.linear(transform.affine)
    return WorldTransform(np.eye(transform.dim + 1), transform.displacement, transform.lattice)
