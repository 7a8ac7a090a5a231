"""Cohorts on a Ray cluster of several nodes on one machine: nodes and drivers that die, memory, and what it costs.

    python experiments/cohort/cluster.py WORK deaths      # a node is killed, then the driver; minutes
    python experiments/cohort/cluster.py WORK memory      # 1000 tiny pairs; a quarter of an hour on two cores
    python experiments/cohort/cluster.py WORK costs       # scheduler, journal, summary and file checks; minutes

Every node is a raylet of its own, as on a machine of its own; they share this machine's two cores, so that only tasks
that wait can show how the engine scales. Each writes its part of results.json.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import os
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import HERE, SOURCE, bits, keep, rows, tiny  # type: ignore[import-not-found]
from waiting import Wait  # type: ignore[import-not-found]

from carlreg.cohort.api import register_many
from carlreg.cohort.engine import run
from carlreg.cohort.folder import Board
from carlreg.cohort.rows import Row
from carlreg.cohort.work import Answer, Workers
from carlreg.files.tables import Pair

PAIRS = 1000
QUICK: dict[str, Any] = {"io_iterations": 0, "device": "cpu"}
TASKS, SECONDS = 25, 0.5
"""Tasks of each worker, and how long each of them waits, to measure how the engine scales."""


@contextmanager
def cluster(nodes: int, cores: int) -> Iterator[Any]:
    """A head without cores, and so many nodes with so many (logical) cores each."""
    os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, str(HERE)])  # of the workers
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (start no more processes than are needed)
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.workers = [made.add_node(num_cpus=cores) for _ in range(nodes)]
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def deaths(work: Path) -> None:
    folder, model = tiny(work, 7)
    common: dict[str, Any] = {"all_pairs": True, "model": model, **QUICK}
    whole, out, resumed = work / "here", work / "node", work / "driver"
    for path in (whole, out, resumed):
        shutil.rmtree(path, ignore_errors=True)
    register_many(folder, whole, cpus_per_worker=1, **common)
    with cluster(nodes=3, cores=1) as made:
        killed_after: list[int] = []

        def kill(_: Row, tally: Any) -> None:
            if tally.finished == 12:
                made.remove_node(made.workers.pop(), allow_graceful=False)
                killed_after.append(tally.finished)

        found = register_many(folder, out, ray=made.address, progress=kill, **common)
        node = {
            "nodes": 3,
            "node_killed_after": killed_after[0],
            "done": sum(row.status == "done" for row in found),
            "tried_again": sum(row.tries > 1 for row in found),
            "same_bits": bits(out) == bits(whole),
        }
        words = [
            "cohort",
            folder,
            "--all-pairs",
            "--model",
            model,
            "--io-iterations",
            0,
            "--device",
            "cpu",
            "-o",
            resumed,
        ]
        command = [sys.executable, "-m", "carlreg", *map(str, words), "--ray", made.address]
        driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while len(list(resumed.glob("*/report.json"))) < 10 and driver.poll() is None:
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        time.sleep(5)  # Ray ends the actors of a dead driver
        first = {path: path.stat().st_mtime_ns for path in resumed.glob("*/report.json")}
        code = subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode
        second = {path: path.stat().st_mtime_ns for path in resumed.glob("*/report.json")}
    keep(
        "ray_deaths",
        {
            "pairs": len(found),
            "node": node,
            "driver": {
                "finished_when_killed": len(first),
                "exit_code": code,
                "finished": len(second),
                "registered_twice": sum(second.get(path) != made_at for path, made_at in first.items()),
                "rows": len(rows(resumed)),
                "same_bits": bits(resumed) == bits(whole),
            },
        },
    )


def memory(work: Path) -> None:
    folder, model = tiny(work, 33, side=16)
    images = sorted(folder.iterdir())
    table, out = work / "thousand.csv", work / "thousand"
    shutil.rmtree(out, ignore_errors=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["fixed", "moving"], *itertools.islice(itertools.permutations(images, 2), PAIRS)])
    seen: list[dict[str, float]] = []

    def look(_: Row, tally: Any) -> None:
        if tally.finished % 100 == 0:
            seen.append({"pairs": tally.finished, "driver_mb": _resident(os.getpid()), "worker_mb": _workers_mb()})

    start = time.monotonic()
    with cluster(nodes=2, cores=1) as made:
        found = register_many(
            table, out, model=model, ray=made.address, keep="transform", transform="affine", progress=look, **QUICK
        )
    keep(
        "ray_memory",
        {
            "pairs": len(found),
            "done": sum(row.status == "done" for row in found),
            "seconds": round(time.monotonic() - start),
            "resident": seen,
            "bytes_per_pair": round(statistics.mean(_bytes(out / row.name) for row in found[:50])),
        },
    )


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def _workers_mb() -> float:
    """The most memory that an actor's process holds."""
    held = [0.0]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::_Actor" in path.read_bytes():
                held.append(_resident(int(path.parent.name)))
        except OSError:
            continue
    return max(held)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def costs(work: Path) -> None:
    pair = Pair(
        "subject-0001_to_template", Path("/data/study/template.nii.gz"), Path("/data/study/subject-0001.nii.gz")
    )
    pairs = [pair] * 1000
    scaling = []
    with cluster(nodes=2, cores=4) as made:
        nothing = _seconds(Wait(0.0), pairs, Workers(ray=made.address, count=2))
        for count in (1, 2, 4, 8):
            tasks = pairs[: TASKS * count]
            seconds = _seconds(Wait(SECONDS), tasks, Workers(ray=made.address, count=count))
            rate = (len(tasks) - count) / seconds  # the clock starts when the first task of every worker is done
            scaling.append(
                {"workers": count, "tasks_per_s": round(rate, 2), "of_ideal": round(rate * SECONDS / count, 3)}
            )
    here = _seconds(Wait(0.0), pairs, Workers(count=2))
    row = Wait(0.0).wait(pair)
    keep(
        "costs",
        {
            "ray_ms_per_task": round(1000 * nothing / len(pairs), 3),
            "processes_ms_per_task": round(1000 * here / len(pairs), 3),
            "task_bytes": len(pickle.dumps(pair)),
            "answer_bytes": len(pickle.dumps(Answer(row))),
            "wait_seconds": SECONDS,
            "scaling": scaling,
            **_folder_costs(work),
        },
    )


