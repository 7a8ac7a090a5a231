"""What a family of attacks is: numbered cases, each a pure function of its number."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Cases 0 to `count` − 1 of one kind of attack."""

    name: str
    count: int
    """Cases of the full run."""
    run: Callable[[int], str | None]
    """Run one case; the failure in one line, or None if the promise held."""
    isolated: bool = False
    """Run in a worker process under limits of time and memory, since a case may crash or hang."""


def generator(family: str, case: int) -> random.Random:
    """The random numbers of one case: the same in every run."""
    return random.Random(f"{family}/{case}")
