"""What several commands need: options, progress, and where a transform comes from. Nothing here imports torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from carlreg.files.images import Image
    from carlreg.files.world_transform import ItkTransform, WorldTransform

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors, show no progress.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more; an error shows where it came from.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")]
Transforms = Annotated[
    list[Path],
    typer.Option(
        "--transform",
        "-t",
        help="A folder of `carl register`, or a transform file. Several, as for ANTs: the first acts on a point first.",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option("--reference", "-r", help="An image whose grid the result gets; a folder of `carl register` has one."),
]
IMAGES = (".nii.gz", ".nii", ".nrrd", ".mha", ".png", ".tif", ".tiff")
REPORT, FORWARD, INVERSE, WARPED = "report.json", "transform.h5", "inverse_transform.h5", "warped.nii.gz"


class Side(str, Enum):
    """Which image something belongs to."""

    fixed = "fixed"
    moving = "moving"


class Interpolation(str, Enum):
    """How values between voxels are made."""

    linear = "linear"
    nearest = "nearest"


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: what is under way cleans up after itself. Not an Exception, so that nothing goes on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


def set_loudness(quiet: bool, verbose: bool) -> None:
    """How much carlreg's loggers say, on stderr."""
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose were both given; expected one of them")
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING
    logging.getLogger("carlreg").setLevel(level)


def say(text: str, quiet: bool = False) -> None:
    """A line on stderr."""
    if not quiet:
        typer.echo(f"carl: {text}", err=True)


class Progress:
    """What is being done, and how far it is. Does nothing until `working` gives it a bar."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar, self._task = bar, task

    def say(self, text: str) -> None:
        """Name the work that begins; how long it takes is not known."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=0, total=None)

    def step(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


@contextmanager
def working(text: str, quiet: bool) -> Iterator[Progress]:
    """A progress bar on stderr, gone when the work is done; none if `quiet` or if stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield Progress(bar, bar.add_task(text, total=None))


def check_new(path: Path, overwrite: bool, endings: tuple[str, ...] = ()) -> None:
    """Refuse an output file before any work is done for it."""
    if endings and not path.name.lower().endswith(endings):
        raise ValueError(f"{path} has an unknown extension; expected one of {', '.join(endings)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; expected the name of a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; choose another name, or say --overwrite")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it first")


def is_registration(path: Path) -> bool:
    return path.is_dir() and (path / FORWARD).is_file()


def read_transform(paths: list[Path], *, inverse: bool = False) -> WorldTransform | ItkTransform:
    """The map from fixed to moving points of a folder or of files; of a folder also the inverse."""
    from carlreg.files import transform_files

    files = [path / (INVERSE if inverse else FORWARD) if path.is_dir() else path for path in paths]
    for path, file in zip(paths, files, strict=True):
        if path.is_dir() and not file.is_file():
            raise ValueError(f"{path} is a folder without {file.name}; expected a folder of `carl register`, or a file")
    return transform_files.read(files if len(files) > 1 else files[0])


def read_reference(reference: Path | None, paths: list[Path], transform: Any) -> Image:
    """The grid for a result: the one asked for, that of a registration folder, or that of the displacements."""
    import numpy as np

    from carlreg.files import images
    from carlreg.files.images import Image
    from carlreg.files.world_transform import WorldTransform

    if reference is not None:
        return images.read(reference)
    if len(paths) == 1 and is_registration(paths[0]) and (paths[0] / WARPED).is_file():
        return images.read(paths[0] / WARPED)
    if isinstance(transform, WorldTransform) and not transform.is_linear:
        shape = transform.displacement.shape[:-1]
        return Image(np.zeros(shape, np.uint8), transform.lattice, f"the grid of {paths[0]}")
    raise ValueError(f"{paths[0]} does not say on which grid the result should lie; give an image with --reference")
