"""A cohort: the pairs of a table, each registered into a folder of its own, and a summary of all of them."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from carlreg.errors import ExistsError, InputError, OutputError, user_message
from carlreg.files.atomic import refuse_result, write_atomically
from carlreg.files.checksums import sha256
from carlreg.files.results import REPORT, Report, ResultFolder
from carlreg.files.tables import Pair
from carlreg.model.loaded import LoadedModel
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.result import make_request

SUMMARY = "summary.csv"


@dataclass(frozen=True)
class Row:
    """One pair's line of the summary."""

    name: str
    status: Literal["done", "was done", "failed"]
    report: Report | None = None
    error: str = ""

    def cells(self) -> dict[str, str]:
        numbers = {} if self.report is None else {**self.report.metrics, "seconds": self.report.seconds.get("total", 0)}
        error = {"error": self.error} if self.error else {}
        return {"name": self.name, "status": self.status} | {k: f"{v:.4f}" for k, v in numbers.items()} | error


def register_cohort(
    pairs: Sequence[Pair],
    out: Path,
    model: LoadedModel,
    options: RegisterOptions,
    *,
    register: Callable[[PairInputs, Path], Report],
    overwrite: bool = False,
    more: Sequence[str] = (),
    full_precision: bool = False,
    started: Callable[[str], object] = lambda name: None,
    failed: Callable[[Exception, str], object] = lambda error, name: None,
) -> list[Row]:
    """Call `register(inputs, folder)` for every pair, and write `summary.csv` after each.

    A pair is skipped if its folder holds the complete result of the same inputs, model and options, with `more` files.
    A folder with another result is registered again if `overwrite`, and otherwise an error. An error fails its own
    pair only.
    """
    refuse_result(out, SUMMARY, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    checksum = functools.cache(sha256)  # many pairs share an image

    def run(pair: Pair) -> Row:
        if pair.name.lower() == SUMMARY:
            raise InputError(f"invalid name {pair.name!r}: the summary of all pairs has this name; choose another one")
        folder, inputs = ResultFolder(out / pair.name), PairInputs(**pair.files())
        folder.check_free(overwrite=True)
        if folder[REPORT].is_file() and not overwrite:
            checksums = {name: checksum(path) for name, path in pair.files().items()}
            request = make_request(model, options, checksums)
            if different := folder.differences(request, *more, full_precision=full_precision):
                held = f"{folder.path} holds a registration with {', '.join(different)}"
                raise ExistsError(f"{held}; choose another name, or allow overwriting")
            return Row(pair.name, "was done", folder.read_report())
        return Row(pair.name, "done", register(inputs, folder.path))

    rows: list[Row] = []
    for pair in pairs:
        started(pair.name)
        try:
            rows.append(run(pair))
        except Exception as error:
            failed(error, pair.name)
            rows.append(Row(pair.name, "failed", error=user_message(error) or repr(error)))
        with suppress(OutputError):
            _write_summary(rows, out / SUMMARY)
    _write_summary(rows, out / SUMMARY)
    return rows


def _write_summary(rows: Sequence[Row], path: Path) -> None:
    lines = [row.cells() for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_atomically(path, text.getvalue().encode())
