"""Options, progress and input handling shared by several commands. Nothing here imports torch."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from carlreg.errors import InputError, user_message
from carlreg.files.results import INVERSE, TRANSFORM, WARPED, ResultFolder

if TYPE_CHECKING:
    from carlreg.files.images import Image
    from carlreg.files.world_transform import ItkTransform, WorldTransform

LOGGER = logging.getLogger("carlreg")


def _set_level(context: typer.Context, parameter: typer.CallbackParam, value: bool) -> bool:
    """Set the log level as soon as --quiet or --verbose is parsed: a command only has to declare the two options."""
    if value:
        if context.params.get("verbose" if parameter.name == "quiet" else "quiet"):
            raise typer.BadParameter("--quiet and --verbose exclude each other; use only one of them")
        LOGGER.setLevel(logging.ERROR if parameter.name == "quiet" else logging.DEBUG)
    return value


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_level, help="Print errors only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_set_level, help="Print debug output and full tracebacks.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
Transforms = Annotated[
    list[Path],
    typer.Option(
        "--transform",
        "-t",
        help="Result folder of `carl register`, or transform file. Repeat the option to chain transforms: the first is "
        "applied to a point first.",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option("--reference", "-r", help="Image that defines the output grid. Not needed with a result folder."),
]
IMAGES = (".nii.gz", ".nii", ".nrrd", ".mha", ".png", ".tif", ".tiff")
Side = Literal["fixed", "moving"]
Interpolation = Literal["linear", "nearest"]


class Stopped(BaseException):
    """SIGINT or SIGTERM. Not an Exception, so that no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


def message(text: str, *, always: bool = False) -> None:
    """Print a line on stderr, unless --quiet was given and it is not `always` printed."""
    if always or not is_quiet():
        typer.echo(f"carl: {text}", err=True)


def is_quiet() -> bool:
    return not LOGGER.isEnabledFor(logging.WARNING)


def print_error(error: BaseException, subject: str = "") -> None:
    """Print an error on stderr: one line if the user can act on it, the traceback if it is a bug or with --verbose."""
    text = user_message(error)
    if text is None or LOGGER.isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    text = text or f"this is a bug ({type(error).__name__}); please report it with the traceback above"
    message(f"{subject}: {text}" if subject else text, always=True)


class Progress:
    """The current task and how far it has got. Does nothing without a bar; see `working`."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar, self._task = bar, task

    def start(self, text: str) -> None:
        """Show the name of the next task, whose length is unknown."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=0, total=None)

    def step(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)


@contextmanager
def working(text: str) -> Iterator[Progress]:
    """Show a progress bar on stderr until the work is done, unless --quiet was given or stderr is not a terminal."""
    if is_quiet() or not sys.stderr.isatty():
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
        raise InputError(f"{path} has an unknown extension; expected one of {', '.join(endings)}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected the name of a file")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already; choose another name, or give --overwrite")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: the folder {path.parent} does not exist; create it first")


def read_transform(paths: list[Path], *, inverse: bool = False) -> WorldTransform | ItkTransform:
    """Read the map from fixed to moving points from a result folder or transform files; a folder has an inverse too."""
    from carlreg.files import transform_files

    files = [path / (INVERSE if inverse else TRANSFORM) if path.is_dir() else path for path in paths]
    for path, file in zip(paths, files, strict=True):
        if path.is_dir() and not file.is_file():
            raise InputError(f"{path} is a folder without {file.name}; expected a folder of `carl register`, or a file")
    return transform_files.read(files if len(files) > 1 else files[0])


def read_reference(reference: Path | None, paths: list[Path], transform: Any) -> Image:
    """Choose the output grid: that of --reference, of a result folder, or of the displacement field."""
    import numpy as np

    from carlreg.files import images
    from carlreg.files.images import Image
    from carlreg.files.world_transform import WorldTransform

    if reference is not None:
        return images.read(reference)
    if len(paths) == 1 and (result := ResultFolder(paths[0])).holds_registration() and result[WARPED].is_file():
        return images.read(result[WARPED])
    if isinstance(transform, WorldTransform) and not transform.is_linear:
        shape = transform.displacement.shape[:-1]
        return Image(np.zeros(shape, np.uint8), transform.lattice, f"the grid of {paths[0]}")
    raise InputError(f"{paths[0]} does not define an output grid; give an image with --reference")
