"""Image files and where their voxels lie: reading, writing, orientation, intensities, and the network's grid.

Convention: `data[i, j, k]` is the voxel at ITK's index (i, j, k), x first, as in nibabel; SimpleITK's own arrays have
the opposite axis order. World positions are millimetres in ITK's LPS frame: the first two axes have the opposite sign
of NIfTI's and nibabel's RAS. Unit coordinates are those of `carlreg.grids`.

`read` refuses files that do not hold one scalar image with a sound header and finite values. `preprocess` refuses
images that cannot be registered: thin or constant ones. SimpleITK is imported where it is used.
"""

from __future__ import annotations

import gzip
import itertools
import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from carlreg.errors import OutputError
from carlreg.files.atomic import write_atomically
from carlreg.files.itk import affine_of, place, read_header, reason, simpleitk
from carlreg.geometry.grids import Grid

PathLike = str | os.PathLike[str]
Matrix = npt.NDArray[np.float64]

NIFTI_HEADER = 352
"""Bytes before the voxels of a NIfTI-1 file."""
MOST_VOXELS = 4e9
WITHOUT_POSITION = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
TWO_FILES = (".mhd", ".nhdr", ".hdr", ".img")

log = logging.getLogger(__name__)


class ImageError(ValueError):
    """A file or an array that is not an image we can use. One line: which, what was found, what to do."""


@dataclass(frozen=True, eq=False)
class Image:
    """A scalar 2-D or 3-D image and where it lies.

    >>> image = read("scan.nii.gz")
    >>> corner = map_points(image.unit_to_world(), np.ones(3))  # the last voxel's centre, LPS millimetres
    """

    data: npt.NDArray[Any]  # shape, in the file's own type
    affine: Matrix  # (D + 1, D + 1), from voxel indices in array-axis order to world millimetres, LPS
    name: str = "image"  # what messages call it

    def __post_init__(self) -> None:
        if self.data.ndim not in (2, 3):
            raise ImageError(f"{self.name} has {self.data.ndim} axes {self.data.shape}; expected one 2-D or 3-D image")
        if self.data.dtype.kind not in "iuf":
            raise ImageError(f"{self.name} holds {self.data.dtype} values; expected integers or floating point")
        if self.affine.shape != (self.dim + 1, self.dim + 1) or np.any(self.affine[-1] != np.eye(self.dim + 1)[-1]):
            raise ImageError(
                f"{self.name} has an affine of shape {self.affine.shape}; expected ({self.dim + 1}, {self.dim + 1}) "
                "with a last row of zeros and a one"
            )
        _check_size(self.shape, self.name)
        _check_geometry(self.affine, self.name)

    @property
    def dim(self) -> int:
        return self.data.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def spacing(self) -> tuple[float, ...]:
        """Millimetres between neighbouring voxel centres along each array axis."""
        return tuple(float(length) for length in np.linalg.norm(self.affine[:-1, :-1], axis=0))

    def index_to_world(self) -> Matrix:
        """(D + 1, D + 1): voxel indices to world millimetres (LPS)."""
        return self.affine.copy()

    def unit_to_world(self) -> Matrix:
        """(D + 1, D + 1): unit coordinates (0 and 1 are the first and last voxel centres) to world millimetres."""
        return self.affine @ np.diag([*(1 / s for s in Grid.of(self.shape).spacing), 1.0])

    def world_to_unit(self) -> Matrix:
        """(D + 1, D + 1): world millimetres (LPS) to unit coordinates."""
        return np.asarray(np.linalg.inv(self.unit_to_world()), dtype=np.float64)

    def to_sitk(self) -> Any:
        """The same voxels and positions as a SimpleITK image."""
        return place(simpleitk().GetImageFromArray(np.ascontiguousarray(self.data.T)), self.affine)


def map_points(matrix: npt.NDArray[np.floating[Any]], points: npt.ArrayLike) -> Matrix:
    """Points (..., D) of one space in another, by a matrix (D + 1, D + 1) such as `unit_to_world()`."""
    return np.asarray(points, dtype=np.float64) @ matrix[:-1, :-1].T + matrix[:-1, -1]


