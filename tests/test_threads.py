"""CPU threads of a command: how many, and that idle ones sleep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from carlreg.cli import main
from carlreg.cli._threads import WAITING
from carlreg.cohort.threads import COUNTS

SOURCE = str(Path(__file__).parents[1] / "src")
PROBE = """
import sys
from carlreg.cli import carl, main
from carlreg.cli._threads import Threads

@carl.command()
def probe(threads: Threads = None) -> None:
    import torch, SimpleITK
    print(torch.get_num_threads(), SimpleITK.ProcessObject.GetGlobalDefaultNumberOfThreads())

sys.exit(main(["probe", *sys.argv[1:]]))
"""


def probe(*arguments: str, cores: set[int] | None = None, **variables: str) -> tuple[list[int], str]:
    """The threads of torch and SimpleITK in a command, and what OpenMP states about its own settings."""
    plain = {k: v for k, v in os.environ.items() if k not in (*WAITING, *COUNTS, "SLURM_CPUS_PER_TASK")}
    environment = {**plain, "PYTHONPATH": SOURCE, "OMP_DISPLAY_ENV": "verbose", **variables}
    narrow = None if cores is None else lambda: os.sched_setaffinity(0, cores)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        env=environment, capture_output=True, text=True, encoding="utf-8", preexec_fn=narrow, check=True,
    )  # fmt: skip
    return [int(word) for word in done.stdout.split()], done.stderr.upper()


def test_threads_are_given_or_allotted_and_idle_ones_sleep() -> None:
    pytest.importorskip("SimpleITK")
    counts, stated = probe("--threads", "1")
    assert counts == [1, 1]
    if gnu := "OMP_WAIT_POLICY" in stated:
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in stated
        assert "GOMP_SPINCOUNT = '10000'" in stated
    counts, stated = probe(SLURM_CPUS_PER_TASK="1", GOMP_SPINCOUNT="77")
    assert counts == [1, 1]
    assert not gnu or "GOMP_SPINCOUNT = '77'" in stated  # the user's own setting


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")
def test_threads_stay_on_the_cores_of_the_process() -> None:
    pytest.importorskip("SimpleITK")
    one = {min(os.sched_getaffinity(0))}
    assert probe(cores=one, SLURM_CPUS_PER_TASK="8")[0] == [1, 1]


def test_no_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("register", "evaluate", "train"):
        assert main([command, "--threads", "0"]) == 2
        assert "--threads" in capsys.readouterr().err
