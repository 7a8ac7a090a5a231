"""Work captured as CUDA graphs, and kept for further inputs of the same shapes.

To capture a step of an optimisation takes as long as tens of its replays, and depends on shapes and settings alone. So
pairs of a list share what was captured for the first of them: it reads and writes tensors that stay where they are, and
each pair fills them anew.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

MOST = 8
"""Captured works that are kept: the levels of one optimisation and the network, and some for pairs of other shapes."""


class Work(Protocol):
    """A computation on tensors of its own, always the same ones, that does not wait for the GPU."""

    def run(self) -> None: ...


W = TypeVar("W", bound=Work)
Capture = Callable[[Callable[[], None]], Callable[[], Any]]
"""From a computation to a function that repeats it."""


class Graphs:
    """Captured works by key, on one GPU. The least recently used ones are released first.

    The graphs share one pool of memory, so they must not run side by side: one caller at a time borrows from here, and
    a second thread gets a work of its own. A copy, or what a pickle makes of it, is empty.

    >>> with graphs.lend(("descent", shape), lambda: Descent(shape)) as (descent, repeat):
    ...     descent.begin(fields)
    ...     repeat()
    """

    def __init__(self, most: int = MOST, capture: Callable[[], Capture] | None = None) -> None:
        self._most, self._new_capture = most, capture or _Stream
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, tuple[Any, Callable[[], Any]]] = OrderedDict()
        self._known: set[Hashable] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return Graphs, (self._most,)

    def __len__(self) -> int:
        return len(self._held)

    @functools.cached_property
    def _capture(self) -> Capture:
        return self._new_capture()

    def is_repeated(self, key: Hashable) -> bool:
        """Whether this was asked before: what runs only once is not worth a capture."""
        known = key in self._known
        self._known.add(key)
        return known

    @contextmanager
    def lend(self, key: Hashable | None, make: Callable[[], W]) -> Iterator[tuple[W, Callable[[], Any]]]:
        """The work of a key and a function that repeats it, made and captured if there is none yet.

        Without a key, or while another thread has borrowed one, the work is not kept.
        """
        if key is None or not self._lock.acquire(blocking=False):
            work = make()
            yield work, self._new_capture()(work.run)
            return
        try:
            yield self._find(key, make)
        finally:
            self._lock.release()

    def release(self) -> bool:
        """Release the memory of all that is kept; whether there was anything."""
        held = bool(self._held)
        self._held.clear()
        self.__dict__.pop("_capture", None)
        if held and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return held

    def _find(self, key: Hashable, make: Callable[[], W]) -> tuple[W, Callable[[], Any]]:
        if key not in self._held:
            while len(self._held) >= self._most:
                self._held.popitem(last=False)
            work = make()
            self._held[key] = work, self._capture(work.run)
        self._held.move_to_end(key)
        return self._held[key]


class _Stream:
    """Captures on one stream, into one pool of memory. cuBLAS keeps a workspace for every stream."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], Any]:
        stream, current = self._stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()  # kernels are chosen and compiled here
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # not `torch.cuda.graph`, which collects Python's garbage first
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay
