"""GIF, the first image of a file, in shades of grey: what SimpleITK does not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from carlreg.files.images import PathLike


def read_gif(path: PathLike) -> npt.NDArray[np.uint8]:
    """Brightness (height, width), 0 to 255: the mean of each palette entry's three colours."""
    content = Path(path).read_bytes()
    try:
        return _decode(content)
    except (IndexError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a whole GIF ({error}); expected one: copy it again") from error


def _decode(content: bytes) -> npt.NDArray[np.uint8]:
    if content[:6] not in (b"GIF87a", b"GIF89a"):
        raise ValueError("it has another beginning")
    at = 13
    palette, at = _palette(content, content[10], at)
    while content[at] != 0x2C:  # up to the first image; before it, extensions
        if content[at] != 0x21:
            raise ValueError("it holds no image")
        _, at = _blocks(content, at + 2)
    width, height = (int.from_bytes(content[at + k : at + k + 2], "little") for k in (5, 7))
    flags = content[at + 9]
    own, at = _palette(content, flags, at + 10)
    palette = palette if own is None else own
    if palette is None:
        raise ValueError("it has no palette")
    data, _ = _blocks(content, at + 1)
    values = np.frombuffer(_unpack(data, content[at], width * height), np.uint8).reshape(height, width)
    if flags & 0x40:  # every 8th row first, then those between
        rows = np.concatenate([np.arange(start, height, step) for start, step in ((0, 8), (4, 8), (2, 4), (1, 2))])
        values = values[np.argsort(rows)]
    return palette[values]


def _palette(content: bytes, flags: int, at: int) -> tuple[npt.NDArray[np.uint8] | None, int]:
    if not flags & 0x80:
        return None, at
    size = 3 * 2 ** ((flags & 7) + 1)
    colours = np.frombuffer(content[at : at + size], np.uint8).reshape(-1, 3)
    grey = np.zeros(256, np.uint8)
    grey[: len(colours)] = np.rint(colours.mean(axis=1))
    return grey, at + size


def _blocks(content: bytes, at: int) -> tuple[bytes, int]:
    """The data of a chain of blocks, each with its length in front, and where it ends."""
    parts = []
    while content[at]:
        parts.append(content[at + 1 : at + 1 + content[at]])
        at += 1 + content[at]
    return b"".join(parts), at + 1


def _unpack(data: bytes, bits: int, count: int) -> bytes:
    """LZW: codes of growing width, each a string seen before and the first letter of the next."""
    clear, end = 1 << bits, (1 << bits) + 1
    start = [bytes([n]) for n in range(clear)] + [b"", b""]
    table, width, previous = list(start), bits + 1, b""
    out = bytearray()
    buffer = held = 0
    for byte in data:
        buffer |= byte << held
        held += 8
        while held >= width:
            code = buffer & ((1 << width) - 1)
            buffer >>= width
            held -= width
            if code == clear:
                table, width, previous = list(start), bits + 1, b""
                continue
            if code == end:
                break
            if code > len(table) or (code == len(table) and not previous):
                raise ValueError("its data are damaged")
            entry = table[code] if code < len(table) else previous + previous[:1]
            out += entry
            if previous and len(table) < 4096:
                table.append(previous + entry[:1])
                if len(table) == 1 << width and width < 12:
                    width += 1
            previous = entry
    if len(out) < count:
        raise ValueError(f"{len(out)} of {count} pixels")
    return bytes(out[:count])
