"""Rebuild every table and plot that the pages show, from the result files alone: `make figures`.

    python experiments/figures.py            # rewrite tables and plots that differ
    python experiments/figures.py --check    # change nothing; list what differs and exit with 1

A page marks a table with `<!-- table: NAME -->` and `<!-- end of table -->`; the text between them is replaced by the
result of the function of that name in this file. Tables are compared byte for byte, plots with a tolerance, since fonts
and libraries differ between machines. Pictures of scans need the scans and are not rebuilt here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "experiments"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TOLERANCE = 0.02
"""Largest mean difference between two plots, as a fraction of the intensity range."""

Table = Callable[[], str]
TABLES: dict[str, Table] = {}


def table(function: Callable[[], Iterable[Sequence[str]]]) -> Callable[[], Iterable[Sequence[str]]]:
    """Register a table: the function yields its rows, the header first. Without rows, it is one line of text; without
    a header, nothing."""

    def text() -> str:
        if not (lines := list(function())):
            return ""
        header, *rows = lines
        if not rows:
            return "Not measured yet.\n"
        return "".join(
            "|" + "|".join("---" if cell == "---" else f" {cell} " for cell in line) + "|\n"
            for line in (header, ["---"] * len(header), *rows)
        )

    TABLES[function.__name__] = text
    return function


def result(path: str) -> Any:
    """A result file, by its path under experiments/."""
    return json.loads((HERE / path).read_text(encoding="utf-8"))


def benchmark(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def three(values: Iterable[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def number(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


# ---- attacks --------------------------------------------------------------------------------------------------------


@table
def torture() -> Iterator[Sequence[str]]:
    yield "attack", "cases", "broken promises", "code"
    rows = result("torture/results.json")["rows"]
    for name, row in rows.items():
        yield name, f"{row['cases']:,}".replace(",", " "), str(len(row["failures"])), ", ".join(row["commits"])
    cases, failures = sum(row["cases"] for row in rows.values()), sum(len(row["failures"]) for row in rows.values())
    yield "all", f"{cases:,}".replace(",", " "), str(failures), ""


# ---- confidence -----------------------------------------------------------------------------------------------------

EVIDENCE = {
    "network_disagreement": "disagreement of the network's two directions",
    "disagreement": "disagreement of the two directions after optimisation",
    "turn": "certificate, turned: median",
    "turn_95": "certificate, turned: 95th percentile",
    "shift": "certificate, shifted: median",
    "shift_95": "certificate, shifted: 95th percentile",
    "scatter": "scatter of the network's answers to shifted and turned copies",
    "opinion": "distance of the result from the mean of these answers",
    "spread": "spread of attention",
    "entropy": "entropy of attention",
    "attention": "distance of the result from the centre of attention",
    "surprise": "attention at the result",
    "mismatch": "features against wrong alignments",
    "feature_drift": "how far from the result features may match",
    "kinship": "kinship of the two scans' features",
    "novelty": "novelty of the features",
    "dissimilarity": "similarity",
    "no_excess": "similarity against wrong alignments",
    "no_gain": "similarity against that before",
    "network_dissimilarity": "similarity of the network's own result",
    "no_information": "mutual information against wrong alignments",
    "drift": "how far from their places windows may match",
    "residual": "distance of structures by the contrast that is left",
    "contrast": "agreement of contrasts",
    "uncovered": "coverage of the fixed image",
    "no_overlap": "overlap of the outlines",
    "folds": "folds",
    "extreme": "extreme changes of volume",
    "volume": "deviation of the change of volume",
    "deformation": "distance from an affine map",
    "strain": "stretching or shrinking by the affine part",
    "misorientation": "similarity gained by mirroring or turning a scan",
    "moved": "how far optimisation moved the answer",
    "gain": "loss removed by optimisation",
}


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


@table
def confidence_promises() -> Iterator[Sequence[str]]:
    found = result("confidence/results.json")
    same, verdicts, scores = found["same_anatomy"], found["verdicts"], found["auroc"]
    yield "on validation pairs", "wanted", "measured"
    yield "pairs, of which failed", "400", f"{found['pairs_tested']}, {found['failures']}"
    yield "pairs of the same anatomy, of which failed", "at least 60 failures", f"{same['pairs']}, {same['failures']}"
    yield "AUROC for failure, kinds left out", "0.97", f"{scores['kinds_left_out']:.3f}"
    yield "the same, same anatomy", "0.90", f"{scores['kinds_left_out_same_anatomy']:.3f}"
    yield "the same, cheap evidence alone", "", f"{scores['cheap']:.3f}"
    yield "failures found at 5 % false alarms", "95 %", share(found["found_at_5_percent_false_alarms"])
    yield "failures among good", "at most 5 %", f"{share(verdicts['failures_among_good'])} of {verdicts['good']}"
    yield (
        "failures among failed",
        "at least 80 %",
        f"{share(verdicts['failures_among_failed'])} of {verdicts['failed']}",
    )
    yield "doubtful among intact pairs", "at most 15 %", share(verdicts["doubtful_among_plain"])
    seconds = found["seconds"]
    yield (
        "time of all evidence, as a share of the registration's",
        "25 %",
        share(seconds["evidence"] / seconds["registration"]),
    )


@table
def confidence_ladder() -> Iterator[Sequence[str]]:
    yield "kind of pair", "pairs", "not good at first", "failed before", "failed after", "mended", "worse", "time"
    for kind, row in result("confidence/ladder.json")["summary"].items():
        counts = (
            row[name] for name in ("pairs", "climbed", "failed_before", "failed_after", "mended_and_good", "worse")
        )
        yield kind, *map(str, counts), f"× {row['median_time']:.2f}"


@table
def confidence_kinds() -> Iterator[Sequence[str]]:
    yield "kind of pair", "pairs", "failures", "good", "doubtful", "failed"
    for kind, counts in result("confidence/results.json")["kinds"].items():
        yield kind, *(str(counts[name]) for name in ("pairs", "failures", "good", "doubtful", "failed"))


@table
def confidence_error() -> Iterator[Sequence[str]]:
    yield "pairs", "expected, mm", "true, mm"
    found = result("confidence/results.json")["error"]
    for one in found["bins"]:
        yield str(one["pairs"]), f"{one['expected_mm']:.1f}", f"{one['true_mm']:.1f}"
    yield f"rank correlation over {found['pairs']}", f"{found['rank_correlation']:.2f}", ""


@table
def confidence_map() -> Iterator[Sequence[str]]:
    yield "truth", "pairs", "rank correlation"
    for truth, one in result("confidence/results.json")["map"].items():
        yield truth, str(one["pairs"]), f"{one['rank_correlation']:.2f}"


@table
def confidence_alone() -> Iterator[Sequence[str]]:
    yield "evidence", "all pairs", "same anatomy", "all pairs, compared", "in the verdict"
    found = result("confidence/results.json")["alone"]
    fitted = ROOT / "src" / "carlreg" / "model" / "weights" / "carl-base.confidence.json"
    model = json.loads(fitted.read_text(encoding="utf-8"))["failure"][0]
    used = [name for name, weight in zip(model["names"], model["weights"], strict=True) if weight > 0]
    for name, words in EVIDENCE.items():
        numbers = (found.get(name, {}).get(key) for key in ("all", "same_anatomy", "compared"))
        columns = ("–" if value is None else f"{value:.2f}" for value in numbers)
        yield words, *columns, "yes" if name in used else "compared" if f"beyond_{name}" in used else ""


@table
def confidence_headers() -> Iterator[Sequence[str]]:
    yield "set", "altered in one scan", "named rightly", "unaltered", "false alarms", "both altered alike", "found"
    for name, counts in result("confidence/orientation.json")["summary"].items():
        columns = ("altered", "named_rightly", "unaltered", "false_alarms", "alike", "alike_found")
        yield name.replace("_", " "), *(str(counts[column]) for column in columns)


# ---- speed ----------------------------------------------------------------------------------------------------------


def timings() -> Iterator[tuple[str, ...]]:
    """Rows: the operation; our time, the plain time and their ratio; our memory and the plain memory."""

    def row(
        what: str, ours: float, plain: float, unit: str = "ms", memory: str = "", other: str = ""
    ) -> tuple[str, ...]:
        return what, f"{number(ours)} {unit}", f"{number(plain)} {unit}", f"{plain / ours:.1f}", memory, other

    gpu, cpu = benchmark("gpu"), benchmark("cpu")
    trained = next(entry for entry in gpu["attention"] if entry["features"] == "trained")
    for what, key in (("forward", "forward_ms"), ("forward and backward", "forward_backward_ms")):
        yield row(f"attention, one direction, {what}", trained["ours"][key], trained["plain"][key])
    for what, name in (
        ("network, one direction, side {}", "forward"),
        ("instance optimisation step, side {}", "instance_optimisation_step"),
        ("training step, side {}, four pairs, two refinements", "training_step"),
    ):
        entry = gpu[name]
        side = entry["side"] if "side" in entry else entry["ours"]["side"]
        measured = entry.get("without_graph", entry["ours"])  # memory statistics miss what a CUDA graph uses
        memory, other = (f"{one['peak_gb']:.1f} GB" for one in (measured, entry["plain"]))
        yield row(what.format(side), entry["ours"]["ms"], entry["plain"]["ms"], "ms", memory, other)
    both, alone = cpu["both_directions"]["ours"], cpu["both_directions"]["one_after_the_other"]
    what = f"both directions on the CPU, side {cpu['both_directions']['side']}"
    yield row(what, both["seconds"], alone["seconds"], "s", f"{both['peak_resident_gb']:.1f} GiB")


@table
def speed() -> Iterator[Sequence[str]]:
    yield "operation", "carlreg", "plain", "ratio", "memory", "plain memory"
    yield from timings()


@table
def speed_in_short() -> Iterator[Sequence[str]]:
    yield "operation", "carlreg", "plain", "ratio"
    yield from (row[:4] for row in list(timings())[2:5])


@table
def sides() -> Iterator[Sequence[str]]:
    yield "side", "both directions", "memory", "optimisation step", "step memory"
    for entry in benchmark("gpu")["sweep"]:
        yield (
            str(entry["side"]),
            f"{number(entry['both_directions_ms'])} ms",
            f"{entry['both_directions_gb']:.1f} GB",
            f"{number(entry['step_ms'])} ms",
            f"{entry['step_gb']:.1f} GB",
        )


@table
def attention_accuracy() -> Iterator[Sequence[str]]:
    yield "features", "worst, 10⁻³ voxels", "mean, 10⁻³ voxels", "query gradient", "key gradient"
    for entry in benchmark("gpu")["attention"]:
        measured = entry["accuracy"]
        distances = [f"{1e3 * measured[key]:.2f}" for key in ("worst_voxels", "mean_voxels")]
        gradients = [f"{100 * measured[key]:.2f} %" for key in ("query_gradient_relative", "key_gradient_relative")]
        yield entry["features"], *distances, *gradients


# ---- the default answer ---------------------------------------------------------------------------------------------


def answers() -> dict[str, Any]:
    """What benchmarks/answer.py measured on a GPU and on a CPU, as far as it did, by the name of the file."""
    names = [f"answer-{kind}" for kind in ("gpu", "cpu")]
    return {name: benchmark(name) for name in names if (ROOT / "benchmarks" / "results" / f"{name}.json").exists()}


def other_programs() -> list[dict[str, Any]]:
    """What answer.py measured of other programs on a CPU."""
    made = (ROOT / "benchmarks/results/answer-others.json").exists()
    rows: list[dict[str, Any]] = benchmark("answer-others")["others"] if made else []
    return rows


def machine(report: Mapping[str, Any]) -> str:
    return str(report["machine"]).removeprefix("x86_64, ")


def seconds_of(*values: float) -> str:
    return " + ".join(f"{value:.2f}" if value < 9.995 else number(value) for value in values) + " s"


ANSWER: dict[str, tuple[str, Callable[[Any], str]]] = {
    "network + optimisation, a pair of brains": (
        "times",
        lambda row: seconds_of(*(row["seconds"][part] for part in ("network", "optimisation"))),
    ),
    "the same, first run": (
        "times",
        lambda row: seconds_of(*(row["first"][part] for part in ("network", "optimisation"))),
    ),
    "the same bits in each run": ("times", lambda row: "yes" if row["same_bits"] else "no"),
    "peak memory of the optimisation": ("memory", lambda row: f"{row['peak_gb']:.1f} GB at {row['side']}³"),
    "whole command, first": ("commands", lambda row: seconds_of(row["first_s"])),
    "whole command, second": ("commands", lambda row: seconds_of(row["seconds"])),
    "folder of results": ("commands", lambda row: f"{row['folder_mb']:.0f} MB"),
    "list of pairs of brains, each": ("lists", lambda row: f"{seconds_of(row['each'])}, of {row['pairs']} pairs"),
}
"""Rows: the part of the results, and what is shown of its row."""


@table
def default_answer() -> Iterator[Sequence[str]]:
    """One column for each machine."""
    found = answers()
    yield "", *(f"[{machine(report)}](../benchmarks/results/{name}.json)" for name, report in found.items())
    for what, (part, shown) in ANSWER.items():
        cells = [shown(report[part][0]) if report.get(part) else "" for report in found.values()]
        if any(cells):
            yield what, *cells
    if found:
        yield "commit", *(report["commit"] for report in found.values())


DICE = ("before", "network", "fields_96", "default")


@table
def default_dice() -> Iterator[Sequence[str]]:
    """Nothing if no pair was scored."""
    if any(report.get("dice") for report in answers().values()):
        yield "", "machine", "pairs", "before", "network", "fields, at most 96 a side", "default", "folds, %"
    for name, words in SETS.items():
        for report in answers().values():
            if rows := [row for row in report.get("dice", []) if row["set"] == name]:
                columns = {key: [row[key] for row in rows if key in row] for key in (*DICE, "folds_percent")}
                cells = [f"{mean(columns[key]):.3f}" if len(columns[key]) == len(rows) else "" for key in DICE]
                folds = f"{mean(columns['folds_percent']):.4f}" if cells[-1] else ""
                yield words, machine(report), str(len(rows)), *cells, folds


def beside() -> dict[str, tuple[int, dict[str, tuple[float, float]]]]:
    """By set: the number of pairs that the default answer and all other programs have, and mean Dice and median
    seconds over them. Without other programs, nothing."""
    found = answers()
    shown = {}
    for name in SETS:
        ours: dict[str, dict[tuple[str, ...], tuple[float, float]]] = {}
        others: dict[str, dict[tuple[str, ...], tuple[float, float]]] = {}
        for report in found.values():
            for row in report.get("dice", []):
                if row["set"] == name and "default" in row:
                    seconds = sum(row["seconds"].get(part, 0.0) for part in ("network", "optimisation"))
                    rows = ours.setdefault(f"carlreg, {machine(report)}", {})
                    rows[tuple(row["pair"])] = row["default"], seconds
        for row in other_programs():
            if row["set"] == name:
                others.setdefault(row["program"], {})[tuple(row["pair"])] = row["dice"], row["seconds"]
        every = ours | others
        if others and (pairs := sorted(set.intersection(*map(set, every.values())))):
            scores = {
                program: (mean(rows[pair][0] for pair in pairs), median(rows[pair][1] for pair in pairs))
                for program, rows in every.items()
            }
            shown[SETS[name]] = len(pairs), scores
    return shown


@table
def default_and_others() -> Iterator[Sequence[str]]:
    """Nothing if no other program was run."""
    if not (sets := beside()):
        return
    yield (
        "",
        *(text for words, (count, _) in sets.items() for text in (f"{words}, {count} pair{'s' * (count > 1)}", "s")),
    )
    for program in dict.fromkeys(program for _, scores in sets.values() for program in scores):
        cells = []
        for _, scores in sets.values():
            dice, seconds = scores.get(program, (None, None))
            cells += ["" if dice is None else f"{dice:.3f}", "" if seconds is None else number(seconds)]
        yield program, *cells


def time_and_dice() -> str:
    """The plot of the table before, where there is one."""
    text = "Dice against seconds of the default answer and of other programs"
    return f"![{text}](../benchmarks/results/time-and-dice.png)\n" if beside() else ""


TABLES["time_and_dice"] = time_and_dice

# ---- the trained models ---------------------------------------------------------------------------------------------

SETS = {
    "brain": "brain, 14 subcortical structures",
    "abdomen": "abdomen, 13 organs",
    "hippocampus": "hippocampus, 2 parts",
}


@table
def base_at_the_grid() -> Iterator[Sequence[str]]:
    yield "", "pairs", "before", "after", "folds, %"
    scores = result("base/results/scores-13.json")["after"]["val"]
    for words, kind in (
        ("brain, 14 subcortical structures", "brain"),
        ("the same, moving brain in another contrast", "brain_other_contrast"),
        ("abdomen CT, 13 organs", "abdomen"),
        ("abdomen MR, 4 organs", "abdomen_mr"),
        ("abdomen CT to MR and MR to CT, 4 organs", "ct_mr"),
        ("heart, systole fixed, 3 structures", "cardiac_systole_fixed"),
        ("heart, diastole fixed, 3 structures", "cardiac_diastole_fixed"),
        ("hippocampus, 2 parts", "hippocampus"),
    ):
        row = scores[kind]
        yield words, str(row["pairs"]), *three([row["before"], row["dice"], row["folds"]])


@table
def two_d() -> Iterator[Sequence[str]]:
    yield "", "pairs", "before", "network", "optimised", "folds, %, network", "folds, %, optimised"
    scores = result("base/results/scores-2d.json")
    rows = {f"retinas, {name}": row for name, row in scores["test"].items()}
    for words, kind in (
        ("brains, 14 subcortical structures", "brain"),
        ("abdomen CT, 13 organs", "abdomen"),
        ("abdomen MR, 4 organs", "abdomen_mr"),
        ("hearts, 3 structures", "cardiac"),
    ):
        rows[f"slices of {words}"] = scores["dev"][kind]
        rows["the same, moving slice in another contrast (" + words.split(",")[0] + ")"] = scores["dev"][
            f"{kind}, other contrast"
        ]
    for name, row in rows.items():
        values = three(row[key] for key in ("before", "dice", "dice_optimized", "folds", "folds_optimized"))
        yield name, str(round(row["pairs"])), *values


@table
def rot_at_all_angles() -> Iterator[Sequence[str]]:
    yield "", "upright", "over all angles"
    for words, name in (("network alone", "rot"), ("fields optimised", "rot-optimised")):
        rows = result(f"rotation/results/turned-{name}.json")["rows"]
        dice = [mean(row["dice"]) for row in rows]
        (upright,) = (mean(row["dice"]) for row in rows if not row["degrees"])
        yield words, f"{upright:.3f}", f"{min(dice):.3f} to {max(dice):.3f}"


@table
def base_and_others() -> Iterator[Sequence[str]]:
    yield (
        *("", "brain", "abdomen, 13 organs", "abdomen, 5 organs", "hippocampus"),
        *("folds, % (brain, abdomen, hippocampus)", "steps"),
    )
    for name, ending, steps in (
        ("carl-base 4", "", "17 200, over four runs"),
        ("carl-base 3", "-4", "13 300, over three runs"),
        ("carl-base 2", "-3", "8 600, over two runs"),
        ("GradICON, 10.1 M parameters", "-grad", "20 100, over three runs"),
        ("GradICON after its second run", "-grad-2", "14 300, over two runs"),
        ("GradICON after its first run", "-grad-1", "5 800, from scratch"),
        ("CARL without abdomens", "-left", "3 300, from scratch"),
        ("carl-base 3 with Ψ3", "-refine", "900 more"),
    ):
        scores = result(f"base/results/scores{ending}.json")["val"]["network"]
        dice = [scores["brain"]["dice"], scores["abdomen"]["dice"], scores["abdomen"]["dice_five"]]
        folds = ", ".join(f"{scores[key]['folds']:.4f}" for key in SETS)
        yield name, *three([*dice, scores["hippocampus"]["dice"]]), folds, steps


KINDS_OF_PAIRS = (
    ("brain, 14 subcortical structures", "brain", "dice"),
    ("the same, moving brain in another contrast", "brain_other_contrast", "dice"),
    ("brain, IBSR, 3 tissues", "brain_ibsr", "dice"),
    ("rendered heads, each in its own contrast, 14 subcortical structures", "brain_maps", "dice"),
    ("rendered head to OASIS brain", "head_to_brain", "dice"),
    ("abdomen CT, 13 organs", "abdomen", "dice"),
    ("abdomen CT, 5 organs", "abdomen", "dice_five"),
    ("abdomen MR, 4 organs", "abdomen_mr", "dice"),
    ("abdomen CT to MR and MR to CT, 4 organs", "ct_mr", "dice"),
    ("heart, systole fixed", "cardiac_systole_fixed", "dice"),
    ("heart, diastole fixed", "cardiac_diastole_fixed", "dice"),
    ("hippocampus", "hippocampus", "dice"),
)


@table
def base_6() -> Iterator[Sequence[str]]:
    runs = (("scores-6.json", "before"), ("scores-7.json", "after"), ("scores-9.json", "after"))
    yield from versions_of_base(("carl-base 4", "carl-base 5", "carl-base 6"), runs)


@table
def base_7() -> Iterator[Sequence[str]]:
    runs = (("scores-10.json", "before"), ("scores-10.json", "after"))
    yield from versions_of_base(("carl-base 6", "carl-base 7"), runs)


@table
def base_8() -> Iterator[Sequence[str]]:
    runs = (("scores-13.json", "before"), ("scores-13.json", "after"))
    yield from versions_of_base(("carl-base 7", "carl-base 8"), runs)


@table
def loss_weights() -> Iterator[Sequence[str]]:
    yield "", "mean of dev", "brain", "abdomen CT", "hearts", "folds, % (brain, abdomen CT)"
    words = {
        "as before": "λ 1.5, labels 1, window 4, as before",
        "labels 3": "labels 3",
        "labels 3, window 2": "labels 3, window 2",
        "labels 3, window 2, λ 0.5": "labels 3, window 2, λ 0.5",
    }
    for name, row in result("base/results/weights.json")["rows"].items():
        scores = row["scores"]
        hearts = (scores["cardiac_systole_fixed"]["dice"] + scores["cardiac_diastole_fixed"]["dice"]) / 2
        folds = ", ".join(f"{scores[kind]['folds']:.3f}" for kind in ("brain", "abdomen"))
        yield words[name], *three([row["mean"], scores["brain"]["dice"], scores["abdomen"]["dice"], hearts]), folds


@table
def passes_and_averages() -> Iterator[Sequence[str]]:
    kinds = {
        "brain": "brain",
        "brain_other_contrast": "another contrast",
        "abdomen": "abdomen CT",
        "cardiac_systole_fixed": "heart, systole fixed",
        "cardiac_diastole_fixed": "diastole fixed",
        "hippocampus": "hippocampus",
    }
    yield "passes", *kinds.values()
    rows = result("base/results/passes-7.json")["rows"]
    for way in ("", ", mirrored", ", shifted", ", mirrored and shifted"):
        for number in (1, 2, 3):
            yield f"{number}{way}", *three([rows[f"{kind}, {number}{way}"]["dice"] for kind in kinds])


@table
def base_passes() -> Iterator[Sequence[str]]:
    runs = (("scores-10.json", "after"), ("scores-12.json", "before"), ("scores-12.json", "after"))
    yield from versions_of_base(("one pass", "as shipped", "trained further with two"), runs)


def versions_of_base(versions: Sequence[str], runs: Sequence[tuple[str, str]]) -> Iterator[Sequence[str]]:
    """The Dice of several models on dev and on val, from a score file each and whether it was scored before or after
    that run."""
    yield "", "dev: boxes", *versions, "val: boxes", *versions
    scores = [result(f"base/results/{name}")[when] for name, when in runs]
    for words, kind, key in KINDS_OF_PAIRS:
        cells = []
        for split in ("dev", "val"):
            rows = [score[split].get(kind) for score in scores]
            known = all(row is not None for row in rows)
            cells.append(f"{rows[0]['before']:.3f}" if known and key == "dice" else "")
            cells += three([row[key] for row in rows]) if known else [""] * len(rows)
        yield words, *cells


@table
def unseen_anatomy() -> Iterator[Sequence[str]]:
    yield "", "13 organs", "5 organs", "folds, %"
    names = {
        "boxes": "boxes aligned",
        "affine": "closed-form affine fit to the network's attention",
        "network": "network",
        "optimised": "network, then field optimisation",
    }
    for key, row in result("base/results/unseen.json")["means"].items():
        yield names[key], *three([row["dice"], row["dice_five"]]), f"{row['folds']:.4f}"


def tuned(*names: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """Scores of tune_fields.py, by the suffix of their file, the settings and the set."""
    return {
        (name, json.dumps(row["settings"]), row["set"]): row
        for name in names
        for row in result(f"base/results/fields{name}.json")["rows"]
    }


FIELD_SETS = {
    "brain": "brain, 14 subcortical structures",
    "abdomen": "abdomen CT, 13 organs",
    "abdomen_mr": "abdomen MR, 4 organs",
    "ct_mr": "abdomen CT with MR, 4 organs",
    "cardiac": "heart, both phases fixed in turn, 3 structures",
    "hippocampus": "hippocampus, 2 parts",
}


def optimised(name: str, columns: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Means of tune_fields.py over pairs that all columns have: Dice with these settings, and folds with the last."""
    yield "", "pairs", *columns, "folds, %, network", "folds, %"
    rows = result(f"base/results/{name}.json")["rows"]
    for key, words in FIELD_SETS.items():
        found = [
            {row["pair"]: row for row in rows if (row["set"], row["settings"]) == (key, settings)}
            for settings in columns.values()
        ]
        if pairs := sorted(set.intersection(*map(set, found))):
            scores = three(mean(one[pair]["dice"] for pair in pairs) for one in found)
            folds = (f"{mean(one[pair]['folds'] for pair in pairs):.4f}" for one in (found[0], found[-1]))
            yield words, str(len(pairs)), *scores, *folds


