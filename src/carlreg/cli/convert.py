"""`carl convert`: write a transform or an image in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from carlreg.cli._shared import (
    Overwrite,
    Quiet,
    Reference,
    Verbose,
    check_new,
    read_reference,
    read_transform,
    working,
)
from carlreg.errors import InputError
from carlreg.files.results import ResultFolder

if TYPE_CHECKING:
    from carlreg.files.world_transform import ItkTransform, WorldTransform


Part = Literal["whole", "affine", "displacement"]


def convert(
    source: Annotated[Path, typer.Argument(help="A transform file, a folder of `carl register`, or an image.")],
    target: Annotated[
        Path,
        typer.Argument(
            help="For a transform: .h5, .tfm, .mat (affine ones only), an image such as .nii.gz for displacements in "
            "mm, or disp_*.nii.gz for Learn2Reg's in voxels. For an image: any image format."
        ),
    ],
    reference: Reference = None,
    moving: Annotated[Path | None, typer.Option("--moving", "-m", help="The moving image, for Learn2Reg.")] = None,
    part: Annotated[Part, typer.Option(help="Write all of T(x) = A(x + u(x)), or only A or x + u(x).")] = "whole",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a transform or an image in another format."""
    check_new(target, overwrite)
    from carlreg.files import images, transform_files

    with working("converting"):
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
    """Whether a path is a transform rather than an image, judging by its name and header."""
    from carlreg.files import transform_files

    if ResultFolder(path).holds_registration() or path.name.lower().endswith(
        (*transform_files.HDF5, *transform_files.TEXT, *transform_files.ALONE)
    ):
        return True
    return path.is_file() and (transform_files.is_learn2reg(path) or transform_files.is_warp(path))


def _read(path: Path, reference: Path | None) -> WorldTransform | ItkTransform:
    from carlreg.files import images, transform_files

    if not transform_files.is_learn2reg(path):
        return read_transform([path])
    if reference is None:
        raise InputError(f"{path} holds displacements in voxels; give the fixed image with --reference")
    return transform_files.read_learn2reg(path, images.read(reference))


def _part(transform: WorldTransform | ItkTransform, part: Part) -> WorldTransform | ItkTransform:
    import numpy as np

    from carlreg.files.world_transform import WorldTransform

    if part == "whole":
        return transform
    if not isinstance(transform, WorldTransform):
        raise InputError("this transform has no affine and displacement parts; expected --part whole")
    if part == "affine":
        return WorldTransform.linear(transform.affine)
    return WorldTransform(np.eye(transform.dim + 1), transform.displacement, transform.lattice)
