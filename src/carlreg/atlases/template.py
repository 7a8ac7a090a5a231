"""`carl template`: the average shape and image of a group of scans.

The scans are centred and averaged; then they are registered to their average again and again, the first time by affine
maps. Each time, the average moves to the mean of the shapes (see `average`), so that it is biased towards no scan.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import carlreg
from carlreg.atlases import average
from carlreg.atlases.average import Average, Subject
from carlreg.atlases.inputs import list_scans, read_each, read_scan
from carlreg.atlases.options import TemplateOptions
from carlreg.atlases.work import Task, check_workers, register_each, source_of
from carlreg.errors import OVERWRITE, ExistsError, InputError
from carlreg.fast.devices import choose_device
from carlreg.files import images, world_transform
from carlreg.files.atomic import PathLike, only_writer, refuse_inputs, write_atomically, write_together
from carlreg.files.checksums import sha256
from carlreg.files.images import Image, as_image
from carlreg.files.results import InputRecord, Report, Request, ResultFolder
from carlreg.files.world_transform import WorldTransform
from carlreg.model.loaded import load_model
from carlreg.registration.api import Model
from carlreg.registration.options import PairInputs
from carlreg.registration.result import Registration

logger = logging.getLogger(__name__)

IMAGE, PAGE, RECORD, JOURNAL = "template.nii.gz", "template.html", "template.json", "iterations.json"
SUBJECTS, ITERATIONS, WORK = "subjects", "iterations", ".carl-work"
NAMES = (IMAGE, PAGE, RECORD)
IN_MEMORY = InputRecord(given_as="Template")
Kind = Literal["centred", "affine", "deformable"]
LARGEST_MEAN = 0.1
"""The mean displacement of a template's maps should have at most this RMS length, in mm."""
SHRINKAGE = 0.02
"""Averages of scans that are rotated against each other shrink; more than this is worth a warning."""


@dataclass(frozen=True)
class Iteration:
    """How an average came about."""

    kind: str
    """ "centred", "affine" or "deformable"."""
    moved_mm: float
    """RMS of the mean displacement of the registrations, in the foreground: how far the average moved."""
    residual_mm: float
    """The same of the maps of the average after it moved."""
    spread: float
    """Standard deviation of the scans' intensities in the foreground, relative to the mean intensity."""
    sharpness: float
    """Mean gradient magnitude of the average in its foreground, per mm, before it is sharpened."""
    seconds: float


@dataclass(frozen=True, eq=False)
class Template:
    """An average of scans. `transforms` take its points to those of each scan."""

    image: Image
    mean: Image
    """The average before it was sharpened."""
    subjects: tuple[Subject, ...]
    transforms: tuple[WorldTransform, ...]
    iterations: tuple[Iteration, ...]
    record: Mapping[str, Any]
    """How it was made, as in `template.json`."""

    @property
    def residual_mm(self) -> float:
        """RMS of the mean displacement of the transforms in the foreground."""
        return self.iterations[-1].residual_mm

    def registration(self, number: int, fixed: InputRecord = IN_MEMORY) -> Registration:
        """A scan registered to the template, which its report describes as `fixed`."""
        subject, transform = self.subjects[number], self.transforms[number]
        inverse, residual = world_transform.invert(transform, subject.image)
        missed = residual[np.isfinite(residual)]
        folds = world_transform.folds_percent(world_transform.jacobian_determinant(transform, self.image))
        length = np.linalg.norm(_shift(transform), axis=-1)[average.foreground(self.image).numpy()]
        metrics = {
            "folds_percent": folds,
            "inverse_error_mm": float(missed.mean()) if missed.size else math.nan,
            "displacement_mm": float(length.mean()),
        }
        moving = InputRecord(**self.record["scans"][subject.name], **_geometry(subject.image))
        record = Report(
            model=self.record["model"],
            device=self.record["device"],
            transform="deformable",
            inputs={"fixed": fixed, "moving": moving},
            metrics=metrics,
            request=Request(None, {}, {"fixed": fixed.sha256, "moving": moving.sha256}),
        )
        warped = world_transform.apply(transform, subject.image, self.image)
        return Registration(transform, inverse, warped, self.image, subject.image, record)

    def save(self, folder: PathLike, *, overwrite: bool = False, progress: Callable[[str], None] | None = None) -> Path:
        """Write `template.nii.gz`, `template.html`, `template.json`, and for each scan a folder `subjects/NAME` with
        transforms both ways, as `carl register` writes them with the template as the fixed image. Overwriting removes
        the results of the old template's other scans."""
        from carlreg.atlases.page import page

        target = Path(folder)
        if (target / RECORD).exists() and not overwrite:
            raise ExistsError(f"{target} already holds {RECORD}; choose another folder, or {OVERWRITE}")
        rows, old = [], _scans_of(target)
        with write_together(target, NAMES, last=RECORD, overwrite=overwrite) as staging:
            images.write(self.image, staging / IMAGE)
            fixed = InputRecord(path=str((target / IMAGE).absolute()), sha256=sha256(staging / IMAGE))
            fixed = replace(fixed, **_geometry(self.image))
            for number, subject in enumerate(self.subjects):
                if progress is not None:
                    progress(f"writing {subject.name}")
                found = self.registration(number, fixed)
                found.save(target / SUBJECTS / subject.name, overwrite=True)
                rows.append({"name": subject.name, **found.metrics})
            record = {**self.record, "iterations": [asdict(row) for row in self.iterations], "subjects": rows}
            write_atomically(staging / PAGE, page(self.image, self.iterations, rows, record).encode())
            write_atomically(staging / RECORD, (json.dumps(record, indent=2) + "\n").encode())
        for name in old - {one.name for one in self.subjects}:
            ResultFolder(target / SUBJECTS / name).remove()
        return target


