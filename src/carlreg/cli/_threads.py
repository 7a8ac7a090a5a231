"""How many CPU threads a command may use, and how idle ones wait. Must run before torch is loaded."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from carlreg.cohort.threads import available_cores, set_threads

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = 10_000
"""How often GNU's idle threads look for work before they sleep: some ten microseconds. Steps of the optimisation are so
short that waking a thread each time takes longer than its work."""


def respect_machine() -> None:
    """Let idle OpenMP threads sleep after a moment, since spinning ones take the cores of other processes, and use no
    more threads than SLURM allots to the task. Settings of the user's own stay. OpenMP itself respects the CPU
    affinity."""
    if not any(name in os.environ for name in WAITING):
        os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": str(SPINS)}
    allotted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if allotted.isdigit() and "OMP_NUM_THREADS" not in os.environ:
        set_threads(max(1, min(int(allotted), available_cores())))


def _limit(count: int | None) -> int | None:
    if count is not None:
        set_threads(count)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        callback=_limit,
        show_default=False,
        help="CPU threads. By default one for each core that the process may use, or as SLURM_CPUS_PER_TASK says.",
    ),
]
