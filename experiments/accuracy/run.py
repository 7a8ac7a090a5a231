"""Score CARL, ANTs SyNQuick, greedy and ConvexAdam on the validation pairs, in the images' own space.

    python experiments/native/run.py ../shared/data work --kinds network fields --keep work/carl
    python experiments/accuracy/run.py ../shared/data work

Brains are scored on 14 subcortical structures and abdomens on 13 organs and on 5 of them, over all ordered pairs;
hippocampi on 2 parts, over 40 pairs. CARL's results are read from work/carl/SET/KIND/PAIR, where experiments/native
keeps them; missing ones are made with `carl register`. Results of ANTs are kept in work/ants/SET/PAIR, as by
`carl evaluate --save`, those of the others in work/greedy and work/convexadam; a missing one is computed if the program
is installed. Each result is scored once: its row in results/SET.json has the checksum of its transform. So the script
can be stopped and continues where it stopped.

Writes results/SET.json, the box plots SET.png, the best, median and worst pair SET_pairs.png, and table.md for all
sets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.evaluation.api import Evaluation, box_plot
from carlreg.evaluation.baselines import BASELINES, cached
from carlreg.evaluation.scores import FIGURES, Scores, score
from carlreg.evaluation.sources import Method, Result, identity, in_folder
from carlreg.files import world_transform
from carlreg.files.atomic import write_atomically
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, read, read_labels
from carlreg.files.orientation import to_closest_ras
from carlreg.files.tables import Pair
from carlreg.model.loaded import find_model
from carlreg.objective.metrics import mean_score
from carlreg.paper_data import learn2reg, oasis

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine, png
from experiments.native.run import SEED, SETS, boxes, is_kept, keep, register, validation_pairs

RESULTS = Path(__file__).with_name("results")
NAMES = {"brain": oasis.LABELS, "abdomen": learn2reg.LABELS, "hippocampus": {1: "anterior", 2: "posterior"}}
TASKS = {
    "brain, 14 subcortical structures": ("brain", SETS["brain"]),
    "abdomen, 13 organs": ("abdomen", SETS["abdomen"]),
    "abdomen, 5 organs: spleen, kidneys, liver, pancreas": ("abdomen", (1, 2, 3, 6, 11)),
    "hippocampus, 2 parts": ("hippocampus", SETS["hippocampus"]),
}
CARL = {"CARL": "network", "CARL with optimisation": "fields"}
"""Our methods, and their names in experiments/native."""
BEST, ANTS = "CARL with optimisation", "ANTs SyNQuick"
OTHERS = {
    ANTS: ("ants-synquick", "ants", "ants", "antspyx"),
    "greedy": ("greedy", "greedy", "picsl_greedy", "picsl-greedy"),
    "ConvexAdam": ("convexadam", "convexadam", "convexAdam", "convexAdam"),
}
"""Other programs: the name of the baseline, its folder in WORK, its module and its package."""
METHODS = ("unregistered", "boxes aligned", *CARL, *OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument(
        "--pairs", type=int, help="use the first N pairs of each set, in a random order with a fixed seed"
    )
    parser.add_argument("--model", default="default", help="name or file of a model (default: the default model)")
    parser.add_argument(
        "--kept", type=Path, help="folder in which experiments/native kept its results (default: WORK/carl)"
    )
    parser.add_argument("--carl-pairs", type=int, help="register at most N pairs with CARL in this run")
    parser.add_argument("--ants-pairs", type=int, help="register at most N pairs with ANTs in this run")
    parser.add_argument("--other-pairs", type=int, help="the same for greedy and for ConvexAdam")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.model != "default" and arguments.out == RESULTS:
        parser.error("the results beside this script belong to the default model: give --out with another --model")
    weights = sha256(find_model(arguments.model))
    left = dict.fromkeys(OTHERS, arguments.other_pairs) | dict.fromkeys(CARL, arguments.carl_pairs)
    left[ANTS] = arguments.ants_pairs
    for method, (_, _, module, package) in OTHERS.items():
        if importlib.util.find_spec(module) is None:
            left[method] = 0
            print(f"{package} is not installed: skipping {method}, except for results kept earlier", flush=True)
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.sets:
        data, kept = arguments.data / name / "val", arguments.kept or arguments.work / "carl"
        book = Book.open(arguments.out / f"{name}.json", weights)
        sources = sources_of(name, data, arguments.work, kept, arguments.model, weights)
        pairs = pairs_of(data, name)
        for pair in pairs[: arguments.pairs]:
            for source in sources:
                failed += not enter(book, source, pair, left)
        evaluation = book.evaluation()
        for method in METHODS:
            print(f"{name}, {method}: {len(evaluation.of(method))} of {len(pairs)} pairs are scored", flush=True)
        if common(evaluation).scores:
            write_atomically(arguments.out / f"{name}.png", box_plot(common(evaluation)))
        picture(evaluation, sources, {pair.name: pair for pair in pairs}, arguments.out / f"{name}_pairs.png")
    text = table({name: Book.open(arguments.out / f"{name}.json", weights) for name in SETS})
    write_atomically(arguments.out / "table.md", text.encode())
    print(text)
    if failed:
        sys.exit(f"{failed} failed; see the messages above")


def pairs_of(folder: Path, name: str) -> list[Pair]:
    """The validation pairs of a set, in their random order."""

    def pair(fixed: str, moving: str) -> Pair:
        images = (folder / f"{case}.nii.gz" for case in (fixed, moving))
        f, m, f_labels, m_labels = (*images, *(folder / f"{case}_labels.nii.gz" for case in (fixed, moving)))
        return Pair(f"{moving}_to_{fixed}", f, m, f_labels, m_labels)

    return [pair(fixed, moving) for fixed, moving in validation_pairs(folder, name)]


# ---- results of the methods -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A method and its results, a folder for each pair."""

    name: str
    method: Method
    """Reads a pair's result from its folder."""
    root: Path | None = None
    """None for a method that needs no files."""
    is_complete: Callable[[Path], bool] = lambda folder: True
    make: Callable[[Pair], object] = lambda pair: None
    """Registers a pair into its folder."""

    def checksum(self, pair: Pair) -> str | None:
        """The checksum of a pair's result; None if there is no result yet."""
        if self.root is None:
            return self.name
        folder = self.root / pair.name
        if not self.is_complete(folder):
            return None
        transform = folder / "transform.h5"
        return sha256(transform if transform.is_file() else folder / "report.json")  # a failure leaves a report only

    def report(self, pair: Pair) -> dict[str, Any]:
        """The report of a pair's result."""
        path = self.root and self.root / pair.name / "report.json"
        return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


