"""`carl warp`, `carl warp-points`, `carl jacobian` and `carl convert`: apply, measure and convert transforms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import IMAGES, Overwrite, check_new, message, working
from carlreg.errors import InputError
from carlreg.files.results import EXPECTED_ERROR, INVERSE, REPORT, TRANSFORM, WARPED, ResultFolder

if TYPE_CHECKING:
    from carlreg.files.images import Image
    from carlreg.files.landmarks import Points
    from carlreg.files.world_transform import ItkTransform, WorldTransform

Part = Literal["whole", "affine", "displacement"]
Transforms = Annotated[
    list[Path],
    "Result folder of `carl register`, or transform file. Repeat the option to chain transforms: the first is "
    "applied to a point first.",
    "-t",
]
Reference = Annotated[Path | None, "Image that defines the output grid. Not needed with a result folder.", "-r"]


@dataclass(frozen=True)
class Take:
    """What to take of an image that holds more than one."""

    nan: Annotated[float | None, "Replace NaN and infinite values of the image by this number."] = None
    frame: Annotated[int | None, "The time point of a 4-D image, or the page of a TIFF file, from 0."] = None
    channel: Annotated[str | None, "The channel of an image in colour, from 0, or luminance, as for pictures."] = None
    series: Annotated[
        str | None, "The series of a DICOM folder that holds several: its number, UID, or a part of its description."
    ] = None

    def read(self, path: Path) -> Image:
        from carlreg.files.images import Choice, read

        return read(path, Choice.of(vars(self), "moving"))


@command()
def warp(
    image: Annotated[Path, "The image, in the moving image's space.", "-i"],
    transform: Transforms,
    out: Annotated[Path, "The file to write.", "-o"],
    reference: Reference = None,
    inverse: Annotated[
        bool,
        "Warp from the fixed to the moving image instead. A chain keeps its order and is inverted as a whole.",
        "--inverse",
    ] = False,
    labels: Annotated[bool, "The image is a label map: use the nearest voxel.", "--labels"] = False,
    interpolation: Annotated[Literal["linear", "nearest"], "How to interpolate between voxels."] = "linear",
    outside: Annotated[
        float | None, "The value outside the image. By default 0, or the lowest value if negative, as in CT."
    ] = None,
    take: Take = Take(),
    overwrite: Overwrite = False,
) -> None:
    """Resample the moving image, or its labels, on the fixed image's grid. The data type is kept."""
    check_new(out, overwrite, IMAGES)
    from carlreg.files import images, world_transform

    with working("reading") as part:
        source = images.as_labels(take.read(image)) if labels else take.read(image)
        if inverse and not all(ResultFolder(path).holds_registration() for path in transform):
            raise InputError(f"--inverse needs a folder of `carl register`, which has {TRANSFORM} and its inverse")
        _check_direction(image, transform, inverse)
        mapping = _read(transform, inverse=inverse)
        grid = _read_reference(reference, transform, mapping, inverse=inverse)
        if not source.dim == mapping.dim == grid.dim:
            sides = f"the image is {source.dim}-D, the transform {mapping.dim}-D, the reference {grid.dim}-D"
            raise InputError(f"{sides}; expected the same")
        if not labels and interpolation == "linear" and images.looks_like_labels(source):
            message(f"{image} looks like a label map; if it is one, give --labels")
        part.begin("warping")
        warped = world_transform.apply(mapping, source, grid, "nearest" if labels else interpolation, outside)
        images.write(warped, out, overwrite=overwrite)


@command()
def warp_points(
    points: Annotated[Path, "A text file (.csv, .tsv, .txt), or Slicer's .fcsv or .mrk.json.", "-p"],
    transform: Transforms,
    side: Annotated[Literal["fixed", "moving"], "The image that the points belong to.", "--from"],
    out: Annotated[Path, "The file to write, in the same format.", "-o"],
    space: Annotated[
        Literal["LPS", "RAS"], "The meaning of columns x, y, z: LPS as in ITK and ANTs, or RAS as in NIfTI."
    ] = "LPS",
    overwrite: Overwrite = False,
) -> None:
    """Map points from one image to the other, in world millimetres.

    Points of the fixed image go through the transform, points of the moving image through its inverse, which is
    computed at each point. Everything else in the file is kept. A text file gets the column expected_error_mm if the
    result folder has a map of expected errors.
    """
    check_new(out, overwrite)
    import numpy as np

    from carlreg.files import world_transform
    from carlreg.files.landmarks import read_points, write_points
    from carlreg.files.world_transform import WorldTransform

    source = read_points(points, space=space)
    mapping = _read(transform)
    dim = source.positions.shape[1]
    if mapping.dim != dim:
        raise InputError(f"{points} holds {dim}-D points but the transform is {mapping.dim}-D; expected the same")
    _warn_if_outside(source, transform, mapping, side == "moving")
    if side == "fixed":
        moved = mapping(source.positions)
    else:
        moved, doubtful = source.positions, np.zeros(len(source.positions), bool)
        for path in reversed(transform):  # one by one, which needs no inverse of the whole chain
            one = _read([path])
            if not isinstance(one, WorldTransform):
                raise InputError(f"{path} cannot be inverted; give the transform of the other direction, --from fixed")
            moved, residual = world_transform.invert_points(one, moved)
            doubtful |= ~(residual < 0.1)
        if doubtful.any():
            count = f"{doubtful.sum()} of {len(moved)} points"
            message(f"{count} lie outside the fixed image, or where the transform folds")
    if not np.isfinite(moved).all():
        raise InputError(f"{transform[0]} maps points of {points} to infinity; expected a transform of these images")
    column = None
    errors = _expected_errors(transform, source.positions if side == "fixed" else moved)
    if errors is not None:
        message(f"expected error: {errors.mean():.1f} mm on average, {errors.max():.1f} mm at most")
        column = ("expected_error_mm", errors.tolist()) if source.ending in (".csv", ".tsv", ".txt") else None
    write_points(source, moved, out, overwrite=overwrite, column=column)


