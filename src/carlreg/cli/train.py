"""`carl train`: train a network on your own images."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carlreg.cli._options import expand
from carlreg.cli._shared import Quiet, Stopped, Verbose
from carlreg.cli._threads import Threads
from carlreg.training.monitor import Monitor
from carlreg.training.settings import Execution, Settings

if TYPE_CHECKING:
    from carlreg.training.loop import Progress


def _sides(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid grid; expected for example 96 or 96,112,96") from None


@expand(
    usage=True,
    grid=Annotated[str | None, typer.Option(parser=_sides, metavar="SIDES")],
    freeze_batch_norm=Annotated[bool, typer.Option("--freeze-batch-norm")],
    permutations=Annotated[bool, typer.Option("--permute/--no-permute")],
    validation_fraction=Annotated[float | None, typer.Option("--val-fraction")],
    validation_pairs=Annotated[int, typer.Option("--val-pairs")],
)
def train(
    data: Annotated[
        Path,
        typer.Argument(
            help="A CSV file with a column `image` (any two images form a pair; optional: `labels`, `split`), or with "
            "columns `fixed` and `moving`, one pair per row; or a folder of images."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run. An interrupted run in it is resumed.")],
    settings: Settings,
    val: Annotated[
        Path | None,
        typer.Option(help="A separate CSV file or folder for validation.", rich_help_panel="Validation"),
    ] = None,
    *,
    execution: Execution,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start again if the folder holds a run.", rich_help_panel="Execution"),
    ] = False,
    threads: Threads = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a network on your own images, or continue training one.

    Writes best.safetensors, the model for `carl register --model`, to the folder --out. To resume an interrupted run,
    repeat the same command.
    """
    from carlreg.training.distributed import ranks
    from carlreg.training.run import run

    rank, _, _ = ranks(execution.devices, execution.nodes)
    display = _Display(quiet or rank != 0)
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
        self.done = self.total = 0

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
        left = (time.monotonic() - self.started) / max(step - self.done, 1) * (self.total - step)
        self.report(f"step {step} of {self.total}: {', '.join(parts)}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
