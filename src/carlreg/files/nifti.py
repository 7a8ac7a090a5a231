"""NIfTI-1 and NIfTI-2 files, read without ITK: no more is read than the header calls for, and in one pass.

Positions follow ITK's rule, so that images and transforms lie in the same world here as in ANTs and 3D Slicer: the
sform if its code is 1 (scanner) or the qform's is 0, and its axes are at right angles; otherwise the qform; without
either, the spacing alone. The same rule serves the headers of nibabel images, whose `affine` prefers the sform.
"""

import gzip
import logging
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.files.checks import ImageError, Matrix, check_size, check_spacing, distance

log = logging.getLogger(__name__)

NAMES = (
    *("sizeof_hdr", "dim", "intent_code", "datatype", "bitpix", "pixdim", "vox_offset", "scl_slope", "scl_inter"),
    *("xyzt_units", "qform_code", "sform_code", "quatern", "qoffset", "srow"),
)
FORMATS_1 = ("i4", "8i2", "i2", "i2", "i2", "8f4", "f4", "f4", "f4", "u1", "i2", "i2", "3f4", "3f4", "(3,4)f4")
OFFSETS_1 = (0, 40, 68, 70, 72, 76, 108, 112, 116, 123, 252, 254, 256, 268, 280)
FORMATS_2 = ("i4", "8i8", "i4", "i2", "i2", "8f8", "i8", "f8", "f8", "i4", "i4", "i4", "3f8", "3f8", "(3,4)f8")
OFFSETS_2 = (0, 16, 504, 12, 14, 104, 168, 176, 184, 500, 344, 348, 352, 376, 400)
LAYOUTS = [
    np.dtype({"names": NAMES, "formats": [order + one for one in formats], "offsets": offsets, "itemsize": size})
    for size, formats, offsets in ((348, FORMATS_1, OFFSETS_1), (540, FORMATS_2, OFFSETS_2))
    for order in "<>"
]
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
TUPLES = {32: (2, "f4"), 1792: (2, "f8"), 128: (3, "u1"), 2304: (4, "u1")}  # complex numbers and colours
VECTORS, DISPLACEMENTS = 1007, 1006  # codes of intent; ITK takes the latter to be in RAS
MILLIMETRES = {1: 1000.0, 3: 0.001}  # in a metre and in a micrometre, by the code of the unit
MOST_EXTENSIONS = 2**26  # bytes between the header and the voxels
DEFLATE = 1040  # no gzip file expands by more
BLOCK = 2**24  # bytes read at a time


@dataclass(frozen=True, eq=False)
class Header:
    """What a NIfTI header states, checked."""

    name: str
    fields: Any  # as in the file
    shape: tuple[int, ...]  # trailing axes of length one are dropped
    components: int
    dtype: np.dtype[Any]
    offset: int  # of the voxels, from the start of the file

    @property
    def dim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.components * self.dtype.itemsize

    def at_time(self, frame: int) -> "Header":
        """The header of one time point of a 4-D image; that of any other image as it is."""
        if self.dim != 4:
            return self
        shape, apart = self.shape[:3], self.nbytes // self.shape[3]
        return replace(self, shape=shape, offset=self.offset + frame * apart)

    def affine(self) -> Matrix:
        """(D + 1, D + 1), from indices to LPS millimetres, for images with at most three axes."""
        axes = [*range(self.dim), 3]
        return positions(self.fields, self.shape, self.name)[np.ix_(axes, axes)]


