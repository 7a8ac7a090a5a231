"""Reading in a child process: a file that crashes ITK or HDF5, hangs or exhausts memory fails alone.

The child has SimpleITK and h5py, but not torch. It sends a header, waits until the parent has checked it and grants
memory for the rest, and then sends arrays. Headers are lines of JSON; arrays follow theirs as bytes.

Importing SimpleITK takes far longer than reading a small file. A nursery, started with the first file, imports it once
and forks a child for each file; where a system cannot fork, each child is a new interpreter.
"""

import atexit
import glob
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from carlreg.errors import DependencyError, InputError
from carlreg.files.checks import ImageError, check_size
from carlreg.files.itk import affine_of, read_header, reason, simpleitk

LINEAR = ("AffineTransform", "MatrixOffsetTransformBase")
DIRECT = (*LINEAR, "CompositeTransform", "DisplacementFieldTransform", "BSplineTransform")
"""Types of ITK's transforms that are sent as they are stored; all others are linear and become affine ones."""
BLOCK = 2**22  # numbers, or slices of an image, sent at a time
ROOM = 2**30  # bytes that a child may use beyond what it has after its imports, and beyond what the parent grants
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from carlreg.files import isolated; isolated."


class UnreadableError(InputError):
    """A file that a library cannot read. The message is the reason alone."""


@dataclass(frozen=True)
class Reader:
    """A child that reads one file."""

    process: Any

    def header(self) -> dict[str, Any]:
        """What the file states, before its arrays are read; raise UnreadableError if it cannot be read."""
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self.fate()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise UnreadableError(message["error"])
        return message

    def proceed(self, memory: int) -> None:
        """Allow the child to read arrays of `memory` bytes in all."""
        self.answer(str(memory))

    def answer(self, text: str) -> None:
        """Send a line."""
        with suppress(BrokenPipeError):  # its fate shows when the arrays are read
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def array(self) -> npt.NDArray[Any]:
        """The next array."""
        about = self.header()
        data = np.empty(about["shape"], about["dtype"])
        if self.process.stdout.readinto(data.reshape(-1).view(np.uint8)) < data.nbytes:
            raise self.fate()
        return data

    def fate(self) -> UnreadableError:
        """What became of a child that ended too early."""
        code = self.process.wait()
        if code == -9:
            return UnreadableError("reading it took too long or too much memory")
        crashed, failed = f"it crashed its reader (signal {-code})", f"its reader failed (exit code {code})"
        return UnreadableError(crashed if code < 0 else failed)


@contextmanager
def reading(kind: Literal["image", "series", "transform"], path: Path) -> Iterator[Reader]:
    """Start a child that reads an image, a DICOM series or a transform. It ends with the block."""
    _refuse_detached(path)
    files = path.iterdir() if path.is_dir() else [path]
    seconds = 10 + sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    process = (
        _nursery().fork(kind, path)
        if hasattr(socket, "recv_fds")
        else _python("serve(*sys.argv[2:])", kind, path.absolute())
    )
    with process:
        process.stdout.readline()  # its imports are done: the clock starts
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            yield Reader(process)
        finally:
            timer.cancel()
            process.kill()


