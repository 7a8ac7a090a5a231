"""Volumes as text that a web page can hold: 8-bit PNG mosaics and small arrays, as data URIs."""

from __future__ import annotations

import base64
import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.uint8]


def png(picture: Levels) -> bytes:
    """A greyscale PNG of rows (height, width)."""
    height, width = picture.shape
    # Differences between neighbours ("Sub") suit smooth maps; flat backgrounds are better left as they are.
    rows = np.empty((height, width + 1), np.uint8)
    rows[:, 0], rows[:, 1] = 1, picture[:, 0]
    rows[:, 2:] = picture[:, 1:] - picture[:, :-1]
    plain = np.concatenate([np.zeros((height, 1), np.uint8), picture], axis=1)
    better = min((rows, plain), key=lambda way: len(zlib.compress(way.tobytes(), 1)))
    body = zlib.compress(better.tobytes(), 6)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def mosaic(volume: Levels) -> tuple[Levels, int]:
    """The slices (nx, ny, nz) of a volume beside and below one another, and how many stand in a row.

    Pixel (i, j) of tile k, counted in rows of tiles, is voxel (i, j, k): i to the right, j down.
    """
    nx, ny, nz = volume.shape
    columns = max(1, math.ceil(math.sqrt(nz * ny / nx)))
    rows = math.ceil(nz / columns)
    tiles = np.zeros((rows * columns, ny, nx), np.uint8)
    tiles[:nz] = volume.transpose(2, 1, 0)
    return tiles.reshape(rows, columns, ny, nx).swapaxes(1, 2).reshape(rows * ny, columns * nx), columns


def volume_uri(volume: Levels) -> dict[str, object]:
    """What the page needs to have the volume (nx, ny, nz) back."""
    picture, columns = mosaic(volume)
    return {"shape": list(volume.shape), "columns": columns, "png": _uri("image/png", png(picture))}


def array_text(array: npt.NDArray[np.int16]) -> str:
    """Base64 of the bytes, little-endian."""
    return base64.b64encode(np.ascontiguousarray(array, dtype="<i2").tobytes()).decode()


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
