"""Transform files of ITK, SimpleITK, ANTs, 3D Slicer and Learn2Reg: reading and writing.

SimpleITK is imported where it is used.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.errors import DependencyError, InputError, OutputError
from carlreg.files import isolated, nifti, nifti_write
from carlreg.files.atomic import write_atomically
from carlreg.files.checks import ImageError, check_geometry, check_size
from carlreg.files.compression import LEVEL, in_threads
from carlreg.files.images import Image, Matrix, PathLike, write_sitk
from carlreg.files.itk import itk_order, read_header, reason, simpleitk, vector_image
from carlreg.files.world_transform import (
    ItkTransform,
    PointMap,
    TransformError,
    WorldTransform,
    compose_exactly,
    displacements,
    learn2reg,
)

# ---- writing --------------------------------------------------------------------------------------------------------

HDF5 = (".h5", ".hdf5")
TEXT = (".tfm", ".txt")
ALONE = (".mat", ".xfm")  # single affine maps; the second is only read
CHUNK = 2**18  # numbers of a file that are compressed together


def write(
    transform: WorldTransform | ItkTransform, path: PathLike, *, within: float = 0, overwrite: bool = False
) -> None:
    """Write a composite of ITK's AffineTransform and DisplacementFieldTransform, which ITK applies in T's order: the
    displacement, then the affine map. The file appears whole or not at all.

    `.h5` holds the displacements as float32, half of what SimpleITK itself would write; a third of that if they are
    rounded, so that no point is mapped more than `within` mm away, and compressed. `.tfm` is text: for small ones.
    `.mat` is what ANTs writes for affine maps, and holds nothing else.

    >>> write(T, "transform.h5", within=0.01)
    """
    ending = Path(path).suffix.lower()
    if ending == ".mat" and not (isinstance(transform, WorldTransform) and transform.is_linear):
        raise TransformError(f"{path} can hold an affine map only; expected .h5 or .tfm, or the affine part alone")
    if ending not in (*HDF5, *TEXT, ".mat"):
        raise TransformError(f"{path} has the extension {ending!r}; expected .h5, .tfm or .mat for a transform")
    if isinstance(transform, ItkTransform):
        content: bytes | Callable[[Path], object] = partial(_write_itk, transform.to_sitk())
    elif ending in HDF5:
        content = partial(_write_hdf5, _parts(rounded(transform, within) if within else transform), packed=within > 0)
    else:
        content = _matlab(_parts(transform)[0]) if ending == ".mat" else _text(_parts(transform))
    write_atomically(path, content, overwrite=overwrite)


def rounded(transform: WorldTransform, within: float) -> WorldTransform:
    """The same map to `within` mm, with displacements that are multiples of a power of two, which compress well."""
    largest = 2 * within / np.sqrt(transform.dim) / np.linalg.norm(transform.affine[:-1, :-1], 2)
    step = np.float32(2.0 ** math.floor(math.log2(largest)))
    return replace(transform, displacement=np.rint(transform.displacement / step) * step)


def write_warp(transform: PointMap, grid: Image, path: PathLike, *, overwrite: bool = False) -> None:
    """Write T(x) − x on the voxels of `grid`, an image in the fixed image's world, as ANTs does: millimetres, LPS,
    float32; in NIfTI, five axes and the intent code of vectors. The file appears whole or not at all.

    >>> write_warp(T, fixed, "warp.nii.gz")
    """
    stored = np.empty((grid.dim, *grid.shape[::-1]), np.float32)  # as NIfTI has them: one component after the other
    field = stored.transpose(*range(grid.dim, 0, -1), 0)
    for box, shift in displacements(transform, grid):
        field[box] = shift

    def save(temporary: Path) -> None:
        with _as_transform_error(temporary):
            if nifti.is_nifti(temporary):
                return nifti_write.write(field, grid.affine, temporary, axis=5)
            write_sitk(vector_image(field, grid.affine), temporary)
        header = read_header(temporary)
        if header.GetSize() != grid.shape or header.GetNumberOfComponents() != grid.dim:
            raise TransformError(f"{path} was not written: its format cannot hold vectors; expected .nii.gz or .mha")

    write_atomically(path, save, overwrite=overwrite)


def write_learn2reg(
    transform: PointMap, fixed: Image, moving: Image, path: PathLike, *, overwrite: bool = False
) -> None:
    """Write `learn2reg`'s displacements as its evaluation reads them: NIfTI of four axes (x, y, z, 3), float32, with
    the fixed image's header. The file appears whole or not at all.

    >>> write_learn2reg(T, fixed, moving, "disp_0001_0002.nii.gz")
    """
    if fixed.dim != 3 or not nifti.is_nifti(Path(path)):
        raise TransformError(f"{path}: Learn2Reg's displacements are 3-D and in NIfTI; expected disp_0001_0002.nii.gz")
    save = partial(nifti_write.write, learn2reg(transform, fixed, moving), fixed.affine, axis=4)
    write_atomically(path, save, overwrite=overwrite)


@dataclass(frozen=True, eq=False)
class _Part:
    """One transform of an ITK file: its type and two vectors of numbers, which are empty for a composite."""

    kind: str
    parameters: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))
    fixed: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))

    @property
    def name(self) -> str:
        """The type without its precision and dimension: AffineTransform_double_3_3 is an AffineTransform."""
        return self.kind.partition("_")[0]


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


class _File(io.FileIO):
    """A file for HDF5, which crashes if a write fails: the first error is kept, and what follows is not written."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        try:
            while rest and self.error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            super().truncate(size)
        except OSError as error:
            self.error = self.error or error
        return size or 0


