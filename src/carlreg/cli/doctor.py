"""`carl doctor`: check the installation."""

from __future__ import annotations

from typing import Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import is_quiet, working

MARKS = {"green": ("✓", "green"), "note": ("·", None), "red": ("✗", "red")}


@command()
def doctor(as_json: Annotated[bool, "Print JSON.", "--json"] = False) -> int:
    """Check the installation: versions, GPU, kernels, models, other tools, disk, memory and threads.

    A line each: ✓ is fine, · is worth knowing, ✗ needs what the line advises. The exit code is 1 if there is any ✗.
    """
    with working("importing"):
        import json
        from dataclasses import asdict

        from carlreg import doctor

    findings = []
    for finding in doctor.examine():
        findings.append(finding)
        if not as_json and not (is_quiet() and finding.state != "red"):
            mark, colour = MARKS[finding.state]
            advice = f"; {finding.advice}" if finding.advice else ""
            typer.echo(f"{typer.style(mark, fg=colour)} {finding.name}: {finding.text}{advice}")
    red = sum(finding.state == "red" for finding in findings)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    elif not is_quiet():
        typer.echo("all is well" if not red else f"{red} of {len(findings)} checks failed")
    return 1 if red else 0
