"""Score CARL, ANTs SyNQuick, ANTs SyN, greedy and ConvexAdam on the validation pairs, in the images' own space.

    python experiments/accuracy/run.py ../shared/data work

Brains are scored on 14 subcortical structures, abdomens on 13 organs and on 5 of them, MR of abdomens and pairs of CT
and MR on 4 organs, over all ordered pairs; hearts on 3 structures, from the end of diastole to that of systole and
back; hippocampi on 2 parts, over 40 pairs. Results of CARL are kept in work/carl/SET/KIND/PAIR; missing ones are made
with `carl register`. Those of ANTs SyNQuick are kept in work/ants/SET/PAIR, as by `carl evaluate --save`, those of the
others in work/ants-syn, work/greedy and work/convexadam; a missing one is computed if the program is installed. Each
result is scored once: its row in results/SET.json has the checksums of its transform and of the pair's files. So the
script can be stopped and continues where it stopped. Processes that run at the same time need different sets.

Writes results/SET.json, the box plots SET.png, table.md for all sets, and on request SET_pairs.png with the best, the
median and the worst pair.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from carlreg.evaluation.api import Evaluation, box_plot
from carlreg.evaluation.baselines import BASELINES, ants, cached, guarded
from carlreg.evaluation.scores import FIGURES, Scores, score
from carlreg.evaluation.sources import Method, Result, identity, in_folder
from carlreg.evaluation.statistics import Comparison
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

from experiments.accuracy.registering import SEED, SUBCORTICAL, boxes, command, is_kept, keep, validation_pairs
from experiments.made import commit, machine, png, tree

RESULTS = Path(__file__).with_name("results")
FOUR = (1, 2, 3, 6)
SETS = {"hippocampus": (1, 2), "abdomen": tuple(range(1, 14)), "brain": SUBCORTICAL}
SETS |= {"abdomen_mr": FOUR, "ct_mr": FOUR, "cardiac": (1, 2, 3)}
"""The sets, and the labels to score."""
ORGANS = {label: learn2reg.LABELS[label] for label in FOUR}
NAMES: dict[str, Mapping[int, str]] = {
    "brain": oasis.LABELS,
    "abdomen": learn2reg.LABELS,
    "hippocampus": {1: "anterior", 2: "posterior"},
    "abdomen_mr": ORGANS,
    "ct_mr": ORGANS,
    "cardiac": {1: "right ventricle", 2: "myocardium", 3: "left ventricle"},
}
TASKS = {
    "brain, 14 subcortical structures": ("brain", SETS["brain"]),
    "abdomen, 13 organs": ("abdomen", SETS["abdomen"]),
    "abdomen, 5 organs: spleen, kidneys, liver, pancreas": ("abdomen", (1, 2, 3, 6, 11)),
    "abdomen MR, 4 organs": ("abdomen_mr", FOUR),
    "abdomen, CT to MR and MR to CT, 4 organs": ("ct_mr", FOUR),
    "heart, 3 structures": ("cardiac", SETS["cardiac"]),
    "hippocampus, 2 parts": ("hippocampus", SETS["hippocampus"]),
}
PLOTTED = ("brain", "abdomen", "hippocampus")
"""Sets with a box plot."""
UNCHANGED = ("brain", "hippocampus")
"""Sets whose files have never changed, so that rows from before rows had checksums of them are still right."""
AFFINE, BEST, ANTS, SYN = "CARL, affine", "CARL with optimisation", "ANTs SyNQuick", "ANTs SyN"
CARL = {AFFINE: "affine", "CARL": "network", BEST: "fields"}
"""Our methods, and the names of their options in registering.py."""
OTHERS = {
    ANTS: (BASELINES["ants-synquick"], "ants", "ants", "antspyx"),
    SYN: (guarded(ants("antsRegistrationSyN[s]")), "ants-syn", "ants", "antspyx"),
    "greedy": (BASELINES["greedy"], "greedy", "picsl_greedy", "picsl-greedy"),
    "ConvexAdam": (BASELINES["convexadam"], "convexadam", "convexAdam", "convexAdam"),
}
"""Other programs: the method, its folder in WORK, its module and its package. ANTs SyN is the setting of
antsRegistrationSyN.sh: cross-correlation, up to full resolution."""
METHODS = ("unregistered", "boxes aligned", *CARL, *OTHERS)
PARTIAL = (AFFINE, SYN)
"""Methods that may run on a few pairs alone: they have a table of their own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="METHOD",
        help="methods to run and score",
    )
    parser.add_argument(
        "--pairs", type=int, help="use the first N pairs of each set, in a random order with a fixed seed"
    )
    parser.add_argument("--model", default="default", help="name or file of a model (default: the default model)")
    parser.add_argument("--kept", type=Path, help="folder of the results of CARL (default: WORK/carl)")
    parser.add_argument(
        "--carl-pairs", type=int, help="register at most N pairs of all sets in this run, by each of its three ways"
    )
    parser.add_argument("--ants-pairs", type=int, help="the same for ANTs SyNQuick")
    parser.add_argument("--other-pairs", type=int, help="the same for greedy and for ConvexAdam")
    parser.add_argument(
        "--syn-pairs", type=int, default=0, help="ANTs SyN, which is slow: the first N pairs of each set (default: 0)"
    )
    parser.add_argument("--pictures", action="store_true", help="draw the best, median and worst pair of each set")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.model != "default" and arguments.out == RESULTS:
        parser.error("the results beside this script belong to the default model: give --out with another --model")
    weights = sha256(find_model(arguments.model))
    left = dict.fromkeys(OTHERS, arguments.other_pairs) | dict.fromkeys(CARL, arguments.carl_pairs)
    left |= {ANTS: arguments.ants_pairs, SYN: None}
    for method, (_, _, module, package) in OTHERS.items():
        if importlib.util.find_spec(module) is None:
            left[method] = 0
            if method in arguments.methods:
                print(f"{package} is not installed: skipping {method}, except for results kept earlier", flush=True)
    for folder in (arguments.out, arguments.work):
        folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.sets:
        pairs = pairs_of(arguments.data, name)
        book = Book.open(arguments.out / f"{name}.json", weights, pairs)
        kept = arguments.kept or arguments.work / "carl"
        sources = sources_of(name, arguments.work, kept, arguments.model, weights)
        for number, pair in enumerate(pairs[: arguments.pairs]):
            for source in sources:
                late = source.name == SYN and number >= arguments.syn_pairs
                if source.name in arguments.methods:
                    failed += not enter(book, source, pair, left | {SYN: 0} if late else left)
        evaluation = book.evaluation()
        for method in METHODS:
            print(f"{name}, {method}: {len(evaluation.of(method))} of {len(pairs)} pairs are scored", flush=True)
        if name in PLOTTED and common(evaluation).scores:
            write_atomically(arguments.out / f"{name}.png", box_plot(common(evaluation)))
        if arguments.pictures:
            picture(evaluation, sources, {pair.name: pair for pair in pairs}, arguments.out / f"{name}_pairs.png")
    text = table(
        {
            name: Book.open(arguments.out / f"{name}.json", weights, pairs_of(arguments.data, name))
            for name in SETS
            if (arguments.out / f"{name}.json").is_file()
        }
    )
    write_atomically(arguments.out / "table.md", text.encode())
    print(text)
    if failed:
        sys.exit(f"{failed} failed; see the messages above")


