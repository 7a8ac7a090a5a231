"""`carl models`: what is in the package, and whether a file is what it should be."""

from __future__ import annotations

import typer

models = typer.Typer(help="List models, look at one, and check its file.", no_args_is_help=True)


@models.command("list")
def list_models() -> None:
    """Name the models of this package, the first line being the default."""
    from carlreg.models import DEFAULT, available

    for name in sorted(available(), key=lambda name: (name != DEFAULT, name)):
        typer.echo(name)
