"""Worker processes under limits: a case that crashes, hangs or takes too much memory ends its worker, not the run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from torture.families import Family

SECONDS = 10.0
"""A case that takes longer hangs."""
MEMORY = 2**30
"""Bytes that a case may take beyond what its worker held before."""


def run_isolated(family: Family, cases: Iterable[int]) -> Iterator[tuple[int, str | None]]:
    """Each case and its failure, from a worker that is replaced when it dies or hangs."""
    context = multiprocessing.get_context("fork")
    todo, worker, pipe = iter(cases), None, None
    for case in todo:
        if worker is None or not worker.is_alive():
            pipe, other = context.Pipe()
            worker = context.Process(target=_serve, args=(family, other), daemon=True)
            worker.start()
            other.close()
        assert pipe is not None
        pipe.send(case)
        try:
            if pipe.poll(SECONDS):
                yield case, pipe.recv()
                continue
            failure = f"took longer than {SECONDS:.0f} s"
            os.kill(worker.pid or 0, signal.SIGKILL)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            failure = ""
        worker.join()
        code = worker.exitcode or 0
        worker = None
        yield case, failure or f"the process died with {signal.Signals(-code).name if code < 0 else code}"
    if worker is not None and pipe is not None:
        pipe.send(None)  # closing it would not do: the worker holds a copy of this end, too
        worker.join(2)
        worker.kill()


def _serve(family: Family, pipe: Connection[Any, Any]) -> None:
    """Run the cases that come through the pipe, under a limit of memory."""
    os.environ["TORTURE_WORKER"] = "1"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY + 2**29, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        case = pipe.recv()
        if case is None:
            return
        pipe.send(family.run(case))