# ---- from memory ----------------------------------------------------------------------------------------------------


def from_array(data: npt.ArrayLike, affine: npt.ArrayLike | None = None, *, name: str = "array") -> Image:
    """An image from an array and a matrix from its indices to world millimetres (LPS); without one, 1 mm voxels."""
    array = np.asarray(data)
    if array.dtype == bool or array.dtype == np.float16:  # ITK has neither
        array = array.astype(np.uint8 if array.dtype == bool else np.float32)
    matrix = np.eye(array.ndim + 1) if affine is None else np.array(affine, dtype=np.float64)
    return Image(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")), matrix, name)


def from_sitk(image: Any, *, name: str = "SimpleITK image") -> Image:
    """An image from a SimpleITK one."""
    dim = image.GetDimension()
    _check_kind(dim, image.GetSize(), image.GetNumberOfComponentsPerPixel(), name)
    return Image(np.ascontiguousarray(simpleitk().GetArrayViewFromImage(image).T), affine_of(image), name)


def from_nibabel(image: Any, *, name: str = "nibabel image") -> Image:
    """An image from a nibabel one, whose affine is RAS. Trailing axes of length one are dropped."""
    data = np.asanyarray(image.dataobj)
    while data.ndim > 3 and data.shape[-1] == 1:
        data = data[..., 0]
    axes = [*range(min(data.ndim, 3)), 3]
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.asarray(image.affine, dtype=np.float64)
    return from_array(data, affine[np.ix_(axes, axes)], name=name)


def as_image(source: Any, name: str) -> Image:
    if isinstance(source, Image):
        return source
    if isinstance(source, (str, os.PathLike)):
        return read(source)
    if isinstance(source, np.ndarray):
        return from_array(source, name=name)
    kind = type(source).__module__.partition(".")[0]
    if kind == "torch":
        return from_array(source.detach().cpu().numpy(), name=name)
    if kind == "SimpleITK":
        return from_sitk(source, name=name)
    if kind == "nibabel":
        return from_nibabel(source, name=name)
    raise TypeError(f"{name} is a {type(source).__name__}; expected a path, an Image, an array, SimpleITK or nibabel")


# ---- reading --------------------------------------------------------------------------------------------------------


def read(path: PathLike) -> Image:
    """Read one scalar image: NIfTI, NRRD, MetaImage, PNG, TIFF, JPEG, whatever else SimpleITK reads, or a folder with
    a DICOM series (the largest one, which is logged and is part of the image's name).

    >>> image = read("scan.nii.gz")
    """
    path = Path(path)
    if not path.exists():
        raise ImageError(f"{path} does not exist; expected an image file or a DICOM folder: check the path")
    if not os.access(path, os.R_OK):
        raise ImageError(f"{path} cannot be read: permission denied; expected a readable file: check its permissions")
    if path.is_dir():
        return _read_series(path)
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is empty; expected an image: copy or export it again")
    _check_header(path)
    _check_complete(path)
    image = from_sitk(_run(path, lambda: simpleitk().ReadImage(str(path))), name=str(path))
    _check_finite(image.data, image.name)
    return image


def read_labels(path: PathLike) -> Image:
    """Read a label map. Integers keep their type; whole numbers stored as floating point become int32."""
    return as_labels(read(path))


def as_labels(image: Image) -> Image:
    """The same image as a label map: whole numbers stored as floating point become int32."""
    if image.data.dtype.kind != "f":
        return image
    if not np.all((np.abs(image.data) < 2**31) & (image.data == np.rint(image.data))):
        raise ImageError(f"{image.name} holds values that are not whole numbers; expected a label map: is it an image?")
    return Image(image.data.astype(np.int32), image.affine, image.name)


def _read_series(folder: Path) -> Image:
    sitk = simpleitk()
    names = sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(folder))
    if not names:
        raise ImageError(
            f"{folder} is a folder without a DICOM series; expected DICOM slices: check the folder, or give a file"
        )
    files = {name: sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder), name) for name in names}
    series = max(sorted(names), key=lambda name: len(files[name]))
    name = f"{folder} (DICOM series {series}, {len(files[series])} files)"
    level = logging.WARNING if len(names) > 1 else logging.INFO
    log.log(level, "%s: read the largest of %d series", name, len(names))
    _check_header(Path(files[series][0]), slices=len(files[series]))
    if len(files[series]) == 1:
        return from_sitk(_run(folder, lambda: simpleitk().ReadImage(files[series][0])), name=name)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(files[series])
    reader.MetaDataDictionaryArrayUpdateOn()
    image = from_sitk(_run(folder, lambda: reader.Execute()), name=name)
    if image.dim == 3 and all(reader.HasMetaDataKey(i, "0020|0032") for i in range(image.shape[2])):
        # ITK assumes even slices at right angles; a missing slice or a tilted gantry would be misplaced silently.
        stated = [[float(x) for x in reader.GetMetaData(i, "0020|0032").split("\\")] for i in range(image.shape[2])]
        assumed = map_points(image.affine, [[0, 0, i] for i in range(image.shape[2])])
        error = float(np.linalg.norm(assumed - stated, axis=1).max())
        if error > 0.1 * image.spacing[2]:
            raise ImageError(
                f"{name} has slices up to {error:.3g} mm away from even steps of {image.spacing[2]:.3g} mm; expected "
                "every slice once and no gantry tilt: convert it to NIfTI with a tool that resamples"
            )
    return image


