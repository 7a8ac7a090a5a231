"""NIfTI-1 files, written without ITK, which needs longer and does not report a full disk.

Headers are as ITK writes them: sform and qform agree, and both are positions in a scanner.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.files import nifti
from carlreg.files.checks import ImageError, Matrix, distance
from carlreg.files.compression import write_gzip

LONGEST = 2**15 - 1
BLOCK = 2**22  # bytes compressed at a time


def write(data: npt.NDArray[Any], affine: Matrix, path: Path, *, axis: int | None = None) -> None:
    """Write an image, or vectors (*shape, C) whose components lie along NIfTI's fifth axis, or its fourth, as in
    Learn2Reg. `affine` (D + 1, D + 1) takes indices to LPS millimetres; what a header cannot hold is refused.
    """
    dim = len(affine) - 1
    shape, spacing = data.shape[:dim], np.linalg.norm(affine[:-1, :-1], axis=0)
    if max(shape) > LONGEST:
        raise ImageError(f"{path} was not written: NIfTI holds at most {LONGEST} voxels along an axis; expected .mha")
    left, _, right = np.linalg.svd(affine[:-1, :-1] / spacing)  # the closest axes at right angles
    stored = affine.copy()
    stored[:-1, :-1] = left @ right * spacing
    shift = distance(stored.astype(np.float32), affine, shape)
    if not shift <= 0.01 * spacing.min():
        held = f"these directions (voxels would move by {shift:.3g} mm)"
        raise ImageError(f"{path} was not written: its format cannot hold {held}; choose another format")
    blocks = _blocks(_header(data, affine, axis), data[..., None] if axis is None else data)
    with path.open("wb") as file:
        if path.suffix.lower() == ".gz":
            write_gzip(file, blocks)
        else:
            file.writelines(blocks)


def _header(data: npt.NDArray[Any], affine: Matrix, axis: int | None) -> bytes:
    header, dim = np.zeros((), nifti.LAYOUTS[0]), len(affine) - 1
    shape = (*data.shape[:dim], 1, 1)[:3]
    header["sizeof_hdr"], header["vox_offset"], header["scl_slope"], header["xyzt_units"] = 348, 352, 1, 10  # mm, s
    header["dim"], header["intent_code"] = (axis or dim, *shape, 1, 1, 1, 1), nifti.VECTORS if axis == 5 else 0
    if axis is not None:
        header["dim"][axis] = data.shape[-1]
    header["datatype"] = {kind: code for code, kind in nifti.TYPES.items()}[data.dtype.str[1:]]
    header["bitpix"] = 8 * data.dtype.itemsize
    ras = np.eye(4)
    axes = [*range(dim), 3]
    ras[np.ix_(axes, axes)] = affine
    ras = np.diag([-1.0, -1.0, 1.0, 1.0]) @ ras
    spacing = np.linalg.norm(ras[:3, :3], axis=0)
    turn = ras[:3, :3] / spacing
    handed = -1.0 if np.linalg.det(turn) < 0 else 1.0
    header["pixdim"][:4], header["srow"], header["qoffset"] = (handed, *spacing), ras[:3], ras[:3, 3]
    header["pixdim"][4] = axis == 4
    header["quatern"] = _quaternion(turn * [1, 1, handed])
    header["qform_code"] = header["sform_code"] = 1
    block = bytearray(header.tobytes()) + bytes(4)
    block[38:39], block[344:348] = b"r", b"n+1\0"
    return bytes(block)


def _quaternion(turn: Matrix) -> Matrix:
    """(b, c, d) of a rotation matrix, the eigenvector of a symmetric matrix made of it."""
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = turn
    lower = [
        [xx - yy - zz, 0, 0, 0],
        [yx + xy, yy - xx - zz, 0, 0],
        [zx + xz, zy + yz, zz - xx - yy, 0],
        [zy - yz, xz - zx, yx - xy, xx + yy + zz],
    ]
    b, c, d, a = np.linalg.eigh(lower)[1][:, -1]
    sign = next(np.sign(part) for part in (a, d, c, b) if abs(part) > 1e-7)
    return np.array([b, c, d]) * sign


def _blocks(header: bytes, data: npt.NDArray[Any]) -> Iterator[Any]:
    """The header, and the voxels in the order of the file: components last, then the last axis."""
    rows = max(1, BLOCK // max(1, data[..., :1, 0].nbytes))
    yield header
    for component in np.moveaxis(data, -1, 0):
        for start in range(0, data.shape[-2], rows):
            yield np.ascontiguousarray(component[..., start : start + rows].T).view(np.uint8).reshape(-1).data
