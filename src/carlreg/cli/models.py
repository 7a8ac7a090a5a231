"""`carl models`: list, describe, verify and import models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Overwrite, check_new
from carlreg.errors import InputError

Name = Annotated[str, typer.Argument(help="Name of a model in the package, or path of a model file.")]


@command()
def list_models() -> None:
    """List the models in the package with their licences. The default comes first, `auto` last."""
    from carlreg.model.files import read_metadata
    from carlreg.model.loaded import AUTO
    from carlreg.model.shipped import DEFAULT, WEIGHTS, available

    for name in sorted(available(), key=lambda name: (name != DEFAULT, name)):
        typer.echo(f"{name}\t{read_metadata(WEIGHTS / f'{name}.safetensors').get('licence', 'no licence stated')}")
    typer.echo(f"{AUTO}\t{DEFAULT}, after a rotation search")


@command()
def show(name: Name = "default") -> None:
    """Print a model's metadata: training, grid, licence, size and checksum."""
    from carlreg.cli.info import as_text, model_facts
    from carlreg.model.loaded import find_model

    typer.echo(as_text(model_facts(find_model(name))))


@command()
def verify(name: Name = "default") -> None:
    """Check that a model file is complete and, for a model in the package, that its checksum is the published one."""
    from carlreg.files.checksums import sha256
    from carlreg.model.files import load
    from carlreg.model.loaded import find_model
    from carlreg.model.shipped import WEIGHTS

    path = find_model(name)
    checksum = sha256(path)
    if path.parent == WEIGHTS:
        lines = (WEIGHTS / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
        expected = {name: digest for digest, name in (line.split() for line in lines if line.strip())}.get(path.name)
        if checksum != expected:
            raise InputError(f"{path.name} has the checksum {checksum}; expected {expected}: reinstall the package")
    load(path)
    typer.echo(f"{path.name}: complete, sha256 {checksum}")


@command()
def licence() -> None:
    """Print the licence of the models in the package."""
    from carlreg.model.shipped import WEIGHTS

    typer.echo((WEIGHTS / "LICENSE").read_text(encoding="utf-8").rstrip())


@command()
def import_model(
    checkpoint: Annotated[Path, typer.Argument(help="State dict of icon_registration: CARL, GradICON, uniGradICON.")],
    out: Annotated[Path, typer.Argument(help="Model file to write, .safetensors.")],
    grid: Annotated[
        str | None, "Grid the network was trained on, such as '175 175 175'. Images are resampled to it."
    ] = None,
    licence: Annotated[str | None, "Licence to store in the file."] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a checkpoint of the paper's authors into a model file. No code in the checkpoint is executed."""
    check_new(out, overwrite, (".safetensors",))
    if not checkpoint.is_file():
        raise InputError(f"{checkpoint} does not exist or is a folder; expected a checkpoint: check the path")
    sides = None if grid is None else grid.replace(",", " ").replace("x", " ").split()
    if sides is not None and not (len(sides) in (2, 3) and all(side.isdigit() and int(side) > 3 for side in sides)):
        raise InputError(f"the grid is {grid!r}; expected two or three sides, such as '175 175 175'")
    import pickle

    import torch

    from carlreg.model.files import save
    from carlreg.model.icon import from_icon

    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, IndexError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{checkpoint} cannot be read as a file of weights alone: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError(f"{checkpoint} is not a state dict; expected names and tensors, as torch.save writes them")
    metadata = {"name": out.stem, "imported_from": checkpoint.name, "view": "whole"}
    metadata |= {} if sides is None else {"grid": " ".join(sides)}
    metadata |= {} if licence is None else {"licence": licence}
    save(from_icon(state), out, metadata=metadata)


COMMANDS = {"list": list_models, "show": show, "verify": verify, "licence": licence, "import": import_model}
