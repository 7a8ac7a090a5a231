"""Run the attacks and print a table: `make torture`, or `make torture FULL=1` for every case.

    python tests/torture/run.py --seconds 1200
    python tests/torture/run.py --full --state torture.json
    python tests/torture/run.py --collect torture.json

Without --full, each family gets an equal share of the time and cases spread over its whole range. A full run writes
its state after every few cases and continues from there. The exit code is 1 if any promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "experiments")]

from made import commit, machine  # noqa: E402

from torture import faults, fuzz, geometry, viewer  # noqa: E402
from torture.families import Family  # noqa: E402
from torture.workers import run_isolated  # noqa: E402

RESULTS = HERE.parent.parent / "experiments" / "torture" / "results.json"
STRIDE = 7919
"""A prime: the n-th case of a sample is n · STRIDE modulo the count, so that a sample covers the whole range."""


def outcomes(family: Family, cases: Iterable[int]) -> Iterator[tuple[int, str | None]]:
    if family.isolated:
        yield from run_isolated(family, cases)
    else:
        for case in cases:
            try:
                yield case, family.run(case)
            except Exception as error:
                yield case, f"{type(error).__name__}: {error}"


def attack(family: Family, done: dict[str, Any], seconds: float | None, most: int | None = None) -> None:
    """Run the cases that are left, for so long at most; `done` is brought up to date."""
    start, begun = time.monotonic(), done["cases"]
    total = family.count if most is None else min(most, family.count)
    step = STRIDE if family.count % STRIDE else 1

    def left() -> Iterator[int]:
        for n in range(begun, total):
            if seconds is not None and time.monotonic() - start > seconds:
                return
            yield n * step % family.count

    for case, failure in outcomes(family, left()):
        done["cases"] += 1
        if failure is not None:
            done["failures"].append([case, failure])
            print(f"{family.name}, case {case}: {failure}", flush=True)
    done["seconds"] = round(done["seconds"] + time.monotonic() - start, 1)


def families() -> list[Family]:
    return [*geometry.families(), *viewer.families(), *faults.families(), *fuzz.families()]


def show(state: dict[str, Any]) -> None:
    width = max(len(name) for name in state)
    print(f"\n{'':{width}}   cases      of  failures  seconds")
    for name, done in state.items():
        print(f"{name:{width}} {done['cases']:7} {done['of']:7} {len(done['failures']):9} {done['seconds']:8.0f}")


def preload() -> None:
    """Start this program again with the library that makes writes fail."""
    if "TORTURE_SHIM" in os.environ:
        return
    shim = faults.build_shim(Path(tempfile.mkdtemp(prefix="torture-shim.")))
    environment = os.environ | {"TORTURE_SHIM": str(shim), "OMP_NUM_THREADS": "1"}
    if shim is not None:
        environment["LD_PRELOAD"] = str(shim)
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200, help="for a sample, in all")
    parser.add_argument("--cases", type=int, help="of each family, at most; ten times as many of fuzzed files")
    parser.add_argument("--full", action="store_true", help="every case of every family")
    parser.add_argument("--only", default="", help="families whose name matches this regular expression")
    parser.add_argument("--state", type=Path, default=Path("torture-state.json"), help="where a full run stands")
    parser.add_argument("--collect", type=Path, nargs="+", help="state files of full runs, to be written to --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON file of --collect")
    arguments = parser.parse_args()
    if arguments.collect:
        collect(arguments.collect, arguments.out)
        return
    preload()
    with tempfile.TemporaryDirectory(prefix="torture.") as folder:
        os.environ["TORTURE_TMP"] = folder
        chosen = [family for family in families() if re.search(arguments.only, family.name)]
        state: dict[str, Any] = {}
        if arguments.full and arguments.state.exists():
            state = json.loads(arguments.state.read_text())
        for family in chosen:
            empty = {"of": family.count, "cases": 0, "failures": [], "seconds": 0.0, "commits": []}
            done = state.setdefault(family.name, empty)
            if done["cases"] < family.count and commit() not in done["commits"]:
                done["commits"].append(commit())
            if not arguments.full:
                most = None if arguments.cases is None else arguments.cases * (10 if family.isolated else 1)
                attack(family, done, arguments.seconds / len(chosen), most)
            while arguments.full and done["cases"] < family.count:
                attack(family, done, 30)
                arguments.state.write_text(json.dumps(state))
    show(state)
    sys.exit(any(done["failures"] for done in state.values()))


def collect(paths: list[Path], out: Path) -> None:
    """Write the rows of several full runs, of different families, to one file."""
    rows = {name: row for path in paths for name, row in json.loads(path.read_text()).items()}
    missing = [name for name, row in rows.items() if row["cases"] < row["of"]]
    if missing:
        sys.exit(f"unfinished: {', '.join(missing)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