def _write_hdf5(parts: Sequence[_Part], path: Path, packed: bool) -> None:
    """ITK's HDF5 file, with the displacements as float32: SimpleITK writes float64 only."""
    try:
        import h5py
    except ImportError as error:
        raise DependencyError("transform files (.h5) need h5py: pip install h5py") from error
    text = h5py.string_dtype("ascii")  # ITK does not read UTF-8
    with _File(path, "w+") as stream:
        with h5py.File(stream, "w") as file:
            for name, version in (("ITKVersion", "5.4.0"), ("HDFVersion", "1.8.0")):
                file.create_dataset(name, data=[version], dtype=text)
            for number, part in enumerate(parts):
                group = file.create_group(f"TransformGroup/{number}")
                group.create_dataset("TransformType", data=[part.kind], dtype=text)
                if not part.parameters.size:
                    continue
                group["TransformFixedParameters"] = part.fixed
                if packed and part.parameters.dtype == np.float32:
                    _write_packed(group, part.parameters)
                else:
                    group["TransformParameters"] = part.parameters
        if stream.error is not None:
            raise stream.error


def _write_packed(group: Any, numbers: npt.NDArray[np.float32]) -> None:
    """HDF5's shuffle and deflate filters, by several threads: the first bytes of all numbers of a chunk, the second…"""
    size = min(CHUNK, len(numbers))
    options = {"chunks": (size,), "shuffle": True, "compression": "gzip", "compression_opts": LEVEL}
    dataset = group.create_dataset("TransformParameters", numbers.shape, np.float32, **options)

    def pack(start: int) -> bytes:
        chunk = np.zeros(size, "<f4")
        part = numbers[start : start + size]
        chunk[: len(part)] = part
        return zlib.compress(np.ascontiguousarray(chunk.view(np.uint8).reshape(-1, 4).T).data, LEVEL)

    starts = range(0, len(numbers), size)
    for start, content in zip(starts, in_threads(pack, starts), strict=True):
        dataset.id.write_direct_chunk((start,), content)


def _text(parts: Sequence[_Part]) -> bytes:
    """ITK's text file. It reads displacements of the type double only."""
    lines = ["#Insight Transform File V1.0"]
    for number, part in enumerate(parts):
        lines += [f"#Transform {number}", f"Transform: {part.kind.replace('_float_', '_double_')}"]
        if part.parameters.size:
            for name, numbers in (("Parameters", part.parameters), ("FixedParameters", part.fixed)):
                lines.append(f"{name}: {' '.join(map(repr, numbers.tolist()))}")
    return ("\n".join(lines) + "\n").encode()


def _matlab(part: _Part) -> bytes:
    """A file of MATLAB 4, as ITK and ANTs write for one transform: two vectors of doubles with their names."""

    def vector(name: str, numbers: npt.NDArray[Any]) -> bytes:
        text, values = name.encode() + b"\0", numbers.astype("<f8")
        return struct.pack("<5i", 0, len(values), 1, 0, len(text)) + text + values.tobytes()

    return vector(part.kind, part.parameters) + vector("fixed", part.fixed)


def _write_itk(transform: Any, path: Path) -> None:
    """Write any ITK transform. SimpleITK does not report a full disk when it writes text."""
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
    """Read a transform file of ITK (.h5, .tfm, .txt, .mat, .xfm) or an image of displacements in mm, LPS (ANTs'
    Warp.nii.gz), or several in ANTs' order, in which the first acts on a point first.

    Linear maps of any kind and at most one displacement field become a WorldTransform, exactly. Everything else is left
    to SimpleITK, as an ItkTransform.

    >>> T = read(["1Warp.nii.gz", "0GenericAffine.mat"])
    """
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(one) for one in path]
    if not paths:
        raise TransformError("no transform file was given; expected at least one")
    parts = [part for one in paths for part in _read_parts(one)]  # in the order in which they act on a point
    if len({part.dim for part in parts}) != 1:
        raise TransformError(f"{paths[0]} and the files after it hold 2-D and 3-D transforms; expected one dimension")
    whole: WorldTransform | ItkTransform = parts[0]
    for part in parts[1:]:
        both = compose_exactly(part, whole)
        if both is None:
            return ItkTransform(simpleitk().CompositeTransform([one.to_sitk() for one in reversed(parts)]))
        whole = both
    return whole


