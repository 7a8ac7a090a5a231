"""Fit the calibration of a model on rows of training subjects, and test it on rows of validation subjects."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from carlreg.confidence.calibration import (
    BEYOND,
    SUFFIX,
    Calibration,
    Linear,
    Steps,
    Typical,
    Vector,
    auroc,
    fit_isotonic,
    fit_log_linear,
    fit_logistic,
    non_negative,
    pair_name,
)
from carlreg.confidence.numbers import LOCAL, NUMBERS, SHARES, SMOOTH, numbers_of, split_name
from carlreg.files.atomic import write_atomically
from carlreg.files.checksums import sha256
from carlreg.model.loaded import NONE, find_model
from carlreg.model.shipped import DEFAULT, WEIGHTS
from experiments.made import commit

HERE = Path(__file__).parent
HEADERS = ("misorientation",)
CERTIFICATE = ("turn", "turn_95", "shift", "shift_95", "scatter", "opinion")
ATTENTION = ("spread", "entropy", "attention", "surprise", "mismatch", "feature_drift", "novelty", "kinship")
OPTIMISATION = ("moved", "gain")
NETWORK = ("network_disagreement", "network_dissimilarity")


def without(*groups: Sequence[str]) -> tuple[str, ...]:
    """All numbers but those of some groups."""
    return tuple(name for name in NUMBERS if not any(name in group for group in groups))


def compared(names: Sequence[str]) -> tuple[str, ...]:
    """Numbers, and the same compared with what is usual for two kinds of scans."""
    return (*names, *(BEYOND + name for name in names))


TIERS = {
    "everything": compared(without()),
    "without headers": compared(without(HEADERS)),
    "not optimised": compared(without(HEADERS, OPTIMISATION)),
    "without certificate": compared(without(HEADERS, CERTIFICATE)),
    "cheap": without(HEADERS, CERTIFICATE, ATTENTION),
    "cheap, not optimised": without(HEADERS, CERTIFICATE, ATTENTION, OPTIMISATION),
}
"""What each model may choose from, the one with most evidence first: the first whose evidence is complete counts."""
ALONE = {"without network": without(HEADERS, CERTIFICATE, ATTENTION, OPTIMISATION, NETWORK)}
MOST_NUMBERS, MOST_LOCAL = 8, 6
"""How many numbers a model has, at most: of pairs, and of points."""
LEAST_GAIN = 0.002
"""A number is chosen if it raises the score of a model by this, at least."""
RIDGE = 0.02
"""Pulls the weights of the map towards 0."""
LEAST_POINTS = 10
"""Pairs with more points than this count in the fit of the map."""
LEAST_PAIRS = 2
"""What is usual is known of so many intact pairs of two kinds, at least."""
LEAST_DEVIATION = 0.02
GUARD = 0.1
"""The weight of sets that were left out, beside kinds that were, in the choice of numbers."""
MOST_MISSED, LEAST_RIGHT = 0.03, 0.88
"""On training subjects: the share of failures among the good, at most, and among the failed, at least."""
NOT_FAILURES = ("plain", "network alone", "synthetic", "no network")
LEAST_ROWS = 40
"""Registrations without a network are only judged if so many were collected, a quarter of which failed."""
TRE = 5.0
FLOOR = 1e-3
Row = dict[str, Any]


def run(arguments: argparse.Namespace) -> None:
    """Fit, test, and write the calibrations and the results."""
    every = [row for path in arguments.rows for row in read_rows(path)]
    path = find_model(DEFAULT if arguments.model == "default" else arguments.model)
    checksum = sha256(path)
    rows = [row for row in every if "error" not in row and row["model"] in (checksum, NONE) and has_truth(row)]
    if not rows:
        raise SystemExit(f"no row was made with {path.name}; run collect again")
    medians = mark_failures(rows)
    network, bare = ([row for row in rows if (row["model"] == NONE) == none] for none in (False, True))
    kinds, deviation = add_features(network)
    for row in rows:
        row["numbers"] = numbers_of(row["evidence"])
    train, val = ([row for row in network if row["split"] == split] for split in ("train", "val"))
    typical = typical_of(train)
    for row in network:
        row["numbers"] |= beyond(row, typical)
    made = {"commit": commit(), "machine": rows[0]["machine"], "seed": 0, "rows": len(train)}
    calibration, chosen = fit_calibration(checksum, train, TIERS, kinds, deviation, made, typical)
    alone = [row for row in rows if row["split"] == "train"]
    other, _ = fit_calibration(NONE, alone, ALONE, {}, (), made | {"rows": len(alone)})
    report = {
        "made": {**made, "model": path.stem, "model_sha256": checksum},
        "rows": {"all": len(every), "errors": sum("error" in row for row in every), "used": len(rows)},
        "medians": medians,
        "chosen": chosen,
        **test(calibration, train, val, [name for name, _ in chosen["failure"]["cheap"]]),
        "without_network": summary(other, [row for row in bare if row["split"] == "val"]),
    }
    outputs = {path.with_name(path.stem + SUFFIX): calibration}
    if len(bare) >= LEAST_ROWS and sum(row["failed"] for row in bare) >= LEAST_ROWS // 4:
        outputs[WEIGHTS / f"{NONE}{SUFFIX}"] = other
    for target, one in outputs.items():
        write_atomically(target, (json.dumps(one.to_json(), indent=1) + "\n").encode())
    write_atomically(HERE / "results.json", (json.dumps(_rounded(report), indent=1) + "\n").encode())
    print(json.dumps(_rounded({k: v for k, v in report.items() if k != "pairs"}), indent=1))


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, which may be compressed. A last line that was cut off does not count."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


# ---- truth ----------------------------------------------------------------------------------------------------------


def mark_failures(rows: Sequence[Row]) -> dict[str, float]:
    """Mark rows as failures: no common anatomy; Dice below that before, or below half of the set's median; landmarks
    more than 5 mm off. Returns the medians."""
    plain = [row for row in rows if row["kind"] == "plain" and "dice_after" in row]
    medians = {name: median(r["dice_after"] for r in plain if r["set"] == name) for name in {r["set"] for r in plain}}
    for row in rows:
        worse = row.get("dice_after", 1.0) < max(row.get("dice_before", 0.0), medians.get(row["set"], 0.0) / 2)
        missing = "dice_before" in row and "dice_after" not in row
        row["failed"] = bool(row["no_common_anatomy"] or worse or missing or row.get("tre_mm", 0.0) > TRE)
        row["true_mm"] = next((row[k] for k in ("true_error_mm", "tre_mm", "surface_after_mm") if k in row), math.nan)
    return dict(sorted(medians.items()))


def has_truth(row: Row) -> bool:
    """Whether anything tells if a registration has failed: a crop may have lost all labels."""
    return bool(row["no_common_anatomy"] or {"dice_before", "dice_after", "tre_mm", "true_error_mm"} & row.keys())


def add_features(rows: Sequence[Row]) -> tuple[dict[str, list[float]], list[float]]:
    """Means of the pooled features of each set of training scans, and the deviation within a set; adds the distances
    from them to the rows, for a training scan from the other subjects of its set, and the numbers to the evidence."""
    scans: dict[tuple[str, str], Vector] = {}
    for row in rows:
        if row["split"] == "train" and row["kind"] == "plain" and row["features"]:
            for subject, features in zip(row["subjects"], row["features"], strict=True):
                scans[subject.split("/")[0], subject] = np.array(features)
    sets = sorted({name for name, _ in scans})
    means = {name: np.mean([v for (s, _), v in scans.items() if s == name], axis=0) for name in sets}
    counted = [name for name in sets if sum(s == name for s, _ in scans) > 1]
    within = [v - means[s] for (s, _), v in scans.items() if s in counted]
    deviation = np.maximum(np.sqrt(np.mean(np.square(within), axis=0)), 1e-4)

    def distances(features: Vector, subject: str) -> dict[str, float]:
        others = {s: [v for (name, who), v in scans.items() if name == s and who != subject] for s in sets}
        centres = {s: np.mean(each, axis=0) for s, each in others.items() if each}
        return {s: float(np.sqrt(np.mean(((features - centre) / deviation) ** 2))) for s, centre in centres.items()}

    for row in rows:
        if row["features"]:
            both = [np.array(one) for one in row["features"]]
            row["apart"] = [distances(f, s) for f, s in zip(both, row["subjects"], strict=True)]
            row["evidence"]["novelty"] = max(min(one.values()) for one in row["apart"])
            row["evidence"]["kinship"] = float(np.sqrt(np.mean(((both[0] - both[1]) / deviation) ** 2)))
    return {name: mean.tolist() for name, mean in means.items()}, deviation.tolist()


def typical_of(rows: Sequence[Row], names: Sequence[str] = tuple(NUMBERS)) -> Typical | None:
    """Medians of numbers over intact pairs of each two sets of scans, and deviations from them."""
    pairs: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "plain" and not row["failed"]:
            pairs.setdefault(pair_name(*(one.split("/")[0] for one in row["subjects"])), []).append(row)
    values = {pair: table(each, names) for pair, each in sorted(pairs.items()) if len(each) >= LEAST_PAIRS}
    if not values:
        return None
    known = np.all([np.isfinite(each).all(0) for each in values.values()], axis=0)
    medians = {pair: np.median(each, axis=0) for pair, each in values.items()}
    left = np.concatenate([each - medians[pair] for pair, each in values.items()])
    deviation = np.maximum(left.std(0), LEAST_DEVIATION)

    def named(one: Vector) -> dict[str, float]:
        return {name: float(value) for name, value, there in zip(names, one, known, strict=True) if there}

    return Typical({pair: named(one) for pair, one in medians.items()}, named(deviation))


def beyond(row: Row, typical: Typical | None, left_out: str = "") -> dict[str, float]:
    """Numbers compared with what is usual for the sets that the features resemble most, but for one left out."""
    if typical is None or not row.get("apart"):
        return {}
    near = [{name: mm for name, mm in one.items() if name != left_out} for one in row["apart"]]
    return typical.beyond(row["numbers"], *(min(one, key=one.__getitem__) for one in near))


# ---- fits -----------------------------------------------------------------------------------------------------------


def fit_calibration(
    checksum: str,
    rows: Sequence[Row],
    tiers: Mapping[str, Sequence[str]],
    kinds: Mapping[str, Sequence[float]],
    deviation: Sequence[float],
    made: Mapping[str, Any],
    typical: Typical | None = None,
) -> tuple[Calibration, dict[str, Any]]:
    """Everything from training rows, and how numbers were chosen; the limits of the verdicts are from predictions for
    kinds that were left out."""
    courses, failing = choose_all(tiers, lambda names: choose_failure(rows, names))
    plain = {tier: [name for name in names if name in NUMBERS] for tier, names in tiers.items()}
    others, erring = choose_all(plain, lambda names: choose_error(rows, names))
    needed = {name.removeprefix(BEYOND) for names in failing for name in names if name.startswith(BEYOND)}
    left_out = left_out_scores(rows, rows, failing)
    known = np.isfinite(left_out)
    good, failed = limits(left_out[known], truth(rows)[known])
    right = [row["numbers"] for row in rows if not row["failed"]]
    values = {name: [n[name] for n in right if math.isfinite(n[name])] for name in NUMBERS}
    usual, middle = ({n: _quantile(v, q) for n, v in values.items() if v} for q in (0.95, 0.5))
    local, places = fit_local(rows) if kinds else (None, [])
    calibration = Calibration(
        model=checksum,
        failure=tuple(fit_failure(rows, names) for names in failing),
        error=tuple(fit_error(rows, names) for names in erring),
        good=good,
        failed=failed,
        usual=usual,
        median=middle,
        local=local,
        kinds=kinds,
        deviation=deviation,
        typical=typical_of(rows, sorted(needed)) if typical is not None and needed else None,
        made=made,
    )
    return calibration, {"failure": courses, "error": others, "map": places}


Course = list[tuple[str, float]]
"""Numbers in the order in which they were chosen, and the score with each."""


def choose_all(
    tiers: Mapping[str, Sequence[str]], choose_from: Callable[[Sequence[str]], Course]
) -> tuple[dict[str, Course], list[tuple[str, ...]]]:
    """The course of each tier, and the different choices. A tier that lacks nothing that a larger one chose would
    choose the same."""
    courses: dict[str, Course] = {}
    for tier, names in tiers.items():
        same = [
            course
            for other, course in courses.items()
            if set(names) <= set(tiers[other]) and {name for name, _ in course} <= set(names)
        ]
        courses[tier] = same[0] if same else choose_from(names)
    return courses, list(dict.fromkeys(tuple(name for name, _ in course) for course in courses.values()))


def choose(
    candidates: Sequence[str], score: Callable[[Sequence[str]], float], most: int, least: float = LEAST_GAIN
) -> Course:
    """Add the number that raises a score most, as long as one raises it enough; the first of equals."""
    course: Course = []
    while len(course) < most:
        chosen = [name for name, _ in course]
        scores = {name: score([*chosen, name]) for name in candidates if name not in chosen}
        best = max(scores, key=lambda name: scores[name], default=None)
        if best is None or not scores[best] > (course[-1][1] + least if course else -math.inf):
            break
        course.append((best, scores[best]))
    return course


def usable(rows: Sequence[Row], candidates: Sequence[str]) -> tuple[list[Row], list[str]]:
    """The numbers that most rows have, and the rows that have them all."""
    counts = {name: len(complete(rows, [name])) for name in candidates}
    names = [name for name in candidates if counts[name] >= 0.7 * max(len(rows), 1)]
    return complete(rows, names), names


def choose_failure(rows: Sequence[Row], candidates: Sequence[str]) -> Course:
    """Numbers by the AUROC for kinds of failure that were left out: the mean of that over all training rows, over those
    of the same anatomy, and of failures against intact pairs. Sets that were left out count a little, so that no number
    is chosen that misleads for new anatomy."""
    known, names = usable(rows, candidates)
    failed = truth(known)
    same = np.array([not row["no_common_anatomy"] for row in known])
    plain = np.array([row["kind"] == "plain" for row in known]) | (failed > 0)
    every = table(known, names)
    kinds = [(fitted, tested, every) for fitted, tested in kinds_left_out(known)]
    sets = []
    for fitted, tested in sets_left_out(known):
        name = known[tested[0]]["set"]
        typical = typical_of([known[index] for index in fitted])
        others = [row | {"numbers": row["numbers"] | beyond(row, typical, name)} for row in known]
        sets.append((fitted, tested, table(others, names)))

    def score(chosen: Sequence[str]) -> float:
        columns = [names.index(name) for name in chosen]

        def odds(folds: Sequence[tuple[Sequence[int], Sequence[int], Vector]]) -> Vector:
            found = np.zeros(len(known))
            for fitted, tested, numbers in folds:
                x = numbers[:, columns]
                found[tested] = fit_logistic(x[fitted], failed[fitted], chosen, share=0.5).apply(x[tested])
            return found

        new, strange = odds(kinds), odds(sets)
        by_kind = np.mean([auroc(new[part], failed[part]) for part in (failed >= 0, same, plain)])
        by_set = np.mean([auroc(strange[part], failed[part]) for part in (failed >= 0, same)])
        return float((1 - GUARD) * by_kind + GUARD * by_set)

    return choose(names, score, MOST_NUMBERS)


def choose_error(rows: Sequence[Row], candidates: Sequence[str]) -> Course:
    """Numbers by the share of the variance of errors, in logarithms, that is explained for kinds and for sets that were
    left out: the mean of the two."""
    known, names = usable([row for row in rows if math.isfinite(row["true_mm"])], candidates)
    numbers, target = table(known, names), np.log(relative_errors(known))

    def fit(x: Vector, fitted: Sequence[int]) -> Linear:
        return fit_log_linear(x[fitted], target[fitted], [""] * x.shape[1])

    def score(chosen: Sequence[str]) -> float:
        x = numbers[:, [names.index(name) for name in chosen]]
        left = [target - predicted(x, folds, fit) for folds in (kinds_left_out(known), sets_left_out(known))]
        return 1 - float(np.mean(np.square(left)) / max(target.var(), 1e-9))

    return choose(names, score, MOST_NUMBERS)


def predicted(x: Vector, folds: Folds, fit: Callable[[Vector, Sequence[int]], Linear]) -> Vector:
    """What models that were fitted to other rows predict for each row of numbers (N, D)."""
    found = np.zeros(len(x))
    for fitted, tested in folds:
        found[tested] = fit(x, fitted).apply(x[tested])
    return found


Folds = list[tuple[list[int], list[int]]]
"""Indices of rows to fit to, and of rows to test on."""


def kinds_left_out(rows: Sequence[Row]) -> Folds:
    """Each kind of failure, and the rest. Rows of kinds that are meant to succeed are judged by the model of all."""
    return _folds([row["kind"] for row in rows], NOT_FAILURES)


def sets_left_out(rows: Sequence[Row]) -> Folds:
    return _folds([row["set"] for row in rows], ())


def _folds(names: Sequence[str], always: Sequence[str]) -> Folds:
    every = range(len(names))
    groups = {name: [index for index in every if names[index] == name] for name in sorted(set(names))}
    together = [index for name in always for index in groups.pop(name, [])]
    folds = [([index for index in every if names[index] != name], tested) for name, tested in groups.items()]
    return [*folds, (list(every), together)] if together else folds


def complete(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return [row for row in rows if all(math.isfinite(row["numbers"].get(name, math.nan)) for name in names)]


def table(rows: Sequence[Row], names: Sequence[str]) -> Vector:
    values = [[row["numbers"].get(name, math.nan) for name in names] for row in rows]
    return np.array(values).reshape(len(rows), len(names))


def truth(rows: Sequence[Row]) -> Vector:
    return np.array([float(row["failed"]) for row in rows])


def fit_failure(rows: Sequence[Row], names: Sequence[str], share: float | None = None) -> Linear:
    known = complete(rows, names)
    return fit_logistic(table(known, names), truth(known), names, share=share)


def relative_errors(rows: Sequence[Row]) -> Vector:
    """Errors as fractions of the extent."""
    return np.array([max(row["true_mm"] / row["evidence"]["extent_mm"], FLOOR) for row in rows])


def fit_error(rows: Sequence[Row], names: Sequence[str]) -> tuple[Linear, Steps]:
    """The logarithm of the error as a fraction of the extent, and a monotone correction that keeps means: of
    predictions for kinds that were left out, which are as far off as those for new pairs."""
    known = [row for row in complete(rows, names) if math.isfinite(row["true_mm"])]
    relative, numbers = relative_errors(known), table(known, names)
    linear = fit_log_linear(numbers, np.log(relative), names)

    def fit(x: Vector, fitted: Sequence[int]) -> Linear:
        return fit_log_linear(x[fitted], np.log(relative[fitted]), names)

    steps = fit_isotonic(predicted(numbers, kinds_left_out(known), fit), relative)
    return linear, Steps(steps.x, tuple(math.log(max(value, FLOOR)) for value in steps.y))


def left_out_scores(fitted: Sequence[Row], tested: Sequence[Row], tiers: Sequence[Sequence[str]]) -> Vector:
    """The probability of failure of each tested row, from models that have not seen its kind of failure; NaN without
    the evidence. Rows of kinds that are meant to succeed are judged by the models of all, and all models assume the
    same share of failures."""
    scores, share = np.full(len(tested), math.nan), float(truth(fitted).mean())
    for kind in sorted({row["kind"] for row in tested}):
        seen = [row for row in fitted if row["kind"] != kind or kind in NOT_FAILURES]
        models = tuple(fit_failure(seen, names, share) for names in tiers)
        judge = Calibration("", models, (), 0.0, 0.0)
        for index, row in enumerate(tested):
            if row["kind"] == kind:
                scores[index] = judge.probability(row["numbers"])
    return scores


def limits(scores: Vector, failed: Vector) -> tuple[float, float]:
    """The highest limit of good and the lowest of failed that keep the promises on training subjects."""
    order = np.argsort(scores)
    missed = np.cumsum(failed[order]) / np.arange(1, len(order) + 1)
    allowed = np.flatnonzero(missed <= MOST_MISSED)
    good = float(scores[order][allowed[-1]]) if len(allowed) else 0.0
    right = np.cumsum(failed[order][::-1]) / np.arange(1, len(order) + 1)
    allowed = np.flatnonzero(right >= LEAST_RIGHT)
    bad = float(scores[order][::-1][allowed[-1]]) if len(allowed) else 1.0
    return (good, bad) if good <= bad else ((good + bad) / 2,) * 2


@dataclass(frozen=True, eq=False)
class Places:
    """Local numbers (points, names) and logarithms of local errors of one pair, each less its mean over the pair: the
    map ranks places within a pair, whatever its level."""

    set: str
    numbers: Vector
    target: Vector

    @classmethod
    def of(cls, row: Row, names: Sequence[str]) -> Places | None:
        """None if something is missing."""
        points, extent = row.get("points"), row["evidence"]["extent_mm"]
        if not points or len(points["truth"]) <= LEAST_POINTS:
            return None
        columns = []
        for name in names:
            window, plain = split_name(name)
            prefix = name.removesuffix(plain) if window else ""
            values = points.get(prefix + SHARES.get(plain, plain))
            if values is None:
                return None
            column = np.array(values)
            columns.append(1 - column if plain in SHARES else np.log(np.maximum(column / extent, FLOOR)))
        numbers = np.stack(columns, axis=1)
        target = np.log(np.maximum(np.array(points["truth"]) / extent, FLOOR))
        if not np.isfinite(numbers).all():
            return None
        return cls(row["set"], numbers - numbers.mean(0), target - target.mean())


def fit_local(rows: Sequence[Row]) -> tuple[Linear | None, Course]:
    """The logarithm of the error at a point, within pairs that did not fail: each pair has the same weight. Numbers
    are chosen by the mean rank correlation within pairs of sets that were left out."""
    names = [prefix + name for prefix in ("", *SMOOTH) for name in LOCAL]
    right = [row for row in rows if not row["failed"] and row.get("points")]
    names = [name for name in names if sum(Places.of(row, [name]) is not None for row in right) >= 0.7 * len(right)]
    known = [one for row in right if (one := Places.of(row, names)) is not None]
    if not known or not names:
        return None, []
    weights = [1 / len(one.target) for one in known]
    # Sums of squares and products, from which any choice of numbers can be fitted without the points.
    square = np.array([w * one.numbers.T @ one.numbers for w, one in zip(weights, known, strict=True)])
    product = np.array([w * one.numbers.T @ one.target for w, one in zip(weights, known, strict=True)])

    def fit(chosen: Sequence[int], pairs: Sequence[int]) -> Linear:
        some = np.ix_(chosen, chosen)
        gram, towards = square[pairs].mean(0)[some], product[pairs].mean(0)[list(chosen)]
        scale = np.sqrt(np.maximum(gram.diagonal(), 1e-12))
        weights = non_negative(gram / np.outer(scale, scale) + RIDGE * np.eye(len(scale)), towards / scale)
        picked = tuple(names[index] for index in chosen)
        return Linear(picked, (0.0,) * len(picked), tuple(scale), tuple(weights), 0.0)

    folds = _folds([one.set for one in known], ())
    folds = folds if len(folds) > 1 else [(folds[0][1], folds[0][1])]

    def score(chosen: Sequence[str]) -> float:
        columns, found = [names.index(name) for name in chosen], []
        for fitted, tested in folds:
            model = fit(columns, fitted)
            found += [spearman(model.apply(known[i].numbers[:, columns]), known[i].target) for i in tested]
        values = [value if math.isfinite(value) else 0.0 for value in found]
        return float(np.mean(values))

    course = choose(names, score, MOST_LOCAL)
    model = fit([names.index(name) for name, _ in course], range(len(known)))
    return model, course


# ---- test -----------------------------------------------------------------------------------------------------------


def test(calibration: Calibration, train: Sequence[Row], val: Sequence[Row], cheap: Sequence[str]) -> dict[str, Any]:
    """The promises, measured on validation subjects; `cheap` are the numbers of the cheap model."""
    tiers = [model.names for model in calibration.failure]
    every = left_out_scores(train, val, tiers)
    known = [row for row, score in zip(val, every, strict=True) if math.isfinite(score)]
    scores = every[np.isfinite(every)]
    whole = np.array([calibration.probability(row["numbers"]) for row in known])
    failed, same = truth(known), np.array([not row["no_common_anatomy"] for row in known])
    less = left_out_scores(train, known, [cheap])
    judged = np.isfinite(less)
    plain = np.array([row["kind"] == "plain" for row in known])
    alarm = float(np.quantile(scores[failed == 0], 0.95)) if (failed == 0).any() else math.nan
    verdicts = np.where(scores < calibration.good, "good", np.where(scores > calibration.failed, "failed", "doubtful"))
    expected = np.array([calibration.expected_error(r["numbers"], r["evidence"]["extent_mm"]) for r in known])
    true = np.array([row["true_mm"] for row in known])
    return {
        "pairs_tested": len(known),
        "failures": int(failed.sum()),
        "same_anatomy": {"pairs": int(same.sum()), "failures": int(failed[same].sum())},
        "auroc": {
            "kinds_left_out": auroc(scores, failed),
            "kinds_left_out_same_anatomy": auroc(scores[same], failed[same]),
            "all_kinds_seen": auroc(whole, failed),
            "all_kinds_seen_same_anatomy": auroc(whole[same], failed[same]),
            "cheap": auroc(less[judged], failed[judged]),
            "cheap_same_anatomy": auroc(less[judged & same], failed[judged & same]),
        },
        "found_at_5_percent_false_alarms": float((scores[failed == 1] > alarm).mean()),
        "alone": alone(known, failed, same),
        "verdicts": {
            **{verdict: int((verdicts == verdict).sum()) for verdict in ("good", "doubtful", "failed")},
            "failures_among_good": _share(failed[verdicts == "good"]),
            "failures_among_failed": _share(failed[verdicts == "failed"]),
            "doubtful_among_plain": float((verdicts[plain] == "doubtful").mean()),
        },
        "kinds": by_kind(known, failed, verdicts),
        "error": error_summary(expected, true),
        "map": map_summary(calibration, val),
        "seconds": seconds(known),
        "pairs": [
            [row["kind"], row["set"], int(row["failed"]), float(score), float(e), float(t)]
            for row, score, e, t in zip(known, scores, expected, true, strict=True)
        ],
    }


def summary(calibration: Calibration, rows: Sequence[Row]) -> dict[str, Any]:
    """The same in short, for registration without a network."""
    known = complete(rows, calibration.failure[0].names)
    scores = np.array([calibration.probability(row["numbers"]) for row in known])
    expected = np.array([calibration.expected_error(r["numbers"], r["evidence"]["extent_mm"]) for r in known])
    true = np.array([row["true_mm"] for row in known])
    failed = truth(known)
    return {
        "pairs": len(known),
        "failures": int(failed.sum()),
        "auroc": auroc(scores, failed),
        "rank_correlation": spearman(expected, true),
    }


def alone(rows: Sequence[Row], failed: Vector, same: Vector) -> dict[str, dict[str, float]]:
    """The AUROC of each number by itself: over all rows and those of the same anatomy, and, compared with what is usual
    for the two kinds of scans, over all rows."""

    def worth(name: str, among: Vector) -> float:
        values = table(rows, [name])[:, 0]
        known = np.isfinite(values) & among
        return auroc(values[known], failed[known])

    every = np.ones(len(rows), bool)
    return {
        name: {"all": worth(name, every), "same_anatomy": worth(name, same), "compared": worth(BEYOND + name, every)}
        for name in NUMBERS
    }


def by_kind(rows: Sequence[Row], failed: Vector, verdicts: Any) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for row, bad, verdict in zip(rows, failed, verdicts, strict=True):
        counts = found.setdefault(row["kind"], {"pairs": 0, "failures": 0, "good": 0, "doubtful": 0, "failed": 0})
        counts["pairs"] += 1
        counts["failures"] += int(bad)
        counts[str(verdict)] += 1
    return found


def error_summary(expected: Vector, true: Vector) -> dict[str, Any]:
    """Rank correlation of expected and true error, and their means in five bins of equal count."""
    known = np.isfinite(expected) & np.isfinite(true)
    expected, true = expected[known], true[known]
    order = np.argsort(expected)
    bins = [
        {"pairs": len(part), "expected_mm": float(expected[part].mean()), "true_mm": float(true[part].mean())}
        for part in np.array_split(order, 5)
        if len(part)
    ]
    return {"pairs": len(true), "rank_correlation": spearman(expected, true), "bins": bins}


def map_summary(calibration: Calibration, rows: Sequence[Row]) -> dict[str, Any]:
    """Rank correlation of expected and true error over the points of a pair: medians over pairs that did not fail."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if calibration.local is None or row["failed"]:
            continue
        places = Places.of(row, calibration.local.names)
        if places is None:
            continue
        value = spearman(calibration.local.apply(places.numbers), places.target)
        if math.isfinite(value):
            truth_kind = "synthetic truth" if "true_error_mm" in row else "landmarks" if "tre_mm" in row else "surfaces"
            found.setdefault(truth_kind, []).append(value)
    return {kind: {"pairs": len(values), "rank_correlation": median(values)} for kind, values in found.items()}


def seconds(rows: Sequence[Row]) -> dict[str, float]:
    return {part: median(row["seconds"][part] for row in rows) for part in ("registration", "evidence")}


def spearman(first: Vector, second: Vector) -> float:
    """Rank correlation; ties have their mean rank."""
    known = np.isfinite(first) & np.isfinite(second)
    if known.sum() < 3:
        return math.nan
    a, b = _ranks(first[known]), _ranks(second[known])
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale else math.nan


def _ranks(values: Vector) -> Vector:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts) + (last - 1))[inverse] / 2


def _share(values: Vector) -> float:
    return float(values.mean()) if len(values) else math.nan


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
