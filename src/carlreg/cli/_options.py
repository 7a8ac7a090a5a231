"""Commands built from functions and dataclasses: a default and a help text are written once, beside their name."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from carlreg.cli._shared import LOGGER
from carlreg.errors import InputError

Function = Callable[..., Any]


GENERAL = ("threads", "quiet", "verbose", "help")
"""Options of many commands, which come last in their help."""
KIND = re.compile(r"<(?:list\[)?(\w+)(?:\]| range)>")
"""A type as Python or click names it: `<list[str]>`, `<int range>`. A user reads what to type: `<str>`, `<int>`."""


class Command(TyperCommand):
    """A command whose help is plain text: names of options are never cut, and panels are sections."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        if examples := getattr(self.callback, "examples", ()):
            with formatter.section("Examples"):
                for line in "\n".join(examples).splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in getattr(self.callback, "sections", ())}
        general = []
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                record = (KIND.sub(lambda kind: f"<{kind[1].lower()}>", record[0]), record[1])
                usual = f"{parameter.param_type_name.capitalize()}s"
                panel = getattr(parameter, "rich_help_panel", None)
                if panel is None and parameter.name in GENERAL:
                    general.append(record)
                else:
                    sections.setdefault(panel or usual, []).append(record)
        sections.setdefault(next(reversed(sections), "Options"), []).extend(general)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first paragraph of the help, in full."""
        return " ".join((self.help or "").partition("\n\n")[0].split())


def command(
    *, usage: bool = False, examples: Sequence[str] = (), sections: Sequence[str] = (), **special: Any
) -> Callable[[Function], Function]:
    """Make the parameters of a function options of a command, and dataclass parameters one option per field.

    `name: Annotated[type, "help"] = default` is the option --name. Further strings are its names if they begin with a
    dash, of which a short one is added to --name, and otherwise its panel. `special` adds names to the fields of a
    dataclass, or replaces their types: `Annotated[type, typer.Option(...)]`. A field of type Any takes a path. `usage`
    reports values that a dataclass refuses as wrong usage. `examples` are shown first in the help, and `sections` is
    the order of its panels. All commands have the options --quiet and --verbose.

    >>> @command(optimize=("--optimize", "--over"))
    ... def register(inputs: PairInputs, options: RegisterOptions, out: Annotated[Path, "Folder.", "-o"]) -> None: ...
    """

    def decorate(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        parameters = []
        for one in inspect.signature(function).parameters.values():
            if one.name in groups:
                types = get_type_hints(groups[one.name], include_extras=True)
                for field in fields(groups[one.name]):
                    default = None if field.default is MISSING else field.default
                    parameters.append(_option(field.name, types[field.name], default, special.get(field.name, ())))
            else:
                parameters.append(_option(one.name, hints[one.name], one.default))
        parameters += [_option(name, hint, False) for name, hint in LEVELS.items()]

        @functools.wraps(function)
        def flat(*, quiet: bool, verbose: bool, **values: Any) -> Any:
            try:
                made = {
                    name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
                    for name, kind in groups.items()
                }
            except InputError as error:
                if usage:
                    raise typer.BadParameter(str(error)) from error
                raise
            return function(**values, **made)

        del flat.__wrapped__
        flat.examples, flat.sections = examples, sections  # type: ignore[attr-defined]
        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = {one.name: one.annotation for one in parameters}
        return flat

    return decorate


def _option(name: str, hint: Any, default: Any, special: Any = ()) -> inspect.Parameter:
    kind, words = hint.__origin__, [*hint.__metadata__, *getattr(special, "__metadata__", special)]
    kind = Path | None if kind is Any else getattr(special, "__origin__", kind)
    texts = [word for word in words if isinstance(word, str)]
    names = [text for text in texts if text.startswith("-")]
    if names and not any(text.startswith("--") for text in names):
        names.insert(0, f"--{name.replace('_', '-')}")
    option = copy.copy(next((word for word in words if not isinstance(word, str)), None)) or typer.Option(*names)
    text, panel, *_ = [*(text for text in texts if text not in names), None, None]
    option.help, option.rich_help_panel = option.help or text, option.rich_help_panel or panel
    if kind == list[Path] and isinstance(option, OptionInfo):
        option.metavar = "<path>"
    kinds = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kinds, default=default, annotation=Annotated[kind, option])


def _set_level(context: typer.Context, parameter: typer.CallbackParam, value: bool) -> bool:
    """Set the log level as soon as --quiet or --verbose is parsed."""
    if value:
        if context.params.get("verbose" if parameter.name == "quiet" else "quiet"):
            raise typer.BadParameter("--quiet and --verbose exclude each other; use only one of them")
        LOGGER.setLevel(logging.ERROR if parameter.name == "quiet" else logging.DEBUG)
    return value


LEVELS = {
    "quiet": Annotated[bool, "Print errors only.", typer.Option("--quiet", "-q", callback=_set_level)],
    "verbose": Annotated[
        bool, "Print debug output and full tracebacks.", typer.Option("--verbose", "-v", callback=_set_level)
    ],
}
