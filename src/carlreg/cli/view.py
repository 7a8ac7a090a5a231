"""`carl view`: a registration in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import Quiet, Stopped, Verbose, say


def view(
    folder: Annotated[Path, typer.Argument(help="A folder of `carl register`.")],
    port: Annotated[int, typer.Option(help="The port to serve on; 0: any free one.", min=0, max=65535)] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show a registration in the browser: fixed, moving and warped image, linked by the transform.

    A click on the fixed image shows the matching point on the moving one. Labels and the change of volume lie over the
    images if you like. The address works on this machine alone, until Ctrl-C.
    """
    from carlreg.show import viewer

    with viewer.serve(folder, port=port) as server:
        for note in server.scene.notes:
            say(note, quiet)
        say(f"{folder} is at {server.url} until Ctrl-C")
        if not no_browser and not viewer.open_browser(server.url):
            say("no browser could be opened; open the address yourself, on this machine", quiet)
        try:
            server.serve_forever()
        except Stopped:  # is how it ends
            say("stopped", quiet)
