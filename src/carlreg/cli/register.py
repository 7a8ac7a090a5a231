"""`carl register`: two scans, or a table of pairs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import IMAGES, Overwrite, check_new, message, print_error, working
from carlreg.cli._threads import Threads
from carlreg.files.results import PAGE, WARP, Report, ResultFolder
from carlreg.registration.options import PairInputs, RegisterOptions, SimilarityName

if TYPE_CHECKING:
    from carlreg.model.loaded import LoadedModel


def _iterations(text: str) -> int | None:
    """`auto`, `None` (which is 0 in other tools' scripts) or a number."""
    named: dict[str, int | None] = {"auto": None, "none": 0}
    if text.lower() in named:
        return named[text.lower()]
    if not text.isdecimal():
        raise typer.BadParameter(
            f"{text!r} is not a number of steps; expected 0 or more, auto, or None", param_hint="--io-iterations"
        )
    return int(text)


Some = Path | None


@dataclass(frozen=True)
class Outputs:
    """What to write, and where."""

    out: Annotated[Some, "The folder for all results; created if needed.", "-o"] = None
    transform_out: Annotated[Some, "A file for the transform alone: .h5, .hdf5 or .tfm."] = None
    warped_moving_out: Annotated[Some, "A file for the warped moving image alone."] = None
    html: Annotated[bool, "Write report.html, which shows the result in a browser."] = True
    ants_warp: Annotated[bool, "Also write warp.nii.gz, the transform as ANTs writes it.", "--ants-warp"] = False
    full_precision: Annotated[
        bool, "Do not round the stored transforms, to 0.01 mm: the files are larger.", "--full-precision"
    ] = False
    overwrite: Overwrite = False

    def files(self) -> dict[str, Path]:
        """The folder and files that were given, by name."""
        given = {"out": self.out, "transform_out": self.transform_out, "warped_moving_out": self.warped_moving_out}
        return {name: path for name, path in given.items() if path is not None}

    def check(self) -> None:
        """Refuse what cannot be written, before any work is done for it."""
        if self.out is not None:
            ResultFolder(self.out).check_free(overwrite=self.overwrite)
        if self.transform_out is not None:
            check_new(self.transform_out, self.overwrite, (".h5", ".hdf5", ".tfm", ".txt"))
        if self.warped_moving_out is not None:
            check_new(self.warped_moving_out, self.overwrite, IMAGES)


@command(
    fixed=["-f"],
    moving=["-m"],
    io_iterations=Annotated[int | None, typer.Option(parser=_iterations, metavar="STEPS", show_default="auto")],
    io_sim=Annotated[SimilarityName, typer.Option()],
    optimize=["--optimize", "--over"],
    fit_source=["--fit-source", "--fit-to"],
)
def register(
    *,
    inputs: PairInputs,
    outputs: Outputs,
    pairs: Annotated[
        Some,
        "A CSV file with a pair in each row, instead of --fixed and --moving. Columns: fixed, moving, and optionally "
        "name, fixed_seg, moving_seg, fixed_mask, moving_mask, fixed_landmarks, moving_landmarks, initial_transform. "
        "Paths are relative to the CSV file. Each pair gets a folder in --out. Pairs that were registered before from "
        "the same files, with the same model and options, are skipped.",
    ] = None,
    model: Annotated[
        str,
        "A model from `carl models list`, or a model file. auto: the default model, after a search for a rotation "
        "between the scans, which is undone first.",
    ] = "default",
    options: RegisterOptions,
    threads: Threads = None,
) -> int:
    """Find where each point of the fixed image lies in the moving one.

    Writes warped.nii.gz, transform.h5, inverse_transform.h5, report.json and report.html to the folder --out, and
    warped_seg.nii.gz if the moving image has labels.
    """
    if pairs is not None:
        if single := [*inputs.sources(), *(name for name in outputs.files() if name != "out")]:
            name = single[0].replace("_", "-")
            raise typer.BadParameter(f"--{name} was given with --pairs; expected it in the table of pairs")
        if outputs.out is None:
            raise typer.BadParameter("--pairs was given without --out; expected a folder for the results")
        return _many(pairs, outputs.out, outputs, model, options)
    if inputs.fixed is None or inputs.moving is None:
        raise typer.BadParameter("expected --fixed and --moving, or --pairs with a table of pairs")
    if not outputs.files():
        raise typer.BadParameter("no output was given; expected --out, --transform-out or --warped-moving-out")
    _one(inputs, outputs, model, options)
    return 0


def _one(inputs: PairInputs, outputs: Outputs, model: str | LoadedModel, options: RegisterOptions) -> Report:
    """Register and save a pair."""
    from carlreg.files import images, transform_files
    from carlreg.registration.api import register_pair
    from carlreg.show import report

    outputs.check()
    overwrite = outputs.overwrite
    with working("reading") as show:
        steps = _steps(options)
        result = register_pair(
            inputs,
            model,
            options,
            progress=lambda part: show(description=part, completed=0, total=None),
            callback=lambda number, _: show(completed=number, total=max(number, steps)),
        )
        show(description="writing", completed=0, total=None)
        if outputs.out is not None:
            extra = {PAGE: lambda: report.page(result)} if outputs.html else None
            kept = {"ants_warp": outputs.ants_warp, "full_precision": outputs.full_precision}
            result.save(outputs.out, overwrite=overwrite, extra=extra, **kept)
        if outputs.transform_out is not None:
            transform_files.write(result.transform, outputs.transform_out, overwrite=overwrite)
        if outputs.warped_moving_out is not None:
            images.write(result.warped, outputs.warped_moving_out, overwrite=overwrite)
    record, target = result.record, next(iter(outputs.files().values()))
    turned = f"turned back by {record.look['degrees']:.0f}°, " if record.look and record.look["turned_back"] else ""
    message(f"{target}: {turned}{_summary(record.metrics)}{record.seconds['total']:.0f} s")
    return record


def _steps(options: RegisterOptions) -> int:
    """The number of optimisation steps, for the progress bar."""
    from carlreg.fast.devices import choose_device
    from carlreg.objective.instance import FIELD_STEPS, WEIGHT_STEPS, steps_in_all

    steps, optimize = options.io_iterations, options.optimize
    if optimize == "weights" or (optimize == "auto" and choose_device(options.device).type == "cuda"):
        return WEIGHT_STEPS if steps is None else steps
    return steps_in_all(FIELD_STEPS if steps is None else steps)


def _summary(metrics: Mapping[str, float]) -> str:
    parts = {
        "dice_after": "Dice {dice_before:.3f} before, {dice_after:.3f} after, ",
        "tre_after_mm": "landmarks {tre_before_mm:.1f} mm apart before, {tre_after_mm:.1f} mm after, ",
        "folds_percent": "{folds_percent:.3f} % folds, ",
    }
    return "".join(text.format(**metrics) for name, text in parts.items() if name in metrics)


# ---- many pairs -----------------------------------------------------------------------------------------------------


def _many(table: Path, out: Path, outputs: Outputs, model: str, options: RegisterOptions) -> int:
    """Register every pair of the table with one model; the exit code is 1 if any of them failed."""
    from carlreg.files.tables import read_pairs

    pairs = read_pairs(table, unique=True)  # all of them, before anything heavy begins
    from carlreg.model.loaded import load_model
    from carlreg.registration.cohort import register_cohort

    loaded, numbers = load_model(model, options.device), itertools.count(1)
    rows = register_cohort(
        pairs,
        out,
        loaded,
        options,
        register=lambda inputs, folder: _one(inputs, replace(outputs, out=folder), loaded, options),
        overwrite=outputs.overwrite,
        more=(WARP,) if outputs.ants_warp else (),
        full_precision=outputs.full_precision,
        started=lambda name: message(f"pair {next(numbers)} of {len(pairs)}: {name}"),
        failed=print_error,
    )
    count = Counter(row.status for row in rows)
    failed = ", ".join(row.name for row in rows if row.status == "failed")
    counts = f"{count['done']} pairs done, {count['was done']} were done already"
    message(f"{counts}, {count['failed']} failed: {failed}" if failed else counts, always=bool(failed))
    return 1 if failed else 0
