"""`report.html`: one file that shows a registration in any browser, offline.

It holds the volumes themselves, at a display's resolution, and a small script that cuts slices from them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import carlreg
from carlreg.errors import OVERWRITE, OutputError
from carlreg.files.atomic import PathLike, write_atomically
from carlreg.files.images import Image
from carlreg.files.label_names import Names, guess_names, read_names
from carlreg.registration.result import Registration
from carlreg.show.report import facts
from carlreg.show.report.curves import plot_losses
from carlreg.show.report.volumes import is_reduced, label_numbers, page_data


@dataclass(frozen=True)
class Structure:
    """A row of the table of labels. `label` is its number, if it is known."""

    name: str
    label: int | None
    before: float
    after: float


def write(
    registration: Registration,
    path: str | os.PathLike[str],
    *,
    spread: Image | None = None,
    dice: Mapping[str, tuple[float, float]] | None = None,
    label_names: PathLike | Names | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the report to a file.

    `spread` is an image in the fixed image's world, in mm, small where the match is certain; by default, that of the
    registration. `dice` is the overlap of each structure before and after, by name; by default, that of the labels.
    `label_names` are their names, by number, or the file or the well-known table that has them.

    >>> write(register(fixed="a.nii.gz", moving="b.nii.gz"), "report.html")
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise OutputError(f"{target} exists already; choose another name, or {OVERWRITE}")
    text = page(registration, spread=spread, dice=dice, label_names=label_names)
    write_atomically(target, text.encode())
    return target


def page(
    registration: Registration,
    *,
    spread: Image | None = None,
    dice: Mapping[str, tuple[float, float]] | None = None,
    label_names: PathLike | Names | None = None,
) -> str:
    """The report as HTML; see `write`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader(__name__, ""), autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    folder = resources.files(__name__)
    inputs, confidence = (registration.settings[name] for name in ("inputs", "confidence"))
    names = _names(registration, label_names)
    data = page_data(registration, registration.spread if spread is None else spread, names)
    structures = list(_overlaps(registration, names) if dice is None else _named(dice, names))
    return environment.get_template("page.html").render(
        title=" on ".join(facts.file_name(inputs.get(side, {})) or side for side in ("moving", "fixed")),
        style=(folder / "page.css").read_text("utf-8"),
        script=(folder / "page.js").read_text("utf-8"),
        confidence=confidence,
        warnings=[text for text in registration.warnings if not confidence or text not in confidence["reasons"]],
        metrics=list(facts.metrics(registration)),
        structures=structures,
        means=[_mean([getattr(one, when) for one in structures]) for when in ("before", "after")],
        plot=plot_losses(registration.losses),
        sides=[side for side in ("fixed", "moving") if side in inputs],
        inputs=list(facts.images(inputs)),
        settings=list(facts.settings(registration.record)),
        version=carlreg.__version__,
        reduced=is_reduced(data, registration),
        data=data,
    )


def _names(registration: Registration, given: PathLike | Names | None) -> Names:
    """The names that were given or recorded, or those of FreeSurfer if the labels are its."""
    if given is not None:
        return read_names(given)
    return registration.record.label_names or guess_names(label_numbers(registration))


def _overlaps(registration: Registration, names: Names) -> Iterator[Structure]:
    """Dice of each label before and after, if both images had labels."""
    before, after = (registration.dice.get(when, {}) for when in ("before", "after"))
    for label, score in after.items():
        yield Structure(names.get(label, f"label {label}"), label, before.get(label, math.nan), score)


def _named(dice: Mapping[str, tuple[float, float]], names: Names) -> Iterator[Structure]:
    labels = {name: label for label, name in names.items()}
    for name, scores in dice.items():
        yield Structure(name, labels.get(name), *scores)


def _mean(scores: Sequence[float]) -> float:
    finite = [score for score in scores if math.isfinite(score)]
    return sum(finite) / len(finite) if finite else math.nan
