"""`index.html` of a cohort: a thumbnail and the scores of every pair, to sort and to filter, offline."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any
from urllib.parse import quote

import carlreg
from carlreg.cohort.rows import Row

KEYS = {"dice_after": "dice", "folds_percent": "folds", "tre_after_mm": "tre"}
"""Metrics that the gallery sorts by."""


def gallery(rows: Sequence[Row], *, title: str = "Cohort", failed_first: bool = False) -> str:
    """The page as HTML. `failed_first` sorts it by verdict to begin with."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    folder = resources.files(__package__)
    return environment.get_template("gallery.html").render(
        title=title,
        style=(folder / "gallery.css").read_text("utf-8"),
        script=(folder / "gallery.js").read_text("utf-8"),
        data={"rows": [_described(row) for row in rows], "sort": "verdict" if failed_first else "order"},
        version=carlreg.__version__,
    )


def _described(row: Row) -> dict[str, Any]:
    """What the page shows of a row, without what is empty."""
    reasons = row.reasons if row.verdict in ("doubtful", "failed") else ()
    described = {
        "name": row.name,
        "status": row.status,
        "verdict": row.verdict,
        "seconds": row.seconds,
        "warnings": list(dict.fromkeys([*reasons, *row.warnings])),  # a warning may be a reason
        "error": row.error,
        "page": quote(row.page),
        "thumbnail": quote(row.thumbnail),
        **{short: row.metrics.get(metric) for metric, short in KEYS.items()},
        "diceBefore": row.metrics.get("dice_before"),
        "expected": row.metrics.get("expected_error_mm"),
    }
    return {key: value for key, value in described.items() if value not in ("", None, [])}
