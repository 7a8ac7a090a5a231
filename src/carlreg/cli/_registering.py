"""What `carl register` and `carl cohort` share: the options of a registration, and its metrics in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from carlreg.registration.options import QUALITY, SimilarityChoice


def _iterations(text: str) -> int | None:
    """`auto`, `None` (which is 0 in other tools' scripts) or a number."""
    named: dict[str, int | None] = {"auto": None, "none": 0}
    if text.lower() in named:
        return named[text.lower()]
    if not text.isdecimal():
        raise typer.BadParameter(
            f"{text!r} is not a number of steps; expected 0 or more, auto, or None", param_hint="--io-iterations"
        )
    return int(text)


def _numbers(text: str) -> int | str | tuple[int | str, ...]:
    """A number or a word, or two of them, separated by a comma."""
    parts = tuple(int(part) if part.isdecimal() else part for part in text.split(","))
    return parts if len(parts) > 1 else parts[0]


Numbers = Annotated[str | None, typer.Option(parser=_numbers, metavar="N[,N]")]
MODEL = Annotated[
    str,
    "A model from `carl models list`, or a model file. default: carl-base; where its result is judged doubtful or "
    "failed, other ways are tried: a search for a rotation, another similarity, no network. auto: the same after a "
    "search for a rotation. none: no network; fields are optimised from an affine map, which is searched for.",
    QUALITY,
]
SPECIAL: dict[str, Any] = {
    "io_iterations": Annotated[int | None, typer.Option(parser=_iterations, metavar="STEPS", show_default="auto")],
    "io_sim": Annotated[SimilarityChoice, typer.Option()],
    "frame": Numbers,
    "channel": Numbers,
    "optimize": ["--optimize", "--over"],
    "fit_source": ["--fit-source", "--fit-to"],
}
"""How fields of `RegisterOptions` become options of a command."""


def summarise(metrics: Mapping[str, float]) -> str:
    """The main metrics in words, if there are any."""
    parts = {
        "dice_after": "Dice {dice_before:.3f} before, {dice_after:.3f} after, ",
        "tre_after_mm": "landmarks {tre_before_mm:.1f} mm apart before, {tre_after_mm:.1f} mm after, ",
        "guide_after_mm": "guide points {guide_before_mm:.1f} mm apart before, {guide_after_mm:.1f} mm after, ",
        "folds_percent": "{folds_percent:.3f} % folds, ",
    }
    return "".join(text.format(**metrics) for name, text in parts.items() if name in metrics)
