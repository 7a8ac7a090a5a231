"""What is wrong with the files of a cohort, found before anything is registered: headers, lengths, grids and names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby
from pathlib import Path

from carlreg.errors import CarlError, InputError
from carlreg.files.choice import Choice
from carlreg.files.images import Image, check_same_grid, placed_like, read_outline
from carlreg.files.landmarks import read_landmarks
from carlreg.files.results import TRANSFORM, ResultFolder
from carlreg.files.tables import SIDES, Pair, Side
from carlreg.registration.options import PairInputs, RegisterOptions

READERS = 8
"""Files are checked at the same time: on a network file system, most of the time is spent waiting."""
SHOWN = 3
"""Pairs that are named in a line about a file that many pairs share."""

RIGID: dict[Side, str] = {"fixed": "rigid_mask", "moving": "moving_rigid_mask"}

Problems = dict[str, list[str]]
"""Messages by the name of the pair, in the order of the pairs."""
Outline = Callable[[Path, Choice], Image | str | None]


class BadPairsError(InputError):
    """Pairs that cannot be registered. `problems` has the messages of each by its name."""

    def __init__(self, text: str, problems: Problems) -> None:
        super().__init__(text)
        self.problems = problems

    def __reduce__(self) -> tuple[type[BadPairsError], tuple[str, Problems]]:
        return type(self), (str(self), self.problems)


def find_problems(
    pairs: Sequence[Pair], options: RegisterOptions, reserved: Collection[str] = (), names: Iterable[str] | None = None
) -> Problems:
    """Everything that is wrong with the pairs. `reserved` are names that a pair must not have, `names` those of all
    pairs, if these are a part of them."""
    outline = cache(_outline)
    every_name = (pair.name for pair in pairs) if names is None else names
    count = Counter(name.lower() for name in every_name)  # some file systems ignore case

    def of(pair: Pair) -> list[str]:
        return list(dict.fromkeys([*_of_name(pair, count, reserved), *_of_files(pair, options, outline)]))

    with ThreadPoolExecutor(READERS) as pool:
        every = list(pool.map(of, pairs))
    problems: Problems = {}
    for pair, found in zip(pairs, every, strict=True):
        if found:
            problems.setdefault(pair.name, []).extend(text for text in found if text not in problems.get(pair.name, []))
    return problems


def _outline(path: Path, choice: Choice) -> Image | str | None:
    """`read_outline`, with its error as a text, so that it is kept like a result."""
    try:
        return read_outline(path, choice)
    except (CarlError, OSError) as error:
        return str(error)


def _of_name(pair: Pair, count: Counter[str], reserved: Collection[str]) -> Iterator[str]:
    if pair.name.lower() in reserved:
        yield f"invalid name {pair.name!r}: a file of the cohort has this name; choose another one"
    if (more := count[pair.name.lower()]) > 1:
        yield f"{more} pairs are called {pair.name!r}; expected different names: add a column 'name'"


def _of_files(pair: Pair, options: RegisterOptions, outline: Outline) -> Iterator[str]:
    found: dict[str, Image | None] = {}

    def attempt(name: str, path: Path, choice: Choice) -> Iterator[str]:
        result = outline(path, choice)
        if isinstance(result, str):
            yield result
        else:
            found[name] = result

    for side in SIDES:
        yield from attempt(side, getattr(pair, side), Choice.of_pair(vars(options), side, getattr(pair, side)))
        for column, what in ((f"{side}_seg", "a label map"), (f"{side}_mask", "a mask"), (RIGID[side], "a rigid mask")):
            if (path := getattr(pair, column)) is not None:
                yield from attempt(column, path, Choice())
                yield from _of_grid(found.get(column), found.get(side), what)
        if (path := getattr(pair, f"{side}_landmarks")) is not None:
            yield from _of_landmarks(path, found.get(side))
    if pair.guide is not None and not pair.guide.is_file():
        yield f"{pair.guide} does not exist; expected a file of corresponding points: check the path"
    first = pair.initial_transform
    if first is not None and not (first.is_file() or ResultFolder(first).holds_registration()):
        what = f"holds no {TRANSFORM}" if first.is_dir() else "does not exist"
        yield f"{first} {what}; expected a transform file, or the folder of a result: check the path"
    try:
        inputs = PairInputs(**pair.files())
        if inputs.is_guided:
            options.check_guided()
        if inputs.has_rigid_regions:
            options.check_rigid_regions()
    except InputError as error:
        yield str(error)
    fixed, moving = found.get("fixed"), found.get("moving")
    if fixed is not None and moving is not None and fixed.dim != moving.dim:
        yield f"{fixed.name} is {fixed.dim}-D and {moving.name} {moving.dim}-D; expected the same"


def _of_grid(other: Image | None, image: Image | None, what: str) -> Iterator[str]:
    if other is None or image is None:
        return
    try:
        check_same_grid(placed_like(other, image), image, what)
    except CarlError as error:
        yield str(error)


def _of_landmarks(path: Path, image: Image | None) -> Iterator[str]:
    try:
        if image is not None:
            read_landmarks(path, image)
        elif not path.is_file():
            yield f"{path} does not exist; expected landmarks: check the path"
    except (CarlError, OSError) as error:
        yield str(error)


def lines(problems: Problems) -> list[str]:
    """Each problem once, with the pairs that have it."""
    by_text = sorted((text, name) for name, texts in problems.items() for text in texts)
    listed = []
    for text, group in groupby(by_text, key=lambda one: one[0]):
        names = [name for _, name in group]
        more = f" and {len(names) - SHOWN} more pairs" if len(names) > SHOWN else ""
        listed.append(f"{', '.join(names[:SHOWN])}{more}: {text}")
    return listed
