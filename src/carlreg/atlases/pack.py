"""`.carlatlas`: labelled scans in one file, for `carl segment`.

A safetensors file. Its metadata describes each atlas as JSON: name, shape, positions and types of voxels; its tensors
are the voxels, compressed by zlib. Floating-point images are stored in 65 536 steps between their extremes. Everything
is checked before memory is taken for it; nothing in a file is executed.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from carlreg.atlases.inputs import Atlas
from carlreg.errors import InputError
from carlreg.files.atomic import PathLike, write_atomically
from carlreg.files.checks import check_geometry, check_size
from carlreg.files.images import Image
from carlreg.files.label_names import Names

FORMAT, ENDING = "carlatlas-1", ".carlatlas"
TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32")
STEPS = 2**16 - 1
MOST_ATLASES, LONGEST = 10_000, 2**26
"""Limits of a file: its atlases, and the characters of its metadata."""


class PackError(InputError):
    """A file that is not a pack of atlases, or is damaged."""


def is_pack(path: PathLike) -> bool:
    return str(path).lower().endswith(ENDING)


# ---- writing --------------------------------------------------------------------------------------------------------


def write_pack(atlases: Sequence[Atlas], path: PathLike, names: Names, *, overwrite: bool = False) -> None:
    """Write atlases, and the names of their labels, to one file.

    >>> write_pack(atlases, "brains.carlatlas", {1: "hippocampus"})
    """
    if not is_pack(path):
        raise InputError(f"{path} has another extension; expected {ENDING}")
    from safetensors.numpy import save

    described, tensors = [], {}
    for number, atlas in enumerate(atlases):
        image, scale = _stored(atlas.image.data)
        labels = atlas.labels.data.astype(smallest_type(int(atlas.labels.data.max())))
        for kind, voxels in (("image", image), ("labels", labels)):
            content = zlib.compress(np.ascontiguousarray(voxels).tobytes(), 6)
            tensors[f"{number}/{kind}"] = np.frombuffer(content, np.uint8)
        described.append(
            {
                "name": atlas.name,
                "shape": list(atlas.image.shape),
                "affine": atlas.image.affine.tolist(),
                "image": str(image.dtype),
                "scale": scale,
                "labels": str(labels.dtype),
            }
        )
    metadata = {
        "format": FORMAT,
        "atlases": json.dumps(described),
        "label_names": json.dumps({str(label): name for label, name in names.items()}),
    }
    write_atomically(path, save(tensors, metadata), overwrite=overwrite)


def _stored(data: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[float] | None]:
    """Voxels in a type of `TYPES`, and slope and intercept if they are steps."""
    if data.dtype.kind in "iu" and str(data.dtype) in TYPES:
        return data, None
    low, high = float(data.min()), float(data.max())
    slope = (high - low) / STEPS or 1.0
    return np.rint((data.astype(np.float64) - low) / slope).astype(np.uint16), [slope, low]


def smallest_type(largest: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type that holds labels up to this one."""
    return np.uint8 if largest < 2**8 else np.uint16 if largest < 2**16 else np.uint32


# ---- reading --------------------------------------------------------------------------------------------------------


def read_pack(path: PathLike) -> tuple[list[Atlas], dict[int, str]]:
    """The atlases of a file, and the names of their labels."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise PackError(f"{path} does not exist; expected a {ENDING} file: check the path")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise PackError(f"{path} has the format {header.get('format')!r}; expected {FORMAT!r}")
            described, names = (_parsed(header, key, path) for key in ("atlases", "label_names"))
            if not isinstance(described, list) or not isinstance(names, dict) or len(described) > MOST_ATLASES:
                raise PackError(f"{path} is damaged: expected a list of at most {MOST_ATLASES} atlases, and names")
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            atlases = [_atlas(tensors, number, entry, path) for number, entry in enumerate(described)]
            labels = {int(label): str(name) for label, name in names.items()}
    except (SafetensorError, OSError) as error:
        raise PackError(f"{path} is not a {ENDING} file, or it is damaged: {error}") from error
    except (KeyError, TypeError, ValueError, zlib.error, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise PackError(f"{path} is damaged: {type(error).__name__} {error}") from error
    if not atlases:
        raise PackError(f"{path} holds no atlases; expected at least one")
    return atlases, labels


def _parsed(header: Mapping[str, str], key: str, path: PathLike) -> Any:
    text = header.get(key, "")
    if len(text) > LONGEST:
        raise PackError(f"{path} is damaged: its {key} have {len(text)} characters; expected at most {LONGEST}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PackError(f"{path} is damaged: its {key} are not valid JSON ({error})") from error


def _atlas(tensors: Mapping[str, Any], number: int, entry: Mapping[str, Any], path: PathLike) -> Atlas:
    """An atlas, once its description is known to be harmless."""
    name, shape = str(entry["name"]), tuple(int(n) for n in entry["shape"])
    label = f"{name} of {path}"
    if len(shape) not in (2, 3):
        raise PackError(f"{label} is {len(shape)}-D; expected a 2-D or 3-D image")
    check_size(shape, label)
    affine = np.array(entry["affine"], np.float64)
    if affine.shape != (len(shape) + 1,) * 2:
        raise PackError(f"{label} has positions of shape {affine.shape}; expected {(len(shape) + 1,) * 2}")
    check_geometry(affine, label)
    image, labels = (
        _voxels(tensors[f"{number}/{kind}"], str(entry[kind]), shape, label) for kind in ("image", "labels")
    )
    if labels.dtype.kind != "u":
        raise PackError(f"{label} has labels of type {labels.dtype}; expected unsigned integers")
    if entry["scale"] is not None:
        slope, low = (float(value) for value in entry["scale"])
        if not (math.isfinite(slope) and math.isfinite(low)):
            raise PackError(f"{label} has a scale that is not finite")
        image = (image * np.float64(slope) + low).astype(np.float32)
    if not np.isfinite(image).all():
        raise PackError(f"{label} has voxels that are not finite")
    return Atlas(name, Image(image, affine, label), Image(labels, affine, f"labels of {label}"))


def _voxels(source: Any, kind: str, shape: tuple[int, ...], name: str) -> npt.NDArray[Any]:
    """Decompress no more than the voxels that are declared."""
    if kind not in TYPES:
        raise PackError(f"{name} has voxels of type {kind!r}; expected one of {', '.join(TYPES)}")
    if source.get_dtype() != "U8" or len(source.get_shape()) != 1:
        raise PackError(f"{name} is damaged: its voxels are not a row of bytes")
    size = math.prod(shape) * np.dtype(kind).itemsize
    unpack = zlib.decompressobj()
    content = unpack.decompress(source[:].tobytes(), size + 1)
    if len(content) != size or not unpack.eof:
        raise PackError(f"{name} is damaged: it has more or fewer voxels than {' × '.join(map(str, shape))}")
    return np.frombuffer(bytearray(content), kind).reshape(shape)
