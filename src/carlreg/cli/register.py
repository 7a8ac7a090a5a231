"""`carl register`: two scans, or a table of pairs."""

from __future__ import annotations

import csv
import functools
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import IMAGES, check_new, message, print_error, working
from carlreg.cli._threads import Threads
from carlreg.errors import ExistsError, InputError, OutputError, user_message
from carlreg.files.atomic import refuse_result, write_atomically
from carlreg.files.checksums import sha256
from carlreg.files.results import PAGE, PICTURES, REPORT, WARP, Report, ResultFolder
from carlreg.registration.options import (
    ADVANCED,
    LABELS,
    OUTPUT,
    QUALITY,
    PairInputs,
    RegisterOptions,
    SimilarityChoice,
)
from carlreg.registration.options import (
    IMAGES as INPUTS,
)

if TYPE_CHECKING:
    from carlreg.files.tables import Pair
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


def _numbers(text: str) -> int | str | tuple[int | str, ...]:
    """A number or a word, or two of them, separated by a comma."""
    parts = tuple(int(part) if part.isdecimal() else part for part in text.split(","))
    return parts if len(parts) > 1 else parts[0]


Some = Path | None
SUMMARY = "summary.csv"
Numbers = Annotated[str | None, typer.Option(parser=_numbers, metavar="N[,N]")]


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

    def check(self) -> None:
        """Refuse what cannot be written, before any work is done for it."""
        if self.out is not None:
            ResultFolder(self.out).check_free(overwrite=self.overwrite)
        if self.transform_out is not None:
            check_new(self.transform_out, self.overwrite, (".h5", ".hdf5", ".tfm", ".txt"))
        if self.warped_moving_out is not None:
            check_new(self.warped_moving_out, self.overwrite, IMAGES)


@command(
    examples=(
        "carl register -f fixed.nii.gz -m moving.nii.gz -o out",
        "carl register -f ct_folder -m mr.nii.gz -o out --transform rigid",
        "carl register --pairs pairs.csv -o results",
    ),
    sections=(INPUTS, QUALITY, LABELS, OUTPUT, ADVANCED),
    fixed=["-f"],
    moving=["-m"],
    io_iterations=Annotated[int | None, typer.Option(parser=_iterations, metavar="STEPS", show_default="auto")],
    io_sim=Annotated[SimilarityChoice, typer.Option()],
    frame=Numbers,
    channel=Numbers,
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
        "name, fixed_seg, moving_seg, fixed_mask, moving_mask, fixed_landmarks, moving_landmarks, initial_transform, "
        "guide. Paths are relative to the CSV file. Each pair gets a folder in --out. Pairs that were registered "
        "before from the same files, with the same model and options, are skipped.",
        INPUTS,
    ] = None,
    model: Annotated[
        str,
        "A model from `carl models list`, or a model file. auto: the default model, after a search for a rotation "
        "between the scans, which is undone first. none: no network; fields are optimised from an affine map, which is "
        "searched for.",
        QUALITY,
    ] = "default",
    options: RegisterOptions,
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
    from carlreg.registration.progress import optimisation_steps
    from carlreg.show import report

    outputs.check()
    overwrite, names = outputs.overwrite, outputs.names()
    with working("reading") as show:
        steps = optimisation_steps(options)
        result = register_pair(
            inputs,
            model,
            options,
            progress=lambda part: show(description=part, completed=0, total=None),
            advance=lambda share: show(completed=100 * share, total=100),
            callback=lambda number, _: show(completed=number, total=max(number, steps)),
        )
        result = replace(result, record=replace(result.record, label_names=names))
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
    if record.io_iterations and record.io_sim_reason:
        message(f"optimised {record.io_sim}: {record.io_sim_reason}")
    turned = f"turned back by {record.look['degrees']:.0f}°, " if record.look and record.look.get("turned_back") else ""
    message(f"{target}: {turned}{_summary(record.metrics)}{record.seconds['total']:.0f} s")
    return record


def _summary(metrics: Mapping[str, float]) -> str:
    parts = {
        "dice_after": "Dice {dice_before:.3f} before, {dice_after:.3f} after, ",
        "tre_after_mm": "landmarks {tre_before_mm:.1f} mm apart before, {tre_after_mm:.1f} mm after, ",
        "guide_after_mm": "guide points {guide_before_mm:.1f} mm apart before, {guide_after_mm:.1f} mm after, ",
        "folds_percent": "{folds_percent:.3f} % folds, ",
    }
    return "".join(text.format(**metrics) for name, text in parts.items() if name in metrics)


# ---- many pairs -----------------------------------------------------------------------------------------------------


def _many(table: Path, out: Path, outputs: Outputs, model: str, options: RegisterOptions) -> int:
    """Register every pair of the table into a folder of its own, and write `summary.csv` after each.

    A pair is skipped if its folder holds the complete result of the same inputs, model and options, with all files. A
    folder with another result is registered again with --overwrite, and otherwise an error. An error fails its own pair
    only; the exit code is 1 if there was any.
    """
    from carlreg.files.tables import read_pairs

    pairs = read_pairs(table, unique=True)  # all of them, before anything heavy begins
    from carlreg.model.loaded import load_model

    loaded, checksum = load_model(model, options.device), functools.cache(sha256)  # many pairs share an image
    if str(pairs[0].fixed).lower().endswith(PICTURES):
        loaded = loaded.for_dimension(2)
    refuse_result(out, SUMMARY, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, str]] = []
    for number, pair in enumerate(pairs, 1):
        message(f"pair {number} of {len(pairs)}: {pair.name}")
        try:
            status, report = _one_of_many(pair, replace(outputs, out=out / pair.name), loaded, options, checksum)
            numbers = {**report.metrics, "seconds": report.seconds.get("total", 0)}
            row = {"status": status, **{name: f"{value:.4f}" for name, value in numbers.items()}}
        except Exception as error:
            print_error(error, pair.name)
            row = {"status": "failed", "error": user_message(error) or repr(error)}
        rows.append({"name": pair.name, **row})
        with suppress(OutputError):
            _write_summary(rows, out / SUMMARY)
    _write_summary(rows, out / SUMMARY)
    count = Counter(row["status"] for row in rows)
    failed = ", ".join(row["name"] for row in rows if row["status"] == "failed")
    counts = f"{count['done']} pairs done, {count['was done']} were done already"
    message(f"{counts}, {count['failed']} failed: {failed}" if failed else counts, always=bool(failed))
    return 1 if failed else 0


def _one_of_many(
    pair: Pair, outputs: Outputs, model: LoadedModel, options: RegisterOptions, checksum: Callable[[str], str]
) -> tuple[str, Report]:
    """Register a pair, unless that was done already."""
    from carlreg.registration.result import make_request

    if pair.name.lower() == SUMMARY:
        raise InputError(f"invalid name {pair.name!r}: the summary of all pairs has this name; choose another one")
    assert outputs.out is not None
    folder = ResultFolder(outputs.out)
    folder.check_free(overwrite=True)
    if not folder[REPORT].is_file() or outputs.overwrite:
        return "done", _one(PairInputs(**pair.files()), outputs, model, options)
    checksums = {name: checksum(path) for name, path in pair.files().items()}
    request, more = make_request(model, options, checksums), [WARP] if outputs.ants_warp else []
    if different := folder.differences(request, *more, full_precision=outputs.full_precision):
        held = f"{folder.path} holds a registration with {', '.join(different)}"
        raise ExistsError(f"{held}; choose another name, or give --overwrite")
    return "was done", folder.read_report()


def _write_summary(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