@table
def fields_dev() -> Iterator[Sequence[str]]:
    yield from optimised("fields-8", {"network": None, "optimised, stiffness 0": {"stiffness": 0}, "optimised": {}})


@table
def fields_val() -> Iterator[Sequence[str]]:
    yield from optimised("fields-8-val", {"network": None, "optimised": {}})


@table
def field_settings() -> Iterator[Sequence[str]]:
    yield "", "abdomen, 13 organs", "5 organs", "brain", "hippocampus"
    rows = tuned("", "-3")
    tried: list[tuple[str, str, dict[str, float]]] = [
        ("network alone", "", {"steps": 0}),
        ("window 4, as in training", "-3", {}),
        ("window 3", "-3", {"sigma": 3.0}),
        ("**window 2, regulariser weight 1.5**", "", {}),
        ("window 1.5", "", {"window": 1.5}),
        ("window 2, regulariser weight 3", "", {"weight": 3.0}),
        ("window 2, regulariser weight 0.75", "", {"weight": 0.75}),
        ("window 2, twice as many steps", "", {"steps": 40}),
        ("window 2, one more coarse grid", "-3", {"levels": 4, "sigma": 2.0}),
        ("window 2, grids of side 48, 24 and 12", "-3", {"side": 48, "sigma": 2.0}),
        *(
            (f"window 2, penalty on the distance from the start {weight:g}", "", {"stay": weight})
            for weight in (0.003, 0.01, 0.03, 0.1)
        ),
    ]
    for words, name, settings in tried:
        abdomen, brain, parts = (rows[name, json.dumps(settings), key] for key in ("abdomen", "brain", "hippocampus"))
        yield words, *three([abdomen["dice"], abdomen["dice_five"], brain["dice"], parts["dice"]])


