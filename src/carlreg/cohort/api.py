"""Register many pairs: `register_many`, which `carl cohort` is the command line of."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from carlreg.cohort.bids import check_derivative, describe, find_bids_pairs, result_folder
from carlreg.cohort.check import BadPairsError, Problems, find_problems, lines
from carlreg.cohort.engine import run
from carlreg.cohort.folder import GALLERY, RESERVED, ROWS, SETTINGS, SUMMARY, CohortFolder
from carlreg.cohort.options import Bad, CohortOptions
from carlreg.cohort.register import RegisterPairs
from carlreg.cohort.rows import Row, Status
from carlreg.cohort.sources import find_pairs
from carlreg.cohort.work import Outcome
from carlreg.errors import InputError
from carlreg.files.atomic import PathLike, refuse_inputs, refuse_result
from carlreg.files.checksums import sha256
from carlreg.files.label_names import read_names
from carlreg.files.results import NAMES, TRANSFORM, ResultFolder
from carlreg.files.tables import Pair
from carlreg.model.loaded import AUTO, NONE, LoadedModel, find_model
from carlreg.model.shipped import DEFAULT
from carlreg.registration.api import Model
from carlreg.registration.options import RegisterOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tally:
    """How far a cohort is."""

    finished: int
    """Pairs with a row, those that were done before included."""
    total: int
    registered: int
    """Pairs that this run has registered, or failed to register."""
    seconds: float

    @property
    def per_minute(self) -> float:
        return 60 * self.registered / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """None if nothing is known yet."""
        left = self.total - self.finished
        return left * self.seconds / self.registered if self.registered else None


Report = Callable[[Row, Tally], None]


def register_many(
    pairs: PathLike | Sequence[Pair],
    out: PathLike,
    *,
    model: Model = "default",
    fixed: PathLike | None = None,
    fixed_seg: PathLike | None = None,
    fixed_mask: PathLike | None = None,
    all_pairs: bool = False,
    bids: bool = False,
    suffix: str | None = None,
    workers: int | None = None,
    shard: str | None = None,
    keep: str = CohortOptions.keep,
    label_names: PathLike | None = None,
    full_precision: bool = False,
    skip_bad: bool = False,
    overwrite: bool = False,
    ray: str | None = None,
    gpus_per_worker: float | None = None,
    cpus_per_worker: int = 1,
    progress: Report | None = None,
    **options: Any,
) -> list[Row]:
    """Register many pairs, each into a folder of its own in `out`, and return a row for each, in order.

    `pairs` is a table of pairs, a sequence of `carlreg.files.tables.Pair`, or a folder of images: then every image is
    registered to the `fixed` one, or every image to every other one with `all_pairs`. With `bids`, it is a BIDS
    dataset: its images with this `suffix` are registered, by default those of later sessions to the subject's first
    one, and the results are named as a derivative.

    `options` are those of `register`, such as `io_iterations`. All files are checked first; if some cannot be used,
    BadPairsError lists them, unless `skip_bad`. A pair that fails does not stop the others: its row has the error.

    The folder also gets `summary.csv` with all metrics, `index.html`, a gallery, and `cohort.json`, the settings. If
    the same call is made again, pairs are skipped whose folder is complete and was made from the same files; other
    settings are refused, unless `overwrite`, which registers all pairs again.

    `workers` processes share the cores and the GPUs of this machine; with `ray`, they work on a Ray cluster. `shard`,
    such as "3/40", registers a part of the pairs. `progress(row, tally)` is called for every pair that is finished.

    >>> rows = register_many("pairs.csv", "results", workers=4)
    >>> rows = register_many("scans", "results", fixed="template.nii.gz", io_iterations=0)
    """
    known = {one.name for one in fields(RegisterOptions)}
    if unknown := sorted(options.keys() - known):
        raise TypeError(f"register_many() got an unexpected keyword argument {unknown[0]!r}")
    source = None
    if isinstance(pairs, (str, os.PathLike)):
        target, labels, mask = (None if path is None else Path(path) for path in (fixed, fixed_seg, fixed_mask))
        target_files: dict[str, Any] = {"fixed": target, "fixed_seg": labels, "fixed_mask": mask}
        source = Path(pairs)
        if bids:
            pairs = find_bids_pairs(source, suffix=suffix, **target_files, all_pairs=all_pairs)
        else:
            pairs = find_pairs(source, **target_files, all_pairs=all_pairs)
    how = CohortOptions(
        workers=workers,
        shard=shard,
        keep=keep,
        label_names=None if label_names is None else Path(label_names),
        full_precision=full_precision,
        skip_bad=skip_bad,
        ray=ray,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
    )
    dataset = source if bids else None
    chosen = RegisterOptions(**options)
    return register_cohort(pairs, out, model, chosen, how, overwrite=overwrite, progress=progress, bids=dataset)


def register_cohort(
    pairs: Sequence[Pair],
    out: PathLike,
    model: Model = "default",
    options: RegisterOptions | None = None,
    how: CohortOptions | None = None,
    *,
    overwrite: bool = False,
    bad: Bad | None = None,
    bids: Path | None = None,
    progress: Report | None = None,
) -> list[Row]:
    """`register_many`, with its arguments in two values. `bad` is by default "skip" or "refuse", as `how` says. `bids`
    is the dataset that the results are a derivative of."""
    options, how = options or RegisterOptions(), how or CohortOptions()
    folder = CohortFolder(Path(out).absolute())
    if not pairs:
        raise InputError("there are no pairs; expected at least one")
    label_names = {} if how.label_names is None else read_names(how.label_names)
    part = [_absolute(pair) for pair in how.part().of(pairs)]
    if bids is not None:
        check_derivative(folder.path, bids)
    begun = overwrite or any((folder.path / name).exists() for name in (SETTINGS, ROWS))
    refuse_result(folder.path, (SUMMARY, GALLERY), last=SETTINGS, overwrite=begun)
    if overwrite:
        _refuse_own_inputs(folder.path, part, pairs, bids is not None)
    problems = find_problems(part, options, RESERVED, names=(pair.name for pair in pairs))
    if problems and (bad or ("skip" if how.skip_bad else "refuse")) == "refuse":
        raise BadPairsError(_refusal(problems, len(part)), problems)
    for line in lines(problems):
        log.log(logging.ERROR if bad == "fail" else logging.WARNING, "%s", line)
    settings = {
        **_pinned(options),
        "model": _identity(model),
        "keep": how.words(),
        "full_precision": how.full_precision,
    }
    folder.path.mkdir(parents=True, exist_ok=True)
    overwritten = folder.pin(settings, _pinned(RegisterOptions()), overwrite=overwrite)
    work = RegisterPairs(
        folder.path,
        model,
        options,
        how.files(),
        how.full_precision,
        label_names,
        overwrite=overwrite,
        overwritten=overwritten,
        bids=bids is not None,
    )
    if bids is not None:
        describe(folder.path, bids, RESERVED)
    names = list(dict.fromkeys(pair.name for pair in pairs))
    with folder.board(names, how.part(), failed_first=how.strict) as board:
        if overwrite:
            board.forget(pair.name for pair in part)
        status: Status = "failed" if bad == "fail" else "skipped"
        board.add(*(Row(name, status, error="; ".join(texts), tries=0) for name, texts in problems.items()))
        start, count = time.monotonic(), 0
        ready = [pair for pair in part if pair.name not in problems]
        for done, outcome in enumerate(run(work, ready, how.crew()), 1):
            row = _row(outcome)
            board.add(row)
            count += row.status != "was done"
            if progress is not None:
                progress(row, Tally(done, len(ready), count, time.monotonic() - start))
        mine = {pair.name for pair in part}
        return [row for row in board.rows if row.name in mine]


def _refuse_own_inputs(out: Path, part: Sequence[Pair], pairs: Sequence[Pair], bids: bool) -> None:
    """Raise if overwriting would replace a file that is an input of another pair, such as an earlier result."""
    given = {os.path.realpath(path) for pair in pairs for path in pair.files().values()}
    inputs = given | {os.path.join(path, TRANSFORM) for path in given}  # an initial transform may be a result folder
    folders = {os.path.dirname(path) for path in inputs}
    results = (result_folder(out, pair) if bids else ResultFolder(out / pair.name) for pair in part)
    replaced = [one[name] for one in results if os.path.realpath(one.path) in folders for name in NAMES]
    refuse_inputs([*(out / name for name in RESERVED), *replaced], inputs)


def _row(outcome: Outcome[Pair, Row]) -> Row:
    name, failure = outcome.task.name, outcome.failure
    if failure is not None and failure.trace:
        log.error("%s: this is a bug; please report it with the traceback:\n%s", name, failure.trace)
    row = outcome.result or Row(name, "failed", error="" if failure is None else failure.message)
    return replace(row, tries=outcome.tries)


def _absolute(pair: Pair) -> Pair:
    """The pair with paths that mean the same in every process."""
    files: dict[str, Any] = {name: Path(path).absolute() for name, path in pair.files().items()}
    return replace(pair, **files)


def _refusal(problems: Problems, count: int) -> str:
    first, *more = lines(problems)
    others = f"; and {len(more)} more problems" if more else ""
    advice = "correct them, or skip bad pairs to go on without them"
    return f"{len(problems)} of {count} pairs cannot be registered ({first}{others}); {advice}"


def _pinned(options: RegisterOptions) -> dict[str, Any]:
    """The options that change results."""
    return {name: value for name, value in options.as_json().items() if name != "device"}


def _identity(model: Model) -> str | None:
    """A model by its name and the checksum of its file; None for a model in memory."""
    if not isinstance(model, (str, os.PathLike)):
        return model.provenance.get("sha256") if isinstance(model, LoadedModel) else None
    if model == NONE:
        return NONE
    path = find_model(DEFAULT if model in (AUTO, "default") else model)
    return f"{AUTO if model == AUTO else path.stem} {sha256(path)[:12]}"
