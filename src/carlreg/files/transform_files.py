"""Transform files of ITK, SimpleITK, ANTs, 3D Slicer and Learn2Reg: reading and writing.

SimpleITK is imported where it is used.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.errors import DependencyError, OutputError
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image, ImageError, Matrix, PathLike, _check_nifti, largest_shift, write_sitk
from carlreg.files.itk import affine_of, itk_order, read_header, reason, simpleitk, vector_image
from carlreg.files.world_transform import (
    ItkTransform,
    PointMap,
    TransformError,
    WorldTransform,
    after_affine,
    learn2reg,
    slabs,
)

# ---- writing --------------------------------------------------------------------------------------------------------

HDF5 = (".h5", ".hdf5")
TEXT = (".tfm", ".txt")
ALONE = (".mat", ".xfm")
"""Formats of single affine maps; the second is only read."""


def write(transform: WorldTransform | ItkTransform, path: PathLike, *, overwrite: bool = False) -> None:
    """Write a composite of ITK's AffineTransform and DisplacementFieldTransform, which ITK applies in T's order: the
    displacement, then the affine map. The file appears whole or not at all.

    `.h5` holds the displacements as float32, half of what SimpleITK itself would write. `.tfm` is text: for small ones.
    `.mat` is what ANTs writes for affine maps, and holds nothing else.

    >>> write(T, "transform.h5")
    """
    ending = Path(path).suffix.lower()
    if ending == ".mat" and not (isinstance(transform, WorldTransform) and transform.is_linear):
        raise TransformError(f"{path} can hold an affine map only; expected .h5 or .tfm, or the affine part alone")
    if ending not in (*HDF5, *TEXT, ".mat"):
        raise TransformError(f"{path} has the extension {ending!r}; expected .h5, .tfm or .mat for a transform")
    if isinstance(transform, ItkTransform):
        content: bytes | Callable[[Path], object] = partial(_write_itk, transform.to_sitk())
    elif ending in HDF5:
        content = partial(_write_hdf5, _parts(transform))
    else:
        content = _matlab(_parts(transform)[0]) if ending == ".mat" else _text(_parts(transform))
    write_atomically(path, content, overwrite=overwrite)


def write_warp(transform: PointMap, grid: Image, path: PathLike, *, overwrite: bool = False) -> None:
    """Write T(x) − x on the voxels of `grid`, an image in the fixed image's world, as ANTs does: millimetres, LPS,
    float32; in NIfTI, five axes and the intent code of vectors. The file appears whole or not at all.

    >>> write_warp(T, fixed, "warp.nii.gz")
    """
    field = np.empty((*grid.shape, grid.dim), np.float32)
    for box, points in slabs(grid):
        field[box] = transform(points) - points
    source = vector_image(field, grid.affine)

    def save(temporary: Path) -> None:
        try:
            write_sitk(source, temporary)
        except ImageError as error:
            raise TransformError(str(error)) from error
        header = read_header(temporary)
        if header.GetSize() != source.GetSize() or header.GetNumberOfComponents() != grid.dim:
            raise TransformError(f"{path} was not written: its format cannot hold vectors; expected .nii.gz, say")
        shift = largest_shift(affine_of(header), grid)
        if shift > 0.01 * min(grid.spacing):
            raise TransformError(
                f"{path} was not written: its format would move voxels by {shift:.3g} mm; expected .mha"
            )

    write_atomically(path, save, overwrite=overwrite)


def write_learn2reg(
    transform: PointMap, fixed: Image, moving: Image, path: PathLike, *, overwrite: bool = False
) -> None:
    """Write `learn2reg`'s displacements as its evaluation reads them: NIfTI of four axes (x, y, z, 3), float32, with
    the fixed image's header. The file appears whole or not at all.

    >>> write_learn2reg(T, fixed, moving, "disp_0001_0002.nii.gz")
    """
    if fixed.dim != 3 or not Path(path).name.lower().endswith((".nii", ".nii.gz")):
        raise TransformError(f"{path}: Learn2Reg's displacements are 3-D and in NIfTI; expected disp_0001_0002.nii.gz")
    field = learn2reg(transform, fixed, moving)
    image = simpleitk().GetImageFromArray(np.ascontiguousarray(field.transpose(3, 2, 1, 0)), isVector=False)
    image.SetSpacing([*fixed.spacing, 1.0])
    image.SetOrigin([*fixed.affine[:-1, -1].tolist(), 0.0])
    direction = np.eye(4)
    direction[:3, :3] = fixed.affine[:-1, :-1] / np.array(fixed.spacing)
    image.SetDirection(direction.ravel().tolist())
    write_atomically(path, partial(write_sitk, image), overwrite=overwrite)


def read_learn2reg(path: PathLike, grid: Image) -> WorldTransform:
    """The world map of Learn2Reg's displacements in voxels; `grid` is the fixed image, whose header counts."""
    name = Path(path)
    if not is_learn2reg(name):
        raise TransformError(f"{path} is no NIfTI image of shape (x, y, z, 3); expected Learn2Reg's displacements")
    field = (
        simpleitk().GetArrayFromImage(simpleitk().ReadImage(str(name), simpleitk().sitkFloat32)).transpose(3, 2, 1, 0)
    )
    if field.shape[:-1] != grid.shape:
        raise TransformError(
            f"{path} is for {field.shape[:-1]} voxels but {grid.name} has {grid.shape}; expected one grid"
        )
    displacement = np.ascontiguousarray(field @ grid.affine[:-1, :-1].T, np.float32)
    return WorldTransform(np.eye(4), displacement, grid.index_to_world())


