"""`carl register`: two scans, or a table of pairs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from carlreg.cli._options import expand
from carlreg.cli._shared import IMAGES, Overwrite, Quiet, Verbose, check_new, message, print_error, working
from carlreg.files.results import PAGE, Report, ResultFolder
from carlreg.registration.options import FitSource, Optimize, PairInputs, RegisterOptions, SimilarityName


def _iterations(text: str) -> int | None:
    """`auto`, `None` (which is 0 in other tools' scripts) or a number."""
    if text.lower() == "auto":
        return None
    if text.lower() == "none":
        return 0
    try:
        steps = int(text)
    except ValueError:
        steps = -1
    if steps < 0:
        raise typer.BadParameter(
            f"{text!r} is not a number of steps; expected 0 or more, auto, or None", param_hint="--io-iterations"
        )
    return steps


Some = Path | None


@expand(
    fixed=Annotated[Some, typer.Option("--fixed", "-f")],
    moving=Annotated[Some, typer.Option("--moving", "-m")],
    io_iterations=Annotated[int | None, typer.Option(parser=_iterations, metavar="STEPS", show_default="auto")],
    io_sim=Annotated[SimilarityName, typer.Option()],
    optimize=Annotated[Optimize, typer.Option("--optimize", "--over")],
    fit_source=Annotated[FitSource, typer.Option("--fit-source", "--fit-to")],
)
def register(
    *,
    inputs: PairInputs,
    out: Annotated[Some, typer.Option("--out", "-o", help="The folder for all results; created if needed.")] = None,
    pairs: Annotated[
        Some,
        typer.Option(
            help="A CSV file with a pair in each row, instead of --fixed and --moving. Columns: fixed, moving, and "
            "optionally name, fixed_seg, moving_seg, fixed_mask, moving_mask, fixed_landmarks, moving_landmarks, "
            "initial_transform. Paths are relative to the CSV file. Each pair gets a folder in --out. Pairs that were "
            "registered before from the same files, with the same model and options, are skipped."
        ),
    ] = None,
    transform_out: Annotated[Some, typer.Option(help="A file for the transform alone: .h5, .hdf5 or .tfm.")] = None,
    warped_moving_out: Annotated[Some, typer.Option(help="A file for the warped moving image alone.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="A model from `carl models list`, or a model file. auto: the default model, after a search for a "
            "rotation between the scans, which is undone first."
        ),
    ] = "default",
    options: RegisterOptions,
    html: Annotated[bool, typer.Option(help="Write report.html, which shows the result in a browser.")] = True,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Find where each point of the fixed image lies in the moving one.

    Writes warped.nii.gz, transform.h5, inverse_transform.h5, warp.nii.gz, report.json and report.html to the folder
    --out, and warped_seg.nii.gz if the moving image has labels.
    """
    alone = inputs.sources() | {"transform_out": transform_out, "warped_moving_out": warped_moving_out}
    if pairs is not None:
        given = [name for name, value in alone.items() if value is not None]
        if given:
            name = given[0].replace("_", "-")
            raise typer.BadParameter(f"--{name} was given with --pairs; expected it in the table of pairs")
        if out is None:
            raise typer.BadParameter("--pairs was given without --out; expected a folder for the results")
        return _many(pairs, out, model, options, overwrite, html)
    if inputs.fixed is None or inputs.moving is None:
        raise typer.BadParameter("expected --fixed and --moving, or --pairs with a table of pairs")
    if out is None and transform_out is None and warped_moving_out is None:
        raise typer.BadParameter("no output was given; expected --out, --transform-out or --warped-moving-out")
    if transform_out is not None:
        check_new(transform_out, overwrite, (".h5", ".hdf5", ".tfm", ".txt"))
    if warped_moving_out is not None:
        check_new(warped_moving_out, overwrite, IMAGES)
    _one(inputs, out, transform_out, warped_moving_out, model, options, overwrite, html)
    return 0


def _one(
    pair: PairInputs,
    out: Path | None,
    transform_out: Path | None,
    warped_out: Path | None,
    model: Any,
    options: RegisterOptions,
    overwrite: bool,
    html: bool,
) -> Report:
    """Register and save a pair."""
    from carlreg.files import images, transform_files
    from carlreg.registration.api import register_pair
    from carlreg.show import report

    if out is not None:
        ResultFolder(out).check_free(overwrite=overwrite)
    with working("reading") as progress:
        steps = _steps(options)
        result = register_pair(
            pair,
            model,
            options,
            progress=progress.start,
            callback=lambda step, _: progress.step(step, max(step, steps)),
        )
        progress.start("writing")
        if out is not None:
            result.save(out, overwrite=overwrite, extra={PAGE: report.page(result)} if html else None)
        if transform_out is not None:
            transform_files.write(result.transform, transform_out, overwrite=overwrite)
        if warped_out is not None:
            images.write(result.warped, warped_out, overwrite=overwrite)
    record = result.record
    turned = f"turned back by {record.look['degrees']:.0f}°, " if record.look and record.look["turned_back"] else ""
    seconds = f"{record.seconds['total']:.0f} s"
    message(f"{out or transform_out or warped_out}: {turned}{_summary(record.metrics)}{seconds}")
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
    parts = []
    if "dice_after" in metrics:
        parts.append(f"Dice {metrics['dice_before']:.3f} before, {metrics['dice_after']:.3f} after, ")
    if "tre_after_mm" in metrics:
        parts.append(
            f"landmarks {metrics['tre_before_mm']:.1f} mm apart before, {metrics['tre_after_mm']:.1f} mm after, "
        )
    if "folds_percent" in metrics:
        parts.append(f"{metrics['folds_percent']:.3f} % folds, ")
    return "".join(parts)


# ---- many pairs -----------------------------------------------------------------------------------------------------


def _many(table: Path, out: Path, model: str, options: RegisterOptions, overwrite: bool, html: bool) -> int:
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
        register=lambda inputs, folder: _one(inputs, folder, None, None, loaded, options, overwrite, html),
        overwrite=overwrite,
        started=lambda name: message(f"pair {next(numbers)} of {len(pairs)}: {name}"),
        failed=print_error,
    )
    count = Counter(row.status for row in rows)
    failed = ", ".join(row.name for row in rows if row.status == "failed")
    counts = f"{count['done']} pairs done, {count['was done']} were done already"
    message(f"{counts}, {count['failed']} failed: {failed}" if failed else counts, always=bool(failed))
    return 1 if failed else 0
