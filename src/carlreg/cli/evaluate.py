"""`carl evaluate`: scores of one or more methods on the same pairs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from carlreg.cli._shared import Overwrite, Quiet, Verbose, message
from carlreg.cli._threads import Threads
from carlreg.errors import InputError
from carlreg.files.atomic import refuse_result

if TYPE_CHECKING:
    from carlreg.evaluation.api import Evaluation
    from carlreg.evaluation.scores import Scores
    from carlreg.evaluation.sources import Method
    from carlreg.files.tables import Pair
    from carlreg.paper_data.dataset import Dataset


def evaluate(
    pairs: Annotated[
        Path | None,
        typer.Argument(help="A CSV file of pairs, or a folder with results of `carl register`.", show_default=False),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="NAME=SOURCE, once for each method: a folder of results, a CSV file of pairs with the column "
            "'transform', the name or file of a model, a checkpoint of icon_registration (.trch, .pth), or one of "
            "identity, ants-affine, ants-synquick, greedy, convexadam.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Register the pairs with this model.", show_default=False)] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Use the pairs of one of the paper's datasets: abdomen1k, dirlab, hcp, …", show_default=False
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of that dataset.", show_default=False)] = None,
    preparation: Annotated[
        Literal["dataset", "model"],
        typer.Option(
            help="With --dataset: models see the images as the paper prepares that dataset (grid, intensities, masks), "
            "or as `carl register` would prepare them for the model."
        ),
    ] = "dataset",
    labels: Annotated[
        str | None, typer.Option(help="Score only these labels, for example 1,2,6.", show_default=False)
    ] = None,
    allow_missing_labels: Annotated[
        bool, typer.Option(help="Skip labels that only one image of a pair has, instead of reporting a failure.")
    ] = False,
    io_iterations: Annotated[
        int | None, typer.Option(help="Steps of instance optimisation when a model registers.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0 or mps.")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for scores.csv, scores.json and dice.png.", show_default=False),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results of models and baselines. A baseline is not run again if its result exists.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    threads: Threads = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure registrations: Dice, HD95, landmark error, folds, SDlogJ, inverse consistency, time and memory.

    With several methods, their differences on the same pairs are reported as well. A problem with a pair is printed as
    one line; the other pairs are still measured, and the exit code is 1.
    """
    from carlreg.evaluation import api, sources

    if out is not None:
        refuse_result(out, api.SCORES, overwrite)
    source, listed = _pairs(pairs, dataset, data)
    if preparation == "model":
        source = replace(source, prepare=None)
    options = {"io_iterations": io_iterations, "device": device, "dataset": source}
    methods = _results_of(pairs, listed) | _methods(method or [], model, options, save)
    if not methods:
        methods = {"transform": sources.listed}
    chosen = (sorted(source.labels) or None) if labels is None else _numbers(labels)
    result = api.evaluate(
        listed,
        methods,
        labels=chosen,
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

    if (pairs is None) == (dataset is None):
        raise typer.BadParameter("expected a CSV file of pairs, a folder of results, or --dataset with --data")
    if pairs is not None:
        return PLAIN, (sources.pairs_of(pairs) if pairs.is_dir() else PLAIN.pairs(pairs))
    if data is None:
        raise typer.BadParameter("--dataset was given without --data; expected the folder of the dataset")
    assert dataset is not None
    source = find_dataset(dataset)
    return source, source.pairs(data)


def _results_of(pairs: Path | None, listed: list[Pair]) -> dict[str, Method]:
    """The results that come with the pairs."""
    from carlreg.evaluation import sources

    methods: dict[str, Method] = {"transform": sources.listed} if any(pair.transform for pair in listed) else {}
    if pairs is not None and pairs.is_dir():
        methods[pairs.resolve().name] = sources.in_folder(pairs)
    return methods


def _methods(texts: list[str], model: str | None, options: dict[str, Any], save: Path | None) -> dict[str, Method]:
    """The methods of --method and --model, by name."""
    from carlreg.evaluation import sources

    methods: dict[str, Method] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--method is {text!r}; expected NAME=SOURCE")
        if name in methods:
            raise typer.BadParameter(f"the method {name!r} is given twice; expected different names")
        methods[name] = _method(source, options, save and save / name)
    if model is not None:
        methods[Path(model).stem] = sources.by_model(model, save=save, **options)
    return methods


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


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(" ", ",").split(",") if word]
    except ValueError as error:
        raise typer.BadParameter(f"--labels is {text!r}; expected whole numbers: 1,2,6") from error


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
    from rich.table import Table

    from carlreg.evaluation.scores import FIGURES
    from carlreg.evaluation.statistics import mean

    means = {method: evaluation.means(method) for method in evaluation.methods}
    shown = [key for key in FIGURES if any(row[key] == row[key] for row in means.values())]
    table = Table(title="Means over pairs")
    for heading in ("method", "pairs", *(FIGURES[key] for key in shown)):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method, row in means.items():
        scores = evaluation.of(method)
        succeeded = sum(not one.failures for one in scores)
        table.add_row(method, f"{succeeded}/{len(scores)}", *(_text(row[key]) for key in shown))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if evaluation.labels:
        table = Table("label", title="Dice per structure")
        for method in evaluation.methods:
            table.add_column(method, justify="right")
        for label in evaluation.labels:
            cells = [_text(mean(evaluation.dice_of(method, label))) for method in evaluation.methods]
            table.add_row(evaluation.label_name(label), *cells)
        console.print(table)
    for one in evaluation.comparisons():
        low, high = one.interval
        console.print(
            f"{one.first} − {one.second}, {FIGURES[one.figure]}: {one.mean_difference:+.4f} "
            f"[{low:+.4f}, {high:+.4f}], p = {one.p:.2g}, better on {one.won} of {one.pairs} pairs"
        )


def _text(value: float) -> str:
    return f"{value:.4g}" if value == value else ""