def pairs_of(data: Path, name: str) -> list[Pair]:
    """The validation pairs of a set, MOVING_to_FIXED, in their random order, which is always the same."""
    folder = data / name / "val"
    if name == "ct_mr":  # the sets number their subjects independently, hence the prefixes
        cases = {kind: cases_of(data / one / "val") for kind, one in (("ct", "abdomen"), ("mr", "abdomen_mr"))}
        files = {f"{kind}{case}": path for kind, found in cases.items() for case, path in found.items()}
        pairs = [(fixed, moving) for fixed in files for moving in files if fixed[:2] != moving[:2]]
    elif name == "cardiac":
        files = cases_of(folder)
        pairs = [(f"{one}_{a}", f"{one}_{b}") for one in patients(files) for a, b in (("ED", "ES"), ("ES", "ED"))]
    else:
        files = cases_of(folder)
        pairs = validation_pairs(folder, name)
    if name in ("ct_mr", "cardiac"):
        pairs = random.Random(SEED).sample(pairs, len(pairs))
    labels = {case: path.with_name(path.name.replace(".nii.gz", "_labels.nii.gz")) for case, path in files.items()}
    return [
        Pair(f"{moving}_to_{fixed}", files[fixed], files[moving], labels[fixed], labels[moving])
        for fixed, moving in pairs
    ]


def cases_of(folder: Path) -> dict[str, Path]:
    """The images of a folder by their names."""
    paths = sorted(path for path in folder.glob("*.nii.gz") if "_labels" not in path.name)
    return {path.name.removesuffix(".nii.gz"): path for path in paths}


def patients(cases: Iterable[str]) -> list[str]:
    """The subjects of these scans: a heart has two scans, whose names end with its phase."""
    return sorted({re.sub(r"_E[DS]$", "", case) for case in cases})


@functools.cache
def checksum_of(path: Path) -> str:
    return sha256(path)[:16]


