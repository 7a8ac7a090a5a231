"""Messages, progress and checks shared by several commands. Nothing here imports torch."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from carlreg.errors import InputError, user_message

LOGGER = logging.getLogger("carlreg")
Overwrite = Annotated[bool, "Replace existing files.", "--overwrite"]
Device = Annotated[str, "auto, cpu, cuda, cuda:0 or mps."]
Number = TypeVar("Number", int, float)
IMAGES = (".nii.gz", ".nii", ".nrrd", ".mha", ".png", ".jpg", ".jpeg", ".tif", ".tiff")


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


ENOUGH = 0.01
"""The share of a part of the work that shows how long the rest takes."""


class Part:
    """A part of the work: its name, and how much of it is done, where that is known."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.begin(name)

    def begin(self, name: str) -> None:
        """Begin another part."""
        self.name, self._began = name, self.clock()
        self.share: float | None = None
        self.end: float | None = None

    def advance(self, share: float) -> None:
        """Note how much of the part is done, from 0 to 1. Since 0, that gives its speed, and so its `end`."""
        now, self.share = self.clock(), min(share, 1.0)
        if self.share == 0:
            self._began = now
        self.end = now + (now - self._began) * (1 - self.share) / self.share if self.share >= ENOUGH else None

    def left(self) -> str:
        """Percent, and the time that is left, unless the part takes longer than its speed had promised."""
        if self.share is None:
            return ""
        seconds = None if self.end is None else self.end - self.clock()
        return time_left(100 * self.share, seconds if seconds is not None and seconds >= 0 else None)


@contextmanager
def working(text: str) -> Iterator[Part]:
    """Show a progress bar on stderr until the work is done, unless --quiet was given or stderr is not a terminal.

    >>> with working("reading") as part:
    ...     part.begin("warping")
    ...     part.advance(0.3)
    """
    part = Part(text)
    if is_quiet() or not sys.stderr.isatty():
        yield part
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    class Name(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(part.name)

    class Bar(BarColumn):
        def render(self, task: Task) -> ProgressBar:
            task.total, task.completed = (None, 0) if part.share is None else (1, part.share)
            return super().render(task)

    class Left(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(part.left())

    columns = (SpinnerColumn(), Name(), Bar(), Left(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(text, total=None)
        yield part


def time_left(percent: float, seconds: float | None) -> str:
    """
    >>> time_left(40.2, 75)
    '40 %, 1:15 left'
    """
    left = "" if seconds is None else f", {int(seconds) // 60}:{int(seconds) % 60:02d} left"
    return f"{percent:.0f} %{left}"


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


def numbers(text: str, kind: type[Number], option: str, expected: str, count: int | None = None) -> list[Number]:
    """Numbers that are separated by commas, spaces or an x, as many as `count`."""
    try:
        found = [kind(word) for word in text.replace("x", " ").replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or count not in (None, len(found)):
        raise typer.BadParameter(f"{option} is {text!r}; expected {expected}")
    return found