@table
def field_settings_4() -> Iterator[Sequence[str]]:
    yield "", "abdomen, 13 organs", "5 organs", "brain"
    rows = tuned("-4")
    tried: list[tuple[str, dict[str, float]]] = [
        ("network alone", {"steps": 0}),
        ("window 2, weight 1.5", {}),
        ("window 1.5, weight 1.5", {"window": 1.5}),
        ("**window 1.5, weight 0.75**", {"window": 1.5, "weight": 0.75}),
    ]
    for words, settings in tried:
        abdomen, brain = (rows["-4", json.dumps(settings), key] for key in ("abdomen", "brain"))
        yield words, *three([abdomen["dice"], abdomen["dice_five"], brain["dice"]])


@table
def small_scans() -> Iterator[Sequence[str]]:
    yield "hippocampus, optimised on half the grid", "Dice"
    rows = tuned("-4", "-4h")
    half: dict[str, float] = {"side": 48}
    narrow = {"window": 1.5, "weight": 0.75}
    tried: list[tuple[str, dict[str, float]]] = [
        ("network alone", {"steps": 0}),
        ("three grids, window 2, weight 1.5", half),
        ("three grids, window 2, weight 6", {**half, "weight": 6}),
        ("three grids, window 2, weight 1.5, half the steps", {**half, "steps": 10}),
        ("two grids, window 2, weight 1.5", {**half, "levels": 2}),
        ("one grid, window 2, weight 1.5", {**half, "levels": 1}),
        ("one grid, window 1.5, weight 0.75", {**half, "levels": 1, **narrow}),
        ("the same, a quarter of the learning rate", {**half, "levels": 1, "learning_rate": 0.25, **narrow}),
        ("**the same, a tenth of the learning rate**", {**half, "levels": 1, "learning_rate": 0.1, **narrow}),
        (
            "the same, a tenth of the learning rate and half the steps",
            {**half, "levels": 1, "learning_rate": 0.1, "steps": 10, **narrow},
        ),
    ]
    for words, settings in tried:
        found = (rows.get((name, json.dumps(settings), "hippocampus")) for name in ("-4h", "-4"))
        row = next(one for one in found if one is not None)
        yield words, f"{row['dice']:.3f}"


@table
def encoder_widths() -> Iterator[Sequence[str]]:
    yield "width", "brain", "abdomen, 13 organs", "hippocampus"
    for width in (32, 64, 96):
        scores = result(f"base/results/scores-width-{width}.json")["dev"]["network"]
        yield str(width), *three(scores[key]["dice"] for key in SETS)


@table
def structures() -> Iterator[Sequence[str]]:
    """Dice of the network that recognises structures."""
    yield "", "structures", "dev", "val", "subcortical: dev", "val"
    scores = result("base/results/structures-1.json")
    for words, kind in (
        ("brain", "brain"),
        ("the same, in another contrast", "brain_other_contrast"),
        ("rendered heads, each in its own contrast", "brain_maps"),
        ("abdomen CT", "abdomen"),
        ("abdomen MR", "abdomen_mr"),
        ("heart", "cardiac"),
        ("hippocampus", "hippocampus"),
    ):
        rows = [scores[split].get(kind, {}) for split in ("dev", "val")]
        count = len(rows[0].keys() - {"mean", "subcortical"})
        means = [f"{row[key]:.3f}" if key in row else "" for key in ("mean", "subcortical") for row in rows]
        yield words, str(count), *means


# ---- without a network ----------------------------------------------------------------------------------------------


@table
def without_model() -> Iterator[Sequence[str]]:
    yield "", "pairs", "before", "after", "folds, %", "s"
    names = {
        "brain": "brain, 14 subcortical structures",
        "abdomen": "abdomen CT, 13 organs",
        "cardiac": "heart, systole fixed, 3 structures",
    }
    for name, label in names.items():
        rows = [row for row in result("without_model/results/val.json")["rows"] if row["set"] == name]
        scores = three(mean(row[key] for row in rows) for key in ("before", "after"))
        folds = mean(row["metrics"]["folds_percent"] for row in rows)
        yield label, str(len(rows)), *scores, f"{folds:.3f}", f"{median(row['command_seconds'] for row in rows):.0f}"