def inputs_of(pair: Pair) -> dict[str, str]:
    """The first 16 digits of the checksums of a pair's files."""
    return {
        key: checksum_of(path) for key in ("fixed", "moving", "fixed_seg", "moving_seg") if (path := getattr(pair, key))
    }


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
    program: Callable[[], dict[str, str]] = dict
    """What registers: our code, or the version of a package."""

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

    def origin(self, pair: Pair) -> dict[str, Any]:
        """What made a pair's result, and from which files; empty for results of other scripts."""
        path = self.root and self.root / pair.name / "made.json"
        origin: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
        if origin.get("inputs", inputs_of(pair)) != inputs_of(pair):
            sys.exit(f"{path} names other images than those of today: delete its folder, or pass another WORK")
        return origin

    def run(self, pair: Pair) -> None:
        """Register a pair, and record what did it."""
        made = {"commit": commit(), **self.program(), "inputs": inputs_of(pair)}
        self.make(pair)
        if self.root is not None:
            write_atomically(self.root / pair.name / "made.json", (json.dumps(made, indent=1) + "\n").encode())


def sources_of(name: str, work: Path, kept: Path, model: str, weights: str) -> list[Source]:
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
            scratch = work / f"pair-{name}"  # of this set, since other processes may run other sets
            shutil.rmtree(scratch, ignore_errors=True)
            subprocess.run(command(pair, kind, scratch, model), check=True)
            keep(scratch, root / pair.name)

        return Source(
            method,
            lambda pair, fixed, moving: in_folder(root)(pair, fixed, moving),
            root,
            lambda folder: is_kept(folder, weights),
            make,
            lambda: {"tree": tree()},
        )

    def other(method: str, function: Method, folder: str, package: str) -> Source:
        root = work / folder / name
        run = cached(function, root)
        return Source(
            method,
            run,
            root,
            lambda folder: (folder / "report.json").is_file(),
            lambda pair: run(pair, read(pair.fixed), read(pair.moving)),
            lambda: {"program": f"{package} {version_of(package)}"},
        )

    return [
        Source(METHODS[0], identity),
        Source(METHODS[1], stretched),
        *(carl(method, kind) for method, kind in CARL.items()),
        *(other(method, function, folder, package) for method, (function, folder, _, package) in OTHERS.items()),
    ]


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


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
            source.run(pair)
        except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
            print(f"{pair.name} by {source.name}: {error}", file=sys.stderr, flush=True)
        checksum = source.checksum(pair)
        if checksum is None:
            return False
    # Score the file, even right after it was made, so that the scores are those of `carl evaluate`.
    scores = score(pair, source.method, name=source.name, labels=SETS[book.name], partial=True)
    made = {key: value for key, value in source.origin(pair).items() if key != "inputs"}
    book.write(scores, transform=checksum, report=source.report(pair), made=made, inputs=inputs_of(pair))
    print(f"{pair.name} by {source.name}: Dice {scores.figures['dice']:.4f}", *scores.failures, flush=True)
    return not scores.failures


# ---- scores of a set ------------------------------------------------------------------------------------------------


@dataclass
class Book:
    """results/SET.json: a row for each pair and method."""

    path: Path
    rows: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Book:
        return cls(path, json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else [])

    @classmethod
    def open(cls, path: Path, weights: str, pairs: Sequence[Pair]) -> Book:
        """Read the file, ignoring rows of other weights, and of other files than these pairs have now."""
        book = cls.read(path)
        today = {pair.name: inputs_of(pair) for pair in pairs}

        def holds(row: dict[str, Any]) -> bool:
            inputs = row.get("inputs")
            same = book.name in UNCHANGED if inputs is None else inputs == today.get(row["pair"])
            return same and row.get("model", {}).get("sha256", weights) == weights

        return cls(path, [row for row in book.rows if holds(row)])

    @property
    def name(self) -> str:
        return self.path.stem

    def row(self, method: str, pair: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if (row["method"], row["pair"]) == (method, pair)), None)

    def write(
        self,
        scores: Scores,
        *,
        transform: str,
        report: dict[str, Any],
        made: dict[str, Any],
        inputs: dict[str, str],
    ) -> None:
        """Add a pair's scores, replacing earlier ones, and write the file."""
        row = {key: value for key, value in scores.as_dict().items() if not key.startswith("tre_mm")}
        row |= {"transform": transform, "commit": commit(), "inputs": inputs} | ({"made": made} if made else {})
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
    """The scores of the pairs that all methods share, without methods that may have run on a few pairs alone."""
    whole = [method for method in evaluation.methods if method not in PARTIAL]
    shared = set.intersection(*(scored_pairs(evaluation, method) for method in whole)) if whole else set()
    kept = [scores for scores in evaluation.scores if scores.pair in shared and scores.method in whole]
    return Evaluation(kept, evaluation.names)


def scored_pairs(evaluation: Evaluation, method: str) -> set[str]:
    return {scores.pair for scores in evaluation.of(method) if scores.dice}


