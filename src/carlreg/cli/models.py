"""`carl models`: what is in the package, on which terms, and whether a file is what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import Overwrite, check_new

models = typer.Typer(help="List models, look at one, check its file, import one.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A model of the package, or a model file.")]


@models.command("list")
def list_models() -> None:
    """Name the models of this package with their terms, the first line being the default, the last `auto`."""
    from carlreg.model.files import read_metadata
    from carlreg.model.loaded import AUTO
    from carlreg.model.shipped import DEFAULT, WEIGHTS, available

    for name in sorted(available(), key=lambda name: (name != DEFAULT, name)):
        typer.echo(f"{name}\t{read_metadata(WEIGHTS / f'{name}.safetensors').get('licence', 'no licence given')}")
    typer.echo(f"{AUTO}\t{DEFAULT}, after a look whether the scans are turned against each other")


@models.command()
def show(name: Name = "default") -> None:
    """Say what a model's file says of it: its training, grid, licence, size and checksum."""
    from carlreg.cli.info import as_text, model_facts
    from carlreg.model.loaded import find_model

    typer.echo(as_text(model_facts(find_model(name))))


@models.command()
def verify(name: Name = "default") -> None:
    """Check that a model's file is whole and, for one of the package, that it is the one that was shipped."""
    from carlreg.files.checksums import sha256
    from carlreg.model.files import load
    from carlreg.model.loaded import find_model
    from carlreg.model.shipped import WEIGHTS

    path = find_model(name)
    found = sha256(path)
    if path.parent == WEIGHTS:
        sums = dict(
            line.split()[::-1]
            for line in (WEIGHTS / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
            if line.strip()
        )
        if sums.get(path.name) != found:
            raise ValueError(
                f"{path.name} has the checksum {found}; expected {sums.get(path.name)}: install the package again"
            )
    load(path)
    typer.echo(f"{path.name}: whole, sha256 {found}")


@models.command()
def licence() -> None:
    """Print the terms of the models of this package."""
    from carlreg.model.shipped import WEIGHTS

    typer.echo((WEIGHTS / "LICENSE").read_text(encoding="utf-8").rstrip())


@models.command("import")
def import_model(
    checkpoint: Annotated[Path, typer.Argument(help="A state dict of icon_registration: CARL, GradICON, uniGradICON.")],
    out: Annotated[Path, typer.Argument(help="The model file to write, .safetensors.")],
    grid: Annotated[
        str | None, typer.Option(help="The grid it was trained on, '175 175 175' say: images are stretched to it.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Its terms of use, to be kept in the file.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a model file of a checkpoint that the paper's authors' code wrote. Nothing in it is executed."""
    check_new(out, overwrite, (".safetensors",))
    if not checkpoint.is_file():
        raise ValueError(f"{checkpoint} does not exist or is a folder; expected a checkpoint: check the path")
    sides = None if grid is None else grid.replace(",", " ").replace("x", " ").split()
    if sides is not None and not (len(sides) in (2, 3) and all(side.isdigit() and int(side) > 3 for side in sides)):
        raise ValueError(f"the grid is {grid!r}; expected two or three sides, such as '175 175 175'")
    import pickle

    import torch

    from carlreg.model.files import save
    from carlreg.model.icon import from_icon

    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{checkpoint} cannot be read as a file of weights alone: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError(f"{checkpoint} holds no state dict; expected names and tensors, as torch.save writes them")
    about = {"name": out.stem, "imported_from": checkpoint.name, "view": "whole"}
    about |= {} if sides is None else {"grid": " ".join(sides)}
    about |= {} if licence is None else {"licence": licence}
    save(from_icon(state), out, metadata=about)