def _expected_errors(paths: list[Path], fixed_points: Any) -> Any:
    """The expected error at points of the fixed image in mm, if one result folder is given and has a map of it."""
    if len(paths) != 1 or not (path := ResultFolder(paths[0])[EXPECTED_ERROR]).is_file():
        return None
    import numpy as np

    from carlreg.files.images import map_points, read

    errors = read(path)
    index = np.rint(map_points(np.linalg.inv(errors.affine), fixed_points)).astype(int)
    return errors.data[tuple(index.clip(0, np.array(errors.shape) - 1).T)].astype(float)


def _warn_if_outside(source: Points, paths: list[Path], mapping: Any, inverse: bool) -> None:
    """Warn of points outside the image that they are said to belong to: often their frame is the other one."""
    from carlreg.files.images import count_outside

    if inverse and not (len(paths) == 1 and ResultFolder(paths[0])[INVERSE].is_file()):
        return
    try:
        grid = _read_reference(None, paths, _read(paths, inverse=True) if inverse else mapping, inverse=inverse)
    except InputError:  # a linear transform alone: it belongs to no image
        return
    if outside := count_outside(grid, source.positions):
        side, other = "moving" if inverse else "fixed", "RAS" if source.space == "LPS" else "LPS"
        flipped = count_outside(grid, source.positions * [-1, -1, 1][: grid.dim])
        mistaken = source.ending in (".csv", ".tsv", ".txt") and flipped < outside
        advice = f"are they {other}? Then give --space {other}" if mistaken else "check that they belong to it"
        found = f"{outside} of {len(source.positions)} points lie outside the {side} image if read as {source.space} mm"
        message(f"{found}; {advice}")


@command()
def jacobian(
    transform: Transforms,
    out: Annotated[Path | None, "Image to write; without it, the numbers are printed alone.", "-o"] = None,
    reference: Reference = None,
    overwrite: Overwrite = False,
) -> None:
    """Print the percentage of folds and SDlogJ, and write the Jacobian determinant on the fixed image's grid.

    The determinant is above 1 where the anatomy is larger in the moving image, below 1 where it is smaller, and below
    0 where the transform folds.
    """
    if out is not None:
        check_new(out, overwrite, IMAGES)
    from carlreg.files import images, world_transform

    with working("determinants"):
        mapping = _read(transform)
        grid = _read_reference(reference, transform, mapping)
        if grid.dim != mapping.dim:
            raise InputError(f"the transform is {mapping.dim}-D but the reference is {grid.dim}-D; expected the same")
        folder = ResultFolder(transform[0])
        mirrored = len(transform) == 1 and folder[REPORT].is_file() and folder.read_report().is_mirrored
        result = world_transform.jacobian_determinant(mapping, grid, mirrored=mirrored)
        if out is not None:
            images.write(result, out, overwrite=overwrite)
    folds, spread, values = world_transform.folds_percent(result), world_transform.sd_log_jacobian(result), result.data
    typer.echo(
        f"folds {folds:.4f} %, SDlogJ {spread:.4f}, determinants from {values.min():.3f} to {values.max():.3f}, "
        f"mean {values.mean():.3f}"
    )


@command()
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
    moving: Annotated[Path | None, "The moving image, for Learn2Reg.", "-m"] = None,
    part: Annotated[Part, "Write all of T(x) = A(x + u(x)), or only A or x + u(x)."] = "whole",
    take: Take = Take(),
    overwrite: Overwrite = False,
) -> None:
    """Write a transform or an image in another format."""
    check_new(target, overwrite)
    from carlreg.files import images, transform_files

    of_image = [name for name, value in vars(take).items() if value is not None]
    values = {"reference": reference, "moving": moving, "part": None if part == "whole" else part}
    of_transform = [name for name, value in values.items() if value is not None]
    with working("converting"):
        if not is_transform(source) or (of_image and not _is_named_transform(source)):
            image = take.read(source)
            _refuse(of_transform, f"is for transforms, but {source} is an image")
            images.write(image, target, overwrite=overwrite)
            return
        _refuse(of_image, f"is for images, but {source} is a transform")
        if not transform_files.is_learn2reg(source):
            transform = _read([source])
        elif reference is not None:
            transform = transform_files.read_learn2reg(source, images.read(reference))
        else:
            raise InputError(f"{source} holds displacements in voxels; give the fixed image with --reference")
        transform, name = _part(transform, part), target.name.lower()
        if name.endswith((*transform_files.HDF5, *transform_files.TEXT, ".mat")):
            transform_files.write(transform, target, overwrite=overwrite)
            return
        grid = _read_reference(reference, [source], transform)
        if name.startswith("disp_"):
            other = grid if moving is None else images.read(moving)
            transform_files.write_learn2reg(transform, grid, other, target, overwrite=overwrite)
        else:
            transform_files.write_warp(transform, grid, target, overwrite=overwrite)


