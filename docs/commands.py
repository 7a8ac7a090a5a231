"""Write docs/commands.md from the commands themselves.

    python docs/commands.py

A test holds the page to what this would write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from carlreg.cli import app

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """# Commands

This page is written by `docs/commands.py` from the commands themselves. `carl COMMAND --help` says the same.

Underscores and dashes are alike in option names: `--io_iterations` is `--io-iterations`. Messages go to stderr. The
exit code is 0 for success, 1 for a failure while running, 2 for a wrong call, and 128 plus the signal's number for a
command that was stopped (130 for Ctrl-C). Nothing is overwritten without `--overwrite`. A file appears whole or not at
all.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [INTRODUCTION, *(line for name, function in commands("carl", app) for line in section(name, function))]
    )


def commands(prefix: str, group: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command's full name and function, in the order of `--help`."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{prefix} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(f"{prefix} {inner.name}", inner.typer_instance)


def section(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """A heading, what the command does, how it is called, and its options."""
    hints = get_type_hints(function, include_extras=True)
    rows, call = [], [name]
    for parameter in inspect.signature(function).parameters.values():
        kind, info = hints[parameter.name].__origin__, hints[parameter.name].__metadata__[0]
        needed = parameter.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            word = parameter.name.upper()
            call.append(word if needed else f"[{word}]")
        else:
            # Inside of Annotated, typer keeps the first name where a default would be.
            given = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
            names = sorted(given or [f"--{parameter.name.replace('_', '-')}"], key=len, reverse=True)
            word = ", ".join(names)
            call += [f"{names[0]} {parameter.name.upper()}"] if needed else []
        text = " ".join((info.help or "").split())
        if choices := _choices(kind):
            text += f" One of {', '.join(choices)}."
        default = getattr(parameter.default, "value", parameter.default)
        if isinstance(default, (str, int, float)) and not isinstance(default, bool):
            text += f" Default: {default}."
        rows.append(f"| `{word}` | {text} |")
    yield f"## {name}\n"
    yield re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(function.__doc__ or "")) + "\n"
    options = " [OPTIONS]" if any("`-" in row for row in rows) else ""
    yield f"```sh\n{' '.join(call)}{options}\n```\n"
    if rows:
        yield "\n".join(["| option | what |", "|---|---|", *rows]) + "\n"


def _choices(kind: Any) -> list[str]:
    """The values that an option of this type accepts, if it is a list of choices."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(choice.value) for choice in kind]
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
