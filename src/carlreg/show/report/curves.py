"""The course of the loss as lines of an SVG plot, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LEFT, RIGHT, TOP, BOTTOM = 56.0, 616.0, 8.0, 192.0
"""The box of the curves in a picture of 640 × 230."""
LINEAR = 1e-3
"""If values are zero or negative, the axis is linear below this fraction of the largest."""


@dataclass(frozen=True)
class Plot:
    """Everything in pixels of the picture."""

    curves: Mapping[str, str]
    """The points of each part of the loss, as SVG writes them."""
    rows: Sequence[tuple[float, str]]
    """Heights and values of the horizontal rules."""
    steps: Sequence[tuple[float, str]]
    """Positions and numbers of some steps."""
    levels: Sequence[float]
    """Positions at which the optimisation goes to a finer grid."""
    scale: str
    """What the vertical axis is."""


def plot_losses(losses: Sequence[Mapping[str, float]]) -> Plot | None:
    """Draw each part of the loss that is finite at every step; None if there are fewer than two steps.

    Entries may name the `level` of the grid they were measured on.
    """
    names = [name for name in (losses[0] if len(losses) > 1 else ()) if name != "level"]
    parts = {name: [step.get(name, math.nan) for step in losses] for name in names}
    parts = {name: values for name, values in parts.items() if all(map(math.isfinite, values))}
    if not parts:
        return None
    values = [value for part in parts.values() for value in part]
    unit = None if min(values) > 0 else max(LINEAR * max(map(abs, values)), 1e-12)
    heights = [_height(value, unit) for value in values]
    low, high = min(heights), max(heights)

    def across(step: float) -> float:
        return round(LEFT + step * (RIGHT - LEFT) / (len(losses) - 1), 1)

    def down(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (_height(value, unit) - low) / ((high - low) or 1), 1)

    levels = [step.get("level") for step in losses]
    return Plot(
        {name: " ".join(f"{across(n)},{down(v)}" for n, v in enumerate(part)) for name, part in parts.items()},
        [(down(value), f"{value:.3g}") for value in _ticks(min(values), max(values), unit)],
        [(across(step - 1), str(step)) for step in _steps(len(losses))],
        [across(n - 0.5) for n in range(1, len(levels)) if levels[n] != levels[n - 1]],
        "logarithmic" if unit is None else f"logarithmic, linear below {unit:.1g}",
    )


def _height(value: float, unit: float | None) -> float:
    """A value on the axis: its logarithm, or one that passes through zero, linear below `unit`."""
    return math.log10(value) if unit is None else math.copysign(math.log10(1 + abs(value) / unit), value)


def _ticks(low: float, high: float, unit: float | None) -> list[float]:
    """Round values between the lowest and the highest, far enough apart to be read."""
    powers = range(math.floor(math.log10(unit or low)), math.ceil(math.log10(max(abs(low), abs(high), 1e-12))) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        sizes = [digit * 10.0**power for power in powers for digit in digits]
        marks = {sign * size for size in sizes for sign in (1, -1) if unit is None or size > unit} | {0.0}
        ticks = sorted(mark for mark in marks if low <= mark <= high)
        if len(ticks) >= 3:
            break
    else:
        ticks = [low, high]
    return list(_apart(ticks, unit, (_height(high, unit) - _height(low, unit)) / 12))


def _apart(ticks: Sequence[float], unit: float | None, least: float) -> Iterator[float]:
    last = -math.inf
    for tick in ticks:
        if _height(tick, unit) - last >= least:
            yield tick
            last = _height(tick, unit)


def _steps(count: int) -> list[int]:
    """The first step, the last, and round ones between them."""
    size = next(s * 10**p for p in range(9) for s in (1, 2, 5) if s * 10**p >= count / 6)
    inner = [step for step in range(size, count, size) if size / 2 < step <= count - size / 2]
    return sorted({1, *inner, count})
