"""Images and the positions of their voxels: from arrays, from other libraries' images, from files and to files.

Convention: `data[i, j, k]` is the voxel at ITK's index (i, j, k), x first, as in nibabel; SimpleITK's own arrays have
the opposite axis order. World positions are millimetres in ITK's LPS frame: the first two axes have the opposite sign
of NIfTI's and nibabel's RAS. Unit coordinates are those of `carlreg.geometry.grids`.

`read` refuses files that do not hold one scalar image with a valid header and finite values. NIfTI is read here; other
formats are read by SimpleITK in a process of its own, so that a damaged or hostile file cannot crash this one.
"""

import importlib
import logging
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.errors import DependencyError, InputError, OutputError
from carlreg.files import dicom, isolated, nifti, nifti_write
from carlreg.files.atomic import PathLike as PathLike
from carlreg.files.atomic import write_atomically
from carlreg.files.checks import ImageError as ImageError
from carlreg.files.checks import Matrix as Matrix
from carlreg.files.checks import check_geometry, check_size, check_spacing, distance, times
from carlreg.files.choice import Choice as Choice
from carlreg.files.choice import is_picture
from carlreg.files.itk import affine_of, itk_order, place, read_header, reason, simpleitk, vector_image
from carlreg.geometry.grids import Grid

TWO_FILES = (".mhd", ".nhdr", ".hdr", ".img")

WHOLE = Choice()

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Image:
    """A scalar 2-D or 3-D image and where it lies.

    >>> image = read("scan.nii.gz")
    >>> corner = map_points(image.unit_to_world(), np.ones(3))  # the last voxel's centre, LPS millimetres
    """

    data: npt.NDArray[Any]  # shape, in the file's own type
    affine: Matrix  # (D + 1, D + 1), from voxel indices in array-axis order to world millimetres, LPS
    name: str = "image"  # what messages call it
    colours: npt.NDArray[Any] | None = None  # (*shape, components), in colour images, whose data is the luminance

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
        check_size(self.shape, self.name)
        check_geometry(self.affine, self.name)

    def __repr__(self) -> str:
        spacing = " × ".join(f"{mm:.3g}" for mm in self.spacing)
        corner = ", ".join(f"{mm:.6g}" for mm in self.affine[:-1, -1])
        what = f"{times(self.shape)} voxels of {spacing} mm, {self.data.dtype}"
        return f"Image {self.name!r}: {what}, first voxel at {corner} (LPS mm)"

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

    def to_nibabel(self) -> Any:
        """The same voxels and positions as a nibabel image, whose affine is in RAS. A 2-D image gets a third axis."""
        nibabel = _optional("nibabel")
        affine = np.eye(4)
        kept = [*range(self.dim), 3]
        affine[np.ix_(kept, kept)] = self.affine
        data = self.data if self.dim == 3 else self.data[..., None]
        known = data.astype(np.int32) if data.dtype == np.int64 and np.abs(data).max(initial=0) < 2**31 else data
        image = nibabel.Nifti1Image(known, np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine, dtype=known.dtype)
        image.header.set_xyzt_units("mm")
        return image

    def to_ants(self) -> Any:
        """The same voxels and positions as an image of ANTsPy, which keeps bytes, uint32 and float32 only."""
        direction = self.affine[:-1, :-1] / np.array(self.spacing)
        places = {"origin": self.affine[:-1, -1].tolist(), "spacing": list(self.spacing), "direction": direction}
        low, high = self.data.min(), self.data.max()
        wraps = self.data.dtype.kind in "iu" and (low < 0 or high >= 2**32)  # as ANTsPy would do with −1000 HU
        data = self.data.astype(np.float32) if wraps else np.ascontiguousarray(self.data)
        return _optional("ants", "antspyx").from_numpy(data, **places)

    def to_numpy(self) -> npt.NDArray[Any]:
        """The voxels, axes in the order x, y, z of their indices."""
        return self.data