# ---- intervals ------------------------------------------------------------------------------------------------------


def difference(evaluation: Evaluation, first: str, second: str) -> Comparison | None:
    """The Dice of the first method minus that of the second on the pairs that both have, with an interval by a
    bootstrap over subjects; None if there are none."""
    comparison = evaluation.compare(first, second)
    if comparison is None:
        return None
    other = {scores.pair: scores.figures["dice"] for scores in evaluation.of(second)}
    found = {s.pair: s.figures["dice"] - other[s.pair] for s in evaluation.of(first) if s.pair in other}
    interval = by_subject({pair: value for pair, value in found.items() if math.isfinite(value)})
    return replace(comparison, interval=interval)


def by_subject(values: Mapping[str, float]) -> tuple[float, float]:
    """95 % interval of the mean over pairs, by their names MOVING_to_FIXED. Subjects are drawn with replacement, as
    many as there are; a pair counts as often as the product of the counts of its subjects, a pair of two scans of one
    subject as often as this one. Draws that leave no pair are ignored."""
    members = [patients(pair.split("_to_")) for pair in values]
    subjects = sorted({one for pair in members for one in pair})
    inside = np.array([[subject in pair for subject in subjects] for pair in members])  # (pairs, subjects)
    share = np.full(len(subjects), 1 / len(subjects))
    counts = np.random.default_rng(SEED).multinomial(len(subjects), share, 10_000)  # (draws, subjects)
    weights = np.where(inside, counts[:, None], 1).prod(axis=2)  # (draws, pairs)
    weights = weights[weights.any(axis=1)]
    means = weights @ np.array(list(values.values())) / weights.sum(axis=1)
    low, high = (float(x) for x in np.percentile(means, [2.5, 97.5]))
    return low, high


# ---- table and pictures ---------------------------------------------------------------------------------------------


def table(books: Mapping[str, Book]) -> str:
    """Means over the pairs that all methods of a set share, each method's mean over all its pairs, methods that ran on
    a few pairs beside others on these, and the differences between CARL and the other programs per pair."""
    headings = ("task", "method", "pairs", "Dice", "HD95, mm", "% \\|J\\| < 0", "seconds", "Dice, all its pairs")
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    notes = [
        "Means of the first table are over the pairs that all its methods share; its last column is each method's mean "
        "over all its pairs. Those of the second are over the pairs of its method.",
        "carl-base was trained with other subjects' labels of these structures; the other programs use no labels.",
        "Intervals are by a bootstrap over subjects.",
    ]
    few = []
    for task, (name, labels) in TASKS.items():
        if name not in books:
            continue
        whole = on_labels(books[name].evaluation(), labels)
        shared = common(whole)
        for method in shared.methods or [one for one in whole.methods if one not in PARTIAL]:
            means, own = shared.means(method), [s.figures["dice"] for s in whole.of(method) if s.dice]
            shown = zip(("dice", "hd95_mm", "folds_percent", "seconds"), (3, 1, 4, 0), strict=True)
            cells = [f"{means[key]:.{digits}f}" if means[key] == means[key] else "" for key, digits in shown]
            cells.append(f"{np.mean(own):.3f} ({len(own)})" if own else "")
            lines.append(f"| {task} | {method} | {len(shared.of(method))} | {' | '.join(cells)} |")
        few += [f"| {task} | {method} | {' | '.join(cells)} |" for method, cells in beside_others(whole)]
        for other in OTHERS:
            comparison = difference(whole, BEST, other)
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
    if few:
        columns = ("task", "method", "pairs", "Dice", "HD95, mm", "% \\|J\\| < 0", "seconds", *BESIDE)
        lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *few]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


BESIDE = ("CARL", BEST, ANTS)
"""Methods whose Dice is shown on the pairs of a method that ran on a few."""


def beside_others(evaluation: Evaluation) -> Iterator[tuple[str, list[str]]]:
    """Each method that may have run on a few pairs alone: the number of its pairs, its means over them, and the Dice
    of others on the same pairs if they have all of these."""
    for method in (one for one in evaluation.methods if one in PARTIAL):
        pairs = scored_pairs(evaluation, method)
        same = Evaluation([scores for scores in evaluation.scores if scores.pair in pairs], evaluation.names)
        means = same.means(method)
        shown = zip(("dice", "hd95_mm", "folds_percent", "seconds"), (3, 1, 4, 0), strict=True)
        cells = [f"{means[key]:.{digits}f}" if means[key] == means[key] else "" for key, digits in shown]
        others = (f"{same.means(o)['dice']:.3f}" if pairs == scored_pairs(same, o) else "" for o in BESIDE)
        yield method, [str(len(pairs)), *cells, *others]


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
