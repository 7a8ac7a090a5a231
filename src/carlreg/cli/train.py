"""`carl train`: a network for your own images."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carlreg.cli._shared import Quiet, Verbose

if TYPE_CHECKING:
    from carlreg.training.loop import Progress
    from carlreg.training.run import Watch

INTERRUPTED = 130
NETWORK, SCHEDULE, VARIATION = "The network", "The schedule", "Variation of the images"
VALIDATION, PLACE = "Validation", "Where and how long"


def train(
    data: Annotated[
        Path,
        typer.Argument(
            help="A CSV file with a column `image` (any two form a pair; optional: `labels`, `split`), or with columns "
            "`fixed` and `moving`, a pair a row; or a folder of images."
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the run. Where it holds this very run, that goes on.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="carl, carl_rot, gradicon or xi for a new network; carl-base, carl-rot or a model file to go on from.",
            rich_help_panel=NETWORK,
        ),
    ] = "carl",
    size: Annotated[
        str, typer.Option(help="Of a new network: paper, small (as carl-base) or tiny.", rich_help_panel=NETWORK)
    ] = "small",
    width: Annotated[
        int | None, typer.Option(help="Channels of a new network's encoder.", min=1, rich_help_panel=NETWORK)
    ] = None,
    handed: Annotated[
        int | None,
        typer.Option(
            help="Determinants in a new carl_rot's encoder that tell left from right, 16 say; the paper has none.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Sides of the network's grid, to which images are stretched without wide empty margins, 96 or "
            "96,112,96 say. By default the trained model's; else the images' median, up to 96 in 3-D and 256 in 2-D.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    voxel: Annotated[
        float | None,
        typer.Option(
            help="Lay images into the grid with cubic voxels of so many millimetres, around what they show, instead of "
            "stretching them to it: for rotations. By default the trained model's, if it has one.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Pairs in a step, over all devices.", rich_help_panel=SCHEDULE)] = 4,
    diffusion_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps with diffusion first; by default 1500 for a new network, 4500 if it learns rotations, else 0.",
            min=0,
            rich_help_panel=SCHEDULE,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps with GradICON.", rich_help_panel=SCHEDULE)] = 50_000,
    refine_steps: Annotated[
        int, typer.Option(help="Steps with one more refinement after that.", min=0, rich_help_panel=SCHEDULE)
    ] = 0,
    rate: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=SCHEDULE)] = 1e-4,
    final_rate: Annotated[
        float | None, typer.Option(help="Where it ends, along half a cosine.", min=0, rich_help_panel=SCHEDULE)
    ] = None,
    regularity: Annotated[float, typer.Option(help="Weight of the regulariser.", rich_help_panel=SCHEDULE)] = 1.5,
    similarity: Annotated[str, typer.Option(help="lncc, lncc2, mind or ssd.", rich_help_panel=SCHEDULE)] = "lncc",
    label_weight: Annotated[
        float,
        typer.Option(help="Weight of the overlap of the training images' labels.", rich_help_panel=SCHEDULE),
    ] = 0.0,
    freeze_batch_norm: Annotated[
        bool, typer.Option("--freeze-batch-norm", help="Keep BatchNorm's statistics.", rich_help_panel=SCHEDULE)
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.", rich_help_panel=SCHEDULE)] = 0,
    affine_noise: Annotated[
        float, typer.Option(help="Random affine map of each image, 0 for none.", rich_help_panel=VARIATION)
    ] = 0.05,
    flips: Annotated[bool, typer.Option(help="Mirror both images of a pair alike.", rich_help_panel=VARIATION)] = True,
    permute: Annotated[
        bool, typer.Option(help="Exchange the axes of both images alike.", rich_help_panel=VARIATION)
    ] = False,
    rotate: Annotated[
        bool | None,
        typer.Option(
            "--rotate/--no-rotate",
            help="Rotate both images, and undo it before the loss; by default for carl_rot and carl-rot, and what goes "
            "on from such a network, alone.",
            rich_help_panel=VARIATION,
        ),
    ] = None,
    val: Annotated[
        Path | None, typer.Option(help="Another CSV file or folder to validate with.", rich_help_panel=VALIDATION)
    ] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of the images that is kept for validation, 0 for none; by default 0.1 where nothing else says.",
            rich_help_panel=VALIDATION,
        ),
    ] = None,
    val_pairs: Annotated[int, typer.Option(help="Pairs to validate with, at most.", rich_help_panel=VALIDATION)] = 20,
    validate_every: Annotated[int, typer.Option(help="Steps between two.", rich_help_panel=VALIDATION)] = 500,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.", rich_help_panel=PLACE)] = 500,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.", rich_help_panel=PLACE)] = 20,
    seconds: Annotated[
        float | None,
        typer.Option(help="Stop after so long, with a checkpoint.", min=0, rich_help_panel=PLACE),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.", rich_help_panel=PLACE)] = "auto",
    devices: Annotated[
        int, typer.Option(help="GPUs (or CPU processes) on this machine.", min=1, rich_help_panel=PLACE)
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1, rich_help_panel=PLACE)] = 1,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=PLACE)] = "auto",
    cache: Annotated[Path | None, typer.Option(help="Where images made ready are kept.", rich_help_panel=PLACE)] = None,
    tensorboard: Annotated[
        bool | None,
        typer.Option("--tensorboard/--no-tensorboard", help="By default where installed.", rich_help_panel=PLACE),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew where the folder holds a run.", rich_help_panel=PLACE)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a network on your own images, or go on training one.

    The run's folder gets best.safetensors, the model for `carl register --model`, and all that is needed to go on if
    the run is broken off: give the same command again.
    """
    from carlreg.training.run import Settings, run

    try:
        settings = Settings(
            model=model,
            size=size,
            width=width,
            handed=handed,
            grid=_sides(grid),
            voxel=voxel,
            batch=batch,
            diffusion_steps=diffusion_steps,
            steps=steps,
            refine_steps=refine_steps,
            rate=rate,
            final_rate=final_rate,
            regularity=regularity,
            similarity=similarity,
            label_weight=label_weight,
            affine_noise=affine_noise,
            flips=flips,
            permutations=permute,
            rotate=rotate,
            freeze_batch_norm=freeze_batch_norm,
            seed=seed,
            precision=precision,  # type: ignore[arg-type]  # checked there
            validation_fraction=val_fraction,
            validation_pairs=val_pairs,
            validate_every=validate_every,
            save_every=save_every,
            log_every=log_every,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    display = _Display(quiet or os.environ.get("LOCAL_RANK", "0") != "0")  # of several processes, the first speaks
    try:
        with display:
            result = run(
                data,
                out,
                settings,
                val=val,
                cache_folder=cache,
                device=device,
                devices=devices,
                nodes=nodes,
                seconds=seconds,
                overwrite=overwrite,
                tensorboard=tensorboard,
                watch=display.watch(),
            )
    except KeyboardInterrupt:
        typer.echo(f"carl: stopped; the same command goes on from the last checkpoint in {out}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    display.say(f"the model is {result}")


def _sides(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.replace("x", ",").split(","))
    except ValueError:
        raise typer.BadParameter(f"the grid is {text!r}; expected 96, or 96,112,96 say", param_hint="--grid") from None


class _Display:
    """A bar on a terminal, lines elsewhere, nothing if quiet. All of it on stderr."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.bar, self.preparation = quiet, None, None
        self.terminal: Any = None
        self.done = self.of = 0
        self.started = time.monotonic()

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

    def watch(self) -> Watch:
        from carlreg.training.run import Watch

        return Watch(self.say, self.prepare, self.begin, self.progress, self.say)

    def say(self, words: str) -> None:
        if self.terminal is not None:
            self.terminal.console.print(words, markup=False, highlight=False)
        elif not self.quiet:
            typer.echo(words, err=True)

    def prepare(self, done: int, of: int) -> None:
        if self.terminal is not None:
            if self.preparation is None:
                self.preparation = self.terminal.add_task("preparing images", total=of)
            self.terminal.update(self.preparation, completed=done)

    def begin(self, done: int, of: int) -> None:
        self.done, self.of, self.started = done, of, time.monotonic()
        if self.terminal is not None:
            self.bar = self.terminal.add_task("training", total=of, completed=done)

    def progress(self, at: Progress, step: int) -> None:
        parts = [f"{name} {value:.3g}" for name, value in at.losses.items()] + [f"folds {at.folds:.2g} %"]
        if at.skipped:
            parts.append(f"{at.skipped} skipped")
        if self.terminal is not None:
            self.terminal.update(self.bar, completed=step, description=", ".join(parts))
            return
        left = (time.monotonic() - self.started) / max(step - self.done, 1) * (self.of - step)
        self.say(f"step {step} of {self.of}: {', '.join(parts)}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
