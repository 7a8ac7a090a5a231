"""Cohorts on one machine: how much faster several workers are, and what ten kills leave behind.

    python experiments/cohort/run.py kills WORK                                    # a tiny network; minutes
    python experiments/cohort/run.py timing ../shared/data/hippocampus/val WORK    # on an idle machine; half an hour

`timing` registers 40 pairs of hippocampus scans three times: by one worker with one thread, by one worker with a thread
for each of two cores, and by two workers. `kills` registers all pairs of seven synthetic images with two workers, kills
the command with signal 9 at ten random moments, runs it again after each, and compares the results with those of an
unbroken run. Both write their part of results.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from common import bits, carl, keep, rows, seconds_of, shown, tiny  # type: ignore[import-not-found]

PAIRS, KILLS, IMAGES, SEED = 40, 10, 7, 0
CORES = {0, 1}
WAYS = {"one worker, one thread": (1, 1), "one worker, two threads": (1, 2), "two workers, a thread each": (2, 2)}
"""Workers, and threads in all."""


def hippocampus_pairs(data: Path, table: Path) -> None:
    """The table of the first pairs of the validation scans, each with the next ones, in order."""
    names = sorted(path.name.removesuffix("_labels.nii.gz") for path in data.glob("*_labels.nii.gz"))
    every = [
        (fixed, moving) for step in range(1, len(names)) for fixed, moving in zip(names, names[step:], strict=False)
    ]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["fixed", "moving", "fixed_seg", "moving_seg"])
        for fixed, moving in every[:PAIRS]:
            files = [data / f"{name}{end}.nii.gz" for end in ("", "_labels") for name in (fixed, moving)]
            writer.writerow([path.absolute() for path in files])


def timing(data: Path, work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    table = work / "pairs.csv"
    hippocampus_pairs(data, table)
    measured: dict[str, Any] = {}
    for name, (workers, threads) in WAYS.items():
        out = work / name.replace(" ", "-").replace(",", "")
        shutil.rmtree(out, ignore_errors=True)
        start = time.monotonic()
        process = carl(
            "cohort", table, "-o", out, "--workers", workers, "--device", "cpu", threads=threads, cores=CORES
        )
        seconds = seconds_of(process, start)
        dice = [float(row["dice_after"]) for row in rows(out)]
        measured[name] = {
            "workers": workers,
            "threads": threads,
            "seconds": seconds,
            "pairs_per_minute": round(60 * len(dice) / seconds, 2),
            "dice_after": round(sum(dice) / len(dice), 4),
        }
    one, both, two = (one["seconds"] for one in measured.values())
    ratios = {
        "two_workers_against_one_thread": round(one / two, 3),
        "two_workers_against_two_threads": round(both / two, 3),
    }
    keep("timing", {"pairs": PAIRS, "ways": measured, **ratios})


def kills(work: Path) -> None:
    folder, model = tiny(work, IMAGES)
    words = ("cohort", folder, "--all-pairs", "--model", model, "--io-iterations", 2, "--workers", 2, "--device", "cpu")
    whole, out = work / "whole", work / "killed"
    for path in (whole, out):
        shutil.rmtree(path, ignore_errors=True)
    start = time.monotonic()
    unbroken = seconds_of(carl(*words, "-o", whole, threads=2), start)
    rng, total = random.Random(SEED), IMAGES * (IMAGES - 1)
    history: list[dict[str, Any]] = []
    made: dict[Path, int] = {}
    twice = 0
    while True:
        process = carl(*words, "-o", out, threads=2)
        if len(history) < KILLS:
            _wait_for(out, len(made) + rng.randint(1, 2 * (total - len(made)) // (KILLS + 1 - len(history))), process)
            time.sleep(rng.random())
            process.send_signal(signal.SIGKILL)
        code = process.wait()
        now = {path: path.stat().st_mtime_ns for path in out.glob("*/report.json")}
        twice += sum(now.get(path) != time_made for path, time_made in made.items())
        whole_files = len(rows(out)) == len(shown(out)) == total
        listed = sum(row["status"] in ("done", "was done") for row in rows(out))
        history.append({"exit_code": code, "finished": len(now), "in_summary": listed, "summary_whole": whole_files})
        made = now
        if code >= 0:
            break
    journal = [json.loads(line) for line in (out / ".rows/1-of-1/rows.jsonl").read_text().splitlines()]
    registered = [row["name"] for row in journal if row["status"] == "done"]
    keep(
        "kills",
        {
            "seed": SEED,
            "pairs": total,
            "kills": sum(one["exit_code"] == -signal.SIGKILL for one in history),
            "seconds_unbroken": unbroken,
            "registered_twice": twice + len(registered) - len(set(registered)),
            "finished": len(made),
            "summary_and_gallery_always_whole": all(one["summary_whole"] for one in history),
            "same_bits": bits(out) == bits(whole),
            "files_compared": len(bits(whole)),
            "left_behind": sorted(str(path.relative_to(out)) for path in out.rglob("*.carl-tmp")),
            "runs": history,
        },
    )


def _wait_for(out: Path, count: int, process: Any) -> None:
    while len(list(out.glob("*/report.json"))) < count and process.poll() is None:
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("kills", "timing"):
        part = parts.add_parser(name)
        if name == "timing":
            part.add_argument("data", type=Path)
        part.add_argument("work", type=Path)
    given = parser.parse_args()
    if given.part == "kills":
        kills(given.work)
    else:
        timing(given.data, given.work)


if __name__ == "__main__":
    main()
