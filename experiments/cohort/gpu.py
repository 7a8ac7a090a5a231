"""A cohort on one GPU: pairs per minute with one and more workers, and how busy the GPU is.

    python experiments/cohort/gpu.py ../shared/data/brain/val WORK --workers 1 2 4

Registers all 56 ordered pairs of the eight validation brains, once for each number of workers. The GPU's use is what
nvidia-smi reports every 100 ms between the first and the last result: the share of the time in which a kernel runs.
The seconds of each part of a registration, from the reports, show what the rest is spent on. Writes the part `gpu` of
results.json; with --out, also to that file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, carl, keep, rows, seconds_of  # type: ignore[import-not-found]

EVERY = 100
"""Milliseconds between two looks at the GPU."""


class Watch:
    """Looks at the GPU in the background: (time, percent) pairs."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={EVERY}"]
        self._process = subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.seen.append((time.time(), float(line)))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def measure(data: Path, out: Path, workers: int) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    watch, start = Watch(), time.monotonic()
    seconds = seconds_of(carl("cohort", data, "--all-pairs", "-o", out, "--workers", workers), start)
    watch.stop()
    table = rows(out)
    ends = sorted(datetime.fromisoformat(row["finished"]).timestamp() for row in table)
    steady = ends[-1] - ends[0]
    busy = [percent for at, percent in watch.seen if ends[0] <= at <= ends[-1]]
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*/report.json"))]
    parts = {part for report in reports for part in report["seconds"]}
    return {
        "workers": workers,
        "pairs": len(table),
        "seconds_in_all": seconds,
        "pairs_per_minute": round(60 * (len(ends) - 1) / steady, 1),
        "gpu_busy_percent": round(statistics.mean(busy), 1) if busy else None,
        "dice_after": round(statistics.mean(float(row["dice_after"]) for row in table), 4),
        "mb_read": round(statistics.mean(_megabytes(report) for report in reports), 2),
        "mb_written": round(sum(path.stat().st_size for path in out.glob("*/*")) / len(table) / 1e6, 2),
        "seconds": {
            part: round(statistics.mean(report["seconds"].get(part, 0.0) for report in reports), 3)
            for part in sorted(parts)
        },
    }


def _megabytes(report: dict[str, Any]) -> float:
    """The size of a pair's input files."""
    return sum(Path(one["path"]).stat().st_size for one in report["inputs"].values()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, help="copy results.json there")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    runs = []
    for workers in given.workers:
        runs.append(measure(given.data, given.work / f"workers-{workers}", workers))
        keep("gpu", {"runs": runs}, gpu=torch.cuda.get_device_name())
        if given.out is not None:
            shutil.copy(RESULTS, given.out)


if __name__ == "__main__":
    main()