# ---- other contrasts ------------------------------------------------------------------------------------------------


@table
def other_contrasts() -> Iterator[Sequence[str]]:
    """One row for each pair of brains that was registered both as it is and in another contrast."""
    rows = {(row["contrast_seed"], row["changed"]): row for row in result("conditions/results/val.json")["contrast"]}
    squared = {row["contrast_seed"]: row["optimised"] for row in result("conditions/results/lncc2.json")["contrast"]}
    yield "contrast", "network: same", "another", "optimised: same", "another, recoloured", "another, by `lncc2`"
    seeds = sorted(seed for seed, changed in rows if changed)
    lines = [
        [*(rows[seed, changed][way] for way in ("network", "optimised") for changed in (False, True)), squared[seed]]
        for seed in seeds
    ]
    for seed, line in zip(seeds, lines, strict=True):
        yield str(seed), *three(line)
    yield "**mean**", *three(map(mean, zip(*lines, strict=True)))


@table
def heads() -> Iterator[Sequence[str]]:
    """One row for each brain to which both contrasts of one head were registered, in mm."""
    yield "OASIS brain", "network", "95 %", "optimised", "95 %"
    keys = ("network_mm", "network_95_mm", "optimised_mm", "optimised_95_mm")
    lines = {row["fixed"]: [row[key] for key in keys] for row in result("conditions/results/val.json")["brainweb"]}
    for name, line in lines.items():
        yield name.removesuffix(".nii.gz"), *(f"{one:.1f}" for one in line)
    yield "**mean**", *(f"{mean(column):.1f}" for column in zip(*lines.values(), strict=True))


@table
def shifted_brain() -> Iterator[Sequence[str]]:
    """One row for each axis and shift."""
    yield "axis", "shift, mm", "network", "optimised"
    for row in result("conditions/results/val.json")["shifts"]:
        axis = "" if row["shift_mm"] == 0 else str(row["axis"] + 1)
        yield axis, f"{row['shift_mm']:.0f}", *three([row["network"], row["optimised"]])


@table
def similarities() -> Iterator[Sequence[str]]:
    """One row for each kind of pair."""
    rows = result("similarity/results/dev.json")["rows"]
    yield "pairs", "", "found to differ", "network", "optimised", "by `lncc`", "by `lncc2`"
    for name in dict.fromkeys(row["set"] for row in rows):
        found = [row for row in rows if row["set"] == name]
        differ = sum(row["differs"] for row in found)
        labelled = [row["dice"] for row in found if row["dice"]]
        scores = [mean(dice[way] for dice in labelled) for way in ("network", "auto", "lncc", "lncc2") if labelled]
        yield name, str(len(found)), str(differ), *(three(scores) if labelled else [""] * 4)


# ---- templates and atlases ------------------------------------------------------------------------------------------


@table
def template() -> Iterator[Sequence[str]]:
    yield "average", "sharpness, per mm", "spread", "moved by, mm", "mean displacement, mm", "s"
    for number, row in enumerate(result("template/results/brain.json")["iterations"]):
        name = row["kind"] if number < 2 else f"{row['kind']}, {number - 1}"
        moved = f"{row['moved_mm']:.2f}" if number else ""
        yield (
            name,
            f"{row['sharpness']:.4f}",
            f"{row['spread']:.3f}",
            moved,
            f"{row['residual_mm']:.4f}",
            (f"{row['seconds']:.0f}"),
        )


METHODS = ("majority", "local", "joint")


def segmented(name: str) -> Iterator[Sequence[str]]:
    """Dice of each validation subject of a set, and the mean."""
    yield "subject", "one atlas", *METHODS
    every = []
    for row in result(f"segment/results/{name}.json")["val"]:
        each = {one["fusion"]: one["dice"] for one in row["fusions"]}
        every.append([mean(row["one_atlas"].values()), *(each[method] for method in METHODS)])
        yield row["subject"].replace("_", " "), *three(every[-1])
    yield "mean", *three(map(mean, zip(*every, strict=True)))


@table
def segmentation() -> Iterator[Sequence[str]]:
    yield from segmented("hippocampus")


@table
def segmentation_brain() -> Iterator[Sequence[str]]:
    yield from segmented("brain")


@table
def segmentation_settings() -> Iterator[Sequence[str]]:
    """Dice of the dev subjects; the settings that were chosen are bold."""
    report = result("segment/results/hippocampus.json")
    rows = report["dev"]
    yield "fusion", "settings", *(row["subject"].replace("_", " ") for row in rows), "mean"
    shown = {"majority": (), "local": ("sigma", "power"), "joint": ("patch", "search", "alpha", "beta")}
    for same in zip(*(row["fusions"] for row in rows), strict=True):
        method, settings = same[0]["fusion"], same[0]["settings"]
        text = ", ".join(f"{key} {settings[key]:g}" for key in shown[method])
        scores = [one["dice"] for one in same]
        chosen = report["settings"][method] == settings
        yield f"**{method}**" if chosen else method, text, *three([*scores, mean(scores)])


@table
def guide() -> Iterator[Sequence[str]]:
    yield (
        "model",
        "fixed, moving",
        "organ",
        "clicks before, mm",
        "after",
        "its Dice",
        "after",
        "other organs",
        "after",
        "folds, %",
    )
    for name in ("val-base-8", "val", "val-base-5"):
        made = result(f"guide/results/{name}.json")
        for row in made["rows"]:
            clicks = (", ".join(f"{mm:.1f}" for mm in row["clicks"][f"{when}_mm"]) for when in ("before", "after"))
            scores = three(score for key in ("organ_dice", "others_dice") for score in row[key])
            pair = f"{row['fixed']}, {row['moving']}"
            yield made["model"], pair, row["organ"], *clicks, *scores, f"{row['folds_percent'][1]:.3f}"


# ---- accuracy compared with other programs --------------------------------------------------------------------------

PROGRAMS = ("ANTs SyNQuick", "greedy", "ConvexAdam")


def accuracies() -> Iterator[tuple[str, Any, Any]]:
    """Each task with results, its scores, and those of the pairs that all methods share."""
    run = script("experiments/accuracy/run.py")
    for task, (name, labels) in run.TASKS.items():
        whole = run.on_labels(run.Book.read(HERE / f"accuracy/results/{name}.json").evaluation(), labels)
        if (shared := run.common(whole)).scores:
            yield task, whole, shared