def read_learn2reg(path: PathLike, grid: Image) -> WorldTransform:
    """The world map of Learn2Reg's displacements in voxels; `grid` is the fixed image, whose positions count."""
    name = Path(path)
    if not is_learn2reg(name):
        raise TransformError(f"{path} is not a NIfTI image of shape (x, y, z, 3); expected Learn2Reg's displacements")
    with _as_transform_error(name):
        field = nifti.read_voxels(name, nifti.read_header(name)).astype(np.float32, copy=False)
    if field.shape[:-1] != grid.shape:
        raise TransformError(
            f"{path} is for {field.shape[:-1]} voxels but {grid.name} has {grid.shape}; expected the same grid"
        )
    displacement = np.ascontiguousarray(field @ grid.affine[:-1, :-1].T, np.float32)
    return WorldTransform(np.eye(4), displacement, grid.index_to_world())


def is_learn2reg(path: PathLike) -> bool:
    """Whether a file looks like Learn2Reg's displacements: NIfTI, four axes, the last of length three."""
    name = Path(path)
    if not name.is_file() or not nifti.is_nifti(name):
        return False
    header = nifti.read_header(name)
    return header.dim == 4 and header.shape[3] == 3 and header.components == 1


def is_warp(path: PathLike) -> bool:
    """Whether a file is an image with as many numbers per voxel as axes."""
    name = Path(path)
    if nifti.is_nifti(name):
        header = nifti.read_header(name)
        return header.dim in (2, 3) and header.components == header.dim
    if name.suffix.lower() not in (".nrrd", ".nhdr", ".mha", ".mhd", ".vtk"):  # others hold no vectors
        return False
    try:
        with isolated.reading("image", name) as child:
            about = child.header()
    except InputError:  # not an image at all: reading it gives the reason
        return False
    return bool(about["components"] == len(about["size"]))


def _read_parts(path: Path) -> Sequence[WorldTransform | ItkTransform]:
    """The transforms of a file, the one that acts first on a point first."""
    if not path.is_file():
        wanted = "a transform file or a result folder of `carl register`"
        problem = "is a folder without a result" if path.is_dir() else "does not exist"
        raise TransformError(f"{path} {problem}; expected {wanted}: check the path")
    ending = path.suffix.lower()
    with _as_transform_error(path):
        if ending not in HDF5 + TEXT + ALONE:
            return [_read_warp(path)]
        parts = _read_text(path) if ending in TEXT else None
        if parts is None or any(part.name not in isolated.DIRECT for part in parts):
            parts = _read_isolated(path)
        composite = parts[0].name == "CompositeTransform"
        parts = [part for part in parts if part.name != "CompositeTransform"]
        if len(parts) > 1 and not composite:
            raise TransformError(
                f"{path} holds {len(parts)} transforms that are not one composite; expected one file each"
            )
        return [_built(part) for part in reversed(parts)]


@contextmanager
def _as_transform_error(path: Path) -> Iterator[None]:
    try:
        yield
    except isolated.UnreadableError as error:
        raise TransformError(
            f"{path} cannot be read: {error}; expected a whole transform file: copy or write it again"
        ) from error
    except ImageError as error:
        raise TransformError(str(error)) from error


def _read_warp(path: Path) -> WorldTransform:
    """An image of displacements."""

    def check(dim: int, components: int) -> None:
        if dim not in (2, 3) or components != dim:
            raise TransformError(
                f"{path} is an image with {dim} axes and {components} numbers per voxel; expected a transform, or "
                "displacements with as many numbers as axes"
            )

    if nifti.is_nifti(path):
        header = nifti.read_header(path)
        check(header.dim, header.components)
        return _field(nifti.read_voxels(path, header), header.affine(), str(path))
    lattice, vectors = isolated.read_image(path, lambda header: check(len(header["size"]), header["components"]))
    return _field(itk_order(vectors), lattice, str(path))


def _field(vectors: npt.NDArray[Any], lattice: Matrix, name: str) -> WorldTransform:
    check_geometry(lattice, name)
    if not np.isfinite(vectors).all():
        raise isolated.UnreadableError("it holds numbers that are not finite")
    return WorldTransform(np.eye(len(lattice)), vectors.astype(np.float32, copy=False), lattice)