def is_learn2reg(path: PathLike) -> bool:
    """Whether a file looks like Learn2Reg's displacements: NIfTI, four axes, the last of them three long."""
    name = Path(path)
    if not name.is_file() or not name.name.lower().endswith((".nii", ".nii.gz")):
        return False
    _check_nifti(name)
    try:
        header = read_header(name)
    except RuntimeError:
        return False
    return bool(header.GetDimension() == 4 and header.GetSize()[3] == 3 and header.GetNumberOfComponents() == 1)


def is_warp(path: PathLike) -> bool:
    """Whether a file is an image with as many numbers per voxel as axes."""
    try:
        header = read_header(Path(path))
    except RuntimeError:
        return False
    return bool(header.GetDimension() in (2, 3) and header.GetNumberOfComponents() == header.GetDimension())


@dataclass(frozen=True, eq=False)
class _Part:
    """One transform of a file of ITK's: its type and its two vectors of numbers; a composite has none."""

    kind: str
    parameters: npt.NDArray[Any] | None = None
    fixed: npt.NDArray[Any] | None = None


def _parts(transform: WorldTransform) -> list[_Part]:
    """An affine map alone, or a composite, the affine map and the displacements, in the order of the file."""
    dim, lattice = transform.dim, transform.lattice
    parameters = np.concatenate([transform.affine[:-1, :-1].ravel(), transform.affine[:-1, -1]])
    affine = _Part(f"AffineTransform_double_{dim}_{dim}", parameters, np.zeros(dim))
    if transform.is_linear:
        return [affine]
    spacing = np.linalg.norm(lattice[:-1, :-1], axis=0)
    geometry = [transform.displacement.shape[:-1], lattice[:-1, -1], spacing, (lattice[:-1, :-1] / spacing).ravel()]
    vectors = np.ascontiguousarray(itk_order(transform.displacement), np.float32).ravel()
    field = _Part(f"DisplacementFieldTransform_float_{dim}_{dim}", vectors, np.concatenate(geometry, dtype=np.float64))
    return [_Part(f"CompositeTransform_double_{dim}_{dim}"), affine, field]


