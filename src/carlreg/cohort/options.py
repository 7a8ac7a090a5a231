"""How to work through a cohort. Imports neither torch nor numpy.

The text beside each field is its documentation and the help of its command-line option.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from carlreg.cohort.shard import Shard
from carlreg.cohort.work import Workers
from carlreg.errors import InputError
from carlreg.files.results import INVERSE, PAGE, TRANSFORM, WARP, WARPED, WARPED_LABELS
from carlreg.registration.options import IMAGES, LABELS, OUTPUT

KINDS = {
    "transform": TRANSFORM,
    "inverse": INVERSE,
    "warped": WARPED,
    "seg": WARPED_LABELS,
    "report": PAGE,
    "warp": WARP,
}
"""The files that can be kept of each pair, beside `report.json` and the thumbnail, by the word for them."""
WORKERS = "Workers"
"""Another section of the help."""
USUAL = "transform,inverse,warped,seg,report"
Bad = Literal["refuse", "skip", "fail"]
"""Pairs whose files cannot be used: refuse the cohort, go on without them, or count them as failed."""


@dataclass(frozen=True, kw_only=True)
class CohortOptions:
    """How to work through a cohort."""

    workers: Annotated[
        int | None,
        "Processes that register pairs at the same time, which share the CPU threads and the GPUs. With --ray, workers "
        "on the cluster; by default as many as fit.",
        WORKERS,
    ] = None
    shard: Annotated[
        str | None,
        "Register a part of the pairs, such as 3/40: every 40th, from the third on. Shards share a folder.",
        WORKERS,
    ] = None
    keep: Annotated[
        str,
        "Files to write for each pair, beside report.json and the thumbnail: transform, inverse, warped, seg (warped "
        "labels), report (report.html), warp (the transform as ANTs writes it).",
        OUTPUT,
    ] = USUAL
    label_names: Annotated[
        Path | None,
        "Names of the labels, for the reports: a CSV file with the columns label,name, a colour table of FreeSurfer or "
        "ITK-SNAP, or the name of a well-known table, such as freesurfer.",
        LABELS,
    ] = None
    full_precision: Annotated[
        bool, "Do not round the stored transforms, to 0.01 mm: the files are larger.", "--full-precision", OUTPUT
    ] = False
    skip_bad: Annotated[bool, "Go on without the pairs whose files cannot be used.", "--skip-bad", IMAGES] = False
    strict: Annotated[
        bool, "List registrations judged as failed first, and exit with 3 if there are any.", "--strict", OUTPUT
    ] = False
    ray: Annotated[
        str | None,
        "Work on a Ray cluster: its address, auto for the one that this machine belongs to, or local for one on this "
        "machine alone. Needs carlreg[cluster], and files that all nodes can read.",
        WORKERS,
    ] = None
    gpus_per_worker: Annotated[
        float | None, "GPUs of a worker on the cluster, such as 0.5. By default 1 if the cluster has GPUs.", WORKERS
    ] = None
    cpus_per_worker: Annotated[int, "CPU cores of a worker on the cluster.", WORKERS] = 1

    def __post_init__(self) -> None:
        self.files()
        self.part()
        self.crew()

    def files(self) -> frozenset[str]:
        """The names of the files to keep."""
        return frozenset(KINDS[word] for word in self.words())

    def words(self) -> list[str]:
        """What to keep, in the order of `KINDS`."""
        asked = [word.strip() for word in self.keep.split(",") if word.strip()]
        if unknown := [word for word in asked if word not in KINDS]:
            raise InputError(f"unknown kind of file to keep: {unknown[0]!r}; expected some of {', '.join(KINDS)}")
        return [word for word in KINDS if word in asked]

    def part(self) -> Shard:
        return Shard() if self.shard is None else Shard.parse(self.shard)

    def crew(self) -> Workers:
        if self.ray is None and self.gpus_per_worker is not None:
            raise InputError("GPUs per worker were given without a Ray cluster; expected both, or neither")
        gpus, cpus = self.gpus_per_worker, self.cpus_per_worker
        return Workers(count=self.workers, ray=self.ray, gpus_per_worker=gpus, cpus_per_worker=cpus)


def kept(words: Collection[str]) -> str:
    """The option `keep` for these words."""
    return ",".join(word for word in KINDS if word in words)
