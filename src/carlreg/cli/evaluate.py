"""`carl evaluate`: scores of one or more methods on the same pairs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from carlreg.cli._options import command
from carlreg.cli._shared import Device, Overwrite, message, numbers
from carlreg.cli._threads import Threads
from carlreg.errors import InputError
from carlreg.files.atomic import refuse_inputs, refuse_result

if TYPE_CHECKING:
    from carlreg.evaluation.api import Evaluation
    from carlreg.evaluation.scores import Scores
    from carlreg.evaluation.sources import Method
    from carlreg.files.tables import Pair
    from carlreg.paper_data.dataset import Dataset


@command()
def evaluate(
    pairs: Annotated[
        Path | None, typer.Argument(help="A CSV file of pairs, or a folder with results of `carl register`.")
    ] = None,
    method: Annotated[
        list[str] | None,
        "NAME=SOURCE, once for each method: a folder of results, a CSV file of pairs with the column 'transform', the "
        "name or file of a model, a checkpoint of icon_registration (.trch, .pth), or one of identity, ants-affine, "
        "ants-synquick, greedy, convexadam.",
        "-m",
    ] = None,
    model: Annotated[str | None, "Register the pairs with this model."] = None,
    dataset: Annotated[str | None, "Use the pairs of one of the paper's datasets: abdomen1k, dirlab, hcp, …"] = None,
    data: Annotated[Path | None, "The folder of that dataset."] = None,
    preparation: Annotated[
        Literal["dataset", "model"],
        "With --dataset: models see the images as the paper prepares that dataset (grid, intensities, masks), or as "
        "`carl register` would prepare them for the model.",
    ] = "dataset",
    labels: Annotated[str | None, "Score only these labels, for example 1,2,6."] = None,
    allow_missing_labels: Annotated[
        bool, "Skip labels that only one image of a pair has, instead of reporting a failure."
    ] = False,
    io_iterations: Annotated[int | None, "Steps of instance optimisation when a model registers."] = None,
    device: Device = "auto",
    out: Annotated[Path | None, "Folder for scores.csv, scores.json and dice.png.", "-o"] = None,
    save: Annotated[
        Path | None,
        "Folder for the results of models and baselines. What was registered before is not registered again.",
    ] = None,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Measure registrations: Dice, HD95, landmark error, folds, SDlogJ, inverse consistency, time and memory.

    With several methods, their differences on the same pairs are reported as well. A problem with a pair is printed as
    one line; the other pairs are still measured, and the exit code is 1.
    """
    from carlreg.evaluation import api, sources

    if out is not None:
        refuse_result(out, api.OUTPUTS, last=api.SCORES, overwrite=overwrite)
        origins = (text.partition("=")[2] for text in method or [])
        refuse_inputs((out / name for name in api.OUTPUTS), [pairs, model, *origins])
    source, listed = _pairs(pairs, dataset, data)
    if preparation == "model":
        source = replace(source, prepare=None)
    options: dict[str, Any] = {"io_iterations": io_iterations, "device": device, "dataset": source}
    options["overwrite"] = overwrite
    methods: dict[str, Method] = {"transform": sources.listed} if any(pair.transform for pair in listed) else {}
    if pairs is not None and pairs.is_dir():
        methods[pairs.resolve().name] = sources.in_folder(pairs)
    given = [text.partition("=") for text in method or []]
    added = [*(name for name, _, _ in given), *([] if model is None else [Path(model).stem])]
    if repeated := [name for name, count in Counter([*methods, *added]).items() if count > 1]:
        advice = "expected different names: --method NAME=SOURCE"
        raise typer.BadParameter(f"two methods are called {repeated[0]!r}; {advice}")
    for name, equals, origin in given:
        if not equals:
            raise typer.BadParameter(f"--method is {name!r}; expected NAME=SOURCE")
        methods[name] = _method(origin, options, save and save / name)
    if model is not None:
        methods[Path(model).stem] = sources.by_model(model, save=save, **options)
    chosen = sorted(source.labels) if labels is None else numbers(labels, int, "--labels", "whole numbers: 1,2,6")
    result = api.evaluate(
        listed,
        methods or {"transform": sources.listed},
        labels=chosen or None,
        names=source.labels,
        partial=allow_missing_labels,
        dataset=source,
        done=_report,
    )
    _print_tables(result)
    if out is not None:
        result.write(out, overwrite=overwrite)
    failed = sum(bool(scores.failures) for scores in result.scores)
    if failed:
        message(f"{failed} of {len(result.scores)} failed, see above", always=True)
        raise typer.Exit(1)


