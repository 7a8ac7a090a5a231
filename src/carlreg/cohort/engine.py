"""Run many tasks: one after another, in several processes, or on a Ray cluster. Imports neither torch nor Ray.

A `Work` is opened once by every worker, which loads what all tasks need, such as a model, and then called with one task
after another. Failures stay with their task: it is tried once more at the end, unless its input is to blame. A worker
that dies, killed for its memory, say, is replaced, and its task is tried again.

>>> for outcome in run(RegisterPairs(...), pairs, Workers(count=2)):
...     print(outcome.task.name, outcome.result or outcome.failure.message)
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Generic

from carlreg.cohort.threads import threads_in_all
from carlreg.cohort.work import (
    TRIES,
    Answer,
    Outcome,
    Pool,
    R,
    Slot,
    Stages,
    T,
    Work,
    Workers,
    answer,
    continued,
)

WRITERS, CORES = 3, 4
"""Results that are written side by side beside a GPU, at most, and the CPU threads for which there is one of them."""


@dataclass(frozen=True)
class _Attempt(Generic[T]):
    task: T
    tries: int = 1


def run(work: Work[T, R], tasks: Iterable[T], workers: Workers | None = None) -> Generator[Outcome[T, R], None, None]:
    """Yield the outcome of every task, in the order in which they finish. Tasks are taken as workers become free.

    An error while the work is opened is raised. To stop early, close the generator: this ends all workers.
    """
    with closing(_open(work, workers or Workers())) as pool:
        yield from _distribute(tasks, pool)


def _open(work: Work[Any, Any], workers: Workers) -> Pool:
    if workers.ray is not None:
        from carlreg.cohort.cluster import RayPool

        return RayPool(work, workers)
    if workers.count is None or workers.count == 1:
        call = work.open(Slot())
        return _Overlapped(call) if isinstance(call, Stages) else _Here(call)
    from carlreg.cohort.processes import Processes

    return Processes(work, workers.count)


def _distribute(tasks: Iterable[T], pool: Pool) -> Iterator[Outcome[T, Any]]:
    new, again = iter(tasks), deque[_Attempt[T]]()
    running: dict[int, _Attempt[T]] = {}
    count = itertools.count()

    def take() -> _Attempt[T] | None:
        for task in new:
            return _Attempt(task)
        return again.popleft() if again else None

    attempt = take()
    while attempt or running:
        while attempt and pool.free():
            running[number := next(count)] = attempt
            pool.submit(number, attempt.task)
            attempt = take()
        for number, answered in pool.wait():
            tried, failure = running.pop(number), answered.failure
            if failure and not failure.final and tried.tries < (pool.deaths if failure.died else TRIES):
                again.append(replace(tried, tries=tried.tries + 1))
            else:
                yield Outcome(tried.task, answered.result, failure, answered.seconds, tried.tries)
        attempt = attempt or take()


class _Here:
    """This process as the only worker."""

    deaths = TRIES

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self._task: tuple[int, Any] | None = None

    def free(self) -> bool:
        return self._task is None

    def submit(self, number: int, task: Any) -> None:
        self._task = number, task

    def wait(self) -> Iterable[tuple[int, Answer]]:
        assert self._task is not None
        number, task = self._task
        self._task = None
        return [(number, answer(self._call, task))]

    def close(self) -> None:
        pass


class _Overlapped:
    """This process as the only worker, which reads the next task and writes the last ones while it computes.

    Answers come in the order of the tasks. One of them is read, one is computed, and as many are written as there are
    writers; no more are in memory.
    """

    deaths = TRIES

    def __init__(self, stages: Stages, writers: int | None = None) -> None:
        self._stages = stages
        self._writers = writers or max(1, min(WRITERS, threads_in_all() // CORES))
        self._reader, self._writer = ThreadPoolExecutor(1, "reader"), ThreadPoolExecutor(self._writers, "writer")
        self._reading, self._writing = deque[tuple[int, Future[Answer]]](), deque[tuple[int, Future[Answer]]]()

    def free(self) -> bool:
        return len(self._reading) < 2 and len(self._reading) + len(self._writing) < 2 + self._writers

    def submit(self, number: int, task: Any) -> None:
        self._reading.append((number, self._reader.submit(answer, self._stages.read, task)))

    def wait(self) -> Iterable[tuple[int, Answer]]:
        waiting = self._writing
        if waiting and (waiting[0][1].done() or len(waiting) > self._writers or not self._reading):
            number, written = waiting.popleft()
            return [(number, written.result())]
        number, read = self._reading.popleft()
        computed = continued(read.result(), self._stages.compute)
        waiting.append((number, self._writer.submit(continued, computed, self._stages.write)))
        return []

    def close(self) -> None:
        """Drop what was read, and finish what is written."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()
