"""CPU threads of this process and of those that it starts. Imports neither torch nor SimpleITK."""

from __future__ import annotations

import os
import sys

COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS")


def available_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_in_all() -> int:
    """The threads that this process may use: as many as were set, or one for each core."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdecimal() and int(stated) else available_cores()


def set_threads(count: int) -> None:
    """Limit torch and SimpleITK, in this process and in those that it starts."""
    os.environ.update(dict.fromkeys(COUNTS, str(count)))
    if (torch := sys.modules.get("torch")) is not None:  # too late for the environment
        torch.set_num_threads(count)
    if (itk := sys.modules.get("SimpleITK")) is not None:
        itk.ProcessObject.SetGlobalDefaultNumberOfThreads(count)
