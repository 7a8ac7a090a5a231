"""`carl demo`: a registration to look at, with nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Device, is_quiet
from carlreg.files.results import PAGE


@command()
def demo(
    out: Annotated[Path, "Folder for the images and results.", "-o"] = Path("carl-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed: which two patients to make.")] = 0,
    size: Annotated[int, typer.Option(min=16, help="Width of the images in voxels.")] = 128,
    quick: Annotated[bool, "Use the network alone, without optimisation.", "--quick"] = False,
    device: Device = "cpu",
    model: Annotated[str, "A model's name or file."] = "default",
    overwrite: Annotated[bool, "Replace files of an earlier demo.", "--overwrite"] = False,
) -> None:
    """Register two synthetic patients whose true correspondence is known, then again with one image shifted."""
    from carlreg.demo import CASES, SUMMARY, run

    say = (lambda _: None) if is_quiet() else typer.echo
    report = run(out, seed=seed, size=size, quick=quick, device=device, model=model, overwrite=overwrite, say=say)
    rows: list[tuple[str, ...]] = [("", "Dice", "", "error, mm", ""), ("", "before", "after", "before", "after")]
    for name, words in (("pair", "two patients"), ("shifted", "one image shifted")):
        both = [report[name][when] for when in ("before", "after")]
        dice = (f"{part['dice']:.3f}" for part in both)
        rows.append((words, *dice, *(f"{part['error_mm']['mean']:.1f}" for part in both)))
    table = "\n".join(f"{row[0]:<18}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)
    moved = report["answer_moved_mm"]
    shift, mean = (", ".join(f"{n:.4g}" for n in numbers) for numbers in (report["shift_mm"], moved["shift"]))
    pages = "\n".join(f"  {out / name / PAGE}" for name in CASES)
    typer.echo(
        f"\n{table}\n\nThe shift was {shift} mm; the result moved by {mean} mm on average, "
        f"{moved['off_median']:.1f} mm off (median).\n"
        f"{report['seconds']:.0f} s in all. Figures are in {out / SUMMARY}, pictures in\n{pages}"
    )
