"""Registrations in a process of their own: what to register, how far it is, and an end on request."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from carlreg.files.results import PAGE, ResultFolder
from carlreg.registration.options import PairInputs, RegisterOptions

State = Literal["running", "done", "failed", "cancelled"]
PHASES = {
    "reading": (0, 4),
    "searching for a rotation": (4, 10),
    "searching for an affine map": (4, 40),
    "network": (10, 40),
    "coordinate attention": (10, 80),
    "optimisation": (40, 80),
    "world space": (80, 86),
    "judging the result": (86, 93),
    "trying other ways": (88, 94),
    "certainty": (94, 95),
    "scores": (95, 96),
    "writing": (96, 100),
}
"""Where each part of a registration begins and ends, roughly, in percent of the whole."""


@dataclass(frozen=True)
class Task:
    """A registration to be done. All values can be written as JSON."""

    inputs: Mapping[str, str]  # paths, by their names in `PairInputs`
    out: str
    model: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict)  # some of those of `RegisterOptions`
    label_names: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False


@dataclass(frozen=True)
class Status:
    """How far a job is."""

    state: State = "running"
    phase: str = "starting"
    percent: int = 0
    message: str = ""  # what went wrong


class Job:
    """A registration in a process of its own.

    >>> job = Job(Task({"fixed": "a.nii", "moving": "b.nii"}, "out"))
    >>> job.status.percent
    """

    def __init__(self, task: Task) -> None:
        self.task, self.status, self._started = task, Status(), time.monotonic()
        command = [sys.executable, "-m", "carlreg.show.viewer.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()  # and not closed: the process ends when this one does
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError, TypeError):  # a library may print, too
                self.status = replace(self.status, **json.loads(line))
        code = self._process.wait()
        if self.status.state == "running":
            failed = Status(
                "failed", message=f"the registration ended unexpectedly (exit code {code}); see the terminal"
            )
            self.status = Status("cancelled") if self._cancelled else failed

    _cancelled = False

    def cancel(self) -> None:
        """End the registration; nothing unfinished is left."""
        self._cancelled = True
        if self.status.state == "running":
            self._process.terminate()
        self._reader.join(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.close()

    def close(self) -> None:
        """Close the pipes of a job that has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.status), "seconds": round(time.monotonic() - self._started)}


def run(task: Task, report: Callable[..., None]) -> None:
    """Register, and write the result folder with its page; `report(phase=, percent=)` is called meanwhile."""
    from carlreg.registration.api import register_pair
    from carlreg.show import report as pages

    options = task_options(task.options)
    part, furthest = [0, 0], [0]

    def begin(phase: str) -> None:
        part[:] = PHASES.get(phase, part)
        report(phase=phase)
        advance(0)

    def advance(share: float) -> None:
        percent = round(part[0] + (part[1] - part[0]) * min(max(share, 0), 1))
        furthest[0] = max(furthest[0], percent)  # other ways repeat what was done before
        report(percent=furthest[0])

    ResultFolder(Path(task.out)).check_free(overwrite=task.overwrite, inputs=task.inputs)
    result = register_pair(
        PairInputs(**task.inputs),
        task.model,
        options,
        progress=begin,
        advance=advance,
        full_precision=False,
    )
    names = {int(label): name for label, name in task.label_names.items()}
    result = replace(result, record=replace(result.record, label_names=names))
    begin("writing")
    result.save(task.out, overwrite=task.overwrite, extra={PAGE: lambda: pages.page(result)})


def task_options(options: Mapping[str, Any]) -> RegisterOptions:
    """Options that were written as JSON, which has no tuples."""
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in options.items()}
    return RegisterOptions(**values)


def free_path(path: Path, ending: str = "") -> Path:
    """The path with an ending, and with a number if that exists already.

    >>> free_path(Path("out"), "_guided")
    """
    names = (f"{path.name}{ending}{number}" for number in ("", *range(2, 10_000)))
    return next(
        one for name in names if not (one := path.with_name(name)).exists() and not one.with_suffix(".csv").exists()
    )