def sources_of(name: str, data: Path, work: Path, kept: Path, model: str, weights: str) -> list[Source]:
    """The methods to compare on a set, in the order of the table's rows."""

    def stretched(pair: Pair, fixed: Image, moving: Image) -> Result:
        return Result(boxes(fixed, moving))

    def carl(method: str, kind: str) -> Source:
        root = kept / name / kind

        def make(pair: Pair) -> None:
            if (root / pair.name / "report.json").exists():
                sys.exit(
                    f"{root / pair.name} was not made by {model}: pass its own --model, or another folder as --kept"
                )
            moving, fixed = pair.name.split("_to_")
            same = {"set": name, "fixed": fixed, "moving": moving, "kind": kind}
            register(data, same, work / "pair", model)
            keep(work / "pair", root / pair.name)

        return Source(
            method,
            lambda pair, fixed, moving: in_folder(root)(pair, fixed, moving),
            root,
            lambda folder: is_kept(folder, weights),
            make,
        )

    def other(method: str, key: str, folder: str) -> Source:
        root = work / folder / name
        run = cached(BASELINES[key], root)
        return Source(
            method,
            run,
            root,
            lambda folder: (folder / "report.json").is_file(),
            lambda pair: run(pair, read(pair.fixed), read(pair.moving)),
        )

    return [
        Source(METHODS[0], identity),
        Source(METHODS[1], stretched),
        *(carl(method, kind) for method, kind in CARL.items()),
        *(other(method, key, folder) for method, (key, folder, *_) in OTHERS.items()),
    ]


def enter(book: Book, source: Source, pair: Pair, left: dict[str, int | None]) -> bool:
    """Score a pair that has no row yet, registering it first if needed and allowed; False if that failed."""
    row, checksum = book.row(source.name, pair.name), source.checksum(pair)
    if row is not None and checksum in (None, row["transform"]):  # the files of a scored result may have been deleted
        return True
    if checksum is None:
        allowed = left[source.name]
        if allowed == 0:
            return True
        left[source.name] = None if allowed is None else allowed - 1
        try:
            source.make(pair)
        except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
            print(f"{pair.name} by {source.name}: {error}", file=sys.stderr, flush=True)
        checksum = source.checksum(pair)
        if checksum is None:
            return False
    # Score the file, even right after it was made, so that the scores are those of `carl evaluate`.
    scores = score(pair, source.method, name=source.name, labels=SETS[book.name], partial=True)
    book.write(scores, transform=checksum, report=source.report(pair))
    print(f"{pair.name} by {source.name}: Dice {scores.figures['dice']:.4f}", *scores.failures, flush=True)
    return not scores.failures