def _python(call: str, *arguments: Any, stdin: Any = subprocess.PIPE) -> Any:
    """A new interpreter that calls a function of this module."""
    # The parent's path, but never the current folder: it may hold a stranger's files.
    search = json.dumps([os.path.abspath(folder) for folder in sys.path if folder])
    command = [sys.executable, "-I", "-c", START + call, search, *map(str, arguments)]
    single = {"OMP_NUM_THREADS": "1", "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    pipes: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env={**os.environ, **single}, **pipes)


class _Nursery:
    """A process that forks children. Forked copies of this process have their own."""

    def __init__(self) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.channel, other = socket.socketpair()
        self.process = _python("nurse()", stdin=other)
        other.close()
        atexit.register(self.close)

    def close(self) -> None:
        self.channel.close()
        if os.getpid() == self.owner:
            self.process.communicate()

    def fork(self, kind: str, path: Path) -> "_Forked":
        pipes = [os.pipe() for _ in range(3)]
        theirs, ours = (pipes[0][0], pipes[1][1], pipes[2][1]), (pipes[0][1], pipes[1][0], pipes[2][0])
        stdin, stdout, status = (os.fdopen(end, mode) for end, mode in zip(ours, ("wb", "rb", "rb"), strict=True))
        with self.lock:  # until the nursery has taken the request: two must not arrive at once
            with suppress(OSError):  # a dead nursery: the child's output ends at once
                socket.send_fds(self.channel, [json.dumps([kind, str(path.absolute())]).encode()], theirs)
            for end in theirs:
                os.close(end)
            return _Forked(stdin, stdout, status, int(status.readline() or 0))


@dataclass(frozen=True)
class _Forked:
    """A child of the nursery, with the attributes of a Popen that `Reader` needs."""

    stdin: Any
    stdout: Any
    status: Any
    """Process number and exit code of the child, a line each."""
    pid: int

    def __enter__(self) -> "_Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()  # as Popen does: a child that is being killed may still hold its file open
        for end in (self.stdin, self.stdout, self.status):
            with suppress(BrokenPipeError):
                end.close()

    def kill(self) -> None:
        if self.pid and not select.select([self.status], [], [], 0)[0]:  # no exit code yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return int(self.status.readline() or -signal.SIGKILL)


_nurseries: list[_Nursery] = []
_starting = threading.Lock()


def _nursery() -> _Nursery:
    """The nursery of this process; a new one if there is none, or if it died."""
    with _starting:
        if not _nurseries or _nurseries[-1].owner != os.getpid() or _nurseries[-1].process.poll() is not None:
            _nurseries.append(_Nursery())
        return _nurseries[-1]


def read_image(path: Path, check: Callable[[dict[str, Any]], None]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The affine map of an image and its voxels in ITK's order, if `check` does not raise for its header."""
    with reading("image", path) as child:
        header = child.header()
        check(header)
        width = header["width"] * header["components"]
        check_size(header["size"], str(path), width)
        child.proceed(math.prod(header["size"]) * width)
        return np.array(child.header()["affine"]), child.array()


def _refuse_detached(path: Path) -> None:
    """Refuse headers that refer to voxel files outside the image's own folder: those may be private."""
    ending = path.suffix.lower()
    if ending not in (".mha", ".mhd", ".nrrd", ".nhdr") or not path.is_file():
        return
    with open(path, encoding="latin-1", newline="") as file:
        text = file.read(2**20).replace("\0", "\n")  # where names end for ITK
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
            if not all(Path(os.path.realpath(file)).is_relative_to(folder) for file in files):
                expected = "a file beside it: copy it there, and change the header"
                raise ImageError(f"{path} takes its voxels from {name}, outside its own folder; expected {expected}")


# ---- the child ------------------------------------------------------------------------------------------------------


class Child:
    """The child's side: sends what it reads to standard output."""

    def __init__(self) -> None:
        self._channel = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what libraries print does not belong between the arrays

    def send(self, header: dict[str, Any], blocks: Iterable[npt.NDArray[Any]] = ()) -> None:
        self._channel.write(json.dumps(header).encode() + b"\n")
        for block in blocks:
            self._channel.write(np.ascontiguousarray(block).data)
        self._channel.flush()

    def send_array(self, array: Any) -> None:
        """Send an array, or a dataset of a file."""
        blocks = (array[start : start + BLOCK] for start in range(0, len(array), BLOCK))
        self.send({"dtype": array.dtype.str, "shape": array.shape}, blocks)

    def question(self) -> str:
        """The parent's answer."""
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        return line.removesuffix("\n")

    def wait(self) -> None:
        """Until the parent grants memory."""
        _allow(int(self.question()))


def nurse() -> None:
    """The nursery's main function: for each file that the socket on standard input names, fork a child, and a keeper
    that reports its number and its exit code."""
    _import()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    channel = socket.socket(fileno=os.dup(0))
    while True:
        request, handles, _, _ = socket.recv_fds(channel, 2**16, 3)
        if not request:
            return
        if os.fork() == 0:
            _keep(request, *handles)
        for handle in handles:
            os.close(handle)


def _keep(request: bytes, stdin: int, stdout: int, status: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        try:
            serve(*json.loads(request))
        finally:
            os._exit(0)
    os.close(stdin)
    os.close(stdout)
    with suppress(BrokenPipeError):
        os.write(status, b"%d\n" % pid)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _import() -> None:
    with suppress(ImportError, DependencyError):
        simpleitk()
        import h5py  # noqa: F401


def serve(kind: str, path: str) -> None:
    """The child's main function."""
    child = Child()
    _import()
    child.send({})  # the imports are done
    _allow(0)
    try:
        _refuse_external(path)
        {"image": _image, "series": _series, "transform": _transform}[kind](path, child)
    except Exception as error:  # whatever a library makes of a damaged file
        child.send({"error": reason(error)})


def _allow(memory: int) -> None:
    """Limit the address space, where the system can: ITK copies an image a few times."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * memory + ROOM, resource.RLIM_INFINITY))


def _about(reader: Any) -> dict[str, Any]:
    kind = simpleitk().GetPixelIDValueAsString(reader.GetPixelID())
    return {
        "size": reader.GetSize(),
        "components": reader.GetNumberOfComponents(),
        "width": next((int(bits) // 8 for bits in re.findall(r"(8|16|32|64)[- ]bit", kind)), 8),
        "affine": affine_of(reader).tolist(),
        "spacing": reader.GetSpacing(),
    }


def _image(path: str, child: Child) -> None:
    reader = read_header(path)
    child.send(_about(reader))
    child.wait()
    image = reader.Execute()
    child.send({"affine": affine_of(image).tolist()})
    child.send_array(simpleitk().GetArrayViewFromImage(image))


def _series(path: str, child: Child) -> None:
    sitk = simpleitk()
    names = sitk.ImageSeriesReader.GetGDCMSeriesIDs(path)
    series = {name: sitk.ImageSeriesReader.GetGDCMSeriesFileNames(path, name) for name in names}
    child.send({"series": [_describe_series(name, files) for name, files in series.items()]})
    files, stated = series[child.question()], None
    child.send(_about(read_header(files[0])))
    child.wait()
    if len(files) == 1:
        image = sitk.ReadImage(files[0])
    else:
        reader = sitk.ImageSeriesReader()
        reader.SetFileNames(files)
        reader.MetaDataDictionaryArrayUpdateOn()
        image = reader.Execute()
        slices, tag = range(len(files)), "0020|0032"  # the position of a slice
        if all(reader.HasMetaDataKey(i, tag) for i in slices):
            stated = [[float(x) for x in reader.GetMetaData(i, tag).split("\\")] for i in slices]
    child.send({"affine": affine_of(image).tolist(), "stated": stated})
    child.send_array(sitk.GetArrayViewFromImage(image))


def _describe_series(name: str, files: Sequence[str]) -> dict[str, Any]:
    reader = read_header(files[0])

    def tag(key: str) -> str:
        return str(reader.GetMetaData(key)).strip(" \0") if reader.HasMetaDataKey(key) else ""

    about = {"number": tag("0020|0011"), "description": tag("0008|103e"), "modality": tag("0008|0060")}
    return {"uid": name, "files": len(files), **about}


Part = tuple[str, npt.NDArray[np.float64], Any]
"""A type, its fixed parameters, and its parameters: an array or a dataset of a file."""


def _transform(path: str, child: Child) -> None:
    """Parts as ITK's files store them, each of a type in `DIRECT`; composites are flattened."""
    parts = list(_hdf5_parts(path)) if _is_hdf5(path) else []
    if not parts or any(part[0].partition("_")[0] not in DIRECT for part in parts):
        parts = [("CompositeTransform", np.zeros(0), np.zeros(0))]
        parts += [_itk_part(part) for part in _flattened(simpleitk().ReadTransform(path))]
    about = [
        {"kind": kind, "fixed": fixed.tolist(), "count": len(numbers), "width": numbers.dtype.itemsize}
        for kind, fixed, numbers in parts
    ]
    child.send({"parts": about})
    child.wait()
    for _, _, numbers in parts:
        child.send_array(numbers)


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
    if not os.path.isfile(path):
        return False
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
    if not _is_hdf5(path):
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