@table
def accuracy() -> Iterator[Sequence[str]]:
    run, tasks = script("experiments/accuracy/run.py"), list(accuracies())
    names = {"boxes aligned": "boxes", run.AFFINE: "affine", "CARL": "CARL", run.BEST: "with optimisation"}
    names |= dict.fromkeys(PROGRAMS, "")
    means = {}
    for task, whole, shared in tasks:
        pairs = {scores.pair for scores in shared.scores}
        for method in names:
            if pairs <= run.scored_pairs(whole, method):
                dice = [scores.figures["dice"] for scores in whole.of(method) if scores.pair in pairs]
                means[task, method] = f"{mean(dice):.3f}"
    shown = [method for method in names if any(key[1] == method for key in means)]
    yield "", "pairs", *(names[method] or method for method in shown), "CARL − ANTs, 95 % interval", "CARL better"
    for task, _, shared in tasks:
        difference, better = "", ""
        if (found := run.difference(shared, run.BEST, run.ANTS)) is not None:
            low, high = found.interval
            difference = f"{found.mean_difference:+.3f}, {low:+.3f} to {high:+.3f}"
            better = f"{found.won} of {found.pairs}"
        count = len({scores.pair for scores in shared.scores})
        yield task, str(count), *(means.get((task, method), "") for method in shown), difference, better


@table
def accuracy_in_short() -> Iterator[Sequence[str]]:
    """CARL and ANTs on the pairs that both have registered, for the README."""
    run = script("experiments/accuracy/run.py")
    yield "mean Dice", "pairs", "before", "carlreg", "network alone", "ANTs SyNQuick", "carlreg better"
    for task, whole, _ in accuracies():
        methods = ("unregistered", run.BEST, "CARL", run.ANTS)
        found = [{one.pair: one.figures["dice"] for one in whole.of(method)} for method in methods]
        pairs = set.intersection(*map(set, found))
        if pairs:
            better = sum(found[1][pair] > found[3][pair] for pair in pairs)
            scores = three(mean(one[pair] for pair in pairs) for one in found)
            yield task, str(len(pairs)), *scores, f"{better} of {len(pairs)}"


@table
def base_in_own_space() -> Iterator[Sequence[str]]:
    """CARL without and with optimisation, on the pairs registered both ways."""
    run = script("experiments/accuracy/run.py")
    yield "", "pairs", "headers", "boxes", "network", "optimised", "folds, %, network", "folds, %, optimised"
    for task, whole, _ in accuracies():
        found = [{one.pair: one.figures for one in whole.of(method)} for method in (*run.METHODS[:2], "CARL", run.BEST)]
        if pairs := set.intersection(*map(set, found)):
            dice = three(mean(one[pair]["dice"] for pair in pairs) for one in found)
            folds = (f"{mean(one[pair]['folds_percent'] for pair in pairs):.4f}" for one in found[2:])
            yield task, str(len(pairs)), *dice, *folds


@table
def time_in_short() -> Iterator[Sequence[str]]:
    """Seconds of carlreg and ANTs on the same pairs and the same CPU, for the README."""
    yield "median seconds, 2 CPU cores", "pairs", "carlreg", "ANTs SyNQuick"
    for words, (count, scores) in beside().items():
        ours = next(seconds for program, (_, seconds) in scores.items() if "CPU" in program)
        yield words.split(",")[0], str(count), number(ours), number(scores["ANTs SyNQuick"][1])


@table
def accuracy_on_few() -> Iterator[Sequence[str]]:
    """Methods that may have run on a few pairs alone, beside others on the same pairs; nothing if none did."""
    run = script("experiments/accuracy/run.py")
    rows = [(task, *row) for task, whole, _ in accuracies() for row in run.beside_others(whole)]
    if rows:
        yield "", "method", "pairs", "Dice", "HD95, mm", "folds, %", "s", *(f"{method}, Dice" for method in run.BESIDE)
    yield from ((task, method, *cells) for task, method, cells in rows)


# ---- shifts and rotations -------------------------------------------------------------------------------------------

AXES = ("left to right", "back to front", "bottom to top")


def shifts(way: str) -> Iterator[Sequence[str]]:
    yield "shift, voxels", *map(str, (0, 3, 7, 13, 20, 29, 38, 48))
    methods = result(f"moved/results/shifts-{way}.json")["methods"]
    for name in ("carl-base", "gradicon"):
        for axis in AXES:
            yield f"{name}, {axis}", *three(mean(r["dice"]) for r in methods[name]["rows"] if r["axis"] == axis)
    if "ANTs" not in methods:
        return
    ants, base = methods["ANTs"], methods["carl-base"]
    shared = [base["pairs"].index(pair) for pair in ants["pairs"]]
    yield f"ANTs SyNQuick on {len(shared)} pairs, {AXES[0]}", *three(mean(row["dice"]) for row in ants["rows"])
    same = ([row["dice"][n] for n in shared] for row in base["rows"] if row["axis"] == AXES[0])
    yield f"carl-base on these {len(shared)}, {AXES[0]}", *three(map(mean, same))
    for axis in AXES:
        visible = (mean(row["visible"]) for row in base["rows"] if row["axis"] == axis)
        yield f"share in view, {axis}", *(f"{100 * share:.0f} %" for share in visible)


@table
def shifts_in_own_boxes() -> Iterable[Sequence[str]]:
    return shifts("96")


@table
def shifts_with_room() -> Iterable[Sequence[str]]:
    return shifts("160-seen-96")


@table
def shifts_cropped() -> Iterable[Sequence[str]]:
    return shifts("160-cropped-96")


@table
def shifts_in_a_cube() -> Iterable[Sequence[str]]:
    return shifts("192")


@table
def untrained_shifts() -> Iterator[Sequence[str]]:
    yield "shift, voxels", "4", "8", "16", "24"
    for name, curve in result("shift/results.json")["errors"].items():
        yield name, *(f"{curve[n]:.2g}" for n in (4, 8, 16, 24))


RETINA_ANGLES = ("0", "15", "30", "45", "90", "135", "180")
NETWORKS = {
    "rot": "CARL{ROT}",
    "CARL": "CARL",
    "displacement": "displacement",
    "outside": "CARL{ROT}, augmented outside the loss",
}


def over_angles(label: str, scores: Mapping[str, list[float]]) -> Sequence[str]:
    return label, *three(mean(scores[angle]) for angle in RETINA_ANGLES)


@table
def rotated_retinas() -> Iterator[Sequence[str]]:
    yield "degrees", *RETINA_ANGLES
    runs = result("rotation/results/runs.json")
    yield over_angles("unregistered", runs["unregistered"])
    for run in runs["runs"]:
        yield over_angles(NETWORKS[run["network"]], run["dice"])


@table
def rotated_retinas_optimised() -> Iterator[Sequence[str]]:
    yield "degrees", *RETINA_ANGLES
    sweep = result("rotation/results/sweep.json")
    for network in ("rot", "CARL", "displacement"):
        yield over_angles(f"{NETWORKS[network]}, network alone", sweep["network"][network])
        yield over_angles(f"{NETWORKS[network]}, optimised", sweep["optimised"][network])


def rotated_brains(methods: Mapping[str, str]) -> Iterator[Sequence[str]]:
    angles = (0, 15, 30, 45, 60, 90, 135, 180)
    yield "degrees", *map(str, angles)
    for name, words in methods.items():
        rows = result(f"rotation/results/turned-{name}.json")["rows"]
        for plane in ("sagittal", "coronal", "axial"):
            dice = {row["degrees"]: mean(row["dice"]) for row in rows if row["plane"] == plane or not row["degrees"]}
            if len(dice) > 1:
                yield f"{words}, {plane}", *(f"{dice[angle]:.3f}" if angle in dice else "" for angle in angles)


