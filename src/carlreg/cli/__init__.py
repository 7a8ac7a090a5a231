"""`carl`: one command, one function, each in a file of its own name.

Nothing here imports torch before a command runs, so that `carl --help` answers at once. A command lets errors pass:
`main` turns those that a user can do something about into one line and an exit code.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from carlreg import __version__
from carlreg.cli.demo import demo
from carlreg.cli.models import models

RUNNING, USAGE, INTERRUPTED = 1, 2, 130
"""Exit codes: it failed while running, it was called wrongly, it was stopped by the user."""
UsageError: Any = typer.BadParameter.__mro__[1]  # typer has no public name for it, and newer ones do not need click

app = typer.Typer(
    name="carl",
    help="Register medical images: for every point of a fixed image, the matching point of a moving one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.add_typer(models, name="models")


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
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="carl: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        code = app(args=[_dashes(word) for word in given], prog_name="carl", standalone_mode=False)
    except UsageError as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped; nothing was written", INTERRUPTED)
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        if logging.getLogger("carlreg").isEnabledFor(logging.DEBUG):
            raise
        return _fail(_words(error), RUNNING)
    return code if isinstance(code, int) else 0


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
