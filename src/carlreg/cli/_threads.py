"""How many CPU threads a command may use, and how idle ones wait. Must run before torch is loaded."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS")


def respect_machine() -> None:
    """Let idle OpenMP threads sleep, since spinning ones take the cores of other processes, and use no more threads
    than SLURM allots to the task. Settings of the user's own stay. OpenMP itself respects the CPU affinity."""
    if not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"
    allotted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if allotted.isdigit() and "OMP_NUM_THREADS" not in os.environ:
        set_threads(max(1, min(int(allotted), available_cores())))


def available_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(count: int | None) -> int | None:
    """Limit torch and SimpleITK, in this process and in those that it starts; None changes nothing."""
    if count is not None:
        os.environ.update(dict.fromkeys(COUNTS, str(count)))
        if (torch := sys.modules.get("torch")) is not None:  # too late for the environment
            torch.set_num_threads(count)
        if (itk := sys.modules.get("SimpleITK")) is not None:
            itk.ProcessObject.SetGlobalDefaultNumberOfThreads(count)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=set_threads,
        show_default=False,
        help="CPU threads. By default one for each core that the process may use, or as SLURM_CPUS_PER_TASK says.",
    ),
]
