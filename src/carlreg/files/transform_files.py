"""Transform files of ITK, SimpleITK, ANTs, 3D Slicer and Learn2Reg: reading and writing.

SimpleITK is imported where it is used.
"""

from __future__ import annotations

import math
import os
import re
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.files.images import (
    Image,
    ImageError,
    Matrix,
    PathLike,
    _affine,
    _check_nifti,
    _header,
    _largest_shift,
    _sitk,
)
from carlreg.files.world_transform import (
    ItkTransform,
    PointMap,
    TransformError,
    WorldTransform,
    _after_affine,
    _itk_order,
    _slabs,
    _vector_image,
    learn2reg,
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
    if ending in HDF5 and isinstance(transform, WorldTransform):
        tree = _hdf5_tree(transform)
        _write_whole(path, overwrite, lambda temporary: _write_hdf5(temporary, tree))
    else:
        itk = transform.to_sitk()
        _write_whole(path, overwrite, lambda temporary: _sitk().WriteTransform(itk, str(temporary)))


def write_warp(transform: PointMap, grid: Image, path: PathLike, *, overwrite: bool = False) -> None:
    """Write T(x) − x on the voxels of `grid`, an image in the fixed image's world, as ANTs does: millimetres, LPS,
    float32; in NIfTI, five axes and the intent code of vectors. The file appears whole or not at all.

    >>> write_warp(T, fixed, "warp.nii.gz")
    """
    field = np.empty((*grid.shape, grid.dim), np.float32)
    for rows, points in _slabs(grid):
        field[rows] = transform(points) - points
    source = _vector_image(field, grid.affine)

    def save(temporary: Path) -> None:
        _sitk().WriteImage(source, str(temporary))
        back = _header(temporary)
        if back.GetSize() != source.GetSize() or back.GetNumberOfComponents() != grid.dim:
            raise TransformError(f"{path} was not written: its format cannot hold vectors; expected .nii.gz, say")
        apart = _largest_shift(_geometry(back), grid)
        if apart > 0.01 * min(grid.spacing):
            raise TransformError(
                f"{path} was not written: its format would move voxels by {apart:.3g} mm; expected .mha"
            )

    _write_whole(path, overwrite, save)


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
    image = _sitk().GetImageFromArray(np.ascontiguousarray(field.transpose(3, 2, 1, 0)), isVector=False)
    image.SetSpacing([*fixed.spacing, 1.0])
    image.SetOrigin([*fixed.affine[:-1, -1].tolist(), 0.0])
    direction = np.eye(4)
    direction[:3, :3] = fixed.affine[:-1, :-1] / np.array(fixed.spacing)
    image.SetDirection(direction.ravel().tolist())
    _write_whole(path, overwrite, lambda temporary: _sitk().WriteImage(image, str(temporary)))


def read_learn2reg(path: PathLike, grid: Image) -> WorldTransform:
    """The world map of Learn2Reg's displacements in voxels; `grid` is the fixed image, whose header counts."""
    name = Path(path)
    if not is_learn2reg(name):
        raise TransformError(f"{path} is no NIfTI image of shape (x, y, z, 3); expected Learn2Reg's displacements")
    field = _sitk().GetArrayFromImage(_sitk().ReadImage(str(name), _sitk().sitkFloat32)).transpose(3, 2, 1, 0)
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
        header = _header(name)
    except RuntimeError:
        return False
    return bool(header.GetDimension() == 4 and header.GetSize()[3] == 3 and header.GetNumberOfComponents() == 1)


def is_warp(path: PathLike) -> bool:
    """Whether a file is an image with as many numbers per voxel as axes."""
    try:
        header = _header(Path(path))
    except RuntimeError:
        return False
    return bool(header.GetDimension() in (2, 3) and header.GetNumberOfComponents() == header.GetDimension())


def _write_whole(path: PathLike, overwrite: bool, save: Callable[[Path], object]) -> None:
    """Save under a temporary name in the same folder, then rename."""
    path = Path(path)
    if path.exists() and not overwrite:
        raise TransformError(f"{path} exists already; expected a new name: choose another, or allow overwriting")
    ending = ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=ending)
    except OSError as error:
        raise TransformError(
            f"{path} cannot be written: {error.strerror}; expected a folder one may write to"
        ) from error
    os.close(handle)
    try:
        save(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except (RuntimeError, OSError) as error:
        raise TransformError(f"{path} cannot be written: {_reason(error)}; expected .h5, .tfm or .nii.gz") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _hdf5_tree(transform: WorldTransform) -> dict[str, Any]:
    """The groups and datasets of ITK's transform files."""
    dim, field, lattice = transform.dim, transform.displacement, transform.lattice
    spacing = np.linalg.norm(lattice[:-1, :-1], axis=0)
    direction = lattice[:-1, :-1] / spacing
    affine = {
        "TransformType": f"AffineTransform_double_{dim}_{dim}",
        "TransformFixedParameters": np.zeros(dim),
        "TransformParameters": np.concatenate([transform.affine[:-1, :-1].ravel(), transform.affine[:-1, -1]]),
    }
    parts: list[dict[str, Any]] = [
        {"TransformType": f"CompositeTransform_double_{dim}_{dim}"},
        affine,
        {
            "TransformType": f"DisplacementFieldTransform_float_{dim}_{dim}",
            "TransformFixedParameters": np.concatenate(
                [field.shape[:-1], lattice[:-1, -1], spacing, direction.ravel()], dtype=np.float64
            ),
            "TransformParameters": np.ascontiguousarray(_itk_order(field), np.float32).ravel(),
        },
    ]
    numbered = {str(number): part for number, part in enumerate([affine] if transform.is_linear else parts)}
    return {"ITKVersion": "5.4.0", "HDFVersion": "1.8.0", "TransformGroup": numbered}


def _write_hdf5(path: Path, tree: dict[str, Any]) -> None:
    """HDF5 of nested groups, strings and vectors of floats, by its published format: SimpleITK writes float64 only.

    Superblock version 0, object headers version 1, links inside the headers, contiguous data.
    """
    nowhere = b"\xff" * 8
    numbers = {
        4: "11201f00 04000000 0000 2000 17 08 00 17 7f000000",
        8: "11203f00 08000000 0000 4000 34 0b 00 34 ff030000",
    }
    string = bytes.fromhex("19010000 10000000 10000000 01000000 0000 0800")  # of any length, in a heap

    def padded(data: bytes) -> bytes:
        return data + bytes(-len(data) % 8)

    with open(path, "wb") as file:

        def put(data: Any) -> int:
            at = file.tell()
            file.write(data)
            file.write(bytes(-file.tell() % 8))
            return at

        def header(*messages: tuple[int, bytes]) -> int:
            body = b"".join(struct.pack("<HHB3x", kind, len(padded(m)), 0) + padded(m) for kind, m in messages)
            return put(struct.pack("<BxHII4x", 1, len(messages), 1, len(body)) + body)

        def dataset(kind: bytes, sides: tuple[int, ...], data: Any, size: int) -> int:
            space = struct.pack(f"<BBB5x{len(sides)}Q", 1, len(sides), 0, *sides)
            layout = struct.pack("<BBQQ", 3, 1, put(data), size)
            return header((1, space), (3, kind), (5, bytes([2, 2, 2, 0])), (8, layout))

        def node(value: Any) -> int:
            if isinstance(value, str):
                text = value.encode()
                item = struct.pack("<HHIQ", 1, 1, 0, len(text)) + padded(text)
                free = 4096 - 16 - len(item)
                heap = put(
                    struct.pack("<4sB3xQ", b"GCOL", 1, 4096)
                    + item
                    + struct.pack("<HHIQ", 0, 0, 0, free).ljust(free, b"\0")
                )
                return dataset(string, (1,), struct.pack("<IQI", len(text), heap, 1), 16)
            if isinstance(value, np.ndarray):
                little = value.astype(value.dtype.newbyteorder("<"), copy=False)
                return dataset(bytes.fromhex(numbers[value.itemsize]), value.shape, little.data, value.nbytes)
            children = {name.encode(): node(child) for name, child in value.items()}
            links = [(6, struct.pack("<BBB", 1, 0, len(n)) + n + struct.pack("<Q", at)) for n, at in children.items()]
            return header((2, bytes(2) + nowhere + nowhere), (10, bytes(2)), *links)

        file.write(bytes(96))
        root = node(tree)
        end = file.tell()
        file.seek(0)
        file.write(b"\x89HDF\r\n\x1a\n" + struct.pack("<8BHHI", 0, 0, 0, 0, 0, 8, 8, 0, 4, 16, 0))
        file.write(struct.pack("<Q8sQ8sQQ24x", 0, nowhere, end, nowhere, 0, root))


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
        return ItkTransform(_sitk().CompositeTransform(parts[::-1]) if len(parts) > 1 else parts[0])
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
        image = _sitk().DisplacementFieldTransform(fields[0]).GetDisplacementField()
        vectors, lattice = _itk_order(_sitk().GetArrayFromImage(image)), _geometry(image)
    if not np.isfinite(vectors).all() or not np.isfinite(before).all() or not np.isfinite(after).all():
        raise TransformError(f"{paths[0]} holds numbers that are not finite; expected a transform: write it again")
    whole = WorldTransform(after, np.ascontiguousarray(vectors, np.float32), lattice)
    return _after_affine(whole, before)


def _read_parts(path: Path) -> list[Any]:
    """The file's transforms as SimpleITK has them, the one that acts first on a point first."""
    if not path.is_file():
        raise TransformError(f"{path} does not exist or is a folder; expected a transform file: check the path")
    sitk = _sitk()
    try:
        if path.suffix.lower() in TEXT:
            _check_text(path)
        if path.suffix.lower() in HDF5 + TEXT + ALONE:
            return _flatten(sitk.ReadTransform(str(path)))
        if path.name.lower().endswith((".nii", ".nii.gz")):
            _check_nifti(path)
        header = _header(path)
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
            f"{path} cannot be read: {_reason(error)}; expected a whole transform file: copy or write it again"
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
    composite = _sitk().CompositeTransform(transform)
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


def _geometry(image: Any) -> Matrix:
    return _affine(image.GetDimension(), image.GetDirection(), image.GetSpacing(), image.GetOrigin())


def _reason(error: Exception) -> str:
    """The last line of an error without SimpleITK's addresses."""
    last = str(error).strip().splitlines()[-1]
    return re.sub(r"(sitk::|ITK )ERROR: |\w+\(0x[0-9a-f]+\): ", "", last).strip(" .")