def _seconds(work: Wait, tasks: list[Pair], workers: Workers) -> float:
    """The seconds from the first answer to the last: without the start of the workers."""
    stream = run(work, tasks, workers)
    next(stream)
    start = time.monotonic()
    for outcome in stream:
        assert outcome.failure is None
    return time.monotonic() - start


def _folder_costs(work: Path, count: int = 100_000) -> dict[str, float]:
    """What the driver does for each of 10⁵ pairs: a line of the journal; and for all: the summary and the gallery."""
    from carlreg.cohort.gallery import gallery
    from carlreg.cohort.rows import summary

    folder = work / "board"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "1").mkdir(parents=True)
    made = [
        Row(f"subject-{n:06}_to_template", "done", "good", metrics={f"metric_{k}": n / (k + 7) for k in range(8)},
            seconds=1.0, page=f"subject-{n:06}_to_template/report.html")
        for n in range(count)
    ]  # fmt: skip
    board = Board(folder, [], folder / "1" / "rows.jsonl")
    start = time.monotonic()
    for row in made[:500]:
        board.add(row)
    line = (time.monotonic() - start) / 500
    board.close()
    start = time.monotonic()
    sizes = len(summary(made)), len(gallery(made).encode())
    both = time.monotonic() - start
    return {
        "journal_ms_per_pair": round(1000 * line, 3),
        "rows": count,
        "summary_and_gallery_s": round(both, 2),
        "summary_mb": round(sizes[0] / 1e6, 1),
        "gallery_mb": round(sizes[1] / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("part", choices=("deaths", "memory", "costs"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    {"deaths": deaths, "memory": memory, "costs": costs}[given.part](given.work)


if __name__ == "__main__":
    main()
