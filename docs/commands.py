"""Generate docs/commands.md from the commands.

    python docs/commands.py

A test checks that the page is current.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo

from carlreg.cli import COMMANDS, functions

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """# Commands

`docs/commands.py` generates this page from the commands; `carl COMMAND --help` prints the same.

Option names accept underscores for dashes: `--io_iterations` is `--io-iterations`. Results go to stdout, messages to
stderr. The exit code is 0 for success, 1 if the command failed, 2 for wrong usage, and 128 plus the number of the
signal that stopped the command (130 for Ctrl-C). A mistake in the input is reported in one line; a traceback means a
bug, which we ask you to report. No file is overwritten without `--overwrite`, and no file is left half-written.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(line for name, function in commands() for line in section(name, function))])


def commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command's full name and function, in the order of `--help`."""
    for name in COMMANDS:
        yield from ((f"carl {words}", function) for words, function in functions(name).items())


def section(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """The heading, description, usage and options of a command."""
    hints = get_type_hints(function, include_extras=True)
    rows, call = [], [name]
    for parameter in inspect.signature(function).parameters.values():
        kind, info = hints[parameter.name].__origin__, hints[parameter.name].__metadata__[0]
        required = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            word = parameter.name.upper()
            call.append(word if required else f"[{word}]")
        else:
            # Inside Annotated, typer keeps the first name in `default`.
            declared = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
            names = sorted(declared or [f"--{parameter.name.replace('_', '-')}"], key=len, reverse=True)
            word = ", ".join(names)
            call += [f"{names[0]} {parameter.name.upper()}"] if required else []
        text = " ".join((info.help or "").split())
        if get_origin(kind) is Literal:
            text += f" One of {', '.join(get_args(kind))}."
        if isinstance(parameter.default, (str, int, float)) and not isinstance(parameter.default, bool):
            text += f" Default: {parameter.default}."
        rows.append(f"| `{word}` | {text} |")
    yield f"## {name}\n"
    yield re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(function.__doc__ or "")) + "\n"
    options = " [OPTIONS]" if any("`-" in row for row in rows) else ""
    yield f"```sh\n{' '.join(call)}{options}\n```\n"
    if examples := getattr(function, "examples", ()):
        yield "For example:\n\n```sh\n" + "\n".join(examples) + "\n```\n"
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
