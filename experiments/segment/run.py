"""Segment scans by atlases: Dice of each way of fusing labels, on subjects whose labels are known.

    python experiments/segment/run.py ../shared/data --seconds 100

For each set, the settings of the fusion are chosen on training subjects that are kept back (`dev`: the last three, of
which `--dev-subjects` are used, with `--dev-atlases` of the other training subjects as atlases). Then validation
subjects are segmented with all training subjects as atlases. Labels are fused by each method from the same
registrations. The results are written after every subject, and what is in there is not repeated, so the script can be
stopped and restarted. After `--seconds`, no further subject is begun. With `--work FOLDER`, every registration is kept
there, so that a restart repeats none of them and labels can be fused again in other ways.

Without a GPU, `--device cpu --workers N` registers in N processes of one thread each; torch, numpy and safetensors are
all that is needed. `--dev-subjects 0` skips the choice of settings and fuses with the default ones.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from carlreg.atlases.fusion import FusionSettings, fuse
from carlreg.atlases.inputs import Atlas, read_atlas
from carlreg.atlases.options import Fusion, SegmentOptions
from carlreg.atlases.segment import scaled, window_of
from carlreg.atlases.work import RegisterEach, Task
from carlreg.cohort.engine import run
from carlreg.cohort.work import Workers
from carlreg.fast.devices import choose_device
from carlreg.files.atomic import write_atomically
from carlreg.files.images import Image
from carlreg.registration.options import PairInputs

sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.made import commit, machine

RESULTS = Path(__file__).with_name("results") / "val.json"
SUBCORTICAL = (23, 30, 31, 32, 36, 37, 47, 48, 55, 56, 57, 58, 59, 60)
SETS = {"abdomen": tuple(range(1, 14)), "brain": SUBCORTICAL, "hippocampus": (1, 2)}
KEPT_BACK = 3
SEED = 0
BASE = FusionSettings()
JOINT = [
    *(replace(BASE, patch=patch, search=search) for patch in (1, 2) for search in (0, 1, 2)),
    *(replace(BASE, alpha=alpha, beta=beta) for alpha in (0.03, 0.1, 0.3, 1.0) for beta in (1.0, 2.0, 3.0)),
]
LOCAL = [replace(BASE, sigma=sigma, power=power) for sigma in (1.0, 2.0) for power in (2.0, 4.0, 8.0)]
CANDIDATES: list[tuple[Fusion, FusionSettings]] = [
    ("majority", BASE),
    *(("local", one) for one in LOCAL),
    *(("joint", one) for one in dict.fromkeys(JOINT)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["abdomen", "brain"])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--dev-subjects", type=int, default=2)
    parser.add_argument("--dev-atlases", type=int, default=8)
    parser.add_argument("--atlases", type=int, help="atlases of validation subjects (default: all training subjects)")
    parser.add_argument("--subjects", type=int, help="validation subjects of each set (default: all)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="default")
    parser.add_argument("--work", type=Path, help="folder in which to keep the registrations")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--io-iterations", type=int, help="steps of optimisation, to try the script")
    arguments = parser.parse_args()
    started = time.monotonic()
    report: dict[str, Any] = {"dev": [], "val": []}
    if arguments.out.is_file():
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
    device = choose_device(arguments.device)
    options = SegmentOptions(
        device=arguments.device, seed=SEED, io_iterations=arguments.io_iterations
    ).register_options()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report |= {"machine": machine(), "gpu": gpu, "seed": SEED, "torch": torch.__version__, "workers": arguments.workers}
    report["model"] = arguments.model
    work = RegisterEach(arguments.model, options, "warped")
    open_jobs: dict[str, Job] = {}

    def tasks() -> Iterator[Task]:
        for job in jobs(arguments, report):
            if time.monotonic() - started > arguments.seconds:
                return
            open_jobs[job.key] = job
            yield from job.tasks()

    def finish(job: Job) -> None:
        if job.split == "val" and "settings" not in report:
            report["settings"] = common(report["dev"])
        settings = [(m, FusionSettings(**values)) for m, values in report.get("settings", {}).items()]
        row = job.fused(CANDIDATES if job.split == "dev" else settings, device)
        report[job.split].append(row)
        write_atomically(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
        scores = {one["fusion"]: round(one["dice"], 4) for one in row["fusions"]} if job.split == "val" else {}
        print(f"{time.monotonic() - started:.1f} s", job.key, json.dumps(scores), flush=True)

    fusing: list[Future[None]] = []
    with ThreadPoolExecutor(1) as thread:  # one subject is fused while the next one is registered
        for outcome in run(work, tasks(), Workers(count=arguments.workers)):
            if outcome.result is None:
                sys.exit(f"{outcome.task.name}: {outcome.failure}")
            key, _, atlas = outcome.task.name.rpartition("/")
            warped = outcome.result.read("warped").warped
            assert warped is not None
            job = open_jobs[key]
            job.add(atlas, *warped, outcome.result.seconds, device)
            if len(job.voters) == len(job.atlases):
                fusing.append(thread.submit(finish, open_jobs.pop(key)))
            for done in [one for one in fusing if one.done()]:
                fusing.remove(done)
                done.result()  # raises what went wrong
    for left in fusing:
        left.result()
    print(f"finished after {time.monotonic() - started:.1f} s", flush=True)


def jobs(arguments: argparse.Namespace, report: dict[str, Any]) -> Iterator[Job]:
    """The subjects that are not in the report: dev of all sets first."""
    for split in ("dev", "val"):
        done = {(row["set"], row["subject"]) for row in report[split]}
        for name in arguments.sets:
            train, atlases = subjects(arguments.data / name / "train"), None
            known = train[: arguments.atlases] if split == "val" else train[:-KEPT_BACK][: arguments.dev_atlases]
            chosen = subjects(arguments.data / name / "val")[: arguments.subjects]
            if split == "dev":
                chosen = train[-KEPT_BACK:][: arguments.dev_subjects]
            for path in chosen:
                if (name, stem(path)) not in done:
                    atlases = atlases or read(known)
                    yield Job(name, split, read([path])[0], atlases, arguments.work)


@dataclass(eq=False)
class Job:
    """A subject to segment, and what its atlases have become on its grid."""

    set: str
    split: str
    subject: Atlas
    atlases: list[Atlas]
    work: Path | None = None
    began: float = field(default_factory=time.monotonic)
    images: list[Tensor] = field(default_factory=list)
    voters: list[Tensor] = field(default_factory=list)
    alone: dict[str, float] = field(default_factory=dict)
    each_seconds: list[float] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.set}/{self.split}/{self.subject.name}"

    @functools.cached_property
    def truth(self) -> Tensor:
        return torch.from_numpy(self.subject.labels.data.astype(np.int64))

    def tasks(self) -> Iterator[Task]:
        for one in self.atlases:
            inputs = PairInputs(fixed=self.subject.path, moving=one.path, moving_seg=one.labels_path)
            name = f"{self.key}/{one.name}"
            yield Task(name, inputs, None if self.work is None else self.work / name)

    def add(self, name: str, image: Image, labels: Image, seconds: float, device: torch.device) -> None:
        """Keep a registered atlas, and score it alone."""
        (atlas,) = (one for one in self.atlases if one.name == name)
        self.each_seconds.append(seconds)
        self.images.append(scaled(image, window(atlas)).half().to(device))
        self.voters.append(torch.from_numpy(labels.data.astype(np.int16)).to(device))
        self.alone[name] = score(self.voters[-1], self.truth.to(device), self.set)[0]

    def fused(self, candidates: Sequence[tuple[Fusion, FusionSettings]], device: torch.device) -> dict[str, Any]:
        """Fuse the labels in every way, and score each. To save time, only the box of the structures that are scored is
        fused: no fusion puts one of them where no atlas has it."""
        seconds = time.monotonic() - self.began
        scan, truth = scaled(self.subject.image, window(self.subject)).to(device), self.truth.to(device)
        box = around([truth, *self.voters], self.set)
        every = (slice(None), *box)
        images, labels = (torch.stack(parts)[every] for parts in (self.images, self.voters))
        rows = []
        for method, settings in candidates:
            began = time.monotonic()
            overlap, each = score(fuse(scan[box], images, labels, method, settings).labels, truth[box], self.set)
            spent = round(time.monotonic() - began, 2)
            rows.append(
                {"fusion": method, "settings": asdict(settings), "dice": overlap, "labels": each, "seconds": spent}
            )
        return {
            "set": self.set,
            "subject": self.subject.name,
            "commit": commit(),
            "atlases": len(self.atlases),
            "seconds": round(seconds, 1),
            "seconds_a_registration": round(mean(self.each_seconds), 1),
            "one_atlas": self.alone,
            "fusions": rows,
        }


def subjects(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("*.nii.gz") if not path.name.endswith("_labels.nii.gz"))
    if not found:
        sys.exit(f"{folder} has no scans; expected NAME.nii.gz and NAME_labels.nii.gz")
    return found


def stem(path: Path) -> str:
    return path.name.removesuffix(".nii.gz")


@functools.cache
def window(atlas: Atlas) -> tuple[float, float]:
    return window_of(atlas.image)


def read(paths: Sequence[Path]) -> list[Atlas]:
    return [read_atlas(stem(path), (path, path.with_name(f"{stem(path)}_labels.nii.gz"))) for path in paths]


def around(maps: Sequence[Tensor], name: str) -> tuple[slice, ...]:
    """The box of the structures that are scored, in any of the label maps, and ten voxels around it."""
    scored = torch.tensor(SETS[name], device=maps[0].device)
    inside = functools.reduce(torch.logical_or, (torch.isin(one, scored.to(one.dtype)) for one in maps)).nonzero()
    ends = zip(inside.amin(0).tolist(), inside.amax(0).tolist(), strict=True)
    return tuple(slice(max(0, low - 10), high + 11) for low, high in ends)


def score(labels: Tensor, truth: Tensor, name: str) -> tuple[float, dict[str, float]]:
    """Mean Dice of the structures that the subject has, and that of each."""
    each = {}
    for label in SETS[name]:
        there, found = truth == label, labels == label
        if bool(there.any()):
            each[str(label)] = 2 * int((there & found).sum()) / int(there.sum() + found.sum())
    return mean(each.values()), {label: round(value, 4) for label, value in each.items()}


def averages(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Every method and its settings, with the mean Dice over subjects."""
    for number, one in enumerate(rows[0]["fusions"] if rows else ()):
        yield one["fusion"], one["settings"], mean(row["fusions"][number]["dice"] for row in rows)


def common(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings of each method with the best mean over the sets, in which all sets count the same; the default ones
    if there are no subjects to choose on."""
    totals: dict[str, dict[str, float]] = {}
    for name in sorted({row["set"] for row in rows}):
        for method, settings, value in averages([row for row in rows if row["set"] == name]):
            key = json.dumps(settings, sort_keys=True)
            totals.setdefault(method, {}).setdefault(key, 0.0)
            totals[method][key] += value
    best = {method: json.loads(max(each, key=each.__getitem__)) for method, each in totals.items()}
    return best or {method: asdict(BASE) for method in get_args(Fusion)}


if __name__ == "__main__":
    main()
