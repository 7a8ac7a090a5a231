"""`carl evaluate`: figures of one or more methods on the same pairs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from carlreg.cli._shared import Quiet, Verbose

if TYPE_CHECKING:
    from carlreg.evaluation.api import Evaluation
    from carlreg.evaluation.scores import Scores
    from carlreg.evaluation.sources import Method


def evaluate(
    pairs: Annotated[
        Path | None,
        typer.Argument(help="A CSV of pairs, or a folder of results of `carl register`.", show_default=False),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-m",
            help="NAME=SOURCE, as often as there are methods: a folder of results, a CSV of pairs with the column "
            "'transform', a model's name or file, a checkpoint of icon_registration (.trch, .pth), or one of identity, "
            "ants-affine, ants-synquick, greedy, convexadam.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Register the pairs with this model.", show_default=False)] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="The pairs of a dataset of the paper: abdomen1k, dirlab, hcp, …", show_default=False),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where that dataset is.", show_default=False)] = None,
    labels: Annotated[str | None, typer.Option(help="Score these labels only: 1,2,6.", show_default=False)] = None,
    allow_missing_labels: Annotated[
        bool, typer.Option(help="A label that only one map of a pair has is left out, without a word.")
    ] = False,
    io_iterations: Annotated[
        int | None, typer.Option(help="Steps of instance optimisation, where a model registers.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:0, mps")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for scores.csv, scores.json and dice.png.", show_default=False),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which what registers here keeps its results; baselines are not run again.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace scores that are there.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure registrations: Dice, HD95, landmark error, folds, SDlogJ, inverse consistency, time and memory.

    With several methods, their differences on the same pairs are told too. What is wrong with a pair is said in one
    line; the others go on, and the exit code is 1.
    """
    from carlreg.evaluation import api, sources

    listed, names = _pairs(pairs, dataset, data)
    options = {"io_iterations": io_iterations, "device": device}
    methods: dict[str, Method] = {}
    for text in method or []:
        name, equals, source = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--method is {text!r}; expected NAME=SOURCE")
        if name in methods:
            raise typer.BadParameter(f"the method {name!r} is given twice; expected different names")
        methods[name] = _method(source, options, save and save / name)
    if model is not None:
        methods[Path(model).stem] = sources.by_model(model, save=save, **options)
    if pairs is not None and pairs.is_dir():
        methods = {pairs.resolve().name: sources.in_folder(pairs), **methods}
    if any(pair.transform for pair in listed) or not methods:
        methods = {"transform": sources.listed, **methods}
    if out is not None and (out / "scores.json").exists() and not overwrite:
        raise FileExistsError(f"{out} already holds scores.json; choose another folder, or --overwrite")
    chosen = (sorted(names) or None) if labels is None else _numbers(labels)
    found = api.evaluate(listed, methods, labels=chosen, names=names, partial=allow_missing_labels, done=_tell)
    _show(found)
    if out is not None:
        found.write(out, overwrite=overwrite)
    failed = sum(bool(scores.failures) for scores in found.scores)
    if failed:
        print(f"carl: {failed} of {len(found.scores)} failed, as told above", file=sys.stderr)
        raise typer.Exit(1)


def _pairs(pairs: Path | None, dataset: str | None, data: Path | None) -> tuple[list[Any], dict[int, str]]:
    from carlreg.evaluation import api, sources
    from carlreg.files.tables import read_pairs

    if (pairs is None) == (dataset is None):
        raise typer.BadParameter("expected either a CSV of pairs or a folder of results, or --dataset with --data")
    if dataset is not None:
        if data is None:
            raise typer.BadParameter("--dataset needs --data, the folder where it is")
        module = api.adapter(dataset)
        return module.pairs(data), dict(module.LABELS)
    assert pairs is not None
    return (sources.pairs_of(pairs) if pairs.is_dir() else read_pairs(pairs)), {}


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
        return icon(path, **options)
    if path.is_dir():
        return sources.in_folder(path)
    if path.suffix.lower() == ".csv":
        return sources.from_list(read_pairs(path))
    if source in (AUTO, *SHORT, *available()) or path.is_file():
        return sources.by_model(source, save=save, **options)
    raise ValueError(
        f"{source} is neither a folder of results nor a CSV nor a model ({', '.join(available())}, {AUTO}) nor a "
        f"baseline ({', '.join(BASELINES)}); expected one of these"
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(" ", ",").split(",") if word]
    except ValueError as error:
        raise typer.BadParameter(f"--labels is {text!r}; expected whole numbers: 1,2,6") from error


def _tell(scores: Scores) -> None:
    from carlreg.evaluation.scores import FIGURES

    for text in scores.failures:
        print(f"carl: {scores.pair} by {scores.method}: {text}", file=sys.stderr)
    if sys.stderr.isatty():
        known = [f"{FIGURES[key]} {_text(value)}" for key, value in scores.figures.items() if value == value]
        print(f"{scores.method}, {scores.pair}: {', '.join(known)}", file=sys.stderr)


def _show(found: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    from carlreg.evaluation.scores import FIGURES

    means = {method: found.means(method) for method in found.methods}
    known = [key for key in FIGURES if any(row[key] == row[key] for row in means.values())]
    table = Table(title="Means over pairs")
    for heading in ("method", "pairs", *(FIGURES[key] for key in known)):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method, row in means.items():
        sound = sum(not scores.failures for scores in found.of(method))
        table.add_row(method, f"{sound}/{len(found.of(method))}", *(_text(row[key]) for key in known))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if found.labels:
        table = Table("label", title="Dice per structure")
        for method in found.methods:
            table.add_column(method, justify="right")
        for label in found.labels:
            columns = [found.dice_of(method, label) for method in found.methods]
            cells = [_text(sum(column) / len(column)) if column else "" for column in columns]
            table.add_row(found.label_name(label), *cells)
        console.print(table)
    for told in found.comparisons():
        low, high = told["interval"]
        console.print(
            f"{told['first']} − {told['second']}, {FIGURES[told['figure']]}: {told['mean_difference']:+.4f} "
            f"[{low:+.4f}, {high:+.4f}], p = {told['p']:.2g}, better on {told['won']} of {told['pairs']} pairs"
        )


def _text(value: float) -> str:
    return f"{value:.4g}" if value == value else ""
