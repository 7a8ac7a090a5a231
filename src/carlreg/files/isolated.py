"""Reading in a child process: a file that crashes ITK or HDF5, hangs or exhausts memory fails alone.

The child imports SimpleITK or h5py, but not torch. It sends a header, waits until the parent has checked it and grants
memory for the rest, and then sends arrays. Headers are lines of JSON; arrays follow theirs as bytes.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from carlreg.errors import InputError
from carlreg.files.checks import ImageError, check_size
from carlreg.files.itk import affine_of, read_header, reason, simpleitk

LINEAR = ("AffineTransform", "MatrixOffsetTransformBase")
DIRECT = (*LINEAR, "CompositeTransform", "DisplacementFieldTransform", "BSplineTransform")
"""Types of ITK's transforms that are sent as they are stored; all others are linear and become affine ones."""
Kind = Literal["image", "series", "transform"]
BLOCK = 2**22
"""Numbers sent at a time."""
ROOM = 2**30
"""Bytes that a child may use beyond what it has after its imports, and beyond what the parent grants."""
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from carlreg.files import isolated; isolated.serve()"


class UnreadableError(InputError):
    """A file that a library cannot read. The message is the reason alone."""


# ---- the parent -----------------------------------------------------------------------------------------------------


class Reader:
    """A child that reads one file."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def header(self) -> dict[str, Any]:
        """What the file states, before its arrays are read; raise UnreadableError if it cannot be read."""
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise UnreadableError(_fate(self._process))
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise UnreadableError(message["error"])
        return message

    def proceed(self, memory: int) -> None:
        """Allow the child to read arrays of `memory` bytes in all."""
        with suppress(BrokenPipeError):  # its fate shows when the arrays are read
            self._process.stdin.write(f"{memory}\n".encode())
            self._process.stdin.flush()

    def array(self) -> npt.NDArray[Any]:
        """The next array."""
        about = self.header()
        data = np.empty(about["shape"], about["dtype"])
        view = data.reshape(-1).view(np.uint8)
        while len(view):
            count = self._process.stdout.readinto(view)
            if not count:
                raise UnreadableError(_fate(self._process))
            view = view[count:]
        return data


@contextmanager
def reading(kind: Kind, path: Path) -> Iterator[Reader]:
    """Start a child that reads an image, a DICOM series or a transform. It ends with the block."""
    _refuse_detached(path)
    files = path.iterdir() if path.is_dir() else [path]
    seconds = 10 + sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    # The parent's path, but never the current folder: it may hold a stranger's files.
    search = json.dumps([os.path.abspath(folder) for folder in sys.path if folder])
    command = [sys.executable, "-I", "-c", START, search, kind, str(path.absolute())]
    single = {"OMP_NUM_THREADS": "1", "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, **single}, **pipes) as process:
        process.stdout.readline()  # type: ignore[union-attr]  # its imports are done: the clock starts
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            yield Reader(process)
        finally:
            timer.cancel()
            process.kill()


def read_image(path: Path, check: Callable[[dict[str, Any]], None]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The affine map of an image and its voxels in ITK's order, if `check` does not raise for its header."""
    with reading("image", path) as child:
        header = child.header()
        check(header)
        width = header["width"] * header["components"]
        check_size(header["size"], str(path), width)
        child.proceed(math.prod(header["size"]) * width)
        return np.array(child.header()["affine"]), child.array()


