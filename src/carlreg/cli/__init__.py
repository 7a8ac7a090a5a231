"""The `carl` command line. Each command is a function.

Nothing here imports torch before a command runs, so that `carl --help` is fast. Commands do not catch errors: `main`
prints those that a user can act on as one line. Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from carlreg import __version__
from carlreg.cli import models
from carlreg.cli._options import Command
from carlreg.cli._shared import Stopped, print_error
from carlreg.cli._threads import respect_machine
from carlreg.cli.app import app as browser_app
from carlreg.cli.atlases import atlas, segment, template
from carlreg.cli.cohort import cohort
from carlreg.cli.demo import demo
from carlreg.cli.doctor import doctor
from carlreg.cli.evaluate import evaluate
from carlreg.cli.explain import explain
from carlreg.cli.info import info
from carlreg.cli.register import register
from carlreg.cli.train import train
from carlreg.cli.transforms import convert, jacobian, warp, warp_points
from carlreg.cli.view import view

FAILURE, USAGE = 1, 2
"""Exit codes for a failed command and for wrong usage. A signal gives 128 plus its number."""
UsageError: Any = typer.BadParameter.__mro__[1]  # typer has no public name for it, and newer versions bundle click

app = typer.Typer(
    name="carl",
    help="Register medical images: map every point of a fixed image to the matching point of a moving image.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # its tables cut the names of options on a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
many = (cohort, template, segment, atlas)
alone = (warp, warp_points, jacobian, convert, info, evaluate, explain, view, demo, train, doctor)
for function in (register, *many, *alone):
    app.command(cls=Command)(function)
app.command("app", cls=Command)(browser_app)
group = typer.Typer(help="List, describe, verify and import models.", no_args_is_help=True)
for name, function in models.COMMANDS.items():
    group.command(name, cls=Command)(function)
app.add_typer(group, name="models")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"carl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raise `Stopped` on SIGINT and SIGTERM, so that unfinished files are removed."""
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread only
        yield
        return

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Print the package's log records to stderr, warnings and errors unless a command changes the level."""
    logger, handler = logging.getLogger("carlreg"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("carl: %(message)s"))
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@_logging_to_stderr()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 if the command failed, 2 for wrong usage."""
    respect_machine()
    words = [_with_dashes(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    try:
        with _signals_as_exceptions():
            code = app(args=words, prog_name="carl", standalone_mode=False)
    except UsageError as error:
        error.show()
        return USAGE
    except Stopped as stopped:
        print("carl: stopped; no unfinished file was left", file=sys.stderr)
        return stopped.code
    except Exception as error:
        print_error(error)
        return FAILURE
    return code if isinstance(code, int) else 0


def _with_dashes(word: str) -> str:
    """Spell an option with dashes: scripts for other tools use `--io_iterations`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
