"""`carl register`: two scans, or a table of pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._registering import MODEL, SPECIAL, summarise
from carlreg.cli._shared import IMAGES, check_new, message, working
from carlreg.cli._threads import Threads
from carlreg.files.atomic import refuse_inputs
from carlreg.files.results import PAGE, Report, ResultFolder
from carlreg.registration.options import (
    ADVANCED,
    LABELS,
    OUTPUT,
    QUALITY,
    PairInputs,
    RegisterOptions,
)
from carlreg.registration.options import (
    IMAGES as INPUTS,
)

if TYPE_CHECKING:
    from carlreg.model.loaded import LoadedModel


Some = Path | None
JUDGED_FAILED = 3
"""The exit code of --strict."""


@dataclass(frozen=True)
class Outputs:
    """What to write, and where."""

    out: Annotated[
        Some,
        "The folder for all results; created if needed. [required, or one of the next two]",
        "-o",
        OUTPUT,
    ] = None
    transform_out: Annotated[Some, "A file for the transform alone: .h5, .hdf5 or .tfm.", OUTPUT] = None
    warped_moving_out: Annotated[Some, "A file for the warped moving image alone.", OUTPUT] = None
    html: Annotated[bool, "Write report.html, which shows the result in a browser.", OUTPUT] = True
    label_names: Annotated[
        Some,
        "Names of the labels, for the report and the viewer: a CSV file with the columns label,name, a colour table of "
        "FreeSurfer or ITK-SNAP, or freesurfer, btcv, amos, acdc, hippocampus or totalsegmentator.",
        LABELS,
    ] = None
    ants_warp: Annotated[bool, "Also write warp.nii.gz, the transform as ANTs writes it.", "--ants-warp", OUTPUT] = (
        False
    )
    full_precision: Annotated[
        bool, "Do not round the stored transforms, to 0.01 mm: the files are larger.", "--full-precision", OUTPUT
    ] = False
    overwrite: Annotated[bool, "Replace existing files.", "--overwrite", OUTPUT] = False

    def files(self) -> dict[str, Path]:
        """The folder and files that were given, by name."""
        given = {"out": self.out, "transform_out": self.transform_out, "warped_moving_out": self.warped_moving_out}
        return {name: path for name, path in given.items() if path is not None}

    def names(self) -> dict[int, str]:
        """The names of the labels, if there are any."""
        from carlreg.files.label_names import read_names

        return {} if self.label_names is None else read_names(self.label_names)

    def check(self, inputs: PairInputs) -> None:
        """Refuse what cannot be written, before any work is done for it."""
        sources = inputs.sources()
        if self.out is not None:
            ResultFolder(self.out).check_free(overwrite=self.overwrite, inputs=sources)
        if self.transform_out is not None:
            check_new(self.transform_out, self.overwrite, (".h5", ".hdf5", ".tfm", ".txt"))
        if self.warped_moving_out is not None:
            check_new(self.warped_moving_out, self.overwrite, IMAGES)
        refuse_inputs((path for name, path in self.files().items() if name != "out"), sources.values())


@command(
    examples=(
        "carl register -f fixed.nii.gz -m moving.nii.gz -o out",
        "carl register -f ct_folder -m mr.nii.gz -o out --transform rigid",
        "carl register --pairs pairs.csv -o results",
    ),
    sections=(INPUTS, QUALITY, LABELS, OUTPUT, ADVANCED),
    fixed=["-f"],
    moving=["-m"],
    **SPECIAL,
)
def register(
    *,
    inputs: PairInputs,
    outputs: Outputs,
    pairs: Annotated[
        Some,
        "A CSV file with a pair in each row, instead of --fixed and --moving. Columns: fixed, moving, and optionally "
        "name, fixed_seg, moving_seg, fixed_mask, moving_mask, fixed_landmarks, moving_landmarks, initial_transform, "
        "guide, rigid_mask, moving_rigid_mask. Paths are relative to the CSV file. Each pair gets a folder in --out. "
        "Pairs that were registered before from the same files, with the same model and options, are skipped.",
        INPUTS,
    ] = None,
    model: MODEL = "default",
    options: RegisterOptions,
    strict: Annotated[bool, "Exit with code 3 if a result is judged as failed.", "--strict", OUTPUT] = False,
    threads: Threads = None,
) -> int:
    """Find where each point of the fixed image lies in the moving one.

    Writes warped.nii.gz, transform.h5, inverse_transform.h5, report.json and report.html to the folder --out,
    warped_seg.nii.gz if the moving image has labels, and a warped picture if it is one, in its format.
    """
    if pairs is not None:
        if single := [*inputs.sources(), *(name for name in outputs.files() if name != "out")]:
            name = single[0].replace("_", "-")
            raise typer.BadParameter(f"--{name} was given with --pairs; expected it in the table of pairs")
        if outputs.out is None:
            raise typer.BadParameter("--pairs was given without --out; expected a folder for the results")
        return _many(pairs, outputs.out, outputs, model, options, strict=strict)
    if inputs.fixed is None or inputs.moving is None:
        raise typer.BadParameter("expected --fixed and --moving, or --pairs with a table of pairs")
    if not outputs.files():
        raise typer.BadParameter("no output was given; expected --out, --transform-out or --warped-moving-out")
    confidence = _one(inputs, outputs, model, options).confidence
    return JUDGED_FAILED if strict and confidence is not None and confidence.verdict == "failed" else 0


def _one(inputs: PairInputs, outputs: Outputs, model: str | LoadedModel, options: RegisterOptions) -> Report:
    """Register and save a pair."""
    from carlreg.files import images, transform_files
    from carlreg.registration.api import register_pair
    from carlreg.show import report

    outputs.check(inputs)
    overwrite, names = outputs.overwrite, outputs.names()
    with working("reading") as part:
        result = register_pair(
            inputs,
            model,
            options,
            progress=part.begin,
            advance=part.advance,
            full_precision=outputs.full_precision or outputs.out is None,
        )
        result = replace(result, record=replace(result.record, label_names=names))
        part.begin("writing")
        if outputs.out is not None:
            extra = {PAGE: lambda: report.page(result)} if outputs.html else None
            result.save(
                outputs.out,
                overwrite=overwrite,
                extra=extra,
                ants_warp=outputs.ants_warp,
                full_precision=outputs.full_precision,
            )
        if outputs.transform_out is not None:
            transform_files.write(result.transform, outputs.transform_out, overwrite=overwrite)
        if outputs.warped_moving_out is not None:
            images.write(result.warped, outputs.warped_moving_out, overwrite=overwrite)
    record, target = result.record, next(iter(outputs.files().values()))
    if record.io_iterations and record.io_sim_reason:
        message(f"optimised {record.io_sim}: {record.io_sim_reason}")
    if record.io_kept:
        message(record.io_kept)
    turned = f"turned back by {record.look['degrees']:.0f}°, " if record.look and record.look.get("turned_back") else ""
    message(f"{target}: {turned}{summarise(record.metrics)}{record.seconds['total']:.0f} s")
    if record.confidence is not None:
        message(f"{target}: {record.confidence.line()}")
    return record


def _many(table: Path, out: Path, outputs: Outputs, model: str, options: RegisterOptions, *, strict: bool) -> int:
    """`carl cohort`, in which pairs whose files cannot be used fail, but do not keep the others from being done."""
    from carlreg.cli.cohort import run_cohort
    from carlreg.cohort.options import USUAL, CohortOptions, kept
    from carlreg.files.tables import read_pairs

    chosen = {"report": outputs.html, "warp": outputs.ants_warp}
    words = [word for word in (*USUAL.split(","), "warp") if chosen.get(word, True)]
    names, precise = outputs.label_names, outputs.full_precision
    how = CohortOptions(keep=kept(words), full_precision=precise, label_names=names, strict=strict)
    pairs = read_pairs(table, unique=True)
    return run_cohort(pairs, out, model, options, how, overwrite=outputs.overwrite, bad="fail")