def _pairs(pairs: Path | None, dataset: str | None, data: Path | None) -> tuple[Dataset, list[Pair]]:
    from carlreg.evaluation import sources
    from carlreg.paper_data import find_dataset
    from carlreg.paper_data.dataset import PLAIN

    if pairs is not None and dataset is None:
        return PLAIN, (sources.pairs_of(pairs) if pairs.is_dir() else PLAIN.pairs(pairs))
    if pairs is not None or dataset is None:
        raise typer.BadParameter("expected a CSV file of pairs, a folder of results, or --dataset with --data")
    if data is None:
        raise typer.BadParameter("--dataset was given without --data; expected the folder of the dataset")
    source = find_dataset(dataset)
    return source, source.pairs(data)


def _method(source: str, options: dict[str, Any], save: Path | None) -> Method:
    from carlreg.evaluation import sources
    from carlreg.evaluation.baselines import BASELINES, cached, icon
    from carlreg.files.tables import read_pairs
    from carlreg.model.loaded import AUTO
    from carlreg.model.shipped import SHORT, available

    path = Path(source)
    if source in BASELINES:
        return BASELINES[source] if save is None else cached(BASELINES[source], save)
    if path.suffix.lower() in (".trch", ".pth", ".pt") and path.is_file():
        return icon(path, save=save, **options)
    if path.is_dir():
        return sources.in_folder(path)
    if path.suffix.lower() == ".csv":
        return sources.from_list(read_pairs(path))
    if source in (AUTO, *SHORT, *available()) or path.is_file():
        return sources.by_model(source, save=save, **options)
    raise InputError(
        f"{source} is not a folder of results, a CSV file, a model ({', '.join(available())}, {AUTO}) or a baseline "
        f"({', '.join(BASELINES)}); expected one of these"
    )


def _report(scores: Scores) -> None:
    """Print a pair's failures and, to a terminal, its figures."""
    from carlreg.evaluation.scores import FIGURES

    for text in scores.failures:
        message(f"{scores.pair} by {scores.method}: {text}", always=True)
    if sys.stderr.isatty():
        figures = [f"{FIGURES[key]} {_text(value)}" for key, value in scores.figures.items() if value == value]
        print(f"{scores.method}, {scores.pair}: {', '.join(figures)}", file=sys.stderr)


def _print_tables(evaluation: Evaluation) -> None:
    from rich.console import Console

    from carlreg.evaluation.scores import FIGURES
    from carlreg.evaluation.statistics import mean

    console = Console(width=None if sys.stdout.isatty() else 160)
    methods = evaluation.methods
    means = {method: evaluation.means(method) for method in methods}
    shown = [key for key in FIGURES if any(row[key] == row[key] for row in means.values())]
    succeeded = {method: [not one.failures for one in evaluation.of(method)] for method in methods}
    rows = [
        (method, f"{sum(succeeded[method])}/{len(succeeded[method])}", *(_text(row[key]) for key in shown))
        for method, row in means.items()
    ]
    console.print(_table("Means over pairs", ["method", "pairs", *(FIGURES[key] for key in shown)], rows))
    if evaluation.labels:
        rows = [
            (evaluation.label_name(label), *(_text(mean(evaluation.dice_of(method, label))) for method in methods))
            for label in evaluation.labels
        ]
        console.print(_table("Dice per structure", ["label", *methods], rows))
    for one in evaluation.comparisons():
        low, high = one.interval
        console.print(
            f"{one.first} − {one.second}, {FIGURES[one.figure]}: {one.mean_difference:+.4f} "
            f"[{low:+.4f}, {high:+.4f}], p = {one.p:.2g}, better on {one.won} of {one.pairs} pairs"
        )


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """A table for a terminal. On a narrow one, long names go on in a second line; they are never cut."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _text(value: float) -> str:
    return f"{value:.4g}" if value == value else ""