def _read_text(path: Path) -> list[_Part]:
    """ITK's text files, whole: ITK itself reads those that were cut off without a warning."""
    parts = []
    for block in re.split(r"(?m)^Transform:", path.read_text(errors="replace"))[1:]:
        kind, *lines = (line.strip() for line in block.strip().splitlines() or [""])
        words = {name: numbers.split() for name, _, numbers in (line.partition(":") for line in lines)}
        if kind.startswith("CompositeTransform"):
            parts.append(_Part(kind))
            continue
        try:
            vectors = [np.fromiter(map(float, words[name]), np.float64) for name in ("Parameters", "FixedParameters")]
            _shape_of(kind, vectors[1], len(vectors[0]))
        except (KeyError, ValueError) as error:
            raise TransformError(f"{path} is truncated in its {kind}; expected a whole file: copy it again") from error
        parts.append(_Part(kind, *vectors))
    if not parts:
        raise isolated.UnreadableError("it holds no transform")
    return parts


def _read_isolated(path: Path) -> list[_Part]:
    """HDF5, MATLAB and MINC files, and types of transforms that only ITK knows."""
    with isolated.reading("transform", path) as child:
        headers = child.header()["parts"]
        for part in headers:
            check_size((max(part["count"], 1),), str(path), part["width"])
            _shape_of(part["kind"], np.array(part["fixed"]), part["count"])
        child.proceed(sum(part["count"] * part["width"] for part in headers))
        return [_Part(part["kind"], child.array(), np.array(part["fixed"])) for part in headers]


def _shape_of(kind: str, fixed: npt.NDArray[Any], count: int) -> tuple[int, ...]:
    """The sides of the lattice of a field or a B-spline, and the axes; refuse other counts than these call for."""
    name, dim, _ = _split(kind)
    if name not in isolated.DIRECT or name == "CompositeTransform":
        return ()
    linear = name in isolated.LINEAR
    whole = len(fixed) == (dim if linear else dim * (dim + 3)) and bool(np.isfinite(fixed).all())
    shape = (dim + 1, dim) if linear else (*(int(side) for side in fixed[:dim]), dim) if whole else ()
    if not whole or min(shape) < 1 or math.prod(shape) != count:
        raise isolated.UnreadableError(f"its {kind} has {count} parameters and {len(fixed)} fixed ones: no match")
    return shape


def _split(kind: str) -> tuple[str, int, int]:
    """Name, dimension and, for a B-spline, order: BSplineTransform_double_3_3_2, where an order of 3 is left out."""
    match = re.fullmatch(r"(\w+?)(?:_(?:double|float)_([23])_\2(?:_([0-3]))?)?", kind)
    if match is None or (match[1] != "CompositeTransform" and match[2] is None):
        raise isolated.UnreadableError(f"it holds a transform of type {kind!r}")
    return match[1], int(match[2] or 0), int(match[3] or 3)


def _built(part: _Part) -> WorldTransform | ItkTransform:
    """A part of a type in `isolated.DIRECT`."""
    parameters, fixed, (name, dim, order) = part.parameters, part.fixed, _split(part.kind)
    shape = _shape_of(part.kind, fixed, len(parameters))
    if not np.isfinite(parameters).all():
        raise isolated.UnreadableError("it holds numbers that are not finite")
    matrix = np.eye(dim + 1)
    if name in isolated.LINEAR:
        matrix[:-1, :-1] = parameters[:-dim].reshape(dim, dim)
        matrix[:-1, -1] = parameters[-dim:] + fixed - matrix[:-1, :-1] @ fixed  # the fixed ones are the centre
        return WorldTransform(matrix, np.zeros((*(1,) * dim, dim), np.float32), np.eye(dim + 1))
    matrix[:-1, :-1] = fixed[3 * dim :].reshape(dim, dim) * fixed[2 * dim : 3 * dim]
    matrix[:-1, -1] = fixed[dim : 2 * dim]
    if name == "DisplacementFieldTransform":
        return _field(itk_order(parameters.reshape(*shape[-2::-1], dim)), matrix, f"its {part.kind}")
    check_geometry(matrix, f"its {part.kind}")
    if min(shape[:-1]) <= order:
        raise isolated.UnreadableError(
            f"its B-spline has {shape[:-1]} points; expected more than {order} along each axis"
        )
    spline = simpleitk().BSplineTransform(dim, order)
    spline.SetFixedParameters(fixed.tolist())
    spline.SetParameters(parameters.tolist())
    return ItkTransform(spline)