def _write_hdf5(parts: Sequence[_Part], path: Path) -> None:
    """ITK's HDF5 file, with the displacements as float32: SimpleITK writes float64 only."""
    try:
        import h5py
    except ImportError as error:
        raise DependencyError("transform files (.h5) need h5py: pip install h5py") from error
    text = h5py.string_dtype("ascii")  # ITK does not read UTF-8
    with h5py.File(path, "w") as file:
        for name, version in (("ITKVersion", "5.4.0"), ("HDFVersion", "1.8.0")):
            file.create_dataset(name, data=[version], dtype=text)
        for number, part in enumerate(parts):
            group = file.create_group(f"TransformGroup/{number}")
            group.create_dataset("TransformType", data=[part.kind], dtype=text)
            if part.parameters is not None and part.fixed is not None:
                group["TransformFixedParameters"], group["TransformParameters"] = part.fixed, part.parameters


def _text(parts: Sequence[_Part]) -> bytes:
    """ITK's text file. It reads displacements of the type double only."""
    lines = ["#Insight Transform File V1.0"]
    for number, part in enumerate(parts):
        lines += [f"#Transform {number}", f"Transform: {part.kind.replace('_float_', '_double_')}"]
        if part.parameters is not None and part.fixed is not None:
            for name, numbers in (("Parameters", part.parameters), ("FixedParameters", part.fixed)):
                lines.append(f"{name}: {' '.join(map(repr, numbers.tolist()))}")
    return ("\n".join(lines) + "\n").encode()


def _matlab(part: _Part) -> bytes:
    """A file of MATLAB 4, as ITK and ANTs write for one transform: two vectors of doubles with their names."""

    def vector(name: str, numbers: npt.NDArray[Any] | None) -> bytes:
        text, values = name.encode() + b"\0", np.asarray(numbers, "<f8")
        return struct.pack("<5i", 0, len(values), 1, 0, len(text)) + text + values.tobytes()

    return vector(part.kind, part.parameters) + vector("fixed", part.fixed)


def _write_itk(transform: Any, path: Path) -> None:
    """Any transform of ITK's. SimpleITK does not report a full disk when it writes text."""
    try:
        simpleitk().WriteTransform(transform, str(path))
        stored = simpleitk().ReadTransform(str(path))
    except RuntimeError as error:
        raise TransformError(f"{path} cannot be written: {reason(error)}; expected .h5 or .tfm") from error
    same = stored.GetParameters() == transform.GetParameters()
    whole = path.suffix.lower() in HDF5 or path.read_bytes().endswith(b"\n")
    if not (same and whole and stored.GetFixedParameters() == transform.GetFixedParameters()):
        raise OutputError(f"{path} was not written completely; check the disk, then try again")


# ---- reading --------------------------------------------------------------------------------------------------------


def read(path: PathLike | Sequence[PathLike]) -> WorldTransform | ItkTransform:
    """Read a transform file of ITK's (.h5, .tfm, .txt, .mat, .xfm) or an image of displacements in mm, LPS (ANTs'
    Warp.nii.gz), or several in ANTs' order, in which the first acts on a point first.

    Linear maps of any kind and at most one displacement field become a WorldTransform, exactly. Everything else is left
    to SimpleITK, as an ItkTransform.

    >>> T = read(["1Warp.nii.gz", "0GenericAffine.mat"])
    """
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(one) for one in path]
    if not paths:
        raise TransformError("no transform file was given; expected at least one")
    parts = [part for one in paths for part in _read_parts(one)]  # in the order in which they act on a point
    if len({part.GetDimension() for part in parts}) != 1:
        raise TransformError(f"{paths[0]} and the files after it hold 2-D and 3-D transforms; expected one dimension")
    dim = parts[0].GetDimension()
    fields = [part for part in parts if _is_field(part)]
    if len(fields) > 1 or not all(part.IsLinear() or _is_field(part) for part in parts):
        return ItkTransform(simpleitk().CompositeTransform(parts[::-1]) if len(parts) > 1 else parts[0])
    before, after, seen = np.eye(dim + 1), np.eye(dim + 1), False
    for part in parts:
        if _is_field(part):
            seen = True
        elif seen:
            after = _matrix(part) @ after
        else:
            before = _matrix(part) @ before
    vectors, lattice = np.zeros((*(1,) * dim, dim), np.float32), np.eye(dim + 1)
    if fields:
        image = simpleitk().DisplacementFieldTransform(fields[0]).GetDisplacementField()
        vectors, lattice = itk_order(simpleitk().GetArrayFromImage(image)), affine_of(image)
    if not np.isfinite(vectors).all() or not np.isfinite(before).all() or not np.isfinite(after).all():
        raise TransformError(f"{paths[0]} holds numbers that are not finite; expected a transform: write it again")
    whole = WorldTransform(after, np.ascontiguousarray(vectors, np.float32), lattice)
    return after_affine(whole, before)


