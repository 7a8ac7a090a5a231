"""The `carl` command line. Each command is a function, whose module is imported when the command is used.

Nothing here imports torch before a command runs, so that `carl --help` is fast. Commands do not catch errors: `main`
prints those that a user can act on as one line. Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from carlreg import __version__
from carlreg.errors import user_message

try:
    import typer
    from typer.core import TyperGroup
except ImportError as error:  # also without a package that typer needs
    sys.exit(f"carl: {user_message(error) or error}")

from carlreg.cli._shared import Stopped, print_error
from carlreg.cli._threads import respect_machine

COMMANDS = {
    "register": ("register", "Find where each point of the fixed image lies in the moving one."),
    "cohort": ("cohort", "Register many pairs: a table, a folder against one fixed image, or all pairs of a folder."),
    "template": ("atlases", "Build the average shape and image of a group of scans."),
    "segment": ("atlases", "Find the structures of a scan from scans that have labels."),
    "atlas": ("atlases", "Pack labelled scans into one file for `carl segment`."),
    "warp": (
        "transforms",
        "Resample the moving image, or its labels, on the fixed image's grid. The data type is kept.",
    ),
    "warp-points": ("transforms", "Map points from one image to the other, in world millimetres."),
    "jacobian": (
        "transforms",
        "Print the percentage of folds and SDlogJ, and write the Jacobian determinant on the fixed image's grid.",
    ),
    "convert": ("transforms", "Write a transform or an image in another format."),
    "info": (
        "info",
        "Describe an image, a transform, a model or a result folder; of a folder with DICOM, the series in it.",
    ),
    "evaluate": (
        "evaluate",
        "Measure registrations: Dice, HD95, landmark error, folds, SDlogJ, inverse consistency, time and memory.",
    ),
    "explain": ("explain", "Show how a network matches two images, before its refinements."),
    "view": (
        "view",
        "Show a registration in the browser: fixed, moving and warped images, linked by the transform.",
    ),
    "demo": (
        "demo",
        "Register two synthetic patients whose true correspondence is known, then again with one image shifted.",
    ),
    "train": ("train", "Train a network on your own images, or continue training one."),
    "doctor": (
        "doctor",
        "Check the installation: versions, GPU, kernels, models, other tools, disk, memory and threads.",
    ),
    "app": (
        "app",
        "Register scans in the browser: choose or drop two files, look at the result, and correct it by hand.",
    ),
    "models": ("models", "List, describe, verify and import models."),
}
"""The module of each command, and the first paragraph of its help."""
FAILURE, USAGE = 1, 2
"""Exit codes for a failed command and for wrong usage. A signal gives 128 plus its number."""
UsageError: Any = typer.BadParameter.__mro__[1]  # typer has no public name for it, and newer versions bundle click


class Commands(TyperGroup):
    """The commands of `COMMANDS`, each imported when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*COMMANDS, *super().list_commands(ctx)]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in COMMANDS else super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in {*COMMANDS, *self.commands}:  # typer suggests similar names of loaded commands
            self.commands.update({name: load(name) for name in COMMANDS})
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": None,  # its tables cut the names of options on a narrow terminal
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
carl = typer.Typer(
    name="carl",
    cls=Commands,
    help="Register medical images: map every point of a fixed image to the matching point of a moving image.",
    add_completion=True,
    **SETTINGS,
)


def functions(name: str) -> dict[str, Callable[..., Any]]:
    """The function of a command, by its name; those of a group by theirs."""
    module = importlib.import_module(f"carlreg.cli.{COMMANDS[name][0]}")
    if (inner := getattr(module, "COMMANDS", None)) is not None:
        return {f"{name} {word}": function for word, function in inner.items()}
    return {name: getattr(module, name.replace("-", "_"))}


def load(name: str) -> Any:
    """A command, or a group of them, with its options."""
    from carlreg.cli._options import Command

    one = typer.Typer(name=name, help=COMMANDS[name][1], add_completion=False, **SETTINGS)
    for words, function in functions(name).items():
        one.command(words.split()[-1], cls=Command)(function)
    return typer.main.get_command(one)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"carl {__version__}")
        raise typer.Exit


@carl.callback()
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
            code = carl(args=words, prog_name="carl", standalone_mode=False)
    except UsageError as error:
        error.message = error.message.removeprefix("Value error, ")  # from pydantic, by which newer typer checks
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