def _optional(module: str, package: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(f"{package or module} is not installed; pip install {package or module}") from error


def map_points(matrix: npt.NDArray[np.floating[Any]], points: npt.ArrayLike) -> Matrix:
    """Points (..., D) of one space in another, by a matrix (D + 1, D + 1) such as `unit_to_world()`."""
    return np.asarray(points, dtype=np.float64) @ matrix[:-1, :-1].T + matrix[:-1, -1]


def count_outside(image: Image, points: Matrix) -> int:
    """How many world points (N, D) lie more than a voxel beyond the outermost voxel centres of an image."""
    index = map_points(np.linalg.inv(image.affine), points)
    return int(((index < -1) | (index > np.array(image.shape))).any(axis=-1).sum())


def from_array(data: npt.ArrayLike, affine: npt.ArrayLike | None = None, *, name: str = "array") -> Image:
    """An image from an array and a matrix from its indices to world millimetres (LPS); without one, 1 mm voxels."""
    array = np.asarray(data)
    if array.dtype == bool or array.dtype == np.float16:  # ITK has neither
        array = array.astype(np.uint8 if array.dtype == bool else np.float32)
    matrix = np.eye(array.ndim + 1) if affine is None else np.array(affine, dtype=np.float64)
    return Image(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")), matrix, name)


def placed(source: Any, spacing: Any, affine: Any, space: str, name: str) -> Image:
    """An array or tensor with the size of its voxels in mm, or a matrix from indices to `space`, "LPS" or "RAS"."""
    has_positions = isinstance(source, Image) or hasattr(source, "affine") or hasattr(source, "spacing")
    if isinstance(source, (str, os.PathLike)) or has_positions or not hasattr(source, "shape"):
        kind = type(source).__name__
        raise InputError(
            f"spacing or affine was given, but {name} is a {kind}; expected an array, which has no positions"
        )
    if spacing is not None and affine is not None:
        raise InputError("spacing and affine were both given; expected one of them")
    if space not in ("LPS", "RAS"):
        raise InputError(f"unknown space {space!r}; expected 'LPS' or 'RAS'")
    array = as_image(source, name).data
    if affine is None:
        sides = _numbers(spacing, "spacing", name)
        if sides.shape not in ((), (1,), (array.ndim,)) or not (sides > 0).all():
            raise InputError(f"the spacing of {name} is {spacing!r}; expected {array.ndim} positive numbers, in mm")
        matrix = np.diag([*np.broadcast_to(sides, array.ndim), 1.0])
    else:
        matrix = _numbers(affine, "affine", name)
        if matrix.shape != (array.ndim + 1, array.ndim + 1):
            expected = f"({array.ndim + 1}, {array.ndim + 1})"
            raise InputError(f"the affine of {name} has shape {matrix.shape}; expected {expected}")
    flip = [-1.0, -1.0, *[1.0] * (array.ndim - 1)] if space == "RAS" and affine is not None else [1.0] * len(matrix)
    return from_array(array, np.diag(flip) @ matrix, name=name)


def _numbers(given: Any, what: str, name: str) -> npt.NDArray[np.float64]:
    try:
        return np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"the {what} of {name} is {given!r}; expected numbers") from error


def from_sitk(image: Any, choice: Choice = WHOLE, *, name: str = "SimpleITK image") -> Image:
    """An image from a SimpleITK one."""
    return _taken(simpleitk().GetArrayViewFromImage(image), affine_of(image), choice, name)


def _taken(voxels: npt.NDArray[Any], affine: Matrix, choice: Choice, name: str) -> Image:
    """An image from voxels in ITK's order."""
    ordered = voxels.T if voxels.ndim < len(affine) else itk_order(voxels)
    data, affine, colours = choice.take(ordered, affine, name)
    return Image(data, affine, name, colours)


def from_nibabel(image: Any, choice: Choice = WHOLE, *, name: str = "nibabel image") -> Image:
    """An image from a nibabel one. Its positions are those that `read` gives to its file, by the rule in `nifti`.

    They differ from nibabel's own if sform and qform do; a warning then gives the distance. Trailing axes of length one
    are dropped.
    """
    data = np.asanyarray(image.dataobj)
    while data.ndim > 3 and data.shape[-1] == 1:
        data = data[..., 0]
    if data.ndim > 3:
        data, _, _ = choice.take(data, np.eye(data.ndim + 1), name)
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.asarray(image.affine, dtype=np.float64)
    if hasattr(image.header, "get_sform"):
        stated = nifti.positions(nifti.fields_of(image.header.binaryblock, name), data.shape[:3], name)
        apart = distance(stated, affine, (*data.shape, 1, 1)[:3])
        if not apart <= 1e-3 * np.linalg.norm(affine[:3, :3], axis=0).min():  # otherwise nibabel's is more precise
            log.warning("%s: its file's positions are used, up to %.3g mm away from nibabel's affine", name, apart)
            affine = stated
    axes = [*range(min(data.ndim, 3)), 3]
    return from_array(data, affine[np.ix_(axes, axes)], name=name)


def as_image(source: Any, name: str, choice: Choice = WHOLE) -> Image:
    """An image from anything that holds one: a path, an array, a tensor, a SimpleITK or a nibabel image."""
    if isinstance(source, (str, os.PathLike)):
        return read(source, choice)
    image = _from_memory(source, name, choice)
    if choice.nan is None or image.data.dtype.kind != "f":
        return image
    return replace(image, data=choice.take(image.data, image.affine, name)[0])


def _from_memory(source: Any, name: str, choice: Choice) -> Image:
    if isinstance(source, Image):
        return source
    kind = type(source).__module__.partition(".")[0]
    if kind in ("monai", "torchio") and hasattr(source, "affine"):
        return _from_channels(source, name)
    if kind == "torch":
        source = source.detach().cpu().numpy()
    if isinstance(source, np.ndarray):
        source = source if choice.frame is not None else _without_channel(source)
        frames = source.ndim == 4 and choice.frame is not None
        return from_array(choice.take(source, np.eye(5), name)[0] if frames else source, name=name)
    if kind == "SimpleITK":
        return from_sitk(source, choice, name=name)
    if kind == "nibabel":
        return from_nibabel(source, choice, name=name)
    if kind == "ants":
        return _from_ants(source, choice, name)
    if hasattr(source, "affine") and hasattr(source, "data"):
        return _from_channels(source, name)
    expected = "a path, an Image, an array, or an image of SimpleITK, nibabel, ANTsPy, MONAI or TorchIO"
    raise TypeError(f"{name} is a {type(source).__name__}; expected {expected}")


def _from_ants(image: Any, choice: Choice, name: str) -> Image:
    affine = np.eye(image.dimension + 1)
    affine[:-1, :-1] = np.asarray(image.direction) * np.asarray(image.spacing)
    affine[:-1, -1] = image.origin
    data, affine, colours = choice.take(image.numpy(), affine, name)  # components last
    return Image(data, affine, name, colours)


def _from_channels(source: Any, name: str) -> Image:
    """An image (1, x, y, z) with an affine in RAS, as MONAI and TorchIO keep them."""
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.asarray(source.affine, dtype=np.float64)
    data = _without_channel(np.asarray(getattr(source, "data", source)))
    if data.ndim == 3 and data.shape[-1] == 1:  # TorchIO keeps pictures as volumes of one slice
        data, affine = data[..., 0], affine[np.ix_([0, 1, 3], [0, 1, 3])]
    return from_array(data, affine, name=name)


def _without_channel(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(1, 1, *shape) or (1, x, y, z), as networks take images, without the batch and the channel."""
    if data.ndim in (4, 5) and data.shape[:2] == (1, 1):
        return np.asarray(data[0, 0])
    return np.asarray(data[0]) if data.ndim == 4 and data.shape[0] == 1 else data


def read(path: PathLike, choice: Choice = WHOLE) -> Image:
    """Read one scalar image: NIfTI, NRRD, MetaImage, PNG, TIFF, JPEG, any other format that SimpleITK reads, or a
    folder with DICOM series, of which `choice` names one if there are several. A gantry tilt is corrected.

    Pictures in colour keep their `colours` beside their luminance. `choice` says what to take of files that hold more.

    >>> image = read("scan.nii.gz")
    """
    path = Path(path)
    _check_readable(path, choice)
    if path.is_dir():
        return _read_series(path, choice)
    if nifti.is_nifti(path):
        header = _nifti_header(path, choice)
        voxels, affine, colours = choice.take(nifti.read_voxels(path, header), header.affine(), str(path))
        return Image(voxels, affine, str(path), colours)
    _check_complete(path)
    with _reasons(path):
        affine, voxels = isolated.read_image(path, lambda header: _check_header(header, choice, str(path)))
    if path.suffix.lower() == ".png":
        affine = affine @ np.diag([*_png_spacing(path.read_bytes()[: 2**16]), 1.0])
    return _taken(voxels, affine, choice, str(path))


def read_outline(path: PathLike, choice: Choice = WHOLE) -> Image | None:
    """Read what a header states: an image whose voxels are all 0 and take no memory. Files that `read` would refuse
    for their header or for their length are refused. None for a DICOM folder, which shows its shape only when read.

    >>> read_outline("scan.nii.gz").shape
    """
    path = Path(path)
    _check_readable(path, choice)
    if path.is_dir():
        dicom.choose(list_series(path), choice.series, str(path))
        return None
    if nifti.is_nifti(path):
        header = _nifti_header(path, choice)
        nifti.check_whole(path, header)
        return Image(np.broadcast_to(np.uint8(0), header.shape), header.affine(), str(path))
    _check_complete(path)
    with _reasons(path), isolated.reading("image", path) as child:
        about = child.header()
        _check_header(about, choice, str(path))
    affine, shape = np.array(about["affine"]), tuple(about["size"])
    if choice.has_frames(len(shape), path.name):
        kept = [*range(len(shape) - 1), len(shape)]
        affine, shape = affine[np.ix_(kept, kept)], shape[:-1]
    if path.suffix.lower() == ".png":
        affine = affine @ np.diag([*_png_spacing(path.read_bytes()[: 2**16]), 1.0])
    return Image(np.broadcast_to(np.uint8(0), shape), affine, str(path))


def _check_readable(path: Path, choice: Choice) -> None:
    if not path.exists():
        raise ImageError(f"{path} does not exist; expected an image file or a DICOM folder: check the path")
    if not os.access(path, os.R_OK):
        raise ImageError(f"{path} cannot be read: permission denied; expected a readable file: check its permissions")
    if path.is_dir():
        return
    if choice.series is not None:
        raise ImageError(
            f"{path} is a file, but a DICOM series was chosen ({choice.series}); expected a folder of these"
        )
    if path.stat().st_size == 0:
        raise ImageError(f"{path} is empty; expected an image: copy or export it again")


def _nifti_header(path: Path, choice: Choice) -> nifti.Header:
    header = nifti.read_header(path)
    choice.check(header.shape, header.components, str(path))
    header = header.at_time(choice.frame or 0)
    check_geometry(header.affine(), str(path))
    return header


def _png_spacing(content: bytes) -> tuple[float, float]:
    """The size of a pixel in mm by a PNG file's header, which ITK ignores; 1 if there is none."""
    at = content.find(b"pHYs", 0, content.find(b"IDAT"))
    across, down, unit = struct.unpack(">IIB", content[at + 4 : at + 13]) if at > 0 else (0, 0, 0)
    return (1000 / across, 1000 / down) if unit == 1 and across and down else (1.0, 1.0)


def _check_header(header: Mapping[str, Any], choice: Choice, name: str) -> None:
    """Refuse what the header of `isolated.reading` already shows to be unusable."""
    choice.check(header["size"], header["components"], name)
    check_spacing(header["spacing"], name)
    check_geometry(np.array(header["affine"]), name)


def read_labels(path: PathLike) -> Image:
    """Read a label map. Integers keep their type; whole numbers stored as floating point become int32."""
    return as_labels(read(path))


def as_labels(image: Image) -> Image:
    """The same image as a label map: whole numbers stored as floating point become int32."""
    if image.colours is not None:
        raise ImageError(f"{image.name} is in colour; expected a label map with one number per voxel: convert it")
    if image.data.dtype.kind != "f":
        return image
    if not np.all((np.abs(image.data) < 2**31) & (image.data == np.rint(image.data))):
        raise ImageError(f"{image.name} holds values that are not whole numbers; expected a label map: is it an image?")
    return Image(image.data.astype(np.int32), image.affine, image.name)


def _read_series(folder: Path, choice: Choice) -> Image:
    with _reasons(folder), isolated.reading("series", folder) as child:
        series = dicom.choose(_series_of(child, folder), choice.series, str(folder))
        child.answer(series.uid)
        header = child.header()
        files, size = series.files, header["size"]
        name = f"{folder} (DICOM series {series})"
        _check_header(header, choice, name)
        check_size(size if files == 1 else (*size[:2], files), name, header["width"])
        child.proceed(math.prod(size) * header["width"] * header["components"] * files)
        volume = child.header()
        image = _taken(child.array(), np.array(volume["affine"]), choice, name)
    return image if image.dim == 2 or volume["stated"] is None else _straightened(image, np.array(volume["stated"]))


def _straightened(image: Image, stated: Matrix) -> Image:
    """A series whose slices lie where their headers say: ITK assumes even slices at right angles, and would silently
    misplace those of a tilted gantry, or those after a missing one."""
    assumed = map_points(image.affine, [[0, 0, i] for i in range(image.shape[2])])
    error = float(np.linalg.norm(assumed - stated, axis=1).max())
    if error <= 0.1 * image.spacing[2]:
        return image
    found = dicom.straighten(image.data, image.affine, stated)
    if found is None:
        steps = f"{error:.3g} mm away from even steps of {image.spacing[2]:.3g} mm"
        raise ImageError(f"{image.name} has slices up to {steps}; expected every slice once: export the series again")
    data, affine, tilt = found
    log.warning("%s: corrected a gantry tilt of %.1f° by shifting its slices", image.name, tilt)
    return Image(data, affine, image.name)


def list_series(folder: PathLike) -> list[dicom.Series]:
    """The DICOM series of a folder."""
    with _reasons(Path(folder)), isolated.reading("series", Path(folder)) as child:
        return _series_of(child, Path(folder))


def _series_of(child: isolated.Reader, folder: Path) -> list[dicom.Series]:
    found = [dicom.Series.of(one) for one in child.header()["series"]]
    if not found:
        raise ImageError(f"{folder} is a folder without a DICOM series; {dicom.where_else(folder)}")
    return found


@contextmanager
def _reasons(path: Path, verb: str = "read") -> Iterator[None]:
    """Raise errors of SimpleITK in one line."""
    try:
        yield
    except (RuntimeError, isolated.UnreadableError) as error:
        why = reason(error)
        expected = {"read": "a whole file: copy or export it again", "written": "another format, such as .nii.gz"}[verb]
        if "ImageIO" in why:
            why = "not an image of a format that SimpleITK reads"
            if path.suffix.lower() == ".gif":
                why, expected = "SimpleITK does not read GIF", "another format, such as PNG: convert it"
        elif "orthonormal" in why:
            why = "the directions in its header are singular or not at right angles"
            expected = "axes at right angles: correct its header, or resample it"
        elif "Reason:" in why:  # MetaImage blames the operating system
            why = "its voxels are missing or end too early"
        raise ImageError(f"{path} cannot be {verb}: {why}; expected {expected}") from error


def _check_complete(path: Path) -> None:
    """JPEG's reader fills what a cut-off file lacks with grey."""
    if path.suffix.lower() in (".jpg", ".jpeg"):
        content = path.read_bytes()
        if content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda"):  # no end after the last scan's start
            raise ImageError(f"{path} is truncated: it has no end marker; expected a whole JPEG: copy it again")


def write(image: Image, path: PathLike, *, overwrite: bool = False) -> None:
    """Write an image in the format of the name's extension, in its own type. The file appears whole or not at all.

    A format that cannot store the image's type, its third axis or its directions is refused. PNG, TIFF, JPEG and BMP
    have no positions: those are lost. They hold the colours of an image; other formats hold its luminance.

    >>> write(image, "warped.nii.gz")
    """
    ending = Path(path).suffix.lower()
    if not ending or ending in TWO_FILES:
        why = f"{ending} takes two files" if ending else "its name has no extension"
        raise ImageError(f"{path} cannot be written: {why}; expected one file, such as .nii.gz")
    write_atomically(path, partial(_save, image), overwrite=overwrite)


def _save(image: Image, path: Path) -> None:
    """Write a file, and read the header back of formats that drop without a warning what they cannot store."""
    if nifti.is_nifti(path):
        return nifti_write.write(image.data, image.affine, path)
    coloured = image.colours is not None and is_picture(path.name)
    source = vector_image(image.colours, image.affine) if coloured else image.to_sitk()  # type: ignore[arg-type]
    write_sitk(source, path)
    with _reasons(path, "written"):
        header = read_header(path)
    lost = []
    if header.GetPixelID() != source.GetPixelID():
        lost.append(f"values of type {image.data.dtype}")
    if tuple(header.GetSize()) != image.shape:
        lost.append(f"a size of {times(image.shape)}")
    elif not is_picture(path.name):
        shift = distance(affine_of(header), image.affine, image.shape)
        if shift > 0.01 * min(image.spacing):
            lost.append(f"these directions (voxels would move by {shift:.3g} mm)")
    if lost:
        raise ImageError(f"{path} was not written: its format cannot hold {' or '.join(lost)}; choose another format")


def write_sitk(source: Any, path: Path) -> None:
    """Write a SimpleITK image and check that all of it is in the file: SimpleITK does not report a full disk."""
    with _reasons(path, "written"):
        simpleitk().WriteImage(source, str(path), path.suffix.lower() in (".nrrd", ".mha"))
        stored = simpleitk().ReadImage(str(path))
    lossy = path.suffix.lower() in (".jpg", ".jpeg") or stored.GetSize() != source.GetSize()  # `_save` checks that
    written, meant = (simpleitk().GetArrayViewFromImage(one) for one in (stored, source))
    length = (meant.nbytes % 2**32).to_bytes(4, "little")  # ends a gzip stream; ITK reads one without it
    cut = path.suffix.lower() == ".nrrd" and not path.read_bytes().endswith(length)
    if cut or not (lossy or np.array_equal(written, meant, equal_nan=True)):
        raise OutputError(f"{path} was not written completely; check the disk, then try again")


def looks_like_labels(image: Image) -> bool:
    """Whether an image may be a label map: whole numbers, and neighbours that are mostly the same."""
    data = image.data
    if data.dtype.kind == "f" and not np.array_equal(data, np.rint(data)):
        return False
    same, inner = data[1:] == data[:-1], (data[1:] != 0) & (data[:-1] != 0)
    return bool(inner.any() and same.mean() > 0.9 and same[inner].mean() > 0.6)


def placed_like(other: Image, image: Image) -> Image:
    """A picture at the place of an image of the same size, since its file has no positions; others as they are."""
    return replace(other, affine=image.affine) if is_picture(other.name) and other.shape == image.shape else other


def check_same_grid(other: Image, image: Image, what: str) -> None:
    """Refuse a mask or a label map whose voxels are not the image's, to a tenth of a voxel."""
    if other.shape != image.shape:
        problem = f"has {times(other.shape)} voxels but {image.name} has {times(image.shape)}"
    elif (shift := distance(other.affine, image.affine, image.shape)) > 0.1 * min(image.spacing):
        problem = f"lies up to {shift:.3g} mm away from {image.name}"
    else:
        return
    raise ImageError(f"{other.name} {problem}; expected {what} on the image's own grid: resample it")