def _fate(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    if code == -9:
        return "reading it took too long or too much memory"
    return f"it crashed its reader (signal {-code})" if code < 0 else f"its reader failed (exit code {code})"


def _refuse_detached(path: Path) -> None:
    """Refuse headers that refer to voxel files outside the image's own folder: those may be private."""
    ending = path.suffix.lower()
    if ending not in (".mha", ".mhd", ".nrrd", ".nhdr") or not path.is_file():
        return
    with open(path, "rb") as file:
        text = file.read(2**20).decode("latin-1").replace("\0", "\n")  # where names end for ITK
    key = r"ElementDataFile\s*[=:]" if ending in (".mha", ".mhd") else r"data ?file\s*:"
    folder = path.resolve().parent
    for match in re.finditer(rf"(?im)^[^\S\n]*{key}[^\S\n]*(.*)$", text):
        value = match[1].strip()
        if value.lower() == "local":
            continue
        listed = text[match.end() :].splitlines() if value.upper().startswith("LIST") else [value]
        for name in filter(None, map(str.strip, listed)):
            # A pattern such as slice%03d.raw stands for the files that match it.
            pattern = re.sub(r"%\d*d", "*", glob.escape(name.split()[0] if "%" in name else name))
            files = [folder / name, *(folder.glob(pattern) if "*" in pattern and not pattern.startswith("/") else [])]
            if not all(_lies_in(file, folder) for file in files):
                raise ImageError(
                    f"{path} takes its voxels from {name}, outside its own folder; expected a file beside it: "
                    "copy it there, and change the header"
                )


def _lies_in(file: Path, folder: Path) -> bool:
    """Whether a path leads into a folder, links followed; not if it is no possible path at all."""
    try:
        return file.resolve().is_relative_to(folder)
    except (OSError, RuntimeError):
        return False


# ---- the child ------------------------------------------------------------------------------------------------------


def serve() -> None:
    """The child's main function: read the file that the command line names, and send it to standard output."""
    kind, path = sys.argv[2:]
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print does not belong between the arrays
    if kind == "transform":
        with suppress(ImportError):
            import h5py  # noqa: F401
    simpleitk()
    channel.write(b"ready\n")
    channel.flush()
    _allow(0)
    try:
        for message in {"image": _image, "series": _series, "transform": _transform}[kind](path):
            if isinstance(message, dict):
                channel.write(json.dumps(message).encode() + b"\n")
            else:
                dtype, shape, blocks = message
                channel.write(json.dumps({"dtype": dtype, "shape": shape}).encode() + b"\n")
                for block in blocks:
                    channel.write(np.ascontiguousarray(block).data)
            channel.flush()
    except Exception as error:  # whatever a library makes of a damaged file
        channel.write(json.dumps({"error": reason(error)}).encode() + b"\n")
        channel.flush()


Message = dict[str, Any] | tuple[str, tuple[int, ...], Iterable[npt.NDArray[Any]]]


def _wait() -> None:
    """Until the parent grants memory."""
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    _allow(int(line))


def _allow(memory: int) -> None:
    """Limit the address space, where the system can: ITK copies an image a few times."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * memory + ROOM, resource.RLIM_INFINITY))


def _whole(array: npt.NDArray[Any]) -> Message:
    return array.dtype.str, array.shape, [array]


def _about(reader: Any) -> dict[str, Any]:
    kind = simpleitk().GetPixelIDValueAsString(reader.GetPixelID())
    width = next((int(bits) // 8 for bits in re.findall(r"(8|16|32|64)[- ]bit", kind)), 8)
    return {
        "size": reader.GetSize(),
        "components": reader.GetNumberOfComponents(),
        "width": width,
        "affine": affine_of(reader).tolist(),
        "spacing": reader.GetSpacing(),
    }


def _image(path: str) -> Iterator[Message]:
    _refuse_external(path)
    reader = read_header(path)
    yield _about(reader)
    _wait()
    image = reader.Execute()
    yield {"affine": affine_of(image).tolist()}
    yield _whole(simpleitk().GetArrayViewFromImage(image))


def _series(path: str) -> Iterator[Message]:
    sitk = simpleitk()
    names = sitk.ImageSeriesReader.GetGDCMSeriesIDs(path)
    files = {name: sitk.ImageSeriesReader.GetGDCMSeriesFileNames(path, name) for name in names}
    if not names:
        yield {"series": 0}
        return
    largest = max(sorted(names), key=lambda name: len(files[name]))
    first = _about(read_header(files[largest][0]))
    yield {**first, "series": len(names), "name": largest, "files": len(files[largest])}
    _wait()
    if len(files[largest]) == 1:
        image, stated = sitk.ReadImage(files[largest][0]), None
    else:
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(files[largest])
        reader.MetaDataDictionaryArrayUpdateOn()
        image = reader.Execute()
        slices, tag = range(len(files[largest])), "0020|0032"  # the position of a slice
        whole = all(reader.HasMetaDataKey(i, tag) for i in slices)
        stated = [[float(x) for x in reader.GetMetaData(i, tag).split("\\")] for i in slices] if whole else None
    yield {"affine": affine_of(image).tolist(), "components": image.GetNumberOfComponentsPerPixel(), "stated": stated}
    yield _whole(sitk.GetArrayViewFromImage(image))


def _transform(path: str) -> Iterator[Message]:
    """Parts as ITK's files store them, each of a type in `DIRECT`; composites are flattened."""
    _refuse_external(path)
    parts = list(_hdf5_parts(path)) if _is_hdf5(path) else []
    if not parts or any(part[0].partition("_")[0] not in DIRECT for part in parts):
        parts = [("CompositeTransform", np.zeros(0), np.zeros(0))]
        parts += [_itk_part(part) for part in _flattened(simpleitk().ReadTransform(path))]
    about = [
        {"kind": kind, "fixed": fixed.tolist(), "count": len(numbers), "width": numbers.dtype.itemsize}
        for kind, fixed, numbers in parts
    ]
    yield {"parts": about}
    _wait()
    for _, _, numbers in parts:
        blocks = (numbers[start : start + BLOCK] for start in range(0, len(numbers), BLOCK))
        yield numbers.dtype.str, (len(numbers),), blocks


Part = tuple[str, npt.NDArray[np.float64], Any]
"""A type, its fixed parameters, and its parameters: an array or a dataset of a file."""


def _flattened(transform: Any) -> Iterator[Any]:
    if transform.GetName() == "CompositeTransform":
        composite = simpleitk().CompositeTransform(transform)
        for number in range(composite.GetNumberOfTransforms()):
            yield from _flattened(composite.GetNthTransform(number))
    else:
        yield transform


def _itk_part(transform: Any) -> Part:
    """A field or a B-spline as it is; every linear transform as an affine one."""
    sitk, dim, name = simpleitk(), transform.GetDimension(), transform.GetName()
    fixed = np.array(transform.GetFixedParameters(), np.float64)
    if name == "DisplacementFieldTransform":
        field = sitk.GetArrayFromImage(sitk.DisplacementFieldTransform(transform).GetDisplacementField())
        return f"{name}_double_{dim}_{dim}", fixed, field.reshape(-1)
    if not transform.IsLinear():
        order = sitk.BSplineTransform(transform).GetOrder()
        return f"{name}_double_{dim}_{dim}_{order}", fixed, np.array(transform.GetParameters(), np.float64)
    shift = np.array(transform.TransformPoint([0.0] * dim))
    linear = np.transpose([transform.TransformPoint(axis) for axis in np.eye(dim).tolist()]) - shift[:, None]
    return f"AffineTransform_double_{dim}_{dim}", np.zeros(dim), np.concatenate([linear.ravel(), shift])


def _is_hdf5(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def _hdf5_parts(path: str) -> Iterator[Part]:
    import h5py

    group = h5py.File(path, "r")["TransformGroup"]
    for number in range(len(group)):
        part = group[str(number)]
        (kind,) = part["TransformType"].asstr()[()]
        if kind.startswith("CompositeTransform"):
            yield kind, np.zeros(0), np.zeros(0)
            continue
        spelling = "Transform" if "TransformParameters" in part else "Tranform"  # as older versions of ITK write it
        fixed, numbers = part[f"{spelling}FixedParameters"], part[f"{spelling}Parameters"]
        if fixed.size > 100 or numbers.ndim != 1 or numbers.dtype.kind != "f":
            raise OSError("its parameters are not vectors of floating-point numbers")
        yield kind, fixed[()].astype(np.float64).reshape(-1), numbers


def _refuse_external(path: str) -> None:
    """Refuse HDF5 whose data lie in other files, which may be private."""
    if not os.path.isfile(path) or not _is_hdf5(path):
        return
    import h5py

    def walk(group: Any, depth: int) -> None:
        for name in group:
            item = group[name] if type(group.get(name, getlink=True)) is h5py.HardLink else None
            if item is None or (isinstance(item, h5py.Dataset) and (item.external or item.is_virtual)):
                raise OSError("its data lie in other files")
            if isinstance(item, h5py.Group) and depth < 5:
                walk(item, depth + 1)

    with h5py.File(path, "r") as file:
        walk(file, 0)
