"""`carl`: one command, one function, each in a file of its own name.

Nothing here imports torch before a command runs, so that `carl --help` answers at once. A command lets errors pass:
`main` turns those that a user can do something about into one line and an exit code.
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
from carlreg.cli._shared import Stopped
from carlreg.cli.convert import convert
from carlreg.cli.demo import demo
from carlreg.cli.evaluate import evaluate
from carlreg.cli.explain import explain
from carlreg.cli.info import info
from carlreg.cli.jacobian import jacobian
from carlreg.cli.models import models
from carlreg.cli.register import register
from carlreg.cli.train import train
from carlreg.cli.view import view
from carlreg.cli.warp import warp
from carlreg.cli.warp_points import warp_points

RUNNING, USAGE = 1, 2
"""Exit codes: it failed while running, it was called wrongly. By a signal: 128 and its number."""
UsageError: Any = typer.BadParameter.__mro__[1]  # typer has no public name for it, and newer ones do not need click

app = typer.Typer(
    name="carl",
    help="Register medical images: for every point of a fixed image, the matching point of a moving one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(register)
app.command()(warp)
app.command("warp-points")(warp_points)
app.command()(jacobian)
app.command()(convert)
app.command()(info)
app.command()(evaluate)
app.command()(explain)
app.command()(view)
app.command()(demo)
app.add_typer(models, name="models")
app.command("train")(train)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and stop.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 1 for a failure while running, 2 for a wrong call."""
    with _told_on_stderr():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


def _run(given: list[str]) -> int:
    try:
        with _stoppable():
            code = app(args=[_dashes(word) for word in given], prog_name="carl", standalone_mode=False)
    except UsageError as error:
        error.show()
        return USAGE
    except Stopped as stopped:
        return _fail("stopped; no unfinished file was left", stopped.code)
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError, ArithmeticError) as error:
        if logging.getLogger("carlreg").isEnabledFor(logging.DEBUG):
            raise
        return _fail(_words(error), RUNNING)
    return code if isinstance(code, int) else 0


@contextmanager
def _stoppable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _told_on_stderr() -> Iterator[None]:
    """What carlreg's loggers say, as lines of ours."""
    logger, handler = logging.getLogger("carlreg"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("carl: %(message)s"))
    before = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _fail(text: str, code: int) -> int:
    print(f"carl: {text}", file=sys.stderr)
    return code


def _words(error: BaseException) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return text or type(error).__name__


def _dashes(word: str) -> str:
    """`--io_iterations` is `--io-iterations`: scripts written for other tools use underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