# ---- scores of a set ------------------------------------------------------------------------------------------------


@dataclass
class Book:
    """results/SET.json: a row for each pair and method."""

    path: Path
    rows: list[dict[str, Any]]

    @classmethod
    def open(cls, path: Path, weights: str) -> Book:
        """Read the file, ignoring rows of other weights."""
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
        return cls(path, [row for row in rows if row.get("model", {}).get("sha256", weights) == weights])

    @property
    def name(self) -> str:
        return self.path.stem

    def row(self, method: str, pair: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if (row["method"], row["pair"]) == (method, pair)), None)

    def write(self, scores: Scores, *, transform: str, report: dict[str, Any]) -> None:
        """Add a pair's scores, replacing earlier ones, and write the file."""
        row = {key: value for key, value in scores.as_dict().items() if not key.startswith("tre_mm")}
        row |= {"transform": transform, "commit": commit()}
        if "model" in report:
            row["model"] = {key: report["model"].get(key) for key in ("name", "sha256")}
        before = self.row(scores.method, scores.pair)
        self.rows = [*(one for one in self.rows if one is not before), row]
        head = {"set": self.name, "seed": SEED, "machine": machine(), "labels": NAMES[self.name]}
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        text = f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'  # one line per row
        write_atomically(self.path, text.encode())

    def evaluation(self) -> Evaluation:
        """All scores, in the order of the methods."""
        rows = sorted(self.rows, key=lambda row: METHODS.index(row["method"]))
        return Evaluation([scores_of(row) for row in rows], NAMES[self.name])


def scores_of(row: dict[str, Any]) -> Scores:
    """The inverse of `Scores.as_dict`."""

    def numbers(values: Mapping[Any, float | None]) -> dict[Any, float]:
        return {key: math.nan if value is None else value for key, value in values.items()}

    dice, hd95 = (
        {int(label): value for label, value in numbers(row[f"{key}_per_label"]).items()} for key in ("dice", "hd95_mm")
    )
    figures = numbers({key: row.get(key) for key in FIGURES})
    return Scores(row["method"], row["pair"], figures, dice, hd95, failures=row["failures"])


def on_labels(evaluation: Evaluation, labels: Sequence[int]) -> Evaluation:
    """The same scores, restricted to these labels."""

    def cut(scores: Scores) -> Scores:
        dice = {label: value for label, value in scores.dice.items() if label in labels}
        hd95 = {label: value for label, value in scores.hd95_mm.items() if label in labels}
        means = {"dice": mean_score(dice), "hd95_mm": mean_score(hd95)}
        return replace(scores, figures=scores.figures | means, dice=dice, hd95_mm=hd95)

    return Evaluation([cut(scores) for scores in evaluation.scores], evaluation.names)


def common(evaluation: Evaluation) -> Evaluation:
    """The scores of the pairs that all methods share."""
    having = [{scores.pair for scores in evaluation.of(method) if scores.dice} for method in evaluation.methods]
    shared = set.intersection(*having) if having else set()
    return Evaluation([scores for scores in evaluation.scores if scores.pair in shared], evaluation.names)


# ---- table and pictures ---------------------------------------------------------------------------------------------


