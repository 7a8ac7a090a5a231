"""`carl demo`: a registration to look at, with nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from carlreg.cli._shared import Quiet, Verbose
from carlreg.files.results import PAGE


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the images and results.")] = Path("carl-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed: which two patients to make.")] = 0,
    size: Annotated[int, typer.Option(min=16, help="Width of the images in voxels.")] = 128,
    quick: Annotated[bool, typer.Option("--quick", help="Use the network alone, without optimisation.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")] = "cpu",
    model: Annotated[str, typer.Option(help="A model's name or file.")] = "default",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of an earlier demo.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Register two synthetic patients whose true correspondence is known, then again with one image shifted."""
    from carlreg.demo import CASES, SUMMARY, run

    report = run(
        out,
        seed=seed,
        size=size,
        quick=quick,
        device=device,
        model=model,
        overwrite=overwrite,
        say=(lambda _: None) if quiet else typer.echo,
    )
    rows: list[tuple[str, ...]] = [("", "Dice", "", "error, mm", ""), ("", "before", "after", "before", "after")]
    for name, words in (("pair", "two patients"), ("shifted", "one image shifted")):
        before, after = report[name]["before"], report[name]["after"]
        dice = [f"{part['dice']:.3f}" for part in (before, after)]
        error = [f"{part['error_mm']['mean']:.1f}" for part in (before, after)]
        rows.append((words, *dice, *error))
    typer.echo("")
    for row in rows:
        typer.echo(f"{row[0]:<18}" + "".join(f"{cell:>11}" for cell in row[1:]))
    moved = report["answer_moved_mm"]
    typer.echo(
        f"\nThe shift was {_list(report['shift_mm'])} mm; the result moved by {_list(moved['shift'])} mm on average, "
        f"{moved['off_median']:.1f} mm off (median)."
    )
    typer.echo(f"{report['seconds']:.0f} s in all. Figures are in {out / SUMMARY}, pictures in")
    for name in CASES:
        typer.echo(f"  {out / name / PAGE}")


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{n:.4g}" for n in numbers)