def is_nifti(path: Path) -> bool:
    """Whether a file is NIfTI by its name."""
    return path.name.lower().endswith((".nii", ".nii.gz"))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file, decompressed if it is gzip; raise ImageError if that fails."""
    try:
        with path.open("rb") as file:
            yield gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ImageError(f"{path} is truncated or damaged ({error}); expected a whole file: copy it again") from error


def read_header(path: Path) -> Header:
    """Read and check the header alone."""
    name = str(path)
    with _opened(path) as file:
        fields = fields_of(file.read(540), name)
    axes, *sides = (int(n) for n in fields["dim"])
    if not 1 <= axes <= 7:
        raise ImageError(f"{name} declares {axes} axes; expected 2 or 3: correct its header")
    sides = sides[:axes]
    check_size(sides, name)
    code, kind = int(fields["datatype"]), TYPES.get(int(fields["datatype"]))
    components, part = TUPLES.get(code, (1, "u1"))
    if axes == 5 and sides[3] == 1 and fields["intent_code"] in (DISPLACEMENTS, VECTORS):
        components, sides = sides[4], sides[: 2 if sides[2] == 1 and sides[4] == 2 else 3]
    while len(sides) > 3 and sides[-1] == 1:
        sides = sides[:-1]
    check_spacing([float(s) for s in fields["pixdim"][1 : min(len(sides), 3) + 1]], name)
    if kind is None and components == 1:
        raise ImageError(f"{name} has the unknown data type {code}; expected integers or floating point: convert it")
    dtype = np.dtype(f"{fields.dtype['datatype'].byteorder}{kind or part}")
    if kind is not None and fields["bitpix"] != 8 * dtype.itemsize:
        found, expected = f"{fields['bitpix']} bits per voxel for {np.dtype(kind)}", f"{8 * dtype.itemsize}"
        raise ImageError(f"{name} declares {found}; expected {expected}: correct its header")
    first = fields.dtype.itemsize
    offset = float(fields["vox_offset"]) or first + 4
    if not first <= offset <= MOST_EXTENSIONS or offset % 1:
        expected = f"{first + 4} or a little more: correct its header"
        raise ImageError(f"{name} declares that its voxels start at byte {offset:g}; expected {expected}")
    return Header(name, fields, tuple(sides), components, dtype, int(offset))


def check_whole(path: Path, header: Header) -> None:
    """Refuse a file that ends too early. That of a gzip file shows in the length that is stored at its end."""
    expected = header.offset + header.nbytes
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        size = file.seek(-4 if packed else 0, 2)
        stored = int.from_bytes(file.read(4), "little") if packed else size
    if packed and stored != expected % 2**32:
        read_voxels(path, header)  # a file in several parts, or with more than its voxels; or it raises
    elif not packed and size < expected:
        raise _truncated(header, size)


def read_voxels(path: Path, header: Header) -> npt.NDArray[Any]:
    """The voxels (*shape), or (*shape, components), in ITK's types: scaled integers are float32."""
    check_size(header.shape, header.name, header.dtype.itemsize * header.components)
    packed = path.stat().st_size
    if header.nbytes > DEFLATE * packed:
        raise _truncated(header, packed)
    tuples, sides = int(header.fields["datatype"]) in TUPLES, header.shape[::-1]
    data = np.empty((*sides, header.components) if tuples else (header.components, *sides), header.dtype)
    view = data.reshape(-1).view(np.uint8)
    with _opened(path) as file:
        file.seek(header.offset)
        count = sum(file.readinto(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK))
        file.read(2**20)  # at the end of the file, gzip compares checksums
    if count < data.nbytes:
        raise _truncated(header, header.offset + count)
    data = np.ascontiguousarray(np.moveaxis(data, -1, 0)) if tuples else data
    values = _scaled(data.astype(header.dtype.newbyteorder("="), copy=False), header)
    voxels = values.transpose(*range(values.ndim - 1, 0, -1), 0)  # (x, y, z, components)
    if header.components == 1:
        return voxels[..., 0]
    if header.fields["intent_code"] == DISPLACEMENTS:  # in RAS
        voxels = voxels * np.array([-1, -1, 1], voxels.dtype)[: header.components]
    return voxels


def fields_of(block: bytes, name: str) -> Any:
    """The fields of a header, such as nibabel's `header.binaryblock`, in its own byte order."""
    for layout in LAYOUTS:
        if len(block) >= layout.itemsize:
            fields = np.frombuffer(block[: layout.itemsize], layout)[0]
            if fields["sizeof_hdr"] == layout.itemsize:
                return fields
    raise ImageError(f"{name} is not an image: it has no NIfTI header; expected a whole NIfTI file: copy it again")


