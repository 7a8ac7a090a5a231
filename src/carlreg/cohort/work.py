"""What workers do, what they answer, and how many there are. Imports neither torch nor Ray."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from carlreg.errors import CarlError, ExistsError, InputError, user_message

T = TypeVar("T")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
TRIES = 2
"""How often a task is tried that raises, or that its worker does not survive."""


class WorkerError(CarlError, RuntimeError):
    """Workers that cannot be started, or not kept alive."""


@dataclass(frozen=True)
class Slot:
    """The place of a worker among those of one machine."""

    number: int = 0
    count: int = 1


class Work(Protocol[T_contra, R_co]):
    """What workers do. Values of this type are pickled, as are tasks and results."""

    def open(self, slot: Slot) -> Callable[[T_contra], R_co]:
        """Load what all tasks need. The function that is returned works on one task; it may raise."""


@dataclass(frozen=True)
class Stages:
    """Work in three parts, for `Work.open` to return: while one task is computed, the next one is read and the last one
    is written, in threads of their own."""

    read: Callable[[Any], Any]
    compute: Callable[[Any], Any]
    """From what was read. Always in the thread that runs the work."""
    write: Callable[[Any], Any]
    """From what was computed to the result."""

    def __call__(self, task: Any) -> Any:
        return self.write(self.compute(self.read(task)))


@dataclass(frozen=True)
class Failure:
    """Why a task failed."""

    message: str
    trace: str = ""
    """The traceback of a bug; empty for an error that a user can act on."""
    final: bool = False
    """Whether another attempt would fail as well."""
    died: bool = False
    """Whether the worker died."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = user_message(error)
        trace = "" if text else "".join(traceback.format_exception(error))
        return cls(text or f"{type(error).__name__}: {error}", trace, isinstance(error, (InputError, ExistsError)))


@dataclass(frozen=True)
class Answer:
    """What a worker made of a task."""

    result: Any = None
    failure: Failure | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """What became of a task: a result or a failure."""

    task: T
    result: R | None
    failure: Failure | None
    seconds: float
    """The time of the last attempt."""
    tries: int


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How many workers, and where."""

    count: int | None = None
    """Processes on this machine; 1 is this process itself. On a cluster, by default as many as fit."""
    ray: str | None = None
    """The address of a Ray cluster; "auto" is the one that runs on this machine, "local" a new one on it."""
    gpus_per_worker: float | None = None
    """GPUs of a worker on a cluster, such as 0.5; by default one if the cluster has any."""
    cpus_per_worker: int = 1
    """CPU cores of a worker on a cluster."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise InputError(f"{self.count} workers were asked for; expected 1 or more")
        if self.cpus_per_worker < 1:
            raise InputError(f"cpus_per_worker is {self.cpus_per_worker}; expected 1 or more")
        if self.gpus_per_worker is not None and not 0 <= self.gpus_per_worker < float("inf"):
            raise InputError(f"gpus_per_worker is {self.gpus_per_worker}; expected 0 or more, such as 0.5")


class Pool(Protocol):
    """Workers that have opened a work."""

    deaths: int
    """How often a task is tried whose worker dies."""

    def free(self) -> bool:
        """Whether a worker waits for a task."""

    def submit(self, number: int, task: Any) -> None:
        """Give a task to a worker that waits."""

    def wait(self) -> Iterable[tuple[int, Answer]]:
        """Wait until something happens; return the answers that have come, by the number of the task."""

    def close(self) -> None:
        """Stop all workers."""


def answer(call: Callable[[Any], Any], task: Any) -> Answer:
    """Call a function; an exception becomes a failure."""
    start = time.perf_counter()
    try:
        result, failure = call(task), None
    except Exception as error:
        result, failure = None, Failure.of(error)
    return Answer(result, failure, time.perf_counter() - start)


def continued(before: Answer, call: Callable[[Any], Any]) -> Answer:
    """Call a function with a result, unless there is none; the seconds are those of both."""
    if before.failure is not None:
        return before
    after = answer(call, before.result)
    return replace(after, seconds=before.seconds + after.seconds)