def _run(path: Path, action: Callable[[], Any], verb: str = "read") -> Any:
    """Do something with SimpleITK, whose errors are pages long and name its source files."""
    try:
        return action()
    except RuntimeError as error:
        why = reason(error)
        expected = "a whole image file: copy or export it again" if verb == "read" else "another format, .nii.gz say"
        if "ImageIO" in why:
            why = "not an image of a format that SimpleITK knows"
            if path.suffix.lower() == ".gif":
                why, expected = "SimpleITK does not know GIF", "PNG, say: convert it"
        elif "orthonormal" in why:
            why = "the directions in its header are singular or not at right angles"
            expected = "axes at right angles: correct its header, or resample it"
        elif "Reason:" in why:  # MetaImage blames the operating system
            why = "its voxels are missing or end too early"
        raise ImageError(f"{path} cannot be {verb}: {why}; expected {expected}") from error


def _check_header(path: Path, slices: int = 1) -> None:
    """Refuse what the header already shows to be unusable, before memory is taken for voxels."""
    if path.name.lower().endswith((".nii", ".nii.gz")):
        _check_nifti(path)
    reader = _run(path, lambda: read_header(path))
    dim, size = reader.GetDimension(), tuple(reader.GetSize())
    _check_kind(dim, size, reader.GetNumberOfComponents(), str(path))
    _check_size(size if slices == 1 else (*size[:2], slices), str(path))
    _check_spacing(reader.GetSpacing(), str(path))
    _check_geometry(affine_of(reader), str(path))


