"""Registrations of many scans to one, as work for `carlreg.cohort`: those that are saved are not repeated."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from carlreg.cohort.engine import run
from carlreg.cohort.register import device_of
from carlreg.cohort.work import Slot, Workers
from carlreg.errors import CarlError, InputError
from carlreg.files import images, transform_files, world_transform
from carlreg.files.atomic import write_atomically, write_together
from carlreg.files.checksums import sha256
from carlreg.files.images import Image
from carlreg.files.results import INVERSE, REPORT, TRANSFORM, WARPED, WARPED_LABELS, WITHIN, Request
from carlreg.files.world_transform import WorldTransform
from carlreg.model.loaded import LoadedModel, load_model
from carlreg.registration.api import Model, align_pair, register_pair
from carlreg.registration.options import PairInputs, RegisterOptions
from carlreg.registration.progress import Progress
from carlreg.registration.result import make_request

logger = logging.getLogger(__name__)

Keep = Literal["transform", "warped", "all"]
"""What is needed of a registration: the map, or the moving image and its labels on the fixed grid; or all of it, as a
result folder."""
REQUEST = "request.json"
NEEDED: dict[Keep, tuple[str, ...]] = {
    "transform": (TRANSFORM,),
    "warped": (WARPED, WARPED_LABELS),
    "all": (TRANSFORM, INVERSE, WARPED, WARPED_LABELS, REPORT),
}


@dataclass(frozen=True, eq=False)
class Task:
    """A scan to register to another one."""

    name: str
    inputs: PairInputs
    folder: Path | None = None
    """For the result; without one, it is returned."""


@dataclass(frozen=True, eq=False)
class Registered:
    """What is needed of a registration, in memory or in a folder."""

    name: str
    seconds: float
    folder: Path | None = None
    transform: WorldTransform | None = None
    """From points of the fixed image to points of the moving one."""
    warped: tuple[Image, Image] | None = None
    """The moving image and its labels on the grid of the fixed one."""

    def read(self, keep: Keep) -> Registered:
        """The same in memory."""
        if self.folder is None:
            return self
        if keep == "transform":
            transform = transform_files.read(self.folder / TRANSFORM)
            assert isinstance(transform, WorldTransform)
            return Registered(self.name, self.seconds, None, transform)
        pair = images.read(self.folder / WARPED), images.read_labels(self.folder / WARPED_LABELS)
        return Registered(self.name, self.seconds, None, None, pair)


@dataclass(frozen=True, eq=False)
class RegisterEach:
    """Register scans with one model."""

    model: Model
    options: RegisterOptions
    keep: Keep

    def open(self, slot: Slot) -> Callable[[Task], Registered]:
        device = device_of(slot, self.options.device)
        own = replace(self, options=replace(self.options, device=device))
        return functools.partial(own._one, load_model(self.model, device), functools.cache(sha256))

    def _one(self, model: LoadedModel, checksum: Callable[[str], str], task: Task) -> Registered:
        request = _request(model, self.options, task, checksum)
        if task.folder is not None and (seconds := _found(task.folder, request, self.keep)) is not None:
            return Registered(task.name, seconds, task.folder)
        if self.keep == "all":
            result = register_pair(task.inputs, model, self.options, full_precision=task.folder is None)
            seconds = result.record.seconds["total"]
            if task.folder is None:
                assert result.labels is not None
                return Registered(task.name, seconds, None, result.transform, (result.warped, result.labels))
            result.save(task.folder, overwrite=True, extra={REQUEST: _recorded(request, seconds)})
            return Registered(task.name, seconds, task.folder)
        work = Progress()
        found = align_pair(task.inputs, model, self.options, work)
        transform, case = found.transform, found.case
        warped = None
        if self.keep == "warped":
            assert case.moving_seg is not None
            warped = (
                world_transform.apply(transform, case.moving, case.fixed),
                world_transform.apply(transform, case.moving_seg, case.fixed, "nearest"),
            )
        seconds = work.seconds()["total"]
        if task.folder is None:
            return Registered(task.name, seconds, None, transform if warped is None else None, warped)
        with write_together(task.folder, (*NEEDED["all"], REQUEST), last=REQUEST, overwrite=True) as staging:
            if warped is None:
                transform_files.write(transform, staging / TRANSFORM, within=WITHIN * min(1, *case.fixed.spacing))
            else:
                for image, name in zip(warped, NEEDED["warped"], strict=True):
                    images.write(image, staging / name)
            write_atomically(staging / REQUEST, _recorded(request, seconds).encode())
        return Registered(task.name, seconds, task.folder)


def _request(
    model: LoadedModel, options: RegisterOptions, task: Task, checksum: Callable[[str], str]
) -> Request | None:
    """What decides a result; None if an input has no file."""
    sources = task.inputs.sources()
    if task.folder is None or not all(isinstance(one, (str, os.PathLike)) for one in sources.values()):
        return None
    return make_request(model, options, {name: checksum(os.fspath(one)) for name, one in sources.items()})


def _recorded(request: Request | None, seconds: float) -> str:
    """The content of `request.json`."""
    content = None if request is None else asdict(request)
    return json.dumps({"request": content, "seconds": seconds}, indent=1) + "\n"


def _found(folder: Path, request: Request | None, keep: Keep) -> float | None:
    """The seconds of a finished registration for the same request, with all that is needed; None if there is none."""
    if request is None or not all((folder / name).is_file() for name in NEEDED[keep]):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
        if not Request(**content["request"]).differences(request):
            return float(content["seconds"])
    return None


def register_each(
    tasks: Sequence[Task], model: Model, options: RegisterOptions, keep: Keep, workers: int = 1
) -> Iterator[Registered]:
    """Register all scans, in the order in which they finish; if any cannot be registered, raise once all are done."""
    failures = []
    for outcome in run(RegisterEach(model, options, keep), tasks, Workers(count=workers)):
        if outcome.failure is not None:
            logger.error("%s: %s", outcome.task.name, outcome.failure.message)
            failures.append(f"{outcome.task.name}: {outcome.failure.message}")
        elif outcome.result is not None:
            yield outcome.result.read(keep)
    if failures:
        listed = "; ".join(failures)
        raise CarlError(f"{len(failures)} of {len(tasks)} registrations failed ({listed}); the others are kept")


def check_workers(workers: int) -> None:
    if workers < 1:
        raise InputError(f"workers is {workers}; expected 1 or more")


def source_of(image: Image, path: Any) -> Any:
    """A file, so that a result can be recognised by its checksum; otherwise the image."""
    return path if isinstance(path, (str, os.PathLike)) else image
