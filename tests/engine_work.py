"""Work for the tests of the engine, which other processes import: it needs neither torch nor pytest."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from carlreg.cohort.work import Slot
from carlreg.errors import InputError


@dataclass(frozen=True)
class Square:
    """Squares numbers, and records each opening and each call as a file in a folder.

    Odd things happen to some of them: a task `once` raises or kills its worker the first time, `always` every time.
    """

    folder: Path
    raises_once: int | None = None
    raises_always: int | None = None
    refuses: int | None = None
    kills_once: int | None = None
    kills_always: int | None = None
    cannot_open: bool = False
    seconds: float = 0.0

    def open(self, slot: Slot) -> Callable[[int], tuple[int, int, str | None]]:
        if self.cannot_open:
            raise InputError("no model 'x'; expected another one")
        self._note(f"open-{slot.number}-of-{slot.count}")
        return self.square

    def square(self, task: int) -> tuple[int, int, str | None]:
        time.sleep(self.seconds)
        tries = self._note(f"call-{task}")
        if task == self.refuses:
            raise InputError("the file does not exist")
        if task == self.raises_always or (task == self.raises_once and tries == 1):
            raise OSError(5, "Input/output error")
        if task == self.kills_always or (task == self.kills_once and tries == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        print("noise on stdout")
        sys.stdout.flush()
        return task * task, os.getpid(), os.environ.get("OMP_NUM_THREADS")

    def _note(self, name: str) -> int:
        (self.folder / f"{name}.{os.getpid()}.{time.monotonic_ns()}").touch()
        return len(list(self.folder.glob(f"{name}.*")))