def _scans_of(folder: Path) -> set[str]:
    """The names of the scans of the template in a folder, if there is one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        names = json.loads((folder / RECORD).read_text(encoding="utf-8"))["scans"]
        own = (name for name in names if name != ".." and Path(name).name == name)
        return {name for name in own if not (folder / SUBJECTS / name).is_symlink()}
    return set()


def _shift(transform: WorldTransform) -> np.ndarray[Any, Any]:
    """T(x) − x at the points of the lattice of u, without the part that is common to all: scans may lie anywhere."""
    grid = Image(np.zeros(transform.displacement.shape[:-1], np.uint8), transform.lattice)
    field = np.empty(transform.displacement.shape, np.float32)
    for box, part in world_transform.displacements(transform, grid):
        field[box] = part
    return np.asarray(field - field.reshape(-1, grid.dim).mean(axis=0))


def template(
    scans: Iterable[Any] | Mapping[str, Any],
    *,
    out: PathLike | None = None,
    model: Model = "default",
    initial: Any = None,
    workers: int = 1,
    skip_bad: bool = False,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
    callback: Callable[[Iteration, Image], None] | None = None,
    **options: Any,
) -> Template:
    """Average the shapes and intensities of scans: paths, folders, anything that `register` accepts, or a mapping from
    names to those. `options` are the fields of `TemplateOptions`.

    With `out`, the result is saved there. If it is stopped, the same call goes on where it was; more `iterations` go on
    from what is there. `initial` is an image to start from instead of the average of the centred scans. `workers` are
    processes that register at the same time. `skip_bad` leaves out scans that cannot be used. `callback` is called with
    every average, before it is sharpened.

    >>> result = template(["a.nii.gz", "b.nii.gz", "c.nii.gz"], out="average")
    """
    builder = prepare(
        scans,
        model=model,
        initial=initial,
        workers=workers,
        skip_bad=skip_bad,
        progress=progress,
        callback=callback,
        **options,
    )
    if out is None:
        return builder.run(None)
    folder = Path(out)
    busy = ExistsError(f"another process builds a template in {folder}; wait for it, or choose another folder")
    if overwrite:
        held = (path for name in (ITERATIONS, SUBJECTS) for path in (folder / name).rglob("*"))
        refuse_inputs([*(folder / name for name in (*NAMES, JOURNAL)), *held], [*builder.sources.values(), initial])
    with only_writer(folder / ITERATIONS, busy):  # `write_together` locks the folder itself
        journal = Journal.open(folder, builder.record, overwrite)
        built = builder.run(journal)
        built.save(folder, overwrite=True, progress=builder.progress)
        journal.add(built.iterations, built.image)
        return built


def prepare(
    scans: Iterable[Any] | Mapping[str, Any],
    *,
    model: Model = "default",
    initial: Any = None,
    workers: int = 1,
    skip_bad: bool = False,
    progress: Callable[[str], None] | None = None,
    callback: Callable[[Iteration, Image], None] | None = None,
    **options: Any,
) -> Builder:
    """The part of `template` that reads and checks everything. `run` of what it returns builds the template."""
    settings = TemplateOptions(**options)
    check_workers(workers)
    listed = list_scans(scans)
    read = read_each(
        listed, read_scan, what="scans", least=2, skip_bad=skip_bad, skipped=lambda text: logger.warning("%s", text)
    )
    dims = {image.dim for _, image in read}
    if len(dims) > 1:
        raise InputError("some scans are 2-D and others 3-D; expected the same")
    device = choose_device(settings.device)
    loaded = load_model(model, device).for_dimension(dims.pop())
    ct = average.all_ct([image for _, image in read])
    subjects = [average.make_subject(name, image, ct) for name, image in read]
    start = None if initial is None else as_image(initial, "initial")
    sources = dict(listed)
    record = {
        "versions": {"carlreg": carlreg.__version__, "torch": torch.__version__},
        "model": loaded.provenance,
        "device": str(device),
        "options": settings.pinned(),
        "initial": None if initial is None else _describe(initial, start)["sha256"],
        "scans": {one.name: _describe(sources[one.name], one.image) for one in subjects},
    }
    used = loaded if workers == 1 else model  # each process loads its own
    return Builder(
        tuple(subjects), sources, used, settings, start, record, workers, progress or (lambda _: None), callback
    )


def _describe(source: Any, image: Image | None) -> dict[str, Any]:
    """A scan by its file, or by its voxels."""
    if isinstance(source, (str, os.PathLike)):
        return {"path": str(Path(source).absolute()), "sha256": sha256(source)}
    assert image is not None
    return {"given_as": type(source).__name__, "sha256": _geometry(image)["sha256_voxels"]}


def _geometry(image: Image) -> dict[str, Any]:
    """What a report records of an image itself."""
    voxels = hashlib.sha256(np.ascontiguousarray(image.data).tobytes()).hexdigest()
    return {"shape": list(image.shape), "spacing_mm": list(image.spacing), "sha256_voxels": voxels}


@dataclass(frozen=True, eq=False)
class Builder:
    """Scans that were read and checked, and how to average them."""

    subjects: tuple[Subject, ...]
    sources: Mapping[str, Any]
    model: Model
    options: TemplateOptions
    start: Image | None
    record: Mapping[str, Any]
    workers: int
    progress: Callable[[str], None]
    callback: Callable[[Iteration, Image], None] | None

    def run(self, journal: Journal | None) -> Template:
        """Build the template; with a journal, from where it ends. All but the last average are added to it."""
        rows = [] if journal is None else list(journal.rows)
        kinds: list[Kind] = ["centred", "affine", *["deformable"] * self.options.iterations]  # type: ignore[list-item]
        if journal is not None and len(rows) >= len(kinds):
            raise ExistsError(f"{journal.folder} already holds this template; choose another folder, or {OVERWRITE}")
        grid = average.common_grid(self.subjects, self.options.spacing)
        target = journal.read(len(rows) - 1) if rows and journal is not None else None
        result: Average | None = None
        for number, kind in list(enumerate(kinds))[len(rows) :]:
            started = time.perf_counter()
            last = number == len(kinds) - 1
            if kind == "centred":
                transforms: Sequence[WorldTransform] = average.centring(self.subjects)
            else:
                assert target is not None
                transforms = self._register(target, kind, number, journal)
            self.progress(f"averaging, {kind} {number}")
            result = average.average(self.subjects, transforms, grid, choose_device(self.options.device))
            if kind == "affine":
                _warn_of_rotations(transforms)
            target = average.sharpen(result.image, self.options.sharpen)
            if kind == "centred" and self.start is not None:
                target = self._placed(grid)
            rows.append(_row(kind, result, time.perf_counter() - started))
            if self.callback is not None:
                self.callback(rows[-1], result.image)
            if journal is not None and not last:
                journal.add(rows, target)
        assert result is not None
        assert target is not None
        if result.residual_mm > LARGEST_MEAN:
            logger.warning("the mean displacement is %.2f mm; expected at most %g", result.residual_mm, LARGEST_MEAN)
        return Template(target, result.image, self.subjects, result.transforms, tuple(rows), self.record)

    def _placed(self, grid: Image) -> Image:
        """The image to start from, on the grid of the template, centred as the scans are."""
        assert self.start is not None
        ct = self.subjects[0].window is None
        matrix = np.eye(grid.dim + 1)
        matrix[:-1, -1] = average.make_subject("initial", self.start, ct).centre
        matrix[:-1, -1] -= np.mean([one.centre for one in self.subjects], axis=0)
        placed = world_transform.apply(WorldTransform.linear(matrix), self.start, grid)
        return replace(placed, data=placed.data.astype(np.float32))

    def _register(
        self, target: Image, kind: Literal["affine", "deformable"], number: int, journal: Journal | None
    ) -> list[WorldTransform]:
        """Maps from the average to every scan."""
        fixed: Any = target if journal is None else journal.path(number - 1)
        work = None if journal is None else journal.work(number)
        tasks = [
            Task(
                one.name,
                PairInputs(fixed=fixed, moving=source_of(one.image, self.sources[one.name])),
                None if work is None else work / one.name,
            )
            for one in self.subjects
        ]
        found: dict[str, WorldTransform] = {}
        options = self.options.register_options(kind)
        self.progress(f"registering, {kind} {number}, 0 of {len(tasks)}")
        for one in register_each(tasks, self.model, options, "transform", self.workers):
            assert one.transform is not None
            found[one.name] = one.transform
            self.progress(f"registering, {kind} {number}, {len(found)} of {len(tasks)}")
        return [found[one.name] for one in self.subjects]


def _row(kind: str, result: Average, seconds: float) -> Iteration:
    sharp = round(average.sharpness(result.image), 6)
    moved, residual, spread = (round(value, 6) for value in (result.moved_mm, result.residual_mm, result.spread))
    return Iteration(kind, moved, residual, spread, sharp, round(seconds, 2))


def _warn_of_rotations(transforms: Sequence[WorldTransform]) -> None:
    """The mean of rotations is smaller than a rotation."""
    rotations = []
    for one in transforms:
        left, _, right = np.linalg.svd(one.affine[:-1, :-1])
        rotations.append(left @ right)
    shrinkage = 1 - float(np.linalg.svd(np.mean(rotations, axis=0))[1].min())
    if shrinkage > SHRINKAGE:
        text = "the scans are rotated against each other, which shrinks their average by up to %.0f %%; turn them first"
        logger.warning(text, 100 * shrinkage)


# ---- resuming -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Journal:
    """What is done already, in the folder of a template."""

    folder: Path
    record: Mapping[str, Any]
    rows: tuple[Iteration, ...]
    keeps_registrations: bool = True
    """Whether those of an average that is not finished are kept in files, until it is."""

    @classmethod
    def open(cls, folder: Path, record: Mapping[str, Any], overwrite: bool) -> Journal:
        """The iterations in a folder, if they are of the same scans, model and options; otherwise an error. Those of
        another template are removed if it is overwritten."""
        path = folder / JOURNAL
        if overwrite or not path.is_file():
            if not overwrite and (held := _held(folder)) is not None:
                raise ExistsError(f"{folder} already holds {held}; choose another folder, or {OVERWRITE}")
            _forget(folder)
            return cls(folder, record, ())._write(())
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
            rows = tuple(Iteration(**row) for row in old["rows"])
            different = _differences(old["record"], record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path} is damaged ({error}); choose another folder, or {OVERWRITE}") from error
        if not rows:
            return cls(folder, record, ())._write(())
        if different:
            held = f"{folder} holds a template with {', '.join(different)}"
            raise ExistsError(f"{held}; choose another folder, or {OVERWRITE}")
        return cls(folder, record, rows)

    def path(self, number: int) -> Path:
        return self.folder / ITERATIONS / f"{number:02d}.nii.gz"

    def work(self, number: int) -> Path | None:
        return self.folder / WORK / f"{number:02d}" if self.keeps_registrations else None

    def read(self, number: int) -> Image:
        return images.read(self.path(number))

    def add(self, rows: Sequence[Iteration], target: Image) -> None:
        """Keep an average; its registrations are not needed any more."""
        number = len(rows) - 1
        self.path(0).parent.mkdir(parents=True, exist_ok=True)
        images.write(target, self.path(number), overwrite=True)
        self._write(rows)
        if (work := self.work(number)) is not None:
            shutil.rmtree(work, ignore_errors=True)
        if not any((self.folder / WORK).glob("*")):
            shutil.rmtree(self.folder / WORK, ignore_errors=True)

    def _write(self, rows: Sequence[Iteration]) -> Journal:
        content = {"record": self.record, "rows": [asdict(row) for row in rows]}
        write_atomically(self.folder / JOURNAL, (json.dumps(content, indent=2) + "\n").encode())
        return self


def _held(folder: Path) -> str | None:
    """What a folder without a journal holds in the places of a template, if anything."""
    found = [folder / name for name in NAMES[::-1] if (folder / name).exists()]
    found += [path for name in (ITERATIONS, SUBJECTS) for path in sorted((folder / name).glob("*"))]
    return str(found[0].relative_to(folder)) if found else None


def _forget(folder: Path) -> None:
    """Remove the averages that the journal of another template lists, and its unfinished registrations."""
    path = folder / JOURNAL
    with suppress(OSError, ValueError, TypeError, KeyError):
        for number in range(len(json.loads(path.read_text(encoding="utf-8"))["rows"])):
            (folder / ITERATIONS / f"{number:02d}.nii.gz").unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    shutil.rmtree(folder / WORK, ignore_errors=True)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two records, in words."""
    different = [] if old["model"].get("sha256") == new["model"].get("sha256") else ["another model"]
    before, after = ({name: one["sha256"] for name, one in record["scans"].items()} for record in (old, new))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            article = "no" if name not in before else "a" if name not in after else "another"
            different.append(f"{article} scan {name}")
    if old["initial"] != new["initial"]:
        different.append("another initial image")
    for name in sorted({*old["options"], *new["options"]}):
        mine, theirs = old["options"].get(name), new["options"].get(name)
        if mine != theirs:
            different.append(f"{name}={mine!r} instead of {theirs!r}")
    return different
