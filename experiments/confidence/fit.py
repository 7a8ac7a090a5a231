"""Fit the calibration of a model on rows of training subjects, and test it on rows of validation subjects."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from carlreg.confidence.calibration import (
    SUFFIX,
    Calibration,
    Linear,
    Steps,
    Vector,
    auroc,
    fit_isotonic,
    fit_log_linear,
    fit_logistic,
)
from carlreg.confidence.numbers import NUMBERS, numbers_of
from carlreg.files.atomic import write_atomically
from carlreg.files.checksums import sha256
from carlreg.model.loaded import NONE, find_model
from carlreg.model.shipped import DEFAULT, WEIGHTS
from experiments.made import commit

HERE = Path(__file__).parent
ALONE = ("no_excess", "dissimilarity", "uncovered", "volume")
CHEAP = ("network_disagreement", "moved", "no_excess", "dissimilarity", "uncovered")
ATTENTION = (*CHEAP, "kinship", "novelty")
FULL = (*ATTENTION, "turn")
UNOPTIMISED = ("network_disagreement", "no_excess", "dissimilarity", "uncovered")
"""The numbers of each model: without a network; with one; with its features; with the certificate; and without
optimisation. Chosen on training subjects, by the AUROC for kinds that were left out."""
LOCAL = ("network_disagreement", "disagreement", "turn", "shift", "spread", "dissimilarity")
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
    lines = [line for path in arguments.rows for line in path.read_text(encoding="utf-8").splitlines()]
    every = [json.loads(line) for line in lines]
    path = find_model(DEFAULT if arguments.model == "default" else arguments.model)
    checksum = sha256(path)
    rows = [row for row in every if "error" not in row and row["model"] in (checksum, NONE)]
    if not rows:
        raise SystemExit(f"no row was made with {path.name}; run collect again")
    medians = mark_failures(rows)
    network, without = ([row for row in rows if (row["model"] == NONE) == none] for none in (False, True))
    kinds, deviation = add_features(network)
    for row in rows:
        row["numbers"] = numbers_of(row["evidence"])
    train, val = ([row for row in network if row["split"] == split] for split in ("train", "val"))
    made = {"commit": commit(), "machine": rows[0]["machine"], "seed": 0, "rows": len(train)}
    calibration = fit_calibration(checksum, train, (FULL, ATTENTION, CHEAP, UNOPTIMISED), kinds, deviation, made)
    alone = [row for row in rows if row["split"] == "train"]
    other = fit_calibration(NONE, alone, (ALONE,), {}, (), made | {"rows": len(alone)})
    report = {
        "made": {**made, "model": path.stem, "model_sha256": checksum},
        "rows": {"all": len(every), "errors": len(every) - len([r for r in every if "error" not in r])},
        "medians": medians,
        **test(calibration, train, val),
        "without_network": summary(other, [row for row in without if row["split"] == "val"]),
    }
    outputs = {path.with_name(path.stem + SUFFIX): calibration}
    if len(without) >= LEAST_ROWS and sum(row["failed"] for row in without) >= LEAST_ROWS // 4:
        outputs[WEIGHTS / f"{NONE}{SUFFIX}"] = other
    for target, one in outputs.items():
        write_atomically(target, (json.dumps(one.to_json(), indent=1) + "\n").encode())
    write_atomically(HERE / "results.json", (json.dumps(_rounded(report), indent=1) + "\n").encode())
    print(json.dumps(_rounded({k: v for k, v in report.items() if k != "pairs"}), indent=1))


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


def add_features(rows: Sequence[Row]) -> tuple[dict[str, list[float]], list[float]]:
    """Means of the pooled features of each set of training scans, and the deviation within a set; adds the distances
    from them to the evidence, for a training scan from the other subjects of its set."""
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

    def novelty(features: Vector, subject: str) -> float:
        others = {s: [v for (name, who), v in scans.items() if name == s and who != subject] for s in sets}
        centres = [np.mean(each, axis=0) for each in others.values() if each]
        return min(float(np.sqrt(np.mean(((features - centre) / deviation) ** 2))) for centre in centres)

    for row in rows:
        if row["features"]:
            both = [np.array(one) for one in row["features"]]
            row["evidence"]["novelty"] = max(novelty(f, s) for f, s in zip(both, row["subjects"], strict=True))
            row["evidence"]["kinship"] = float(np.sqrt(np.mean(((both[0] - both[1]) / deviation) ** 2)))
    return {name: mean.tolist() for name, mean in means.items()}, deviation.tolist()


# ---- fits -----------------------------------------------------------------------------------------------------------


def fit_calibration(
    checksum: str,
    rows: Sequence[Row],
    choices: Sequence[Sequence[str]],
    kinds: Mapping[str, Sequence[float]],
    deviation: Sequence[float],
    made: Mapping[str, Any],
) -> Calibration:
    """Everything from training rows; the limits of the verdicts from predictions for kinds that were left out."""
    failure = tuple(fit_failure(rows, names) for names in choices)
    error = tuple(fit_error(rows, names) for names in choices)
    known = complete(rows, choices[0])
    left_out = left_out_scores(known, known, choices[0])
    good, failed = limits(left_out, truth(known))
    right = [row["numbers"] for row in rows if not row["failed"]]
    values = {name: [n[name] for n in right if math.isfinite(n[name])] for name in NUMBERS}
    usual, middle = ({n: _quantile(v, q) for n, v in values.items() if v} for q in (0.95, 0.5))
    return Calibration(
        model=checksum,
        failure=failure,
        error=error,
        good=good,
        failed=failed,
        usual=usual,
        median=middle,
        local=fit_local(rows) if kinds else None,
        kinds=kinds,
        deviation=deviation,
        made=made,
    )


def complete(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return [row for row in rows if all(math.isfinite(row["numbers"][name]) for name in names)]


def table(rows: Sequence[Row], names: Sequence[str]) -> Vector:
    return np.array([[row["numbers"][name] for name in names] for row in rows]).reshape(len(rows), len(names))


def truth(rows: Sequence[Row]) -> Vector:
    return np.array([float(row["failed"]) for row in rows])


def fit_failure(rows: Sequence[Row], names: Sequence[str]) -> Linear:
    known = complete(rows, names)
    return fit_logistic(table(known, names), truth(known), names)


def fit_error(rows: Sequence[Row], names: Sequence[str]) -> tuple[Linear, Steps]:
    """The logarithm of the error as a fraction of the extent, and a monotone correction that keeps means."""
    known = [row for row in complete(rows, names) if math.isfinite(row["true_mm"])]
    relative = np.array([max(row["true_mm"] / row["evidence"]["extent_mm"], FLOOR) for row in known])
    linear = fit_log_linear(table(known, names), np.log(relative), names)
    steps = fit_isotonic(linear.apply(table(known, names)), relative)
    return linear, Steps(steps.x, tuple(math.log(max(value, FLOOR)) for value in steps.y))


def left_out_scores(fitted: Sequence[Row], tested: Sequence[Row], names: Sequence[str]) -> Vector:
    """The probability of failure of each tested row, from a model that has not seen its kind of failure. Rows of kinds
    that are meant to succeed are judged by the model of all."""
    scores = np.zeros(len(tested))
    for kind in sorted({row["kind"] for row in tested}):
        seen = [row for row in fitted if row["kind"] != kind or kind in NOT_FAILURES]
        chosen = [index for index, row in enumerate(tested) if row["kind"] == kind]
        odds = fit_failure(seen, names).apply(table([tested[index] for index in chosen], names))
        scores[chosen] = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
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


def fit_local(rows: Sequence[Row]) -> Linear:
    """The logarithm of the error at a point, within pairs: each pair has the same weight, whatever its level."""
    parts = [local_table(row) for row in rows if row.get("points") and not row["failed"]]
    known = [part for part in parts if part is not None]
    x = np.concatenate([numbers - numbers.mean(0) for numbers, _ in known])
    y = np.concatenate([target - target.mean() for _, target in known])
    return fit_log_linear(x, y, LOCAL)


def local_table(row: Row) -> tuple[Vector, Vector] | None:
    """Numbers and the logarithm of the true error at the points of a row; None if something is missing."""
    points, extent = row["points"], row["evidence"]["extent_mm"]
    columns = []
    for name in LOCAL:
        if name.endswith("dissimilarity"):
            columns.append(1 - np.array(points[name.replace("dissimilarity", "similarity")]))
        elif name in points:
            columns.append(np.log(np.maximum(np.array(points[name]) / extent, FLOOR)))
        else:
            return None
    target = np.log(np.maximum(np.array(points["truth"]) / extent, FLOOR))
    numbers = np.stack(columns, axis=1)
    return (numbers, target) if len(target) > 10 and bool(np.isfinite(numbers).all()) else None


# ---- test -----------------------------------------------------------------------------------------------------------


def test(calibration: Calibration, train: Sequence[Row], val: Sequence[Row]) -> dict[str, Any]:
    """The promises, measured on validation subjects."""
    known = complete(val, FULL)
    scores = left_out_scores(complete(train, FULL), known, FULL)
    whole = calibration.failure[0].apply(table(known, FULL))
    failed, same = truth(known), np.array([not row["no_common_anatomy"] for row in known])
    cheap = left_out_scores(complete(train, CHEAP), known, CHEAP)
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
            "cheap": auroc(cheap, failed),
            "cheap_same_anatomy": auroc(cheap[same], failed[same]),
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
    """The AUROC of each number by itself."""
    found = {}
    for name in NUMBERS:
        values = np.array([row["numbers"][name] for row in rows])
        known = np.isfinite(values)
        both = known & same.astype(bool)
        everything, alike = auroc(values[known], failed[known]), auroc(values[both], failed[both])
        found[name] = {"all": everything, "same_anatomy": alike}
    return found


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
        part = local_table(row) if row.get("points") and not row["failed"] else None
        if part is None or calibration.local is None:
            continue
        value = spearman(calibration.local.apply(part[0]), part[1])
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
