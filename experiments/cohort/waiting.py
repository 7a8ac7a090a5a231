"""Work that waits, for the measurements of the engine alone. Workers import it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from carlreg.cohort.rows import Row
from carlreg.cohort.work import Slot
from carlreg.files.tables import Pair


@dataclass(frozen=True)
class Wait:
    """Waits as long as a registration would take, and answers with a row such as a registration has."""

    seconds: float

    def open(self, slot: Slot) -> Callable[[Pair], Row]:
        return self.wait

    def wait(self, pair: Pair) -> Row:
        time.sleep(self.seconds)
        return Row(pair.name, "done", metrics={f"metric_{n}": n / 7 for n in range(8)}, seconds=self.seconds)