def table(books: Mapping[str, Book]) -> str:
    """Means over the pairs that all methods of a set share, each method's mean over all its pairs, and the differences
    between CARL and the other programs per pair."""
    headings = ("task", "method", "pairs", "Dice", "HD95, mm", "% \\|J\\| < 0", "seconds", "Dice, all its pairs")
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    notes = [
        "Means are over the pairs that all methods share; the last column is each method's mean over all its pairs.",
        "carl-base was trained with other subjects' labels of these structures; the other programs use no labels.",
        "Intervals treat pairs as independent; pairs share subjects, so the true intervals are wider.",
    ]
    for task, (name, labels) in TASKS.items():
        whole = on_labels(books[name].evaluation(), labels)
        shared = common(whole)
        for method in whole.methods:
            means, own = shared.means(method), [s.figures["dice"] for s in whole.of(method) if s.dice]
            shown = zip(("dice", "hd95_mm", "folds_percent", "seconds"), (3, 1, 4, 0), strict=True)
            cells = [f"{means[key]:.{digits}f}" if means[key] == means[key] else "" for key, digits in shown]
            cells.append(f"{np.mean(own):.3f} ({len(own)})" if own else "")
            lines.append(f"| {task} | {method} | {len(shared.of(method))} | {' | '.join(cells)} |")
        for other in OTHERS:
            comparison = whole.compare(BEST, other)
            if comparison is not None:
                low, high = comparison.interval
                notes.append(
                    f"{task}: {BEST} − {other} is {comparison.mean_difference:+.3f} Dice, 95 % interval {low:+.3f} "
                    f"to {high:+.3f}, better on {comparison.won} of {comparison.pairs} pairs."
                )
            elif whole.methods and other == ANTS:
                notes.append(f"{task}: {BEST} and {other} have no pair in common yet.")
    for book in books.values():
        notes += [f"{row['pair']} by {row['method']}: {text}" for row in book.rows for text in row["failures"]]
    models = {tuple(row["model"].values()) for book in books.values() for row in book.rows if "model" in row}
    notes += [f"The model is {name}, SHA-256 {checksum}." for name, checksum in models]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def picture(evaluation: Evaluation, sources: Sequence[Source], pairs: Mapping[str, Pair], path: Path) -> None:
    """Draw the best, the median and the worst pair by the Dice of CARL with optimisation, a row each: the fixed image,
    the moving image in its own space, and the moving image warped by each method. Each shows the outlines of its own
    labels; warped images also show those of the fixed labels in white."""
    ranked = sorted(
        (scores for scores in evaluation.of(BEST) if scores.dice), key=lambda scores: -scores.figures["dice"]
    )
    if not ranked:
        return
    picks = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    shown = [source for source in sources if source.root is not None and evaluation.of(source.name)]
    gone = [s.pair for s in picks.values() if any(o.checksum(pairs[s.pair]) is None for o in shown if o.name == BEST)]
    if gone:
        print(f"not redrawing {path.name}: the transform of {gone[0]} is missing", flush=True)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.7 * (2 + len(shown)), 8.6), layout="constrained")
    for axes, (word, scores) in zip(figure.subplots(3, 2 + len(shown)), picks.items(), strict=True):
        pair = pairs[scores.pair]
        assert pair.fixed_seg is not None
        assert pair.moving_seg is not None
        fixed, moving = read(pair.fixed), read(pair.moving)
        fixed_labels, moving_labels = read_labels(pair.fixed_seg), read_labels(pair.moving_seg)
        moving_name, fixed_name = pair.name.split("_to_")
        here, there = (best_slice(labels, evaluation.labels) for labels in (fixed_labels, moving_labels))
        draw(axes[0], fixed, {"": fixed_labels}, here, evaluation.labels, f"{word}: fixed, {fixed_name}")
        draw(axes[1], moving, {"": moving_labels}, there, evaluation.labels, f"moving, {moving_name}")
        for axis, source in zip(axes[2:], shown, strict=True):
            dice = [s.figures["dice"] for s in evaluation.of(source.name) if s.pair == pair.name and s.dice]
            if not dice or source.checksum(pair) is None:
                axis.set_axis_off()
                continue
            transform = source.method(pair, fixed, moving).transform
            warped, labels = (
                world_transform.apply(transform, moving, fixed),
                world_transform.apply(transform, moving_labels, fixed, "nearest"),
            )
            outlines = {"white": fixed_labels, "": labels}
            draw(axis, warped, outlines, here, evaluation.labels, f"{source.name}, Dice {dice[0]:.3f}")
    write_atomically(path, png(figure, 100))


def best_slice(labels: Image, wanted: Sequence[int]) -> int:
    """The axial slice, with axes closest to RAS, that shows the most of these structures."""
    data = to_closest_ras(labels).data
    shown = np.stack([(data == label).sum(axis=(0, 1)) for label in wanted])  # (labels, slices)
    return int(np.lexsort((shown.sum(axis=0), (shown > 0).sum(axis=0)))[-1])


def draw(
    axis: Any, image: Image, outlines: Mapping[str, Image], height: int, wanted: Sequence[int], title: str
) -> None:
    """Draw an axial slice and the outlines of labels in the given colour; without one, each label has its own."""
    from matplotlib import colormaps

    oriented = to_closest_ras(image)
    aspect = oriented.spacing[1] / oriented.spacing[0]
    axis.imshow(oriented.data[:, :, height].T, cmap="gray", origin="lower", aspect=aspect)
    for colour, labels in outlines.items():
        plane = to_closest_ras(labels).data[:, :, height].T
        for number, label in enumerate(wanted):
            own = colormaps["gist_rainbow"](number / len(wanted))
            if (plane == label).any():
                axis.contour(plane == label, levels=[0.5], colors=[colour or own], linewidths=0.8)
    axis.set_title(title, fontsize=9)
    axis.set_axis_off()


if __name__ == "__main__":
    main()