@table
def rotated_brains_optimised() -> Iterable[Sequence[str]]:
    names = {"base": "carl-base", "auto": "auto", "rot": "carl-rot", "gradicon": "GradICON"}
    return rotated_brains({f"{key}-optimised": words for key, words in names.items()} | {"ANTs": "ANTs SyNQuick"})


@table
def rotated_brains_alone() -> Iterable[Sequence[str]]:
    return rotated_brains({"base": "carl-base alone", "rot": "carl-rot alone", "gradicon": "GradICON alone"})


# ---- the paper's smaller experiments --------------------------------------------------------------------------------

RETINA_SETS = ("Baseline", "Shift", "Scale Shift")


@table
def retina_in_short() -> Iterator[Sequence[str]]:
    yield "trained on Baseline", "runs", *RETINA_SETS
    runs = result("retina/results/runs.json")
    yield "unregistered", "", *three(mean(runs["unregistered"][name]) for name in RETINA_SETS)
    for network in ("displacement", "Ξ", "CARL"):
        chosen = [run for run in runs["runs"] if run["network"] == network and run["trained on"] == "Baseline"]
        yield network, str(len(chosen)), *three(mean(mean(r["dice"][name]) for r in chosen) for name in RETINA_SETS)


@table
def retina() -> Iterator[Sequence[str]]:
    yield "trained on → tested on", "unregistered", "displacement", "Ξ", "CARL"
    runs = result("retina/results/runs.json")
    combinations = [(name, name) for name in RETINA_SETS] + [("Baseline", name) for name in RETINA_SETS[1:]]
    for trained, tested in sorted(combinations, key=lambda pair: RETINA_SETS.index(pair[1])):
        cells = [f"{mean(runs['unregistered'][tested]):.3f}"]
        for network in ("displacement", "Ξ", "CARL"):
            chosen = [r for r in runs["runs"] if r["network"] == network and r["trained on"] == trained]
            scores = [mean(run["dice"][tested]) for run in sorted(chosen, key=lambda run: run["seed"])]
            cells.append(f"{mean(scores):.3f} ({', '.join(three(scores))})")
        yield f"{trained} → {tested}", *cells


@table
def retina_equivariance() -> Iterator[Sequence[str]]:
    errors = result("retina/results/look.json")["equivariance"]
    columns = [errors["shifts_pixels"].index(n) for n in (4, 13, 24, 37, 48)]
    yield "shift, pixels", *(str(errors["shifts_pixels"][n]) for n in columns)
    for network in ("CARL", "displacement"):
        for kind in ("[W, U]", "[U, U]"):
            yield f"{network}, {kind}", *(f"{errors[network][kind][n]:.2f}" for n in columns)


@table
def retina_speed() -> Iterator[Sequence[str]]:
    yield "network", "1 run", "3 runs", "6 runs", "kernels per step", "kernels under 10 µs", "kernel time per step, ms"
    for name, row in result("retina/results/speed.json")["networks"].items():
        steps = [f"{row['steps_per_second'][n]:.0f}" for n in "136"]
        yield name, *steps, str(row["kernels"]), str(row["shorter_than_10_us"]), f"{row['kernel_ms']:.1f}"


@table
def probe() -> Iterator[Sequence[str]]:
    measured = result("inside/results.json")
    yield "", *measured["mean_probe_dice"]
    dice = [f"{value:.2f}" for value in measured["mean_probe_dice"].values()]
    yield f"mean Dice of the probe, {measured['pairs']} pairs", *dice


@table
def refinements() -> Iterator[Sequence[str]]:
    steps = ("Ξ alone", "Ξ and 1 Ψ", "Ξ and 2 Ψ")
    yield "", "pairs", *steps
    for name, words in (("abdomen", "abdomen, 5 organs"), ("brain", "brain, 14 structures")):
        methods = result(f"refinement/{name}/scores.json")["methods"]
        yield words, str(methods[steps[0]]["pairs"]), *three(methods[step]["dice"] for step in steps)


@table
def capture_radius() -> Iterator[Sequence[str]]:
    radii = ("0.1", "0.2", "0.3")
    yield "", *(f"up to {radius}" for radius in radii)
    for name, curve in result("landscape/results.json")["curves"].items():
        yield name, *(f"{curve['share_towards_0'][radius]:.2f}" for radius in radii)


def cohorts() -> Any:
    """The measured parts of cohorts; those that were not measured yet are absent."""
    return result("cohort/results.json")


@table
def cohort_shown() -> Iterator[Sequence[str]]:
    held = cohorts()
    yield "", "measured"
    if ways := held.get("timing", {}):
        one, both = (f"{ways[f'two_workers_against_{name}']:.2f}" for name in ("one_thread", "two_threads"))
        pairs = f"{ways['pairs']} hippocampus pairs, two cores"
        yield pairs, f"two workers are {one} × as fast as one with one thread, {both} × as one with two threads"
    if kills := held.get("kills"):
        bits = "the same bits as" if kills["same_bits"] else "OTHER bits than"
        whole = "always whole" if kills["summary_and_gallery_always_whole"] else "NOT always whole"
        what = (
            f"{kills['finished']} done, {kills['registered_twice']} of them twice; summary and gallery {whole}; {bits}"
        )
        yield f"{kills['pairs']} pairs, killed {kills['kills']} times", f"{what} an unbroken run"
    if deaths := held.get("ray_deaths"):
        for name, words in (("node", f"{deaths['node']['nodes']} nodes, one killed"), ("driver", "driver killed")):
            part = deaths[name]
            done = part.get("done", part.get("finished"))
            bits = "the same bits as" if part["same_bits"] else "OTHER bits than"
            twice = f", {part['registered_twice']} of them twice" if "registered_twice" in part else ""
            yield f"Ray: {deaths['pairs']} pairs, {words}", f"{done} done{twice}; {bits} on one machine"
    if memory := held.get("ray_memory"):
        first, last = memory["resident"][0], memory["resident"][-1]
        texts = [
            f"{who} {first[key]:.0f} MB after {first['pairs']:.0f} pairs, {last[key]:.0f} MB after {last['pairs']:.0f}"
            for who, key in (("driver", "driver_mb"), ("largest worker", "worker_mb"))
        ]
        yield f"Ray: {memory['pairs']} tiny pairs", f"{memory['done']} done; {'; '.join(texts)}"
    for run in held.get("gpu", {}).get("runs", []):
        workers = f"{run['workers']} worker{'s' if run['workers'] > 1 else ''}"
        busy = "" if run["gpu_busy_percent"] is None else f", GPU busy {run['gpu_busy_percent']:.0f} % of the time"
        yield (
            f"{held['gpu']['gpu']}: {run['pairs']} brain pairs, {workers}",
            f"{run['pairs_per_minute']} a minute{busy}",
        )


@table
def cohort_costs() -> Iterator[Sequence[str]]:
    costs = cohorts()["costs"]
    yield "", "measured"
    yield "Ray: give a task to a worker and take its answer", f"{costs['ray_ms_per_task']:.2f} ms"
    yield "processes: the same", f"{costs['processes_ms_per_task']:.2f} ms"
    yield "size of a task and of its answer", f"{costs['task_bytes']} and {costs['answer_bytes']} bytes"
    yield "write a line of the journal", f"{costs['journal_ms_per_pair']:.2f} ms"
    both = f"{costs['summary_mb']} MB and {costs['gallery_mb']} MB"
    rows = f"{costs['rows']:,}".replace(",", " ")
    yield f"make summary and gallery of {rows} pairs", f"{costs['summary_and_gallery_s']:.1f} s, {both}"
    for part in costs["scaling"]:
        workers = f"{part['workers']} worker{'s' if part['workers'] > 1 else ''}"
        yield (
            f"Ray: tasks that wait {costs['wait_seconds']} s, {workers}",
            f"{100 * part['of_ideal']:.0f} % of the ideal rate",
        )