def _refuse(options: list[str], why: str) -> None:
    if options:
        raise InputError(f"--{options[0]} {why}; leave it out")


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


def is_transform(path: Path) -> bool:
    """Whether a path is a transform rather than an image, judging by its name and header."""
    from carlreg.files import transform_files as files

    return _is_named_transform(path) or (path.is_file() and (files.is_learn2reg(path) or files.is_warp(path)))


def _is_named_transform(path: Path) -> bool:
    """Whether a path is a transform by its name; by its header alone, one is an image with three time points, too."""
    from carlreg.files import transform_files as files

    by_name = path.name.lower().endswith((*files.HDF5, *files.TEXT, *files.ALONE))
    return by_name or ResultFolder(path).holds_registration()


def _read(paths: list[Path], *, inverse: bool = False) -> WorldTransform | ItkTransform:
    """Read the map from fixed to moving points from a result folder or transform files, or its inverse from folders:
    that of a chain, (B ∘ A)⁻¹ = A⁻¹ ∘ B⁻¹, begins with the last."""
    from carlreg.files import transform_files

    files = [path / (INVERSE if inverse else TRANSFORM) if path.is_dir() else path for path in paths]
    for path, file in zip(paths, files, strict=True):
        if path.is_dir() and not file.is_file():
            raise InputError(f"{path} is a folder without {file.name}; expected a folder of `carl register`, or a file")
    return transform_files.read(files[::-1] if inverse else files)


def _check_direction(image: Path, paths: list[Path], inverse: bool) -> None:
    """Refuse the fixed image, or its labels, where the moving one's belong, and the other way round, by the checksums
    in the reports of result folders. The fixed image of a chain is that of its first folder, the moving one of its
    last."""
    ends = {"fixed": ResultFolder(paths[0]), "moving": ResultFolder(paths[-1])}
    inputs = {side: end.read_report().inputs for side, end in ends.items() if end[REPORT].is_file()}
    if not inputs:
        return
    from carlreg.files.checksums import sha256

    checksum = sha256(image)
    sides = {
        side
        for side, records in inputs.items()
        for name, one in records.items()
        if one.sha256 == checksum and name.startswith("moving") == (side == "moving")
    }
    given, other = ("moving", "fixed") if inverse else ("fixed", "moving")
    if sides == {given}:
        advice = "leave --inverse out" if inverse else "give --inverse"
        raise InputError(
            f"{image} belongs to the {given} image of {ends[given].path}; expected an image in the space of the "
            f"{other} image of {ends[other].path}: {advice} to warp it there"
        )


def _read_reference(reference: Path | None, paths: list[Path], transform: Any, *, inverse: bool = False) -> Image:
    """Choose the output grid: that of --reference, of a result folder, or of the displacement field. With `inverse`, it
    is the moving image's, on which the displacements of the inverse lie; a linear one has none."""
    import numpy as np

    from carlreg.files import images
    from carlreg.files.images import Image
    from carlreg.files.world_transform import WorldTransform

    if reference is not None:
        return images.read(reference)
    result = ResultFolder(paths[0]) if len(paths) == 1 else None
    if result is not None and not inverse and result.holds_registration() and result[WARPED].is_file():
        return images.read(result[WARPED])
    if isinstance(transform, WorldTransform) and not transform.is_linear:
        shape = transform.displacement.shape[:-1]
        return Image(np.zeros(shape, np.uint8), transform.lattice, f"the grid of {paths[0]}")
    if inverse and result is not None and result[REPORT].is_file() and (found := _moving_grid(result)) is not None:
        return found
    raise InputError(f"{paths[0]} does not define an output grid; give an image with --reference")


def _moving_grid(result: ResultFolder) -> Image | None:
    """The grid of a result's moving image, where that is found: at its recorded place or in the folder, by its name."""
    from carlreg.files import images
    from carlreg.files.choice import Choice

    report = result.read_report()
    moving = report.inputs.get("moving")
    if moving is None or moving.path is None:
        return None
    options = {} if report.request is None else report.request.options
    for path in (Path(moving.path), result.path / Path(moving.path).name):
        if path.exists():
            return images.read(path, Choice.of_pair(options, "moving", path))
    return None