@np.errstate(all="ignore")  # NaN and infinity are refused later
def positions(fields: Any, shape: tuple[int, ...], name: str) -> Matrix:
    """(4, 4), from indices to LPS millimetres, by the module's rule. Warn if what the header states differs by more
    than a tenth of a voxel."""
    unit, dim = MILLIMETRES.get(int(fields["xyzt_units"]) & 7, 1.0), min(len(shape), 3)
    spacing = np.abs(fields["pixdim"][1:4].astype(np.float64)) * unit
    spacing[dim:] = 1  # a plane has no third axis
    shape = (*shape[:dim], 1, 1)[:3]
    tolerance, stated = 0.1 * spacing.min(), []
    straight, qform, code = None, None, fields["sform_code"]
    if code > 0:
        sform = np.vstack([unit * fields["srow"].astype(np.float64), [0, 0, 0, 1]])
        sform[2, 2] = 1 if dim < 3 and not sform[:, 2].any() else sform[2, 2]
        stated.append(sform)
        straight = _straightened(sform, spacing, shape, tolerance)
    if fields["qform_code"] > 0:
        qform = _qform(fields, spacing, unit)
        stated.append(qform)
    if not stated:
        return np.diag([*spacing, 1.0])
    if straight is not None and (qform is None or code == 1 or distance(straight, qform, shape) <= tolerance):
        chosen, which = straight, "sform"
    elif qform is not None:
        chosen, which = qform, "qform"
    else:
        found = "an sform that is singular or whose axes are not at right angles, and no qform"
        raise ImageError(f"{name} has {found}; expected axes at right angles: correct its header, or resample it")
    apart = max(distance(chosen, one, shape) for one in stated)
    if not apart <= tolerance:
        log.warning("%s: sform, qform and spacing disagree by up to %.3g mm; using the %s", name, apart, which)
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ chosen  # from RAS to LPS


def _straightened(affine: Matrix, spacing: Matrix, shape: tuple[int, ...], tolerance: float) -> Matrix | None:
    """The closest map whose axes are at right angles, with this spacing; None if it is not close."""
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.isfinite(affine).all() or not lengths.all():
        return None
    left, _, right = np.linalg.svd(affine[:3, :3] / lengths)
    result = affine.copy()
    result[:3, :3] = left @ right * lengths
    if not distance(result, affine, shape) <= tolerance:
        return None
    result[:3, :3] = left @ right * spacing
    return result


def _qform(fields: Any, spacing: Matrix, unit: float) -> Matrix:
    b, c, d = fields["quatern"].astype(np.float64)
    a = math.sqrt(max(0.0, 1 - (b * b + c * c + d * d)))
    if a < 1e-7:  # half a turn: b, c and d are a unit vector
        length = math.sqrt(b * b + c * c + d * d)
        a, (b, c, d) = 0.0, (b / length, c / length, d / length) if length > 0 else (math.nan,) * 3
    turn = np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - c * c - b * b],
        ]
    )
    handed = np.array([1.0, 1.0, -1.0 if fields["pixdim"][0] < 0 else 1.0])
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = turn * spacing * handed, unit * fields["qoffset"].astype(np.float64)
    return affine


@np.errstate(all="ignore")
def _scaled(data: npt.NDArray[Any], header: Header) -> npt.NDArray[Any]:
    slope, intercept = (float(header.fields[name]) for name in ("scl_slope", "scl_inter"))
    intercept = intercept if math.isfinite(intercept) else 0.0
    if not math.isfinite(slope) or slope == 0 or (slope, intercept) == (1, 0):
        return data
    scaled = data.astype(np.float64 if data.dtype == np.float64 else np.float32)
    for part in scaled.reshape(header.components * header.shape[-1], -1):  # in float64, a slice at a time
        part[:] = part.astype(np.float64) * slope + intercept
    return scaled


def _truncated(header: Header, count: int) -> ImageError:
    expected = f"{header.offset + header.nbytes} by its header: copy it again"
    return ImageError(f"{header.name} is truncated: it holds {count} bytes; expected {expected}")
