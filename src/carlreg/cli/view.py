"""`carl view`: a registration in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Stopped, message


@command()
def view(
    folder: Annotated[Path, typer.Argument(help="Result folder of `carl register`.")],
    port: Annotated[int, typer.Option(help="Port to serve on. 0 means any free port.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, "Print the address, but do not open a browser.", "--no-browser"] = False,
    trust: Annotated[
        bool,
        "Show input files even if their checksums differ from report.json, and follow links that lead out of the "
        "folder. Use it only for folders that you made yourself.",
        "--trust",
    ] = False,
    model: Annotated[
        str | None, "The model file to register with again, if the result was made with one of your own."
    ] = None,
) -> None:
    """Show a registration in the browser: fixed, moving and warped images, linked by the transform.

    Click a point of one image to see the matching point of the other. Labels and the local volume change can be
    shown as overlays. Where the match is wrong, mark corresponding points and register again with them; the new
    result gets a folder beside the old one. The address works on this machine only, until you press Ctrl-C.
    """
    from carlreg.show import viewer

    with viewer.serve(folder, port=port, trust=trust, model=model) as server:
        for note in server.scene.notes:
            message(note)
        message(f"serving {folder} at {server.url} until Ctrl-C", always=True)
        if not no_browser and not viewer.open_browser(server.url):
            message("no browser could be opened; open the address yourself, on this machine")
        try:
            server.serve_forever()
        except Stopped:
            message("stopped")
