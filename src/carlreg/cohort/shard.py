"""Parts of a cohort, for job arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from carlreg.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """A part of a cohort: every `count`-th pair, from the `number`-th on, counted from 1."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            expected = (
                f"expected 1/{self.count} to {self.count}/{self.count}" if self.count else "expected at least one"
            )
            raise InputError(f"shard {self.number}/{self.count} does not exist; {expected}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal()):
            raise InputError(f"the shard is {text!r}; expected its number and how many there are, such as 3/40")
        return cls(int(number), int(count))

    def of(self, pairs: Sequence[T]) -> Sequence[T]:
        return pairs[self.number - 1 :: self.count]

    def __str__(self) -> str:
        return f"{self.number}-of-{self.count}"
