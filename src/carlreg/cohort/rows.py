"""The rows of a cohort's summary: what became of each pair."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any, Literal

from carlreg.files.results import Report

Status = Literal["pending", "done", "was done", "failed", "skipped"]
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Row:
    """A pair: what became of it, and how good its registration is."""

    name: str
    status: Status = "pending"
    """"was done": an earlier run has registered it; "skipped": its files cannot be used."""
    verdict: str = ""
    """Whether the registration can be trusted, by its report: "good", "doubtful", "failed" or "unknown"."""
    reasons: tuple[str, ...] = ()
    """Why it is not good, in words."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    tries: int = 1
    warnings: tuple[str, ...] = ()
    error: str = ""
    page: str = ""
    """The report to look at, relative to the cohort's folder; empty if there is none."""
    thumbnail: str = ""
    finished: str = ""
    """When, in UTC."""

    @classmethod
    def of(cls, name: str, status: Status, report: Report, *, page: str = "", thumbnail: str = "") -> Row:
        """The row of a registration by its report."""
        confidence = report.confidence
        expected = None if confidence is None else confidence.expected_error_mm
        metrics = {**report.metrics, "expected_error_mm": math.nan if expected is None else expected}
        return cls(
            name,
            status,
            verdict=UNKNOWN if confidence is None else confidence.verdict,
            reasons=() if confidence is None else tuple(confidence.reasons),
            metrics={key: float(value) for key, value in metrics.items() if math.isfinite(value)},
            seconds=report.seconds.get("total"),
            warnings=tuple(report.warnings),
            page=page,
            thumbnail=thumbnail,
        )

    def now(self) -> Row:
        return replace(self, finished=datetime.now(timezone.utc).isoformat(timespec="milliseconds"))

    @property
    def is_done(self) -> bool:
        return self.status in ("done", "was done")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Row:
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        return cls(**known | {name: tuple(known.get(name, ())) for name in ("reasons", "warnings")})

    def cells(self) -> dict[str, str]:
        """The row of `summary.csv`."""
        numbers = {**self.metrics} if self.seconds is None else {**self.metrics, "seconds": self.seconds}
        texts = {"name": self.name, "status": self.status, "verdict": self.verdict}
        notes = {"reasons": "; ".join(self.reasons), "warnings": "; ".join(self.warnings)}
        more = {**notes, "error": self.error, "finished": self.finished}
        return texts | {name: f"{value:.4f}" for name, value in numbers.items()} | more


def summary(rows: Iterable[Row]) -> bytes:
    """The content of `summary.csv`: a column for every metric that a row has."""
    table = [row.cells() for row in rows]
    last = ("seconds", "reasons", "warnings", "error", "finished")
    columns = [name for name in dict.fromkeys(name for row in table for name in row) if name not in last]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *last], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue().encode()