def _read_parts(path: Path) -> list[Any]:
    """The file's transforms as SimpleITK has them, the one that acts first on a point first."""
    if not path.is_file():
        raise TransformError(f"{path} does not exist or is a folder; expected a transform file: check the path")
    sitk = simpleitk()
    try:
        if path.suffix.lower() in TEXT:
            _check_text(path)
        if path.suffix.lower() in HDF5 + TEXT + ALONE:
            return _flatten(sitk.ReadTransform(str(path)))
        if path.name.lower().endswith((".nii", ".nii.gz")):
            _check_nifti(path)
        header = read_header(path)
        dim, components = header.GetDimension(), header.GetNumberOfComponents()
        if dim not in (2, 3) or components != dim:
            raise TransformError(
                f"{path} is an image with {dim} axes and {components} numbers per voxel; expected a transform, or "
                "displacements with as many numbers as axes"
            )
        return [sitk.DisplacementFieldTransform(sitk.ReadImage(str(path), sitk.sitkVectorFloat64))]
    except TransformError:
        raise
    except ImageError as error:
        raise TransformError(str(error)) from error
    except (RuntimeError, ValueError) as error:
        raise TransformError(
            f"{path} cannot be read: {reason(error)}; expected a whole transform file: copy or write it again"
        ) from error


def _check_text(path: Path) -> None:
    """ITK reads what is there of a cut-off text file without a word: count the numbers for ourselves."""
    for block in path.read_text(errors="replace").split("\nTransform:")[1:]:
        kind, *lines = block.strip().splitlines()
        words = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
        numbers, fixed = words.get("Parameters:"), words.get("FixedParameters:")
        whole = "CompositeTransform" in kind or (numbers is not None and fixed is not None)
        if whole and "DisplacementField" in kind:
            dim = int(kind.rsplit("_")[-1])
            sides = [int(float(side)) for side in (fixed or [])[:dim]]
            whole = len(fixed or []) == dim * (dim + 3) and len(numbers or []) == dim * math.prod(sides)
        if not whole:
            raise TransformError(f"{path} is truncated in its {kind.strip()}; expected a whole file: copy it again")


def _flatten(transform: Any) -> list[Any]:
    if transform.GetName() != "CompositeTransform":
        return [transform]
    composite = simpleitk().CompositeTransform(transform)
    count = composite.GetNumberOfTransforms()
    return [part for n in reversed(range(count)) for part in _flatten(composite.GetNthTransform(n))]


def _is_field(transform: Any) -> bool:
    return bool(transform.GetName() == "DisplacementFieldTransform")


def _matrix(linear: Any) -> Matrix:
    """Any linear SimpleITK transform as (D + 1, D + 1)."""
    dim = linear.GetDimension()
    matrix = np.eye(dim + 1)
    matrix[:-1, -1] = linear.TransformPoint([0.0] * dim)
    matrix[:-1, :-1] = np.transpose([linear.TransformPoint(axis) for axis in np.eye(dim).tolist()]) - matrix[:-1, -1:]
    return matrix