@table
def cohort_arithmetic() -> Iterator[Sequence[str]]:
    held, pairs, gpus = cohorts(), 100_000, 100
    costs, runs = held["costs"], held.get("gpu", {}).get("runs", [])
    best = max(runs, key=lambda run: run["pairs_per_minute"], default=None)
    rate = 60.0 if best is None else best["pairs_per_minute"]
    minutes, per_second = pairs / (gpus * rate), gpus * rate / 60
    driver = (costs["ray_ms_per_task"] + costs["journal_ms_per_pair"]) / 1000
    traffic = (costs["task_bytes"] + costs["answer_bytes"]) / 1000
    source = "assumed, not measured" if best is None else f"measured, {best['workers']} workers on a GPU"
    yield "", "arithmetic", "result"
    yield "pairs per minute and GPU", source, f"{rate:.0f}"
    yield "time", f"100 000 / (100 × {rate:.0f} per minute)", f"{minutes:.1f} min"
    yield "pairs per second in all", f"100 × {rate:.0f} / 60", f"{per_second:.0f}"
    yield "driver, time per pair", "Ray's answer and a line of the journal", f"{1000 * driver:.2f} ms"
    yield (
        "driver, share of its time",
        f"{per_second:.0f} per second × {1000 * driver:.2f} ms",
        f"{100 * per_second * driver:.0f} %",
    )
    yield "driver, most pairs per second", f"1 / {1000 * driver:.2f} ms", f"{1 / driver:.0f}"
    yield "through Ray", f"{per_second:.0f} per second × {traffic:.2f} kB", f"{per_second * traffic:.0f} kB/s"
    yield "journal", f"100 000 × {costs['answer_bytes']} bytes", f"{pairs * costs['answer_bytes'] / 1e6:.0f} MB"
    if best is not None and "mb_read" in best:
        read, written = best["mb_read"], best["mb_written"]
        yield "file system, reading", f"{per_second:.0f} per second × {read} MB", f"{per_second * read / 1000:.2f} GB/s"
        yield (
            "file system, writing",
            f"{per_second:.0f} per second × {written} MB",
            f"{per_second * written / 1000:.2f} GB/s",
        )
        yield "disk space", f"100 000 × {written} MB", f"{pairs * written / 1e6:.2f} TB"


@table
def lungs() -> Iterator[Sequence[str]]:
    yield "", "mean error, mm", "standard deviation", "median", "largest", "folds, %", "s"
    names = {"unregistered": "unregistered", "carl": "CARL", "carl_masked": "CARL, lungs alone"}
    names |= {"elastix": "elastix", "ants": "ANTs"}
    rows = result("lung/results/popi.json")["rows"]
    for method, name in names.items():
        for row in (row for row in rows if row["method"] == method):
            errors = [f"{row[key]:.2f}" for key in ("mean_mm", "std_mm", "median_mm", "most_mm")]
            folds = f"{row['folds_percent']:.4f}" if "folds_percent" in row else ""
            seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
            yield ", ".join(filter(None, (name, row["stage"]))), *errors, folds, seconds


# ---- plots ----------------------------------------------------------------------------------------------------------


def script(path: str) -> ModuleType:
    """Import a script by its path."""
    sys.path[:0] = [str(HERE), str((ROOT / path).parent)]
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plots(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Draw every plot into a folder; yield the committed file and the new one."""
    moved = script("experiments/moved/grid.py")
    for way in ("96", "160-seen-96", "160-cropped-96", "192"):
        moved.draw(result(f"moved/results/shifts-{way}.json"), folder / f"shifts-{way}.png")
        yield HERE / f"moved/results/shifts-{way}.png", folder / f"shifts-{way}.png"
    script("experiments/shift/run.py").draw(result("shift/results.json")["errors"], folder / "shift.png")
    yield HERE / "shift/shift.png", folder / "shift.png"
    script("experiments/landscape/run.py").draw(result("landscape/results.json"), folder / "landscape.png")
    yield HERE / "landscape/landscape.png", folder / "landscape.png"
    script("experiments/training/run.py").plot(result("training/results/training.json"), folder / "curves.png")
    yield HERE / "training/results/curves.png", folder / "curves.png"
    script("experiments/base/curve.py").draw(folder / "training-time.png")
    yield HERE / "base/results/training-time.png", folder / "training-time.png"
    retinas = script("experiments/retina/plot.py")
    retinas.violins(result("retina/results/runs.json"), folder)
    retinas.equivariance(result("retina/results/look.json"), folder)
    for name in ("dice.png", "equivariance.png"):
        yield HERE / "retina/results" / name, folder / name
    rotated = copied(HERE / "rotation/results", folder / "rotation")
    rotation = script("experiments/rotation/plot.py")
    rotation.curves(rotated)
    rotation.encoder_errors(rotated)
    rotation.registrations(sorted(rotated.glob("turned-*.json")), rotated)
    for name in ("angles.png", "encoder.png", "turned.png"):
        yield HERE / "rotation/results" / name, rotated / name
    measured = copied(ROOT / "benchmarks/results", folder / "benchmarks")
    script("benchmarks/run.py").plot(measured)
    yield ROOT / "benchmarks/results/gpu.png", measured / "gpu.png"
    if sets := beside():
        points = {words: scores for words, (_, scores) in sets.items()}
        script("benchmarks/beside.py").draw(points, folder / "time-and-dice.png")
        yield ROOT / "benchmarks/results/time-and-dice.png", folder / "time-and-dice.png"


def copied(results: Path, folder: Path) -> Path:
    """Copy result files into another folder, for scripts that draw beside them."""
    return Path(shutil.copytree(results, folder, ignore=shutil.ignore_patterns("*.png")))


# ---- pages and plots ------------------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """The pages that may hold tables. Tables in result folders are results themselves and are not rebuilt."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted(HERE.glob("*.md")),
        *sorted(HERE.glob("*/*.md")),
    ]


def rebuilt(text: str) -> str:
    """A page with its tables rebuilt from the result files."""

    def replace(block: re.Match[str]) -> str:
        if block[2] not in TABLES:
            raise SystemExit(f"unknown table {block[2]!r}; expected one of {', '.join(sorted(TABLES))}")
        return f"{block[1]}\n{TABLES[block[2]]()}\n{block[3]}"

    return BLOCK.sub(replace, text)


def stale_pages() -> list[Path]:
    return [page for page in pages() if rebuilt(text := page.read_text(encoding="utf-8")) != text]


def differs(one: Path, other: Path) -> bool:
    """Whether two plots differ in size, or in content after both are downsampled; a missing one does."""
    import numpy as np
    from PIL import Image

    if not one.exists():
        return True
    first, second = (Image.open(path).convert("L") for path in (one, other))
    if any(abs(a - b) > 2 for a, b in zip(first.size, second.size, strict=True)):
        return True
    small = (max(first.width // 8, 1), max(first.height // 8, 1))
    apart = np.asarray(first.resize(small), float) - np.asarray(second.resize(small), float)
    return float(np.abs(apart).mean()) / 255 > TOLERANCE


def stale_plots() -> list[Path]:
    with tempfile.TemporaryDirectory() as folder:
        return [committed for committed, drawn in plots(Path(folder)) if differs(committed, drawn)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if anything differs")
    arguments = parser.parse_args()
    if arguments.check:
        stale = [*stale_pages(), *stale_plots()]
        for path in stale:
            print(f"{path.relative_to(ROOT)} does not match the result files: run make figures")
        sys.exit(bool(stale))
    for page in stale_pages():
        page.write_text(rebuilt(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        for committed, drawn in plots(Path(folder)):
            if differs(committed, drawn):
                committed.write_bytes(drawn.read_bytes())
                print(committed.relative_to(ROOT))


if __name__ == "__main__":
    main()
