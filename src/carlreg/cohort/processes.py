"""Workers in processes of this machine.

Each is a new interpreter: nothing of the parent's threads, memory or GPU context is inherited, and scripts need no main
guard. Tasks go to its standard input and answers come from its standard output, as pickles. A worker whose parent
dies ends at once.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO

from carlreg.cohort.threads import COUNTS, threads_in_all
from carlreg.cohort.work import TRIES, Answer, Failure, Slot, Work, WorkerError, answer

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from carlreg.cohort.processes import serve; serve()"
PATIENCE = 10
"""Seconds that a worker has to clean up when it is stopped."""


class Processes:
    """A pool of processes, which share the threads of this one."""

    deaths = TRIES

    def __init__(self, work: Work[Any, Any], count: int) -> None:
        threads = max(1, threads_in_all() // count)
        self._workers = [_Process(work, Slot(number, count), threads) for number in range(count)]
        self._free = list(reversed(self._workers))
        self._threads = concurrent.futures.ThreadPoolExecutor(count)
        self._running: dict[concurrent.futures.Future[Answer], tuple[int, _Process]] = {}

    def free(self) -> bool:
        return bool(self._free)

    def submit(self, number: int, task: Any) -> None:
        worker = self._free.pop()
        self._running[self._threads.submit(worker.call, task)] = number, worker

    def wait(self) -> Iterable[tuple[int, Answer]]:
        done, _ = concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            number, worker = self._running.pop(future)
            self._free.append(worker)
            yield number, future.result()

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.wait()
        self._threads.shutdown(cancel_futures=True)


class _Process:
    """A worker: started with its first task, and again if it has died."""

    def __init__(self, work: Work[Any, Any], slot: Slot, threads: int) -> None:
        self._opening = work, slot, logging.getLogger("carlreg").getEffectiveLevel()
        self._environment = {**os.environ, **dict.fromkeys(COUNTS, str(threads))}
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def call(self, task: Any) -> Answer:
        try:
            if self._process is None:
                self._start()
            return self._send(task)
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            return Answer(failure=Failure(f"its worker died ({self._fate()})", died=True))

    def _start(self) -> None:
        search = json.dumps([os.path.abspath(folder) for folder in sys.path if folder])
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._lock:
            if self._stopped:
                raise EOFError
            self._process = subprocess.Popen([sys.executable, "-c", START, search], env=self._environment, **pipes)
        try:
            problem = self._send(self._opening)
        except (EOFError, ConnectionError) as error:
            raise WorkerError(f"a worker died while it was started ({self._fate()}); try fewer workers") from error
        if problem is not None:
            self._fate()
            raise problem

    def _send(self, value: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(pickle.dumps(value))
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def _fate(self) -> str:
        """Wait for the end of a worker that does not answer; return how it ended."""
        assert self._process is not None
        for end in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if end is not None:
                    end.close()
        code = self._process.wait()
        self._process = None
        if code >= 0:
            return f"exit code {code}"
        memory = ", perhaps by the system for want of memory" if code == -9 else ""
        return f"killed by {signal.Signals(-code).name}{memory}"

    def stop(self) -> None:
        """Ask the worker to end; one that works on a task removes its unfinished files."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.terminate()

    def wait(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- the worker -----------------------------------------------------------------------------------------------------


def serve() -> None:
    """The worker's main function."""
    channel, tasks = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what libraries print does not belong between the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks, received), daemon=True).start()

    def send(content: bytes) -> None:
        channel.write(content)
        channel.flush()

    try:
        try:
            work, slot, level = received.get()
            _log(level)
            call = work.open(slot)
        except Exception as error:
            return send(_pickled(error))
        send(pickle.dumps(None))
        while True:
            send(pickle.dumps(answer(call, received.get())))
    except SystemExit:  # stopped, and unfinished files are removed
        os._exit(1)


def _receive(tasks: BinaryIO, received: queue.SimpleQueue[Any]) -> None:
    """Read what the parent sends; end this process when the parent is gone."""
    try:
        while True:
            received.put(pickle.load(tasks))
    except EOFError:
        pass
    except Exception:  # what cannot be unpickled here, such as a function of the caller's script
        traceback.print_exc()
    os._exit(1)


def _log(level: int) -> None:
    """Print log records as the command line does."""
    logger, handler = logging.getLogger("carlreg"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("carl: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)


def _pickled(error: Exception) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)
    except Exception:  # exceptions of other libraries
        content = pickle.dumps(WorkerError(f"a worker cannot start: {type(error).__name__}: {error}"))
    return content