def _check_nifti(path: Path) -> None:
    """ITK makes bad spacings 1, and NaN and what a cut-off file lacks 0, without a word: look for ourselves."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        with cast("IO[bytes]", gzip.open(path) if packed else open(path, "rb")) as file:
            head = file.read(352)
            length = {int.from_bytes(head[:4], "little"): "<", int.from_bytes(head[:4], "big"): ">"}
            if 540 in length:
                raise ImageError(f"{path} is NIfTI-2, which SimpleITK does not read; expected NIfTI-1: convert it")
            if len(head) < 352 or 348 not in length:
                return  # no NIfTI header: ITK says so
            order = length[348]
            axes, *sides = struct.unpack_from(order + "8h", head, 40)
            kind, bits, _, _, *spacing, offset = struct.unpack_from(order + "3h8f1f", head, 70)
            if not 1 <= axes <= 7:
                return
            _check_size(sides[:axes], str(path))
            _check_spacing(spacing[: min(axes, 3)], str(path))
            count = math.prod(sides[:axes])
            expected = int(offset) + count * bits // 8
            content = head + file.read(max(expected - len(head), 0))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ImageError(f"{path} is truncated or damaged ({error}); expected a whole file: copy it again") from error
    if len(content) < expected:
        raise ImageError(
            f"{path} is truncated: it holds {len(content)} bytes; expected {expected} by its header: copy it again"
        )
    if kind in (16, 64):  # float32 and float64
        _check_finite(np.frombuffer(content, f"{order}f{bits // 8}", count, int(offset)), str(path))


def _check_complete(path: Path) -> None:
    """JPEG's reader fills what a cut-off file lacks with grey."""
    if path.suffix.lower() in (".jpg", ".jpeg"):
        content = path.read_bytes()
        if content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda"):  # no end after the last scan's start
            raise ImageError(f"{path} is truncated: it has no end marker; expected a whole JPEG: copy it again")


def _check_kind(dim: int, size: Sequence[int], components: int, name: str) -> None:
    if dim not in (2, 3):
        raise ImageError(
            f"{name} is {dim}-D ({_times(size)}); expected one 2-D or 3-D image: extract one time point or channel"
        )
    if components != 1:
        raise ImageError(
            f"{name} has {components} components per voxel (colour, vectors or complex numbers); expected one: "
            "convert it to grey values or choose a component"
        )


def _check_size(size: Iterable[int], name: str) -> None:
    size = tuple(size)
    if min(size) < 1:
        raise ImageError(f"{name} declares {_times(size)} voxels; expected at least one along every axis")
    count = math.prod(size)
    try:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # not on every platform
        memory = math.inf
    if count > MOST_VOXELS or 4 * count > memory:
        most = min(MOST_VOXELS, memory / 4)
        raise ImageError(
            f"{name} declares {_times(size)} voxels, {4 * count / 1e9:.3g} GB as float32; expected at most "
            f"{most:.2g} voxels in this memory: check the header, or resample it"
        )


def _check_spacing(spacing: Sequence[float], name: str) -> None:
    if not all(math.isfinite(s) and s > 0 for s in spacing):
        numbers = " × ".join(f"{s:g}" for s in spacing)
        raise ImageError(f"{name} declares a spacing of {numbers} mm; expected positive numbers: correct its header")


def _check_finite(data: npt.NDArray[Any], name: str) -> None:
    bad = data.size - int(np.isfinite(data).sum())
    if bad:
        raise ImageError(
            f"{name} has {bad} NaN or infinite voxels out of {data.size}; expected none: replace them by 0"
        )


def _check_geometry(affine: Matrix, name: str) -> None:
    """Refuse positions that are not finite and axes that lie in a plane."""
    if not np.isfinite(affine).all():
        raise ImageError(f"{name} has a direction or origin that is not finite; expected numbers: correct its header")
    lengths = np.linalg.norm(affine[:-1, :-1], axis=0)
    _check_spacing(lengths.tolist(), name)
    if abs(np.linalg.det(affine[:-1, :-1] / lengths)) < 1e-3:
        raise ImageError(
            f"{name} has a singular direction matrix; expected axes that point different ways: correct its header"
        )


def _times(size: Iterable[int]) -> str:
    return " × ".join(str(n) for n in size)


# ---- writing --------------------------------------------------------------------------------------------------------


def write(image: Image, path: PathLike, *, overwrite: bool = False) -> None:
    """Write an image in the format of the name's extension, in its own type. The file appears whole or not at all.

    A format that cannot store the image's type, its third axis or its directions is refused. PNG, TIFF, JPEG and BMP
    have no positions: those are lost.

    >>> write(image, "warped.nii.gz")
    """
    path = Path(path)
    ending = path.suffix.lower()
    if not ending or ending in TWO_FILES:
        reason = f"{ending} takes two files" if ending else "its name has no extension"
        raise ImageError(f"{path} cannot be written: {reason}; expected one file, such as .nii.gz")
    source = image.to_sitk()

    def save(temporary: Path) -> None:
        write_sitk(source, temporary)
        _check_stored(image, source.GetPixelID(), temporary)

    write_atomically(path, save, overwrite=overwrite)


def write_sitk(source: Any, path: Path) -> None:
    """Write a SimpleITK image and check that all of it is in the file: SimpleITK does not report a full disk."""
    _run(path, lambda: simpleitk().WriteImage(source, str(path), path.suffix.lower() in (".nrrd", ".mha")), "written")
    array = simpleitk().GetArrayViewFromImage(source)
    if path.name.lower().endswith((".nii", ".nii.gz")):
        whole = _count_bytes(path) == NIFTI_HEADER + array.nbytes
    elif path.suffix.lower() == ".nrrd":
        whole = _count_bytes(path, header=True) == array.nbytes
    else:
        stored = _run(path, lambda: simpleitk().ReadImage(str(path)), "written")
        lossy = path.suffix.lower() in (".jpg", ".jpeg") or stored.GetSize() != source.GetSize()  # `write` checks that
        whole = lossy or np.array_equal(simpleitk().GetArrayViewFromImage(stored), array, equal_nan=True)
    if not whole:
        raise OutputError(f"{path} was not written completely; check the disk, then try again")


def _count_bytes(path: Path, *, header: bool = False) -> int:
    """The uncompressed length of a file, without the text header that NRRD begins with; 0 if it is damaged."""
    with open(path, "rb") as file:
        while header and file.readline().strip():
            pass
        compressed = file.peek(2)[:2] == b"\x1f\x8b"
        try:
            with cast("IO[bytes]", gzip.GzipFile(fileobj=file) if compressed else file) as stream:
                return sum(len(block) for block in iter(lambda: stream.read(2**20), b""))
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return 0


def _check_stored(image: Image, pixel_type: int, path: Path) -> None:
    """Read the header back: formats drop without a warning what they cannot store."""
    header = _run(path, lambda: read_header(path), "written")
    lost = []
    if header.GetPixelID() != pixel_type:
        lost.append(f"values of type {image.data.dtype}")
    if tuple(header.GetSize()) != image.shape:
        lost.append(f"a size of {_times(image.shape)}")
    elif path.suffix.lower() not in WITHOUT_POSITION:
        shift = largest_shift(affine_of(header), image)
        if shift > 0.01 * min(image.spacing):
            lost.append(f"these directions (voxels would move by {shift:.3g} mm)")
    if lost:
        raise ImageError(f"{path} was not written: its format cannot hold {' or '.join(lost)}; choose another format")


def largest_shift(affine: Matrix, image: Image) -> float:
    """How far apart, in millimetres, another affine puts the image's voxels at most."""
    corners = np.array(list(itertools.product(*((0, n - 1) for n in image.shape))))
    return float(np.abs(map_points(affine, corners) - map_points(image.affine, corners)).max())


def looks_like_labels(image: Image) -> bool:
    """Whether an image may be a label map: whole numbers, and neighbours that are mostly the same."""
    data = image.data
    if data.dtype.kind == "f" and not np.array_equal(data, np.rint(data)):
        return False
    same, inner = data[1:] == data[:-1], (data[1:] != 0) & (data[:-1] != 0)
    return bool(inner.any() and same.mean() > 0.9 and same[inner].mean() > 0.6)


def check_same_grid(other: Image, image: Image, what: str) -> None:
    """Refuse a mask or a label map whose voxels are not the image's, to a tenth of a voxel."""
    if other.shape != image.shape:
        raise ImageError(
            f"{other.name} has {_times(other.shape)} voxels but {image.name} has {_times(image.shape)}; expected "
            f"{what} on the image's own grid: resample it"
        )
    shift = largest_shift(other.affine, image)
    if shift > 0.1 * min(image.spacing):
        raise ImageError(
            f"{other.name} lies up to {shift:.3g} mm away from {image.name}; expected {what} on the image's own grid: "
            "resample it"
        )
