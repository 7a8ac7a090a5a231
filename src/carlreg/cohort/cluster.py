"""Workers on a Ray cluster: actors, each of which holds what its tasks need, such as a model on its share of a GPU.

Ray places the actors, ships pickles and notices nodes that die. Here, a dead actor is replaced by a new one, which Ray
starts as soon as there is room for it, and its task is given to another one. Tasks and results are small: images are
read from, and results written to, a file system that all nodes share.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

from carlreg.cohort.threads import set_threads
from carlreg.cohort.work import Answer, Failure, Slot, Work, WorkerError, Workers, answer
from carlreg.errors import DependencyError

INSTALL = "Ray is not installed; install it on every node: pip install 'carlreg[cluster]'"
DEATHS = 4
"""How often a task is tried whose node dies: one task cannot be to blame for several nodes, but a cluster of
preemptible nodes loses many."""
LOST = 60.0
"""Seconds without any worker, after which the user is warned."""
PATIENCE = 5.0
"""Seconds for the head of a cluster to accept a connection."""

log = logging.getLogger(__name__)


class RayPool:
    """A pool of actors."""

    deaths = DEATHS

    def __init__(self, work: Work[Any, Any], workers: Workers) -> None:
        ray = _connected(workers.ray or "auto")
        self._ray = ray
        resources = ray.cluster_resources()
        gpus = (1.0 if resources.get("GPU") else 0.0) if workers.gpus_per_worker is None else workers.gpus_per_worker
        count = workers.count or _fitting(resources, workers.cpus_per_worker, gpus)
        kind: Any = ray.remote(num_cpus=workers.cpus_per_worker, num_gpus=gpus, max_restarts=0)(_Actor)
        level = logging.getLogger("carlreg").getEffectiveLevel()
        opening = ray.put((work, workers.cpus_per_worker, level))  # once per node, not once per actor
        self._start: Callable[[], Any] = functools.partial(kind.remote, opening)
        self._free: list[Any] = []
        self._opening: dict[Any, Any] = {}  # by the reference that is ready when an actor is
        self._running: dict[Any, tuple[int, Any]] = {}  # by the reference of the answer
        self._unopened = 0
        for _ in range(count):
            self._add()
        self._await_first()

    def _add(self) -> None:
        actor = self._start()
        self._opening[actor.opened.remote()] = actor

    def _await_first(self) -> None:
        """Wait for a worker, so that an error that all would have is raised before anything is done."""
        while not self._free:
            if self._step() is None:
                needs = "each needs its share of the cluster's cores and GPUs, and `ray status` shows what is free"
                log.warning("no worker could be started for %.0f s: %s", LOST, needs)

    def free(self) -> bool:
        return bool(self._free)

    def submit(self, number: int, task: Any) -> None:
        actor = self._free.pop()
        self._running[actor.call.remote(task)] = number, actor

    def wait(self) -> Iterable[tuple[int, Answer]]:
        answers = self._step()
        if answers is None and not self._free and not self._running:
            log.warning("no worker is alive: waiting for nodes to join the cluster")
        return answers or []

    def _step(self) -> list[tuple[int, Answer]] | None:
        """Wait until an actor is ready or has answered; None if nothing happens for a while."""
        done, _ = self._ray.wait([*self._opening, *self._running], timeout=LOST)
        answers = []
        for reference in done:
            if reference in self._opening:
                self._opened(reference, self._opening.pop(reference))
                continue
            number, actor = self._running.pop(reference)
            try:
                answers.append((number, self._ray.get(reference)))
                self._free.append(actor)
            except self._ray.exceptions.RayError as error:
                reason = _reason(error)
                answers.append((number, Answer(failure=Failure(f"its worker died ({reason})", died=True))))
                self._add()
        return answers if done else None

    def _opened(self, reference: Any, actor: Any) -> None:
        """Use an actor that is ready. Raise what opening the work has raised; replace an actor that died."""
        try:
            error = self._ray.get(reference)
        except self._ray.exceptions.RayError as died:
            self._unopened += 1
            if self._unopened > 2 * DEATHS:
                raise WorkerError(f"workers die as soon as they start ({_reason(died)}); see Ray's logs") from died
            return self._add()
        if error is not None:
            raise error
        self._unopened = 0
        self._free.append(actor)

    def close(self) -> None:
        actors = [*self._free, *self._opening.values(), *(actor for _, actor in self._running.values())]
        for actor in actors:
            self._ray.kill(actor)


def _connected(address: str) -> Any:
    """Ray, connected to a cluster, or to the one that this process has connected to before."""
    if address != "local":  # otherwise a cluster that is gone, whose address is remembered, is tried for 14 minutes
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")
    try:
        import ray
    except ImportError as error:
        raise DependencyError(INSTALL) from error
    if ray.is_initialized():
        return ray
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options["include_dashboard"] = False
    try:
        _knock(address)
        ray.init(address=address, **options)
    except Exception as error:  # ConnectionError, ValueError, RuntimeError: it depends on what does not answer
        start = "start one with `ray start --head`" if address == "auto" else "check the address and `ray status`"
        reason = " ".join(str(error).split())[:200]
        raise WorkerError(f"no Ray cluster answers at {address!r} ({reason}); {start}, or use --ray local") from error
    return ray


def _knock(address: str) -> None:
    """Raise OSError at once if nothing listens at host:port, which Ray finds out in minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


def _reason(error: Exception) -> str:
    """Ray's account of a death in one line: the error that was raised is at its end, everything else at its start."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "Traceback" in str(error) or "creation task" in lines[0] else lines[0]


def _fitting(resources: dict[str, float], cpus: int, gpus: float) -> int:
    """How many workers fit on a cluster, at least one."""
    by_gpus = resources.get("GPU", 0) / gpus if gpus else float("inf")
    return max(1, int(min(resources.get("CPU", 0) / cpus, by_gpus)))


class _Actor:
    """A worker: the main class of an actor's process."""

    def __init__(self, opening: tuple[Work[Any, Any], int, int]) -> None:
        work, threads, level = opening
        logging.getLogger("carlreg").setLevel(level)
        set_threads(threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        self._error: Exception | None = None
        try:
            self._call = work.open(Slot())
        except Exception as error:
            self._error = error

    def opened(self) -> Exception | None:
        """The error of opening the work, if there was one."""
        return self._error

    def call(self, task: Any) -> Answer:
        return answer(self._call, task)
