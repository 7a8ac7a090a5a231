"""`carl cohort`: many pairs, and what `carl register --pairs` runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carlreg.cli._options import command
from carlreg.cli._registering import MODEL, SPECIAL, summarise
from carlreg.cli._shared import is_quiet, message
from carlreg.cli._threads import Threads
from carlreg.cohort.options import WORKERS, Bad, CohortOptions
from carlreg.registration.options import ADVANCED, IMAGES, LABELS, OUTPUT, QUALITY, RegisterOptions

if TYPE_CHECKING:
    from carlreg.cohort.api import Tally
    from carlreg.cohort.rows import Row
    from carlreg.files.tables import Pair

STRICT = 3
"""Exit code for a registration that is judged as failed."""


@dataclass(frozen=True)
class Source:
    """The pairs of a folder."""

    fixed: Annotated[Path | None, "The image that every image of the folder is registered to.", "-f", IMAGES] = None
    fixed_seg: Annotated[Path | None, "Labels of the fixed image. By default those found beside it.", IMAGES] = None
    fixed_mask: Annotated[Path | None, "Mask of the fixed image. By default the one found beside it.", IMAGES] = None
    all_pairs: Annotated[bool, "Register every image of the folder to every other one.", "--all-pairs", IMAGES] = False
    bids: Annotated[
        Path | None,
        "A BIDS dataset, instead of a table or a folder. By default, later sessions of a subject are registered to its "
        "first one. Results are named as a derivative.",
        IMAGES,
    ] = None
    suffix: Annotated[
        str | None, "The suffix of the images of a BIDS dataset. By default T1w, or the only one.", IMAGES
    ] = None

    def pairs(self, table: Path | None) -> list[Pair]:
        """The pairs of a table or a folder, or of the BIDS dataset."""
        from carlreg.cohort.bids import find_bids_pairs
        from carlreg.cohort.sources import find_pairs

        given: dict[str, Any] = {"fixed": self.fixed, "fixed_seg": self.fixed_seg, "fixed_mask": self.fixed_mask}
        if (table is None) == (self.bids is None):
            raise typer.BadParameter("expected a table or a folder of images, or --bids with a dataset")
        if self.bids is not None:
            return find_bids_pairs(self.bids, suffix=self.suffix, all_pairs=self.all_pairs, **given)
        if self.suffix is not None:
            raise typer.BadParameter("--suffix was given without --bids; expected both, or neither")
        assert table is not None
        return find_pairs(table, all_pairs=self.all_pairs, **given)


@command(
    examples=(
        "carl cohort pairs.csv -o results --workers 4",
        "carl cohort scans --fixed template.nii.gz -o results",
        "carl cohort scans --all-pairs -o results --shard $SLURM_ARRAY_TASK_ID/40",
    ),
    sections=("Arguments", IMAGES, QUALITY, LABELS, OUTPUT, WORKERS, ADVANCED),
    **SPECIAL,
)
def cohort(
    *,
    pairs: Annotated[
        Path | None,
        typer.Argument(
            help="A CSV file with a pair in each row, or a folder of images. Columns: fixed, moving, and optionally "
            "name, fixed_seg, moving_seg, fixed_mask, moving_mask, fixed_landmarks, moving_landmarks, "
            "initial_transform, guide, rigid_mask, moving_rigid_mask; paths are relative to the file. In a folder, "
            "a_labels.nii.gz and a_mask.nii.gz belong to a.nii.gz."
        ),
    ] = None,
    out: Annotated[Path, "The folder for all results, with a folder for each pair.", "-o", OUTPUT],
    source: Source,
    how: CohortOptions,
    overwrite: Annotated[bool, "Register all pairs again, with other settings, say.", "--overwrite", OUTPUT] = False,
    model: MODEL = "default",
    options: RegisterOptions,
    threads: Threads = None,
) -> int:
    """Register many pairs: a table, a folder against one fixed image, or all pairs of a folder.

    All files are checked first. Each pair gets a folder in --out, as `carl register` writes it; summary.csv has the
    metrics of all, and index.html shows them. If the command is stopped or killed, run it again: finished pairs are
    skipped. A pair that fails is tried once more and does not stop the others; the exit code is then 1.
    """
    return run_cohort(source.pairs(pairs), out, model, options, how, overwrite=overwrite, bids=source.bids)


def run_cohort(
    pairs: Sequence[Pair],
    out: Path,
    model: str,
    options: RegisterOptions,
    how: CohortOptions,
    *,
    overwrite: bool,
    bad: Bad | None = None,
    bids: Path | None = None,
) -> int:
    """Register pairs, report each as it is finished, and return the exit code."""
    from functools import partial

    from carlreg.cohort.api import register_cohort
    from carlreg.cohort.check import BadPairsError, lines

    message(f"checking the files of {len(pairs)} pair{'s' if len(pairs) != 1 else ''}")
    with _progress() as show:
        try:
            work = partial(register_cohort, pairs, out, model, options, how, overwrite=overwrite, progress=show)
            rows = work(bad=bad, bids=bids)
        except BadPairsError as error:
            for line in lines(error.problems):
                message(line, always=True)
            count = f"{len(error.problems)} of {len(how.part().of(pairs))} pairs cannot be registered"
            message(f"{count}, and nothing was done; correct them, or give --skip-bad", always=True)
            return 1
    return _conclude(rows, out, how)


@contextmanager
def _progress() -> Iterator[Callable[[Row, Tally], None]]:
    """Print a line for each pair; on a terminal, show a bar, and print lines for failures alone."""
    if is_quiet() or not sys.stderr.isatty():
        yield lambda row, tally: message(_line(row, tally), always=row.status == "failed")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("checking", total=None)

        def show(row: Row, tally: Tally) -> None:
            description = f"{_pace(tally)}{row.name}"
            bar.update(task, completed=tally.finished, total=tally.total, description=description)
            if row.status == "failed":
                message(f"{row.name}: {row.error}", always=True)

        yield show


def _line(row: Row, tally: Tally) -> str:
    what = row.error if row.status == "failed" else f"{summarise(row.metrics)}{row.seconds or 0:.0f} s"
    what = "was done" if row.status == "was done" else what
    verdict = f"{row.verdict}, " if row.verdict in ("doubtful", "failed") else ""
    return f"{tally.finished} of {tally.total}: {_pace(tally)}{row.name}: {verdict}{what}"


def _pace(tally: Tally) -> str:
    left = tally.seconds_left
    return "" if left is None else f"{tally.per_minute:.3g} pairs/min, {_duration(left)} left: "


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _conclude(rows: Sequence[Row], out: Path, how: CohortOptions) -> int:
    count = Counter(row.status for row in rows)
    failed = ", ".join(row.name for row in rows if row.status == "failed")
    judged = [row.name for row in rows if row.is_done and row.verdict == "failed"]
    if how.strict and judged:
        message(f"{len(judged)} registrations are judged as failed: {', '.join(judged)}", always=True)
    parts = [f"{count['done']} pairs done", f"{count['was done']} were done already"]
    if count["skipped"]:
        parts.append(f"{count['skipped']} skipped")
    if failed:
        parts.append(f"{count['failed']} failed: {failed}")
    message(", ".join(parts), always=bool(failed))
    message(f"open {out / 'index.html'} in a browser to look at them")
    return 1 if failed else STRICT if how.strict and judged else 0
