"""`carl train`: train a network on your own images."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Stopped, is_quiet, numbers
from carlreg.cli._threads import Threads
from carlreg.training.monitor import Monitor
from carlreg.training.settings import EXECUTION, VALIDATION, Execution, Settings

if TYPE_CHECKING:
    from carlreg.training.loop import Progress


def _sides(text: str) -> tuple[int, ...]:
    return tuple(numbers(text, int, "--grid", "for example 96 or 96,112,96"))


@command(
    usage=True,
    grid=Annotated[str | None, typer.Option(parser=_sides, metavar="SIDES")],
    freeze_batch_norm=["--freeze-batch-norm"],
    permutations=["--permute/--no-permute"],
    validation_fraction=["--val-fraction"],
    validation_pairs=["--val-pairs"],
)
def train(
    data: Annotated[
        Path,
        typer.Argument(
            help="A CSV file with a column `image` (any two images form a pair; optional: `labels`, `modality`, "
            "`split`), or with columns `fixed` and `moving`, one pair per row; or a folder of images."
        ),
    ],
    out: Annotated[Path, "Folder for the run. An interrupted run in it is resumed.", "-o"],
    settings: Settings,
    val: Annotated[Path | None, "A separate CSV file or folder for validation.", VALIDATION] = None,
    *,
    execution: Execution,
    overwrite: Annotated[bool, "Start again if the folder holds a run.", "--overwrite", EXECUTION] = False,
    threads: Threads = None,
) -> None:
    """Train a network on your own images, or continue training one.

    Writes best.safetensors, the model for `carl register --model`, to the folder --out. To resume an interrupted run,
    repeat the same command.
    """
    from carlreg.training.distributed import ranks
    from carlreg.training.run import run

    rank, _, _ = ranks(execution.devices, execution.nodes)
    display = _Display(is_quiet() or rank != 0)
    try:
        with display:
            model = run(data, out, settings, execution, val=val, overwrite=overwrite, monitor=display)
    except Stopped as stopped:
        again = "the same command without --overwrite" if overwrite else "the same command"
        if rank == 0:
            typer.echo(f"carl: stopped; {again} resumes the run from its last checkpoint in {out}", err=True)
        raise typer.Exit(stopped.code) from None
    display.report(f"the model is {model}")


class _Display(Monitor):
    """A progress bar on a terminal, lines elsewhere, nothing if quiet; all of it on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.terminal: Any = None
        self.task: Any = None

    def __enter__(self) -> None:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn())
            self.terminal = Progress(*columns, console=Console(stderr=True), speed_estimate_period=600)
            self.terminal.start()

    def __exit__(self, *_: object) -> None:
        if self.terminal is not None:
            self.terminal.stop()
            self.terminal = None

    def report(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            typer.echo(text, err=True)

    def preparing(self, done: int, total: int) -> None:
        if self.terminal is not None:
            if self.task is None:
                self.task = self.terminal.add_task("preparing images", total=total)
            self.terminal.update(self.task, completed=done)

    def begin(self, done: int, total: int) -> None:
        self.done, self.total, self.started = done, total, time.monotonic()
        if self.terminal is not None:
            self.task = self.terminal.add_task("training", total=total, completed=done)

    def progress(self, progress: Progress, step: int) -> None:
        parts = [f"{name} {value:.3g}" for name, value in progress.losses.items()] + [f"folds {progress.folds:.2g} %"]
        if progress.skipped:
            parts.append(f"{progress.skipped} skipped")
        if self.terminal is not None:
            self.terminal.update(self.task, completed=step, description=", ".join(parts))
            return
        seconds = (time.monotonic() - self.started) / max(step - self.done, 1) * (self.total - step)
        self.report(f"step {step} of {self.total}: {', '.join(parts)}, {timedelta(seconds=round(seconds))} left")
