"""Damaged files: every reader either reads them or refuses them with a CarlError.

Each case takes a small valid file, changes some of its bytes, and gives it to the reader. Headers are hit more often
than data, and numbers are replaced by extreme ones, since that is where readers trust too much.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from carlreg.errors import CarlError
from torture.families import Family, generator

HEADER = 400
"""Bytes at the beginning of a file that are changed more often than the rest."""
WORDS = (0, 1, 2, 3, 7, 8, 16, 64, 127, 128, 255, 256, 1000, 10_000, 32_767, 65_535, 2**31 - 1, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, -1e30, 3e38, 4e9, float("nan"), float("inf"), -float("inf"), 0.5)
TOKENS = (
    "",
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    "10000 10000 10000",
    "../../etc/passwd",
    '"',
    ",",
    ";",
    "\t",
    "\0",
    "é" * 50,
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Content with one to six random changes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        if not data:
            break
        where = rng.randrange(min(HEADER, len(data))) if rng.random() < 0.7 else rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[where] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[where] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice(WORDS) % 2 ** (8 * size)
            data[where : where + size] = value.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 3:
            data[where : where + 4] = struct.pack(rng.choice("<>") + "f", rng.choice(FLOATS))
        elif kind == 4:
            del data[where:]
        elif kind == 5:
            del data[where : where + rng.randint(1, 40)]
        else:
            data[where:where] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
    return bytes(data)


def reworded(content: bytes, rng: random.Random) -> bytes:
    """Text with some of its words replaced, then perhaps mutated as well."""
    separators = b" ,\n:{}[]"
    cuts = [n for n, byte in enumerate(content) if byte in separators]
    for _ in range(rng.randint(1, 4)):
        if len(cuts) > 1:
            n = rng.randrange(len(cuts) - 1)
            content = content[: cuts[n] + 1] + rng.choice(TOKENS).encode() + content[cuts[n + 1] :]
            cuts = [n for n, byte in enumerate(content) if byte in separators]
    return mutated(content, rng) if rng.random() < 0.3 else content


@functools.cache
def seeds() -> dict[str, bytes]:
    """One small valid file of each format, by its ending."""
    import SimpleITK as sitk  # noqa: N813
    import torch
    from safetensors.torch import save

    from carlreg import carl
    from carlreg.files import transform_files
    from carlreg.files.images import from_array
    from carlreg.files.world_transform import WorldTransform

    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = (np.arange(8**3) % 251).astype(np.uint8).reshape(8, 8, 8)
        image = sitk.GetImageFromArray(values)
        image.SetSpacing((1.0, 2.0, 1.5))
        for ending in (".nii", ".nrrd", ".mha"):
            sitk.WriteImage(image, str(folder / f"image{ending}"))
            found[ending] = (folder / f"image{ending}").read_bytes()
        sitk.WriteImage(image[:, :, 4], str(folder / "image.png"))
        found[".png"] = (folder / "image.png").read_bytes()
        floats = sitk.Cast(image, sitk.sitkFloat64)
        sitk.WriteImage(floats, str(folder / "floats.nii"))
        found["floats.nii"] = (folder / "floats.nii").read_bytes()
        field = np.zeros((4, 4, 4, 3), np.float32)
        field[1:3, 1:3, 1:3] = 0.3
        bent = WorldTransform(np.eye(4), field, np.eye(4))
        transform_files.write(bent, folder / "bent.h5")
        transform_files.write(bent, folder / "bent.tfm")
        spline = sitk.BSplineTransformInitializer(image, [3, 3, 3])
        sitk.WriteTransform(spline, str(folder / "spline.tfm"))
        for name_ in ("bent.h5", "bent.tfm", "spline.tfm"):
            found[name_] = (folder / name_).read_bytes()
        transform_files.write_warp(bent, from_array(values), folder / "warp.nii.gz")
        found["warp.nii"] = gzip.decompress((folder / "warp.nii.gz").read_bytes())
        tiny = carl(2, 2, width=4, unet_down=(2, 2, 2, 2, 2), unet_up=(2, 2, 2, 2, 2))
        import carlreg

        carlreg.save(tiny, folder / "model.safetensors")
        found[".safetensors"] = (folder / "model.safetensors").read_bytes()
        found["alien.safetensors"] = save({"a": torch.zeros(3)})
    found["pairs.csv"] = b"name,fixed,moving,fixed_seg\na,f.nii,m.nii,\nb,f.nii,m.nii,s.nii\n"
    found["points.csv"] = b"name,x,y,z\na,1.5,2,3\nb,-4,5e1,6\n"
    found["points.fcsv"] = (
        b"# Markups fiducial file version = 4.11\n# CoordinateSystem = LPS\n"
        b"# columns = id,x,y,z,ow,ox,oy,oz,vis,sel,lock,label,desc,associatedNodeID\n1,1,2,3,0,0,0,1,1,1,0,F-1,,,2,0\n"
    )
    markups = {"markups": [{"coordinateSystem": "LPS", "controlPoints": [{"label": "a", "position": [1.0, 2.0, 3.0]}]}]}
    found["points.mrk.json"] = json.dumps(markups, indent=1).encode()
    return found


def attempt(read: Callable[[Path], object], content: bytes, ending: str) -> str | None:
    """Give the reader a file with this content; what it raised, unless that was a CarlError."""
    handle, name = tempfile.mkstemp(suffix=ending, dir=os.environ.get("TORTURE_TMP"))
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        read(path)
    except CarlError as error:
        text = str(error)
        if "\n" in text or not text:
            return f"{type(error).__name__} is not one line: {text!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        path.unlink(missing_ok=True)
    return None


def read_image(path: Path) -> object:
    from carlreg.files import images

    return images.read(path)


def read_transform(path: Path) -> object:
    from carlreg.files import transform_files

    return transform_files.read(path)


def read_pairs(path: Path) -> object:
    from carlreg.files import tables

    return tables.read_pairs(path)


def read_landmarks(path: Path) -> object:
    from carlreg.files import landmarks

    return landmarks.read_points(path)


def load_model(path: Path) -> object:
    import carlreg

    return carlreg.load(path)


def binary(name: str, seed: str, ending: str, read: Callable[[Path], object], count: int) -> Family:
    def run(case: int) -> str | None:
        rng = generator(name, case)
        content = mutated(seeds()[seed], rng)
        return attempt(read, gzip.compress(content, 1) if ending.endswith(".gz") else content, ending)

    return Family(name, count, run, isolated=True)


def text(name: str, seed: str, ending: str, read: Callable[[Path], object], count: int) -> Family:
    def run(case: int) -> str | None:
        return attempt(read, reworded(seeds()[seed], generator(name, case)), ending)

    return Family(name, count, run, isolated=True)


def families() -> list[Family]:
    return [
        binary("fuzzed NIfTI", ".nii", ".nii", read_image, 40_000),
        binary("fuzzed NIfTI, compressed", "floats.nii", ".nii.gz", read_image, 15_000),
        binary("fuzzed NRRD", ".nrrd", ".nrrd", read_image, 1_000),
        binary("fuzzed MetaImage", ".mha", ".mha", read_image, 1_000),
        binary("fuzzed PNG", ".png", ".png", read_image, 500),
        binary("fuzzed HDF5 transforms", "bent.h5", ".h5", read_transform, 1_000),
        text("fuzzed text transforms", "bent.tfm", ".tfm", read_transform, 6_000),
        text("fuzzed B-splines", "spline.tfm", ".tfm", read_transform, 3_000),
        binary("fuzzed warps", "warp.nii", ".nii.gz", read_transform, 5_000),
        text("fuzzed tables of pairs", "pairs.csv", ".csv", read_pairs, 10_000),
        text("fuzzed landmarks, CSV", "points.csv", ".csv", read_landmarks, 5_000),
        text("fuzzed landmarks, Slicer", "points.fcsv", ".fcsv", read_landmarks, 3_000),
        text("fuzzed landmarks, JSON", "points.mrk.json", ".mrk.json", read_landmarks, 4_000),
        binary("fuzzed models", ".safetensors", ".safetensors", load_model, 8_000),
    ]
