"""Command-line options built from dataclasses: a default and a help text are written once, beside their field."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from carlreg.errors import InputError

Command = Callable[..., Any]


def expand(*, usage: bool = False, **special: Any) -> Callable[[Command], Command]:
    """Replace every dataclass parameter of a command by one option per field, named after the field.

    A field `name: Annotated[type, "help"] = default` gives type, help text and default of its option, and
    `Annotated[type, "help", "panel"]` also its panel in the help; one of type Any takes a path. `special` are
    annotations of options that need more: `Annotated[type, typer.Option(...)]`. `usage` reports
    values that a dataclass refuses as wrong usage.

    >>> @expand(optimize=Annotated[Optimize, typer.Option("--optimize", "--over")])
    ... def register(inputs: PairInputs, options: RegisterOptions, out: Annotated[Path, typer.Option()]) -> None: ...
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
        parameters = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name in groups:
                types = get_type_hints(groups[parameter.name], include_extras=True)
                for field in fields(groups[parameter.name]):
                    parameters.append(_option(field, types[field.name], special.get(field.name)))
            else:
                parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def flat(**values: Any) -> Any:
            try:
                made = {
                    name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
                    for name, kind in groups.items()
                }
            except InputError as error:
                if usage:
                    raise typer.BadParameter(str(error)) from error
                raise
            return command(**values, **made)

        del flat.__wrapped__
        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = {one.name: one.annotation for one in parameters}
        return flat

    return decorate


def _option(field: Field[Any], hint: Any, special: Any) -> inspect.Parameter:
    kind, (text, *panel) = hint.__origin__, hint.__metadata__
    default = None if field.default is MISSING else field.default
    option = typer.Option()
    if special is not None:
        kind, option = special.__origin__, copy.copy(special.__metadata__[0])
    elif kind is Any:
        kind = Path | None
    option.help = option.help or text
    option.rich_help_panel = panel[0] if panel else None
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
