"""`carl app`: registration in the browser, for people who do not use a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Stopped, message


@command()
def app(
    port: Annotated[int, typer.Option(help="Port to serve on. 0 means any free port.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, "Print the address, but do not open a browser.", "--no-browser"] = False,
    out: Annotated[
        Path | None,
        "Folder to keep results in, each in a folder of its own. By default they are removed at the end, after you "
        "have downloaded what you need.",
        "-o",
    ] = None,
    model: Annotated[str | None, "A model file to use instead of the default model."] = None,
) -> None:
    """Register scans in the browser: choose or drop two files, look at the result, and correct it by hand.

    Files that you drop are stored in a private temporary folder, which is removed at the end. The address works on
    this machine only, until you press Ctrl-C.
    """
    from carlreg.show import app, viewer

    with app.serve(port=port, model=model, out=out) as server:
        message(f"carl app is at {server.url} until Ctrl-C", always=True)
        if not no_browser and not viewer.open_browser(server.url):
            message("no browser could be opened; open the address yourself, on this machine")
        try:
            server.serve_forever()
        except Stopped:
            message("stopped")
